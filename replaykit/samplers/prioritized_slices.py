"""Draw windows in proportion to the priorities of their starts."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from replaykit.episodes import WINDOWS, CountLaw, EpisodeIndex, Found
from replaykit.episodes.boundaries import CONTINUES
from replaykit.keywords import checked_keywords, one_of
from replaykit.priorities import MinSegmentTree, SumSegmentTree
from replaykit.samplers.episode_measures import (
    EpisodeMasses,
    Predicate,
    WeighedEpisodes,
    weighed_episodes,
)
from replaykit.samplers.prioritized import PrioritizedSampler
from replaykit.samplers.priority_draws import drawn_distinct, rows_of
from replaykit.samplers.priority_rules import REQUIRED, Update, importance_weights, resolved_update
from replaykit.samplers.priority_table import Lost, PriorityTable
from replaykit.samplers.slice_arguments import Boundaries, SliceSize, checked_form, checked_span
from replaykit.samplers.slicing import (
    RecentPriorities,
    Sliced,
    SliceRequest,
    Slicing,
    checked_markers,
    checked_recent,
    checked_short,
    none_of,
)
from replaykit.samplers.window_forms import SEQUENCE_ID, Cut
from replaykit.samplers.window_measures import iid, stratified, without_replacement
from replaykit.storages import Storage
from replaykit.storages.episode_tags import EpisodeData, EpisodeTags
from replaykit.storages.indexing import elements_of, unravel_index
from replaykit.transfer import put_on

Array = np.ndarray[Any, Any]


class EpisodePriorities(WeighedEpisodes):
    """Keeps one priority for each episode, in the table of the priorities of rows.

    The priority of an episode is that of its last stored row. So priorities of episodes are saved,
    recovered, shared and moved as those of rows are. An update of any row sets the priority of its
    episode. Rows that continue an episode take it over, before any use of the table.

    Args:
        where: the predicate that episodes have to satisfy; None for all episodes.
        boundaries: the ends of episodes.
        table: the raw priorities of rows.

    Cost: O(K log J) for a draw or an update of K windows of J episodes. After a write, O(J) once.
    """

    def __init__(
        self, where: Predicate | None, boundaries: Boundaries, table: PriorityTable
    ) -> None:
        super().__init__(where)
        self._boundaries = boundaries
        self.follow_table(table)

    def follow_table(self, table: PriorityTable) -> None:
        """Use this table, whose rows inherit priorities from now on."""
        self._table, table.inherit = table, self.inherit
        self.forget()

    def _tags(self, storage: Storage, index: EpisodeIndex) -> EpisodeTags:
        # Tags belong to the episodes of the storage, and only predicates read them.
        return EpisodeTags() if self.where is None else super()._tags(storage, index)

    def _new(self, index: EpisodeIndex, law: CountLaw, tags: EpisodeTags) -> PriorityMasses:
        return PriorityMasses(index, law, tags, self.where, self._table)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_table": None}

    def inherit(self, storage: Storage, slots: Array, lost: Lost | None) -> None:
        """Let rows that were written continue the priority of their episode.

        ``lost`` has the priorities of the newest rows from before, if these are gone. Cost: a few
        lookups for each row. The caller holds the lock.
        """
        if not len(slots):
            return
        try:
            index = self._boundaries.index(storage)
        except (KeyError, RuntimeError):  # rows without episodes, which no draw accepts
            return
        if lost is not None:
            lane = np.arange(index.lanes)
            lo, hi = index.bounds(lane)
            time, (behind, raw) = np.full(len(lane), lo), lost
            known = index.begins(time, lane) < hi - behind
            self._set(index, raw[torch.from_numpy(known).to(raw.device)], time[known], lane[known])
            return
        element = elements_of(slots, storage.lanes.numel())
        time, lane = index.time_and_lane(element)
        oldest = np.maximum(index.begins(time, lane), index.bounds(lane)[0])
        later = time > oldest
        time, lane = time[later], lane[later]
        source = index.element(time - 1, lane)
        old = ~np.isin(source, element)
        raw = self._table.raw[torch.from_numpy(source[old]).to(self._table.device)]
        self._set(index, raw, time[old], lane[old])

    def _set(self, index: EpisodeIndex, raw: torch.Tensor, time: Array, lane: Array) -> None:
        """Set the priorities ``[K]`` of the episodes of rows."""
        if len(time):
            target = torch.from_numpy(index.element(index.spans(time, lane)[1], lane))
            self._table.set(target.to(raw.device), raw, self._table.length)

    def reduced(self, update: Update, storage: Storage) -> Update:
        """Return an update of the rows that hold the priorities of the episodes of rows.

        An episode gets the largest priority of its rows.
        """
        index = self._boundaries.index(storage)
        time, lane = index.time_and_lane(update.elements.cpu().numpy())
        last = index.element(index.spans(time, lane)[1], lane)
        holder, which = np.unique(last, return_inverse=True)
        largest = update.priorities.new_zeros(len(holder), device="cpu")
        np.maximum.at(largest.numpy(), which, update.priorities.cpu().numpy())
        return update._replace(elements=torch.from_numpy(holder), priorities=largest)

    def of_rows(self, storage: Storage) -> Array:
        """Return the priority of the episode of each stored row, ``[N]``."""
        index, raw = self._boundaries.index(storage), self._table.priorities.cpu().numpy()
        data = EpisodeData(index, EpisodeTags())
        every = np.ones(len(data), bool)
        raw[index.element(*rows_of(data, every))] = np.repeat(
            raw[index.element(data.last, data.lane)], data.length
        )
        return raw


class PriorityMasses(EpisodeMasses):
    """The measure ``P(a) = v_j / sum v * 1 / (windows of j)``; ``v`` is the weight of a priority.

    Windows of episodes with weight 0 do not count.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        law: CountLaw,
        tags: EpisodeTags,
        where: Predicate | None,
        table: PriorityTable,
    ) -> None:
        self._table = table
        self._least: MinSegmentTree | None = None
        super().__init__(index, law, tags, "trajectory", where)
        self._alone = False  # the priority of an open episode moves with its last row

    def _read_masses(self) -> None:
        data = self.data
        if self._table.has_smallest:
            self._least = MinSegmentTree(len(self._mass), dtype=torch.float64)
        self._holder = self.index.element(data.last, data.lane)[self.age]
        self._set(np.arange(self._used))

    def follow(self) -> None:
        """Follow priorities that changed since the last draw."""
        changed = self._table.set_since(self._seen)
        if changed is None:
            self._set(np.arange(self._used))
        elif changed:
            at = np.concatenate([part.cpu().numpy() for part in changed])
            at = at[at < self._table.length]
            number = self.numbers_at(*self.index.time_and_lane(at))
            self._set(np.unique(number[self._holder[number] == at]))

    def _set(self, number: Array) -> None:
        table, windows, at = self._table, self._facts[:, 3], torch.from_numpy(number)
        self._seen = table.log.number
        if not len(number):
            return
        holder = torch.from_numpy(self._holder[number]).to(table.device)
        value = table.values(holder).to("cpu", torch.float64).numpy()
        mass = np.where(windows[number] > 0, value, 0.0)
        self._tree.update(at, torch.from_numpy(mass))
        if self._least is not None:
            alone = np.divide(mass, windows[number], np.full(len(mass), np.inf), where=mass > 0)
            self._least.update(at, torch.from_numpy(alone))
        if table.law.may_be_zero:
            self._mass[number] = mass
            self._upto = np.cumsum(np.where(self._mass > 0, windows, 0))
            self.count = int(self._upto[-1])

    def drawn(self, draw: str, count: int, generator: torch.Generator | None) -> Found:
        """Draw up to ``count`` windows."""
        if draw == "without_replacement":
            found = without_replacement(self, min(count, self.count), generator)
            self.episodes_of(found)
            return found
        return (stratified if draw == "stratified" else iid)(self, count, generator)

    def weights(self, beta: float) -> torch.Tensor:
        """Return the importance weights of the last draw, ``[K]``."""
        mass = self._tree[torch.from_numpy(self._drawn)]
        value = mass / torch.from_numpy(self._drawn_facts[3])
        smallest = value.min() if self._least is None else self._least.reduce()
        return importance_weights(value, smallest, beta, self._table.law.dtype)


