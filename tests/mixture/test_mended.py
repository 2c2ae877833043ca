"""Faults of mixtures that random programs have found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
)
from tests.mixture.members import by_priority, holding
from tests.support.refusals import refuses


def _buffer(rows: int, first: int = 0, **how: Any) -> ReplayBuffer:
    return holding(TensorDict({"x": torch.arange(first, first + rows)}, [rows]), **how)


@pytest.mark.parametrize("plain", [True, False])
def test_two_owners_that_undo_draws_keep_all_rows_of_a_pass(plain: bool) -> None:
    member = _buffer(
        16, sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=1 if plain else None
    )
    first = ReplayBufferEnsemble(member, batch_size=4, prefetch=1)
    second: Any = member if plain else ReplayBufferEnsemble(member, batch_size=4, prefetch=1)
    rows = [*first.sample()["x"].flatten().tolist(), *second.sample()["x"].flatten().tolist()]
    first.shutdown()
    if plain:
        member.state_dict()
    else:
        second.shutdown()
    while len(rows) < 16:
        rows += member.sample(4)["x"].tolist()
    assert sorted(rows) == list(range(16))


@pytest.mark.parametrize("size", [16, 8, 4])
def test_parts_of_nested_mixtures_may_be_single_rows(size: int) -> None:
    inner = ReplayBufferEnsemble(_buffer(40), _buffer(40, 100))
    twice = ReplayBufferEnsemble(inner, inner, sample_from_all=True)
    assert twice.sample(size)["x"].shape == (2, size // 2)
    mixed = ReplayBufferEnsemble(_buffer(40, 200), inner, sample_from_all=True)
    batch = mixed.sample(size)["x"]
    assert batch.shape == (2, size // 2)
    assert (batch[0] >= 200).all()
    assert (batch[1] < 200).all()


def test_priorities_of_a_batch_in_another_shape_all_arrive() -> None:
    members = [_buffer(20, sampler=by_priority()) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, generator=generator)
    batch = ensemble.sample(8)
    for member in members:
        member.update_priority(torch.arange(20), 0.0)
    batch["td_error"] = torch.ones(2, 4)
    ensemble.update_tensordict_priority(batch.reshape(2, 2, 2))
    for part, member in enumerate(members):
        drawn = set(member.sample(400)["x"].tolist())
        assert drawn == set(batch["index", "index"][part].tolist())


def test_a_copy_knows_that_its_pass_has_ended() -> None:
    member = _buffer(4, sampler=SamplerWithoutReplacement(), batch_size=4)
    ensemble = ReplayBufferEnsemble(member, batch_size=4)
    assert ensemble.next() is not None
    again = copy.deepcopy(ensemble)
    assert ensemble.next() is None
    assert again.next() is None
    assert again.next() is not None


def test_an_inner_mixture_raises_the_error_of_its_remote_member() -> None:
    def slots() -> LazyTensorStorage:
        return LazyTensorStorage(9)

    with ShardedReplayBuffer(num_shards=2, storage=slots, backend="local") as far:
        inner = ReplayBufferEnsemble(far, _buffer(9))
        outer = ReplayBufferEnsemble(_buffer(9, 100), inner, batch_size=8)
        for seed in range(8):
            outer.set_rng(torch.Generator().manual_seed(seed))
            refuses(Exception, r"^member 1: member 0: .*(empty|no rows)", outer.sample)
