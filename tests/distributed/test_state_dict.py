"""All shards as one dictionary, and back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, RandomSampler
from replaykit.distributed.wire_format import pack, unpack


def numbered(first: int, count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + count)}, [count])


def make(sharded: Any, count: int = 3, capacity: int = 20, **arguments: Any) -> Any:
    arguments.setdefault("sampler", lambda: PrioritizedSampler(alpha=0.8, beta=0.5))
    return sharded(count, capacity, batch_size=16, **arguments)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_buffers_loaded_from_state_draw_equal_batches(sharded: Any, prefetch: int) -> None:
    """C10: rows, indices, priorities, the deal, the generator; what is written later is not in it,
    nor do two that take it over share anything."""
    rb = make(sharded, prefetch=prefetch)
    others = [make(sharded), make(sharded, prefetch=prefetch)]
    index = rb.extend(numbered(0, 75))[-50:]
    rb.update_priority(index, torch.rand(50, generator=torch.Generator().manual_seed(2)))
    rb.sample()
    state = unpack(pack(rb.state_dict()), own=True)  # as it travels
    expected = [rb.sample() for _ in range(3)]
    written = rb.extend(numbered(75, 4)).tolist()
    for other in others:
        other.load_state_dict(state)
        for one in expected:
            two = other.sample()
            for key in ("x", "index", "priority_weight", "index_generation"):
                assert torch.equal(one[key], two[key])
        assert other.extend(numbered(75, 4)).tolist() == written
        assert torch.equal(rb[:]["x"], other[:]["x"])


def test_unfitting_state_changes_nothing(sharded: Any) -> None:
    rb = make(sharded)
    rb.extend(numbered(0, 9))
    state = rb.state_dict()

    half = {**state, "shards": [*state["shards"][:2], {}]}
    for target, given, match in [
        (make(sharded, 2), state, r"num_shards=2, got 3"),
        (make(sharded, shard_key="x"), state, "shard_key='x', got None"),
        (make(sharded), half, "missing"),
        (make(sharded), {**state, "shards": state["shards"][:2]}, "states of 3 shards, got 2"),
        (make(sharded), {"shards": []}, "got nothing"),
        (make(sharded), 5, "a mapping, got 5"),
        (make(sharded, sampler=RandomSampler), state, "ampler"),
    ]:
        target.extend(numbered(100, 4))
        with pytest.raises(ValueError, match=match):
            target.load_state_dict(given)
        assert sorted(target[:]["x"].tolist()) == [100, 101, 102, 103]
        target.extend(numbered(104, 1))
        assert all(shard.holder._loaded is None for shard in target._members.shards)


def test_state_holds_whole_batches_only(sharded: Any) -> None:
    rb = make(sharded, 4, 10_000)
    stop, failed = threading.Event(), []

    def write() -> None:
        client, number = rb.client(), 0
        try:
            while not stop.is_set():
                client.extend(TensorDict({"x": torch.full((8,), number)}, [8]))
                number += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        states = [rb.state_dict() for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    assert failed == []
    other = make(sharded, 4, 10_000, storage=lambda: LazyTensorStorage(10_000))
    for state in states:
        other.load_state_dict(state)
        if len(other):
            assert (other[:]["x"].bincount() == 8).all()
