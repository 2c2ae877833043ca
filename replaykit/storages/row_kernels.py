"""Copy rows in the compiled core or in torch, also with the rows before them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, lookup
from replaykit.native import row_stride
from replaykit.storages.indexing import unravel_index
from replaykit.storages.memory import carried
from replaykit.storages.records import RecordLayout, alone, plan_records
from replaykit.structure import Path
from replaykit.transfer import REUSED_FROM

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns

_THREADS_FROM = 2**20
"""Bytes of a batch from which on several threads are faster."""


_COLD_BATCHES = 16
"""Number of batches whose pages are requested, after a batch partly from disk.

The requests take 256 calls per batch. Without them, a missing page causes a read of 128 KiB or
more, which also evicts other pages.
"""

_MODEL_BYTES = 2**18
"""Most bytes of leaves that serve as templates for the next batch. Templates halve the time to make
leaves."""


_PLANS = 8
"""Most plans of sums over steps in the cache."""

_CPU = torch.device("cpu")
"""Passed to each allocation, because torch would use the caller's default device."""


class NativeRows:
    """Addresses of the columns, in the form that the core uses.

    Rows are elements here. With lanes, the elements of a time slot are consecutive.
    """

    @classmethod
    def over(cls, columns: Columns) -> NativeRows | None:
        """Return the addresses of columns, or None if the core cannot copy their rows.

        The core needs columns on the CPU. The values of each row must be contiguous, and elements
        must be at equal distances.
        """
        if columns.device.type != "cpu":
            return None
        strides = [row_stride(tensor, columns.ndim) for tensor in columns.tensors.values()]
        if any(stride is None for stride in strides):
            return None
        return cls(columns, dict(zip(columns.tensors, strides, strict=True)))

    def __init__(self, columns: Columns, strides: dict[Path, Any]) -> None:
        self.columns = columns.tensors
        self.strides = strides
        self._owner = columns
        self._cold = 0
        self.ndim = columns.ndim
        self.cells = columns.lanes.numel()
        self.elements = columns.slots * self.cells
        # A batch has records even if the stored rows are in columns.
        self.batch_layout: RecordLayout | None = columns.layout or plan_records(columns.schema)
        self._alone = alone(self.columns, self.batch_layout)
        self._shapes = {path: t.shape[columns.ndim :] for path, t in self.columns.items()}
        self._dtypes = {path: tensor.dtype for path, tensor in self.columns.items()}
        self.sizes = {
            path: self._shapes[path].numel() * t.dtype.itemsize for path, t in self.columns.items()
        }
        self.order = [*(self.batch_layout.offsets if self.batch_layout else ()), *self._alone]
        self._row_bytes = sum(self.sizes.values())
        self._records = columns.records
        self._only_records = columns.records is not None and not self._alone
        self.point()

    def point(self) -> None:
        """Update the addresses of the columns."""
        tensors, sizes, strides = self.columns, self.sizes, self.strides
        self._some: dict[tuple[Path, ...], tuple[Any, list[int]]] = {}
        self._plans: dict[int, tuple[StepsPlan, StepsAhead | None]] = {}
        self._models: dict[tuple[Path, ...], list[torch.Tensor]] = {}
        self._leaves, self.leaf_sizes = self.table(tuple(tensors))
        bases, steps, widths, self._batch_strides = [], [], [], []
        self._block_offsets: list[int] = []
        if self.batch_layout is not None:
            stride = self.batch_layout.stride
            if self._records is not None:
                bases, steps, widths = [self._records.data_ptr()], [stride], [stride]
                self._block_offsets = [0]
            else:
                offsets = self.batch_layout.offsets
                bases = [tensors[path].data_ptr() for path in offsets]
                steps = [strides[path] for path in offsets]
                widths = [sizes[path] for path in offsets]
                self._block_offsets = [*offsets.values()]
            self._batch_strides = [stride] * len(bases)
        for path in self._alone:
            bases.append(tensors[path].data_ptr())
            steps.append(strides[path])
            widths.append(sizes[path])
            self._batch_strides.append(sizes[path])
        self._rows = native.Table(bases, steps, widths, self.elements)

    def gather(self, rows: torch.Tensor, limit: int, contiguous: bool) -> Sequence[torch.Tensor]:
        """Copy elements ``[B]`` into new leaves ``[B, *F]``, in ``order``.

        Small leaves are strided views of one allocation, unless ``contiguous`` is set.

        Raises:
            IndexError: an element is outside ``[0, limit)``.
        """
        self._owner.refresh_addresses()
        if rows.dtype is not torch.int64 or not rows.is_cpu or not rows.is_contiguous():
            rows = rows.to("cpu", torch.int64).contiguous()
        count = rows.shape[0]
        if contiguous:
            return self._gather_apart(tuple(self.order), rows, limit)
        layout = self.batch_layout
        if self._only_records and layout is not None:
            block = layout.new_block(count, self._owner.batch_memory)
            self._move(self._rows, rows, limit, [block.data_ptr()], self._batch_strides)
            return layout.split(block)
        leaves, to = self._new_batch(count)
        self._move(self._rows, rows, limit, to, self._batch_strides)
        return leaves

    def _new_batch(self, count: int) -> tuple[list[torch.Tensor], list[int]]:
        """Return leaves with small ones in records, and the addresses for ``_rows``."""
        leaves = [self._fresh(path, count) for path in self._alone]
        to = [leaf.data_ptr() for leaf in leaves]
        layout = self.batch_layout
        if layout is None:
            return leaves, to
        block = layout.new_block(count, self._owner.batch_memory)
        base = block.data_ptr()
        to = [base + offset for offset in self._block_offsets] + to
        return [*layout.split(block), *leaves], to

    def _gather_apart(
        self, paths: tuple[Path, ...], rows: torch.Tensor, limit: int
    ) -> list[torch.Tensor]:
        """Gather some leaves, each into a contiguous tensor."""
        (table, sizes), count = self.table(paths), rows.shape[0]
        leaves = self._fresh_leaves(paths, count)
        self._move(table, rows, limit, [leaf.data_ptr() for leaf in leaves], sizes)
        return leaves

    def begin(
        self, rows: torch.Tensor, limit: int, contiguous: bool
    ) -> tuple[Sequence[torch.Tensor], Any]:
        """Begin a ``gather`` in the background.

        Returns:
            The leaves, and an object. The caller must call its ``wait()`` before it uses the
            leaves. Writes to the columns also wait for the gather.

        Raises:
            IndexError: an element is outside ``[0, limit)``.
        """
        self._owner.refresh_addresses()
        changes = self._owner.changes
        if changes.reads is None:
            changes.reads = native.core.Reads()
        if rows.dtype is not torch.int64 or not rows.is_cpu or not rows.is_contiguous():
            rows = rows.to("cpu", torch.int64).contiguous()
        count, table, strides = rows.shape[0], self._rows, self._batch_strides
        if contiguous:
            table, strides = self.table(tuple(self.order))
            leaves = [self._fresh(path, count) for path in self.order]
            to = [leaf.data_ptr() for leaf in leaves]
        else:
            leaves, to = self._new_batch(count)
        kept = leaves, self.columns, self._records
        at, threads = rows.data_ptr(), torch.get_num_threads()
        return leaves, changes.reads.begin(table, at, count, limit, to, strides, threads, kept)

    def gather_some(self, paths: tuple[Path, ...], rows: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Copy some leaves of elements ``[B]`` into new contiguous tensors.

        Raises:
            IndexError: an element is outside the columns.
        """
        self._owner.refresh_addresses()
        if rows.dtype is not torch.int64 or not rows.is_cpu or not rows.is_contiguous():
            rows = rows.to("cpu", torch.int64).contiguous()
        return dict(zip(paths, self._gather_apart(paths, rows, self.elements), strict=True))

    def table(self, paths: tuple[Path, ...]) -> tuple[Any, list[int]]:
        """Return a table of some leaves, and the bytes of each.

        The table is valid until the columns move.
        """
        known = self._some.get(paths)
        if known is None:
            sizes = [self.sizes[path] for path in paths]
            bases = [self.columns[path].data_ptr() for path in paths]
            strides = [self.strides[path] for path in paths]
            known = self._some[paths] = (
                native.Table(bases, strides, sizes, self.elements),
                sizes,
            )
        return known

    def steps_ahead(self, plan: StepsPlan) -> StepsAhead | None:
        """Return the object for a plan of sums over steps, cached until the columns move.

        Return None if the core cannot compute the sums.
        """
        self._owner.refresh_addresses()
        known = self._plans.get(id(plan))
        if known is None or known[0] is not plan:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            known = self._plans[id(plan)] = plan, StepsAhead.over(self, plan)
        return known[1]

    def _fresh(self, path: Path, count: int) -> torch.Tensor:
        shape = (count, *self._shapes[path])
        if count * self.sizes[path] >= REUSED_FROM:
            return self._owner.batch_memory.new(shape, self._dtypes[path])
        return torch.empty(shape, dtype=self._dtypes[path], device=_CPU)

    def _fresh_leaves(self, paths: tuple[Path, ...], count: int) -> list[torch.Tensor]:
        models = self._models.get(paths)  # another thread may replace them
        if models is None or models[0].shape[0] != count:
            leaves = [self._fresh(path, count) for path in paths]
            if sum(leaf.nbytes for leaf in leaves) > _MODEL_BYTES:
                return leaves
            models = self._models[paths] = leaves
        return [torch.empty_like(model) for model in models]

    def _move(
        self, table: Any, rows: torch.Tensor, limit: int, to: list[int], strides: list[int]
    ) -> None:
        count, mapped, at = rows.shape[0], self._owner.advise, rows.data_ptr()
        threads = torch.get_num_threads() if count * self._row_bytes >= _THREADS_FROM else 1
        cold = table.gather(at, count, limit, to, strides, threads, mapped, self._cold > 0)
        if mapped:
            self._cold = _COLD_BATCHES if cold else max(0, self._cold - 1)

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        """Write elements ``skipped .. count``, which are contiguous from each address.

        Return False if some of them may lie in the columns.
        """
        threads = torch.get_num_threads() if count * self._row_bytes >= _THREADS_FROM else 1
        written: bool = self._leaves.scatter_ring(
            first, count - skipped, skipped, addresses, threads
        )
        return written

    def scatter(self, slots: torch.Tensor, sources: Mapping[Path, torch.Tensor]) -> bool:
        """Write time slots ``[K]`` from leaves ``[K, *lanes, *F]``.

        Return False if the core cannot.
        """
        rows = slots
        if self.cells > 1:
            rows = (
                slots[:, None] * self.cells + torch.arange(self.cells, device=slots.device)
            ).reshape(-1)
        if rows.dtype is not torch.int64 or not rows.is_cpu or not rows.is_contiguous():
            rows = rows.to("cpu", torch.int64).contiguous()
        plain = [sources[path].contiguous() for path in self.columns]
        if any(not leaf.is_cpu or leaf._is_zerotensor() for leaf in plain):
            return False
        addresses = [leaf.data_ptr() for leaf in plain]
        threads = torch.get_num_threads() if len(rows) * self._row_bytes >= _THREADS_FROM else 1
        self._leaves.scatter(rows.data_ptr(), len(rows), addresses, self.leaf_sizes, threads)
        return True


_ENOUGH_BYTES = 2**23
"""Bytes for each thread, whose copy takes a hundred times as long as its start."""
_BLOCK_BYTES = 2**22
_MOST_THREADS = 4


def gather(columns: Columns, rows: torch.Tensor, contiguous: bool) -> list[torch.Tensor]:
    """Copy all leaves of elements ``[B]`` into new leaves ``[B, *F]``, in the columns' order.

    Records are copied as whole words.

    Args:
        columns: the columns of the rows.
        rows: the elements, on the columns' device.
        contiguous: whether to make each leaf contiguous.
    """
    columns.refresh_addresses()
    found: dict[Path, torch.Tensor] = {}
    layout, records, ndim = columns.layout, columns.records, columns.ndim
    if layout is not None and records is not None:
        words = records.view(layout.word).flatten(0, ndim - 1)
        block = layout.as_block(words.index_select(0, rows))
        leaves = layout.split(block)
        if contiguous:
            leaves = [leaf.contiguous() for leaf in leaves]
        found.update(zip(layout.offsets, leaves, strict=True))
    found |= gather_some(columns, [path for path in columns.tensors if path not in found], rows)
    return [found[path] for path in columns.order]


def gather_some(
    columns: Columns, paths: Sequence[Path], elements: torch.Tensor
) -> dict[Path, torch.Tensor]:
    """Copy some leaves of stored elements ``[B]`` into new tensors."""
    columns.refresh_addresses()
    found, rows, ndim = {}, elements.to(columns.device), columns.ndim
    for path in paths:
        column = columns.tensors[path]
        source = carried(column)
        if ndim == 1 or source.is_contiguous():
            values = source.flatten(0, ndim - 1).index_select(0, rows)
        else:
            values = source[unravel_index(rows, columns.lanes).unbind(-1)]
        found[path] = values.view(column.dtype)
    return found


def scatter(
    columns: Columns,
    slots: torch.Tensor,
    runs: Sequence[tuple[int, int, int]] | None,
    sources: Mapping[Path, torch.Tensor],
    block: torch.Tensor | None = None,
) -> None:
    """Write leaves ``[K, *F]`` to distinct slots ``[K]`` of dimension 0.

    Args:
        columns: the target.
        slots: the slots, which must be on the columns' device if ``runs`` is None.
        runs: the slots as runs, the result of ``runs_of``; or None.
        sources: the leaves by path.
        block: records of all leaves that are not in ``sources``, uint8 ``[K, *lanes, stride]``. If
            they are not on the columns' device, they are in pinned memory.
    """
    pairs = [(carried(columns.tensors[path]), source) for path, source in sources.items()]
    if block is not None:
        assert columns.records is not None
        pairs.append((columns.records, block))
    for target, source in pairs:
        if runs is None:
            target[slots] = source
            continue
        for first, start, stop in runs:
            rows = source if len(runs) == 1 else source[start:stop]
            target[first : first + stop - start].copy_(rows, non_blocking=target.is_cuda)


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows; on the CPU without torch's threads, which wait for each other.

    If there are many rows, independent threads copy them block by block. The first write to a page
    waits until the kernel allocates the page, which may take longer than the copy.
    """
    plain = not (source.is_conj() or source.is_neg()) and target.dtype is not torch.bfloat16
    if not (target.is_cpu and source.is_cpu and plain):
        target.copy_(source)
        return
    to, values = target.numpy(), source.detach().numpy()
    threads = min(os.cpu_count() or 1, _MOST_THREADS, to.nbytes // _ENOUGH_BYTES)
    if threads < 2:
        np.copyto(to, values)
        return
    rows = max(1, _BLOCK_BYTES * len(to) // to.nbytes)
    blocks = [slice(first, first + rows) for first in range(0, len(to), rows)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda block: np.copyto(to[block], values[block]), blocks):
            pass


Array = np.ndarray[Any, Any]


class Before(NamedTuple):
    """Rows, and for each row the first row before it that may be copied.

    The arrays are NumPy int64 ``[B]``.

    Attributes:
        element: the stored rows, as elements.
        time: the times of the rows.
        begin: for each row, the time of the first row to copy. A value below ``lowest`` is replaced
            by ``lowest``.
        lowest: the lowest time of any row to copy.
    """

    element: Array
    time: Array
    begin: Array
    lowest: int


class _Plan(NamedTuple):
    """A plan for copying some leaves.

    Attributes:
        models: empty stacks of one number of rows, as templates.
        places: for each frame, the index of its stack, and the byte of the frame in a row of this
            stack. All frames of a leaf precede the frames of the next leaf.
        strides: for each frame, the bytes from row to row in its stack.
        nbytes: bytes of all frames of a row.
    """

    models: list[torch.Tensor]
    places: list[tuple[int, int]]
    strides: list[int]
    nbytes: int


class Frames:
    """Rows and the rows before them, copied out of columns in one step.

    A frame is the value of a leaf in one row. If the row of a frame precedes the first row to copy,
    the frame is a copy of that first row, or zeros.

    Args:
        columns: the columns, on the CPU and not in mapped files.
        rows: the addresses of these columns.
    """

    def __init__(self, columns: Columns, rows: NativeRows) -> None:
        self._columns, self._rows = columns, rows
        self._plans: dict[Any, _Plan | None] = {}

    def stacks(
        self, paths: tuple[Path, ...], rows: Before, count: int, *, zero: bool
    ) -> dict[Path, torch.Tensor] | None:
        """Return ``count`` frames for each row, the oldest first: ``[B, count, *F]`` by path.

        The result is None if a leaf is missing.

        Args:
            zero: fill missing frames with zeros.
        """
        key, number = (paths, count), rows.element.shape[0]
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        plan = self._plans[key]
        if plan is None:
            return None
        self._columns.refresh_addresses()
        table, _ = self._rows.table(paths)
        if plan.models[0].shape[0] != number:
            fresh = [model.new_empty((number, *model.shape[1:])) for model in plan.models]
            plan = self._plans[key] = plan._replace(models=fresh)  # another thread may do the same
        memory, threads = self._columns.batch_memory, 1
        if number * plan.nbytes >= REUSED_FROM:
            made = [memory.new(model.shape, model.dtype) for model in plan.models]
            threads = torch.get_num_threads()
        else:
            made = [torch.empty_like(model) for model in plan.models]
        bases = [leaf.data_ptr() for leaf in made]
        to = [bases[leaf] + byte for leaf, byte in plan.places]
        table.frames(*rows, self._rows.cells, count, zero, to, plan.strides, threads)
        return dict(zip(paths, made, strict=True))

    def _plan(self, paths: tuple[Path, ...], count: int) -> _Plan | None:
        """Return a plan; None if a leaf is missing."""
        tensors = self._columns.tensors
        if not all(path in tensors for path in paths):
            return None
        leaves = [tensors[path] for path in paths]
        shapes = [leaf.shape[self._columns.ndim :] for leaf in leaves]
        sizes = [leaf.dtype.itemsize * s.numel() for leaf, s in zip(leaves, shapes, strict=True)]
        models = [
            torch.empty((1, count, *shape), dtype=leaf.dtype, device="cpu")
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        places = [(at, j * size) for at, size in enumerate(sizes) for j in range(count)]
        strides = [count * size for size in sizes for _ in range(count)]
        return _Plan(models, places, strides, count * sum(sizes))


_MOST_BYTES = 2**20
"""Bytes of the largest batch for which one thread is enough."""


class StepsPlan(NamedTuple):
    """The rewards to sum, and the leaves to copy from the last step.

    Attributes:
        reward: the leaf to sum, with one number per row.
        flag: a leaf to read at the last step, or None.
        taken: the leaves of the batch that are replaced by the values at the last step.
        gamma: the discount of one step.
        discounts: the discounts after 1, 2, ... steps. There is one discount for each step, up to
            the largest number of steps.
    """

    reward: Path
    flag: Path | None
    taken: tuple[Path, ...]
    gamma: float
    discounts: tuple[float, ...]


class Led(NamedTuple):
    """The results of ``StepsAhead.lead``.

    Attributes:
        sums: the sums ``[B, *F]``, like the reward.
        discounts: the discount after the last step, ``[B, 1]`` in the dtype of the reward.
        used: int64 ``[B, 1]``, the number of summed steps.
        ends: int64 ``[B]``, the time of the last step.
        open: bool ``[B, 1]``, True if the flag is not set at the last step. None if the flag is not
            one bool per row.
    """

    sums: torch.Tensor
    discounts: torch.Tensor
    used: torch.Tensor
    ends: Array
    open: torch.Tensor | None


class StepsAhead:
    """A plan with the addresses of its leaves, valid until the leaves move in memory."""

    @classmethod
    def over(cls, rows: NativeRows, plan: StepsPlan) -> StepsAhead | None:
        """Return an object if the reward is one float32 or float64 per row, else None."""
        reward = rows.columns.get(plan.reward)
        if reward is None or reward.dtype not in (torch.float32, torch.float64):
            return None
        return None if reward.shape[rows.ndim :].numel() != 1 else cls(rows, plan)

    def __init__(self, rows: NativeRows, plan: StepsPlan) -> None:
        tensors = [rows.columns[path] for path in plan.taken]
        sizes = [rows.sizes[path] for path in plan.taken]
        reward = rows.columns[plan.reward]
        self._taken = plan.taken
        flag, between = 0, 0
        if plan.flag is not None and plan.flag in rows.columns:
            found = rows.columns[plan.flag]
            if found.dtype is torch.bool and rows.sizes[plan.flag] == 1:
                flag, between = found.data_ptr(), rows.strides[plan.flag]
        self._flagged = bool(flag)
        self._row_bytes = sum(sizes)
        # Offsets of the leaves from the first leaf, if all are in the same record of a batch.
        self._offsets: list[int] | None = None
        layout = rows.batch_layout
        if layout is not None and plan.taken and all(p in layout.offsets for p in plan.taken):
            start = layout.offsets[plan.taken[0]]
            self._offsets = [layout.offsets[path] - start for path in plan.taken]
            self._first_bytes, self._stride = sizes[0], layout.stride
            self._strides = [layout.stride] * len(sizes)
        self._core = native.core.StepsAhead(
            reward.data_ptr(),
            rows.strides[plan.reward],
            reward.dtype is torch.float64,
            flag,
            between,
            [tensor.data_ptr() for tensor in tensors],
            [rows.strides[path] for path in plan.taken],
            sizes,
            rows.elements,
            rows.cells,
            plan.gamma,
            plan.discounts,
        )
        self._feature, self._dtype = reward.shape[rows.ndim :], reward.dtype
        self._models = self._new(1)

    def _new(self, count: int) -> list[torch.Tensor]:
        models = [
            torch.empty((count, *self._feature), dtype=self._dtype, device="cpu"),
            torch.empty((count, 1), dtype=self._dtype, device="cpu"),
            torch.empty((count, 1), dtype=torch.int64, device="cpu"),
        ]
        if self._flagged:
            models.append(torch.empty((count, 1), dtype=torch.bool, device="cpu"))
        return models

    def lead(self, batch: Any, element: Array, time: Array, last: Array) -> Led | None:
        """Sum the rewards from each row on, and overwrite ``StepsPlan.taken`` in a batch.

        The leaves ``StepsPlan.taken`` of the batch get their values at the last step.

        Args:
            batch: a copy of these rows, which is changed in place; None if the plan takes no leaf.
            element: the rows to start from, int64 ``[B]``.
            time: the times of the rows, int64 ``[B]``.
            last: the times of the last rows of their episodes, int64 ``[B]``.

        Returns:
            None if the batch is not a plain TensorDict, or is so large that several threads are
            faster. Nothing has changed then.

        Raises:
            IndexError: an element is not stored, or ``last`` contradicts the stored rows.
        """
        count = len(element)
        if count * self._row_bytes > _MOST_BYTES:
            return None
        found = self._addresses(batch, count)
        if found is None:
            return None
        to, strides = found
        models = self._models  # another thread may replace them
        if models[0].shape[0] != count:
            models = self._models = self._new(count)
        sums, discounts, used, *flags = map(torch.empty_like, models)
        still_open = flags[0] if flags else None
        ends = np.empty(count, np.int64)
        self._core.run(
            element,
            time,
            last,
            ends,
            sums.data_ptr(),
            discounts.data_ptr(),
            used.data_ptr(),
            0 if still_open is None else still_open.data_ptr(),
            to,
            strides,
        )
        return Led(sums, discounts, used, ends, still_open)

    def _addresses(self, batch: Any, count: int) -> tuple[list[int], list[int]] | None:
        """Return the addresses of the batch's leaves, and the strides in bytes."""
        if not self._taken:
            return [], []
        if type(batch) is not TensorDict:
            return None
        first = lookup(batch, self._taken[0])
        if type(first) is not torch.Tensor:
            return None
        # If rows are further apart than in a separate tensor, they are in records of the known
        # layout.
        if self._offsets is not None and count > 1:
            base, between = first.data_ptr(), first.stride(0) * first.itemsize
            if between == self._stride != self._first_bytes:
                return [base + offset for offset in self._offsets], self._strides
        leaves = [lookup(batch, path) for path in self._taken]
        if any(type(leaf) is not torch.Tensor for leaf in leaves):
            return None
        return (
            [leaf.data_ptr() for leaf in leaves],
            [leaf.stride(0) * leaf.itemsize for leaf in leaves],
        )
