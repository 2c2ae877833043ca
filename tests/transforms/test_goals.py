"""New goals by the core are those by torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.transforms import HindsightGoal
from replaykit.transforms.hindsight import (
    REACHED,
    distance_rewards,
    relabel_rows,
)

ACHIEVED, GOAL, NEXT_GOAL = ("next", "achieved_goal"), ("desired_goal",), ("next", "desired_goal")
REWARD = ("next", "reward")


def leaves_of(
    size: int, width: int, dtype: torch.dtype, packed: bool, seed: int, flat: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict[Any, torch.Tensor]]:
    """Chosen rows, fresh goals and leaves; packed: views of one block, side by side."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(size, 3 * width + 1, dtype=dtype, generator=generator) * 0.05
    block[::3, 0] = float("nan")
    parts = [block[:, k * width : (k + 1) * width] for k in range(3)] + [block[:, 3 * width :]]
    if not packed:
        parts = [part.clone() for part in parts]
    if flat:
        parts[3] = parts[3][:, 0]
    fresh = torch.randn(size, width, dtype=dtype, generator=generator) * 0.05
    rows = torch.rand(size, generator=generator) < 0.7
    return rows, fresh, dict(zip((ACHIEVED, GOAL, NEXT_GOAL, REWARD), parts, strict=True))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


@given(
    size=st.integers(0, 40) | st.just(5000),
    width=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    packed=st.booleans(),
    flat=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_the_core_and_torch_agree(
    size: int, width: int, dtype: torch.dtype, packed: bool, flat: bool, seed: int
) -> None:
    rows, fresh, leaves = leaves_of(size, width, dtype, packed, seed, flat)
    before = leaves[ACHIEVED].clone()
    expected, _ = HindsightGoal()._relabelled(leaves, rows, fresh)
    assert relabel_rows(rows.numpy(), fresh.numpy(), list(leaves.values()))
    assert set(expected) == {GOAL, NEXT_GOAL, REWARD}
    for key, value in expected.items():
        assert leaves[key].shape == value.shape
        assert bits(leaves[key]) == bits(value), key
    assert bits(leaves[ACHIEVED]) == bits(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_distance_reward_depends_on_threshold(dtype: torch.dtype) -> None:
    apart = torch.tensor([0.0, 0.0499, 0.0501, 1.0, float("nan")], dtype=torch.float64)
    goal = torch.zeros(5, 2, dtype=torch.float64)
    achieved = torch.stack([apart, torch.zeros(5)], 1)
    found = distance_rewards(achieved, goal, torch.zeros(5, 1, dtype=dtype))
    assert found.dtype == dtype
    assert found.flatten().tolist() == [0, 0, -1, -1, -1]
    assert REACHED == 0.05
    # Goals of several dimensions; integers.
    whole = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 5]]])
    assert distance_rewards(whole, whole[:1].expand(2, 2, 2), torch.zeros(2)).tolist() == [0, -1]
