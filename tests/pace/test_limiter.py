"""The law of a RateLimiter, against counts of single rows as Reverb states it."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaykit import RateLimiter
from replaykit.pace import INSERT, SAMPLE, checked_timeout
from tests.support.refusals import refuses


@st.composite
def laws(draw: Any) -> tuple[int, int, int]:
    ratio, least = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    return ratio, least, draw(st.integers(max(1, ratio), 60))


@given(laws(), st.integers(0, 200), st.integers(0, 800), st.integers(0, 50), st.integers(1, 40))
def test_limiter_equals_the_law_of_reverb(
    law: tuple[int, int, int], inserts: int, samples: int, size: int, count: int
) -> None:
    """Source: reverb/cc/rate_limiter.cc, ``CanInsert`` and ``CanSample``, in whole numbers."""
    ratio, least, error = law
    limiter = RateLimiter(ratio, least, error)
    lowest, highest = ratio * least - error, ratio * least + error
    may_insert = size + count <= least or (inserts + count) * ratio - samples <= highest
    may_sample = size >= least and inserts * ratio - samples - count >= lowest
    assert limiter.may_insert(count, inserts, samples, size) is may_insert
    assert limiter.may_sample(count, inserts, samples, size) is may_sample


@given(laws(), st.lists(st.booleans(), max_size=200))
def test_one_side_may_always_continue(law: tuple[int, int, int], turns: list[bool]) -> None:
    """Row by row, whoever comes next: one of the two may always go on."""
    limiter = RateLimiter(*law)
    inserts = samples = 0
    for first in turns:
        may = {
            INSERT: limiter.may_insert(1, inserts, samples, inserts),
            SAMPLE: limiter.may_sample(1, inserts, samples, inserts),
        }
        assert any(may.values())
        side = INSERT if (may[INSERT] and first) or not may[SAMPLE] else SAMPLE
        inserts, samples = inserts + (side == INSERT), samples + (side == SAMPLE)


def test_min_size_queue_and_error_range_limit_as_documented() -> None:
    first = RateLimiter.min_size(5)
    assert not first.may_sample(1, 100, 0, 4)
    assert first.may_sample(10**9, 5, 0, 5)
    assert first.may_insert(10**9, 5, 0, 5)
    line = RateLimiter.queue(3)
    assert [line.may_insert(1, n, 0, n) for n in range(5)] == [True, True, True, False, False]
    assert [line.may_sample(1, 3, n, 3 - n) for n in range(4)] == [True, True, True, False]
    asked = RateLimiter(2.5, 4, (1, 30))
    assert (asked.min_diff, asked.max_diff) == (1, 30)


def test_rounded_decimal_bounds_block_no_call() -> None:
    """0.1 * 3 is above 0.3: sums of rounded numbers hold up nobody."""
    limiter = RateLimiter(0.1, 10, (0.3, 2.5))
    assert limiter.may_insert(15, 10, 0, 99)
    assert limiter.may_sample(1, 13, 0, 99)  # 1.3 - 1 is below 0.3


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((0, 1, 5), ValueError, "samples_per_insert above 0"),
        ((math.nan, 1, 5), ValueError, "above 0"),
        ((math.inf, 1, 5), ValueError, "above 0"),
        (("2", 1, 5), TypeError, "expected a number"),
        ((True, 1, 5), TypeError, "expected a number"),
        ((1, 0, 5), ValueError, "at least 1"),
        ((1, 1.5, 5), TypeError, "as an int"),
        ((1, True, 5), TypeError, "as an int"),
        ((4, 1, 3), ValueError, "room for 8"),
        ((1, 1, math.nan), ValueError, "room for 2"),
        ((1, 10, (11, 20)), ValueError, "between min_diff and max_diff"),
        ((1, 10, (1, 2, 3)), ValueError, "min_diff, max_diff"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, error: type[Exception], said: str) -> None:
    refuses(error, said, RateLimiter, *arguments)
    refuses(ValueError, "at least 1", RateLimiter.queue, 0)
    refuses(TypeError, "as an int", RateLimiter.min_size, "3")


@given(laws(), st.integers(1, 300), st.integers(0, 40))
def test_never_refuses_exactly_the_counts_that_cannot_fit(
    law: tuple[int, int, int], count: int, size: int
) -> None:
    """A row count is refused exactly where no state that can be reached admits it."""
    limiter = RateLimiter(*law)
    # Diffs can be any whole number between the bounds where rows come one by one.
    ratio, least, error = law
    fits = count <= 2 * error
    assert (limiter.never(SAMPLE, count, size) is None) is fits
    fits = count * ratio <= 2 * error or size + count <= least
    assert (limiter.never(INSERT, count, size) is None) is fits


@given(laws(), st.integers(0, 500))
def test_rows_to_begin_with_count_as_far_as_they_could_have_been_written(
    law: tuple[int, int, int], size: int
) -> None:
    limiter = RateLimiter(*law)
    written = 0
    while written < size and limiter.may_insert(1, written, 0, written):
        written += 1
    assert limiter.counted(size) == written


def test_check_capacity_refuses_too_small_buffers() -> None:
    RateLimiter.min_size(5).check_capacity(5)
    refuses(ValueError, "nothing could ever be sampled", RateLimiter.min_size(6).check_capacity, 5)
    with pytest.raises(ValueError, match="overwritten before they are sampled"):
        RateLimiter.queue(6).check_capacity(5)


def test_limiters_compare_hash_and_pickle_by_value() -> None:
    for limiter in (RateLimiter(2, 5, 10), RateLimiter.queue(4), RateLimiter.min_size(3)):
        copy = pickle.loads(pickle.dumps(limiter))
        assert (copy, hash(copy), repr(copy)) == (limiter, hash(limiter), repr(limiter))
    assert RateLimiter.queue(4) != RateLimiter.queue(5)
    assert eval(repr(RateLimiter(2, 5, 10)), {"RateLimiter": RateLimiter}) == RateLimiter(2, 5, 10)


def test_invalid_timeouts_are_refused() -> None:
    assert [checked_timeout(given) for given in (None, math.inf, 0, 2)] == [None, None, 0.0, 2.0]
    for seconds, error in ((-1, ValueError), (math.nan, ValueError), ("1", TypeError)):
        refuses(error, "timeout", checked_timeout, seconds)
