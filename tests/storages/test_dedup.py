"""Observations stored once: every read is what a storage that keeps both copies gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, RoundRobinWriter

KEYS = [("observation",), ("pixels",), ("next", "observation"), ("next", "pixels")]


def lanes_last(steps: TensorDict, lanes: tuple[int, ...]) -> TensorDict:
    """Rows ``[T, *lanes]`` as a buffer takes them: time in the place of the last lane."""
    return steps.transpose(0, len(lanes)) if lanes else steps


class Twins:
    """Two buffers that get the same calls, the second of which stores observations once."""

    def __init__(
        self, slots: int, lanes: tuple[int, ...], make: Callable[..., Any] = LazyTensorStorage
    ) -> None:
        size, ndim = slots * torch.Size(lanes).numel(), 1 + len(lanes)
        self.lanes = lanes
        self.storages = [
            LazyTensorStorage(size, ndim=ndim),
            make(size, ndim=ndim, dedup_next=True, on_mismatch="dense"),
        ]
        self.buffers = [
            ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
            for storage in self.storages
        ]

    def both(self, call: Callable[[ReplayBuffer], Any]) -> None:
        a, b = (call(buffer) for buffer in self.buffers)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)

    def check(self, same: Callable[[TensorDict, TensorDict], bool]) -> None:
        dense, once = self.buffers
        if dense.storage.schema is None:
            return
        assert len(dense) == len(once)
        if not len(dense):
            return
        assert same(dense[:], once[:])
        stored = dense.storage.ledger.length
        if self.lanes:
            cells = torch.cartesian_prod(*map(torch.arange, (stored, *self.lanes)))
        else:
            cells = torch.arange(stored)
        for contiguous in (False, True):
            reads = [b.storage.read(cells.flip(0), contiguous=contiguous) for b in self.buffers]
            assert same(*reads)
        for index in (0, -1, slice(0, 2), slice(1, None, 2), [0, -1, 0]):
            assert same(dense[index], once[index])
        for key in KEYS:
            assert same(*(TensorDict({"x": b[key]}, []) for b in self.buffers))


def _operations(lanes: tuple[int, ...]) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    kinds = ["extend", "extend", "extend", "noise", "add", "edit", "column", "cell", "patch"]
    kinds += ["empty", "load", "pickle", "write_at", "lane"]
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.integers(0, 17), st.integers(0, 3)), max_size=12
    )


def _apply(twins: Twins, stream: Any, kind: str, size: int, which: int) -> None:
    lanes = twins.lanes
    stored = twins.storages[0].ledger.length
    key = KEYS[which]
    if kind in ("extend", "noise"):
        rows = lanes_last((stream.steps if kind == "extend" else stream.noise)(size + 1), lanes)
        twins.both(lambda b: b.extend(rows))
    elif kind == "add":
        row = lanes_last(stream.steps(1), lanes)[(slice(None),) * len(lanes) + (0,)]
        twins.both(lambda b: b.add(row))
    elif kind == "empty":
        twins.both(lambda b: b.empty())
    elif kind == "pickle":
        twins.buffers = [pickle.loads(pickle.dumps(buffer)) for buffer in twins.buffers]
        twins.storages = [buffer.storage for buffer in twins.buffers]
    elif not stored:
        return
    elif kind == "load":
        # Each takes what the other one has.
        states = [buffer.state_dict() for buffer in twins.buffers]
        for buffer, state in zip(twins.buffers, reversed(states), strict=True):
            buffer.load_state_dict(state)
    elif kind == "write_at":
        slots = torch.tensor([size, which, size]) % stored
        rows = lanes_last(stream.noise(3), lanes)
        twins.both(lambda b: b.writer.write_at(slots, rows))
    elif kind == "edit":
        start = size % stored
        at: Any = slice(start, min(start + 3, stored))
        if which == 3:
            at = torch.tensor([start, 0, start])
        count = len(range(stored)[at]) if isinstance(at, slice) else 3
        rows = lanes_last(stream.noise(count), lanes)
        index = (slice(None),) * len(lanes) + (at,) if lanes else at
        twins.both(lambda b: b.__setitem__(index, rows))
    elif kind == "column":
        values = lanes_last(stream.noise(stored), lanes)[key]
        twins.both(lambda b: b.set_(key, values))
    elif kind == "cell":
        last = (slice(None),) * len(lanes)
        values = lanes_last(stream.noise(1), lanes)[(*last, 0)][key]
        index = (*last, size % stored) if lanes else size % stored
        twins.both(lambda b: b.set_at_(key, values, index))
    elif kind == "lane":
        first = (0,) * len(lanes)
        steps = slice(size % stored, min(size % stored + 2, stored))
        values = lanes_last(stream.noise(len(range(stored)[steps])), lanes)[first][key]
        twins.both(lambda b: b.set_at_(key, values, (*first, steps) if lanes else steps))
    elif kind == "patch":
        slots = torch.tensor([size, which, 0]) % stored
        index = slots
        if lanes:
            cells = [torch.tensor([0, size, 1]) % n for n in lanes]
            index = torch.stack([slots, *cells], -1)
        values = type(stream)(size + stored).noise(3)[key]
        generation = twins.storages[0].ledger.generations(slots)
        twins.both(
            lambda b: (
                b.update_if_present(index=index, generation=generation, patch={key: values}).updated
            )
        )


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("lanes", [(), (2,), (2, 3)], ids=str)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_calls_match_dense_storage(
    make: Any, lanes: tuple[int, ...], transitions: Any, same_rows: Any, data: st.DataObject
) -> None:
    twins = Twins(data.draw(st.integers(1, 12)), lanes, make)
    stream = transitions(data.draw(st.integers(0, 1000)), lanes)
    for kind, size, which in data.draw(_operations(lanes)):
        _apply(twins, stream, kind, size, which)
        twins.check(same_rows)


@pytest.mark.parametrize("lanes", [(), (3,)], ids=str)
def test_overflow_rows_equal_rows_without_successor(
    lanes: tuple[int, ...], transitions: Any, same_rows: Any
) -> None:
    twins, stream = Twins(50, lanes), transitions(5, lanes)
    cells = torch.Size(lanes).numel()
    for size in (1, 7, 20, 1, 1, 30, 120, 49, 50, 51, 2):
        rows = lanes_last(stream.steps(size), lanes)
        twins.both(lambda b, rows=rows: b.extend(rows))
        # Done in the middle, or newest: what has no follower with the same bits.
        dense = twins.storages[0]
        done = dense.column(("next", "done")).squeeze(-1).clone()
        done[(dense.ledger.cursor - 1) % 50] = True
        assert twins.storages[1].overflow_rows == int(done.sum())
        twins.check(same_rows)
    for buffer in twins.buffers:
        buffer.empty()
    assert twins.storages[1].overflow_rows == 0
    rows = lanes_last(stream.steps(3), lanes)
    twins.both(lambda b: b.extend(rows))
    twins.check(same_rows)
    assert cells <= twins.storages[1].overflow_rows <= 3 * cells


def test_matching_row_across_the_seam_is_accepted(transitions: Any, same_rows: Any) -> None:
    # The newest row leads to just what the oldest one, behind it in the ring, begins with.
    twins = Twins(4, ())
    rows = transitions(0).noise(4)
    for key in ("observation", "pixels"):
        rows["next", key][:3] = rows[key][1:]
        rows["next", key][3] = rows[key][0]
    for _ in range(2):
        twins.both(lambda b: b.extend(rows))
        twins.check(same_rows)
    other = transitions(1).noise(1)
    twins.both(lambda b: b.extend(other))
    twins.check(same_rows)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lanes", [(), (2,)], ids=str)
def test_deduplicated_rows_on_cuda_match_dense_storage(
    lanes: tuple[int, ...], transitions: Any, same_rows: Any
) -> None:
    twins = Twins(9, lanes)
    cuda = LazyTensorStorage(
        twins.storages[0].max_size,
        ndim=1 + len(lanes),
        device="cuda",
        dedup_next=True,
        on_mismatch="dense",
    )
    twins.buffers[1] = ReplayBuffer(storage=cuda, writer=RoundRobinWriter(track_generations=True))
    stream = transitions(0, lanes)
    kinds = ["extend", "add", "edit", "noise", "column", "cell", "write_at", "patch", "extend"]
    for turn in range(60):
        _apply(twins, stream, kinds[turn % len(kinds)], turn % 13, turn % 4)
        dense, once = (buffer[:].cpu() for buffer in twins.buffers)
        assert same_rows(dense, once)
        index = torch.arange(twins.storages[0].ledger.length)
        if lanes:
            index = torch.stack([index, index % lanes[0]], -1)
        rows = [buffer.storage.read(index).cpu() for buffer in twins.buffers]
        assert same_rows(*rows)
