"""Read and write manifests of checkpoints, and encode state as JSON with tensors."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import math
import os
import re
import stat
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
from replaykit.checkpoint.dirty_chunks import TrackedTensor
from replaykit.declared import Count, Rule, decode_state, within
from replaykit.errors import CheckpointError
from replaykit.filesystem import replace_file, sync_directory
from replaykit.structure import Path as KeyPath
from replaykit.structure import build, flatten, from_json, leaf_paths

_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
)
"""Flags that refuse links, which may lead anywhere, and do not wait for a pipe."""


def open_file(file: Path, size: int | None = None) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        size: the number of bytes that the file must have; None for any number.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the path is a link or not a regular file, or the size differs.
    """
    try:
        opened = os.open(file, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        raise CheckpointError(f"{file} is damaged: it is a link") from None
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is damaged: it is no file")
        if size is not None and found.st_size != size:
            raise CheckpointError(f"{file} is torn: expected {size} bytes, got {found.st_size}")
    except BaseException:
        os.close(opened)
        raise
    return opened


Tensors = dict[str, torch.Tensor | TrackedTensor]

_DEEPEST = 120
_INT64 = 2**63


def encode(value: Any, where: str, tensors: Tensors, depth: int = 0) -> Any:
    """Return JSON for ``value``; add its tensors to ``tensors`` under new names.

    The value may be

    - None, bool, int, float, str or bytes,
    - a tensor, a tracked tensor, a NumPy array or number,
    - a TensorDict (also with non-tensor values) or a tensorclass,
    - a torch size, dtype or device,
    - or lists, tuples and dicts of these, up to 120 levels deep.

    Args:
        where: a name for the value in error messages.

    Raises:
        TypeError: the value holds another kind of object; the error names the path to it.
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
    """Encode a non-tensor value of a TensorDict, for all rows or for each row."""
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
    """Rebuild an encoded value; ``load`` returns the tensor of a name.

    Raises:
        ValueError: ``encode`` cannot have made the record.
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
    leaves: dict[KeyPath, torch.Tensor] = {}
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


FORMAT = "replaykit-checkpoint"
FORMAT_VERSION = 3
MANIFEST = "manifest.json"
_MOST_VERSIONS = 10**15
_VERSIONED = re.compile(r"manifest-([0-9]{1,15})\.json")
_DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{5,}\.bin")
_CHECKSUM = re.compile(r', "crc32": ([0-9]{1,10})\}\Z')

# Allow only names that a save makes, so that no file outside the directory is ever opened.
_DATA_FILES = Rule("of data files", lambda names: all(map(_DATA_FILE.fullmatch, names)))


@dataclass(frozen=True)
class _FileRecord:
    """The size and checksum of a file of a checkpoint."""

    size: Count
    crc32: Count


@dataclass(frozen=True)
class _Manifest:
    """The entries of every manifest."""

    files: Annotated[dict[str, _FileRecord], _DATA_FILES]
    tensors: dict[str, Any]
    parts: dict[str, Any]
    save: str
    version: Annotated[int, within(1, _MOST_VERSIONS - 1)] = 1


class _NoRecordError(CheckpointError):
    """A valid JSON file that no save of the package can have written.

    A save writes a JSON object. If an object is truncated or damaged, the result is not valid JSON
    of another kind.
    """


def version_of(manifest: Mapping[str, Any]) -> int:
    """Return the version number of a checkpoint in its directory, counted from 1."""
    return int(manifest.get("version", 1))


def checkpoint_versions(path: str | os.PathLike[str]) -> list[int]:
    """Return the versions that a directory holds, in rising order.

    The last version is the newest. ``loads(path, version=...)`` accepts each of them.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the newest checkpoint is damaged.

    Example:
        >>> import tempfile, torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.checkpoint import checkpoint_versions
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number in range(4):
        ...         _ = rb.extend(torch.full((2,), number))
        ...         rb.dumps(folder, keep=3)
        ...     found = checkpoint_versions(folder)
        ...     rb.loads(folder, version=found[0])
        >>> found, rb[:]
        ([2, 3, 4], tensor([0, 0, 1, 1]))
    """
    folder = Path(path).expanduser()
    newest = version_of(read_manifest(folder, check=True))
    return [*(number for number in _saved_versions(folder) if number < newest), newest]


def _saved_versions(folder: Path) -> list[int]:
    found = (_VERSIONED.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match and match[1] == str(int(match[1])))


def _manifest_name(version: int) -> str:
    return f"manifest-{version}.json"


def read_manifest(
    folder: Path, version: int | None = None, *, check: bool = False
) -> dict[str, Any]:
    """Read the newest manifest of a directory, or the manifest of a version.

    Args:
        check: whether to refuse a manifest that this version of the package cannot read.

    Raises:
        FileNotFoundError: there is no such manifest.
        CheckpointError: the manifest is damaged; the error names the file.
    """
    if version is None:
        return _read(folder, MANIFEST, check)
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        newest = _read(folder, MANIFEST, check)
        if version_of(newest) == version:
            return newest
    try:
        found = _read(folder, _manifest_name(version), check)
    except FileNotFoundError:
        there = checkpoint_versions(folder)
        raise FileNotFoundError(f"{folder} has no version {version}; there are {there}") from None
    if version_of(found) != version:
        file = folder / _manifest_name(version)
        raise CheckpointError(f"{file} is damaged: it belongs to version {version_of(found)}")
    return found


def _read(folder: Path, name: str, check: bool) -> dict[str, Any]:
    file = folder / name
    try:
        with open(open_file(file), encoding="utf-8") as opened:
            text = opened.read()
        manifest = json.loads(text)
    except CheckpointError:
        raise  # this is also a ValueError, and already names the damage
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint in {folder}") from None
    except NotADirectoryError:
        raise FileNotFoundError(f"{folder} is not a directory with a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(manifest, dict):
        raise _NoRecordError(f"{file} is damaged: it holds no record")
    if check:
        _check(manifest, text, file)
    return manifest


def read_base(folder: Path) -> dict[str, Any] | None:
    """Return the manifest that a save builds on, or None if there is no readable one.

    Raises:
        CheckpointError: ``manifest.json`` in the directory is not the manifest of a checkpoint.
    """
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        manifest = read_manifest(folder, check=True)
        if manifest.get("format") == FORMAT:
            return manifest
    try:
        manifest = read_manifest(folder)
        found = f"format {manifest.get('format')!r}"
        if manifest.get("format") == FORMAT:
            return None
    except _NoRecordError:
        found = "it holds no record"
    except (FileNotFoundError, CheckpointError):
        return None  # the manifest is missing or unreadable
    raise CheckpointError(
        f"{folder / MANIFEST} is not that of a checkpoint ({found}); choose another directory"
    )


def publish(
    folder: Path, manifest: dict[str, Any], base: Mapping[str, Any] | None, keep: int
) -> None:
    """Replace the newest manifest, then remove files that no manifest names.

    The files of the manifest are already on disk. They belong to ``base``, or have names that no
    other manifest uses. At any instant the directory holds a whole checkpoint, either the old or
    the new one.

    Args:
        manifest: the new manifest, without a checksum. Its ``version`` is set here.
        base: the present manifest; None if there is no readable manifest.
        keep: the largest number of checkpoints in the directory, including the new one.
    """
    kept = _saved_versions(folder)
    newest = max([*kept, 0 if base is None else version_of(base)])
    if newest + 1 >= _MOST_VERSIONS:
        raise CheckpointError(
            f"{folder} has a checkpoint of version {newest}, the largest possible one; choose "
            "another directory"
        )
    manifest["version"] = newest + 1
    if base is not None and keep > 1:
        # This is a copy of the manifest under the name of its version. Until the replace below,
        # both the old and the new manifest count as the newest.
        older = {name: value for name, value in base.items() if name != "crc32"}
        _write(folder, {**older, "version": version_of(base)}, _manifest_name(version_of(base)))
    _write(folder, manifest, MANIFEST)
    _remove_old(folder, manifest, keep)


def _write(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    text = json.dumps(manifest, allow_nan=False)
    # The last entry is the checksum of the text without this entry.
    text = f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'
    sync_directory(folder)  # the manifest must not survive a loss of power without its files
    replace_file(folder / name, text)


def is_published(folder: Path, token: str) -> bool:
    """Return whether the save ``token`` wrote the newest checkpoint."""
    try:
        return bool(read_manifest(folder).get("save") == token)
    except (OSError, CheckpointError):
        return False


def _remove_old(folder: Path, manifest: Mapping[str, Any], keep: int) -> None:
    """Remove the oldest manifests, then the files that no manifest names."""
    older = [number for number in _saved_versions(folder) if number < manifest["version"]]
    gone = older[: max(0, len(older) - (keep - 1))]
    for number in gone:
        with contextlib.suppress(OSError):  # the next save tries again
            os.unlink(folder / _manifest_name(number))
    if gone:
        sync_directory(folder)  # before the files that the removed manifests name are removed
    named = set(manifest["files"])
    for number in _saved_versions(folder):
        try:
            named |= set(_read(folder, _manifest_name(number), True)["files"])
        except FileNotFoundError:
            continue
        except (OSError, CheckpointError):
            return  # its files are unknown, so remove no file as long as this manifest exists
    for entry in os.scandir(folder):
        stale = _DATA_FILE.fullmatch(entry.name) and entry.name not in named
        if stale or entry.name.startswith(".manifest"):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _check(manifest: dict[str, Any], text: str, file: Path) -> None:
    """Raise CheckpointError if this version of the package cannot read the manifest."""
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a checkpoint's (format {manifest.get('format')!r})")
    version = manifest.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file} is damaged: format_version {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format version {version}, this version of replaykit reads up to "
            f"{FORMAT_VERSION}; it was written by replaykit {manifest.get('library_version')}"
        )
    end = _CHECKSUM.search(text)
    if end is None or zlib.crc32(f"{text[: end.start()]}}}".encode()) != int(end[1]):
        raise CheckpointError(f"{file} is damaged: its checksum is not that of its content")
    try:
        decode_state(_Manifest, manifest, "its entries")
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
