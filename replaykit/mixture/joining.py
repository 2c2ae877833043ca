"""Concatenate the batches of members and the info of their rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict, lookup
from replaykit.buffer.source import MemberFacts
from replaykit.mixture.choosing import is_of_rows
from replaykit.samplers.window_forms import MASK
from replaykit.schema import check_alike
from replaykit.structure import Rules, assembler, flatten
from replaykit.ted import format_key


class BatchParts:
    """The positions of rows in a batch of K parts.

    Args:
        members: the member of each part.
        rows: number of rows per part.
    """

    def __init__(self, members: list[int], rows: int) -> None:
        self.members, self.rows = members, rows
        self.shape = (len(members), rows)
        self._order: torch.Tensor | None = None
        """Position of each batch row in the rows of all members; None if equal."""
        if any(a > b for a, b in itertools.pairwise(members)):
            first = np.argsort(members, kind="stable")
            place = np.empty_like(first)
            place[first] = np.arange(len(first))
            rows_of = place[:, None] * rows + np.arange(rows)
            self._order = torch.from_numpy(rows_of.reshape(-1))

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Combine rows ``[n, *F]`` of members to rows ``[K, rows, *F]``.

        The members are in the order of their numbers. The tensors of a member together have the
        rows of its parts.
        """
        if len(tensors) == 1:
            return tensors[0].unflatten(0, self.shape)
        first = tensors[0]
        if self._order is None:
            return torch.cat(tensors).view(*self.shape, *first.shape[1:])
        order = self._order.to(first.device)
        return torch.cat(tensors).index_select(0, order).view(*self.shape, *first.shape[1:])

    def ids(self, device: torch.device) -> torch.Tensor:
        """Return the member of each row, int64 ``[K, rows]``."""
        members = torch.tensor(self.members, dtype=torch.int64, device=device)
        return members[:, None].repeat(1, self.rows)


def select(data: Any, keys: Sequence[Any], member: int) -> Any:
    """Return a TensorDict with only these keys.

    Raises:
        TypeError: the data is not a TensorDict; the error names the member.
        KeyError: keys are missing; the error names them and the member.
    """
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


def stacked(pieces: Sequence[tuple[int, Any]], places: BatchParts) -> Any:
    """Return the samples of members as one container of batch size ``[K, rows]``.

    Args:
        pieces: members and their samples, rows along dimension 0, as for ``BatchParts.join``.

    Raises:
        ValueError: samples differ in keys, shapes, dtypes, devices or kinds of container; the error
            names the difference and the members.
        TypeError: a value is not a tensor; the error names the key.

    Cost: two passes over the bytes, and a few Python steps per leaf and member.
    """
    taken = []
    for member, data in pieces:
        try:
            taken.append((member, *flatten(data, 1, Rules(detach=False))))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"member {member}: {error}; give a collate_fn= that stacks its samples"
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


def _device(pieces: Sequence[tuple[int, Any]]) -> torch.device | None:
    """Return the device of a stack; None if samples name different devices."""
    said = {data.device for _, data in pieces if is_tensordict(data) or is_tensorclass(data)}
    return said.pop() if len(said) == 1 else None


def sliced(pieces: Sequence[tuple[int, Any]], places: BatchParts) -> list[Any]:
    """Return the rows of each part, in the order of the parts."""
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
    """Return the number of rows of a sample; -1 if it has no length."""
    if isinstance(data, torch.Tensor) or is_tensordict(data) or is_tensorclass(data):
        return data.shape[0] if len(data.shape) else -1
    if isinstance(data, dict):
        return length_of(next(iter(data.values()))) if data else -1
    if isinstance(data, tuple):
        return length_of(data[0]) if data else -1
    return len(data) if hasattr(data, "__len__") else -1


