"""Transforms that hold rows back on their way in, as n-step returns do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.transforms import Transform

STEPS = 3


class NStep(Transform):
    """Adds up the rewards of ``STEPS`` rows, and so lets a row go ``STEPS - 1`` rows later."""

    def __init__(self) -> None:
        self.held: TensorDict | None = None
        self.closing = False

    def inv(self, data: Any) -> Any:
        rows = data if self.held is None else torch.cat([self.held, data])
        sums = rows["reward"].clone()
        for step in range(1, STEPS):
            sums[: len(rows) - step] += rows["reward"][step:]
        ready = len(rows) if self.closing else max(0, len(rows) - STEPS + 1)
        self.held = rows[ready:].clone()
        return rows[:ready].copy().set("return", sums[:ready]) if ready else None

    def state_dict(self) -> dict[str, Any]:
        return {"held": None if self.held is None else self.held.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = None if state["held"] is None else state["held"].clone()


def make_rows(start: int, count: int) -> TensorDict:
    ids = torch.arange(start, start + count)
    return TensorDict({"id": ids, "reward": ids.double() ** 2}, [count])


def make_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(100), transform=NStep(), batch_size=4)


def through_files(buffer: ReplayBuffer, folder: Path) -> ReplayBuffer:
    buffer.dumps(folder)
    loaded = make_buffer()
    loaded.loads(folder)
    return loaded


def through_state(buffer: ReplayBuffer, folder: Path) -> ReplayBuffer:
    loaded = make_buffer()
    loaded.load_state_dict(buffer.state_dict())
    return loaded


@pytest.mark.pitfall("WR18")
@pytest.mark.parametrize(
    "onward",
    [
        through_files,
        through_state,
        lambda buffer, folder: pickle.loads(pickle.dumps(buffer)),
        lambda buffer, folder: copy.deepcopy(buffer),
        lambda buffer, folder: buffer,
    ],
    ids=["dumps", "state_dict", "pickle", "deepcopy", "no save"],
)
def test_held_back_rows_are_all_stored_in_the_end(
    onward: Callable[[Any, Path], ReplayBuffer], tmp_path: Path
) -> None:
    buffer = make_buffer()
    start = 0
    for turn, count in enumerate((1, 1, 5, 2, 1, 9, 1)):
        index = buffer.extend(make_rows(start, count))
        start += count
        assert len(buffer) == max(0, start - STEPS + 1)
        assert len(index) == min(count, len(buffer))
        buffer = onward(buffer, tmp_path / str(turn))
    transform = buffer.transform[0]
    transform.closing = True
    buffer.extend(make_rows(start, 1))
    start += 1

    assert buffer["id"].tolist() == list(range(start))
    rewards = [float(i**2) for i in range(start)]
    assert buffer["return"].tolist() == [sum(rewards[i : i + STEPS]) for i in range(start)]
    assert buffer.write_count == start


@pytest.mark.pitfall("WR18")
def test_a_state_taken_before_does_not_follow_later_rows(tmp_path: Path) -> None:
    buffer = make_buffer()
    buffer.extend(make_rows(0, 4))
    state = buffer.state_dict()
    buffer.extend(make_rows(4, 4))
    loaded = make_buffer()
    loaded.load_state_dict(state)
    loaded.extend(make_rows(4, 4))
    assert loaded["return"].equal(buffer["return"])
