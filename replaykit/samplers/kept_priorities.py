"""Priorities as what keeps rows in files, for one process or for several, knows them."""

from __future__ import annotations

import copy
import multiprocessing.context
import weakref
from typing import Any

import numpy as np
import torch

from replaykit.samplers.base import Sampler
from replaykit.samplers.eligible_priorities import EligiblePriorities
from replaykit.samplers.priority_law import PriorityLaw
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.set_elements import FollowedTable
from replaykit.samplers.stored_priorities import StoredPriorities
from replaykit.storages import Storage
from replaykit.storages.kept_parts import Changed

__all__ = ["KeptPriorities"]


class KeptPriorities(Sampler):
    """A sampler whose priorities go with a storage: what has become of them since somebody asked,
    and what others have made of them. ``WithPriorities`` has the rest."""

    dtype: torch.dtype
    dropped_updates: int
    _stored: StoredPriorities
    _attached: weakref.ref[Storage] | None
    _chosen: EligiblePriorities | None
    _kept: FollowedTable

    def _home(self, storage: Storage | None) -> Storage | None:
        """The storage that an index is about: the one given, else the one attached or owned."""
        if storage is None and self._attached is not None:
            storage = self._attached()
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        return storage

    @property
    def _law(self) -> PriorityLaw:
        return self._stored.law

    @property
    def _table(self) -> PriorityTable | None:
        return self._stored.table

    def works_on(self, storage: Storage) -> bool:
        """Whether it is attached to a storage, and no other has come for it in its buffer."""
        owner = self.owner
        attached = self._attached is not None and self._attached() is storage
        return attached and (owner is None or getattr(owner, "_sampler", self) is self)

    def priorities_changed(self, *, everything: bool = False) -> Changed | None:
        """What has become of the priorities since the last call, or all of them; see
        ``storages.kept_parts``."""
        table, counts = self._table, (self._stored.most, self.dropped_updates)
        if table is None:
            none = np.zeros(0)
            return Changed(None, none, 0, *counts) if everything else None
        return self._kept.changed(table, *counts, everything=everything)

    def priorities_pending(self) -> bool:
        """Whether some may have been set since ``priorities_changed`` was called."""
        return self._table is not None and self._kept.pending(self._table)

    def take_kept(self, priorities: torch.Tensor, most: float, dropped: int) -> None:
        """Takes over what a sampler in this one's place had; ValueError where the exponents do not
        allow it."""
        self._law.check(0.0, most)
        table = self._stored.new_table(self._home(None), self._law)
        table.load(priorities.to(self.dtype))
        self._stored.take(self._law, table, most)
        self.dropped_updates = dropped

    def take_changed(self, changed: Changed) -> None:
        """Takes over what another process has made of the priorities; ValueError where the
        exponents do not allow them."""
        values, most, dropped = torch.from_numpy(changed.values), changed.most, changed.dropped
        if changed.elements is None or self._table is None:
            self._chosen = None
            self.take_kept(values, most, dropped)
        else:
            table = self._stored.known(None)
            table.truncate(changed.length)
            if len(changed.elements):
                self._law.check(0.0, most)
                index = torch.from_numpy(changed.elements).to(table.device)
                table.set(index, values.to(table.device, self.dtype), changed.length)
            table.cover(changed.length, most)
            self._stored.most, self.dropped_updates = most, dropped
        assert self._table is not None
        self._kept.skip(self._table, most, dropped)

    def __getstate__(self) -> dict[str, Any]:
        _ = self._table  # a copy does not share the file
        own = {"_attached": None, "_chosen": None, "_kept": FollowedTable()}
        if multiprocessing.context.get_spawning_popen() is None:
            return {**super().__getstate__(), **own}
        if not (self.owner is not None and self.owner.shared):
            raise RuntimeError(
                f"a {type(self).__name__} cannot be handed to a spawned process: each process "
                "would have priorities of its own; make one there, or a buffer with shared=True"
            )
        # They lie in files that the other process finds by its storage.
        stored = copy.copy(self._stored)
        stored.table = None
        return {**super().__getstate__(), **own, "_stored": stored}
