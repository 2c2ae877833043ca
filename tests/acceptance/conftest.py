"""Rows of episodes that are given by their ends alone, and buffers that draw from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer


@pytest.fixture(scope="session")
def ted() -> Callable[..., TensorDict]:
    """``ted(codes, start=0, **columns)``: rows ``[T]``, or ``[lanes, T]`` from nested lists.

    A code is 0 (goes on), 1 (terminated) or 2 (truncated). Row t of a lane has ``t = start + t``,
    ``observation = t``, ``("next", "observation") = t + 1`` and reward t, unless columns say more.
    Keys of columns with a dot go under ``next``: ``ted([0], **{"next.reward": ...})``.
    """

    def make(codes: Any, start: int = 0, **columns: Any) -> TensorDict:
        code = torch.as_tensor(codes)
        t = (start + torch.arange(code.shape[-1])).expand(code.shape).clone()
        rows = TensorDict(
            {
                "t": t,
                "observation": t.float().unsqueeze(-1),
                "next": {
                    "observation": t.float().unsqueeze(-1) + 1,
                    "reward": t.float().unsqueeze(-1),
                    "terminated": (code == 1).unsqueeze(-1),
                    "truncated": (code == 2).unsqueeze(-1),
                    "done": (code > 0).unsqueeze(-1),
                },
            },
            code.shape,
        )
        for name, value in columns.items():
            rows[tuple(name.split("."))] = torch.as_tensor(value)
        return rows

    return make


@pytest.fixture(scope="session")
def codes_of() -> Callable[..., list[int]]:
    """``codes_of([3, 9])``: codes of episodes of these lengths, each of which terminates."""
    return lambda lengths, last=1: [c for n in lengths for c in [0] * (n - 1) + [last]]


@pytest.fixture(scope="session")
def buffer() -> Callable[..., ReplayBuffer]:
    """``buffer(capacity, sampler=None, lanes=1, lane_key=None, **options)``, seeded with 0."""

    def make(
        capacity: int, sampler: Any = None, *, lanes: int = 1, lane_key: Any = None, **options: Any
    ) -> ReplayBuffer:
        storage = LazyTensorStorage(
            capacity * lanes, ndim=1 if lanes == 1 else 2, lane_key=lane_key
        )
        options.setdefault("generator", torch.Generator().manual_seed(0))
        return ReplayBuffer(storage=storage, sampler=sampler, **options)

    return make
