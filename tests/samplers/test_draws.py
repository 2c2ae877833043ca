"""How likely windows are, exactly, and how they are drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.episodes import CountLaw
from replaykit.samplers.window_measures import (
    MEASURES,
    Anchors,
    iid,
    stratified,
    without_replacement,
)
from tests.samplers.building import follows, rows


def _anchors(
    rows: Any, measure: str, length: int = 3, *, ndim: int = 1, newest: int | None = None
) -> Anchors:
    rb = ReplayBuffer(storage=LazyTensorStorage(rows.numel(), ndim=ndim))
    rb.extend(rows)
    return MEASURES[measure](rb.storage.episodes, CountLaw.strict(length), newest)


def _starts(found: Any) -> list[tuple[int, int]]:
    return list(zip((found.base + found.rest).tolist(), found.lane.tolist(), strict=True))


def _exact(anchors: Anchors, parts: int) -> dict[tuple[int, int], float]:
    """Probabilities of windows, by counting which one belongs to each of many equal parts."""
    counts = Counter(_starts(anchors.at((np.arange(parts) + 0.5) / parts)))
    return {start: count / parts for start, count in counts.items()}


def _lanes(per_lane: list[list[int]]) -> TensorDict:
    return torch.stack([rows(lengths) for lengths in per_lane], 0)


@pytest.mark.parametrize(
    ("measure", "short", "other", "parts"),
    [
        ("window", 1 / 8, 1 / 8, 8),
        ("transition", 1 / 4, 3 / 28, 28),
        ("trajectory", 1 / 2, 1 / 14, 14),
        ("lane", 1 / 8, 1 / 8, 8),
    ],
)
def test_laws_of_episodes_of_three_and_nine_rows(
    measure: str, short: float, other: float, parts: int
) -> None:
    anchors = _anchors(rows([3, 9]), measure)
    law = _exact(anchors, 100 * parts)
    assert law == pytest.approx({(0, 0): short, **{(s, 0): other for s in range(3, 10)}})
    mass = anchors.mass(anchors.numbered(np.arange(8)))
    assert (mass / mass.sum()).tolist() == pytest.approx([short, *[other] * 7])


def test_lanes_are_equally_likely_despite_unequal_content() -> None:
    data = _lanes([[9, 1], [2, 2, 2, 2, 2], [5, 5]])
    law = _exact(_anchors(data, "lane", ndim=2), 4200)
    expected = {(s, 0): 1 / 14 for s in range(7)}
    expected |= {(s, 2): 1 / 12 for s in (0, 1, 2, 5, 6, 7)}
    assert law == pytest.approx(expected)


def test_too_short_episodes_have_no_share() -> None:
    anchors = _anchors(rows([2, 4, 1, 6]), "transition")
    assert _exact(anchors, 3000) == pytest.approx(
        {**{(s, 0): 0.4 / 2 for s in (2, 3)}, **{(s, 0): 0.6 / 4 for s in range(7, 11)}}
    )


@pytest.mark.parametrize("measure", ["window", "trajectory", "transition", "lane"])
def test_newest_windows_of_every_lane(measure: str) -> None:
    data = _lanes([[6, 4], [4, 6]])
    anchors = _anchors(data, measure, ndim=2, newest=3)
    law = _exact(anchors, 3 * 5 * 8 * 100)
    # Lane 0 has windows 0..3 and 6, 7; lane 1 has 0, 1 and 4..7.
    window = dict.fromkeys([(3, 0), (6, 0), (7, 0), (5, 1), (6, 1), (7, 1)], 1 / 6)
    trajectory = {(3, 0): 1 / 3, (6, 0): 1 / 6, (7, 0): 1 / 6}
    trajectory |= {(s, 1): 1 / 9 for s in (5, 6, 7)}
    transition = {(3, 0): 6 / 16, (6, 0): 2 / 16, (7, 0): 2 / 16}
    transition |= {(s, 1): 2 / 16 for s in (5, 6, 7)}
    expected = {"window": window, "lane": window, "trajectory": trajectory}
    assert law == pytest.approx(expected.get(measure, transition), abs=1e-3)
    mass = anchors.mass(anchors.numbered(np.arange(anchors.count)))
    assert len(mass) == 6


@pytest.mark.parametrize("measure", MEASURES)
def test_independent_draws_have_the_law(measure: str) -> None:
    anchors = _anchors(rows([3, 9, 5]), measure)
    every = anchors.numbered(np.arange(anchors.count))
    number = {start: i for i, start in enumerate(_starts(every))}
    found = iid(anchors, 30_000, torch.Generator().manual_seed(3))
    drawn = torch.tensor([number[start] for start in _starts(found)])
    mass = torch.from_numpy(anchors.mass(every))
    assert follows(drawn, mass / mass.sum())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_stratified_counts_are_those_of_the_law(measure: str, count: int) -> None:
    anchors = _anchors(rows([3, 9, 5, 2]), measure)
    every = anchors.numbered(np.arange(anchors.count))
    mass = anchors.mass(every) / anchors.mass(every).sum()
    counts = Counter(_starts(stratified(anchors, count, torch.Generator().manual_seed(0))))
    for start, share in zip(_starts(every), mass, strict=True):
        assert abs(counts[start] - count * share) < 2


def test_lanes_take_turns() -> None:
    data = _lanes([[8], [2] * 4, [4, 4], [5, 3]])
    anchors = _anchors(data, "lane", ndim=2)
    seen: Counter[int] = Counter()
    for seed in range(200):
        found = stratified(anchors, 11, torch.Generator().manual_seed(seed))
        lanes = found.lane.tolist()
        assert lanes[:9] == [0, 2, 3] * 3
        assert len(lanes[9:]) == 2
        assert lanes[9:] == sorted(set(lanes[9:]))
        seen.update(lanes[9:])
        # In lane 0 the i-th of m draws lies in the i-th of m parts of its six windows.
        starts = (found.base + found.rest)[found.lane == 0]
        m = len(starts)
        assert all(int(6 * i / m) <= s <= 6 * (i + 1) / m for i, s in enumerate(starts))
    assert set(seen) == {0, 2, 3}
    assert all(100 < count < 165 for count in seen.values())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("lengths", [[3, 5, 4], [3] * 2 + [40]])
def test_no_window_twice_and_all_in_the_end(measure: str, lengths: list[int]) -> None:
    anchors = _anchors(rows(lengths), measure)
    for count in range(1, anchors.count + 1):
        found = without_replacement(anchors, count, torch.Generator().manual_seed(count))
        assert len(set(_starts(found))) == len(found.base) == count


def _successive(mass: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """Probability of every order of ``count`` successive draws from what is left."""
    law = {}
    for order in itertools.permutations(range(len(mass)), count):
        left, probability = mass.sum(), 1.0
        for item in order:
            probability *= mass[item] / left
            left -= mass[item]
        law[order] = probability
    return law


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("lengths", "count"), [([3, 5], 2), ([3, 5], 3), ([3, 10], 2), ([3, 4, 12], 2)]
)
def test_successive_draws_have_the_law(
    measure: str,
    lengths: list[int],
    count: int,
) -> None:
    """By keys where many are drawn, by dropping repeats where few are."""
    anchors = _anchors(rows(lengths), measure)
    every = anchors.numbered(np.arange(anchors.count))
    law = _successive(anchors.mass(every), count)
    number = {start: i for i, start in enumerate(_starts(every))}
    order = {drawn: i for i, drawn in enumerate(law)}
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2000):
        starts = _starts(without_replacement(anchors, count, generator))
        found.append(order[tuple(number[start] for start in starts)])
    assert follows(torch.tensor(found), torch.tensor(list(law.values())))


def test_draw_without_replacement_ends_with_one_dominant_window() -> None:
    """Of 80 windows one has half of the mass; asking for 19 redraws it most of the time."""
    anchors = _anchors(rows([3, 81]), "trajectory")
    for seed in range(20):
        found = without_replacement(anchors, 19, torch.Generator().manual_seed(seed))
        assert len(set(_starts(found))) == 19
