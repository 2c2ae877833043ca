"""Members of an ensemble that draw elsewhere: in shards, in actors; some of them misbehave."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    RayReplayBuffer,
    RayReplayBufferClient,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    SliceSampler,
)
from replaykit.checkpoint import checkpoint_versions
from replaykit.errors import ActorLost, CheckpointError, NotEnoughData, SchemaError
from tests.distributed.stand_in import Actor, client_of, stand_in
from tests.mixture.members import by_priority, check_rows, holding, make_member, rows_of, same
from tests.mixture.test_data_sets import publish
from tests.mixture.test_weights import CRITICAL
from tests.support.refusals import refuses


@pytest.fixture(params=["shards", "actor"])
def far(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``far(number, rows)``: shards, or a handle of an actor that answers at once."""
    made: list[ShardedReplayBuffer] = []
    if request.param == "actor":
        stand_in(monkeypatch)

    def make(number: int, rows: int = 20, **arguments: Any) -> Any:
        arguments.setdefault("storage", lambda: LazyTensorStorage(50))
        if request.param == "actor":
            handle: Any = client_of(Actor(**arguments))
        else:
            handle = ShardedReplayBuffer(num_shards=2, backend="local", **arguments)
            made.append(handle)
        if rows:
            handle.extend(rows_of(number, rows))
        return handle

    yield make
    for one in made:
        one.close()


