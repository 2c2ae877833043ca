"""Which slot the next record takes when only the largest ranks are kept: against a sorted list."""

from __future__ import annotations

import math
import sys
from bisect import insort
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replaykit.native as native


def offer(heap: Any, ranks: list[float]) -> list[int]:
    slots = np.full(len(ranks), 99, dtype=np.int64)
    heap.offer(np.array(ranks, dtype=np.float64), slots)
    return slots.tolist()


def content(heap: Any) -> tuple[list[float], list[int]]:
    ranks, ages = np.empty(len(heap)), np.empty(len(heap), dtype=np.int64)
    heap.export(ranks, ages)
    return ranks.tolist(), ages.tolist()


class SortedModel:
    """The records kept, in one sorted list: smallest rank first, among equals the youngest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: list[tuple[float, int, int]] = []
        self.age = 0

    def offer(self, rank: float) -> int:
        if len(self.kept) < self.capacity:
            slot = len(self.kept)
        elif rank > self.kept[0][0]:
            slot = self.kept.pop(0)[2]
        else:
            return -1
        insort(self.kept, (rank, -self.age, slot))
        self.age += 1
        return slot

    def content(self) -> tuple[list[float], list[int]]:
        by_slot = sorted(self.kept, key=lambda record: record[2])
        return [rank for rank, _, _ in by_slot], [-age for _, age, _ in by_slot]


RankHeap: Any = native.RankHeap
RANKS = st.one_of(
    st.integers(-3, 3).map(float),  # ties are common
    st.floats(allow_nan=False),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf]),
)


@pytest.mark.pitfall("WR17")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.lists(st.lists(RANKS, max_size=12), max_size=6), st.booleans())
def test_offers_equal_a_sorted_list(
    capacity: int, batches: list[list[float]], reload: bool
) -> None:
    """WR17: any batches, across a save and a load, ties and infinities included."""
    heap, model = RankHeap(capacity), SortedModel(capacity)
    for batch in batches:
        assert offer(heap, batch) == [model.offer(rank) for rank in batch]
        assert content(heap) == model.content()
        assert (len(heap), heap.capacity) == (len(model.kept), capacity)
        if reload:
            ranks, ages = content(heap)
            heap = RankHeap(capacity)
            heap.assign(np.array(ranks), np.array(ages, dtype=np.int64), model.age)


def test_ten_thousand_ranks_in_batches_above_the_release_of_the_lock() -> None:
    generator = np.random.default_rng(0)
    ranks = generator.integers(0, 300, 10_000).astype(np.float64)
    heap, model = RankHeap(500), SortedModel(500)
    for start in range(0, 10_000, 2_500):
        batch = ranks[start : start + 2_500].tolist()
        assert offer(heap, batch) == [model.offer(rank) for rank in batch]
    assert content(heap) == model.content()
    assert sorted(content(heap)[0]) == sorted(ranks.tolist())[-500:]


def _floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float64)


def _ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


ERRORS: dict[str, tuple[Any, str]] = {
    "capacity 0": (lambda cls: cls(0), "expected a capacity of at least 1, got 0"),
    "capacity -3": (lambda cls: cls(-3), "expected a capacity of at least 1, got -3"),
    "NaN offered": (
        lambda cls: cls(2).offer(_floats(1, math.nan, 2), _ints(0, 0, 0)),
        "expected a rank that is a number, got NaN at position 1",
    ),
    "too few slots": (
        lambda cls: cls(2).offer(_floats(1, 2), _ints(0)),
        "expected 2 entries in `slots`, got 1",
    ),
    "too few slots and NaN": (
        lambda cls: cls(2).offer(_floats(math.nan, 2), _ints(0)),
        "expected 2 entries in `slots`, got 1",
    ),
    "export ranks": (
        lambda cls: cls(2).export(_floats(1), _ints()),
        "expected 0 entries in `ranks`, got 1",
    ),
    "export ages": (
        lambda cls: cls(2).export(_floats(), _ints(1, 2)),
        "expected 0 entries in `ages`, got 2",
    ),
    "assign lengths": (
        lambda cls: cls(2).assign(_floats(1), _ints(), 3),
        "expected 1 entries in `ages`, got 0",
    ),
    "assign too many": (
        lambda cls: cls(2).assign(_floats(1, 2, 3), _ints(0, 1, 2), 3),
        "expected at most 2 records, got 3",
    ),
    "assign NaN": (
        lambda cls: cls(2).assign(_floats(1, math.nan), _ints(0, 1), 3),
        "expected a rank that is a number, got NaN at position 1",
    ),
    "assign age from the future": (
        lambda cls: cls(2).assign(_floats(1, 2), _ints(0, 3), 3),
        "expected ages in [0, 3), got 3 at position 1",
    ),
    "assign negative age": (
        lambda cls: cls(2).assign(_floats(1, 2), _ints(-1, 1), 3),
        "expected ages in [0, 3), got -1 at position 0",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_refused(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError) as caught:
        call(RankHeap)
    assert str(caught.value) == message


def test_a_refused_offer_changes_nothing() -> None:
    heap = RankHeap(3)
    offer(heap, [1, 2, 3])
    before = content(heap)
    with pytest.raises(ValueError, match="NaN at position 2"):
        offer(heap, [9, 9, math.nan])
    with pytest.raises(ValueError, match="at most 3"):
        heap.assign(_floats(1, 2, 3, 4), _ints(0, 1, 2, 3), 4)
    assert content(heap) == before


@pytest.mark.parametrize(
    ("ranks", "slots"),
    [
        (np.zeros(2, dtype=np.float32), _ints(0, 0)),
        (_floats(1, 2), np.zeros(2, dtype=np.int32)),
        (np.zeros(4)[::2], _ints(0, 0)),
        (_floats(1, 2), np.zeros(4, dtype=np.int64)[::2]),
        (np.zeros((2, 1)), _ints(0, 0)),
    ],
    ids=["float32", "int32", "strided ranks", "strided slots", "two dimensions"],
)
def test_the_core_takes_arrays_as_they_are_or_not_at_all(ranks: Any, slots: Any) -> None:
    """A converted copy of an output would lose its result without a word."""
    with pytest.raises(TypeError):
        RankHeap(2).offer(ranks, slots)


class _Finder:
    """Stands before all other finders and fails for the core."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "replaykit.native._core":
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: something"),
        ModuleNotFoundError("No module named 'something'", name="something"),
    ],
)
def test_core_that_fails_to_load_says_why(
    monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    monkeypatch.delitem(sys.modules, "replaykit.native._core")
    monkeypatch.setattr(sys, "meta_path", [_Finder(error), *sys.meta_path])
    with pytest.raises(ImportError, match=r"cannot be loaded: .*something.*Install a wheel"):
        native._load()
