# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.storages.episode_tags import (
    EpisodeData,
)
from replaykit.storages.lists import (
    LazyStackStorage,
    ListStorage,
)
from replaykit.storages.memmap import (
    LazyMemmapStorage,
)
from replaykit.storages.storage import (
    Storage,
)
from replaykit.storages.tensors import (
    LazyTensorStorage,
    TensorStorage,
)

__all__ = [
    "EpisodeData",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "TensorStorage",
]
