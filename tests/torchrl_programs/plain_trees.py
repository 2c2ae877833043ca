"""Segment trees without a tree, for a TorchRL whose compiled ones do not load with this torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PlainSum:
    """Numbers whose sums are taken when they are asked for."""

    neutral = 0.0

    def __init__(self, capacity: int) -> None:
        self.values = np.full(capacity, self.neutral)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        found = self.values[np.asarray(index)]
        return torch.from_numpy(found) if isinstance(found, np.ndarray) else float(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[np.asarray(index)] = np.asarray(value)

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].sum())

    def scan_lower_bound(self, mass: Any) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(self.values.cumsum(), np.asarray(mass)))


class PlainMin(PlainSum):
    """The same for the least one."""

    neutral = float("inf")

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].min())
