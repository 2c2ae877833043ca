"""What is written and what is learned between a draw and the use of its batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, PrioritizedSliceSampler, ReplayBuffer
from tests.buffer.building import eventually, same

pytestmark = pytest.mark.usefixtures("by_threads")

ROWS = 64


def filled(sampler: str, prefetch: int | None) -> ReplayBuffer:
    make = {
        "rows": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
        "slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4),
    }[sampler]
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=make(),
        batch_size=16,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(2),
    )
    number = torch.arange(ROWS)
    done = (number % 16 == 15)[:, None]
    rb.extend(TensorDict({"id": number, "next": {"done": done}}, [ROWS]))
    return rb


def learned(batch: Any) -> torch.Tensor:
    """Priorities that follow from the rows alone."""
    return (batch["id"] * 7 % 11).float() + 0.1


def all_drawn(rb: ReplayBuffer, depth: int, eventually: Any) -> None:
    queue = rb._prefetcher
    assert queue is not None
    assert eventually(lambda: len(queue.pending()) == depth)


@pytest.mark.parametrize("sampler", ["rows", "slices"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_priority_update_affects_later_draws(sampler: str, depth: int) -> None:
    """Bit for bit the batches of a buffer without prefetch that learns ``depth`` batches late."""
    ahead, direct = filled(sampler, depth), filled(sampler, None)
    late: list[Any] = []
    for _ in range(12):
        batch = ahead.sample()
        ahead.update_tensordict_priority(batch.set("td_error", learned(batch)))
        late.append(batch.exclude("td_error"))
    ahead.shutdown()
    waiting: list[Any] = []
    for expected in late:
        found = direct.sample()
        same(expected, found)
        waiting.append(found.set("td_error", learned(found)))
        if len(waiting) > depth:
            direct.update_tensordict_priority(waiting.pop(0))


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_written_since_the_draw_keep_the_priorities_they_came_with(depth: int) -> None:
    """A batch prepared before the write is the old one, and what is learned of it is dropped."""
    rb = filled("rows", depth)
    rb.sample()
    all_drawn(rb, depth, eventually)
    number = torch.arange(ROWS) + 1000
    rb.extend(TensorDict({"id": number, "next": {"done": number[:, None] < 0}}, [ROWS]))
    assert isinstance(rb.sampler, PrioritizedSampler)
    dropped = rb.sampler.dropped_updates
    for turn in range(depth):
        old = rb.sample()
        assert (old["id"] < ROWS).all()
        rb.update_tensordict_priority(old.set("td_error", torch.full((16,), 1e6)))
        assert rb.sampler.dropped_updates == dropped + 16 * (turn + 1)
    new = rb.sample()
    assert (new["id"] >= 1000).all()
    assert (new["priority_weight"] == 1).all()  # all alike, as they came


@pytest.mark.parametrize("how", ["sample", "iteration"])
def test_sample_and_iteration_take_from_one_queue(how: str) -> None:
    ahead, direct = filled("rows", 3), filled("rows", None)
    iteration = iter(ahead)
    for number in range(8):
        found = ahead.sample() if how == "sample" or number % 2 else next(iteration)
        same(direct.sample(), found)
    ahead.shutdown()
