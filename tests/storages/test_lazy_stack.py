"""TensorDicts that may differ from one another, read as lazy stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from replaykit import LazyStackStorage, ReplayBuffer


def _ragged(*lengths: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.full((n,), float(n)), "n": torch.tensor(n)}) for n in lengths]


def test_rows_may_differ_in_shape() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5), batch_size=4)
    rb.extend(_ragged(2, 3, 4))
    rows = rb[:]
    assert isinstance(rows, LazyStackedTensorDict)
    assert rows.batch_size == (3,)
    assert rows["n"].tolist() == [2, 3, 4]
    assert [row["x"].tolist() for row in rows.unbind(0)] == [[2.0] * 2, [3.0] * 3, [4.0] * 4]
    batch = rb.sample()
    assert isinstance(batch, LazyStackedTensorDict)
    assert (batch["n"] == batch["index"] + 2).all()
    assert [len(row["x"]) for row in batch.unbind(0)] == batch["n"].tolist()


def test_a_key_that_not_all_rows_have_is_on_the_parts_only() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend(
        [TensorDict({"a": torch.zeros(1), "b": torch.ones(1)}), TensorDict({"a": torch.ones(1)})]
    )
    rows = rb[:]
    assert set(rows.keys()) == {"a"}
    assert [set(row.keys()) for row in rows.unbind(0)] == [{"a", "b"}, {"a"}]
    assert set(rb[[0, 0]].keys()) == {"a", "b"}


@pytest.mark.parametrize(
    ("stack_dim", "shape"),
    [
        (0, (3, 4, 2)),
        (1, (4, 3, 2)),
        (2, (4, 2, 3)),
        (-1, (4, 2, 3)),
        (-2, (4, 3, 2)),
        (-3, (3, 4, 2)),
    ],
)
def test_rows_are_stacked_along_any_dimension(stack_dim: int, shape: tuple[int, ...]) -> None:
    """Negative dimensions count from the end of the result, as for ``torch.stack``."""
    rb = ReplayBuffer(storage=LazyStackStorage(5, stack_dim=stack_dim))
    row = TensorDict({"x": torch.arange(8).view(4, 2)}, [4, 2])
    for _ in range(3):
        rb.add(row)
    assert rb[:].batch_size == shape
    assert torch.equal(rb[:]["x"], torch.stack([row["x"]] * 3, stack_dim))
    batch = rb.sample(3)
    assert batch.batch_size == shape
    assert batch["index"].shape == shape


def test_a_batch_is_taken_apart_into_rows(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    assert rb.extend(make_rows(0, 3)).tolist() == [0, 1, 2]
    assert rb.extend(lazy_stack(_ragged(2, 3))).tolist() == [3, 4]
    assert rb[1]["id"] == 1
    assert rb[4]["x"].shape == (3,)


@pytest.mark.parametrize("batch", [torch.zeros(3), [1, 2], [TensorDict({}), "a"], ("a",)])
def test_rows_other_than_tensordicts_are_refused(batch: Any, snapshot: Any) -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend(_ragged(2))
    before = snapshot(rb)
    with pytest.raises(TypeError, match=r"rows that are TensorDicts, got \w+; ListStorage takes"):
        rb.extend(batch)
    assert snapshot(rb) == before


@pytest.mark.pitfall("WR13")
def test_changes_to_a_batch_do_not_reach_stored_rows() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend(_ragged(2, 3))
    for row in rb.sample(6).unbind(0):
        row["x"].fill_(-1)
    assert [row["x"].tolist() for row in rb.storage] == [[2.0] * 2, [3.0] * 3]


def test_rows_can_be_replaced_by_rows_of_another_shape() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend(_ragged(2, 3, 4))
    rb[1] = _ragged(7)[0]
    rb[[0, 2]] = _ragged(5, 6)
    assert [len(row["x"]) for row in rb.storage] == [5, 7, 6]
    assert rb.storage.ledger.next_position == 3


def test_an_empty_selection_has_no_rows() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend(_ragged(2, 3))
    assert len(rb.storage[2:]) == 0
