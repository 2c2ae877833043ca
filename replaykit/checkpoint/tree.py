"""State as JSON with references to tensors, and back: no pickle, no evaluation.

Every value becomes plain JSON, or an object with the key ``$`` that says what it is. Tensors are
handed over by name; whoever writes the checkpoint stores them.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    dtype_by_name,
    dtype_name,
    holds_objects,
    is_non_tensor,
    is_tensordict,
)
from replaykit.checkpoint.changes import TrackedTensor
from replaykit.structure import Path, build, flatten, from_json, leaf_paths

__all__ = ["Tensors", "decode", "encode"]

Tensors = dict[str, torch.Tensor | TrackedTensor]

_DEEPEST = 120
_INT64 = 2**63


def encode(value: Any, where: str, tensors: Tensors, depth: int = 0) -> Any:
    """Returns JSON for ``value``; puts its tensors into ``tensors`` under fresh names.

    Takes None, bool, int, float, str, bytes, tensors, tracked ones, NumPy arrays and numbers,
    TensorDicts (also with values that are no tensors), tensorclasses, torch sizes, dtypes and
    devices, and lists, tuples and dicts of these, up to 120 levels deep.

    Args:
        where: what the value is, for error messages.

    Raises:
        TypeError: something else, with the way to it.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value if -_INT64 <= value < _INT64 else {"$": "int", "value": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if depth >= _DEEPEST:
        raise TypeError(f"{where}: expected at most {_DEEPEST} levels of nesting, got more")
    if isinstance(value, torch.Size):
        return {"$": "size", "items": list(value)}
    if type(value) in (list, tuple):
        items = [encode(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}
    if type(value) in (dict, OrderedDict):
        return _encode_mapping(value, where, tensors, depth)
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "name": _name(_dense(value, where), tensors)}
    if isinstance(value, TrackedTensor):
        _dense(value.tensor, where)
        return {"$": "tensor", "name": _name(value, tensors)}
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "ndarray" if isinstance(value, np.ndarray) else "number"
        return {"$": kind, "name": _name(_from_numpy(np.asarray(value), where), tensors)}
    if is_non_tensor(value):
        return _encode_object(value, where, tensors, depth)
    if holds_objects(value):
        items = [[k, encode(v, f"{where}[{k!r}]", tensors, depth + 1)] for k, v in value.items()]
        return {"$": "tensordict", "batch": list(value.batch_size), "items": items}
    if is_tensordict(value) or is_tensorclass(value):
        return _encode_container(value, where, tensors, depth)
    if type(value) is bytes:
        return {"$": "bytes", "value": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "value": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "device", "value": str(value)}
    raise TypeError(
        f"{where}: expected tensors, arrays, numbers, strings, bytes, None, or lists, tuples and "
        f"dicts of them, got {type(value).__name__}"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, tensors: Tensors, depth: int) -> Any:
    for key in value:
        if not isinstance(key, (str, int)):
            raise TypeError(f"{where}: expected str keys, got {type(key).__name__} {key!r}")
    encoded = {
        key: encode(item, f"{where}[{key!r}]", tensors, depth + 1) for key, item in value.items()
    }
    if "$" not in encoded and all(type(key) is str for key in encoded):
        return encoded
    return {"$": "dict", "items": [[key, item] for key, item in encoded.items()]}


def _encode_container(value: Any, where: str, tensors: Tensors, depth: int) -> Any:
    try:
        node, leaves = flatten(value, 0)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    names = [_name(leaf, tensors) for leaf in leaves.values()]
    layout = encode(node.to_json(), where, tensors, depth + 1)
    return {"$": "container", "node": layout, "leaves": names}


def _encode_object(value: Any, where: str, tensors: Tensors, depth: int) -> Any:
    """Encodes what a TensorDict holds beside tensors: one value for all rows, or one for each."""
    one = isinstance(value, NonTensorData)
    found = encode(value.data if one else value.tolist(), where, tensors, depth + 1)
    if not one and value.batch_dims != 1:
        raise TypeError(
            f"{where}: expected objects along one dimension, got {list(value.batch_size)}"
        )
    return {"$": "object" if one else "objects", "batch": list(value.batch_size), "value": found}


def _name(tensor: torch.Tensor | TrackedTensor, tensors: Tensors) -> str:
    name = f"t{len(tensors)}"
    tensors[name] = tensor
    return name


def _dense(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{where}: expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}"
        )
    return tensor.detach()


