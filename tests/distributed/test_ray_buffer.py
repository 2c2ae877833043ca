"""RayReplayBuffer, behind one real Ray: it does what the buffer does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RateLimiter,
    RayReplayBuffer,
    RayReplayBufferClient,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from replaykit.distributed import ray_buffer
from replaykit.distributed.host import Host
from replaykit.errors import ActorLost, RateLimiterTimeout, SchemaError
from replaykit.remote import DEFAULT_REMOTE_CLASS_CONFIG
from replaykit.testing import RoboHiveWriter, make_trial
from tests.conftest import fingerprint, make_rows
from tests.distributed.laws import wait_until
from tests.ray_cluster import RAY_MARKS
from tests.support.refusals import refuses

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
    return bool(fingerprint(found) == fingerprint(expected))


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
    (
        "td priority",
        lambda b: b.update_tensordict_priority(b.sample(5).set("td_error", torch.ones(5))),
    ),
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


@pytest.mark.pitfall("TH11")
def test_every_call_matches_local_buffer(make: Any, tmp_path: Path) -> None:
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
    refuses(AttributeError, r"rb\.run", lambda: remote.episodes)
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
    refuses(RuntimeError, "empty storage", rb.sample)
    rb.extend(make_rows(0, 3))
    with pytest.raises(ValueError, match="observation") as caught:
        rb.extend(make_rows(0, 3).exclude("observation"))
    assert type(caught.value) is SchemaError
    refuses(KeyError, "unknown", rb.set_, "unknown", torch.zeros(3))
    with pytest.raises(IndexError):
        _ = rb[7]
    with pytest.raises(TypeError):
        rb.sample(nothing=1)
    refuses(ValueError, "batch_size", rb.sample, 0)
    with pytest.raises(AttributeError):
        _ = rb.nonsense
    assert "index" not in rb.sample(include_info=False)
    assert len(rb) == 3
    refuses(TypeError, "storage must be", Host(ReplayBuffer, {"storage": 3}).ready)
    refuses(ValueError, "expected prefetch", rb.client, prefetch=-1)
    refuses(ValueError, "write_seconds", rb.client, write_seconds=0)


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

    refuses(TypeError, "client", pickle.dumps, rb)
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
    refuses(RuntimeError, "allow writing", remote.extend, local[:3])


def test_actor_that_cannot_start_names_its_resources(monkeypatch: pytest.MonkeyPatch):
    """Without Ray: its actor has not answered after a minute."""
    cluster = {"CPU": 2.0}
    ray = SimpleNamespace(
        wait=lambda refs, timeout: ([], refs), cluster_resources=lambda: dict(cluster)
    )
    actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: "asked"))
    monkeypatch.setattr(ray_buffer, "running_ray", lambda: ray)
    monkeypatch.setattr(ray_buffer, "Reply", lambda ref: SimpleNamespace(get=lambda: ref))
    asked = {"num_cpus": 1000, "resources": {"learner": 1}}
    with pytest.raises(TimeoutError, match=r"needs .*1000.* has only \{'learner': 0, 'CPU': 2.0\}"):
        ray_buffer._ready(actor, asked)
    # With enough in the cluster, the caller waits: others may release it, or the start is slow.
    cluster.update(CPU=1000.0, learner=1.0)
    assert ray_buffer._ready(actor, asked) == "asked"


@pytest.mark.pitfall("TH11")
def test_plain_actor_matches_local_buffer(ray_cluster: Any, tmp_path: Path) -> None:
    call = ray_cluster.get
    remote = TensorDictReplayBuffer.as_remote({"num_cpus": 0}).remote(**arguments())
    local = TensorDictReplayBuffer(**arguments())
    assert same(call(remote.extend.remote(make_rows(0, 15))), local.extend(make_rows(0, 15)))
    local.dumps(tmp_path)
    call(remote.loads.remote(str(tmp_path)))
    assert call(remote.stats.remote()) == local.stats()
    for size in (4, 7, None, 1):
        assert same(call(remote.sample.remote(size))["id"], local.sample(size)["id"])
    with pytest.raises(ValueError, match="'next', 'done'"):
        call(remote.extend.remote(make_rows(0, 2).exclude(("next", "done"))))
    refuses(KeyError, "unknown", call, remote.set_.remote("unknown", torch.zeros(2)))
    ray_cluster.kill(remote)


def test_the_options_reach_ray(ray_cluster: Any):
    assert DEFAULT_REMOTE_CLASS_CONFIG == {"num_cpus": 1, "num_gpus": 0}
    default = ReplayBuffer.as_remote()
    assert default._default_options["num_cpus"] == 1
    assert default._default_options["num_gpus"] == 0
    given = ReplayBuffer.as_remote({"num_cpus": 0.25, "max_restarts": 3})
    assert given._default_options["num_cpus"] == 0.25
    assert given._default_options["max_restarts"] == 3
    assert "num_cpus" not in ReplayBuffer.as_remote({})._default_options
    assert DEFAULT_REMOTE_CLASS_CONFIG == {"num_cpus": 1, "num_gpus": 0}


def test_without_ray_the_extra_is_named(monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(RuntimeError, r"pip install 'replaykit\[ray\]'", ReplayBuffer.as_remote)
    refuses(RuntimeError, "ray", TensorDictReplayBuffer.as_remote, {"num_cpus": 1})


def messages(handle: RayReplayBufferClient, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The counts of every message of gathered writes that the handle sends from now on."""
    sent: list[list[int]] = []
    write = handle._write_queue._write

    def noted(counts: list[int], rows: Any) -> Any:
        sent.append(counts)
        return write(counts, rows)

    monkeypatch.setattr(handle._write_queue, "_write", noted)
    return sent


