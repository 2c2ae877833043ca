"""What samplers with priorities have in common: the priorities, not the draws."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.keywords import checked_keywords
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.eligible_priorities import EligiblePriorities
from replaykit.samplers.kept_priorities import KeptPriorities
from replaykit.samplers.priority_arguments import (
    as_elements,
    as_priorities,
    bounds,
    resolved_update,
    stored_elements,
)
from replaykit.samplers.priority_law import PriorityLaw, checked_number, importance_weights
from replaykit.samplers.priority_options import REQUIRED, check_options
from replaykit.samplers.priority_state import SavedPriorities
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.set_elements import FollowedTable
from replaykit.samplers.stored_priorities import StoredPriorities
from replaykit.storages import Storage

__all__ = ["WithPriorities"]

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
