"""The samples of members, put together into one batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, fields_of, is_tensordict, new_tensordict
from replaykit.assembly import assembler
from replaykit.errors import SchemaError
from replaykit.structure import Branch, Leaf, Node, Path, flatten, leaf_paths
from replaykit.ted import format_key

__all__ = ["Places", "flat_rows", "length_of", "select", "sliced", "stacked"]


_LARGE_BYTES = 2**20
"""From this size on rows are put where they belong member by member: once, not twice."""


class Places:
    """Where the rows of a batch of K parts come from.

    Args:
        members: the member of each part.
        rows: of a part.
    """

    def __init__(self, members: list[int], rows: int) -> None:
        self.members, self.rows = members, rows
        self.shape = (len(members), rows)
        self._order: torch.Tensor | None = None
        """For each row of the batch its place among those of all members; None: in that order."""
        if any(a > b for a, b in itertools.pairwise(members)):
            first = np.argsort(members, kind="stable")
            place = np.empty_like(first)
            place[first] = np.arange(len(first))
            rows_of = place[:, None] * rows + np.arange(rows)
            self._order = torch.from_numpy(rows_of.reshape(-1))

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns rows ``[K, rows, *F]`` of rows ``[n, *F]`` of members, which come in the order
        of their numbers; a member's together are those of its parts."""
        if len(tensors) == 1:
            return tensors[0].unflatten(0, self.shape)
        first = tensors[0]
        if self._order is None:
            return torch.cat(tensors).view(*self.shape, *first.shape[1:])
        order = self._order.to(first.device)
        count = self.shape[0] * self.rows
        if first[:1].nbytes * count < _LARGE_BYTES:
            return torch.cat(tensors).index_select(0, order).view(*self.shape, *first.shape[1:])
        out = first.new_empty((count, *first.shape[1:]))
        target = torch.empty_like(order)  # of each row of the members, where it goes
        target[order] = torch.arange(count, device=order.device)
        start = 0
        for tensor in tensors:
            out.index_copy_(0, target[start : start + len(tensor)], tensor)
            start += len(tensor)
        return out.view(*self.shape, *first.shape[1:])

    def ids(self, device: torch.device) -> torch.Tensor:
        """The member of each row, int64 ``[K, rows]``."""
        members = torch.tensor(self.members, dtype=torch.int64, device=device)
        return members[:, None].repeat(1, self.rows)


def select(data: Any, keys: Sequence[Any], member: int) -> Any:
    """Returns a TensorDict with these keys only; names the member and the keys that it lacks."""
    if not is_tensordict(data):
        raise TypeError(
            f"member {member}: expected a TensorDict to take keys= of, got {type(data).__name__}"
        )
    known = set(data.keys(True))
    missing = [
        format_key(key if isinstance(key, tuple) else (key,)) for key in keys if key not in known
    ]
    if missing:
        raise KeyError(f"member {member}: no {', '.join(missing)} in its samples")
    return data.select(*keys)


def stacked(pieces: Sequence[tuple[int, Any]], places: Places) -> Any:
    """Returns the samples of members as one container of batch size ``[K, rows]``.

    Args:
        pieces: members and their samples, rows along dimension 0, as for ``Places.join``.

    Raises:
        ValueError: samples that differ in keys, shapes, dtypes, or kinds of container; names what
            differs and the members. TypeError: something other than tensors; names the key.

    Cost: one pass over the bytes, and a few Python steps a leaf and member.
    """
    if all(type(data) is TensorDict for _, data in pieces):
        found = _plain([data for _, data in pieces], places, torch.Size(places.shape))
        if found is not None:
            return found
    taken = []
    for member, data in pieces:
        try:
            taken.append((member, *flatten(data, 1)))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"member {member}: {error}; give collate_fn= what stacks its samples"
            ) from None
    first, tree, leaves = taken[0]
    for member, other, found in taken[1:]:
        if other != tree:
            check_alike((first, tree), (member, other))
        for path, leaf in found.items():
            if leaf.device != leaves[path].device:
                raise ValueError(
                    f"expected samples on one device, got {format_key(path)} of member {first} on "
                    f"{leaves[path].device} and of member {member} on {leaf.device}; give device="
                )
    order = list(leaves)
    joined = [places.join([found[path] for _, _, found in taken]) for path in order]
    return assembler(tree, order)(joined, torch.Size(places.shape), _device(pieces))


