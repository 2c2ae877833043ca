"""Which episodes of a data set are served, and where their rows lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.datasets.opened import Published

__all__ = ["Episodes", "chosen_episodes", "rows_of"]

_PERCENT: Final = r"(?:([0-9]+(?:\.[0-9]+)?)%)?"
_FRACTION: Final = re.compile(rf"(?=.*%){_PERCENT}:{_PERCENT}(?:@([0-9]{{1,9}}))?")

Episodes = slice | Iterable[int] | torch.Tensor | Callable[[TensorDict], torch.Tensor]
"""Positions in the episode table, a slice of it, or a function that gets it and returns which."""


def chosen_episodes(
    published: Published, split: str | None, episodes: Episodes | None
) -> torch.Tensor | None:
    """Returns the positions of episodes that both arguments choose, in order; ``None`` for all.

    Args:
        published: the data set.
        split: a part that the corpus names, such as ``"train"``; a range of positions such as
            ``"0:100"``; or a range of hundredths of all episodes in a random order, ``"0%:80%"``,
            with a seed for the order behind an ``@``.
        episodes: see `Episodes`.

    Raises:
        ValueError: a name or range that is none, a position that there is not, a function that
            returns something else, or nothing is chosen.
    """
    if split is None and episodes is None:
        return None
    count = published.manifest.episodes
    keep = torch.ones(count, dtype=torch.bool)
    if split is not None:
        keep &= _mask(_of_split(published, split, count), count, "split")
    if episodes is not None:
        keep &= _mask(_of_episodes(published, episodes, count), count, "episodes")
    if not keep.any():
        raise ValueError(
            f"expected split and episodes to choose some of {count} episodes, got none with "
            f"split={split!r}"
        )
    return keep.nonzero().flatten()


def _of_split(published: Published, split: str, count: int) -> torch.Tensor:
    known = published.manifest.report.get("splits", {})
    if split in known:
        return torch.tensor(known[split], dtype=torch.int64)
    match = re.fullmatch(r"([0-9]*):([0-9]*)", split) if isinstance(split, str) else None
    if match is not None:
        first, stop = (int(part) if part else None for part in match.groups())
        return torch.arange(count)[first:stop]
    fraction = _FRACTION.fullmatch(split) if isinstance(split, str) else None
    if fraction is not None:
        return _of_fraction(fraction, split, count)
    names = f"one of {sorted(known)} or " if known else ""
    raise ValueError(f"expected split as {names}a range such as '0:100' or '0%:80%', got {split!r}")


def _of_fraction(match: re.Match[str], split: str, count: int) -> torch.Tensor:
    """Returns the positions between two hundredths of the episodes in a random order.

    Ranges that meet are disjoint, and together have every episode: both ends are rounded alike.
    """
    first, stop = Fraction(match[1] or "0"), Fraction(match[2] or "100")
    if not 0 <= first <= stop <= 100:
        raise ValueError(f"expected split as a range within '0%:100%', got {split!r}")
    # A generator whose numbers NumPy has promised never to change.
    order = np.random.RandomState(int(match[3] or 0)).permutation(count)
    begin, end = (round(count * part / 100) for part in (first, stop))
    return torch.from_numpy(order[begin:end].astype(np.int64))


def _of_episodes(published: Published, episodes: Episodes, count: int) -> torch.Tensor:
    if isinstance(episodes, slice):
        return torch.arange(count)[episodes]
    if callable(episodes):
        found = torch.as_tensor(episodes(published.episodes))
        if found.dtype != torch.bool or found.shape != (count,):
            raise ValueError(
                f"expected the function for episodes to return bool [{count}], got {found.dtype} "
                f"{list(found.shape)}"
            )
        return found.nonzero().flatten()
    given: Any = episodes if isinstance(episodes, torch.Tensor) else list(episodes)
    found = torch.as_tensor(given)
    if found.numel() and (found.dtype.is_floating_point or found.dtype == torch.bool):
        raise ValueError(f"expected episodes as positions, got {found.dtype}")
    return found.reshape(-1).to(torch.int64)


def _mask(positions: torch.Tensor, count: int, name: str) -> torch.Tensor:
    bad = positions[(positions < 0) | (positions >= count)]
    if bad.numel():
        raise ValueError(f"expected {name} as positions below {count}, got {int(bad[0])}")
    mask = torch.zeros(count, dtype=torch.bool)
    mask[positions] = True
    return mask


def rows_of(published: Published, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where the rows of episodes lie: runs, int64 ``[R]``, of first rows and of how many.

    Episodes that follow one another make one run.
    """
    if len(published.manifest.batch) > 1:
        starts, lengths = positions, torch.ones_like(positions)
    else:
        starts, lengths = (published.episodes[name][positions] for name in ("start", "length"))
    begins = torch.ones(len(starts), dtype=torch.bool)
    begins[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    first = begins.nonzero().flatten()
    stops = torch.cat([first[1:], torch.tensor([len(starts)])]) - 1
    return starts[first], starts[stops] + lengths[stops] - starts[first]
