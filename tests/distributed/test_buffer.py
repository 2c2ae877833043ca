"""RayReplayBuffer: a buffer in an actor does what the buffer does."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    RayReplayBufferClient,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from replaykit.distributed import ray_buffer
from replaykit.distributed.host import Host
from replaykit.errors import SchemaError
from replaykit.testing import RoboHiveWriter, make_trial
from tests.conftest import make_rows
from tests.ray_cluster import RAY_MARKS

pytestmark = RAY_MARKS

LOCAL_ONLY = {"as_remote", "episodes", "join", "share"}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def twice(td: TensorDict) -> TensorDict:
    return td.set("twice", td["id"] * 2)


def arguments() -> dict[str, Any]:
    return {
        "storage": partial(LazyTensorStorage, 20),
        "writer": partial(RoundRobinWriter, track_generations=True),
        "batch_size": 4,
        "generator": generator(),
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and torch.equal(found, expected)
    if isinstance(expected, TensorDict):
        return set(found.keys()) == set(expected.keys()) and all(
            same(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            same(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, tuple):
        return all(same(one, other) for one, other in zip(found, expected, strict=True))
    return bool(found == expected)


CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("extend", lambda b: b.extend(make_rows(0, 15))),
    ("add", lambda b: b.add(make_rows(15, 1)[0])),
    ("len", len),
    ("write_count", lambda b: b.write_count),
    ("batch_size", lambda b: b.batch_size),
    ("dim_extend", lambda b: b.dim_extend),
    ("initialized", lambda b: b.initialized),
    ("shared", lambda b: b.shared),
    ("sample", lambda b: b.sample()),
    ("sample 7", lambda b: b.sample(7)),
    ("sample, info", lambda b: b.sample(3, return_info=True)),
    ("can_sample", lambda b: b.can_sample(4)),
    ("next", lambda b: b.next()),
    ("a row", lambda b: b[3]),
    ("rows", lambda b: b[torch.tensor([4, 2])]),
    ("a slice", lambda b: b[2:9:3]),
    ("a column", lambda b: b["next", "reward"]),
    ("all", lambda b: b.read_all_in_order(end=5)),
    ("set_", lambda b: b.set_("action", torch.arange(16, dtype=torch.uint8))["action"]),
    ("set_at_", lambda b: b.set_at_("action", torch.zeros(2, dtype=torch.uint8), [1, 5])["action"]),
    ("update_", lambda b: b.update_({"id": torch.arange(16) + 100})["id"]),
    ("an item", lambda b: b.__setitem__(2, make_rows(70, 1)[0])),
    ("write_all", lambda b: b.write_all(make_rows(80, 3))),
    ("a column set", lambda b: b.__setitem__("id", torch.arange(16))),
    (
        "update_if_present",
        lambda b: b.update_if_present(
            index=torch.tensor([0, 3]),
            generation=torch.tensor([0, 9]),
            patch={"id": torch.tensor([1000, 2000])},
        ).updated.tolist(),
    ),
    ("mark_update", lambda b: b.mark_update(torch.tensor([1]))),
    ("stats", lambda b: b.stats()),
    ("cut", lambda b: b.cut()),
    ("flush", lambda b: b.flush()),
    ("append_transform", lambda b: len(b.append_transform(twice))),
    ("transformed", lambda b: b.sample()["twice"]),
    ("insert_transform", lambda b: len(b.insert_transform(0, twice).transform)),
    ("set_rng", lambda b: b.set_rng(generator())),
    ("set_sampler", lambda b: type(b.set_sampler(PrioritizedSampler(alpha=1.0, beta=0.5)))),
    ("sampler", lambda b: type(b.sampler)),
    ("update_priority", lambda b: b.update_priority(torch.tensor([1, 2]), torch.tensor([9.0, 8]))),
    ("prioritized", lambda b: b.sample(10)),
    ("td priority", lambda b: b.update_tensordict_priority(b.sample(5).set("td_error", ones(5)))),
    ("prioritized again", lambda b: b.sample(10)),
    ("state_dict", lambda b: set(b.state_dict())),
    ("loaded", lambda b: (b.load_state_dict(b.state_dict()), b.sample(6))[1]),
    ("set_writer", lambda b: type(b.set_writer(RoundRobinWriter()))),
    ("writer", lambda b: type(b.writer)),
    ("set_storage", lambda b: type(b.set_storage(LazyTensorStorage(30))).__name__),
    ("storage", lambda b: b.storage.max_size),
    ("the new storage", lambda b: (b.extend(make_rows(5, 2)), len(b))[1]),
    ("register_save_hook", lambda b: b.register_save_hook(lambda data: data)),
    ("register_load_hook", lambda b: b.register_load_hook(lambda data: data)),
    ("empty", lambda b: (b.empty(), len(b))[1]),
]


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


@pytest.mark.pitfall("TH11")
def test_every_call_matches_local_buffer(make: Any, tmp_path: Path) -> None:
    """TH11: the same seed, the same calls, the same results."""
    local, remote = ReplayBuffer(**arguments()), make(**arguments())
    for name, call in CALLS:
        expected, found = call(local), call(remote)
        assert same(found, expected), name
    remote.extend(make_rows(0, 9))
    assert remote.dumps(tmp_path / "saved") is None
    remote.empty()
    remote.loads(tmp_path / "saved")
    assert remote["id"].tolist() == list(range(9))
    local.loads(tmp_path / "saved")
    assert same(local.sample(6)["id"], remote.sample(6)["id"])
    with pytest.raises(RuntimeError, match="cannot be changed"):
        remote.dim_extend = 1
    with pytest.raises(AttributeError, match=r"rb\.run"):
        _ = remote.episodes
    assert remote.run(lambda buffer, most: min(len(buffer), most), 5) == 5


def test_no_method_of_a_buffer_is_missing() -> None:
    names = {name for name, _ in inspect.getmembers(ReplayBuffer) if name[0] != "_"}
    names |= {"__len__", "__getitem__", "__setitem__", "__iter__"}
    missing = {n for n in names if inspect.getattr_static(RayReplayBuffer, n, None) is None}
    assert missing <= LOCAL_ONLY
    for name in ("close", "shutdown", "is_alive", "client"):
        assert inspect.getattr_static(RayReplayBuffer, name, None) is not None
        assert inspect.getattr_static(RayReplayBufferClient, name, None) is None


@pytest.mark.pitfall("TH12")
def test_errors_have_their_own_type(rb: RayReplayBuffer) -> None:
    """TH12: ``except ValueError`` works across the actor."""
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()
    rb.extend(make_rows(0, 3))
    with pytest.raises(ValueError, match="observation") as caught:
        rb.extend(make_rows(0, 3).exclude("observation"))
    assert type(caught.value) is SchemaError
    with pytest.raises(KeyError, match="unknown"):
        rb.set_("unknown", torch.zeros(3))
    with pytest.raises(IndexError):
        _ = rb[7]
    with pytest.raises(TypeError):
        rb.sample(nothing=1)
    with pytest.raises(ValueError, match="batch_size"):
        rb.sample(0)
    with pytest.raises(AttributeError):
        _ = rb.nonsense
    with pytest.warns(UserWarning, match="has no priorities"):
        rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.warns(DeprecationWarning, match="include_info"):
        assert "index" not in rb.sample(include_info=False)
    assert len(rb) == 3
    with pytest.raises(TypeError, match="storage must be"):
        Host(ReplayBuffer, {"storage": 3}).ready()
    with pytest.raises(ValueError, match="expected prefetch"):
        rb.client(prefetch=-1)
    with pytest.raises(ValueError, match="write_seconds"):
        rb.client(write_seconds=0)


def test_caller_may_change_results_without_changing_rows(rb: RayReplayBuffer) -> None:
    """G2, G3: batches may be changed, and what was given stays as it is."""
    given = make_rows(0, 30)
    rb.extend(given)
    assert set(given.keys()) == set(make_rows(0, 1).keys())
    batch = rb.sample(20)
    ids = batch["id"].clone()
    batch["observation"].zero_()
    rows = rb[:]
    rows["observation"].zero_()
    assert rb["observation"][:, 0].tolist() == [10.0 * n for n in range(30)]
    assert torch.equal(batch["id"], ids)


def test_a_large_batch_is_mapped_and_not_copied(rb: RayReplayBuffer) -> None:
    """Its tensors lie in the memory that Ray's store shares with the actor."""
    rb.extend(make_rows(0, 50))
    batch = rb.sample(20_000)
    assert torch.equal(batch["observation"][:, 0], batch["id"] * 10.0)
    address = batch["observation"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            assert "s" in line.split()[1], f"not shared: {line}"
            break
    else:
        pytest.fail("not mapped")
    batch["observation"].add_(1)


def test_iteration_ends_with_a_pass_and_prefetch_draws_nothing_beyond(rb: RayReplayBuffer) -> None:
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(make_rows(0, 10))
    handle = rb.client(prefetch=3)
    for _ in range(2):
        batches = list(handle)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat([batch["id"] for batch in batches]).tolist()) == list(range(10))
    assert [len(batch) for batch in rb] == [4, 4, 2]
    assert len(rb.next()) == 4


