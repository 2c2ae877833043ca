"""Track changes of rows by several processes, in memory that outlives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from replaykit.checkpoint.dirty_chunks import Changes, CopiedRows, TrackedTensor

Array = np.ndarray[Any, Any]

_NOW, _NEXT, _SAVES = 0, 1, 2
_REMEMBERED, _ENTRY = 16, 3
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
        >>> from replaykit.checkpoint.shared_dirty_chunks import SharedChanges
        >>> from replaykit.checkpoint.dirty_chunks import Changes
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
        for at in range(_SAVES, _SAVES + _REMEMBERED * _ENTRY, _ENTRY):
            if name and self._head[at] == name and self._head[at + 2] == tensors:
                return int(self._head[at + 1])
        return None

    def mark_saved(self, save: str, at: int, tensors: int) -> None:
        """Record a published save. The caller holds the lock."""
        head, entry = self._head, _SAVES + self._head[_NEXT] % _REMEMBERED * _ENTRY
        head[entry] = 0  # if the process is killed after this, the save is not recorded
        head[entry + 1], head[entry + 2] = at, tensors
        head[entry] = _number(save)
        head[_NEXT] += 1


def _number(save: str) -> int:
    """Return the random name of a save as a number; 0 for any other name."""
    return int(save, 16) if re.fullmatch("[0-9a-f]{12}", save) else 0
