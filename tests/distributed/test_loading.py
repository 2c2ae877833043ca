"""Loaders over a buffer in an actor, and over shards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from replaykit import (
    BufferDataset,
    LazyTensorStorage,
    RateLimiter,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
)
from replaykit.distributed.host import check_loader
from tests.conftest import make_rows
from tests.distributed.laws import prioritized
from tests.distributed.stand_in import Actor, client_of, stand_in
from tests.support.refusals import refuses


@pytest.fixture(params=["actor", "shards"])
def loaded(request: Any, sharded: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``loaded(rows, **arguments)``: a handle of an actor that answers at once, or of shards."""
    if request.param == "actor":
        stand_in(monkeypatch)

    def make(rows: int = 40, **arguments: Any) -> Any:
        arguments.setdefault("generator", torch.Generator().manual_seed(0))
        if request.param == "shards":
            handle = sharded(3, max_age=0.0, **arguments)
        else:
            handle = client_of(Actor(storage=lambda: LazyTensorStorage(60), **arguments))
        if rows:
            handle.extend(make_rows(0, rows))
        return handle

    return make


def drawn(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def plain_loader(handle: Any, **options: Any) -> Any:
    return DataLoader(handle, batch_size=None, collate_fn=BufferDataset.collate, **options)


def test_streams_follow_from_a_seed_and_leave_the_buffer_alone(loaded: Any) -> None:
    handle, other = loaded(batch_size=5), loaded(batch_size=5)
    loader = handle.dataloader(steps=4, seed=1)
    assert len(loader) == 4
    first = drawn(loader)
    assert [len(batch) for batch in first] == [5] * 4
    assert drawn(other.dataloader(steps=4, seed=1)) == first
    assert drawn(plain_loader(BufferDataset(handle, 5, steps=4, seed=1))) == first
    assert drawn(handle.dataloader(steps=4, seed=1, rank=0, world_size=2)) == first
    for others in (
        loader,  # of the next epoch
        handle.dataloader(steps=4, seed=2),
        handle.dataloader(steps=4, seed=1, rank=1, world_size=2),
    ):
        assert drawn(others) != first
    for _ in range(3):
        assert torch.equal(handle.sample()["id"], other.sample()["id"])


def test_loaded_loader_continues_at_its_position(loaded: Any) -> None:
    handle = loaded(batch_size=5)
    loader = handle.dataloader(steps=5, seed=3)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = drawn(batches)
    again = handle.dataloader(steps=5, seed=3)
    again.load_state_dict(state)
    assert drawn(again) == rest
    assert len(rest) == 3
    endless = iter(handle.dataloader(seed=3))
    assert [next(endless)["id"].tolist() for _ in range(5)][2:] == rest


def test_a_delivered_batch_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    actor = Actor(storage=LazyTensorStorage(40), batch_size=5)
    actor.buffer.extend(make_rows(0, 40))
    loader = client_of(actor).dataloader(steps=3, seed=1)
    loader.load_state_dict({**loader.state_dict(), "step": 2})
    assert len(drawn(loader)) == actor.called.count("draw_seeded") == 1


def test_rows_and_priorities_count_from_the_next_batch_on(loaded: Any) -> None:
    handle = loaded(batch_size=8, sampler=prioritized)
    batches = iter(handle.dataloader(seed=0))
    next(batches)
    handle.update_priority(torch.arange(40), torch.zeros(40))
    handle.update_priority(torch.tensor([7, 8]), torch.tensor([1.0, 3.0]))
    batch = next(batches)
    assert set(batch["id"].tolist()) <= {7, 8}
    wanted = torch.where(batch["id"] == 7, 1.0, 1 / 3)
    torch.testing.assert_close(batch["priority_weight"], wanted)


def test_loader_refuses_unsupported_configurations(loaded: Any) -> None:
    refuses(RuntimeError, "empty", next, iter(loaded(0, batch_size=4).dataloader()))
    handle = loaded(batch_size=4)
    for wrong, text in (
        ({"workers": 1, "multiprocessing_context": "fork"}, r"spawned|backend='ray'"),
        ({"workers": -1}, "expected workers as an int"),
        ({"drop_last": True}, "drop_last with a sampler"),
        ({"steps": 0}, "expected steps"),
        ({"batch_size": 0}, "expected batch_size"),
    ):
        refuses(ValueError, text, handle.dataloader, **wrong)
    refuses(TypeError, "is not known in advance", len, BufferDataset(handle))
    refuses(RuntimeError, "batch_size not specified", loaded().dataloader)
    with pytest.raises(ValueError, match="without rate_limiter"):
        loaded(0, rate_limiter=RateLimiter.min_size(1)).dataloader(4)


def test_loader_of_an_actor_refuses_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for arguments, text in (
        ({"sampler": SamplerWithoutReplacement()}, r"SamplerWithoutReplacement.*client\(prefetch"),
        ({"consume_after_n_samples": 1}, "ConsumingSampler"),
    ):
        handle: Any = client_of(Actor(storage=LazyTensorStorage(40), **arguments))
        refuses(ValueError, text, handle.dataloader, 4)
    member = Actor(storage=LazyTensorStorage(40)).buffer
    refuses(TypeError, "stores rows itself", check_loader, ReplayBufferEnsemble(member, member))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here"
)
def test_forked_worker_raises_error_on_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    actor = Actor(storage=LazyTensorStorage(40), batch_size=4)
    dataset = BufferDataset(client_of(actor), steps=2)
    with pytest.raises(ValueError, match="no connection to Ray"):
        next(iter(plain_loader(dataset, num_workers=1, multiprocessing_context="fork")))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("shards", [False, True])
def test_workers_ask_the_actors(make: Any, shards: bool) -> None:
    arguments = {
        "storage": lambda: LazyTensorStorage(40),
        "sampler": prioritized,
        "batch_size": 4,
    }
    if shards:
        rb: Any = ShardedReplayBuffer(num_shards=1, remote_config={"num_cpus": 0}, **arguments)
    else:
        rb = make(**arguments)
    with rb:
        rb.extend(make_rows(0, 40))
        one = drawn(rb.dataloader(steps=5, seed=1))
        assert drawn(rb.dataloader(workers=1, steps=5, seed=1)) == one
        assert len(drawn(rb.dataloader(workers=2, steps=5, seed=1))) == 5
