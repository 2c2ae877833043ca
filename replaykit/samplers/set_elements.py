"""Elements of a table that were set, for those who follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit import native
from replaykit.storages.kept_parts import Changed

if TYPE_CHECKING:
    from replaykit.samplers.priority_table import PriorityTable

__all__ = ["FollowedTable", "SetElements", "Watches"]


_core = native.core()

_PLAIN = (torch.float32, torch.float64)

_NONE = np.zeros(0, np.int64)


class SetElements:
    """Which elements of a table were set since somebody asked, while they are few."""

    def __init__(self) -> None:
        self.everything = True
        self._index: list[torch.Tensor] = []
        self._count = 0

    def __bool__(self) -> bool:
        return self.everything or bool(self._index)

    def note(self, index: torch.Tensor, most: int) -> None:
        """Keeps elements in mind; of more than ``most`` that it may be all."""
        if self.everything:
            return
        self._count += index.numel()
        if self._count > most:
            self.everything = True
            self._index = []
        else:
            self._index.append(index.clone())  # it may be the caller's

    def take(self) -> list[torch.Tensor] | None:
        """Returns which elements were set since the last call; None: it may be all of them."""
        taken = None if self.everything else self._index
        self._index, self._count, self.everything = [], 0, False
        return taken


class Watches:
    """All who follow a table, each with what was set since it asked."""

    def __init__(self) -> None:
        self._each: list[SetElements] = []

    @property
    def want_elements(self) -> bool:
        """Whether one of them still tells elements apart."""
        return any(not watch.everything for watch in self._each)

    def new(self) -> SetElements:
        """Returns one more; at first it may be all elements."""
        watch = SetElements()
        self._each.append(watch)
        return watch

    def note(self, index: torch.Tensor, most: int) -> None:
        """Told of elements that were set; see ``SetElements.note``."""
        try:
            for watch in self._each:
                watch.note(index, most)
        except BaseException:  # they are set already
            self.all_changed()
            raise

    def all_changed(self) -> None:
        """Told that it may be all elements."""
        for watch in self._each:
            watch.everything = True


class FollowedTable:
    """What becomes of priorities, for who keeps them somewhere else too."""

    def __init__(self) -> None:
        self._table: PriorityTable | None = None
        self._watch = SetElements()
        self._numbers: tuple[Any, ...] = ()

    def skip(self, table: PriorityTable, most: float, dropped: int) -> None:
        """Takes what has become of them until now for known."""
        if self._table is not table:
            self._table, self._watch = table, table.watch()
        self._watch.take()
        self._numbers = table.length, most, dropped

    def pending(self, table: PriorityTable) -> bool:
        """Whether elements may have been set that ``changed`` has not told of."""
        return self._table is not table or bool(self._watch)

    def changed(
        self, table: PriorityTable, most: float, dropped: int, *, everything: bool
    ) -> Changed | None:
        """Returns what has changed since the last call; None: nothing.

        Args:
            most: the largest priority ever set. dropped: updates that came too late.
            everything: not what has changed, but all of it.

        Cost: O(1), or that of what was set.
        """
        if self._table is not table:
            self._table, self._watch, self._numbers = table, table.watch(), ()
        numbers = table.length, most, dropped
        if not self._watch and numbers == self._numbers and not everything:
            return None
        self._numbers = numbers
        index, raw = self._watch.take(), table.raw
        if index is None or everything:
            return Changed(None, raw.double().cpu().numpy(), *numbers)
        if not raw.is_cpu:
            elements = torch.cat(index).unique() if index else raw[:0].long()
            elements = elements[elements < table.length]
            return Changed(elements.cpu().numpy(), raw[elements].double().cpu().numpy(), *numbers)
        if len(index) == 1 and index[0].ndim == 1:
            at = index[0].numpy()
            if _core is not None and raw.dtype in _PLAIN:
                values = np.empty(len(at))
                if _core.take_rising(at, raw.numpy(), values):
                    return Changed(at, values, *numbers)
            if not (at[1:] > at[:-1]).all():
                at = np.unique(at)
        else:
            at = np.unique(np.concatenate([_NONE, *(part.numpy().reshape(-1) for part in index)]))
        if len(at) and at[-1] >= table.length:
            at = at[at < table.length]
        return Changed(at, raw.numpy()[at].astype(np.float64), *numbers)
