"""Allocate memory for columns, and find the memory of tensors."""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Any

import torch

from replaykit.native import ask_for_large_pages
from replaykit.schema import Schema
from replaykit.storages.records import RecordLayout, alone
from replaykit.structure import Path


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


def storage_bytes(
    schema: Schema, slots: int, lanes: torch.Size, layout: RecordLayout | None
) -> int:
    """Return the bytes of all rows: records with their padding, and the other columns."""
    element = schema.row_bytes()
    if layout is not None:
        element += layout.stride - sum(layout.sizes.values())
    return slots * lanes.numel() * element


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
    needed = storage_bytes(schema, slots, lanes, layout)
    free = available_memory(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"a storage of {slots * lanes.numel()} rows of {needed // (slots * lanes.numel())} "
            "bytes needs "
            f"{format_bytes(needed)} on {device}, {format_bytes(free)} are available; "
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
