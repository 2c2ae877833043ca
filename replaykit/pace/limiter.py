"""The law by which inserts and samples wait for each other."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["INSERT", "SAMPLE", "RateLimiter", "checked_timeout"]

INSERT, SAMPLE = 0, 1
"""The two sides that keep each other's pace."""

_SLACK = 1e-6
"""Part of a row by which sums may be off: they are rounded."""


class RateLimiter:
    """How many rows may be inserted and sampled, given how many have been: the law of Reverb.

    With ``diff = inserts * samples_per_insert - samples``:

    - a write of n rows waits until ``diff`` with them is at most ``max_diff``. While no more than
      ``min_size_to_sample`` rows are there with them, nothing holds it up;
    - a sample of n rows waits until ``min_size_to_sample`` rows are there and ``diff`` with it is
      at least ``min_diff``.

    One insert is one row that was stored (one element, where the storage has lanes); rows that a
    writer refuses or a transform swallows are none. One sample is one record that was drawn for a
    batch that was delivered: ``batch_size`` of them, fewer where the batch is shorter; with
    ``Sequence`` those that the windows were made of. Batches made ahead count when they are
    delivered. The rows that are there are ``len(rb)``.

    It has no counts itself, those are the buffer's; several buffers may have the same one.

    Args:
        samples_per_insert: how often a row is to be sampled on average, above 0.
        min_size_to_sample: how many rows there are before the first sample, at least 1.
        error_buffer: how far ``diff`` may be from ``samples_per_insert * min_size_to_sample``, to
            either side, at least ``max(1, samples_per_insert)``; or ``(min_diff, max_diff)``.

    Raises:
        TypeError: no numbers. ValueError: numbers out of range, or a tolerance with which neither
            side could ever go on.

    A write of ``n`` rows and a sample of ``m`` can wait for each other for ever only where
    ``n * samples_per_insert + m`` is above ``max_diff - min_diff``.

    Source: Cassirer et al. 2021, "Reverb: a framework for experience replay", section 3.4.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> limiter = RateLimiter(samples_per_insert=2, min_size_to_sample=10, error_buffer=10)
        >>> limiter.min_diff, limiter.max_diff
        (10.0, 30.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), rate_limiter=limiter, batch_size=10)
        >>> _ = rb.extend(torch.arange(15))  # diff is 30: nothing more before somebody samples
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
        least = _count("min_size_to_sample", min_size_to_sample)
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
                f"samples_per_insert)), so that neither side waits for ever, got {error_buffer!r}"
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
        """Returns one by which samples wait for the first rows, and nothing waits after that.

        Example:
            >>> from replaykit import RateLimiter
            >>> RateLimiter.min_size(1000)
            RateLimiter.min_size(1000)
        """
        found = cls.__new__(cls)
        found._set(1.0, _count("min_size_to_sample", min_size_to_sample), -math.inf, math.inf)
        return found

    @classmethod
    def queue(cls, size: int) -> RateLimiter:
        """Returns one by which at most ``size`` rows wait to be sampled, each of them once.

        With ``consume_after_n_samples=1`` each row is delivered once and none is overwritten
        before; rows of a batch are drawn uniformly from those that wait.

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
        found._set(1.0, 1, 0.0, float(_count("size", size)))
        found._queue = True
        return found

    # -- the law ------------------------------------------------------------------------------

    def may_insert(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Whether ``count`` rows may be written after so many inserts and samples, where ``size``
        rows are there."""
        if size + count <= self.min_size_to_sample:
            return True
        return (inserts + count) * self.samples_per_insert - samples <= self.max_diff + _SLACK

    def may_sample(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Whether ``count`` rows may be sampled; arguments as for ``may_insert``."""
        if size < self.min_size_to_sample:
            return False
        return inserts * self.samples_per_insert - samples - count >= self.min_diff - _SLACK

    def never(self, side: int, count: int, size: int) -> str | None:
        """Says why ``count`` rows at once will always be too many; None: they will not."""
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
        """How many of ``size`` rows that are there to begin with count as inserted: as many as
        could have been written without a sample."""
        if self.may_insert(size, 0, 0, 0):
            return size
        return max(self.min_size_to_sample, int(self.max_diff / self.samples_per_insert + _SLACK))

    def check_capacity(self, capacity: int) -> None:
        """Raises ValueError where a buffer of that capacity could not keep it."""
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
    """Returns a timeout in seconds; None: without end.

    Raises:
        TypeError: no number. ValueError: negative or NaN.
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


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"expected {name} as an int, got {value!r}")
    count = int(value.__index__())
    if count < 1:
        raise ValueError(f"expected {name} of at least 1, got {value!r}")
    return count
