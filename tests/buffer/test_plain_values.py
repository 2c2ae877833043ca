"""Numbers, NumPy scalars, arrays and lists, as ``env.step`` gives them, written as they are."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer
from replaykit.errors import SchemaError
from tests.support.refusals import refuses

VALUES: list[tuple[Any, torch.Tensor]] = [
    (1.5, torch.tensor(1.5)),
    (3, torch.tensor(3)),
    (True, torch.tensor(True)),
    (2 + 1j, torch.tensor(2 + 1j)),
    (np.float64(1.5), torch.tensor(1.5, dtype=torch.float64)),
    (np.float32(1.5), torch.tensor(1.5)),
    (np.int32(3), torch.tensor(3, dtype=torch.int32)),
    (np.uint8(3), torch.tensor(3, dtype=torch.uint8)),
    (np.bool_(True), torch.tensor(True)),
    (np.array(1.5), torch.tensor(1.5, dtype=torch.float64)),
    (np.arange(3, dtype=np.int16), torch.arange(3, dtype=torch.int16)),
    ([1.5, 2], torch.tensor([1.5, 2.0])),
    ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
    ([np.float64(1), np.float64(2)], torch.tensor([1.0, 2.0], dtype=torch.float64)),
]


def same(found: Any, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize(("value", "wanted"), VALUES, ids=repr)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_values_have_the_dtypes_that_are_promised(
    value: Any, wanted: torch.Tensor, storage: Any
) -> None:
    """One by one, in a list of rows, and bare; a list storage keeps them and stacks alike."""
    rb = ReplayBuffer(storage=storage(10), batch_size=6)
    rb.add({"a": value, "b": (value, {"c": value})})
    rb.extend([{"a": value, "b": (value, {"c": value})}] * 2)
    batch = rb.sample()
    for column in (batch["a"], batch["b"][0], batch["b"][1]["c"]):
        assert same(column, wanted.expand(6, *wanted.shape))
    bare = ReplayBuffer(storage=storage(10), batch_size=2)
    bare.add(value)
    assert same(bare.sample(), wanted.expand(2, *wanted.shape))
    if storage is LazyTensorStorage:  # a batch may be lists of numbers
        lists = ReplayBuffer(storage=LazyTensorStorage(10))
        pair = [value, value]
        lists.extend({"a": np.stack(pair) if isinstance(value, np.ndarray) else pair})
        assert same(lists[:]["a"], wanted.expand(2, *wanted.shape))


def test_floats_follow_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.add({"a": 0.1})
    finally:
        torch.set_default_dtype(before)
    assert rb[:]["a"].tolist() == [0.1]


def test_values_of_nested_gymnasium_spaces_are_written_unchanged() -> None:
    """Space by space, a step of each of gymnasium's nested spaces."""
    spaces = gymnasium.spaces
    space = spaces.Dict(
        {
            "box": spaces.Box(-1, 1, (2, 3), np.float32),
            "discrete": spaces.Discrete(5),
            "both": spaces.Tuple((spaces.MultiBinary(4), spaces.MultiDiscrete([3, 4]))),
            "deep": spaces.Dict({"one": spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3)))}),
        }
    )
    space.seed(0)
    seen = [space.sample() for _ in range(8)]
    rows = [
        {"observation": o, "action": 1, "reward": 0.5 * i, "done": i == 7, "info": {}}
        for i, o in enumerate(seen)
    ]
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    for row in rows[:4]:
        rb.add(row)
    rb.extend(rows[4:])
    stored = rb[:]
    assert stored["reward"].tolist() == [0.5 * i for i in range(8)]
    assert stored["done"].tolist() == [False] * 7 + [True]
    observation = stored["observation"]
    for at, one in enumerate(seen):
        assert np.array_equal(observation["box"][at].numpy(), one["box"])
        assert observation["discrete"][at] == one["discrete"]
        for part in range(2):
            assert np.array_equal(observation["both"][part][at].numpy(), one["both"][part])
            assert observation["deep"]["one"][part][at] == one["deep"]["one"][part]
    assert observation["box"].dtype == torch.float32
    assert observation["discrete"].dtype == torch.int64
    assert observation["both"][0].dtype == torch.int8


