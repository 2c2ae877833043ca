"""A rate limiter behind Ray: who has to wait holds up nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from replaykit import LazyTensorStorage, RateLimiter
from replaykit.errors import RateLimiterTimeout
from tests.conftest import make_rows
from tests.ray_cluster import RAY_MARKS

pytestmark = RAY_MARKS


def test_samples_and_writes_wait_for_each_other_in_the_actor(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 8 rows wait to be sampled, each of them once; batches have 4."""
    rb = make(
        storage=lambda: LazyTensorStorage(100), batch_size=4, rate_limiter=RateLimiter.queue(8)
    )
    early = [rb.sample_async() for _ in range(3)]
    with pytest.raises(RateLimiterTimeout):
        rb.sample(timeout=0.01)
    assert len(rb) == 0  # answered while they wait
    assert not any(batch.done() for batch in early)
    rb.extend(make_rows(0, 4))
    until = time.monotonic() + 60
    while sum(batch.done() for batch in early) < 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert rb.run(lambda buffer: buffer.stats()["samples"]) == 4

    writes = [rb.extend_async(make_rows(4 + 4 * n, 4)) for n in range(6)]
    assert [batch.result().shape for batch in early] == [(4,)] * 3
    for _ in range(2):
        assert rb.sample(timeout=60).shape == (4,)
    places = [write.result(timeout=60).tolist() for write in writes]
    assert places == [list(range(4 + 4 * n, 8 + 4 * n)) for n in range(6)]
    stats = rb.stats()
    assert (stats["inserts"], stats["samples"]) == (28, 20)
    assert rb["id"].tolist() == list(range(28))
    handle = rb.client(prefetch=2)
    assert handle.sample(timeout=60).shape == (4,)
    with pytest.raises(RateLimiterTimeout):
        _repeat(2, lambda: handle.sample(timeout=0.5))
    gathering = rb.client(write_rows=8, write_seconds=60)
    gathering.add(make_rows(28, 1)[0])
    gathering.cut()  # after the row, which goes by another way
    assert rb.run(lambda buffer: buffer.episodes.lengths.tolist())[-2:] == [3, 2]
    for start in (29, 33, 37):  # one of the three that wait is served, whichever it is
        rb.extend(make_rows(start, 4 if start > 29 else 3))
        assert handle.sample(timeout=60).shape == (4,)
    with pytest.raises(RateLimiterTimeout):
        _repeat(5, lambda: rb.extend(make_rows(40, 8), timeout=0.5))
    monkeypatch.setattr("replaykit.distributed.ray_buffer._SETTLING_SECONDS", 0.1)
    rb.extend_async(make_rows(48, 8))
    with pytest.raises(RuntimeError, match="wait for samples"):
        rb.close()


def _repeat(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()
