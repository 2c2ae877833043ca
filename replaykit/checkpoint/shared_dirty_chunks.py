"""What is known of changes, in memory that outlives who wrote: several processes write the rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from replaykit.checkpoint.dirty_chunks import Changes, CopiedRows, TrackedTensor

__all__ = ["KeptChanges", "ViewsOfRows"]

Array = np.ndarray[Any, Any]

_NOW, _NEXT, _SAVES = 0, 1, 2
_REMEMBERED, _ENTRY = 16, 3
_HEADER = 64
"""Numbers before those of the chunks: the number of the next save, how many saves were noted, and
of the last ones the name, the number and which tensors they wrote."""


class ViewsOfRows(Protocol):
    """Tells processes of each other's views of rows, which may be written to without a word."""

    def hold(self) -> None:
        """Told that this process gives views away."""

    def let_go(self) -> None:
        """Told that it has none any more, and that what was written to them is marked."""

    def of_others(self) -> bool:
        """Whether another one has some, or had some when it died; that is said once."""


class KeptChanges(Changes):
    """``Changes`` that all processes note which write the rows, and any of them saves by.

    Who writes marks the chunks with the number of the next save before it touches a row: one that
    is killed has marked too much, never too little. A save by one process counts for the others:
    the table knows the saves by the random names that their manifests carry, so that a checkpoint
    of another buffer, or of another run, is one of which nothing is known.

    Args:
        cells: int64, ``KeptChanges.length`` of them, zeros at first: memory of all processes.
        like: of which rows; in every process of as many, and as large ones.
        keys: of tensors whose changes are noted one by one; of others it may be all.
        views: what processes tell each other of views; None: nobody can get one.
        unsettled: whether something is changed that may yet be taken back, without a mark: a save
            of that is not remembered.

    Every call is made under the lock that these processes share.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint.shared_dirty_chunks import KeptChanges
        >>> from replaykit.checkpoint.dirty_chunks import Changes
        >>> like = Changes(10_000, 8)
        >>> cells = np.zeros(KeptChanges.length(like), np.int64)
        >>> one, other = (KeptChanges(cells, like) for _ in range(2))
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
        unsettled: Callable[[], bool] | None = None,
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
        self._unsettled = unsettled

    @staticmethod
    def length(like: Changes, keys: Sequence[Hashable] = ()) -> int:
        """Returns how many numbers it takes."""
        return _HEADER + (1 + len(keys)) * len(like._written)

    def _versions_of(self, key: Hashable) -> Array:
        return self._keyed.get(key, self._written)

    def wrote_rising(self, rows: Array) -> None:
        """Told of rows, int64 ``[K]`` that rise, which most often lie in one chunk."""
        if not len(rows):
            return
        chunk = rows.item(0) // self.chunk
        if rows.item(-1) // self.chunk != chunk:
            self._touch(rows // self.chunk, None)
        elif self._last != chunk or self._last_now != self._clock[0]:
            self.wrote(chunk * self.chunk, 1)

    def wrote_later(self, rows: torch.Tensor) -> None:
        self.wrote_at(rows)  # before others can see them

    # -- views ----------------------------------------------------------------------------------

    @property
    def exposed(self) -> bool:
        """Whether somebody in this process may write without saying so."""
        return self._exposed

    def expose(self) -> None:
        if not self._exposed:
            users = self._count()
            if self._views is not None:
                self._views.hold()
            self._users, self._exposed = users, True

    def lend(self) -> None:
        self.expose()
        self._users = None

    def look(self) -> None:
        """Looks whether the views of this process are gone, once a save of anybody. The lock is
        held."""
        if self._looked != self.now:
            self._looked = self.now
            self._settle_views(0, others=False)

    def _settle_views(self, own: int, *, others: bool = True) -> None:
        mine = self._exposed
        if mine or (others and self._views is not None and self._views.of_others()):
            self._touch(slice(None), None)
        if mine and self._users is not None and (self._count() or 0) - own <= self._users:
            self._exposed = False
            if self._views is not None:
                self._views.let_go()

    # -- saving ---------------------------------------------------------------------------------

    def freeze(
        self, tensors: Mapping[str, TrackedTensor], lock: AbstractContextManager[Any]
    ) -> CopiedRows:
        """Begins a save; what is wanted of it is named before the lock is let go."""
        self._settle_views(len(tensors))
        settled = self._unsettled is None or not self._unsettled()
        frozen = CopiedRows(self, tensors, lock, settled)
        self._head[_NOW] += 1
        return frozen

    def saved_at(self, save: str, tensors: int) -> int | None:
        """Returns the number of the save of that name, which wrote these tensors; None: it is not
        known here. The lock is held."""
        name = _number(save)
        for at in range(_SAVES, _SAVES + _REMEMBERED * _ENTRY, _ENTRY):
            if name and self._head[at] == name and self._head[at + 2] == tensors:
                return int(self._head[at + 1])
        return None

    def note_saved(self, save: str, at: int, tensors: int) -> None:
        """Notes a save that is published. The lock is held."""
        head, place = self._head, _SAVES + self._head[_NEXT] % _REMEMBERED * _ENTRY
        head[place] = 0  # who is killed here has noted nothing
        head[place + 1], head[place + 2] = at, tensors
        head[place] = _number(save)
        head[_NEXT] += 1


def _number(save: str) -> int:
    """The name of a save, which is random, as a number; 0: it is none of ours."""
    return int(save, 16) if re.fullmatch("[0-9a-f]{12}", save) else 0
