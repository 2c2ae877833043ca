"""Rows that are copied as they lie, by one thread or by several."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.storages import restorable, row_kernels


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads, each with several blocks, of a few rows."""
    monkeypatch.setattr(row_kernels, "_ENOUGH_BYTES", 64)
    monkeypatch.setattr(row_kernels, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(restorable, "_WHOLE_BYTES", 500)


@given(
    rows=st.integers(0, 70),
    shape=st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
    dtype=st.sampled_from([torch.uint8, torch.bool, torch.int64, torch.float16, torch.complex64]),
    step=st.integers(1, 3),
)
def test_every_row_is_copied_for_any_block_size(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype, step: int
) -> None:
    values = torch.arange(rows * step * int(np.prod(shape))).reshape(rows * step, *shape)
    source = values.to(dtype)[::step]
    around = torch.full((rows + 2, *shape), 1).to(dtype)
    target = around.clone()
    row_kernels.copy_rows(target[1 : rows + 1], source)
    assert torch.equal(target[1 : rows + 1], source)
    assert torch.equal(target[[0, -1]], around[[0, -1]])


@pytest.mark.parametrize("wide", [1, 600], ids=["records", "columns"])
def test_a_load_copies_all_rows_of_all_pieces(wide: int) -> None:
    """The second save writes what has changed beside the first: the rows lie in several pieces."""
    rows = TensorDict(
        {"a": torch.arange(400 * wide).reshape(400, wide), "b": torch.arange(400.0)}, [400]
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(400))
    rb.extend(rows)
    with tempfile.TemporaryDirectory() as folder:
        rb.dumps(Path(folder) / "saved")
        rb.extend(rows[:130].apply(lambda leaf: leaf + 7))
        rb.dumps(Path(folder) / "saved")
        other = ReplayBuffer(storage=LazyTensorStorage(400))
        other.loads(Path(folder) / "saved")
    expected = {key: torch.cat([rows[key][:130] + 7, rows[key][130:]]) for key in ("a", "b")}
    for key, values in expected.items():
        assert torch.equal(other.storage.read(torch.arange(400))[key], values)
