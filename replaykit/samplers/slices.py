"""Draw runs of consecutive rows, each inside one episode."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import arange
from replaykit.checkpoint import ReadOnce
from replaykit.declared import Count
from replaykit.episodes import WINDOWS, CountLaw, EpisodeIndex, Found
from replaykit.errors import NoEpisodeColumns
from replaykit.keywords import checked_keywords, named_after, one_of
from replaykit.samplers.episode_measures import (
    Coverage,
    DrawCounter,
    EpisodeMasses,
    Predicate,
    chosen_order,
    weighed_episodes,
)
from replaykit.samplers.sampler import Int64s, saved_below
from replaykit.samplers.slice_arguments import (
    Boundaries,
    SliceSize,
    checked_form,
)
from replaykit.samplers.slicing import (
    Sliced,
    SliceRequest,
    Slicing,
    checked_markers,
    checked_recent,
    checked_short,
    none_of,
)
from replaykit.samplers.window_forms import Markers
from replaykit.samplers.window_measures import (
    DRAWS,
    MEASURES,
    Anchors,
    EpisodeOrder,
    floor_below,
    iid,
    integers,
    permutation,
    stratified,
    uniform,
    without_replacement,
)
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _EpisodePass:
    """The state of a pass over episodes.

    ``in_order`` is False if rows were placed by hand. A load into other slots then orders the
    episodes differently, so the numbers ``remaining`` name others.
    """

    PREFIX: ClassVar[str] = "_"
    episodes: Count
    length: Count
    rows: Count
    ran_out: bool
    remaining: Int64s | None = None
    returned: Int64s | None = None
    in_order: bool = True

    def __post_init__(self) -> None:
        self.left()
        self.rolled_back()

    def left(self) -> Any:
        """Return the episodes left in the pass. Raises ValueError if one is impossible."""
        return saved_below(self.episodes, "_remaining", "pass over episodes", self.remaining)

    def rolled_back(self) -> Any:
        """Return the rows that were rolled back. Raises ValueError if one is impossible."""
        return saved_below(self.rows, "_returned", "pass over episodes", self.returned)


class SliceSamplerWithoutReplacement(Sliced):
    """Draws one window per episode in each pass over the episodes.

    Episodes without a window are skipped. The start of each window is uniform in its episode.
    ``ran_out`` becomes True with the batch that ends a pass. This batch may have fewer slices than
    requested. The next draw begins a new pass. A write also ends the pass, and with ``where`` a
    change of a tag. A batch has the info of a SliceSampler.

    Args:
        drop_last: if True, skip a last batch that would have fewer slices.
        shuffle: if ``False``, draw episodes in the order in which they were written, lane by lane.
        num_slices, slice_len, end_key, end_keys, traj_key, ends: as in SliceSampler.
        trajectories, truncated_key, init_key, strict_length: as in SliceSampler.
        flat, where, compile, use_gpu: as in SliceSampler.
        cross: as in SliceSampler. A pass then has one window of each part of a stream.
        replacement: no effect.

    Raises:
        TypeError, ValueError, RuntimeError: as SliceSampler does.
        ValueError: ``drop_last`` is True, and there are fewer episodes than slices in a batch.

    Cost: O(B + K log E) for a draw, and O(E) once per pass. Memory: 8 bytes per episode.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4,
        ...                   sampler=SliceSamplerWithoutReplacement(slice_len=2, shuffle=False))
        >>> done = torch.arange(15) % 5 == 4
        >>> _ = rb.extend(TensorDict({"step": torch.arange(15), "next": {"done": done}}, [15]))
        >>> [(batch["step"] // 5).tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]
    """

    kind = "slice_without_replacement"
    _declared = _EpisodePass
    mapped_entries = ("_remaining",)
    passes = True

    _remaining = ReadOnce[torch.Tensor | None]()
    """Numbers of the episodes that are left; None if the next draw begins a pass."""

    @checked_keywords
    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Any = None,
        traj_key: Any = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: Any = False,
        use_gpu: Any = False,
        flat: bool = True,
        cross: bool = False,
        where: Predicate | None = None,
        replacement: bool = False,
    ) -> None:
        super().__init__()
        self.drop_last, self.shuffle = bool(drop_last), bool(shuffle)
        boundaries = Boundaries(end_key, end_keys, traj_key, ends, trajectories)
        if not flat and slice_len is None:
            raise ValueError(
                "expected slice_len with flat=False, since a batch may have fewer slices; got "
                "num_slices"
            )
        self._slicing = Slicing(
            SliceSize(num_slices, slice_len),
            boundaries,
            checked_form(strict_length=strict_length),
            Markers(truncated_key, init_key, boundaries.rule.flags),
            flat,
            cross,
        )
        self.where, self._weighed = where, weighed_episodes(where, cross)
        self._remaining = None
        self._episodes = 0
        # Rows of slices that were rolled back, as flat indices. Draws return their episodes next.
        self._returned: torch.Tensor | None = None
        # The index and its version when the pass began, or before the first write after its load.
        # No index: the pass has ended. None: the pass was loaded, and no rows were written.
        self._as_of: tuple[EpisodeIndex | None, int] | None = None
        # None if the pass was loaded.
        self._law: tuple[CountLaw, EpisodeMasses | None] | None = None
        self._length = 0
        self._rows = 0
        self._in_order = True  # of the loaded rows, when they were saved
        self._forgotten = 0

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw the next slices of the pass; return their rows, and the slice of each row.

        Raises:
            NotEnoughData: no window is stored.
            ValueError: ``drop_last`` is True, and there are fewer episodes than slices.
            RuntimeError, KeyError: as ``SliceSampler.sample`` does.
        """
        with storage.lock:
            request, order = self._prepare(storage, batch_size)
            remaining = self._left(request, order)
            if self._too_few(remaining, request.slices):
                remaining = self._new_pass(order.count)
            chosen, rest = remaining[: request.slices], remaining[request.slices :]
            found = order.find(chosen.numpy())
            start = floor_below(uniform(len(chosen), self.generator) * found.count, found.count)
            cut = request.window.cut(found._replace(rest=start))
            index, info = self._slicing.deliver(storage, request, cut)
            self._ran_out = not len(rest) or self._too_few(rest, request.slices)
            self._remaining = None if self._ran_out else rest
            self._episodes, self._length = order.count, request.window.length
            self._as_of = request.episodes, request.episodes.version
            self._law = request.law, order.masses
            self._rows = len(storage)
            return index, info

    def _prepare(self, storage: Storage, batch_size: int) -> tuple[SliceRequest, EpisodeOrder]:
        request = self._slicing.request(storage, batch_size, self.needs)
        order = chosen_order(self._weighed, storage, request.episodes, request.law)
        if not order.count:
            raise self._slicing.refuse(request, self.needs, none_of(self.where))
        if self.drop_last and request.slices > order.count:
            raise ValueError(
                f"expected at most {order.count} slices with drop_last, one of each episode that "
                f"has a window of {request.window.length} rows; got {request.slices}"
            )
        return request, order

    def _left(self, request: SliceRequest, order: EpisodeOrder) -> torch.Tensor:
        """Return the episodes that are left in the pass; all episodes after a write."""
        remaining, returned = self._remaining, self._returned
        self._returned = None
        old = (
            order.count != self._episodes
            or self._length != request.window.length
            or (
                order.masses is not None and order.masses.tags.edited
                if self._law is None
                else self._law != (request.law, order.masses)
            )
            or self._as_of not in (None, (request.episodes, request.episodes.version))
        )
        if old or (remaining is None and returned is None):
            return self._new_pass(order.count)
        if remaining is None:
            remaining = arange(0)
        if returned is not None:
            time, lane = request.episodes.time_and_lane(returned.numpy())
            number = order.of(time, lane)
            # Once for each window; two of one episode follow each other where a pass began.
            first = np.flatnonzero(np.diff(number, prepend=-1))
            rows, number = np.diff(first, append=len(number)), number[first]
            rows, number = rows[number >= 0], number[number >= 0]
            windows = rows // np.minimum(order.find(number).rows, request.window.length)
            number = np.repeat(number, np.maximum(windows, 1))
            remaining = torch.cat([torch.from_numpy(number), remaining])
        return remaining if len(remaining) else self._new_pass(order.count)

    def _too_few(self, remaining: torch.Tensor, slices: int) -> bool:
        return self.drop_last and len(remaining) < slices

    def _new_pass(self, count: int) -> torch.Tensor:
        if not self.shuffle:
            return arange(count)
        return torch.from_numpy(permutation(count, self.generator))

    # -- notifications ------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        if self._as_of is not None:
            self._forget()

    def about_to_write(self) -> None:
        """Let a loaded pass notice later writes of other processes."""
        super().about_to_write()
        loaded = self._as_of is None and not (self._remaining is self._returned is None)
        if loaded and self.owner is not None:
            with contextlib.suppress(NoEpisodeColumns):
                index = self.episodes(self.owner.storage)
                self._as_of = index, index.newest_version()

    def add(self, index: Any) -> None:
        self._forget()

    def extend(self, index: torch.Tensor) -> None:
        self._forget()

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        self._forget()

    def _forget(self) -> None:
        self._remaining = self._returned = None
        self._as_of = None, 0
        self._forgotten += 1

    def empty(self) -> None:
        super().empty()
        self._forget()

    def mark(self, storage: Storage) -> Any:
        of_pass = self._remaining, self._returned, self._episodes, self._as_of
        return self._forgotten, *of_pass, self._law, self._length, self._rows

    def rollback(self, token: Any, storage: Storage) -> None:
        forgotten, self._remaining, self._returned, self._episodes, self._as_of, *more = token
        self._law, self._length, self._rows = more
        if forgotten != self._forgotten:
            self._forget()  # rows were written, which ends the pass

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        flat = [ravel(index, storage.lanes) if storage.ndim > 1 else index for index in drawn]
        flat = [index.cpu() for index in flat]
        if self._returned is not None:
            flat.append(self._returned)
        if flat:
            self._returned = torch.cat(flat)

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        lanes = storage.lanes.numel()
        lost = len(rows) * lanes != self._rows or (len(rows) and int(rows.max()) >= len(rows))
        if lost or not self._in_order:  # with rows, whole episodes may have been lost
            self._forget()
        elif self._returned is not None:
            now = torch.empty(len(rows), dtype=torch.int64, device="cpu")
            now[rows.cpu()] = arange(len(rows))
            self._returned = now[self._returned // lanes] * lanes + self._returned % lanes

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._notice_writes()
        remaining, returned, owner = self._remaining, self._returned, self.owner
        return {
            **super().state_dict(),
            "_remaining": None if remaining is None else remaining.clone(),
            "_returned": None if returned is None else returned.clone(),
            "_episodes": self._episodes,
            "_length": self._length,
            "_rows": self._rows,
            "_ran_out": self._ran_out,
            "_in_order": owner is None or owner.storage.ledger.oldest_first,
        }

    def _notice_writes(self) -> None:
        """End the pass if rows or tags were written since its last draw, in any process."""
        if self._as_of is None:
            return
        (index, version), law, weighed = self._as_of, self._law, self._weighed
        if (
            index is None
            or index.newest_version() != version
            or (law is not None and weighed is not None and not weighed.knows(law[1]))
        ):
            self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = self._declared_state(state_dict)
        self._remaining, self._returned = saved.left(), saved.rolled_back()
        self._episodes, self._length = saved.episodes, saved.length
        self._rows, self._ran_out, self._in_order = saved.rows, saved.ran_out, saved.in_order
        self._as_of = self._law = None
        self._forgotten += 1

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._slicing.size!r}, drop_last={self.drop_last}, "
            f"shuffle={self.shuffle})"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._notice_writes()
        return {**super().__getstate__(), "_as_of": None, "_law": None}


@named_after
class SliceSampler(Sliced):
    """Draws ``K`` windows of ``L`` consecutive rows, each inside one episode.

    Windows in a batch of ``B`` rows have length ``L = slice_len`` or ``L = B // num_slices``. There
    are ``K = B // L`` windows. By default all stored windows are equally likely.

    The info of a batch has these entries in addition to ``index``: ``sequence_id``, int64 ``[B]``,
    the number of the row's slice; and ``done``, ``truncated`` and ``terminated``, bool ``[B, 1]``,
    under ``next``. ``done`` is set at the last row of every slice. ``truncated`` is also set there,
    unless the episode ends. ``init_key`` is set at the first row of every slice, if it is stored.

    Args:
        num_slices, slice_len: exactly one of the two.
        end_key, end_keys: flags that end episodes, instead of ``done``, ``truncated`` and
            ``terminated`` under ``next``. An episode ends if any of the flags is set.
            ``end_keys=()``: no flags.
        traj_key: a key, or a list of keys, whose change ends an episode, instead of
            ``("collector", "traj_ids")``, ``episode`` and ``seed``. ``()``: no keys. If the data
            lacks the key, only flags end episodes, with a UserWarning.
        ends: a tensor ``[N]`` instead of columns, nonzero for stored rows that end an episode.
        trajectories: a tensor ``[N]`` instead of columns, whose changes end episodes.
        truncated_key: the flag that marks the cut of a slice in a batch; ``done`` and
            ``terminated`` are its siblings. None: no flags.
        init_key: a stored flag that is set at the first row of every slice, where recurrent
            networks load the stored state. None: the stored flag stays unchanged.
        strict_length: if True, draw only from episodes of at least ``L`` rows. If ``False``, a
            shorter episode is one window, and the batch has fewer rows.
        pad_output: with ``strict_length=False``, short windows repeat their last row. The mask
            ``("collector", "mask")``, bool ``[B]``, is True at real rows.
        span: whether windows may extend beyond the start and the end of an episode and are then
            shorter; one value, or a pair. ``True``: at least 1 row remains. An int i: at least
            ``L - i`` rows remain.
        measure: the probabilities of windows. ``"window"``: all windows are equally likely. For the
            other values, the sampler first draws an episode or a lane, and then one of its windows.
            ``"trajectory"``: episodes are equally likely. ``"lane"``: lanes are equally likely.
            ``"transition"``: episodes are drawn in proportion to their number of rows. A
            ``Coverage`` prefers episodes that were rarely drawn.
        draw: ``"iid"``: independent draws. ``"stratified"``: one draw in each of K equal parts of
            the measure; with ``measure="lane"``, lanes take turns. ``"without_replacement"``: no
            window occurs twice in a batch. ``"sequential"``: windows ``stride`` rows apart, from
            the oldest episode on. Every batch continues after the last batch, and the oldest window
            follows the newest. ``pass_index`` counts the completed rounds. ``"round_robin"``: each
            window is of the next episode in the order of age, and every episode has a window before
            any has a second one. If a smaller capacity leaves out the row at which either
            of the two continues, it begins again with the oldest.
        pad: the ends of an episode beyond which windows may extend, with padding: ``"left"``,
            ``"right"``, ``"both"`` or ``"none"``. The mask marks real rows.
        short: treatment of episodes of at most ``L`` rows. ``"whole"``: the episode is one padded
            window (the default unless ``pad="none"``). ``"law"``: the same windows as in longer
            episodes. ``"exclude"``: episodes of fewer than ``L`` rows have no window.
        align: the position of real rows in a padded window: first (``"left"``) or last
            (``"right"``).
        pad_value: a number for padding, or numbers by key. Flags of padding are always False.
        recent: ``(ratio, steps)``: draw ``ceil(ratio * K)`` slices from the newest ``steps``
            windows of every lane. These slices come first in the batch. This applies only if
            ``ratio * rows per lane > steps``, so that plain draws would return too few of the
            newest windows.
        strict_lanes: with ``measure="lane"``, raise unless every lane has a window.
        flat: if ``False``, deliver batches of shape ``[K, L]`` instead of ``[K * L]``.
        stride: distance between sequential windows; None for ``L``.
        cross: if True, windows may span ends that flags mark. Transforms still keep to the episodes
            of the rows: no n-step sum, stack of frames or goal crosses an end. Ends without a flag,
            such as a cut or another id, are never spanned.
        where: a function of an ``EpisodeData``, which returns bool ``[J]``: the episodes to draw
            from. It is called again after a write and after ``rb.tag``. None: all episodes.
        offset: the window of an episode with ``draw="round_robin"``: ``"random"`` or ``"first"``.
        allow_short: for draws without replacement, return fewer slices if there are fewer windows.
        replacement: ``False`` creates a SliceSamplerWithoutReplacement from the other keywords.
        cache_values, compile, use_gpu: no effect; the sampler is fast without them.

    Attributes:
        num_slices, slice_len, end_key, end_keys, traj_key, span: the arguments, read-only.
        strict_length, pad_output, truncated_key: the arguments, read-only.
        init_key, cache_values: the arguments, read-only.

    Raises:
        TypeError, ValueError, RuntimeError: arguments are invalid or exclude each other.
        NotEnoughData: no window is stored, at the time of a draw.

    Cost: O(B + K log E) for E episodes. With ``where``, the first draw after a write or a change of
    a tag also calls the function, in O(E).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=6,
        ...                   sampler=SliceSampler(slice_len=3))
        >>> done = torch.arange(20) % 5 == 4
        >>> _ = rb.extend(TensorDict({"step": torch.arange(20), "next": {"done": done}}, [20]))
        >>> steps = rb.sample()["step"].reshape(2, 3)
        >>> bool((steps.diff() == 1).all()), bool((steps // 5 == steps[:, :1] // 5).all())
        (True, True)
    """

    kind = "slice"
    marks_draws = False

    @overload
    def __new__(
        cls, *, replacement: Literal[True] = True, draw: str = "iid", **kwargs: Any
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]  # returns another class, as in TorchRL
        cls, *, replacement: Literal[False], draw: str = "iid", **kwargs: Any
    ) -> SliceSamplerWithoutReplacement: ...
    def __new__(cls, *, replacement: bool = True, draw: str = "iid", **kwargs: Any) -> Any:
        if not replacement:
            return SliceSamplerWithoutReplacement(**kwargs)
        if draw == "sequential":  # a separate class, because these draws change state
            from replaykit.samplers.sequential_slices import _SequentialSlices

            return super().__new__(_SequentialSlices)
        if draw == "round_robin":
            from replaykit.samplers.sequential_slices import _RoundRobinSlices

            return super().__new__(_RoundRobinSlices)
        return super().__new__(cls)

    @checked_keywords
    def __init__(
        self,
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
        use_gpu: Any = False,
        measure: str | Coverage = "window",
        draw: str = "iid",
        pad: str | None = None,
        short: str | None = None,
        align: str = "left",
        pad_value: Any = 0,
        recent: tuple[float, int] | None = None,
        strict_lanes: bool = False,
        flat: bool = True,
        stride: int | None = None,
        cross: bool = False,
        where: Predicate | None = None,
        offset: str = "random",
        allow_short: bool = False,
        replacement: bool = True,
    ) -> None:
        super().__init__()
        self.measure = measure
        coverage = measure if isinstance(measure, Coverage) else None
        self._base = one_of("measure", getattr(measure, "base", measure), MEASURES)
        self.draw = one_of("draw", draw, DRAWS)
        form = checked_form(
            span=span,
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
        self._cache_values = bool(cache_values)
        self.recent = checked_recent(recent, draw)
        if strict_lanes and measure != "lane":
            raise ValueError(f"strict_lanes needs measure='lane', got {measure!r}")
        self.strict_lanes = bool(strict_lanes)
        self.allow_short = checked_short(allow_short, draw, flat, slice_len)
        if draw == "sequential":
            if any(form.span) or form.pad in ("left", "both") or form.short == "law":
                raise ValueError("draw='sequential' takes windows with pad=None, none or right")
        elif stride is not None:
            raise ValueError(f"stride needs draw='sequential', got {draw!r}")
        self.stride = stride
        self.where, self.offset = where, one_of("offset", offset, ("random", "first"))
        self._weighed = weighed_episodes(where, cross, self._base, coverage, draw, recent)
        if offset != "random" and draw != "round_robin":
            raise ValueError(f"offset needs draw='round_robin', got {draw!r}")
        self._counter = None if coverage is None else DrawCounter()
        if self._counter is not None:
            self.marks_draws = True
        self._plain = measure == "window" and draw == "iid" and recent is None and where is None
        self._known: Anchors | None = None  # the last windows

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw windows; return their rows, one window after another, and info.

        Raises:
            NotEnoughData: no window is stored, or too few; the text has the counts.
            RuntimeError: slices do not fill the batch, the rows are not TensorDicts, or ``ends``
                does not match the stored rows.
            KeyError: no stored column shows where episodes end.
        """
        with storage.lock:
            self._ran_out = False
            if self._plain:
                request = self._slicing.request(storage, batch_size, self.needs)
                if request.window.whole:
                    return self._draw_plain(storage, request)
            request, anchors = self._prepare(storage, batch_size)
            window, rows = request.window, None
            if self.draw == "iid" and window.whole and isinstance(anchors, EpisodeMasses):
                rows = anchors.rows(request.slices, window.length, self.generator)
            if rows is not None:
                drawn = self._slicing.hand_out(storage, *rows)
            else:
                found = self._draw(request, anchors)
                drawn = self._slicing.deliver(storage, request, window.cut(found))
            if self._counter is not None:
                assert isinstance(anchors, EpisodeMasses)
                if self.draw == "without_replacement":
                    anchors.episodes_of(found)
                self._counter.made(anchors.count_draw(), drawn[0])
            return drawn

    def _draw_plain(
        self, storage: Storage, request: SliceRequest
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw independently among equally likely windows that have all their rows.

        This method handles the usual case in fewer steps.
        """
        index, law, length = request.episodes, request.law, request.window.length
        count = index.total(law, WINDOWS)
        if not count:
            raise self._slicing.refuse(request, self.needs)
        number = integers(count, request.slices, self.generator)
        return self._slicing.hand_out(storage, *index.slices(law, number, length))

    def _prepare(self, storage: Storage, batch_size: int) -> tuple[SliceRequest, Anchors]:
        """Return the request and the stored windows. Raises if no window can be drawn."""
        request = self._slicing.request(storage, batch_size, self.needs)
        if self._weighed is None:
            anchors = self._anchors(request)
        else:
            anchors = self._weighed.of(storage, request.episodes, request.law)
        if not anchors.count:
            raise self._slicing.refuse(request, self.needs, none_of(self.where))
        if self.strict_lanes and not anchors.per_lane.all():
            lanes = np.nonzero(anchors.per_lane == 0)[0]
            raise self._slicing.refuse(
                request, self.needs, f"none in {len(lanes)} of the lanes (the first: {lanes[0]})"
            )
        distinct = self.draw == "without_replacement" and not self.allow_short
        if distinct and request.slices > anchors.count:
            raise self._slicing.refuse(
                request, self.needs, f"{anchors.count} windows to draw without replacement"
            )
        return request, anchors

    def _anchors(self, request: SliceRequest, newest: int | None = None) -> Anchors:
        episodes, law = request.episodes, request.law
        if newest is not None:
            return MEASURES[self._base](episodes, law, newest)
        known = self._known
        same = known is not None and known.index is episodes and known.law is law
        if known is None or not same or known.version != episodes.version:
            known = self._known = MEASURES[self._base](episodes, law)
        return known

    def _draw(self, request: SliceRequest, anchors: Anchors) -> Found:
        count, generator = request.slices, self.generator
        if self.draw == "without_replacement":
            return without_replacement(anchors, min(count, anchors.count), generator)
        one = stratified if self.draw == "stratified" else iid
        newest = 0 if self.recent is None else self.recent.slices(request, self.needs)
        if not newest:
            return one(anchors, count, generator)
        assert self.recent is not None
        recent = one(self._anchors(request, self.recent.steps), newest, generator)
        if newest == count:
            return recent
        rest = one(anchors, count - newest, generator)
        return Found(*(np.concatenate(pair) for pair in zip(recent, rest, strict=True)))

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._forget_windows()

    def _forget_windows(self) -> None:
        self._known = None
        if self._weighed is not None:
            self._weighed.forget()

    # -- undoing draws ------------------------------------------------------------------------

    def mark(self, storage: Storage) -> Any:
        return None if self._counter is None else self._counter.number

    def rollback(self, token: Any, storage: Storage) -> bool | None:
        if self._counter is not None and token is not None:
            with storage.lock:
                self._counter.undo(token, storage, self.episodes(storage))
        return None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        if self._counter is not None and drawn and len(storage):
            with storage.lock:
                self._counter.undo_rows(drawn, storage, self.episodes(storage))

    # -- state --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget_windows()

    def __repr__(self) -> str:
        return f"SliceSampler({self._slicing.size!r}, measure={self.measure!r}, draw={self.draw!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}
