"""``update_priority`` and ``mark_update``, line by line."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer
from tests.samplers.building import prioritized, raw

NAN, INF = math.nan, math.inf


@pytest.fixture
def refuses() -> Any:
    """``refuses(buffer, error, match, *arguments, **keywords)``: and nothing has changed."""

    def check(buffer: ReplayBuffer, error: Any, match: str, *args: Any, **kwargs: Any) -> None:
        sampler = buffer.sampler
        before = copy.deepcopy(sampler.state_dict())
        leaves = sampler._table._sums.leaves
        with pytest.raises(error, match=match):
            buffer.sampler.update_priority(*args, **kwargs)
        after = sampler.state_dict()
        assert torch.equal(before.pop("_priorities"), after.pop("_priorities"))
        assert before == after
        assert torch.equal(leaves, sampler._table._sums.leaves)
        buffer.sample(3)

    return check


INDICES = {
    "int": (2, [1, 1, 9, 1]),
    "nobody": (-1, [1, 1, 1, 1]),
    "numpy int": (np.int64(2), [1, 1, 9, 1]),
    "scalar tensor": (torch.tensor(2), [1, 1, 9, 1]),
    "tensor": (torch.tensor([0, 3]), [9, 1, 1, 9]),
    "int32": (torch.tensor([0, 3], dtype=torch.int32), [9, 1, 1, 9]),
    "uint8": (torch.tensor([0, 3], dtype=torch.uint8), [9, 1, 1, 9]),
    "column": (torch.tensor([[0], [3]]), [9, 1, 1, 9]),
    "strided": (torch.tensor([0, 1, 3, 1])[::2], [9, 1, 1, 9]),
    "list": ([1], [1, 9, 1, 1]),
    "range": (range(1, 3), [1, 9, 9, 1]),
    "array": (np.array([0, 1]), [9, 9, 1, 1]),
    "tuple of one tensor": ((torch.tensor([0, 1]),), [9, 9, 1, 1]),
    "nothing": (torch.tensor([], dtype=torch.int64), [1, 1, 1, 1]),
    "empty list": ([], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("how", INDICES)
def test_every_kind_of_index(how: str) -> None:
    index, expected = INDICES[how]
    buffer = prioritized([1.0] * 4, capacity=6)
    buffer.sampler.update_priority(index, 9.0)
    assert raw(buffer) == expected


PRIORITIES = {
    "float": 3.0,
    "int": 3,
    "scalar tensor": torch.tensor(3.0),
    "vector": torch.tensor([3.0, 3.0]),
    "column": torch.tensor([[3.0], [3.0]]),
    "float64": torch.tensor([3.0, 3.0], dtype=torch.float64),
    "float16": torch.tensor([3.0, 3.0], dtype=torch.float16),
    "int64": torch.tensor([3, 3]),
    "with grad": torch.tensor([3.0, 3.0], requires_grad=True),
    "strided": torch.tensor([3.0, 0.0, 3.0])[::2],
    "list": [3.0, 3.0],
    "array": np.array([3.0, 3.0]),
}


@pytest.mark.parametrize("how", PRIORITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_priority(how: str, dtype: Any) -> None:
    buffer = prioritized([1.0] * 4, dtype=dtype)
    for update in (buffer.sampler.update_priority, buffer.update_priority):
        buffer.mark_update(torch.arange(4))
        update(torch.tensor([3, 1]), PRIORITIES[how])
        assert raw(buffer)[1::2] == [3.0, 3.0]


def test_numbers_of_python_keep_their_digits() -> None:
    buffer = prioritized([1.0, 2.0], dtype=torch.float64)
    buffer.update_priority(0, 0.1)
    buffer.sampler.update_priority([1], [0.2])
    assert raw(buffer) == [0.1, 0.2]


@pytest.mark.pitfall("PR2")
@pytest.mark.parametrize("wrong", [NAN, INF, -INF, -1.0, -1e-30])
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_priorities_are_refused(wrong: float, position: int, dtype: Any, refuses: Any) -> None:
    """PR2: the total was NaN from then on, and every later draw failed."""
    buffer = prioritized([1.0, 2.0, 3.0, 4.0, 5.0], dtype=dtype)
    priority = torch.ones(5, dtype=torch.float64)
    priority[position] = wrong
    index = torch.arange(5)
    refuses(buffer, ValueError, "priorities", index, priority)
    refuses(buffer, ValueError, "priorities", index, wrong)
    refuses(buffer, ValueError, "priorities", torch.tensor([0, 1, 2, 3, -1]), priority)


def test_priority_too_large_for_the_dtype_is_refused(refuses: Any) -> None:
    """The check comes after the cast, and after the power."""
    buffer = prioritized([1.0, 2.0])
    refuses(buffer, ValueError, r"finite in torch.float32, got inf", 0, 1e39)
    squared = prioritized([1.0, 2.0], alpha=2.0)
    refuses(squared, ValueError, r"power alpha=2.0 in torch.float32, got 1\.0+2\d*e\+20", [1], 1e20)
    double = prioritized([1.0, 2.0], dtype=torch.float64)
    double.update_priority(0, 1e39)
    refuses(prioritized([1.0], alpha=1.0, dtype=torch.float64), ValueError, "power", 0, 1.7e308)


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("index", "priority", "error", "match"),
    [
        ([0, 1], ONE, ValueError, "expected"),
        ([0, 1], torch.ones(3), ValueError, "expected"),
        ([0, 1], torch.ones(1, 2), ValueError, "expected"),
        (0, TWO, ValueError, "expected"),
        ([], ONE, ValueError, "expected"),
        ([0, 1], torch.ones(0), ValueError, "expected"),
        (torch.zeros(2, 2, dtype=torch.int64), TWO, ValueError, "expected"),
        ([0], torch.tensor([1j]), ValueError, "real numbers"),
        ("01", 1.0, TypeError, "index"),
        (torch.tensor([0.0]), 1.0, TypeError, "index"),
        (torch.tensor([True, False]), 1.0, TypeError, "index"),
        (None, 1.0, TypeError, "index"),
    ],
)
def test_unsuitable_indices_and_priorities_are_refused(
    index: Any, priority: Any, error: Any, match: str, refuses: Any
) -> None:
    refuses(prioritized([1.0, 2.0]), error, match, index, priority)
    seen = prioritized([1.0, 2.0])
    refuses(seen, ValueError, "generation for each of the 2", [0, 1], 1.0, generation=[0])
    refuses(seen, TypeError, "integers", [0, 1], 1.0, generation=torch.zeros(2))


def test_the_last_of_very_many_wins() -> None:
    buffer = prioritized([1.0] * 8)
    many = torch.randint(8, (100_000,), generator=torch.Generator().manual_seed(0))
    priority = torch.rand(100_000) + 0.1
    buffer.update_priority(many, priority)
    last = [priority[int((many == slot).nonzero()[-1])].item() for slot in range(8)]
    assert raw(buffer) == last


@pytest.mark.pitfall("PR3")
@pytest.mark.parametrize("wrong", [3, 4, 8, -2, 2**40, -(2**40), 2**62])
def test_an_index_outside_is_an_error(wrong: int, refuses: Any) -> None:
    """PR3: it was a segmentation fault. Three of eight slots are in use."""
    buffer = prioritized([1.0, 2.0, 3.0], capacity=8)
    refuses(buffer, IndexError, rf"in \[0, 3\), .* got {wrong}$", wrong, 5.0)
    index = torch.tensor([0, wrong, 1])
    refuses(buffer, IndexError, rf"got {wrong}$", index, torch.ones(3))
    refuses(buffer, IndexError, rf"got {wrong}$", index, torch.ones(3), generation=index * 0)
    with pytest.raises(IndexError, match=rf"got {wrong}$"):
        buffer.mark_update(index)


# -- several lanes --------------------------------------------------------------------------------


@pytest.fixture
def lanes() -> ReplayBuffer:
    """Three steps of two lanes, in room for four."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8, ndim=2),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0),
    )
    buffer.extend(torch.arange(6).view(2, 3))
    return buffer


