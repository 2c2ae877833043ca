"""What one buffer can do: one over shards can do it too, or says why not."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    RoundRobinWriter,
    ShardedReplayBuffer,
    SliceSampler,
    Transform,
)
from replaykit.distributed.sharded_client import REFUSED
from replaykit.errors import SchemaError
from tests.distributed.laws import episodes, steps, windows
from tests.support.refusals import refuses


class Halved(Transform):
    """What is stored looks other than what is written."""

    def inv(self, data: Any) -> Any:
        return data.copy().set("half", data["x"] / 2)


def test_every_name_of_a_buffer_is_there_or_is_refused_with_a_reason(sharded: Any) -> None:
    rb = sharded(2)
    names = {name for name in dir(ReplayBuffer) if not name.startswith("_")}
    assert names - set(dir(ShardedReplayBuffer)) == set(REFUSED)
    for handle in (rb, rb.client()):
        for name, reason in REFUSED.items():
            with pytest.raises(
                AttributeError, match=f"Sharded[A-Za-z]* has no '{name}': "
            ) as found:
                getattr(handle, name)
            assert reason in str(found.value)
            assert not hasattr(handle, name)
        refuses(AttributeError, "object has no attribute 'nothing'", lambda h=handle: h.nothing)
        refuses(TypeError, "update_if_present", handle.__setitem__, 0, torch.zeros(()))
    assert rb.initialized
    refuses(TypeError, "client", copy.deepcopy, rb)
    client = copy.copy(rb.client())
    assert client.num_shards == 2
    refuses(TypeError, "client", pickle.dumps, rb)


def test_rows_get_the_default_priority_of_one_big_buffer(sharded: Any, single: Any) -> None:
    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(alpha=0.7, beta=1.0)

    one, rb = single(sampler()), sharded(3, sampler=sampler)
    rows = TensorDict({"x": torch.arange(12)}, [12])
    for buffer in (one, rb):
        index = buffer.extend(rows)
        buffer.update_priority(index, torch.linspace(0.5, 3.0, 12))
        buffer.update_priority(index[10:], 0.1)  # the largest ever is not the largest there is
    other = rb.client()
    for buffer in (one, other):
        buffer.mark_update(torch.tensor([0, 5, -1]))
        buffer.mark_update(7)
        with pytest.raises(IndexError):
            buffer.mark_update(torch.tensor([1, 12]))

    def weights(buffer: Any) -> dict[int, float]:
        batch = buffer.sample(3000)
        found = zip(batch["x"].tolist(), batch["priority_weight"].tolist(), strict=True)
        return {x: round(weight, 5) for x, weight in found}

    assert weights(other) == weights(one)
    assert len(weights(one)) == 12
    plain = sharded(2)
    plain.extend(rows)
    plain.mark_update(3)
    assert torch.equal(plain.read_all_in_order(5)["x"], rows["x"][:5])


def test_rows_are_read_by_index_place_mask_and_key(sharded: Any) -> None:
    rb = sharded(3)
    with pytest.raises(RuntimeError):
        rb["x"]
    index = rb.extend(
        TensorDict({"x": torch.arange(8) * 10, "next": {"reward": torch.rand(8, 1)}}, [8])
    )
    assert torch.equal(index, torch.arange(8))
    assert torch.equal(rb["x"], torch.arange(8) * 10)
    assert torch.equal(rb["next", "reward"], rb[:]["next", "reward"])
    assert rb["next", "reward"].shape == (8, 1)
    assert rb[torch.tensor(3)]["x"] == rb[3]["x"] == 30
    assert rb[torch.arange(8) > 5]["x"].tolist() == [60, 70]
    assert rb[[True] + 7 * [False]]["x"].tolist() == [0]
    assert rb[...]["x"].shape == (8,)
    assert rb[::-3]["x"].tolist() == [70, 40, 10]
    assert rb[[]].shape == (0,)
    refuses(KeyError, r"no key 'y'; there are 'x', \('next', 'reward'\)", lambda: rb["y"])
    with pytest.raises(IndexError, match=r"mask of shape \[8\], got \[3\]"):
        rb[torch.ones(3, dtype=torch.bool)]
    keyed = sharded(4, shard_key="x")
    keyed.add(TensorDict({"x": torch.tensor(5)}, []))  # the other shards know of no rows
    assert keyed[[]].shape == keyed[1:1].shape == (0,)
    assert keyed[[]]["x"].dtype is torch.int64
    for wrong in (True, 1.5, torch.zeros(2, 2, dtype=torch.int64)):
        refuses(TypeError, "expected an index as an int, slice, mask, key", rb.__getitem__, wrong)


def test_include_info_works_as_in_one_buffer(sharded: Any) -> None:
    rb = sharded(2, batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    assert set(rb.sample(include_info=True).keys()) == {"index", "x"}
    for ask in (rb.sample, lambda **given: rb.sample_async(**given).result()):
        with pytest.warns(DeprecationWarning, match="include_info=False") as told:
            batch, info = ask(return_info=True, include_info=False)
        assert told[0].filename == __file__
        assert set(batch.keys()) == {"x"}
        assert torch.equal(batch["x"], info["index"])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("batch_size", 0, ValueError),
        ("batch_size", 1.5, ValueError),
        ("generator", 3, TypeError),
        ("on_loss", 3, TypeError),
    ],
)
def test_invalid_arguments_are_refused_before_shards_are_made(
    sharded: Any, name: str, value: Any, error: type[Exception]
) -> None:
    made = []

    def storage() -> LazyTensorStorage:
        made.append(None)
        return LazyTensorStorage(10)

    refuses(error, f"expected {name} as", sharded, 2, storage=storage, **{name: value})
    assert not made
    rb = sharded(2)
    if name != "batch_size":
        refuses(error, f"expected {name} as", rb.client, **{name: value})
    if name == "generator":
        refuses(error, f"expected {name} as", rb.set_rng, value)


ROWS = 12


def tracked() -> RoundRobinWriter:
    return RoundRobinWriter(track_generations=True)


def tracked_rows(first: int, count: int) -> TensorDict:
    x = torch.arange(first, first + count)
    deep = {"y": torch.zeros(count, 2)}
    return TensorDict({"x": x, "v": torch.full((count,), 10), "deep": deep}, [count])


def both(sharded: Any, single: Any, shards: int) -> tuple[Any, Any]:
    """Shards and one buffer of which each full round has the same rows under the same indices."""
    pair = (
        sharded(shards, ROWS // shards, writer=tracked),
        single(None, capacity=ROWS, writer=tracked()),
    )
    for buffer in pair:
        buffer.extend(tracked_rows(0, ROWS + 5))
    return pair


@pytest.mark.parametrize("shards", [1, 3])
def test_patches_match_a_single_buffer(sharded: Any, single: Any, shards: int) -> None:
    """Rows live, stale and never stored, the same several times, versions or none."""
    rb, one = both(sharded, single, shards)
    random = torch.Generator().manual_seed(shards)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    seen = set()
    for step in range(60):
        count = int(draw(0, 15))
        patch = {("deep", "y"): torch.rand(count, 2, generator=random)}
        if step % 2:
            patch["x"] = draw(100, 1000, count)
        given: dict[str, Any] = {"index": draw(-1, ROWS + 2, count)}
        given["generation"] = draw(-1, 3, count)
        if step % 3:
            version = draw(8, 14, count) if step % 3 == 1 else int(draw(8, 14))
            given.update(version_key="v", version=version, require_newer=step % 4 == 0)
        found, expected = (b.update_if_present(patch=patch, **given) for b in (rb, one))
        assert torch.equal(found.updated, expected.updated)
        assert (found.version_rejected is None) is (expected.version_rejected is None)
        seen.add("updated" if found.updated_count else "none")
        if found.version_rejected is not None:
            assert torch.equal(found.version_rejected, expected.version_rejected)
            seen.add("rejected" if found.version_rejected_count else "accepted")
        assert (rb[:] == one[:]).all()
        if step % 10 == 9:
            for buffer in (rb, one):
                buffer.extend(tracked_rows(step, 3))
    assert seen == {"updated", "none", "rejected", "accepted"}


def test_refused_patch_changes_nothing(sharded: Any) -> None:
    rb = sharded(2, writer=tracked, shard_key="x")
    where = {"index": torch.tensor([0, 1]), "generation": torch.tensor([0, 0])}
    with pytest.raises(RuntimeError, match="nothing is stored"):
        rb.update_if_present(patch={"v": torch.tensor([1, 1])}, **where)
    rb.extend(tracked_rows(0, 6))
    before = rb[:].clone()
    for error, match, change in [
        (KeyError, "no column 'z'", {"patch": {"z": torch.zeros(2)}}),
        (ValueError, "expected int64", {"patch": {"v": torch.zeros(2)}}),
        (ValueError, "expected int64", {"patch": {"v": torch.tensor([1])}}),
        (ValueError, "shard_key 'x'", {"patch": {"x": torch.tensor([1, 1])}}),
        (ValueError, "shard_key 'x'", {"version_key": "x", "version": 100}),
        (ValueError, "together", {"version_key": "v"}),
        (ValueError, "2 generations, got", {"generation": torch.tensor([0])}),
        (TypeError, "mapping", {"patch": 3}),
    ]:
        asked = {"patch": {("deep", "y"): torch.ones(2, 2)}, **where, **change}
        refuses(error, match, rb.update_if_present, **asked)
    assert (rb[:] == before).all()
    refuses(RuntimeError, "track_generations=True", sharded(2).update_if_present, patch={}, **where)


def test_rows_of_a_shard_that_was_restarted_are_stale(sharded: Any, tmp_path: Any) -> None:
    """It has them again, from its checkpoint; who has seen them before cannot know that."""
    rb = sharded(2, writer=tracked, checkpoint_dir=tmp_path, checkpoint_interval=0, on_loss=print)
    rb.extend(tracked_rows(0, 6))
    _, info = rb.sample(50, return_info=True)
    rb._members.shards[0].kill()
    asked = {"index": info["index"], "patch": {"v": torch.full((50,), 11)}}
    for _ in range(2):  # noticed by the patch itself, and after the restart
        found = rb.update_if_present(generation=info["index_generation"], **asked)
        assert torch.equal(found.updated, info["index"] % 2 == 1)
        rb._members.wait_for([0], float("inf"))
    _, info = rb.sample(50, return_info=True)
    asked["index"] = info["index"]
    assert rb.update_if_present(generation=info["index_generation"], **asked).updated.all()
    assert sorted(rb[:]["x"].tolist()) == list(range(6))


def test_stored_rows_may_look_other_than_those_that_were_given(sharded: Any) -> None:
    """As transforms have made them."""
    rb, other = (sharded(2, writer=tracked, transform_factory=t) for t in (Halved, None))
    for buffer in (rb, other):
        buffer.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    given = {"index": torch.arange(4), "generation": torch.zeros(4).long()}
    patch = {"half": torch.full((4,), 7.0)}
    assert rb.update_if_present(patch=patch, **given).updated.all()
    assert rb[:]["half"].tolist() == [7.0] * 4
    refuses(KeyError, "no column 'half'", other.update_if_present, patch=patch, **given)


def test_patch_fits_the_rows_that_another_handle_has_loaded(sharded: Any, tmp_path: Path) -> None:
    rb, saved = (sharded(2, writer=tracked) for _ in range(2))
    other, asked = rb.client(), {"index": torch.arange(2), "generation": torch.zeros(2).long()}
    rb.extend({"x": torch.zeros(2), "y": torch.zeros(2)})
    assert other.update_if_present(patch={"x": torch.ones(2)}, **asked).updated.all()
    saved.extend({"x": torch.zeros(2, dtype=torch.float64), "z": torch.zeros(2)})
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    refuses(
        ValueError, "expected float64", other.update_if_present, patch={"x": torch.ones(2)}, **asked
    )
    refuses(KeyError, "no column 'y'", other.update_if_present, patch={"y": torch.ones(2)}, **asked)
    patch = {"z": torch.ones(2), "x": torch.ones(2, dtype=torch.float64)}
    assert other.update_if_present(patch=patch, **asked).updated.all()
    assert rb[:]["z"].tolist() == rb[:]["x"].tolist() == [1.0, 1.0]


def test_patch_raises_the_error_of_on_loss(sharded: Any) -> None:
    def on_loss(loss: Any) -> None:
        raise KeyError("lost")

    rb = sharded(2, writer=tracked)
    rb.extend({"x": torch.zeros(2)})
    other, asked = rb.client(on_loss=on_loss), {"index": torch.tensor([0])}
    asked |= {"generation": torch.tensor([0]), "patch": {"x": torch.ones(1)}}
    assert other.update_if_present(**asked).updated.all()
    other._members.shards[1].kill()
    assert len(other) == 1
    refuses(KeyError, "lost", other.update_if_present, **asked)


def test_timeouts_that_are_too_long_for_threads_set_no_limit(sharded: Any) -> None:
    rb = sharded(2, batch_size=2)
    for timeout in (1e10, 1e300):
        assert rb.extend_async(torch.zeros(2)).result(timeout) is not None
        assert rb.sample_async().result(timeout).shape == rb.sample(timeout=timeout).shape


def held_back() -> Any:
    return NStep(3, gamma=1.0, when="write")


def stored(buffer: Any, index: Any) -> list[tuple[int, float]]:
    rows = buffer[index]
    pairs = zip(rows["x"].tolist(), rows["next", "reward"][:, 0].tolist(), strict=True)
    return sorted(pairs)


def test_flush_stores_held_back_rows_as_in_one_buffer(sharded: Any, single: Any) -> None:
    rb = sharded(3, transform_factory=held_back, shard_key="episode")
    one = single(None, transform=held_back())
    rows = episodes([4, 6, 5, 7])
    rows["next", "reward"] = rows["x"][:, None].float()
    rows["next", "done"][:] = False
    for buffer in (rb, one):
        for first in (0, 11):  # episodes that go on with the next batch
            buffer.extend(rows[first : first + 11])
    before = {x for x, _ in stored(rb, slice(None))}
    index = rb.flush()
    one.flush()
    assert stored(rb, slice(None)) == stored(one, slice(None))
    assert {x for x, _ in stored(rb, index)} == set(range(22)) - before > {20, 21}
    assert rb.flush().tolist() == []
    assert rb.stats()["write_count"] == 22


def lanes(storage_rows: int = 400) -> LazyTensorStorage:
    return LazyTensorStorage(storage_rows, lane_key="k")


def streams(sharded: Any, count: int) -> tuple[Any, Any]:
    """Shards and one buffer with the same streams, three steps each."""
    rb = sharded(count, storage=lanes, sampler=lambda: SliceSampler(slice_len=2), shard_key="k")
    one = ReplayBuffer(
        storage=lanes(), sampler=SliceSampler(slice_len=2), generator=torch.Generator()
    )
    return rb, one


def write_steps(buffers: Any, first: int) -> None:
    for step in range(first, first + 3):
        for buffer in buffers:
            buffer.extend(steps(list(range(5)), [100 * stream + step for stream in range(5)]))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("lane", [None, 3, [0, 2], torch.tensor([4])])
def test_streams_are_cut_as_in_one_buffer(
    sharded: Any, tmp_path: Path, shards: int, lane: Any
) -> None:
    """Those that they came interleaved with go on, also in another number of shards."""
    both = streams(sharded, shards)
    for buffer in both:
        buffer.cut(lane)  # nothing is stored: nothing happens
    write_steps(both, 0)
    for buffer in both:
        buffer.cut(lane)
    write_steps(both, 3)
    severed = range(5) if lane is None else torch.as_tensor(lane).reshape(-1).tolist()
    expected = {(100 * s + t, 100 * s + t + 1) for s in range(5) for t in range(5)}
    expected -= {(100 * stream + 2, 100 * stream + 3) for stream in severed}
    other, _ = streams(sharded, 4 - shards)
    both[0].dumps(tmp_path)
    other.loads(tmp_path)
    assert windows(both[0]) == windows(both[1]) == windows(other) == expected


def test_an_unknown_stream_is_refused_before_any_is_cut(sharded: Any) -> None:
    rb, one = streams(sharded, 3)
    write_steps((rb, one), 0)
    for buffer in (rb, one):
        refuses(IndexError, "stored rows, got", buffer.cut, [1, 77])
    write_steps((rb,), 3)
    assert (102, 103) in windows(rb)
    plain = sharded(2)
    plain.extend(torch.arange(4))
    refuses(IndexError, r"lanes in \[0, 1\)", plain.cut, 1)
    plain.cut(0)


def test_a_cut_waits_for_a_shard_that_has_died(sharded: Any, tmp_path: Path) -> None:
    """Its streams are in its checkpoint: they are not unknown."""
    rb = sharded(
        2,
        storage=lanes,
        sampler=lambda: SliceSampler(slice_len=2),
        shard_key="k",
        checkpoint_dir=tmp_path,
        checkpoint_interval=0,
        on_loss=print,
    )
    write_steps((rb,), 0)
    for shard in (0, 1):
        rb._members.shards[shard].kill()
        rb._members.died(shard, 0)
        rb.cut(list(range(5)))
    write_steps((rb,), 3)
    assert not {(100 * stream + 2, 100 * stream + 3) for stream in range(5)} & windows(rb)
    assert len(windows(rb)) == 20


def test_rows_before_transforms_have_the_same_layout_in_all_shards(
    sharded: Any, tmp_path: Path
) -> None:
    """Of every client, of shards that hold none yet, and after a load: what is agreed on is what
    writers give, not what shards store."""

    def rows(dtype: torch.dtype, count: int) -> TensorDict:
        return TensorDict({"x": torch.ones(count, dtype=dtype)}, [count])

    rb, other = (sharded(count, transform_factory=Halved) for count in (3, 2))
    rb.add(rows(torch.float32, 1)[0])
    for client in (rb, rb.client()):
        refuses(SchemaError, "expected float32", client.add, rows(torch.float64, 1)[0])
    assert rb.stats()["shards"] == [1, 0, 0]
    rb.dumps(tmp_path)
    other.extend(rows(torch.float64, 2))
    other.loads(tmp_path)
    for client in (other, other.client()):
        refuses(SchemaError, "expected float32", client.extend, rows(torch.float64, 2))
        client.extend(rows(torch.float32, 2))
    assert len(other) == 5
    assert other[:]["x"].dtype is torch.float32


@pytest.mark.parametrize(
    ("verb", "call", "stored"),
    [
        ("commit_load", lambda rb, path: rb.loads(path / "saved"), 18),
        ("freeze", lambda rb, path: rb.dumps(path / "other"), 9),
        ("thaw", lambda rb, path: rb.dumps(path / "other"), 9),
        ("empty", lambda rb, path: rb.empty(), 0),
        ("extend", lambda rb, path: rb.extend(torch.arange(6)), 15),
        ("attempt", lambda rb, path: rb.extend(torch.arange(6)), 15),
        ("attempt", lambda rb, path: rb.sample(6), 9),
    ],
)
def test_interrupted_call_has_taken_effect_in_all_shards(
    sharded: Any, tmp_path: Path, verb: str, call: Callable[[Any, Path], Any], stored: int
) -> None:
    """And afterwards writes find all the room of the rate limiter, and no shard delays them."""
    rb, saved = (sharded(3, rate_limiter=RateLimiter(1, 1, 30), timeout=1.0) for _ in range(2))
    saved.extend(torch.arange(18))
    saved.dumps(tmp_path / "saved")
    rb.extend(torch.arange(9))
    owner, name = rb._members.shards[1], "call"
    if verb == "attempt":
        owner, name = rb._tickets.keeper, verb
    method = getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        answer = method(*args)
        if verb in ("attempt", args[0]):
            signal.raise_signal(signal.SIGINT)
        return answer

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    setattr(owner, name, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(rb, tmp_path)
    finally:
        setattr(owner, name, method)
        signal.signal(signal.SIGINT, before)
    stats = rb.stats()
    assert len(rb) == stats["inserts"] == stored
    room = 31 - stats["inserts"] + stats["samples"]
    assert len(rb.extend(torch.arange(room), timeout=0)) == room


def test_interrupt_ends_the_wait_of_a_write_for_earlier_writes(sharded: Any) -> None:
    rb = sharded(2, rate_limiter=RateLimiter.queue(4), timeout=5.0)
    rb.extend(torch.arange(4))
    written = rb.extend_async(torch.arange(4, 6))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    try:
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rb.extend(torch.arange(6, 8), timeout=20.0)
        assert time.monotonic() - begun < 10
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    rb.sample(4)
    assert len(written.result(10)) == 2
    assert len(rb) == 6
