"""Draws made ahead and undone: by a save, before writes, by a change of transforms."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    HindsightGoal,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    Sequence,
    SliceSampler,
    StepCount,
    TrajectoryTransform,
)
from tests.buffer.building import same


def rows(count: int, start: int = 0) -> TensorDict:
    """Episodes of ten rows that reach their number as a goal."""
    number = torch.arange(start, start + count)
    goal = number.float()[:, None]
    done = (number % 10 == 9)[:, None]
    after = {"achieved": goal + 1, "goal": goal * 0, "reward": goal, "done": done}
    return TensorDict({"id": number, "goal": goal * 0, "next": after}, [count])


def unchanged(episode: TensorDict) -> TensorDict:
    return episode


def make(sampler: Any, transform: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=sampler(),
        transform=None if transform is None else transform(),
        batch_size=24,
        prefetch=3,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def filled_ahead(buffer: ReplayBuffer) -> None:
    """Take a batch; then three others are drawn."""
    buffer.sample()
    assert buffer.stats()["prefetch_queue_size"] == 3


@pytest.mark.parametrize("way", ["directory", "dict", "pickle"])
@pytest.mark.parametrize(
    ("sampler", "transform"),
    [
        (RandomSampler, lambda: HindsightGoal(0.5, achieved="achieved", goal="goal")),
        (lambda: SliceSampler(slice_len=4), lambda: TrajectoryTransform(unchanged)),
        (lambda: SliceSampler(slice_len=12, strict_length=False), None),
        (lambda: SliceSampler(slice_len=4, span=True), None),
    ],
    ids=["goals", "edited", "short", "span"],
)
def test_a_save_with_prefetched_batches_gives_the_same_batches(
    sampler: Any, transform: Any, way: str, tmp_path: Path
) -> None:
    """Also where transforms draw too, and where batches have fewer rows than were asked for."""
    buffer, other = make(sampler, transform), make(sampler, transform)
    buffer.extend(rows(100))
    filled_ahead(buffer)
    if way == "directory":
        buffer.dumps(tmp_path)
        other.loads(tmp_path)
    elif way == "dict":
        other.load_state_dict(buffer.state_dict())
    else:
        other = pickle.loads(pickle.dumps(buffer))
    for _ in range(6):
        same(buffer.sample(), other.sample())


def broken(batch: TensorDict, length: int) -> int:
    """How many windows hold rows that do not follow each other."""
    windows = batch.reshape(-1, length)
    follows = windows["id"].diff(dim=1) == 1
    valid = windows.get("validity_mask", None)
    if valid is not None:
        follows |= ~valid[:, 1:]
    return int((~follows.all(1)).sum())


def after_load(buffer: ReplayBuffer) -> ReplayBuffer:
    other = make(lambda: SliceSampler(slice_len=8))
    other.load_state_dict(buffer.state_dict())
    return other


def after_transform(buffer: ReplayBuffer) -> ReplayBuffer:
    return buffer.append_transform(StepCount())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"sampler": lambda: SliceSampler(slice_len=8)}, after_load),
        ({"sampler": lambda: SliceSampler(slice_len=8)}, after_transform),
        ({"sampler": RandomSampler, "sample_unit": Sequence(length=8)}, after_transform),
    ],
    ids=["loaded slices", "slices", "sequences"],
)
def test_windows_drawn_ahead_do_not_cross_the_seam_of_a_later_write(
    options: dict[str, Any], kept: Callable[[ReplayBuffer], ReplayBuffer]
) -> None:
    crossed = 0
    for start in range(5, 100, 10):
        buffer = make(**options)
        buffer.extend(rows(100))
        filled_ahead(buffer)
        buffer = kept(buffer)
        buffer.extend(rows(start, 100))
        crossed += sum(broken(buffer.sample(), 8) for _ in range(3))
    assert crossed == 0


def test_sequential_pass_continues_after_returned_windows() -> None:
    buffer = make(lambda: SliceSampler(slice_len=4, draw="sequential"))
    buffer.extend(rows(100))
    filled_ahead(buffer)
    buffer.append_transform(StepCount())
    buffer.extend(rows(10, 100))  # over windows that were delivered, and one that was not
    assert buffer.sample()["id"][::4].tolist() == [30, 34, 40, 44, 50, 54]
