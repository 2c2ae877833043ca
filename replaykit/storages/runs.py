"""Slots that follow each other, as the few runs that they are."""

from __future__ import annotations

import itertools

import torch

__all__ = ["runs_of"]


def runs_of(slots: torch.Tensor) -> list[tuple[int, int, int]] | None:
    """Splits slots into at most two rising runs ``(first slot, start, stop)``; None if there are
    more. What a ring writes is one run, or two around its end."""
    count = len(slots)
    if count == 1:
        return [(int(slots[0]), 0, 1)]
    breaks = (slots.diff() != 1).nonzero().flatten().tolist()
    if len(breaks) > 1:
        return None
    bounds = [0, *(b + 1 for b in breaks), count]
    return [(int(slots[a]), a, b) for a, b in itertools.pairwise(bounds)]
