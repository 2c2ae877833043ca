"""Buffers with priorities or episodes, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler
from tests.samplers.chi_square import chi_square_p

__all__ = ["follows", "law", "prioritized", "raw", "rows", "sliced", "windows_of"]

SMALLEST_P = 3e-6


def raw(thing: Any) -> list[float]:
    """Return the raw priorities of the stored records of a buffer or sampler, by slot."""
    priorities: list[float] = getattr(thing, "sampler", thing).state_dict()["_priorities"].tolist()
    return priorities


def law(priorities: Any, alpha: float, eps: float = 1e-8) -> torch.Tensor:
    """Return the probability of each record, in float64, from the formula."""
    p = torch.as_tensor(priorities, dtype=torch.float64)
    v = torch.where(p + eps > 0, (p + eps) ** alpha, 0.0)
    return v / v.sum()


def prioritized(
    priorities: Any = (),
    capacity: int | None = None,
    *,
    alpha: float = 0.7,
    beta: float = 0.9,
    storage: Any = None,
    **options: Any,
) -> Any:
    """Make a seeded buffer with as many rows, of which row i holds the number i."""
    count = len(priorities)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity or max(count, 1)) if storage is None else storage,
        sampler=PrioritizedSampler(alpha=alpha, beta=beta, **options),
        generator=torch.Generator().manual_seed(0),
    )
    if count:
        index = buffer.extend(torch.arange(count))
        buffer.update_priority(index, torch.as_tensor(priorities))
    return buffer


def follows(drawn: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Tell if draws ``[n]`` have that law, by chi-square."""
    counts = torch.bincount(drawn, minlength=len(probabilities)).to(torch.float64)
    if len(counts) > len(probabilities) or counts[probabilities == 0].any():
        return False
    possible = probabilities > 0
    expected = probabilities[possible] * len(drawn)
    enough = int(possible.sum()) == 1
    return enough or chi_square_p(counts[possible].tolist(), expected.tolist()) > SMALLEST_P


def rows(lengths: Sequence[int], *, start: int = 0, open_: bool = False) -> TensorDict:
    """Make episodes end to end: ``t`` counts rows, ``e`` episodes; the last one may be open."""
    count = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0) - 1
    done = torch.zeros(count, dtype=torch.bool)
    done[ends] = True
    if open_:
        done[-1] = False
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TensorDict(
        {
            "t": torch.arange(count) + start,
            "e": episode,
            "next": {"terminated": done, "truncated": torch.zeros_like(done), "done": done},
        },
        [count],
    )


def sliced(
    data: Any = (),
    capacity: int | None = None,
    *,
    batch_size: int | None = None,
    ndim: int = 1,
    **options: Any,
) -> Any:
    """Make a seeded buffer of slices, with given rows or episodes of given lengths."""
    written = rows(data) if isinstance(data, list) else data
    room = capacity or max(len(written) if ndim == 1 else written.numel(), 1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(room, ndim=ndim),
        sampler=SliceSampler(**options),
        generator=torch.Generator().manual_seed(0),
        batch_size=batch_size,
    )
    if len(written):
        buffer.extend(written)
    return buffer


def windows_of(batch: TensorDict) -> list[list[int]]:
    """Return the values of ``t``, window by window."""
    ids = batch["sequence_id"].tolist()
    windows: list[list[int]] = [[] for _ in range(max(ids) + 1)]
    for number, t in zip(ids, batch["t"].tolist(), strict=True):
        windows[number].append(t)
    return windows
