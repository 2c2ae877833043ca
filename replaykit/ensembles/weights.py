"""How often each member is drawn: weights, and the two laws by which they become members."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.errors import NotEnoughData
from replaykit.samplers.draws import integers, uniform

__all__ = ["COUNTS", "SIZE", "checked_weights", "exact", "multinomial"]

Array = np.ndarray[Any, Any]

SIZE = "size"
"""Weights by the number of rows that the members hold at each draw."""

COUNTS = ("multinomial", "exact")

_ROUNDING = 1e-9
"""What a share of a batch may differ from a whole number and still be one: 0.8 * 5 is not 4."""


def checked_weights(p: Any, count: int) -> torch.Tensor | str | None:
    """Returns weights float64 ``[count]`` with sum 1, ``"size"``, or None for equal ones.

    Args:
        p: relative weights, one a member; "size"; or None.

    Raises:
        ValueError: negative, NaN or infinite ones, nothing but zeros, or not one a member.
    """
    if p is None:
        return None
    if isinstance(p, str):
        if p != SIZE:
            raise ValueError(f"expected p as one weight a member, {SIZE!r} or None, got {p!r}")
        return p
    weights = torch.as_tensor(p, dtype=torch.float64, device="cpu").detach()
    if weights.shape != (count,):
        raise ValueError(
            f"expected p as {count} weights, one a member, got shape {list(weights.shape)}"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(f"expected weights that are finite and not negative, got {p}")
    largest = weights.max()
    if not largest > 0:
        raise ValueError(f"expected a weight above 0, got {p}")
    weights = weights / largest  # a sum of the largest numbers there are is infinite
    return weights / weights.sum()


def multinomial(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draws members independently: int64 ``[draws]``; one of weight 0 is never among them.

    Args:
        weights: not negative, with a sum above 0; None: equal ones.
        count: number of members.
    """
    if weights is None:
        return integers(count, draws, generator)
    return _at(weights, uniform(draws, generator))


def exact(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draws each member ``draws * weight / sum`` times, rounded down or up: int64 ``[draws]``.

    What is left after rounding down goes to members at points that lie at equal distances on the
    rests, from one uniform number (systematic sampling), so that each comes up as often, on
    average, as its weight says. Nothing is drawn where nothing is left. The numbers rise.
    """
    share = np.full(count, 1.0 / count) if weights is None else weights / weights.sum()
    quota = share * draws
    times = np.floor(quota + _ROUNDING).astype(np.int64)
    left = draws - int(times.sum())
    if left > 0:
        rest = np.maximum(quota - times, 0.0)
        points = (np.arange(left) + uniform(1, generator)) / left
        np.add.at(times, _at(rest, points), 1)
    return np.repeat(np.arange(count), times)


def _at(weights: Array, points: Array) -> Array:
    """The members at points of [0, 1) of the sum of weights."""
    ends = np.cumsum(weights)
    # The last with a weight ends at the sum, whatever the product is rounded to.
    last = int(np.nonzero(weights)[0][-1])
    return np.minimum(np.searchsorted(ends, points * ends[-1], side="right"), last)


def require_any(weights: Array) -> None:
    """Raises NotEnoughData where no member has a weight."""
    if not weights.any():
        raise NotEnoughData("no member of the ensemble can be drawn: none has a row, or weight")
