"""Rewards clipped, scaled, shifted and mapped, on real rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    RewardClip,
    RewardMap,
    RewardScale,
    RewardShift,
)
from tests.support.refusals import refuses

REWARD = ("next", "reward")
VALUES = [-3.0, -1.0, float("inf"), 0.0, 0.5, float("nan"), 7.0]

# Each with what NumPy makes of the same numbers.
CASES: list[tuple[Any, Any]] = [
    (RewardClip(-1, 1), lambda r: np.clip(r, -1, 1)),
    (RewardClip(0.25, float("inf")), lambda r: np.clip(r, 0.25, np.inf)),
    (RewardClip(-float("inf"), 0), lambda r: np.minimum(r, 0)),
    (RewardScale(0.1), lambda r: r * 0.1),
    (RewardScale(4, shift=-2), lambda r: r * 4 - 2),
    (RewardShift(1.5), lambda r: r + 1.5),
    (RewardMap(torch.abs), np.abs),
    (RewardMap(lambda r: 3 * r**2), lambda r: 3 * r**2),
]
IDS = [f"{number}-{type(transform).__name__}" for number, (transform, _) in enumerate(CASES)]


def batch(values: Any, dtype: torch.dtype = torch.float64) -> TensorDict:
    reward = torch.tensor(values, dtype=dtype)[:, None]
    n = len(reward)
    return TensorDict({"x": torch.arange(n), "next": {"reward": reward, "x": torch.ones(n)}}, [n])


@pytest.mark.parametrize(("transform", "model"), CASES, ids=IDS)
def test_rewards_are_mapped_and_nothing_else(transform: Any, model: Any, fingerprint: Any) -> None:
    data = batch(VALUES)
    before = fingerprint(data)
    out = transform(data)
    assert out[REWARD].shape == (len(VALUES), 1)
    assert out[REWARD].dtype is torch.float64
    np.testing.assert_allclose(out[REWARD].squeeze(-1).numpy(), model(np.array(VALUES)), rtol=1e-15)
    assert out["x"] is data["x"]
    assert out["next", "x"] is data["next", "x"]
    assert fingerprint(data) == before
    assert transform.inv(data) is data
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert transform(batch(VALUES, dtype))[REWARD].dtype is dtype


@pytest.mark.parametrize(("transform", "model"), CASES, ids=IDS)
@pytest.mark.parametrize("name", ["validity_mask", ("collector", "mask"), "column", "mask"])
def test_padding_keeps_its_values(transform: Any, model: Any, name: Any) -> None:
    data = batch(VALUES)
    real = torch.tensor([True, False, True, True, False, True, True])
    if name == "mask":  # that of padded trajectories, which are laid side by side
        data, real = data.reshape(1, -1), real[None]
    if name == "column":
        data["validity_mask"] = real[:, None]
    else:
        data[name] = real
    out = transform(data)[REWARD].squeeze(-1).numpy()
    expected = np.where(real.numpy(), model(np.array(VALUES)), np.array(VALUES))
    np.testing.assert_allclose(out, expected, rtol=1e-15)


def test_several_masks_count_together_and_other_columns_are_no_masks() -> None:
    data = batch([0.0, 0.0, 0.0, 0.0])
    data["validity_mask"] = torch.tensor([True, True, False, False])
    data["collector", "mask"] = torch.tensor([True, False, True, False])
    data["mask"] = torch.tensor([False, True, False, False])  # of actions, say: no time in it
    assert RewardShift(1)(data)[REWARD].squeeze(-1).tolist() == [1, 0, 0, 0]
    for own in (torch.zeros(4), torch.zeros(4, 2, dtype=torch.bool)):
        data = batch([0.0, 0.0, 0.0, 0.0]).set("validity_mask", own)
        assert RewardShift(1)(data)[REWARD].squeeze(-1).tolist() == [1] * 4


def test_a_function_gets_real_rows_alone() -> None:
    given = []

    def centred(reward: torch.Tensor) -> torch.Tensor:
        given.append(reward.clone())
        return reward - reward.mean()

    data = batch([1.0, 3.0, 1000.0])
    data["validity_mask"] = torch.tensor([True, True, False])
    assert RewardMap(centred)(data)[REWARD].squeeze(-1).tolist() == [-1, 1, 1000]
    assert given[0].squeeze(-1).tolist() == [1, 3]
    data["validity_mask"] = torch.zeros(3, dtype=torch.bool)
    assert RewardMap(torch.sign)(data)[REWARD].squeeze(-1).tolist() == [1, 3, 1000]


def test_a_function_may_change_the_dtype() -> None:
    data = batch([1.5, -2.5, 4.0])
    assert RewardMap(lambda r: r.long())(data)[REWARD].squeeze(-1).tolist() == [1, -2, 4]
    data["validity_mask"] = torch.tensor([True, False, True])
    out = RewardMap(lambda r: 10 * r.long())(data)[REWARD]
    assert out.dtype is torch.int64
    assert out.squeeze(-1).tolist() == [10, -2, 40]


def test_keys_and_shapes_are_free() -> None:
    reward = torch.arange(12.0).view(2, 3, 2)
    data = TensorDict(
        {"a": {"r": reward}, "validity_mask": torch.ones(2, 3, dtype=torch.bool)}, [2, 3]
    )
    data["validity_mask"][1, 2] = False
    out = RewardScale(2, key=("a", "r"))(data)["a", "r"]
    assert torch.equal(out[0], reward[0] * 2)
    assert out[1].tolist() == [[12, 14], [16, 18], [10, 11]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
@pytest.mark.parametrize(
    ("low", "high", "whole"),
    [
        (-1, 2, True),
        (-500.0, 500.0, True),
        (-float("inf"), 3, True),
        (-0.5, 2, False),
        (1, 1.5, False),
        (1000, 2000, None),
    ],
)
def test_integers_stay_integers_if_clipped_to_integers(
    dtype: torch.dtype, low: float, high: float, whole: Any
) -> None:
    values = [0, 1, 2, 3, 100] if dtype is torch.uint8 else [-100, -1, 0, 2, 100]
    out = RewardClip(low, high)(batch(values, dtype))[REWARD]
    if whole is None:
        whole = torch.iinfo(dtype).max > 1000
    assert out.dtype is (dtype if whole else torch.float32)
    assert out.squeeze(-1).tolist() == np.clip(np.array(values, np.float64), low, high).tolist()
    data = batch([1, 2, 3], dtype)
    assert RewardScale(0.5, 1)(data)[REWARD].squeeze(-1).tolist() == [1.5, 2.0, 2.5]
    assert RewardShift(0.25)(data)[REWARD].squeeze(-1).tolist() == [1.25, 2.25, 3.25]


@pytest.mark.parametrize(("transform", "model"), CASES, ids=IDS)
def test_invalid_rewards_are_refused(transform: Any, model: Any) -> None:
    with pytest.raises(KeyError, match=r"no key \('next', 'reward'\); there are 'x'"):
        transform(TensorDict({"x": torch.zeros(2)}, [2]))
    with pytest.raises(TypeError, match=r"expected a TensorDict with \('next', 'reward'\), got Te"):
        transform(torch.zeros(2))
    with pytest.raises(ValueError, match="expected a tensor, got TensorDict"):
        transform(TensorDict({"next": {"reward": {"x": torch.zeros(2)}}}, [2]))
    for dtype in (torch.bool, torch.complex64):
        refuses(TypeError, f"expected real numbers, got {dtype}", transform, batch([0, 1], dtype))


def test_result_of_a_reward_function_is_checked() -> None:
    with pytest.raises(ValueError, match=r"rewards of shape \[2, 1\], got \[2\]"):
        RewardMap(lambda r: r.squeeze(-1))(batch([0, 1]))
    with pytest.raises(TypeError, match="expected a tensor of rewards, got list"):
        RewardMap(lambda r: r.tolist())(batch([0, 1]))


def test_a_tensorclass_is_mapped() -> None:
    @tensorclass
    class Row:
        reward: torch.Tensor

    rb = ReplayBuffer(storage=LazyTensorStorage(2), transform=RewardShift(1, key="reward"))
    rb.extend(Row(reward=torch.zeros(2, 1), batch_size=[2]))
    assert rb[:].reward.tolist() == [[1], [1]]
    assert isinstance(rb[:], Row)
