"""Saves buffers of TorchRL: ``python make_torchrl.py FOLDER KIND ...``, each in ``FOLDER/KIND``.

Needs torchrl, not replaykit.

The directories ``fixtures/torchrl_*`` were made with it; see ``fixtures/README.md``.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import prioritized as samplers


class Leaves:
    """In the place of TorchRL's trees where these are not compiled for this torch: what is saved
    of a tree are its leaves, float32."""

    def __init__(self, capacity: int) -> None:
        self._values = torch.zeros(capacity)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._values[index] = torch.as_tensor(value, dtype=torch.float32)

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return found if found.ndim else found.item()


def trees() -> Any:
    """While samplers are made: TorchRL's trees, or what takes their place; nobody else gets it."""
    missing = {}
    if samplers.SumSegmentTreeFp32 is None:
        # It asks for all of them, and uses those of 32.
        missing = {
            f"{kind}SegmentTreeFp{bits}": Leaves for kind in ("Sum", "Min") for bits in (32, 64)
        }
    return mock.patch.multiple(samplers, **missing) if missing else contextlib.nullcontext()


def rows(start: int, stop: int) -> TensorDict:
    """Rows that tell their number in every column."""
    number = torch.arange(start, stop)
    return TensorDict(
        {
            "obs": torch.stack([number, number + 0.5], -1).float(),
            "pixels": number[:, None].expand(-1, 4).to(torch.uint8),
            "half": number.to(torch.bfloat16),
            "next": {"reward": number[:, None].double(), "done": (number % 5 == 4)[:, None]},
        },
        [stop - start],
    )


def prioritized() -> TensorDictReplayBuffer:
    """A ring of 10 slots after 13 rows, with a priority of (slot + 1) / 10 each."""
    with trees():
        sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10),
        sampler=sampler,
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(rows(0, 7))
    buffer.extend(rows(7, 13))
    buffer.update_priority(torch.arange(10), torch.arange(1, 11) / 10)
    return buffer


def random() -> ReplayBuffer:
    """7 rows in 10 slots."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=RandomSampler(),
        writer=RoundRobinWriter(),
        batch_size=3,
    )
    buffer.extend(rows(0, 7))
    return buffer


def lanes() -> ReplayBuffer:
    """4 time steps of 3 lanes, in 5 slots."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(15, ndim=2), batch_size=3)
    buffer.extend(rows(0, 12).reshape(4, 3))
    return buffer


def tensor() -> ReplayBuffer:
    """Rows that are tensors."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(6), batch_size=3)
    buffer.extend(torch.arange(8.0)[:, None].expand(8, 2).clone())
    return buffer


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        globals()[kind]().dumps(f"{sys.argv[1]}/{kind}")
