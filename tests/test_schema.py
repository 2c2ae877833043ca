"""The fixed layout of a record: what does not fit is refused by name, on every way in."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.errors import SchemaError
from replaykit.schema import Schema, take_apart

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Inner:
    x: torch.Tensor


@tensorclass
class Record:
    inner: Inner
    y: torch.Tensor
    label: str = "a"


def _record(count: int = 2, width: int = 3, label: str = "a") -> Record:
    inner = Inner(torch.zeros(count, width), batch_size=[count])
    return Record(inner=inner, y=torch.zeros(count), label=label, batch_size=[count])


def _without(key: Any) -> Callable[[TensorDict], TensorDict]:
    return lambda rows: rows.exclude(key)


def _with(key: Any, value: Callable[[int], torch.Tensor]) -> Callable[[TensorDict], TensorDict]:
    return lambda rows: rows.clone().set(key, value(len(rows)))


# What is wrong with rows made by `make_rows`, and what the message has to say of it.
MISMATCHES: dict[str, tuple[Callable[[TensorDict], Any], str]] = {
    "missing key": (_without("action"), r"key 'action': expected uint8 \[\], got nothing"),
    "missing nested key": (
        _without(("next", "reward")),
        r"key \('next', 'reward'\): expected float32 \[1\], got nothing",
    ),
    "missing branch": (
        _without("next"),
        r"\('next', 'done'\): expected bool \[1\], got nothing; .*\('next', 'reward'\)",
    ),
    "extra key": (
        _with("extra", lambda n: torch.zeros(n, 2)),
        r"key 'extra': expected no such key, got float32 \[2\]",
    ),
    "extra nested key": (
        _with(("next", "extra"), lambda n: torch.zeros(n)),
        r"key \('next', 'extra'\): expected no such key, got float32 \[\]",
    ),
    "wider feature": (
        _with("observation", lambda n: torch.zeros(n, 4)),
        r"key 'observation': expected float32 \[3\], got float32 \[4\]",
    ),
    "feature of size 1": (
        _with("observation", lambda n: torch.zeros(n, 1)),
        r"key 'observation': expected float32 \[3\], got float32 \[1\]",
    ),
    "another dimension": (
        _with("observation", lambda n: torch.zeros(n, 1, 3)),
        r"key 'observation': expected float32 \[3\], got float32 \[1, 3\]",
    ),
    "no feature dimension": (
        _with("observation", lambda n: torch.zeros(n)),
        r"key 'observation': expected float32 \[3\], got float32 \[\]",
    ),
    "reward without its dimension": (
        _with(("next", "reward"), lambda n: torch.zeros(n)),
        r"key \('next', 'reward'\): expected float32 \[1\], got float32 \[\]",
    ),
    "double": (
        _with("observation", lambda n: torch.zeros(n, 3, dtype=torch.float64)),
        r"key 'observation': expected float32 \[3\], got float64 \[3\]",
    ),
    "int from float": (
        _with("id", lambda n: torch.full((n,), 2.9)),
        r"key 'id': expected int64 \[\], got float32 \[\]",
    ),
    "float from int": (
        _with("observation", lambda n: torch.zeros(n, 3, dtype=torch.int64)),
        r"key 'observation': expected float32 \[3\], got int64 \[3\]",
    ),
    "flag of another dtype": (
        _with(("next", "done"), lambda n: torch.zeros(n, 1)),
        r"key \('next', 'done'\): expected bool \[1\], got float32 \[1\]",
    ),
    "several at once, sorted": (
        lambda rows: rows.exclude("id").set("zoo", torch.zeros(len(rows))).set(
            "action", torch.zeros(len(rows))
        ),
        r"key 'action': .*; key 'id': .*; key 'zoo': ",
    ),
    "a leaf in place of a branch": (
        lambda rows: rows.exclude("next").set("next", torch.zeros(len(rows))),
        r"key 'next': expected no such key, got float32 \[\]; key \('next', 'done'\): ",
    ),
    "bare tensor": (lambda rows: rows["observation"], "expected TensorDict records, got tensor"),
    "dict": (lambda rows: dict(rows.items()), "expected TensorDict records, got mapping"),
    "tuple": (lambda rows: (rows["id"],), "expected TensorDict records, got tuple"),
    "tensorclass": (lambda rows: _record(len(rows)), "expected TensorDict records, got .*Record"),
}  # fmt: skip


def _first(rows: Any) -> Any:
    if isinstance(rows, dict):
        return {key: _first(value) for key, value in rows.items()}
    return tuple(map(_first, rows)) if isinstance(rows, tuple) else rows[0]


# Ways in for one row, given as a batch of one.
WAYS: dict[str, Callable[[ReplayBuffer, Any], Any]] = {
    "add": lambda rb, rows: rb.add(_first(rows)),
    "extend": lambda rb, rows: rb.extend(rows),
    "extend with a list": lambda rb, rows: rb.extend([_first(rows)]),
    "extend with one bad row of three": lambda rb, rows: rb.extend(
        [rb[0].clone(), rb[1].clone(), _first(rows)]
    ),
    "rb[i] = v": lambda rb, rows: rb.__setitem__(1, _first(rows)),
    "rb[a:b] = v": lambda rb, rows: rb.__setitem__(slice(1, 2), rows),
    "rb[mask] = v": lambda rb, rows: rb.__setitem__(torch.tensor([False, True, False]), rows),
    "storage.set": lambda rb, rows: rb.storage.set(1, _first(rows)),
    "storage.set beyond the end": lambda rb, rows: rb.storage.set([3], rows),
    "storage[i] = v": lambda rb, rows: rb.storage.__setitem__(1, _first(rows)),
    "write_at": lambda rb, rows: rb.writer.write_at(torch.tensor([0]), rows),
}


@pytest.mark.pitfall("WR1")
@pytest.mark.pitfall("WR2")
@pytest.mark.pitfall("WR3")
@pytest.mark.pitfall("WR4")
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_what_does_not_fit_is_refused_on_every_way_in_and_changes_nothing(
    column_kind: Any, make_rows: Any, snapshot: Any, mismatch: str
) -> None:
    """WR1 to WR4: key, expected and got are named; bytes, counters and handles stay."""
    damage, message = MISMATCHES[mismatch]
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    before = snapshot(rb)
    for way, write in WAYS.items():
        with pytest.raises(SchemaError, match=message):
            write(rb, damage(make_rows(7, 1)))
        assert snapshot(rb) == before, way


SET_WAYS: dict[str, tuple[Callable[[ReplayBuffer], Any], type[Exception], str]] = {
    "set_ dtype": (
        lambda rb: rb.set_("id", torch.zeros(3)),
        ValueError,
        r"key 'id': expected int64 \[3\], got float32 \[3\]",
    ),
    "set_ size 1": (
        lambda rb: rb.set_("observation", torch.zeros(3, 1)),
        ValueError,
        r"key 'observation': expected float32 \[3, 3\], got float32 \[3, 1\]",
    ),
    "set_ one row for all": (
        lambda rb: rb.set_("observation", torch.zeros(1, 3)),
        ValueError,
        r"expected float32 \[3, 3\], got float32 \[1, 3\]",
    ),
    "set_ number": (lambda rb: rb.set_("id", 3), ValueError, "expected a tensor, got int"),
    "set_ unknown": (
        lambda rb: rb.set_("nothing", torch.zeros(3)),
        KeyError,
        r"no column 'nothing'; there are .*'id'",
    ),
    "set_ branch": (lambda rb: rb.set_("next", torch.zeros(3)), KeyError, "no column 'next'"),
    "set_at_ shape": (
        lambda rb: rb.set_at_(("next", "reward"), torch.zeros(2), [0, 1]),
        ValueError,
        r"key \('next', 'reward'\): expected float32 \[2, 1\], got float32 \[2\]",
    ),
    "set_at_ dtype": (
        lambda rb: rb.set_at_("id", torch.tensor(2.9), 0),
        ValueError,
        r"expected int64 \[\], got float32 \[\]",
    ),
    "set_at_ outside": (
        lambda rb: rb.set_at_("id", torch.tensor(2), 3),
        IndexError,
        r"\[0, 3\), got 3",
    ),
    "update_ second bad": (
        lambda rb: rb.update_({"id": torch.full((3,), 9), "observation": torch.zeros(3, 1)}),
        ValueError,
        "key 'observation'",
    ),
    "rb[key] = v": (
        lambda rb: rb.__setitem__("new", torch.zeros(3)),
        KeyError,
        "no column 'new'",
    ),
}


@pytest.mark.pitfall("WR3")
@pytest.mark.pitfall("WR4")
@pytest.mark.pitfall("WR14")
@pytest.mark.parametrize("case", SET_WAYS)
def test_columns_are_replaced_by_what_fits_only(
    column_kind: Any, make_rows: Any, snapshot: Any, case: str
) -> None:
    """WR3, WR4, WR14 on ``set_``, ``set_at_``, ``update_`` and ``rb[key] =``."""
    call, error, message = SET_WAYS[case]
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    before = snapshot(rb)
    with pytest.raises(error, match=message):
        call(rb)
    assert snapshot(rb) == before


def test_the_first_write_fixes_the_schema_only_if_it_succeeds(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(TypeError):
        rb.extend({"a": torch.zeros(2), "b": "text"})
    with pytest.raises(SchemaError, match=r"'a': \[2, 1\], 'b': \[3\]"):
        rb.extend({"a": torch.zeros(2, 1), "b": torch.zeros(3)})
    with pytest.raises(SchemaError, match="expected at least one tensor"):
        rb.extend(TensorDict({}, [2]))
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
        with pytest.raises(RuntimeError, match="gap"):
            gap()
    assert rb.storage.schema is None
    rb.extend(torch.zeros(2, 5))
    assert str(rb.storage.schema.leaves[()]) == "float32 [5]"


def test_empty_keeps_the_schema(column_kind: Any, make_rows: Any) -> None:
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    rb.empty()
    with pytest.raises(SchemaError, match="expected TensorDict records, got tensor"):
        rb.extend(torch.zeros(3))


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


# -- other kinds of records -----------------------------------------------------------------------


def _pytree(count: int) -> Any:
    return (torch.zeros(count), {"a": torch.ones(count, 2), "b": (torch.zeros(count, 0),)})


OTHERS: dict[str, tuple[Any, list[tuple[Any, str]]]] = {
    "bare tensor": (
        torch.zeros(2, 3),
        [
            (torch.zeros(2, 4), r"key \(root\): expected float32 \[3\], got float32 \[4\]"),
            (torch.zeros(2, 3, dtype=torch.int64), "expected float32 .*, got int64"),
            (TensorDict({"a": torch.zeros(2, 3)}, [2]), "expected tensor records, got TensorDict"),
        ],
    ),
    "tensorclass": (
        _record(),
        [
            (_record(width=4), r"key \('inner', 'x'\): expected float32 \[3\], got float32 \[4\]"),
            (_record(label="b"), "field 'label': expected 'a' .*, got 'b'"),
            (Inner(torch.zeros(2, 3), batch_size=[2]), "expected .*Record records, got .*Inner"),
            (_record().to_tensordict().exclude("label"), "expected .*Record records, got Tensor"),
        ],
    ),
    "tensorclass in a TensorDict": (
        TensorDict({"t": _record().inner}, [2]),
        [
            (
                TensorDict({"t": TensorDict({"x": torch.zeros(2, 3)}, [2])}, [2]),
                "key 't': expected a Inner, got a TensorDict",
            ),
            (
                TensorDict({"t": Inner(torch.zeros(2), batch_size=[2])}, [2]),
                r"key \('t', 'x'\): expected float32 \[3\], got float32 \[\]",
            ),
        ],
    ),
    "pytree": (
        _pytree(2),
        [
            ((*_pytree(2), torch.zeros(2)), "key 2: expected no such key, got float32"),
            ((_pytree(2)[0],), r"key \(1, 'a'\): expected float32 \[2\], got nothing"),
            (
                (torch.zeros(2), {**_pytree(2)[1], "b": [torch.zeros(2, 0)]}),
                r"key \(1, 'b'\): expected a tuple, got a list",
            ),
            (Pair(*_pytree(2)), "expected tuple records, got Pair"),
            (
                (_pytree(2)[0], {"a": torch.ones(2, 2), "b": (torch.zeros(2, 1),)}),
                r"key \(1, 'b', 0\): expected float32 \[0\], got float32 \[1\]",
            ),
        ],
    ),
    "named tuple": (
        Pair(torch.zeros(2), torch.ones(2)),
        [((torch.zeros(2), torch.ones(2)), "expected Pair records, got tuple")],
    ),
    "dict": (
        {"a": torch.zeros(2)},
        [
            ({"b": torch.zeros(2)}, "key 'a': .*; key 'b': "),
            (TensorDict({"a": torch.zeros(2)}, [2]), "expected mapping records, got TensorDict"),
        ],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_records_have_a_schema_too(
    column_kind: Any, snapshot: Any, fingerprint: Any, name: str
) -> None:
    good, bad = OTHERS[name]
    rb = column_kind.buffer(4, _row_of(good))
    rb.extend(good)
    assert fingerprint(rb[:]) == fingerprint(good)
    before = snapshot(rb)
    for rows, message in bad:
        with pytest.raises(SchemaError, match=message):
            rb.extend(rows)
        assert snapshot(rb) == before
    rb.add(_row_of(good))
    assert len(rb) == 3


def _row_of(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _row_of(value) for key, value in data.items()}
    if isinstance(data, tuple):
        rows = [_row_of(value) for value in data]
        return type(data)(*rows) if hasattr(data, "_fields") else tuple(rows)
    return data[0]


# -- flags and reserved keys ----------------------------------------------------------------------

FLAGS = [
    (*prefix, name) for prefix in ((), ("next",)) for name in ("done", "terminated", "truncated")
]


@pytest.mark.pitfall("BD6")
@pytest.mark.parametrize("flat_first", [True, False], ids=["[N] first", "[N,1] first"])
def test_flags_are_stored_with_a_dimension_however_they_come(
    storage_kind: Any, flat_first: bool
) -> None:
    """BD6: ``[N]`` and ``[N, 1]`` may be mixed, at the root and under ``next``."""

    def rows(count: int, flat: bool, offset: int) -> TensorDict:
        column = (torch.arange(count) + offset) % 2 == 1
        shaped = column if flat else column.unsqueeze(-1)
        data = TensorDict({flag: shaped.clone() for flag in FLAGS}, [count])
        return data.set("plain", column)  # no flag: never reshaped

    example = rows(1, False, 0)[0]
    rb = storage_kind.buffer(20, example, batch_size=7)
    rb.extend(rows(3, flat_first, 0))
    rb.extend(rows(3, not flat_first, 3))
    rb.add(rows(1, flat_first, 6)[0])
    rb.add(rows(1, not flat_first, 7)[0])
    rb.extend([rows(1, flat_first, 8)[0]])
    rb[0] = rows(1, flat_first, 0)[0]
    rb[1:3] = rows(2, not flat_first, 1)
    assert len(rb) == 9
    for flag in FLAGS:
        stored = torch.stack([rb[row][flag] for row in range(9)])
        assert stored.flatten().tolist() == [i % 2 == 1 for i in range(9)]
        assert stored.shape == (9, 1)
        assert rb.sample()[flag].shape == (7, 1)
    assert rb.sample()["plain"].shape == (7,)


@pytest.mark.pitfall("BD6")
def test_flags_of_lanes_and_of_trajectories_get_a_dimension() -> None:
    """BD6 for ``ndim=2`` and for rows that are whole trajectories."""
    flags = torch.arange(6).view(2, 3) % 2 == 0
    flat = TensorDict({"done": flags, "next": {"truncated": flags}}, [2, 3])
    full = TensorDict({"done": flags[..., None], "next": {"truncated": flags[..., None]}}, [2, 3])
    for rows in (flat, full):
        lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        assert lanes.extend(rows).shape == (6, 2)
        lanes.extend(full)
        assert lanes.add(flat[:, 0]).shape == (2, 2)
        assert lanes[:]["done"].shape == (2, 6, 1)  # 7 steps went into a ring of 6
        assert lanes[:]["next", "truncated"][:, 1:3, 0].tolist() == flags[:, 1:].tolist()
        trajectories = ReplayBuffer(storage=LazyTensorStorage(4))
        trajectories.extend(rows)
        trajectories.extend(full)
        trajectories.add(flat[0])
        assert trajectories[:]["next", "truncated"].shape == (4, 3, 1)
        assert trajectories[0]["done"].flatten().tolist() == flags[0].tolist()


def test_flags_of_other_dtypes_are_kept() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"done": torch.tensor([0.0, 2.5])}, [2]))
    assert rb[:]["done"].tolist() == [[0.0], [2.5]]


def test_flags_in_records_that_are_no_tensordicts_are_left_alone() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"done": torch.zeros(2), "index": torch.ones(2)})
    assert rb[:]["done"].shape == (2,)
    assert rb[:]["index"].tolist() == [1.0, 1.0]


@pytest.mark.pitfall("WR16")
def test_what_the_caller_gave_is_never_changed(
    storage_kind: Any, make_rows: Any, fingerprint: Any
) -> None:
    """WR16 and E1: reserved keys and flat flags are dealt with in copies."""
    rows = make_rows(0, 3).set("index", torch.tensor([7, 7, 7])).set("done", torch.ones(3).bool())
    rows.set("index_generation", torch.zeros(3, dtype=torch.int64))
    rows["next"].set("terminated", torch.zeros(3).bool())
    example = make_rows(0, 1).set("done", torch.ones(1, 1).bool())
    example["next"].set("terminated", torch.zeros(1, 1).bool())
    rb = storage_kind.buffer(3, example[0], batch_size=4)
    nested = rows["next"]
    before = fingerprint(rows)
    rb.extend(rows)
    rb.add(rows[0])
    rb.extend(list(rows.unbind(0)))
    rb[0] = rows[0]
    rb[1:3] = rows[1:3]
    rb.writer.write_at(torch.tensor([0, 1]), rows[:2])
    rb.storage.set([0, 1, 2], rows)
    assert fingerprint(rows) == before
    assert rows["next"] is nested
    assert "index" not in set(rb[0].keys())
    assert "index_generation" not in set(rb[0].keys())
    sampled = rb.sample()
    assert sampled["index"].max() < 3
    rb.extend(sampled)  # a sample goes back in, without its index
    # The storage has its own copy: what the caller does later is not seen.
    rb.extend(rows)
    rows["id"].fill_(-1)
    assert sorted(int(rb[row]["id"]) for row in range(3)) == [0, 1, 2]


def test_an_index_branch_is_ignored_as_a_whole() -> None:
    """Samples of an ensemble carry ``("index", "buffer_ids")``."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rows = TensorDict({"x": torch.zeros(2), "index": {"index": torch.zeros(2)}}, [2])
    rb.extend(rows)
    assert set(rb[:].keys()) == {"x"}


