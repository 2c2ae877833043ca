"""Share the handling of priorities among all samplers that have them."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.context
import os
import weakref
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows
from replaykit.declared import encode_state
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
from replaykit.samplers.priority_table import PriorityTable, WatchedTable
from replaykit.samplers.sampler import Sampler
from replaykit.storages import Storage
from replaykit.storages.commit_state import Changed
from replaykit.storages.indexing import elements_of

__all__ = ["RecoverableSampler", "StoredPriorities", "WithPriorities"]


class StoredPriorities:
    """A law, a table, and the largest priority ever set.

    The priority of new rows follows from these. The table is created when it is first needed. A
    request first follows the log of the storage: rows written since the last request get the
    default, and lost rows are removed. The storage's lock guards the object.

    Attributes:
        law: the law of the present table, and of the next table.
        most: the largest raw priority ever set, at least 1.

    Args:
        device: device of the tables; None for the storage's.
        smallest: whether the smallest positive ``v`` will be needed.
        within_buffer: whether the default is the largest stored priority instead of the largest
            priority ever set.

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
        self._device, self._smallest, self.within_buffer = device, smallest, within_buffer
        self._table: PriorityTable | None = None
        self._unread: torch.Tensor | None = None
        self._where = ""
        # The place in the storage's log at the last request; None if the rows of the table are the
        # stored ones.
        self._seen: tuple[int, int] | None = None

    @property
    def table(self) -> PriorityTable | None:
        """The table; None before it is created.

        The first access reads saved priorities that are still in their file. Cost: O(N), once.

        Raises:
            CheckpointError: the file holds values that are not priorities.
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
        self._table, self._unread, self._seen = table, None, None

    @property
    def default(self) -> float:
        """Raw priority of new rows: the largest ever set, or the largest stored.

        It is 1 before any priority was set.
        """
        table = self.table
        if not self.within_buffer:
            return self.most
        return 1.0 if table is None else table.largest()

    def new_table(self, storage: Storage | None, law: PriorityLaw) -> PriorityTable:
        """Return an empty table for a storage. The present table stays in use."""
        device: Any = self._device
        if device is None:
            device = "cpu" if storage is None else storage.device
        return PriorityTable(
            law, torch.device(device), smallest=self._smallest, largest=self.within_buffer
        )

    def known(self, storage: Storage | None, count: int | None = None) -> PriorityTable:
        """Return the table of the rows stored now; create it on first use.

        Args:
            count: the number of stored rows, if the caller knows it.
        """
        table = self._table if self._unread is None else self.table
        if table is None:
            table, self._seen = self.new_table(storage, self.law), None
            self._table = table
        if table.process != os.getpid():
            table.renew_after_fork()
        if storage is not None:
            table.limit = storage.max_size
            count = len(storage) if count is None else count
            if count < table.length:
                table.truncate(count)
            if self._seen is None or self._seen[0] != storage.ledger.log.number:
                self._follow(storage, table, count)
            if count > table.length:
                table.cover(count, self.default)
        return table

    def _follow(self, storage: Storage, table: PriorityTable, count: int) -> None:
        """Give the default to rows that were written since the last call."""
        cleared, slots = storage.ledger.written_since(self._seen)
        if cleared:
            table.truncate(0)
        elements = elements_of(slots, storage.lanes.numel())
        elements = elements[elements < count]
        if len(elements):
            self.give_default(table, torch.from_numpy(elements), count)
        self.skip(storage)

    def is_current(self, storage: Storage | None) -> bool:
        """Return whether no row was written since the last request."""
        return storage is None or self._seen in (None, storage.ledger.place_in_log)

    def skip(self, storage: Storage | None) -> None:
        """Count all rows that are stored now as rows with priorities."""
        self._seen = None if storage is None else storage.ledger.place_in_log

    def give_default(self, table: PriorityTable, elements: torch.Tensor, top: int) -> None:
        """Give the default to rows, and to unset rows below ``top``.

        Args:
            elements: flat indices below ``top``, int64 ``[K]``, K at least 1.
        """
        if not self.within_buffer and table.set_same(elements, self.most, top):
            return
        elements = elements.to(table.device)
        table.leave_out_of_largest(elements)
        default = self.default
        table.set(elements, default, top)
        table.cover(top, default)

    def set_law(self, law: PriorityLaw) -> None:
        """Draw by another law from now on.

        Raises:
            ValueError: the law does not allow a stored priority; nothing has changed.
        """
        law.check(0.0, self.most)  # new rows will get this priority
        table = self.table
        if table is not None:
            table.set_law(law)
        self.law = law

    def load(
        self,
        law: PriorityLaw,
        table: PriorityTable,
        most: float,
        storage: Storage | None,
        unread: torch.Tensor | None = None,
        where: str = "",
    ) -> None:
        """Replace the law, the table and the largest priority.

        Args:
            storage: the storage of the rows; None if it is not known.
            unread: unchecked priorities that are still in files; the table is then empty.
            where: names of those files, for the error message of a later read.
        """
        self.law, self._table, self.most, self._unread = law, table, most, unread
        self._where = where
        self.skip(storage)

    def forget(self) -> None:
        """Forget all priorities, read or unread, and the largest priority ever set."""
        self.most, self._unread = 1.0, None
        table = self._table
        if table is not None:
            table.truncate(0)


class RecoverableSampler(Sampler):
    """A sampler whose priorities are recovered together with its storage.

    The sampler reports the changes of priorities since its last report. It also loads the changes
    that other processes made. All other methods of priorities are in ``WithPriorities``.
    """

    dtype: torch.dtype
    dropped_updates: int
    _stored: StoredPriorities
    _attached: weakref.ref[Storage] | None
    _chosen: EligiblePriorities | None
    _kept: WatchedTable

    def _home(self, storage: Storage | None) -> Storage | None:
        """Return the storage argument, or else the attached storage or the owner's."""
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
        """Return whether the storage is attached, and the buffer still uses this sampler."""
        owner = self.owner
        attached = self._attached is not None and self._attached() is storage
        return attached and (owner is None or getattr(owner, "_sampler", self) is self)

    def priorities_changed(self, *, everything: bool = False) -> Changed | None:
        """Return the changes of the priorities since the last call, or all priorities.

        ``storages.commit_state`` describes the result.
        """
        table, storage = self._table, self._home(None)
        if storage is not None and storage.ledger.length:
            table = self._stored.known(storage, storage.ledger.length * storage.lanes.numel())
        counts = self._stored.most, self.dropped_updates
        if table is None:
            none = np.zeros(0)
            return Changed(None, none, 0, *counts) if everything else None
        return self._kept.changed(table, *counts, everything=everything)

    def priorities_pending(self) -> bool:
        """Return whether priorities may have been set since ``priorities_changed``."""
        storage, table = self._home(None), self._table
        if table is None:
            return storage is not None and storage.ledger.length > 0
        return self._kept.pending(table) or not self._stored.is_current(storage)

    def follow_priorities(self, changed: Changed) -> None:
        """Load an earlier sampler's priorities, or another process's changes of the priorities.

        Raises:
            ValueError: the exponents do not allow these priorities.
        """
        values, most, dropped = torch.from_numpy(changed.values), changed.most, changed.dropped
        if changed.elements is None or self._table is None:
            self._chosen = None
            self._law.check(0.0, most)
            table = self._stored.new_table(self._home(None), self._law)
            table.load(values.to(self.dtype))
            self._stored.load(self._law, table, most, self._home(None))
            self.dropped_updates = dropped
        else:
            table = self._stored.known(None)
            self._stored.skip(self._home(None))
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
        _ = self._table  # reads the file, which a copy does not share
        own = {"_attached": None, "_chosen": None, "_kept": WatchedTable()}
        if multiprocessing.context.get_spawning_popen() is None:
            return {**super().__getstate__(), **own}
        if not (self.owner is not None and self.owner.shared):
            raise RuntimeError(
                f"a {type(self).__name__} cannot be handed to a spawned process: each process "
                "would have separate priorities; make one there, or a buffer with shared=True"
            )
        # The files of the priorities are shared. The other process finds them through its storage.
        stored = copy.copy(self._stored)
        stored.table = None
        return {**super().__getstate__(), **own, "_stored": stored}


