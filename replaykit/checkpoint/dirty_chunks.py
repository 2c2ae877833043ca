"""Track which rows changed, and freeze rows while a save reads them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from replaykit._compat import memory_users

Array = np.ndarray[Any, Any]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenRows:
    """The rows of some tensors as of one instant, while writers continue to write.

    Attributes:
        at: the sequence number of the save. Chunks that were last written before the instant have
            this number or a smaller number.
        rows: the number of rows at that instant.
        names: the names of the tensors.
        row_bytes: bytes of a row, by tensor.

    Cost: rows are copied only when they are read or overwritten.
    """

    at_once = False
    """True if ``want`` copies rows under the lock of ``freeze``; see ``CopiedRows``."""

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
            changes = self.changes
            changes.frozen = [other for other in changes.frozen if other is not self]
            self._kept = {name: {} for name in self.names}

    def saved(self, manifest: Mapping[str, Any]) -> RowsAtSave | None:
        """Return the rows that the save of a manifest wrote, or None.

        The result is None if the save is not one of the last saves of these rows.
        """
        return self.changes.saves.get(manifest["save"])

    def remember(self, save: str, rows: RowsAtSave) -> None:
        """Remember the rows that a published save wrote."""
        saves = self.changes.saves
        saves[save] = rows
        for old in list(saves)[:-_REMEMBERED]:
            del saves[old]

    def copy_chunks(self, chunks: Array, keys: Iterable[Any] | None) -> None:
        """Copy chunks that were not read yet, before a write changes them.

        The caller holds the lock.
        """
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

    def want(self, wanted: Mapping[str, Array]) -> None:
        """Choose the chunks of each tensor that will be read, bool ``[chunks]``.

        Each chosen chunk is read once.
        """
        with self.lock:
            for name, chunks in wanted.items():
                self._left[name] &= chunks
                kept = self._kept[name]
                for number in [number for number in kept if not chunks[number]]:
                    del kept[number]

    def wanted(self, name: str) -> Array:
        """Return a mask ``[chunks]`` of the chunks of a tensor that are still to be read."""
        return self._left[name].copy()

    def read(self, name: str, first: int, stop: int, out: torch.Tensor) -> None:
        """Copy the rows ``first..stop``, as of the instant, into ``out`` on the CPU.

        Args:
            first, stop: the span of rows. It covers whole chunks, or a part of one chunk. The parts
                of a chunk must be read in order.
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
            if tracked.padding:  # the content of the padding is undefined
                blank(out, tracked.padding)

    def blocks(self, name: str, first: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of ``first..stop`` to ``read``, of at most ``nbytes`` each.

        A span has at least one row.
        """
        chunk, step = self.changes.chunk, max(1, nbytes // max(self.row_bytes[name], 1))
        while first < stop:
            until = (first + step) // chunk * chunk
            if until <= first:  # the span is a part of one chunk
                until = first + step
            yield first, min(until, stop)
            first = until


def blank(rows: torch.Tensor, padding: int) -> None:
    """Set the last ``padding`` bytes of rows, uint8 ``[*batch, n]``, to zero.

    The function masks whole words, because an operation on a few bytes of every row takes five
    times as long.
    """
    width = rows.shape[-1]
    size = next(size for size in (8, 4, 2, 1) if width % size == 0)
    count = -(-padding // size)
    masks = bytes([255]) * (count * size - padding) + bytes(padding)
    words = rows.reshape(-1, width).numpy().view(f"u{size}")
    for number, mask in enumerate(np.frombuffer(masks, f"u{size}"), width // size - count):
        words[:, number] &= mask


def copy_rows(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows bit for bit.

    On the CPU this avoids the threads of torch, which wait for each other.
    """
    words = _WORDS.get(source.dtype.itemsize)
    if words is None or not source.is_cpu or source.is_conj() or source.is_neg():
        out.copy_(source)
    else:
        np.copyto(out.view(words).numpy(), source.detach().view(words).numpy())


def runs(chosen: Array) -> list[tuple[int, int]]:
    """Return the runs of True in bool ``[n]`` as ``(first, stop)``.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint.dirty_chunks import runs
        >>> runs(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


_MOST_CHUNKS = 4096
_LEAST_BYTES = 4096
RECORDS = "records"
"""Key of the tensor of records, whose rows hold the leaves of several keys."""
_REMEMBERED = 4
"""Number of remembered saves; a buffer may be saved into several directories."""


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor to save, with a record of its changed rows.

    Attributes:
        tensor: ``[n, ...]``, the memory that writers change. The save reads it under the lock.
        changes: the record of writes. Several tensors with the same rows may share a record.
        key: the key of the tensor in ``changes``.
        check: function that is called before each read of the tensor. It raises an error if the
            memory was released.
        padding: number of elements at the end of each row that are never written. A save writes
            zeros for them.
    """

    tensor: torch.Tensor
    changes: Changes
    key: Hashable
    check: Callable[[], None] | None = None
    padding: int = 0


@dataclass(frozen=True)
class RowsAtSave:
    """The rows that a save wrote, of all tensors that share a Changes object.

    Attributes:
        at: the sequence number of the save. It includes all changes with this number or a smaller
            number.
        records: by key, the record of the manifest with dtype, shape and pieces.
    """

    at: int
    records: Mapping[Hashable, Mapping[str, Any]]


class Changes:
    """A record of the last write to each chunk of rows.

    Saves have rising sequence numbers. Every chunk is marked with the number of the first save
    after its last write. The object is not thread-safe, so callers hold the lock that guards the
    rows.

    Attributes:
        exposed: whether a caller in this process may write without a mark.
        frozen: the saves in progress.
        saves: the rows of the last saves that this process has published, by the name of the save.
        last_write: the CUDA stream of the last write to a device, and the event at its end.
        reads: the gathers that run without the lock, for which each write waits; None if there are
            none.

    Args:
        rows: the largest number of rows. Chunks begin at multiples of ``chunk``.
        row_bytes: bytes of a row, of all tensors together.
        tensors: the memory of the rows, to find out whether callers have views of it. It is empty
            if no caller can get a view.
        packed: keys of leaves that are saved as a part of the tensor ``RECORDS``.

    Cost: under a microsecond per write, and the time to mark chunks. There are at most 4096 chunks,
    and the mark of each takes 8 bytes. While a save is in progress, the first write to a chunk
    copies it.

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
        self.chunk = 1 << (chunk - 1).bit_length()  # so that large chunks are whole pages
        self._clock: Any = [1]
        self._written = np.zeros(-(-rows // self.chunk), np.int64)
        self._keyed: dict[Hashable, Array] = {}
        self.tensors, self.packed = tuple(tensors), frozenset(packed)
        self._last = self._last_now = -1
        self._users: int | None = None  # references to the memory before a caller got a view
        self.exposed = False
        self.frozen: list[FrozenRows] = []
        self.saves: dict[str, RowsAtSave] = {}
        self.reads: Any = None
        self.last_write: tuple[Any, Any] | None = None

    @property
    def now(self) -> int:
        """The sequence number of the next save. A write marks its chunks with it."""
        return int(self._clock[0])

    def versions(self, key: Hashable) -> Array:
        """Return a copy of the marks of all chunks, int64 ``[chunks]``."""
        keyed = self._keyed.get(key)
        return self._written.copy() if keyed is None else np.maximum(self._written, keyed)

    # -- writes -------------------------------------------------------------------------------

    def wrote(self, first: int, count: int, keys: Iterable[Hashable] | None = None) -> None:
        """Mark ``count`` rows of the ring from ``first`` on, before they are written.

        Args:
            keys: the keys of the tensors that will be written; None for all tensors.
        """
        if count <= 0:
            return
        if self.reads is not None:
            self.reads.wait()
        chunk, stop = first // self.chunk, first + count
        # The last chunk may be partial. After its end, the ring continues at the first row.
        if keys is None and stop <= self.rows and chunk == (stop - 1) // self.chunk:
            # Most writes are of a few rows, into the chunk that was marked last.
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
        """Mark rows ``[K]``, in any order, before they are written.

        If ``rows`` is on another device, this marks all rows, to avoid a wait for the device.
        """
        if not rows.is_cpu:
            self.wrote(0, self.rows, keys)
        elif len(rows) == 1:
            self.wrote(int(rows[0]), 1, keys)
        elif len(rows):
            chunks = rows.numpy() // self.chunk
            # Rows mostly rise, or are few. To mark a chunk twice costs nothing.
            self._touch(np.unique(chunks) if self.frozen else chunks, keys)

    def _touch(self, chunks: Any, keys: Iterable[Hashable] | None) -> None:
        if self.reads is not None:
            self.reads.wait()
        if keys is not None and self.packed:
            keys = {RECORDS if key in self.packed else key for key in keys}
        if self.frozen:
            numbers = np.arange(len(self._written))[chunks]
            for frozen in self.frozen:
                frozen.copy_chunks(numbers, keys)
        if keys is None:
            self._written[chunks] = self._clock[0]
            return
        for key in keys:
            self._versions_of(key)[chunks] = self._clock[0]

    def _versions_of(self, key: Hashable) -> Array:
        keyed = self._keyed.get(key)
        if keyed is None:
            keyed = self._keyed[key] = np.zeros_like(self._written)
        return keyed

    # -- views ----------------------------------------------------------------------------------

    def expose(self) -> None:
        """Record that a caller will get a view, and may then write without a mark."""
        if self.reads is not None:
            self.reads.wait()
        if not self.exposed:
            # A save in progress will release its own views later, so a count now would be wrong.
            self._users = None if self.frozen else self._count()
            self.exposed = True

    def track(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add tensors to the memory of the rows.

        No caller may have a view of them yet.
        """
        self.tensors += tuple(tensors)
        if self._users is not None:
            counts = [memory_users(tensor) for tensor in tensors]
            self._users = None if None in counts else self._users + sum(n or 0 for n in counts)

    def lend(self) -> None:
        """Record that other code may at any time write to the memory without a mark."""
        self._users, self.exposed = None, True

    def _count(self) -> int | None:
        counts = [memory_users(tensor) for tensor in self.tensors]
        return None if None in counts else sum(count or 0 for count in counts)

    def _check_views(self, own: int) -> None:
        """Mark all rows if callers may have had views since the last check.

        Args:
            own: the number of views that the save itself has.
        """
        if not self.exposed:
            return
        self._written[:] = self.now
        if self._users is not None and not self.frozen:
            self.exposed = (self._count() or 0) - own > self._users

    # -- saving ---------------------------------------------------------------------------------

    def freeze(
        self, tensors: Mapping[str, TrackedTensor], lock: AbstractContextManager[Any]
    ) -> FrozenRows:
        """Begin a save of tensors with equal numbers of rows.

        The caller holds the lock. The result is a context manager, whose exit ends the save.
        """
        self._check_views(len(tensors))
        frozen = FrozenRows(self, tensors, lock)
        self._clock[0] += 1
        self.frozen.append(frozen)
        return frozen


_BLOCK_BYTES = 64 * 2**20
"""Bytes of a copied piece, which is released when all of it has been read."""


class CopiedRows(FrozenRows):
    """Frozen rows that other processes may overwrite without a copy.

    ``want`` therefore copies the wanted chunks, before the lock of ``freeze`` is released. It keeps
    no view of the tensors.

    Args:
        stable: whether all frozen values are final. If not, later saves do not build on this save.

    Cost: memory for the wanted rows until they are read.
    """

    changes: SharedChanges
    at_once = True

    def __init__(
        self,
        changes: SharedChanges,
        tensors: Mapping[str, TrackedTensor],
        lock: AbstractContextManager[Any],
        stable: bool,
    ) -> None:
        super().__init__(changes, tensors, lock)
        self._stable = stable
        self._copies: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
        # A save of other tensors, or under other names, is not a save of these rows.
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
        if self._stable:
            with self.lock:
                self.changes.mark_saved(save, rows.at, self._names)

    def copy_chunks(self, chunks: Array, keys: Iterable[Any] | None) -> None:
        raise AssertionError("these chunks are copied before the next write")

    def want(self, wanted: Mapping[str, Array]) -> None:
        """Copy the chunks that will be read, under the lock of ``freeze``."""
        size = self.changes.chunk
        for name, chunks in wanted.items():
            tracked = self.tensors[name]
            copies: dict[int, tuple[int, torch.Tensor]] = {}
            self._left[name] &= chunks
            if tracked.check is not None:
                tracked.check()
            step = max(1, _BLOCK_BYTES // max(1, size * self.row_bytes[name]))
            for begin, end in runs(self._left[name]):
                for at in range(begin, end, step):
                    some = range(at, min(at + step, end))
                    first, stop = at * size, min(some.stop * size, self.rows)
                    source = tracked.tensor[first:stop]
                    rows = torch.empty(source.shape, dtype=source.dtype, device="cpu")
                    copy_rows(rows, source)
                    if tracked.padding:
                        blank(rows, tracked.padding)
                    copies.update(dict.fromkeys(some, (first, rows)))
            self._copies[name] = copies
        # A view that this object kept would count as a view that a caller may write to.
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


_NOW, _NEXT, _SAVES = 0, 1, 2
_SAVES_SHARED, _ENTRY = 16, 3
_HEADER = 64
"""Count of the numbers that precede those of the chunks.

They are the number of the next save and the count of recorded saves. Each recorded save adds its
name, its number and its tensors.
"""


class ViewsOfRows(Protocol):
    """A record of the processes that have views, and may write without a mark."""

    def hold(self) -> None:
        """Record that callers in this process get views."""

    def drop(self) -> None:
        """Record that this process has no views left, and has marked their rows."""

    def of_others(self) -> bool:
        """Return whether another process has views, or had views when it died.

        Each dead process is reported once.
        """


class SharedChanges(Changes):
    """A ``Changes`` that is shared by all processes that write or save the rows.

    A writer marks the chunks with the number of the next save before it changes a row. A killed
    writer may thus have marked too many chunks, but never too few. Saves by one process are known
    to the other processes, because the table holds the random names of saves. Manifests also hold
    these names. The name in a checkpoint of another buffer or run is not in the table.

    Args:
        cells: int64 ``[SharedChanges.length]`` in shared memory, zeros at first.
        like: the changes of this process. All processes have the same number of rows, of the same
            size.
        keys: keys of tensors with separate marks. A write to any other tensor marks all tensors.
        views: the record of processes with views; None if no caller can get a view.
        pending_changes: function that returns whether a change may still be rolled back. A rollback
            marks no chunks, so a save at such an instant is not remembered.

    The caller of every method holds the lock that these processes share.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint.dirty_chunks import Changes, SharedChanges
        >>> like = Changes(10_000, 8)
        >>> cells = np.zeros(SharedChanges.length(like), np.int64)
        >>> one, other = (SharedChanges(cells, like) for _ in range(2))
        >>> one.wrote(1000, 100)
        >>> (other.versions("any key") >= other.now).nonzero()[0].tolist()
        [1, 2]
    """

    def __init__(
        self,
        cells: Array,
        like: Changes,
        keys: Sequence[Hashable] = (),
        views: ViewsOfRows | None = None,
        pending_changes: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(like.rows, like.row_bytes, like.tensors, like.packed)
        chunks = len(self._written)
        self._head: Any = cells[:_HEADER].data
        self._clock = self._head
        if not self._head[_NOW]:
            self._head[_NOW] = 1
        marks = cells[_HEADER : _HEADER + (1 + len(keys)) * chunks].reshape(-1, chunks)
        self._written = marks[0]
        self._keyed = dict(zip(keys, marks[1:], strict=True))
        self._views, self._looked = views, 0
        self._pending_changes = pending_changes

    @staticmethod
    def length(like: Changes, keys: Sequence[Hashable] = ()) -> int:
        """Return the number of cells that the table takes."""
        return _HEADER + (1 + len(keys)) * len(like._written)

    def _versions_of(self, key: Hashable) -> Array:
        return self._keyed.get(key, self._written)

    def marking(self) -> tuple[Array, int, Any]:
        """Return the marks of all chunks, the bits of a number in a chunk, and memory of ``now``.

        With these the core marks rows of which there are no views.
        """
        return self._written, self.chunk.bit_length() - 1, self._clock

    # -- views ----------------------------------------------------------------------------------

    def expose(self) -> None:
        if not self.exposed:
            users = self._count()
            if self._views is not None:
                self._views.hold()
            self._users, self.exposed = users, True

    def lend(self) -> None:
        self.expose()
        self._users = None

    def check_views(self) -> None:
        """Check whether the views of this process are gone, once after each save.

        Any process may have made the save. The caller holds the lock.
        """
        if self._looked != self.now:
            self._looked = self.now
            self._check_views(0, others=False)

    def _check_views(self, own: int, *, others: bool = True) -> None:
        mine = self.exposed
        if mine or (others and self._views is not None and self._views.of_others()):
            self._touch(slice(None), None)
        if mine and self._users is not None and (self._count() or 0) - own <= self._users:
            self.exposed = False
            if self._views is not None:
                self._views.drop()

    # -- saving ---------------------------------------------------------------------------------

    def freeze(
        self, tensors: Mapping[str, TrackedTensor], lock: AbstractContextManager[Any]
    ) -> CopiedRows:
        """Begin a save.

        The caller must call ``want`` of the result before it releases the lock.
        """
        self._check_views(len(tensors))
        stable = self._pending_changes is None or not self._pending_changes()
        frozen = CopiedRows(self, tensors, lock, stable)
        self._head[_NOW] += 1
        return frozen

    def saved_at(self, save: str, tensors: int) -> int | None:
        """Return the number of a save of these tensors, or None if it is unknown.

        The caller holds the lock.
        """
        name = _number(save)
        for at in range(_SAVES, _SAVES + _SAVES_SHARED * _ENTRY, _ENTRY):
            if name and self._head[at] == name and self._head[at + 2] == tensors:
                return int(self._head[at + 1])
        return None

    def mark_saved(self, save: str, at: int, tensors: int) -> None:
        """Record a published save. The caller holds the lock."""
        head, entry = self._head, _SAVES + self._head[_NEXT] % _SAVES_SHARED * _ENTRY
        head[entry] = 0  # if the process is killed after this, the save is not recorded
        head[entry + 1], head[entry + 2] = at, tensors
        head[entry] = _number(save)
        head[_NEXT] += 1


def _number(save: str) -> int:
    """Return the random name of a save as a number; 0 for any other name."""
    return int(save, 16) if re.fullmatch("[0-9a-f]{12}", save) else 0
