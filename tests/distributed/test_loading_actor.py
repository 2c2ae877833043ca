"""Loaders over a buffer in an actor."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from replaykit import (
    BufferDataset,
    LazyTensorStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from replaykit.distributed.host import check_loader
from tests.conftest import make_rows
from tests.distributed.stand_in import Actor, client_of, stand_in


def drawn(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_streams_follow_from_a_seed_and_leave_the_buffer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch)

    def filled(prefetch: int | None) -> tuple[Any, Any]:
        actor = Actor(
            storage=LazyTensorStorage(40),
            batch_size=5,
            generator=torch.Generator().manual_seed(0),
            prefetch=prefetch,
        )
        actor.buffer.extend(make_rows(0, 40))
        return actor, client_of(actor)

    (actor, handle), (_, other) = filled(2), filled(None)
    loader = handle.dataloader(steps=3, seed=1)
    assert len(loader) == 3
    first = drawn(loader)
    assert [len(batch) for batch in first] == [5] * 3
    assert first != drawn(loader)  # of the next epoch
    assert drawn(other.dataloader(steps=3, seed=1)) == first
    assert drawn(handle.dataloader(steps=3, seed=2)) != first
    assert drawn(handle.dataloader(steps=3, seed=1, rank=1, world_size=2)) != first
    own = [handle.sample()["id"].tolist() for _ in range(4)]
    assert own == [other.sample()["id"].tolist() for _ in range(4)]
    actor.called.clear()
    again = handle.dataloader(steps=3, seed=1)
    again.load_state_dict({**again.state_dict(), "step": 2})
    assert drawn(again) == first[2:]
    assert actor.called.count("draw_seeded") == 1  # what was delivered before is not drawn again
    actor.buffer.shutdown()


def test_rows_and_priorities_count_from_the_next_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    actor = Actor(storage=LazyTensorStorage(40), sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    handle = client_of(actor)
    handle.extend(make_rows(0, 20))
    batches = iter(handle.dataloader(8))
    next(batches)
    handle.update_priority(torch.arange(20), torch.zeros(20))
    handle.extend(make_rows(20, 1))
    batch = next(batches)
    assert batch["id"].tolist() == [20] * 8
    assert batch["priority_weight"].shape == batch["index_generation"].shape == (8,)


def test_loader_refuses_unsupported_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)

    def handle(**arguments: Any) -> Any:
        return client_of(Actor(storage=LazyTensorStorage(40), **arguments))

    for arguments, text in (
        ({"sampler": SamplerWithoutReplacement()}, r"SamplerWithoutReplacement.*client\(prefetch"),
        ({"consume_after_n_samples": 1}, "ConsumingSampler"),
        ({"rate_limiter": RateLimiter.min_size(1)}, "without rate_limiter"),
    ):
        with pytest.raises(ValueError, match=text):
            handle(**arguments).dataloader(4)
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        handle().dataloader()
    with pytest.raises(ValueError, match="expected batch_size"):
        handle().dataloader(0)
    with pytest.raises(ValueError, match="spawned"):
        handle(batch_size=4).dataloader(workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="empty"):
        next(iter(handle().dataloader(4)))
    member = Actor(storage=LazyTensorStorage(40)).buffer
    with pytest.raises(TypeError, match="stores rows itself"):
        check_loader(ReplayBufferEnsemble(member, member))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="nothing is forked here"
)
def test_forked_worker_raises_error_on_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    actor = Actor(storage=LazyTensorStorage(40), batch_size=4)
    actor.buffer.extend(make_rows(0, 40))
    loader: Any = DataLoader(
        BufferDataset(client_of(actor), steps=2),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=BufferDataset.collate,
    )
    with pytest.raises(ValueError, match="no connection to Ray"):
        next(iter(loader))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.xdist_group("ray")
def test_workers_ask_the_actor(make: Any) -> None:
    rb = make(storage=lambda: LazyTensorStorage(40), batch_size=4)
    rb.extend(make_rows(0, 40))
    one = drawn(rb.dataloader(steps=5, seed=1))
    assert drawn(rb.dataloader(workers=1, steps=5, seed=1)) == one
    assert len(drawn(rb.dataloader(workers=2, steps=5, seed=1))) == 5
