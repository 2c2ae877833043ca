"""What is known of the rows of a batch: where each lies, and what the members' samplers tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replaykit._compat import is_tensordict, lookup
from replaykit.ensembles.batches import Places
from replaykit.ensembles.core import EnsembleCore
from replaykit.samplers.markers import MASK

__all__ = ["IDS", "INDEX", "INNER", "PLACES", "Layout", "joined", "merged", "put_back_marks"]

INDEX = ("index", "index")
"""Where a row lies in its member."""

IDS = ("index", "buffer_ids")
"""The member that a row is of."""

INNER = ("index", "inner_ids")
"""Where members are ensembles: their member, and so on, -1 below a buffer; ``[..., depth]``."""

PLACES = (INDEX, IDS, INNER)

_GENERATION = "index_generation"


def tells(member: Any) -> frozenset[Any]:
    """Keys of what a member always tells of its rows, but for the index and marks of ends."""
    if isinstance(member, EnsembleCore):
        return frozenset().union(*(tells(one) for one in member._members))
    return frozenset((*member.sampler.tells, *member._sample_unit.tells))


_Fill = Callable[[dict[Any, Any], torch.Tensor], torch.Tensor]

_FILLS: dict[Any, _Fill] = {
    # Likely as all others, as far as is known: nothing to be corrected.
    "priority_weight": lambda info, row: torch.ones_like(row, dtype=torch.float32),
    # A row by itself is its own anchor, and a sequence of one.
    "anchor_index": lambda info, row: info[INDEX],
    "anchor_generation": lambda info, row: info[_GENERATION],
    "sequence_id": lambda info, row: row,
    "step_in_sequence": lambda info, row: torch.zeros_like(row),
    "learning_mask": lambda info, row: torch.ones_like(row, dtype=torch.bool),
    "validity_mask": lambda info, row: torch.ones_like(row, dtype=torch.bool),
    MASK: lambda info, row: torch.ones_like(row, dtype=torch.bool),
}
"""What is said of the rows of members that do not tell it, where others do."""


def put_back_marks(data: Any, info: dict[Any, Any]) -> Any:
    """Puts what a sampler marks (where windows end) over what was read; of TensorDicts only.

    The rest stays in ``info``.
    """
    if not is_tensordict(data):
        return data
    for key in list(info):
        if key in _FILLS or key in PLACES or key == _GENERATION:
            continue
        path = key if isinstance(key, tuple) else (key,)
        there = lookup(data, path)
        if there is None:
            continue
        value = info.pop(key)
        if there is not value:
            if data.is_locked:
                data = data.copy()
            data.set(key, value)
    return data


def index_width(member: Any) -> int:
    """How many numbers say where a row lies in a member: more than one where it has lanes."""
    if isinstance(member, EnsembleCore):
        return max(map(index_width, member._members))
    return int(member.storage.ndim)


def depth(member: Any) -> int:
    """How many members one has to go down in a member to a buffer: none in a buffer."""
    return 1 + max(map(depth, member._members)) if isinstance(member, EnsembleCore) else 0


def weight_dtype(members: Iterable[Any]) -> torch.dtype:
    """The dtype of ``priority_weight`` in a batch of these members."""
    found = torch.float32
    for member in members:
        if isinstance(member, EnsembleCore):
            known = weight_dtype(member._members)
        else:
            known = getattr(member.sampler, "dtype", found)
        found = torch.promote_types(found, known)
    return found


@dataclass(frozen=True)
class Layout:
    """What is said of the rows of every batch, whichever members it is of.

    Attributes:
        keys: what members tell, beside where rows lie and their generations.
        width: numbers in an index.
        depth: numbers in ``("index", "inner_ids")``; 0: there is none.
        weights: dtype of ``priority_weight``.
    """

    keys: frozenset[Any]
    width: int
    depth: int
    weights: torch.dtype

    @classmethod
    def of(cls, members: Sequence[Any]) -> Layout:
        """That of an ensemble of these members."""
        return cls(
            frozenset().union(*map(tells, members)),
            max(map(index_width, members)),
            max(map(depth, members)),
            weight_dtype(members),
        )

    def fill(self, info: dict[Any, Any], rows: int) -> dict[Any, Any]:
        """Returns what is known of some rows of a member, with all that is said of others.

        Args:
            info: what the member told, and where the rows lie.
            rows: of a part of the batch; sequences are numbered anew in each.
        """
        index = info[INDEX]
        missing = [key for key in self.keys if key not in info and key in _FILLS]
        if missing:
            row = torch.arange(len(index), device=index.device) % rows
            info = {**info, **{key: _FILLS[key](info, row) for key in missing}}
        for key in (INDEX, "anchor_index"):
            if self.width > 1 and key in info:
                info[key] = _as_wide(info[key], self.width)
        if self.depth:
            info[INNER] = _as_wide(info.get(INNER, index.new_empty((len(index), 0))), self.depth)
        if "priority_weight" in self.keys:
            info["priority_weight"] = info["priority_weight"].to(self.weights)
        return info


def joined(
    infos: Sequence[dict[Any, Any]], places: Places, device: torch.device | None
) -> dict[Any, torch.Tensor]:
    """Returns what all members of a batch tell of their rows, ``[K, rows, ...]``.

    Args:
        infos: what is known of rows of members, as for ``Places.join``.
        device: where to; None: where that of the first member is.
    """
    home = infos[0][INDEX].device if device is None else device
    found: dict[Any, torch.Tensor] = {INDEX: places.join(_there(infos, INDEX, home))}
    found[IDS] = places.ids(home)
    lengths = [len(info[INDEX]) for info in infos]
    for key in infos[0]:
        if key == INDEX:
            continue
        values: list[Any] = [info.get(key) for info in infos]
        if not all(map(_of_rows, values, lengths)):
            continue
        if len({(value.dtype, value.shape[1:]) for value in values}) == 1:
            found[key] = places.join(_there(infos, key, home))
    return found


def merged(data: Any, info: dict[Any, torch.Tensor], needed: bool) -> Any:
    """Puts what is known of the rows into a TensorDict of them; other data stay.

    The rows lie along its first two dimensions, or along one. Where they do not any more: an error
    if they are ``needed``.
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
            "which gives them beside the data"
        )
    if data.is_locked:
        data = data.copy()
    own = data.batch_size[dims:]
    for key, value in info.items():
        if dims == 1:
            value = value.flatten(0, 1)
        if own:  # dimensions of the rows themselves
            rest = value.shape[dims:]
            wide = value.reshape(*value.shape[:dims], *(1,) * len(own), *rest)
            value = wide.expand(*data.batch_size, *rest).clone()
        data.set(key, value)
    return data


def _there(infos: Sequence[dict[Any, Any]], key: Any, home: torch.device) -> list[torch.Tensor]:
    values = [info[key] for info in infos]
    return [value if value.device == home else value.to(home) for value in values]


def _as_wide(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers ``[n]`` or ``[n, K]`` as ``[n, width]``, with -1 behind them."""
    columns = numbers.reshape(len(numbers), -1)
    if columns.shape[1] == width:
        return columns
    room = columns.new_full((len(columns), width - columns.shape[1]), -1)
    return torch.cat([columns, room], 1)


def _of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows
