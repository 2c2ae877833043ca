"""Small transitions: uniform sample, add and extend against raw torch, TorchRL and cpprb.

A row has an observation and a next one of 17 floats, an action of 6, a reward and six flags: 10
leaves, 170 bytes. Every contender holds the same rows and returns (or takes) the same leaves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness import Contender, Timing, measure
from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.ted import DEFAULT_DONE_KEYS

__all__ = ["run"]

BATCH = 256
CHUNK = 10_000

Leaves = dict[tuple[str, ...], torch.Tensor]


def make_leaves(rows: int) -> Leaves:
    """Returns the columns of the work, with values that tell rows apart."""
    draw = torch.Generator().manual_seed(0)
    leaves: Leaves = {
        ("observation",): torch.randn(rows, 17, generator=draw),
        ("action",): torch.randn(rows, 6, generator=draw),
        ("next", "observation"): torch.randn(rows, 17, generator=draw),
        ("next", "reward"): torch.arange(rows, dtype=torch.float32).unsqueeze(-1),
    }
    for name in DEFAULT_DONE_KEYS:
        leaves[(name,)] = torch.zeros(rows, 1, dtype=torch.bool)
        leaves["next", name] = torch.rand(rows, 1, generator=draw) < 0.01
    return leaves


def as_tensordict(leaves: Leaves) -> TensorDict:
    """Returns the columns as one TensorDict."""
    rows = len(leaves["action",])
    data = TensorDict({}, batch_size=[rows])
    for key, value in leaves.items():
        data.set(key, value)
    return data


class RawTorch:
    """The floor: preallocated columns, one operation per leaf and call."""

    name = "raw torch"

    def __init__(self, leaves: Leaves) -> None:
        self.columns = {key: value.clone() for key, value in leaves.items()}
        self.rows = len(leaves["action",])
        self.cursor = 0

    def sample(self) -> tuple[torch.Tensor, Leaves]:
        index = torch.randint(self.rows, (BATCH,))
        return index, {key: c.index_select(0, index) for key, c in self.columns.items()}

    def writer(self, count: int, leaves: Leaves) -> Callable[[], Any]:
        blocks = [{k: v[i : i + count] for k, v in leaves.items()} for i in range(0, 64, count)]
        source = itertools.cycle(blocks)

        def write() -> None:
            block = next(source)
            start = self.cursor
            for key, column in self.columns.items():
                column[start : start + count].copy_(block[key])
            self.cursor = (start + count) % (self.rows - count)

        return write

    def __len__(self) -> int:
        return self.rows

    def read(self, index: torch.Tensor) -> Leaves:
        return {key: column[index] for key, column in self.columns.items()}


class Ours:
    """replaykit's ReplayBuffer over a LazyTensorStorage."""

    name = "replaykit"

    def __init__(self, leaves: Leaves) -> None:
        rows = len(leaves["action",])
        self.buffer: Any = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=BATCH)
        self._fill(leaves, rows)

    def _fill(self, leaves: Leaves, rows: int) -> None:
        data = as_tensordict(leaves)
        for start in range(0, rows, CHUNK):
            self.buffer.extend(data[start : start + CHUNK])

    def sample(self) -> tuple[torch.Tensor, Leaves]:
        batch = self.buffer.sample()
        return batch["index"], {key: batch[key] for key in make_leaves(1)}

    def sampler(self) -> Callable[[], Any]:
        return self.buffer.sample

    def writer(self, count: int, leaves: Leaves) -> Callable[[], Any]:
        data = as_tensordict(leaves)
        if count == 1:
            rows = itertools.cycle([data[i].clone() for i in range(64)])
            return lambda: self.buffer.add(next(rows))
        blocks = itertools.cycle([data[i : i + count].clone() for i in range(0, 64, count)])
        return lambda: self.buffer.extend(next(blocks))

    def __len__(self) -> int:
        return len(self.buffer)

    def read(self, index: torch.Tensor) -> Leaves:
        rows = self.buffer[index]
        return {key: rows[key] for key in make_leaves(1)}


class TorchRL(Ours):
    """TorchRL's TensorDictReplayBuffer over its LazyTensorStorage."""

    name = "TorchRL"

    def __init__(self, leaves: Leaves) -> None:
        os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
        from torchrl.data import LazyTensorStorage as Storage
        from torchrl.data import TensorDictReplayBuffer

        rows = len(leaves["action",])
        self.buffer = TensorDictReplayBuffer(storage=Storage(rows), batch_size=BATCH)
        self._fill(leaves, rows)


