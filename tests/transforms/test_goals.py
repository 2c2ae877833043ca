"""New goals by the core are those by torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import native
from replaykit.transforms import HindsightGoal, goals
from replaykit.transforms.goals import REACHED, distance_rewards, relabelled

ACHIEVED, GOAL, NEXT_GOAL = ("next", "achieved_goal"), ("desired_goal",), ("next", "desired_goal")
REWARD = ("next", "reward")
KEYS = (ACHIEVED, (GOAL, NEXT_GOAL), REWARD)


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


@pytest.mark.skipif(native.core() is None, reason="needs the compiled core")
@given(
    size=st.integers(0, 40),
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
    before = {key: leaf.clone() for key, leaf in leaves.items()}
    found = relabelled(rows.numpy(), fresh, leaves, *KEYS)
    assert found is not None
    expected, _ = HindsightGoal()._relabelled(leaves, rows, fresh)
    assert set(found) == set(expected) == {GOAL, NEXT_GOAL, REWARD}
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert bits(found[key]) == bits(value), key
    assert all(bits(leaves[key]) == bits(leaf) for key, leaf in before.items())


def test_many_rows_at_once() -> None:
    rows, fresh, leaves = leaves_of(5000, 3, torch.float32, True, 0)
    found = relabelled(rows.numpy(), fresh, leaves, *KEYS)
    if found is None:
        assert native.core() is None
        return
    expected, _ = HindsightGoal()._relabelled(leaves, rows, fresh)
    assert all(bits(found[key]) == bits(value) for key, value in expected.items())


def test_leaves_that_the_core_does_not_know() -> None:
    rows, fresh, leaves = leaves_of(6, 3, torch.float32, False, 0)
    for other in (
        {GOAL: leaves[GOAL].double()},
        {GOAL: leaves[GOAL].T.contiguous().T},
        {REWARD: torch.zeros(6, 2)},
        {REWARD: torch.zeros(6, 1, dtype=torch.int64)},
        {ACHIEVED: torch.zeros(6, 3, 1)},
        {ACHIEVED: torch.zeros(6, 2)},
    ):
        assert relabelled(rows.numpy(), fresh, {**leaves, **other}, *KEYS) is None
    assert relabelled(rows.numpy(), fresh.T.contiguous().T, leaves, *KEYS) is None
    assert relabelled(rows.numpy(), fresh.to(torch.float16), leaves, *KEYS) is None


def test_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "_core", None)
    rows, fresh, leaves = leaves_of(6, 3, torch.float32, False, 0)
    assert relabelled(rows.numpy(), fresh, leaves, *KEYS) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_what_is_near_enough(dtype: torch.dtype) -> None:
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
