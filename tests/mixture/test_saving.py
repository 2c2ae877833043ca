"""All members and the ensemble in one checkpoint: what it holds, and that it is all or nothing."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    HindsightGoal,
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from replaykit.checkpoint import checkpoint_versions
from replaykit.errors import CheckpointError
from tests.conftest import fingerprint
from tests.mixture.members import holding, make_ensemble, make_member, rows_of, same
from tests.support.refusals import refuses

PASS = "without_replacement"
SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    PASS: SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized_slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2),
}


def empty_like(name: str, **arguments: Any) -> ReplayBufferEnsemble:
    return make_ensemble([0, 0], [SAMPLERS[name]] * 2, seed=9, **arguments)


@pytest.mark.covering(2)
@pytest.mark.pitfall("RD3")
@pytest.mark.parametrize("way", ["files", "opened files", "state", "pickle", "copy"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_resumed_ensemble_draws_the_same_batches(
    name: str, way: str, prefetch: int | None, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "p": [2, 1],
        "num_buffer_sampled": 4,
        "batch_size": 8,
        "prefetch": prefetch,
    }
    ensemble = make_ensemble([13, 17], [SAMPLERS[name]] * 2, **arguments)
    for _ in range(4):
        batch = ensemble.sample()
        ensemble.update_tensordict_priority(batch.set("td_error", batch["id"].float() % 5 + 0.5))
    if "files" in way:
        ensemble.dumps(tmp_path)
        other = empty_like(name, **arguments)
        other.loads(tmp_path, mmap=way == "opened files")
    elif way == "state":
        state = ensemble.state_dict()
        other = empty_like(name, **arguments)
        other.load_state_dict(state)
    else:
        other = pickle.loads(pickle.dumps(ensemble)) if way == "pickle" else copy.deepcopy(ensemble)
    for _ in range(6):
        assert same(ensemble.sample(), other.sample())
    # Else it depends on how far each has drawn ahead by now; and a load severs what was open.
    if prefetch is None and "slices" not in name:
        for one in (ensemble, other):
            one[0].extend(rows_of(0, 3, start=13))
        assert same(ensemble.sample(16), other.sample(16))
    for one in (ensemble, other):
        one.shutdown()


def test_pickled_ensemble_is_consistent_with_its_prefetched_draws() -> None:
    """Threads draw ahead, and others sample, while the rest of the ensemble is pickled."""
    arguments: dict[str, Any] = {"sample_from_all": True, "batch_size": 4, "prefetch": 2}
    ensemble = make_ensemble([24, 24], [SamplerWithoutReplacement] * 2, **arguments)
    ensemble.sample()
    state = ensemble.__getstate__()
    expected = [ensemble.sample() for _ in range(6)]
    other = ReplayBufferEnsemble.__new__(ReplayBufferEnsemble)
    other.__setstate__(pickle.loads(pickle.dumps(state)))
    assert all(same(other.sample(), batch) for batch in expected)
    assert other.sampler[1] is other[1].sampler
    for one in (ensemble, other):
        one.shutdown()


def test_relabelling_continues_with_the_saved_generator(tmp_path: Path) -> None:
    """Transforms that draw do it by the ensemble's generator, for draws made ahead too."""

    def made(rows: int, prefetch: int | None, seed: int) -> ReplayBufferEnsemble:
        members = []
        for number in range(2):
            goal = HindsightGoal(0.8, achieved="observation", goal="goal")
            rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=goal)
            data = rows_of(number, 20)
            data["goal"] = data["observation"] * 0
            data["next", "observation"] = data["observation"] + 1
            data["next", "goal"] = data["goal"].clone()
            if rows:
                rb.extend(data)
            members.append(rb)
        return ReplayBufferEnsemble(
            *members,
            batch_size=8,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(seed),
        )

    ensemble, plain = made(20, 3, 0), made(20, None, 0)
    for _ in range(3):
        assert same(ensemble.sample(), plain.sample())
    ensemble.dumps(tmp_path)
    other = made(0, None, 5)
    other.loads(tmp_path)
    for _ in range(6):
        expected = ensemble.sample()
        assert same(expected, other.sample())
        assert same(expected, plain.sample())
    ensemble.shutdown()


