"""How a buffer's writes and samples keep the pace that its rate limiter sets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sized
from typing import Any

import numpy as np
import torch

from replaykit._compat import is_tensordict
from replaykit.pace import INSERT, SAMPLE, Pace, RateLimiter, Ticket, checked_timeout
from replaykit.storages import Storage
from replaykit.structure import flatten

__all__ = ["Pacing", "checked_limiter", "rows_given", "rows_of", "rows_stored"]

_FREE: contextlib.AbstractContextManager[Ticket | None] = contextlib.nullcontext()


class Pacing:
    """Tickets of calls that may have to wait; None where nothing makes them."""

    _rate_limiter: RateLimiter | None = None
    _pace: Pace | None = None

    def _new_pace(self, storage: Storage, *, shared: bool) -> Pace | None:
        """Makes the counts of a buffer over a storage; ValueError where it cannot keep the pace."""
        if self._rate_limiter is None:
            return None
        self._rate_limiter.check_capacity(storage.max_size)
        return Pace(self._rate_limiter, storage.recovery.home.folder if shared else None)

    def _insert_ticket(
        self, timeout: float | None
    ) -> contextlib.AbstractContextManager[Ticket | None]:
        return self._ticket(INSERT, timeout)

    def _sample_ticket(
        self, timeout: float | None
    ) -> contextlib.AbstractContextManager[Ticket | None]:
        return self._ticket(SAMPLE, timeout)

    def _ticket(
        self, side: int, timeout: float | None
    ) -> contextlib.AbstractContextManager[Ticket | None]:
        if timeout is not None:
            timeout = checked_timeout(timeout)
        return _FREE if self._pace is None else self._pace.ticket(side, timeout)

    def _pace_stats(self) -> dict[str, Any]:
        if self._rate_limiter is None:
            return {}
        pace = Pace(self._rate_limiter) if self._pace is None else self._pace
        return pace.stats()

    def _size(self) -> int:
        return len(self)  # type: ignore[arg-type]


def checked_limiter(limiter: object) -> RateLimiter | None:
    """Returns what was given as ``rate_limiter``; TypeError where it is none."""
    if limiter is None or isinstance(limiter, RateLimiter):
        return limiter
    raise TypeError(f"expected rate_limiter as a RateLimiter, got {type(limiter).__name__}")


def rows_of(rows: Any) -> int:
    """How many elements there are in prepared rows."""
    batch = getattr(rows, "batch", None)
    return len(rows) if batch is None else math.prod(batch)


def rows_stored(index: torch.Tensor) -> int:
    """How many of the rows at an index that a write gave are stored."""
    return len(index) if index.ndim > 1 else int(np.count_nonzero(index.numpy() >= 0))


def rows_given(data: Any, ndim: int, *, single: bool) -> int:
    """How many elements there seem to be in data that no transform has seen yet.

    ``single``: a batch of one row.
    """
    if is_tensordict(data) or hasattr(data, "batch_size"):
        shape = tuple(data.batch_size)
    elif isinstance(data, torch.Tensor):
        shape = tuple(data.shape)
    elif isinstance(data, list):
        if not data:
            return 0
        return len(data) * (1 if ndim == 1 else rows_given(data[0], ndim - 1, single=False))
    else:
        try:
            leaves = flatten(data, 0)[1]
        except TypeError:
            return 1 if single or not isinstance(data, Sized) else len(data)
        return max((rows_given(leaf, ndim, single=single) for leaf in leaves.values()), default=0)
    return math.prod(shape[:ndim]) if shape else 1
