"""Which slots the next records take, and what they displace."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from replaykit.writers.base import Writer
from replaykit.writers.immutable import ImmutableDatasetWriter
from replaykit.writers.lanes import LaneWriter
from replaykit.writers.max_value import TensorDictMaxValueWriter
from replaykit.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

if TYPE_CHECKING:
    from replaykit.ensembles import WriterEnsemble

__all__ = [
    "ImmutableDatasetWriter",
    "LaneWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]


def __getattr__(name: str) -> Any:
    # A public name of this room for what stands above it; nothing in the room uses it.
    if name == "WriterEnsemble":
        return importlib.import_module("replaykit.ensembles").WriterEnsemble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
