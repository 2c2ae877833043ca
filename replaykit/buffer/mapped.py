"""Which buffers can have their rows in the files of a checkpoint."""

from __future__ import annotations

import torch

from replaykit._compat import arange
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from replaykit.storages.content import Content
from replaykit.storages.mapped_rows import why_not_mapped
from replaykit.ted import format_key

__all__ = ["check_mappable", "check_mapped_rows"]


def check_mappable(storage: Storage) -> None:
    """Raises ValueError where rows cannot stay in files for a storage; says why."""
    kind = type(storage).__name__
    if not isinstance(storage, LazyTensorStorage) or isinstance(storage, LazyMemmapStorage):
        why = f"got a {kind}, whose rows lie elsewhere"
    elif storage.initialized or storage.ledger.next_position:
        why = f"got one that was written to, with {len(storage)} rows"
    elif str(storage.device).partition(":")[0] not in ("auto", "cpu"):
        why = f"got one on {storage.device}"
    elif storage.load_hooks:
        why = "got load hooks, which change what was read"
    else:
        return
    raise ValueError(
        f"expected a new LazyTensorStorage on the CPU for mmap=True, {why}; load without mmap"
    )


def check_mapped_rows(
    storage: LazyTensorStorage, content: Content, slots: int, rows: torch.Tensor | None
) -> None:
    """Raises ValueError where saved rows cannot be used as they lie.

    Args:
        slots: how many there will be.
        rows: as for ``Storage.load_content``.
    """
    if rows is not None and not torch.equal(rows, arange(content.rows)):
        raise ValueError(
            f"expected the capacity that was saved for mmap=True, got {slots} slots, in "
            f"which the {content.rows} rows would have to lie elsewhere; load without mmap"
        )
    if not content.groups:
        return
    pairs = storage.pairs_for(content.single_group().schema)
    found = why_not_mapped(content, pairs, slots, linked=storage.lane_key is not None)
    if found is not None:
        path, why = found
        raise ValueError(
            f"expected rows that lie in files as they are for mmap=True, got "
            f"{format_key(path)}, {why}; load without mmap"
        )
