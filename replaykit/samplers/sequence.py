"""A window of rows around every drawn one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.episodes import BoundaryRule, EpisodeIndex
from replaykit.samplers.sampler import Sampler, SampleUnit
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel, unravel_index
from replaykit.structure import Branch
from replaykit.ted import Key, unravel

__all__ = ["EPISODE_BOUNDARIES", "AnchorUpdate", "Sequence", "anchor_priorities"]

EPISODE_BOUNDARIES = ("pad", "stop", "include_reset")
"""What a window does where its episode ends; see ``Sequence``."""

_DEFAULT_DONE = ("next", "done")

Array = np.ndarray[Any, Any]


class Sequence(SampleUnit):
    """Makes ``W = burn_in + length + bootstrap`` rows of every drawn one, its anchor.

    They lie ``dilation`` rows apart, ``burn_in`` of them before the anchor: row ``s`` of a window
    is ``dilation * (s - burn_in)`` rows after it, in its lane. Whatever a sampler goes by, it draws
    anchors: random and prioritized ones give random and prioritized sequences, and a SliceSampler
    of ``slice_len=1`` those of its ``measure=``, ``draw=`` and ``recent=``.

    A batch of B anchors has ``B * W`` rows, one window after another, and beside ``index``:

    =====================  ========================================================================
    ``anchor_index``       the row that was drawn, int64 ``[B*W]`` (``[B*W, ndim]``)
    ``sequence_id``        which window a row belongs to, int64: ``0..B-1``
    ``step_in_sequence``   which row of its window, int64: ``0..W-1``
    ``learning_mask``      bool: neither burn-in nor bootstrap
    ``validity_mask``      bool: the row belongs to the window, and does not fill a gap
    ``anchor_generation``  that of the anchor's slot, int64, where generations are reported
    =====================  ========================================================================

    What the sampler knows of an anchor is repeated over its window.
    ``update_tensordict_priority`` gives an anchor the largest priority of its valid rows.

    Args:
        length: rows to learn from, the anchor the first of them.
        episode_boundary: what a window does where its episode ends. "pad": rows beyond the
            episode's first or last row are that row again, and not valid. "stop": the window moves
            back until its end fits, the anchor at most to the episode's first row; what does not
            fit even so is padded. "include_reset": it goes on into the neighbouring episode; only
            the write seam, what was cut by hand, and rows that are not stored end it.
        done_key: the default means all that ends an episode: the flags ``done``, ``terminated``
            and ``truncated``, and a change of a stored id. Another key is looked at instead of
            those flags, besides the ids. None: only the write seam bounds windows.
        burn_in: rows before the anchor, as to warm up a recurrent state.
        bootstrap: rows after those to learn from.
        dilation: distance of neighbouring rows.

    Raises:
        ValueError: a number too small, an unknown ``episode_boundary``; when a buffer takes it:
            together with a sampler that draws windows of several rows by itself.
        TypeError: not an int; in a buffer: records that are not TensorDicts in a tensor storage.
        KeyError: when sampling: ``done_key`` is not stored.

    Cost: O(B * W), whatever is stored. With another ``done_key``, one pass over that column at the
    first sample; from then on it is kept up with every write.

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
        done_key: Key | None = _DEFAULT_DONE,
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
            if type(value) is not int:
                raise TypeError(f"expected {name} as an int, got {value!r}")
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
        if episode_boundary not in EPISODE_BOUNDARIES:
            raise ValueError(
                f"expected episode_boundary as one of {EPISODE_BOUNDARIES}, got "
                f"{episode_boundary!r}"
            )
        self.length, self.burn_in, self.bootstrap = length, burn_in, bootstrap
        self.dilation, self.episode_boundary = dilation, episode_boundary
        self.done_key = None if done_key is None else unravel(done_key)
        self._rule = _rule_of(self.done_key)
        steps = np.arange(burn_in + length + bootstrap)
        self._offsets: Array = (steps - burn_in) * dilation
        self._learning: Array = (steps >= burn_in) & (steps < burn_in + length)
        # The storage keeps an index with a rule of its own only as long as somebody holds it.
        self._index: EpisodeIndex | None = None

    @property
    def width(self) -> int:
        """Rows of one window: ``burn_in + length + bootstrap``."""
        return len(self._offsets)

    def check(self, storage: Storage, sampler: Sampler) -> None:
        if not isinstance(storage, ColumnStorage):
            raise TypeError(
                "expected a tensor or memmap storage for a Sequence, got "
                f"{type(storage).__name__}, which does not know where episodes end"
            )
        if not sampler.draws_anchors:
            raise ValueError(
                f"expected a sampler of single rows with a Sequence, got {type(sampler).__name__}, "
                "which draws windows by itself; use one or the other, or slices of one row "
                "(slice_len=1), whose measure then says which rows are anchors"
            )
        if storage.initialized:
            _check_content(storage)

    def expand(
        self,
        index: torch.Tensor | tuple[torch.Tensor, ...],
        info: dict[str, Any],
        storage: Storage,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the rows of the windows of anchors ``[B]`` (``[B, ndim]``), and their info.

        The storage's lock is held.

        Args:
            index: the anchors; or a tuple with one ``[B]`` for each dimension.

        Raises:
            TypeError: records that are no TensorDicts. KeyError: ``done_key`` is not stored.
        """
        episodes = self.episodes(storage)
        if isinstance(index, tuple):
            index = index[0] if len(index) == 1 else torch.stack(index, -1)
        lanes, count, width = storage.lanes, len(index), self.width
        flat = ravel(index, lanes) if lanes else index
        time, lane = episodes.place(flat.cpu().numpy())
        wanted, first, last = self._wanted(episodes, time, lane)
        valid = (wanted >= first) & (wanted <= last)
        rows = np.minimum(np.maximum(wanted, first), last).reshape(-1)
        element = episodes.element(rows, np.repeat(lane, width))
        found = _tensor(element, index.device)
        expanded = unravel_index(found, lanes) if lanes else found
        told: dict[str, Any] = {}
        for key, value in info.items():
            known = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == count
            told[key] = value.repeat_interleave(width, 0) if known else value
        if "index_generation" in told:
            slots = expanded[:, 0] if lanes else expanded
            told["anchor_generation"] = told["index_generation"]
            told["index_generation"] = storage.ledger.generations(slots)
        told["anchor_index"] = index.repeat_interleave(width, 0)
        for name, values in (
            ("sequence_id", np.repeat(np.arange(count), width)),
            ("step_in_sequence", np.tile(np.arange(width), count)),
            ("learning_mask", np.tile(self._learning, count)),
            ("validity_mask", valid.reshape(-1)),
        ):
            told[name] = _tensor(values, index.device)
        return expanded, told

    @property
    def tells(self) -> tuple[Any, ...]:
        """What `expand` says of the rows of windows."""
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
        """Times int64 ``[B, W]`` as if nothing ended, and the first and last that there are."""
        if self.episode_boundary == "include_reset":
            first, last = episodes.streams(time, lane)
        else:
            first, last = episodes.spans(time, lane)
        if self.episode_boundary == "stop":
            beyond = time + self._offsets[-1] - last
            time = time - np.clip(beyond, 0, time - first)
        return time[:, None] + self._offsets, first[:, None], last[:, None]

    def episodes(self, storage: Storage) -> EpisodeIndex:
        """The index by which it cuts windows. The storage's lock is held."""
        if not isinstance(storage, ColumnStorage):
            raise TypeError(
                f"expected a tensor or memmap storage for a Sequence, got {type(storage).__name__}"
            )
        _check_content(storage)
        self._index = storage.indexes.of(self._rule)
        return self._index

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, "
            f"episode_boundary={self.episode_boundary!r}, burn_in={self.burn_in}, "
            f"bootstrap={self.bootstrap}, dilation={self.dilation})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}


class AnchorUpdate(NamedTuple):
    """What priorities of rows come to for their anchors; ``generation`` is None where unknown."""

    anchor: torch.Tensor
    priority: torch.Tensor
    generation: torch.Tensor | None


def anchor_priorities(
    anchor: torch.Tensor,
    generation: torch.Tensor | None,
    priority: torch.Tensor,
    valid: torch.Tensor,
) -> AnchorUpdate:
    """Returns each anchor once, with the largest priority of its valid rows.

    Args:
        anchor: ``anchor_index`` of rows, int64 ``[N]`` or ``[N, ndim]``.
        generation: ``anchor_generation``, int64 ``[N]``.
        priority: of the rows, ``[N]``.
        valid: ``validity_mask``, bool ``[N]``; anchors without a valid row are left out.
    """
    columns = [anchor.reshape(len(valid), -1)]
    if generation is not None:
        columns.append(generation.reshape(-1, 1))
    keys = torch.cat(columns, 1)[valid]
    priority = priority[valid.to(priority.device)]
    # Rows of a window lie side by side: that leaves B of B * W to be sorted.
    for unique in (torch.unique_consecutive, torch.unique):
        keys, group = unique(keys, return_inverse=True, dim=0)
        largest = priority.new_zeros(len(keys))
        group = group.to(priority.device)
        priority = largest.scatter_reduce_(0, group, priority, "amax", include_self=False)
    index = keys[:, : columns[0].shape[1]]
    return AnchorUpdate(
        index if anchor.ndim > 1 else index[:, 0].contiguous(),
        priority,
        None if generation is None else keys[:, -1].contiguous(),
    )


def _check_content(storage: ColumnStorage) -> None:
    root = storage.require().schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        kind = root.kind if isinstance(root, Branch) else "tensor"
        raise TypeError(f"expected TensorDicts for a Sequence, got records of kind {kind!r}")


def _rule_of(done_key: tuple[str, ...] | None) -> BoundaryRule:
    if done_key is None:
        return BoundaryRule(flags=(), ids=())
    return BoundaryRule() if done_key == _DEFAULT_DONE else BoundaryRule(flags=(done_key,))


def _tensor(values: Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
