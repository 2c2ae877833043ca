"""Containers taken apart into leaves and put together again."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass

from replaykit.errors import SchemaError
from replaykit.structure import (
    Branch,
    Leaf,
    Rules,
    build,
    flatten,
    from_json,
    from_numpy,
    leaf_paths,
    map_leaves,
)
from tests.support.refusals import refuses

Pair = namedtuple("Pair", ["left", "right"])


class Step(NamedTuple):
    obs: Any
    action: Any


@tensorclass
class Inner:
    x: torch.Tensor
    note: str | None = None


@tensorclass
class Outer:
    inner: Inner
    y: torch.Tensor
    label: str = "none"
    maybe: torch.Tensor | None = None


def _containers() -> dict[str, Any]:
    a, b = torch.arange(6.0).view(3, 2), torch.arange(3)
    inner = Inner(a.clone(), note="hello", batch_size=[3])
    return {
        "tensor": a,
        "tensordict": TensorDict({"a": a, "next": {"b": b, "deep": {"c": b + 1}}}, [3]),
        "empty nested": TensorDict({"a": a, "info": TensorDict({}, [3])}, [3]),
        "lazy stack": lazy_stack([TensorDict({"a": a[i]}, []) for i in range(3)]),
        "tensorclass": Outer(inner=inner, y=b, label="run", batch_size=[3]),
        "tensorclass in tensordict": TensorDict({"t": inner, "b": b}, [3]),
        "tensordict in tuple": (TensorDict({"a": a}, [3]), b),
        "tuple": (a, b),
        "list": [a, {"b": b}],
        "dict": {"a": a, 7: b},
        "named tuple": Pair(a, Step(b, {"x": (a, b)})),
        "trajectories": TensorDict({"a": a.unsqueeze(-1), "n": {"b": a}}, [3, 2]),
    }


CONTAINERS = _containers()


@pytest.mark.parametrize("name", CONTAINERS)
def test_build_undoes_flatten(name: str, fingerprint: Any) -> None:
    data = CONTAINERS[name]
    node, leaves = flatten(data, 1)
    assert [path for path, _ in leaf_paths(node)] == list(leaves)
    rebuilt = build(node, leaves, torch.Size([3]), None)
    expected = data.contiguous() if name == "lazy stack" else data
    assert fingerprint(rebuilt) == fingerprint(expected)
    if isinstance(data, tuple):
        assert type(rebuilt) is type(data)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tree_survives_json_and_builds_the_same(name: str, fingerprint: Any) -> None:
    node, leaves = flatten(CONTAINERS[name], 1)
    again = from_json(json.loads(json.dumps(node.to_json())))
    assert dict(leaf_paths(again)) == dict(leaf_paths(node))
    built = build(again, leaves, torch.Size([3]), None)
    assert fingerprint(built) == fingerprint(build(node, leaves, torch.Size([3]), None))


def test_flatten_hands_out_the_tensors_themselves() -> None:
    data = CONTAINERS["tensordict"]
    _, leaves = flatten(data, 1)
    assert leaves[("next", "deep", "c")].data_ptr() == data["next", "deep", "c"].data_ptr()


def test_leaves_are_below_the_batch_dimensions() -> None:
    data = TensorDict({"a": torch.zeros(4, 5, 2, dtype=torch.int16)}, [4])
    node, _ = flatten(data, 2 - 1)
    assert dict(leaf_paths(node)) == {("a",): Leaf(torch.Size([5, 2]), torch.int16)}
    assert str(Leaf(torch.Size([5, 2]), torch.int16)) == "int16 [5, 2]"


def test_gradients_are_left_behind() -> None:
    x = torch.ones(3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    _, leaves = flatten({"x": x * 2, "p": parameter}, 1)
    assert not any(leaf.requires_grad for leaf in leaves.values())
    assert type(leaves[("p",)]) is torch.Tensor
    assert x.requires_grad


def test_lazy_conjugates_and_negatives_become_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    _, leaves = flatten({"conj": z.conj(), "neg": z.conj().imag}, 1)
    assert not any(leaf.is_conj() or leaf.is_neg() for leaf in leaves.values())
    assert leaves[("conj",)].tolist() == [1 - 2j, 3 + 1j]
    assert leaves[("neg",)].tolist() == [-2.0, 1.0]


def test_rules_drop_paths_and_give_flags_a_dimension() -> None:
    data = TensorDict({"index": {"a": torch.zeros(2)}, "done": torch.zeros(2), "x": torch.ones(2)})
    data.batch_size = [2]
    rules = Rules(frozenset({("index",)}), frozenset({("done",)}), 1)
    _, leaves = flatten(data, 1, rules)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        ("done",): (2, 1),
        ("x",): (2,),
    }
    assert data["done"].shape == (2,)


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (np.arange(3), [0, 1, 2]),
        (np.arange(3)[::-1], [2, 1, 0]),
        (np.broadcast_to(np.float32(2), 3), [2, 2, 2]),
        (np.array(5), 5),
        (np.array([True, False]), [True, False]),
    ],
    ids=["plain", "backwards", "read-only", "scalar", "bool"],
)
def test_arrays_become_tensors(array: Any, values: Any) -> None:
    _, leaves = flatten({"a": array}, 0)
    assert leaves[("a",)].tolist() == values


def test_a_plain_array_is_not_copied() -> None:
    array = np.zeros(3)
    from_numpy(array)[0] = 5.0
    assert array[0] == 5.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "got str"),
        (None, "got NoneType"),
        (np.str_("text"), "NumPy dtype <U4"),
        (object(), "got object"),
        ({1, 2}, "got set"),
        (np.array(["a"]), "NumPy dtype <U1"),
        (np.array([object()]), "NumPy dtype object"),
        (np.arange(3, dtype=">i4"), "NumPy dtype >i4"),
        (torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (torch.zeros(3, device="meta"), "device meta"),
        (NonTensorData("a", batch_size=[3]), "non-tensor data"),
    ],
)
def test_flatten_refuses_a_non_tensor_and_names_its_path(value: Any, message: str) -> None:
    refuses(TypeError, rf"key \('a', 1\): .*{message}", flatten, {"a": (torch.zeros(3), value)}, 1)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    refuses(TypeError, "nested tensor", flatten, {"a": ragged}, 1)


def test_too_few_dimensions_are_named() -> None:
    with pytest.raises(SchemaError, match=r"key 'a': expected at least 2 .* got shape \[3\]"):
        flatten({"a": torch.zeros(3)}, 2)
    with pytest.raises(SchemaError, match=r"key 'n': expected a batch_size of at least 1"):
        flatten({"n": TensorDict({"a": torch.zeros(3)}, [])}, 1)


def test_a_lazy_stack_of_unlike_rows_is_refused_by_name() -> None:
    one, two = TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})
    refuses(SchemaError, r"key 'a': expected rows of one shape", flatten, lazy_stack([one, two]), 1)
    other = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(1)}})
    with pytest.raises(SchemaError, match=r"row 1 differs from row 0 in .*\('n', 'b'\)"):
        flatten(lazy_stack([one, other]), 1)


def test_a_lazy_stack_along_another_dimension_is_flattened_in_its_layout() -> None:
    rows = [TensorDict({"a": torch.full((4,), float(i))}, [4]) for i in range(3)]
    _, leaves = flatten(lazy_stack(rows, 1), 1)
    assert leaves[("a",)].tolist() == [[0.0, 1.0, 2.0]] * 4


def test_fields_of_a_tensorclass_that_are_no_tensors_are_kept_apart() -> None:
    node, leaves = flatten(CONTAINERS["tensorclass"], 1)
    assert isinstance(node, Branch)
    assert node.constants == {"label": "run"}
    assert set(leaves) == {("inner", "x"), ("y",)}


def test_mapping_leaves_keeps_container_and_shape(fingerprint: Any) -> None:
    for data in CONTAINERS.values():
        doubled = map_leaves(data, lambda leaf: leaf * 2)
        back = map_leaves(
            doubled, lambda leaf: leaf // 2 if leaf.dtype == torch.int64 else leaf / 2
        )
        assert dict(flatten(back, 0)[1]).keys() == dict(flatten(data, 0)[1]).keys()
        assert fingerprint(list(flatten(back, 0)[1].values())) == fingerprint(
            list(flatten(data, 0)[1].values())
        )


def test_mappings_of_any_kind_are_read_and_come_back_as_dicts() -> None:
    node, leaves = flatten(OrderedDict(b=torch.zeros(1), a=torch.ones(1)), 1)
    built = build(node, leaves, torch.Size([1]), None)
    assert type(built) is dict
    assert list(built) == ["b", "a"]


LEAF = {"kind": "tensor", "dtype": "float32", "shape": []}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "a record of a container"),
        ([], "a record of a container"),
        ({}, "kind None"),
        ({"kind": "pickle", "children": []}, "kind 'pickle'"),
        ({"kind": "mapping", "class": "dict"}, "a record of a container"),
        ({"kind": "mapping", "class": "dict", "children": ["ab"]}, "name, record"),
        ({"kind": "mapping", "class": "dict", "children": [[None, {}]]}, "name, record"),
        ({"kind": "mapping", "class": "dict", "children": [["a"]]}, "name, record"),
        ({"kind": "tensordict", "children": [[3, LEAF]]}, "name, record"),
        ({"kind": "tensordict", "children": [[True, LEAF]]}, "name, record"),
        ({"kind": "sequence", "class": "list", "children": [["a", LEAF]]}, "name, record"),
        ({"kind": "tensordict", "children": [["a", LEAF], ["a", LEAF]]}, "two of 'a'"),
        ({"kind": ["tensordict"], "children": []}, "a record of a container"),
        ({"kind": "tensor", "dtype": "float31", "shape": []}, "torch dtype"),
        ({"kind": "tensor", "dtype": "load", "shape": []}, "torch dtype"),
        ({"kind": "tensor", "dtype": 3, "shape": []}, "torch dtype"),
        ({"kind": "tensor", "dtype": "float32", "shape": [-1]}, "sizes"),
        ({"kind": "tensor", "dtype": "float32", "shape": [True]}, "sizes"),
        ({"kind": "tensor", "dtype": "float32", "shape": "3"}, "sizes"),
        ({"kind": "tensordict", "children": [], "extra": [1.5]}, "sizes"),
        ({"kind": "tensordict", "children": [], "constants": 3}, "constants"),
        ({"kind": "sequence", "children": [], "class": "os:system"}, "not loaded"),
        ({"kind": "sequence", "children": [], "class": "subprocess:Popen"}, "not loaded"),
        ({"kind": "sequence", "children": [], "class": "no.such.module:X"}, "not loaded"),
        ({"kind": "sequence", "children": [], "class": "tuple:x:y"}, "module:class"),
        ({"kind": "sequence", "children": []}, "module:class"),
        ({"kind": "tensorclass", "children": [], "class": "builtins:dict"}, "not loaded"),
    ],
)
@pytest.mark.pitfall("CK7")
def test_records_that_are_no_trees_are_refused(record: Any, message: str) -> None:
    """CK7: names are looked up among loaded classes of the right kind; nothing is run."""
    refuses(ValueError, message, from_json, record)
