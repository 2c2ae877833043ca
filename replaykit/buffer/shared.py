"""Which buffers processes can share."""

from __future__ import annotations

from typing import Any

from replaykit.storages import LazyTensorStorage, Storage
from replaykit.transforms import Compose
from replaykit.writers import RoundRobinWriter, Writer

__all__ = ["check_not_ahead", "check_shareable", "check_transforms", "refuse_exchange"]


def check_not_ahead(depth: int) -> None:
    """Raises ValueError where batches would be prepared ahead by a shared buffer."""
    if depth:
        raise ValueError(
            "Cannot share prefetched replay buffers: expected prefetch=0 or shared=False, got "
            f"prefetch={depth}; other processes may overwrite what is drawn ahead"
        )


def check_shareable(storage: Storage, writer: Writer, chain: Compose) -> None:
    """Checks that the parts of a buffer can be shared, before anything is.

    Raises:
        ValueError: names the part that cannot, and what can.
    """
    if not isinstance(storage, LazyTensorStorage):
        raise ValueError(
            "expected a LazyTensorStorage or LazyMemmapStorage for shared=True, whose memory "
            f"processes can share, got {type(storage).__name__}"
        )
    if not isinstance(writer, RoundRobinWriter):
        raise ValueError(
            f"expected a RoundRobinWriter for shared=True, got {type(writer).__name__}, whose "
            "order is known to one process only"
        )
    check_transforms(chain)


def check_transforms(chain: Compose) -> None:
    """Raises ValueError where a transform follows every write, which another process may make."""
    for transform in chain.told_of_writes:
        raise ValueError(
            f"expected transforms that need not be told of writes for shared=True, got "
            f"{type(transform).__name__}: other processes write too"
        )


def refuse_exchange(buffer: Any, part: str) -> None:
    """Raises RuntimeError where a part of a shared buffer is about to be exchanged."""
    if buffer._shared:
        raise RuntimeError(
            f"the {part} of a shared buffer cannot be exchanged: other processes have the one "
            "before; make a new buffer"
        )
