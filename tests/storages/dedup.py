"""Buffers and rows for tests of observations that are stored once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
)

KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "lanes": {"ndim": 2},
    "streams": {"lane_key": "env"},
    "stream rings": {"lane_key": "env"},
}
STORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (LazyTensorStorage, {}),
    "once": (LazyTensorStorage, {"dedup_next": True, "on_mismatch": "dense"}),
    "mapped": (LazyMemmapStorage, {"dedup_next": ["pixels"], "on_mismatch": "dense"}),
}
KEYS = [("observation",), ("pixels",), ("next", "observation"), ("next", "pixels")]
ENVS = torch.arange(20) * 7
LANES = 2
"""Number of lanes of the kind ``lanes``."""


def storage(kind: str, stored: str, slots: int, **options: Any) -> Any:
    """Return a storage of ``slots`` rows, or of ``slots`` rows for each lane."""
    make, more = STORED[stored]
    cells = LANES if kind == "lanes" else 1
    return make(slots * cells, **{**KINDS[kind], **more, **options})


def buffer(
    kind: str, stored: str = "once", slots: int = 20, *, length: int | None = None, **options: Any
) -> ReplayBuffer:
    """Return a buffer; ``length`` is that of the ring of each stream."""
    length = length or max(1, slots // 4)
    writer = LaneWriter(length) if kind == "stream rings" else None
    options = {"batch_size": 8, **options}
    return ReplayBuffer(storage=storage(kind, stored, slots), writer=writer, **options)


def all_stored(kind: str, **options: Any) -> list[ReplayBuffer]:
    """Return equal buffers that store observations twice, once, and once in files."""
    return [buffer(kind, stored, **options) for stored in STORED]


class Rows:
    """Transitions in the layout that a buffer of one kind takes.

    Streams have endless episodes, and their rows are interleaved at random.
    """

    def __init__(
        self,
        transitions: Any,
        seed: int,
        kind: str,
        *,
        lanes: tuple[int, ...] | None = None,
        envs: torch.Tensor = ENVS,
        count: int = 4,
        **options: Any,
    ) -> None:
        if lanes is None:
            lanes = (LANES,) if kind == "lanes" else ()
        self.lanes, self.envs, self.count = lanes, envs, count
        self.interleaved = "lane_key" in KINDS[kind]
        self.random = np.random.default_rng(seed)
        seeds = [seed * 100 + place for place in range(count)] if self.interleaved else [seed]
        self.sources = [transitions(one, lanes, **options) for one in seeds]
        self.other = transitions(seed + 50)

    def steps(self, count: int, *, turns: bool = False) -> TensorDict:
        """Return rows that continue those before; ``turns`` takes the streams in turn."""
        if not self.interleaved:
            return self.time_last(self.sources[0].steps(count))
        which = np.arange(count) % self.count
        if not turns:
            which = self.random.integers(0, self.count, count)
        rows: dict[int, Any] = {
            one: iter(self.sources[one].steps(int((which == one).sum()))) for one in set(which)
        }
        found = torch.stack([next(rows[one]) for one in which])
        return found.set("env", self.envs[torch.from_numpy(which)])

    def noise(self, count: int) -> TensorDict:
        """Return rows that do not continue each other."""
        rows = self.time_last(self.sources[0].noise(count))
        if self.interleaved:
            rows["env"] = self.envs[torch.from_numpy(self.random.integers(0, self.count, count))]
        return rows

    def time_last(self, rows: TensorDict) -> TensorDict:
        """Move time from the first dimension to the last one."""
        return rows.transpose(0, len(self.lanes)) if self.lanes else rows


def through(values: list[float], **columns: Any) -> TensorDict:
    """Return an episode through these observations, one row shorter than they are."""
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    count = len(values) - 1
    following = {"observation": x[1:].clone(), "done": torch.zeros(count, 1, dtype=torch.bool)}
    rows = TensorDict({"observation": x[:-1].clone(), "next": following}, [count])
    for key, value in columns.items():
        rows[tuple(key.split("__"))] = torch.tensor(value)
    return rows


def write_all(buffers: list[ReplayBuffer], rows: TensorDict) -> None:
    """Write the same rows to all buffers."""
    for rb in buffers:
        rb.extend(rows)


def check_table(storage: Any) -> None:
    """Check that no entry belongs to two rows, and that exactly the used entries are counted."""
    table, stored = storage.require().table, storage.ledger.length
    if table.cells == 1:
        references = table.references[:stored]
        assert 0 not in references
        for column in (0, 1):
            assert len(set(references[:, column].tolist())) == stored
        alone = set(references[:, 1].tolist()) - set(references[:, 0].tolist())
        assert storage.overflow_rows == len(alone)
    alone = storage.overflow_rows
    table.core.derive(stored * table.cells)
    assert storage.overflow_rows == alone


def interrupt_first_call(table: Any, name: str) -> Callable[..., Any]:
    """Return the method ``name`` that raises KeyboardInterrupt after its first call."""
    original, calls = getattr(table, name), []

    def call(*arguments: Any) -> Any:
        result = original(*arguments)
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    return call


class Twins:
    """Two buffers that get the same calls. The second one stores observations once."""

    def __init__(
        self,
        kind: str,
        lanes: tuple[int, ...],
        slots: int,
        make: Any = LazyTensorStorage,
        *,
        length: int = 1,
        core: bool = True,
        **options: Any,
    ) -> None:
        self.kind, self.lanes, self.core = kind, lanes, core
        self.interleaved = "lane_key" in KINDS[kind]
        size = slots * torch.Size(lanes).numel()
        shape = {**KINDS[kind], "ndim": 1 + len(lanes)}
        self.length = length
        self.make_once = lambda: make(
            size, **shape, dedup_next=True, on_mismatch="dense", **options
        )
        self.buffers = [
            self.buffer(storage) for storage in (LazyTensorStorage(size, **shape), self.make_once())
        ]

    def buffer(self, storage: Any) -> ReplayBuffer:
        writer = (
            LaneWriter(self.length, track_generations=True)
            if self.kind == "stream rings"
            else RoundRobinWriter(track_generations=True)
        )
        return ReplayBuffer(storage=storage, writer=writer)

    @property
    def storages(self) -> list[Any]:
        return [buffer.storage for buffer in self.buffers]

    def both(self, call: Callable[[ReplayBuffer], Any]) -> None:
        a, b = (call(buffer) for buffer in self.buffers)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)

    def write(self, rows: TensorDict) -> None:
        self.both(lambda buffer: buffer.extend(rows))

    def check(self, same: Callable[[TensorDict, TensorDict], bool]) -> None:
        dense, once = self.buffers
        if dense.storage.schema is None:
            return
        assert len(dense) == len(once)
        ledgers = [storage.ledger for storage in self.storages]
        assert ledgers[0].cursor == ledgers[1].cursor
        assert torch.equal(*(ledger.write_order() for ledger in ledgers))
        if not len(dense):
            return
        if not self.core:
            once.storage.require().table.native = None
        assert (once.storage.require().table.native is not None) == self.core
        assert same(dense[:], once[:])
        stored = dense.storage.ledger.length
        cells = torch.arange(stored)
        if self.lanes:
            cells = torch.cartesian_prod(*map(torch.arange, (stored, *self.lanes)))
        for contiguous in (False, True):
            reads = [b.storage.read(cells.flip(0), contiguous=contiguous) for b in self.buffers]
            assert same(*reads)
        elements = torch.arange(len(dense)).flip(0)
        asked = [b.storage.require().gather_keys(KEYS[::-1], elements) for b in self.buffers]
        assert same(*(TensorDict(found, [len(dense)]) for found in asked))
        for index in (0, -1, slice(0, 2), slice(1, None, 2), [0, -1, 0]):
            assert same(dense[index], once[index])
        for key in [*KEYS, *([("env",)] if self.interleaved else [])]:
            assert same(*(TensorDict({"x": b[key]}, []) for b in self.buffers))
        check_table(once.storage)


def apply(twins: Twins, rows: Rows, kind: str, size: int, which: int, folder: Path) -> None:
    """Do one operation to both buffers."""
    last, key = (slice(None),) * len(twins.lanes), KEYS[which]
    stored = twins.storages[0].ledger.length
    if kind in ("extend", "turns"):
        twins.write(rows.steps(size + 1, turns=kind == "turns"))
    elif kind == "noise":
        twins.write(rows.noise(size + 1))
    elif kind == "add":
        row = rows.steps(1)[(*last, 0)]
        twins.both(lambda b: b.add(row))
    elif kind == "empty":
        twins.both(lambda b: b.empty())
    elif kind == "pickle":
        copied = copy.deepcopy if which % 2 else lambda buffer: pickle.loads(pickle.dumps(buffer))
        twins.buffers = [copied(buffer) for buffer in twins.buffers]
    elif stored and kind == "cut":
        twins.both(lambda b: b.cut())
    elif stored and kind == "load":  # each buffer loads the rows of the other one
        states = [buffer.state_dict() for buffer in twins.buffers]
        for buffer, state in zip(twins.buffers, reversed(states), strict=True):
            buffer.load_state_dict(state)
    elif stored and kind == "saved":
        for buffer, name in zip(twins.buffers, ("dense", "once"), strict=True):
            buffer.dumps(folder / name)
        for buffer, name in zip(twins.buffers, ("once", "dense"), strict=True):
            buffer.loads(folder / name)
    elif stored:
        change(twins, rows, kind, size, which, last, key)


def change(twins: Twins, rows: Rows, kind: str, size: int, which: int, last: Any, key: Any) -> None:
    """Change stored rows of both buffers."""
    stored = twins.storages[0].ledger.length
    if kind == "write_at" and twins.kind != "stream rings":  # they refuse rows of other writers
        slots, new = torch.tensor([size, which, size]) % stored, rows.noise(3)
        twins.both(lambda b: b.writer.write_at(slots, new))
    elif kind == "set" and twins.kind == "ring":
        slots, new = torch.tensor(sorted({size % stored, which % stored})), rows.noise(2)
        twins.both(lambda b: b.storage.set(slots, new[: len(slots)], set_cursor=bool(which % 2)))
    elif kind == "edit":
        start = size % stored
        at: Any = slice(start, min(start + 3, stored))
        if which == 3:
            at = torch.tensor([start, 0, start])
        new = rows.noise(len(torch.arange(stored)[at]))
        if twins.interleaved:  # the streams stay, so that the writer has room
            new["env"] = twins.buffers[0]["env"][at]
        twins.both(lambda b: b.__setitem__((*last, at) if last else at, new))
    elif kind == "column":
        values = rows.noise(stored)[key]
        twins.both(lambda b: b.set_(key, values))
    elif kind == "cell":
        values, at = rows.noise(1)[(*last, 0)][key], size % stored
        twins.both(lambda b: b.set_at_(key, values, (*last, at) if last else at))
    elif kind == "lane":
        first, steps = (0,) * len(last), slice(size % stored, min(size % stored + 2, stored))
        values = rows.noise(len(range(stored)[steps]))[first][key]
        twins.both(lambda b: b.set_at_(key, values, (*first, steps) if last else steps))
    elif kind == "env" and twins.kind == "streams":
        at, values = torch.tensor([size % stored, which % stored]), rows.noise(2)["env"]
        twins.both(lambda b: b.set_at_("env", values, at))
    elif kind == "patch":
        slots, values = torch.tensor([size, which, 0]) % stored, rows.other.noise(3)[key]
        index = slots
        if last:
            index = torch.stack([slots, *(torch.tensor([0, size, 1]) % n for n in twins.lanes)], -1)
        ids = {"index": index, "generation": twins.storages[0].ledger.generations(slots)}
        twins.both(lambda b: b.update_if_present(**ids, patch={key: values}).updated)