# -- the parts ------------------------------------------------------------------------------------


def test_rows_are_taken_apart_with_time_first() -> None:
    data = TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3])
    rows = take_apart(data, 2, time_dim=1)
    assert rows.batch == (3, 2)
    assert len(rows) == 3
    assert rows.leaves[("x",)].tolist() == [[0, 3], [1, 4], [2, 5]]
    single = take_apart(data[:, 0], 2, single=True, time_dim=1)
    assert single.leaves[("x",)].tolist() == [[0, 3]]


def test_time_that_is_not_there_is_named() -> None:
    with pytest.raises(SchemaError, match=r"time along batch dimension 1, got batch shape \[3\]"):
        take_apart(torch.zeros(3), 2, time_dim=1)
    with pytest.raises(TypeError, match="got str"):
        take_apart({"a": "text"}, 2, time_dim=1)


def test_optional_keys_are_left_out_where_the_schema_has_none() -> None:
    data = TensorDict({"x": torch.zeros(2), "td_error": torch.ones(2)}, [2])
    optional = [("td_error",)]
    first = take_apart(data, 1, optional=optional)
    assert ("td_error",) in first.leaves
    without = Schema(take_apart(data.exclude("td_error"), 1).root)
    assert set(take_apart(data, 1, optional=optional, schema=without).leaves) == {("x",)}
    with_it = Schema(first.root)
    assert len(take_apart(data, 1, optional=optional, schema=with_it).leaves) == 2


def test_a_schema_tells_its_size_and_layout(make_rows: Any) -> None:
    schema = Schema(take_apart(make_rows(0, 2), 1).root)
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
