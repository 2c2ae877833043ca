"""What a handle does by itself, beside an actor that needs no Ray."""

from __future__ import annotations

import warnings

import pytest
from tensordict import TensorDict

from replaykit import ConsumingSampler, LazyTensorStorage, RandomSampler, RateLimiter
from replaykit.errors import RateLimiterTimeout
from tests.conftest import make_rows
from tests.remote.stand_in import Actor, client_of, stand_in


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def test_rows_that_are_used_up_are_not_drawn_ahead() -> None:
    """A batch that nobody takes would use them up: refused before anything is drawn."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2, consume_after_n_samples=1)
    plain = client_of(actor)
    plain.extend(make_rows(0, 10))
    with pytest.raises(ValueError, match=r"prefetch.*ConsumingSampler"):
        client_of(actor, prefetch=2)
    assert len(plain) == 10
    assert plain.sample().shape == (2,)
    assert len(plain) == 8


def test_a_sampler_that_uses_rows_up_stops_handles_that_ask_ahead() -> None:
    """Also one that was set later, for samples and for iteration."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2)
    plain, ahead = client_of(actor), client_of(actor, prefetch=2)
    plain.extend(make_rows(0, 10))
    assert ahead.sample().shape == (2,)
    plain.set_sampler(ConsumingSampler())
    left = [ahead.sample() for _ in range(2)]  # drawn before
    assert [batch.shape for batch in left] == [(2,)] * 2
    with pytest.raises(ValueError, match=r"prefetch.*ConsumingSampler"):
        ahead.sample()
    with pytest.raises(ValueError, match=r"prefetch.*ConsumingSampler"):
        next(iter(ahead))
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
    assert actor.called.count("sample") == 4


def test_a_sample_asked_for_ahead_that_does_not_come_is_a_timeout_of_the_limiter() -> None:
    """As without ``prefetch``; the batch stays under way. Without a limiter a TimeoutError."""
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=RateLimiter.min_size(2))
    plain, ahead = client_of(actor, paced=True), client_of(actor, paced=True, prefetch=2)
    with pytest.raises(RateLimiterTimeout, match=r"waited 0\.01 s"):
        plain.sample(timeout=0.01)
    actor.busy = True
    for _ in range(3):
        with pytest.raises(RateLimiterTimeout, match=r"waited 0\.01 s"):
            ahead.sample(timeout=0.01)
    assert actor.called.count("sample") == 3
    with pytest.raises(TimeoutError) as raised:
        client_of(actor, prefetch=2, checked=True).sample(timeout=0.01)
    assert type(raised.value) is TimeoutError


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_timeout_is_checked_before_anything_is_asked(prefetch: int) -> None:
    actor = Actor(storage=LazyTensorStorage(10), batch_size=2, rate_limiter=RateLimiter.min_size(2))
    handle = client_of(actor, paced=True, prefetch=prefetch)
    with pytest.raises(ValueError, match="timeout of at least 0"):
        handle.sample(timeout=-1)
    with pytest.raises(TypeError, match="timeout as a number"):
        handle.sample(timeout="soon")
    assert "sample" not in actor.called


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_batch_has_to_warn_of_is_told_to_whoever_gets_it(prefetch: int) -> None:
    """Where it was asked for; so do writes, and iteration."""

    def checked(rows: TensorDict) -> TensorDict:
        warnings.warn("odd rows", UserWarning, stacklevel=2)
        return rows

    actor = Actor(storage=LazyTensorStorage(10), batch_size=2)
    handle = client_of(actor, prefetch=prefetch, write_rows=5)
    handle.extend(make_rows(0, 4))
    handle.append_transform(checked)
    for call in (handle.sample, handle.sample_async().result, handle.next):
        with pytest.warns(UserWarning, match="odd rows") as told:
            call()
        assert told[0].filename == __file__
    handle.append_transform(checked, invert=True)
    with pytest.warns(UserWarning, match="odd rows"):
        assert handle.add(make_rows(0, 1)[0]).result() == 4
