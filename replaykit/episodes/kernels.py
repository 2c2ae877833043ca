"""Which kernel keeps the episodes of a ring: the core's, or its counterpart in NumPy."""

from __future__ import annotations

from typing import Any

from replaykit import native
from replaykit.episodes.native_ring import NativeRing
from replaykit.episodes.ring import RingEpisodes

__all__ = ["new_ring"]


def new_ring(slots: int, lanes: int, **options: Any) -> Any:
    """Returns an empty ring of episodes; the options are those of ``RingEpisodes``."""
    kernel = RingEpisodes if native.core() is None else NativeRing
    return kernel(slots, lanes, **options)