_DRAWS = ("iid", "stratified", "without_replacement")
_UNITS = ("step", "slice", "episode")


class PrioritizedSliceSampler(Sliced, PrioritizedSampler):
    """Draws windows of rows of one episode by the priority of their start.

    A window starts with row i with probability ``v_i / sum v``, ``v_i = (p_i + eps) ** alpha``. The
    sum covers only the rows with which a window may start. From such a row on, its episode has at
    least L rows. Fewer rows are enough with ``strict_length=False``, a right span, or padding. The
    neighbours that the buffer's transforms need must be stored, too. Other rows keep their
    priorities, which have an effect as soon as a window may start there. No draw changes a
    priority.

    All rows of a window have the ``priority_weight`` of its start, ``(v_i / min v) ** -beta``. The
    minimum is over all stored rows, or over the batch with ``weight_norm="batch"``.

    With ``recent``, a share q of the slices comes from the newest windows. The draw among these
    uses the same priorities. So
    ``P(i) = q * v_i / (sum of v over the newest) + (1 - q) * v_i / sum v``. The first term is 0 for
    windows that are not among the newest.

    Weights use this P for all windows: ``(P(i) / P_low) ** -beta``, with
    ``P_low = (1 - q) * min v / sum v``. ``P_low`` is the probability of a window that is not among
    the newest and whose start has the smallest ``v``. So older windows have the same weights as
    without ``recent``, and newer windows have smaller weights.

    With ``unit="episode"``, a window of episode j has the probability
    ``v_j / sum v * 1 / (windows of j)``. The sum covers the episodes that have a window. Weights
    use this P, relative to its smallest value. A new episode has ``default_priority``. An update of
    rows, also by written data, sets the priorities of their episodes, each to the largest value of
    its rows. Rows that continue an episode later do not change its priority.

    Args:
        max_capacity, alpha, beta, eps, dtype: as in ``PrioritizedSampler``.
        reduction, max_priority_within_buffer, weight_norm, device: as in ``PrioritizedSampler``.
        num_slices, slice_len: exactly one of the two. Windows in a batch of B rows have length
            ``L = slice_len`` or ``L = B // num_slices``. There are ``K = B // L`` windows.
        end_key, end_keys, traj_key, ends, trajectories: as in ``SliceSampler``.
        truncated_key, init_key, strict_length, pad_output: as in ``SliceSampler``.
        span: whether windows may extend beyond the end of an episode and are then shorter. A span
            before the start of an episode is ignored with a UserWarning, because windows start with
            the drawn row.
        pad: None or "none": no padding. "right": windows may extend beyond the end of an episode
            and are padded there.
        short, align, pad_value: the form of padded windows, as in ``SliceSampler``.
        unit: the rows whose priorities ``update_tensordict_priority`` sets. "step": every row of a
            sample gets a separate priority. "slice": the start of a window gets the largest
            priority of its rows. Other rows keep their priorities. A sample with "slice" has the
            start of each window in ``anchor_index`` and ``anchor_generation``. "episode": an
            episode has one priority, see below.
        draw: "iid": independent draws. "stratified": one draw from each of K equal parts of the
            sum, as with ``stratified=True``. "without_replacement": no start occurs twice in a
            batch. Each draw is then from the starts that are left.
        allow_short: for draws without replacement: return fewer windows if too few starts have
            weight.
        recent: ``(ratio, steps)``: draw ``ceil(ratio * K)`` slices from the newest ``steps``
            windows of every lane. These slices come first in the batch. This applies only if
            ``ratio * rows per lane > steps``, so that plain draws would return too few of the
            newest windows. One of these windows must also have weight.
        flat: if ``False``, deliver batches of shape ``[K, L]`` instead of ``[K * L]``.
        cross, where: as in ``SliceSampler``; with ``where`` also together with ``recent``.
        cache_values, compile: no effect.
        replacement: must be ``True``; see ``draw``.

    A batch has the info of a ``SliceSampler``, and also ``priority_weight`` and
    ``index_generation``. The generations let priority updates skip rows that were overwritten after
    the draw.

    Raises:
        TypeError, ValueError, RuntimeError: in the cases of ``PrioritizedSampler`` and
            ``SliceSampler``.
        ValueError: ``pad`` is "left" or "both", or ``unit`` or ``draw`` is unknown; or
            ``unit="episode"`` comes with ``cross``, ``recent`` or ``max_priority_within_buffer``.

    Cost: O(B + K log N) for a draw, and O(c log N) for c rows written or updated since the last
    draw. A new window length, new needs of transforms or a new alpha costs O(N) once. With
    ``where``, the first draw after a write costs O(J log J) for J episodes, and with
    ``unit="episode"`` O(J).
    Memory: in float32, 6 bytes per row more than a PrioritizedSampler. With ``recent`` also O(steps
    * lanes).

    Source: Schaul et al. 2016, "Prioritized Experience Replay", equation 1 and section 3.4.

    Example: slices from the starts of episodes only, because all other rows have priority 0.
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
        cross: bool = False,
        where: Predicate | None = None,
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
        if unit == "episode" and (cross or recent is not None or max_priority_within_buffer):
            raise ValueError(
                "expected unit='episode' without cross=True, recent= and max_priority_within_buffer"
            )
        self.allow_short = short_allowed
        self.recent = newest
        self._newest = None if newest is None else RecentPriorities(newest.steps)
        left, right = checked_span(span)
        if left:
            warnings.warn(
                "prioritized slices start with the row that was drawn, so they cannot extend "
                f"before the start of an episode: span={span!r} is taken as {(False, right)}",
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
        self._slicing = Slicing(size, boundaries, form, markers, flat, cross)
        self.where, self._weighed = where, weighed_episodes(where, cross)
        if unit == "episode":
            self._weighed = EpisodePriorities(where, boundaries, self._table)
        self._cache_values = bool(cache_values)

    # -- drawing ------------------------------------------------------------------------------

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys of all slice samplers, and with ``unit="slice"`` the start keys."""
        anchors = ("anchor_index", "anchor_generation") if self.unit == "slice" else ()
        return (*super().info_keys, *anchors)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw windows; return their rows, one window after another, and their info.

        Raises:
            NotEnoughData: no window is stored, or too few to draw without replacement.
            RuntimeError: eps is 0, and so are the priorities of all rows with which a window may
                start; slices do not fill the batch; the rows are not TensorDicts; or ``ends`` does
                not match the stored rows.
            KeyError: no stored column shows where episodes end.
        """
        with storage.lock:
            self._ran_out = False  # there is no pass; clear a flag that was set
            if self.unit == "episode":
                return self._sample_episodes(storage, batch_size)
            request, table, sums = self._prepare(storage, batch_size)
            if self.draw == "without_replacement":
                start, value = drawn_distinct(table, sums, request.slices, self.generator)
                self._require_weight(request, len(start))
                weight = table.weights(value, self._beta)
            else:
                start, weight = self._drawn_starts(request, table, sums)
            index, info = self._delivered(storage, request, start)
            self._add_weights(storage, index, info, weight)
            if self.unit == "slice":
                rows, lanes = start.to(index.device)[info[SEQUENCE_ID]], storage.lanes
                info["anchor_index"] = unravel_index(rows, lanes) if lanes else rows
                slots = info["anchor_index"][:, 0] if lanes else rows
                info["anchor_generation"] = storage.ledger.generations(slots)
            return index, info

    @staticmethod
    def _add_weights(
        storage: Storage, index: torch.Tensor, info: dict[Any, Any], weight: torch.Tensor
    ) -> None:
        """Add the weights of windows ``[K]`` and the generations of rows to ``info``."""
        window = info[SEQUENCE_ID]
        info["priority_weight"] = put_on(weight, window.device).index_select(0, window)
        slots = index[:, 0] if storage.ndim > 1 else index
        info["index_generation"] = storage.ledger.generations(slots)

    def _sample_episodes(
        self, storage: Storage, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw windows by the priorities of episodes."""
        request, masses = self._prepare_episodes(storage, batch_size)
        draw = "stratified" if self.stratified else self.draw
        window, count, rows = request.window, request.slices, None
        if draw == "iid" and window.whole:
            rows = masses.rows(count, window.length, self.generator)
        if rows is not None:
            index, info = self._slicing.hand_out(storage, *rows)
        else:
            found = masses.drawn(draw, count, self.generator)
            index, info = self._slicing.deliver(storage, request, window.cut(found))
        self._add_weights(storage, index, info, masses.weights(self._beta))
        return index, info

    def _prepare_episodes(
        self, storage: Storage, batch_size: int
    ) -> tuple[SliceRequest, PriorityMasses]:
        """Return the request and the weighed episodes. Raises if no window can be drawn."""
        request = self._slicing.request(storage, batch_size, self.needs)
        self._table.follow(storage)
        assert self._weighed is not None
        masses = self._weighed.of(storage, request.episodes, request.law)
        assert isinstance(masses, PriorityMasses)
        if not masses.chosen.any():
            raise self._slicing.refuse(request, self.needs, none_of(self.where))
        if not masses.count:
            raise self._all_zero("priority of an episode that has a window")
        if self.draw == "without_replacement":
            self._require_weight(request, masses.count)
        return request, masses

    def _require_weight(self, request: SliceRequest, there: int) -> None:
        """Raise NotEnoughData if fewer windows have weight than a draw must return."""
        if there < request.slices and not self.allow_short:
            found = f"{there} with weight to draw without replacement"
            raise self._slicing.refuse(request, self.needs, found)

    def _prepare(
        self, storage: Storage, batch_size: int
    ) -> tuple[SliceRequest, PriorityTable, SumSegmentTree]:
        """Return request, table and tree of a draw. Raises if no window can be drawn."""
        request = self._slicing.request(storage, batch_size, self.needs)
        chosen, weighed = None, self._weighed
        if weighed is not None:
            chosen = weighed.of(storage, request.episodes, request.law)
            if not chosen.count:
                raise self._slicing.refuse(request, self.needs, none_of(self.where))
        table, sums = self._eligible(storage, request.episodes, request.law, chosen)
        # Reading a sum on a device waits for it. The episode index is known here.
        if table.device.type == "cpu" and sums.total > 0:
            return request, table, sums
        if not request.episodes.totals(request.law, WINDOWS).any():
            raise self._slicing.refuse(request, self.needs)
        if table.law.may_be_zero and not sums.total > 0:
            raise self._all_zero("priority of a row with which a slice may start")
        return request, table, sums

    def _drawn_starts(
        self, request: SliceRequest, table: PriorityTable, sums: SumSegmentTree
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the starts of windows, int64 ``[K]``; return them and their weights."""
        among, count = self._newest, request.slices
        newest = 0 if self.recent is None else self.recent.slices(request, self.needs)
        recent = None
        if newest and among is not None:
            among.refresh(request)
            recent = among.draw(newest, sums, self.generator, self.stratified)
        if among is None or recent is None:
            return table.draw_weighted(
                count, self.generator, self.stratified, self._beta, None, sums
            )[:2]
        start, value, total = recent
        start, value = start.to(table.device), value.to(table.device)
        if newest < count:
            rest = table.draw(count - newest, self.generator, self.stratified, sums)
            start, value = torch.cat([start, rest[0]]), torch.cat([value, rest[1]])
            # The newest starts are likelier by this factor than others of the same priority.
            more = 1 + newest / (count - newest) * float(sums.total) / total
            value = torch.where(among.among(start), value * more, value)
        return start, table.weights(value, self._beta)

    def _delivered(
        self, storage: Storage, request: SliceRequest, start: torch.Tensor
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return the rows of the windows with these starts ``[K]``, and the info."""
        window = request.window
        if not window.whole:
            return self._slicing.deliver(storage, request, self._cut(request, start))
        rows = request.episodes.runs(start.cpu().numpy(), window.length)
        return self._slicing.hand_out(storage, rows, window.numbers(start.numel()))

    def _cut(self, request: SliceRequest, start: torch.Tensor) -> Cut:
        """Cut the windows with these starts ``[K]``."""
        index, window = request.episodes, request.window
        time, lane = index.time_and_lane(start.cpu().numpy())
        if window.plain:
            return Cut(lane, time, time + window.length)
        _, last, code, _ = index.episodes_at(time, lane)
        # Rows that are stored only for transforms are in no window.
        last = last - np.where(code == CONTINUES, request.law.open_future, 0)
        return Cut(lane, time, np.minimum(time + window.length, last + 1))

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        if self.unit == "episode":
            self._prepare_episodes(storage, batch_size)
            return
        request, table, sums = self._prepare(storage, batch_size)
        if self.draw == "without_replacement" and not self.allow_short:
            self._require_weight(request, int((sums[: table.length] > 0).sum()))

    # -- priorities of episodes ---------------------------------------------------------------

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        storage: Storage | None = None,
        generation: Any = None,
    ) -> None:
        if not isinstance(self._weighed, EpisodePriorities):
            super().update_priority(index, priority, storage=storage, generation=generation)
            return
        storage = self._home(storage)
        if storage is None:
            raise ValueError("expected a storage, whose episodes get the priorities, got none")
        with storage.lock:
            law = self._table.follow(storage).law
            update = resolved_update(index, priority, generation, law, storage, len(storage))
            self.dropped_updates += update.dropped
            if update.top:
                update = self._weighed.reduced(update, storage)
                at = update.elements
                if storage.lanes:
                    at = unravel_index(at, storage.lanes)
                super().update_priority(at, update.priorities, storage=storage)

    update_priority.__doc__ = PrioritizedSampler.update_priority.__doc__

    def stored_priorities(self, storage: Storage) -> Any:
        raw, episodes = super().stored_priorities(storage), self._weighed
        return episodes.of_rows(storage) if isinstance(episodes, EpisodePriorities) else raw

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        if self._weighed is not None:
            self._weighed.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self._weighed, EpisodePriorities):
            self._weighed.follow_table(self._table)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._slicing.size!r}, alpha={self.alpha}, beta={self.beta}, "
            f"eps={self.eps}, draw={self.draw!r}, unit={self.unit!r})"
        )
