"""Draws that hold no lock which keeps other processes out: what they read is of one instant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    StackFrames,
)
from replaykit.buffer import draw
from replaykit.storages import shared_storage
from replaykit.storages.observation_table import ObservationTable
from tests.storages.sharing import another
from tests.support.refusals import refuses

SLOTS = 8


def rows(first: int, count: int) -> TensorDict:
    """Rows that are whole where both columns tell the same number."""
    number = torch.arange(first, first + count)
    wide = number[:, None].expand(count, 300).clone()
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"number": number, "wide": wide, "next": {"done": done}}, [count])


def handles(**options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Two processes' worth, over a full ring of the rows 0 to 7."""
    generator = torch.Generator().manual_seed(0)
    storage = LazyTensorStorage(SLOTS)
    mine = ReplayBuffer(storage=storage, shared=True, batch_size=64, generator=generator, **options)
    mine.extend(rows(0, SLOTS))
    other = another(mine)
    assert len(other) == SLOTS
    return mine, other


def meanwhile(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]
) -> list[str]:
    """Has work done by others after the first time that rows are read; returns which ways rows
    were drawn."""
    ways: list[str] = []
    storage: Any = buffer.storage
    read = storage.read_held

    def reading(*args: Any) -> Any:
        found = read(*args)
        if ways == ["apart"]:
            work()
        return found

    def noted(way: str, made: Any) -> Any:
        def drawing(drawer: Any, *args: Any) -> Any:
            if drawer is buffer:
                ways.append(way)
            return made(drawer, *args)

        return drawing

    monkeypatch.setattr(storage, "read_held", reading)
    monkeypatch.setattr(draw, "draw_unlocked", noted("apart", draw.draw_unlocked))
    monkeypatch.setattr(draw, "draw_locked", noted("held", draw.draw_locked))
    return ways


needs_order = pytest.mark.skipif(
    not shared_storage._ORDERED,
    reason="a processor that does not show stores in order: draws take the lock",
)


@pytest.mark.parametrize(
    "ordered", [pytest.param(True, marks=needs_order), False], ids=["ordered", "not ordered"]
)
def test_undisturbed_draw_takes_no_lock_where_stores_are_seen_in_order(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_storage, "_ORDERED", ordered)
    mine, other = handles()
    ways = meanwhile(mine, monkeypatch, lambda: None)
    other.extend(rows(SLOTS, 3))  # what has come since the last draw is no reason
    assert set(mine.sample()["number"].tolist()) == set(range(3, SLOTS + 3))
    assert ways == ["apart", "held"][: 1 if ordered else 2]


@needs_order
@pytest.mark.parametrize("half", [0, 1, 2])
def test_draw_of_rows_not_overwritten_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, half: int
) -> None:
    mine, other = handles()
    ways = meanwhile(mine, monkeypatch, lambda: [other.extend(rows(100, half)), None][1])
    slots = torch.arange(half, SLOTS)
    monkeypatch.setattr(mine.sampler, "sample", lambda *_: (slots, {}))
    assert mine.sample(len(slots))["number"].tolist() == slots.tolist()
    assert ways == ["apart"]


@needs_order
@pytest.mark.parametrize(
    ("work", "held"),
    [
        (lambda other: other.extend(rows(50, 3)), False),
        (lambda other: other.__setitem__(0, rows(50, 1)[0]), True),
        (lambda other: other.writer.write_at(torch.tensor([5]), rows(50, 1)), True),
        (lambda other: other.empty() or other.extend(rows(50, 2)), True),
        (lambda other: other.extend(rows(50, SLOTS)), False),
        (lambda other: other.extend(rows(50, 5 * SLOTS)), True),
    ],
    ids=["extend", "edit", "write_at", "empty", "a ring", "several rings"],
)
def test_rows_overwritten_during_a_read_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[ReplayBuffer], Any], held: bool
) -> None:
    mine, other = handles()
    ways = meanwhile(mine, monkeypatch, lambda: work(other))
    batch = mine.sample()
    assert ways == ["apart", "apart", "held"][: 3 if held else 2]
    stored = other[:]["number"]
    assert torch.equal(batch["number"], stored[batch["index"]])
    assert (batch["wide"] == batch["number"][:, None]).all()


@needs_order
def test_overwritten_neighbouring_rows_repeat_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = handles(transform=StackFrames(["number"], 3))
    ways = meanwhile(mine, monkeypatch, lambda: [other.extend(rows(8, 1)), None][1])
    monkeypatch.setattr(mine.sampler, "sample", lambda *_: (torch.tensor([2, 3]), {}))
    batch = mine.sample(2)
    assert ways == ["apart", "apart"]  # row 0, which row 2 is stacked on, was overwritten
    assert batch["number"].reshape(2, -1).tolist() == [[1, 1, 2], [1, 2, 3]]


