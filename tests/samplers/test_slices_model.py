"""Random histories of rings, lanes and interleaved streams against a model that scans all rows."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.samplers.building import sliced


@dataclass
class _Row:
    t: int
    lane: int
    end: str
    number: int
    """That of its episode."""
    age: int
    """When its episode began: the ``t`` of its first row."""


class _Model:
    """Rows in the order in which they were written; the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.rows: list[_Row] = []

    def lane(self, lane: int) -> list[_Row]:
        return [row for row in self.rows if row.lane == lane]

    def write(self, rows: list[tuple[int, str, int]]) -> list[_Row]:
        written = []
        for lane, end, number in rows:
            row = _Row(self.clock, lane, end, number, self.clock)
            before = self.lane(lane)[-1:]  # of a stream without a row, nothing is known
            if before and not before[0].end and before[0].number == number:
                row.age = before[0].age
            written.append(row)
            self.rows = [*self.rows, row][-self.capacity :]
            self.clock += 1
        return written

    def episodes(self) -> list[list[_Row]]:
        found = []
        for lane in {row.lane for row in self.rows}:
            before = None
            for row in self.lane(lane):
                if before is None or before.end or before.age != row.age:
                    found.append([])
                found[-1].append(row)
                before = row
        return found

    def windows(self, length: int) -> Counter[tuple[int, ...]]:
        """Values of ``t`` of all windows."""
        return Counter(
            tuple(row.t for row in rows[first : first + length])
            for rows in self.episodes()
            for first in range(len(rows) - length + 1)
        )


def _buffer(layout: str, slots: int, sampler: Any) -> ReplayBuffer:
    if layout == "lanes":
        storage = LazyTensorStorage(2 * slots, ndim=2)
    else:
        storage = LazyTensorStorage(slots, lane_key="env" if layout == "streams" else None)
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage, sampler=sampler, generator=generator)


def _extend(rb: ReplayBuffer, rows: list[_Row], ids: bool = False) -> None:
    data = TensorDict(
        {
            "t": torch.tensor([row.t for row in rows]),
            "env": torch.tensor([row.lane for row in rows]),
            "next": {
                end: torch.tensor([row.end == end for row in rows])
                for end in ("terminated", "truncated")
            },
        },
        [len(rows)],
    )
    if ids:
        data["episode"] = torch.tensor([row.number for row in rows])
    rb.extend(data if rb.storage.ndim == 1 else data.reshape(-1, 2).transpose(0, 1))


_ROWS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["", "", "", "terminated", "truncated"]), st.booleans()
    ),
    min_size=1,
    max_size=14,
)
_CHANGES = st.sampled_from(["empty", "load", "edit"])