def test_lanes_have_separate_priorities(lanes: ReplayBuffer) -> None:
    index = torch.tensor([[0, 1], [2, 0], [-1, 1]])
    lanes.update_priority(index, torch.tensor([2.0, 3.0, 99.0]))
    assert raw(lanes) == [1.0, 2.0, 1.0, 1.0, 3.0, 1.0]
    lanes.sampler.update_priority((torch.tensor([0, 1]), torch.tensor([0, 1])), 4.0)
    assert raw(lanes) == [4.0, 2.0, 1.0, 4.0, 3.0, 1.0]
    lanes.sampler.update_priority((2, 1), 6.0)
    lanes.sampler.update_priority(torch.tensor([1, 0]), 0.0)
    assert raw(lanes) == [4.0, 2.0, 0.0, 4.0, 3.0, 6.0]
    drawn, info = lanes.sample(100, return_info=True)
    assert info["index"].shape == (100, 2)
    assert [1, 0] not in info["index"].tolist()
    assert torch.equal(drawn, info["index"][:, 1] * 3 + info["index"][:, 0])


@pytest.mark.pitfall("PR3")
@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        *[
            (torch.tensor([[0, 0], wrong]), IndexError, "expected")
            for wrong in ([3, 0], [0, 2], [0, -1], [-2, 0], [2**62, 0], [-(2**62), 1])
        ],
        (torch.tensor([0, 1, 2]), ValueError, r"shape \[K, 2\]"),
        (1, ValueError, r"shape \[K, 2\]"),
        (torch.zeros(2, 3, dtype=torch.long), ValueError, r"shape \[K, 2\]"),
    ],
)
def test_cells_outside_and_other_coordinates_are_refused(
    index: Any, error: Any, match: str, lanes: ReplayBuffer, refuses: Any
) -> None:
    """PR3: in either coordinate."""
    refuses(lanes, error, match, index, 5.0)


