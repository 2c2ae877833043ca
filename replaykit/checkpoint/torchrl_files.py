"""Read and check checkpoint directories of TorchRL, without use of pickle.

``ReplayBuffer.dumps`` of TorchRL writes JSON and raw columns. The directory holds ``storage/``,
``writer/metadata.json``, ``sampler/`` and ``buffer_metadata.json``. ``storage/`` is a memory-mapped
TensorDict or a tensor, at full capacity. TorchRL writes no checksums, and overwrites files in
place. An incomplete save cannot be distinguished from a complete save if all files have the right
size.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, dtype_by_name
from replaykit.checkpoint.checkpoint_format import open_file
from replaykit.errors import CheckpointError
from replaykit.filesystem import map_private

_SINGLE = "_-single-tensor-_"
_ESCAPED = frozenset('/<>:"|?*\\ %\x7f')
_WRITER = {"cursor", "write_count", "generation_shape", "generation_dtype"}


@dataclass(frozen=True)
class TorchRLPriorities:
    """The saved state of a PrioritizedSampler.

    Attributes:
        alpha, beta, eps: the parameters of the sampler.
        max_priority: the largest raw priority, at least 1.
        raw: raw priorities, float64 ``[N]`` in slot order, computed from the saved ``(p + eps) **
            alpha``. With ``alpha=0`` this is impossible, and all of them are ``max_priority``.
        single: whether all saved values are float32 numbers.
    """

    alpha: float
    beta: float
    eps: float
    max_priority: float
    raw: torch.Tensor
    single: bool


@dataclass(frozen=True)
class TorchRLCheckpoint:
    """A checkpoint that TorchRL wrote.

    Attributes:
        rows: the stored rows over mapped files, as a TensorDict, a tensor or a dictionary of
            tensors. All tensors are ``[n, *lanes, ...]``.
        slots: capacity, in rows of dimension 0.
        ndim: number of leading dimensions that count as rows.
        lanes: sizes of these dimensions, without the first.
        length: number of stored rows of dimension 0.
        cursor: the slot of the next row.
        written: number of rows written so far, at least ``length``.
        priorities: the state of a PrioritizedSampler; None for another sampler.
        other_sampler: file of another sampler's state, which is not read; None if there is none.
        batch_size: the batch size of the buffer; None if the buffer had none.
        generator: state of the buffer's generator on the CPU, uint8; None if the buffer had none.
        transforms: whether the transforms had a state. It is in a pickle, and is not read.
    """

    rows: Any
    slots: int
    ndim: int
    lanes: torch.Size
    length: int
    cursor: int
    written: int
    priorities: TorchRLPriorities | None
    other_sampler: Path | None
    batch_size: int | None
    generator: torch.Tensor | None
    transforms: bool


def open_torchrl(path: str | os.PathLike[str], ndim: int | None = None) -> TorchRLCheckpoint:
    """Open a checkpoint of TorchRL, and map its columns copy-on-write.

    No column is read.

    Args:
        ndim: the ``ndim`` of the storage. With None, it is derived from length and cursor for
            TensorDicts, and is 1 for other rows.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: a file is missing, incomplete or contradictory; the error names it.
        ValueError: some content is not supported; the error names it.
    """
    folder = Path(path).expanduser()
    if not (folder / "buffer_metadata.json").is_file():
        raise FileNotFoundError(
            f"there is no checkpoint of TorchRL in {folder}: expected buffer_metadata.json, as "
            "ReplayBuffer.dumps of TorchRL writes it"
        )
    batch_size = _json(folder / "buffer_metadata.json").get("batch_size")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise _damaged(folder / "buffer_metadata.json", f"batch_size {batch_size!r}")
    stored, batch = _rows(folder / "storage")
    described = folder / "storage" / "storage_metadata.json"
    count = _count(_json(described), "len", described)
    described = folder / "writer" / "metadata.json"
    writer = _json(described)
    if set(writer) - _WRITER:
        raise ValueError(
            f"expected the state of a RoundRobinWriter in {described}, got {sorted(writer)}; the "
            "states of other writers are not read"
        )
    cursor = _count(writer, "cursor", described)
    dims, length = _layout(count, cursor, batch, ndim, folder)
    slots, lanes = batch[0], torch.Size(batch[1:dims])
    written = length
    if length == slots:
        saved: Any = writer.get("write_count")
        fits = type(saved) is int and slots <= saved < 2**60 and saved % slots == cursor
        written = saved if fits else slots + cursor
    priorities, other = _sampler(folder / "sampler", count)
    return TorchRLCheckpoint(
        rows=_first(stored, length),
        slots=slots,
        ndim=dims,
        lanes=lanes,
        length=length,
        cursor=cursor,
        written=written,
        priorities=priorities,
        other_sampler=other,
        batch_size=batch_size,
        generator=_generator(folder / "rng_state"),
        transforms=(folder / "transform.t").exists(),
    )


# -- rows -----------------------------------------------------------------------------------------


def _rows(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """Return the columns at full capacity, and the sizes that may count as rows."""
    described = folder / "storage_metadata.json"
    metadata = _json(described)
    if not metadata.get("is_pytree"):
        stored = _tensordict(folder, ())
        if not stored.batch_size or stored.is_empty():
            raise _damaged(folder / "meta.json", f"no rows of shape {list(stored.batch_size)}")
        return stored, tuple(stored.batch_size)
    leaves = metadata.get("metadata")
    if not isinstance(leaves, dict) or not leaves:
        raise _damaged(described, "no columns")
    if set(leaves) == {_SINGLE}:
        column = _column(folder / f"{_SINGLE}.memmap", leaves[_SINGLE], described)
        if not column.ndim:
            raise _damaged(described, "a tensor without rows")
        return column, tuple(column.shape[:1])
    tree: dict[str, Any] = {}
    sizes = set()
    for name, record in leaves.items():
        parts = name.split(".")
        if any(part.isdigit() for part in parts):
            raise ValueError(
                f"expected TensorDicts, tensors or dictionaries of tensors in {folder}, got "
                f"{name!r} of a list or a tuple, which is not read"
            )
        file = folder.joinpath(*(_checked_name(part, described) for part in parts))
        column = _column(file.with_name(f"{file.name}.memmap"), record, described)
        parts = [part.replace("_<dot>_", ".") for part in parts]
        inner = tree
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise _damaged(described, f"column {name!r} inside of another")
        inner[parts[-1]] = column
        sizes.add(column.shape[:1])
    if len(sizes) != 1 or not next(iter(sizes)):
        raise _damaged(described, f"columns of {sorted(map(list, sizes))} rows")
    return tree, tuple(next(iter(sizes)))


def _tensordict(folder: Path, key: tuple[str, ...]) -> TensorDict:
    described = folder / "meta.json"
    if not described.exists() and (folder / "meta.pt").exists():
        raise ValueError(
            f"{folder / 'meta.pt'} is a pickle, as tensordict wrote it before 0.3; it is not read: "
            "load and save the buffer with a newer version of TorchRL first"
        )
    metadata = _json(described)
    kind = str(metadata.get("_type", "TensorDict"))
    if kind.strip("'<>").rpartition(".")[2] != "TensorDict":
        raise ValueError(f"expected a TensorDict in {folder}, got {kind}, which is not read")
    batch = _shape(metadata.get("shape"), described)
    found: dict[str, Any] = {}
    for name, record in metadata.items():
        if not isinstance(record, dict):  # other metadata, such as shape and device
            if any(os.path.lexists(folder / f"{name}{end}") for end in ("", ".memmap")):
                raise ValueError(
                    f"expected a record of each column in {described}, got none of "
                    f"{(*key, name)}: tensordict has replaced it by the record of the whole"
                )
            continue
        path = (*key, name)
        if "type" in record:
            if record["type"] != "TensorDict":
                raise ValueError(
                    f"expected tensors in {folder}, got {record['type']} under {path}, which is "
                    "not read: delete the entry before saving with TorchRL"
                )
            inner = _path_of(folder, name, "", described)
            if inner.is_symlink():
                raise CheckpointError(f"{inner} is damaged: it is a link")
            found[name] = _tensordict(inner, path)
        elif record.get("is_nested"):
            raise ValueError(f"expected plain tensors in {folder}, got a nested one under {path}")
        else:
            found[name] = _column(_path_of(folder, name, ".memmap", described), record, described)
    for name, value in found.items():
        if value.shape[: len(batch)] != batch:
            raise _damaged(described, f"{name!r} of shape {list(value.shape)} in {list(batch)}")
    return TensorDict(found, batch)


def _column(file: Path, record: Any, described: Path) -> torch.Tensor:
    """Map a file of raw values; ``record`` holds its shape and dtype."""
    if not isinstance(record, dict):
        raise _damaged(described, f"record of {file.name}: {record!r}")
    shape = _shape(record.get("shape"), described)
    try:
        dtype = dtype_by_name(str(record.get("dtype")).removeprefix("torch."))
    except ValueError as error:
        raise _damaged(described, str(error)) from None
    return _values(file, shape, dtype)


@torch.inference_mode(False)  # a tensor made in that mode cannot be changed outside it
def _values(file: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    nbytes = shape.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    opened = _opened(file, nbytes)
    try:
        memory = map_private(opened, nbytes)
    finally:
        os.close(opened)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _opened(file: Path, size: int | None = None) -> int:
    try:
        return open_file(file, size)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file} is missing") from None


def _first(stored: Any, length: int) -> Any:
    if isinstance(stored, dict):
        return {name: _first(value, length) for name, value in stored.items()}
    return stored[:length]


def _layout(
    count: int, cursor: int, batch: tuple[int, ...], ndim: int | None, folder: Path
) -> tuple[int, int]:
    """Return the number of dimensions that count as rows, and the length of the first.

    The length is the number of rows of dimension 0 that are stored.
    """
    for dims in range(1, len(batch) + 1) if ndim is None else [ndim]:
        length, rest = divmod(count, max(math.prod(batch[1:dims]), 1))
        slots = batch[0]
        if not rest and (cursor == length < slots or cursor < slots == length):
            return dims, length
    raise CheckpointError(
        f"{folder} contradicts itself: {count} rows and the cursor at {cursor} in storage/ and "
        f"writer/ do not fit a ring of shape {list(batch)}"
        + ("" if ndim is None else f" and a storage with ndim={ndim}")
    )


# -- the other parts ------------------------------------------------------------------------------


def _sampler(folder: Path, count: int) -> tuple[TorchRLPriorities | None, Path | None]:
    described = folder / "sampler_metadata.json"
    if not described.exists():
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return None, folder / names[0] if names else None
    metadata = _json(described)
    numbers = {}
    for name in ("_alpha", "_beta", "_eps"):
        value = metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _damaged(described, f"{name} {value!r}")
        if not math.isfinite(value) or value < 0:
            raise _damaged(described, f"{name} {value!r}")
        numbers[name] = float(value)
    most = metadata.get("_max_priority")
    most = most[0] if isinstance(most, list) and most else most  # a number, or [number, index]
    if not isinstance(most, (int, float)) or isinstance(most, bool) or not math.isfinite(most):
        most = 1.0
    capacity = metadata.get("_max_capacity")
    if not isinstance(capacity, (int, float)) or capacity != capacity // 1 or capacity < count:
        raise _damaged(described, f"_max_capacity {capacity!r} for {count} rows")
    file = folder / "sumtree.memmap"
    value = _values(file, torch.Size([int(capacity)]), torch.float64)[:count].numpy()
    if not (np.isfinite(value).all() and (value >= 0).all()):
        raise _damaged(file, "expected finite numbers that are not negative")
    alpha, eps = numbers["_alpha"], numbers["_eps"]
    if alpha:
        with np.errstate(over="ignore"):
            raw = np.maximum(value ** (1 / alpha) - eps, 0.0)
        if not np.isfinite(raw).all():
            raise _damaged(file, f"numbers that are not powers {alpha} of priorities")
    else:
        raw = np.full(count, max(most, 1.0))
    single = bool((value == value.astype(np.float32)).all())
    most = max(1.0, float(most), float(raw.max(initial=0.0)))
    priorities = torch.from_numpy(raw)
    return TorchRLPriorities(alpha, numbers["_beta"], eps, most, priorities, single), None


def _generator(folder: Path) -> torch.Tensor | None:
    if not folder.is_dir():
        return None
    if str(_json(folder / "meta.json").get("device")) not in ("cpu", "None"):
        return None
    state = _tensordict(folder, ()).get("rng_state", None)
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise _damaged(folder / "meta.json", "no state of a generator")
    return state.clone()


# -- files ----------------------------------------------------------------------------------------


def _json(file: Path) -> dict[str, Any]:
    opened = _opened(file)
    try:
        with contextlib.suppress(OSError, UnicodeDecodeError, RecursionError, ValueError):
            with open(opened, encoding="utf-8", closefd=False) as text:
                found = json.load(text)
            if isinstance(found, dict):
                return found
    finally:
        os.close(opened)
    raise CheckpointError(f"{file} is damaged: expected a JSON object")


def _path_of(folder: Path, name: str, end: str, described: Path) -> Path:
    """Return the path at which tensordict stores a key.

    Newer versions of tensordict escape characters that file systems may refuse.
    """
    escaped = "".join(f"%{ord(c):02X}" if c in _ESCAPED or ord(c) < 32 else c for c in name)
    if not name.strip("."):
        escaped = "%2E" * len(name) if name in (".", "..") else name or "%"
    if escaped != name and os.path.lexists(folder / f"{escaped}{end}"):
        return folder / f"{escaped}{end}"
    return folder / f"{_checked_name(name, described)}{end}"


def _checked_name(name: str, described: Path) -> str:
    """Return the name; ValueError if the file would be outside its directory."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"expected keys that are names of files in {described}, got {name!r}")
    return name


def _shape(value: Any, described: Path) -> torch.Size:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise _damaged(described, f"shape {value!r}")
    if math.prod(value) >= 2**60:
        raise _damaged(described, f"shape {value!r}")
    return torch.Size(value)


def _count(record: Mapping[str, Any], name: str, described: Path) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value < 2**60:
        raise _damaged(described, f"{name} {value!r}")
    return value


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {why}")
