"""Least, largest, mean and spread of numbers: against exact sums, and core against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from replaykit import native
from replaykit.native import MOST_MOMENTS, moments
from tests.native import reference

DTYPES = [
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
]  # fmt: skip
LENGTHS = [1, 2, 15, 16, 17, 33, 1000, 5001, MOST_MOMENTS]


def _draw(dtype: str, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return (draw.normal(size=count) * 10 ** draw.uniform(-3, 3) + 5).astype(dtype)
    limits = np.iinfo(dtype)
    return draw.integers(limits.min, limits.max, count, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_equal_exact_sums(dtype):
    for count in LENGTHS:
        values = _draw(dtype, count, count)
        found = moments(values)
        numbers = [float(value) for value in values]
        mean = math.fsum(numbers) / count
        squares = math.fsum((number - mean) ** 2 for number in numbers)
        assert found[:3] == (count, min(values.tolist()), max(values.tolist()))
        assert found[3] == pytest.approx(mean, rel=1e-13, abs=1e-13 * max(map(abs, numbers)))
        assert found[4] == pytest.approx(squares, rel=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_core_and_numpy_find_the_same_bits(dtype):
    for count in [*LENGTHS, 0]:
        values = _draw(dtype, count, count)
        if dtype.startswith("float"):
            values[::7] = np.nan
            values[3::11] = -0.0
        ours, theirs = native.core.moments(values), reference.moments(values)
        assert ours[0] == theirs[0]
        if ours[0]:
            assert np.array(ours[1:], object).tolist() == np.array(theirs[1:], object).tolist()
            assert [type(part) for part in ours] == [type(part) for part in theirs]


@pytest.mark.parametrize("found_by", [moments, reference.moments])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_skip_nan_and_count_infinity(dtype, found_by):
    values = np.array([np.nan, 2.0, np.nan, -1.0, 5.0], dtype)
    assert found_by(values) == (3, -1.0, 5.0, 2.0, 18.0)
    assert found_by(np.full(100, np.nan, dtype))[0] == 0
    count, least, largest, mean, squares = found_by(np.array([1.0, np.inf, np.nan], dtype))
    assert (count, least, largest, mean) == (2, 1.0, np.inf, np.inf)
    assert math.isnan(squares)
    zeros = found_by(np.array([-0.0, -0.0], dtype))
    assert [math.copysign(1, part) for part in zeros[1:]] == [1.0] * 4


def test_moments_accept_strided_arrays():
    assert moments(np.broadcast_to(np.float32(3), 100)) == (100, 3.0, 3.0, 3.0, 0.0)
    assert moments(np.arange(10.0)[::-3]) == (4, 0.0, 9.0, 4.5, 45.0)


def test_core_refuses_too_many_values_and_complex_numbers():
    with pytest.raises(ValueError, match="65536"):
        native.core.moments(np.zeros(MOST_MOMENTS + 1, np.uint8))
    with pytest.raises(TypeError, match="expected integers"):
        native.core.moments(np.zeros(3, np.complex64))
