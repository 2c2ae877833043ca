"""Where rows go, and under which index they are found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ShardedReplayBuffer
from replaykit.distributed.shard_config import ByKey, InTurn, stable_hash
from replaykit.errors import SchemaError
from tests.distributed.laws import prioritized
from tests.support.refusals import refuses


def test_the_hash_of_a_key_is_the_same_everywhere() -> None:
    """Published values of SplitMix64 (seed 1234567), whose n-th output mixes seed + n steps."""
    step = 0x9E3779B97F4A7C15
    seeds = [(1234567 + n * step) % 2**64 for n in range(3)]
    keys = np.array(seeds, np.uint64).view(np.int64)
    assert stable_hash(keys).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(1, 6), st.lists(st.integers(0, 40), max_size=8), st.data())
def test_rows_in_turn_are_spread_evenly(shards: int, sizes: list[int], data: Any) -> None:
    router, found = InTurn(shards), []
    for size in sizes:
        found += router.route({}, size, range(shards)).tolist()
    assert found == [number % shards for number in range(len(found))]
    there = sorted(data.draw(st.sets(st.integers(0, shards - 1), min_size=1)))
    assert set(router.route({}, 50, there).tolist()) <= set(there)


@given(
    st.integers(1, 7),
    st.lists(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=9), max_size=6),
)
def test_a_key_always_goes_to_the_same_shard(shards: int, batches: list[list[int]]) -> None:
    home: dict[int, int] = {}
    router = ByKey(shards, ("next", "id"))
    for keys in batches:
        column = {("next", "id"): torch.tensor(keys)[:, None]}
        for key, shard in zip(keys, router.route(column, len(keys), []), strict=True):
            assert home.setdefault(key, int(shard)) == shard


def test_keys_are_spread_evenly() -> None:
    keys = torch.arange(70_000)
    shards = ByKey(7, "k").route({("k",): keys}, len(keys), [])
    assert abs(np.bincount(shards, minlength=7) - 10_000).max() < 400


def test_a_key_that_cannot_be_hashed_is_refused_before_anything_is_written(sharded: Any) -> None:
    rb = sharded(2, shard_key="k")
    refuses(KeyError, "shard_key", rb.extend, TensorDict({"x": torch.arange(3)}, [3]))
    with pytest.raises(TypeError, match="integers under the shard_key 'k'"):
        rb.extend(TensorDict({"k": torch.rand(3)}, [3]))
    assert len(rb) == 0


@settings(max_examples=25, deadline=None)
@given(
    shards=st.integers(1, 4),
    capacity=st.integers(3, 9),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(1, 12)),
            st.tuples(st.just("add"), st.just(1)),
            st.tuples(st.just("update"), st.integers(0, 10**6)),
            st.tuples(st.just("empty"), st.just(0)),
        ),
        max_size=12,
    ),
)
def test_buffer_matches_plain_model(
    shards: int, capacity: int, steps: list[tuple[str, int]]
) -> None:
    """Rows under their indices, sizes, and which updates are refused or come too late."""
    rings: list[dict[int, int]] = [{} for _ in range(shards)]
    written = [0] * shards
    dealt = value = 0
    with ShardedReplayBuffer(
        num_shards=shards,
        storage=lambda: LazyTensorStorage(capacity),
        sampler=prioritized,
        backend="local",
    ) as rb:
        for what, number in steps:
            if what in ("extend", "add"):
                rows = torch.arange(value, value + number)
                found = rb.extend(rows) if what == "extend" else [rb.add(rows[0])]
                expected = []
                for row in range(value, value + number):
                    shard = dealt % shards
                    slot = written[shard] % capacity
                    rings[shard][slot] = row
                    written[shard] += 1
                    dealt += 1
                    expected.append(shard + shards * slot)
                assert [int(index) for index in found] == expected
                value += number
            elif what == "empty":
                rb.empty()
                rings, written, dealt = [{} for _ in range(shards)], [0] * shards, 0
            else:
                index, stored = number % 40, number % 40 // shards in rings[number % 40 % shards]
                if stored:
                    rb.update_priority(torch.tensor([index, -1]), torch.tensor([2.0, 9.0]))
                else:
                    with pytest.raises(IndexError, match="stored rows"):
                        rb.update_priority(torch.tensor([index]), 1.0)
        model = {
            shard + shards * slot: row
            for shard, ring in enumerate(rings)
            for slot, row in ring.items()
        }
        assert len(rb) == len(model)
        if model:
            index = torch.tensor(sorted(model))
            assert rb[index].tolist() == [model[int(one)] for one in index]
            assert rb[:].tolist() == rb[index].tolist()
            assert int(rb[int(index[-1])]) == model[int(index[-1])]
        with pytest.raises(IndexError):
            rb[shards * capacity]


def test_late_update_is_dropped(sharded: Any) -> None:
    rb = sharded(2, 4, sampler=prioritized, batch_size=8)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    batch = rb.sample()
    rb.extend(TensorDict({"x": torch.arange(2)}, [2]))  # over indices 0 and 1
    batch["td_error"] = torch.full((8,), 7.0)
    rb.update_tensordict_priority(batch)
    assert rb.dropped_updates == int((batch["index"] < 2).sum())


def test_bad_updates_change_nothing(sharded: Any) -> None:
    rb = sharded(2, sampler=prioritized)
    index = rb.extend(torch.arange(6))
    for bad in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="priorities"):
            rb.update_priority(index, torch.tensor([5.0] * 5 + [bad]))
    for count in (5, 1):
        with pytest.raises(ValueError, match=f"6 priorities, got {count}"):
            rb.update_priority(index, torch.ones(count))
    with pytest.raises(IndexError, match="got 6 at 1"):
        rb.update_priority(torch.tensor([0, 6]), torch.tensor([100.0, 100.0]))
    assert all(weight == 1 for weight in rb.sample(60, return_info=True)[1]["priority_weight"])


def test_refused_write_keeps_the_order_of_shards(sharded: Any) -> None:
    """Another client agrees on other rows after this one has asked."""
    rb = sharded(3)
    late = rb.client()
    supervisor = late._members.supervisor

    def agree(root: Any) -> Any:
        known = supervisor.agree(root)
        if root is None:
            rb.add(TensorDict({"x": torch.tensor(1)}))
        return known

    late._members.supervisor = SimpleNamespace(agree=agree)
    with pytest.raises(SchemaError):
        late.extend(TensorDict({"x": torch.rand(2)}, [2]))
    assert late.extend(TensorDict({"x": torch.arange(3)}, [3])).tolist() == [3, 1, 2]


def test_rows_keep_priorities_given_with_them(sharded: Any) -> None:
    rb = sharded(2, sampler=prioritized)
    rows = TensorDict({"x": torch.arange(4), "td_error": torch.tensor([0.0, 0, 3, 0])}, [4])
    rb.extend(rows)
    assert set(rb.sample(20)["x"].tolist()) == {2}
    rows["td_error"][0] = -1
    refuses(ValueError, "td_error", rb.extend, rows)
    assert len(rb) == 4


def test_closed_buffer_refuses_calls(sharded: Any) -> None:
    rb = sharded(2, batch_size=1)
    rb.extend(torch.arange(2))
    rb.close()
    rb.shutdown()
    assert not rb.is_alive
    for call in (rb.sample, rb.stats, rb.__len__, lambda: rb.extend(torch.arange(1))):
        refuses(RuntimeError, "shut down", call)