def _plain(samples: list[Any], places: Places, batch: torch.Size) -> Any:
    """The usual case of ``stacked`` in fewer steps: TensorDicts of the same tensors.

    None where there is anything else, or a difference.
    """
    first = samples[0]
    others = samples[1:]
    fields: dict[str, Any] = {}
    tables = [fields_of(sample) for sample in samples]
    size = first.batch_size[1:]
    if any(len(table) != len(tables[0]) for table in tables) or any(
        other.device != first.device or other.batch_size[1:] != size for other in others
    ):
        return None
    for name, value in tables[0].items():
        values: list[Any] = [table.get(name) for table in tables]
        kind = type(value)
        if any(type(one) is not kind for one in values):
            return None
        if kind is TensorDict:
            fields[name] = _plain(values, places, batch)
            if fields[name] is None:
                return None
            continue
        if kind is not torch.Tensor:
            return None
        dtype, shape, device = value.dtype, value.shape[1:], value.device
        if len(values) > 1 and any(
            one.dtype is not dtype or one.shape[1:] != shape or one.device != device
            for one in values[1:]
        ):
            return None
        if value.layout is not torch.strided:
            return None
        fields[name] = places.join(values)
    return new_tensordict(fields, batch + size, first.device)


def _device(pieces: Sequence[tuple[int, Any]]) -> torch.device | None:
    """The device that a stack says it is on: where all samples say so."""
    said = {data.device for _, data in pieces if is_tensordict(data) or is_tensorclass(data)}
    return said.pop() if len(said) == 1 else None


def check_alike(one: tuple[int, Node], other: tuple[int, Node]) -> None:
    """Raises SchemaError where the samples of two members differ in what is in them.

    Classes, order of keys, and constants of containers are those of the first.
    """
    (first, tree), (second, found) = one, other
    known, there = dict(leaf_paths(tree)), dict(leaf_paths(found))
    lines = [
        f"key {format_key(path) if path else '(root)'}: {_said(known.get(path))} and "
        f"{_said(there.get(path))}"
        for path in sorted(set(known) | set(there), key=str)
        if known.get(path) != there.get(path)
    ]
    if not lines and not _same_kinds(tree, found):
        lines.append("containers of other kinds")
    if lines:
        raise SchemaError(
            f"expected the same in the samples of all members, got in those of members {first} and "
            f"{second}: {'; '.join(lines)}. Choose what all have with keys=, or give the members "
            "transforms, or a collate_fn="
        )


def _said(leaf: Leaf | None) -> str:
    return "nothing" if leaf is None else str(leaf)


def _same_kinds(one: Node, other: Node, path: Path = ()) -> bool:
    """Whether two trees with the same leaves have containers of the same kinds."""
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return isinstance(one, Leaf) and isinstance(other, Leaf)
    if one.kind != other.kind or one.extra != other.extra:
        return False
    return _children_alike(one, other)


def _children_alike(one: Branch, other: Branch) -> bool:
    theirs = dict(other.children)
    return all(part in theirs and _same_kinds(child, theirs[part]) for part, child in one.children)


def sliced(pieces: Sequence[tuple[int, Any]], places: Places) -> list[Any]:
    """Returns the rows of each part, in the order of the parts."""
    by_member: dict[int, list[Any]] = {}
    for member, data in pieces:
        by_member.setdefault(member, []).append(data)
    parts: dict[int, Any] = {}
    for member, data in by_member.items():
        if any(length_of(one) % places.rows for one in data):
            data = [torch.cat(data)]
        parts[member] = iter(
            [
                one[first : first + places.rows]
                for one in data
                for first in range(0, length_of(one), places.rows)
            ]
        )
    return [next(parts[member]) for member in places.members]


def length_of(data: Any) -> int:
    """How many rows a sample has."""
    if isinstance(data, torch.Tensor) or is_tensordict(data) or is_tensorclass(data):
        return data.shape[0] if len(data.shape) else -1
    if isinstance(data, dict):
        return length_of(next(iter(data.values()))) if data else -1
    if isinstance(data, tuple):
        return length_of(data[0]) if data else -1
    return len(data) if hasattr(data, "__len__") else -1


def flat_rows(data: Any) -> Any:
    """Returns a batch ``[K, rows, *S]`` of tensors as ``[K * rows, *S]``."""
    if isinstance(data, dict):
        return {key: flat_rows(value) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        items = [flat_rows(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data.flatten(0, 1)
