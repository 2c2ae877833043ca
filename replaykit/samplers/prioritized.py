"""Draw rows and slices in proportion to their priorities."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from replaykit.episodes import WINDOWS
from replaykit.episodes.episode_laws import GOES_ON
from replaykit.keywords import checked_keywords, named_after
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.prioritized_base import WithPriorities
from replaykit.samplers.priority_draws import drawn_distinct
from replaykit.samplers.priority_rules import REQUIRED
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.sampler import as_drawn, require_rows
from replaykit.samplers.slice_arguments import (
    Boundaries,
    SliceSize,
    checked_form,
    checked_span,
    one_of,
)
from replaykit.samplers.slicing import (
    RecentPriorities,
    Sliced,
    SliceRequest,
    Slicing,
    checked_markers,
    checked_recent,
    checked_short,
)
from replaykit.samplers.window_forms import SEQUENCE_ID, Cut
from replaykit.samplers.window_measures import SINGLE, index_for, refuse_nothing
from replaykit.storages import Storage
from replaykit.storages.indexing import unravel_index

__all__ = ["PrioritizedSampler", "PrioritizedSliceSampler"]


@named_after
class PrioritizedSampler(WithPriorities):
    """Draws record i with probability ``v_i / sum v``, where ``v_i = (p_i + eps) ** alpha``.

    ``p_i`` is the raw priority that ``update_priority`` or the written data gave; new records have
    ``default_priority``. Draws are independent, with replacement. Each comes with
    ``priority_weight``, ``(v_i / min v) ** -beta``, at most 1, by which a learner multiplies its
    loss to undo the preference (Schaul et al. 2016, "Prioritized Experience Replay", section 3.4:
    their ``(N P(i)) ** -beta`` over its maximum is the same number).

    Args:
        max_capacity: None: whatever the storage has. Else at least its ``max_size``.
        alpha: how much priorities count; 0: not at all. Required.
        beta: how much of the preference the weights undo; 1: all of it. Required.
        eps: added to every priority, so that 0 can still be drawn.
        dtype: of priorities and of ``priority_weight``, ``torch.float32`` or ``torch.float64``;
            sums are float64 either way.
        reduction: how several numbers under a priority key become one: "max", "min", "mean",
            "median", "sum".
        max_priority_within_buffer: ``default_priority`` is the largest priority of the records
            stored now (1 where none is), not the largest ever set (at least 1).
        device: where priorities lie; None: with the storage.
        weight_norm: "global": weights are relative to the least likely stored record that can be
            drawn; "batch": to the least likely one of the batch, which spares a tree.
        stratified: one draw from each of B equal parts of the sum. Each record comes up as often
            in the mean and with less variance; a batch is in rising order of the index.
        replacement: ``True``; no other form exists.

    Attributes:
        dropped_updates: how many entries of ``update_priority`` were left out because their record
            had been overwritten since it was sampled.

    Raises:
        TypeError: alpha or beta missing, or not a number; ``replacement=False``.
        ValueError: alpha, beta or eps negative, NaN or infinite; an unknown ``reduction`` or
            ``weight_norm``; when a buffer takes the sampler: ``max_capacity`` below the storage's.
        NotImplementedError: another dtype.

    Cost: O(B log N) for a draw and an update of B, no Python step per record. With "global" and
    float32 about 15 bytes a record, 10 with "batch". Sampling on cuda waits for the device only if
    eps is 0; an update does once if the index or the priorities lie there.

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
    prompt = True

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws by priority; returns the index and ``priority_weight`` ``[B]`` in ``dtype``.

        Raises:
            RuntimeError: nothing is stored, or every priority is 0 and eps too. NotEnoughData, a
                kind of it: no row has around it what the buffer's transforms need.
        """
        with storage.lock:
            require_rows(storage)
            if self.needs:
                table, sums = self._among_eligible(storage)
            else:
                table, sums = self._following(storage), None
                if table.law.may_be_zero and not table.drawable:
                    raise self._all_zero("stored priority")
            self._ran_out = False  # there is no pass; a flag that was set is over
            flat, weight, generation = self._drawn(storage, batch_size, table, sums)
        info = {"priority_weight": weight}
        if generation is not None:
            info["index_generation"] = generation
        home = storage.device
        if home == flat.device:
            return flat if storage.ndim == 1 else as_drawn(flat, storage), info
        return as_drawn(flat, storage), {key: value.to(home) for key, value in info.items()}

    def _among_eligible(self, storage: Storage) -> tuple[PriorityTable, SumSegmentTree]:
        """The table, and a tree of the rows that have around them what the transforms need."""
        index, law = index_for(storage), SINGLE.needing(self.needs)
        table, sums = self._eligible(storage, index, law)
        # On a device it takes a wait to know a sum; what is stored is known here.
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
                return self._following(storage).drawable
            try:
                self._among_eligible(storage)
            except RuntimeError:
                return False
            return True

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )


_DRAWS = ("iid", "stratified", "without_replacement")
_UNITS = ("step", "slice")


class PrioritizedSliceSampler(Sliced, WithPriorities):
    """Draws windows of consecutive rows, each inside one episode, by the priority of their start.

    A window starts with row i with probability ``v_i / sum v``, ``v_i = (p_i + eps) ** alpha``, the
    sum over the rows with which a window may start: those from which on their episode has L rows
    (fewer with ``strict_length=False``, a right span, or padding), and that have around them what
    the buffer's transforms need. Priorities of other rows are kept, and count again as soon as
    their rows can be starts. No draw changes a priority.

    ``priority_weight`` of all rows of a window is that of its start, ``(v_i / min v) ** -beta``,
    the smallest ``v`` over all stored rows; with ``weight_norm="batch"`` over the batch.

    With ``recent`` a share q of the slices comes from the newest windows, by the same priorities
    among these: ``P(i) = q * v_i / (sum of v over the newest) + (1 - q) * v_i / sum v``, the first
    part for the newest ones only. Weights are those of this P, however a window was drawn:
    ``(P(i) / P_low) ** -beta``, where ``P_low = (1 - q) * min v / sum v`` is that of a window which
    is not among the newest and whose start has the smallest ``v``. So these windows have the
    weights that they have without ``recent``, and newer ones smaller ones.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, weight_norm,
            device: as in ``PrioritizedSampler``.
        num_slices, slice_len: one of them; a batch of B rows has ``L = slice_len`` or
            ``B // num_slices``, and ``K = B // L`` windows.
        end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length,
            pad_output: as in ``SliceSampler``.
        span: windows may hang over the end of an episode and are then shorter. Over its start they
            may not, since they start with the row that was drawn: a UserWarning, and it is off.
        pad: None or "none": no padding; "right": windows may hang over the end and are padded.
        short, align, pad_value: how they are padded, as in ``SliceSampler``.
        unit: whose priorities ``update_tensordict_priority`` sets. "step": every row of a sample
            has its own. "slice": the largest of a window's rows is that of its start; other rows
            keep theirs. A sample then says what the start was, ``anchor_index`` and
            ``anchor_generation``.
        draw: "iid": independent draws. "stratified": one from each of K equal parts of the sum,
            also said as ``stratified=True``. "without_replacement": no start twice in a batch, each
            next one drawn from what is left.
        allow_short: of draws without replacement: fewer windows where fewer have weight.
        recent: ``(ratio, steps)``: where plain draws would see too few of the newest ``steps``
            windows of every lane (``ratio * rows per lane > steps``), and one of them has weight,
            ``ceil(ratio * K)`` slices are drawn among those; they come first.
        flat: ``False``: deliver ``[K, L]`` instead of ``[K * L]``.
        cache_values, compile: no effect.
        replacement: ``True``; see ``draw``.

    A batch says of its rows what those of ``SliceSampler`` say, besides ``priority_weight`` and
    ``index_generation``, with which updates that come too late are left out.

    Raises:
        TypeError, ValueError, RuntimeError: as ``PrioritizedSampler`` and ``SliceSampler`` do;
            ``pad="left"`` or "both"; an unknown ``unit`` or ``draw``.

    Cost: O(B + K log N), and O(c log N) for c rows written or updated since the last draw. With
    another window length, other needs or another alpha, once O(N). 6 bytes a row more than a
    PrioritizedSampler in float32. With ``recent`` also O(steps * lanes).

    Source: Schaul et al. 2016, "Prioritized Experience Replay", equation 1 and section 3.4.

    Example: slices from the beginnings of episodes alone; nothing else has a priority.
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
        >>> sampler = PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=6, sampler=sampler)
        >>> step = torch.arange(20) % 5
        >>> rows = {"step": step, "td_error": (step == 0).float(), "next": {"done": step == 4}}
        >>> _ = rb.extend(TensorDict(rows, [20]))
        >>> rb.sample()["step"].tolist()
        [0, 1, 2, 0, 1, 2]
    """

    kind = "prioritized_slice"

    @checked_keywords
    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = REQUIRED,
        beta: float = REQUIRED,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Any = None,
        traj_key: Any = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: Any = False,
        span: Any = False,
        max_priority_within_buffer: bool = False,
        device: torch.device | str | int | None = None,
        weight_norm: str = "global",
        unit: str = "step",
        draw: str = "iid",
        stratified: bool = False,
        allow_short: bool = False,
        pad: str | None = None,
        short: str | None = None,
        align: str = "left",
        pad_value: Any = 0,
        recent: tuple[float, int] | None = None,
        flat: bool = True,
        replacement: bool = True,
    ) -> None:
        self.draw = one_of("draw", draw, _DRAWS)
        if stratified and draw == "without_replacement":
            raise ValueError("expected stratified=True or draw='without_replacement', got both")
        newest = checked_recent(recent, "stratified" if stratified else draw)
        short_allowed = checked_short(allow_short, draw, flat, slice_len)
        super().__init__(
            max_capacity,
            alpha,
            beta,
            eps,
            dtype,
            reduction,
            max_priority_within_buffer,
            device,
            weight_norm=weight_norm,
            stratified=stratified or draw == "stratified",
            replacement=replacement,
        )
        self.unit = one_of("unit", unit, _UNITS)
        self.allow_short = short_allowed
        self.recent = newest
        self._newest = self._no_newest()
        left, right = checked_span(span)
        if left:
            warnings.warn(
                "prioritized slices start with the row that was drawn, so that they cannot hang "
                f"over the start of an episode: span={span!r} is taken as {(False, right)}",
                UserWarning,
                stacklevel=2,
            )
        if pad in ("left", "both"):
            raise ValueError(
                "expected pad as none or right, since prioritized slices start with the row that "
                f"was drawn, got {pad!r}"
            )
        form = checked_form(
            span=(False, right),
            strict_length=strict_length,
            pad_output=pad_output,
            pad=pad,
            short=short,
            align=align,
        )
        boundaries = Boundaries(end_key, end_keys, traj_key, ends, trajectories)
        markers = checked_markers(truncated_key, init_key, boundaries, pad, pad_value)
        size = SliceSize(num_slices, slice_len)
        self._slicing = Slicing(size, boundaries, form, markers, flat)
        self._cache_values = bool(cache_values)

    # -- drawing ------------------------------------------------------------------------------

    @property
    def tells(self) -> tuple[Any, ...]:
        """As other samplers of slices do, and with ``unit="slice"`` where slices start."""
        anchors = ("anchor_index", "anchor_generation") if self.unit == "slice" else ()
        return (*super().tells, *anchors)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draws windows; returns the rows of all, one window after another, and what is known.

        Raises:
            NotEnoughData: no window is stored, or too few to draw without replacement.
            RuntimeError: the priorities of all rows with which a window may start are 0, and eps;
                slices do not fill the batch; records that are no TensorDicts; ``ends`` of other
                rows than those stored. KeyError: no column to tell episodes by.
        """
        with storage.lock:
            request, table, sums = self._prepare(storage, batch_size)
            self._ran_out = False  # there is no pass; a flag that was set is over
            if self.draw == "without_replacement":
                start, value = drawn_distinct(table, sums, request.slices, self.generator)
                if len(start) < request.slices and not self.allow_short:
                    found = f"{len(start)} with weight to draw without replacement"
                    raise self._slicing.refuse(request, self.needs, found)
                weight = self._weights(table, value)
            else:
                start, weight = self._drawn_starts(storage, request, table, sums)
            index, info = self._delivered(storage, request, start)
            window = info[SEQUENCE_ID]
            info["priority_weight"] = weight.to(window.device).index_select(0, window)
            slots = index[:, 0] if storage.ndim > 1 else index
            info["index_generation"] = storage.ledger.generations(slots)
            if self.unit == "slice":
                self._name_starts(storage, start.to(index.device), info)
            return index, info

    def _prepare(
        self, storage: Storage, batch_size: int
    ) -> tuple[SliceRequest, PriorityTable, SumSegmentTree]:
        """What is asked for, and what can be drawn; refuses what cannot be. Draws nothing."""
        request = self._slicing.request(storage, batch_size, self.needs)
        table, sums = self._eligible(storage, request.episodes, request.law)
        # On a device it takes a wait to know a sum; what is stored is known here.
        if table.device.type == "cpu" and sums.total > 0:
            return request, table, sums
        if not request.episodes.totals(request.law, WINDOWS).any():
            raise self._slicing.refuse(request, self.needs)
        if table.law.may_be_zero and not sums.total > 0:
            raise self._all_zero("priority of a row with which a slice may start")
        return request, table, sums

    def _drawn_starts(
        self, storage: Storage, request: SliceRequest, table: PriorityTable, sums: SumSegmentTree
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements with which windows start, int64 ``[K]``, and their weights."""
        among, count = self._newest, request.slices
        newest = 0 if self.recent is None else self.recent.slices(request, self.needs)
        recent = None
        if newest and among is not None:
            among.follow(request)
            recent = among.draw(newest, sums, self.generator, self.stratified)
        if among is None or recent is None:
            return self._drawn(storage, count, table, sums)[:2]
        start, value, total = recent
        start, value = start.to(table.device), value.to(table.device)
        if newest < count:
            rest = table.draw(count - newest, self.generator, self.stratified, sums)
            start, value = torch.cat([start, rest[0]]), torch.cat([value, rest[1]])
            # How much likelier the newest are than others with the same priority.
            more = 1 + newest / (count - newest) * float(sums.total) / total
            value = torch.where(among.among(start), value * more, value)
        return start, self._weights(table, value)

    def _delivered(
        self, storage: Storage, request: SliceRequest, start: torch.Tensor
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """The rows of the windows that start with elements ``[K]``, and which each belongs to."""
        window = request.window
        if not window.whole:
            return self._slicing.deliver(storage, request, self._cut(request, start))
        rows = request.episodes.runs(start.cpu().numpy(), window.length)
        return self._slicing.hand_out(storage, rows, window.numbers(start.numel()))

    def _cut(self, request: SliceRequest, start: torch.Tensor) -> Cut:
        """The rows of the windows that start with elements ``[K]``."""
        index, window = request.episodes, request.window
        time, lane = index.place(start.cpu().numpy())
        if window.plain:
            return Cut(lane, time, time + window.length)
        _, last, code, _ = index.episodes_at(time, lane)
        # Rows that are there for transforms only are in no window.
        last = last - np.where(code == GOES_ON, request.law.open_future, 0)
        return window.cut_from(time, last, lane)

    @staticmethod
    def _name_starts(storage: Storage, start: torch.Tensor, info: dict[Any, Any]) -> None:
        """Adds which row was drawn for the window of every row."""
        rows, lanes = start[info[SEQUENCE_ID]], storage.lanes
        info["anchor_index"] = unravel_index(rows, lanes) if lanes else rows
        slots = info["anchor_index"][:, 0] if lanes else rows
        info["anchor_generation"] = storage.ledger.generations(slots)

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        request, table, sums = self._prepare(storage, batch_size)
        if self.draw == "without_replacement" and not self.allow_short:
            there = int((sums[: table.length] > 0).sum())
            if there < request.slices:
                found = f"{there} with weight to draw without replacement"
                raise self._slicing.refuse(request, self.needs, found)

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._newest = self._no_newest()

    def _no_newest(self) -> RecentPriorities | None:
        return None if self.recent is None else RecentPriorities(self.recent.steps)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_newest": self._no_newest()}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._slicing.size!r}, alpha={self.alpha}, beta={self.beta}, "
            f"eps={self.eps}, draw={self.draw!r}, unit={self.unit!r})"
        )
