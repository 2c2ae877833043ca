"""The fixed layout of a record: what fixes it, what shares it, and what it tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.errors import SchemaError
from replaykit.schema import Schema, split_leaves
from tests.support.refusals import refuses


def test_the_first_write_fixes_the_schema_only_if_it_succeeds(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(TypeError):
        rb.extend({"a": torch.zeros(2), "b": "text"})
    with pytest.raises(SchemaError, match=r"'a': \[2, 1\], 'b': \[3\]"):
        rb.extend({"a": torch.zeros(2, 1), "b": torch.zeros(3)})
    refuses(SchemaError, "expected at least one tensor", rb.extend, TensorDict({}, [2]))
    for write in (
        lambda: rb.writer.write_at(torch.tensor([4]), make_rows(0, 1)),
        lambda: rb.storage.set([4], make_rows(0, 1)),
    ):
        with pytest.raises(IndexError):
            write()
    for gap in (
        lambda: rb.writer.write_at(torch.tensor([1]), make_rows(0, 1)),
        lambda: rb.storage.set([1], make_rows(0, 1)),
    ):
        refuses(RuntimeError, "gap", gap)
    assert rb.storage.schema is None
    rb.extend(torch.zeros(2, 5))
    assert str(rb.storage.schema.leaves[()]) == "float32 [5]"


def test_empty_keeps_the_schema(column_kind: Any, make_rows: Any) -> None:
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    rb.empty()
    refuses(SchemaError, "expected TensorDict records, got tensor", rb.extend, torch.zeros(3))


def test_the_order_of_keys_does_not_matter(column_kind: Any, make_rows: Any) -> None:
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 2))
    rows = make_rows(2, 2)
    turned = TensorDict({key: rows[key] for key in reversed(list(rows.keys()))}, [2])
    rb.extend(turned)
    assert rb["id"].tolist() == [0, 1, 2, 3]
    assert rb["observation"][:, 0].tolist() == [0.0, 10.0, 20.0, 30.0]


def test_lazy_stacks_equal_dense_batches(
    storage_kind: Any, make_rows: Any, fingerprint: Any
) -> None:
    dense, lazy = storage_kind.buffer(5), storage_kind.buffer(5)
    rows = make_rows(0, 4)
    assert dense.extend(rows).tolist() == lazy.extend(lazy_stack(list(rows.unbind(0)))).tolist()
    for row in range(4):
        assert fingerprint(dense[row]) == fingerprint(lazy[row])
    dense.extend(lazy_stack(list(rows.unbind(0))))
    assert [int(dense[row]["id"]) for row in range(5)] == [1, 2, 3, 3, 0]


def test_lists_and_batches_share_a_schema(column_kind: Any, make_rows: Any) -> None:
    rb = column_kind.buffer(6)
    rows = make_rows(0, 6)
    rb.extend(rows[:2])
    rb.extend(list(rows[2:4].unbind(0)))
    rb.add(rows[4])
    assert rb["id"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="row 1 of the list differs from row 0: key 'id'"):
        rb.extend([rows[0], rows[1].exclude("id")])


# -- the parts ------------------------------------------------------------------------------------


def test_rows_are_taken_apart_with_time_first() -> None:
    data = TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3])
    rows = split_leaves(data, 2, time_dim=1)
    assert rows.batch == (3, 2)
    assert len(rows) == 3
    assert rows.leaves[("x",)].tolist() == [[0, 3], [1, 4], [2, 5]]
    single = split_leaves(data[:, 0], 2, single=True, time_dim=1)
    assert single.leaves[("x",)].tolist() == [[0, 3]]


def test_error_names_a_missing_time_dimension() -> None:
    with pytest.raises(SchemaError, match=r"time along batch dimension 1, got batch shape \[3\]"):
        split_leaves(torch.zeros(3), 2, time_dim=1)
    refuses(TypeError, "got str", split_leaves, {"a": "text"}, 2, time_dim=1)


def test_optional_keys_are_left_out_where_the_schema_has_none() -> None:
    data = TensorDict({"x": torch.zeros(2), "td_error": torch.ones(2)}, [2])
    optional = [("td_error",)]
    first = split_leaves(data, 1, optional=optional)
    assert ("td_error",) in first.leaves
    without = Schema(split_leaves(data.exclude("td_error"), 1).root)
    assert set(split_leaves(data, 1, optional=optional, schema=without).leaves) == {("x",)}
    with_it = Schema(first.root)
    assert len(split_leaves(data, 1, optional=optional, schema=with_it).leaves) == 2


def test_schema_gives_its_size_and_layout(make_rows: Any) -> None:
    schema = Schema(split_leaves(make_rows(0, 2), 1).root)
    assert schema.row_bytes() == 8 + 3 * 4 + 1 + 4 + 1
    assert repr(schema).splitlines()[2] == "    'observation': float32 [3]"
    assert Schema.from_json(schema.to_json()).leaves == schema.leaves


def test_zero_rows_do_not_fix_the_schema(column_kind: Any, make_rows: Any) -> None:
    """E5 is tested with the writers; here: rows of no kind and no lane are no rows either."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    for nothing in (
        make_rows(0, 3)[:0],
        [],
        TensorDict({}, [0]),
        torch.zeros(0, 9),
        {"a": torch.zeros(0)},
    ):
        assert rb.extend(nothing).shape == (0,)
    lanes = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    assert lanes.extend(torch.zeros(0, 3)).shape == (0, 2)
    assert lanes.extend(torch.zeros(2, 0)).shape == (0, 2)
    assert rb.storage.schema is None
    assert lanes.storage.schema is None
