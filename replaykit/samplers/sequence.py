"""Draw a window of rows around every drawn row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from replaykit.episodes import BoundaryRule, EpisodeIndex, Needs
from replaykit.keywords import one_of, whole_number
from replaykit.samplers.sampler import Sampler, SampleUnit
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel, unravel_index
from replaykit.structure import Branch
from replaykit.ted import DONE, Key, unravel
from replaykit.transfer import put_on

EPISODE_BOUNDARIES = ("pad", "stop", "include_reset")
"""The ways in which a window treats the end of its episode; see ``Sequence``."""

Array = np.ndarray[Any, Any]


class Sequence(SampleUnit):
    """Makes a window of ``W = burn_in + length + bootstrap`` rows for each drawn row.

    The drawn row is the anchor of its window. The window lies in the lane of the anchor, and
    ``burn_in`` of its rows precede the anchor. Neighbouring rows of a window are ``dilation`` rows
    apart. So row ``s`` of a window is ``dilation * (s - burn_in)`` rows after the anchor.

    Every sampler of single rows can draw the anchors. Random and prioritized samplers give random
    and prioritized sequences. A SliceSampler of ``slice_len=1`` draws anchors by its ``measure=``,
    ``draw=`` and ``recent=``.

    A batch of B anchors has ``B * W`` rows, one window after another. Its info has these keys in
    addition to ``index``:

    =====================  ========================================================================
    ``anchor_index``       the row that was drawn, int64 ``[B*W]`` (``[B*W, ndim]``)
    ``sequence_id``        number of the row's window, int64: ``0..B-1``
    ``step_in_sequence``   number of the row in its window, int64: ``0..W-1``
    ``learning_mask``      bool: neither burn-in nor bootstrap
    ``validity_mask``      bool: the row belongs to the window, and does not fill a gap
    ``anchor_generation``  generation of the anchor's slot, int64, where generations are reported
    =====================  ========================================================================

    The sampler's info of an anchor is repeated for all rows of its window.
    ``update_tensordict_priority`` gives an anchor the largest priority of the valid rows of its
    window.

    Args:
        length: number of rows to learn from; the anchor is the first of them.
        episode_boundary: the treatment of a window that extends beyond its episode. "pad": the
            episode's first or last row fills the positions beyond the episode, and is not valid
            there. "stop": the window moves back until its end fits. The anchor moves at most to the
            episode's first row. Positions that still do not fit are padded. "include_reset": the
            window continues in the neighbouring episode. It ends only at the write seam, at a
            manual cut, and at rows that are not stored.
        done_key: by default, the flags ``done``, ``terminated`` and ``truncated`` and a change of a
            stored id end an episode. Another key replaces these flags, but not the ids. None: only
            the write seam bounds windows.
        burn_in: number of rows before the anchor, for example to warm up a recurrent state.
        bootstrap: number of rows after the rows to learn from.
        dilation: distance between neighbouring rows of a window.

    Raises:
        ValueError: a number is too small, or ``episode_boundary`` is unknown. A buffer also raises
            it if the sampler itself draws windows of several rows.
        TypeError: a number is not an int. A buffer also raises it unless rows are TensorDicts in a
            tensor storage.
        KeyError: ``done_key`` is not stored, at the time of sampling.

    Cost: O(B * W), independent of the number of stored rows. A custom ``done_key`` takes one pass
    over that column at the first sample. After that every write updates its index.

    Source: stored-state burn-in of Kapturowski et al. 2019, "Recurrent Experience Replay in
    Distributed Reinforcement Learning".

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Sequence
        >>> unit = Sequence(length=3, burn_in=2, bootstrap=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=unit)
        >>> done = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"next": {"done": done}}, batch_size=[10]))
        >>> index, info = unit.expand(torch.tensor([5]), {}, rb.storage)
        >>> index.tolist(), info["validity_mask"].tolist()
        ([4, 4, 5, 6, 7, 8], [False, True, True, True, True, True])
        >>> rb.sample(4).batch_size
        torch.Size([24])
    """

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: Key | None = DONE,
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        for name, value, least in (
            ("length", length, 1),
            ("burn_in", burn_in, 0),
            ("bootstrap", bootstrap, 0),
            ("dilation", dilation, 1),
        ):
            whole_number(name, value, least)
        one_of("episode_boundary", episode_boundary, EPISODE_BOUNDARIES)
        self.length, self.burn_in, self.bootstrap = length, burn_in, bootstrap
        self.dilation, self.episode_boundary = dilation, episode_boundary
        self.done_key = None if done_key is None else unravel(done_key)
        self._rule = _rule_of(self.done_key)
        steps = np.arange(burn_in + length + bootstrap)
        self._offsets: Array = (steps - burn_in) * dilation
        self._learning: Array = (steps >= burn_in) & (steps < burn_in + length)
        # The storage holds an index with a custom rule only weakly.
        self._index: EpisodeIndex | None = None

    @property
    def width(self) -> int:
        """Number of rows of a window, ``burn_in + length + bootstrap``."""
        return len(self._offsets)

    def check(self, storage: Storage, sampler: Sampler) -> None:
        columns = _columns_of(storage)
        if not sampler.draws_anchors:
            raise ValueError(
                f"expected a sampler of single rows with a Sequence, got {type(sampler).__name__}, "
                "which draws windows itself; use one of the two, or slices of one row "
                "(slice_len=1), whose measure then decides which rows are anchors"
            )
        if columns.initialized:
            _check_content(columns)

    def anchor_needs(self, needs: Needs) -> Needs:
        """Return the needs of an anchor: those of the first and the last row of its window."""
        before, after = -int(self._offsets[0]), int(self._offsets[-1])
        if self.episode_boundary == "stop":
            before += after  # the window may move back that far
        return replace(
            needs,
            past=needs.past and needs.past + before,
            open_future=needs.open_future and needs.open_future + after,
            future=needs.future and needs.future + after,
        )

    def expand(
        self,
        index: torch.Tensor | tuple[torch.Tensor, ...],
        info: dict[str, Any],
        storage: Storage,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the rows and info of the windows of anchors ``[B]`` (``[B, ndim]``).

        The caller holds the storage's lock.

        Args:
            index: the anchors, as a tensor or as a tuple with one ``[B]`` per dimension.

        Raises:
            TypeError: the rows are not TensorDicts.
            KeyError: ``done_key`` is not stored.
        """
        episodes = self.episodes(storage)
        if isinstance(index, tuple):
            index = index[0] if len(index) == 1 else torch.stack(index, -1)
        lanes, count, width = storage.lanes, len(index), self.width
        flat = ravel(index, lanes) if lanes else index
        time, lane = episodes.time_and_lane(flat.cpu().numpy())
        wanted, first, last = self._wanted(episodes, time, lane)
        valid = (wanted >= first) & (wanted <= last)
        rows = np.minimum(np.maximum(wanted, first), last).reshape(-1)
        element = episodes.element(rows, np.repeat(lane, width))
        found = _tensor(element, index.device)
        expanded = unravel_index(found, lanes) if lanes else found
        info_of_rows: dict[str, Any] = {}
        for key, value in info.items():
            known = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == count
            info_of_rows[key] = value.repeat_interleave(width, 0) if known else value
        if "index_generation" in info_of_rows:
            slots = expanded[:, 0] if lanes else expanded
            info_of_rows["anchor_generation"] = info_of_rows["index_generation"]
            info_of_rows["index_generation"] = storage.ledger.generations(slots)
        info_of_rows["anchor_index"] = index.repeat_interleave(width, 0)
        for name, values in (
            ("sequence_id", np.repeat(np.arange(count), width)),
            ("step_in_sequence", np.tile(np.arange(width), count)),
            ("learning_mask", np.tile(self._learning, count)),
            ("validity_mask", valid.reshape(-1)),
        ):
            info_of_rows[name] = _tensor(values, index.device)
        return expanded, info_of_rows

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys that `expand` adds."""
        return (
            "anchor_index",
            "anchor_generation",
            "sequence_id",
            "step_in_sequence",
            "learning_mask",
            "validity_mask",
        )

    def _wanted(
        self, episodes: EpisodeIndex, time: Array, lane: Array
    ) -> tuple[Array, Array, Array]:
        """Return times ``[B, W]`` that ignore episode ends, and the bounds of valid times."""
        if self.episode_boundary == "include_reset":
            first, last = episodes.streams(time, lane)
        else:
            first, last = episodes.spans(time, lane)
        if self.episode_boundary == "stop":
            beyond = time + self._offsets[-1] - last
            time = time - np.clip(beyond, 0, time - first)
        return time[:, None] + self._offsets, first[:, None], last[:, None]

    def episodes(self, storage: Storage) -> EpisodeIndex:
        """Return the index that cuts the windows. The caller holds the storage's lock."""
        columns = _columns_of(storage)
        _check_content(columns)
        self._index = columns.indexes.of(self._rule)
        return self._index

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, "
            f"episode_boundary={self.episode_boundary!r}, burn_in={self.burn_in}, "
            f"bootstrap={self.bootstrap}, dilation={self.dilation})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}