_UNKNOWN = 1 << 48
"""Limit of an index if no storage is known."""


_NO_LOCK = contextlib.nullcontext()


class WithPriorities(RecoverableSampler):
    """Base class that stores each row's raw priority and values derived from it.

    ``PrioritizedSampler`` documents the arguments and the errors.
    """

    prioritized = follows_log = True
    marks_draws = False
    mapped_entries = ("_priorities",)

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys of all samplers, and ``priority_weight``."""
        return (*super().info_keys, "priority_weight")

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
        self._kept = WatchedTable()

    # -- parameters ---------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """The exponent of priorities in the draw.

        Setting it takes one pass over all priorities. Raw priorities stay stored, so setting the
        old value again gives the old probabilities. Setting it raises ValueError if the value is
        negative, NaN or infinite, or makes a power infinite.
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
        """The share of the preference that weights undo.

        Setting it raises ValueError if the value is negative, NaN or infinite. Cost: O(1).
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        value = checked_number("beta", value)
        self._beta = value

    @property
    def eps(self) -> float:
        """The number that is added to every priority."""
        return self._law.eps

    @property
    def default_priority(self) -> float:
        """Raw priority of new rows: the largest ever set, or the largest stored.

        It is 1 before any priority was set.
        """
        storage = self._home(None)
        with _NO_LOCK if storage is None else storage.lock:
            if storage is not None and self._table is not None:
                self._stored.known(storage)
            return self._stored.default

    def _lock_of(self, storage: Storage | None) -> Any:
        """Return the lock of the priorities. Buffers hold it already."""
        if storage is None:
            return _NO_LOCK
        return storage.lock

    # -- the table -----------------------------------------------------------------------------

    def _following(self, storage: Storage) -> PriorityTable:
        """Return the table, in which all stored rows have a priority."""
        return self._stored.known(storage)

    def _drawn(
        self,
        storage: Storage,
        count: int,
        table: PriorityTable,
        sums: SumSegmentTree | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Draw flat indices ``[count]``, from ``sums`` if given, with their weights.

        The third value is the generations of these rows, or None if the draw does not compute them.
        """
        ledger = storage.ledger if storage.ndim == 1 else None
        drawn = table.draw_weighted(
            count, self.generator, self.stratified, self._beta, ledger, sums
        )
        if drawn is not None:
            return drawn
        flat, value = table.draw(count, self.generator, self.stratified, sums)
        return flat, self._weights(table, value), None

    def _weights(self, table: PriorityTable, value: torch.Tensor) -> torch.Tensor:
        """Return ``priority_weight`` of a batch with these ``v``, float64 ``[B]``."""
        smallest = table.smallest() if self.weight_norm == "global" else value.amin()
        return importance_weights(value, smallest, self._beta, self.dtype)

    def _all_zero(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"every {what} is zero with alpha={self.alpha} and eps={self.eps}, so no row can be "
            "drawn; give the sampler a larger eps, or some rows a priority above zero"
        )

    def _eligible(
        self, storage: Storage, index: EpisodeIndex, law: CountLaw
    ) -> tuple[PriorityTable, SumSegmentTree]:
        """Return the table, and a tree of the rows with which windows may start."""
        table = self._following(storage)
        if self._chosen is None:
            self._chosen = EligiblePriorities()
        return table, self._chosen.follow(table, index, law)

    def attach(self, storage: Storage) -> None:
        """Attach the sampler to its storage. All stored rows get ``default_priority``.

        Raises:
            ValueError: ``max_capacity`` is below the storage's ``max_size``; nothing has changed.
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

    # -- notifications of writes --------------------------------------------------------------

    def about_to_write(self) -> None:
        _ = self._stored.table

    def add(self, index: Any) -> None:
        """Give a new row the default, unless the next request does."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Give new rows the default, unless the next request does.

        The largest stored priority has to be found now. It may be that of a row that is overwritten
        before the next request.
        """
        if self.owner is None or self.max_priority_within_buffer:
            self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give rows ``default_priority``.

        With ``max_priority_within_buffer``, the default ignores the old priorities of these slots.

        Raises:
            IndexError: an index other than -1 is outside the stored rows.
            TypeError: the index does not consist of integers.
        """
        if storage is None:
            storage = self._home(None)
        with _NO_LOCK if storage is None else storage.lock:
            table = self._stored.known(storage)
            elements = as_elements(index, torch.Size() if storage is None else storage.lanes)
            limit = self.max_capacity or _UNKNOWN
            kept, top = stored_elements(elements, limit if storage is None else len(storage))
            if top:
                self._stored.give_default(table, kept, top)

    def empty(self) -> None:
        """Forget all priorities, and the largest priority ever set."""
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
        """Set the raw priorities of rows.

        If a row occurs several times, its last priority counts. If the call raises, nothing has
        changed. Cost: O(K log N).

        Args:
            index: an int, ``[K]``, ``[K, ndim]``, or a tuple of LongTensors. Entries of -1 are
                ignored.
            priority: one number for all rows, ``[K]`` or ``[K, 1]``, of any real dtype, on any
                device.
            storage: the storage of the rows; by default the storage that the sampler is attached
                to.
            generation: ``[K]``, the generations of the slots at sampling. If a slot was written
                since, its entry is skipped and counted in ``dropped_updates``.

        Raises:
            ValueError: a priority is NaN or negative; a priority or its power is not finite in
                ``dtype``; or the number of priorities or generations differs from the number of
                index entries.
            IndexError: an index other than -1 is outside the stored rows.
            TypeError: the index does not consist of integers.
        """
        if storage is None:
            storage = self._home(None)
        with self._lock_of(storage):
            stored = self._stored
            table = stored.known(storage)
            if storage is not None and storage.ndim == 1:
                # Learners usually pass tensors that need no conversion.
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
            if top > table.length:  # without a storage
                table.cover(top, stored.default)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents and a copy of the stored rows' raw priorities, ``[N]``."""
        storage = self._home(None)
        with self._lock_of(storage):
            table = self._table if storage is None else self._following(storage)
            raw = torch.empty(0, dtype=self.dtype, device="cpu")
            if table is not None and not self._saving:
                raw = table.priorities.cpu()
            saved = SavedPriorities(
                self.alpha, self._beta, self.eps, self._stored.most, self.dropped_updates, raw
            )
        return {**super().state_dict(), **encode_state(saved)}

    def state_to_save(self, storage: Storage) -> dict[str, Any]:
        # A custom state_dict may change the priorities, so it gets a copy.
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
        """Load copies of exponents, counters and priorities.

        Priorities beyond the stored rows are dropped, unless ``moved`` follows. If the call raises,
        nothing has changed.

        Raises:
            ValueError: entries are missing or invalid.
            CheckpointError: the state has a newer version.
        """
        super().load_state_dict(state_dict)
        saved = SavedPriorities.from_state(state_dict, self.dtype)
        law, storage = saved.law(), self._home(None)
        table = self._stored.new_table(storage, law)
        raw, unread, files = saved.priorities, None, ""
        if isinstance(raw, MappedRows):
            files, raw = raw.where, raw.spanned()
            unread = raw if len(raw) else None
        if unread is None:
            table.load(raw)
        with self._lock_of(storage):
            self._stored.load(law, table, saved.max_priority, storage, unread, files)
            self._beta, self.dropped_updates = saved.beta, saved.dropped_updates
            self._ran_out = False

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        if self._table is not None:
            lanes = storage.lanes.numel()
            cells = (rows[:, None] * lanes + arange(lanes)).flatten()
            self._table.load(self._table.priorities[cells.to(self._table.device)])
