"""Make buffers in actors of one Ray, sharded buffers, and single buffers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, ShardedReplayBuffer
from replaykit.buffer.components import set_chain
from replaykit.distributed.shard_config import ShardRecipe


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


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., ShardRecipe]:
    """What one small shard is made of that saves itself every so many seconds."""

    def make(seconds: float = 60.0) -> ShardRecipe:
        return ShardRecipe(
            storage=lambda: LazyTensorStorage(4),
            sampler=None,
            writer=None,
            transform_factory=None,
            priority_key="td_error",
            checkpoint_dir=str(tmp_path),
            checkpoint_interval=seconds,
            num_shards=1,
            shard_key=None,
        )

    return make


@pytest.fixture
def make(ray_cluster: Any) -> Iterator[Callable[..., RayReplayBuffer]]:
    """``make(**arguments)``: a RayReplayBuffer, closed at the end."""
    made: list[RayReplayBuffer] = []

    def buffer(**arguments: Any) -> RayReplayBuffer:
        arguments.setdefault("remote_config", {"num_cpus": 0})
        made.append(RayReplayBuffer(**arguments))
        return made[-1]

    yield buffer
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def shared(ray_cluster: Any) -> Iterator[RayReplayBuffer]:
    with RayReplayBuffer(
        storage=lambda: LazyTensorStorage(50), batch_size=4, remote_config={"num_cpus": 0}
    ) as buffer:
        yield buffer


@pytest.fixture
def rb(shared: RayReplayBuffer) -> RayReplayBuffer:
    """An empty buffer of 50 rows, batches of 4, seeded; the same actor for all tests."""
    shared.run(_renew)
    return shared


def _renew(buffer: Any) -> None:
    from replaykit import RandomSampler

    set_chain(buffer, type(buffer.transform)())
    buffer.set_storage(LazyTensorStorage(50))
    buffer.set_sampler(RandomSampler())
    buffer.set_rng(torch.Generator().manual_seed(0))