def test_priorities_laid_out_like_the_data(lanes: ReplayBuffer) -> None:
    index = lanes.extend(torch.arange(4).view(2, 2))
    lanes.update_priority(index, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    # Steps 3 and 0, lane by lane.
    assert raw(lanes) == [2.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]


# -- by itself ------------------------------------------------------------------------------------


def test_a_sampler_works_without_a_buffer() -> None:
    storage = ListStorage(6)
    storage.set(range(4), [10, 11, 12, 13])
    sampler = PrioritizedSampler(6, 1.0, 1.0)
    sampler.extend(range(4))
    assert raw(sampler) == [1.0] * 4
    sampler.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 5.0, 0.0]))
    sampler.add(1)
    assert raw(sampler) == [0.0, 5.0, 5.0, 0.0]
    index, info = sampler.sample(storage, 30)
    assert set(index.tolist()) == {1, 2}
    assert info["priority_weight"].shape == (30,)
    with pytest.raises(IndexError, match=r"in \[0, 4\)"):
        sampler.update_priority(4, 1.0)
    with pytest.raises(IndexError, match=r"in \[0, 6\)"):
        sampler.extend([6])
    with pytest.raises(ValueError, match="a storage to compare generations with"):
        sampler.update_priority([0], 1.0, generation=[0])


def test_rows_never_announced_to_sampler_get_default_priority() -> None:
    """Between those that were told of, and after them."""
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0)
    sampler.update_priority([], [])
    sampler.extend([3])
    assert raw(sampler) == [1.0] * 4
    storage = ListStorage(6)
    storage.set(range(6), list(range(6)))
    sampler.update_priority([3], 2.0)
    assert set(sampler.sample(storage, 100)[0].tolist()) == set(range(6))
    assert raw(sampler) == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_priorities_of_removed_rows_are_not_restored() -> None:
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0)
    sampler.extend(range(4))
    sampler.update_priority(range(4), 5.0)
    sampler.empty()
    assert raw(sampler) == []
    sampler.extend([3])
    assert raw(sampler) == [1.0] * 4
