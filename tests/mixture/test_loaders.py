"""Batches of mixtures for ``torch.utils.data.DataLoader``, with workers and without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from replaykit import (
    BufferDataset,
    ConsumingSampler,
    HindsightGoal,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    Ramp,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    SliceSampler,
)
from tests.buffer.workers import WORKER_MARKS, no_process_is_left
from tests.mixture.members import check_rows, holding, make_ensemble, make_member, rows_of, same
from tests.support.refusals import refuses

__all__ = ["no_process_is_left"]

pytestmark = WORKER_MARKS

SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_worker_makes_the_batches_of_the_main_process(name: str) -> None:
    ensemble = make_ensemble([20, 30], [SAMPLERS[name]] * 2, p=[1, 2], num_buffer_sampled=4)
    here, there, again = (
        list(ensemble.dataloader(8, workers=n, steps=5, seed=3)) for n in (0, 1, 1)
    )
    assert len(here) == 5
    for one, other, third in zip(here, there, again, strict=True):
        assert one.shape == (4, 2)
        check_rows(one)
        assert same(one, other)
        assert same(one, third)
    assert not same(here[0], here[1])
    others = list(ensemble.dataloader(8, steps=5, seed=4))
    assert not any(map(same, here, others))


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_change_no_draws_of_ensemble_and_members(workers: int) -> None:
    samplers: list[Any] = [SamplerWithoutReplacement, SAMPLERS["prioritized"]]
    one, other = (make_ensemble([20, 30], samplers, batch_size=6) for _ in range(2))
    assert same(one.sample(), other.sample())
    state = torch.get_rng_state()
    list(itertools.islice(one.dataloader(workers=workers), 3))
    assert torch.get_rng_state().equal(state)
    for _ in range(6):
        assert same(one.sample(), other.sample())


class _Counting(LazyTensorStorage):
    """A storage that counts the rows that are read."""

    rows_read = 0

    def read(self, index: torch.Tensor, **options: Any) -> Any:
        self.rows_read += len(index)
        return super().read(index, **options)


@pytest.mark.parametrize("relabels", [False, True])
def test_a_resumed_loader_reads_no_rows_of_delivered_batches(relabels: bool) -> None:
    goals = [HindsightGoal(achieved="observation", goal="goal") for _ in range(2 * relabels)]
    members = [
        ReplayBuffer(
            storage=_Counting(50), sampler=SamplerWithoutReplacement(), transform=transform
        )
        for transform in (goals or [None, None])
    ]
    for number, member in enumerate(members):
        rows = rows_of(number, 20)
        rows["goal"] = rows["next", "goal"] = rows["observation"].clone()
        rows["next", "observation"] = rows["observation"] + 1
        member.extend(rows)
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    whole = [*ensemble.dataloader(8, steps=5, seed=3)]
    loader = ensemble.dataloader(8, steps=5, seed=3)
    loader.load_state_dict({**loader.state_dict(), "step": 3})
    before = members[0].storage.rows_read
    assert all(map(same, loader, whole[3:]))
    assert members[0].storage.rows_read - before == 8
    assert loader.epoch == 1
    assert not same(next(iter(loader)), whole[0])


def test_plain_data_loader_reads_an_ensemble() -> None:
    ensemble = make_ensemble([20, 30], batch_size=6)
    dataset = BufferDataset(ensemble, steps=4, seed=2)
    loader = DataLoader(dataset, batch_size=None, collate_fn=BufferDataset.collate, num_workers=1)
    batches = list(loader)
    assert len(batches) == len(dataset) == 4
    assert all(map(same, batches, ensemble.dataloader(steps=4, seed=2)))


def test_writes_to_a_member_while_workers_read_raise_an_error() -> None:
    ensemble = make_ensemble([20, 20], batch_size=6)
    loader = iter(ensemble.dataloader(workers=1))
    next(loader)
    ensemble[1].extend(rows_of(1, 1, start=20))
    refuses(RuntimeError, "no writes while worker processes read the buffer", next, loader)
    persistent = ensemble.dataloader(workers=1, steps=2, persistent_workers=True)
    list(persistent)
    ensemble[1].extend(rows_of(1, 2, start=21))
    refuses(RuntimeError, "got 2 rows written", list, persistent)


def test_workers_follow_writes_to_shared_members() -> None:
    members = [make_member(number, 10, shared=True) for number in range(2)]
    ensemble = ReplayBufferEnsemble(*members, shared=True, batch_size=40)
    loader = iter(ensemble.dataloader(workers=1))
    assert (next(loader)["id"] % 1000 < 10).all()
    for number, member in enumerate(members):
        member.extend(rows_of(number, 40, start=10))
    seen = torch.cat([next(loader)["id"].flatten() for _ in range(6)])
    assert (seen % 1000 >= 10).any()


def test_spawned_workers_open_the_files_of_members(tmp_path: Path) -> None:
    """They have the epoch of the mixture, and know since when members are ready."""

    def member(number: int, rows: int) -> ReplayBuffer:
        storage = LazyMemmapStorage(30, scratch_dir=tmp_path / str(number))
        return holding(rows_of(number, rows), storage, sampler=SamplerWithoutReplacement())

    one, other = member(0, 20), member(1, 1)
    twice = ReplayBufferEnsemble(other, one)
    ensemble = ReplayBufferEnsemble(
        *(one, other, one, twice),
        p=[0.1, 0.5, 0.2, 0.2],
        ramp=Ramp(9),
        ready=[None, (2, "episodes"), None, None],
        num_buffer_sampled=20,
        batch_size=40,
    )
    other.extend(rows_of(1, 20, start=1))
    ensemble.set_epoch(4)
    ensemble.set_epoch(5)
    here, there = (
        list(ensemble.dataloader(workers=n, steps=3, multiprocessing_context=method))
        for n, method in ((0, None), (1, "spawn"))
    )
    assert all(map(same, here, there))
    mixed = ReplayBufferEnsemble(ensemble[0], make_member(1), batch_size=6)
    with pytest.raises(RuntimeError, match="member 1"):
        mixed.dataloader(workers=1, steps=3, multiprocessing_context="spawn")


def test_remote_members_are_loaded_in_this_process() -> None:
    with ShardedReplayBuffer(
        num_shards=2, storage=lambda: LazyTensorStorage(50), backend="local"
    ) as shards:
        shards.extend(rows_of(1, 20))
        ensemble = ReplayBufferEnsemble(make_member(0), shards, batch_size=8)
        first, again = (list(ensemble.dataloader(steps=3, seed=1)) for _ in range(2))
        assert all(map(same, first, again))
        for batch in first:
            check_rows(batch)
        refuses(ValueError, r"member 1: expected shards in actors", ensemble.dataloader, workers=1)


def test_members_that_loaders_cannot_draw_from_are_named() -> None:
    used_up = make_member(1, sampler=ConsumingSampler(1))
    with pytest.raises(ValueError, match="member 1: expected a sampler whose draws leave"):
        ReplayBufferEnsemble(make_member(0), used_up).dataloader(4)
    refuses(RuntimeError, "batch_size not specified", make_ensemble([3, 3]).dataloader)
    with pytest.raises(ValueError, match="drop_last with a sampler that draws"):
        make_ensemble([3, 3]).dataloader(2, drop_last=True)
