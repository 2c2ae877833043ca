"""What all works share: how much, how often, where, and what the machine can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibration import Calibration
from benchmarks.limits import Limit

__all__ = ["BATCH", "Setting"]

BATCH = 256


@dataclass(frozen=True)
class Setting:
    """How a work is to be measured.

    Attributes:
        rows: transitions in a buffer; a tree has as many leaves, and the larger tree ten times.
        images: rows of images.
        rounds: turns of each contender.
        threads: threads that torch may use.
        scratch: a folder on disk for mapped files.
        calibration: what the machine can do; without it no share of a limit is told.
    """

    rows: int
    images: int
    rounds: int
    threads: int
    scratch: Path
    calibration: Calibration | None = None

    def limit(self, formula: Callable[[Calibration], Limit | None]) -> Limit | None:
        """Returns the limit of a work on this machine, if its constants are known."""
        return None if self.calibration is None else formula(self.calibration)
