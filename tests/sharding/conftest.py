"""Sharded buffers in this process, what one big buffer would do, and a Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer, ShardedReplayBuffer


@pytest.fixture
def sharded() -> Iterator[Callable[..., ShardedReplayBuffer]]:
    """Makes sharded buffers in this process; they are closed at the end."""
    made: list[ShardedReplayBuffer] = []

    def make(num_shards: int, capacity: int = 1000, **arguments: Any) -> ShardedReplayBuffer:
        arguments.setdefault("backend", "local")
        arguments.setdefault("generator", torch.Generator().manual_seed(0))
        arguments.setdefault("storage", lambda: LazyTensorStorage(capacity))
        made.append(ShardedReplayBuffer(num_shards=num_shards, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def single() -> Callable[..., ReplayBuffer]:
    """Makes the one big buffer that shards are compared with."""

    def make(sampler: Any, capacity: int = 10_000, **arguments: Any) -> ReplayBuffer:
        arguments.setdefault("generator", torch.Generator().manual_seed(1))
        return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, **arguments)

    return make
