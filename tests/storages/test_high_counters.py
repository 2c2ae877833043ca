"""Counters that have come past 2**31 and 2**32, in files: all is as it is with small ones."""

from __future__ import annotations

import multiprocessing
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
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from tests.storages.sharing import another, shown

SLOTS = 8
SAMPLERS: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2),
    "episode priorities": lambda: PrioritizedSliceSampler(
        alpha=0.7, beta=0.5, slice_len=2, unit="episode"
    ),
    "a pass": SamplerWithoutReplacement,
}


CASES = [("prioritized slices", high) for high in (2**32 - 16, 2**53)]
CASES += [(name, 2**31 - 16) for name in SAMPLERS]
"""Positions to begin at, multiples of the slots; the writes pass the next power of two."""


def rows(first: int, count: int, streams: bool) -> TensorDict:
    number = torch.arange(first, first + count)
    step = number // 2 if streams else number
    leaves = {"number": number, "next": {"done": (step % 3 == 2)[:, None]}}
    return TensorDict({**leaves, "env": number % 2} if streams else leaves, [count])


def made(sampler: str, folder: Path | None, **options: Any) -> ReplayBuffer:
    key = options.pop("lane_key", None)
    if folder is None:
        storage = LazyTensorStorage(SLOTS, lane_key=key)
    else:
        recover = not options.get("shared")
        storage = LazyMemmapStorage(SLOTS, scratch_dir=folder, recover=recover, lane_key=key)
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(
        storage=storage, sampler=SAMPLERS[sampler](), generator=generator, **options
    )


def begin_at(buffer: ReplayBuffer, position: int) -> None:
    """Has an empty buffer go on as if so many rows had been written, and forgotten."""
    with buffer.storage.lock:
        buffer.writer._write_count = position
        buffer.storage.ledger.next_position = buffer.storage.ledger.cleared = position


def lowered(found: dict[str, Any], by: int) -> dict[str, Any]:
    """What ``shown`` of a buffer has shown, as it is with counters that are so much smaller."""
    counts = ("next_position", "write_count", "cleared")
    tables = [("positions", by), ("generations", by // SLOTS)]
    tables += [(f"episodes' {name}", by) for name in ("id", "begin", "first", "last")]
    found = {name: value - by if name in counts else value for name, value in found.items()}
    for name, less in tables:
        if name in found:
            found[name] = [max(value - less, -1) for value in found[name]]
    return found


def step(buffer: ReplayBuffer, number: int, streams: bool) -> dict[str, list[Any]]:
    """A write, a batch, and what is learned of it."""
    buffer.extend(rows(3 * number, 3, streams))
    batch = buffer.sample(4)
    if buffer.sampler.prioritized:
        batch["td_error"] = (batch["number"] % 5 + 1).double()
        buffer.update_tensordict_priority(batch)
    keys = [key for key in batch.keys(True, True) if key != "index_generation"]
    return {str(key): batch[key].tolist() for key in keys}


@pytest.mark.pitfall("WR10")
@pytest.mark.parametrize(("sampler", "high"), CASES)
@pytest.mark.parametrize("streams", [False, True])
def test_recovered_buffer_continues_past_high_counters(
    sampler: str, high: int, streams: bool, tmp_path: Path
) -> None:
    key = "env" if streams else None
    small, large = made(sampler, None, lane_key=key), made(sampler, tmp_path, lane_key=key)
    begin_at(large, high)
    for number in range(14):
        if number in (4, 10):  # no episode is open then
            random, state = large._generator.get_state(), large.sampler.state_dict()
            del large
            large = made(sampler, tmp_path, lane_key=key)
            large._generator.set_state(random)
            if sampler == "a pass":
                large.sampler.load_state_dict(state)
        assert step(large, number, streams) == step(small, number, streams)
        assert lowered(shown(large), high) == shown(small)
    assert large.storage.ledger.next_position == high + 42


@pytest.mark.pitfall("WR10")
@pytest.mark.parametrize(("sampler", "high"), [case for case in CASES if case[0] != "a pass"])
@pytest.mark.parametrize("streams", [False, True])
def test_processes_continue_past_high_counters(
    sampler: str, high: int, streams: bool, tmp_path: Path
) -> None:
    key = "env" if streams else None
    small = made(sampler, None, lane_key=key)
    one = made(sampler, tmp_path / "rows", lane_key=key, shared=True)
    begin_at(one, high)
    handles = [one, another(one)]
    for number in range(14):  # no episode is open at the end
        writer, reader = handles[number % 2], handles[1 - number % 2]
        writer._generator.set_state(small._generator.get_state())
        assert step(writer, number, streams) == step(small, number, streams)
        for handle in (reader, writer):
            assert lowered(shown(handle), high) == shown(small)
    reader.dumps(tmp_path / "saved")
    loaded = made(sampler, None, lane_key=key)
    loaded.loads(tmp_path / "saved")
    assert lowered(shown(loaded), high) == {**shown(small), "cleared": -high}


def test_forked_process_writes_past_high_counters(tmp_path: Path) -> None:
    high = 2**31 - SLOTS
    one = made("prioritized", tmp_path, shared=True)
    begin_at(one, high)
    child = multiprocessing.get_context("fork").Process(
        target=one.extend, args=(rows(0, 11, False),)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    small = made("prioritized", None)
    small.extend(rows(0, 11, False))
    assert lowered(shown(one), high) == shown(small)
    assert one.storage.ledger.next_position == 2**31 + 3