@pytest.mark.parametrize("whose", ["ensemble", "member"])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_weights_and_transforms_are_saved(prefetch: int | None, whose: str, tmp_path: Path) -> None:
    class Counting:
        seen = 0

        def forward(self, data: Any) -> Any:
            self.seen += 1
            return data

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    def made(sizes: list[int]) -> Any:
        counting = Counting()
        own = counting if whose == "ensemble" else None
        ensemble = make_ensemble(sizes, p=[1, 0], transform=own, batch_size=4, prefetch=prefetch)
        if whose == "member":
            ensemble[0].append_transform(counting)
        return ensemble, counting

    ensemble, counting = made([5, 5])
    LinearScheduler(ensemble, "p", [0, 1], 4).step()
    ensemble.sample()
    ensemble.dumps(tmp_path)
    other, again = made([0, 0])
    other.loads(tmp_path)
    assert other.sampler.p.tolist() == [0.75, 0.25]
    assert again.seen == counting.seen == 1
    for one in (ensemble, other):
        one.shutdown()


def test_nested_ensembles_are_saved_and_loaded(tmp_path: Path) -> None:
    def made(size: int) -> ReplayBufferEnsemble:
        inner = make_ensemble([size, size], seed=None, p=[1, 2], num_buffer_sampled=2)
        return ReplayBufferEnsemble(
            make_member(5, size, sampler=SamplerWithoutReplacement()),
            inner,
            batch_size=8,
            prefetch=2,
            generator=torch.Generator().manual_seed(size),
        )

    ensemble, other, third = made(11), made(0), made(0)
    for _ in range(3):
        ensemble.sample()
    ensemble.dumps(tmp_path)
    other.loads(tmp_path)
    third.load_state_dict(ensemble.state_dict())
    fourth = pickle.loads(pickle.dumps(ensemble))
    everyone = [ensemble, other, third, fourth]
    for _ in range(6):
        first, *rest = [one.sample() for one in everyone]
        assert all(same(first, batch) for batch in rest)
    for one in everyone:
        one.shutdown()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [member["name"] for member in manifest["members"]] == [
        "members/0",
        "members/1/members/0",
        "members/1/members/1",
    ]


