"""A buffer with priorities, and what its sampler knows of every record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, SliceSampler


def _raw(sampler: PrioritizedSampler) -> torch.Tensor:
    return sampler.state_dict()["_priorities"]


@pytest.fixture(scope="session")
def raw() -> Callable[[Any], list[float]]:
    """``raw(buffer_or_sampler)``: the raw priorities of the stored records, in physical order."""
    return lambda thing: _raw(getattr(thing, "sampler", thing)).tolist()


@pytest.fixture(scope="session")
def law() -> Callable[..., torch.Tensor]:
    """``law(priorities, alpha, eps)``: the probability of each, in float64, from the formula."""

    def probabilities(
        priorities: Sequence[float] | torch.Tensor, alpha: float, eps: float = 1e-8
    ) -> torch.Tensor:
        p = torch.as_tensor(priorities, dtype=torch.float64)
        v = torch.where(p + eps > 0, (p + eps) ** alpha, 0.0)
        return v / v.sum()

    return probabilities


@pytest.fixture(scope="session")
def prioritized() -> Callable[..., ReplayBuffer]:
    """``prioritized(priorities, capacity=None, alpha=0.7, beta=0.9, **sampler_options)``.

    A buffer with as many rows, row i holding the number i; seeded.
    """

    def make(
        priorities: Sequence[float] | torch.Tensor = (),
        capacity: int | None = None,
        *,
        alpha: float = 0.7,
        beta: float = 0.9,
        seed: int = 0,
        storage: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> ReplayBuffer:
        count = len(priorities)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(capacity or max(count, 1)) if storage is None else storage,
            sampler=PrioritizedSampler(alpha=alpha, beta=beta, **options),
            generator=torch.Generator().manual_seed(seed),
            batch_size=batch_size,
        )
        if count:
            index = buffer.extend(torch.arange(count))
            buffer.update_priority(index, torch.as_tensor(priorities))
        return buffer

    return make


def _chi_square_is_small(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    drawn = counts.sum()
    possible = probabilities > 0
    if counts[~possible].any():
        return False
    expected = probabilities[possible] * drawn
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal. Four and
    # a half standard deviations: one seed in 300 000 would fail by chance, and seeds are fixed.
    if freedom == 0:
        return True
    spread = (2 / (9 * freedom)) ** 0.5
    return (statistic / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4.5 * spread


@pytest.fixture(scope="session")
def follows() -> Callable[..., bool]:
    """``follows(drawn, probabilities)``: whether draws ``[n]`` have that law, by chi-square."""

    def test(drawn: torch.Tensor, probabilities: torch.Tensor) -> bool:
        counts = torch.bincount(drawn, minlength=len(probabilities)).to(torch.float64)
        return len(counts) == len(probabilities) and _chi_square_is_small(counts, probabilities)

    return test


def _rows(lengths: Sequence[int], *, start: int = 0, open_: bool = False) -> TensorDict:
    """Episodes end to end: ``t`` counts rows, ``e`` episodes; the last one may be open."""
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


@pytest.fixture(scope="session")
def rows() -> Callable[..., TensorDict]:
    """``rows(lengths, start=0, open_=False)``: terminated episodes of these lengths."""
    return _rows


@pytest.fixture(scope="session")
def sliced() -> Callable[..., ReplayBuffer]:
    """``sliced(lengths_or_data, capacity=None, batch_size=None, seed=0, **sampler_options)``."""

    def make(
        data: Any = (),
        capacity: int | None = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        ndim: int = 1,
        **options: Any,
    ) -> ReplayBuffer:
        written = _rows(data) if isinstance(data, list) else data
        room = capacity or max(len(written) if ndim == 1 else written.numel(), 1)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(room, ndim=ndim),
            sampler=SliceSampler(**options),
            generator=torch.Generator().manual_seed(seed),
            batch_size=batch_size,
        )
        if len(written):
            buffer.extend(written)
        return buffer

    return make


@pytest.fixture(scope="session")
def windows_of() -> Callable[[TensorDict], list[list[int]]]:
    """``windows_of(batch)``: the values of ``t``, window by window."""

    def apart(batch: TensorDict) -> list[list[int]]:
        ids = batch["sequence_id"].tolist()
        windows: list[list[int]] = [[] for _ in range(max(ids) + 1)]
        for number, t in zip(ids, batch["t"].tolist(), strict=True):
            windows[number].append(t)
        return windows

    return apart
