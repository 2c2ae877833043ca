"""A transform that needs rows around those drawn."""

from __future__ import annotations

from typing import Any

from replaykit.episodes import Needs
from replaykit.transforms import HistoryTransform

__all__ = ["Needing"]


class Needing(HistoryTransform):
    """Changes nothing, and needs what it is told to need."""

    def __init__(self, **needs: Any) -> None:
        super().__init__()
        self.needs = Needs(**needs)

    def apply(self, data: Any, fetched: Any, around: Any) -> Any:
        return data