class Cpprb:
    """cpprb's ReplayBuffer; samples become tensors without a copy."""

    name = "cpprb"

    def __init__(self, leaves: Leaves) -> None:
        import cpprb

        self.rows = len(leaves["action",])
        self.names = {"/".join(key): key for key in leaves}
        fields = {
            name: {"shape": tuple(leaves[key].shape[1:]), "dtype": leaves[key].numpy().dtype}
            for name, key in self.names.items()
        }
        self.buffer = cpprb.ReplayBuffer(self.rows, fields)
        arrays = self._arrays(leaves)
        for start in range(0, self.rows, CHUNK):
            self.buffer.add(**{name: a[start : start + CHUNK] for name, a in arrays.items()})

    def _arrays(self, leaves: Leaves) -> dict[str, Any]:
        return {name: leaves[key].numpy() for name, key in self.names.items()}

    def sample(self) -> tuple[torch.Tensor, Leaves]:
        batch = self.buffer.sample(BATCH)
        found = {key: torch.from_numpy(batch[name]) for name, key in self.names.items()}
        # It does not tell the index; the reward of a row is its number.
        return found["next", "reward"].flatten().long(), found

    def writer(self, count: int, leaves: Leaves) -> Callable[[], Any]:
        arrays = self._arrays(leaves)
        blocks = itertools.cycle(
            [{n: a[i : i + count].copy() for n, a in arrays.items()} for i in range(0, 64, count)]
        )
        return lambda: self.buffer.add(**next(blocks))

    def __len__(self) -> int:
        return self.rows

    def read(self, index: torch.Tensor) -> Leaves:
        rows = self.buffer._encode_sample(index.numpy())
        return {key: torch.from_numpy(rows[name]) for name, key in self.names.items()}


def check_samples(contender: Any, leaves: Leaves) -> None:
    """Raises where a sample is not the rows that its index names, or too few rows are drawn."""
    seen = set()
    for _ in range(20):
        index, batch = contender.sample()
        seen.update(index.tolist())
        for key, column in leaves.items():
            if not batch[key].equal(column[index]):
                raise AssertionError(f"{contender.name}: {key} differs from the rows written")
    expected = min(len(leaves["action",]), 20 * BATCH) / 2
    if len(seen) < expected:
        raise AssertionError(f"{contender.name}: only {len(seen)} rows drawn")


def check_writes(contender: Any, count: int, leaves: Leaves) -> None:
    """Raises where rows that were written do not read back as they are."""
    write = contender.writer(count, leaves)
    write()
    rewards = contender.read(torch.arange(len(contender)))["next", "reward"].flatten()
    written = leaves["next", "reward"][:count].flatten()
    slots = torch.stack([(rewards == reward).nonzero()[-1, 0] for reward in written])
    stored = contender.read(slots)
    for key, column in leaves.items():
        if not stored[key].equal(column[:count]):
            raise AssertionError(f"{contender.name}: {key} is not what was written")


def run(rows: int, rounds: int) -> tuple[list[Timing], dict[str, str]]:
    """Measures; returns timings, and the contenders that could not be loaded with the reason."""
    leaves = make_leaves(rows)
    fresh = {key: value[:64].clone() for key, value in leaves.items()}
    # Rewards below zero: rows that none of the contenders holds yet.
    fresh["next", "reward"] = -1 - torch.arange(64, dtype=torch.float32).unsqueeze(-1)
    absent: dict[str, str] = {}
    contenders: list[Any] = []
    for kind in (Ours, RawTorch, TorchRL, Cpprb):
        try:
            contenders.append(kind(leaves))
        except ImportError as error:
            absent[kind.name] = str(error)
    for contender in contenders:
        check_samples(contender, leaves)
    timings = measure(
        f"sample {BATCH} of {rows:,}",
        [Contender(c.name, getattr(c, "sampler", lambda c=c: c.sample)()) for c in contenders],
        rounds=rounds,
    )
    for count, work in ((1, "add 1"), (8, "extend 8"), (64, "extend 64")):
        for contender in contenders:
            check_writes(contender, count, fresh)
        timings += measure(
            work,
            [Contender(c.name, c.writer(count, fresh)) for c in contenders],
            rounds=rounds,
        )
    return timings, absent
