"""What is known of the episodes of stored rows, asked by their index."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import Uncompiled, as_tensor
from replaykit.episodes import EpisodeIndex
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import check_cells, check_range, ravel

__all__ = ["EpisodeLookup"]

Array = np.ndarray[Any, Any]


class EpisodeLookup(Uncompiled):
    """Answers for rows, by their ``index`` as ``extend`` returned it and samples carry it.

    An index is int64 ``[K]``, for storages with lanes ``[K, ndim]``; answers are ``[K]`` on its
    device. Each method raises IndexError for rows that are not stored, TypeError for anything but
    integers, and costs O(K). They see what is stored now. A position is the number of a row in
    the order of writing, never used twice.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> done = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool)
        >>> index = rb.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> index[1:], rb.episodes.begin(index[1:]), rb.episodes.steps_to_end(index[1:])
        (tensor([1, 2, 3, 0]), tensor([0, 0, 3, 3]), tensor([1, 0, 1, 0]))
    """

    def __init__(self, storage: ColumnStorage) -> None:
        self._storage = storage

    def id(self, index: Any) -> torch.Tensor:
        """Ids of the episodes: that of no other one, in this buffer or after a load into it."""
        return self._asked(index, lambda by, time, lane: by.ids(time, lane))

    def position(self, index: Any) -> torch.Tensor:
        """Positions of the rows themselves."""
        return self._asked(index, lambda by, time, lane: by.positions(time, lane))

    def begin(self, index: Any) -> torch.Tensor:
        """Positions of the episodes' first rows, also of those that were overwritten."""

        def begin(by: EpisodeIndex, time: Array, lane: Array) -> Array:
            return by.positions(by.begins(time, lane), lane)

        return self._asked(index, begin)

    def end(self, index: Any) -> torch.Tensor:
        """Positions of the episodes' last rows; of an open one: of its newest row so far."""

        def end(by: EpisodeIndex, time: Array, lane: Array) -> Array:
            return by.positions(by.spans(time, lane)[1], lane)

        return self._asked(index, end)

    def step(self, index: Any) -> torch.Tensor:
        """Rows of the episode before this one, those that were overwritten too: from 0."""
        return self._asked(index, lambda by, time, lane: time - by.begins(time, lane))

    def steps_to_end(self, index: Any) -> torch.Tensor:
        """Stored rows of the episode after this one: 0 at its last."""
        return self._asked(index, lambda by, time, lane: by.spans(time, lane)[1] - time)

    def reason(self, index: Any) -> torch.Tensor:
        """Why the episodes have no further row: an ``EndReason`` each."""
        return self._asked(index, lambda by, time, lane: by.reasons(time, lane))

    def head(self, index: Any) -> torch.Tensor:
        """How the stored parts of the episodes begin: a ``Head`` each."""
        return self._asked(index, lambda by, time, lane: by.heads(time, lane))

    def _asked(self, index: Any, question: Any) -> torch.Tensor:
        with self._storage.lock:
            elements, device = self._elements(index)
            if not len(elements):
                return torch.empty(0, dtype=torch.int64, device=device)
            by = self._storage.episodes
            answer = question(by, *by.place(elements))
        return torch.from_numpy(np.ascontiguousarray(answer, np.int64)).to(device)

    def _elements(self, index: Any) -> tuple[Array, torch.device]:
        """Flat numbers of checked rows, and where the index lies; the lock is held."""
        storage = self._storage
        at = as_tensor(index)
        if at.dtype == torch.bool or at.is_floating_point() or at.is_complex():
            if at.numel():
                raise TypeError(f"expected an index of integers, got {at.dtype}")
            at = at.to(torch.int64)
        dims = 1 if storage.ndim == 1 else 2
        if at.ndim != dims or (dims == 2 and at.shape[1] != storage.ndim):
            raise IndexError(
                f"expected an index of shape {'[K]' if dims == 1 else f'[K, {storage.ndim}]'}, "
                f"got {list(at.shape)}"
            )
        cells = at.detach().to(device="cpu", dtype=torch.int64)
        if not len(cells):
            return np.zeros(0, np.int64), at.device
        if dims == 1:
            check_range(cells, 0, storage.ledger.length)
        else:
            check_cells(cells, storage.visible_shape())
            cells = ravel(cells, storage.lanes)
        return np.ascontiguousarray(cells.numpy()), at.device
