"""Memory that belongs to others as well: it may move, go, or be seen through other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import ReplayBuffer, TensorStorage


@pytest.mark.parametrize("core", [True, False])
def test_memory_that_was_moved_is_found_again(core: bool) -> None:
    a, b = torch.arange(12.0).view(4, 3), torch.arange(4)
    rb = ReplayBuffer(storage=TensorStorage(TensorDict({"a": a, "b": b}, [4])), batch_size=8)
    columns = rb.storage.require()
    if not core:
        columns._native = None
    for turn in range(3):
        address = a.data_ptr()
        a.untyped_storage().resize_((turn + 2) * 2**20)
        assert a.data_ptr() != address
        if turn:
            batch = rb.sample()
            assert torch.equal(batch["a"], a[batch["index"]])
        rb.extend(TensorDict({"a": torch.full((2, 3), 50.0 + turn), "b": torch.arange(2)}, [2]))
        assert (a[rb.storage.ledger.cursor - 1] == 50.0 + turn).all()


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("move", [True, False])
def test_rows_of_moved_memory_are_not_overwritten_while_they_are_read(
    core: bool, move: bool
) -> None:
    memory = torch.arange(8.0).numpy()
    wrapped = torch.from_numpy(memory[1:5]) if not move else torch.arange(1.0, 5.0)
    rb = ReplayBuffer(storage=TensorStorage(TensorDict({"x": wrapped}, [4])))
    if not core:
        rb.storage.require()._native = None
    if move:
        wrapped.untyped_storage().resize_(2**22)
        source = rb[:]["x"]
    else:  # other tensors over the same memory, of which torch knows nothing
        source = torch.from_numpy(memory)[1:5]
    rb.add(TensorDict({"x": torch.tensor(9.0)}, []))
    rb.extend(TensorDict({"x": source[:3]}, [3]))
    assert rb[:]["x"].tolist() == [9.0, 9.0, 2.0, 3.0]
    if not move:
        memory[:5] = range(5)
        rb.add(TensorDict({"x": torch.tensor(2.0)}, []))
        rb.extend(TensorDict({"x": torch.from_numpy(memory)[0:3]}, [3]))  # begins before it
        assert rb[:]["x"].tolist() == [2.0, 0.0, 2.0, 2.0]


def test_released_memory_raises_error() -> None:
    a = torch.arange(12.0).view(4, 3)
    rb = ReplayBuffer(storage=TensorStorage(TensorDict({"a": a}, [4])), batch_size=8)
    a.untyped_storage().resize_(0)
    for use in (rb.sample, lambda: rb.extend(TensorDict({"a": torch.zeros(2, 3)}, [2]))):
        with pytest.raises(RuntimeError, match="expected 48 bytes of memory behind stored rows"):
            use()


def test_default_device_does_not_affect_core_writes(run_python: Any) -> None:
    """In a process of its own: the core would write to an address that is none."""
    run_python(
        """
import torch
from tensordict import TensorDict
from replaykit import LazyTensorStorage, ReplayBuffer
rows = TensorDict({"x": torch.arange(4.0), "y": torch.arange(4), "w": torch.ones(4, 300)}, [4])
for contiguous in (False, True):
    for ndim in (1, 2):
        data = rows if ndim == 1 else rows.unsqueeze(0).expand(2, 4).clone()
        storage = LazyTensorStorage(8, ndim=ndim)
        rb = ReplayBuffer(storage=storage, batch_size=3, contiguous=contiguous)
        rb.extend(data)
        index = torch.tensor([3, 1] if ndim == 1 else [[3, 1], [1, 0]])
        with torch.device("meta"):
            batch = storage.read(index, contiguous=contiguous)
        assert batch["x"].tolist() == [3.0, 1.0], batch["x"]
        assert batch["w"].sum() == 600
"""
    )
