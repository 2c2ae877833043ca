"""What a buffer in another process gives to a batch of an ensemble, made there."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.drawing import Lent
from replaykit.buffer.elsewhere import MemberFacts, Piece, Standing
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.requests import filled, requests
from replaykit.ensembles.told import tells, weight_dtype
from replaykit.storages.indexing import check_range

__all__ = ["check_member", "check_stored", "facts_of", "part_of", "piece_of", "standing_of"]


def check_member(buffer: Any) -> None:
    """Raises TypeError or ValueError where a buffer in another process cannot be a member."""
    if isinstance(buffer, EnsembleCore) or not isinstance(buffer, ReplayBuffer):
        raise TypeError(
            "expected a ReplayBuffer with rows of its own in the actor of a member, got "
            f"{type(buffer).__name__}; make its members those of the ensemble"
        )
    if buffer._rate_limiter is not None:
        raise ValueError(
            "expected a buffer without a rate limiter, which does not see draws of an ensemble, "
            f"got {buffer._rate_limiter!r}"
        )
    if buffer.sampler.passes or buffer.sampler.consumes:
        raise ValueError(
            "expected a sampler that draws with replacement in an actor, got a "
            f"{type(buffer.sampler).__name__}: batches that are not delivered could not give their "
            "rows back to it"
        )


def facts_of(buffer: Any) -> MemberFacts:
    """What an ensemble has to know of a buffer; raises as `check_member`."""
    check_member(buffer)
    sampler = buffer.sampler
    return MemberFacts(
        sampler=type(sampler).__name__,
        tells=tells(buffer),
        prioritized=sampler.prioritized,
        priority_key=buffer._priority_key,
        width=buffer.storage.ndim,
        weights=weight_dtype([buffer]),
        single=len(requests(sampler, buffer._sample_unit, 2, 1)) == 1,
        ordered=buffer.transform.ordered,
    )


def standing_of(buffer: Any, rows: int) -> Standing:
    """How many rows a buffer holds, and whether it can give that many now."""
    return Standing(len(buffer.storage), buffer.can_sample(rows))


def part_of(buffer: Any, rows: list[int], seed: int) -> list[Piece]:
    """Draws that many rows, each number by itself; the buffer's own draws are left alone."""
    check_member(buffer)
    lent = Lent(torch.Generator().manual_seed(seed))

    def draw(count: int) -> tuple[Any, int, bool]:
        drawn = buffer._draw(count, lent)
        return drawn, len(drawn.anchors), drawn.ran_out

    draws = [one for count in rows for one in filled(count, draw, buffer.sampler)]
    return [piece_of(buffer, drawn) for drawn in draws]


def piece_of(buffer: Any, drawn: Any) -> Piece:
    """A draw of a buffer, read and transformed, with its rows along dimension 0."""
    data, info = buffer._finish(drawn)
    if drawn.arrival is not None:
        drawn.arrival.order()
    if drawn.stack_dim:
        data = data.transpose(0, drawn.stack_dim)
    return Piece(data, info)


def check_stored(buffer: Any, index: torch.Tensor) -> None:
    """Raises IndexError where one of these rows, ``[K]`` or ``[K, ndim]``, is not stored; -1 is
    any."""
    storage = buffer.storage
    cells = index.reshape(len(index), -1)
    for column, limit in enumerate((storage.ledger.length, *storage.lanes)):
        check_range(cells[:, column], -1, limit)
