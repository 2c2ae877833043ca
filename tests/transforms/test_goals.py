"""New goals by the core are those by torch, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import native
from replaykit.transforms import HindsightGoal
from replaykit.transforms.hindsight import (
    REACHED,
    distance_rewards,
    later_goals,
    relabel_rows,
)
from tests.support.refusals import refuses

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


def ring_of(
    size: int, slots: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Draws, first and last times of stored rows, and a column beside others."""
    random = np.random.default_rng(seed)
    newest = slots + int(random.integers(0, 3 * slots))
    low = newest - random.integers(0, slots, size)
    last = low + (random.random(size) * (newest - low + 1)).astype(np.int64)
    column = torch.randn(slots, width + 2, generator=torch.Generator().manual_seed(seed)) * 0.05
    return random.random((2, size)), low, last, column.to(dtype)[:, 1 : 1 + width]


@given(
    size=st.sampled_from([0, 1, 7, 256, 600, 1500]),
    slots=st.integers(1, 60),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_goals_drawn_by_the_core_are_those_by_numpy(
    size: int, slots: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    draws, low, last, column = ring_of(size, slots, width, dtype, seed)
    further = last - low
    time = low + np.minimum((draws[1] * (further + 1)).astype(np.int64), further)
    rows = draws[0] < 0.8
    expected = column[torch.from_numpy(time % slots)]
    found = later_goals(draws, low, last, 0.8, column)
    assert found is not None
    assert (found[0] == rows).all()
    assert bits(torch.from_numpy(found[1])) == bits(expected)


def test_invalid_draws_and_times_are_refused() -> None:
    draws, low, last, column = ring_of(4, 9, 2, torch.float32, 0)
    for wrong in (
        (np.array([[0.0] * 4, [0, 0, 1.0, 0]]), low, last),
        (np.array([[0.0] * 4, [0, 0, np.nan, 0]]), low, last),
        (draws, low, low - [0, 0, 1, 0]),
        (draws, np.where(np.arange(4) == 2, -1, low), last),
    ):
        refuses(IndexError, "row 2", later_goals, *wrong, 0.8, column)
    for short in ((draws[:, :3].copy(), low, last), (draws, low[:3], last), (draws, low, last[:3])):
        refuses(ValueError, "entries in", later_goals, *short, 0.8, column)
    refuses(TypeError, "`draws`", later_goals, draws.astype(np.float32), low, last, 0.8, column)


def test_core_declines_unsupported_columns() -> None:
    draws, low, last, column = ring_of(4, 9, 2, torch.float32, 0)
    for other in (column.half(), column[:, 0], column.T.contiguous().T, column[:0]):
        assert later_goals(draws, low, last, 0.8, other) is None


def test_core_declines_unsupported_leaves() -> None:
    rows, fresh, leaves = leaves_of(6, 3, torch.float32, False, 0)
    for other in (
        {GOAL: leaves[GOAL].double()},
        {GOAL: leaves[GOAL].T.contiguous().T},
        {REWARD: torch.zeros(6, 2)},
        {REWARD: torch.zeros(6, 1, dtype=torch.int64)},
        {ACHIEVED: torch.zeros(6, 3, 1)},
        {ACHIEVED: torch.zeros(6, 2)},
    ):
        its = list({**leaves, **other}.values())
        before = [bits(leaf) for leaf in its]
        assert not relabel_rows(rows.numpy(), fresh.numpy(), its)
        assert [bits(leaf) for leaf in its] == before
    for goals in (fresh.half(), fresh[0]):
        assert not relabel_rows(rows.numpy(), goals.numpy(), list(leaves.values()))
    with pytest.raises(TypeError, match="`goals` as a contiguous"):
        relabel_rows(rows.numpy(), fresh.T.contiguous().T.numpy(), list(leaves.values()))
    with pytest.raises(ValueError, match="entries in `goals`"):
        native.core.relabel(rows.numpy(), fresh.numpy()[:5], REACHED, *[0] * 8)


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