def test_asynchronous_calls_keep_their_order(rb: RayReplayBuffer, ray_cluster: Any) -> None:
    first = rb.extend_async(make_rows(0, 5))
    second = rb.add_async(make_rows(5, 1)[0])
    batch = rb.sample_async(30)
    info = rb.sample_async(3, return_info=True)
    assert len(rb) == 6  # it came after them
    assert set(batch.result()["id"].tolist()) == set(range(6))
    assert first.result(timeout=60).tolist() == [0, 1, 2, 3, 4]
    assert first.done()
    assert second.result() == 5
    assert info.result()[1]["index"].shape == (3,)
    assert ray_cluster.wait([rb.sample_async().ref], timeout=60)[0]


def test_results_are_awaited(rb: RayReplayBuffer) -> None:
    async def both() -> tuple[Any, Any, Any]:
        rows, batch = rb.extend_async(make_rows(0, 5)), rb.sample_async()
        bad = rb.extend_async(make_rows(0, 5).exclude("id"))
        with pytest.raises(ValueError, match="id"):
            await bad
        return await rows, await batch, await rb.client(write_rows=8).add(make_rows(9, 1)[0])

    rows, batch, place = asyncio.run(both())
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.shape == (4,)
    assert place == 5
    rb.flush()  # the error was raised before


