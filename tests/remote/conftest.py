"""Remote buffers of the one Ray of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, RayReplayBuffer
from replaykit.buffer.components import set_chain


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
