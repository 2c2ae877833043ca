"""Values of the row before, at the first rows of chunks whose earlier chunks are missing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    PreviousStep,
    ReplayBuffer,
    SliceSampler,
    StepCount,
    TrajectoryFolder,
    TrajectoryWriter,
)
from tests.feeds.trajectories import files_in, rows_of
from tests.support.refusals import refuses

KEYS = ["step", ("next", "reward")]


def expected(rows: TensorDict, init: float) -> tuple[list[float], list[float]]:
    """Return action (here: the step before) and reward of the row before, by the known ends."""
    step, stream = rows["step"], rows["stream"]
    first = ((step == 0) | (step % 9 == 0)).tolist()
    before = (step - 1).tolist()
    reward = ((step - 1) * 3 + stream).tolist()
    pairs = [
        (init, init) if new else (b, r) for new, b, r in zip(first, before, reward, strict=True)
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


@pytest.mark.acceptance("C16", "C39")
@pytest.mark.parametrize("format", ["safetensors", "npz"])
@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("init", [0.0, 7.0])
def test_previous_values_are_right_where_chunks_are_missing(
    tmp_path: Path, format: Any, lanes: int | None, init: float
) -> None:
    rng, count = random.Random(0), 60
    ends = range(8, count, 9)
    streams = [rows_of(lane, 0, count, ends) for lane in range(lanes or 1)]
    rows = torch.stack(streams, 1) if lanes else streams[0]
    writer = TrajectoryWriter(tmp_path, max_len=4, format=format, lanes=lanes, previous=KEYS)
    at = 0
    while at < count:
        size = rng.randrange(1, 8)
        writer.extend(rows[at : at + size])
        at += size
    writer.close()
    for name in files_in(tmp_path):
        if rng.random() < 0.4:
            (tmp_path / "fifo" / name).unlink()
    storage = LazyTensorStorage(100, lane_key="lane")
    transform = Compose(PreviousStep(KEYS, init=init, stored=True), StepCount(stored=True))
    rb = ReplayBuffer(
        storage=storage, transform=transform, sampler=SliceSampler(slice_len=2), batch_size=4000
    )
    assert 0 < TrajectoryFolder(tmp_path, rb).refresh() < count * (lanes or 1)
    for found in (rb[:], rb.sample()):
        action, reward = expected(found, init)
        assert found["previous_step"].tolist() == action
        assert found["previous_reward"].flatten().tolist() == reward
        assert (found["next", "previous_step"] == found["step"]).all()
        assert (found["step_count"].flatten() == found["step"] % 9).all()
    drawn = set(zip(found["stream"].tolist(), found["step"].tolist(), strict=True))
    pairs = {
        (int(e.rows()["stream"][0]), step)
        for e in rb.episodes
        if e.length > 1
        for step in e.rows()["step"].tolist()
    }
    assert drawn == pairs  # also the first rows of cut chunks


def test_cuts_and_ids_begin_without_previous_values(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, previous=["x"]) as writer:
        for start in (1, 3):
            writer.extend(TensorDict({"x": torch.arange(start, start + 2)}, [2]))
        writer.cut()
        episode = torch.tensor([0, 0, 1])
        writer.extend(TensorDict({"x": torch.arange(5, 8)}, [3]))
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    TrajectoryFolder(tmp_path, rb).refresh()
    assert rb[:]["previous", "x"].tolist() == [0, 1, 2, 3, 0, 5, 6]
    assert rb[:]["previous", "valid"].flatten().tolist() == [False, *[True] * 3, False, True, True]
    assert rb[:]["previous", "steps"].flatten().tolist() == [0, 1, 2, 3, 0, 1, 2]
    with TrajectoryWriter(tmp_path / "ids", previous=["x"]) as writer:
        writer.extend(TensorDict({"x": torch.arange(5, 8), "episode": episode}, [3]))
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    TrajectoryFolder(tmp_path / "ids", rb).refresh()
    assert rb[:]["previous", "x"].tolist() == [0, 5, 0]


def test_wrong_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="previous: expected a list of keys, got 'x'"):
        TrajectoryWriter(tmp_path, previous="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'valid' and 'steps' are reserved"):
        TrajectoryWriter(tmp_path, previous=["y", "steps"])
    writer = TrajectoryWriter(tmp_path, previous=["y"])
    with pytest.raises(KeyError, match="previous: expected rows with the key 'y'"):
        writer.extend(TensorDict({"x": torch.arange(2)}, [2]))
    with pytest.raises(ValueError, match="rows without the key 'previous'"):
        writer.extend(TensorDict({"y": torch.arange(2), "previous": torch.arange(2)}, [2]))
    writer.extend(TensorDict({"y": torch.arange(2)}, [2]))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(9), transform=PreviousStep(["x"], stored=True), batch_size=1
    )
    rb.extend(TensorDict({"x": torch.arange(2)}, [2]))
    refuses(KeyError, "stored=True expected the column of 'x'", rb.sample)
    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=StepCount(stored=True), batch_size=1)
    rb.extend(TensorDict({"x": torch.arange(2)}, [2]))
    refuses(KeyError, "stored=True expected the column", rb.sample)
