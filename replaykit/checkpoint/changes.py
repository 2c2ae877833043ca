"""Which rows of tensors changed and when, and what they held while a save was going on.

A save that follows another one writes what has changed since, without reading the rest. So whoever
writes rows says so first, chunk by chunk: before the write, with the lock held under which the rows
are written. A save in progress then keeps what the chunk held, where it still has to read that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit._compat import memory_users
from replaykit.checkpoint.frozen import FrozenRows

__all__ = ["RECORDS", "Changes", "SavedRows", "TrackedTensor"]

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
class SavedRows:
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
        >>> from replaykit.checkpoint.changes import Changes
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
        self._saves: dict[str, SavedRows] = {}
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

    def saved(self, save: str) -> SavedRows | None:
        """Returns what the save of that name wrote, if it was one of the last of these rows."""
        return self._saves.get(save)

    def remember(self, save: str, rows: SavedRows) -> None:
        """Keeps in mind what a save wrote, once it is published."""
        self._saves[save] = rows
        for old in list(self._saves)[:-_REMEMBERED]:
            del self._saves[old]
