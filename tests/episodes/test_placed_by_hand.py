"""The index goes on as one that is made anew would see it, and as a loaded buffer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSamplerWithoutReplacement,
)

SLOTS = 7


def rows(first: int, count: int, done: tuple[int, ...] = ()) -> TensorDict:
    number = torch.arange(first, first + count)
    ends = torch.tensor([at in done for at in number.tolist()])[:, None]
    return TensorDict({"number": number, "env": number % 3, "next": {"done": ends}}, [count])


def shown(buffer: ReplayBuffer) -> list[list[int]]:
    """The rows of each episode, by what is in them."""
    return [buffer["number"][episode.index].tolist() for episode in buffer.episodes]


def loaded(buffer: ReplayBuffer, folder: Path, writer: Any, **options: Any) -> ReplayBuffer:
    buffer.dumps(folder)
    found = ReplayBuffer(storage=LazyTensorStorage(SLOTS, **options), writer=writer)
    found.loads(folder)
    return found


@pytest.mark.parametrize("options", [{}, {"lane_key": "env"}])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("slot", [1, 4])
def test_after_a_row_placed_by_hand_nothing_goes_on_from_the_rows_before_it(
    options: dict[str, Any], looked: bool, slot: int, tmp_path: Path
):
    """Also where that row is overwritten by the next ones: those before and after it were joined,
    if somebody had looked in between, and a loaded buffer drew other slices."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(SLOTS, **options))
    buffer.extend(rows(0, 13))
    buffer.writer.write_at(torch.tensor([slot]), rows(100, 1))
    if looked:
        assert len(list(buffer.episodes))
    buffer.extend(rows(14, 4))
    found = shown(buffer)
    assert not any(min(episode) < 13 < max(episode) for episode in found)
    assert found == shown(loaded(buffer, tmp_path, None, **options))
    table = buffer.storage.episodes.table()
    buffer.storage.ledger.log.edit(None, [("next", "done")])  # the index is rebuilt from the rows
    assert buffer.storage.episodes.table().code.tolist() == table.code.tolist()
    assert shown(buffer) == found


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("more", [SLOTS, 2 * SLOTS])
@pytest.mark.parametrize("slots", [[4], [0], [6, 1], [3, 2]])
def test_save_of_a_full_ring_keeps_the_beginning_of_its_oldest_episode(
    slots: list[int], more: int, lanes: int, tmp_path: Path
):
    """Episodes that are longer than the ring keep their number and their steps."""

    def make() -> ReplayBuffer:
        storage = LazyTensorStorage(SLOTS * lanes, ndim=2 if lanes > 1 else 1)
        return ReplayBuffer(storage=storage, dim_extend=0)

    def data(first: int, count: int) -> TensorDict:
        number = torch.arange(first, first + count)
        shape = [count, lanes] if lanes > 1 else [count]
        done = (number == 3)[:, None].expand(count, lanes).reshape(*shape, 1)
        return TensorDict({"next": {"done": done.clone()}}, shape)

    buffer = make()
    for first in range(0, 17, 2):
        buffer.extend(data(first, 2))
    buffer.writer.write_at(torch.tensor(slots), data(100, len(slots)))
    assert len(list(buffer.episodes))
    for first in range(200, 200 + more):
        buffer.extend(data(first, 1))
    buffer.dumps(tmp_path)
    again = make()
    again.loads(tmp_path)
    elements = np.arange(SLOTS * lanes)
    found = []
    for one in (buffer, again):
        index = one.storage.episodes
        time, lane = index.time_and_lane(elements)
        begin = index.begins(time, lane)
        found.append([index.ids(time, lane).tolist(), (time - begin).tolist()])
    assert found[0] == found[1]


def test_extend_with_views_of_the_buffer_equals_extend_with_copies():
    """Where they are views: the flags and streams of what was written over them were noted."""
    done = torch.tensor([0, 1, 0, 0, 0, 1], dtype=torch.bool)[:, None]
    first = TensorDict(
        {"number": torch.arange(6), "env": torch.arange(6) // 3, "next": {"done": done}}, [6]
    )
    found = []
    for copied in (False, True):
        storage = LazyTensorStorage(6, lane_key="env")
        buffer = ReplayBuffer(storage=storage, writer=LaneWriter(length=3))
        buffer.extend(first)
        view = buffer[1:4]
        assert view["number"].data_ptr() == storage.column("number")[1:].data_ptr()
        buffer.extend(view.clone() if copied else view)
        found.append([episode.index.tolist() for episode in buffer.episodes])
    assert found[0] == found[1] == [[2, 0], [1], [4, 5], [3]]


@pytest.mark.parametrize("options", [{}, {"lane_key": "env"}])
@pytest.mark.parametrize("slots", [SLOTS, 20])
@pytest.mark.parametrize("resized", [False, True])
def test_a_pass_over_episodes_repeats_none_after_a_load(
    options: dict[str, Any], slots: int, resized: bool
) -> None:
    """In other slots, the episodes have another order, and a new pass begins."""

    def make(slots: int, seed: int = 0) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(slots, **options),
            sampler=SliceSamplerWithoutReplacement(slice_len=1),
            batch_size=1,
            generator=torch.Generator().manual_seed(seed),
        )

    for seed in range(10):
        made = make(SLOTS, seed)
        made.extend(rows(0, 6, done=tuple(range(6))))
        made.storage.set(torch.tensor([4, 1]), rows(6, 2, done=(6, 7)))
        episodes = {tuple(each) for each in shown(made)}
        drawn = {int(made.sample()["number"]) for _ in range(2)}
        other = made if resized else make(slots)
        if resized:
            made.resize(slots)
        else:
            other.load_state_dict(made.state_dict())
        assert {tuple(each) for each in shown(other)} == episodes
        rest = [int(other.sample()["number"]) for _ in range(len(episodes))]
        if slots == SLOTS:
            assert drawn | set(rest[: len(episodes) - 2]) == set(other["number"].tolist())
        else:
            assert sorted(rest) == sorted(other["number"].tolist())
