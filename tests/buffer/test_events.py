"""Functions that are called after writes, ends of episodes, evictions and samples."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Event,
    JointBatch,
    LazyTensorStorage,
    ListStorage,
    Metrics,
    PeriodicSave,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    wait_ready,
)
from replaykit.errors import Closed, SchemaError
from tests.support.refusals import refuses

KINDS = ("write", "episode_end", "evict", "sample")


def rows(*shape: int, seed: int = 0) -> TensorDict:
    """Rows, a fifth of which end an episode."""
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand(*shape, 1, generator=generator) < 0.2
    rank = torch.rand(*shape, generator=generator)
    env = torch.arange(rank.numel()).reshape(shape) % 2
    return TensorDict({"x": rank, "env": env, "next": {"done": done}}, shape)


def watched(rb: ReplayBuffer) -> list[Event]:
    seen: list[Event] = []
    for kind in KINDS:
        rb.on(kind, seen.append)
    return seen


STORAGES: dict[str, Any] = {
    "ring": (lambda: ReplayBuffer(storage=LazyTensorStorage(10)), ()),
    "lanes": (lambda: ReplayBuffer(storage=LazyTensorStorage(30, ndim=2)), (3,)),
    "streams": (lambda: ReplayBuffer(storage=LazyTensorStorage(10, lane_key="env")), ()),
    "best": (
        lambda: ReplayBuffer(
            storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="x")
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", STORAGES)
def test_events_count_the_rows_that_came_and_went(name: str) -> None:
    make, lanes = STORAGES[name]
    rb = make()
    seen = watched(rb)
    stored = 0
    for number, size in enumerate([3, 4, 1, 5, 10, 2]):
        data = rows(*lanes, size, seed=number)
        index = rb.extend(data)
        rb.sample(4)
        counts = Counter({event.kind: event.count for event in seen})
        kept = index if index.ndim > 1 else index[index >= 0]
        # A best row may displace another row of its batch, which then has no slot.
        assert counts["write"] == len(kept) or (name == "best" and counts["write"] > len(kept))
        assert counts["sample"] == 4
        assert stored + counts["write"] - counts["evict"] == len(rb)
        stored = len(rb)
        events = {event.kind: event for event in seen}
        if "write" in events:
            written = events["write"].index
            assert written is not None
            assert set(map(str, written.tolist())) == set(map(str, kept.tolist()))
        ends = int(data["next", "done"].sum()) if name != "best" else None
        if ends is not None:
            assert counts["episode_end"] == ends
        if "episode_end" in events:
            at = events["episode_end"].index
            assert at is not None
            flags = rb[:]["next", "done"][..., 0]
            assert flags[tuple(at.T.flip(0)) if lanes else at].all()
        seen.clear()
    rb.empty()
    assert seen == [Event("evict", stored)]
    if name == "ring":  # a batch beyond the capacity
        rb.extend(rows(4))
        seen.clear()
        rb.extend(rows(25))
        counts = Counter({event.kind: event.count for event in seen})
        assert (counts["write"], counts["evict"]) == (25, 19)


def test_loads_cause_no_events_but_their_rows_may_be_evicted(tmp_path: Path) -> None:
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    rb.extend(rows(9))
    rb.dumps(tmp_path)
    other.extend(rows(2))
    seen = watched(other)
    other.loads(tmp_path)
    assert not seen
    other.extend(rows(2))
    other.extend(rows(2))
    assert [event.count for event in seen if event.kind == "evict"] == [1, 2]
    seen.clear()
    other.set_storage(LazyTensorStorage(5))
    other.extend(rows(5))
    other.extend(rows(5))
    assert sum(event.count for event in seen if event.kind == "evict") == 5


def test_functions_are_called_without_a_lock_and_never_in_the_way(caplog: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    done = threading.Event()

    def reads_in_another_thread(event: Event) -> None:
        thread = threading.Thread(target=lambda: (len(rb.sample(3)), done.set()))
        thread.start()
        thread.join(10)
        raise OSError("a fault of an observer")

    rb.on("write", reads_in_another_thread)
    counted: list[Event] = []
    add = counted.append
    remove, _ = rb.on("write", add), rb.on("write", add)
    with caplog.at_level(logging.ERROR):
        assert rb.extend(rows(3)).tolist() == [0, 1, 2]
    assert done.is_set()
    assert "a fault of an observer" in caplog.text
    assert len(rb) == 3
    with pytest.raises(SchemaError):
        rb.extend(TensorDict({"y": torch.zeros(2)}, [2]))
    assert len(counted) == 2
    remove()
    remove()
    rb.add(rows(1)[0])
    rb.cut()
    rb.flush()
    assert len(counted) == 3


def test_ctrl_c_waits_until_all_functions_were_called() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    rb.extend(rows(3))
    for kind in KINDS:
        rb.on(kind, lambda event: signal.raise_signal(signal.SIGINT))
    seen = watched(rb)
    for call in (lambda: rb.extend(rows(3)), rb.sample):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert [(event.kind, event.count) for event in seen if event.kind != "episode_end"] == [
        ("evict", 2),
        ("write", 3),
        ("sample", 2),
    ]


@pytest.mark.parametrize("storage", [lambda: ListStorage(4), lambda: LazyTensorStorage(4)])
def test_rows_without_flags_have_no_ends(storage: Any) -> None:
    rb = ReplayBuffer(storage=storage(), batch_size=2)
    seen = watched(rb)
    rb.extend(torch.arange(3))
    assert [event.kind for event in seen] == ["write"]
    next(iter(rb))
    rb.next()
    assert [event.kind for event in seen[1:]] == ["sample", "sample"]
    assert pickle.loads(pickle.dumps(rb))._observers is None


def test_invalid_functions_metrics_and_periods_are_refused(tmp_path: Path) -> None:
    rb = ReplayBuffer()
    refuses(ValueError, "'episode_end'", rb.on, "add", print)
    refuses(TypeError, "a function", rb.on, "write", 3)
    refuses(TypeError, "state_dict", rb.on, "write", print, state=3)
    for name in ("window", "every"):
        refuses(ValueError, "at least 1", Metrics, **{name: 0})
    refuses(ValueError, "every", PeriodicSave, rb, tmp_path, every=0)
    refuses(ValueError, "min_seconds", PeriodicSave, rb, tmp_path, min_seconds=-1)


# -- metrics --------------------------------------------------------------------------------------


@pytest.mark.acceptance("S35", "C20")
def test_reports_add_up_and_keep_a_window() -> None:
    metrics = Metrics(window=3)
    metrics.report({"one": 1}, {"three": [3, 3], "histogram:ones": [1] * 5})
    metrics.report({"one": 1})
    metrics.report({"one": 1})
    values, windows = metrics.get_report(["one", "three", "histogram:ones", "unknown"])
    assert values == {
        "one": 1,
        "three": 3,
        "histogram:ones": 1,
        "one/cumulative": 3,
        "three/cumulative": 6,
    }
    assert windows == {"one": [1, 1, 1], "three": [3, 3], "histogram:ones": [1, 1, 1]}
    metrics.report({"one": 7})
    assert metrics.get_report(["one"]) == ({"one": 3, "one/cumulative": 10}, {"one": [1, 1, 7]})
    with metrics.timer("seconds"):
        time.sleep(0.01)
    assert 0.01 <= metrics.get_report()[0]["seconds"] < 10
    before = metrics.state_dict()
    refuses(ValueError, "could not convert", metrics.report, {"one": 1, "two": "x"})
    assert metrics.state_dict() == before


@pytest.mark.acceptance("S35", "F62")
@pytest.mark.parametrize("dictionary", [False, True])
def test_metrics_of_a_buffer_survive_its_checkpoint(dictionary: bool, tmp_path: Path) -> None:
    logged: list[Any] = []
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(2))
    metrics = Metrics(every=10, log=logged.append).attach(rb)
    fresh = Metrics().attach(other)
    assert fresh.get_report() == ({}, {})
    for number in range(10):
        done = torch.tensor([[number == 6]])
        rb.extend(
            TensorDict({"next": {"done": done.expand(3, 1) & (torch.arange(3) == 2)[:, None]}}, [3])
        )
    values = metrics.get_report()[0]
    found = {kind: values.get(f"{kind}/cumulative") for kind in KINDS}
    assert found == {"write": 30, "episode_end": 1, "evict": 22, "sample": None}
    assert [one["write/cumulative"] for one in logged] == [12, 24]

    def load() -> None:
        if dictionary:
            other.load_state_dict(rb.state_dict())
        else:
            rb.dumps(tmp_path)
            other.loads(tmp_path)

    load()
    assert fresh.state_dict() == metrics.state_dict()
    plain = ReplayBuffer(storage=LazyTensorStorage(8))
    plain.load_state_dict(rb.state_dict())
    plain.extend(rows(1).select(("next", "done")))
    rb.load_state_dict(plain.state_dict())
    assert fresh.state_dict() == metrics.state_dict()
    broken = other.state_dict()
    broken["_observers"]["Metrics.0"]["sums"] = {"write": "many"}
    refuses(ValueError, r"sums\.write|sums", other.load_state_dict, broken)
    assert fresh.state_dict() == metrics.state_dict()
    metrics.report({"loss": float("nan"), "norm": float("inf")})
    load()
    assert str(fresh.get_report(["loss", "norm"])[1]) == "{'loss': [nan], 'norm': [inf]}"


# -- periodic saves -------------------------------------------------------------------------------


@pytest.mark.acceptance("S36", "C21", "F60")
def test_saves_wait_for_rows_and_seconds(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    with PeriodicSave(rb, tmp_path / "at", every=10, min_seconds=60) as saves:
        for seconds, count, made in [
            (59, 20, 0),
            (60, 1, 1),
            (119, 50, 1),
            (121, 1, 2),
            (999, 9, 2),
        ]:
            now[0] = seconds
            rb.extend(rows(count))
            assert saves.wait()
            assert saves.count == made
    rb.extend(rows(50))
    assert saves.wait()
    assert saves.count == 2
    other = ReplayBuffer(storage=LazyTensorStorage(100))
    other.loads(tmp_path / "at")
    assert len(other) == 72
    refuses(FileNotFoundError, "nowhere", other.loads, tmp_path / "nowhere")


def test_a_failed_save_is_logged_and_tried_again(tmp_path: Path, caplog: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    path = tmp_path / "at"
    path.write_text("a file")
    with PeriodicSave(rb, path, every=5, min_seconds=0) as saves:
        rb.extend(rows(5))
        assert saves.wait()
        assert isinstance(saves.error, OSError)
        assert str(path) in caplog.text
        path.unlink()
        rb.extend(rows(4))
        assert saves.wait()
        assert saves.count == 0
        rb.extend(rows(1))
    assert (saves.count, saves.error) == (1, None)


def test_a_forked_process_calls_no_functions_of_its_parent(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(rows(1))
    with PeriodicSave(rb, tmp_path, every=5, min_seconds=0) as saves:
        process = os.fork()
        if not process:
            seen = watched(rb)
            rb.extend(rows(5, seed=2))
            saves.close()
            os._exit(sum(event.kind == "write" for event in seen) + 10 * saves.count)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert not list(tmp_path.iterdir())


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.acceptance("S36")
def test_a_wait_ends_with_the_first_rows_a_timeout_or_a_stop() -> None:
    def empty() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)

    def sources(rb: ReplayBuffer) -> list[Any]:
        mixture = ReplayBufferEnsemble(ReplayBufferEnsemble(rb), empty(), p=[1, 0], batch_size=2)
        return [rb, mixture, JointBatch({"a": rb})]

    for number in range(3):
        rb = empty()
        source = sources(rb)[number]
        assert not wait_ready(source, timeout=0.01)
        threading.Timer(0.05, rb.extend, [rows(3)]).start()
        assert wait_ready(source, timeout=60)
        stop = threading.Event()
        stop.set()
        with pytest.raises(Closed):
            wait_ready(sources(empty())[number], stop=stop)
        assert not any(rb._observers._functions.values())  # type: ignore[union-attr]
