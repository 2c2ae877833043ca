"""Draw rows in proportion to their priorities, which follow writes and updates."""

from __future__ import annotations

import multiprocessing.context
import weakref
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.declared import encode_state
from replaykit.episodes import NOTHING, WINDOWS, CountLaw, EpisodeIndex
from replaykit.interrupts import deferred
from replaykit.keywords import checked_keywords
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.episode_measures import EpisodeMasses
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
    resolved_update,
    stored_elements,
)
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.sampler import Sampler, as_drawn, require_rows
from replaykit.samplers.window_measures import index_for, refuse_nothing
from replaykit.storages import Storage
from replaykit.storages.commit_state import CommittedPriorities, PriorityColumn
from replaykit.transfer import put_on

_UNKNOWN = 1 << 48
"""Limit of an index if no storage is known."""


class PrioritizedSampler(Sampler):
    """Draws row i with probability ``v_i / sum v``, ``v_i = (p_i + eps) ** alpha``.

    ``p_i`` is the raw priority from ``update_priority`` or from the written data. New rows have
    ``default_priority``. Draws are independent, with replacement.

    Each draw has a ``priority_weight``, ``(v_i / min v) ** -beta``, at most 1. A learner multiplies
    its loss by this weight to undo the preference for high priorities. Schaul et al. 2016,
    "Prioritized Experience Replay", section 3.4, divide ``(N P(i)) ** -beta`` by its maximum. The
    result is the same number.

    Args:
        max_capacity: a limit on the number of rows, at least the storage's ``max_size``. None: no
            separate limit.
        alpha: exponent of the priorities, required. 0: priorities have no effect.
        beta: share of the preference that the weights undo, required. 1: all of it.
        eps: number added to every priority, so that rows of priority 0 can still be drawn.
        dtype: dtype of priorities and of ``priority_weight``, ``torch.float32`` or
            ``torch.float64``. Sums are float64 either way.
        reduction: the function that reduces several numbers under a priority key to one: "max",
            "min", "mean", "median" or "sum".
        max_priority_within_buffer: if True, ``default_priority`` is the largest priority of the
            rows stored now, or 1 if none is stored. If False, it is the largest priority ever set,
            at least 1.
        device: device of the priorities; None for the CPU, for rows on any device.
        weight_norm: the row to which weights are relative. "global": the least likely eligible row
            in the storage. "batch": the least likely row of the batch; one tree fewer is needed
            then.
        stratified: if True, make one draw from each of B equal parts of the sum. The expected
            number of draws of each row stays the same, with less variance. The index of a batch is
            in ascending order.
        replacement: must be ``True``.

    Attributes:
        dropped_updates: number of entries that ``update_priority`` ignored, because their row had
            been overwritten since it was sampled.

    Raises:
        TypeError: alpha or beta is missing or not a number, or ``replacement`` is False.
        ValueError: alpha, beta or eps is negative, NaN or infinite; ``reduction`` or
            ``weight_norm`` is unknown; or, when a buffer takes the sampler, ``max_capacity`` is
            below the storage's ``max_size``.
        NotImplementedError: ``dtype`` is another dtype.

    Cost: O(B log N) for a draw or an update of B rows, without a Python step per row. An update
    waits for the device of the index and the priorities. Priorities on a device need hundreds of
    small kernels for a draw, so they are slower than on the CPU, except in a CUDA graph. There,
    a draw waits for the device only if eps is 0.
    Memory: in float32 about 15 bytes per row with "global", 10 with "batch".

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100),
        ...                   sampler=PrioritizedSampler(alpha=0.7, beta=0.9))
        >>> index = rb.extend(torch.arange(4))
        >>> rb.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> _, info = rb.sample(1000, return_info=True)
        >>> sorted({f"{weight:.3f}" for weight in info["priority_weight"].tolist()})
        ['0.418', '0.501', '0.646', '1.000']
    """

    kind = "prioritized"
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
        self.device = torch.device("cpu" if device is None else device)
        self.dropped_updates = 0
        self._table = PriorityTable(
            PriorityLaw(alpha, eps, dtype),
            self.device,
            smallest=weight_norm == "global",
            within_buffer=self.max_priority_within_buffer,
        )
        self._beta = checked_number("beta", beta)
        self._chosen = EligiblePriorities()
        self._attached: weakref.ref[Storage] | None = None

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw by priority; return the index and ``priority_weight`` ``[B]`` in ``dtype``.

        Raises:
            RuntimeError: the storage is empty, or eps and all priorities are 0.
            NotEnoughData: no row is eligible for the buffer's transforms. This is a RuntimeError.
        """
        with storage.lock:
            ledger = storage.ledger
            if not ledger.length:
                require_rows(storage)
            if self.needs is not NOTHING and self.needs:
                table, sums = self._among_eligible(storage)
            else:
                table, sums = self._table.follow(storage), None
                if table.law.may_be_zero and not table.drawable:
                    raise self._all_zero("stored priority")
            self._ran_out = False  # there is no pass; clear a flag that was set
            flat, weight, generation = table.draw_weighted(
                batch_size,
                self.generator,
                self.stratified,
                self._beta,
                ledger if storage.ndim == 1 else None,
                sums,
            )
        info = {"priority_weight": weight}
        if generation is not None:
            info["index_generation"] = generation
        home = storage.device
        if home == flat.device:
            return flat if storage.ndim == 1 else as_drawn(flat, storage), info
        return as_drawn(flat, storage), {key: put_on(value, home) for key, value in info.items()}

    def _among_eligible(self, storage: Storage) -> tuple[PriorityTable, SumSegmentTree]:
        """Return the table, and a tree of the rows that are eligible for the transforms."""
        index, law = index_for(storage), self.needs.single
        table, sums = self._eligible(storage, index, law)
        # Reading a sum on a device waits for it. The episode index is known here.
        if table.device.type == "cpu" and sums.total > 0:
            return table, sums
        if not index.totals(law, WINDOWS).any():
            refuse_nothing(index, self.needs)
        if table.law.may_be_zero and not sums.total > 0:
            raise self._all_zero("priority of a row that the transforms allow to be drawn")
        return table, sums

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        with storage.lock:
            if not len(storage):
                return False
            if not self.needs:
                return self._table.follow(storage).drawable
            try:
                self._among_eligible(storage)
            except RuntimeError:
                return False
            return True

    def _all_zero(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"every {what} is zero with alpha={self.alpha} and eps={self.eps}, so no row can be "
            "drawn; give the sampler a larger eps, or some rows a priority above zero"
        )

    def _eligible(
        self,
        storage: Storage,
        index: EpisodeIndex,
        law: CountLaw,
        chosen: EpisodeMasses | None = None,
    ) -> tuple[PriorityTable, SumSegmentTree]:
        """Return the table, and a tree of the rows with which windows may start.

        ``chosen``: the episodes whose rows may be drawn; None for all.
        """
        table = self._table.follow(storage)
        return table, self._chosen.follow(table, index, law, chosen)

    # -- parameters ---------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """The exponent of priorities in the draw.

        Setting it takes one pass over all priorities. Raw priorities stay stored, so setting the
        old value again gives the old probabilities. Setting it raises ValueError if the value is
        negative, NaN or infinite, or makes a power infinite.
        """
        return self._table.law.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        law = PriorityLaw(value, self.eps, self.dtype)
        with self._lock_of(self._home(None)):
            if law.alpha != self.alpha:
                self._table.set_law(law)

    @property
    def beta(self) -> float:
        """The share of the preference that weights undo.

        Setting it raises ValueError if the value is negative, NaN or infinite. Cost: O(1).
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = checked_number("beta", value)

    @property
    def eps(self) -> float:
        """The number that is added to every priority."""
        return self._table.law.eps

    @property
    def default_priority(self) -> float:
        """Raw priority of new rows: the largest ever set, or the largest stored.

        It is 1 before any priority was set.
        """
        storage, table = self._home(None), self._table
        with self._lock_of(storage):
            table.read()
            if storage is not None and table.process:
                table.follow(storage)
            return table.default

    def stored_priorities(self, storage: Storage) -> Any:
        """Return the raw priorities of the stored rows, ``[N]``; the caller holds the lock."""
        return self._table.follow(storage).raw.cpu().numpy()

    def _home(self, storage: Storage | None) -> Storage | None:
        """Return the storage argument, or else the attached storage or the owner's."""
        if storage is None and self._attached is not None:
            storage = self._attached()
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        return storage

    @staticmethod
    def _lock_of(storage: Storage | None) -> Any:
        """Return the lock of the priorities, which buffers hold already; it defers signals."""
        return deferred if storage is None else storage.lock

    # -- notifications of writes --------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        """Attach the sampler to its storage. All stored rows get ``default_priority``.

        Raises:
            ValueError: ``max_capacity`` is below the storage's ``max_size``; nothing has changed.
        """
        self.check_capacity(storage, storage.max_size)
        self._attached, self._chosen = weakref.ref(storage), EligiblePriorities()
        self._table.column = None
        self._table.restart()
        if len(storage):
            self._table.follow(storage)
        if storage.recovery is not None:
            storage.recovery.adopt_sampler(self)

    def check_capacity(self, storage: Storage, rows: int) -> None:
        # With lanes the storage has rounded its size up to whole time steps.
        lanes, most = storage.lanes.numel(), self.max_capacity
        if most is not None and -(-most // lanes) * lanes < rows:
            raise ValueError(
                f"expected max_capacity of at least the storage's max_size of {rows}, got "
                f"{self.max_capacity}; leave it out to have it follow the storage"
            )

    def about_to_write(self) -> None:
        self._table.read()

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
        with self._lock_of(storage):
            table = self._table.follow(storage)
            elements = as_elements(index, torch.Size() if storage is None else storage.lanes)
            limit = self.max_capacity or _UNKNOWN
            kept, top = stored_elements(elements, limit if storage is None else len(storage))
            if top:
                table.give_default(kept, top)

    def empty(self) -> None:
        """Forget all priorities, and the largest priority ever set."""
        super().empty()
        with self._lock_of(self._home(None)):
            self._table.forget()

    # -- priorities ---------------------------------------------------------------------------

    def check_priorities(self, priority: torch.Tensor) -> None:
        if len(priority):
            self._table.law.check(*bounds(as_priorities(priority, len(priority), self.dtype)))

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
            # Learners usually pass tensors that need no conversion.
            ledger = None if storage is None or storage.ndim > 1 else storage.ledger
            table = self._table.follow(storage, None if ledger is None else ledger.length)
            if ledger is not None and table.set_plain(index, priority, generation, ledger):
                return
            if table.device.type == "cpu":
                given = index, priority, generation
                index, priority, generation = map(_on_cpu, given)
                moved = index is not given[0] or priority is not given[1]
                if moved and ledger and table.set_plain(index, priority, generation, ledger):
                    return
            limit = table.length if storage is None else len(storage)
            update = resolved_update(index, priority, generation, table.law, storage, limit)
            self.dropped_updates += update.dropped
            where, top = table.device, update.top
            if not top:
                return
            table.set(update.elements.to(where), update.priorities.to(where), top)
            table.most = max(table.most, update.most)
            if top > table.length:  # without a storage
                table.cover(top, table.default)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents and a copy of the stored rows' raw priorities, ``[N]``."""
        storage, table = self._home(None), self._table
        with self._lock_of(storage):
            table.read()
            if storage is not None:
                table.follow(storage)
            return self._state_with(table.priorities.cpu())

    def _state_with(self, raw: Any) -> dict[str, Any]:
        law, most = self._table.law, self._table.most
        saved = SavedPriorities(law.alpha, self._beta, law.eps, most, self.dropped_updates, raw)
        return {**super().state_dict(), **encode_state(saved)}

    def state_to_save(self, storage: Storage) -> dict[str, Any]:
        # A custom state_dict may change the priorities, so it gets a copy.
        custom = type(self).state_dict is not PrioritizedSampler.state_dict
        if custom or self._home(None) is not storage:
            return self.state_dict()
        tracked = self._table.follow(storage).tracked()
        if storage.recovery is not None:
            tracked = storage.recovery.tracked(tracked)
        return self._state_with(tracked)

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
        with self._lock_of(storage):
            self._table.load(law, saved.priorities, saved.max_priority, storage)
            self._beta, self.dropped_updates = saved.beta, saved.dropped_updates
            self._ran_out = False

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        table, lanes = self._table, storage.lanes.numel()
        table.read()
        if table.length:
            cells = (rows[:, None] * lanes + arange(lanes)).flatten()
            raw = table.priorities[cells.to(table.device)]
            table.load(table.law, raw, table.most, self._home(None))

    # -- recovery -----------------------------------------------------------------------------

    def works_on(self, storage: Storage) -> bool:
        """Return whether the storage is attached, and the buffer still uses this sampler."""
        owner = self.owner
        attached = self._attached is not None and self._attached() is storage
        return attached and (owner is None or getattr(owner, "_sampler", self) is self)

    def use_column(self, column: PriorityColumn) -> None:
        """Write priorities into a column from now on, when they are set."""
        self._table.column = column

    def settle_priorities(self, *, written: bool = True) -> tuple[int, float, int]:
        """Give the default to new rows, and write priorities to the files that lack them.

        Args:
            written: whether rows may have been written since the last call.

        Returns:
            The number of priorities, the largest one ever set, and ``dropped_updates``.
        """
        table = self._table
        if not written and table.column is not None and not table.column.whole:
            return table.length, table.most, self.dropped_updates
        storage = self._home(None)
        if storage is None or not storage.ledger.length:
            table.read()
        else:
            table.follow(storage, storage.ledger.length if storage.ndim == 1 else None)
        if table.column is not None and table.column.whole:
            table.column.write(range(table.length), table.raw.cpu().numpy())
        return table.length, table.most, self.dropped_updates

    def follow_priorities(self, elements: Any, values: Any, counts: CommittedPriorities) -> None:
        """Load an earlier sampler's priorities, or another process's changes of the priorities.

        Raises:
            ValueError: the exponents do not allow these priorities.
        """
        table, storage, (length, most, dropped) = self._table, self._home(None), counts
        values = torch.from_numpy(values).to(self.dtype)
        column, table.column = table.column, None  # it has these priorities
        try:
            if elements is None:
                table.law.check(0.0, most)
                table.load(table.law, values, most, storage)
            else:
                table.follow(None)
                table.skip(storage)
                table.truncate(length)
                if len(elements):
                    table.law.check(0.0, most)
                    index = torch.from_numpy(elements).to(table.device)
                    table.set(index, values.to(table.device), length)
                table.cover(length, most)
                table.most = most
        finally:
            table.column = column
        self.dropped_updates = dropped

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_attached": None, "_chosen": EligiblePriorities()}
        is_spawning = multiprocessing.context.get_spawning_popen() is not None
        if is_spawning and (self.owner is not None or self._attached is not None):
            if self.owner is None or not self.owner.shared:
                raise RuntimeError(
                    f"a {type(self).__name__} cannot be handed to a spawned process: each process "
                    "would have separate priorities; make one there, or a buffer with shared=True"
                )
            # The files of the priorities are shared. The other process finds them through its
            # storage.
            own["_table"] = self._table.emptied()
        return {**super().__getstate__(), **own}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value
