"""Weights, and the two laws by which they become members."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replaykit.mixture.choosing import _at, exact, multinomial
from replaykit.mixture.member_parts import checked_weights
from tests.support.refusals import refuses

# Critical values of the chi-square distribution for a probability of 0.001.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


def chi_square(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_weights_are_relative() -> None:
    largest = torch.finfo(torch.float64).max
    for p, expected in (([1, 3], [0.25, 0.75]), ([largest, largest], [0.5, 0.5])):
        weights = checked_weights(p, 2)
        assert isinstance(weights, torch.Tensor)
        assert (weights.dtype, weights.tolist()) == (torch.float64, expected)
    assert checked_weights(None, 2) is None
    assert checked_weights("size", 2) == "size"


@pytest.mark.parametrize(
    ("p", "words"),
    [
        ([-1, 2], "not negative"),
        ([math.nan, 1], "finite"),
        ([math.inf, 1], "finite"),
        ([0, 0], "above 0"),
        ([1], "2 weights"),
        ([1, 2, 3], "2 weights"),
        ([[1, 2]], "2 weights"),
        ("rows", "'size'"),
    ],
)
def test_invalid_weights_are_refused(p: Any, words: str) -> None:
    refuses(ValueError, words, checked_weights, p, 2)


@pytest.mark.pitfall("RD6")
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.0, 0.2], [1.0, 2.0, 3.0, 4.0], None])
def test_multinomial_draws_have_the_law_of_the_weights(weights: list[float] | None) -> None:
    p = None if weights is None else np.array(weights)
    draws = multinomial(p, 20_000, 4, generator())
    assert (multinomial(p, 20_000, 4, generator()) == draws).all()
    share = np.full(4, 0.25) if p is None else p / p.sum()
    found = np.bincount(draws, minlength=4)
    assert (found[share == 0] == 0).all()
    kept = share > 0
    assert chi_square(found[kept], 20_000 * share[kept]) < CRITICAL[int(kept.sum()) - 1]
    # One after the other: as independent as they are equally distributed.
    pairs = np.bincount(draws[:-1] * 4 + draws[1:], minlength=16).reshape(4, 4)
    law = np.outer(share, share) * 19_999
    assert chi_square(pairs[law > 0], law[law > 0]) < 45


def test_members_without_weight_at_either_end_are_never_drawn() -> None:
    weights = np.array([0.1, 0.2, 0.0])
    for point in (0.0, 0.5, np.nextafter(1.0, 0.0), 1.0):
        assert _at(weights, np.array([point]))[0] in (0, 1)
    assert _at(np.array([0.0, 0.0, 1.0]), np.array([0.0]))[0] == 2


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda p: sum(p) > 1e-6),
    draws=st.integers(1, 300),
    seed=st.integers(0, 5),
)
def test_exact_counts_are_the_quota_rounded_down_or_up(
    weights: list[float], draws: int, seed: int
) -> None:
    p = np.array(weights)
    found = exact(p, draws, len(p), generator(seed))
    counts = np.bincount(found, minlength=len(p))
    quota = draws * p / p.sum()
    assert len(found) == draws
    assert (np.diff(found) >= 0).all()
    assert (counts >= np.floor(quota + 1e-9)).all()
    assert (counts <= np.ceil(quota - 1e-9)).all()


@pytest.mark.parametrize(
    ("weights", "draws", "counts"),
    [
        ([0.8, 0.2], 5, [4, 1]),
        ([0.1] * 10, 10, [1] * 10),
        ([1 / 3, 2 / 3], 6, [2, 4]),
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ([0.0, 1.0], 3, [0, 3]),
        ([29, 71], 100, [29, 71]),  # 0.29 * 100 is 28.999999999999996
        (None, 8, [2, 2, 2, 2]),
    ],
)
def test_whole_quotas_are_met_without_a_random_number(
    weights: list[float] | None, draws: int, counts: list[int]
) -> None:
    random = generator()
    before = random.get_state()
    p = None if weights is None else np.array(weights)
    found = exact(p, draws, len(counts), random)
    assert np.bincount(found, minlength=len(counts)).tolist() == counts
    assert torch.equal(random.get_state(), before)


def test_exact_counts_match_the_weights_on_average() -> None:
    p, draws, times = np.array([0.55, 0.3, 0.15]), 7, 4000
    random = generator(3)
    counts = np.zeros(3)
    for _ in range(times):
        counts += np.bincount(exact(p, draws, 3, random), minlength=3)
    # Each count is one of two numbers: a coin of its own.
    rest = (draws * p) % 1
    spread = np.sqrt(times * rest * (1 - rest))
    assert (np.abs(counts - times * draws * p) < 4 * spread).all()
