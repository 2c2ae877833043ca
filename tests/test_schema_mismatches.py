"""What does not fit a schema is refused by name, on every way in, for every kind of record."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import ReplayBuffer
from replaykit.errors import SchemaError
from tests.conftest import make_rows
from tests.support.refusals import refuses

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
def test_every_way_of_writing_refuses_rows_that_do_not_fit(
    column_kind: Any, make_rows: Any, snapshot: Any, mismatch: str
) -> None:
    """WR1 to WR4: key, expected and got are named; bytes, counters and handles stay."""
    damage, message = MISMATCHES[mismatch]
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    before = snapshot(rb)
    for way, write in WAYS.items():
        refuses(SchemaError, message, write, rb, damage(make_rows(7, 1)))
        assert snapshot(rb) == before, way


SET_WAYS: list[tuple[Callable[[ReplayBuffer], Any], type[Exception], str]] = [
    (
        lambda rb: rb.set_("id", torch.zeros(3)),
        ValueError,
        r"key 'id': expected int64 \[3\], got float32 \[3\]",
    ),
    (
        lambda rb: rb.set_("observation", torch.zeros(3, 1)),
        ValueError,
        r"key 'observation': expected float32 \[3, 3\], got float32 \[3, 1\]",
    ),
    (
        lambda rb: rb.set_("observation", torch.zeros(1, 3)),
        ValueError,
        r"expected float32 \[3, 3\], got float32 \[1, 3\]",
    ),
    (lambda rb: rb.set_("id", 3), ValueError, "expected a tensor, got int"),
    (
        lambda rb: rb.set_("nothing", torch.zeros(3)),
        KeyError,
        r"no column 'nothing'; there are .*'id'",
    ),
    (lambda rb: rb.set_("next", torch.zeros(3)), KeyError, "no column 'next'"),
    (
        lambda rb: rb.set_at_(("next", "reward"), torch.zeros(2), [0, 1]),
        ValueError,
        r"key \('next', 'reward'\): expected float32 \[2, 1\], got float32 \[2\]",
    ),
    (
        lambda rb: rb.set_at_("id", torch.tensor(2.9), 0),
        ValueError,
        r"expected int64 \[\], got float32 \[\]",
    ),
    (
        lambda rb: rb.set_at_("id", torch.arange(3), [0, 1]),
        ValueError,
        r"expected int64 \[2\], got int64 \[3\]",
    ),
    (
        lambda rb: rb.set_at_("id", torch.arange(1), 0),
        ValueError,
        r"expected int64 \[\], got int64 \[1\]",
    ),
    (lambda rb: rb.set_at_("id", torch.tensor(2), 3), IndexError, r"\[0, 3\), got 3"),
    (lambda rb: rb.set_at_("id", torch.arange(2), [0, 3]), IndexError, r"\[0, 3\), got 3"),
    (
        lambda rb: rb.update_({"id": torch.full((3,), 9), "observation": torch.zeros(3, 1)}),
        ValueError,
        "key 'observation'",
    ),
    (
        lambda rb: rb.update_({"id": torch.full((3,), 9), "new": torch.zeros(3)}),
        KeyError,
        "no column 'new'",
    ),
    (
        lambda rb: rb.update_({"id": torch.arange(3), "next": {"reward": torch.zeros(3)}}),
        ValueError,
        r"key \('next', 'reward'\)",
    ),
    (
        lambda rb: rb.__setitem__("new", torch.zeros(2)),
        ValueError,
        r"key 'new': expected a tensor of shape \[3, ...\], got \[2\]",
    ),
    (
        lambda rb: rb.__setitem__(slice(0, 2), make_rows(0, 3)),
        ValueError,
        r"expected rows of shape \[2\], got \[3\]",
    ),
    (lambda rb: rb.__setitem__(0, make_rows(0, 1)), ValueError, "takes one row"),
    (lambda rb: rb.__setitem__(3, make_rows(0, 1)[0]), IndexError, r"\[0, 3\), got 3"),
    (lambda rb: rb.__setitem__([0, -4], make_rows(0, 2)), IndexError, r"\[0, 3\), got -4"),
    (
        lambda rb: rb.write_all(make_rows(0, 3), end=2),
        ValueError,
        r"expected rows of shape \[2\], got \[3\]",
    ),
    (lambda rb: rb.write_all(make_rows(0, 4)), IndexError, "at most the 3 stored rows, got 4"),
    (lambda rb: rb.write_all(make_rows(0, 2), end=4), IndexError, "3 stored rows, got 4"),
    (lambda rb: rb.write_all(make_rows(0, 2), end=-1), IndexError, "3 stored rows, got -1"),
]


@pytest.mark.pitfall("WR3")
@pytest.mark.pitfall("WR4")
@pytest.mark.pitfall("WR14")
def test_values_that_do_not_fit_a_column_are_refused(column_kind: Any, snapshot: Any) -> None:
    """WR3, WR4, WR14 on all edits: no cast, no broadcast, no write beyond the stored rows."""
    rb = column_kind.buffer(4)
    rb.extend(make_rows(0, 3))
    before = snapshot(rb)
    for number, (call, error, message) in enumerate(SET_WAYS):
        refuses(error, message, call, rb)
        assert snapshot(rb) == before, (number, message)


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
        refuses(SchemaError, message, rb.extend, rows)
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
