"""Transforms and collation of batches: their order, and what they may return."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer, StepCount
from tests.buffer.building import buffer_of, rows


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
    """Threads write while a transform works."""
    done = threading.Event()

    def transform(data: TensorDict) -> TensorDict:
        thread = threading.Thread(target=lambda: (buffer.extend(rows(1, 4)), done.set()))
        thread.start()
        assert done.wait(20), "the lock was held"
        return data

    buffer = buffer_of(filled=4)
    buffer.append_transform(transform)
    buffer.sample(2)
    assert len(buffer) == 5


@pytest.mark.parametrize(
    "change", [lambda td: td[:2], lambda td: torch.cat([td, td]), lambda td: td.sum(dim=0)]
)
def test_a_transform_that_changes_the_number_of_rows_needs_return_info(change: Any):
    buffer = buffer_of(filled=4, batch_size=3, transform=change)
    for call in (buffer.sample, buffer.next, lambda: next(iter(buffer))):
        with pytest.raises(RuntimeError, match="return_info"):
            call()
    data, info = buffer.sample(return_info=True)
    assert data.batch_size != (3,)
    assert "index" not in set(data.keys())
    assert info["index"].shape == (3,)


def test_transform_may_return_a_tensor_instead_of_the_batch():
    buffer = buffer_of(filled=4, transform=lambda td: td["id"])
    data, info = buffer.sample(3, return_info=True)
    assert torch.equal(data, info["index"])


def test_records_that_are_trajectories_have_no_rows_around():
    """As a data set has them with ``split_trajs``."""
    row = {"a": torch.zeros(6, 3, 1), "next": {"done": torch.zeros(6, 3, 1, dtype=torch.bool)}}
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), transform=StepCount())
    buffer.extend(TensorDict(row, [6, 3]))
    with pytest.raises(RuntimeError, match=r"batch of \[4\] rows, got \[4, 3\]"):
        buffer.sample(4)