@pytest.mark.pitfall("BD1", "BD3", "BD13", "BD16")
@settings(max_examples=200, deadline=None)
@given(
    slots=st.integers(1, 9),
    length=st.integers(1, 3),
    measure=st.sampled_from(["window", "trajectory", "lane", "transition"]),
    ids=st.booleans(),
    steps=st.lists(st.one_of(_ROWS, _ROWS, _CHANGES), min_size=1, max_size=8),
)
@pytest.mark.parametrize("layout", ["ring", "lanes", "streams"])
def test_windows_of_any_history(
    layout: str, slots: int, length: int, measure: Any, ids: bool, steps: list[Any]
) -> None:
    def fresh() -> ReplayBuffer:
        return _buffer(layout, slots, SliceSampler(slice_len=length, measure=measure))

    lanes = {"ring": 1, "lanes": 2, "streams": 4}[layout]
    rb, model, number = fresh(), _Model(slots * (2 if layout == "lanes" else 1)), [0] * lanes
    for step in steps:
        if isinstance(step, list):
            rows = []
            for place, (lane, end, switch) in enumerate(step[: len(step) // 2 * 2 or 1]):
                lane = lane if layout == "streams" else place % lanes
                number[lane] += ids and switch
                rows.append((lane, end, number[lane]))
            if layout == "lanes" and len(rows) == 1:
                rows.append((1, "", number[1]))
            _extend(rb, model.write(rows), ids)
        elif step == "empty":
            rb.empty()
            model.rows = []
        elif step == "load" and model.clock:
            state, rb = rb.state_dict(), fresh()
            rb.load_state_dict(state)
            for lane in range(lanes):
                for newest in model.lane(lane)[-1:]:
                    newest.end = newest.end or "restart"
        elif step == "edit" and model.rows:
            row = model.rows[len(model.rows) // 2]
            row.end = "truncated"
            flags = rb["next", "truncated"].clone()
            flags[rb["t"] == row.t] = True
            rb["next", "truncated"] = flags
        _check_windows(rb, model, length, measure)


def _check_windows(rb: ReplayBuffer, model: _Model, length: int, measure: Any) -> None:
    expected = model.windows(length)
    assert rb.can_sample(length) == bool(expected)
    if not expected:
        return
    assert set(map(tuple, rb.sample(length * 40)["t"].reshape(-1, length).tolist())) <= {*expected}

    def drawn(sampler: Any, windows: int) -> list[tuple[int, ...]]:
        sampler.generator = torch.Generator().manual_seed(1)
        index, _ = sampler.sample(rb.storage, length * windows)
        index = tuple(index.T) if index.ndim == 2 else index
        t: list[list[int]] = rb.storage.get(index)["t"].reshape(-1, length).tolist()
        return list(map(tuple, t))

    # All of them: drawn without replacement, as many as there are.
    every = SliceSampler(slice_len=length, measure=measure, draw="without_replacement")
    assert Counter(drawn(every, sum(expected.values()))) == expected
    # One of every episode in a pass.
    episode = {row.t: at for at, rows in enumerate(model.episodes()) for row in rows}
    passed = drawn(SliceSamplerWithoutReplacement(slice_len=length), 100)
    assert sorted(episode[t[0]] for t in passed) == sorted({episode[t[0]] for t in expected})


@settings(max_examples=80, deadline=None)
@given(
    slots=st.integers(3, 20),
    length=st.integers(1, 2),
    batches=st.lists(_ROWS, min_size=1, max_size=6),
    each=st.integers(1, 5),
)
def test_sequential_windows_of_streams_by_the_age_of_episodes(
    slots: int, length: int, batches: list[Any], each: int
) -> None:
    """Also where streams are forgotten, so that others get their numbers."""
    rb = _buffer("streams", slots, SliceSampler(slice_len=length, stride=1, draw="sequential"))
    model, last = _Model(slots), (-1, -1)
    for batch in batches:
        _extend(rb, model.write([(lane, end, 0) for lane, end, _ in batch]))
        age = {row.t: row.age for row in model.rows}
        grid = sorted((age[window[0]], window[0]) for window in model.windows(length))
        if not grid:
            continue
        expected = []
        for _ in range(each):
            last = next((one for one in grid if one > last), grid[0])
            expected.append(last[1])
        drawn = rb.sample(each * length)["t"].reshape(each, length)[:, 0].tolist()
        assert drawn == expected


@pytest.mark.pitfall("SL3")
def test_number_of_calls_per_draw_does_not_depend_on_stored_rows() -> None:
    """No Python frame per slice, row or episode."""

    def frames(lengths: list[int], size: int, **options: Any) -> int:
        rb = sliced(lengths, slice_len=4, **options)
        rb.sample(size)
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            rb.sample(size)
        finally:
            sys.setprofile(None)
        return count

    for options in (
        {},
        {"measure": "trajectory"},
        {"strict_length": False},
        {"span": True},
        {"pad": "both"},
        {"draw": "stratified"},
    ):
        assert frames([5] * 4, 16, **options) >= frames([5, 9] * 400, 1600, **options) - 12
