"""Episodes and passes after changes of capacity, loads and other processes' edits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from tests.storages.sharing import another


def _rows(first: int, ends: list[int], env: int = 0) -> TensorDict:
    """Return rows numbered from ``first`` on, with a flag of their ends."""
    done = torch.tensor(ends, dtype=torch.bool)
    x = torch.arange(first, first + len(ends))
    return TensorDict({"x": x, "env": x * 0 + env, "next": {"done": done}}, [len(ends)])


def _episodes(rb: ReplayBuffer) -> list[list[int]]:
    return sorted(episode.rows()["x"].tolist() for episode in rb.episodes)


def test_resize_cuts_gaps_but_no_episode_ends() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(_rows(0, [0, 1, 0]))
    rb.resize(9)
    rb[1] = _rows(1, [0])[0]
    assert _episodes(rb) == [[0, 1, 2]]


def test_processes_agree_on_ids_after_a_load(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), shared=True)
    rb.extend(_rows(0, [0] * 6))
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    other = another(rb)
    for writer, reader in ((other, rb), (rb, other)):
        writer.extend(_rows(6, [1, 0, 0, 0, 0, 0]))
        assert [e.id for e in reader.episodes] == [e.id for e in writer.episodes]


@pytest.mark.parametrize("lane_key", [None, "env"])
def test_processes_agree_on_ids_after_rows_placed_by_hand(lane_key: str | None) -> None:
    """The oldest episode in the order of the ring began before the stored rows."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4, lane_key=lane_key), shared=True)
    rb.extend(_rows(0, [0] * 6))
    other = another(rb)
    assert [e.id for e in rb.episodes] == [0]
    rb.storage.set([0], _rows(6, [0]))
    assert sorted(e.id for e in rb.episodes) == [2, 5, 6]
    assert [e.id for e in other.episodes] == [e.id for e in rb.episodes]


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, SliceSamplerWithoutReplacement])
def test_a_pass_ends_when_another_process_writes(sampler: Any, tmp_path: Path) -> None:
    """A clear and as many new rows end a pass over rows; any write ends a loaded one of slices."""
    slices = sampler is SliceSamplerWithoutReplacement
    made = sampler(slice_len=1, shuffle=False) if slices else sampler(shuffle=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=made, batch_size=1, shared=True)
    other = another(rb)
    rb.extend(_rows(0, [1] * 4))
    assert rb.sample()["x"] == 0
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    if not slices:
        other.empty()
    other.extend(_rows(4, [1] * 4))
    assert [int(rb.sample()["x"]) for _ in range(2)] == [4, 5]


def test_the_first_of_all_rows_begins_its_episode_whatever_is_placed_by_hand() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(_rows(0, [0, 0, 1, 0, 0]))
    rb.storage.set([3], _rows(5, [0]))
    assert next(e.complete for e in rb.episodes)


@pytest.mark.parametrize("lane_key", [None, "env"])
def test_an_edit_that_keeps_the_ends_reads_no_rows_again(lane_key: str | None) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(6, lane_key=lane_key), shared=True)
    other = another(rb)
    rb.extend(_rows(0, [0, 0, 1, 0, 0, 0]))
    assert _episodes(rb) == _episodes(other)
    known = [buffer.storage.episodes for buffer in (rb, other)]
    rebuilt = [index.rebuilt for index in known]
    rb[1:3] = _rows(11, [0, 1])
    assert _episodes(rb) == _episodes(other) == [[0, 11, 12], [3, 4, 5]]
    assert [index.rebuilt for index in known] == rebuilt
    rb[1] = _rows(21, [1])[0]
    assert _episodes(rb) == _episodes(other) == [[0, 21], [3, 4, 5], [12]]


def test_an_edit_follows_edits_of_rows_that_are_gone() -> None:
    """Another process ends an episode and overwrites that end, before this process edits a row."""
    storage = LazyTensorStorage(3, lane_key="env")
    rb = ReplayBuffer(storage=storage, shared=True)
    rb.extend(_rows(0, [0, 0, 0]))
    other = another(rb)
    assert len(other.episodes) == 1
    rb[2] = _rows(2, [1])[0]
    rb.extend(_rows(3, [0, 0, 0]))
    other[1] = _rows(4, [0])[0]
    assert [e.id for e in other.episodes] == [e.id for e in rb.episodes] == [3]


def test_a_pass_that_is_over_is_over_in_copies(tmp_path: Path) -> None:
    """A row ends a pass of 9 rows. The smaller copies have 9 rows again, but begin a pass."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SamplerWithoutReplacement(),
        writer=TensorDictMaxValueWriter(rank_key="x"),
        batch_size=6,
    )
    rb.extend(_rows(1, [0] * 9))
    rb.sample()
    rb.add(_rows(0, [0])[0])
    rb.dumps(tmp_path)
    small = ReplayBuffer(
        storage=LazyTensorStorage(9),
        sampler=SamplerWithoutReplacement(),
        writer=TensorDictMaxValueWriter(rank_key="x"),
        batch_size=6,
    )
    with pytest.warns(UserWarning, match="smaller capacity"):
        small.loads(tmp_path)
    for made in (small, copy.deepcopy(rb)):
        assert len(made.sample()) == 6


@pytest.mark.parametrize("edit", [False, True])
def test_round_robin_keeps_its_place_if_an_edit_follows_a_load(tmp_path: Path, edit: bool) -> None:
    sampler = SliceSampler(slice_len=1, draw="round_robin", offset="first")
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=1)
    rb.extend(_rows(0, [0, 1, 0, 0, 0, 1, 0, 1]))
    assert rb.sample()["x"].item() == 0
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    if edit:  # this cuts the next episode
        rb[2] = _rows(2, [1])[0]
    assert [rb.sample()["x"].item() for _ in range(3)] == ([2, 3, 6] if edit else [2, 6, 0])


def test_a_place_that_a_resize_leaves_out_becomes_the_oldest() -> None:
    """The next window of the order was that of lane 1, whose row of the last window is gone."""
    storage = LazyTensorStorage(12, ndim=2)
    sampler = SliceSampler(slice_len=1, draw="sequential")
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=1)
    x = torch.arange(12).view(2, 6)
    rb.extend(TensorDict({"x": x, "next": {"done": x == 12}}, [2, 6]))
    assert [rb.sample()["x"].item() for _ in range(8)] == [*range(6), 6, 7]
    rb.resize(6)
    assert rb.sample()["x"].item() == 3
