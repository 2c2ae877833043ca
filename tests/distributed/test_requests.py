"""Requests under way: of an actor without Ray, and of shards in this process."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import PrioritizedSampler, RandomSampler, SliceSampler
from replaykit.distributed.requests import JointReply, Reply, RequestQueue
from replaykit.sharding import ShardSilent
from tests.distributed.laws import episodes, running
from tests.distributed.stand_in import Ray
from tests.distributed.test_members import Silent
from tests.support.refusals import refuses


class Answer:
    """A reply that comes when the test says so."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.there = False
        self.small = False

    def say(self, value: Any) -> None:
        self.value, self.there = value, True

    def sent(self) -> None:
        pass

    def is_ready(self) -> bool:
        return self.there

    def get(self, timeout: float | None = None) -> Any:
        if not self.there:
            assert timeout is not None, "would wait for ever"
            raise TimeoutError
        if isinstance(self.value, Exception):
            self.error = self.value
            raise self.error
        return self.value


class Interrupted(Answer):
    """The user's Ctrl-C comes while it is waited for, or the answer just after the timeout."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.once: BaseException | None = error

    def get(self, timeout: float | None = None) -> Any:
        if self.once is not None:
            error, self.once = self.once, None
            self.say("drawn")
            raise error
        return super().get(timeout)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()], ids=repr)
def test_batch_that_arrives_as_a_wait_ends_is_the_next(error: BaseException) -> None:
    answers: list[Any] = [Interrupted(error), *(Answer() for _ in range(5))]
    ahead = RequestQueue(lambda _: [answers.pop(0)], depth=2)
    with pytest.raises(type(error)):
        ahead.next(timeout=1.0)
    assert ahead.next() == "drawn"


def test_error_of_an_early_request_reaches_no_other_request() -> None:
    """The call whose request failed raises it once. Other calls get their batches."""
    sent: list[Answer] = []

    def request(_: int) -> list[Any]:
        sent.append(Answer())
        return sent[-1:]

    ahead = RequestQueue(request, depth=2)
    first = ahead.take()
    for number, answer in enumerate(sent):
        answer.say(RuntimeError(f"request {number}"))
    assert first.is_ready()
    for _ in range(2):
        refuses(RuntimeError, "request 0", first.get)
    second = ahead.take()
    assert not second.is_ready()  # two failed before it was asked for
    for number, answer in enumerate(sent[3:], 3):
        answer.say(number)
    assert second.is_ready()
    assert second.get() == second.get() == 3
    assert ahead.next() == 4


@pytest.mark.parametrize("joint", [False, True])
def test_waiting_for_an_answer_does_not_block_other_threads(
    monkeypatch: pytest.MonkeyPatch, joint: bool
) -> None:
    """Another thread asks for the same with a timeout of its own; both get one value."""
    come, asked = threading.Event(), threading.Event()

    class Slow(Ray):
        def get(self, ref: Any, timeout: float | None = None) -> Any:
            asked.set()
            if not come.wait(timeout):
                raise self.exceptions.GetTimeoutError
            return [0, "there"]

    class Joint(JointReply):
        def _make(self, timeout: float | None) -> Any:
            return Slow().get(None, timeout)[1]

    monkeypatch.setattr("replaykit.distributed.requests.ray_module", Slow)
    reply = Joint() if joint else Reply(object())
    with running(reply.get):
        assert asked.wait(30)
        refuses(TimeoutError, r"within 0\.01 seconds", reply.get, 0.01)
        come.set()
    assert reply.get(0.0) == "there"


def prioritized() -> Any:
    return PrioritizedSampler(alpha=0.8, beta=0.5)


def make(sharded: Any, sampler: Any = prioritized, **arguments: Any) -> Any:
    arguments.setdefault("generator", torch.Generator().manual_seed(5))
    rb = sharded(3, sampler=sampler, shard_key="episode", batch_size=12, on_loss=print, **arguments)
    rb.extend(episodes([6, 4, 9, 5, 7, 3]))
    return rb


def alike(one: Any, two: Any) -> bool:
    keys = set(one.keys(True, True))
    return keys == set(two.keys(True, True)) and all(torch.equal(one[k], two[k]) for k in keys)


@pytest.mark.parametrize("sampler", [RandomSampler, prioritized, lambda: SliceSampler(slice_len=3)])
def test_prefetch_does_not_change_draws(sharded: Any, sampler: Any) -> None:
    """Of batches of the default size, whichever way they are asked for."""
    plain, ahead = make(sharded, sampler), make(sharded, sampler, prefetch=3)
    expected = [plain.sample() for _ in range(9)]
    assert alike(ahead.sample(), expected[0])
    assert ahead.stats()["prefetch_queue_size"] == 3
    state = ahead.generator.get_state()
    batches = [ahead.sample(6), ahead.sample_async(9).result()]  # of other sizes
    assert [batch.shape for batch in batches] == [(6,), (9,)]
    ahead.generator.set_state(state)
    late = [ahead.sample_async() for _ in range(2)]
    assert alike(ahead.next(), expected[3])
    assert alike(late[1].result(), expected[2])
    assert late[0].done()
    assert alike(late[0].result(), expected[1])
    assert late[0].result() is late[0].result()
    assert alike(ahead.sample(return_info=True)[0], expected[4])
    assert alike(next(iter(ahead)), expected[5])

    async def three() -> list[Any]:
        return [await ahead.sample_async() for _ in range(3)]

    assert all(alike(*pair) for pair in zip(asyncio.run(three()), expected[6:], strict=True))


def test_dropped_batches_are_drawn_again(sharded: Any, tmp_path: Path) -> None:
    """Dropped batches give their random numbers back, unless others were used since. A checkpoint
    has the generator before them."""
    plain, ahead = make(sharded), make(sharded, prefetch=3)
    for rb in (plain, ahead):
        rb.sample()
        rb.empty()
        rb.extend(episodes([8, 8]))
    assert alike(ahead.sample(), plain.sample())
    ahead.dumps(tmp_path)
    other = pickle.loads(pickle.dumps(ahead._generator_state()))
    expected = [plain.sample() for _ in range(2)]
    assert alike(ahead.sample(), expected[0])
    ahead.loads(tmp_path)
    assert torch.equal(ahead.generator.get_state(), other)
    assert [alike(ahead.sample(), one) for one in expected] == [True, True]
    own = ahead.generator
    torch.rand(1, generator=own)
    state = own.get_state()
    ahead.set_rng(torch.Generator().manual_seed(9))
    assert torch.equal(own.get_state(), state)
    plain.set_rng(torch.Generator().manual_seed(9))
    assert alike(ahead.sample(), plain.sample())


def test_errors_are_raised_in_the_requesting_call(sharded: Any) -> None:
    """Also of a batch that was asked for too early; what comes after is drawn."""
    rb = sharded(2, batch_size=4, prefetch=2)
    refuses(RuntimeError, "empty storage", rb.sample)
    result = rb.sample_async()
    refuses(RuntimeError, "empty storage", result.result)
    rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    assert rb.sample().shape == (4,)
    refuses(RuntimeError, "empty storage", result.result)
    for kind in (OSError, TimeoutError):
        for holder in (shard.holder for shard in rb._members.shards):
            holder.draw = functools.partial(fails, kind)
        for _ in range(2):  # those under way are whole
            assert rb.sample().shape == (4,)
        refuses(kind, "a broken shard", rb.sample)
        for holder in (shard.holder for shard in rb._members.shards):
            del holder.draw
        assert rb.sample().shape == (4,)
    refuses(ValueError, "prefetch as an int of at least 0, got -1", sharded, 2, prefetch=-1)


def fails(kind: type[Exception], *args: Any) -> Any:
    raise kind("a broken shard")


def test_late_batch_is_returned_by_a_later_call(sharded: Any) -> None:
    plain, ahead = make(sharded), make(sharded, prefetch=2, timeout=0.1)
    assert alike(ahead.sample(), plain.sample())
    shard = ahead._members.shards[1]
    send = shard.call
    shard.call = lambda verb, *args: Silent(1 if verb == "draw" else 0, send(verb, *args))
    for _ in range(2):
        assert alike(ahead.sample(), plain.sample())
    expected = plain.sample()
    refuses(ShardSilent, "shard 1", ahead.sample)
    assert alike(ahead.sample(), expected)


def test_a_shard_that_dies_meanwhile_is_drawn_around(sharded: Any) -> None:
    rb = make(sharded, prefetch=3)
    rb.sample()
    waiting = rb.sample_async()
    rb._members.shards[0].kill()
    batches = [waiting.result(), *(rb.sample() for _ in range(8))]
    assert all(batch.shape == (12,) for batch in batches)
    assert not any((batch["index"] % 3 == 0).any() for batch in batches[-3:])


def test_handles_prefetch_separate_batches(sharded: Any) -> None:
    rb = make(sharded)
    client = rb.client(torch.Generator().manual_seed(5), prefetch=2)
    plain = rb.client(torch.Generator().manual_seed(5))
    first = client.sample()
    state = client.__getstate__()
    again = type(client).__new__(type(client))
    again.__setstate__(state)
    assert again._ahead.depth == 2
    assert len(again._ahead) == 0
    assert alike(first, plain.sample())
    assert alike(client.sample(), again.sample())


def test_priority_update_affects_later_requests(sharded: Any) -> None:
    """Two batches are under way: they are of before, the third is of the new priorities."""
    rb = make(sharded, prefetch=2)
    rb.sample()
    index = rb._names.join(0, torch.arange(rb.stats()["shards"][0]))
    for shard in (1, 2):
        others = rb._names.join(shard, torch.arange(rb.stats()["shards"][shard]))
        rb.update_priority(others, 0.0)
    rb.update_priority(index, 1e6)
    seen = [int((rb.sample()["index"] % 3 == 0).sum()) for _ in range(4)]
    assert seen[2:] == [12, 12]
    assert min(seen[:2]) < 12
