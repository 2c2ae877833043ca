"""Observations stored once: every read is what a storage that keeps both copies gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from replaykit.storages.bits import differing
from replaykit.writers import RoundRobinWriter

KEYS = [("observation",), ("pixels",), ("next", "observation"), ("next", "pixels")]


class Stream:
    """Transitions of endless episodes of random lengths, one for each lane.

    ``observation`` has random bits, NaN among them; ``pixels`` are wide enough to lie alone.
    """

    def __init__(self, seed: int, lanes: tuple[int, ...] = (), wide: int = 600) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.lanes = lanes
        self.wide = wide
        self.now = self._state()
        self.count = 0

    def _bits(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

    def _state(self) -> dict[str, torch.Tensor]:
        return {
            "observation": self._bits(*self.lanes, 12).view(torch.float32),
            "pixels": self._bits(*self.lanes, self.wide),
        }

    def steps(self, count: int) -> TensorDict:
        """The next rows, ``[count, *lanes]``."""
        rows = []
        for _ in range(count):
            following = self._state()
            done = self._bits(*self.lanes, 1) < 60
            rows.append(
                TensorDict(
                    {
                        **self.now,
                        "action": torch.full((*self.lanes,), self.count),
                        "next": {**following, "reward": done.float(), "done": done},
                    },
                    self.lanes,
                )
            )
            fresh = self._state()
            self.now = {
                key: torch.where(done, fresh[key], value) for key, value in following.items()
            }
            self.count += 1
        return torch.stack(rows)

    def noise(self, count: int) -> TensorDict:
        """Rows that have nothing to do with each other, ``[count, *lanes]``."""
        return torch.stack(
            [
                TensorDict(
                    {
                        **self._state(),
                        "action": self._bits(*self.lanes).long(),
                        "next": {
                            **self._state(),
                            "reward": self._bits(*self.lanes, 1).float(),
                            "done": self._bits(*self.lanes, 1) < 60,
                        },
                    },
                    self.lanes,
                )
                for _ in range(count)
            ]
        )


def _bits(data: TensorDict) -> dict[Any, torch.Tensor]:
    return {
        key: value.contiguous().view(torch.uint8) if value.dtype == torch.float32 else value
        for key, value in data.items(True, True)
    }


def same(a: TensorDict, b: TensorDict) -> bool:
    a, b = _bits(a), _bits(b)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


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

    def check(self) -> None:
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
    kinds += ["empty", "load", "pickle", "write_at"]
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.integers(0, 17), st.integers(0, 3)), max_size=12
    )


def _apply(twins: Twins, stream: Stream, kind: str, size: int, which: int) -> None:
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
    elif kind == "patch":
        slots = torch.tensor([size, which, 0]) % stored
        index = slots
        if lanes:
            cells = [torch.tensor([0, size, 1]) % n for n in lanes]
            index = torch.stack([slots, *cells], -1)
        values = Stream(size + stored).noise(3)[key]
        generation = twins.storages[0].ledger.generations(slots)
        twins.both(
            lambda b: b.update_if_present(
                index=index, generation=generation, patch={key: values}
            ).updated
        )


@pytest.mark.parametrize("lanes", [(), (2,), (2, 3)], ids=str)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_calls_leave_what_a_dense_storage_has(
    lanes: tuple[int, ...], data: st.DataObject
) -> None:
    twins = Twins(data.draw(st.integers(1, 12)), lanes)
    stream = Stream(data.draw(st.integers(0, 1000)), lanes)
    for kind, size, which in data.draw(_operations(lanes)):
        _apply(twins, stream, kind, size, which)
        twins.check()
