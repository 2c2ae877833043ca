"""The log of changes, against a plain list of everything that was recorded."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replaykit.storages import change_log
from replaykit.storages.change_log import ChangeKind, ChangeLog

RING = 7
SOME = st.lists(st.integers(0, RING - 1), max_size=5)
COLUMNS = st.sampled_from([None, (("x",),), (("x",), ("y", "z"))])
CHANGES = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 2 * RING), st.none()),
    st.tuples(st.just("place"), SOME, st.none()),
    st.tuples(st.just("edit"), st.none() | SOME, COLUMNS),
    st.tuples(st.sampled_from(["clear", "cut", "move"]), st.none(), st.none()),
)


class Model:
    """Every change ever recorded: a number for each slot, as (kind, slot or None, columns)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int | None, Any]] = []
        self.cursor = 0

    def record(self, log: ChangeLog, kind: str, slots: Any, columns: Any) -> None:
        if kind == "append":
            log.append(self.cursor, slots)
            self.said += [(kind, (self.cursor + n) % RING, None) for n in range(slots)]
            self.cursor = (self.cursor + slots) % RING
        elif kind == "place":
            log.place(np.array(slots, np.int64))
            self.said += self._at_most(kind, slots, None)
        elif kind == "edit":
            log.edit(None if slots is None else np.array(slots, np.int64), columns)
            known = None if columns is None else frozenset(columns)
            self.said += (
                [(kind, None, known)] if slots is None else self._at_most(kind, slots, known)
            )
        else:
            getattr(log, kind)()
            self.said.append((kind, None, None))

    def _at_most(self, kind: str, slots: list[int], columns: Any) -> list[Any]:
        return [(kind, slot, columns) for slot in slots]


def spelled(log: ChangeLog, seen: int) -> list[tuple[str, int | None, Any]] | None:
    """The answer of the log, a number for each slot."""
    changes = log.since(seen)
    if changes is None:
        return None
    found: list[tuple[str, int | None, Any]] = []
    for kind, slots, columns in changes:
        each = [None] if slots is None else [int(slot) % RING for slot in slots]
        found += [(kind.value, slot, columns) for slot in each]
    return found


@settings(deadline=None)
@given(st.lists(CHANGES, max_size=30), st.sampled_from([0, 64, 200, 10_000]))
@example([("append", 3, None), ("append", 9, None), ("place", [1, 1], None)] * 4, 200)
def test_followers_hear_of_every_change_once_and_in_order(
    changes: list[tuple[str, Any, Any]], spare: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_log, "_SPARE", spare)
        log, model = ChangeLog(RING), Model()
        seen, overtaken = 0, 0
        for change in changes:
            model.record(log, *change)
            assert log.number == len(model.said)
            for follower in range(len(model.said) + 1):
                found = spelled(log, follower)
                if found is None:
                    overtaken = max(overtaken, follower + 1)
                else:
                    assert found == model.said[follower:]
            # No follower that has seen more is overtaken before one that has seen less.
            assert all(spelled(log, later) is not None for later in range(overtaken, log.number))
            # A follower that looks after every change is never overtaken.
            latest = spelled(log, seen)
            assert latest == model.said[seen:]
            seen = log.number
            regular = [n for n, (kind, _, _) in enumerate(model.said) if kind != "append"]
            assert log.irregular == (regular[-1] + 1 if regular else 0)
        assert spelled(log, log.number + 1) is None
        assert spelled(log, -1) is None


@given(st.lists(CHANGES, max_size=12), st.integers(0, 40), st.booleans())
def test_slots_since_are_those_of_the_wanted_changes(
    changes: list[tuple[str, Any, Any]], seen: int, edits: bool
) -> None:
    log, model = ChangeLog(RING), Model()
    for change in changes:
        model.record(log, *change)
    seen = min(seen, log.number)
    wanted = [
        (kind, slot)
        for kind, slot, columns in model.said[seen:]
        if kind != "cut" and (edits or kind != "edit") and (columns is None or ("x",) in columns)
    ]
    found = log.slots_since(seen, RING, [("x",)], edits=edits)
    if any(slot is None for _, slot in wanted):
        assert found is None
    else:
        assert found is not None
        assert {int(slot) for slots in found for slot in slots} == {slot for _, slot in wanted}
    assert log.rows_changed(seen) == any(kind != "cut" for kind, _, _ in model.said[seen:])


def test_the_memory_of_the_log_is_bounded() -> None:
    log = ChangeLog(100)
    for turn in range(5000):
        log.edit(np.arange(turn % 100), [("x",)])
        log.append(turn % 100, 1)
    held = [part for run in log._runs for part in run.parts if isinstance(part, np.ndarray)]
    assert sum(map(len, held)) <= 100 + 4096 + 1024
    assert len(log._runs) <= (100 + 4096) // 64 + 2
    assert log.since(log.number - 50) is not None
    assert log.since(0) is None


def test_more_slots_than_rows_are_recorded_once_each() -> None:
    log = ChangeLog(10)
    log.place(np.arange(40) % 4)
    assert log.since(0) == [(ChangeKind.PLACE, pytest.approx([0, 1, 2, 3]), None)]
    assert log.number == 4


def test_slots_given_to_a_follower_do_not_change_later() -> None:
    log, given = ChangeLog(1000), np.array([5, 6])
    log.edit(given)
    (change,) = log.since(0) or ()
    given[:] = 0
    for turn in range(300):
        log.edit(np.array([turn]))
    assert change.slots.tolist() == [5, 6]


def test_a_copy_goes_on_at_the_same_number_and_knows_no_change() -> None:
    log = ChangeLog(10)
    log.append(0, 5)
    log.cut()
    other = copy.deepcopy(log)
    assert other.number == log.number == 6
    assert other.since(6) == []
    assert other.since(5) is None
    other.append(5, 2)
    assert spelled(other, 6) == [("append", 5, None), ("append", 6, None)]
