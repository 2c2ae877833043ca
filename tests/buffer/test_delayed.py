"""Components made by factories, at once or at first use."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from tests.buffer.building import in_threads
from tests.support.refusals import refuses


def test_components_may_be_instances_or_factories():
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(
        storage=lambda: LazyTensorStorage(3), sampler=sampler, writer=RoundRobinWriter
    )
    assert buffer.initialized
    assert buffer.sampler is sampler
    assert isinstance(buffer.writer, RoundRobinWriter)
    assert buffer.storage is buffer.storage


def test_delayed_components_are_made_at_first_use():
    made: list[str] = []

    def storage() -> LazyTensorStorage:
        made.append("storage")
        return LazyTensorStorage(3)

    buffer = ReplayBuffer(storage=storage, delayed_init=True, batch_size=2, prefetch=2)
    assert "not initialized" in repr(buffer)
    assert buffer.stats() == {
        "size": 0,
        "write_count": 0,
        "prefetch_queue_size": 0,
        "initialized": False,
    }
    assert (buffer.initialized, made) == (False, [])
    buffer.extend(torch.arange(2))
    assert (buffer.initialized, made, len(buffer)) == (True, ["storage"], 2)
    assert set(buffer.sample().tolist()) <= {0, 1}


@pytest.mark.parametrize(
    "use",
    [
        len,
        repr,
        lambda b: b.storage,
        lambda b: b.sampler,
        lambda b: b.writer,
        lambda b: b.transform,
        lambda b: b.write_count,
        lambda b: b.dim_extend,
        lambda b: b.can_sample(2),
        lambda b: b.empty(),
        lambda b: b.set_writer(RoundRobinWriter()),
        lambda b: b.append_transform(lambda x: x),
        lambda b: b.state_dict(),
    ],
)
def test_any_use_of_a_delayed_buffer_works(use: Any):
    buffer = ReplayBuffer(storage=lambda: LazyTensorStorage(3), delayed_init=True)
    use(buffer)
    buffer.add(torch.tensor(1.0))
    assert buffer[:].tolist() == [1.0]


def test_a_transform_factory_delays_and_is_called_once():
    made: list[int] = []

    def factory() -> Any:
        made.append(1)
        return lambda data: data + 1

    buffer = ReplayBuffer(storage=LazyTensorStorage(3), transform_factory=factory)
    assert (buffer.initialized, made) == (False, [])
    buffer.extend(torch.zeros(2))
    assert buffer[:].tolist() == [1.0, 1.0]
    assert buffer.sample(1).tolist() == [1.0]
    assert made == [1]
    assert ReplayBuffer(transform_factory=factory, delayed_init=False).initialized


@pytest.mark.parametrize("name", ["storage", "sampler", "writer", "transform_factory"])
def test_a_failing_factory_leaves_the_buffer_uninitialised_and_is_tried_again(name: str):
    working = {
        "storage": lambda: LazyTensorStorage(3),
        "sampler": RandomSampler,
        "writer": RoundRobinWriter,
        "transform_factory": lambda: torch.neg,
    }
    errors = [ConnectionError("not yet")] * 2

    def failing() -> Any:
        if errors:
            raise errors.pop()
        return working[name]()

    buffer = ReplayBuffer(**{**working, name: failing}, delayed_init=True)
    for _ in range(2):
        refuses(ConnectionError, "not yet", buffer.extend, torch.zeros(2))
        assert not buffer.initialized
    buffer.extend(torch.ones(2))
    assert (buffer.initialized, buffer[:].tolist()) == (True, [-1.0, -1.0])


@pytest.mark.pitfall("TH3")
def test_threads_that_use_a_delayed_buffer_first_share_its_components():
    """TH3: two first uses at once made two storages, and the rows of one were lost."""
    for _ in range(20):
        made: list[int] = []

        def storage(made: list[int] = made) -> LazyTensorStorage:
            made.append(1)
            threading.Event().wait(0.002)
            return LazyTensorStorage(100)

        buffer = ReplayBuffer(storage=storage, delayed_init=True)
        in_threads(*[lambda b=buffer: b.extend(torch.zeros(5)) for _ in range(4)])
        assert (len(made), len(buffer)) == (1, 20)
