"""The ledger against a model that stores one record after the other in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaykit.storages.ledger import Ledger
from tests.support.refusals import refuses


@dataclass
class Model:
    """Slots as a dictionary: which position lies where, and how often each slot was written."""

    slots: int
    stored: dict[int, int] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    cursor: int = 0
    next_position: int = 0

    def write(self, slot: int) -> None:
        self.stored[slot] = self.next_position
        self.generations[slot] = self.generations.get(slot, -1) + 1
        self.next_position += 1

    def add(self) -> None:
        self.write(self.cursor)
        self.cursor = (self.cursor + 1) % self.slots

    def clear(self) -> None:
        self.stored = {}
        self.cursor = 0
        self.generations = {slot: count + 1 for slot, count in self.generations.items()}


def read(ledger: Ledger) -> Model:
    """The model that agrees with a ledger as it is."""
    every = torch.arange(ledger.slots)
    positions = ledger.positions(every).tolist()
    generations = ledger.generations(every).tolist()
    return Model(
        ledger.slots,
        {slot: position for slot, position in enumerate(positions) if position >= 0},
        {slot: count for slot, count in enumerate(generations) if count >= 0},
        ledger.cursor,
        ledger.next_position,
    )


class LedgerMachine(RuleBasedStateMachine):
    """Random writes, clears and restores; slot and generation name a record for ever."""

    @initialize(slots=st.integers(1, 7))
    def begin(self, slots: int) -> None:
        self.ledger, self.model = Ledger(slots), Model(slots)
        self.saved: list[dict[str, Any]] = []
        self.given: dict[tuple[int, int], int] = {}  # (slot, generation) -> record
        self.records: set[int] = set()  # positions given out, each for one record
        self.note()

    def note(self) -> None:
        """Hands out the handles of all stored records."""
        for slot, position in self.model.stored.items():
            handle = (slot, self.model.generations[slot])
            assert self.given.setdefault(handle, position) == position, f"{handle} names two"
        self.records |= set(self.model.stored.values())

    def write_row_by_row(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.model.next_position not in self.records, "position used twice"
            self.model.write(slot)
            self.note()

    @rule(laps=st.integers(0, 3), rest=st.integers(0, 6))
    def extend(self, laps: int, rest: int) -> None:
        count = laps * self.model.slots + rest
        slots = self.ledger.next_slots(count).tolist()
        self.ledger.advance(count)
        expected = [(self.model.cursor + i) % self.model.slots for i in range(count)]
        assert slots == expected
        self.write_row_by_row(expected)
        self.model.cursor = (self.model.cursor + count) % self.model.slots

    @rule(data=st.data(), move_cursor=st.booleans())
    def place(self, data: st.DataObject, move_cursor: bool) -> None:
        """Explicit slots, some more than once, without a gap at the end."""
        length = len(self.model.stored)
        fresh = data.draw(st.integers(0, self.model.slots - length))
        old = data.draw(st.lists(st.integers(0, length - 1), max_size=5)) if length else []
        slots = data.draw(st.permutations([*old, *range(length, length + fresh)]))
        self.ledger.place(torch.tensor(slots, dtype=torch.int64), move_cursor=move_cursor)
        self.write_row_by_row(slots)
        if move_cursor and slots:
            self.model.cursor = (slots[-1] + 1) % self.model.slots

    @rule()
    def clear(self) -> None:
        self.ledger.clear()
        self.model.clear()

    @rule()
    def save(self) -> None:
        self.saved.append(Ledger.check(self.ledger.state()))

    def fitting(self) -> list[dict[str, Any]]:
        return [state for state in self.saved if state["slots"] == self.ledger.slots]

    @precondition(lambda self: self.fitting())
    @rule(data=st.data())
    def restore_into_itself(self, data: st.DataObject) -> None:
        """A live ledger goes back, and keeps its promises: no handle means another record."""
        state = data.draw(st.sampled_from(self.fitting()))
        before, source = read(self.ledger), self.fresh(state, None)
        self.ledger.restore(state, None)
        self.check_restored(before, source)

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), slots=st.integers(1, 9), written=st.integers(0, 12))
    def restore_into_another(self, data: st.DataObject, slots: int, written: int) -> None:
        """Another capacity, in use or not: the newest records that fit, in write order from 0."""
        state = data.draw(st.sampled_from(self.saved))
        whole = self.fresh(state, None)
        order = sorted(whole.stored, key=whole.stored.__getitem__)
        rows = Ledger(state["slots"])
        rows.restore(state, None)
        kept = rows.write_order()[-slots:]
        assert kept.tolist() == order[-slots:]
        source = Model(
            slots,
            {new: whole.stored[old] for new, old in enumerate(kept.tolist())},
            {new: whole.generations[old] for new, old in enumerate(kept.tolist())},
            len(kept) % slots,
            whole.next_position,
        )
        if rows.keeps_slots(slots):  # as where they all stay
            assert kept.tolist() == list(range(len(order))) or slots == state["slots"]
            staying = Ledger(slots)
            staying.restore(state, None)
            assert read(staying) == (whole if slots == state["slots"] else source)
            kept = data.draw(st.sampled_from([kept, None])) if slots != state["slots"] else kept
        fresh = Ledger(slots)
        fresh.restore(state, kept)
        assert read(fresh) == source
        target = Ledger(slots)
        target.advance(written)
        before = read(target)
        given = {(slot, before.generations[slot]) for slot in before.stored}
        target.restore(state, kept)
        self.ledger, self.model = target, before
        self.given = dict.fromkeys(given, -1)
        self.records = set(range(written))
        self.check_restored(before, source)

    def fresh(self, state: dict[str, Any], rows: torch.Tensor | None) -> Model:
        """A state as it is in a ledger that has no past: exactly what was saved."""
        ledger = Ledger(state["slots"])
        ledger.restore(state, rows)
        model = read(ledger)
        assert ledger.next_position == state["next_position"]
        assert ledger.cursor == state["cursor"]
        assert len(model.stored) == state["length"]
        return model

    def check_restored(self, before: Model, source: Model) -> None:
        after = read(self.ledger)
        by_age = sorted(source.stored, key=source.stored.__getitem__)
        assert sorted(after.stored, key=after.stored.__getitem__) == by_age
        assert after.cursor == source.cursor
        assert after.next_position >= max(before.next_position, source.next_position)
        for slot, position in after.stored.items():
            assert position not in self.records, "position used twice"
            assert position < after.next_position
            assert after.generations[slot] >= source.generations[slot]
        for slot, generation in self.given:
            assert after.generations[slot] > generation, "an old handle became valid again"
        if not before.next_position:
            assert after == source
        self.model = after
        self.note()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        assert read(self.ledger) == self.model
        assert self.ledger.length == len(self.model.stored)
        # Stored records always occupy the first slots.
        assert set(self.model.stored) == set(range(self.ledger.length))
        order = sorted(self.model.stored, key=self.model.stored.__getitem__)
        assert self.ledger.write_order().tolist() == order


LedgerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.pitfall("WR6")
@pytest.mark.pitfall("WR11")
class TestAgainstRows(LedgerMachine.TestCase):
    """Sequences of extend, place, clear, save, restore equal writing row by row (WR6, WR11)."""


@pytest.mark.parametrize("tables", [False, True], ids=["counters", "tables"])
def test_slots_that_do_not_exist_have_no_record(tables: bool) -> None:
    ledger = Ledger(3)
    ledger.advance(3)
    if tables:
        ledger.place(torch.tensor([1]), move_cursor=True)
    outside = torch.tensor([-1, -4, 3, 2**40])
    assert ledger.positions(outside).tolist() == [-1] * 4
    assert ledger.generations(outside).tolist() == [-1] * 4


def test_a_ring_spends_no_memory_on_its_slots() -> None:
    ledger = Ledger(2**62)
    ledger.advance(2**61)
    state = ledger.state()
    assert state["positions"] is None
    assert state["generations"] is None


def test_counts_that_the_index_of_episodes_could_not_hold_are_refused() -> None:
    ledger = Ledger(4)
    ledger.advance(3)
    forged = {**ledger.state(), "next_position": 2**54 + 1}
    refuses(ValueError, "next_position", Ledger.check, forged)
    largest = {**ledger.state(), "next_position": 2**54}
    ledger.restore(Ledger.check(largest), None)
    assert ledger.positions(torch.tensor([2])).tolist() == [2**54 - 1]


def test_state_is_a_copy() -> None:
    ledger = Ledger(3)
    ledger.place(torch.tensor([0, 1]), move_cursor=True)
    state = ledger.state()
    restored = Ledger(3)
    restored.restore(state, None)
    ledger.place(torch.tensor([0]), move_cursor=True)
    restored.place(torch.tensor([1]), move_cursor=True)
    assert state["positions"].tolist() == [0, 1]
    assert state["generations"].tolist()[:2] == [0, 0]
    assert ledger.positions(torch.arange(2)).tolist() == [2, 1]


def test_records_kept_with_gaps_keep_their_positions() -> None:
    """A writer may keep other records than the newest ones."""
    saved = Ledger(5)
    saved.advance(5)
    kept = Ledger(2)
    kept.restore(saved.state(), torch.tensor([1, 3]))
    assert kept.positions(torch.arange(2)).tolist() == [1, 3]
    assert kept.write_order().tolist() == [0, 1]
    assert kept.next_position == 5


def _state(**changes: Any) -> dict[str, Any]:
    ledger = Ledger(4)
    ledger.place(torch.tensor([0, 1, 2, 1]), move_cursor=True)
    return {**ledger.state(), **changes}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "mapping"),
        ({}, "slots"),
        (_state(slots=0), "slots"),
        (_state(length=-1), "length"),
        (_state(length=True), "length"),
        (_state(cursor=1.5), "cursor"),
        (_state(length=5), "length <= slots"),
        (_state(next_position=2), "length <= next_position"),
        (_state(cursor=4), "cursor"),
        (_state(length=1, cursor=2, positions=torch.tensor([0])), "cursor"),
        (_state(positions=[0, 3, 2]), r"positions as int64 \[K\]"),
        (_state(positions=torch.tensor([0.0, 1.0, 2.0])), r"positions as int64 \[K\]"),
        (_state(positions=torch.tensor([0, 3])), "3 to 3 entries"),
        (_state(positions=torch.tensor([0, 3, 3])), "distinct"),
        (_state(positions=torch.tensor([-1, 3, 2])), "distinct"),
        (_state(positions=torch.tensor([0, 4, 2])), "below 4"),
        (_state(positions=None), "positions"),
        (_state(generations=torch.tensor([0, 1])), "3 to 4 entries"),
        (_state(generations=torch.zeros(5, dtype=torch.int64)), "3 to 4 entries"),
        (_state(generations=torch.tensor([0, 1, -1])), "generations"),
        (_state(generations=torch.tensor([0, 1, 2**63 - 1])), "up to 18014398509481984"),
        (_state(generations=torch.tensor([0, 1, 0, -2])), "generations"),
    ],
)
def test_invalid_state_is_refused(state: Any, message: str) -> None:
    refuses(ValueError, message, Ledger.check, state)
