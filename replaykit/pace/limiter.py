"""Define the rule by which inserts and samples wait for each other."""

from __future__ import annotations

import math
from typing import Any

from replaykit.keywords import whole_number

INSERT, SAMPLE = 0, 1
"""Numbers of the two sides, which wait for each other."""

_SLACK = 1e-6
"""Tolerance for rounding of sums, as a fraction of a row."""


class RateLimiter:
    """Bounds on the numbers of inserted and sampled rows, as in Reverb.

    The rules use ``diff = inserts * samples_per_insert - samples``:

    - A write of n rows waits until ``diff``, with these rows included, is at most ``max_diff``. It
      does not wait if at most ``min_size_to_sample`` rows, including these, are stored.
    - A sample of n rows waits until ``min_size_to_sample`` rows are stored, and ``diff``, with the
      sample included, is at least ``min_diff``.

    One insert is one stored row; with lanes, each lane's row counts. Rows that a writer refuses or
    a transform drops do not count. One sample is one row drawn for a delivered batch. A batch thus
    counts as ``batch_size`` samples, or as fewer if it is shorter. With ``Sequence``, the anchors
    of the windows count. Prefetched batches count when they are delivered. The number of stored
    rows is ``len(rb)``.

    A rate limiter has no counts, because each buffer counts its own rows. Several buffers may use
    the same rate limiter.

    Args:
        samples_per_insert: average number of samples of a row, above 0.
        min_size_to_sample: number of stored rows before the first sample, at least 1.
        error_buffer: the largest allowed distance of ``diff`` from ``samples_per_insert *
            min_size_to_sample``, in either direction. It is at least ``max(1,
            samples_per_insert)``. Or a pair ``(min_diff, max_diff)``.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is out of range, or writes and samples could wait for each other
            forever.

    A write of ``n`` rows and a sample of ``m`` rows can wait for each other forever only if ``n *
    samples_per_insert + m`` is above ``max_diff - min_diff``.

    Source: Cassirer et al. 2021, "Reverb: a framework for experience replay", section 3.4.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> limiter = RateLimiter(samples_per_insert=2, min_size_to_sample=10, error_buffer=10)
        >>> limiter.min_diff, limiter.max_diff
        (10.0, 30.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), rate_limiter=limiter, batch_size=10)
        >>> _ = rb.extend(torch.arange(15))  # diff is 30: no more inserts before a sample
        >>> rb.add(torch.tensor(15), timeout=0)
        Traceback (most recent call last):
        replaykit.errors.RateLimiterTimeout: an insert of 1 row waited 0 s for samples: ...
        >>> _ = rb.sample()
        >>> rb.add(torch.tensor(15), timeout=0)
        15
        >>> rb.stats()["inserts"], rb.stats()["samples"]
        (16, 10)
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | tuple[float, float],
    ) -> None:
        ratio = _number("samples_per_insert", samples_per_insert)
        if not 0 < ratio < math.inf:
            raise ValueError(f"expected samples_per_insert above 0, got {samples_per_insert!r}")
        least = whole_number("min_size_to_sample", min_size_to_sample, 1)
        middle = ratio * least
        if isinstance(error_buffer, (tuple, list)):
            if len(error_buffer) != 2:
                raise ValueError(f"expected (min_diff, max_diff), got {error_buffer!r}")
            lowest, highest = (_number("error_buffer", bound) for bound in error_buffer)
        else:
            error = _number("error_buffer", error_buffer)
            lowest, highest = middle - error, middle + error
        need = 2 * max(1.0, ratio)
        if not highest - lowest >= need:
            raise ValueError(
                f"expected an error_buffer that leaves room for {need:g} (2 * max(1, "
                f"samples_per_insert)), so that neither side waits forever, got {error_buffer!r}"
            )
        if not lowest <= middle <= highest:
            raise ValueError(
                "expected samples_per_insert * min_size_to_sample between min_diff and max_diff, "
                f"got {middle:g} and {error_buffer!r}"
            )
        self._set(ratio, least, lowest, highest)

    def _set(self, ratio: float, least: int, lowest: float, highest: float) -> None:
        self.samples_per_insert, self.min_size_to_sample = ratio, least
        self.min_diff, self.max_diff = lowest, highest
        self._queue = False

    @classmethod
    def min_size(cls, min_size_to_sample: int) -> RateLimiter:
        """Return a rate limiter that makes samples wait only for the first rows.

        Example:
            >>> from replaykit import RateLimiter
            >>> RateLimiter.min_size(1000)
            RateLimiter.min_size(1000)
        """
        found = cls.__new__(cls)
        found._set(
            1.0, whole_number("min_size_to_sample", min_size_to_sample, 1), -math.inf, math.inf
        )
        return found

    @classmethod
    def queue(cls, size: int) -> RateLimiter:
        """Return a rate limiter for a queue of at most ``size`` rows, each sampled once.

        With ``consume_after_n_samples=1`` each row is delivered once, and is not overwritten
        before. A batch is drawn uniformly from the rows in the queue.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), rate_limiter=RateLimiter.queue(4),
            ...                   consume_after_n_samples=1)
            >>> _ = rb.extend(torch.arange(4))
            >>> first = rb.sample(3)
            >>> _ = rb.extend(torch.arange(4, 7), timeout=0)
            >>> sorted(torch.cat([first, rb.sample(4)]).tolist())
            [0, 1, 2, 3, 4, 5, 6]
        """
        found = cls.__new__(cls)
        found._set(1.0, 1, 0.0, float(whole_number("size", size, 1)))
        found._queue = True
        return found

    # -- the law ------------------------------------------------------------------------------

    def may_insert(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Return whether ``count`` rows may be written after ``inserts`` and ``samples``.

        ``size`` is the number of rows that are stored now.
        """
        if size + count <= self.min_size_to_sample:
            return True
        return (inserts + count) * self.samples_per_insert - samples <= self.max_diff + _SLACK

    def may_sample(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Return whether ``count`` rows may be sampled; arguments as for ``may_insert``."""
        if size < self.min_size_to_sample:
            return False
        return inserts * self.samples_per_insert - samples - count >= self.min_diff - _SLACK

    def never(self, side: int, count: int, size: int) -> str | None:
        """Return the reason why ``count`` rows are always too many; None if they are not."""
        room = self.max_diff - self.min_diff + _SLACK
        if side == SAMPLE:
            if count <= room:
                return None
            return f"expected samples of at most {int(room)} rows at once, got {count}"
        if count * self.samples_per_insert <= room or size + count <= self.min_size_to_sample:
            return None
        most = int(room / self.samples_per_insert)
        return f"expected writes of at most {most} rows at once, got {count}"

    def counted(self, size: int) -> int:
        """Return how many of ``size`` initial rows count as inserted.

        The result is at most the count of rows that a buffer can write before its first sample.
        """
        if self.may_insert(size, 0, 0, 0):
            return size
        return max(self.min_size_to_sample, int(self.max_diff / self.samples_per_insert + _SLACK))

    def check_capacity(self, capacity: int) -> None:
        """Raise ValueError if a buffer of this capacity cannot follow this rule."""
        if self.min_size_to_sample > capacity:
            raise ValueError(
                f"expected min_size_to_sample of at most the capacity of {capacity}, got "
                f"{self.min_size_to_sample}: nothing could ever be sampled"
            )
        if self._queue and self.max_diff > capacity:
            raise ValueError(
                f"expected a queue of at most the capacity of {capacity}, got {self.max_diff:g}: "
                "rows would be overwritten before they are sampled"
            )

    # -- as a value ---------------------------------------------------------------------------

    def _values(self) -> tuple[Any, ...]:
        return self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RateLimiter) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        if self._queue:
            return f"RateLimiter.queue({int(self.max_diff)})"
        if self.max_diff == math.inf:
            return f"RateLimiter.min_size({self.min_size_to_sample})"
        return (
            f"RateLimiter(samples_per_insert={self.samples_per_insert:g}, "
            f"min_size_to_sample={self.min_size_to_sample}, "
            f"error_buffer=({self.min_diff:g}, {self.max_diff:g}))"
        )


def checked_timeout(timeout: object) -> float | None:
    """Return a timeout in seconds; None means no limit.

    Raises:
        TypeError: the timeout is not a number.
        ValueError: the timeout is negative or NaN.
    """
    if timeout is None:
        return None
    seconds = _number("timeout", timeout)
    if not seconds >= 0:
        raise ValueError(f"expected a timeout of at least 0 seconds, got {timeout!r}")
    return None if seconds == math.inf else seconds


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"expected {name} as a number, got {value!r}")
    return float(value)
