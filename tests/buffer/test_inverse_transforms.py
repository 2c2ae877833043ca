"""Inverse transforms: what rows pass through on their way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer, Transform
from tests.buffer.building import buffer_of, rows, same


class Tracing(Transform):
    """Multiplies and adds on the way in, and notes the shapes that it sees."""

    def __init__(self, factor: int = 1, plus: int = 0) -> None:
        self.factor, self.plus = factor, plus
        self.seen: list[Any] = []

    def inv(self, data: Any) -> Any:
        self.seen.append(tuple(data.shape))
        return data * self.factor + self.plus


def test_inverse_transforms_run_last_to_first_and_see_a_batch():
    first, second = Tracing(factor=2), Tracing(plus=3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.append_transform(first).append_transform(second)
    buffer.extend(torch.tensor([1.0, 2.0]))
    buffer.add(torch.tensor(3.0))
    buffer[0:1] = torch.tensor([10.0])
    assert buffer[:].tolist() == [(10 + 3) * 2, (2 + 3) * 2, (3 + 3) * 2]
    assert first.seen == second.seen == [(2,), (1,), (1,)]


def test_a_transform_may_swallow_or_multiply_rows():
    class Every(Transform):
        def __init__(self, times: int) -> None:
            self.times = times

        def inv(self, data: Any) -> Any:
            return None if self.times == 0 else data.repeat(self.times)

    swallowing = ReplayBuffer(storage=LazyTensorStorage(10), transform=Every(0))
    assert swallowing.extend(torch.arange(3)).shape == (0,)
    assert swallowing.add(torch.tensor(1)) is None
    assert (len(swallowing), swallowing.write_count) == (0, 0)
    assert not swallowing.storage.initialized
    doubling = ReplayBuffer(storage=LazyTensorStorage(10), transform=Every(2))
    assert doubling.extend(torch.arange(2)).tolist() == [0, 1, 2, 3]
    assert doubling.add(torch.tensor(5)).tolist() == [4, 5]
    assert doubling[:].tolist() == [0, 1, 0, 1, 5, 5]
    lanes = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), transform=Every(0))
    assert lanes.extend(torch.zeros(2, 3)).shape == (0, 2)
    swallowed = ReplayBuffer(storage=LazyTensorStorage(4), transform=Every(1))
    swallowed.extend(torch.arange(3))
    swallowed.append_transform(Every(0))
    swallowed[0:2] = torch.tensor([8, 9])
    swallowed.write_all(torch.tensor([8, 9]))
    assert swallowed[:].tolist() == [0, 1, 2]


def test_an_inverse_transform_that_raises_changes_nothing():
    buffer = buffer_of(filled=3)
    before = buffer.state_dict()

    class Failing(Transform):
        def inv(self, data: Any) -> Any:
            raise ZeroDivisionError

    buffer.append_transform(Failing())
    for write in (
        lambda: buffer.extend(rows(2)),
        lambda: buffer.add(rows(1)[0]),
        lambda: buffer.__setitem__(0, rows(1)[0]),
        lambda: buffer.write_all(rows(2)),
    ):
        with pytest.raises(ZeroDivisionError):
            write()
    same(before, buffer.state_dict())
