"""A draw of an ensemble, on its way to become a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from replaykit.buffer.elsewhere import Asked

__all__ = ["EnsembleDrawn", "Part"]


@dataclass(slots=True)
class Part:
    """What one member has drawn for a batch."""

    member: int
    draws: list[Any]


@dataclass(slots=True, eq=False)
class EnsembleDrawn:
    """A draw of an ensemble: the members of its parts, and what each of them drew.

    ``rows``: that a member is asked for, a part. ``size``: the batch size asked for. ``lent``: it
    is part of the batch of an ensemble above. ``ended``: who had ended a pass before it. ``late``:
    the batch is made when it is delivered. ``checks``: members elsewhere that could have been
    chosen, whether they are ready, and for how many rows. ``before``, ``after``: of the generator.
    ``lost``: a member elsewhere did not give its rows. ``until``: how long these are waited for.
    """

    members: list[int]
    rows: int
    size: int
    parts: list[Part]
    ran_out: bool = False
    lent: bool = False
    ended: frozenset[int] = frozenset()
    was_out: bool = False
    random: Any = field(default=None)
    late: bool = False
    checks: list[tuple[int, Asked, int]] = field(default_factory=list)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    lost: bool = False
    until: float | None = None

    def kept(self) -> EnsembleDrawn:
        """The draw alone, to be delivered later."""
        parts = [Part(part.member, [draw.kept() for draw in part.draws]) for part in self.parts]
        return EnsembleDrawn(self.members, self.rows, self.size, parts, self.ran_out)

    def wait_until(self, until: float | None) -> None:
        """Has it wait for members elsewhere until an instant of the monotonic clock."""
        self.until = until
        for part in self.parts:
            for one in part.draws:
                if isinstance(one, EnsembleDrawn):
                    one.wait_until(until)
