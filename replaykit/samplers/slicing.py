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

__all__ = [
    "Recency",
    "RecentPriorities",
    "SliceRequest",
    "Sliced",
    "Slicing",
    "checked_markers",
    "checked_recent",
    "checked_short",
]

Array = np.ndarray[Any, Any]


class SliceRequest(NamedTuple):
    """What a batch asks for: ``slices`` windows of the episodes of ``episodes`` under ``law``."""

    slices: int
    window: Window
    episodes: EpisodeIndex
    law: CountLaw


class Slicing:
    """How a sampler cuts slices; the sampler decides which.

    Args:
        size: how many and how long.
        boundaries: what ends an episode.
        form: strict, spanning or padded.
        markers: what is said of the rows.
        flat: ``False``: batches are delivered as ``[slices, length]``.

    Raises:
        ValueError: slices of different lengths cannot be delivered so.
    """

    def __init__(
        self,
        size: SliceSize,
        boundaries: Boundaries,
        form: WindowForm,
        markers: Markers,
        flat: bool = True,
    ) -> None:
        if not flat and not form.full:
            raise ValueError(
                "flat=False needs slices of one length: strict ones, or padded with pad= or "
                "pad_output="
            )
        self.size, self.boundaries, self.form, self.markers = size, boundaries, form, markers
        self.flat = bool(flat)
        if size.slice_len:
            form.of(size.slice_len)  # refuses spans that are too wide
        self._window: Window | None = None
        self._needs: Needs | None = None
        self._law_of: CountLaw | None = None
        self._law = CountLaw(1, 0)

    def request(self, storage: Storage, batch_size: int, needs: Needs) -> SliceRequest:
        """What a batch of that many rows asks for. The lock is held.

        Raises:
            RuntimeError: nothing is stored, slices that do not fill the batch, or records that
                have no episodes. KeyError: no column to tell them by.
        """
        if not len(storage):
            raise NotEnoughData("Cannot sample from an empty storage.")
        slices, length = self.size.of(batch_size)
        window = self._window
        if window is None or window.length != length:
            window = self._window = self.form.of(length)
        index = self.boundaries.index(storage)
        if storage.schema is not None:
            self.markers.check(storage.schema)
        if needs is not self._needs or window.law is not self._law_of:
            self._needs, self._law_of = needs, window.law
            self._law = window.law.needing(needs)
        return SliceRequest(slices, window, index, self._law)

    def refuse(
        self, request: SliceRequest, needs: Needs, found: str = "no window"
    ) -> NotEnoughData:
        """The error for a batch that the stored rows cannot fill; names what there is."""
        index, rows = request.episodes, request.episodes.stored_rows()
        text = (
            f"expected {request.slices} slices of {request.window.length} rows, got {found}: "
            f"{rows} rows are stored, and the longest episode has {index.longest()}"
        )
        if 0 < index.longest() < request.window.length and found == "no window":
            text = f"Did not find a single trajectory with sufficient length: {text}"
        if needs:
            text += f"; transforms besides need {needs}"
        if index.longest() == 1 and rows > 1:
            text += (
                ". If rows of several streams lie interleaved, give each a lane of its own "
                "(ndim=2), or name the column that tells them apart (lane_key=) of the storage"
            )
        return NotEnoughData(text)

    def deliver(
        self, storage: Storage, request: SliceRequest, cut: Cut
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """The rows of windows as users see them, and which window each belongs to."""
        return self.hand_out(storage, *request.window.lay_out(request.episodes, cut))

    def hand_out(
        self, storage: Storage, element: Array, window: Array, mask: Array | None = None
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Elements, windows and mask of rows (see ``Layout``) as users see them."""
        index = torch.from_numpy(element)
        info: dict[Any, Any] = {SEQUENCE_ID: torch.from_numpy(window)}
        if mask is not None:
            info[MASK] = torch.from_numpy(np.ascontiguousarray(mask))
        if storage.ndim > 1:
            index = unravel_index(index, storage.lanes)
        device = storage.device
        if device != _CPU:
            index = index.to(device)
            info = {key: value.to(device) for key, value in info.items()}
        return index, info

    def shape_of(self, rows: int) -> tuple[int, ...] | None:
        """Batch shape in which rows are delivered; None: flat."""
        if self.flat:
            return None
        if self.size.slice_len:
            return rows // self.size.slice_len, self.size.slice_len
        assert self.size.num_slices is not None
        return self.size.num_slices, rows // self.size.num_slices


_CPU = torch.device("cpu")


class Sliced(Sampler):
    """A sampler of slices: what a buffer asks of it that does not depend on which it draws."""

    needs_write_order = True
    draws_windows = True

    _slicing: Slicing
    _cache_values = True
    _replaced: ClassVar[dict[str, Replaced]] = {
        "step_key": Replaced(
            ("step_count", ("step_count",)),
            "interleaved trajectories are told apart by lane_key= of the storage",
        ),
        "fragmented": Replaced(
            (False,), "interleaved trajectories are told apart by lane_key= of the storage"
        ),
    }

    @property
    def num_slices(self) -> int | None:
        """Slices of a batch, as given; None where ``slice_len`` was given."""
        return self._slicing.size.num_slices

    @property
    def slice_len(self) -> int | None:
        """Rows of a slice, as given; None where ``num_slices`` was given."""
        return self._slicing.size.slice_len

    @property
    def end_key(self) -> Any:
        """The flag that ends episodes, as given; None where other arguments say what does.

        Without any such argument it is ``("next", "done")``, beside which ``truncated`` and
        ``terminated`` end episodes too.
        """
        return self._slicing.boundaries.end_key

    @property
    def end_keys(self) -> tuple[Any, ...] | None:
        """The flags of which each ends episodes, as given; None where there was no such list."""
        return self._slicing.boundaries.end_keys

    @property
    def traj_key(self) -> Any:
        """The key of which a change ends an episode: as given, else the first that is stored.

        A tuple of keys where several were given. None where none is stored, before the first
        write, and where other arguments say what ends an episode.
        """
        return self._slicing.boundaries.traj_key

    @property
    def truncated_key(self) -> Any:
        """Where batches say that a slice was cut; None where they do not."""
        return self._slicing.markers.truncated_key

    @property
    def init_key(self) -> Any:
        """Where batches mark the first row of a slice, if it is stored; None where they do not."""
        return self._slicing.markers.init_key

    @property
    def span(self) -> tuple[int | bool, int | bool]:
        """How far slices may hang over the start and the end of an episode."""
        return self._slicing.form.span

    @property
    def strict_length(self) -> bool:
        """Whether episodes that are shorter than a slice are left out."""
        return self._slicing.form.skips_short

    @property
    def pad_output(self) -> bool:
        """Whether every slice is padded to its full length, with a mask that tells real rows."""
        return self._slicing.form.filled

    @property
    def cache_values(self) -> bool:
        """As given, without effect: where episodes end is always kept up to date."""
        return self._cache_values

    @property
    def draws_anchors(self) -> bool:
        slicing = self._slicing
        alone = slicing.size.slice_len == 1 and slicing.form.full and not slicing.form.filled
        return alone and slicing.flat and not self.prioritized

    @property
    def tells(self) -> tuple[Any, ...]:
        """Which slice a row is of, whether it is padding, and what it tells besides."""
        told = (SEQUENCE_ID, MASK) if self._slicing.form.filled else (SEQUENCE_ID,)
        return (*super().tells, *told)

    @abstractmethod
    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        """Raises where ``sample`` would; draws nothing. The lock is held."""

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        with storage.lock:
            try:
                self._refuse_early(storage, batch_size)
            except (RuntimeError, KeyError, ValueError):
                return False
            return True

    def episodes(self, storage: Storage) -> EpisodeIndex:
        return self._slicing.boundaries.index(storage)

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        return self._slicing.markers.complete(rows, info)

    def complete_fresh(self, rows: Any, info: dict[Any, Any]) -> Any:
        if type(self).complete is not Sliced.complete:
            return self.complete(rows, info)
        return self._slicing.markers.complete_fresh(rows, info)

    def shape_of(self, rows: int) -> tuple[int, ...] | None:
        return self._slicing.shape_of(rows)

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._slicing.boundaries.attach(storage)

    def rejoin(self, storage: Storage) -> None:
        super().rejoin(storage)
        self._slicing.boundaries.rejoin(storage)


def checked_markers(
    truncated_key: Any, init_key: Any, boundaries: Boundaries, pad: str | None, pad_value: Any
) -> Markers:
    """What is said of the rows of windows; ValueError for a ``pad_value`` without ``pad``."""
    values = checked_pad_value(pad_value)
    if pad is None and values != {(): 0}:
        raise ValueError("pad_value= is for windows that are padded: it needs pad=")
    return Markers(truncated_key, init_key, boundaries.rule.flags, None if pad is None else values)


def checked_short(allow_short: Any, draw: str, flat: bool, slice_len: int | None) -> bool:
    """Whether a batch may have fewer slices; ValueError where that cannot be."""
    if allow_short and draw != "without_replacement":
        raise ValueError(f"allow_short needs draw='without_replacement', got {draw!r}")
    if allow_short and not flat and slice_len is None:
        raise ValueError("expected slice_len with flat=False and allow_short, got num_slices")
    return bool(allow_short)


class Recency(NamedTuple):
    """A share ``ratio`` of the slices of a batch from the newest ``steps`` windows of every lane.

    Example:
        >>> from replaykit.samplers.slicing import checked_recent
        >>> checked_recent((0.5, 1000), "iid")
        Recency(ratio=0.5, steps=1000)
    """

    ratio: float
    steps: int

    def slices(self, request: SliceRequest, needs: Needs) -> int:
        """How many slices of a batch these are: none where plain draws see enough of them."""
        rows = request.episodes.stored_rows() / request.episodes.lanes
        if self.ratio * (rows - (request.window.length - 1) - needs.past) <= self.steps:
            return 0
        return math.ceil(round(self.ratio * request.slices, 9))


def checked_recent(recent: Any, draw: str) -> Recency | None:
    """Returns what ``recent=`` of a sampler of slices says; None: nothing.

    Raises:
        TypeError: no pair. ValueError: numbers out of range, or a draw without such a share.
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
        raise ValueError(f"recent= goes with draw='iid' or 'stratified', got {draw!r}")
    return Recency(float(ratio), int(steps))


class RecentPriorities:
    """The newest ``steps`` windows of every lane, to be drawn by the priority of their starts.

    Cost: O(steps * lanes) for a batch, and a search each after a write.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._of: tuple[EpisodeIndex, CountLaw, int] | None = None
        self._element = torch.empty(0, dtype=torch.int64, device="cpu")
        self._first = np.zeros(0, np.int64)

    def follow(self, request: SliceRequest) -> None:
        """Takes over which windows are the newest now. The lock is held."""
        index, law = request.episodes, request.law
        known = self._of
        if known and known[0] is index and known[1] is law and known[2] == index.version:
            return
        windows = PerWindow(index, law, self.steps)
        found = windows.numbered(np.arange(windows.count))
        time = found.base + found.rest
        self._element = torch.from_numpy(index.element(time, found.lane))
        # In each lane the newest windows start at a time and after it.
        self._first = np.full(index.lanes, np.iinfo(np.int64).max)
        np.minimum.at(self._first, found.lane, time)
        self._of = index, law, index.version

    def among(self, start: torch.Tensor) -> torch.Tensor:
        """Bool ``[K]``: which of some starts of windows are those of the newest."""
        assert self._of is not None
        time, lane = self._of[0].place(start.cpu().numpy())
        return torch.from_numpy(time >= self._first[lane]).to(start.device)

    def draw(
        self,
        count: int,
        sums: SumSegmentTree,
        generator: torch.Generator | None,
        stratified: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Draws starts int64 ``[count]`` by their ``v``: they, their ``v`` in float64, and the sum
        of ``v`` over the newest windows; None where that is 0: nothing is drawn.

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
        # Rounding may lead to the very end: that is the last one with weight.
        at = np.minimum(at, np.searchsorted(upto, upto[-1]))
        chosen = torch.from_numpy(at)
        return self._element[chosen], values[chosen], float(upto[-1])
