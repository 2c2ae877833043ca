"""Transforms of a buffer: of rows on their way in, and of batches on their way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer, StepCount, Transform
from tests.buffer.building import buffer_of, in_threads, rows, same
from tests.support.refusals import refuses

# -- on writing ------------------------------------------------------------------------------------


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


# -- on sampling -----------------------------------------------------------------------------------


def test_transforms_run_in_order_after_collation_and_before_the_info():
    seen: list[Any] = []

    def collate(rows: list[Any]) -> TensorDict:
        seen.append("collate")
        return TensorDict({"x": torch.tensor(rows)}, [len(rows)])

    def first(data: TensorDict) -> TensorDict:
        seen.append(("first", set(data.keys())))
        data["y"] = data["x"] * 2
        return data

    def second(data: TensorDict) -> TensorDict:
        seen.append("second")
        return data.select("y").lock_()

    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=collate, transform=first)
    buffer.append_transform(second)
    buffer.extend([1, 2, 3])
    seen.clear()
    batch = buffer.sample(4)
    assert seen == ["collate", ("first", {"x"}), "second"]
    assert set(batch.keys()) == {"y", "index"}
    assert torch.equal(batch["y"], (batch["index"] + 1) * 2)
    assert not batch.is_locked


def test_transforms_run_without_the_lock():
    def transform(data: TensorDict) -> TensorDict:
        in_threads(lambda: buffer.extend(rows(1, 4)), timeout=20)
        return data

    buffer = buffer_of(filled=4, transform=transform)
    buffer.sample(2)
    assert len(buffer) == 5


@pytest.mark.parametrize(
    "change", [lambda td: td[:2], lambda td: torch.cat([td, td]), lambda td: td.sum(dim=0)]
)
def test_a_transform_that_changes_the_number_of_rows_needs_return_info(change: Any):
    """The refused calls lose no row of the pass."""
    buffer = buffer_of(filled=4, sampler="ordered", batch_size=3, transform=change)
    for call in (buffer.sample, buffer.next, lambda: next(iter(buffer))):
        refuses(RuntimeError, "return_info", call)
    data, info = buffer.sample(return_info=True)
    assert data.batch_size != (3,)
    assert "index" not in set(data.keys())
    assert info["index"].tolist() == [0, 1, 2]


def test_transform_may_return_a_tensor_instead_of_the_batch():
    buffer = buffer_of(filled=4, transform=lambda td: td["id"])
    data, info = buffer.sample(3, return_info=True)
    assert torch.equal(data, info["index"])


def test_records_that_are_trajectories_have_no_rows_around():
    """As a data set has them with ``split_trajs``."""
    row = {"a": torch.zeros(6, 3, 1), "next": {"done": torch.zeros(6, 3, 1, dtype=torch.bool)}}
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), transform=StepCount())
    buffer.extend(TensorDict(row, [6, 3]))
    refuses(RuntimeError, r"batch of \[4\] rows, got \[4, 3\]", buffer.sample, 4)
