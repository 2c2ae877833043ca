"""Rows compared bit by bit, against NumPy's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.storages import memory
from replaykit.storages.memory import any_differing, differing
from replaykit.structure import raw_bytes


def _by_bytes(a: torch.Tensor, b: torch.Tensor) -> list[bool]:
    left, right = (raw_bytes(x).numpy() for x in (a, b))
    if not left.size:
        return [False] * len(a)
    return np.any((left != right).reshape(len(a), -1), axis=1).tolist()


@given(
    dtype=st.sampled_from(
        [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bfloat16,
         torch.float32, torch.float64, torch.complex64, torch.complex128]
    ),
    shape=st.sampled_from([(), (1,), (3,), (5,), (2, 3), (0,), (8,), (33,)]),
    rows=st.integers(0, 9),
    first=st.integers(0, 3),
    seed=st.integers(0, 99),
    block=st.sampled_from([64, memory._BLOCK_BYTES]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_differing_finds_rows_with_other_bytes(
    dtype: torch.dtype, shape: Any, rows: int, first: int, seed: int, block: int, filled: Any
) -> None:
    """In blocks of any size, whose results are joined."""
    # Slices of longer tensors: an odd row leaves words of eight bytes unaligned.
    a, b = (filled((rows + 3, *shape), dtype, s)[first:][:rows] for s in (seed, seed + 1))
    mixed = torch.arange(rows) % 3 == 0
    raw_a, raw_b = (x.view(torch.uint8) if dtype.itemsize == 1 else x for x in (a, b))
    keep = mixed.view(-1, *[1] * len(shape))
    if dtype is not torch.uint16:
        b = torch.where(keep, raw_a, raw_b).view(dtype)
    wide = torch.stack([a.view(dtype), b.view(dtype)], 1)  # rows that are not in one piece
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_BLOCK_BYTES", block)
        assert differing(a, b).tolist() == _by_bytes(a, b)
        assert differing(wide[:, 0], wide[:, 1]).tolist() == _by_bytes(a, b)


def test_differing_distinguishes_signed_zeros_and_accepts_nan() -> None:
    a = torch.tensor([float("nan"), 0.0, 1.0])
    assert differing(a, torch.tensor([float("nan"), -0.0, 1.0])).tolist() == [False, True, False]
    lazy = torch.tensor([1 + 2j]).conj()
    assert differing(lazy, torch.tensor([1 - 2j])).tolist() == [False]


def test_any_differing_considers_every_leaf() -> None:
    a = {"x": torch.tensor([1, 2, 3]), "y": torch.tensor([1.0, 2.0, 3.0])}
    b = {"x": torch.tensor([1, 5, 3]), "y": torch.tensor([1.0, 2.0, 4.0]), "z": torch.zeros(3)}
    assert any_differing(a, b).tolist() == [False, True, True]


def test_differing_compares_bits_across_dtypes() -> None:
    a = torch.arange(40, dtype=torch.int32).to(torch.uint16).view(20, 2)
    b = torch.cat([a[:1], a]).view(torch.int16)[1:]  # eight bytes wide, four bytes off
    assert not bool(differing(a[1::2], b[1::2]).any())
    assert not bool(differing(a[3:], b[3:]).any())
    assert bool(differing(a[3:], b[2:-1]).all())
