"""Keep the priorities of stored rows, and the trees that draws need."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaykit.checkpoint import MappedRows
from replaykit.checkpoint.dirty_chunks import Changes, TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.priorities import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from replaykit.samplers.priority_rules import (
    PriorityLaw,
    as_it_is,
    bounds,
    importance_weights,
    last_of_each,
)
from replaykit.storages import Storage
from replaykit.storages.change_log import ChangeKind, ChangeLog
from replaykit.storages.commit_state import PriorityColumn
from replaykit.storages.indexing import elements_of
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import by_value, from_value

Array = np.ndarray[Any, Any]

Lost = tuple[int, torch.Tensor]
"""The count of rows since a place in a log, and the priorities of the newest rows of then."""

_FIRST = 1024
_BLOCK = 1 << 16


class PriorityTable:
    """Raw priorities ``p`` of the rows ``0..length-1``, and trees over their ``v``.

    A flat index identifies each row. Users give raw priorities, and saves store raw priorities. All
    other values follow from them. So after a change of the exponent or the capacity, or after a
    reload, the table equals a new table with the same raw priorities. A row that is not stored has
    raw priority -1 and ``v = 0``, so no draw returns it.

    Every use begins with ``follow``. It gives the default to rows that were written since, and
    removes lost rows. The first ``follow`` allocates memory, which grows by doubling, up to
    ``limit``. The table is not thread-safe; the storage's lock guards it.

    Attributes:
        most: the largest raw priority ever set, at least 1.
        log: the log of the rows whose priorities were set.
        column: the place in files where priorities are written, too; None without files.
        inherit: a function of the storage, the slots that were written, and the result of
            ``_newest_at``; it changes the default priorities of these slots. None to keep them.

    Args:
        law: the law that turns ``p`` into ``v``.
        device: the device of all tensors.
        smallest: whether the smallest positive ``v`` will be needed.
        within_buffer: whether the default is the largest stored priority instead of the largest
            priority ever set.

    Raises:
        ValueError: the law does not allow the default.

    Cost: 4 bytes per row for ``p`` and about 5 for each tree in float32, twice that in float64.
    """

    def __init__(
        self,
        law: PriorityLaw,
        device: torch.device,
        *,
        smallest: bool,
        within_buffer: bool,
    ) -> None:
        law.check(0.0, 1.0)
        self.law, self.most, self.within_buffer = law, 1.0, within_buffer
        self.device, self._smallest = device, smallest
        self.limit = 2**63 - 1
        self._models = _outputs(0, law.dtype)
        self._same: tuple[tuple[float, int], torch.Tensor] | None = None
        self.log = ChangeLog(1)
        self.truncations = 0  # number of calls of ``truncate`` that forgot rows
        self.column: PriorityColumn | None = None
        self.inherit: Callable[[Storage, Array, Lost | None], None] | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all rows, and allocate memory again at the next use."""
        self.length, self.capacity, self.process = 0, 1, 0
        self._raw = torch.empty(0, dtype=self.law.dtype, device="cpu")
        # Saved priorities that are still in their file, and the name of the file.
        self._unread: tuple[torch.Tensor, str] | None = None
        # The place in the storage's log at the last use; None if the rows of the table are the
        # stored ones.
        self._seen: tuple[int, int] | None = None

    # Collectors often run in inference mode. Tensors created there cannot be changed outside it.
    @torch.inference_mode(False)
    def _allocate(self, capacity: int) -> None:
        options: dict[str, Any] = {"dtype": self.law.dtype, "device": self.device}
        raw = torch.full((capacity,), -1.0, **options)
        sums = SumSegmentTree(capacity, **options)
        least = MinSegmentTree(capacity, **options) if self._smallest else None
        greatest = MaxSegmentTree(capacity, **options) if self.within_buffer else None
        self.capacity, self.process = capacity, os.getpid()
        self.log.rows = capacity
        self.log.edit(None)
        self._saved, self._marked = Changes(capacity, raw.element_size()), self.log.number
        self._raw, self._sums, self._least, self._greatest = raw, sums, least, greatest

    # -- following the storage ----------------------------------------------------------------

    def follow(self, storage: Storage | None, count: int | None = None) -> PriorityTable:
        """Return the table itself, with a priority for each row that is stored now.

        Args:
            count: the number of stored rows, if the caller knows it.

        Raises:
            CheckpointError: a file of a checkpoint holds values that are not priorities.
        """
        if self._unread is not None:
            self.read()
        if self.process != os.getpid():
            self._begin()
        if storage is not None:
            self.limit = storage.max_size
            count, seen = len(storage) if count is None else count, self._seen
            newest = None if self.inherit is None else self._newest_at(storage, seen)
            if self._seen is not None and self._seen[0] < storage.ledger.log.removed:
                self._follow_removals(storage, self._seen[0])
            if count < self.length:
                self.truncate(count)
            if self._seen is None or self._seen[0] != storage.ledger.log.number:
                self._give_written(storage, count)
            if count > self.length:
                self.cover(count, self.default)
            if self.inherit is not None and seen is not None and seen != self._seen:
                self.inherit(storage, storage.ledger.written_since(seen)[1], newest)
        return self

    def _newest_at(self, storage: Storage, seen: tuple[int, int] | None) -> Lost | None:
        """Return the priorities ``[lanes]`` of the newest rows at a place in the log.

        Return None unless these rows were in a ring and are gone now.
        """
        ledger, lanes = storage.ledger, storage.lanes.numel()
        behind = 0 if seen is None else ledger.next_position - seen[1]
        streams = getattr(storage, "lane_key", None) is not None
        if behind < ledger.slots or streams or not ledger.in_order:
            return None
        first = (ledger.cursor - 1 - behind) % ledger.slots * lanes
        raw = self.raw[first : first + lanes].clone()
        return (behind, raw) if len(raw) == lanes else None

    def _begin(self) -> None:
        """Allocate memory at the first use, and again in a forked process.

        At the fork, a thread of the parent may have held the locks of the trees, or may have been
        changing them. The child does not have that thread.
        """
        if self.column is not None:
            self.column.direct = None  # after a fork it belongs to the parent
        self._refill(self.priorities, self.capacity)

    def _give_written(self, storage: Storage, count: int) -> None:
        """Give the default to rows that were written since the last use."""
        cleared, slots = storage.ledger.written_since(self._seen)
        if cleared:
            self.truncate(0)
        elements = elements_of(slots, storage.lanes.numel())
        elements = elements[elements < count]
        if len(elements):
            self.give_default(torch.from_numpy(elements), count)
        self.skip(storage)

    def _follow_removals(self, storage: Storage, seen: int) -> None:
        """Let priorities move with their rows; after too many changes all rows get the default."""
        changes = storage.ledger.log.since(seen)
        if changes is None:
            self.truncate(0)
        for change in changes or ():
            removal, top = change.removal, self.length
            if removal is not None:
                source, target = map(torch.from_numpy, (removal.source, removal.target))
                if len(source):
                    moved = self._raw[source.to(self.device)]
                    self.set(target.to(self.device), moved, top)
                self.truncate(removal.length)
            elif change.kind is ChangeKind.CLEAR:
                self.truncate(0)
            elif change.kind in (ChangeKind.APPEND, ChangeKind.PLACE):
                slots = change.in_ring(storage.ledger.slots)
                self.give_default(torch.from_numpy(slots), max(top, int(slots.max()) + 1))
        self.skip(storage)

    def skip(self, storage: Storage | None) -> None:
        """Count all rows that are stored now as rows with priorities."""
        self._seen = None if storage is None else storage.ledger.place_in_log

    @property
    def default(self) -> float:
        """Raw priority of new rows: the largest ever set, or the largest stored.

        It is 1 before any priority was set.
        """
        return self.largest() if self.within_buffer else self.most

    def give_default(self, elements: torch.Tensor, top: int) -> None:
        """Give the default to rows, and to unset rows below ``top``.

        Args:
            elements: flat indices below ``top``, int64 ``[K]``, K at least 1.
        """
        if not self.within_buffer and self._set_same(elements, self.most, top):
            return
        elements = elements.to(self.device)
        if self._greatest is not None and self.length:  # the old priorities do not count
            self._greatest.update(elements[elements < self.length], float("-inf"))
        default = self.default
        self.set(elements, default, top)
        self.cover(top, default)

    # -- setting ------------------------------------------------------------------------------

    def set(self, index: torch.Tensor, priority: torch.Tensor | float, top: int) -> None:
        """Set allowed priorities. If a row occurs several times, the last one counts.

        Args:
            index: flat indices, int64 ``[K]``, in ``[0, top)``, on the table's device.
            priority: in the law's dtype, ``[K]`` on the table's device, or one number for all rows.
            top: a bound above every index. If it exceeds ``length``, the caller calls ``cover``
                next.

        Cost: O(K log capacity).
        """
        self.reserve(top)
        if isinstance(priority, float):
            value: torch.Tensor | float = self.law.value_of(priority)
        else:
            if not index.is_cpu:
                index, priority = last_of_each(index, priority)
            value = self.law.values(priority)
        # This call checks its arguments again, so it comes first. If it raises, nothing has
        # changed.
        self._sums.update(index, value)
        if self._least is not None:
            self._least.update(index, self.law.positive(value))
        if self._greatest is not None:
            self._greatest.update(index, priority)
        if self._saved.frozen:
            self._saved.wrote_at(index)
        if not index.is_cpu:
            self._raw[index] = priority
        else:
            # NumPy assigns in order, so the last of several equal indices counts.
            new = priority if isinstance(priority, float) else priority.numpy()
            self._raw.numpy()[index.numpy()] = new
        self._log_set(index, priority)

    def _log_set(
        self, index: torch.Tensor, priority: torch.Tensor | float, *, written: bool = False
    ) -> None:
        """Log the rows ``[K]`` whose priorities were set, and write them to the column.

        ``written``: whether the core has written them to the column.
        """
        column, at = self.column, index.numpy() if index.is_cpu else index.clone()
        try:
            self.log.edit(at)
            if column is not None and written:
                column.written = True
            elif column is not None:
                column.set(at, priority)
        except BaseException:  # the priorities are already set
            self.log.edit(None)
            if column is not None:
                column.whole = True
            raise

    def set_since(self, seen: int) -> list[torch.Tensor] | None:
        """Return the rows whose priorities were set since ``seen``; None if any may have been.

        Args:
            seen: a value of ``log.number``.
        """
        slots = self.log.slots_since(seen)
        if slots is None:
            return None
        return [torch.as_tensor(part, device=self.device) for part in slots]

    def set_plain(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        generation: torch.Tensor | None,
        ledger: Ledger,
    ) -> bool:
        """Check and set priorities in one call of the core, if they need no conversion.

        The index must be int64 ``[K]`` of stored slots. The priorities must be ``[K]`` in the law's
        dtype, finite, not negative, and allowed by the law. If generations are given, the slots
        must still have these generations.

        Returns:
            False if a condition fails. No priority has changed then.
        """
        view = self._sums.native_view
        if view is None or type(index) is not torch.Tensor or ledger.length != self.length:
            return False
        count, dtype = index.shape[0] if index.ndim else 0, self.law.dtype
        if not (
            count
            and as_it_is(index, torch.int64, count)
            and as_it_is(priority, dtype, count)
            and not priority.is_neg()
            and not priority.requires_grad
        ):
            return False
        then = 0
        if generation is not None:
            if ledger.generation_table is not None or not as_it_is(generation, torch.int64, count):
                return False
            then = generation.data_ptr()
        if self._saved.frozen:  # a save needs the old values first, even if the core then refuses
            self._saved.wrote_at(index.clamp(0, self.length - 1))
        return self._set_in_core(
            index, priority, then, self.length, ledger.next_position, ledger.slots
        )

    def _set_same(self, index: torch.Tensor, priority: float, top: int) -> bool:
        """Give rows one priority in one call of the core, and cover the rows below ``top``.

        Args:
            index: slots below ``top``, int64 ``[K]``, contiguous on the CPU.
            priority: an allowed priority.

        Returns:
            False if the index has another form, or the core refuses it. No priority has changed
            then.
        """
        count = index.numel()
        if self._sums.native_view is None or self._saved.frozen:
            return False
        if not count or not as_it_is(index, torch.int64, count):
            return False
        self.reserve(top)
        same = self._same  # another thread may replace it
        if same is None or same[0] != (priority, count):
            full = torch.full((count,), priority, dtype=self.law.dtype, device="cpu")
            same = self._same = (priority, count), full
        if not self._set_in_core(index, same[1], 0, top, 0, 1):
            return False
        if top > self.length:
            self.cover(top, priority)
        return True

    def _set_in_core(
        self,
        index: torch.Tensor,
        priority: torch.Tensor,
        then: int,
        length: int,
        written: int,
        slots: int,
    ) -> bool:
        """Set priorities in the trees, the table and the column, and log them.

        Args:
            index, priority: int64 ``[K]`` below ``length``, and ``[K]`` in the law's dtype, both
                contiguous on the CPU.
            then: the address of the generations of the slots; 0 for no check.
            written, slots: the ledger's next row id and its number of slots.

        Returns:
            False if the core refuses. No priority has changed then.
        """
        law, least, greatest, column = self.law, self._least, self._greatest, self.column
        direct = 0 if column is None or column.whole else column.direct or 0
        largest: float = self._sums.native_view.set_priorities(
            0 if least is None else least.native_view,
            0 if greatest is None else greatest.native_view,
            direct,
            self._raw.data_ptr(),
            law.dtype is torch.float64,
            index.data_ptr(),
            priority.data_ptr(),
            then,
            index.shape[0],
            length,
            written,
            slots,
            law.eps,
            law.alpha,
            law.most,
        )
        if largest < 0:
            return False
        if largest > self.most:
            self.most = largest
        self._log_set(index, priority, written=direct != 0)
        return True

    def cover(self, top: int, default: float) -> None:
        """Count the rows below ``top`` as stored; give unset rows the default."""
        if top <= self.length:
            return
        self.reserve(top)
        start, self.length = self.length, top
        self._saved.wrote(start, top - start)
        fresh = self._raw[start:top]
        if fresh.amax().item() < 0:
            fresh.fill_(default)
            self._set_range(start, fresh)
            self.log.edit(np.arange(start, top))
            if self.column is not None:
                self.column.set(range(start, top), default)
        elif fresh.amin().item() < 0:
            self.set((fresh < 0).nonzero()[:, 0] + start, default, top)

    def truncate(self, length: int) -> None:
        """Forget the rows from ``length`` on."""
        count = self.length - length
        if count <= 0:
            return
        if self.process != os.getpid():
            self._begin()
        self._saved.wrote(length, count)
        self._raw[length : self.length] = -1.0
        self.length = length
        self.truncations += 1
        self.log.edit(np.arange(length, length + count) if count <= length else None)
        self._sums.update_range(length, 0.0, count)
        if self._least is not None:
            self._least.update_range(length, float("inf"), count)
        if self._greatest is not None:
            self._greatest.update_range(length, float("-inf"), count)

    def forget(self) -> None:
        """Forget all priorities, read or unread, and the largest priority ever set."""
        self.most, self._unread = 1.0, None
        self.truncate(0)

    def set_law(self, law: PriorityLaw) -> None:
        """Draw by another law from now on. Cost: one pass over the stored rows.

        Raises:
            ValueError: the law does not allow a stored priority; nothing has changed.
        """
        law.check(0.0, self.most)  # new rows will get this priority
        self.read()
        if self.length:
            self.follow(None)
            law.check(0.0, self.raw.amax().item())
        self.law = law
        self.log.edit(None)
        if self.length:
            self._set_range(0, self.raw)

    def load(
        self,
        law: PriorityLaw,
        priorities: torch.Tensor | MappedRows,
        most: float,
        storage: Storage | None = None,
    ) -> None:
        """Replace the law, all priorities and the largest priority; or raise and change nothing.

        Args:
            priorities: allowed raw priorities, ``[N]``. MappedRows are read and checked at the next
                use.
            storage: the storage of the rows; None if it is not known.
        """
        new = object.__new__(PriorityTable)
        new.__dict__.update(self.__dict__)
        new.restart()
        new.law, new.most = law, most
        if isinstance(priorities, MappedRows):
            new._unread = priorities.spanned(), priorities.where
        else:
            new._refill(priorities, max(1, len(priorities)))
        if self.column is not None:
            self.column.whole = True
        new.skip(storage)
        self.__dict__.update(new.__dict__)

    def read(self) -> None:
        """Read saved priorities that are still in their file. Cost: O(N), once.

        Raises:
            CheckpointError: the file holds values that are not priorities.
        """
        if self._unread is None:
            return
        raw, where = self._unread
        try:
            if len(raw):
                self.law.check(*bounds(raw))
        except ValueError as error:
            text = f"the priorities of the checkpoint, in {where}: {error}"
            raise CheckpointError(text) from None
        self._refill(raw, max(1, len(raw)))
        self._unread = None

    def reserve(self, count: int) -> None:
        """Make room for ``count`` rows."""
        if count > self.capacity:
            capacity = max(count, min(self.limit, max(2 * self.capacity, _FIRST)))
            self._refill(self._raw[: self.length], capacity)

    def _refill(self, raw: torch.Tensor, capacity: int) -> None:
        self._allocate(capacity)
        self.length = len(raw)
        if self.length:
            self._raw[: self.length] = raw
            self._set_range(0, self._raw[: self.length])

    def _set_range(self, start: int, raw: torch.Tensor) -> None:
        """Set the trees to raw priorities ``[K]``, K at least 1, from ``start`` on."""
        # On the CPU, blocks stay in the cache. This takes a third of the time of a single step.
        step = _BLOCK if raw.is_cpu else len(raw)
        for at in range(0, len(raw), step):
            block = raw[at : at + step]
            values = self.law.values(block)
            self._sums.update_range(start + at, values)
            if self._least is not None:
                self._least.update_range(start + at, self.law.positive(values))
            if self._greatest is not None:
                self._greatest.update_range(start + at, block)

    def values(self, index: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the tree's ``v``, for indices ``[K]`` or all stored rows."""
        return self._sums[: self.length] if index is None else self._sums[index]

    # -- reading ------------------------------------------------------------------------------

    @property
    def raw(self) -> torch.Tensor:
        """A read-only view of the stored rows' raw priorities: ``[length]``."""
        return self._raw[: self.length]

    @property
    def priorities(self) -> torch.Tensor:
        """A copy of the stored rows' raw priorities: ``[length]``."""
        return self._raw[: self.length].clone()

    def tracked(self) -> TrackedTensor:
        """Return the raw priorities without a copy, for a save. The caller holds the lock."""
        index = self.set_since(self._marked)
        if index is None:
            self._saved.wrote(0, self._saved.rows)
        elif index:
            self._saved.wrote_at(torch.cat(index))
        self._marked = self.log.number
        return TrackedTensor(self._raw[: self.length], self._saved, "raw")

    @property
    def has_smallest(self) -> bool:
        """True if the smallest positive ``v`` is known."""
        return self._smallest

    @property
    def drawable(self) -> bool:
        """True if a draw can return a row. On cuda this may wait for the device."""
        if not self.law.may_be_zero:
            return self.length > 0
        return bool(self._sums.total > 0)

    def smallest(self) -> Any:
        """Return the smallest positive ``v`` as a number; infinity if there is none.

        On devices other than the CPU, return a tensor ``[1]``, so that the call does not wait.
        """
        assert self._least is not None
        if self.device.type == "cpu":
            return self._least.reduce()
        return self._least.reduce(
            torch.zeros(1, dtype=torch.int64, device=self.device), self.capacity
        )

    def largest(self) -> float:
        """Return the largest raw priority of the stored rows; 1 if no row is stored."""
        if not self.length:
            return 1.0
        self.follow(None)
        assert self._greatest is not None
        found = float(self._greatest.reduce())
        return found if found >= 0 else 1.0  # rows that get the default now do not count

    def draw(
        self,
        batch_size: int,
        generator: torch.Generator | None,
        stratified: bool,
        sums: SumSegmentTree | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw by ``v``; return flat indices int64 ``[B]`` and their ``v`` in float64.

        A generator on another device creates the random numbers there. They are then moved to the
        table's device.

        Args:
            sums: a tree over ``v`` of the rows to draw from; None: all rows.
        """
        sums = self._sums if sums is None else sums
        if generator is None or generator.device.type == self.device.type:
            return sums.draw(batch_size, generator=generator, stratified=stratified)
        uniform = torch.rand(
            batch_size, dtype=torch.float64, generator=generator, device=generator.device
        )
        return self.find(uniform, stratified, sums)

    def draw_weighted(
        self,
        batch_size: int,
        generator: torch.Generator | None,
        stratified: bool,
        beta: float,
        ledger: Ledger | None,
        sums: SumSegmentTree | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Draw indices with weights and generations, in one call of the core if it can.

        Args:
            ledger: the ledger of a storage without lanes. Without a ledger, or if it has tables,
                the draw returns None instead of generations.
            sums: as for ``draw``.
        """
        sums, dtype = self._sums if sums is None else sums, self.law.dtype
        if sums.native_view is None or (generator is not None and generator.device.type != "cpu"):
            index, value = self.draw(batch_size, generator, stratified, sums)
            return index, self.weights(value, beta), None
        models = self._models
        if models[0].numel() != batch_size:
            models = self._models = _outputs(batch_size, dtype)
        # ``empty_like`` takes half the time of ``empty`` with a shape and a dtype.
        index, weight = torch.empty_like(models[0]), torch.empty_like(models[1])
        generation, then, written, slots = None, 0, 0, 1
        if ledger is not None and ledger.generation_table is None:
            generation = torch.empty_like(index)
            then, written, slots = generation.data_ptr(), ledger.next_position, ledger.slots
        uniform = models[2].uniform_(generator=generator)  # no caller keeps it
        sums.native_view.draw_weighted(
            uniform.data_ptr(),
            batch_size,
            index.data_ptr(),
            stratified,
            0 if self._least is None else self._least.native_view,
            beta,
            weight.data_ptr(),
            dtype is torch.float64,
            then,
            written,
            slots,
        )
        return index, weight, generation

    def weights(self, value: torch.Tensor, beta: float) -> torch.Tensor:
        """Return ``priority_weight`` of a batch with these ``v``, float64 ``[B]``."""
        smallest = value.amin() if self._least is None else self.smallest()
        return importance_weights(value, smallest, beta, self.law.dtype)

    def find(
        self, uniform: torch.Tensor, stratified: bool, sums: SumSegmentTree | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of ``draw`` for these random numbers in ``[0, 1)``."""
        sums = self._sums if sums is None else sums
        uniform = uniform.to(self.device)
        if stratified:
            strata = torch.full_like(uniform, len(uniform))
            uniform = (torch.arange(len(uniform), device=self.device) + uniform) / strata
        # A number that was rounded up to 1 would be beyond the last part of the sum.
        below_one = uniform.clamp(max=math.nextafter(1.0, 0.0))
        return sums.find(below_one * sums.total_tensor())

    # -- pickling -----------------------------------------------------------------------------

    def emptied(self) -> PriorityTable:
        """Return a table without rows, with the same law and the same default."""
        table = PriorityTable(
            self.law, self.device, smallest=self._smallest, within_buffer=self.within_buffer
        )
        table.most = self.most
        return table

    def __getstate__(self) -> dict[str, Any]:
        self.read()  # a copy does not share the file
        names = ("law", "most", "within_buffer", "device", "limit", "_smallest", "_seen")
        return {"raw": by_value(self.priorities), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        raw, seen = from_value(state.pop("raw")), state.pop("_seen")
        self.__dict__.update(state)
        self._models, self._same = _outputs(0, self.law.dtype), None
        self.log, self.column, self.inherit = ChangeLog(1), None, None
        self.truncations = 0
        self.restart()
        self._seen = seen
        if len(raw):
            self._refill(raw, len(raw))


@torch.inference_mode(False)
def _outputs(batch_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the models for the slots and weights of a batch, and room for random numbers."""
    dtypes = torch.int64, dtype, torch.float64
    return tuple(torch.empty(batch_size, dtype=each, device="cpu") for each in dtypes)