def test_the_order_of_keys_and_kinds_of_containers_may_differ() -> None:
    Pair = namedtuple("Pair", "x y")
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend([{"a": 1, "b": Pair(1.0, True)}, {"b": Pair(2.0, False), "a": 2}])
    assert rb[:]["b"].x.tolist() == [1.0, 2.0]
    assert isinstance(rb[:]["b"], Pair)


def test_steps_of_all_lanes_may_be_lists() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    for step in range(2):
        rb.add({"r": [1.0 + step, 2.0, 3.0], "o": np.full((3, 2), step)})
    assert rb[:]["r"].tolist() == [[1.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
    with pytest.raises(SchemaError, match=r"key 'r'.*got shape \[\]|time along batch dimension"):
        rb.add({"r": 1.0, "o": np.zeros((3, 2))})


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"reward": True, "x": 1.0}, "key 'reward': expected float32 .., got bool"),
        ({"reward": np.ones(()), "x": 1.0}, "key 'reward': expected float32 .., got float64"),
        ({"reward": 1.0}, "key 'x': expected float32 .., got nothing"),
        ({"reward": 1.0, "x": [1.0]}, r"key 'x': expected float32 \[\], got float32 \[1\]"),
        ({"reward": [1.0, [2.0]], "x": 1.0}, "key 'reward': expected numbers of one shape"),
        ({"reward": 2**63, "x": 1.0}, "key 'reward': expected numbers"),
    ],
)
def test_later_values_of_other_dtypes_are_named(later: Any, message: str) -> None:
    """The first write fixes the dtypes; arrays are not cast, and bools are no numbers."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add({"reward": 0.5, "x": 1.0})
    refuses(SchemaError, message, rb.add, later)
    refuses(SchemaError, message, rb.extend, [{"reward": 0.5, "x": 1.0}, later])
    assert (len(rb), rb.write_count, rb.storage.ledger.cursor) == (1, 1, 1)
    assert {key: column.tolist() for key, column in rb[:].items()} == {"reward": [0.5], "x": [1.0]}


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("reward", [-100, np.float64(-100), np.int8(-100), np.float32(-100)])
def test_numbers_take_the_dtype_of_their_column(storage: Any, reward: Any) -> None:
    """LunarLander gives a float for most steps, and an int when it crashes."""
    rb = ReplayBuffer(storage=storage(10))
    rb.add({"reward": 0.5, "done": False})
    rb.add({"reward": reward, "done": True})
    rb.extend([{"reward": reward, "done": True}, {"reward": 2.5, "done": False}])
    rb.extend([{"reward": 0.25, "done": False}, {"reward": reward, "done": True}])
    found = rb[:]["reward"]
    assert found.tolist() == [0.5, -100, -100, 2.5, 0.25, -100]
    if storage is LazyTensorStorage:
        assert found.dtype == torch.float32
        first = ReplayBuffer(storage=storage(10))
        first.extend([{"reward": 0.5}, {"reward": reward}])  # the first row has decided
        assert torch.equal(first[:]["reward"], torch.tensor([0.5, -100.0]))


@pytest.mark.parametrize(
    ("first", "later"),
    [(np.uint8(1), 300), (np.uint8(1), -1), (1, 1.0), (True, 1), (1, True), (1.0, 1j)],
    ids=str,
)
def test_numbers_that_their_column_cannot_hold_are_refused(first: Any, later: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add({"a": first})
    refuses(SchemaError, "key 'a': expected", rb.add, {"a": later})
    refuses(SchemaError, "key 'a': expected", rb.extend, [{"a": first}, {"a": later}])
    assert len(rb) == 1


@pytest.mark.parametrize("value", ["text", None, object(), np.str_("a"), {1, 2}, [1, "a"], b"x"])
def test_values_that_are_not_numbers_are_named(value: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    refuses(TypeError, r"key .*'a'.*: expected", rb.add, {"a": value})
    assert len(rb) == 0


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_an_environment_may_reuse_its_arrays(storage: Any) -> None:
    rb = ReplayBuffer(storage=storage(10))
    array = np.zeros(2)
    for step in range(3):
        array[:] = step
        rb.add({"a": array, "b": (array, (array,))})
    stored = rb[:]
    for column in (stored["a"], stored["b"][0], stored["b"][1][0]):
        assert column[:, 0].tolist() == [0.0, 1.0, 2.0]
