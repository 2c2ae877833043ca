"""The table beside the rows, against a dictionary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit.schema import Schema, split_leaves
from replaykit.storages.overflow_table import OverflowTable, grow_in_memory

CPU = torch.device("cpu")
PATHS = [("small",), ("wide",)]


def _beside(elements: int) -> OverflowTable:
    rows = split_leaves(TensorDict({"small": torch.zeros(1), "wide": torch.zeros(1, 300)}, [1]), 1)
    return OverflowTable(Schema(rows.root), elements, CPU, grow_in_memory(CPU))


def _values(numbers: list[int]) -> dict[Any, torch.Tensor]:
    x = torch.tensor(numbers, dtype=torch.float32)
    return {PATHS[0]: x, PATHS[1]: x[:, None].expand(-1, 300).contiguous()}


@given(st.lists(st.tuples(st.sets(st.integers(0, 199)), st.sets(st.integers(0, 199)))))
@settings(max_examples=80, deadline=None)
def test_entries_match_a_dictionary(changes: list[tuple[set[int], set[int]]]) -> None:
    beside, model, most = _beside(200), dict[int, int](), 0
    for turn, (gone, come) in enumerate(changes):
        gone, come = sorted(gone & model.keys() | come & model.keys()), sorted(come)
        cleared, holders = (
            torch.tensor(gone, dtype=torch.int64),
            torch.tensor(come, dtype=torch.int64),
        )
        back = beside.entries(cleared).to(torch.int64) - 1
        change = beside.plan(back, len(come))
        values = _values([turn * 1000 + e for e in come])
        for _ in range(2):  # as after an interrupt
            beside.commit(change, values)
            beside.assign(cleared, None)
            beside.assign(holders, change.numbers)
        for element in gone:
            del model[element]
        model.update({element: turn * 1000 + element for element in come})
        most = max(most, len(model))
        assert len(beside) == len(model)
        assert beside.elements_with(200).tolist() == sorted(model)
        every = torch.arange(200)
        found = beside.patch(every, _values([-1] * 200))
        expected = [model.get(element, -1) for element in range(200)]
        assert found[PATHS[0]].tolist() == expected
        assert found[PATHS[1]][:, 299].tolist() == expected
    assert beside.nbytes() <= 4 * 200 + max(64, 2 * most) * (8 + 4 + 1200 + 64)


def test_patch_changes_entries_without_a_search() -> None:
    # As on a device where to look would mean to wait.
    beside = _beside(10)
    change = beside.plan(torch.empty(0, dtype=torch.int64), 2)
    beside.commit(change, _values([5, 6]))
    beside.assign(torch.tensor([3, 7]), change.numbers)
    beside.device = SimpleNamespace(type="other")  # type: ignore[assignment]
    given_leaves = _values([-1, -2, -3, -4])
    found = beside.patch(torch.tensor([7, 1, 3, 3]), given_leaves)
    assert found[PATHS[0]].tolist() == [6, -2, 5, 5]
    assert found[PATHS[1]][:, 7].tolist() == [6, -2, 5, 5]


def test_clear_removes_all_entries() -> None:
    beside = _beside(10)
    change = beside.plan(torch.empty(0, dtype=torch.int64), 3)
    beside.commit(change, _values([5, 6, 7]))
    beside.assign(torch.tensor([0, 3, 4]), change.numbers)
    beside.clear(5)
    assert len(beside) == 0
    assert beside.elements_with(10).tolist() == []
    assert beside.plan(torch.empty(0, dtype=torch.int64), 3).numbers.unique().numel() == 3


def test_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = _beside(1000)
    change = beside.plan(torch.empty(0, dtype=torch.int64), 1)
    beside.commit(change, _values([5]))
    beside.assign(torch.tensor([3]), change.numbers)

    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(beside, "_grow", full)
    with pytest.raises(MemoryError):
        beside.plan(torch.empty(0, dtype=torch.int64), 64)
    assert len(beside) == 1
    assert len(beside.plan(torch.empty(0, dtype=torch.int64), 63).numbers) == 63
