"""Which buffers can have their rows in the files of a checkpoint."""

from __future__ import annotations

import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from replaykit.storages.content import Content
from replaykit.ted import format_key

__all__ = ["check_mappable", "check_mapped_rows"]


def check_mappable(storage: Storage) -> None:
    """Raises ValueError where rows cannot stay in files for a storage; says why."""
    kind = type(storage).__name__
    if not isinstance(storage, LazyTensorStorage) or isinstance(storage, LazyMemmapStorage):
        why = f"got a {kind}, whose rows lie elsewhere"
    elif storage.initialized:
        why = f"got one that was written to, with {len(storage)} rows"
    elif storage.dedup_next:
        why = "got dedup_next, with which rows are stored in another form"
    elif str(storage.device).partition(":")[0] not in ("auto", "cpu"):
        why = f"got one on {storage.device}"
    elif storage.load_hooks:
        why = "got load hooks, which change what was read"
    else:
        return
    raise ValueError(
        f"expected a new LazyTensorStorage on the CPU for mmap=True, {why}; load without mmap"
    )


def check_mapped_rows(content: Content, slots: int, rows: torch.Tensor | None) -> None:
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
    for group in content.groups:
        packed = () if group.packed is None else group.packed.offsets
        for path, column in group.leaves.items():
            if path not in packed and not isinstance(column, MappedRows):
                raise ValueError(
                    f"expected rows that lie in files as they are for mmap=True, got "
                    f"{format_key(path)}, which was stored once (dedup_next); load without mmap"
                )
