"""Small batches are drawn ahead by the thread that asks for them: the same ones, in their order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Sequence,
)
from replaykit.buffer.draw import reads_now
from replaykit.storages.row_kernels import NativeRows
from tests.buffer.building import same

ROWS = 50
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "passes": SamplerWithoutReplacement,
    "whole passes": lambda: SamplerWithoutReplacement(drop_last=True),
}


def made(sampler: Sampler, prefetch: int | None = 2, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=sampler,
        batch_size=8,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(2),
        **options,
    )
    number = torch.arange(ROWS)
    rb.extend(TensorDict({"id": number, "next": {"done": (number % 10 == 9)[:, None]}}, [ROWS]))
    return rb


def threads_of_it() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("replaykit-prefetch")]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_does_not_change_the_batches(depth: int, sampler: str) -> None:
    direct, ahead = (made(SAMPLERS[sampler](), n) for n in (None, depth))
    before = threads_of_it()
    for _ in range(30):
        same(direct.sample(), ahead.sample())
        assert direct.sampler.ran_out == ahead.sampler.ran_out
    assert set(threads_of_it()) <= set(before)


def test_iterations_end_with_their_passes() -> None:
    direct, ahead = (made(SamplerWithoutReplacement(), n) for n in (None, 2))
    for _ in range(3):
        pairs = list(zip(direct, ahead, strict=True))
        assert len(pairs) == 7
        for pair in pairs:
            same(*pair)


def test_learning_loop_gets_the_same_batches_as_with_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[list[Any]] = []
    for threads in (False, True):
        with monkeypatch.context() as patch:
            if threads:
                patch.setattr("replaykit.buffer.draw.reads_now", lambda buffer: False)
            rb, found = made(PrioritizedSampler(ROWS, 0.7, 0.5)), []
            for step in range(15):
                batch = rb.sample()
                found.append(batch.clone())
                rb.update_tensordict_priority(batch.set("td_error", batch["id"] * 7.0 % 11))
                rows = torch.arange(ROWS + 4 * step, ROWS + 4 * step + 4)
                done = torch.zeros(4, 1, dtype=torch.bool)
                rb.extend(TensorDict({"id": rows, "next": {"done": done}}, [4]))
                rb[torch.arange(3)] = rb[torch.arange(3)].set("id", torch.full((3,), -step))
            rb.shutdown()
        runs.append(found)
    for pair in zip(*runs, strict=True):
        same(*pair)


def test_failed_draw_raises_at_its_batch_which_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ahead = (made(RandomSampler(), n) for n in (None, 2))
    sample, calls = RandomSampler.sample, iter(range(100))

    def fails(self: Any, storage: Any, size: int) -> Any:
        if next(calls) == 3:
            raise ValueError("not this time")
        return sample(self, storage, size)

    expected = [direct.sample() for _ in range(8)]
    monkeypatch.setattr(RandomSampler, "sample", fails)
    found = [ahead.sample() for _ in range(3)]
    with pytest.raises(ValueError, match="not this time"):
        ahead.sample()
    found += [ahead.sample() for _ in range(5)]
    for pair in zip(expected, found, strict=True):
        same(*pair)
    ahead.shutdown()


def test_interrupt_is_raised_by_the_running_call(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ahead = (made(RandomSampler(), n) for n in (None, 2))
    sample, calls = RandomSampler.sample, iter(range(100))

    def interrupted(self: Any, storage: Any, size: int) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return sample(self, storage, size)

    expected = [direct.sample() for _ in range(8)]
    monkeypatch.setattr(RandomSampler, "sample", interrupted)
    found = [ahead.sample() for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        ahead.sample()  # has the draw made that would be two batches later
    ahead.extend(TensorDict({"id": torch.zeros(0), "next": {"done": torch.zeros(0, 1)}}, [0]))
    found += [ahead.sample() for _ in range(5)]
    for pair in zip(expected, found, strict=True):
        same(*pair)
    ahead.shutdown()


def test_several_callers_share_the_passes() -> None:
    rb = made(SamplerWithoutReplacement())
    found: list[int] = []

    def take() -> None:
        for _ in range(7):
            found.extend(rb.sample()["id"].tolist())

    callers = [threading.Thread(target=take) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
        assert not caller.is_alive()
    assert sorted(found) == sorted([*range(ROWS)] * 4)
    rb.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        rb.sample()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_continues_with_the_prefetched_draws() -> None:
    direct, ahead = (made(RandomSampler(), n) for n in (None, 3))
    for rb in (direct, ahead):
        rb.sample()
    if not (child := os.fork()):
        try:
            agree = all(
                bool((direct.sample()["index"] == ahead.sample()["index"]).all()) for _ in range(6)
            )
            os._exit(0 if agree else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((direct.sample()["index"] == ahead.sample()["index"]).all())


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": lambda rows: rows},
        {"transform": lambda rows: rows},
        {"sample_unit": Sequence(length=2)},
    ],
)
def test_slow_batches_are_left_to_threads(options: dict[str, Any]) -> None:
    rb = made(RandomSampler(), **options)
    assert not reads_now(rb)
    rb.sample()
    rb.shutdown()


@pytest.mark.parametrize("kind", ["mapped", "torch"])
def test_large_batches_are_left_to_threads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = kind == "mapped"
    if not mapped:
        monkeypatch.setattr(NativeRows, "over", classmethod(lambda cls, columns: None))
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path) if mapped else LazyTensorStorage(4)
    rb = ReplayBuffer(storage=storage, batch_size=3, prefetch=1)
    rb.extend(torch.zeros(4, 40_000))
    assert not reads_now(rb)
    assert rb.sample().shape == (3, 40_000)
    rb.shutdown()
