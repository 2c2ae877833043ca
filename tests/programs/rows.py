"""Rows of random programs: plain numbers, and the TensorDicts that hold them.

All leaves of a row follow from a few numbers of it, so that a mixture of two rows is seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tests.programs.model import Values

WIDE = 160
"""The elements of a leaf that is too wide for the record of a row."""

COLUMNS: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {
    "id": ("id", torch.int64, ()),
    "env": ("env", torch.int64, ()),
    "observation": ("observation", torch.float32, (3,)),
    "version": ("version", torch.int64, ()),
    "rank": ("rank", torch.float32, ()),
    "wide": ("wide", torch.float32, (WIDE,)),
    "next_observation": (("next", "observation"), torch.float32, (3,)),
    "reward": (("next", "reward"), torch.float32, (1,)),
    "done": (("next", "done"), torch.bool, (1,)),
    "terminated": (("next", "terminated"), torch.bool, (1,)),
    "truncated": (("next", "truncated"), torch.bool, (1,)),
}
"""The key, dtype and shape of each number of a row."""
FLAGS = ("done", "terminated", "truncated")
N_STEP = {
    "discount": ("discount", torch.float32, (1,)),
    "steps_used": ("steps_used", torch.int64, (1,)),
    "bootstrap": ("bootstrap", torch.bool, (1,)),
}
RETURNS = {
    "return": ("episode_return", torch.float32, (1,)),
    "valid": ("return_valid", torch.bool, (1,)),
}
"""The columns that `ReturnToGo` stores."""


def make_values(stream: int, step: int, end: str) -> Values:
    """Return the numbers of step ``step`` of a stream; ``end`` says how the row ends."""
    number = 1000 * stream + step
    return {
        "id": number,
        "env": stream,
        "observation": float(number),
        "version": step // 4,
        "rank": float(number * 7 % 23),
        "wide": float(number) + 0.25,
        "next_observation": number + (1.0 if end == "open" else 0.5),
        "reward": float(number % 8),
        "done": end != "open",
        "terminated": end == "terminated",
        "truncated": end == "truncated",
    }


def _leaf(values: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return one leaf: each number, plus 0, 1/8, 2/8, ... along a feature dimension."""
    leaf = torch.tensor(values, dtype=dtype)
    if not shape:
        return leaf
    leaf = leaf[:, None].expand(-1, *shape)
    return leaf + torch.arange(shape[0]) / 8 if shape[0] > 1 else leaf.clone()


def to_tensordict(rows: list[Values], lanes: int = 1, *, time_first: bool = True) -> TensorDict:
    """Return rows ``[N]``, or with lanes ``[time, lanes]``, as storages have them.

    ``time_first=False`` returns ``[lanes, time]``, as buffers are given them.
    """
    made = TensorDict({}, [len(rows)])
    with_returns = bool(rows) and "return" in rows[0]
    for name, (key, dtype, shape) in {**COLUMNS, **(RETURNS if with_returns else {})}.items():
        made[key] = _leaf([row.get(name, 0) for row in rows], dtype, shape)
    if lanes == 1:
        return made
    made = made.reshape(len(rows) // lanes, lanes)
    return made if time_first else made.transpose(0, 1).contiguous()


def to_columns(rows: Any, lanes: int = 1) -> dict[str, np.ndarray]:
    """Return the numbers of rows as one array for each name, and check all elements of leaves."""
    if isinstance(rows, list):
        rows = torch.stack(rows)
    if lanes > 1:
        rows = rows.reshape(-1)
    found = {}
    for name, (key, dtype, shape) in {**COLUMNS, **N_STEP, **RETURNS}.items():
        leaf = rows.get(key, None)
        if leaf is None:
            assert name not in COLUMNS, f"{key} is missing"
            continue
        assert leaf.dtype == dtype, f"{key} has {leaf.dtype}"
        assert leaf.shape == (len(rows), *shape), f"{key} has the shape {tuple(leaf.shape)}"
        array = leaf.detach().numpy()
        if shape:
            first = array[:, 0]
            if shape[0] > 1:
                wanted = first[:, None] + np.arange(shape[0], dtype=np.float32) / 8
                assert (array == wanted).all(), f"{key} mixes values of several rows"
            array = first
        found[name] = array
    return found


def check_rows(
    found: dict[str, np.ndarray], wanted: list[Values], without: tuple[str, ...] = ()
) -> None:
    """Compare rows with those of the model, all columns of all rows."""
    for name, array in found.items():
        if name in without:
            continue
        expected = np.array([row[name] for row in wanted], dtype=array.dtype)
        assert array.shape == expected.shape, f"{len(expected)} rows expected, got {len(array)}"
        if not np.array_equal(array, expected):
            raise AssertionError(f"{name}: expected {expected.tolist()}, got {array.tolist()}")
