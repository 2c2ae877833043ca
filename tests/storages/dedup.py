"""Buffers and rows for tests of observations that are stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

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
