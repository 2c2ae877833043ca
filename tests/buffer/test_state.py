"""What a saved state becomes in any buffer: where rows lie, and what is named how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import (
    ReplayBuffer,
    RoundRobinWriter,
)
from tests.buffer.building import buffer_of, check_whole, rows


class Slots:
    """What lies where, in plain Python: per slot id, position and generation."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.at: dict[int, tuple[int, int]] = {}
        self.generations: dict[int, int] = {}
        self.cursor = self.position = self.written = 0

    def put(self, slot: int, number: int) -> None:
        self.at[slot] = (number, self.position)
        self.generations[slot] = self.generations.get(slot, -1) + 1
        self.position += 1
        self.written += 1

    def extend(self, numbers: list[int]) -> None:
        for number in numbers:
            self.put(self.cursor, number)
            self.cursor = (self.cursor + 1) % self.slots

    def empty(self) -> None:
        self.at, self.cursor, self.written = {}, 0, 0
        self.generations = {slot: g + 1 for slot, g in self.generations.items()}

    def ids(self) -> list[int]:
        return [self.at[slot][0] for slot in range(len(self.at))]

    def oldest_first(self) -> list[int]:
        return sorted(self.at, key=lambda slot: self.at[slot][1])

    def moved(self, slots: int) -> Slots:
        """As C7 has it: in write order from 0, the newest where not all fit."""
        kept = self.oldest_first()[-slots:]
        other = Slots(slots)
        other.at = {new: self.at[old] for new, old in enumerate(kept)}
        other.generations = {new: self.generations[old] for new, old in enumerate(kept)}
        other.cursor, other.position = len(kept) % slots, self.position
        other.written = self.written
        return other


def agree(buffer: ReplayBuffer, model: Slots, check_whole: Any) -> None:
    """The buffer holds what the model holds, and names it alike."""
    assert len(buffer) == len(model.at)
    assert buffer.write_count == model.written
    if model.at:
        assert check_whole(buffer[:]) == model.ids()
    found = buffer.storage.ledger.generations(torch.arange(model.slots)).tolist()
    assert found == [model.generations.get(slot, -1) for slot in range(model.slots)]
    assert buffer.storage.ledger.write_order().tolist() == model.oldest_first()


def go_on(buffer: ReplayBuffer, model: Slots) -> None:
    """Both take more rows and still agree: the cursor is where it was."""
    for count in (1, 3, model.slots + 2):
        index = buffer.extend(rows(count, 200)).tolist()
        assert index == [(model.cursor + i) % model.slots for i in range(count)]
        model.extend(list(range(200, 200 + count)))
        agree(buffer, model, check_whole)


@given(
    slots=st.integers(1, 9),
    target_slots=st.integers(1, 14),
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(1, 11)),
            st.tuples(st.just("write_at"), st.lists(st.integers(0, 8), min_size=1, max_size=4)),
            st.tuples(st.just("empty"), st.none()),
        ),
        max_size=6,
    ),
    drawn=st.integers(0, 4),
    source=st.sampled_from(["list", "tensor"]),
    target=st.sampled_from(["list", "tensor", "memmap"]),
    used=st.booleans(),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.pitfall("CK9")
@pytest.mark.pitfall("CK11")
@pytest.mark.filterwarnings("ignore:.*left out")
def test_rows_go_into_any_capacity_in_write_order(
    slots: int,
    target_slots: int,
    operations: list[Any],
    drawn: int,
    source: str,
    target: str,
    used: bool,
    tmp_path_factory: Any,
):
    """CK9, CK11, C7: rows, cursor, generations and the rest of the pass, against a plain model.

    Random programs save and load every combination of parts, empty and filled.
    """
    tracking = {"writer": RoundRobinWriter(track_generations=True), "batch_size": 2}
    buffer = buffer_of(source, slots, sampler="without", seed=0, **tracking)
    model, number = Slots(slots), 0
    for name, argument in operations:
        if name == "extend":
            buffer.extend(rows(argument, number))
            model.extend(list(range(number, number + argument)))
            number += argument
        elif name == "empty":
            buffer.empty()
            model.empty()
        else:
            where = [s % slots for s in argument if s % slots < len(model.at)]
            if where:
                buffer.writer.write_at(torch.tensor(where), rows(len(where), number))
                for slot in where:
                    model.put(slot, number)
                    number += 1
    left = set(model.ids())
    for _ in range(min(drawn, (len(left) + 1) // 2 - 1)):
        left -= set(buffer.sample()["id"].tolist())
    path = tmp_path_factory.mktemp("saved")
    buffer.dumps(path)

    tracking["writer"] = RoundRobinWriter(track_generations=True)
    loaded = buffer_of(target, target_slots, sampler="without", seed=1, **tracking)
    if used:
        loaded.extend(rows(3, 900))
    handles = [loaded.writer.generations_of(torch.arange(target_slots)), loaded.storage]
    loaded.loads(path)
    moved = model if slots == target_slots else model.moved(target_slots)
    if not used:
        agree(loaded, moved, check_whole)
    else:
        # What was there is forgotten, and no handle to it names another record now.
        assert check_whole(loaded[:]) == moved.ids() if moved.at else not len(loaded)
        now = loaded.writer.generations_of(torch.arange(target_slots))
        before = handles[0]
        assert bool((now[before >= 0] > before[before >= 0]).all())
    kept = left & set(moved.ids())
    if kept:
        rest = [i for batch in loaded for i in batch["id"].tolist()]
        assert sorted(rest) == sorted(kept)
    if not used:
        go_on(loaded, moved)
