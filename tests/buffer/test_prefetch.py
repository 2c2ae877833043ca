"""Batches made ahead: the same ones, in the same order, whatever changes meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from tests.buffer.building import CountingSampler, buffer_of, eventually, rows, same, storage_of

# -- the same batches -----------------------------------------------------------------------------


@pytest.mark.pitfall("RD2")
@given(
    prefetch=st.integers(1, 8),
    count=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    sampler=st.sampled_from(["random", "without", "ordered", "drop_last", "prioritized"]),
    kind=st.sampled_from(["list", "tensor"]),
)
@settings(max_examples=60, deadline=None)
def test_prefetch_does_not_change_the_batches(
    prefetch: int, count: int, batch_size: int, sampler: str, kind: str
):
    """RD2, G5: draws are made in the order in which they are asked for."""
    batch_size = min(batch_size, count)
    ahead, direct = (
        buffer_of(
            kind,
            30,
            filled=count,
            sampler=sampler,
            batch_size=batch_size,
            seed=5,
            prefetch=depth,
        )
        for depth in (prefetch, None)
    )
    for number in range(3 * (count // batch_size + 2)):
        how = ("sample", "next")[number % 7 == 3]
        same(getattr(direct, how)(), getattr(ahead, how)())
        assert ahead.sampler.ran_out is direct.sampler.ran_out
    ahead.shutdown()


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("prefetch", range(9))
@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 11])
def test_a_pass_has_every_row_once(prefetch: int, batch_size: int):
    """RD2: rows were lost or repeated, for depths 0..8 and sizes that do not divide."""
    buffer = buffer_of(filled=10, sampler="without", batch_size=batch_size, prefetch=prefetch)
    for _ in range(4):
        assert sorted(i for batch in buffer for i in batch["id"].tolist()) == list(range(10))


def test_slow_batches_are_delivered_in_order():
    def slow_at_first(data: Any) -> Any:
        time.sleep(0.03 if int(data["id"][0]) % 4 == 0 else 0)
        return data

    buffer = buffer_of(
        max_size=24, filled=24, sampler="ordered", batch_size=2, prefetch=4, transform=slow_at_first
    )
    assert [batch["id"][0].item() for batch in buffer] == list(range(0, 24, 2))


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("prefetch", [1, 4, 8])
def test_draws_never_reach_past_the_end_of_a_pass(prefetch: int):
    """RD2: 10 rows in batches of 4 are three draws, however deep the queue is."""
    for _ in range(10):
        sampler = CountingSampler()
        buffer = buffer_of(filled=10, sampler=sampler, batch_size=4, prefetch=prefetch)
        for delivered in (1, 2):
            buffer.sample()
            assert eventually(lambda s=sampler, d=delivered: s.draws == min(3, d + prefetch))
            time.sleep(0.005)
            assert sampler.draws <= 3
        assert len(buffer.sample()) == 2
        assert eventually(lambda s=sampler: s.draws == 3 + min(3, prefetch))
        buffer.shutdown()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_queue_is_filled_up_and_no_further(prefetch: int):
    sampler = CountingSampler()
    buffer = buffer_of(max_size=90, filled=90, sampler=sampler, batch_size=1, prefetch=prefetch)
    for number in range(1, 10):
        buffer.sample()
        assert eventually(lambda n=number: sampler.draws == n + prefetch)
        time.sleep(0.005)
        assert sampler.draws == number + prefetch
        assert buffer.stats()["prefetch_queue_size"] == prefetch


@pytest.mark.pitfall("RD1")
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_another_batch_size_is_served_directly(sampler: str):
    """RD1, E12: a queued batch of the wrong size was returned."""
    buffer = buffer_of(max_size=100, filled=100, sampler=sampler, batch_size=3, prefetch=3, seed=0)
    seen: list[int] = []
    for size in (3, 5, 3, None, 1, 20, 3, 2):
        batch = buffer.sample(size)
        assert len(batch) == (size or 3)
        seen += batch["id"].tolist()
    if sampler == "without":
        assert len(set(seen)) == len(seen) == 40
        seen += [i for batch in buffer for i in batch["id"].tolist()]
        assert sorted(seen) == list(range(100))


def test_batches_may_predate_writes_by_no_more_than_the_depth():
    depth = 3
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, prefetch=depth)
    oldest = 0
    for step in range(60):
        buffer.extend(torch.full((4,), step))
        values = buffer.sample().unique().tolist()
        assert len(values) == 1, "a batch was read while it was written"
        assert step - depth <= values[0] <= step
        oldest = max(oldest, step - values[0])
    assert oldest >= 1


def test_a_delayed_buffer_prefetches_too():
    buffer = ReplayBuffer(
        storage=lambda: ListStorage(5), batch_size=2, prefetch=2, delayed_init=True
    )
    buffer.extend([1, 2, 3])
    assert set(buffer.sample().tolist()) <= {1, 2, 3}


# -- changes while batches are prepared -----------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_transform_that_is_added_applies_to_the_next_batch(prefetch: int):
    """Batches that were prepared are made anew, from the same draws."""

    def in_place(data: Any) -> Any:
        data["id"] += 1000
        return data

    buffer = buffer_of(filled=10, sampler="ordered", batch_size=2, prefetch=prefetch)
    assert buffer.sample()["id"].tolist() == [0, 1]
    time.sleep(0.02)
    buffer.append_transform(in_place)
    assert buffer.sample()["id"].tolist() == [1002, 1003]
    buffer.insert_transform(0, in_place)
    assert buffer.sample()["id"].tolist() == [2004, 2005]
    assert [batch["id"].tolist() for batch in buffer] == [[2006, 2007], [2008, 2009]]
    assert buffer["id"].tolist() == [i + 2000 for i in range(10)]
    assert buffer.storage[:]["id"].tolist() == list(range(10))


@pytest.mark.parametrize("wait", [0.0, 0.01])
def test_draws_kept_for_later_keep_their_order_through_saves(wait: float):
    """What is left of the kept draws comes after those that the queue has taken from them."""
    seen: list[int] = []
    buffer = buffer_of(max_size=40, filled=40, sampler="ordered", batch_size=2, prefetch=4)
    for depth in (4, 1, 3, 2, 4, 1, 2):
        seen += buffer.sample()["id"].tolist()
        time.sleep(wait)
        state = buffer.state_dict()
        buffer = buffer_of(max_size=40, sampler="ordered", batch_size=2, prefetch=depth)
        buffer.load_state_dict(state)
        seen += buffer.sample()["id"].tolist()
        buffer.append_transform(lambda data: data)
    assert seen == list(range(28))


def test_draw_that_is_made_again_has_the_current_generations():
    buffer = buffer_of(
        "tensor",
        4,
        filled=4,
        sampler="ordered",
        batch_size=2,
        prefetch=1,
        writer=RoundRobinWriter(track_generations=True),
    )
    buffer.sample()
    assert buffer.stats()["prefetch_queue_size"] == 1
    buffer.append_transform(lambda td: td)
    buffer.extend(rows(4, 4))
    batch = buffer.sample()
    assert batch["id"].tolist() == [6, 7]
    assert batch["index_generation"].tolist() == [1, 1]


def test_draws_are_dropped_with_their_rows():
    storage = storage_of("tensor", 8)
    one = ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2
    )
    two = ReplayBuffer(storage=storage)
    two.extend(rows(8))
    one.sample()
    assert one.stats()["prefetch_queue_size"] == 2
    one.append_transform(lambda td: td)
    two.empty()
    two.extend(rows(1, 50))
    for _ in range(3):
        assert one.sample()["id"].tolist() == [50]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_outdated_prefetched_batches_are_dropped(prefetch: int):
    buffer = buffer_of(filled=8, sampler="ordered", batch_size=2, prefetch=prefetch)
    buffer.sample()
    buffer.empty()
    buffer.extend(rows(4, 20))
    assert buffer.sample()["id"].tolist() == [20, 21]
    buffer.set_storage(storage_of("list", 5))
    buffer.extend(rows(3, 30))
    assert buffer.sample()["id"].tolist() == [30, 31]
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert buffer.sample()["id"].tolist() == [30, 31]
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.sample()["id"].tolist() == [32]
