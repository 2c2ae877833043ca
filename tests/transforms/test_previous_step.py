"""What came before a row, and how many rows, against a scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    ReplayBuffer,
)
from tests.support.refusals import refuses
from tests.transforms.streams import Streams


def test_concat_joins_reward_and_action() -> None:
    """Reward in column 0, the action after it, zeros at the first row."""
    own = Streams(PreviousStep(concat=True, num_actions=41))
    own.extend([[0], [1], [0], [0], [0]])
    found = own.drawn()
    for number, row in found.items():
        step = number[1]
        begins = step in (0, 2)
        columns = row["previous_step"]
        assert columns.dtype is torch.float32
        one_hot = [0.0] * 41
        if not begins:
            one_hot[(step - 1) * 10] = 1.0
        reward = 0.0 if begins else own.rows[0][step - 1].reward
        assert columns.tolist() == [reward, *one_hot]
        assert row["next", "previous_step"][1 + step * 10].item() == 1.0
        assert row["next", "previous_step"][0].item() == own.rows[0][step].reward


@pytest.mark.parametrize(
    ("action", "columns"),
    [
        (torch.tensor([[0.5, 2.0], [1.5, 3.0]]), [0.5, 2.0]),
        (torch.tensor([[False, True], [True, False]]), [0.0, 1.0]),
        (torch.tensor([[0, 1, 0], [1, 0, 0]]), [0.0, 1.0, 0.0]),
        (torch.tensor([[1.0], [2.0]], dtype=torch.float64), [1.0]),
    ],
)
def test_actions_with_columns_are_joined_unchanged(
    action: torch.Tensor, columns: list[float]
) -> None:
    rows = {"action": action, "next": {"reward": torch.tensor([7, 8]), "done": torch.zeros(2)}}
    buffer = ReplayBuffer(storage=LazyTensorStorage(2), transform=PreviousStep(concat=True))
    buffer.extend(TensorDict(rows, [2]))
    assert buffer[1]["previous_step"].tolist() == [7.0, *columns]
    assert buffer[0]["previous_step"].tolist() == [0.0] * (1 + len(columns))


def test_init_stands_in_at_the_first_row_and_sums_keep_the_last_step() -> None:
    own = Streams(Compose(NStep(3, 0.9), PreviousStep(init=-3)))
    own.extend([[0], [0], [1], [0], [0]])
    for (_, number), row in own.drawn().items():
        first, last = (0, 2) if number < 3 else (3, 4)
        before = number - 1
        assert row["previous_action"].item() == (-3 if number == first else before * 10)
        reward = -3 if number == first else own.rows[0][before].reward
        assert row["previous_reward"].tolist() == [reward]
        last = min(last, number + 2)
        assert row["next", "previous_action"].item() == last * 10
        assert row["next", "previous_reward"].tolist() == [own.rows[0][last].reward]


def test_values_keep_dtype_and_shape() -> None:
    rows = {
        "image": torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3),
        "flag": torch.tensor([True, True]),
        ("agent", "action"): torch.tensor([[1], [2]], dtype=torch.int32),
        "next": {"done": torch.zeros(2)},
    }
    transform = PreviousStep(["image", "flag", ("agent", "action")], init=1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(2), transform=transform)
    buffer.extend(TensorDict(rows, [2]))
    found = buffer[:]
    assert found["previous_image"].tolist() == [[[1] * 3] * 2, [[0, 1, 2], [3, 4, 5]]]
    assert found["previous_image"].dtype is torch.uint8
    assert found["previous_flag"].tolist() == [True, True]
    assert found["agent", "previous_action"].tolist() == [[1], [1]]
    assert found["agent", "previous_action"].dtype is torch.int32


@pytest.mark.parametrize(
    ("transform", "error", "words"),
    [
        (PreviousStep(["velocity"]), KeyError, "velocity"),
        (PreviousStep(init=0.5), ValueError, "'previous_action', got 0.5"),
        (PreviousStep(concat=True), ValueError, "num_actions="),
        (PreviousStep(concat=True, num_actions=10), ValueError, r"in \[0, 10\), got 0 to 20"),
    ],
)
def test_invalid_chains_and_rows_are_refused_on_read(
    transform: Any, error: Any, words: str
) -> None:
    own = Streams(transform)
    own.extend([[0]] * 3)
    refuses(error, words, lambda: own.buffer[:])


def test_n_step_must_precede_previous_step() -> None:
    own = Streams(Compose(PreviousStep(), NStep(2, 0.9)))
    own.extend([[0]] * 3)
    refuses(ValueError, "before PreviousStep", own.buffer.sample)
