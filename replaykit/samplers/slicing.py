"""What samplers of slices share: sizes, boundaries, windows, and how these are handed out."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from replaykit.episodes import CountLaw, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.keywords import Replaced
from replaykit.samplers.base import Sampler
from replaykit.samplers.markers import MASK, SEQUENCE_ID, Markers
from replaykit.samplers.slice_arguments import Boundaries, SliceSize, checked_pad_value
from replaykit.samplers.windows import Cut, Window, WindowForm
from replaykit.storages import Storage
from replaykit.storages.indexing import unravel_index

__all__ = ["Request", "Sliced", "Slicing", "checked_markers", "checked_short"]


Array = np.ndarray[Any, Any]


class Request(NamedTuple):
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

    def request(self, storage: Storage, batch_size: int, needs: Needs) -> Request:
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
        return Request(slices, window, index, self._law)

    def refuse(self, request: Request, needs: Needs, found: str = "no window") -> NotEnoughData:
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
        self, storage: Storage, request: Request, cut: Cut
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
