"""Random histories of a buffer against a model that scans all rows."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
from tests.samplers.building import sliced

_ROW = st.tuples(st.sampled_from(["", "", "", "terminated", "truncated"]), st.booleans())


class _Model:
    """Rows of lanes as a list: (slot, t, ends, id), oldest first; a restart ends what is open."""

    def __init__(self, slots: int, lanes: int) -> None:
        self.slots, self.lanes = slots, lanes
        self.kept: list[list[list[Any]]] = [[] for _ in range(lanes)]
        self.cursor = 0

    def write(self, step: list[tuple[int, bool, int]]) -> None:
        for lane, (t, ends, number) in zip(self.kept, step, strict=True):
            lane.append([self.cursor, t, ends, number])
            del lane[: -self.slots]
        self.cursor = (self.cursor + 1) % self.slots

    def restart(self) -> None:
        for lane in self.kept:
            if lane:
                lane[-1][2] = True

    def empty(self) -> None:
        self.kept = [[] for _ in range(self.lanes)]
        self.cursor = 0

    def windows(self, length: int) -> set[tuple[int, ...]]:
        """Values of ``t`` of all windows."""
        found = set()
        for lane in self.kept:
            for first in range(len(lane) - length + 1):
                inside = lane[first : first + length]
                ended = any(row[2] for row in inside[:-1])
                switched = len({row[3] for row in inside}) > 1
                if not ended and not switched:
                    found.add(tuple(row[1] for row in inside))
        return found


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.lists(_ROW, min_size=2, max_size=2), max_size=14)),
        st.tuples(st.sampled_from(["empty", "load", "edit"]), st.just([])),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.pitfall("BD1")
@pytest.mark.pitfall("BD3")
@pytest.mark.pitfall("BD13")
@pytest.mark.pitfall("BD16")
@settings(max_examples=120, deadline=None)
@given(
    slots=st.integers(1, 9), ndim=st.sampled_from([1, 2]), length=st.integers(1, 3), steps=_STEPS
)
@pytest.mark.parametrize("ids", [False, True])
def test_windows_of_any_history(
    ids: bool, slots: int, ndim: int, length: int, steps: list[Any]
) -> None:
    lanes = 1 if ndim == 1 else 2

    def fresh() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(slots * lanes, ndim=ndim),
            sampler=SliceSampler(slice_len=length),
            generator=torch.Generator().manual_seed(0),
        )

    rb, model, clock, number = fresh(), _Model(slots, lanes), 0, [0] * lanes
    for kind, payload in steps:
        if kind == "write":
            columns: dict[str, list[list[Any]]] = {
                name: [[] for _ in range(lanes)] for name in ("t", "terminated", "truncated", "id")
            }
            for step in payload:
                written = []
                for lane in range(lanes):
                    end, switch = step[lane]
                    number[lane] += ids and switch
                    t = 2 * clock + lane
                    columns["t"][lane].append(t)
                    columns["terminated"][lane].append(end == "terminated")
                    columns["truncated"][lane].append(end == "truncated")
                    columns["id"][lane].append(number[lane])
                    written.append((t, bool(end), number[lane]))
                clock += 1
                model.write(written)
            if not payload:
                continue
            leaves = {name: torch.tensor(value) for name, value in columns.items()}
            if ndim == 1:
                leaves = {name: value[0] for name, value in leaves.items()}
            data = TensorDict(
                {
                    "t": leaves["t"],
                    "next": {name: leaves[name] for name in ("terminated", "truncated")},
                },
                leaves["t"].shape,
            )
            if ids:
                data["episode"] = leaves["id"]
            rb.extend(data)
        elif kind == "empty":
            rb.empty()
            model.empty()
        elif kind == "load":
            if clock:
                state, rb = rb.state_dict(), fresh()
                rb.load_state_dict(state)
                model.restart()
        elif model.kept[0]:
            row = model.kept[-1][len(model.kept[-1]) // 2]
            slot = torch.tensor([row[0]])
            flags = rb["next", "truncated"]
            shape = (1, 1) if ndim == 1 else (1, lanes, 1)
            new = flags[slot] if ndim == 1 else flags.transpose(0, 1)[slot]
            new = new.reshape(shape).clone()
            new.reshape(-1)[-1] = True
            columns_ = flags.clone()
            if ndim == 1:
                columns_[slot] = new
            else:
                columns_[-1, row[0]] = True
            rb.set_(("next", "truncated"), columns_)
            row[2] = True
        expected = model.windows(length)
        assert rb.can_sample(length) == bool(expected)
        if expected:
            batch = rb.sample(length * 40)
            drawn = [tuple(w) for w in batch["t"].reshape(-1, length).tolist()]
            assert set(drawn) <= expected
            # All of them: drawn without replacement, as many as there are.
            other = SliceSampler(slice_len=length, draw="without_replacement")
            other.generator = torch.Generator().manual_seed(1)
            index, _ = other.sample(rb.storage, length * len(expected))
            t = rb.storage.read(index)["t"].reshape(-1, length).tolist()
            assert Counter(map(tuple, t)) == Counter(expected)


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
