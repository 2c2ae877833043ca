"""Share the handling of priorities among all samplers that have them."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.context
import weakref
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.errors import CheckpointError
from replaykit.keywords import checked_keywords
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.priority_draws import EligiblePriorities
from replaykit.samplers.priority_rules import (
    REQUIRED,
    PriorityLaw,
    SavedPriorities,
    as_elements,
    as_priorities,
    bounds,
    check_options,
    checked_number,
    importance_weights,
    resolved_update,
    stored_elements,
)
from replaykit.samplers.priority_table import FollowedTable, PriorityTable
from replaykit.samplers.sampler import Sampler
from replaykit.storages import Storage
from replaykit.storages.commit_state import Changed

__all__ = ["KeptPriorities", "StoredPriorities", "WithPriorities"]


class StoredPriorities:
    """Law, table, and the largest priority ever set: what new records get follows from these.

    A table is made when it is first needed, and forgets records that are gone when it is next asked
    for. The storage's lock guards it.

    Attributes:
        law: what the table draws by, and the next one will.
        most: the largest raw priority ever set, at least 1.

    Args:
        device: where tables lie; None: with the storage.
        smallest: whether the smallest positive ``v`` will be asked for.
        within_buffer: whether the default is the largest priority stored, not the largest ever set.

    Raises:
        ValueError: the law does not allow the default.
    """

    def __init__(
        self,
        law: PriorityLaw,
        device: torch.device | None,
        *,
        smallest: bool,
        within_buffer: bool,
    ) -> None:
        law.check(0.0, 1.0)
        self.law, self.most = law, 1.0
        self._device, self._smallest, self._within_buffer = device, smallest, within_buffer
        self._table: PriorityTable | None = None
        self._unread: torch.Tensor | None = None
        self._where = ""

    @property
    def table(self) -> PriorityTable | None:
        """The table; None where there is none yet. Saved priorities that stayed in their file are
        read now: O(N), once.

        Raises:
            CheckpointError: they are none.
        """
        if self._unread is not None and self._table is not None:
            try:
                self.law.check(*bounds(self._unread))
            except ValueError as error:
                raise CheckpointError(
                    f"the priorities of the checkpoint, in {self._where}: {error}"
                ) from None
            self._table.load(self._unread)
            self._unread = None
        return self._table

    @table.setter
    def table(self, table: PriorityTable | None) -> None:
        self._table, self._unread = table, None

    @property
    def default(self) -> float:
        """Raw priority of new records: the largest ever set, or stored; 1 before any was set."""
        table = self.table
        if not self._within_buffer:
            return self.most
        return 1.0 if table is None else table.largest()

    def new_table(self, storage: Storage | None, law: PriorityLaw) -> PriorityTable:
        """Returns an empty table for a storage, which does not take the place of the other."""
        device: Any = self._device
        if device is None:
            device = "cpu" if storage is None else storage.device
        return PriorityTable(
            law, torch.device(device), smallest=self._smallest, largest=self._within_buffer
        )

    def known(self, storage: Storage | None) -> PriorityTable:
        """The table, made where there is none, without records that are gone."""
        table = self.table
        if table is None:
            table = self._table = self.new_table(storage, self.law)
        table.renew_after_fork()
        if storage is not None:
            table.limit = storage.max_size
            if len(storage) < table.length:
                table.truncate(len(storage))  # another buffer over the storage has emptied it
        return table

    def set_law(self, law: PriorityLaw) -> None:
        """Draws by another law from now on; ValueError, and no change, where it does not allow a
        priority."""
        law.check(0.0, self.most)  # new records get it when they are stored already
        table = self.table
        if table is not None:
            table.set_law(law)
        self.law = law

    def take(
        self,
        law: PriorityLaw,
        table: PriorityTable,
        most: float,
        unread: torch.Tensor | None = None,
        where: str = "",
    ) -> None:
        """Takes the place of all that was there.

        Args:
            unread: priorities in files yet, that nobody has checked, for a table without any.
            where: those files, for the error of who reads them.
        """
        self.law, self._table, self.most, self._unread = law, table, most, unread
        self._where = where

    def forget(self) -> None:
        """Forgets all priorities, those unread too, and the largest one that was ever set."""
        self.most, self._unread = 1.0, None
        table = self._table
        if table is not None:
            table.truncate(0)


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


_UNKNOWN = 1 << 48
"""Limit of an index where there is no storage to ask."""


_NO_LOCK = contextlib.nullcontext()


class WithPriorities(KeptPriorities):
    """Keeps a raw priority of every stored record, and what follows from it; draws nothing.

    What the arguments mean, and what they raise, is said of ``PrioritizedSampler``.
    """

    prioritized = True
    mapped_entries = ("_priorities",)

    @property
    def tells(self) -> tuple[Any, ...]:
        """Weights, and what it tells besides."""
        return (*super().tells, "priority_weight")

    @checked_keywords
    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = REQUIRED,
        beta: float = REQUIRED,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | int | None = None,
        *,
        weight_norm: str = "global",
        stratified: bool = False,
        replacement: bool = True,
    ) -> None:
        super().__init__(replacement=replacement)
        check_options(type(self).__name__, alpha, beta, max_capacity, dtype, reduction, weight_norm)
        self.max_capacity = max_capacity
        self.dtype, self.reduction, self.weight_norm = dtype, reduction, weight_norm
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self.stratified = bool(stratified)
        self.device = None if device is None else torch.device(device)
        self.dropped_updates = 0
        self._stored = StoredPriorities(
            PriorityLaw(alpha, eps, dtype),
            self.device,
            smallest=weight_norm == "global",
            within_buffer=self.max_priority_within_buffer,
        )
        self._beta = checked_number("beta", beta)
        self._saving = False
        self._chosen: EligiblePriorities | None = None
        self._attached: weakref.ref[Storage] | None = None
        self._kept = FollowedTable()

    # -- what it draws by ---------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """How much priorities count. Setting it takes one pass over the stored priorities.

        They are kept as they were given, so that the way back gives the same probabilities.
        ValueError where it is negative, NaN or infinite, or makes a power infinite.
        """
        return self._law.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        law = PriorityLaw(value, self.eps, self.dtype)
        with self._lock_of(self._home(None)):
            if law.alpha == self.alpha:
                return
            self._stored.set_law(law)

    @property
    def beta(self) -> float:
        """How much of the preference the weights undo; ValueError as for alpha. Cost: O(1)."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        value = checked_number("beta", value)
        self._settle_draws()
        self._beta = value

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self._law.eps

    @property
    def default_priority(self) -> float:
        """Raw priority of new records: the largest ever set, or stored; 1 before any was set."""
        storage = self._home(None)
        with _NO_LOCK if storage is None else storage.lock:
            return self._stored.default

    def _lock_of(self, storage: Storage | None) -> Any:
        """What guards the priorities: buffers hold it already, other callers do not."""
        if storage is None:
            return _NO_LOCK
        self._settle_draws()
        return storage.lock

    # -- what it knows -------------------------------------------------------------------------

    def _following(self, storage: Storage) -> PriorityTable:
        """The table, with the default for stored records that it has not been told of."""
        table = self._stored.known(storage)
        if len(storage) > table.length:
            table.cover(len(storage), self.default_priority)
        return table

    def _drawn(
        self,
        storage: Storage,
        count: int,
        table: PriorityTable,
        sums: SumSegmentTree | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Draws elements ``[count]``, from ``sums`` if given, with their weights, and generations
        where they come with the draw."""
        ledger = storage.ledger if storage.ndim == 1 else None
        drawn = table.draw_weighted(
            count, self.generator, self.stratified, self._beta, ledger, sums
        )
        if drawn is not None:
            return drawn
        flat, value = table.draw(count, self.generator, self.stratified, sums)
        return flat, self._weights(table, value), None

    def _weights(self, table: PriorityTable, value: torch.Tensor) -> torch.Tensor:
        """``priority_weight`` of a batch with these ``v``, float64 ``[B]``."""
        smallest = table.smallest() if self.weight_norm == "global" else value.amin()
        return importance_weights(value, smallest, self._beta, self.dtype)

    def _all_zero(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"every {what} is zero with alpha={self.alpha} and eps={self.eps}, so that nothing can "
            "be drawn; give the sampler a larger eps, or some records a priority above zero"
        )

    def _eligible(
        self, storage: Storage, index: EpisodeIndex, law: CountLaw
    ) -> tuple[PriorityTable, SumSegmentTree]:
        """The table, and a tree in which only rows have weight with which windows may start."""
        table = self._following(storage)
        if self._chosen is None:
            self._chosen = EligiblePriorities()
        return table, self._chosen.follow(table, index, law)

    def attach(self, storage: Storage) -> None:
        """Takes the storage to draw from; what is stored there gets ``default_priority``.

        Raises:
            ValueError: ``max_capacity`` below the storage's ``max_size``; nothing has changed.
        """
        # With lanes the storage has rounded its size up to whole time steps.
        lanes, most = storage.lanes.numel(), self.max_capacity
        if most is not None and -(-most // lanes) * lanes < storage.max_size:
            raise ValueError(
                f"expected max_capacity of at least the storage's max_size of {storage.max_size}, "
                f"got {self.max_capacity}; leave it out to have it follow the storage"
            )
        self._attached, self._stored.table, self._chosen = weakref.ref(storage), None, None
        if len(storage):
            self._following(storage)
        if storage.recovery is not None:
            storage.recovery.adopt_sampler(self)

    # -- being told of writes -----------------------------------------------------------------

    def about_to_write(self) -> None:
        _ = self._stored.table

    def add(self, index: Any) -> None:
        """Gives the default to a new record, unless a buffer does: it sets priorities itself."""
        if self.owner is None:
            self.mark_update(index)

    def extend(self, index: Any) -> None:
        """Gives the default to new records, unless a buffer does: it sets priorities itself."""
        if self.owner is None:
            self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Gives records ``default_priority``: they are new.

        With ``max_priority_within_buffer`` what they had before does not count towards it.

        Raises:
            IndexError: an index other than -1 outside the stored records. TypeError: no integers.
        """
        storage = self._home(storage)
        with self._lock_of(storage):
            table = self._stored.known(storage)
            elements = as_elements(index, torch.Size() if storage is None else storage.lanes)
            limit = self.max_capacity or _UNKNOWN
            kept, top = stored_elements(elements, limit if storage is None else len(storage))
            if not top:
                return
            kept = kept.to(table.device)
            table.leave_out_of_largest(kept)
            default = self.default_priority
            table.set(kept, default, top)
            table.cover(top, default)

    def empty(self) -> None:
        """Forgets all priorities, and the largest one that was ever set."""
        super().empty()
        self._stored.forget()

    # -- priorities ---------------------------------------------------------------------------

    def check_priorities(self, priority: torch.Tensor) -> None:
        if len(priority):
            self._law.check(*bounds(as_priorities(priority, len(priority), self.dtype)))

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        storage: Storage | None = None,
        generation: Any = None,
    ) -> None:
        """Sets the raw priorities of records; of several for one record the last counts.

        Args:
            index: int, ``[K]``, ``[K, ndim]``, or a tuple of LongTensors; -1 is ignored.
            priority: one for all, ``[K]`` or ``[K, 1]``; any real dtype, any device.
            storage: that of the records; by default the one that the sampler is attached to.
            generation: ``[K]``, of the slots when they were sampled; entries whose slot was written
                since are left out and counted in ``dropped_updates``.

        Raises:
            ValueError: a priority that is NaN, negative, or not finite in ``dtype``, also as a
                power; another number of priorities or generations than of index entries.
            IndexError: any other index outside the stored records. TypeError: no integers.

        Nothing has changed if it raises. Cost: O(K log N).
        """
        if storage is None:
            storage = self._home(None)
        with self._lock_of(storage):
            stored = self._stored
            table = stored.known(storage)
            if storage is not None and storage.ndim == 1:
                # What learners send: tensors that can be taken as they are.
                largest = table.set_plain(index, priority, generation, storage.ledger)
                if largest is not None:
                    if largest > stored.most:
                        stored.most = largest
                    return
            limit = table.length if storage is None else len(storage)
            update = resolved_update(index, priority, generation, stored.law, storage, limit)
            self.dropped_updates += update.dropped
            where, top = table.device, update.top
            if not top:
                return
            table.set(update.elements.to(where), update.priorities.to(where), top)
            stored.most = max(stored.most, update.most)
            if top > table.length:
                table.cover(top, self.default_priority)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns exponents and raw priorities of the stored records: a copy, ``[N]``."""
        storage = self._home(None)
        with self._lock_of(storage):
            table = self._table if storage is None else self._following(storage)
            raw = torch.empty(0, dtype=self.dtype, device="cpu")
            if table is not None and not self._saving:
                raw = table.priorities.cpu()
            saved = SavedPriorities(
                self.alpha, self._beta, self.eps, self._stored.most, self.dropped_updates, raw
            )
        return {**super().state_dict(), **saved.to_state()}

    def state_to_save(self, storage: Storage) -> dict[str, Any]:
        # A state_dict of one's own may do anything with the priorities: it gets a copy.
        ours = all(
            kind.__module__.startswith("replaykit.")
            for kind in type(self).__mro__
            if "state_dict" in kind.__dict__
        )
        if not ours or self._home(None) is not storage:
            return self.state_dict()
        self._saving = True
        try:
            tracked = self._following(storage).tracked()
            if storage.recovery is not None:
                tracked = storage.recovery.tracked(self, tracked)
            return {**self.state_dict(), "_priorities": tracked}
        finally:
            self._saving = False

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        super().check_state(state_dict, storage)
        SavedPriorities.from_state(state_dict, self.dtype).law()

    def stored_in(self, state_dict: dict[str, Any]) -> int | None:
        return len(state_dict["_priorities"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over exponents, counters and priorities; copies of them.

        Priorities beyond the stored records are forgotten, unless ``moved`` follows.

        Raises:
            ValueError: entries are missing or impossible. CheckpointError: of a newer version.
            Nothing has changed then.
        """
        super().load_state_dict(state_dict)
        saved = SavedPriorities.from_state(state_dict, self.dtype)
        law, storage = saved.law(), self._home(None)
        table = self._stored.new_table(storage, law)
        unread = saved.priorities if saved.unread and len(saved.priorities) else None
        if unread is None:
            table.load(saved.priorities)
        with self._lock_of(storage):
            self._stored.take(law, table, saved.max_priority, unread, saved.unread)
            self._beta, self.dropped_updates = saved.beta, saved.dropped_updates
            self._ran_out = False

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        if self._table is not None:
            lanes = storage.lanes.numel()
            cells = (rows[:, None] * lanes + arange(lanes)).flatten()
            self._table.load(self._table.priorities[cells.to(self._table.device)])
