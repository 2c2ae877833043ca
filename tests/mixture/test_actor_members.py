"""Buffers in actors as members of an ensemble."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
)
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.published_buffer import MappedStorage
from replaykit.datasets.sources import Sources
from replaykit.errors import ActorLost
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.distributed.stand_in import Actor, client_of, stand_in
from tests.mixture.members import check_rows, make_member, rows_of, same


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``far(number, rows)``: a handle of an actor that answers at once."""
    stand_in(monkeypatch)

    def make(number: int, rows: int = 20, **arguments: Any) -> Any:
        arguments.setdefault("storage", LazyTensorStorage(50))
        handle = client_of(Actor(**arguments))
        if rows:
            handle.extend(rows_of(number, rows))
        return handle

    return make


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def test_a_buffer_in_an_actor_is_a_member(far: Any) -> None:
    handle = far(1)
    ensemble = ReplayBufferEnsemble(
        make_member(0),
        handle,
        p=[1, 3],
        num_buffer_sampled=8,
        counts="exact",
        batch_size=32,
        generator=seeded(),
    )
    batch = ensemble.sample()
    assert batch["index", "buffer_ids"][:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    check_rows(batch)
    # One message for the rows of all parts, and none that waits before it.
    assert handle._actor.called[-1] == "part_and_facts"
    assert handle._actor.called.count("part_and_facts") == 1


@pytest.mark.parametrize(
    "sampler", [prioritized, lambda: SliceSampler(num_slices=2, end_key=("next", "done"))]
)
def test_remote_member_draws_like_a_local_buffer(far: Any, sampler: Any) -> None:
    handle = far(1, sampler=sampler())
    batches = []
    for member in (handle, make_member(1, sampler=sampler())):
        ensemble = ReplayBufferEnsemble(
            make_member(0, sampler=sampler()),
            member,
            sample_from_all=True,
            batch_size=16,
            generator=seeded(),
        )
        batches.append(ensemble.sample())
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    for one in batches:
        check_rows(one)
        assert one.shape == (2, 8)
    here, there = (one["index", "index"][1].reshape(2, 4).diff(dim=1) for one in batches)
    if not isinstance(handle.sampler, PrioritizedSampler):
        assert (here == 1).all()
        assert (there == 1).all()


def test_ensemble_follows_changed_sampler_of_remote_member(far: Any) -> None:
    handle = far(1)
    ensemble = ReplayBufferEnsemble(
        make_member(0), handle, sample_from_all=True, batch_size=8, generator=seeded()
    )
    assert "priority_weight" not in ensemble.sample()
    handle.set_sampler(prioritized())
    batch = ensemble.sample()
    assert (batch["priority_weight"] == 1).all()
    batch["td_error"] = torch.zeros(2, 4)
    handle.mark_update(torch.arange(20))
    ensemble.update_tensordict_priority(batch)
    drawn = ensemble.sample(80)["index", "index"][1]
    assert not set(drawn.tolist()) & set(batch["index", "index"][1].tolist())


def test_priorities_go_to_rows_that_are_still_there(far: Any) -> None:
    handle = far(1, 10, sampler=prioritized(), storage=LazyTensorStorage(10))
    ensemble = ReplayBufferEnsemble(make_member(0), handle, batch_size=20, sample_from_all=True)
    batch = ensemble.sample()
    batch["td_error"] = torch.zeros(2, 10)
    handle.extend(rows_of(1, 10))
    ensemble.update_tensordict_priority(batch)
    assert len(handle.sample(100)["id"].unique()) > 5
    with pytest.raises(IndexError, match="member 1"):
        ensemble.update_priority(
            {"index": torch.tensor([10]), "buffer_ids": torch.tensor([1])}, 1.0
        )


def test_unsupported_samplers_are_refused_as_members(far: Any) -> None:
    with pytest.raises(ValueError, match=r"member 1: .*SamplerWithoutReplacement"):
        ReplayBufferEnsemble(make_member(0), far(1, sampler=SamplerWithoutReplacement()))
    handle = far(1)
    ensemble = ReplayBufferEnsemble(make_member(0), handle, sample_from_all=True, batch_size=4)
    handle.set_sampler(SamplerWithoutReplacement())
    with pytest.raises(ValueError, match=r"member 1: .*SamplerWithoutReplacement"):
        ensemble.sample()
    handle.set_sampler(RandomSampler())
    check_rows(ensemble.sample())


def test_its_files_lie_in_the_checkpoint(far: Any, tmp_path: Path) -> None:
    def make(rows: int) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            make_member(0, rows),
            far(1, rows, sampler=prioritized()),
            batch_size=8,
            generator=seeded(),
        )

    ensemble, other = make(20), make(3)
    ensemble[1].update_priority(torch.arange(10), torch.zeros(10))
    ensemble.dumps(tmp_path)
    state = ensemble.state_dict()
    batches = [ensemble.sample() for _ in range(3)]
    other.loads(tmp_path)
    assert all(same(batch, other.sample(), generations=False) for batch in batches)
    again = make(5)
    again.load_state_dict(state)
    assert all(same(batch, again.sample(), generations=False) for batch in batches)


def test_a_late_answer_is_a_timeout(far: Any) -> None:
    handle = far(1)
    ensemble = ReplayBufferEnsemble(
        make_member(0), handle, sample_from_all=True, batch_size=8, generator=seeded()
    )
    handle._actor.busy = True
    with pytest.raises(TimeoutError, match="member 1: no answer within"):
        ensemble.sample(timeout=0.01)
    handle._actor.busy = False
    check_rows(ensemble.sample())


@pytest.mark.timeout(180)
@pytest.mark.xdist_group("ray")
def test_a_member_that_dies_is_named(make: Any) -> None:
    remote, here = make(storage=lambda: LazyTensorStorage(50)), make_member(0)
    remote.extend(rows_of(1, 20))
    ensemble = ReplayBufferEnsemble(
        here, remote, num_buffer_sampled=4, counts="exact", batch_size=8, generator=seeded()
    )
    check_rows(ensemble.sample())
    assert ensemble.stats()["size"] == 40
    # A copy has a handle of the same actor.
    copy = pickle.loads(pickle.dumps(ensemble))
    assert same(copy.sample(), ensemble.sample())
    remote.close()
    copied = copy.sampler
    with pytest.raises(ActorLost, match="member 1"):
        copy.sample()
    copied.p = [1.0, 0.0]
    check_rows(copy.sample())


def test_a_data_set_in_an_actor_is_a_member(far: Any, tmp_path: Path) -> None:
    source = tmp_path / "set.h5"
    with RoboHiveWriter(source) as writer:
        writer.add_trial(**make_trial(30, seed=0))
    path = ensure_dataset(
        tmp_path / "set", get_sources=lambda: Sources.local([source]), layout=ROBOHIVE
    )
    handle = far(1, 0, storage=MappedStorage(path), writer=ImmutableDatasetWriter())
    here = make_member(0, 0)
    here.extend(handle[:10].select("action"))
    ensemble = ReplayBufferEnsemble(
        here, handle, keys=["action"], p="size", num_buffer_sampled=40, generator=seeded()
    )
    batch = ensemble.sample(40)
    where = batch["index", "index"].reshape(-1)
    assert torch.equal(
        batch["action"].reshape(-1, batch["action"].shape[-1]), handle[where]["action"]
    )
    assert 0.5 < batch["index", "buffer_ids"].double().mean() < 1
