"""What the compiled core does, in Python and NumPy: the same results, slower."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = ["RankHeap"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class RankHeap:
    """Which slot the next record takes when only the largest ranks are kept.

    The record displaced next is the one of smallest rank, among equals the youngest. Ranks must
    not be NaN.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1, got {capacity}")
        self.capacity = capacity
        self.next_age = 0
        self._heap: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, ranks: Floats, slots: Ints) -> None:
        """Offers the ranks in order; writes each record's slot, or -1, into ``slots``.

        Cost: O(log capacity) a record that is accepted; those that cannot be are sorted out
        before in one vectorised step.
        """
        _check_length("slots", len(slots), len(ranks))
        _check_ranks(ranks)
        heap, room = self._heap, self.capacity - len(self._heap)
        slots[:] = -1
        for i in range(min(room, len(ranks))):
            slots[i] = len(heap)
            heapq.heappush(heap, (float(ranks[i]), -self.next_age, len(heap)))
            self.next_age += 1
        if room >= len(ranks):
            return
        # The smallest kept rank never falls: what does not exceed it now is refused for good.
        candidates = np.flatnonzero(ranks[max(room, 0) :] > heap[0][0]) + max(room, 0)
        for i in candidates.tolist():
            rank = float(ranks[i])
            if rank > heap[0][0]:
                slots[i] = heap[0][2]
                heapq.heapreplace(heap, (rank, -self.next_age, heap[0][2]))
                self.next_age += 1

    def export(self, ranks: Floats, ages: Ints) -> None:
        """Writes rank and age of the record in each slot."""
        _check_length("ranks", len(ranks), len(self))
        _check_length("ages", len(ages), len(self))
        for rank, age, slot in self._heap:
            ranks[slot], ages[slot] = rank, -age

    def assign(self, ranks: Floats, ages: Ints, next_age: int) -> None:
        """Replaces the content: slot i holds a record of ``ranks[i]`` and ``ages[i]``."""
        _check_length("ages", len(ages), len(ranks))
        if len(ranks) > self.capacity:
            raise ValueError(f"expected at most {self.capacity} records, got {len(ranks)}")
        _check_ranks(ranks)
        wrong = np.flatnonzero((ages < 0) | (ages >= next_age))
        if len(wrong):
            raise ValueError(
                f"expected ages in [0, {next_age}), got {ages[wrong[0]]} at position {wrong[0]}"
            )
        heap = list(zip(ranks.tolist(), (-ages).tolist(), range(len(ranks)), strict=True))
        heapq.heapify(heap)
        self._heap, self.next_age = heap, next_age


def _check_ranks(ranks: Floats) -> None:
    wrong = np.flatnonzero(np.isnan(ranks))
    if len(wrong):
        raise ValueError(f"expected a rank that is a number, got NaN at position {wrong[0]}")


def _check_length(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"expected {expected} entries in `{name}`, got {got}")
