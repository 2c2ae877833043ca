"""The buffers of an ensemble, as what a choice depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from replaykit.buffer.drawing import Lent
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.elsewhere import Known, Member
from replaykit.ensembles.pairs import naming_member
from replaykit.ensembles.storage import rows_in
from replaykit.errors import NotEnoughData

__all__ = ["Buffers"]


class Buffers:
    """The buffers of an ensemble as members of a choice.

    Args:
        known: what members elsewhere have said of themselves.
        trusting: those that were not asked count as ready: they are asked beside the draws.
    """

    def __init__(
        self,
        members: Sequence[Any],
        generator: torch.Generator | None,
        known: Known,
        *,
        trusting: bool = False,
    ) -> None:
        self.members, self.generator, self.known = members, generator, known
        self.trusting = trusting

    def size(self, member: int) -> int:
        """Rows that a member holds."""
        standing = self.known.get(member)
        return rows_in(self.members[member].storage) if standing is None else standing.size

    def ready(self, member: int, rows: int) -> bool:
        """Whether a member can give that many rows now."""
        buffer = self.members[member]
        if isinstance(buffer, Member):
            standing = self.known.get(member)
            return self.trusting if standing is None else standing.ready
        if isinstance(buffer, EnsembleCore) or not buffer.sampler.consumes:
            return buffer.can_sample(rows)
        return len(buffer) >= rows  # what it gives less of fills no part

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raises the error of a member that cannot."""
        buffer = self.members[member]
        try:
            drawn = buffer._draw(rows, Lent(self.generator))
        except Exception as error:
            raise naming_member(error, member) from error
        buffer._give_back(drawn)  # it has become ready, or cannot tell before
        raise NotEnoughData(f"member {member}: expected {rows} rows, it was not ready to give them")
