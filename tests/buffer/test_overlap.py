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

from replaykit import LazyTensorStorage, RandomSampler, ReplayBuffer, SamplerWithoutReplacement

SECONDS = (0.03, 0.03, 0.03, 0.1, 0.3, 1.0)
"""What a sample and a step take in each try."""

TURNS = 12


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


def test_waiting_thread_gets_the_lock_before_the_next_draw(
    eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write, or an update of priorities, waits for one batch to be read and not for two."""
    # However late the system wakes who waits.
    monkeypatch.setattr("replaykit.buffer.prefetch._MOST_SECONDS", 20)
    order: list[str] = []
    reading, go = threading.Semaphore(0), threading.Semaphore(0)

    class Watched(LazyTensorStorage):
        def read(self, index: torch.Tensor, **options: Any) -> Any:
            reading.release()
            assert go.acquire(timeout=60)
            order.append("read")
            return super().read(index, **options)

    for _ in range(20):
        order.clear()
        buffer = ReplayBuffer(storage=Watched(10), batch_size=4, prefetch=3)
        buffer.extend(TensorDict({"id": torch.arange(10)}, [10]))

        def write(buffer: ReplayBuffer = buffer) -> None:
            with buffer._locked():
                order.append("write")

        consumer = threading.Thread(target=buffer.sample)
        consumer.start()
        assert reading.acquire(timeout=60)
        writer = threading.Thread(target=write)
        writer.start()
        queue = buffer._prefetcher
        assert queue is not None
        assert eventually(lambda queue=queue: queue._waiting)
        go.release(20)
        for thread in (consumer, writer):
            thread.join(60)
        buffer.shutdown()
        assert order.index("write") == 1
        while go.acquire(blocking=False) or reading.acquire(blocking=False):
            pass
