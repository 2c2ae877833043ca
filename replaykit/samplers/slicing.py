"""Share sizes, boundaries and recent windows among samplers of slices."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from replaykit.episodes import CountLaw, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.keywords import Replaced
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.sampler import Sampler
from replaykit.samplers.slice_arguments import Boundaries, SliceSize, checked_pad_value
from replaykit.samplers.window_forms import MASK, SEQUENCE_ID, Cut, Markers, Window, WindowForm
from replaykit.samplers.window_measures import PerWindow, uniform
from replaykit.storages import Storage
from replaykit.storages.indexing import unravel_index
from replaykit.transfer import put_on

Array = np.ndarray[Any, Any]


class SliceRequest(NamedTuple):
    """The request for a batch: ``slices`` windows of ``episodes`` under ``law``."""

    slices: int
    window: Window
    episodes: EpisodeIndex
    law: CountLaw


class Slicing:
    """The way in which a sampler cuts slices. The sampler itself chooses the slices.

    Args:
        size: number and length of the slices.
        boundaries: the ends of episodes.
        form: the form of windows: strict, spanning or padded.
        markers: the flags that mark the ends of windows.
        flat: if ``False``, batches are delivered as ``[slices, length]``.
        cross: if True, windows may span ends that flags mark.

    Attributes:
        within: the ends of episodes, also if windows may span them.
        every: ``boundaries`` and ``within``.

    Raises:
        ValueError: ``flat`` is ``False``, but slices may have different lengths; or tensors give
            the ends that windows may span.
    """

    def __init__(
        self,
        size: SliceSize,
        boundaries: Boundaries,
        form: WindowForm,
        markers: Markers,
        flat: bool = True,
        cross: bool = False,
    ) -> None:
        if not flat and not form.full:
            raise ValueError(
                "flat=False needs slices of one length: strict ones, or padded with pad= or "
                "pad_output="
            )
        self.within, self.crosses = boundaries, bool(cross)
        if cross:
            boundaries = boundaries.without_flags()
        self.every = (boundaries, self.within) if cross else (boundaries,)
        self.size, self.boundaries, self.form, self.markers = size, boundaries, form, markers
        self.flat = bool(flat)
        if size.slice_len:
            Window(form, size.slice_len)  # raises for spans that are too wide
        self._window: Window | None = None
        self._needs: Needs | None = None
        self._law = CountLaw(1, 0)

    def request(self, storage: Storage, batch_size: int, needs: Needs) -> SliceRequest:
        """Return the request for a batch of ``batch_size`` rows.

        The caller holds the lock.

        Raises:
            RuntimeError: the storage is empty, slices do not fill the batch, or the rows have no
                episodes.
            KeyError: no stored column shows where episodes end.
            ValueError: windows may span ends, but transforms need whole episodes.
        """
        if not len(storage):
            raise NotEnoughData("Cannot sample from an empty storage.")
        slices, length = self.size.of(batch_size)
        index = self.boundaries.index(storage)
        if storage.schema is not None:
            self.markers.check(storage.schema)
        window = self._window
        if window is None or window.length != length or needs is not self._needs:
            if self.crosses and (needs.closed or needs.intact or needs.future):
                raise ValueError(
                    "expected cross=True without transforms that need the end or later rows of an "
                    f"episode, got {needs}"
                )
            window = self._window = Window(self.form, length, followed=needs.future > 0)
            self._needs, self._law = needs, window.law.needing(needs)
        return SliceRequest(slices, window, index, self._law)

    def refuse(
        self, request: SliceRequest, needs: Needs, found: str = "no window"
    ) -> NotEnoughData:
        """Return the error for a batch that the stored rows cannot fill."""
        index, rows = request.episodes, request.episodes.stored_rows()
        text = (
            f"expected {request.slices} slices of {request.window.length} rows, got {found}: "
            f"{rows} rows are stored, and the longest episode has {index.longest()}"
        )
        if 0 < index.longest() < request.window.length and found == "no window":
            text = f"Did not find a single trajectory with sufficient length: {text}"
        if needs:
            text += f"; transforms also need {needs}"
        if index.longest() == 1 and rows > 1:
            text += (
                ". If rows of several streams are interleaved, give each stream its lane "
                "(ndim=2), or pass the column that names the stream to the storage (lane_key=)"
            )
        return NotEnoughData(text)

    def deliver(
        self, storage: Storage, request: SliceRequest, cut: Cut
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return the rows of windows as users see them, and the window of each row."""
        return self.hand_out(storage, *request.window.lay_out(request.episodes, cut))

    def hand_out(
        self, storage: Storage, element: Array, window: Array, mask: Array | None = None
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Return flat indices, windows and mask in the form that users see.

        ``WindowRows`` describes the arguments.
        """
        index = torch.from_numpy(element)
        info: dict[Any, Any] = {SEQUENCE_ID: torch.from_numpy(window)}
        if mask is not None:
            info[MASK] = torch.from_numpy(np.ascontiguousarray(mask))
        if storage.ndim > 1:
            index = unravel_index(index, storage.lanes)
        device = storage.device
        if device != _CPU:
            index = put_on(index, device)
            info = {key: put_on(value, device) for key, value in info.items()}
        return index, info


_CPU = torch.device("cpu")


class Sliced(Sampler):
    """Base class of slice samplers, with the methods that do not depend on the draw."""

    needs_write_order = True
    draws_windows = True

    _slicing: Slicing
    _cache_values = True
    _replaced: ClassVar[dict[str, Replaced]] = {
        "step_key": Replaced(
            ("step_count", ("step_count",)),
            "interleaved trajectories are separated by lane_key= of the storage",
        ),
        "fragmented": Replaced(
            (False,), "interleaved trajectories are separated by lane_key= of the storage"
        ),
    }

    @property
    def num_slices(self) -> int | None:
        """The given number of slices of a batch; None if ``slice_len`` was given."""
        return self._slicing.size.num_slices

    @property
    def slice_len(self) -> int | None:
        """The given number of rows of a slice; None if ``num_slices`` was given."""
        return self._slicing.size.slice_len

    @property
    def end_key(self) -> Any:
        """The given flag that ends episodes; None if other arguments define the ends.

        Without any such argument it is ``("next", "done")``. In that case ``truncated`` and
        ``terminated`` also end episodes.
        """
        return self._slicing.boundaries.end_key

    @property
    def end_keys(self) -> tuple[Any, ...] | None:
        """The given list of flags that end episodes; None without a list."""
        return self._slicing.boundaries.end_keys

    @property
    def traj_key(self) -> Any:
        """The key whose change ends an episode, or a tuple of several given keys.

        Without a given key, it is the first default key that is stored. It is None if no such key
        is stored, before the first write, and if other arguments define the ends of episodes.
        """
        return self._slicing.boundaries.traj_key

    @property
    def truncated_key(self) -> Any:
        """The flag that marks the cut of a slice in a batch; None for no flags."""
        return self._slicing.markers.truncated_key

    @property
    def init_key(self) -> Any:
        """The stored flag that batches set at the first row of a slice; or None."""
        return self._slicing.markers.init_key

    @property
    def span(self) -> tuple[int | bool, int | bool]:
        """The number of rows by which slices may extend beyond the ends of an episode."""
        return self._slicing.form.span

    @property
    def strict_length(self) -> bool:
        """True if episodes shorter than a slice are never drawn."""
        return self._slicing.form.skips_short

    @property
    def pad_output(self) -> bool:
        """True if every slice is padded to its full length, with a mask of the real rows."""
        return self._slicing.form.filled

    @property
    def cache_values(self) -> bool:
        """The argument of this name. It has no effect: episode ends are always up to date."""
        return self._cache_values

    @property
    def draws_anchors(self) -> bool:
        slicing = self._slicing
        alone = slicing.size.slice_len == 1 and slicing.form.full and not slicing.form.filled
        return alone and slicing.flat and not self.prioritized

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys of all samplers, the slice number, and the mask of padded slices."""
        own_keys = (SEQUENCE_ID, MASK) if self._slicing.form.filled else (SEQUENCE_ID,)
        return (*super().info_keys, *own_keys)

    @property
    def _marks(self) -> tuple[Any, ...]:
        return self._slicing.markers.keys

    @abstractmethod
    def _prepare(self, storage: Storage, batch_size: int) -> Any:
        """Return the parts that a draw needs. Raise if ``sample`` would raise."""

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        """Raise if ``sample`` would raise; draw nothing. The caller holds the lock."""
        self._prepare(storage, batch_size)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        with storage.lock:
            try:
                self._refuse_early(storage, batch_size)
            except (RuntimeError, KeyError, ValueError):
                return False
            return True

    def episodes(self, storage: Storage) -> EpisodeIndex:
        return self._slicing.within.index(storage)

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        return self._slicing.markers.complete(rows, info)

    def complete_fresh(self, rows: Any, info: dict[Any, Any]) -> Any:
        if type(self).complete is not Sliced.complete:
            return self.complete(rows, info)
        return self._slicing.markers.complete(rows, info, fresh=True)

    def shape_of(self, rows: int) -> tuple[int, ...] | None:
        if self._slicing.flat:
            return None
        known = self._slicing.size.known
        return (rows // known, known) if self.slice_len else (known, rows // known)

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        for boundaries in self._slicing.every:
            boundaries.attach(storage)

    def rejoin(self, storage: Storage) -> None:
        super().rejoin(storage)
        for boundaries in self._slicing.every:
            boundaries.rejoin(storage)


def checked_markers(
    truncated_key: Any, init_key: Any, boundaries: Boundaries, pad: str | None, pad_value: Any
) -> Markers:
    """Return the markers of windows. ValueError if ``pad_value`` lacks ``pad``."""
    values = checked_pad_value(pad_value)
    if pad is None and values != {(): 0}:
        raise ValueError("pad_value= applies to padded windows: it needs pad=")
    return Markers(truncated_key, init_key, boundaries.rule.flags, None if pad is None else values)


def checked_short(allow_short: Any, draw: str, flat: bool, slice_len: int | None) -> bool:
    """Return ``allow_short``, checked. Raises ValueError if other arguments forbid it."""
    if allow_short and draw != "without_replacement":
        raise ValueError(f"allow_short needs draw='without_replacement', got {draw!r}")
    if allow_short and not flat and slice_len is None:
        raise ValueError("expected slice_len with flat=False and allow_short, got num_slices")
    return bool(allow_short)


def none_of(where: Any) -> str:
    """Return the words of an error if no window can be drawn."""
    return "no window" if where is None else "no window that where= allows"


class Recency(NamedTuple):
    """A share ``ratio`` of a batch's slices from each lane's newest ``steps`` windows.

    Example:
        >>> from replaykit.samplers.slicing import checked_recent
        >>> checked_recent((0.5, 1000), "iid")
        Recency(ratio=0.5, steps=1000)
    """

    ratio: float
    steps: int

    def slices(self, request: SliceRequest, needs: Needs) -> int:
        """Return the number of slices to draw from the newest windows.

        It is 0 if plain draws return enough of the newest windows.
        """
        rows = request.episodes.stored_rows() / request.episodes.lanes
        if self.ratio * (rows - (request.window.length - 1) - needs.past) <= self.steps:
            return 0
        return math.ceil(round(self.ratio * request.slices, 9))


def checked_recent(recent: Any, draw: str) -> Recency | None:
    """Return the checked ``recent=`` argument of a slice sampler; None without it.

    Raises:
        TypeError: the argument is not a pair.
        ValueError: a number is out of range, or ``draw`` does not support ``recent``.
    """
    if recent is None:
        return None
    if not isinstance(recent, (tuple, list)) or len(recent) != 2:
        raise TypeError(f"expected recent as (ratio, steps), got {recent!r}")
    ratio, steps = recent
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ValueError(f"expected a ratio of recent slices in [0, 1], got {ratio!r}")
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise ValueError(f"expected recent steps as an int of at least 1, got {steps!r}")
    if draw not in ("iid", "stratified"):
        raise ValueError(f"recent= needs draw='iid' or 'stratified', got {draw!r}")
    return Recency(float(ratio), int(steps))


class RecentPriorities:
    """The newest ``steps`` windows of every lane, drawn by their starts' priorities.

    Cost: O(steps * lanes) for a batch. After a write, also one search per window.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._of: tuple[EpisodeIndex, CountLaw, int] | None = None
        self._element = torch.empty(0, dtype=torch.int64, device="cpu")
        self._first = np.zeros(0, np.int64)

    def refresh(self, request: SliceRequest) -> None:
        """Update the newest windows. The caller holds the lock."""
        index, law = request.episodes, request.law
        known = self._of
        if known and known[0] is index and known[1] is law and known[2] == index.version:
            return
        windows = PerWindow(index, law, self._steps)
        found = windows.numbered(np.arange(windows.count))
        time = found.base + found.rest
        self._element = torch.from_numpy(index.element(time, found.lane))
        # The newest windows of a lane start at this time or later.
        self._first = np.full(index.lanes, np.iinfo(np.int64).max)
        np.minimum.at(self._first, found.lane, time)
        self._of = index, law, index.version

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of": None}

    def among(self, start: torch.Tensor) -> torch.Tensor:
        """Return a bool mask ``[K]`` of the starts that belong to the newest windows."""
        assert self._of is not None
        time, lane = self._of[0].time_and_lane(start.cpu().numpy())
        return torch.from_numpy(time >= self._first[lane]).to(start.device)

    def draw(
        self,
        count: int,
        sums: SumSegmentTree,
        generator: torch.Generator | None,
        stratified: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Draw starts int64 ``[count]`` by their ``v``.

        Returns:
            The starts, their ``v`` in float64, and the sum of ``v`` over the newest windows. None
            if that sum is 0.

        Args:
            sums: a tree over ``v`` of the rows with which windows may start.
        """
        values = sums[self._element.to(sums.device)].to(device="cpu", dtype=torch.float64)
        upto = np.cumsum(values.numpy())
        if not (len(upto) and upto[-1] > 0):
            return None
        point = uniform(count, generator)
        if stratified:
            point = (np.arange(count) + point) / count
        at = np.searchsorted(upto, point * upto[-1], side="right")
        # Rounding may give a position after the last start with weight. Use that start then.
        at = np.minimum(at, np.searchsorted(upto, upto[-1]))
        chosen = torch.from_numpy(at)
        return self._element[chosen], values[chosen], float(upto[-1])
