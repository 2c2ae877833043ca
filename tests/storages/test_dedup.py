"""Check that rows whose observations are stored once are read as rows of a dense storage."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.storages.dedup import KINDS, Rows, check_table, interrupt_first_call

KEYS = [("observation",), ("pixels",), ("next", "observation"), ("next", "pixels")]
ENVS = [
    torch.arange(20),
    torch.arange(20, dtype=torch.uint8)[:, None] * 13,
    torch.arange(40, dtype=torch.float32).view(20, 2) / 8,
    (torch.arange(20) * 3000).to(torch.uint16),
]
ROWS = [("ring", ()), ("lanes", (2,)), ("lanes", (2, 3)), ("streams", ()), ("stream rings", ())]


class Twins:
    """Two buffers that get the same calls. The second one stores observations once."""

    def __init__(
        self,
        kind: str,
        lanes: tuple[int, ...],
        slots: int,
        make: Any = LazyTensorStorage,
        *,
        length: int = 1,
        core: bool = True,
        **options: Any,
    ) -> None:
        self.kind, self.lanes, self.core = kind, lanes, core
        self.interleaved = "lane_key" in KINDS[kind]
        size = slots * torch.Size(lanes).numel()
        shape = {**KINDS[kind], "ndim": 1 + len(lanes)}
        self.storages = [
            LazyTensorStorage(size, **shape),
            make(size, **shape, dedup_next=True, on_mismatch="dense", **options),
        ]
        self.buffers = [
            ReplayBuffer(
                storage=storage,
                writer=LaneWriter(length, track_generations=True)
                if kind == "stream rings"
                else RoundRobinWriter(track_generations=True),
            )
            for storage in self.storages
        ]

    def both(self, call: Callable[[ReplayBuffer], Any]) -> None:
        a, b = (call(buffer) for buffer in self.buffers)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)

    def write(self, rows: TensorDict) -> None:
        self.both(lambda buffer: buffer.extend(rows))

    def check(self, same: Callable[[TensorDict, TensorDict], bool]) -> None:
        dense, once = self.buffers
        if dense.storage.schema is None:
            return
        assert len(dense) == len(once)
        if not len(dense):
            return
        if not self.core:
            once.storage.require().table.native = None
        assert (once.storage.require().table.native is not None) == self.core
        assert same(dense[:], once[:])
        stored = dense.storage.ledger.length
        cells = torch.arange(stored)
        if self.lanes:
            cells = torch.cartesian_prod(*map(torch.arange, (stored, *self.lanes)))
        for contiguous in (False, True):
            reads = [b.storage.read(cells.flip(0), contiguous=contiguous) for b in self.buffers]
            assert same(*reads)
        elements = torch.arange(len(dense)).flip(0)
        asked = [b.storage.require().gather_keys(KEYS[::-1], elements) for b in self.buffers]
        assert same(*(TensorDict(found, [len(dense)]) for found in asked))
        for index in (0, -1, slice(0, 2), slice(1, None, 2), [0, -1, 0]):
            assert same(dense[index], once[index])
        for key in [*KEYS, *([("env",)] if self.interleaved else [])]:
            assert same(*(TensorDict({"x": b[key]}, []) for b in self.buffers))
        check_table(once.storage)


OPERATIONS = ["extend", "extend", "extend", "turns", "noise", "add", "edit", "column", "cell"]
OPERATIONS += ["patch", "empty", "load", "saved", "pickle", "write_at", "lane", "cut", "env"]
STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 17), st.integers(0, 3)), max_size=12
)


def apply(twins: Twins, rows: Rows, kind: str, size: int, which: int, folder: Path) -> None:
    """Do one operation to both buffers."""
    last, key = (slice(None),) * len(twins.lanes), KEYS[which]
    stored = twins.storages[0].ledger.length
    if kind in ("extend", "turns"):
        twins.write(rows.steps(size + 1, turns=kind == "turns"))
    elif kind == "noise":
        twins.write(rows.noise(size + 1))
    elif kind == "add":
        row = rows.steps(1)[(*last, 0)]
        twins.both(lambda b: b.add(row))
    elif kind == "empty":
        twins.both(lambda b: b.empty())
    elif kind == "pickle":
        copied = copy.deepcopy if which % 2 else lambda buffer: pickle.loads(pickle.dumps(buffer))
        twins.buffers = [copied(buffer) for buffer in twins.buffers]
        twins.storages = [buffer.storage for buffer in twins.buffers]
    elif stored and kind == "cut":
        twins.both(lambda b: b.cut())
    elif stored and kind == "load":  # each buffer loads the rows of the other one
        states = [buffer.state_dict() for buffer in twins.buffers]
        for buffer, state in zip(twins.buffers, reversed(states), strict=True):
            buffer.load_state_dict(state)
    elif stored and kind == "saved":
        for buffer, name in zip(twins.buffers, ("dense", "once"), strict=True):
            buffer.dumps(folder / name)
        for buffer, name in zip(twins.buffers, ("once", "dense"), strict=True):
            buffer.loads(folder / name)
    elif stored:
        change(twins, rows, kind, size, which, last, key)


def change(twins: Twins, rows: Rows, kind: str, size: int, which: int, last: Any, key: Any) -> None:
    """Change stored rows of both buffers."""
    stored = twins.storages[0].ledger.length
    if kind == "write_at" and twins.kind != "stream rings":  # they refuse rows of other writers
        slots, new = torch.tensor([size, which, size]) % stored, rows.noise(3)
        twins.both(lambda b: b.writer.write_at(slots, new))
    elif kind == "edit":
        start = size % stored
        at: Any = slice(start, min(start + 3, stored))
        if which == 3:
            at = torch.tensor([start, 0, start])
        new = rows.noise(len(torch.arange(stored)[at]))
        if twins.interleaved:  # the streams stay, so that the writer has room
            new["env"] = twins.buffers[0]["env"][at]
        twins.both(lambda b: b.__setitem__((*last, at) if last else at, new))
    elif kind == "column":
        values = rows.noise(stored)[key]
        twins.both(lambda b: b.set_(key, values))
    elif kind == "cell":
        values, at = rows.noise(1)[(*last, 0)][key], size % stored
        twins.both(lambda b: b.set_at_(key, values, (*last, at) if last else at))
    elif kind == "lane":
        first, steps = (0,) * len(last), slice(size % stored, min(size % stored + 2, stored))
        values = rows.noise(len(range(stored)[steps]))[first][key]
        twins.both(lambda b: b.set_at_(key, values, (*first, steps) if last else steps))
    elif kind == "env" and twins.kind == "streams":
        at, values = torch.tensor([size % stored, which % stored]), rows.noise(2)["env"]
        twins.both(lambda b: b.set_at_("env", values, at))
    elif kind == "patch":
        slots, values = torch.tensor([size, which, 0]) % stored, rows.other.noise(3)[key]
        index = slots
        if last:
            index = torch.stack([slots, *(torch.tensor([0, size, 1]) % n for n in twins.lanes)], -1)
        ids = {"index": index, "generation": twins.storages[0].ledger.generations(slots)}
        twins.both(lambda b: b.update_if_present(**ids, patch={key: values}).updated)


@pytest.mark.covering(2)
@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(("kind", "lanes"), ROWS, ids=str)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_calls_match_dense_storage(
    make: Any,
    core: bool,
    kind: str,
    lanes: tuple[int, ...],
    transitions: Any,
    same_rows: Any,
    tmp_path_factory: Any,
    data: st.DataObject,
) -> None:
    count, length = data.draw(st.integers(1, 4)), 3
    slots = length * count + 1 if kind == "stream rings" else data.draw(st.integers(1, 20))
    twins = Twins(kind, lanes, slots, make, length=length, core=core)
    envs = data.draw(st.sampled_from(ENVS)) if twins.interleaved else ENVS[0]
    seed = data.draw(st.integers(0, 1000))
    rows = Rows(transitions, seed, kind, lanes=lanes, envs=envs, count=count)
    folder = tmp_path_factory.mktemp("saved")
    for operation, size, which in data.draw(STEPS):
        apply(twins, rows, operation, size, which, folder)
        twins.check(same_rows)


def rows_without_successor(storage: Any) -> int:
    """Count rows whose next observation is not that of the next row of their stream."""
    rows, newest, follows = storage[:], {}, {}
    has_env = ("env",) in storage.schema.leaves
    for slot in storage.ledger.write_order().tolist():
        env = rows["env"][slot].numpy().tobytes() if has_env else b""
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


@pytest.mark.parametrize(
    ("kind", "envs"),
    [("ring", ENVS[0]), *itertools.product(["streams", "stream rings"], ENVS)],
)
def test_overflow_rows_equal_rows_without_successor(
    kind: str, envs: torch.Tensor, transitions: Any, same_rows: Any, tmp_path: Path
) -> None:
    twins = Twins(kind, (), 50, length=11)
    rows, (dense, once) = Rows(transitions, 5, kind, envs=envs), twins.storages

    def write(size: int, turn: int) -> None:
        twins.write(rows.steps(size, turns=turn % 3 == 0))
        assert once.overflow_rows == rows_without_successor(dense)
        twins.check(same_rows)

    for turn, size in enumerate((1, 7, 20, 1, 1, 30, 120, 49, 50, 51, 2)):
        write(size, turn)
    # A checkpoint of a deduplicated storage has the references, and a dense one does not.
    for source, name in zip(twins.buffers, ("dense", "once"), strict=True):
        source.dumps(tmp_path / name)
    for name in ("dense", "once"):
        twins.buffers[1].loads(tmp_path / name)
        assert once.overflow_rows == rows_without_successor(dense)
        again = pickle.loads(pickle.dumps(twins.buffers[1]))
        assert again.storage.overflow_rows == rows_without_successor(dense)
    for turn in range(3):
        write(9, turn)
    twins.both(lambda b: b.empty())
    assert once.overflow_rows == 0
    write(3, 1)


def test_overflow_rows_of_lanes_equal_ends(transitions: Any, same_rows: Any) -> None:
    """A row of a lane needs its next observation if it ends an episode, or is the newest."""
    twins, rows = Twins("lanes", (3,), 50), Rows(transitions, 5, "lanes", lanes=(3,))
    dense, once = twins.storages
    for size in (1, 7, 20, 1, 1, 30, 120, 49, 50, 51, 2):
        twins.write(rows.steps(size))
        done = dense.column(("next", "done")).squeeze(-1).clone()
        done[(dense.ledger.cursor - 1) % 50] = True
        assert once.overflow_rows == int(done.sum())
        twins.check(same_rows)


def test_matching_row_across_the_seam_is_accepted(transitions: Any, same_rows: Any) -> None:
    """The newest row leads to the observation of the oldest one, which is next in the ring."""
    twins = Twins("ring", (), 4)
    rows = transitions(0).noise(4)
    for key in ("observation", "pixels"):
        rows["next", key][:3] = rows[key][1:]
        rows["next", key][3] = rows[key][0]
    for batch in (rows, rows, transitions(1).noise(1)):
        twins.write(batch)
        twins.check(same_rows)


ONE_LANE = pytest.mark.parametrize("kind", ["ring", "streams", "stream rings"])
CORE = pytest.mark.parametrize("core", [True, False])


@ONE_LANE
@CORE
def test_an_interrupt_between_two_columns_leaves_whole_rows(
    core: bool, kind: str, transitions: Any, same_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, rows = Twins(kind, (), 18, length=6), Rows(transitions, 0, kind, count=3)
    twins.write(rows.steps(14))
    table: Any = twins.storages[1].require().table
    if not core:
        table.native = None
    name = "write" if core else "_write_entries"
    monkeypatch.setattr(table, name, interrupt_first_call(table, name))
    more = rows.steps(7)
    with pytest.raises(KeyboardInterrupt):
        twins.buffers[1].extend(more)
    # The values are there, but the write was not committed. It can be repeated.
    twins.write(more)
    twins.check(same_rows)
    twins.write(rows.steps(9))
    twins.check(same_rows)


@ONE_LANE
@CORE
def test_stored_views_can_be_written_back(
    core: bool, kind: str, transitions: Any, same_rows: Any
) -> None:
    """The write overwrites rows of the view before it has read them."""
    twins = Twins(kind, (), 18, length=6, core=core)
    rows = Rows(transitions, 3, kind, count=3)
    twins.write(rows.steps(16))
    twins.check(same_rows)
    views = rows.noise(4)
    copies, column = views.clone(), twins.storages[1].require().rows["pixels",]
    for key in ("pixels", ("next", "pixels")):
        views[key], copies[key] = column[0:4], column[0:4].clone()
    twins.buffers[1].extend(views)
    twins.buffers[0].extend(copies)
    twins.check(same_rows)


@ONE_LANE
@CORE
def test_out_of_memory_for_overflow_rows_changes_nothing(
    core: bool, kind: str, transitions: Any, same_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(kind, (), 400, length=90, core=core)
    rows = Rows(transitions, 3, kind)
    twins.write(rows.steps(9))
    twins.check(same_rows)
    once, noise = twins.buffers[1], rows.noise(100)

    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    before = once.storage.overflow_rows
    with monkeypatch.context() as patch:
        patch.setattr(once.storage.require().table, "grow", full)
        with pytest.raises(MemoryError, match="no room"):
            once.extend(noise)
    assert once.storage.overflow_rows == before
    twins.check(same_rows)
    for batch in (rows.steps(2), noise):  # the newest rows are still known
        twins.write(batch)
        twins.check(same_rows)
    twins.both(lambda b: b.empty())
    assert once.storage.overflow_rows == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "lanes"), ROWS, ids=str)
def test_deduplicated_rows_on_cuda_match_dense_storage(
    kind: str, lanes: tuple[int, ...], transitions: Any, same_rows: Any, tmp_path: Path
) -> None:
    twins = Twins(kind, lanes, 13, length=3, device="cuda")
    rows = Rows(transitions, 0, kind, lanes=lanes)
    kinds = ["extend", "add", "edit", "noise", "column", "cell", "write_at", "patch", "extend"]
    for turn in range(60):
        apply(twins, rows, kinds[turn % len(kinds)], turn % 13, turn % 4, tmp_path)
        assert same_rows(*(buffer[:].cpu() for buffer in twins.buffers))
        index = torch.arange(twins.storages[0].ledger.length)
        if lanes:
            index = torch.stack([index, *(index % n for n in lanes)], -1)
        assert same_rows(*(buffer.storage.read(index).cpu() for buffer in twins.buffers))
