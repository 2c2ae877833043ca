"""The samples of members, put together into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.assembly import assembler
from replaykit.errors import SchemaError
from replaykit.structure import Branch, Leaf, Node, Path, flatten, leaf_paths
from replaykit.ted import format_key

__all__ = ["Places", "flat_rows", "length_of", "select", "sliced", "stacked"]


@dataclass(frozen=True)
class Places:
    """Where the rows of a batch of K parts come from.

    Attributes:
        members: the member of each part.
        rows: of a part.
    """

    members: list[int]
    rows: int

    @property
    def in_order(self) -> bool:
        """Whether parts of one member lie side by side, and members in the order of numbers."""
        return all(a <= b for a, b in zip(self.members, self.members[1:], strict=False))

    def parts_of(self, member: int) -> list[int]:
        """Numbers of the parts of a member."""
        return [part for part, other in enumerate(self.members) if other == member]

    def join(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Returns rows ``[K, rows, *F]`` of rows ``[n, *F]`` of members, which come in the order
        of their numbers; a member's together are those of its parts."""
        shape = (len(self.members), self.rows)
        tensors = [piece for _, piece in pieces]
        if len(tensors) == 1:
            return tensors[0].unflatten(0, shape)
        if self.in_order:
            return torch.cat(tensors).unflatten(0, shape)
        first = tensors[0]
        out = first.new_empty((*shape, *first.shape[1:]))
        for member in sorted(set(self.members)):
            own = [piece for number, piece in pieces if number == member]
            rows = own[0] if len(own) == 1 else torch.cat(own)
            parts = self.parts_of(member)
            out[torch.tensor(parts, device=out.device)] = rows.unflatten(0, (len(parts), self.rows))
        return out


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
    joined = [places.join([(member, found[path]) for member, _, found in taken]) for path in order]
    batch = torch.Size((len(places.members), places.rows))
    return assembler(tree, order)(joined, batch, _device(pieces, joined))


def _device(pieces: Sequence[tuple[int, Any]], joined: list[torch.Tensor]) -> torch.device | None:
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
