"""Check that rows whose observations are stored once are read as rows of a dense storage."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
)
from tests.storages.dedup import Rows, Twins, apply, interrupt_first_call

ENVS = [
    torch.arange(20),
    torch.arange(20, dtype=torch.uint8)[:, None] * 13,
    torch.arange(40, dtype=torch.float32).view(20, 2) / 8,
    (torch.arange(20) * 3000).to(torch.uint16),
]
ROWS = [("ring", ()), ("lanes", (2,)), ("lanes", (2, 3)), ("streams", ()), ("stream rings", ())]


OPERATIONS = ["extend", "extend", "extend", "turns", "noise", "add", "edit", "column", "cell"]
OPERATIONS += ["patch", "empty", "load", "saved", "pickle", "write_at", "lane", "cut", "env", "set"]
STEPS = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 17), st.integers(0, 3)), max_size=12
)


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
    twins = Twins(kind, (), 18, length=6, core=core)
    rows = Rows(transitions, 0, kind, count=3)
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
