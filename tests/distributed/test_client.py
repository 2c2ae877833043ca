"""What a handle does by itself, beside an actor that needs no Ray."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
)
from replaykit.errors import RateLimiterTimeout
from tests.conftest import make_rows
from tests.distributed.stand_in import Actor, client_of, stand_in
from tests.support.refusals import refuses


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def test_a_sampler_that_uses_rows_up_stops_handles_that_ask_ahead() -> None:
    """Also one that was set later, for samples and for iteration."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2)
    plain, ahead = client_of(actor), client_of(actor, prefetch=2)
    plain.extend(make_rows(0, 10))
    assert ahead.sample().shape == (2,)
    plain.set_sampler(ConsumingSampler())
    refuses(ValueError, r"prefetch.*ConsumingSampler", client_of, actor, prefetch=2)
    left = [ahead.sample() for _ in range(2)]  # drawn before
    assert [batch.shape for batch in left] == [(2,)] * 2
    refuses(ValueError, r"prefetch.*ConsumingSampler", ahead.sample)
    refuses(ValueError, r"prefetch.*ConsumingSampler", next, iter(ahead))
    assert len(plain) == 10
    plain.set_sampler(RandomSampler())
    assert ahead.sample().shape == (2,)


def test_a_handle_that_was_pickled_asks_the_actor_nothing() -> None:
    """It may be unpickled where the actor waits for that."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2)
    handle = client_of(actor, prefetch=3, write_rows=5)
    actor.called.clear()
    make, args = handle.__reduce__()
    again = make(*args)
    assert actor.called == []
    again.extend(make_rows(0, 8))
    assert again.sample().shape == (2,)
    assert actor.called == ["call", "sample_1", "sample_1", "sample_1", "sample_1"]


@pytest.mark.parametrize(("prefetch", "together"), [(3, 1), (4, 2), (5, 2), (9, 4)])
def test_batches_that_go_together_are_those_that_would_have_come(
    prefetch: int, together: int
) -> None:
    """In the same order, never fewer under way than one message less. With a rate limiter, or
    large, each goes alone."""
    drawn: list[list[int]] = []
    for depth in (0, prefetch):
        actor = Actor(
            storage=LazyTensorStorage(50),
            batch_size=4,
            generator=torch.Generator().manual_seed(3),
        )
        handle = client_of(actor, prefetch=depth)
        handle.extend(make_rows(0, 50))
        drawn.append([])
        for taken in range(1, 31):
            drawn[-1] += handle.sample()["id"].tolist()
            asked = sum(int(name[-1]) for name in actor.called if "sample_" in name)
            assert not depth or depth - together < asked - taken <= depth
    assert drawn[0] == drawn[1]
    assert set(actor.called) == {"check_ahead", "call", "sample_1", f"sample_{together}"}
    limited = Actor(
        storage=LazyTensorStorage(50), batch_size=4, rate_limiter=RateLimiter.min_size(2)
    )
    large = Actor(storage=LazyTensorStorage(50), batch_size=4000)
    for alone, paced in ((limited, True), (large, False)):
        handle = client_of(alone, paced=paced, prefetch=prefetch)
        handle.extend(make_rows(0, 50))
        for _ in range(3 * prefetch):
            handle.sample()
        assert {name for name in alone.called if "sample" in name} == {"sample_1"}


@pytest.mark.parametrize("prefetch", [1, 2, 4, 8, 13])
def test_priority_updates_apply_after_prefetched_batches(prefetch: int) -> None:
    """At most ``prefetch`` batches were drawn before; its own other changes drop them."""
    actor = Actor(
        storage=LazyTensorStorage(50), batch_size=4, sampler=PrioritizedSampler(alpha=1.0, beta=1.0)
    )
    plain, ahead = client_of(actor), client_of(actor, prefetch=prefetch)
    plain.extend(make_rows(0, 50))
    for number in range(2 * prefetch + 3):
        ahead.sample()
        only = torch.full((50,), 1e-30)
        only[number % 50] = 1.0
        plain.update_priority(torch.arange(50), only)
        batches = [ahead.sample()["index"].unique().tolist() for _ in range(prefetch + 2)]
        assert batches[prefetch:] == [[number % 50]] * 2
    ahead.set_sampler(RandomSampler())
    assert len(ahead.sample()["index"].unique()) > 1
    ahead.empty()
    plain.extend(make_rows(100, 3))
    assert int(ahead.sample()["id"].min()) >= 100


def test_error_in_a_group_of_batches_is_raised_once() -> None:
    """Where it was asked for before, it is passed over; where it is lasting, every call raises."""
    actor = Actor(storage=LazyTensorStorage(50), batch_size=4)
    handle = client_of(actor, prefetch=4)
    handle.extend(make_rows(0, 50))
    for _ in range(6):
        handle.sample()
    calls, lasting = iter(range(1000)), threading.Event()

    def odd(rows: TensorDict) -> TensorDict:
        if lasting.is_set() or next(calls) % 5 == 3:
            raise OSError("lasting" if lasting.is_set() else "passing")
        return rows

    actor.buffer.append_transform(odd)
    for _ in range(40):
        assert handle.sample().shape == (4,)
    lasting.set()
    good = 0
    with contextlib.suppress(OSError):
        while good < 5:
            good += len(handle.sample()) // 4
    assert good <= 4
    for _ in range(3):
        with pytest.raises(OSError, match="lasting") as raised:
            handle.sample()
        assert raised.value.__cause__ is not None


def test_delayed_prefetched_sample_raises_limiter_timeout() -> None:
    """As without ``prefetch``; the batch stays under way. Without a limiter a TimeoutError."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=RateLimiter.min_size(2))
    plain, ahead = client_of(actor, paced=True), client_of(actor, paced=True, prefetch=2)
    refuses(RateLimiterTimeout, r"waited 0\.01 s", plain.sample, timeout=0.01)
    actor.busy = True
    for _ in range(3):
        refuses(RateLimiterTimeout, r"within 0\.01 s", ahead.sample, timeout=0.01)
    assert actor.called.count("sample_1") == 3
    with pytest.raises(TimeoutError) as raised:
        client_of(actor, prefetch=2, checked=True).sample(timeout=0.01)
    assert type(raised.value) is TimeoutError


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_timeout_is_checked_before_anything_is_asked(prefetch: int) -> None:
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=RateLimiter.min_size(2))
    handle = client_of(actor, paced=True, prefetch=prefetch)
    refuses(ValueError, "timeout of at least 0", handle.sample, timeout=-1)
    refuses(TypeError, "timeout: expected a number", handle.sample, timeout="soon")
    assert not [name for name in actor.called if "sample" in name]
