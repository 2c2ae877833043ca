"""Rows on their way between storages: as columns, as items, as state dicts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from replaykit.errors import SchemaError
from replaykit.storages.content import Content
from tests.support.refusals import refuses


@tensorclass
class Point:
    x: torch.Tensor
    name: str = "p"


MIXED: list[Any] = [
    TensorDict({"a": torch.zeros(2)}, []),
    "text",
    TensorDict({"a": torch.ones(3)}, []),
    torch.arange(3),
    TensorDict({"a": torch.full((2,), 2.0)}, []),
    None,
    Point(torch.zeros(1), batch_size=[]),
    {"k": (1, 2.5)},
    np.arange(2),
    torch.arange(3) + 5,
]


def test_items_are_returned_in_their_order(fingerprint: Any) -> None:
    content = Content.of_items(MIXED)
    assert content.rows == len(MIXED)
    assert len(content.groups) == 4
    # Rows of one layout travel as columns.
    assert content.groups[0].columns[0].tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert fingerprint(content.items()) == fingerprint(MIXED)


def test_state_is_rebuilt_to_the_same_content(fingerprint: Any) -> None:
    for items in (MIXED, MIXED[:1], [], [torch.zeros(2)] * 3, ["only", "objects"]):
        content = Content.from_state(Content.of_items(items).to_state())
        assert fingerprint(content.items()) == fingerprint(items)


def test_key_without_text_form_is_refused(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend({("a", "b"): torch.zeros(2)})
    refuses(TypeError, "keys that are strings or ints", rb.storage.content().to_state)


def test_rows_of_several_layouts_have_no_single_group() -> None:
    with pytest.raises(SchemaError, match="4 layouts and 4 rows that are not tensors"):
        Content.of_items(MIXED).single_group()
    refuses(SchemaError, "0 layouts", Content.of_items([]).single_group)


def _state(**changes: Any) -> dict[str, Any]:
    state = Content.of_items([torch.zeros(2), "a", torch.ones(2)]).to_state()
    return {**state, **changes}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "as a mapping"),
        ({}, "rows as an int of at least 0"),
        (_state(rows=-1), "rows as an int of at least 0"),
        (_state(rows=True), "rows as an int of at least 0"),
        (_state(lanes=[0]), "lanes(.0)? as"),
        (_state(lanes=None), "lanes(.0)? as"),
        (_state(groups=None), "groups as a list"),
        (_state(groups=[None]), "groups.0 as a mapping"),
        (
            _state(groups=[{"schema": {"kind": "tensor", "dtype": "x", "shape": []}}]),
            "groups.0.columns",
        ),
        (_state(rows=4), "each of 4 rows"),
        (_state(order=[0, -1, 0]), "the group of each"),
        (_state(order=torch.tensor([0, -1, 1])), "expected groups of"),
        (_state(order=torch.tensor([0, -2, 0])), "expected groups of"),
        (_state(order=torch.tensor([0, 0, 0])), "expected groups of"),
        (_state(order=None), "expected groups of"),
        (_state(plain=None), "plain as a mapping"),
        (_state(plain={}), "expected groups of"),
        (_state(plain={0: "a"}), "plain rows"),
    ],
)
def test_invalid_state_is_refused(state: Any, message: str) -> None:
    refuses(ValueError, message, Content.from_state, state)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "1 columns, got 0"),
        ([torch.zeros(2, 2), torch.zeros(2)], "1 columns, got 2"),
        (["a"], "expected a tensor"),
        ([torch.zeros(2, 3)], r"rows of shape \[2\]"),
        ([torch.zeros(2, 2, dtype=torch.int64)], "float32 rows"),
        ([torch.zeros(3, 2)], "expected groups of"),
    ],
)
def test_columns_that_do_not_fit_their_schema_are_refused(columns: Any, message: str) -> None:
    state = Content.of_items([torch.zeros(2), torch.ones(2)]).to_state()
    state["groups"][0]["columns"] = columns
    refuses(ValueError, message, Content.from_state, state)


def _ids(storage: Any) -> list[int]:
    return [int(row["id"]) for row in storage]


@pytest.mark.pitfall("CK5")
def test_a_state_dict_holds_copies_of_the_filled_rows(
    storage_kind: Any, make_rows: Any, fingerprint: Any
) -> None:
    """CK5, D9: no later write changes it, and it keeps nothing of the buffer alive."""
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(0, 4))
    state = rb.storage.state_dict()
    assert set(state) == {"_storage", "initialized", "_len"}
    assert state["_len"] == 4
    stored = state["_storage"]
    assert len(stored if isinstance(stored, list) else stored["id"]) == 4
    before = fingerprint(state)
    rb.extend(make_rows(10, 6))
    rb.empty()
    assert fingerprint(state) == before
    rb.storage.load_state_dict(state)
    assert _ids(rb.storage) == [0, 1, 2, 3]
    rb[0] = make_rows(50, 1)[0]
    assert fingerprint(state) == before
    assert rb.storage.ledger.cursor == 4
    rb.extend(make_rows(5, 3))
    assert _ids(rb.storage) == [7, 1, 2, 3, 5, 6]


@pytest.mark.pitfall("CK9")
@pytest.mark.parametrize("target", ["list", "lazy_stack", "tensor", "lazy_tensor", "memmap"])
def test_storages_take_each_others_rows(
    storage_kind: Any, make_rows: Any, fingerprint: Any, target: str
) -> None:
    """C8: rows of one kind of storage load into every other, by state dict and by files."""
    other_kind = type(storage_kind)(target, "cpu", storage_kind.folder)
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(0, 4))
    expected = [fingerprint(row) for row in rb.storage]
    rb.storage.dumps(storage_kind.folder / "saved")
    loaded = other_kind(6)
    loaded.loads(storage_kind.folder / "saved")
    assert [fingerprint(row) for row in loaded] == expected
    other = other_kind(6)
    other.load_state_dict(rb.storage.state_dict())
    assert [fingerprint(row) for row in other] == expected


def test_a_state_dict_that_does_not_fit_changes_nothing(
    storage_kind: Any, make_rows: Any, snapshot: Any
) -> None:
    rb = storage_kind.buffer(3)
    rb.extend(make_rows(0, 3))
    before = snapshot(rb)
    good = rb.storage.state_dict()
    for state in (
        {},
        {key: value for key, value in good.items() if key != "_len"},
        {**good, "_len": 2},
        storage_kind.buffer(5).storage.state_dict() | {"_len": 1},
    ):
        with pytest.raises(ValueError):
            rb.storage.load_state_dict(state)
    larger = storage_kind.buffer(5)
    larger.extend(make_rows(0, 5))
    with pytest.raises(ValueError, match="at most 3 rows, got 5"):
        rb.storage.load_state_dict(larger.storage.state_dict())
    if storage_kind.columns:
        other = ReplayBuffer(storage=LazyTensorStorage(3))
        other.extend(make_rows(0, 3).exclude("action"))
        refuses(SchemaError, "key 'action'", rb.storage.load_state_dict, other.storage.state_dict())
    assert snapshot(rb) == before


def test_pytrees_have_no_state_dict(column_kind: Any) -> None:
    row = (torch.tensor(0), {"a": torch.tensor(1)})
    rb = column_kind.buffer(4, row)
    rb.extend((torch.zeros(2, dtype=torch.int64), {"a": torch.ones(2, dtype=torch.int64)}))
    refuses(TypeError, r"are not supported by .*; use dumps\(path\)", rb.storage.state_dict)
    rb.storage.dumps(column_kind.folder / "saved")
    other = LazyTensorStorage(4)
    other.loads(column_kind.folder / "saved")
    assert other[1][1]["a"].item() == 1


def test_storages_without_rows_have_a_state(storage_kind: Any, make_rows: Any) -> None:
    empty = storage_kind(4) if storage_kind.name != "tensor" else LazyTensorStorage(4)
    state = empty.state_dict()
    assert state["_len"] == 0
    rb = storage_kind.buffer(4)
    rb.extend(make_rows(0, 2))
    rb.storage.load_state_dict(state)
    assert len(rb.storage) == 0


def test_lanes_travel_with_their_rows(make_lanes: Any, tmp_path: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    rb.extend(make_lanes(0, 3))
    rb.storage.dumps(tmp_path)
    for other in (LazyTensorStorage(20, ndim=2), LazyMemmapStorage(8, ndim=2)):
        other.loads(tmp_path)
        assert torch.equal(other[:]["id"], rb.storage[:]["id"])
        assert other.shape == (3, 2)
    small = LazyTensorStorage(4, ndim=2)
    with pytest.warns(UserWarning, match="1 rows do not fit"):
        small.loads(tmp_path)
    assert small[:]["id"].tolist() == [[1, 101], [2, 102]]
    for other in (LazyTensorStorage(8), ListStorage(8), LazyTensorStorage(8, ndim=3)):
        refuses(SchemaError, r"ndim", other.loads, tmp_path)
        assert len(other) == 0
    wider = ReplayBuffer(storage=LazyTensorStorage(9, ndim=2))
    wider.extend(make_lanes(0, 1, (3,)))
    refuses(SchemaError, r"lanes of sizes \[3\], got \[2\]", wider.storage.loads, tmp_path)


@pytest.mark.pitfall("CK11")
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_are_independent(
    storage_kind: Any, make_rows: Any, fingerprint: Any, way: str
) -> None:
    """CK11: storages can be pickled, filled and empty; slots and handles come along."""
    rb = storage_kind.buffer(4)
    rb.extend(make_rows(0, 6))
    storage = rb.storage
    twin = pickle.loads(pickle.dumps(storage)) if way == "pickle" else copy.deepcopy(storage)
    assert type(twin) is type(storage)
    assert [fingerprint(row) for row in twin] == [fingerprint(row) for row in storage]
    slots = torch.arange(4)
    assert twin.ledger.positions(slots).tolist() == storage.ledger.positions(slots).tolist()
    assert twin.ledger.generations(slots).tolist() == storage.ledger.generations(slots).tolist()
    assert twin.lock is not storage.lock
    ReplayBuffer(storage=twin).extend(make_rows(50, 1))
    assert _ids(storage) == [4, 5, 2, 3]
    assert _ids(twin) == [4, 5, 50, 3]
    unused = storage_kind(4)
    again = pickle.loads(pickle.dumps(unused))
    assert len(again) == len(unused) == 0


def test_ragged_rows_survive_every_way(tmp_path: Any, fingerprint: Any) -> None:
    rows = [TensorDict({"x": torch.full((n,), float(n))}, []) for n in (2, 3, 2)]
    storage = LazyStackStorage(4)
    rb = ReplayBuffer(storage=storage)
    rb.extend(lazy_stack(rows))
    storage.dumps(tmp_path)
    loaded = LazyStackStorage(4)
    loaded.loads(tmp_path)
    again = LazyStackStorage(4)
    again.load_state_dict(storage.state_dict())
    for other in (loaded, again, pickle.loads(pickle.dumps(storage))):
        assert [fingerprint(row) for row in other] == [fingerprint(row) for row in rows]
    with pytest.raises(SchemaError, match="expected rows of one layout, got 2 layouts"):
        LazyTensorStorage(4).loads(tmp_path)
