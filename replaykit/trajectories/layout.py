"""Rows to padded trajectories and back: every bit moved by one index, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from replaykit._compat import TensorDict, is_tensordict
from replaykit.structure import Node, Path, build, flatten
from replaykit.ted import Key, format_key

__all__ = ["MASK_KEY", "check_rows", "padded", "picked", "refuse_own", "take_items"]

MASK_KEY: Final[Key] = ("mask",)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Stand-ins of other dtypes, some of which torch cannot move by index; also keeps every bit."""


def padded(
    node: Node,
    rows: Mapping[Path, torch.Tensor],
    counts: torch.Tensor,
    width: int,
    pads: Mapping[Path, Any],
    device: torch.device | None,
) -> tuple[TensorDict, torch.Tensor]:
    """Lays rows ``[N]`` out as ``[E, width]``; returns them with their mask, and the mask."""
    batch = torch.Size([len(counts), width])
    steps = torch.arange(width, device=counts.device)
    mask = steps < counts[:, None]
    slots = mask.view(-1).nonzero().squeeze(-1)
    leaves = {}
    for path, leaf in rows.items():
        shape = (batch.numel(), *leaf.shape[1:])
        pad = pads.get(path, 0)
        out = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        if pad != 0:
            out.fill_(pad)
        _bits(out).index_copy_(0, slots.to(leaf.device), _bits(leaf))
        leaves[path] = out.view(*batch, *leaf.shape[1:])
    padded: TensorDict = build(node, leaves, batch, device)
    return padded.set(MASK_KEY, mask), mask


def picked(leaf: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the entries at ``slots`` of the two leading dimensions taken as one."""
    entries = _bits(leaf).flatten(0, 1)
    return entries.index_select(0, slots.to(leaf.device)).view(leaf.dtype)


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a view with a dtype of that size that can be moved by index."""
    return leaf.view(_BITS.get(leaf.dtype.itemsize, leaf.dtype))


def take_items(
    items: Any, added: Key | None, *, shortest: int
) -> tuple[Node, list[dict[Path, torch.Tensor]], list[int]]:
    """Returns the tree of the first item, the leaves of each in its order, and the lengths.

    All fit each other, and none has the key that will be ``added``.
    """
    if not isinstance(items, (list, tuple)):
        raise TypeError(f"items: expected a list of TensorDicts, got {type(items).__name__}")
    if not items:
        raise ValueError("items: expected at least one TensorDict, got none")
    node: Node | None = None
    tables: list[dict[Path, torch.Tensor]] = []
    for number, item in enumerate(items):
        check_rows(item, f"item {number}", shortest)
        here, leaves = flatten(item, 1)
        node = here if node is None else node
        if added is not None:
            refuse_own(leaves, added, f"item {number}")
        if tables:
            _check_alike(number, leaves, tables[0])
        tables.append(leaves)
    assert node is not None
    return node, tables, [item.batch_size[0] for item in items]


def check_rows(data: Any, name: str, shortest: int = 0) -> None:
    if not is_tensordict(data):
        raise TypeError(f"{name}: expected a TensorDict, got {type(data).__name__}")
    if data.batch_dims != 1:
        raise ValueError(f"{name}: expected batch size [n], got {list(data.batch_size)}")
    if data.batch_size[0] < shortest:
        raise ValueError(f"{name}: expected at least {shortest} row, got none")


def _check_alike(
    number: int, leaves: Mapping[Path, torch.Tensor], first: Mapping[Path, torch.Tensor]
) -> None:
    for path in first:
        if path not in leaves:
            raise KeyError(f"item {number} has no key {format_key(path)}, which item 0 has")
    for path, leaf in leaves.items():
        if path not in first:
            raise KeyError(f"item {number} has a key {format_key(path)}, which item 0 has not")
        other = first[path]
        alike = leaf.shape[1:] == other.shape[1:] and leaf.dtype == other.dtype
        if not alike or leaf.device != other.device:
            raise ValueError(
                f"item {number}, key {format_key(path)}: expected {_described(other)}, as item 0 "
                f"has, got {_described(leaf)}"
            )


def _described(leaf: torch.Tensor) -> str:
    shape = ", ".join(["n", *map(str, leaf.shape[1:])])
    return f"shape [{shape}], {leaf.dtype} on {leaf.device}"


def refuse_own(leaves: Mapping[Path, Any], key: Key, name: str) -> None:
    if any(path[: len(key)] == key for path in leaves):
        raise ValueError(f"{name}: has a key {format_key(key)} of its own; rename or drop it first")
