"""What came before a row, and how many rows, against a scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    ReplayBuffer,
    StepCount,
)
from replaykit.buffer.row_context import StoredSurroundings
from replaykit.transforms import Surroundings
from tests.support.refusals import refuses
from tests.transforms.streams import Streams, histories, play


@settings(max_examples=80, deadline=None)
@given(data=st.data(), init=st.sampled_from([0, -3]), n=st.sampled_from([1, 3]))
def test_previous_steps_match_a_scan(data: Any, init: int, n: int) -> None:
    """S20: ``init`` at the first row of an episode, reward and action of row t - 1 at row t."""
    chain = Compose(*[NStep(n, 0.9)] * (n > 1), PreviousStep(init=init))
    streams = play(chain, data.draw(histories()))
    eligible = {place for place in streams.stored() if streams.has_past(*place, 1)}
    if not eligible:
        refuses(RuntimeError, "1 rows of history", streams.buffer.sample)
        return
    found = streams.drawn()
    assert set(found) == eligible
    for (lane, number), row in found.items():
        own = streams.rows[lane]
        begins = number == streams.begin(lane, number)
        action, reward = row["previous_action"], row["previous_reward"]
        assert action.item() == (init if begins else (number - 1) * 10)
        assert reward.tolist() == [init if begins else own[number - 1].reward]
        last = min(streams.last(lane, number), number + n - 1)
        assert row["next", "previous_action"].item() == last * 10
        assert row["next", "previous_reward"].tolist() == [own[last].reward]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_steps_are_counted_from_where_the_episode_began(data: Any) -> None:
    streams = play(StepCount(), data.draw(histories()))
    found = streams.drawn()
    assert set(found) == set(streams.stored())
    for (lane, number), row in found.items():
        assert row["step_count"].tolist() == [number - streams.begin(lane, number)]
        assert row["step_count"].dtype is torch.int64


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.sampled_from([1, 3]), init=st.sampled_from([0, 0, 1]))
def test_core_and_separate_reads_give_equal_steps(data: Any, n: int, init: int) -> None:
    """What the core copies in one step is what is made of rows read by themselves."""
    dtypes = [torch.float32, torch.float64, torch.int32, torch.bool]
    shape = data.draw(st.sampled_from([(), (1,), (2, 3)]))
    dtype = data.draw(st.sampled_from(dtypes))
    concat = data.draw(st.booleans()) and (dtype.is_floating_point or shape == (2, 3))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    steps, slots = data.draw(st.integers(2, 30)), data.draw(st.integers(2, 12))
    following = {
        "done": torch.rand(steps, 1, generator=seed) < 0.2,
        "reward": torch.rand(steps, *data.draw(st.sampled_from([(), (1,)])), generator=seed),
    }
    if n > 1:
        following["reward"] = following["reward"].reshape(steps, 1)
    action = torch.randint(0, 9, (steps, *shape), generator=seed).to(dtype)
    chain = Compose(
        *[NStep(n, 0.9)] * (n > 1),
        PreviousStep(["action", ("next", "reward")], init=init, concat=concat),
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(slots), transform=chain)
    buffer.extend(TensorDict({"action": action, "next": following}, [steps]))
    found = buffer[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredSurroundings, "stacks", Surroundings.stacks)
        expected = buffer[:]
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert found[key].dtype is expected[key].dtype
        assert found[key].equal(expected[key]), key


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
    ("arguments", "error", "words"),
    [
        ({"keys": "action"}, TypeError, "a list of keys"),
        ({"keys": [3]}, TypeError, "expected a key"),
        ({"keys": []}, ValueError, "at least one"),
        ({"keys": ["reward", ("next", "reward")]}, ValueError, "differ in more than 'next'"),
        ({"init": "x"}, TypeError, "init"),
        ({"init": float("inf")}, ValueError, "init"),
        ({"num_actions": 4}, ValueError, "concat"),
        ({"concat": True, "num_actions": 0}, ValueError, "num_actions"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(
    arguments: Any, error: Any, words: str
) -> None:
    refuses(error, words, PreviousStep, **arguments)
    with pytest.raises(TypeError):
        StepCount(3)


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


def test_repr_shows_arguments() -> None:
    assert repr(PreviousStep()) == "PreviousStep(['action', ('next', 'reward')])"
    shown = repr(PreviousStep(["action"], 2, True, 3))
    assert shown == "PreviousStep(['action'], init=2, concat=True, num_actions=3)"
    assert repr(StepCount()) == "StepCount('step_count')"
