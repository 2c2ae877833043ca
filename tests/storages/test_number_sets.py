"""Distinct numbers close together and far apart, beside sets of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaykit.storages.indexing import all_distinct

NUMBERS = st.one_of(
    st.lists(st.integers(0, 40), max_size=30),
    st.lists(st.integers(2**53, 2**53 + 40), max_size=30),
    st.lists(st.integers(-(2**62), 2**62), max_size=30),
)


@given(numbers=NUMBERS)
def test_number_sets_match_python_sets(numbers: list[int]):
    array = np.array(numbers, np.int64)
    assert all_distinct(array) == (len(set(numbers)) == len(numbers))


@pytest.mark.parametrize("spread", [1, 1000])
def test_number_sets_handle_many_numbers(spread: int):
    numbers = np.random.default_rng(0).permutation(100_000) * spread
    assert all_distinct(numbers)
    numbers[77] = numbers[5]
    assert not all_distinct(numbers)
