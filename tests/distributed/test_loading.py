"""Loaders over shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from replaykit import (
    BufferDataset,
    LazyTensorStorage,
    PrioritizedSampler,
    RateLimiter,
    ShardedReplayBuffer,
)


def filled(rb: ShardedReplayBuffer, rows: int = 60) -> ShardedReplayBuffer:
    rb.extend(TensorDict({"x": torch.arange(rows)}, [rows]))
    return rb


def drawn(loader: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def test_streams_follow_from_seed_epoch_and_rank(sharded: Any) -> None:
    rb = filled(sharded(3, batch_size=5))
    before = rb._generator.get_state()
    loader = rb.dataloader(steps=4, seed=1)
    assert len(loader) == 4
    first, second = drawn(loader), drawn(loader)
    assert [len(batch) for batch in first] == [5] * 4
    assert drawn(rb.dataloader(steps=4, seed=1)) == first
    others = [
        second,
        drawn(rb.dataloader(steps=4, seed=2)),
        drawn(rb.dataloader(steps=4, seed=1, rank=0, world_size=2)),
        drawn(rb.dataloader(steps=4, seed=1, rank=1, world_size=2)),
    ]
    assert others[1] != first == others[2]  # rank 0 is the one that there is without others
    assert others[0] != first != others[3]
    assert torch.equal(rb._generator.get_state(), before)
    mine = DataLoader(
        BufferDataset(rb.client(), 5, steps=4, seed=1),
        batch_size=None,
        collate_fn=BufferDataset.collate,
    )
    assert drawn(mine) == first


def test_loaded_loader_continues_at_its_position(sharded: Any) -> None:
    rb = filled(sharded(2, batch_size=5))
    loader = rb.dataloader(steps=5, seed=3)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = drawn(batches)
    again = rb.dataloader(steps=5, seed=3)
    again.load_state_dict(state)
    assert drawn(again) == rest
    assert len(rest) == 3
    endless = iter(rb.dataloader(seed=3))
    assert [next(endless)["x"].tolist() for _ in range(5)][2:] == rest


def test_rows_and_priorities_count_from_the_next_batch_on(sharded: Any) -> None:
    rb = filled(
        sharded(
            2,
            sampler=lambda: PrioritizedSampler(alpha=1.0, beta=0.5, eps=0.0),
            batch_size=8,
            max_age=0.0,
        )
    )
    rb.sampler.beta = 1.0
    batches = iter(rb.dataloader(seed=0))
    next(batches)
    p = torch.zeros(60)
    p[7], p[8] = 1.0, 3.0
    rb.update_priority(torch.arange(60), p)
    batch = next(batches)
    assert set(batch["x"].tolist()) <= {7, 8}
    wanted = torch.where(batch["x"] == 7, 1.0, 1 / 3)  # by the exponent that the handle has now
    torch.testing.assert_close(batch["priority_weight"], wanted)


def test_loader_refuses_unsupported_configurations(sharded: Any) -> None:
    rb = sharded(2, batch_size=4)
    with pytest.raises(RuntimeError, match="empty"):
        next(iter(rb.dataloader()))
    filled(rb)
    for wrong, text in (
        ({"workers": 1}, "backend='ray'"),
        ({"workers": -1}, "expected workers as an int"),
        ({"drop_last": True}, "drop_last with a sampler"),
        ({"steps": 0}, "expected steps"),
        ({"batch_size": 0}, "expected batch_size"),
    ):
        with pytest.raises(ValueError, match=text):
            rb.dataloader(**wrong)
    with pytest.raises(TypeError, match="is not known in advance"):
        len(BufferDataset(rb))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        sharded(2).dataloader()
    with pytest.raises(ValueError, match="without rate_limiter"):
        sharded(2, rate_limiter=RateLimiter.min_size(1)).dataloader(4)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.xdist_group("ray")
def test_workers_ask_the_actors(ray_cluster: Any) -> None:
    with ShardedReplayBuffer(
        num_shards=1,
        storage=lambda: LazyTensorStorage(100),
        batch_size=5,
        remote_config={"num_cpus": 0},
    ) as rb:
        filled(rb)
        one = drawn(rb.dataloader(steps=4, seed=1))
        two = drawn(rb.dataloader(workers=1, steps=4, seed=1))
        assert one == two
        with pytest.raises(ValueError, match="spawned"):
            rb.dataloader(workers=1, multiprocessing_context="fork")
        forked = DataLoader(
            BufferDataset(rb, steps=2),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
            collate_fn=BufferDataset.collate,
        )
        with pytest.raises(ValueError, match="no connection to Ray"):
            next(iter(forked))
