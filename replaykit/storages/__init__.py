"""Where records live: lists, tensors on any device, memory-mapped files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from replaykit.storages.base import Storage
from replaykit.storages.lazy_stack import LazyStackStorage
from replaykit.storages.lists import ListStorage
from replaykit.storages.memmap import LazyMemmapStorage
from replaykit.storages.tensors import LazyTensorStorage, TensorStorage

if TYPE_CHECKING:
    from replaykit.ensembles import StorageEnsemble

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
]


def __getattr__(name: str) -> Any:
    # A public name of this room for what stands above it; nothing in the room uses it.
    if name == "StorageEnsemble":
        return importlib.import_module("replaykit.ensembles").StorageEnsemble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
