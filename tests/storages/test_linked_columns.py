"""Columns that are others a row later, against rows looked up one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.checkpoint import RowChunks
from replaykit.storages.content import LinkedColumn, plain_column, rebuilt_column


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_linked_column_matches_rows_one_by_one(data: st.DataObject) -> None:
    lanes = torch.Size(data.draw(st.sampled_from([(), (2,), (2, 3)])))
    rows, cells = data.draw(st.integers(1, 9)), lanes.numel()
    chunked = data.draw(st.booleans())
    source: Any = torch.randint(0, 99, (rows, *lanes, 2))
    own = sorted(data.draw(st.sets(st.integers(0, rows * cells - 1))))
    values: Any = torch.randint(100, 199, (len(own), 2))
    expected = source.roll(-1, 0).reshape(-1, 2).clone()
    for place, element in enumerate(own):
        expected[element] = values[place]
    expected = expected.view(source.shape)
    if chunked:
        source = RowChunks([source[:2], source[2:]])
        values = RowChunks([values[:1], values[1:]])
    column = LinkedColumn(source, torch.tensor(own, dtype=torch.int64), values, lanes)
    assert (len(column), column.shape, column.dtype) == (rows, expected.shape, expected.dtype)
    again = rebuilt_column(plain_column(column, (source, column)), [source, None], lanes)
    for found in (column, again):
        assert torch.equal(found[:], expected)
        assert torch.equal(found[1::2], expected[1::2])
        assert torch.equal(found[rows - 1], expected[-1])
        index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1))), dtype=torch.int64)
        assert torch.equal(found[index], expected[index])


def test_plain_column_is_returned_unchanged() -> None:
    x = torch.arange(3)
    assert plain_column(x, (x,)) is x
    assert rebuilt_column(x, [x], torch.Size()) is x


def test_mismatched_values_are_refused() -> None:
    x, none = torch.zeros(3, 2), torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected overflow values torch.float32 \[0, 2\]"):
        LinkedColumn(x, none, torch.zeros(0, 3), torch.Size())
    with pytest.raises(ValueError, match="expected overflow values"):
        LinkedColumn(x, none, torch.zeros(0, 2, dtype=torch.int64), torch.Size())
    with pytest.raises(ValueError, match="expected overflow values"):
        LinkedColumn(x, none, torch.zeros(0), torch.Size([3]))