def test_a_handle_goes_to_others_and_does_not_end_the_actor(
    rb: RayReplayBuffer, ray_cluster: Any
) -> None:
    @ray_cluster.remote(num_cpus=0)
    def collect(handle: Any, start: int) -> Any:
        handle.extend(make_rows(start, 4))
        return len(handle), handle.sample(2)["id"].shape

    with pytest.raises(TypeError, match="client"):
        pickle.dumps(rb)
    handle = rb.client()
    assert ray_cluster.get(collect.remote(handle, 0), timeout=120) == (4, (2,))
    del handle
    gc.collect()
    assert len(rb) == 4
    assert rb.is_alive
    for name in ("close", "shutdown", "client", "is_alive"):
        assert not hasattr(rb.client(), name)


@pytest.mark.long
def test_a_data_set_behind_ray(make: Any, tmp_path: Path) -> None:
    from replaykit.datasets import RobosetExperienceReplay

    with RoboHiveWriter(tmp_path / "recorded.h5") as writer:
        for seed in range(3):
            writer.add_trial(**make_trial(12, seed=seed))
    given: dict[str, Any] = {
        "dataset_id": "mine/recorded",
        "batch_size": 5,
        "root": tmp_path / "root",
        "source": [tmp_path / "recorded.h5"],
    }
    local = RobosetExperienceReplay(**given, generator=generator())
    remote = make(
        replay_buffer_cls=RobosetExperienceReplay,
        **given,
        download=False,
        generator=generator(),
    )
    assert len(remote) == len(local) == 33
    assert same(remote.sample(), local.sample())
    assert remote.data_path == local.data_path
    assert remote.dataset_id == "mine/recorded"
    with pytest.raises(RuntimeError, match="allow writing"):
        remote.extend(local[:3])


def test_actor_that_cannot_start_names_its_resources(monkeypatch: pytest.MonkeyPatch):
    """Without Ray: its actor has not answered after a minute."""
    cluster = {"CPU": 2.0}
    ray = SimpleNamespace(
        wait=lambda refs, timeout: ([], refs), cluster_resources=lambda: dict(cluster)
    )
    actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: "asked"))
    monkeypatch.setattr(ray_buffer, "running_ray", lambda: ray)
    monkeypatch.setattr(ray_buffer, "fetch", lambda ref: ref)
    asked = {"num_cpus": 1000, "resources": {"learner": 1}}
    with pytest.raises(TimeoutError, match=r"needs .*1000.* has only \{'learner': 0, 'CPU': 2.0\}"):
        ray_buffer._ready(actor, asked)
    # What there is enough of is waited for: others may let go of it, or it is slow to be made.
    cluster.update(CPU=1000.0, learner=1.0)
    assert ray_buffer._ready(actor, asked) == "asked"
