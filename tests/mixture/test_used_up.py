"""Ensembles of buffers whose records are used up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    StorageEnsemble,
    WriterEnsemble,
)
from tests.mixture.members import holding
from tests.support.refusals import refuses


def member(first: int, count: int) -> ReplayBuffer:
    rows = TensorDict({"id": torch.arange(first, first + count)}, [count])
    return holding(rows, consume_after_n_samples=1)


def test_each_record_comes_once() -> None:
    members = [member(0, 8), member(100, 8)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4)
    assert ensemble.can_sample(16)
    assert not ensemble.can_sample(18)
    found = torch.cat([batch["id"].flatten() for batch in ensemble])
    assert sorted(found.tolist()) == [*range(8), *range(100, 108)]
    assert not ensemble.can_sample()


def test_a_member_with_too_few_left_is_not_ready() -> None:
    """Left out, or the error of the whole batch; then nothing is used up."""
    members = [member(0, 8), member(100, 1)]
    options: dict[str, Any] = {"batch_size": 4, "generator": torch.Generator().manual_seed(0)}
    refusing = ReplayBufferEnsemble(*members, **options)
    assert not refusing.can_sample()
    refuses(RuntimeError, "member 1: expected 2 rows", refusing.sample)
    assert [len(one) for one in members] == [8, 1]
    skipping = ReplayBufferEnsemble(*members, unready="skip", **options)
    for _ in range(2):
        assert (skipping.sample()["id"] < 100).all()
    assert not skipping.can_sample()
    assert [len(one) for one in members] == [0, 1]


@pytest.mark.parametrize("unready", ["raise", "skip"])
def test_a_member_is_ready_with_rows_for_every_part_that_it_may_get(unready: str) -> None:
    for seed in range(20):
        members = [member(0, 3), member(100, 8)]
        generator = torch.Generator().manual_seed(seed)
        ensemble = ReplayBufferEnsemble(
            *members, batch_size=4, unready=unready, generator=generator
        )
        while ensemble.can_sample():
            ensemble.sample()


def test_sampler_ensemble_works_without_buffers() -> None:
    rows = member(0, 3)
    storages = StorageEnsemble(rows.storage)
    sampler = SamplerEnsemble(rows.sampler)
    assert sampler.can_sample(storages, 3)
    assert not sampler.can_sample(storages, 4)


def test_prefetch_of_consuming_members_is_refused() -> None:
    """A batch that nobody takes would use records up."""
    options: dict[str, Any] = {"batch_size": 2, "prefetch": 2}
    with pytest.raises(ValueError, match=r"member 1 without a ConsumingSampler if prefetch=2"):
        ReplayBufferEnsemble(ReplayBuffer(), member(0, 4), **options)
    nested = ReplayBufferEnsemble(member(0, 4))
    refuses(ValueError, "member 0 without", ReplayBufferEnsemble, nested, **options)
    with pytest.raises(ValueError, match="member 0 without"):
        ReplayBufferEnsemble(
            storages=StorageEnsemble(LazyTensorStorage(4)),
            samplers=SamplerEnsemble(ConsumingSampler()),
            writers=WriterEnsemble(RoundRobinWriter()),
            **options,
        )
