"""Queues of one process and between processes: each row is taken once, and none is lost."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    RateLimiter,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.errors import Closed, NotEnoughData
from tests import effort
from tests.support.refusals import refuses


@tensorclass
class Row:
    position: torch.Tensor


LENGTH = 4
KINDS = [
    "ring", "grid", "streams", "once streams", "shared ring", "shared streams",
    "shared once streams", "recovered ring", "recovered streams",
    "recovered once streams",
]  # fmt: skip


def make(kind: str, folder: Path | None = None, lanes: Any = None) -> ReplayBuffer:
    shared, streams = "shared" in kind, "streams" in kind
    options: dict[str, Any] = {"lane_key": "env"} if streams else {}
    if kind == "grid":
        options["ndim"] = 2
    size, kept = 3 * LENGTH, "recovered" in kind
    if "once" in kind:
        options |= {"dedup_next": ["x"], "on_mismatch": "dense"}
    storage: Any = LazyTensorStorage(size, **options)
    if kept:
        storage = LazyMemmapStorage(size, scratch_dir=folder, recover=True, **options)
    writer = LaneWriter(LENGTH, lanes, track_generations=True) if streams else None
    return ReplayBuffer(storage=storage, writer=writer, shared=shared)


def check_copies(rb: ReplayBuffer, kind: str, folder: Path) -> None:
    """Check saves of one program, which reuse parts of files, and other copies of the rows."""
    if not len(rb):
        return
    kind = kind.removeprefix("recovered ").removeprefix("shared ")
    copies = [make(kind) for _ in range(3)]
    rb.dumps(folder / "checked")
    copies[0].loads(folder / "checked")
    copies[1].loads(folder / "checked", mmap=True)
    copies[2].load_state_dict(rb.state_dict())
    copies.append(copy.deepcopy(copies[1]))
    if "streams" in kind:
        copies[0].resize(20)
    for found in copies:
        assert (found[:] == rb[:]).all()
        if kind == "once streams":
            found.extend(rows([0, 1, 2], -5, 2))
            assert (found[:]["next", "x"] == found[:]["x"] + 1).all()


def rows(lanes: list[int], t: int, count: int = 1) -> TensorDict:
    env = torch.tensor(lanes).repeat_interleave(count)
    x = torch.arange(t, t + count).repeat(len(lanes))
    done = torch.zeros(len(env), 1, dtype=torch.bool)
    return TensorDict({"env": env, "x": x, "next": {"x": x + 1, "done": done}}, [len(env)])


@pytest.mark.acceptance("S3", "C17")
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_match_queues(kind: str, tmp_path: Path) -> None:
    rng, rb = np.random.default_rng(len(kind)), make(kind, tmp_path / "rows")
    all_lanes = list(range(3)) if rb.storage.lane_key or kind == "grid" else [0]
    length = LENGTH if len(all_lanes) > 1 else 3 * LENGTH
    model: dict[int, deque[int]] = defaultdict(deque)
    stored: dict[int, int] = defaultdict(int)  # rows since the start, of each lane
    for step in range(effort.cases(150)):
        if step % 5 == 0:
            check_copies(rb, kind, tmp_path)
        chosen = all_lanes
        if rb.storage.lane_key:
            chosen = sorted(rng.choice(3, int(rng.integers(1, 4)), replace=False).tolist())
        count, action = int(rng.integers(1, 3)), rng.random()
        if action < 0.6:
            data = rows(chosen, 10 * step, count)
            data = data.reshape(len(chosen), count) if kind == "grid" else data
            fits = all(len(model[lane]) + count <= length for lane in chosen)
            if action < 0.3 and not fits:
                with pytest.raises(TimeoutError, match="room for all rows"):
                    rb.extend(data, overwrite=False, timeout=0)
                continue
            rb.extend(data, overwrite=action >= 0.3)
            for lane in chosen:
                model[lane].extend(range(10 * step, 10 * step + count))
                stored[lane] += count
                while len(model[lane]) > length:
                    model[lane].popleft()
        elif action < 0.95:
            rng.shuffle(chosen)
            if any(len(model[lane]) < count for lane in chosen):
                with pytest.raises((NotEnoughData, IndexError)):
                    rb.take(count, chosen)
                continue
            wanted = [[model[lane].popleft() for _ in range(count)] for lane in chosen]
            taken = rb.take(count, chosen)
            assert taken["x"].tolist() == wanted
            assert (taken["next", "x"] == taken["x"] + 1).all()
        elif action < 0.97 and "recovered" not in kind:
            rb.dumps(tmp_path / "saved")
            rb = make(kind)
            rb.loads(tmp_path / "saved")
            rb.load_state_dict(rb.state_dict())
            rb = rb if rb.shared else copy.deepcopy(rb)
        elif action < 0.99 and "recovered" in kind:
            del rb
            rb = make(kind, tmp_path / "rows")
        elif action < 0.98 and kind in ("ring", "grid"):
            rb.resize(5 * len(all_lanes))
            rb.resize(length * len(all_lanes))
            for lane in all_lanes:
                kept = min(stored[lane], 5)
                while len(model[lane]) > kept:
                    model[lane].popleft()
    if len({len(model[lane]) for lane in all_lanes}) == 1 and model[0]:
        assert rb.drain()["x"].tolist() == [list(model[lane]) for lane in all_lanes]


@pytest.mark.acceptance("S4", "F11")
def test_waits_end_with_room_with_an_empty_buffer_and_with_close() -> None:
    rb = make("ring")
    rb.extend(rows([0], 0, 12))
    done: list[Any] = []

    def put() -> None:
        try:
            done.append(len(rb.extend(rows([0], 12, 2), overwrite=False, timeout=60)))
        except Closed as error:
            done.append(error)

    for release in (lambda: rb.take(2), rb.empty, rb.close, rb.shutdown):
        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(0.03)
        assert thread.is_alive()
        release()
        thread.join(20)
        rb.reopen()
        rb.extend(rows([0], 0, 12))
    assert done[:2] == [2, 2]
    assert all(isinstance(one, Closed) for one in done[2:])


@pytest.mark.parametrize("transform", [None, lambda rows: rows])
def test_close_ends_the_wait_for_a_rate_limiter(transform: Any) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), rate_limiter=RateLimiter.queue(1), transform=transform
    )
    rb.extend(rows([0], 0), overwrite=False)
    threading.Timer(0.05, rb.close).start()
    for timeout in (60, 0):  # a call that waits, and a later one
        with pytest.raises(Closed):
            rb.extend(rows([0], 1), overwrite=False, timeout=timeout)
    assert len(rb) == 1


def test_wrong_requests_change_nothing() -> None:
    rb = make("ring")
    rb.extend(rows([0], 0, 12))
    for request, error, text in (
        (lambda: rb.take(13), ValueError, "at most 12 rows"),
        (lambda: rb.take(1, [1]), IndexError, r"lanes in \[0, 1\)"),
        (lambda: rb.take(1, [0, 0]), ValueError, "each lane once"),
        (lambda: rb.take(1, []), ValueError, "at least one stream"),
        (lambda: rb.extend(rows([0], 0, 13), overwrite=False), ValueError, "at most 12 rows of"),
    ):
        refuses(error, text, request)
    streams = make("streams")
    with pytest.raises(ValueError, match="at most 4 rows of a stream, got 5"):
        streams.extend(rows([0], 0, 5), overwrite=False)
    for parts in ({"transform": NStep(2, when="write")}, {"sampler": ConsumingSampler()}):
        other = ReplayBuffer(storage=LazyTensorStorage(4), **parts)
        refuses(ValueError, "overwrite=False expected", other.extend, rows([0], 0), overwrite=False)
    other.extend(rows([0], 0))
    for refused in (partial(other.take, 1), other.drain):
        refuses(ValueError, "a sampler that uses no rows up", refused)
    listed = ReplayBuffer(storage=ListStorage(4))
    for refused in (
        partial(listed.take, 1),
        listed.drain,
        partial(listed.extend, [0], overwrite=False),
    ):
        refuses(RuntimeError, r"a ListStorage .* take\(\), drain\(\) and overwrite=", refused)
    streams.extend(rows([0], 0))
    for buffer in rb, streams:  # an empty selection
        buffer.cut([])
        assert buffer.tag([], {"task": 1}) == 0
        assert buffer.episodes.reasons.tolist() == [0]
    assert streams.remove_oldest(1, lane=[]) == 0
    assert rb.take(12)["x"].tolist() == [list(range(12))]


@pytest.mark.parametrize("kind", ["tensor", "dict", "position", "class"])
def test_rows_of_any_structure_are_taken_and_drained(kind: str) -> None:
    x = torch.arange(4, dtype=torch.uint8)
    given: Any = {
        "tensor": x,
        "dict": {"position": x},
        "position": TensorDict({"position": x}, [4]),
        "class": Row(position=x, batch_size=[4]),
    }[kind]
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    rb.extend(given)
    for found, wanted in ((rb.take(1), [[0]]), (rb.drain(skip=1), [[2, 3]])):
        assert type(found) is type(given)
        if kind != "tensor":
            found = found.position if kind == "class" else found["position"]
        assert (found.tolist(), found.dtype) == (wanted, torch.uint8)


@pytest.mark.parametrize("writer", [None, LaneWriter(4)])
def test_streams_without_rows_left_are_left_out(writer: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, lane_key="env"), writer=writer)
    rb.extend(rows([0, 1], 0, 2))
    rb.take(2, [0])
    assert rb.take(1)["x"].tolist() == [[0]]
    assert rb.drain(aligned=True)["x"].tolist() == [[1]]


def test_rows_that_were_taken_from_a_ring_are_not_taken_again_from_streams() -> None:
    storage = LazyTensorStorage(12, lane_key="env")
    ring = ReplayBuffer(storage=storage)
    ring.extend(rows([0, 1], 0, 5))
    assert ring.take(3)["x"].tolist() == [[0, 1, 2]] * 2
    streams = ReplayBuffer(storage=storage, writer=LaneWriter(5))
    taken = [streams.take(1)["x"].tolist() for _ in range(2)]
    assert taken == [[[3]] * 2, [[4]] * 2]


@pytest.mark.parametrize("kind", ["", "recovered"])
def test_rows_that_were_taken_from_a_ring_stay_taken_after_a_move(
    kind: str, tmp_path: Path
) -> None:
    rb = make(f"{kind} streams", tmp_path)
    rb.set_writer(RoundRobinWriter())
    rb.extend(rows([1, 0], 0, 4))
    assert rb.take(3, [0])["x"].tolist() == [[0, 1, 2]]
    rb.set_writer(LaneWriter(4))
    assert rb.take(2, [1])["x"].tolist() == [[0, 1]]  # the last rows move to their slots
    assert rb.take(1)["x"].tolist() == [[3], [2]]


@pytest.mark.acceptance("C1")
def test_a_named_stream_without_rows_is_empty_and_an_unknown_one_an_error() -> None:
    rb, grid = make("streams", lanes=range(3)), make("grid")
    rb.extend(rows([0], 0, 2))
    grid.extend(rows([0, 1], 0, 2).reshape(2, 2))
    refuses(NotEnoughData, "rows, got 1", rb.take, 1, [0, 1])
    assert (rb.remove_oldest(1, lane=[0, 1]), rb.empty(lane=2), len(rb)) == (1, None, 1)
    refuses(IndexError, r"streams \[0, 1, 2\], got \[0, 9\]", rb.take, 1, [0, 9], timeout=60)
    refuses(IndexError, r"lanes in \[0, 2\), got \[9\]", grid.take, 1, [9], timeout=60)


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(10)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def _put(rb: ReplayBuffer, lanes: list[int], start: int, count: int) -> None:
    for t in range(start, start + count):
        rb.extend(rows(lanes, t), overwrite=False, timeout=60)


def _take(rb: ReplayBuffer, file: str) -> None:
    with open(file, "ab", buffering=0) as out:
        while (taken := rb.take(2, timeout=60)) is not None:
            out.write(taken["x"].numpy().tobytes())
        out.write(np.array([-1, -1], np.int64).tobytes())  # closed


@pytest.mark.acceptance("S4")
@needs_fork
@pytest.mark.parametrize("kind", ["shared ring", "shared streams"])
def test_one_process_puts_and_another_takes(
    kind: str, context: Any, processes: list[Any], tmp_path: Path
) -> None:
    lanes = [0, 1, 2] if "streams" in kind else [0]
    rb = make(kind, lanes=lanes)
    rb.extend(rows(lanes, 0))
    file = str(tmp_path / "taken")
    for target, args in ((_put, (rb, lanes, 1, 59)), (_take, (rb, file))):
        processes.append(context.Process(target=target, args=args))
        processes[-1].start()
    processes[0].join(60)
    until = time.monotonic() + 60
    width = len(lanes) * 2
    while os.path.getsize(file) < 8 * len(lanes) * 60 and time.monotonic() < until:
        time.sleep(0.01)
    rb.close()  # the other process waits for more rows
    processes[1].join(20)
    assert [process.exitcode for process in processes] == [0, 0]
    found = np.fromfile(file, np.int64)
    assert found[-2:].tolist() == [-1, -1]
    found = found[:-2].reshape(-1, len(lanes), 2)
    assert found.size // width == 30
    for lane in range(len(lanes)):
        assert found[:, lane].reshape(-1).tolist() == list(range(60))
    assert rb.take(1, timeout=60) is None
    with pytest.raises(Closed):
        rb.extend(rows(lanes, 60), overwrite=False)
    rb.reopen()
    rb.extend(rows(lanes, 60), overwrite=False)
    assert rb.take(1)["x"].tolist() == [[60]] * len(lanes)


@needs_fork
def test_kills_lose_no_row_and_repeat_none(
    context: Any, processes: list[Any], tmp_path: Path
) -> None:
    """A killed reader loses at most the rows that it had just taken."""
    rng, rb = random.Random(0), make("shared streams", lanes=[0, 1])
    rb.extend(rows([0, 1], 0))
    file, kills = str(tmp_path / "taken"), 6
    Path(file).touch()

    def newest() -> int:
        with rb.storage.lock:
            return int(rb.storage.ledger.next_position) // 2

    for _ in range(kills):
        work = ((_put, (rb, [0, 1], newest(), 10_000)), (_take, (rb, file)))
        processes[:] = [context.Process(target=target, args=args) for target, args in work]
        for process in processes:
            process.start()
        until = newest() + rng.randint(10, 60)
        while newest() < until:
            time.sleep(0.01)
        for process in rng.sample(processes, 2):
            os.kill(process.pid, signal.SIGKILL)
            process.join(20)
    put = newest()
    left = []
    with contextlib.suppress(NotEnoughData):
        while True:
            left.append(rb.take(1, timeout=0)["x"])
    found = [*torch.from_numpy(np.fromfile(file, np.int64).reshape(-1, 2, 2)), *left]
    for lane in torch.cat(found, 1).tolist():
        assert lane == sorted(set(lane))
        assert len(lane) >= put - 2 * kills
        assert lane[-1] == put - 1
    assert put > 50
