"""Slices of streams whose rows lie interleaved, told apart by a column."""

from __future__ import annotations

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

Row = tuple[int, int, bool]  # t, stream, whether its episode ends


def _buffer(capacity: int, sampler: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity, lane_key="env"),
        sampler=sampler,
        generator=torch.Generator().manual_seed(0),
    )


def _data(rows: list[Row]) -> TensorDict:
    t, env, done = (torch.tensor(column) for column in zip(*rows, strict=True))
    return TensorDict({"t": t, "env": env, "next": {"done": done}}, [len(rows)])


class _Model:
    """Rows in the order in which they were written; the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.age: dict[int, int] = {}  # by t: t of the first row of its episode
        self.open: dict[int, int] = {}

    def write(self, rows: list[Row]) -> None:
        for t, env, done in rows:
            self.age[t] = self.open.setdefault(env, t)
            if done:
                del self.open[env]
            self.rows.append((t, env, done))
            if len(self.rows) > self.capacity:
                gone = self.rows.pop(0)
                if all(env != gone[1] for _, env, _ in self.rows):
                    self.open.pop(gone[1], None)  # a stream without a row is forgotten

    def episodes(self) -> dict[int, list[int]]:
        """Stored rows of every episode by its age, oldest first."""
        found: dict[int, list[int]] = {}
        for t, _, _ in self.rows:
            found.setdefault(self.age[t], []).append(t)
        return dict(sorted(found.items()))

    def windows(self, length: int) -> set[tuple[int, ...]]:
        return {
            tuple(ts[i : i + length])
            for ts in self.episodes().values()
            for i in range(len(ts) - length + 1)
        }


_BATCHES = st.lists(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([False, False, False, True])),
        min_size=1,
        max_size=12,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(capacity=st.integers(2, 20), length=st.integers(1, 3), batches=_BATCHES)
@pytest.mark.parametrize("measure", ["window", "trajectory", "lane", "transition"])
def test_windows_of_any_history(
    measure: str, capacity: int, length: int, batches: list[Any]
) -> None:
    rb = _buffer(capacity, SliceSampler(slice_len=length, measure=measure))
    model, clock = _Model(capacity), 0
    for batch in batches:
        rows = [(clock + i, env, done) for i, (env, done) in enumerate(batch)]
        clock += len(rows)
        rb.extend(_data(rows))
        model.write(rows)
        expected = model.windows(length)
        assert rb.can_sample(length) == bool(expected)
        if not expected:
            continue
        drawn = rb.sample(length * 30)["t"].reshape(-1, length).tolist()
        assert {tuple(window) for window in drawn} <= expected
        rb.set_sampler(SliceSampler(slice_len=length, measure=measure, draw="without_replacement"))
        drawn = rb.sample(length * len(expected))["t"].reshape(-1, length).tolist()
        assert {tuple(window) for window in drawn} == expected
        rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=length))
        drawn = rb.sample(length * 100)["t"].reshape(-1, length).tolist()
        fitting = {age for age, ts in model.episodes().items() if len(ts) >= length}
        assert sorted(model.age[window[0]] for window in drawn) == sorted(fitting)
        rb.set_sampler(SliceSampler(slice_len=length, measure=measure))


@settings(max_examples=80, deadline=None)
@given(
    capacity=st.integers(3, 20), length=st.integers(1, 2), batches=_BATCHES, each=st.integers(1, 5)
)
def test_sequential_windows_by_the_age_of_episodes(
    capacity: int, length: int, batches: list[Any], each: int
) -> None:
    rb = _buffer(capacity, SliceSampler(slice_len=length, stride=1, draw="sequential"))
    model, clock = _Model(capacity), 0
    last: tuple[int, int] | None = None
    for batch in batches:
        rows = [(clock + i, env, done) for i, (env, done) in enumerate(batch)]
        clock += len(rows)
        rb.extend(_data(rows))
        model.write(rows)
        grid = sorted((model.age[w[0]], w[0]) for w in model.windows(length))
        if not grid:
            continue
        expected = []
        for _ in range(each):
            later = [one for one in grid if last is not None and one > last]
            last = (later or grid)[0]
            expected.append(last[1])
        drawn = rb.sample(each * length)["t"].reshape(each, length)[:, 0].tolist()
        assert drawn == expected
