"""Copies of what was stored."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from replaykit import Compose, KeepRaw, LazyTensorStorage, ReplayBuffer, RewardScale


def make(rows: int) -> TensorDict:
    return TensorDict({"next": {"reward": torch.arange(rows)[:, None] * 1.0}}, [rows])


def test_keep_raw_adds_stored_values_to_transformed_batch() -> None:
    chain = Compose(KeepRaw([("next", "reward")], under="stored"), RewardScale(2.0))
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=chain)
    rb.extend(make(8))
    batch = rb.sample(32)
    assert torch.equal(batch["stored", "next", "reward"][:, 0].long(), batch["index"])
    assert torch.equal(batch["next", "reward"], batch["stored", "next", "reward"] * 2)


def test_keep_raw_must_precede_transforms_of_values() -> None:
    with pytest.raises(ValueError, match=r"KeepRaw.*'raw'.*before.*RewardScale"):
        Compose(RewardScale(2.0), KeepRaw([("next", "reward")]))
    sorted_chain = Compose(RewardScale(2.0), KeepRaw([("next", "reward")]), order="auto")
    assert [type(each) for each in sorted_chain] == [KeepRaw, RewardScale]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        Compose(order="any")


@pytest.mark.parametrize("keys", [[], "reward"])
def test_keys_are_a_list(keys: object) -> None:
    with pytest.raises(ValueError, match="list"):
        KeepRaw(keys)  # type: ignore[arg-type]


def test_a_key_that_is_not_there_or_in_the_way_is_named() -> None:
    with pytest.raises(KeyError, match="absent"):
        KeepRaw(["absent"])(make(2))
    data = make(2).set(("raw", "next", "reward"), torch.zeros(2))
    with pytest.raises(KeyError, match="expected no key"):
        KeepRaw([("next", "reward")])(data)
