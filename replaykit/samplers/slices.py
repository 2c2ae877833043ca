"""Runs of consecutive rows, each inside one episode."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import torch
from typing_extensions import Self

from replaykit.episodes import WINDOWS, Windows
from replaykit.errors import NotEnoughData
from replaykit.keywords import checked_keywords, named_after
from replaykit.samplers.draws import DRAWS, iid, integers, stratified, without_replacement
from replaykit.samplers.measures import MEASURES, Anchors
from replaykit.samplers.recency import checked_recent
from replaykit.samplers.sequential import Sequential
from replaykit.samplers.slice_arguments import (
    Boundaries,
    SliceSize,
    checked_form,
    one_of,
)
from replaykit.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from replaykit.samplers.slicing import Request, Sliced, Slicing, checked_markers, checked_short
from replaykit.storages import Storage

__all__ = ["SliceSampler"]


@named_after
class SliceSampler(Sliced):
    """Draws ``K`` windows of ``L`` consecutive rows, each inside one episode.

    A batch of ``B`` rows has ``L = slice_len`` or ``B // num_slices``, and ``K = B // L``. By
    default every window that is stored is equally likely.

    Args:
        num_slices, slice_len: one of them.
        end_key, end_keys: flags that end episodes, instead of ``done``, ``truncated`` and
            ``terminated`` under ``next``; any one that is set does. ``end_keys=()``: none.
        traj_key: a key, or a list of them, of which a change ends an episode, instead of
            ``("collector", "traj_ids")``, ``episode`` and ``seed``. ``()``: none. Data that lacks
            it goes by its flags alone, with a UserWarning.
        ends: instead of columns, ``[N]``: which stored rows end an episode.
        trajectories: instead of columns, ``[N]``: a change ends an episode.
        truncated_key: where the batch says that a slice was cut; ``done`` and ``terminated`` are
            siblings of it. None: it does not.
        init_key: a stored flag that is set at the first row of every slice, where recurrent
            networks take the stored state. None: it stays as it was stored.
        strict_length: only episodes of ``L`` rows and more. ``False``: shorter ones are one window,
            and the batch has fewer rows.
        pad_output: with ``strict_length=False``: short windows repeat their last row, and
            ``("collector", "mask")``, bool ``[B]``, is True at real rows.
        span: windows may hang over the start and the end of an episode (one value, or two) and are
            then shorter: ``True``: at least 1 row remains; i: at least ``L - i``.
        measure: which windows are likely: ``"window"``: all equally. ``"trajectory"``: episodes
            equally, then their windows. ``"lane"``: lanes equally, then their windows.
            ``"transition"``: episodes by their rows, then their windows.
        draw: ``"iid"``: independently. ``"stratified"``: one in each of K equal parts of the
            measure; with ``measure="lane"`` lanes take turns. ``"without_replacement"``: none twice
            in a batch. ``"sequential"``: from the oldest episode on, ``stride`` rows apart; every
            batch goes on where the last one ended, after the newest at the oldest;
            ``pass_index`` counts the rounds.
        pad: windows may hang over ``"left"``, ``"right"``, ``"both"`` ends of an episode or none,
            and are padded; the mask says where.
        short: of episodes of at most ``L`` rows: ``"whole"`` (but for ``pad="none"``): one window,
            padded. ``"law"``: windows as of longer ones. ``"exclude"``: none if shorter.
        align: whether real rows come first (``"left"``) or last (``"right"``).
        pad_value: a number for padding, or numbers by key; flags are always False.
        recent: ``(ratio, steps)``: where plain draws would see too few of the newest ``steps``
            windows of every lane (``ratio * rows per lane > steps``), ``ceil(ratio * K)`` slices
            are drawn among those; they come first.
        strict_lanes: with ``measure="lane"``: refuse unless every lane has a window.
        flat: ``False``: deliver ``[K, L]`` instead of ``[K * L]``.
        stride: of sequential draws; None: ``L``.
        allow_short: of draws without replacement: fewer slices where there are not as many windows.
        replacement: ``False`` makes a SliceSamplerWithoutReplacement of the other keywords.
        cache_values, compile, use_gpu: no effect; nothing is slow without.

    Attributes: ``num_slices``, ``slice_len``, ``end_key``, ``end_keys``, ``traj_key``, ``span``,
    ``strict_length``, ``pad_output``, ``truncated_key``, ``init_key`` and ``cache_values`` can be
    read, not set.

    A batch says of its rows, besides ``index``: ``sequence_id`` int64 ``[B]``, the slice; ``done``,
    ``truncated``, ``terminated`` bool ``[B, 1]`` under ``next``: done is set at the last row of
    every slice, truncated there unless the episode ends; ``init_key`` likewise at first rows,
    where it is stored.

    Raises:
        TypeError, ValueError, RuntimeError: arguments that exclude each other, or of which there
            are too many; when drawing: NotEnoughData where no window is stored.

    Cost: O(B + K log E) of E episodes, whatever was written before; every row is read once.

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

    @overload
    def __new__(
        cls, *, replacement: Literal[True] = True, draw: str = "iid", **kwargs: Any
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]  # of another class, as in TorchRL
        cls, *, replacement: Literal[False], draw: str = "iid", **kwargs: Any
    ) -> SliceSamplerWithoutReplacement: ...
    def __new__(cls, *, replacement: bool = True, draw: str = "iid", **kwargs: Any) -> Any:
        if not replacement:
            return SliceSamplerWithoutReplacement(**kwargs)
        # A class of its own, since its draws leave something behind that can be taken back.
        return super().__new__(_SequentialSlices if draw == "sequential" else cls)

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
        measure: str = "window",
        draw: str = "iid",
        pad: str | None = None,
        short: str | None = None,
        align: str = "left",
        pad_value: Any = 0,
        recent: tuple[float, int] | None = None,
        strict_lanes: bool = False,
        flat: bool = True,
        stride: int | None = None,
        allow_short: bool = False,
        replacement: bool = True,
    ) -> None:
        super().__init__()
        self.measure = one_of("measure", measure, MEASURES)
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
        self._slicing = Slicing(size, boundaries, form, markers, flat)
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
        self._plain = measure == "window" and draw == "iid" and recent is None
        # What was counted last, and of which state of the index.
        self._known: Anchors | None = None
        self._version = 0

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draws windows; returns the rows of all, one window after another, and their slices.

        Raises:
            NotEnoughData: no window is stored, or not as many as needed: says what there is.
            RuntimeError: slices do not fill the batch; records that are no TensorDicts; ``ends``
                of other rows than those stored. KeyError: no column to tell episodes by.
        """
        with storage.lock:
            self._ran_out = False
            if self._plain:
                request = self._slicing.request(storage, batch_size, self.needs)
                if request.window.whole:
                    return self._draw_plain(storage, request)
            request, anchors = self._prepare(storage, batch_size)
            found = self._draw(request, anchors)
            return self._slicing.deliver(storage, request, request.window.cut(found))

    def _draw_plain(
        self, storage: Storage, request: Request
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Independent draws among equally likely windows that have all their rows: the usual case,
        in fewer steps."""
        index, law, length = request.episodes, request.law, request.window.length
        count = index.total(law, WINDOWS)
        if not count:
            raise self._slicing.refuse(request, self.needs)
        number = integers(count, request.slices, self.generator)
        return self._slicing.hand_out(storage, *index.slices(law, number, length))

    def _prepare(self, storage: Storage, batch_size: int) -> tuple[Request, Anchors]:
        """What is asked for and what there is; refuses what cannot be. Draws nothing."""
        request = self._slicing.request(storage, batch_size, self.needs)
        anchors = self._anchors(request)
        if not anchors.count:
            raise self._slicing.refuse(request, self.needs)
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

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        """Raises where ``sample`` would; draws nothing."""
        self._prepare(storage, batch_size)

    def _anchors(self, request: Request, newest: int | None = None) -> Anchors:
        episodes, law = request.episodes, request.law
        if newest is not None:
            return MEASURES[self.measure](episodes, law, newest)
        known, version = self._known, episodes.version
        same = known is not None and known.index is episodes and known.law is law
        if known is not None and same and self._version == version:
            return known
        self._known, self._version = MEASURES[self.measure](episodes, law), version
        return self._known

    def _draw(self, request: Request, anchors: Anchors) -> Windows:
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
        return Windows(*(np.concatenate(pair) for pair in zip(recent, rest, strict=True)))

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._known = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._known = None

    def __repr__(self) -> str:
        return f"SliceSampler({self._slicing.size!r}, measure={self.measure!r}, draw={self.draw!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}


