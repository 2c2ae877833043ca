"""How likely counts are under a law."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["chi_square_p"]


def chi_square_p(counts: Sequence[float], expected: Sequence[float] | None = None) -> float:
    """Probability of a chi-square at least as large as that of these counts; without ``expected``
    each is as likely."""
    found = torch.tensor(counts, dtype=torch.float64)
    if expected is None:
        wanted = found.mean().expand(len(found))
    else:
        wanted = torch.tensor(expected, dtype=torch.float64)
    assert abs(float(found.sum() - wanted.sum())) < 1e-6 * float(found.sum())
    statistic = ((found - wanted) ** 2 / wanted).sum()
    free = torch.tensor((len(found) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, statistic / 2))