def test_load_into_a_smaller_member_keeps_the_pass_of_others(tmp_path: Path) -> None:
    """Rows of one member move; what was drawn ahead goes back to both."""
    arguments: dict[str, Any] = {"sample_from_all": True, "batch_size": 4, "prefetch": 2}
    ensemble = make_ensemble([12, 12], [SamplerWithoutReplacement] * 2, **arguments)
    first = [ensemble.sample() for _ in range(2)]
    ensemble.dumps(tmp_path)
    members = [
        make_member(0, 0, capacity=10, sampler=SamplerWithoutReplacement()),
        make_member(1, 0, sampler=SamplerWithoutReplacement()),
    ]
    other = ReplayBufferEnsemble(*members, **{**arguments, "prefetch": None})
    with pytest.warns(UserWarning, match="2 rows do not fit") as caught:
        other.loads(tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    rest = [other.sample() for _ in range(4)]
    ids = torch.cat([batch["id"] for batch in (*first, *rest)], 1)
    assert ids[1].sort().values.tolist() == list(range(1000, 1012))
    left = set(range(2, 12)) - set(torch.cat([b["id"] for b in first], 1)[0].tolist())
    assert set(torch.cat([b["id"] for b in rest], 1)[0].tolist()[: len(left)]) == left
    ensemble.shutdown()


def test_second_save_writes_only_changed_members(tmp_path: Path) -> None:
    ensemble = make_ensemble([20_000, 20_000], member={"capacity": 20_000})
    ensemble.dumps(tmp_path, keep=2)
    before = {file.name: file.stat().st_size for file in tmp_path.glob("data-*")}
    ensemble[1].extend(rows_of(1, 10))
    ensemble.dumps(tmp_path, keep=2)
    new = {f.name: f.stat().st_size for f in tmp_path.glob("data-*") if f.name not in before}
    assert sum(new.values()) < sum(before.values()) / 4
    assert checkpoint_versions(tmp_path) == [1, 2]
    other = make_ensemble([0, 0], member={"capacity": 20_000})
    other.loads(tmp_path, version=1)
    assert other[1][0]["id"] == 1000
    other.loads(tmp_path)
    assert torch.equal(other[1][:]["id"], ensemble[1][:]["id"])


def shown(ensemble: ReplayBufferEnsemble) -> Any:
    """Everything there is to tell of an ensemble, the next batches included."""
    rows = [member[:] if len(member) else None for member in ensemble.members]
    clone = copy.deepcopy(ensemble)
    batches = [clone.sample(8) for _ in range(3)] if ensemble.can_sample(8) else []
    return fingerprint([ensemble.state_dict(), rows, batches])


def test_a_member_that_does_not_fit_changes_no_member(tmp_path: Path) -> None:
    ensemble = make_ensemble([7, 9], [SamplerWithoutReplacement, RandomSampler])
    ensemble.dumps(tmp_path)
    wrong = {
        "schema": holding(TensorDict({"x": torch.zeros(3)}, [3])),
        "sampler": make_member(1, 4, sampler=SamplerWithoutReplacement()),
        "lanes": ReplayBuffer(storage=LazyTensorStorage(50, ndim=2)),
    }
    for name, member in wrong.items():
        target = ReplayBufferEnsemble(
            make_member(0, 4, sampler=SamplerWithoutReplacement()),
            member,
            generator=torch.Generator().manual_seed(1),
        )
        before = fingerprint([target.state_dict(), target[0][:]])
        refuses(ValueError, "members/1: ", target.loads, tmp_path)
        refuses(ValueError, "members/1: ", target.load_state_dict, ensemble.state_dict())
        assert fingerprint([target.state_dict(), target[0][:]]) == before, name


@pytest.mark.parametrize("size", [0, 6])
def test_a_failure_in_the_last_member_takes_the_others_back(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage has no memory; the others, and what samplers had, are as before."""

    def made(sizes: list[int], seed: int) -> ReplayBufferEnsemble:
        storages = (LazyMemmapStorage, ListStorage, LazyTensorStorage, LazyTensorStorage)
        members = [ReplayBuffer(storage=kind(50), sampler=SAMPLERS[PASS]()) for kind in storages]
        for number, (member, count) in enumerate(zip(members, sizes, strict=True)):
            if count:
                member.extend(rows_of(number, count))
        generator = torch.Generator().manual_seed(seed)
        return ReplayBufferEnsemble(*members, generator=generator)

    ensemble = made([7, 9, 8, 9], 0)
    ensemble.sample(8)
    ensemble.dumps(tmp_path)
    target = made([size, size, size, 5], 3)
    if size:
        target.sample(8)

    before = shown(target)

    def no_memory(*_: Any) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(target[3].storage, "load_content", no_memory)
        refuses(MemoryError, "none left", target.loads, tmp_path)
    assert [len(member) for member in target.members] == [size, size, size, 5]
    assert shown(target) == before
    if not size:  # not even the layout of rows is known
        for number, kind in ((0, LazyMemmapStorage), (2, LazyTensorStorage)):
            target[number].extend(TensorDict({"other": torch.arange(3)}, [3]))
            target[number].set_storage(kind(50))
    target.loads(tmp_path)
    for member, saved in zip(target.members, ensemble.members, strict=True):
        assert same(member[:], saved[:])
    assert same(ensemble.sample(8), target.sample(8), generations=False)


def test_own_parts_that_refuse_take_everything_back(tmp_path: Path) -> None:
    class Refusing(RandomSampler):
        kind = "random"

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict.get("_kind") == "random" and not self.ready:
                raise RuntimeError("refused")

        ready = False

    ensemble = make_ensemble([7, 9], p=[3, 1])
    ensemble.dumps(tmp_path)
    target = make_ensemble([4, 4], [RandomSampler, Refusing], seed=3, p=[1, 1])
    before = [same_rows[:].clone() for same_rows in target.members]
    refuses(RuntimeError, "refused", target.loads, tmp_path)
    assert target.sampler.p.tolist() == [0.5, 0.5]
    assert all(same(m[:], rows) for m, rows in zip(target.members, before, strict=True))


def test_states_of_other_ensembles_and_buffers_are_refused(tmp_path: Path) -> None:
    ensemble = make_ensemble([5, 5])
    with pytest.raises(FileNotFoundError):
        ensemble.loads(tmp_path)
    ensemble[0].dumps(tmp_path / "one")
    refuses(ValueError, "got that of one buffer", ensemble.loads, tmp_path / "one")
    make_ensemble([5, 5, 5]).dumps(tmp_path / "three")
    refuses(ValueError, "members/2", ensemble.loads, tmp_path / "three")
    for state in ({}, {"_members": {}, "_own": {}}, 3, ensemble[0].state_dict()):
        with pytest.raises(ValueError, match="the state of an ensemble"):
            ensemble.load_state_dict(state)  # type: ignore[arg-type]
    good = ensemble.state_dict()
    for name, wrong in (
        ("sampler", {"_kind": "random"}),
        ("prepared", 3),
        ("prepared", [{"parts": [{"member": 7, "draws": []}]}]),
        ("transforms", 3),
    ):
        own = {"": {**good["_own"][""], name: wrong}}
        refuses(ValueError, "expected", ensemble.load_state_dict, {**good, "_own": own})
    ensemble.load_state_dict(good)
    refuses(ValueError, "at least 1", ensemble.dumps, tmp_path / "none", keep=0)


def test_rows_of_all_members_stay_in_the_files(tmp_path: Path) -> None:
    """Also of those of a member that is an ensemble; what is written stays out of the files."""
    count = 60_000  # what is shorter than a mebibyte is copied

    def made(rows: int) -> ReplayBufferEnsemble:
        capacity: dict[str, Any] = {"capacity": count + 20}
        samplers = [SAMPLERS["prioritized"], RandomSampler]
        inner = make_ensemble([rows, rows], samplers, member=capacity)
        alone = make_member(2, rows, sampler=SamplerWithoutReplacement(), **capacity)
        generator = torch.Generator().manual_seed(4)
        return ReplayBufferEnsemble(inner, alone, batch_size=8, generator=generator)

    source = made(count)
    source.sample()
    source.dumps(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    opened, plain = made(0), made(0)
    opened.loads(tmp_path, mmap=True)
    plain.loads(tmp_path)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) in maps.read_text()
    for turn in range(4):
        batches = [one.sample() for one in (opened, plain)]
        assert same(*batches)
        for one in (opened, plain):
            one[1].extend(rows_of(2, 9, start=count + 9 * turn))
            one[0][0].extend(rows_of(0, 9, start=count + 9 * turn))
    for one, other in ((opened[1], plain[1]), (opened[0][0], plain[0][0])):
        assert same(one[:], other[:])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_failed_mapping_of_one_member_maps_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ensemble([9, 9]).dumps(tmp_path)
    used, files = make_ensemble([0, 3]), make_ensemble([0, 0])
    files[1].set_storage(LazyMemmapStorage(50, scratch_dir=tmp_path / "rows"))
    for ensemble, words in ((used, "written to, with 3 rows"), (files, "got a LazyMemmapStorage")):
        with pytest.raises(ValueError, match=f"members/1: expected a new .*{words}"):
            ensemble.loads(tmp_path, mmap=True)
        assert not ensemble[0].storage.initialized
    target, calls = make_ensemble([0, 0]), []
    map_content = LazyTensorStorage.map_content

    def refuse(self: LazyTensorStorage, *arguments: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise OSError(12, "Cannot allocate memory")
        map_content(self, *arguments)

    monkeypatch.setattr(LazyTensorStorage, "map_content", refuse)
    refuses(OSError, "Cannot allocate", target.loads, tmp_path, mmap=True)
    assert not any(member.storage.initialized for member in target.members)
    target.loads(tmp_path, mmap=True)
    assert [len(member) for member in target.members] == [9, 9]
    for file in tmp_path.glob("data-*"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"data-.*\.bin is torn"):
        make_ensemble([0, 0]).loads(tmp_path, mmap=True)


def test_state_of_the_sampler_restores_weights_and_passes(tmp_path: Path) -> None:
    ensemble = make_ensemble([7, 9], [SamplerWithoutReplacement] * 2, p=[1, 3])
    ensemble.sample(4)
    other = make_ensemble([7, 9], [SamplerWithoutReplacement] * 2, p=[1, 1])
    other.sampler.load_state_dict(ensemble.sampler.state_dict())
    other.set_rng(torch.Generator().manual_seed(4))
    ensemble.set_rng(torch.Generator().manual_seed(4))
    assert same(ensemble.sample(4), other.sample(4), generations=False)
    refuses(ValueError, "members", other.sampler.load_state_dict, {"0": {}})
    ensemble.sampler.dumps(tmp_path)
    third = make_ensemble([7, 9], [SamplerWithoutReplacement] * 2)
    third.sampler.loads(tmp_path)
    assert third.sampler.p.tolist() == [0.25, 0.75]


def test_set_rng_returns_prefetched_draws_to_the_pass() -> None:
    arguments: dict[str, Any] = {"sample_from_all": True, "batch_size": 4}
    ensemble = make_ensemble([8, 8], [SamplerWithoutReplacement] * 2, prefetch=3, **arguments)
    first = ensemble.sample()
    ensemble.set_rng(torch.Generator().manual_seed(1))
    rest = [ensemble.sample() for _ in range(3)]
    ids = torch.cat([batch["id"] for batch in (first, *rest)], 1)
    assert ids.sort(1).values.tolist() == [list(range(8)), list(range(1000, 1008))]
    ensemble.shutdown()
    with pytest.raises(TypeError, match="Generator"):
        ensemble.set_rng(3)  # type: ignore[arg-type]