def test_small_writes_go_together(rb: RayReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded by rows; in order; flushed by whatever looks at the buffer."""
    handle = rb.client(write_rows=8, write_seconds=60)
    sent = messages(handle, monkeypatch)
    row = make_rows(0, 1)[0]
    results = []
    for _ in range(10):
        results.append(handle.add(row))
        row["id"] += 1  # the row was copied
        row["observation"] += 10.0
    results.append(handle.extend(make_rows(10, 3)))
    assert sent == [[0] * 8]
    assert len(handle) == 13
    assert sent == [[0] * 8, [0, 0, 3]]
    assert [result.result() for result in results[:10]] == list(range(10))
    assert results[10].result().tolist() == [10, 11, 12]
    large = handle.extend(make_rows(13, 20))
    handle.add(make_rows(33, 1)[0])
    assert handle.sample(100).shape == (100,)
    assert large.result().tolist() == list(range(13, 33))
    rows = rb[:]
    assert rows["id"].tolist() == list(range(34))
    assert torch.equal(rows["observation"][:, 0], rows["id"] * 10.0)


def test_small_writes_are_sent_after_a_short_wait(
    rb: RayReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = rb.client(write_rows=1000, write_seconds=0.05)
    sent = messages(handle, monkeypatch)
    began = time.monotonic()
    handle.add(make_rows(0, 1)[0])
    assert not sent or time.monotonic() - began >= 0.05
    wait_until(lambda: len(rb))  # another handle, that sends nothing of this one
    assert sent == [[0]]
    result = handle.add(make_rows(1, 1)[0])
    assert result.result() == 1  # asking for it sends it


def test_one_bad_write_among_others_is_refused_alone(rb: RayReplayBuffer) -> None:
    rb.set_sampler(PrioritizedSampler(alpha=1.0, beta=1.0))
    handle = rb.client(write_rows=8, write_seconds=60)
    errors = enumerate((1.0, -1.0, 2.0))
    results = [handle.add(make_rows(n, 1, td_error=torch.full((1,), e))[0]) for n, e in errors]
    refuses(ValueError, r"priorit", results[1].result)
    handle.flush()
    assert [results[0].result(), results[2].result()] == [0, 1]
    handle.add(make_rows(7, 1, td_error=torch.full((1,), -1.0))[0])
    refuses(ValueError, r"priorit", handle.flush)
    assert rb["id"].tolist() == [0, 2]
    other = handle.add(make_rows(8, 1)[0])  # of another layout
    assert handle.add(make_rows(9, 1, td_error=torch.ones(1))[0]).result() == 2
    refuses(ValueError, "td_error", other.result)


def test_writes_changed_by_transforms_are_sent_singly(rb: RayReplayBuffer) -> None:
    rb.append_transform(lambda td: td.set("id", td["id"] + len(td)), invert=True)
    handle = rb.client(write_rows=8, write_seconds=60)
    handle.add(make_rows(0, 1)[0])
    handle.extend(make_rows(0, 3))
    handle.flush()
    assert rb.run(lambda buffer: buffer.storage[:]["id"].tolist()) == [1, 3, 4, 5]


@pytest.mark.pitfall("TH12")
def test_close_loses_nothing_and_leaves_ray_running(
    make: Any, tmp_path: Path, ray_cluster: Any
) -> None:
    """Writes of this process are stored. Calls of the remaining handles raise an error."""

    def storage() -> LazyMemmapStorage:
        return LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", recover=True)

    buffer = make(storage=storage)
    handle, other = buffer.client(write_rows=50, write_seconds=60), buffer.client(prefetch=2)
    for number in range(5):
        handle.add(make_rows(number, 1)[0])
    buffer.extend_async(make_rows(5, 5))
    assert buffer.is_alive
    buffer.close()
    buffer.shutdown()
    assert not buffer.is_alive
    assert ray_cluster.is_initialized()
    for call in (len, lambda b: b.sample(), lambda b: b.client(), lambda b: b.batch_size):
        refuses(RuntimeError, "closed", call, buffer)
    with pytest.raises(ActorLost):
        len(handle)
    refuses(RuntimeError, "actor", other.sample)
    until = time.monotonic() + 60
    while True:
        try:
            found = ReplayBuffer(storage=storage())
            break
        except RuntimeError as error:  # its process takes a moment to end
            if "in use by another process" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.05)
    assert sorted(found["id"].tolist()) == list(range(10))


def test_close_reports_errors_of_all_handles_even_deleted_ones(make: Any) -> None:
    buffer = make(storage=lambda: LazyTensorStorage(50))
    buffer.extend(make_rows(0, 2))
    handle = buffer.client(write_rows=8, write_seconds=60)
    handle.add(make_rows(2, 1)[0])
    handle.extend_async(make_rows(3, 2).exclude("id"))
    buffer.client().extend_async(make_rows(3, 2).exclude("observation"))
    gc.collect()
    buffer.extend_async(make_rows(3, 2).exclude("id"))
    refuses(ValueError, r"'id'.*2 more writes have failed.*'observation'", buffer.close)
    assert not buffer.is_alive
    buffer.close()


@pytest.mark.parametrize("prefetch", [4, 8])
def test_batches_sent_together_match_batches_sent_alone(
    rb: RayReplayBuffer, ray_cluster: Any, prefetch: int
) -> None:
    """The same batches, in order; each one's reference is its own, to be waited for with others."""
    rb.extend(make_rows(0, 50))

    def drawn(handle: Any) -> list[int]:
        rb.set_rng(torch.Generator().manual_seed(5))
        return [number for _ in range(23) for number in handle.sample()["id"].tolist()]

    handle = rb.client(prefetch=prefetch)
    assert drawn(handle) == drawn(rb.client())
    assert f"sample_{prefetch // 2}" in {name for name, _ in handle._methods}
    results = [handle.sample_async() for _ in range(2 * prefetch)]
    refs = [result.ref for result in results]
    assert len(set(refs)) == 2 * prefetch
    assert len(ray_cluster.wait(refs, num_returns=len(refs), timeout=60)[0]) == len(refs)
    assert all(result.done() for result in results)


def test_cancelled_wait_loses_no_other_batch(rb: RayReplayBuffer) -> None:
    """All that is drawn can be had, each row once: an awaited one too that was given up."""
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(make_rows(0, 48))
    handle = rb.client(prefetch=4)
    seen = [handle.sample()["id"] for _ in range(3)]

    async def some() -> list[torch.Tensor]:
        given_up, other = handle.sample_async(), handle.sample_async()

        async def awaited(result: Any) -> torch.Tensor:
            return (await result)["id"]

        task = asyncio.ensure_future(awaited(given_up))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return [await awaited(other), given_up.result()["id"]]

    seen += asyncio.run(some())
    seen += [handle.sample()["id"] for _ in range(7)]
    assert sorted(torch.cat(seen).tolist()) == list(range(48))


@pytest.mark.long
def test_restarted_actor_continues_to_answer(make: Any, ray_cluster: Any) -> None:
    """Drawn batches are delivered or lost. The handle works again, also with two requests."""
    buffer = make(
        storage=lambda: LazyTensorStorage(50),
        batch_size=4,
        remote_config={"num_cpus": 0, "max_restarts": 1},
    )
    buffer.extend(make_rows(0, 50))
    handle = buffer.client(prefetch=4)
    for _ in range(8):
        handle.sample()
    ray_cluster.kill(buffer._actor, no_restart=False)
    until = time.monotonic() + 120
    while True:
        try:
            buffer.extend(make_rows(100, 50))
            break
        except RuntimeError:
            assert time.monotonic() < until
            time.sleep(0.1)
    batches = []
    for _ in range(20):
        with contextlib.suppress(RuntimeError):  # asked for of the one that has gone
            batches.append(handle.sample())
    assert len(batches) >= 16
    assert all(batch.shape == (4,) for batch in batches)
    assert int(torch.cat([batch["id"] for batch in batches[5:]]).min()) >= 100


def test_samples_and_writes_wait_for_each_other_in_the_actor(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 8 rows wait to be sampled, each of them once; batches have 4."""
    rb = make(
        storage=lambda: LazyTensorStorage(100), batch_size=4, rate_limiter=RateLimiter.queue(8)
    )
    early = [rb.sample_async() for _ in range(3)]
    with pytest.raises(RateLimiterTimeout):
        rb.sample(timeout=0.01)
    assert len(rb) == 0  # answered while they wait
    assert not any(batch.done() for batch in early)
    rb.extend(make_rows(0, 4))
    wait_until(lambda: any(batch.done() for batch in early))
    assert rb.run(lambda buffer: buffer.stats()["samples"]) == 4

    writes = [rb.extend_async(make_rows(4 + 4 * n, 4)) for n in range(6)]
    assert [batch.result().shape for batch in early] == [(4,)] * 3
    for _ in range(2):
        assert rb.sample(timeout=60).shape == (4,)
    places = [write.result(timeout=60).tolist() for write in writes]
    assert places == [list(range(4 + 4 * n, 8 + 4 * n)) for n in range(6)]
    stats = rb.stats()
    assert (stats["inserts"], stats["samples"]) == (28, 20)
    assert rb["id"].tolist() == list(range(28))
    handle = rb.client(prefetch=2)
    assert handle.sample(timeout=60).shape == (4,)
    with pytest.raises(RateLimiterTimeout):
        [handle.sample(timeout=0.5) for _ in range(2)]
    gathering = rb.client(write_rows=8, write_seconds=60)
    gathering.add(make_rows(28, 1)[0])
    gathering.cut()  # after the row, which goes by another way
    assert rb.run(lambda buffer: buffer.episodes.lengths.tolist())[-2:] == [3, 2]
    for start in (29, 33, 37):  # one of the three that wait is served, whichever it is
        rb.extend(make_rows(start, 4 if start > 29 else 3))
        assert handle.sample(timeout=60).shape == (4,)
    with pytest.raises(RateLimiterTimeout):
        [rb.extend(make_rows(40, 8), timeout=0.5) for _ in range(5)]
    monkeypatch.setattr("replaykit.distributed.ray_buffer.SETTLING_S", 0.1)
    rb.extend_async(make_rows(48, 8))
    refuses(RuntimeError, "wait for samples", rb.close)
