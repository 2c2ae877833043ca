"""What draws must obey, checked before anything is timed."""

from __future__ import annotations

import math

import torch

from benchmarks.contender import expect

__all__ = ["expect_frequencies", "importance_weights"]


def expect_frequencies(counts: torch.Tensor, shares: torch.Tensor) -> None:
    """Raises Mismatch where counts of independent draws are not of that law.

    Pearson's chi-square against a limit that a right law exceeds less than once in a million runs
    (its normal approximation by Wilson and Hilferty, 4.9 standard deviations).
    """
    expected = counts.sum() * shares.double() / shares.double().sum()
    found = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    spread = 2 / (9 * degrees)
    limit = degrees * (1 - spread + 4.9 * math.sqrt(spread)) ** 3
    expect(found <= limit, f"frequencies are not of the law: chi-square {found:.0f} > {limit:.0f}")


def importance_weights(
    priorities: torch.Tensor, index: torch.Tensor, *, alpha: float, beta: float, eps: float
) -> torch.Tensor:
    """Returns ``(v_i / min v) ** -beta`` with ``v = (p + eps) ** alpha``, directly from all p."""
    values = (priorities.double() + eps) ** alpha
    return (values[index] / values.min()) ** -beta
