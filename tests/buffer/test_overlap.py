"""Batches are made while the learner works: a loop takes as long as the longer of its halves.

What takes time here is sleep, which needs no processor, so that a busy machine says the same; where
it wakes nobody in time, longer sleeps are tried.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

SECONDS = (0.03, 0.03, 0.03, 0.1, 0.3, 1.0)
"""What a sample and a step take in each try."""

TURNS = 24


class SlowRead(LazyTensorStorage):
    """Rows that take a while to read, with the lock held."""

    seconds = 0.0

    def read(self, index: torch.Tensor, **options: Any) -> Any:
        time.sleep(self.seconds)
        return super().read(index, **options)


def slow_transform(seconds: float) -> Any:
    def transform(batch: Any) -> Any:
        time.sleep(seconds)
        return batch

    return transform


def spent(buffer: ReplayBuffer, seconds: float) -> float:
    """Seconds a turn of sample and step, in the long run."""
    for _ in range(3):
        buffer.sample()
    start = time.monotonic()
    for _ in range(TURNS):
        buffer.sample()
        time.sleep(seconds)
    return (time.monotonic() - start) / TURNS


@pytest.mark.parametrize("slow", ["read", "transform"])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
def test_loop_takes_as_long_as_the_slower_of_sampling_and_learning(slow: str, sampler: Any) -> None:
    """At most 1.15 of it, where both take equally long; one after the other they take 2."""
    storage = SlowRead(400) if slow == "read" else LazyTensorStorage(400)
    ratios = []
    for seconds in SECONDS:
        if isinstance(storage, SlowRead):
            storage.seconds = seconds
        buffer = ReplayBuffer(
            storage=storage,
            sampler=sampler(),
            batch_size=4,
            prefetch=2,
            transform=None if slow == "read" else slow_transform(seconds),
        )
        if not len(buffer):
            buffer.extend(TensorDict({"id": torch.arange(400)}, [400]))
        ratios.append(spent(buffer, seconds) / seconds)
        buffer.shutdown()
        if ratios[-1] <= 1.15:
            return
    raise AssertionError(ratios)


def test_priority_updates_read_no_batch() -> None:
    """Only what changes rows reads the batches that are drawn ahead."""
    readers: list[str] = []

    class Watched(LazyTensorStorage):
        def read(self, index: torch.Tensor, **options: Any) -> Any:
            readers.append(threading.current_thread().name)
            return super().read(index, **options)

    buffer = ReplayBuffer(
        storage=Watched(10),
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        batch_size=4,
        prefetch=3,
    )
    buffer.extend(TensorDict({"id": torch.arange(10)}, [10]))
    own = threading.current_thread().name
    for _ in range(20):
        batch = buffer.sample()
        readers.clear()
        buffer.update_priority(batch["index"], 1.0)
        assert own not in readers
        assert buffer.can_sample()
        assert own not in readers
    buffer.shutdown()
