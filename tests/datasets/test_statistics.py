"""Statistics of columns: exact in what can be said, whatever the size of the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from replaykit.datasets.engine.statistics import Statistics


def of(*blocks: np.ndarray) -> dict[str, object]:
    found = Statistics()
    for block in blocks:
        found.add(block)
    return found.to_json()


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)])
def test_mean_is_exact_when_the_sum_overflows(signs):
    blocks = [np.full(70_000, sign * 1.5e308) for sign in signs]
    found = of(*blocks)
    assert found["mean"] == pytest.approx(sum(signs) / 2 * 1.5e308, rel=1e-12, abs=1e294)
    assert found["min"] == min(signs) * 1.5e308
    assert found["max"] == max(signs) * 1.5e308


def test_infinities_leave_no_mean():
    assert of(np.array([1.0, math.inf]))["mean"] is None
    assert of(np.array([-math.inf, math.inf]), np.ones(3))["mean"] is None


def test_numbers_of_usual_size_are_counted_as_before():
    draw = np.random.default_rng(3)
    blocks = [draw.normal(3, 2, 1000), draw.normal(-1, 1, 77)]
    every, found = np.concatenate(blocks), of(*blocks)
    assert found["mean"] == pytest.approx(every.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(every.std(), rel=1e-12)


def test_nan_of_complex_numbers_are_counted():
    block = np.array([1 + 2j, complex(math.nan, 0), complex(0, math.nan)], np.complex64)
    assert of(block, block[:2]) == {"min": None, "max": None, "mean": None, "std": None, "nan": 3}