def anchor_priorities(
    anchor: torch.Tensor,
    generation: torch.Tensor | None,
    priority: torch.Tensor,
    valid: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return each anchor once, with the largest priority of its valid rows.

    The result has the anchors, the priorities, and the generations, or None if these are unknown.

    Args:
        anchor: ``anchor_index`` of rows, int64 ``[N]`` or ``[N, ndim]``.
        generation: ``anchor_generation``, int64 ``[N]``.
        priority: priorities of the rows, ``[N]``.
        valid: ``validity_mask``, bool ``[N]``. Anchors without a valid row are not returned.
    """
    columns = [anchor.reshape(len(valid), -1)]
    if generation is not None:
        columns.append(generation.reshape(-1, 1))
    keys = torch.cat(columns, 1)[valid]
    priority = priority[valid.to(priority.device)]
    # Rows of a window are consecutive, so the first step reduces B * W keys to B.
    for unique in (torch.unique_consecutive, torch.unique):
        keys, group = unique(keys, return_inverse=True, dim=0)
        largest = priority.new_zeros(len(keys))
        group = group.to(priority.device)
        priority = largest.scatter_reduce_(0, group, priority, "amax", include_self=False)
    index = keys[:, : columns[0].shape[1]]
    anchors = index if anchor.ndim > 1 else index[:, 0].contiguous()
    return anchors, priority, None if generation is None else keys[:, -1].contiguous()


def _columns_of(storage: Storage) -> ColumnStorage:
    """Return the storage. Raises TypeError unless it is a tensor or memmap storage."""
    if not isinstance(storage, ColumnStorage):
        raise TypeError(
            "expected a tensor or memmap storage for a Sequence, got "
            f"{type(storage).__name__}, which does not know where episodes end"
        )
    return storage


def _check_content(storage: ColumnStorage) -> None:
    root = storage.require().schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        kind = root.kind if isinstance(root, Branch) else "tensor"
        raise TypeError(f"expected TensorDicts for a Sequence, got rows of kind {kind!r}")


def _rule_of(done_key: tuple[str, ...] | None) -> BoundaryRule:
    if done_key is None:
        return BoundaryRule(flags=(), ids=())
    return BoundaryRule() if done_key == DONE else BoundaryRule(flags=(done_key,))


def _tensor(values: Array, device: torch.device) -> torch.Tensor:
    return put_on(torch.from_numpy(values), device)
