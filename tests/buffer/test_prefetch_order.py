"""Draws made ahead know of a write or a priority as the program says, not as threads run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    StalenessAwareSampler,
)
from replaykit.buffer import prefetch as ahead
from replaykit.samplers import Sampler
from tests.buffer.building import eventually, same

pytestmark = pytest.mark.usefixtures("by_threads")

ROWS = 64


def rows(first: int, count: int = 16) -> TensorDict:
    number = torch.arange(first, first + count)
    done = (number % 16 == 15)[:, None]
    return TensorDict({"id": number, "next": {"done": done}}, [count])


def made(sampler: Any, prefetch: int | None = 2, storage: Any = None) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=storage or LazyTensorStorage(ROWS),
        sampler=sampler,
        batch_size=8,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(2),
    )
    rb.extend(rows(0, ROWS))
    return rb


def slowed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Threads begin to read batches at random times."""
    pauses, make = random.Random(seed), ahead._make

    def later(*given: Any) -> None:
        time.sleep(pauses.choice([0, 0, 0.001, 0.004]))
        make(*given)

    monkeypatch.setattr(ahead, "_make", later)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Threads begin to read batches when the event is set."""
    may, make = threading.Event(), ahead._make
    monkeypatch.setattr(ahead, "_make", lambda *given: (may.wait(20), make(*given)))
    return may


def same_in_any_timing(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[Any, Callable[[Any, int], None]]]
) -> None:
    """Compare the batches of two runs, each of which is a buffer and what follows a batch."""
    runs = []
    for seed in (0, 1):
        with monkeypatch.context() as patched:
            slowed(patched, seed)
            rb, change = run()
            found = []
            for step in range(12):
                found.append(rb.sample())
                change(found[-1], step)
            rb.shutdown()
        runs.append(found)
    for pair in zip(*runs, strict=True):
        same(*pair)


def learn(rb: ReplayBuffer, batch: Any, step: int) -> None:
    rb.update_tensordict_priority(batch.set("td_error", (batch["id"] * 7 % 11).float()))
    rb.extend(rows(ROWS + 16 * step))


def patch(rb: ReplayBuffer, batch: Any, step: int) -> None:
    rb[torch.arange(4)] = rb[torch.arange(4)].set("id", torch.full((4,), 1000 + step))


def set_on_the_sampler(rb: ReplayBuffer, batch: Any, step: int) -> None:
    sampler = rb.sampler
    assert isinstance(sampler, PrioritizedSampler)
    sampler.alpha, sampler.beta = 1 / (1 + step), 0.5 + step / 50
    sampler.update_priority(batch["index"], batch["id"] % 5 + 1.0)


def another_size(rb: ReplayBuffer, batch: Any, step: int) -> None:
    time.sleep(0.002)  # else it would always come before the draw made ahead
    batch["other"] = rb.sample(10 + 2 * step)["id"][:8]


def of_staleness(staleness: torch.Tensor) -> torch.Tensor:
    return torch.exp(staleness / 50)


def of_version(rb: ReplayBuffer, batch: Any, step: int) -> None:
    assert isinstance(rb.sampler, StalenessAwareSampler)
    if step % 2:
        rb.sampler.consumer_version = 1 + step * 5
    else:
        rb.sampler.increment_consumer_version()


WORK: dict[str, tuple[Callable[[], Sampler], Callable[[ReplayBuffer, Any, int], None]]] = {
    "learned rows": (lambda: PrioritizedSampler(ROWS, 0.7, 0.5), learn),
    "learned slices": (lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4), learn),
    "patched": (lambda: SliceSampler(slice_len=4), patch),
    "exponents": (lambda: PrioritizedSampler(ROWS, 0.7, 0.5), set_on_the_sampler),
    "another size": (lambda: SliceSampler(slice_len=2), another_size),
    "versions": (
        lambda: StalenessAwareSampler(staleness_weight_fn=of_staleness, version_key="id"),
        of_version,
    ),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("depth", [1, 3])
def test_thread_timing_does_not_change_the_batches(
    depth: int, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        sampler, change = WORK[work]
        rb = made(sampler(), depth)
        return rb, lambda batch, step: change(rb, batch, step)

    same_in_any_timing(monkeypatch, run)


def test_scheduler_steps_apply_to_later_draws_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a buffer without prefetch that steps one batch late."""
    slowed(monkeypatch, 3)
    late, direct = (made(PrioritizedSampler(ROWS, 0.7, 0.1), depth) for depth in (1, None))
    priority = torch.arange(ROWS) % 9 + 1.0
    plans = []
    for rb in (late, direct):
        rb.update_priority(torch.arange(ROWS), priority)
        plans.append(LinearScheduler(rb, "beta", final_value=1.0, num_steps=10))
    for step in range(10):
        same(direct.sample(), late.sample())
        plans[0].step()
        if step:
            plans[1].step()
    late.shutdown()


