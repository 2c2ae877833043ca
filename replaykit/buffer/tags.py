"""Give tags to stored episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel
from replaykit.structure import Branch

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


def tag_episodes(
    buffer: ReplayBuffer, index: Any, values: Mapping[str, Any], generation: Any
) -> int:
    """Set tags of the episodes of rows; return how many rows are stored."""
    with buffer._locked() as storage:
        _require_episodes(storage)
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
        return _set(storage, at, fits, values)


def check_tags(storage: Any, rows: Any, values: Mapping[str, Any]) -> None:
    """Check the tags of rows that are about to be written; raise as ``tag_episodes`` does."""
    _require_episodes(storage)
    root = rows.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        raise RuntimeError("expected rows with tags as TensorDicts, which show where episodes end")
    storage.indexes.tags.checked(values, math.prod(rows.batch))


def tag_written(storage: Any, index: torch.Tensor, values: Mapping[str, Any]) -> None:
    """Set checked tags of the episodes of rows that were written to ``index``.

    The index is -1 for rows that were not stored. The caller holds the lock.
    """
    _set(storage, index, (index[:, 0] if storage.ndim > 1 else index) >= 0, values)


def _require_episodes(storage: Storage) -> None:
    if not isinstance(storage, ColumnStorage):
        raise RuntimeError(
            f"a {type(storage).__name__} does not know where episodes end; use a tensor or "
            "memmap storage"
        )


def _set(storage: Any, at: torch.Tensor, fits: torch.Tensor, values: Mapping[str, Any]) -> int:
    """Set tags of the episodes of rows that are stored, bool ``[K]``; return their number."""
    episodes, chosen = storage.episodes, at[fits]
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