def _from_numpy(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    except (TypeError, ValueError):
        raise TypeError(
            f"{where}: expected an array of numbers, got NumPy dtype {array.dtype}"
        ) from None


def decode(record: Any, load: Callable[[str], Any]) -> Any:
    """Rebuilds what ``encode`` took apart; ``load`` gives the tensor of a name.

    Raises:
        ValueError: the record is not one that ``encode`` gave.
    """
    if isinstance(record, list):
        return [decode(item, load) for item in record]
    if not isinstance(record, dict):
        return record
    kind = record.get("$")
    if "$" not in record:
        return {key: decode(item, load) for key, item in record.items()}
    try:
        return _DECODERS[kind](record, load)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"cannot read a value of kind {kind!r}: {error!r}") from None


def _decode_float(record: dict[str, Any], load: Callable[[str], Any]) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[record["value"]]


def _decode_size(items: Any) -> torch.Size:
    if not isinstance(items, list) or not all(type(n) is int and 0 <= n < _INT64 for n in items):
        raise ValueError(f"expected a list of sizes, got {items!r}")
    return torch.Size(items)


def _decode_container(record: dict[str, Any], load: Callable[[str], Any]) -> Any:
    node = from_json(decode(record["node"], load))
    leaves: dict[Path, torch.Tensor] = {}
    for (path, leaf), name in zip(leaf_paths(node), record["leaves"], strict=True):
        tensor = load(name)
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise ValueError(f"expected {leaf} at {path}, got {tensor.dtype} {list(tensor.shape)}")
        leaves[path] = tensor
    return build(node, leaves, torch.Size(), None)


def _decode_dict(record: dict[str, Any], load: Callable[[str], Any]) -> dict[Any, Any]:
    return {key: decode(item, load) for key, item in record["items"]}


def _decode_tensordict(record: dict[str, Any], load: Callable[[str], Any]) -> TensorDict:
    items = {key: decode(item, load) for key, item in record["items"]}
    return TensorDict(items, _decode_size(record["batch"]))


def _decode_object(record: dict[str, Any], load: Callable[[str], Any]) -> NonTensorData:
    return NonTensorData(decode(record["value"], load), batch_size=_decode_size(record["batch"]))


def _decode_objects(record: dict[str, Any], load: Callable[[str], Any]) -> NonTensorStack:
    return NonTensorStack(*map(NonTensorData, decode(record["value"], load)))


def _decode_tuple(record: dict[str, Any], load: Callable[[str], Any]) -> tuple[Any, ...]:
    return tuple(decode(item, load) for item in record["items"])


_DECODERS: dict[Any, Callable[[dict[str, Any], Callable[[str], Any]], Any]] = {
    "float": _decode_float,
    "int": lambda record, load: int(record["value"], 16),
    "tuple": _decode_tuple,
    "dict": _decode_dict,
    "container": _decode_container,
    "tensordict": _decode_tensordict,
    "object": _decode_object,
    "objects": _decode_objects,
    "tensor": lambda record, load: load(record["name"]),
    "ndarray": lambda record, load: load(record["name"]).numpy().copy(),
    "number": lambda record, load: load(record["name"]).numpy().copy()[()],
    "bytes": lambda record, load: base64.b64decode(record["value"], validate=True),
    "size": lambda record, load: _decode_size(record["items"]),
    "dtype": lambda record, load: dtype_by_name(record["value"]),
    "device": lambda record, load: torch.device(record["value"]),
}
