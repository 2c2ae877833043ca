# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.storages.base import (
    Storage,
)
from replaykit.storages.lazy_stack import (
    LazyStackStorage,
)
from replaykit.storages.lists import (
    ListStorage,
)
from replaykit.storages.memmap import (
    LazyMemmapStorage,
)
from replaykit.storages.tensors import (
    LazyTensorStorage,
    TensorStorage,
)

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "TensorStorage",
]