@pytest.mark.parametrize("nested", [False, True])
def test_writes_to_ensemble_members_affect_later_draws(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        members = [made(PrioritizedSampler(ROWS, 0.7, 0.5), None) for _ in range(2)]
        inside: list[Any] = list(members)
        if nested:
            inside = [members[0], ReplayBufferEnsemble(members[1], batch_size=4)]
        rb = ReplayBufferEnsemble(
            *inside, batch_size=16, prefetch=2, generator=torch.Generator().manual_seed(0)
        )

        def change(batch: Any, step: int) -> None:
            for number, member in enumerate(members):
                member.extend(rows(ROWS + 16 * step + 3 * number))
                member.update_priority(torch.arange(8), 1.0 + step + number)

        return rb, change

    same_in_any_timing(monkeypatch, run)


def test_writes_do_not_wait_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write reads the batches that are drawn and not read; each has the rows as of its draw."""
    may = held_up(monkeypatch)
    late, direct = (made(PrioritizedSampler(ROWS, 0.7, 0.5), depth) for depth in (2, None))
    expected = [direct.sample() for _ in range(3)]
    try:
        same(expected[0], late.sample())
        late.extend(rows(ROWS, ROWS))
        late.update_priority(torch.arange(4), 2.0)
        assert not may.is_set()
    finally:
        may.set()
    for batch in expected[1:]:
        same(batch, late.sample())
    assert late.sample()["id"].min() >= ROWS
    late.shutdown()


def test_rows_that_another_buffer_overwrites_before_they_are_read_are_not_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two buffers over a storage do not know of each other's draws."""
    may = held_up(monkeypatch)
    storage = LazyTensorStorage(ROWS)
    rb, other = (
        made(PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4), storage=storage),
        ReplayBuffer(storage=storage),
    )
    rb.sample()
    other.extend(rows(ROWS, ROWS // 2 + 2))  # cuts windows, and keeps others
    may.set()
    for _ in range(4):
        batch = rb.sample()
        assert bool((batch["id"].view(-1, 4).diff(dim=1) == 1).all())
        stored = rb[batch["index"]]
        assert torch.equal(stored["id"], batch["id"])
        assert torch.equal(batch["index_generation"], batch["id"] // ROWS)
    rb.shutdown()


@pytest.mark.parametrize("kind", ["memory", "recoverable"])
def test_holder_of_the_lock_may_write(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    slowed(monkeypatch, 4)
    storage = None
    if kind == "recoverable":
        storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "rows", recover=True)
    rb = made(PrioritizedSampler(ROWS, 0.7, 0.5), storage=storage)
    for step in range(5):
        rb.sample()
        with rb.storage.lock:
            rb.extend(rows(ROWS + 16 * step))
            rb.update_priority(torch.arange(4), 2.0)
    rb.shutdown()


# -- priorities ------------------------------------------------------------------------------------


def learned(batch: Any) -> torch.Tensor:
    """Priorities that follow from the rows alone."""
    return (batch["id"] * 7 % 11).float() + 0.1


@pytest.mark.parametrize("work", ["learned rows", "learned slices"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_priority_update_affects_later_draws(work: str, depth: int) -> None:
    """Bit for bit the batches of a buffer without prefetch that learns ``depth`` batches late."""
    ahead, direct = (made(WORK[work][0](), n) for n in (depth, None))
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
    rb = made(PrioritizedSampler(ROWS, 0.7, 0.5), depth)
    rb.sample()
    queue = rb._prefetcher
    assert queue is not None
    assert eventually(lambda: len(queue.pending()) == depth)
    number = torch.arange(ROWS) + 1000
    rb.extend(TensorDict({"id": number, "next": {"done": number[:, None] < 0}}, [ROWS]))
    assert isinstance(rb.sampler, PrioritizedSampler)
    dropped = rb.sampler.dropped_updates
    for turn in range(depth):
        old = rb.sample()
        assert (old["id"] < ROWS).all()
        rb.update_tensordict_priority(old.set("td_error", torch.full((8,), 1e6)))
        assert rb.sampler.dropped_updates == dropped + 8 * (turn + 1)
    new = rb.sample()
    assert (new["id"] >= 1000).all()
    assert (new["priority_weight"] == 1).all()  # all alike, as they came
