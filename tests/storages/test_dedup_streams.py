"""Observations of interleaved streams stored once: every read is what keeping both copies gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
)

KEYS = [("observation",), ("pixels",), ("next", "observation"), ("next", "pixels"), ("env",)]
ENVS = [
    torch.arange(20),
    torch.arange(20, dtype=torch.uint8)[:, None] * 13,
    torch.arange(40, dtype=torch.float32).view(20, 2) / 8,
    (torch.arange(20) * 3000).to(torch.uint16),
]


class Streams:
    """Transitions of several environments of endless episodes, row by row in any order."""

    def __init__(self, transitions: Any, seed: int, envs: torch.Tensor, count: int) -> None:
        self.envs, self.count = envs, count
        self.lanes = [transitions(seed * 100 + place) for place in range(count)]
        self.random = np.random.default_rng(seed)

    def steps(self, count: int, *, turns: bool = False) -> TensorDict:
        """The next rows of environments by chance, or of all of them in turn."""
        which = np.arange(count) % self.count
        if not turns:
            which = self.random.integers(0, self.count, count)
        rows: dict[int, Any] = {
            lane: iter(self.lanes[lane].steps(int((which == lane).sum()))) for lane in set(which)
        }
        found = torch.stack([next(rows[lane]) for lane in which])
        return found.set("env", self.envs[torch.from_numpy(which)])

    def noise(self, count: int) -> TensorDict:
        """Rows that have nothing to do with each other."""
        which = torch.from_numpy(self.random.integers(0, self.count, count))
        return self.lanes[0].noise(count).set("env", self.envs[which])


class Twins:
    """Two buffers that get the same calls, the second of which stores observations once."""

    def __init__(self, slots: int, length: int | None, make: Any, *, core: bool = True) -> None:
        options = {"lane_key": "env"}
        self.core, self.length = core, length
        self.storages = [
            LazyTensorStorage(slots, **options),
            make(slots, **options, dedup_next=True, on_mismatch="dense"),
        ]
        self.buffers = [
            ReplayBuffer(
                storage=storage,
                writer=RoundRobinWriter(track_generations=True)
                if length is None
                else LaneWriter(length, track_generations=True),
            )
            for storage in self.storages
        ]

    def both(self, call: Callable[[ReplayBuffer], Any]) -> None:
        a, b = (call(buffer) for buffer in self.buffers)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)

    def check(self, same: Callable[[TensorDict, TensorDict], bool]) -> None:
        dense, once = self.buffers
        if dense.storage.schema is None:
            return
        assert len(dense) == len(once)
        if not len(dense):
            return
        if not self.core:
            once.storage.require().table.native = None
        assert same(dense[:], once[:])
        slots = torch.arange(len(dense)).flip(0)
        for contiguous in (False, True):
            assert same(*(b.storage.read(slots, contiguous=contiguous) for b in self.buffers))
        for index in (0, -1, slice(0, 2), slice(1, None, 2), [0, -1, 0]):
            assert same(dense[index], once[index])
        for key in KEYS:
            assert same(*(TensorDict({"x": b[key]}, []) for b in self.buffers))
        check_tables(once.storage)


def check_tables(storage: Any) -> None:
    """No entry is of two rows, and no other entry is in use."""
    columns, stored = storage.require(), storage.ledger.length
    references = columns.table.references[:stored]
    nexts = references[:, 1].tolist()
    assert 0 not in references
    for kind in (0, 1):
        assert len(set(references[:, kind].tolist())) == stored
    alone = set(nexts) - set(references[:, 0].tolist())
    assert storage.overflow_rows == len(alone)
    columns.table.core.derive(stored)
    assert storage.overflow_rows == len(alone)


def model_beside(storage: Any) -> int:
    """How many rows have nothing to follow: by one look at each row of a dense storage."""
    rows = storage[:]
    newest: dict[bytes, int] = {}
    follows: dict[int, int] = {}
    for slot in storage.ledger.write_order().tolist():
        env = rows["env"][slot].numpy().tobytes()
        if env in newest:
            follows[newest[env]] = slot
        newest[env] = slot
    count = 0
    for slot in range(len(storage)):
        after = follows.get(slot)
        count += after is None or any(
            rows["next", key][slot].numpy().tobytes() != rows[key][after].numpy().tobytes()
            for key in ("observation", "pixels")
        )
    return count


_KINDS = ["extend", "extend", "extend", "turns", "noise", "add", "edit", "column", "cell", "patch"]
_KINDS += ["empty", "load", "pickle", "write_at", "cut", "env", "saved"]


def _operations() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(
        st.tuples(st.sampled_from(_KINDS), st.integers(0, 17), st.integers(0, 3)), max_size=12
    )


def _apply(twins: Twins, stream: Streams, kind: str, size: int, which: int, folder: Path) -> None:
    stored = len(twins.storages[0])
    key = KEYS[which]
    if kind in ("extend", "noise", "turns"):
        rows = stream.noise(size + 1) if kind == "noise" else None
        rows = stream.steps(size + 1, turns=kind == "turns") if rows is None else rows
        twins.both(lambda b: b.extend(rows))
    elif kind == "add":
        row = stream.steps(1)[0]
        twins.both(lambda b: b.add(row))
    elif kind == "empty":
        twins.both(lambda b: b.empty())
    elif kind == "pickle":
        twins.buffers = [pickle.loads(pickle.dumps(buffer)) for buffer in twins.buffers]
        twins.storages = [buffer.storage for buffer in twins.buffers]
    elif not stored:
        return
    elif kind == "cut":
        twins.both(lambda b: b.cut())
    elif kind == "load":
        # Each takes what the other one has.
        states = [buffer.state_dict() for buffer in twins.buffers]
        for buffer, state in zip(twins.buffers, reversed(states), strict=True):
            buffer.load_state_dict(state)
    elif kind == "saved":
        names = ["dense", "once"]
        for buffer, name in zip(twins.buffers, names, strict=True):
            buffer.dumps(folder / name)
        for buffer, name in zip(twins.buffers, reversed(names), strict=True):
            buffer.loads(folder / name)
    elif kind == "write_at":
        if twins.length is not None:
            return  # another writer's rows are refused from then on
        slots = torch.tensor([size, which, size]) % stored
        rows = stream.noise(3)
        twins.both(lambda b: b.writer.write_at(slots, rows))
    elif kind == "edit":
        start = size % stored
        at: Any = slice(start, min(start + 3, stored))
        if which == 3:
            at = torch.tensor([start, 0, start])
        count = len(range(stored)[at]) if isinstance(at, slice) else 3
        # What streams there are stays, so that the writer has room.
        rows = stream.noise(count).set("env", twins.buffers[0]["env"][at])
        twins.both(lambda b: b.__setitem__(at, rows))
    elif kind == "column":
        values = stream.noise(stored)[key]
        twins.both(lambda b: b.set_(key, values))
    elif kind == "cell":
        values = stream.noise(1)[0][key]
        twins.both(lambda b: b.set_at_(key, values, size % stored))
    elif kind == "env":
        if twins.length is None:
            at = torch.tensor([size % stored, which % stored])
            values = stream.noise(2)["env"]
            twins.both(lambda b: b.set_at_("env", values, at))
    elif kind == "patch":
        slots = torch.tensor([size, which, 0]) % stored
        values = stream.noise(3)[key]
        generation = twins.storages[0].ledger.generations(slots)
        twins.both(
            lambda b: (
                b.update_if_present(index=slots, generation=generation, patch={key: values}).updated
            )
        )


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("length", [None, 3], ids=["ring", "by stream"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_calls_match_dense_storage(
    make: Any,
    core: bool,
    length: int | None,
    transitions: Any,
    same_rows: Any,
    tmp_path_factory: Any,
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 4))
    slots = data.draw(st.integers(1, 20)) if length is None else length * count + 1
    twins = Twins(slots, length, make, core=core)
    envs = data.draw(st.sampled_from(ENVS))
    stream = Streams(transitions, data.draw(st.integers(0, 1000)), envs, count)
    folder = tmp_path_factory.mktemp("saved")
    for kind, size, which in data.draw(_operations()):
        _apply(twins, stream, kind, size, which, folder)
        twins.check(same_rows)


@pytest.mark.parametrize("length", [None, 11], ids=["ring", "by stream"])
@pytest.mark.parametrize("envs", ENVS, ids=["int64", "uint8", "floats", "uint16"])
def test_overflow_rows_equal_rows_without_successor(
    length: int | None, envs: torch.Tensor, transitions: Any, same_rows: Any, tmp_path: Path
) -> None:
    twins, stream = Twins(50, length, LazyTensorStorage), Streams(transitions, 5, envs, 4)
    dense, once = twins.storages
    for turn, size in enumerate((1, 7, 20, 1, 1, 30, 120, 49, 50, 51, 2)):
        rows = stream.steps(size, turns=turn % 3 == 0)
        twins.both(lambda b, rows=rows: b.extend(rows))
        assert once.overflow_rows == model_beside(dense)
        twins.check(same_rows)
    # What links there are is part of a checkpoint, and found anew in one without them.
    for source, name in zip(twins.buffers, ("dense", "once"), strict=True):
        source.dumps(tmp_path / name)
    for name in ("dense", "once"):
        twins.buffers[1].loads(tmp_path / name)
        assert once.overflow_rows == model_beside(dense)
        again = pickle.loads(pickle.dumps(twins.buffers[1]))
        assert again.storage.overflow_rows == model_beside(dense)
    for _ in range(3):
        rows = stream.steps(9)
        twins.both(lambda b, rows=rows: b.extend(rows))
        assert once.overflow_rows == model_beside(dense)
        twins.check(same_rows)
    twins.both(lambda b: b.empty())
    assert once.overflow_rows == 0
    rows = stream.steps(3)
    twins.both(lambda b: b.extend(rows))
    assert once.overflow_rows == model_beside(dense)
    twins.check(same_rows)


# -- what is refused ------------------------------------------------------------------------------


def _steps(envs: list[int], values: list[float], after: list[float], **ends: Any) -> TensorDict:
    """Rows of environments, each with its observation and the next one."""
    x, then = (torch.tensor(part, dtype=torch.float32)[:, None] for part in (values, after))
    done = torch.tensor(ends.get("done", [False] * len(envs)))[:, None]
    following = {"observation": then, "done": done}
    rows = {"env": torch.tensor(envs), "observation": x, "next": following}
    return TensorDict(
        {**rows, **{k: torch.tensor(v) for k, v in ends.items() if k != "done"}}, [len(envs)]
    )


def _refused(rb: ReplayBuffer, rows: TensorDict, message: str) -> None:
    ledger = rb.storage.ledger
    before = rb[:].clone(), len(rb), ledger.cursor, ledger.next_position, rb.storage.overflow_rows
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            rb.extend(rows)
    after = rb[:], len(rb), ledger.cursor, ledger.next_position, rb.storage.overflow_rows
    assert before[1:] == after[1:]
    assert bool((before[0] == after[0]).all())


WRITERS = pytest.mark.parametrize("length", [None, 6], ids=["ring", "by stream"])


def _buffer(length: int | None, *rows: TensorDict, **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(18, dedup_next=True, lane_key="env", **options)
    rb = ReplayBuffer(storage=storage, writer=None if length is None else LaneWriter(length))
    for part in rows:
        rb.extend(part)
    return rb


@WRITERS
def test_rows_that_do_not_continue_their_stream_are_refused(length: int | None) -> None:
    wrong = _steps([1, 2, 1, 2], [0, 10, 1, 12], [1, 11, 2, 13])
    fresh = _buffer(length)
    with pytest.raises(ValueError, match=r"row 3: .* row 1, of the same stream, has .*next"):
        fresh.extend(wrong)
    assert not fresh.storage.initialized
    rb = _buffer(length, _steps([1, 2], [0, 10], [1, 11]))
    # Each stream goes on from its own newest row, whatever lies between.
    rb.extend(_steps([2, 2, 2], [11, 12, 13], [12, 13, 14]))
    _refused(rb, _steps([3, 2, 1], [7, 14, 2], [8, 15, 3]), "row 2: .*newest stored row of its")
    _refused(rb, _steps([1, 2, 1], [1, 14, 7], [2, 15, 3]), "row 2: .* row 0, of the same stream")
    rb.extend(_steps([3, 2, 1], [7, 14, 1], [8, 15, 2]))
    with pytest.raises(ValueError, match=r"row 0: .*newest stored row of its stream"):
        rb.add(_steps([3], [7], [9])[0])
    assert rb.storage.overflow_rows == 3
    rb.add(_steps([3], [8], [9])[0])
    assert rb.storage.overflow_rows == 3


@WRITERS
@pytest.mark.parametrize("ends", [{"done": [False, True]}, {"episode": [4, 5]}], ids=str)
def test_rows_after_an_end_may_start_at_any_value(length: int | None, ends: dict[str, Any]) -> None:
    # The second stream has come to its end, or begins anew.
    same = {name: [value[0]] * 2 for name, value in ends.items()}
    rb = _buffer(length, _steps([1, 2], [0, 10], [1, 11], **(ends if "done" in ends else same)))
    rb.extend(_steps([1, 2], [1, 50], [2, 51], **(same if "done" in ends else ends)))
    _refused(rb, _steps([1], [9], [9], **{n: v[:1] for n, v in same.items()}), "row 0")
    assert rb["next", "observation"].flatten().tolist() == [1, 11, 2, 51]


@WRITERS
def test_forgotten_expectations_accept_any_next_row_once(
    length: int | None, tmp_path: Path
) -> None:
    rb = _buffer(length, _steps([1, 2], [0, 10], [1, 11]))

    def other(value: float) -> None:
        """Rows that go on from nothing are taken once."""
        rb.extend(_steps([1, 2], [value, value], [value + 1, value + 1]))
        _refused(rb, _steps([2], [value], [value]), "row 0")
        _refused(rb, _steps([1], [value], [value]), "row 0")

    rb.cut()
    other(20)
    rb.cut(2)
    _refused(rb, _steps([1], [0], [0]), "row 0")
    rb.extend(_steps([2, 1], [30, 21], [31, 22]))
    _refused(rb, _steps([2], [0], [0]), "row 0")
    rb.set_(("next", "observation"), rb["next", "observation"] + 1)
    other(40)
    rb.load_state_dict(rb.state_dict())
    other(50)
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    other(60)
    rb["env"] = rb["env"].clone()
    other(70)
    if length is None:
        rb.writer.write_at(1, _steps([1], [80], [81])[0])
        other(90)
    rb.empty()
    other(100)
    # What has nothing to do with observations changes nothing.
    rb.set_(("next", "done"), torch.zeros(len(rb), 1, dtype=torch.bool))
    _refused(rb, _steps([1], [0], [0]), "row 0")


@WRITERS
@pytest.mark.parametrize("count", [18, 19, 50])
def test_batches_larger_than_the_ring_are_checked(length: int | None, count: int) -> None:
    rb = _buffer(length, _steps([1, 2], [0, 10], [1, 11]))
    envs = [1 + place % 2 for place in range(count)]
    values = [10 * (env - 1) + place // 2 + 1 for place, env in enumerate(envs)]
    rows = _steps(envs, values, [value + 1 for value in values])
    for row, message in ((0, "newest stored row of its"), (2, "row 0, of the same stream")):
        wrong = rows.clone()
        wrong["observation"][row] += 0.5
        _refused(rb, wrong, f"row {row}: .*{message}")
    rb.extend(rows)
    assert bool((rb["next", "observation"] == rb["observation"] + 1).all())
    assert rb.storage.overflow_rows == 2
    _refused(rb, _steps([1], [0], [1]), "row 0")


def test_stream_forgotten_by_the_ring_restarts() -> None:
    rb = _buffer(None, _steps([1], [0], [1]))
    rb.extend(_steps([2] * 18, list(range(18)), list(range(1, 19))))
    rb.extend(_steps([1], [7], [8]))
    assert rb.storage.overflow_rows == 2


def test_many_streams_are_forgotten_with_their_rows() -> None:
    rb = _buffer(None)
    for start in range(0, 9000, 9):
        envs = list(range(start, start + 9))
        rb.extend(_steps(envs, [0.0] * 9, [1.0] * 9))
    columns = rb.storage.require()
    assert len(columns._tails._slots) <= 1024 + 9
    assert columns._continuing <= columns._tails._slots.keys()
    _refused(rb, _steps([8999], [5], [6]), "row 0")
    rb.extend(_steps([8999, 8990], [1, 1], [2, 2]))
    assert rb.storage.overflow_rows == 16


@WRITERS
@pytest.mark.parametrize("core", [True, False])
def test_out_of_memory_for_overflow_rows_changes_nothing(
    core: bool, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LazyTensorStorage(400, dedup_next=True, lane_key="env", on_mismatch="dense")
    rb = ReplayBuffer(storage=storage, writer=None if length is None else LaneWriter(200))
    rb.extend(_steps([1, 2, 1], [0, 10, 1], [1, 11, 2]))
    columns, before = storage.require(), rb[:]
    columns.table.native = columns.table.native if core else None

    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    grow = columns.table.grow
    monkeypatch.setattr(columns.table, "grow", full)
    rows = _steps([1, 2] * 50, list(range(100)), [0.5] * 100)
    with pytest.raises(MemoryError, match="no room"):
        rb.extend(rows)
    assert bool((rb[:] == before).all())
    check_tables(storage)
    monkeypatch.setattr(columns.table, "grow", grow)
    rb.extend(_steps([2, 1], [11, 2], [12, 3]))
    assert storage.overflow_rows == 2
    rb.extend(rows)
    assert bool((rb[5:] == rows).all())
    check_tables(storage)


@WRITERS
@pytest.mark.parametrize("core", [True, False])
def test_an_interrupt_between_two_columns_leaves_whole_rows(
    core: bool,
    length: int | None,
    transitions: Any,
    same_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twins = Twins(18, length, LazyTensorStorage)
    stream = Streams(transitions, 0, ENVS[0], 3)
    rows = stream.steps(14)
    twins.both(lambda b: b.extend(rows))
    once = twins.storages[1].require()
    columns: Any = once.table
    name = "write" if core else "_write_entries"
    if not core:
        once.table.native = None
    calls: list[Any] = []

    def interrupted(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            result = original(*args)
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return result

        return write

    monkeypatch.setattr(columns, name, interrupted(getattr(columns, name)))
    more = stream.steps(7)
    with pytest.raises(KeyboardInterrupt):
        twins.buffers[1].extend(more)
    # The rows are there, and nobody was told: written again, they are as they should be.
    twins.both(lambda b: b.extend(more))
    twins.check(same_rows)
    rows = stream.steps(9)
    twins.both(lambda b: b.extend(rows))
    twins.check(same_rows)


@WRITERS
@pytest.mark.parametrize("core", [True, False])
def test_stored_views_can_be_written_back(
    core: bool, length: int | None, transitions: Any, same_rows: Any
) -> None:
    twins = Twins(18, length, LazyTensorStorage, core=core)
    stream = Streams(transitions, 3, ENVS[0], 3)
    start = stream.steps(16)
    twins.both(lambda b: b.extend(start))
    twins.check(same_rows)
    rows = stream.noise(4)
    copied = rows.clone()
    column = twins.storages[1].require().rows["pixels",]
    for key in ("pixels", ("next", "pixels")):
        rows[key] = column[0:4]
        copied[key] = column[0:4].clone()
    twins.buffers[1].extend(rows)
    twins.buffers[0].extend(copied)
    twins.check(same_rows)