only_shards = pytest.mark.parametrize("far", ["shards"], indirect=True)
only_actors = pytest.mark.parametrize("far", ["actor"], indirect=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def together(*members: Any, **arguments: Any) -> ReplayBufferEnsemble:
    """An ensemble of which each batch has rows of all members; draws follow from a seed."""
    arguments = {"batch_size": 8, "generator": seeded(), **arguments}
    return ReplayBufferEnsemble(*members, sample_from_all=True, **arguments)


def test_counts_are_exact_and_every_row_matches_its_index(far: Any) -> None:
    shards = far(1)
    ensemble = ReplayBufferEnsemble(
        make_member(0),
        shards,
        p=[1, 3],
        num_buffer_sampled=8,
        counts="exact",
        batch_size=32,
        generator=seeded(),
    )
    for _ in range(5):
        batch = ensemble.sample()
        assert batch["index", "buffer_ids"][:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
        check_rows(batch)
        assert batch.shape == (8, 4)
        assert "index_generation" in batch
    if isinstance(shards, RayReplayBufferClient):  # one message for the rows of all parts
        assert shards._actor.called[-5:] == ["part_and_facts"] * 5
    assert ensemble[1] is shards
    assert ensemble.members[1] is shards
    assert (ensemble.num_members, len(ensemble)) == (2, 40)


def test_weights_by_size_follow_the_size_at_the_draw(far: Any) -> None:
    shards = far(1, 0)
    ensemble = ReplayBufferEnsemble(
        make_member(0), shards, p="size", num_buffer_sampled=64, generator=seeded()
    )
    assert not ensemble.sample(64)["index", "buffer_ids"].any()
    shards.extend(rows_of(1, 80))
    assert ensemble.sample(64)["index", "buffer_ids"].double().mean() > 0.6


def test_rows_of_a_member_have_its_law(far: Any) -> None:
    shards = far(1, 4, sampler=by_priority)
    ensemble = ReplayBufferEnsemble(
        make_member(0), shards, p=[0, 1], num_buffer_sampled=1, generator=seeded(2)
    )
    shards.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batch = ensemble.sample(4000)
    found = np.bincount(batch["index", "index"].reshape(-1).numpy(), minlength=4)
    expected = np.array([400, 800, 1200, 1600])
    assert ((found - expected) ** 2 / expected).sum() < CRITICAL[3]
    weights = 1 / (1.0 + batch["index", "index"])
    assert torch.allclose(batch["priority_weight"], weights.float())


def test_batches_follow_from_the_generator(far: Any) -> None:
    members = make_member(0, sampler=SamplerWithoutReplacement()), far(1, sampler=by_priority)
    one = ReplayBufferEnsemble(*members, batch_size=8, generator=seeded())
    batches = [one.sample() for _ in range(3)]
    members[0].sampler.empty()
    # The member's own draws are its own: nothing that it draws for others changes these.
    members[1].sample(3)
    ahead = ReplayBufferEnsemble(*members, batch_size=8, generator=seeded(), prefetch=2)
    assert all(same(batch, ahead.sample()) for batch in batches)
    ahead.shutdown()


@only_shards
def test_windows_of_shards_stay_in_one_part(far: Any) -> None:
    shards = far(
        1,
        0,
        sampler=lambda: SliceSampler(num_slices=2, end_key=("next", "done")),
        shard_key="env",
    )
    shards.extend(rows_of(1, 20).set("env", torch.zeros(20).long()))
    here = make_member(0, 20, sampler=RandomSampler())
    ensemble = ReplayBufferEnsemble(
        here,
        shards,
        keys=["id", ("next", "reward")],
        num_buffer_sampled=4,
        counts="exact",
        generator=seeded(),
    )
    batch = ensemble.sample(32)
    check_windows = batch["id"][2:].reshape(2, 2, 4)
    assert (check_windows.diff(dim=-1) == 1).all()
    assert batch["sequence_id"][0].tolist() == list(range(8))
    assert batch["sequence_id"][2:].max() == 1


def test_nested_ensemble_may_contain_remote_members(far: Any) -> None:
    inner = ReplayBufferEnsemble(make_member(1), far(2), sample_from_all=True)
    outer = together(make_member(0), inner, batch_size=16)
    batch = outer.sample()
    index = batch["index", "index"]
    assert (batch["id"][0] == index[0]).all()
    assert (batch["id"][1] == index[1] + torch.tensor([1000] * 4 + [2000] * 4)).all()


def test_remote_members_support_transforms_collate_and_indexing(far: Any) -> None:
    ensemble = together(
        make_member(0), far(1), transform=lambda batch: batch.set("twice", 2 * batch["id"])
    )
    batch = ensemble.sample()
    assert (batch["twice"] == 2 * batch["id"]).all()
    assert ensemble[:, 3]["id"].tolist() == [3, 1003]
    assert ensemble[:, 1:3]["id"].tolist() == [[1, 2], [1001, 1002]]
    assert ensemble[[1]].sample(2)["id"].shape == (1, 2)
    stats = ensemble.stats()
    capacity = 50 + ensemble[1].stats()["capacity"]
    assert (stats["size"], stats["write_count"], stats["capacity"]) == (40, 40, capacity)
    assert ensemble.write_count == 40
    assert ensemble.storage.max_size == capacity
    listed = together(make_member(0), far(1), collate_fn=lambda parts: parts)
    assert [part["id"].shape for part in listed.sample(6)] == [(3,), (3,)]


@only_actors
@pytest.mark.parametrize(
    "sampler", [by_priority, lambda: SliceSampler(num_slices=2, end_key=("next", "done"))]
)
def test_remote_member_draws_like_a_local_buffer(far: Any, sampler: Any) -> None:
    handle = far(1, sampler=sampler())
    batches = []
    for member in (handle, make_member(1, sampler=sampler())):
        here = make_member(0, sampler=sampler())
        batches.append(together(here, member, batch_size=16).sample())
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    for one in batches:
        check_rows(one)
        assert one.shape == (2, 8)
    here, there = (one["index", "index"][1].reshape(2, 4).diff(dim=1) for one in batches)
    if not isinstance(handle.sampler, PrioritizedSampler):
        assert (here == 1).all()
        assert (there == 1).all()


@only_actors
def test_ensemble_follows_changed_sampler_of_remote_member(far: Any) -> None:
    handle = far(1)
    ensemble = together(make_member(0), handle)
    assert "priority_weight" not in ensemble.sample()
    handle.set_sampler(by_priority())
    batch = ensemble.sample()
    assert (batch["priority_weight"] == 1).all()
    batch["td_error"] = torch.zeros(2, 4)
    handle.mark_update(torch.arange(20))
    ensemble.update_tensordict_priority(batch)
    drawn = ensemble.sample(80)["index", "index"][1]
    assert not set(drawn.tolist()) & set(batch["index", "index"][1].tolist())


@only_actors
def test_a_data_set_in_an_actor_is_a_member(far: Any, tmp_path: Path) -> None:
    handle = far(1, 0, storage=publish(tmp_path / "set"), writer=ImmutableDatasetWriter())
    here = holding(handle[:40].select("action"))
    ensemble = ReplayBufferEnsemble(
        here, handle, keys=["action"], p="size", num_buffer_sampled=40, generator=seeded()
    )
    batch = ensemble.sample(40)
    where = batch["index", "index"].reshape(-1)
    assert torch.equal(
        batch["action"].reshape(-1, batch["action"].shape[-1]), handle[where]["action"]
    )
    assert 0.5 < batch["index", "buffer_ids"].double().mean() < 1


def test_priorities_reach_the_member(far: Any) -> None:
    shards = far(1, 10, sampler=by_priority)
    here = make_member(0, 10, sampler=by_priority())
    ensemble = together(here, shards, batch_size=200)
    batch = ensemble.sample()
    batch["td_error"] = (batch["index", "index"] == 7).float()
    ensemble.update_tensordict_priority(batch)
    assert (ensemble.sample()["index", "index"] == 7).all()
    ensemble.update_priority(
        {"index": torch.tensor([7, 3]), "buffer_ids": torch.tensor([1, 1])},
        torch.tensor([0.0, 1.0]),
    )
    assert (shards.sample(20)["id"] == 1003).all()
    # What was written since keeps its own.
    old = ensemble.sample()
    for _ in range(2):
        shards.extend(rows_of(1, 100))
    old["td_error"] = torch.zeros(2, 100)
    ensemble.update_tensordict_priority(old)
    assert len(shards.sample(50)["id"].unique()) > 10


def test_refused_priority_update_changes_no_member(far: Any) -> None:
    shards, here = far(1, 10, sampler=by_priority), make_member(0, 10, sampler=by_priority())
    ensemble = ReplayBufferEnsemble(here, shards)
    index = {"index": torch.tensor([2, 77]), "buffer_ids": torch.tensor([0, 1])}
    with pytest.raises(IndexError, match=r"member 1: .*77"):
        ensemble.update_priority(index, torch.tensor([100.0, 1.0]))
    index["index"] = torch.tensor([20, 2])
    refuses(IndexError, "member 0", ensemble.update_priority, index, torch.tensor([1.0, 100.0]))
    refuses(ValueError, "member 1", ensemble.update_priority, index, torch.tensor([1.0, -1.0]))
    for one in (here, shards):
        assert len(one.sample(100)["id"].unique()) > 5


def test_unsupported_uses_of_remote_members_are_refused(far: Any) -> None:
    paced = far(1, 0, rate_limiter=RateLimiter(1.0, 1, error_buffer=5.0))
    refuses(ValueError, r"member 1: .*rate limiter", ReplayBufferEnsemble, make_member(0), paced)
    shards = far(1)
    with pytest.raises(ValueError, match="collate_fns for member 1"):
        ReplayBufferEnsemble(make_member(0), shards, collate_fns=[None, lambda data: data])
    with pytest.raises(TypeError, match=r"member 1 as a ReplayBuffer, got int; .*RayReplay"):
        ReplayBufferEnsemble(make_member(0), 3)  # type: ignore[arg-type]
    ensemble = ReplayBufferEnsemble(make_member(0), shards)
    refuses(RuntimeError, "its handle", ensemble.sampler.sample, ensemble.storage, 2)
    assert ensemble.storage[1] is ensemble.writer[1] is shards
    refuses(NotImplementedError, r"ensemble\[i\]", ensemble.extend, rows_of(1, 1))


@only_actors
def test_unsupported_samplers_are_refused_as_members(far: Any) -> None:
    with pytest.raises(ValueError, match=r"member 1: .*SamplerWithoutReplacement"):
        ReplayBufferEnsemble(make_member(0), far(1, sampler=SamplerWithoutReplacement()))
    handle = far(1)
    ensemble = together(make_member(0), handle)
    handle.set_sampler(SamplerWithoutReplacement())
    refuses(ValueError, r"member 1: .*SamplerWithoutReplacement", ensemble.sample)
    handle.set_sampler(RandomSampler())
    check_rows(ensemble.sample())


def test_remote_samples_with_other_keys_are_refused(far: Any) -> None:
    ensemble = together(make_member(0), far(1, 0))
    ensemble[1].extend(TensorDict({"other": torch.zeros(4)}, [4]))
    before = ensemble.sampler.ran_out
    for _ in range(2):
        refuses(SchemaError, "members 0 and 1", ensemble.sample, 4)
    assert ensemble.sampler.ran_out == before


@pytest.mark.parametrize("sizes", [(0, 20), (20, 0)])
def test_empty_member_is_named_even_if_another_is_chosen(far: Any, sizes: Any) -> None:
    ensemble = ReplayBufferEnsemble(
        far(0, sizes[0]), far(1, sizes[1]), num_buffer_sampled=1, batch_size=2, generator=seeded()
    )
    empty = sizes.index(0)
    for _ in range(6):
        refuses(NotEnoughData, f"member {empty}: .*empty", ensemble.sample)
    assert not ensemble.can_sample()
    skipping = ReplayBufferEnsemble(
        *ensemble.members, unready="skip", num_buffer_sampled=2, batch_size=2
    )
    assert skipping.can_sample()
    assert (skipping.sample()["index", "buffer_ids"] == 1 - empty).all()
    ensemble[empty].extend(rows_of(empty, 3))
    check_rows(ensemble.sample())


class Slow:
    """An answer that a member gives when somebody lets it."""

    def __init__(self, inner: Any, member: Trouble) -> None:
        self._inner, self._member = inner, member

    def result(self, timeout: float | None = None) -> Any:
        member = self._member
        member.waited.append(timeout)
        if member.error is not None:
            raise member.error
        return self._inner.result(timeout)


class Trouble:
    """Has a handle raise, and note what it is asked and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handle: Any) -> None:
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.waited: list[float | None] = []
        for name in ("_ask_part", "_ask_readiness", "_ask_stored", "_ask_call"):
            monkeypatch.setattr(handle, name, self._noting(name, getattr(handle, name)))

    def _noting(self, name: str, method: Any) -> Any:
        def noted(*args: Any, **keywords: Any) -> Any:
            self.asked.append(name)
            return Slow(method(*args, **keywords), self)

        return noted


def test_failed_batch_changes_no_member(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = far(1)
    here = make_member(0, 6, sampler=SamplerWithoutReplacement())
    trouble = Trouble(monkeypatch, shards)
    ensemble = together(here, shards, batch_size=4)
    other = make_member(0, 6, sampler=SamplerWithoutReplacement())
    expected = together(other, shards, batch_size=4)
    first = ensemble.sample()
    assert same(first, expected.sample())
    trouble.error = RuntimeError("it has ended")
    state = ensemble._mixture.generator.get_state()
    for _ in range(3):
        refuses(RuntimeError, "member 1: it has ended", ensemble.sample)
    assert torch.equal(ensemble._mixture.generator.get_state(), state)
    trouble.error = None
    seen = [first["id"][0], *(ensemble.sample()["id"][0] for _ in range(2))]
    assert sorted(torch.cat(seen).tolist()) == list(range(6))  # no row has left the pass


def test_ensemble_continues_without_a_member_that_ended(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = far(1)
    trouble = Trouble(monkeypatch, shards)
    ensemble = ReplayBufferEnsemble(
        make_member(0), shards, num_buffer_sampled=4, batch_size=8, prefetch=2
    )
    ensemble.sample()
    trouble.error = RuntimeError("it has ended")
    told = []
    for _ in range(5):
        try:
            ensemble.sample()
        except RuntimeError as error:
            told.append(str(error))
    assert told
    assert set(told) == {"member 1: it has ended"}
    ensemble.sampler.p = [1.0, 0.0]
    for _ in range(4):  # those that were asked for before come to an end
        with contextlib.suppress(RuntimeError):
            ensemble.sample()
    assert not ensemble.sample()["index", "buffer_ids"].any()
    ensemble.shutdown()


@only_actors
def test_a_late_answer_is_a_timeout(far: Any) -> None:
    handle = far(1)
    ensemble = together(make_member(0), handle)
    handle._actor.busy = True
    refuses(TimeoutError, "member 1: no answer within", ensemble.sample, timeout=0.01)
    handle._actor.busy = False
    check_rows(ensemble.sample())


@pytest.mark.timeout(180)
@pytest.mark.xdist_group("ray")
def test_a_member_that_dies_is_named(ray_cluster: Any) -> None:
    with RayReplayBuffer(
        storage=lambda: LazyTensorStorage(50), remote_config={"num_cpus": 0}
    ) as remote:
        remote.extend(rows_of(1, 20))
        ensemble = ReplayBufferEnsemble(
            make_member(0),
            remote,
            num_buffer_sampled=4,
            counts="exact",
            batch_size=8,
            generator=seeded(),
        )
        check_rows(ensemble.sample())
        # A copy has a handle of the same actor.
        copy = pickle.loads(pickle.dumps(ensemble))
        assert same(copy.sample(), ensemble.sample())
    refuses(ActorLost, "member 1", copy.sample)
    copy.sampler.p = [1.0, 0.0]
    check_rows(copy.sample())


def test_remote_requests_overlap_reads_of_local_members(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = far(1)
    here = make_member(0)
    trouble = Trouble(monkeypatch, shards)
    ensemble = together(here, shards)
    order: list[str] = []
    sample = here.sampler.sample
    monkeypatch.setattr(
        here.sampler,
        "sample",
        lambda *args: (order.append(f"draw {trouble.asked}"), sample(*args))[1],
    )
    here.append_transform(lambda rows: (order.append(f"read {trouble.waited}"), rows)[1])
    ensemble.sample(timeout=5.0)
    assert order == ["draw ['_ask_part']", "read []"]
    seconds = trouble.waited[0]
    assert seconds is not None
    assert 0 < seconds <= 5.0


def test_failing_remote_member_leaves_local_priorities(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, here = far(1, 10, sampler=by_priority), make_member(0, 10, sampler=by_priority())
    trouble = Trouble(monkeypatch, shards)
    ensemble = together(here, shards, batch_size=20)
    batch = ensemble.sample()
    batch["td_error"] = (batch["index", "index"] == 7).float()
    trouble.error = TimeoutError("no answer")
    refuses(TimeoutError, "member 1: no answer", ensemble.update_tensordict_priority, batch)
    assert len(here.sample(100)["id"].unique()) > 5


def two(far: Any, rows: int = 20) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(
        make_member(0, rows),
        far(1, rows, sampler=by_priority),
        p=[1, 3],
        num_buffer_sampled=4,
        batch_size=8,
        generator=seeded(),
    )


def test_a_checkpoint_has_all_members(far: Any, tmp_path: Path) -> None:
    ensemble = two(far)
    ensemble[1].update_priority(torch.arange(10), torch.zeros(10))
    ensemble.sample()
    ensemble.dumps(tmp_path)
    state = ensemble.state_dict()
    batches = [ensemble.sample() for _ in range(3)]
    for load in (lambda one: one.loads(tmp_path), lambda one: one.load_state_dict(state)):
        other = two(far, 3)
        load(other)
        assert (len(other[0]), len(other[1])) == (20, 20)
        assert all(same(batch, other.sample(), generations=False) for batch in batches)


def test_versions_restore_the_saves_of_remote_members(far: Any, tmp_path: Path) -> None:
    ensemble = two(far)
    for size in (25, 30, 35):
        ensemble[1].extend(rows_of(1, 5))
        ensemble.dumps(tmp_path, keep=2)
        assert len(ensemble[1]) == size
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
    old, new = checkpoint_versions(tmp_path)
    ensemble.loads(tmp_path, version=old)
    assert len(ensemble[1]) == 30
    ensemble.loads(tmp_path, version=new)
    assert len(ensemble[1]) == 35


def test_a_save_that_fails_leaves_the_old_one(
    far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = two(far)
    ensemble.dumps(tmp_path)
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    ensemble[1].extend(rows_of(1, 5))
    ensemble[0].extend(rows_of(0, 5))
    with monkeypatch.context() as patch:
        Trouble(patch, ensemble[1]).error = OSError("the disk is full")
        refuses(OSError, "members/1: the disk is full", ensemble.dumps, tmp_path)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before
    ensemble.loads(tmp_path)
    assert (len(ensemble[0]), len(ensemble[1])) == (20, 20)


def test_a_load_that_does_not_fit_changes_nothing(far: Any, tmp_path: Path) -> None:
    ensemble = two(far)
    ensemble.dumps(tmp_path)
    others = ReplayBufferEnsemble(make_member(0, 3), make_member(1, 3))
    refuses(ValueError, r"members/0', 'members/1'\]", others.loads, tmp_path)
    turned = ReplayBufferEnsemble(ensemble[1], ensemble[0])
    refuses(ValueError, "members/1", turned.loads, tmp_path)
    with pytest.raises(ValueError, match=r"remote members .*members/1"):
        ensemble.load_state_dict(others.state_dict())
    other = two(far, 3)
    refuses(ValueError, r"mmap=False .*members/1", other.loads, tmp_path, mmap=True)
    damaged = next(path for path in (tmp_path / "elsewhere").rglob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refuses(CheckpointError, damaged.name, other.loads, tmp_path)
    assert (len(other[0]), len(other[1])) == (3, 3)


def test_members_of_zero_weight_are_not_asked(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = far(1)
    trouble = Trouble(monkeypatch, shards)
    ensemble = ReplayBufferEnsemble(make_member(0), shards, p=[1, 0], batch_size=4)
    ensemble.sample()
    assert not trouble.asked
