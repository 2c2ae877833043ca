"""Samplers and storages of an ensemble without buffers: drawn from directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from replaykit._compat import TensorDict
from replaykit.ensembles.storage import StorageEnsemble, rows_in
from replaykit.errors import NotEnoughData
from replaykit.samplers import Sampler
from replaykit.storages import Storage

__all__ = ["Pairs", "laid_out", "naming_member"]


class Pairs:
    """Samplers with a storage each, as members of a choice."""

    def __init__(self, samplers: Sequence[Sampler], storage: Storage) -> None:
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"expected a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(samplers):
            raise ValueError(f"expected {len(samplers)} storages, got {len(storage)}")
        self.samplers, self.storages = samplers, storage.storages

    def size(self, member: int) -> int:
        """Rows that a member holds."""
        return rows_in(self.storages[member])

    def ready(self, member: int, rows: int) -> bool:
        """Whether a member can give that many rows now."""
        sampler, storage = self.samplers[member], self.storages[member]
        if sampler.consumes:
            return sampler.left(storage) >= rows  # what it gives less of fills no part
        return sampler.can_sample(storage, rows)

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raises the error of a member that cannot."""
        self.draw(member, rows)  # raises why
        raise NotEnoughData(f"member {member}: expected {rows} rows, and it cannot give them now")

    def draw(self, member: int, rows: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Has a member's sampler draw; its errors name the member."""
        try:
            index, info = self.samplers[member].sample(self.storages[member], rows)
        except Exception as error:
            raise naming_member(error, member) from error
        return torch.stack(index, -1) if isinstance(index, tuple) else index, info


def naming_member(error: Exception, member: int | str) -> Exception:
    """An error of the same class that says which member raised it, or itself where it cannot."""
    text = error.args[0] if error.args else ""
    if len(error.args) > 1 or not isinstance(text, str):
        return error
    name = f"member {member}" if isinstance(member, int) else member
    try:
        return type(error)(f"{name}: {text}")
    except Exception:
        return error


def laid_out(
    members: Sequence[int],
    rows: int,
    drawn: dict[int, list[tuple[torch.Tensor, dict[Any, Any]]]],
) -> tuple[Any, dict[Any, Any]]:
    """Returns the draws of members part by part, in the order in which these were chosen.

    Args:
        members: the member of each part.
        rows: of a part.
        drawn: draws by member, index and info; together they have the rows of its parts.
    """
    lanes = {draws[0][0].shape[1:] for draws in drawn.values()}
    if len(lanes) > 1:
        raise RuntimeError(
            "expected members whose rows have indices of one shape; with lanes and without they go "
            "into one batch of a ReplayBufferEnsemble only"
        )
    shared = set.intersection(*(set(info) for draws in drawn.values() for _, info in draws))
    shared = {
        key
        for key in shared
        if all(_of_rows(info[key], len(index)) for draws in drawn.values() for index, info in draws)
    }
    pieces: dict[int, list[Any]] = {}
    for member, draws in drawn.items():
        index = torch.cat([index for index, _ in draws])
        told = {key: torch.cat([info[key] for _, info in draws]) for key in shared}
        parts = [*index.split(rows)]
        tolds: dict[Any, Any] = {key: value.split(rows) for key, value in told.items()}
        pieces[member] = [
            (part, {key: value[i] for key, value in tolds.items()}) for i, part in enumerate(parts)
        ]
    turn = {member: iter(parts) for member, parts in pieces.items()}
    laid = [next(turn[member]) for member in members]
    index = torch.stack([part for part, _ in laid])
    ids = torch.tensor(members, dtype=torch.int64, device=index.device)
    info = {key: torch.stack([told[key] for _, told in laid]) for key in shared}
    return TensorDict({"index": index, "buffer_ids": ids}, [len(laid)]), info


def _of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows
