"""Checkpoints and states of all shards: one instant, all or nothing, any number of shards."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    Transform,
)
from replaykit.distributed import shard_saves
from replaykit.distributed.protocol import BarrierBusy, pack, unpack
from replaykit.distributed.requests import Reply
from replaykit.distributed.shard_config import ByKey, ShardRecipe
from replaykit.distributed.shard_server import ShardHolder
from replaykit.distributed.shards import LocalShard
from replaykit.distributed.write_queue import Barrier, KnownWrites, Stamp, missing_parts
from replaykit.errors import CheckpointError, SchemaError
from replaykit.sharding import ShardSilent
from tests.distributed.laws import (
    check_law,
    episodes,
    numbered,
    prioritized,
    running,
    steps,
    wait_until,
    windows,
)
from tests.support.refusals import refuses


def moved(how: str, rb: Any, folder: Path) -> Callable[[Any], None]:
    """Save a buffer into files, or as a state that travels; return what loads it."""
    if how == "files":
        rb.dumps(folder)
        return lambda other: other.loads(folder)
    state = unpack(pack(rb.state_dict()), own=True)
    return lambda other: other.load_state_dict(state)


@pytest.mark.parametrize("how", ["files", "state"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_saved_and_loaded_buffers_draw_equal_batches(
    sharded: Any, tmp_path: Path, how: str, prefetch: int
) -> None:
    """C10: rows, indices, priorities, the deal, the generator; what is written later is not in it,
    nor do two that take it over share anything."""

    def make(prefetch: int) -> Any:
        def sampler() -> Any:
            return PrioritizedSampler(alpha=0.8, beta=0.5)

        return sharded(3, 20, sampler=sampler, batch_size=16, prefetch=prefetch)

    rb, others = make(prefetch), [make(0), make(prefetch)]
    index = rb.extend(numbered(0, 75))[-50:]
    rb.update_priority(index, torch.rand(50, generator=torch.Generator().manual_seed(2)))
    rb.sample()
    load = moved(how, rb, tmp_path)
    expected = [rb.sample() for _ in range(3)]
    written = rb.extend(numbered(75, 4)).tolist()
    for other in others:
        load(other)
        for one in expected:
            two = other.sample()
            for key in ("x", "index", "priority_weight", "index_generation"):
                assert torch.equal(one[key], two[key])
        assert other.extend(numbered(75, 4)).tolist() == written
        assert torch.equal(rb[:]["x"], other[:]["x"])


def test_unfitting_state_changes_nothing(sharded: Any) -> None:
    def make(count: int = 3, **arguments: Any) -> Any:
        arguments.setdefault("sampler", lambda: PrioritizedSampler(alpha=0.8, beta=0.5))
        return sharded(count, 20, **arguments)

    rb = make()
    rb.extend(numbered(0, 9))
    state = rb.state_dict()
    for target, given, match in [
        (make(2), state, r"num_shards=2, got 3"),
        (make(shard_key="x"), state, "shard_key='x', got None"),
        (make(), {**state, "shards": [*state["shards"][:2], {}]}, "missing"),
        (make(), {**state, "shards": state["shards"][:2]}, "states of 3 shards, got 2"),
        (make(), {**state, "shards": 5}, "expected"),
        (make(), {"shards": []}, "got nothing"),
        (make(), 5, "a mapping, got 5"),
        (make(), {**state, "dealt": -1}, "expected"),
        (make(), {**state, "dealt": 1.0}, "expected"),
        (make(), {**state, "generator": 3}, "expected"),
        (make(), {**state, "generator": torch.zeros(3, dtype=torch.uint8)}, "expected"),
        (make(), {**state, "layout": {"kind": "no such class", "children": []}}, "class"),
        (make(sampler=RandomSampler), state, "ampler"),
    ]:
        target.extend(numbered(100, 4))
        refuses(ValueError, match, target.load_state_dict, given)
        assert sorted(target[:]["x"].tolist()) == [100, 101, 102, 103]
        target.extend(numbered(104, 1))
        assert all(shard.holder._loaded is None for shard in target._members.shards)


@pytest.mark.parametrize("how", ["files", "state"])
def test_a_batch_is_saved_with_all_its_rows_or_none(sharded: Any, tmp_path: Path, how: str) -> None:
    """Threads write batches over all shards while saves go on."""
    rb, stop, written, loads = sharded(3, 300_000), threading.Event(), [0, 0, 0], []

    def write(which: int) -> None:
        client = rb.client()
        while not stop.is_set():
            batch = which + 10 * written[which]
            client.extend(TensorDict({"x": torch.full((8,), batch)}, [8]))
            written[which] += 1

    with running(*(functools.partial(write, which) for which in range(3))) as failed:
        try:
            for number in range(6):
                before = sum(written)
                loads.append(moved(how, rb, tmp_path / str(number)))
                # So that the next save has more.
                wait_until(lambda before=before: sum(written) != before or failed)
        finally:
            stop.set()
    sizes = []
    for load in loads:
        other = sharded(3, 300_000)
        load(other)
        if len(other):
            found, size = np.unique(other[:]["x"].numpy(), return_counts=True)
            assert (size == 8).all()
            for which in range(3):  # and of each writer all until one
                mine = found[found % 10 == which] // 10
                assert mine.tolist() == list(range(len(mine)))
        sizes.append(len(other))
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_loading_deals_rows_to_another_number_of_shards(
    sharded: Any, tmp_path: Path, shards: int
) -> None:
    """In the order of their age, with their priorities; draws are of the same law."""

    rb = sharded(3, 10, sampler=prioritized)
    other = sharded(shards, 40, sampler=prioritized)
    rb.extend(numbered(0, 41))
    p = torch.rand(30, generator=torch.Generator().manual_seed(4)) + 0.1
    rb.update_priority(torch.arange(30), p)
    rb.dumps(tmp_path)
    other.extend(numbered(500, 7))
    other.loads(tmp_path)
    kept, raw = rb[:]["x"], np.zeros(41)
    raw[kept.numpy()] = p.numpy()
    found = other[torch.arange(30)]["x"]
    assert sorted(found.tolist()) == sorted(kept.tolist())
    assert found.tolist() == sorted(found.tolist())
    assert other.stats()["shards"] == [len(range(s, 30, shards)) for s in range(shards)]
    check_law(other, 20_000, 2000, raw)
    assert other.extend(numbered(41, 1)).tolist() == [30]
    assert float(other.sample(1)["priority_weight"]) <= 1


@pytest.mark.parametrize("shards", [2, 5])
def test_episodes_stay_whole_in_other_numbers_of_shards(
    sharded: Any, tmp_path: Path, shards: int
) -> None:
    """The windows are those that were there, and as likely."""
    lengths, length = [6, 3, 9, 4, 7, 5, 8, 2], 3

    def sampler() -> Any:
        return PrioritizedSliceSampler(alpha=1.0, beta=0.0, slice_len=length)

    rb = sharded(3, sampler=sampler, shard_key="episode")
    rows = episodes(lengths)
    p = torch.rand(len(rows), generator=torch.Generator().manual_seed(6)) + 0.1
    for first in range(0, len(rows), 5):
        rb.update_priority(rb.extend(rows[first : first + 5]), p[first : first + 5])
    rb.dumps(tmp_path)
    other = sharded(shards, sampler=sampler, shard_key="episode")
    other.loads(tmp_path)
    assert len(other) == len(rows)
    begin = np.cumsum([0, *lengths[:-1]])
    v = np.zeros(len(rows))
    for first, size in zip(begin, lengths, strict=True):
        v[first : first + max(0, size - 2)] = p.numpy()[first : first + max(0, size - 2)]
    check_law(other, 30_000, 3000, v)


def test_no_window_goes_over_a_seam(sharded: Any, tmp_path: Path) -> None:
    """Between open streams of shards that become one, and before what is written next: without ids
    the only thing between them is the cut."""

    def make(count: int) -> Any:
        return sharded(count, sampler=lambda: SliceSampler(slice_len=2, traj_key=()), shard_key="k")

    home = ByKey(4, "k").route({("k",): torch.arange(50)}, 50, []).tolist()
    rows = steps([home.index(shard) for shard in range(4) for _ in range(2)], list(range(8)))
    rb, other = make(4), make(1)
    rb.extend(rows)
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    other.extend(rows[:2])
    assert windows(other) == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_loading_warns_of_rows_that_do_not_fit(sharded: Any, tmp_path: Path) -> None:
    rb, other = sharded(3, 20), sharded(2, 12)
    rb.extend(numbered(0, 60))
    rb.dumps(tmp_path)
    with pytest.warns(UserWarning, match="36 of 60 rows do not fit into 2 shards"):
        other.loads(tmp_path)
    assert sorted(other[:]["x"].tolist()) == list(range(36, 60))


@pytest.mark.parametrize("damage", ["manifest", "shard", "gone", "none", "sampler"])
def test_a_damaged_checkpoint_changes_nothing(sharded: Any, tmp_path: Path, damage: str) -> None:
    rb = sharded(3)
    rb.extend(numbered(0, 30))
    rb.dumps(tmp_path / "saved")
    shards = next((tmp_path / "saved" / "shards").iterdir())
    if damage == "manifest":
        file = tmp_path / "saved" / "manifest.json"
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "shard":
        file = max((shards / "00001").iterdir(), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(bytes(content))
    elif damage == "gone":
        shutil.rmtree(shards / "00002")
    elif damage == "none":
        shutil.rmtree(tmp_path / "saved")
    for count in (2, 3):
        if damage == "sampler":  # that of the file is of another kind
            other = sharded(count, sampler=prioritized)
        else:
            other = sharded(count)
        other.extend(numbered(100, 6))
        error = ValueError if damage == "sampler" else (CheckpointError, FileNotFoundError)
        refuses(error, "sampler" if damage == "sampler" else ".", other.loads, tmp_path / "saved")
        assert sorted(other[:]["x"].tolist()) == list(range(100, 106))
        other.extend(numbered(106, 1))


def test_a_save_that_fails_leaves_the_one_before(sharded: Any, tmp_path: Path) -> None:
    rb = sharded(3, on_loss=lambda loss: None)
    rb.extend(numbered(0, 9))
    rb.dumps(tmp_path)
    rb.extend(numbered(9, 9))
    holder = rb._members.shards[2].holder

    def fails(path: Any, base: Any) -> Any:
        raise OSError("no room")

    holder._snapshot, taken = fails, holder._snapshot
    refuses(OSError, "no room", rb.dumps, tmp_path)
    assert len(list((tmp_path / "shards").iterdir())) == 1
    other = sharded(3)
    other.loads(tmp_path)
    assert sorted(other[:]["x"].tolist()) == list(range(9))
    rb.extend(numbered(18, 9))  # nobody waits any more
    holder._snapshot = taken
    rb.dumps(tmp_path)
    assert len(list((tmp_path / "shards").iterdir())) == 1
    other.loads(tmp_path)
    assert len(other) == 27


@pytest.mark.parametrize("files", ["torn", "whole"])
def test_a_shard_that_dies_while_it_writes_files_leaves_the_save_before(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """It has answered that it began; its successor, which is there when all are asked whether
    they are done, knows nothing of it."""
    rb = sharded(3, on_loss=lambda loss: None)
    rb.extend(numbered(0, 9))
    rb.dumps(tmp_path)
    before = list((tmp_path / "shards").iterdir())
    first, last = rb._members.shards[0], rb._members.shards[2]
    send = last.call

    def dies_meanwhile(verb: str, *args: Any) -> Any:
        if verb == "begin_save":
            manifest = Path(args[1]).parent / "00000" / "manifest.json"
            while not manifest.exists():
                time.sleep(0.001)
            if files == "torn":
                manifest.unlink()
            first.kill()
        return send(verb, *args)

    last.call = dies_meanwhile
    refuses(RuntimeError, "shard 0 has been restarted while all were saved", rb.dumps, tmp_path)
    last.call = send
    monkeypatch.setattr(shard_saves, "_DRAIN_S", 0.05)  # the rows that died with it do not come
    assert list((tmp_path / "shards").iterdir()) == before
    other = sharded(3)
    other.loads(tmp_path)
    assert sorted(other[:]["x"].tolist()) == list(range(9))
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    assert sorted(other[:]["x"].tolist()) == [x for x in range(9) if x % 3]


def test_full_disk_after_a_load_leaves_usable_shards(
    sharded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rb = sharded(2, checkpoint_dir=tmp_path / "own", checkpoint_interval=1000)
    saved = sharded(2)
    rb.extend({"x": torch.zeros(2, dtype=torch.float64)})
    saved.extend({"x": torch.ones(5)})
    saved.dumps(tmp_path / "saved")

    def fails(path: Any, base: Any) -> Any:
        raise OSError("no room")

    rb._members.shards[1].holder._snapshot = fails
    rb.loads(tmp_path / "saved")
    assert "no room" in caplog.text
    assert rb.extend({"x": torch.ones(3)}).tolist() == [5, 6, 7]
    assert rb[:]["x"].tolist() == [1.0] * 8


def test_handles_follow_a_load_of_rows_with_another_schema(sharded: Any, tmp_path: Path) -> None:
    """Also shards without rows refuse those that a handle with the old schema sends."""
    rb, saved = sharded(3), sharded(3)
    other, stale = rb.client(), rb.client()
    for handle in (rb, other, stale):
        handle.extend({"x": torch.zeros(2, dtype=torch.float64)})
    saved.extend({"x": torch.ones(1)})
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    refuses(SchemaError, "expected float32", stale.extend, {"x": torch.zeros(6).double()})
    other.extend({"x": torch.ones(3)})
    stale.extend({"x": torch.ones(3)})
    assert rb[:]["x"].tolist() == [1.0] * 7


def test_restarted_shard_refuses_rows_of_the_schema_before_a_load(
    sharded: Any, tmp_path: Path
) -> None:
    rb, saved = sharded(2, on_loss=lambda loss: None), sharded(2)
    stale = rb.client(on_loss=lambda loss: None)
    stale.extend({"x": torch.zeros(3, dtype=torch.float64)})  # the next row is for shard 1
    saved.extend({"x": torch.ones(2)})
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    rb._members.shards[1].kill()
    for count in (1, 2):
        refuses(SchemaError, "expected float32", stale.extend, {"x": torch.zeros(count).double()})
    stale.add({"x": torch.ones(())})
    assert rb[:]["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("first", ["loader", "stale"])
def test_handles_agree_on_a_schema_after_the_load_of_a_state_without_one(
    sharded: Any, tmp_path: Path, first: str
) -> None:
    rb = sharded(2)
    rb.dumps(tmp_path)
    stale = rb.client()
    stale.extend({"x": torch.zeros(2, dtype=torch.float64)})
    rb.loads(tmp_path)
    rows = {"loader": torch.ones(2), "stale": torch.ones(2, dtype=torch.float64)}
    handles = {"loader": rb, "stale": stale}
    handles.pop(first).extend({"x": rows[first][:1]})
    ((other, handle),) = handles.items()
    refuses(SchemaError, "expected float", handle.extend, {"x": rows[other]})
    assert len(rb) == 1
    handle.extend({"x": rows[first]})
    assert rb[:]["x"].tolist() == [1.0] * 3


def before_calls(monkeypatch: pytest.MonkeyPatch, act: Callable[[LocalShard, str], None]) -> None:
    """Call a function before each message to a shard that it has not sent itself."""
    call, inside = LocalShard.call, threading.local()

    def acting(shard: LocalShard, verb: str, *args: Any) -> Any:
        if not getattr(inside, "now", False):
            inside.now = True
            try:
                act(shard, verb)
            finally:
                inside.now = False
        return call(shard, verb, *args)

    monkeypatch.setattr(LocalShard, "call", acting)


def test_save_has_all_parts_of_a_write_that_was_sent_again_after_a_load(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb, asked = sharded(2), []
    stale = rb.client()
    stale.extend(numbered(0, 2))
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    saver = threading.Thread(target=rb.dumps, args=(tmp_path,))

    def act(shard: LocalShard, verb: str) -> None:
        if verb == "extend" and shard.shard == 1:
            asked.append(shard)
            if len(asked) == 2:
                saver.start()
                wait_until(lambda: shard.holder.barrier.frozen)

    before_calls(monkeypatch, act)
    stale.extend(numbered(2, 2))
    saver.join()
    rb.loads(tmp_path)
    assert sorted(rb[:]["x"].tolist()) in ([0, 1], [0, 1, 2, 3])


def test_save_has_the_schema_of_its_rows_if_others_are_loaded_meanwhile(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb, saved = sharded(2), sharded(2)
    ones = TensorDict({"x": torch.ones(2)}, [2])
    saved.extend(ones.double())
    other, state = rb.client(), saved.state_dict()
    rb.extend(ones)

    def act(shard: LocalShard, verb: str) -> None:
        if verb == "finish_save" and shard.shard == 0:
            other.load_state_dict(state)

    before_calls(monkeypatch, act)
    rb.dumps(tmp_path)
    monkeypatch.undo()
    rb.loads(tmp_path)
    rb.extend(ones)
    assert rb[:]["x"].tolist() == [1.0] * 4


def test_load_that_another_load_has_replaced_changes_nothing(
    sharded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb, wide, narrow = (sharded(2) for _ in range(3))
    ones = TensorDict({"x": torch.ones(2)}, [2])
    wide.extend(ones.double())
    narrow.extend(ones)
    other, state, wide_state = rb.client(), narrow.state_dict(), wide.state_dict()

    def act(shard: LocalShard, verb: str) -> None:
        if verb == "freeze" and shard.shard == 0:
            other.load_state_dict(state)

    before_calls(monkeypatch, act)
    refuses(RuntimeError, "prepared load", rb.load_state_dict, wide_state)
    monkeypatch.undo()
    rb.extend(ones)
    assert rb[:]["x"].tolist() == [1.0] * 4


def test_failed_load_keeps_the_rows_that_another_load_has_prepared(
    sharded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = sharded(2)
    rb.extend(numbered(0, 2))
    other, state = rb.client(), rb.state_dict()
    prepared, failed = threading.Event(), threading.Event()

    def load() -> None:
        other.load_state_dict(state)

    def act(shard: LocalShard, verb: str) -> None:
        if verb == "freeze" and shard.shard == 0:
            if threading.current_thread() is threading.main_thread():
                loader.start()
                assert prepared.wait(10)
            else:
                prepared.set()
                assert failed.wait(10)

    before_calls(monkeypatch, act)
    errors: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda found: errors.append(found.exc_value))
    loader = threading.Thread(target=load)
    refuses(RuntimeError, "prepared load", rb.load_state_dict, state)
    failed.set()
    loader.join()
    assert not errors


def test_load_whose_repetition_fails_says_that_others_have_loaded(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = sharded(2, on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    rb.dumps(tmp_path)
    deadly = ["prepare_load", "commit_load"]

    def act(shard: LocalShard, verb: str) -> None:
        if shard.shard == 1 and deadly and verb == deadly[-1]:
            deadly.pop()
            shard.kill()

    before_calls(monkeypatch, act)
    refuses(RuntimeError, "shard 1 died .*the other shards have loaded", rb.loads, tmp_path)
    rb.loads(tmp_path)
    assert len(rb) == 4


def test_save_that_finds_the_first_shard_silent_delays_no_writes(
    sharded: Any, tmp_path: Path
) -> None:
    rb = sharded(2, timeout=0.5)
    shard = rb._members.shards[0]
    send = shard.call

    def late(verb: str, *args: Any) -> Any:
        reply = send(verb, *args)
        return Reply.done(error=ShardSilent("too late")) if verb == "freeze" else reply

    shard.call = late
    refuses(ShardSilent, "too late", rb.dumps, tmp_path)
    assert rb.extend(numbered(0, 4)).tolist() == [0, 1, 2, 3]


def test_a_write_that_was_lost_is_waited_for_once(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first save after its shard died; later ones hold nobody for it."""
    monkeypatch.setattr(shard_saves, "_DRAIN_S", 0.02)
    rb = sharded(3, on_loss=lambda loss: None)
    rb.extend(numbered(0, 9))
    rb._members.shards[0].kill()
    sent: list[str] = []
    send, deadly = rb._members.send, ""

    def noted(shard: int, verb: str, *args: Any) -> Any:
        sent.append(verb)
        if verb == deadly:
            rb._members.shards[shard].kill()
        return send(shard, verb, *args)

    monkeypatch.setattr(rb._members, "send", noted)
    asked = []
    for _ in range(3):
        before = sent.count("has_all")
        rb.dumps(tmp_path)
        asked.append(sent.count("has_all") - before)
    assert asked[0] > 0
    assert asked[1:] == [0, 0]
    rb.extend(numbered(9, 9))
    rb._members.shards[0].kill()
    deadly = "has_all"
    refuses(RuntimeError, "died during a save", rb.dumps, tmp_path)


@pytest.mark.parametrize("way", ["files", "state"])
def test_load_is_repeated_once_if_a_shard_dies_in_its_last_step(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    rb = sharded(2, on_loss=lambda loss: None)
    rb.extend(numbered(0, 4))
    rb.dumps(tmp_path)
    state = rb.state_dict()
    load = (
        functools.partial(rb.loads, tmp_path)
        if way == "files"
        else functools.partial(rb.load_state_dict, state)
    )
    call, deaths = LocalShard.call, [1]

    def deadly(shard: LocalShard, verb: str, *args: Any) -> Any:
        if verb == "commit_load" and shard.shard == 1 and deaths[0]:
            deaths[0] -= 1
            shard.kill()
        return call(shard, verb, *args)

    monkeypatch.setattr(LocalShard, "call", deadly)
    rb.extend(numbered(4, 4))
    load()
    assert sorted(rb[:]["x"].tolist()) == [0, 1, 2, 3]
    deaths[0] = 2
    refuses(RuntimeError, "shard 1 died .*the other shards have loaded", load)
    load()
    assert len(rb) == 4


def test_a_shard_without_files_is_not_published(sharded: Any, tmp_path: Path) -> None:
    rb = sharded(2)
    rb.extend(numbered(0, 4))
    rb.dumps(tmp_path)
    shard = rb._members.shards[1]
    send = shard.call

    def loses_files(verb: str, *args: Any) -> Any:
        reply = send(verb, *args)
        if verb == "finish_save":
            (tmp_path / "shards" / args[0] / "00001" / "manifest.json").unlink(missing_ok=True)
        return reply

    shard.call = loses_files
    rb.extend(numbered(4, 4))
    refuses(CheckpointError, r"expected manifest\.json of a shard in .*00001", rb.dumps, tmp_path)
    other = sharded(2)
    other.loads(tmp_path)
    assert len(other) == 4


def test_concurrent_saves_wait_for_their_own_files(sharded: Any, tmp_path: Path) -> None:
    """One may freeze the shards as soon as the other has thawed them, files or not."""
    rb = sharded(1)
    rb.extend(numbered(0, 4))
    holder = rb._members.shards[0].holder
    for token in ("one", "two"):
        holder.freeze(token, 60)
        holder.begin_save(token, str(tmp_path / token))
        holder.thaw(token)
    for token in ("one", "two"):
        holder.finish_save(token)
        assert (tmp_path / token / "manifest.json").exists()
    refuses(RuntimeError, "restarted", holder.finish_save, "one")


def test_saves_to_one_place_follow_one_another(sharded: Any, tmp_path: Path) -> None:
    """C12: of two buffers that save at once one is there, whole; and a load meets one of them."""
    buffers = [sharded(2), sharded(3)]
    for number, rb in enumerate(buffers):
        rb.extend(numbered(100 * number, 30))
    buffers[0].dumps(tmp_path)
    other = sharded(2)

    def save(rb: Any) -> None:
        for _ in range(4):
            rb.dumps(tmp_path)

    with running(*(functools.partial(save, rb) for rb in buffers)):
        for _ in range(3):
            other.loads(tmp_path)
            found = sorted(other[:]["x"].tolist())
            assert found in (list(range(30)), list(range(100, 130)))
    assert len(list((tmp_path / "shards").iterdir())) == 1


def test_begun_write_passes_the_barrier() -> None:
    barriers = [Barrier(), Barrier()]
    begun, later = Stamp("a", 4, 0b11, 4), Stamp("b", 0, 0b11, 0)
    barriers[0].came(begun, None)
    found = {number: barrier.freeze("t", 60) for number, barrier in enumerate(barriers)}
    assert missing_parts(found) == {1: {("a", 4)}}
    assert not barriers[1].admits(begun)
    barriers[1].let_through("t", {("a", 4)})
    assert barriers[1].admits(begun)
    assert not barriers[1].admits(later)
    assert not barriers[0].admits(later)
    assert barriers[0].admits(begun)  # which gets the answer that it got
    assert not barriers[1].has_all({("a", 4)})
    barriers[1].came(begun, None)
    assert barriers[1].has_all({("a", 4)})
    with pytest.raises(BarrierBusy):
        barriers[0].freeze("other", 60)
    barriers[0].thaw("other")
    assert barriers[0].frozen
    barriers[0].thaw("t")
    assert barriers[0].admits(later)
    barriers[0].freeze("t", 0.0)
    assert barriers[0].admits(later)  # writes wait no longer than that
    refuses(RuntimeError, "held back for too long", barriers[0].check, "t")


class NoThree(Transform):
    """Refuses what only a shard can see."""

    def inv(self, data: Any) -> Any:
        if bool((data["x"] == 3).any()):
            raise ValueError("no three")
        return data


def test_no_save_waits_for_a_part_that_was_refused(
    sharded: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rb, other = (sharded(count, transform_factory=NoThree) for count in (2, 3))
    rb.extend(numbered(10, 2))
    refuses(ValueError, "no three", rb.extend, numbered(0, 4))
    begun = time.monotonic()
    rb.dumps(tmp_path)
    assert time.monotonic() - begun < 4  # who waits for it waits 5 s, and warns
    assert not recwarn.list
    other.loads(tmp_path)
    assert sorted(other["x"].tolist()) == [0, 2, 10, 11]


def test_writes_that_are_long_done_are_forgotten() -> None:
    """What is kept of a client is what it has under way, also while shards hear of it unevenly."""
    one, two = Barrier(), Barrier()
    for number in range(100):
        one.came(Stamp("a", number, 0b1 if number else 0b11, max(0, number - 1)), None)
    two.came(Stamp("a", 0, 0b11, 0), None)
    assert len(one.state()) == 2
    assert missing_parts({0: one.freeze("t", 1), 1: two.freeze("t", 1)}) == {}
    assert (
        missing_parts({0: KnownWrites({}, {"a": 5}), 1: KnownWrites({("a", 3): 0b11}, {"a": 3})})
        == {}
    )


def test_departed_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles may come and go without end; what each shard keeps of them does not grow. Nobody
    is asked for the parts of a write that others may have forgotten."""
    now = 0.0
    monkeypatch.setattr("replaykit.distributed.shard_server.time.monotonic", lambda: now)
    one, two = Barrier(within=10.0), Barrier(within=10.0)
    for number in range(1000):
        now += 1.0
        stamp = Stamp(f"client {number}", 0, 0b11, 0)
        one.came(stamp, torch.arange(5))
        if number == 900:
            two.came(stamp, None)
    kept = one.state()
    assert len(kept) == len(one._done) == len(one._heard) == 101  # of 4 * 10 + 60 seconds
    assert one.answer(Stamp("client 900", 0, 0b11, 0)) is not None
    missing = missing_parts({0: one.freeze("t", 1), 1: two.freeze("t", 1)})
    assert missing == {1: {(f"client {number}", 0) for number in range(950, 1000)}}
    again = Barrier(within=10.0)
    again.load(kept)
    now += 101.0
    again.came(Stamp("new", 0, 1, 0), None)
    again.came(Stamp("new", 1, 1, 1), None)
    assert len(again.state()) == 98


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("save", "../../elsewhere"),
        ("num_shards", 3),
        ("rows", [4]),
        ("dealt", -1),
        ("generator", 3),
        ("layout", 3),
        ("layout", {"kind": "no such class", "children": []}),
        ("pace", {"inserted": -1}),
    ],
)
def test_a_crafted_head_is_refused_by_name_and_changes_nothing(
    entry: str, value: Any, sharded: Any, forge: Any, tmp_path: Path
):
    rb = sharded(2)
    rb.extend(numbered(0, 8))
    rb.dumps(tmp_path)

    def change(manifest: dict[str, Any]) -> None:
        assert entry in {*manifest["parts"]["sharded"], "pace"}
        manifest["parts"]["sharded"][entry] = value

    forge(tmp_path, change)
    other = sharded(2)
    other.extend(numbered(100, 6))
    before = other.generator.get_state()
    refuses(CheckpointError, r"manifest\.json", other.loads, tmp_path)
    assert sorted(other[:]["x"].tolist()) == list(range(100, 106))
    assert torch.equal(other.generator.get_state(), before)
    other.extend(numbered(106, 2))


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"before": 1.5, "writes": []},
        {"before": 0, "writes": [["client", 1, 1]]},
        {"before": 2**63, "writes": []},
        {"before": 0, "writes": [[1, 1, 1, None]]},
        {"before": 0},
    ],
)
def test_shard_with_invalid_checkpoint_starts_empty_and_reports_it(
    said: Any, forge: Any, recipe: Callable[..., ShardRecipe]
):
    shard = ShardHolder(recipe(), 0)
    shard.buffer.extend(numbered(0, 3))
    shard.save_own()
    again = ShardHolder(recipe(), 0, 1)
    assert again.buffer[:]["x"].tolist() == [0, 1, 2]

    def change(manifest: dict[str, Any]) -> None:
        if said is None:
            del manifest["sharding"]
        else:
            manifest["sharding"] = said

    forge(recipe().folder(0), change)
    with pytest.warns(UserWarning, match=r"shard 0 starts empty: .*manifest\.json"):
        empty = ShardHolder(recipe(), 0, 1)
    assert len(empty.buffer) == 0
    for one in (shard, again, empty):
        one.close()


def test_cut_remains_after_its_row_moves_to_another_shard(sharded: Any, tmp_path: Path) -> None:
    """What was severed with it stays severed, although its neighbour is gone."""

    def make(count: int) -> Any:
        return sharded(count, sampler=lambda: SliceSampler(slice_len=2, traj_key=()), shard_key="k")

    home = ByKey(2, "k").route({("k",): torch.arange(50)}, 50, []).tolist()
    here, elsewhere = home.index(0), home.index(1)
    rb = make(1)
    rb.extend(steps([here, here, elsewhere], [0, 1, 100]))
    rb.cut()
    rb.extend(steps([here, here], [2, 3]))
    rb.dumps(tmp_path)
    other = make(2)
    other.loads(tmp_path)
    assert windows(other) == {(0, 1), (2, 3)}