class _SequentialSlices(SliceSampler):
    """``SliceSampler(draw="sequential")``."""

    kind = "slice_sequential"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sequential = Sequential(self.stride)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        with storage.lock:
            self._ran_out = False
            request, _ = self._prepare(storage, batch_size)
            found = self._sequential.next(request, storage, request.slices)
            if found is None:
                raise self._off_grid(request)
            cut = request.window.cut(found)
            index, info = self._slicing.deliver(storage, request, cut)
            self._sequential.advance(found, index, request, storage)
            return index, info

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        request, _ = self._prepare(storage, batch_size)
        if not self._sequential.any(request, storage):
            raise self._off_grid(request)

    def _off_grid(self, request: Request) -> NotEnoughData:
        stride = self.stride or request.window.length
        text = f"none that begins a multiple of {stride} rows after its episode does"
        return self._slicing.refuse(request, self.needs, text)

    @property
    def pass_index(self) -> int:
        """How often the draws have been round all windows."""
        return self._sequential.pass_index

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._sequential.attach(storage)

    def add(self, index: Any) -> None:
        self._sequential.written(index)

    def extend(self, index: torch.Tensor) -> None:
        self._sequential.written(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        self._sequential.written(index)

    def empty(self) -> None:
        super().empty()
        self._sequential.restart()

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        self._sequential.put_back(drawn, storage)

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        self._sequential.moved(rows, storage)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._sequential.state_dict()}

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        super().check_state(state_dict, storage)
        Sequential.check_state(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._sequential.load_state_dict(Sequential.check_state(state_dict))