@needs_order
def test_priorities_that_have_changed_take_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = handles(sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    ways = meanwhile(mine, monkeypatch, lambda: None)
    other.update_priority(torch.arange(SLOTS), torch.tensor([0.0] * 7 + [1.0]))
    assert set(mine.sample()["number"].tolist()) == {7}
    assert ways == ["apart", "held"]
    assert set(mine.sample()["number"].tolist()) == {7}
    assert ways == ["apart", "held", "apart"]


@needs_order
def test_an_error_of_a_draw_is_raised_by_the_draw_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, _ = handles()
    ways = meanwhile(mine, monkeypatch, lambda: None)

    def failing(*_: Any) -> Any:
        raise ValueError("no such law")

    monkeypatch.setattr(mine.sampler, "sample", failing)
    refuses(ValueError, "no such law", mine.sample)
    assert ways == ["apart"]


@needs_order
@pytest.mark.parametrize("edited", [False, True])
def test_index_built_from_overwritten_rows_is_discarded(
    monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    def flagged(first: int, done: list[int]) -> TensorDict:
        made = rows(first, len(done))
        made["next", "done"] = torch.tensor(done, dtype=torch.bool)[:, None]
        return made

    storage = LazyTensorStorage(SLOTS)
    other = ReplayBuffer(
        storage=storage,
        sampler=SliceSampler(num_slices=1, strict_length=False),
        generator=torch.Generator(),
        shared=True,
        batch_size=2,
    )
    other.extend(flagged(0, [0] * SLOTS))
    mine = another(other)
    if edited:
        assert len(mine.episodes) == 1
        other["next", "done"] = torch.zeros(SLOTS, 1, dtype=torch.bool)
    assert len(mine) == SLOTS  # it has taken note of everything, and has no index that is good
    sample, sampler = mine.sampler.sample, mine.sampler

    def sampling(*given: Any) -> Any:
        monkeypatch.setattr(sampler, "sample", sample)
        other.extend(flagged(SLOTS, [0, 1, 0]))
        return sample(*given)

    monkeypatch.setattr(sampler, "sample", sampling)
    mine.sample()
    for name in ("id", "begin", "evicted", "head", "length"):
        found, wanted = (getattr(b.episodes._facts, name).tolist() for b in (mine, other))
        assert found == wanted, name


def lone(first: int, count: int) -> TensorDict:
    """Rows that share no observation, so each needs an entry of the overflow table."""
    number = torch.arange(first, first + count)
    found = TensorDict({"number": number, "seen": 10.0 * number}, [count])
    done = torch.ones(count, dtype=torch.bool)
    found["next"] = TensorDict({"done": done, "seen": 10.0 * number + 1}, [count])
    return found


def are_whole(batch: TensorDict) -> bool:
    number = batch["number"]
    return torch.equal(batch["seen"], 10.0 * number) and torch.equal(
        batch["next", "seen"], 10.0 * number + 1
    )


def once() -> tuple[ReplayBuffer, ReplayBuffer]:
    storage = LazyTensorStorage(200, dedup_next=True, on_mismatch="dense")
    mine = ReplayBuffer(storage=storage, shared=True, batch_size=64)
    mine.extend(lone(0, 8))
    other = another(mine)
    other.sample()
    return mine, other


@needs_order
def test_growth_of_the_overflow_table_during_a_draw_raises_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = once()
    storage: Any = other.storage
    states, grown = storage.recovery.home.states, []
    first = states.first

    def late(known: int) -> Any:
        if not grown:
            grown.append(True)
            mine.extend(lone(8, 190))
        return first(known)

    monkeypatch.setattr(states, "first", late)
    assert are_whole(other.sample())
    assert grown
    assert are_whole(other[:])


@needs_order
def test_entries_of_a_failed_write_do_not_make_draws_take_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = once()

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ObservationTable, "_planned", refused)
        refuses(OSError, "full", mine.extend, lone(8, 190))
    other.sample()
    ways = meanwhile(other, monkeypatch, lambda: None)
    for _ in range(3):
        assert are_whole(other.sample())
    assert ways == ["apart"] * 3


KILLED_WRITER = """
import os, sys, torch
from tensordict import TensorDict
from replaykit import ReplayBuffer
from replaykit.storages.recoverable import Recovery

rb = ReplayBuffer.join(sys.argv[1])
rb.storage.poll()
journal = Recovery.journal_ring

def journal_and_die(self, first, count):
    journal(self, first, count)
    columns = rb.storage.require()
    getattr(columns, "rows", columns).tensors[("number",)][first : first + count] = -777
    os._exit(9)

Recovery.journal_ring = journal_and_die
number = torch.arange(1000, 1050)
rows = TensorDict({"number": number, "seen": 10.0 * number}, [50])
done = torch.ones(50, dtype=torch.bool)
rows["next"] = TensorDict({"done": done, "seen": 10.0 * number + 1}, [50])
rb.extend(rows)
"""


@needs_order
@pytest.mark.parametrize("dedup", [False, True])
def test_rows_of_a_dead_writer_are_drawn_again_when_a_process_joins(
    dedup: bool, tmp_path: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that joins undoes the dead writer's rows while this one has read them."""
    options = {"dedup_next": True, "on_mismatch": "dense"} if dedup else {}
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", **options)
    mine = ReplayBuffer(storage=storage, shared=True)
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer.join(tmp_path / "rows", batch_size=16, generator=generator)
    mine.extend(lone(0, 100))
    buffer.sample()
    reads: list[bool] = []
    read = draw._draw_and_read

    def between(*args: Any) -> Any:
        if reads:
            return read(*args)
        reads.append(True)
        assert run_python(KILLED_WRITER, tmp_path / "rows", check=False).returncode == 9
        found = read(*args)
        assert (found.draw.index != 0).all()
        assert (found.draw.index < 50).any()
        ReplayBuffer.join(tmp_path / "rows").extend(lone(100, 1))  # into slot 0
        return found

    monkeypatch.setattr(draw, "_draw_and_read", between)
    assert are_whole(buffer.sample())
    assert reads
