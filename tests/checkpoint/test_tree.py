"""State as JSON and back: every kind of value to the bit, nothing evaluated on the way."""

from __future__ import annotations

import ast
import json
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorClass, TensorDict

import replaykit
from replaykit.checkpoint.checkpoint_format import decode, encode
from tests.support.refusals import refuses


class Point(TensorClass):
    """A tensorclass with fields that are no tensors."""

    x: torch.Tensor
    name: str = "none"
    about: Any = None


Pair = namedtuple("Pair", "a b")

DTYPES = [torch.bool, torch.uint16, torch.bfloat16, torch.complex32, torch.float8_e5m2]


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)
    return decode(json.loads(text), lambda name: tensors[name].clone())


def alike(a: Any, b: Any) -> bool:
    """Equal in type and value, NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b or (a != a and b != b)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.just(torch.Size([2, 0, 3])),
    st.sampled_from(DTYPES),
)
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(st.integers(), inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "items", "name"]), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(NESTED)
@settings(max_examples=300, deadline=None)
def test_plain_values_come_back_as_they_were(value: Any):
    assert alike(through_json(value), value)


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (object(), r"value: .*object"),
        ([1, {"a": (2, {3})}], r"value\[1\]\['a'\]\[1\].*set"),
        ({"x": Pair(1, 2)}, r"value\['x'\].*Pair"),
        (defaultdict(int), "defaultdict"),
        ({1.5: 2}, r"value: expected str keys, got float 1.5"),
        ({(1, 2): 2}, "tuple"),
        (np.array([object()]), "NumPy dtype object"),
        (np.array(["text"]), "NumPy dtype <U4"),
        (np.arange(3).astype(">i8"), "NumPy dtype >i8"),
        (np.array([1], dtype="M8[s]"), "NumPy dtype datetime64"),
        (torch.eye(3).to_sparse(), "dense tensor, got layout torch.sparse"),
        (Point(x=torch.zeros(1), about=object(), batch_size=[1]), "object"),
        (lambda: None, "function"),
        (bytearray(b"x"), "bytearray"),
        (1j, "complex"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_value_is_named_with_its_place(value: Any, way: str):
    refuses(TypeError, way, encode, value, "value", {})


def test_an_ordered_dict_comes_back_as_a_dict():
    assert alike(through_json(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


def test_endless_values_are_refused():
    endless: list[Any] = []
    endless.append({"a": (endless,)})
    refuses(TypeError, "nesting", encode, endless, "value", {})


def test_values_at_the_depth_limit_are_saved_and_read():
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}):
        value: Any = 1
        for _ in range(120):
            value = wrap(value)
        assert alike(through_json(value), value)
        refuses(TypeError, "nesting", encode, wrap(value), "value", {})


def container(leaves: list[str], **node: Any) -> dict[str, Any]:
    return {"$": "container", "node": node, "leaves": leaves}


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize(
    "record",
    [
        {"$": "unknown"},
        {"$": None},
        {"$": ["list"]},
        {"$": "float", "value": "__import__('os')"},
        {"$": "int", "value": "no number"},
        {"$": "int", "value": 5},
        {"$": "tuple"},
        {"$": "tuple", "items": 5},
        {"$": "dict", "items": [1]},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "tensor"},
        {"$": "tensor", "name": "t9"},
        {"$": "tensor", "name": ["t0"]},
        {"$": "ndarray", "name": "t9"},
        {"$": "bytes", "value": "?"},
        {"$": "size", "items": ["x"]},
        {"$": "size", "items": [2**70]},
        {"$": "dtype", "value": "__class__"},
        {"$": "dtype", "value": "load"},
        {"$": "device", "value": "nowhere"},
        {"$": "container", "node": {"kind": "tensor", "dtype": "float32", "shape": []}},
        {"$": "container", "node": 5, "leaves": []},
        container([], kind="exec", children=[]),
        container([], **{"kind": "tensorclass", "children": [], "class": "subprocess:Popen"}),
        container([], **{"kind": "sequence", "children": [], "class": "no.such.module:Thing"}),
        container(["t0"], kind="tensor", dtype="float32", shape=[3]),
        container(["t0", "t0"], kind="tensor", dtype="int64", shape=[2]),
    ],
    ids=str,
)
def test_a_crafted_record_is_an_error_and_nothing_else(record: Any):
    """CK7: whatever the record says, no code runs and no module is imported."""
    stored = {"t0": torch.zeros(2, dtype=torch.int64)}
    refuses(ValueError, r".", decode, {"a": [record]}, lambda name: stored[name])


SOURCE = Path(replaykit.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MEMBERS = {
    *("torch.load", "torch.save", "np.load", "numpy.load"),
    *(f"builtins.{name}" for name in FORBIDDEN_CALLS),
}
FORBIDDEN_KEYWORDS = {"allow_pickle", "trust_remote_code"}


def faults(tree: ast.AST) -> list[str]:
    """What in a module could run code that comes from a file."""
    found, safe = [], set()
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            found += [f"{line}: import {name}" for name in names if name in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [f"{line}: import {module}"] * (module.split(".")[0] in FORBIDDEN_MODULES)
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [f"{line}: import {name}" for name in names if name in FORBIDDEN_MEMBERS]
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
            found.append(f"{line}: {node.id}")
        elif isinstance(node, ast.Attribute) and id(node) not in safe:
            name = ast.unparse(node)
            found += [f"{line}: {name}"] * (name in FORBIDDEN_MEMBERS)
        elif isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("weights_only") == "True":
                safe.add(id(node.func))  # the walk comes to it later
            found += [
                f"{line}: {k}" for k in FORBIDDEN_KEYWORDS if given.get(k, "False") != "False"
            ]
    return found


BETWEEN_PROCESSES = ["buffer/buffer_dataset.py", "distributed/protocol.py"]
"""They pickle what one process of a user hands to another one, as multiprocessing and Ray do all
the time; nothing of it comes from a file."""


@pytest.mark.pitfall("CK7")
@pytest.mark.pitfall("DS16")
@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_no_module_can_run_code_from_a_file(file: Path):
    """CK7, DS16: no pickle, no ``torch.load`` of more than tensors, no ``eval``, anywhere."""
    found = faults(ast.parse(file.read_text(encoding="utf-8")))
    if file.relative_to(SOURCE).as_posix() in BETWEEN_PROCESSES:
        assert [text.split(": ")[1] for text in found] == ["import pickle"]
    else:
        assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p, os",
        "from pickle import loads",
        "from torch import load",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "f = torch.load",
        "np.load('x', mmap_mode='r')",
        "eval('1')",
        "map(exec, x)",
        "__import__('os')",
        "builtins.eval('1')",
        "datasets.load(x, trust_remote_code=True)",
        "read(x, allow_pickle=flag)",
    ],
)
def test_source_check_finds_every_import_that_runs_code(text: str):
    assert len(faults(ast.parse(text))) == 1
    allowed = "json.load(f); read(x, allow_pickle=False); torch.load('x', weights_only=True)"
    assert faults(ast.parse(allowed)) == []


def test_non_tensor_values_come_back_with_their_rows() -> None:
    data = TensorDict(
        {"x": torch.zeros(2), "all": "same", "each": ["a", {"b": torch.ones(1)}]}, [2]
    )
    tensors: dict[str, torch.Tensor] = {}
    record = json.loads(json.dumps(encode(data, "data", tensors)))
    back = decode(record, tensors.__getitem__)
    assert back.batch_size == (2,)
    assert back["all"] == "same"
    assert back[0]["each"] == "a"
    assert back[1]["each"]["b"].equal(torch.ones(1))
    with pytest.raises(TypeError, match=r"data\['each'\]\[1\]: .*object"):
        encode(TensorDict({"each": ["a", object()]}, [2]), "data", {})
