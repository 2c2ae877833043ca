"""Rows recognised at a glance are what taking them apart gives, or are left to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.schema import Matcher, Schema, split_leaves
from replaykit.structure import raw_bytes

COUNT = 5
PRIORITY = ("td_error",)


def _good(count: int | None = COUNT, seed: int = 0, **others: torch.Tensor) -> TensorDict:
    """Rows of every kind of leaf; one row for ``count=None``."""
    generator = torch.Generator().manual_seed(seed)
    batch = [] if count is None else [count]

    def some(*shape: int) -> torch.Tensor:
        return torch.rand([*batch, *shape], generator=generator)

    return TensorDict(
        {
            "x": some(3),
            "z": torch.complex(some(2), some(2)),
            "scalar": (some() * 100).long(),
            "pixels": (some(4, 5) * 256).to(torch.uint8),
            "empty": some(0),
            "done": some(1) < 0.5,
            "next": TensorDict(
                {"x": some(3), "done": some(1) < 0.5, "agents": TensorDict({"a": some(2)}, batch)},
                batch,
            ),
            **others,
        },
        batch,
    )


def _of(schema_data: TensorDict) -> tuple[Matcher, Schema]:
    schema = Schema(split_leaves(schema_data, 1).root)
    return Matcher(schema, torch.Size()), schema


@pytest.fixture(params=["described", "asked for attributes"])
def versions(request: Any, monkeypatch: Any) -> None:
    """A version of torch that describes its tensors to the core, and one that does not."""
    if request.param != "described":
        monkeypatch.setattr("replaykit.schema._EXCHANGE", None)


# -- changes that leave rows good, or do not -------------------------------------------------------


class _Sub(torch.Tensor):
    pass


@tensorclass
class _Class:
    x: torch.Tensor
    done: torch.Tensor


def _nested(data: TensorDict, path: str) -> tuple[TensorDict, str]:
    *parents, key = path.split(".")
    for parent in parents:
        data = data._tensordict[parent]
    return data, key


def _leaf(change: Callable[[torch.Tensor], Any]) -> Callable[[TensorDict, str], Any]:
    def apply(data: TensorDict, path: str) -> None:
        inner, key = _nested(data, path)
        inner._tensordict[key] = change(inner._tensordict[key])

    return apply


def _delete(data: TensorDict, path: str) -> None:
    inner, key = _nested(data, path)
    del inner._tensordict[key]


def _rename(data: TensorDict, path: str) -> None:
    inner, key = _nested(data, path)
    inner._tensordict["other"] = inner._tensordict.pop(key)


def _add(key: str) -> Callable[[TensorDict, str], Any]:
    def apply(data: TensorDict, path: str) -> None:
        data._tensordict[key] = torch.zeros(data.batch_size)

    return apply


def _strided(leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([leaf, leaf], -1)[..., 0]


def _requires_grad(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().requires_grad_() if leaf.is_floating_point() else leaf


def _lazily(leaf: torch.Tensor) -> torch.Tensor:
    """Other bytes than values: conjugate and negative views."""
    if leaf.is_complex():
        return leaf.conj()
    return torch.complex(leaf, leaf).conj().imag if leaf.is_floating_point() else leaf


def _one_lazily(leaf: torch.Tensor) -> torch.Tensor:
    return _lazily(leaf[:1]).expand(leaf.shape) if leaf.ndim else _lazily(leaf)


def _nested_batch(data: TensorDict, path: str) -> None:
    data["next", "agents"].batch_size = [*data.batch_size, 2]


CHANGES: dict[str, Callable[[TensorDict, str], Any]] = {
    "nothing": lambda data, path: None,
    "missing key": _delete,
    "another name": _rename,
    "unknown key": _add("unknown"),
    "priority": _add("td_error"),
    "index": _add("index"),
    "index_generation": _add("index_generation"),
    "next.td_error": lambda data, path: data.set(("next", "td_error"), torch.zeros(data.shape)),
    "unknown branch": lambda data, path: data.set("branch", TensorDict({}, data.batch_size)),
    "leaf for branch": lambda data, path: data._tensordict.update(next=torch.zeros(data.shape)),
    "branch for leaf": lambda data, path: data._tensordict.update(
        x=TensorDict({"x": data["x"]}, data.batch_size)
    ),
    "dtype": _leaf(lambda leaf: torch.ones_like(leaf, dtype=torch.int32)),
    "as bytes": _leaf(lambda leaf: leaf.contiguous().view(torch.uint8) if leaf.ndim else leaf),
    "longer": _leaf(lambda leaf: torch.cat([leaf, leaf], -1) if leaf.ndim else leaf[None]),
    "one dimension more": _leaf(lambda leaf: leaf[..., None]),
    "squeezed": _leaf(lambda leaf: leaf.squeeze(-1)),
    "in another order": _leaf(lambda leaf: leaf.transpose(-1, 0)),
    "strided": _leaf(_strided),
    "expanded": _leaf(lambda leaf: leaf[:1].expand_as(leaf) if leaf.ndim else leaf),
    "gradient": _leaf(_requires_grad),
    "lazy": _leaf(_lazily),
    "one lazy": _leaf(_one_lazily),
    "subclass": _leaf(lambda leaf: leaf.as_subclass(_Sub)),
    "parameter": _leaf(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False)),
    "sparse": _leaf(lambda leaf: leaf.to_sparse() if leaf.numel() else leaf),
    "meta": _leaf(lambda leaf: leaf.to("meta")),
    "zeros without memory": _leaf(
        lambda leaf: torch._efficientzerotensor(leaf.shape, dtype=leaf.dtype)
    ),
    "an array": _leaf(lambda leaf: leaf.numpy()),
    "no tensor": _leaf(lambda leaf: NonTensorData("text", batch_size=leaf.shape[:1])),
    "nested batch": _nested_batch,
    "locked": lambda data, path: data.lock_(),
}
PATHS = ["x", "z", "scalar", "pixels", "done", "next.x", "next.done", "next.agents.a"]


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, raw_bytes(tensor).numpy(force=True).tobytes()


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("count", [None, 1, COUNT])
@pytest.mark.parametrize("name", CHANGES)
def test_recognised_rows_equal_flattened_rows(name: str, count: int | None) -> None:
    """And what taking apart refuses is never recognised."""
    for path in PATHS:
        for optional in (PRIORITY, ("next", "td_error"), ("x",)):
            for known in (True, False):
                _check([(name, path)], count, optional, known)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("lanes", "batch", "single", "time_dim", "matches"),
    [
        ([3], [5, 3], False, 0, True),
        ([3], [3, 1], False, 1, True),
        ([3], [3, 2], False, 1, False),
        ([3], [3, 3], False, 1, False),
        ([3], [4, 1], False, 1, False),
        ([3], [3], True, 0, True),
        ([3], [3], True, 1, True),
        ([3], [3, 1], True, 0, False),
        ([3, 2], [4, 3, 2], False, 0, True),
        ([3, 2], [3, 1, 2], False, 1, True),
        ([3, 2], [3, 2], True, 1, True),
        ([2, 3], [3, 2, 1], False, 2, False),
        ([3, 2], [2, 3], True, 2, False),
    ],
)
def test_rows_of_lanes_are_recognised_like_flattened_rows(
    lanes: list[int], batch: list[int], single: bool, time_dim: int, matches: bool
) -> None:
    def data(*shape: int) -> TensorDict:
        values = torch.rand(*shape, 4, generator=torch.Generator().manual_seed(len(shape)))
        inner = TensorDict({"y": values[..., 0].round() > 0}, shape)
        return TensorDict({"x": values, "next": inner}, shape)

    ndim = 1 + len(lanes)
    schema = Schema(split_leaves(data(1, *lanes), ndim).root)
    given_ = data(*batch)
    found = Matcher(schema, torch.Size(lanes)).rows(given_, single=single, time_dim=time_dim)
    assert (found is not None) == matches
    if found is not None:
        rows = split_leaves(given_, ndim, single=single, time_dim=time_dim, schema=schema)
        assert (found.batch, found.root) == (rows.batch, rows.root)
        assert {path: _bits(leaf) for path, leaf in found.leaves.items()} == {
            path: _bits(leaf) for path, leaf in rows.leaves.items()
        }


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(list(CHANGES)), st.sampled_from(PATHS)), min_size=2, max_size=3
    ),
    count=st.sampled_from([None, 1, COUNT]),
    optional=st.sampled_from([PRIORITY, ("next", "td_error"), ("x",)]),
    known=st.booleans(),
)
def test_several_changes_are_recognised_like_flattened_rows(
    changes: Any, count: int | None, optional: Any, known: bool
) -> None:
    _check(changes, count, optional, known)


def _check(changes: Any, count: int | None, optional: Any, known: bool) -> None:
    others = {"td_error": torch.zeros(COUNT)} if known else {}
    matcher, schema = _of(_good(**others))
    single = count is None
    given_ = {"td_error": torch.zeros(() if single else (count,))} if known else {}
    data = _good(count, 1, **given_)
    for name, path in changes:
        try:
            CHANGES[name](data, path)
        except (RuntimeError, KeyError, TypeError, AttributeError, IndexError):
            return  # the changes do not go together
    before = _snapshot(data)
    found = matcher.rows(data, single=single, optional=(optional,))
    if found is not None:
        rows = split_leaves(data, 1, single=single, optional=(optional,), schema=schema)
        schema.check(rows.root)
        assert schema.root is found.root
        assert (len(found), found.batch) == (len(rows), rows.batch)
        for address, path in zip(found.addresses, schema.leaves, strict=True):
            leaf = found.leaves[path]
            assert (leaf.dtype, leaf.shape) == (rows.leaves[path].dtype, rows.leaves[path].shape)
            # What is written is what lies at the address, whatever the tensor makes of it.
            want = raw_bytes(rows.leaves[path]).numpy(force=True).tobytes()
            assert ctypes.string_at(address, len(want)) == want
            assert leaf.data_ptr() == address
            assert not leaf.requires_grad
    assert _snapshot(data) == before


def _snapshot(data: Any) -> Any:
    if isinstance(data, TensorDict):
        return {key: _snapshot(value) for key, value in data._tensordict.items()}
    if isinstance(data, torch.Tensor) and data.layout is torch.strided and data.is_cpu:
        if data._is_zerotensor():
            return "zeros"
        return _bits(data), data.stride(), data.requires_grad, type(data)
    return repr(data)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("name", "path"),
    [("nothing", "x"), ("priority", "x"), ("locked", "x"), ("lazy", "scalar")],
)
def test_the_usual_rows_are_recognised(name: str, path: str, single: bool) -> None:
    """Otherwise the law above would hold of a matcher that knows nothing."""
    matcher, _ = _of(_good())
    for seed in (1, 2):  # by a template made just now, and by one kept
        data = _good(None if single else COUNT, seed)
        CHANGES[name](data, path)
        assert matcher.rows(data, single=single, optional=(PRIORITY,)) is not None


@pytest.mark.parametrize("nested", [True, False])
def test_unknown_keys_are_refused_with_a_stored_priority_column(nested: bool) -> None:
    key = ("next", "td_error") if nested else "td_error"
    rows = _good().set(key, torch.ones(COUNT))
    rb = ReplayBuffer(storage=LazyTensorStorage(20), priority_key=key)
    rb.extend(rows)
    rb.extend(rows)
    assert len(rb) == 2 * COUNT
    for write in (
        lambda: rb.extend(rows.clone().set("unknown", torch.ones(COUNT))),
        lambda: rb.add(rows.clone().set("unknown", torch.ones(COUNT))[0]),
        lambda: rb.extend(rows.clone().set(("next", "unknown"), torch.ones(COUNT))),
        lambda: rb.extend(rows.exclude(key)),
    ):
        with pytest.raises(ValueError, match=r"unknown'|td_error'"):
            write()
    assert len(rb) == 2 * COUNT


@pytest.mark.parametrize(
    "other",
    [
        LazyStackedTensorDict(*_good().unbind(0)),
        _Class(x=torch.zeros(COUNT, 3), done=torch.zeros(COUNT, 1), batch_size=[COUNT]),
        [_good(None)],
        {"x": torch.zeros(COUNT, 3)},
        torch.zeros(COUNT, 3),
        _good().unsqueeze(0),
        TensorDict({}, []),
        TensorDict({}, [COUNT]),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_containers_are_left_to_flattening(other: Any) -> None:
    matcher, _ = _of(_good())
    assert matcher.rows(other, single=False) is None
    assert matcher.rows(other, single=True) is None
    for data in (
        _Class(x=torch.zeros(2, 3), done=torch.zeros(2, 1), batch_size=[2]),
        {"x": torch.zeros(2)},
        TensorDict({"c": _Class(x=torch.zeros(2), done=torch.zeros(2), batch_size=[2])}, [2]),
    ):
        assert _of(data)[0].rows(data, single=False) is None


def test_rows_with_inner_batch_dimensions_are_recognised() -> None:
    def rows(count: int | None) -> TensorDict:
        batch = [4] if count is None else [count, 4]
        return TensorDict({"x": torch.rand(*batch, 2), "done": torch.ones(*batch, 1)}, batch)

    matcher, _ = _of(rows(3))
    assert matcher.rows(rows(7), single=False) is not None
    assert matcher.rows(rows(None), single=True) is not None
    assert matcher.rows(rows(4)[:, 0], single=False) is None
    assert matcher.rows(rows(4)[0], single=False) is None


# -- through a buffer -----------------------------------------------------------------------------


def test_a_storage_that_writes_by_itself_sees_every_write() -> None:
    seen = []

    class Own(LazyTensorStorage):
        def write(self, slots: torch.Tensor, rows: Any, kept: Any) -> None:
            seen.append(slots.tolist())
            super().write(slots, rows, kept)

    rb = ReplayBuffer(storage=Own(4))
    for _ in range(2):
        rb.extend(_good(3))
    rb.add(_good(None))
    assert seen == [[0, 1, 2], [3, 0, 1], [2]]


def test_rows_prepared_for_another_storage_go_by_key() -> None:
    """Addresses are in the order of the schema that found them; a storage that is exchanged
    meanwhile may have the same keys in another one."""

    def rows(keys: str, value: float) -> TensorDict:
        widths = {"a": 400, "b": 3}
        return TensorDict({k: torch.full((3, widths[k]), value + ord(k)) for k in keys}, [3])

    one, other = LazyTensorStorage(6), LazyTensorStorage(6)
    ReplayBuffer(storage=one).extend(rows("ab", 0.0))
    ReplayBuffer(storage=other).extend(rows("ba", 0.0))
    prepared = one.prepare(rows("ab", 1.0))
    other.accept(prepared)
    other.write_ring(0, prepared, 0)
    assert other[:]["a"].unique().tolist() == [98.0]
    assert other[:]["b"].unique().tolist() == [99.0]
