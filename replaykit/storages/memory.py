"""Allocate columns; move, compare and pickle tensors as bytes, whatever their dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit.checkpoint import RowChunks
from replaykit.native import ask_for_large_pages
from replaykit.schema import Schema
from replaykit.storages.records import RecordLayout, alone
from replaykit.structure import Path, raw_bytes


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements of the tensor may share an address."""
    if not tensor.numel():
        return False
    needed = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < needed:
                return True
            needed = stride * size
    return False


def reach(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's memory up to the end of its last value."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.dtype.itemsize


def column_shapes(
    schema: Schema, slots: int, lanes: torch.Size, layout: RecordLayout | None
) -> dict[Path, torch.Size]:
    """Return the shape of the column of every leaf outside the records."""
    return {
        path: torch.Size([slots, *lanes, *schema.leaves[path].shape])
        for path in alone(schema.leaves, layout)
    }


def as_device(device: Any) -> torch.device:
    """Return a torch device; ValueError for an unknown device name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'expected a device such as "cpu" or "cuda:0", got {device!r}') from None


def allocate(
    schema: Schema,
    slots: int,
    lanes: torch.Size,
    device: torch.device,
    layout: RecordLayout | None,
) -> tuple[dict[Path, torch.Tensor], torch.Tensor | None]:
    """Allocate uninitialised columns ``[slots, *lanes, *F]`` and records.

    Records are uint8 ``[slots, *lanes, stride]``. They are None if the layout is None.

    Raises:
        RuntimeError: this machine has no such device.
        MemoryError: the device has too little free memory; the error names both numbers.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"expected a device of this machine, got {device}: CUDA is not available"
        )
    shapes = column_shapes(schema, slots, lanes, layout)
    rows, row_bytes = slots * lanes.numel(), schema.row_bytes()
    if layout is not None:  # records have padding
        row_bytes += layout.stride - sum(layout.sizes.values())
    free = available_memory(device)
    if free is not None and rows * row_bytes > free:
        raise MemoryError(
            f"a storage of {rows} rows of {row_bytes} bytes needs {format_bytes(rows * row_bytes)} "
            f"on {device}, {format_bytes(free)} are available; "
            "use a smaller max_size, or LazyMemmapStorage to keep the rows on disk"
        )
    columns = {
        path: _fresh(shape, schema.leaves[path].dtype, device) for path, shape in shapes.items()
    }
    if layout is None:
        return columns, None
    return columns, _fresh(torch.Size([slots, *lanes, layout.stride]), torch.uint8, device)


@torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
def _fresh(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that are available on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [value for value in (_free_of_machine(), _free_of_group()) if value is not None]
    return min(limits) if limits else None


def _free_of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _free_of_group() -> int | None:
    """Return the bytes that the control group still allows; None without a limit.

    A control group sets the memory limit of a container. It counts inactive pages of the file cache
    as used, but the kernel frees them on demand.
    """
    root = FilePath("/sys/fs/cgroup")
    for folder, limit_name, used_name, cache_name in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            used = (folder / used_name).read_text(encoding="ascii").strip()
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            cached = [
                int(line.split()[1])
                for line in stat.splitlines()
                if line.startswith(cache_name + " ")
            ]
            return max(int(limit) - int(used) + sum(cached), 0)
    return None


def format_bytes(count: int) -> str:
    """Return a size with a unit, for messages.

    Example:
        >>> from replaykit.storages.memory import format_bytes
        >>> format_bytes(300), format_bytes(3 * 2**20 // 2)
        ('300 B', '1.5 MiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


_Key = TypeVar("_Key")

_NATIVE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view in a dtype that every torch operation supports."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def carried_rows(
    leaves: Mapping[_Key, torch.Tensor], at: slice | torch.Tensor
) -> dict[_Key, torch.Tensor]:
    """Return some rows of leaves, in dtypes that every torch operation supports."""
    return {key: carried(leaf)[at] for key, leaf in leaves.items()}


def picked(rows: Any, kept: torch.Tensor | slice) -> torch.Tensor:
    """Return some rows of a tensor or of files, in the dtype that ``carried`` gives."""
    if isinstance(rows, torch.Tensor):
        whole = isinstance(kept, slice) and kept.start in (None, 0) and kept.stop is None
        return carried(rows) if whole else carried(rows)[kept]
    return carried(rows[kept])  # rows in files


def picked_views(rows: Any, kept: torch.Tensor | slice) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows that ``picked`` returns, in contiguous parts.

    Each item is a pair: the count of rows before the part, and the part. A slice is not copied.
    """
    if isinstance(kept, slice) and isinstance(rows, RowChunks):
        for first, view in rows.views(kept.start, kept.stop):
            yield first - kept.start, carried(view)
    else:
        yield 0, picked(rows, kept)


_BLOCK_BYTES = 2**22
"""Bytes of a compared block, so that each result stays in the processor's cache."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows ``[n, *F]`` that differ in any bit, bool ``[n]``.

    Both tensors have the same dtype and shape.

    Cost: one pass over the bytes.

    Example:
        >>> import torch
        >>> from replaykit.storages.memory import differing
        >>> a = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
        >>> differing(a, torch.tensor([[1.0, float("nan")], [-0.0, 2.0]]))
        tensor([False,  True])
    """
    count = a.shape[0]
    if not a.numel():
        return torch.zeros(count, dtype=torch.bool, device=a.device)
    a, b = _raw(a), _raw(b)
    row_bytes = a.shape[1] * a.dtype.itemsize
    offsets = row_bytes
    for x in (a, b):
        offsets |= int(x.storage_offset()) * x.dtype.itemsize
    for word in _WORDS:
        if not offsets % word.itemsize:
            break
    a, b = a.view(word), b.view(word)
    if a.shape[1] == 1:
        return (a != b).squeeze(1)
    step = max(1, _BLOCK_BYTES // row_bytes)
    if count <= step:
        return (a != b).any(1)
    found = torch.empty(count, dtype=torch.bool, device=a.device)
    for start in range(0, count, step):
        stop = start + step
        torch.any(a[start:stop] != b[start:stop], 1, out=found[start:stop])
    return found


def any_differing(a: Mapping[Any, torch.Tensor], b: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return a mask of the rows that differ in any leaf of ``a``, bool ``[n]``."""
    found: torch.Tensor | None = None
    for key, leaf in a.items():
        here = differing(leaf, b[key])
        found = here if found is None else found | here
    assert found is not None
    return found


def _raw(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as contiguous ``[n, bytes]`` or ``[n, words]`` in a NaN-free dtype."""
    if rows.is_conj() or rows.is_neg():
        rows = rows.resolve_conj().resolve_neg()
    # reshape would not do, because torch treats a tensor of one value as contiguous with any
    # strides.
    size = rows.numel() // rows.shape[0]
    flat = rows.contiguous().as_strided((rows.shape[0], size), (size, 1))
    return flat if flat.dtype in _WORDS else flat.view(torch.uint8)


@dataclass(frozen=True)
class _Bytes:
    raw: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


def by_value(value: Any) -> Any:
    """Return a copy of lists, tuples and dicts in which bytes replace the tensors.

    Example:
        >>> import torch
        >>> from replaykit.storages.memory import by_value, from_value
        >>> taken = by_value({"x": [torch.arange(3)]})
        >>> from_value(taken)
        {'x': [tensor([0, 1, 2])]}
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        raw = raw_bytes(value).numpy().copy()
        return _Bytes(raw, value.dtype, value.shape, value.device)
    return _mapped(value, by_value)


def from_value(value: Any) -> Any:
    """Restore the tensors of a result of ``by_value``, on their devices."""
    if isinstance(value, _Bytes):
        if not value.raw.size:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        raw = value.raw
        if not raw.flags.writeable:  # unpickled out of band, so it does not own its memory
            raw = raw.copy()
        tensor = torch.from_numpy(raw).view(value.dtype).view(value.shape)
        return tensor.to(value.device)
    return _mapped(value, from_value)


def _mapped(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value
