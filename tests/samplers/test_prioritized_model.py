"""A whole buffer with priorities, against a plain Python model of it."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer

CAPACITIES = [1, 2, 3, 7, 8, 9, 15, 16, 17]

priorities = st.integers(0, 64).map(lambda n: n / 16)


class Model:
    """A ring of (number, priority, write) in Python lists; what the contract says, no more."""

    def __init__(self, capacity: int, within: bool) -> None:
        self.capacity, self.within = capacity, within
        self.rows: list[list[Any]] = []
        self.cursor = 0
        self.writes = 0
        self.largest = 1.0

    def default(self, new: Collection[int] = ()) -> float:
        """The priority of rows that are new in these slots."""
        if not self.within:
            return self.largest
        kept = [row[1] for slot, row in enumerate(self.rows) if slot not in new]
        return max(kept, default=1.0)

    def extend(self, numbers: list[int], given: list[float] | None) -> list[int]:
        slots = [(self.cursor + i) % self.capacity for i in range(len(numbers))]
        self.cursor = (self.cursor + len(numbers)) % self.capacity
        new = dict(zip(slots, zip(numbers, given or numbers, strict=True), strict=True))
        default = self.default(new)
        for slot in sorted(new):
            number, priority = new[slot]
            row = [number, priority if given else default, self.writes]
            self.writes += 1
            if slot < len(self.rows):
                self.rows[slot] = row
            else:
                self.rows.append(row)
        if given:
            self.largest = max(self.largest, *given)
        return slots

    def update(self, slots: list[int], values: list[float], seen: list[int] | None) -> int:
        dropped = 0
        for i, (slot, value) in enumerate(zip(slots, values, strict=True)):
            if slot == -1:
                continue
            if seen is not None and (slot >= len(self.rows) or self.rows[slot][2] != seen[i]):
                dropped += 1
                continue
            self.rows[slot][1] = value
            self.largest = max(self.largest, value)
        return dropped


class PrioritizedBuffer(RuleBasedStateMachine):
    @initialize(
        capacity=st.sampled_from(CAPACITIES),
        within=st.booleans(),
        norm=st.sampled_from(["global", "batch"]),
        eps=st.sampled_from([0.0, 1e-8, 0.5]),
        listed=st.booleans(),
    )
    def start(self, capacity: int, within: bool, norm: str, eps: float, listed: bool) -> None:
        self.options = {
            "eps": eps,
            "weight_norm": norm,
            "max_priority_within_buffer": within,
            "dtype": torch.float64,
        }
        self.alpha, self.beta, self.listed = 0.7, 0.4, listed
        self.buffer = self.make(capacity)
        self.model = Model(capacity, within)
        self.number = 0
        self.dropped = 0
        self.seen: list[tuple[int, int, int]] = []

    def make(self, capacity: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=(ListStorage if self.listed else LazyTensorStorage)(capacity),
            sampler=PrioritizedSampler(alpha=self.alpha, beta=self.beta, **self.options),
            generator=torch.Generator().manual_seed(0),
        )

    def data(self, given: list[float | None]) -> tuple[TensorDict, list[int]]:
        numbers = list(range(self.number, self.number + len(given)))
        self.number += len(given)
        data = TensorDict({"x": torch.tensor(numbers)}, [len(given)])
        # Part of the first write, so that it belongs to the schema from then on.
        values = [0.0 if value is None else value for value in given]
        return data.set("td_error", torch.tensor(values, dtype=torch.float64)), numbers

    # -- what users do ------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def extend(self, count: int) -> None:
        data, numbers = self.data([None] * count)
        count = min(count, self.model.capacity)
        index = self.buffer.extend(data[-count:], update_priority=False)
        assert index.tolist() == self.model.extend(numbers[-count:], None)

    @rule(given=st.lists(priorities, min_size=1, max_size=5))
    def extend_with_priorities(self, given: list[float]) -> None:
        given = given[: self.model.capacity]
        data, numbers = self.data(list(given))
        assert self.buffer.extend(data).tolist() == self.model.extend(numbers, given)

    @rule(value=priorities)
    def add(self, value: float) -> None:
        data, numbers = self.data([value])
        assert [self.buffer.add(data[0])] == self.model.extend(numbers, [value])

    @rule(count=st.integers(1, 5))
    def another_buffer_extends(self, count: int) -> None:
        data, numbers = self.data([None] * min(count, self.model.capacity))
        other = ReplayBuffer(storage=self.buffer.storage)
        assert other.extend(data).tolist() == self.model.extend(numbers, None)

    @precondition(lambda self: len(self.buffer) > 0)
    @rule(slots=st.lists(st.integers(-1, 40), min_size=1, max_size=4))
    def mark_update(self, slots: list[int]) -> None:
        slots = [slot % len(self.buffer) if slot >= 0 else -1 for slot in slots]
        self.model.update(slots, [self.model.default(slots)] * len(slots), None)
        self.buffer.mark_update(torch.tensor(slots))

    @precondition(lambda self: len(self.buffer) > 0)
    @rule(pairs=st.lists(st.tuples(st.integers(-1, 40), priorities), max_size=6))
    def update(self, pairs: list[tuple[int, float]]) -> None:
        stored = len(self.buffer)
        slots = [slot % stored if slot >= 0 else -1 for slot, _ in pairs]
        values = [value for _, value in pairs]
        self.model.update(slots, values, None)
        self.buffer.update_priority(
            torch.tensor(slots, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)
        )

    @precondition(lambda self: self.seen)
    @rule(which=st.lists(st.integers(-1, 40), min_size=1, max_size=6), value=priorities)
    def late_update(self, which: list[int], value: float) -> None:
        """A learner gives priorities back, of records that may have been overwritten since."""
        seen = [(-1, 7, 7) if i < 0 else self.seen[-1 - i % len(self.seen)] for i in which]
        slots, generations, writes = (list(part) for part in zip(*seen, strict=True))
        values = [value + i / 16 for i in range(len(slots))]
        self.dropped += self.model.update(slots, values, writes)
        self.buffer.update_priority(
            torch.tensor(slots),
            torch.tensor(values, dtype=torch.float64),
            generation=torch.tensor(generations),
        )

    @precondition(lambda self: len(self.buffer) > 0)
    @rule(
        wrong=st.sampled_from([float("nan"), -1.0, float("inf")]), outside=st.sampled_from([-2, 99])
    )
    def refused(self, wrong: float, outside: int) -> None:
        index = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(ValueError, match="priorities"):
            self.buffer.update_priority(index, torch.tensor([5.0, 6.0, wrong]))
        index[1] = outside
        with pytest.raises(IndexError, match=str(outside)):
            self.buffer.update_priority(index, torch.tensor([5.0, 6.0, 7.0]))

    @rule(by_another=st.booleans())
    def empty(self, by_another: bool) -> None:
        (ReplayBuffer(storage=self.buffer.storage) if by_another else self.buffer).empty()
        old, self.model = self.model, Model(self.model.capacity, self.model.within)
        self.model.writes = old.writes
        if by_another:  # what this buffer was told of priorities still holds
            self.model.largest = old.largest

    @rule(alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    def set_alpha(self, alpha: float) -> None:
        self.buffer.sampler.alpha = self.alpha = alpha

    @rule(beta=st.sampled_from([0.0, 0.4, 1.0]))
    def set_beta(self, beta: float) -> None:
        self.buffer.sampler.beta = self.beta = beta

    @rule()
    def set_sampler(self) -> None:
        self.buffer.set_sampler(
            PrioritizedSampler(alpha=self.alpha, beta=self.beta, **self.options)
        )
        self.model.largest = 1.0
        self.dropped = 0
        for row in self.model.rows:
            row[1] = 1.0

    @rule(capacity=st.sampled_from(CAPACITIES))
    def save_and_load(self, capacity: int) -> None:
        state = self.buffer.state_dict()
        self.buffer = self.make(capacity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.buffer.load_state_dict(state)
        model = self.model
        if capacity != model.capacity:
            rows = sorted(model.rows, key=lambda row: row[0])[-capacity:]
            model.rows, model.capacity = rows, capacity
            model.cursor = len(rows) % capacity
        self.seen.clear()  # the records that learners saw are those of the old buffer

    # -- what has to hold ---------------------------------------------------------------------

    @invariant()
    def priorities_are_those_of_the_model(self) -> None:
        sampler = self.buffer.sampler
        got = sampler.state_dict()["_priorities"].tolist()
        assert got == [row[1] for row in self.model.rows]
        assert sampler.default_priority == self.model.default()
        assert sampler.dropped_updates == self.dropped
        slots = torch.arange(len(self.model.rows))
        generations = self.buffer.storage.ledger.generations(slots).tolist()
        writes = [row[2] for row in self.model.rows]
        self.seen += zip(slots.tolist(), generations, writes, strict=True)

    @invariant()
    def draws_are_of_stored_rows_by_their_weight(self) -> None:
        eps = self.options["eps"]
        values = [(row[1] + eps) ** self.alpha if row[1] + eps else 0.0 for row in self.model.rows]
        possible = [value for value in values if value > 0]
        assert self.buffer.can_sample(1) == bool(possible)
        if not possible:
            reason = "every stored priority is zero" if values else "from an empty storage"
            with pytest.raises(RuntimeError, match=reason):
                self.buffer.sample(1)
            return
        data, info = self.buffer.sample(8, return_info=True)
        drawn = [values[slot] for slot in info["index"].tolist()]
        assert min(drawn) > 0
        assert data["x"].tolist() == [self.model.rows[i][0] for i in info["index"].tolist()]
        base = min(possible if self.options["weight_norm"] == "global" else drawn)
        expected = [(value / base) ** -self.beta for value in drawn]
        assert info["priority_weight"].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.pitfall("PR6", "PR17")
def test_a_buffer_with_priorities_equals_the_model() -> None:
    """PR6: late updates went to other records. PR17: the largest priority was of a lost one."""
    run_state_machine_as_test(
        PrioritizedBuffer,
        settings=settings(
            max_examples=100, stateful_step_count=30, deadline=None, derandomize=True, database=None
        ),
    )
