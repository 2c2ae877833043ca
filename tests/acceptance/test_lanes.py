"""Lanes: what is stored of each, and how draws share themselves among them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
)
from replaykit.errors import NotEnoughData, StaleAddress


def one_each(ted: Any, lanes: list[int], t: list[int]) -> TensorDict:
    """One row for each of some lanes of a storage with ``lane_key="lane"``."""
    rows = ted([0] * len(lanes), lane=lanes)
    rows["t"] = torch.tensor(t)
    return rows


def lane_sizes(rb: ReplayBuffer, key: str = "lane") -> dict[int, int]:
    return dict(Counter(rb[key].flatten().tolist()))


@pytest.mark.acceptance("S1")
def test_some_lanes_written_and_windows_of_the_asked_shape(ted: Any, buffer: Any) -> None:
    sampler = SliceSampler(num_slices=8, measure="lane", strict_lanes=True)
    rb = buffer(32, sampler, lane_key="lane", writer=LaneWriter(4))
    t = dict.fromkeys(range(8), 0)

    def write(*lanes: int) -> None:
        rb.extend(one_each(ted, list(lanes), [t[lane] for lane in lanes]))
        for lane in lanes:
            t[lane] += 1

    write(0, 4, 7)
    assert lane_sizes(rb) == {0: 1, 4: 1, 7: 1}
    write(1, 2, 3, 5, 6)
    assert lane_sizes(rb) == dict.fromkeys(range(8), 1)
    with pytest.raises(NotEnoughData):
        rb.sample(16)
    # One row each, in the order of lanes.
    rb.set_sampler(SliceSampler(slice_len=1, measure="lane", draw="stratified"))
    assert rb.sample(8)["lane"].tolist() == list(range(8))
    assert rb.sample(13).batch_size == (13,)
    for _ in range(9):
        write(0, 4, 7)
    assert lane_sizes(rb) == {lane: 4 if lane in (0, 4, 7) else 1 for lane in range(8)}
    looks = rb.episodes  # ten steps of those lanes, of which the last four are stored
    counts = dict(zip(looks.lanes.tolist(), looks, strict=True))
    assert [counts[lane].evicted for lane in range(8)] == [6, 0, 0, 0, 6, 0, 0, 6]
    assert counts[4].rows()["t"].tolist() == [6, 7, 8, 9]
    # Five lanes have no window of two: refused by the strict law, passed over by the others.
    rb.set_sampler(SliceSampler(slice_len=2, measure="lane", strict_lanes=True))
    with pytest.raises(NotEnoughData):
        rb.sample(16)
    rb.set_sampler(SliceSampler(slice_len=2, measure="lane", flat=False))
    assert set(rb.sample(400)["lane"].flatten().tolist()) == {0, 4, 7}
    write(1, 2, 3, 5, 6)
    rb.set_sampler(SliceSampler(slice_len=2, measure="lane", strict_lanes=True, flat=False))
    for count in (8, 128, 10, 4):
        batch = rb.sample(2 * count)
        assert batch.batch_size == (count, 2)
        assert torch.equal(batch["t"][:, 1], batch["t"][:, 0] + 1)
        assert torch.equal(batch["lane"][:, 1], batch["lane"][:, 0])
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(RuntimeError):
        rb.sample(16)


@pytest.mark.acceptance("S1")
def test_lanes_that_advance_together(ted: Any, buffer: Any) -> None:
    rb = buffer(4, SliceSampler(num_slices=8, measure="lane", strict_lanes=True), lanes=8)
    rows = ted([[0]] * 8)
    rows["weight"] = torch.ones(8, 1, requires_grad=True)
    rb.extend(rows)
    assert rb[:].batch_size == (8, 1)
    assert not rb["weight"].requires_grad
    with pytest.raises(NotEnoughData):
        rb.sample(16)
    for start in range(1, 4):
        rb.extend(ted([[0]] * 8, start, weight=torch.zeros(8, 1)))
    assert rb[:].batch_size == (8, 4)
    rb.extend(ted([[0]] * 8, 4, weight=torch.zeros(8, 1)))
    assert sorted(rb["t"][3].flatten().tolist()) == [1, 2, 3, 4]
    looks = rb.episodes
    assert looks.position(looks.index).reshape(8, 4).tolist() == [[1, 2, 3, 4]] * 8
    assert (looks.begins.tolist(), looks.lengths.tolist()) == ([0] * 8, [4] * 8)
    rb.empty()
    assert len(rb) == 0


@pytest.mark.acceptance("S6")
def test_recent_rows_come_first_and_lanes_take_turns(ted: Any, buffer: Any) -> None:
    sampler = SliceSampler(slice_len=1, measure="lane", draw="stratified", recent=(0.5, 4))
    rb = buffer(100, sampler, lanes=4)

    def lanes(batch: Any) -> list[int]:
        return batch["index"][:, 1].tolist()

    rb.extend(ted([[0]] * 4))
    assert lanes(rb.sample(4)) == [0, 1, 2, 3]
    rb.extend(ted([[0]] * 4, 1))
    assert lanes(rb.sample(8)) == [0, 1, 2, 3] * 2
    rb.extend(ted([[0] * 30] * 4, 2))
    batch = rb.sample(32)
    recent = list(zip(lanes(batch)[:16], batch["t"][:16].tolist(), strict=True))
    assert sorted(recent) == [(lane, t) for lane in range(4) for t in (28, 29, 30, 31)]
    assert Counter(lanes(batch)[16:]) == dict.fromkeys(range(4), 4)


@pytest.mark.acceptance("F12")
def test_rows_that_are_not_stored_are_refused(ted: Any, buffer: Any) -> None:
    rb = buffer(8)
    rb.extend(ted([0, 0, 1]))
    for wrong in (3, 7, 8):
        with pytest.raises(IndexError):
            rb[wrong]
        with pytest.raises(IndexError):
            rb.episodes.begin(torch.tensor([wrong]))
    episode = rb.episodes[0]
    rb.extend(ted([0] * 8, 3))
    with pytest.raises(StaleAddress):
        episode.rows()
    rb.empty()
    with pytest.raises(IndexError):
        rb[0]


@pytest.mark.acceptance("F14")
def test_lanes_without_windows_neither_block_nor_bias(ted: Any, buffer: Any) -> None:
    """Episodes of 4 rows in lane 0, of 3 in lane 1, one row in lane 2: 3 + 2 windows of two."""
    rb = buffer(100, SliceSampler(slice_len=2, draw="stratified"), lane_key="lane")
    rb.extend(ted([0] * 8, lane=[0, 1, 2, 0, 1, 0, 1, 0]))
    drawn = Counter(map(tuple, rb.sample(2 * 500)["index"].reshape(-1, 2).tolist()))
    assert drawn == dict.fromkeys([(0, 3), (3, 5), (5, 7), (1, 4), (4, 6)], 100)
    rb.set_sampler(SliceSampler(slice_len=2, measure="lane", draw="stratified"))
    lanes = Counter(rb.sample(2 * 600)["lane"].tolist())
    assert lanes == {0: 600, 1: 600}
    rb.set_sampler(SliceSampler(slice_len=2, measure="lane", strict_lanes=True))
    with pytest.raises(NotEnoughData):
        rb.sample(2)


@pytest.mark.acceptance("F57")
def test_the_same_seed_draws_the_same(ted: Any, codes_of: Any) -> None:
    def draws(seed: int) -> list[Any]:
        rb = ReplayBuffer(
            storage=LazyTensorStorage(100),
            sampler=SliceSampler(slice_len=2),
            generator=torch.Generator().manual_seed(seed),
        )
        rb.extend(ted(codes_of([5, 9, 3])))
        torch.rand(3)  # the global generator has no say
        return [rb.sample(8)["index"].tolist() for _ in range(5)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
