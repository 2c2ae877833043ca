"""Which rows come before and after rows that are written, round a ring and lane by lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replaykit._compat import arange

__all__ = ["Neighbours", "neighbours"]

Picked = slice | torch.Tensor
"""Places among the elements written: a slice, or int64 ``[n]``."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of the elements of a write.

    Attributes:
        inside: pairs of places, of elements and of their followers, that are both written.
        outside: places of elements whose follower is stored and not written, int64 ``[n]``.
        before: stored elements that are not written, and whose follower is: int64 ``[m]``.
        after_before: places of those followers.
    """

    inside: list[tuple[Picked, Picked]]
    outside: torch.Tensor
    before: torch.Tensor
    after_before: Picked


def neighbours(
    elements: torch.Tensor, cells: int, total: int, stored: int, *, at_cursor: bool
) -> Neighbours:
    """Returns the neighbours of distinct elements ``[K]``, ``K >= 1``.

    Args:
        cells: how far the follower of an element is: the number of lanes.
        total: number of elements of the ring.
        stored: how many elements, from 0 on, hold a row before the write.
        at_cursor: the last elements are the newest rows; what lies behind them is the oldest rows,
            which do not follow them, and is left alone.

    Cost: O(K) for elements that go on from each other, round the ring; else O(K log K).

    Example:
        >>> import torch
        >>> from replaykit.storages.neighbours import neighbours
        >>> found = neighbours(torch.tensor([4, 0]), 1, 5, 5, at_cursor=True)
        >>> found.inside, found.before.tolist()
        ([(slice(0, 1, None), slice(1, 2, None))], [3])
    """
    count, device = len(elements), elements.device
    first = int(elements[0])
    # A run of some lanes that is longer may have followers at its own beginning.
    short = count <= total - cells or count == total
    if short and torch.equal(elements, ((arange(count) + first) % total).to(device)):
        return _of_run(elements, cells, total, stored, at_cursor)
    rising, order = elements.sort()
    after, before = (elements + cells) % total, (elements - cells) % total

    def places(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where numbers are among the elements, and which of them are."""
        at = torch.searchsorted(rising, numbers).clamp_(max=count - 1)
        return order[at], rising[at] == numbers

    at, written = places(after)
    inside = written.nonzero().flatten()
    outside = (~written & (after < stored)).nonzero().flatten()
    following = (~places(before)[1] & (before < stored)).nonzero().flatten()
    return Neighbours([(inside, at[inside])], outside, before[following], following)


def _of_run(
    elements: torch.Tensor, cells: int, total: int, stored: int, at_cursor: bool
) -> Neighbours:
    count, none = len(elements), elements[:0]
    inside: list[tuple[Picked, Picked]] = []
    if count > cells:
        inside.append((slice(0, count - cells), slice(cells, count)))
    if count == total:
        if not at_cursor:
            inside.append((slice(count - cells, count), slice(0, cells)))
        return Neighbours(inside, none, none, slice(0, 0))
    ends = min(count, cells)
    outside = none
    if not at_cursor:
        last = arange(count - ends, count).to(elements.device)
        outside = last[(elements[last] + cells) % total < stored]
    before = (elements[:ends] - cells) % total
    place = (before < stored).nonzero().flatten()
    return Neighbours(inside, outside, before[place], place)
