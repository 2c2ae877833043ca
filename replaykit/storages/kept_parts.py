"""Samplers and writers whose state is kept in files, and the order in which they came."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "Changed",
    "KeptCount",
    "KeptPriorities",
    "place_of",
    "set_alone",
    "still_there",
    "take_place",
]

Array = np.ndarray[Any, Any]


class Changed(NamedTuple):
    """What has become of a sampler's priorities since somebody asked.

    Attributes:
        elements: which were set, int64 ``[K]`` without repeats; None: all.
        values: their raw priorities, float64 ``[K]``; of all ``[length]``.
        length: how many there are.
        most: the largest one ever set.
        dropped: updates that came too late.
    """

    elements: Array | None
    values: Array
    length: int
    most: float
    dropped: int


class KeptPriorities(Protocol):
    """A sampler whose priorities are to be there again."""

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Whether it is still told of what becomes of the storage."""

    def priorities_changed(self, *, everything: bool = False) -> Changed | None:
        """What has changed since the last call, or all of it; None: nothing."""

    def priorities_pending(self) -> bool:
        """Whether ``priorities_changed`` might return something."""

    def take_kept(self, priorities: torch.Tensor, most: float, dropped: int) -> None:
        """Takes priorities over that it had, float64 ``[length]``."""

    def take_changed(self, changed: Changed) -> None:
        """Takes over what another process has made of them; it is not told of as a change."""


class KeptCount(Protocol):
    """A writer whose count is to be there again."""

    _write_count: int

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Whether it still writes to the storage."""


def place_of(parts: list[weakref.ref[Any]], part: Any) -> int:
    """Where a part is, or the one of the same buffer in whose stead it comes; else behind all."""
    for place, known in enumerate(parts):
        other = known()
        if other is part or (
            other is not None and part.owner is not None and other.owner is part.owner
        ):
            return place
    return len(parts)


def take_place(parts: list[weakref.ref[Any]], place: int, part: Any) -> None:
    """Puts a part where ``place_of`` says, before the one in whose stead it comes.

    Both stay until ``still_there`` tells which of them is in use: the exchange may not come about.
    """
    others = [known for known in parts[place:] if known() is not part]
    parts[place:] = [weakref.ref(part), *others]


def set_alone(parts: list[weakref.ref[Any]], part: Any) -> None:
    """Makes a part the only one.

    Raises:
        RuntimeError: another one is there, of another buffer.
    """
    other = parts[0]() if parts else None
    if other is not None and other is not part and other.owner is not part.owner:
        raise RuntimeError(
            f"expected one buffer over a storage that processes share, got another one with a "
            f"{type(part).__name__}"
        )
    parts[:] = [weakref.ref(part)]


def still_there(
    parts: list[weakref.ref[Any]], storage: LazyTensorStorage
) -> list[weakref.ref[Any]]:
    """Those that have neither gone nor been given something else to work on."""
    return [known for known in parts if (part := known()) is not None and part.works_on(storage)]
