"""Draws by priority in which no record comes twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.priorities import SumSegmentTree
from replaykit.samplers.priority_table import PriorityTable

__all__ = ["drawn_distinct"]

_ROUNDS = 8


def drawn_distinct(
    table: PriorityTable, sums: SumSegmentTree, count: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns up to ``count`` elements drawn one after another from what is left, and their ``v``.

    Fewer where fewer have weight. Independent draws of which repeated ones are dropped have this
    law; where that would take long, since the rest of the weight is small, every element left gets
    a key ``e / v``, e standard exponential, and those of the lowest keys come next, in that order,
    which is the same law (Efraimidis and Spirakis 2006, "Weighted random sampling with a
    reservoir").

    Args:
        table: of the priorities.
        sums: a tree over ``v`` of the elements to draw from, with a positive sum.

    Cost: O(count * log N) if it is a small part of the weight, else O(N).
    """
    drawn = torch.empty(0, dtype=torch.int64, device=table.device)
    value = torch.empty(0, dtype=torch.float64, device=table.device)
    few = 4 * count >= table.length
    for _ in range(0 if few else _ROUNDS):
        more, its = table.draw(count, generator, False, sums)
        drawn, value = _first_of_each(torch.cat([drawn, more]), torch.cat([value, its]))
        if len(drawn) >= count:
            return drawn[:count], value[:count]
    left = sums[: table.length].to(torch.float64)
    left[drawn] = 0.0
    rest = left.nonzero()[:, 0]
    mass = left[rest]
    device = table.device if generator is None else generator.device
    uniform = torch.rand(len(rest), dtype=torch.float64, generator=generator, device=device)
    key = -torch.log1p(-uniform.to(table.device)) / mass
    order = key.argsort(stable=True)[: count - len(drawn)]
    return torch.cat([drawn, rest[order]]), torch.cat([value, mass[order]])


def _first_of_each(drawn: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements in order, each where it came first."""
    found: tuple[Any, Any] = np.unique(drawn.cpu().numpy(), return_index=True)
    first = torch.from_numpy(np.sort(found[1])).to(drawn.device)
    return drawn[first], value[first]