def flat_rows(data: Any) -> Any:
    """Return a batch ``[K, rows, *S]`` of tensors as ``[K * rows, *S]``."""
    if isinstance(data, dict):
        return {key: flat_rows(value) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        items = [flat_rows(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data.flatten(0, 1)


INDEX = ("index", "index")
"""The key of the index of a row in its member."""

IDS = ("index", "buffer_ids")
"""The key of the member of a row."""

_GENERATION = "index_generation"


_Fill = Callable[[dict[Any, Any], torch.Tensor], torch.Tensor]

_FILLS: dict[Any, _Fill] = {
    # Without priorities all rows are equally likely, so there is nothing to correct.
    "priority_weight": lambda info, row: torch.ones_like(row, dtype=torch.float32),
    # A single row is its own anchor, and a sequence of length 1.
    "anchor_index": lambda info, row: info[INDEX],
    "anchor_generation": lambda info, row: info[_GENERATION],
    "sequence_id": lambda info, row: row,
    "step_in_sequence": lambda info, row: torch.zeros_like(row),
    "learning_mask": lambda info, row: torch.ones_like(row, dtype=torch.bool),
    "validity_mask": lambda info, row: torch.ones_like(row, dtype=torch.bool),
    MASK: lambda info, row: torch.ones_like(row, dtype=torch.bool),
}
"""Default info for rows of members that lack a key of other members."""


def put_back_marks(data: Any, info: dict[Any, Any]) -> Any:
    """Overwrite read values with a sampler's marks, such as window ends.

    Only TensorDicts have marks. Other info stays in ``info``.
    """
    if not is_tensordict(data):
        return data
    for key in list(info):
        if key in _FILLS or key in (INDEX, IDS, _GENERATION):
            continue
        there = _lookup(data, key)
        if there is None:
            continue
        value = info.pop(key)
        if there is not value:
            if data.is_locked:
                data = data.copy()
            data.set(key, value)
    return data


def _lookup(data: Any, key: Any) -> Any:
    return lookup(data, key if isinstance(key, tuple) else (key,))


def joint(facts: Sequence[MemberFacts], *, ordered: bool) -> MemberFacts:
    """Return the properties that rows of members with these properties have in common.

    Args:
        ordered: whether the rows are transformed in the order of delivery in any case.
    """
    return MemberFacts(
        info_keys=frozenset().union(*(one.info_keys for one in facts)),
        prioritized=any(one.prioritized for one in facts),
        priority_key=(),
        width=max(one.width for one in facts),
        weights=functools.reduce(torch.promote_types, (one.weights for one in facts)),
        single=False,
        ordered=ordered or any(one.ordered for one in facts),
        marks=frozenset().union(*(one.marks for one in facts)),
    )


def with_defaults(data: Any, info: dict[Any, Any], rows: int, facts: MemberFacts) -> dict[Any, Any]:
    """Return the info of a member's rows, with the keys of other members added.

    Args:
        data: the rows. Marks of ends that they lack are False, since no window was cut there.
        info: the info from the member, and the index of the rows.
        rows: number of rows per part. Sequences are numbered from 0 in each part.
        facts: the common properties of all members.
    """
    index = info[INDEX]
    missing = [key for key in facts.info_keys if key not in info and key in _FILLS]
    if missing:
        row = torch.arange(len(index), device=index.device) % rows
        info = {**info, **{key: _FILLS[key](info, row) for key in missing}}
    if facts.marks and is_tensordict(data):
        missing = [key for key in facts.marks if key not in info and _lookup(data, key) is None]
        none = torch.zeros(len(index), 1, dtype=torch.bool, device=index.device)
        info = {**info, **dict.fromkeys(missing, none)}
    for key in (INDEX, "anchor_index"):
        if facts.width > 1 and key in info:
            info[key] = _as_wide(info[key], facts.width)
    if "priority_weight" in facts.info_keys:
        info["priority_weight"] = info["priority_weight"].to(facts.weights)
    return info


def joined(
    infos: Sequence[dict[Any, Any]], places: BatchParts, device: torch.device | None
) -> dict[Any, torch.Tensor]:
    """Return the info common to all members of a batch, ``[K, rows, ...]``.

    Args:
        infos: the info of rows of members, in the order of ``BatchParts.join``.
        device: the device of the result; None for the device of the first member's index.
    """
    home = infos[0][INDEX].device if device is None else device
    found: dict[Any, torch.Tensor] = {INDEX: places.join(_there(infos, INDEX, home))}
    found[IDS] = places.ids(home)
    lengths = [len(info[INDEX]) for info in infos]
    for key in infos[0]:
        if key == INDEX:
            continue
        values: list[Any] = [info.get(key) for info in infos]
        if not all(map(is_of_rows, values, lengths)):
            continue
        if len({(value.dtype, value.shape[1:]) for value in values}) == 1:
            found[key] = places.join(_there(infos, key, home))
    return found


def merged(data: Any, info: dict[Any, torch.Tensor], needed: bool) -> Any:
    """Put the info of rows into a TensorDict; return other data unchanged.

    The rows are along its first one or two dimensions. A TensorDict of any other shape is returned
    unchanged, unless the info is ``needed``.

    Raises:
        RuntimeError: the info is ``needed`` and does not fit.
    """
    if not is_tensordict(data):
        return data
    lead = info[INDEX].shape[:2]
    dims = 2 if data.batch_size[:2] == lead else 1
    if dims == 1 and data.batch_size[:1] != (lead.numel(),):
        if not needed:
            return data
        raise RuntimeError(
            f"a transform or collate_fn made batch size {list(data.batch_size)} of {list(lead)} "
            "rows, so that index and info no longer belong to them; call sample(return_info=True), "
            "which returns them apart from the data"
        )
    if data.is_locked:
        data = data.copy()
    own = data.batch_size[dims:]
    for key, value in info.items():
        if dims == 1:
            value = value.flatten(0, 1)
        if own:  # dimensions inside the rows
            rest = value.shape[dims:]
            wide = value.reshape(*value.shape[:dims], *(1,) * len(own), *rest)
            value = wide.expand(*data.batch_size, *rest).clone()
        data.set(key, value)
    return data


def _there(infos: Sequence[dict[Any, Any]], key: Any, home: torch.device) -> list[torch.Tensor]:
    values = [info[key] for info in infos]
    return [value if value.device == home else value.to(home) for value in values]


def _as_wide(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Return numbers ``[n]`` or ``[n, K]`` as ``[n, width]``, padded with -1."""
    columns = numbers.reshape(len(numbers), -1)
    if columns.shape[1] == width:
        return columns
    room = columns.new_full((len(columns), width - columns.shape[1]), -1)
    return torch.cat([columns, room], 1)
