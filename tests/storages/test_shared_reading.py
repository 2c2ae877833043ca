"""Draws that hold no lock which keeps other processes out: what they read is of one instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler, StackFrames
from replaykit.buffer import draw
from replaykit.storages import shared_storage
from tests.storages.sharing import another

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


@needs_order
def test_undisturbed_draw_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = handles()
    ways = meanwhile(mine, monkeypatch, lambda: None)
    other.extend(rows(SLOTS, 3))  # what has come since the last draw is no reason
    assert set(mine.sample()["number"].tolist()) == set(range(3, SLOTS + 3))
    assert ways == ["apart"]


@needs_order
def test_rows_overwritten_during_a_read_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = handles()

    def overwrite() -> None:
        other.extend(rows(100, 3))

    ways = meanwhile(mine, monkeypatch, overwrite)
    batch = mine.sample()
    assert ways == ["apart", "apart"]
    assert set(batch["number"].tolist()) == {3, 4, 5, 6, 7, 100, 101, 102}
    assert (batch["wide"] == batch["number"][:, None]).all()


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
        (lambda other: other.__setitem__(0, rows(50, 1)[0]), True),
        (lambda other: other.writer.write_at(torch.tensor([5]), rows(50, 1)), True),
        (lambda other: other.empty() or other.extend(rows(50, 2)), True),
        (lambda other: other.extend(rows(50, SLOTS)), False),
        (lambda other: other.extend(rows(50, 5 * SLOTS)), True),
    ],
    ids=["edit", "write_at", "empty", "a ring", "several rings"],
)
def test_other_changes_during_a_read_repeat_the_draw(
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


def test_draws_take_the_lock_without_ordered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "_ORDERED", False)
    mine, other = handles()
    ways = meanwhile(mine, monkeypatch, lambda: None)
    other.extend(rows(SLOTS, 3))
    assert set(mine.sample()["number"].tolist()) == set(range(3, SLOTS + 3))
    assert ways == ["apart", "held"]


@needs_order
def test_an_error_of_a_draw_is_raised_by_the_draw_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, _ = handles()
    ways = meanwhile(mine, monkeypatch, lambda: None)

    def failing(*_: Any) -> Any:
        raise ValueError("no such law")

    monkeypatch.setattr(mine.sampler, "sample", failing)
    with pytest.raises(ValueError, match="no such law"):
        mine.sample()
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
