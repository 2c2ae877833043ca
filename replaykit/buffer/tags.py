"""Give tags to stored episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer

__all__ = ["tag_episodes"]


def tag_episodes(
    buffer: ReplayBuffer, index: Any, values: Mapping[str, Any], generation: Any
) -> int:
    """Set tags of the episodes of rows; return how many rows are stored."""
    with buffer._locked() as storage:
        if not isinstance(storage, ColumnStorage):
            raise RuntimeError(
                f"a {type(storage).__name__} does not know where episodes end; use a tensor or "
                "memmap storage"
            )
        episodes = storage.episodes
        at = as_tensor(index).detach().to("cpu")
        if at.is_floating_point() or at.dtype == torch.bool:
            raise TypeError(f"expected an index of integers, got {at.dtype}")
        at = at.reshape(-1, storage.ndim) if storage.ndim > 1 else at.reshape(-1)
        slots = at[:, 0] if storage.ndim > 1 else at
        fits = (slots >= 0) & (slots < storage.ledger.length)
        if generation is not None:
            known = as_tensor(generation).cpu().reshape(-1)
            if len(known) != len(slots):
                raise ValueError(f"expected {len(slots)} generations, got {len(known)}")
            fits &= storage.ledger.generations(slots.contiguous()) == known
        chosen = at[fits]
        flat = ravel(chosen, storage.lanes) if storage.ndim > 1 else chosen
        ids = episodes.ids(*episodes.time_and_lane(np.ascontiguousarray(flat.numpy(), np.int64)))
        given = {}
        for name, value in values.items():
            per_row = isinstance(value, torch.Tensor) and value.ndim > 0
            if per_row and len(value) != len(fits):
                raise ValueError(f"tag {name!r}: expected {len(fits)} values, got {len(value)}")
            given[name] = value.cpu()[fits] if per_row else value
        storage.indexes.tags.set(ids, given, episodes)
        return len(ids)
