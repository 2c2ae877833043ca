"""Track which rows changed, and freeze rows while a save reads them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import memory_users

if TYPE_CHECKING:
    from replaykit.checkpoint.shared_dirty_chunks import KeptChanges

__all__ = [
    "RECORDS",
    "Changes",
    "CopiedRows",
    "FrozenRows",
    "RowsAtSave",
    "TrackedTensor",
    "blank",
    "copy_rows",
]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenRows:
    """The rows of some tensors at one instant, while they go on being written.

    Attributes:
        at: the number of the save: what was written up to the instant has it, or a smaller one.
        rows: how many rows there were.
        names: the tensors.
        row_bytes: bytes of a row of each.

    Cost: nothing is copied before it is read or overwritten.
    """

    at_once = False
    """Whether all that is wanted is copied while the lock is still held; see ``CopiedRows``."""

    def __init__(
        self,
        changes: Changes,
        tensors: Mapping[str, TrackedTensor],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.changes, self.tensors, self.lock = changes, dict(tensors), lock
        self.at = changes.now
        self.names = list(tensors)
        self.rows = len(next(iter(tensors.values())).tensor)
        self.chunks = -(-self.rows // changes.chunk)
        self.versions = {
            name: changes.versions(tracked.key)[: self.chunks] for name, tracked in tensors.items()
        }
        self.row_bytes = {
            name: tracked.tensor[:1].nbytes if self.rows else 0 for name, tracked in tensors.items()
        }
        self._left = {name: np.ones(self.chunks, bool) for name in self.names}
        self._kept: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.names}

    def __enter__(self) -> FrozenRows:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.changes.thaw(self)
            self._kept = {name: {} for name in self.names}

    def saved(self, manifest: Mapping[str, Any]) -> RowsAtSave | None:
        """Returns what the save wrote that left a manifest, if it was one of the last of these
        rows."""
        return self.changes.saved(manifest["save"])

    def remember(self, save: str, rows: RowsAtSave) -> None:
        """Keeps in mind what a save of this has written, once it is published."""
        self.changes.remember(save, rows)

    def keep(self, chunks: np.ndarray[Any, Any], keys: Iterable[Any] | None) -> None:
        """Copies chunks that will be overwritten and have not been read. The lock is held."""
        known = None if keys is None else set(keys)
        chunks = chunks[chunks < self.chunks]
        for name, tracked in self.tensors.items():
            if known is not None and tracked.key not in known:
                continue
            left, kept = self._left[name], self._kept[name]
            for number in chunks[left[chunks]].tolist():
                if number not in kept:
                    kept[number] = tracked.tensor[self._span(number)].clone()

    def _span(self, chunk: int) -> slice:
        return slice(chunk * self.changes.chunk, min((chunk + 1) * self.changes.chunk, self.rows))

    def want(self, wanted: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Says which chunks of each tensor will be read, bool ``[chunks]``; each once."""
        with self.lock:
            for name, chunks in wanted.items():
                self._left[name] &= chunks
                kept = self._kept[name]
                for number in [number for number in kept if not chunks[number]]:
                    del kept[number]

    def wanted(self, name: str) -> np.ndarray[Any, Any]:
        """Returns which chunks of a tensor are still to be read, bool ``[chunks]``."""
        return self._left[name].copy()

    def read(self, name: str, first: int, stop: int, out: torch.Tensor) -> None:
        """Copies the rows ``first..stop`` as they were at the instant, into ``out`` on the CPU.

        Args:
            first, stop: both at the border of a chunk, or a part of one chunk; a chunk that is
                read in parts is read in order.
        """
        size = self.changes.chunk
        with self.lock:
            left, kept, tracked = self._left[name], self._kept[name], self.tensors[name]
            if tracked.check is not None:
                tracked.check()
            copy_rows(out, tracked.tensor[first:stop])
            for number in range(first // size, (stop - 1) // size + 1):
                start = number * size
                if number in kept:
                    low, high = max(first, start), min(stop, start + size)
                    out[low - first : high - first] = kept[number][low - start : high - start]
                if stop >= min(start + size, self.rows):
                    left[number] = False
                    kept.pop(number, None)
            if tracked.padding:  # whatever the memory held before
                blank(out, tracked.padding)

    def blocks(self, name: str, first: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields spans of rows to ``read``, of some bytes each, that make up chunks in a row."""
        step = max(1, nbytes // max(self.row_bytes[name], 1))
        if step >= self.changes.chunk:
            step -= step % self.changes.chunk
        else:  # parts of one chunk each
            starts = range(first - first % self.changes.chunk, stop, self.changes.chunk)
            cuts = [
                at
                for start in starts
                for at in range(start, min(start + self.changes.chunk, stop), step)
            ]
            yield from itertools.pairwise([*(at for at in cuts if at >= first), stop])
            return
        for start in range(first, stop, step):
            yield start, min(start + step, stop)


def blank(rows: torch.Tensor, padding: int) -> None:
    """Sets the last ``padding`` bytes of rows uint8 ``[*batch, n]`` to zero.

    Word by word: an operation on a few bytes of every row takes five times as long.
    """
    width = rows.shape[-1]
    size = next(size for size in (8, 4, 2, 1) if width % size == 0)
    count = -(-padding // size)
    kept = bytes([255]) * (count * size - padding) + bytes(padding)
    words = rows.reshape(-1, width).numpy().view(f"u{size}")
    for place, mask in enumerate(np.frombuffer(kept, f"u{size}"), width // size - count):
        words[:, place] &= mask


def copy_rows(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copies rows bit for bit: on the CPU without torch's threads, which wait for each other."""
    words = _WORDS.get(source.dtype.itemsize)
    if words is None or not source.is_cpu or source.is_conj() or source.is_neg():
        out.copy_(source)
    else:
        np.copyto(out.view(words).numpy(), source.detach().view(words).numpy())


_MOST_CHUNKS = 4096
_LEAST_BYTES = 4096
_MOST_LATE = 65536
RECORDS = "records"
"""Key of the tensor in which several others lie side by side, row by row."""
_REMEMBERED = 4
"""Saves that are remembered: of a buffer saved into several directories in turn."""


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor to save, of whose rows it is known which have changed.

    Attributes:
        tensor: ``[n, ...]``, live memory; read while the save holds the lock.
        changes: who is told of writes; several tensors, row by row together, may have one.
        key: which of these it is.
        check: called before it is read; raises where its memory is gone.
        padding: the last elements of a row that nobody ever wrote; they are saved as zeros.
    """

    tensor: torch.Tensor
    changes: Changes
    key: Hashable
    check: Callable[[], None] | None = None
    padding: int = 0


@dataclass(frozen=True)
class RowsAtSave:
    """What a save wrote of the tensors of a Changes.

    Attributes:
        at: changes up to there are in it.
        records: by key the record of the manifest: dtype, shape, pieces.
    """

    at: int
    records: Mapping[Hashable, Mapping[str, Any]]


class Changes:
    """When each chunk of rows was written last.

    Every chunk has the number of the save before which it was last written. Not thread-safe: calls
    come under the lock that guards the rows.

    Attributes:
        reads: gathers that go on without the lock: each write waits for them. None: there are none.

    Args:
        rows: how many rows there can be; chunks begin at multiples of ``chunk``.
        row_bytes: bytes of a row, of all tensors together.
        tensors: what the rows lie in, to learn whether anybody else holds a view of that; none
            where nobody can get one.
        packed: keys of tensors that are not saved themselves, but as a part of ``RECORDS``.

    Cost: of a write, under a microsecond and the chunks touched; 8 bytes a chunk, of which there
    are at most 4096. While a save is in progress, a copy of each chunk before its first write.

    Example:
        >>> from replaykit.checkpoint.dirty_chunks import Changes
        >>> changes = Changes(10_000, 8)
        >>> changes.chunk
        512
        >>> start = changes.now
        >>> changes.wrote(1000, 100)
        >>> (changes.versions("any key") >= start).nonzero()[0].tolist()
        [1, 2]
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        tensors: Sequence[torch.Tensor] = (),
        packed: Iterable[Hashable] = (),
    ) -> None:
        least = -(-_LEAST_BYTES // max(row_bytes, 1))
        self.rows, self.row_bytes = rows, row_bytes
        chunk = max(1, -(-rows // _MOST_CHUNKS), least)
        self.chunk = 1 << (chunk - 1).bit_length()  # so that large ones are whole pages
        self._clock: Any = [1]
        self._written = np.zeros(-(-rows // self.chunk), np.int64)
        self._keyed: dict[Hashable, np.ndarray[Any, Any]] = {}
        self.tensors, self.packed = tuple(tensors), frozenset(packed)
        self._last = self._last_now = -1
        self._later: list[torch.Tensor] = []
        self._late = 0
        self._users: int | None = None  # how many held the memory before a view was given away
        self._exposed = False
        self._frozen: list[FrozenRows] = []
        self._saves: dict[str, RowsAtSave] = {}
        self.reads: Any = None

    @property
    def now(self) -> int:
        """The number of the next save: what is written now has it."""
        return int(self._clock[0])

    def versions(self, key: Hashable) -> np.ndarray[Any, Any]:
        """Returns the number of the last write of each chunk, int64 ``[chunks]``: a copy."""
        keyed = self._keyed.get(key)
        return self._written.copy() if keyed is None else np.maximum(self._written, keyed)

    # -- told of writes -----------------------------------------------------------------------

    def wrote(self, first: int, count: int, keys: Iterable[Hashable] | None = None) -> None:
        """Told that rows will be written: ``count`` from ``first`` on, round the ring.

        Args:
            keys: of which tensors; None: of all of them.
        """
        if count <= 0:
            return
        if self.reads is not None:
            self.reads.wait()
        chunk, stop = first // self.chunk, first + count
        # The last chunk may be a part of one: rows beyond it are those at the beginning.
        if keys is None and stop <= self.rows and chunk == (stop - 1) // self.chunk:
            # Rows come a few at a time: most often into the chunk that was told of last.
            now = self._clock[0]
            if self._last != chunk or self._last_now != now:
                self._touch(slice(chunk, chunk + 1), None)
                self._last, self._last_now = chunk, now
            return
        if count >= self.rows:
            self._touch(slice(None), keys)
            return
        self._touch(slice(chunk, (min(stop, self.rows) - 1) // self.chunk + 1), keys)
        if stop > self.rows:
            self._touch(slice(0, (stop - self.rows - 1) // self.chunk + 1), keys)

    def wrote_at(self, rows: torch.Tensor, keys: Iterable[Hashable] | None = None) -> None:
        """Told that rows ``[K]`` will be written, in any order; those of a device are not asked."""
        if not rows.is_cpu:
            self.wrote(0, self.rows, keys)
        elif len(rows) == 1:
            self.wrote(int(rows[0]), 1, keys)
        elif len(rows):
            chunks = rows.numpy() // self.chunk
            # Most often they rise, or there are few of them: what is there twice costs nothing.
            self._touch(np.unique(chunks) if self._frozen else chunks, keys)

    def wrote_later(self, rows: torch.Tensor) -> None:
        """Told of rows ``[K]`` that were written a moment ago, or will be; noted when asked for.

        While a save is in progress, before they are written.
        """
        if self._frozen or not rows.is_cpu:
            self.wrote_at(rows)
            return
        self._later.append(rows.clone())  # they may be the caller's
        self._late += rows.numel()
        if self._late > _MOST_LATE or len(self._later) > _MOST_LATE // 64:
            self._note_late()

    def _note_late(self) -> None:
        if self._later:
            rows = torch.cat([rows.reshape(-1) for rows in self._later])
            self._later, self._late = [], 0
            self.wrote_at(rows)

    @property
    def saving(self) -> bool:
        """Whether a save is in progress, so that writes have to be told of before they are made."""
        return bool(self._frozen)

    def wrote_index(self, at: Any, stop: int, keys: Iterable[Hashable] | None = None) -> None:
        """Told that the rows will be written that ``at`` selects of the first ``stop``.

        An int, a slice, an int64 tensor or a mask; of anything else, all of them.
        """
        if isinstance(at, int):
            self.wrote(at % max(stop, 1), 1, keys)
        elif isinstance(at, slice):
            span = range(*at.indices(stop))
            if span:
                low, high = min(span[0], span[-1]), max(span[0], span[-1])
                self.wrote(low, high - low + 1, keys)
        elif isinstance(at, torch.Tensor) and at.dtype == torch.int64:
            self.wrote_at(at.reshape(-1) % max(stop, 1), keys)
        elif isinstance(at, torch.Tensor) and at.dtype == torch.bool and at.ndim == 1:
            self.wrote_at(at.nonzero().flatten(), keys)
        else:
            self.wrote(0, stop, keys)

    def _touch(self, chunks: Any, keys: Iterable[Hashable] | None) -> None:
        if self.reads is not None:
            self.reads.wait()
        if keys is not None and self.packed:
            keys = {RECORDS if key in self.packed else key for key in keys}
        if self._frozen:
            numbers = np.arange(len(self._written))[chunks]
            for frozen in self._frozen:
                frozen.keep(numbers, keys)
        if keys is None:
            self._written[chunks] = self._clock[0]
            return
        for key in keys:
            self._versions_of(key)[chunks] = self._clock[0]

    def _versions_of(self, key: Hashable) -> np.ndarray[Any, Any]:
        keyed = self._keyed.get(key)
        if keyed is None:
            keyed = self._keyed[key] = np.zeros_like(self._written)
        return keyed

    # -- views ----------------------------------------------------------------------------------

    def expose(self) -> None:
        """Told, before it happens, that somebody gets a view and may write without saying so."""
        if self.reads is not None:
            self.reads.wait()
        if not self._exposed:
            # A save in progress holds views that it lets go of: nothing can be told by counting.
            self._users = None if self._frozen else self._count()
            self._exposed = True

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count more tensors among those that the rows lie in; nobody else has a view of them."""
        self.tensors += tuple(tensors)
        if self._users is not None:
            counts = [memory_users(tensor) for tensor in tensors]
            self._users = None if None in counts else self._users + sum(n or 0 for n in counts)

    def lend(self) -> None:
        """Told that somebody who may write without saying so has the memory for good."""
        self._users, self._exposed = None, True

    def _count(self) -> int | None:
        counts = [memory_users(tensor) for tensor in self.tensors]
        return None if None in counts else sum(count or 0 for count in counts)

    def _settle_views(self, own: int) -> None:
        """Takes all rows for changed while views may be about, and once after that.

        ``own``: how many views the save that begins has itself.
        """
        if not self._exposed:
            return
        self._written[:] = self.now
        if self._users is not None and not self._frozen:
            self._exposed = (self._count() or 0) - own > self._users

    # -- saving ---------------------------------------------------------------------------------

    def freeze(
        self, tensors: Mapping[str, TrackedTensor], lock: AbstractContextManager[Any]
    ) -> FrozenRows:
        """Begins a save of tensors with equal numbers of rows; to be closed. The lock is held."""
        self._settle_views(len(tensors))
        self._note_late()
        frozen = FrozenRows(self, tensors, lock)
        self._clock[0] += 1
        self._frozen.append(frozen)
        return frozen

    def thaw(self, frozen: FrozenRows) -> None:
        """Ends a save. The lock is held."""
        self._frozen = [other for other in self._frozen if other is not frozen]

    def saved(self, save: str) -> RowsAtSave | None:
        """Returns what the save of that name wrote, if it was one of the last of these rows."""
        return self._saves.get(save)

    def remember(self, save: str, rows: RowsAtSave) -> None:
        """Keeps in mind what a save wrote, once it is published."""
        self._saves[save] = rows
        for old in list(self._saves)[:-_REMEMBERED]:
            del self._saves[old]


_BLOCK_BYTES = 64 * 2**20
"""How much is copied in one piece, which is let go when all of it has been read."""


class CopiedRows(FrozenRows):
    """``FrozenRows`` of which nobody says when they are overwritten: ``want`` copies what it names,
    under the lock that was held when they were frozen, and no view of them is kept.

    Args:
        settled: whether what they hold stays; else no later save may go on from this one.

    Cost: the memory of what is wanted and not yet read.
    """

    changes: KeptChanges
    at_once = True

    def __init__(
        self,
        changes: KeptChanges,
        tensors: Mapping[str, TrackedTensor],
        lock: AbstractContextManager[Any],
        settled: bool,
    ) -> None:
        super().__init__(changes, tensors, lock)
        self._settled = settled
        self._copies: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
        # Under another name, or of other tensors, what a save wrote is not that of these.
        keys = sorted((name, repr(tracked.key)) for name, tracked in tensors.items())
        self._names = zlib.crc32(repr(keys).encode())

    def __exit__(self, *_: object) -> None:
        self._copies = {}

    def saved(self, manifest: Mapping[str, Any]) -> RowsAtSave | None:
        at = self.changes.saved_at(manifest["save"], self._names)
        if at is None:
            return None
        records = manifest["tensors"]
        known = {tracked.key: records[name] for name, tracked in self.tensors.items()}
        return RowsAtSave(at, known)

    def remember(self, save: str, rows: RowsAtSave) -> None:
        if self._settled:
            with self.lock:
                self.changes.note_saved(save, rows.at, self._names)

    def keep(self, chunks: np.ndarray[Any, Any], keys: Iterable[Any] | None) -> None:
        raise AssertionError("they are copied before anybody writes")

    def want(self, wanted: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copies the chunks that will be read. The lock has been held since they were frozen."""
        size = self.changes.chunk
        for name, chunks in wanted.items():
            tracked = self.tensors[name]
            copies: dict[int, tuple[int, torch.Tensor]] = {}
            self._left[name] &= chunks
            if tracked.check is not None:
                tracked.check()
            step = max(1, _BLOCK_BYTES // max(1, size * self.row_bytes[name]))
            numbers = self._left[name].nonzero()[0]
            breaks = (np.diff(numbers) > 1).nonzero()[0] + 1
            for run in np.split(numbers, breaks):
                for at in range(0, len(run), step):
                    some = run[at : at + step]
                    first, stop = int(some[0]) * size, min((int(some[-1]) + 1) * size, self.rows)
                    source = tracked.tensor[first:stop]
                    rows = torch.empty(source.shape, dtype=source.dtype, device="cpu")
                    copy_rows(rows, source)
                    if tracked.padding:
                        blank(rows, tracked.padding)
                    copies.update(dict.fromkeys(some.tolist(), (first, rows)))
            self._copies[name] = copies
        # A view that is held here would be counted as one that somebody may write to.
        self.tensors = {
            name: replace(tracked, tensor=tracked.tensor.to("meta"))
            for name, tracked in self.tensors.items()
        }

    def read(self, name: str, first: int, stop: int, out: torch.Tensor) -> None:
        size, copies, at = self.changes.chunk, self._copies[name], first
        while at < stop:
            number = at // size
            start, rows = copies[number]
            border = min(stop, start + len(rows))
            copy_rows(out[at - first : border - first], rows[at - start : border - start])
            for chunk in range(number, -(-border // size)):
                if border >= min((chunk + 1) * size, self.rows):
                    self._left[name][chunk] = False
                    del copies[chunk]
            at = border
