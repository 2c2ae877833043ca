"""The rate limiter of all shards: clients count together, by the law of one big buffer."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    NStep,
    RateLimiter,
    ReplayBuffer,
    SliceSampler,
)
from replaykit.distributed import shard_pacing, sharded_buffer, shards
from replaykit.distributed.protocol import ShardDied, ShardFacts
from replaykit.distributed.requests import Reply
from replaykit.distributed.shard_pacing import ActorPace, RayPace, ShardsPace
from replaykit.distributed.shards import Supervisor
from replaykit.errors import ActorLost, RateLimiterTimeout, SchemaError
from replaykit.pace import INSERT, SAMPLE
from tests.distributed.laws import episodes, prioritized, running, wait_until
from tests.pace.calls import counts, numbers, started
from tests.support.refusals import refuses


def waiting(rb: Any, count: int) -> None:
    """Returns once so many calls wait."""
    wait_until(lambda: rb._tickets.keeper.pace._waiting >= count)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def went(call: Callable[..., Any], *args: Any, timeout: float = 0.0) -> bool:
    """Whether a call went through in time."""
    try:
        call(*args, timeout=timeout)
    except RateLimiterTimeout:
        return False
    return True


@pytest.fixture(params=[False, True])
def far(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts here, or elsewhere: then shards are asked beside them."""
    monkeypatch.setattr(ShardsPace, "far", request.param)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("seed", range(4))
def test_calls_of_all_clients_are_paced_as_in_one_big_buffer(
    sharded: Any, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    limiter = RateLimiter(*[(1, 5, 12), (3, 10, 30), (0.5, 8, 20), (4, 1, 40)][seed])
    one = ReplayBuffer(storage=LazyTensorStorage(3000), rate_limiter=limiter, batch_size=4)
    rb = sharded(3, rate_limiter=limiter, batch_size=4)
    handles, refused = [rb, rb.client(), rb.client(prefetch=2)], 0
    for step in range(150):
        handle, n, kind = chance.choice(handles), chance.randint(1, 8), chance.random()
        if kind < 0.45:
            rows = numbers(step, n)
            expected = went(one.extend, rows)
            assert went(handle.extend, rows) is expected
        elif kind < 0.9:
            expected = one.can_sample(n)
            assert handle.can_sample(n) is expected
            assert went(one.sample, n) is expected
            assert went(handle.sample, n) is expected
        elif kind < 0.93:
            kept = chance.random() < 0.5
            one.empty(empty_write_count=kept)
            handle.empty(empty_write_count=kept)
        else:
            expected = went(one.sample)
            assert went(handle.sample_async().result) is expected
        refused += not expected
        assert counts(handle) == counts(one)
        assert len(rb) == len(one)
    assert refused > 15
    rb.dumps(tmp_path / "saved")
    other, same = sharded(2, rate_limiter=limiter), sharded(3, rate_limiter=limiter)
    other.loads(tmp_path / "saved")
    same.load_state_dict(rb.state_dict())
    for again in (other, same):
        assert again._tickets.keeper.state([]) == one._pace.state()  # type: ignore[union-attr]
        assert counts(again) == counts(one)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(("ratio", "least", "error"), [(1.0, 10, 20.0), (4.0, 6, 40.0)])
def test_many_clients_never_break_the_law(
    sharded: Any, ratio: float, least: int, error: float
) -> None:
    """Whenever counts are looked at; and who is refused has changed nothing."""
    limiter = RateLimiter(ratio, least, error)
    rb = sharded(3, rate_limiter=limiter, batch_size=5)
    total, seen = 240, []

    def write(handle: Any, first: int) -> None:
        step = 0
        while step < total // 2:
            rows = numbers(first + step, min(3, total // 2 - step))
            if went(handle.extend, rows, timeout=0.02):
                step += len(rows)

    def sample(handle: Any, count: int) -> None:
        for _ in range(count):
            while not went(handle.sample, timeout=0.02):
                pass
            seen.append(count)

    batches = int((total * ratio - (ratio * least)) / 5 / 2)
    works = [
        *(functools.partial(write, rb.client(), first) for first in (0, 1000)),
        *(functools.partial(sample, rb.client(seeded(i)), batches) for i in range(2)),
    ]
    until = time.monotonic() + 60
    with running(*works) as failed:
        while counts(rb) != (total, 10 * batches) and not failed:
            state = rb._tickets.keeper.stats()
            diff = state["inserts"] * ratio - state["samples"]
            assert state["inserts"] <= least or diff <= limiter.max_diff + 1e-6
            assert not state["samples"] or diff >= limiter.min_diff - 1e-6
            assert time.monotonic() < until
            time.sleep(0.001)
    assert counts(rb) == (total, 5 * len(seen))
    stored = [*range(total // 2), *range(1000, 1000 + total // 2)]
    assert sorted(rb[:]["number"].tolist()) == stored


@pytest.mark.usefixtures("far")
def test_a_call_that_waited_in_vain_has_changed_nothing(sharded: Any) -> None:
    one, other = (sharded(2, rate_limiter=RateLimiter.queue(3), batch_size=2) for _ in range(2))
    with pytest.raises(RateLimiterTimeout):
        one.sample(timeout=0)
    for rb in (one, other):
        rb.extend(numbers(0, 3))
    begun = time.monotonic()
    with pytest.raises(RateLimiterTimeout, match=r"insert of 1 row waited 0[.]\d+ s .* 3 inserted"):
        one.add(numbers(3, 1)[0], timeout=0.2)
    assert 0.19 < time.monotonic() - begun < 5
    assert 0.01 < one.stats()["insert_blocked_s"] < 5
    assert torch.equal(one.sample()["number"], other.sample()["number"])
    refuses(RateLimiterTimeout, "sample of 2 rows waited 0 s for inserts", one.sample, timeout=0)
    for rb in (one, other):
        rb.extend(numbers(3, 1))
    assert torch.equal(one.sample()["number"], other.sample()["number"])
    assert torch.equal(one[:]["number"], other[:]["number"])  # dealt as if nothing had been
    for refused in (lambda: one.extend(numbers(0, 4)), lambda: one.extend_async(numbers(0, 4))):
        refuses(ValueError, "at most 3 rows at once, got 4", refused)
    refuses(ValueError, "at most 3 rows at once, got 4", one.sample, 4)
    refuses(ValueError, "at least 0 seconds", one.sample, timeout=-1)


def test_bad_rows_are_refused_before_anything_waits(sharded: Any) -> None:
    rb = sharded(2, rate_limiter=RateLimiter.queue(2))
    rb.extend(numbers(0, 2))
    with pytest.raises(RateLimiterTimeout):
        rb.add(numbers(0, 1)[0], timeout=0)
    with pytest.raises(SchemaError):
        rb.extend(TensorDict({"other": torch.zeros(1)}, [1]))  # would wait without end


def test_a_write_that_timed_out_has_not_fixed_how_rows_look(sharded: Any) -> None:
    rb = sharded(2, rate_limiter=RateLimiter.queue(4))
    keeper = rb._tickets.keeper
    keeper.admit(INSERT, 4, None)  # somebody else has the room
    with pytest.raises(RateLimiterTimeout):
        rb.extend(numbers(0, 2), timeout=0)
    keeper.end(None, INSERT, 4, 0, [])
    rb.extend(torch.zeros(2))


def test_invalid_rate_limiters_and_timeouts_are_refused(sharded: Any) -> None:
    refuses(TypeError, "rate_limiter as a RateLimiter, got int", sharded, 2, rate_limiter=3)
    refuses(ValueError, "capacity of 20", sharded, 2, 10, rate_limiter=RateLimiter.min_size(21))
    assert "inserts" not in sharded(2).stats()
    refuses(ValueError, "timeout", sharded(2).extend, numbers(0, 1), timeout=-1)


def test_rows_that_are_there_to_begin_with_count(tmp_path: Path, sharded: Any) -> None:
    plain = sharded(2)
    plain.extend(numbers(0, 40))
    plain.dumps(tmp_path / "saved")
    rb = sharded(3, rate_limiter=RateLimiter(2, 4, 20))
    rb.loads(tmp_path / "saved")
    assert counts(rb) == (14, 0)
    bad = {**rb.state_dict(), "pace": {"inserts": -1, "samples": 0}}
    refuses(ValueError, "rate limiter", rb.load_state_dict, bad)
    assert (counts(rb), len(rb)) == ((14, 0), 40)
    plain.load_state_dict(sharded(2, rate_limiter=RateLimiter.queue(4)).state_dict())
    assert len(plain) == 0


def test_reports_of_rows_being_loaded_do_not_count(
    sharded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment at which shards have them and that at which the counts are theirs."""
    rb = sharded(2, rate_limiter=RateLimiter(1, 4, 30), batch_size=2)
    rb.extend(numbers(0, 20))
    rb.sample()
    other, keeper, seen = rb.client(), rb._tickets.keeper, []
    state, load = rb.state_dict(), keeper.load

    def later(*args: Any) -> None:
        other.sample()
        seen.append(keeper.stats()["inserts"])
        load(*args)

    monkeypatch.setattr(keeper, "load", later)
    rb.extend(numbers(20, 4))
    rb.load_state_dict(state)
    assert seen == [24]
    assert counts(rb) == (20, 2)
    other.extend(numbers(20, 3))
    assert counts(rb) == (23, 2)


def test_slices_count_rows_and_batches_ahead_when_they_are_delivered(sharded: Any) -> None:
    rb = sharded(
        2,
        rate_limiter=RateLimiter(1, 8, 60),
        sampler=lambda: SliceSampler(slice_len=4),
        shard_key="episode",
        batch_size=8,
        prefetch=3,
    )
    rb.extend(TensorDict({"episode": torch.arange(40) // 4, "t": torch.arange(40)}, [40]))
    rb.sample()
    assert counts(rb) == (40, 8)
    assert rb.stats()["prefetch_queue_size"] == 3
    rb.sample(4)
    assert counts(rb) == (40, 12)


def test_held_back_rows_count_once_they_are_stored(sharded: Any) -> None:
    rb = sharded(
        2,
        rate_limiter=RateLimiter.queue(10),
        transform_factory=lambda: NStep(3, when="write"),
        shard_key="episode",
    )
    rows = episodes([6])
    rows["next", "done"][:] = False
    rows["next", "reward"] = torch.ones(6, 1)
    rb.extend(rows, timeout=0)
    assert counts(rb) == (len(rb), 0) == (4, 0)
    rb.flush()
    assert counts(rb) == (len(rb), 0) == (6, 0)


def test_only_writes_wait_for_delayed_writes(
    sharded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = sharded(
        2,
        rate_limiter=RateLimiter.queue(4),
        sampler=prioritized,
        batch_size=2,
    )
    index = rb.extend(numbers(0, 4))
    first, second = rb.extend_async(numbers(4, 2)), rb.add_async(numbers(6, 1)[0])
    rb.update_priority(index, torch.ones(4))
    rb.dumps(tmp_path / "saved")
    assert (len(rb), first.done(), second.done()) == (4, False, False)
    with pytest.raises(RateLimiterTimeout, match="writes of this handle still wait for samples"):
        rb.add(numbers(7, 1)[0], timeout=0.05)
    with pytest.raises(RateLimiterTimeout):
        second.result(0.05)
    rb.sample()
    assert first.result(20).tolist() == [4, 5]
    with pytest.raises(RateLimiterTimeout):
        second.result(0.05)
    rb.sample()
    assert second.result(20) == 6
    assert rb[:]["number"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    lost = rb.extend_async(numbers(7, 3))
    monkeypatch.setattr(sharded_buffer, "SETTLING_S", 0.05)
    refuses(RuntimeError, "still had to wait for samples when the buffer was clo", rb.close)
    refuses(RuntimeError, "shut down", lost.result, 20)


def test_event_loop_continues_while_many_calls_wait(sharded: Any) -> None:
    """More than the loop has threads: they would wait for each other."""
    rb = sharded(2, rate_limiter=RateLimiter.queue(8), batch_size=2)

    async def all_of_them() -> Any:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        handles = [rb.client() for _ in range(4)]
        samples = [asyncio.ensure_future(_of(rb.client().sample_async())) for _ in range(16)]
        await asyncio.sleep(0.02)
        writes = [asyncio.ensure_future(_of(h.extend_async(numbers(0, 8)))) for h in handles]
        return await asyncio.wait_for(asyncio.gather(*samples, *writes), 30)

    async def _of(result: Any) -> Any:
        return await result

    found = asyncio.run(all_of_them())
    assert counts(rb) == (32, 32)
    assert len(found) == 20


@pytest.mark.usefixtures("far")
def test_delayed_sample_sees_rows_that_ended_its_wait(sharded: Any) -> None:
    one, other = (sharded(2, rate_limiter=RateLimiter.queue(9), batch_size=8) for _ in range(2))
    for rb in (one, other):
        rb.extend(numbers(0, 4))
    drawn: list[Any] = []
    thread = started(lambda: drawn.append(one.sample()["number"].tolist()))
    waiting(one, 1)
    for rb in (one, other):
        rb.extend(numbers(4, 5))
    thread.join(20)
    assert drawn == [other.sample()["number"].tolist()]
    assert max(drawn[0]) > 3


def test_a_result_that_is_asked_for_too_early_draws_from_enough_rows(sharded: Any) -> None:
    rb = sharded(2, rate_limiter=RateLimiter.min_size(100), batch_size=64)
    rb.extend(numbers(0, 50))
    early = rb.sample_async()
    assert not early.done()
    rb.extend(numbers(50, 50))
    assert early.done()
    assert int((early.result()["number"] >= 50).sum()) > 10


def test_close_wakes_all_waiting_calls(sharded: Any) -> None:
    rb, said = sharded(2, rate_limiter=RateLimiter.queue(3), batch_size=2), []

    def wait(handle: Any) -> None:
        try:
            handle.sample()
        except RuntimeError as error:
            said.append(str(error))

    threads = [started(functools.partial(wait, handle)) for handle in (rb, rb.client())]
    waiting(rb, 2)
    rb.close()
    for thread in threads:
        thread.join(20)
    assert said == ["this buffer was shut down"] * 2


def test_rate_limiter_continues_after_lost_rows(sharded: Any) -> None:
    """With the counts of before a write would wait for samples, and these for rows."""
    rb = sharded(2, rate_limiter=RateLimiter(1, 10, 2), batch_size=1, on_loss=lambda loss: None)
    rb.extend(numbers(0, 10))
    rb.extend(numbers(10, 2))
    rb._members.shards[0].kill()
    rb._members.ask_all("stats")
    assert not rb.can_sample()  # of those that are left, and of the one that is back
    assert len(rb) == 6
    rb.extend(numbers(12, 4), timeout=0)
    rb.extend(numbers(16, 2), timeout=0)
    rb.sample(timeout=0)
    assert counts(rb) == (18, 1)


@pytest.mark.parametrize("limited", [True, False])
def test_partly_lost_write_counts_only_stored_rows(
    limited: bool, sharded: Any, tmp_path: Path
) -> None:
    """Its answer is lost with the shard, whose successor has its rows: they are not written twice,
    with a rate limiter or without one."""
    rb = sharded(
        2,
        rate_limiter=RateLimiter.queue(50) if limited else None,
        checkpoint_dir=tmp_path,
        checkpoint_interval=0.0,
        on_loss=lambda loss: None,
    )
    rb.extend(numbers(0, 4))
    shard = rb._members.shards[1]
    call = shard.call

    def dies(verb: str, *args: Any) -> Any:
        reply = call(verb, *args)
        if verb == "extend":
            shard.kill()
            return call(verb, *args)
        return reply

    shard.call = dies
    index = rb.extend(numbers(4, 4))
    assert index.tolist() == [4, 5, 6, 7]
    assert sorted(rb[:]["number"].tolist()) == list(range(8))
    assert rb[index]["number"].tolist() == [4, 5, 6, 7]
    assert rb.stats()["rows_lost"] == 0
    assert not limited or counts(rb) == (8, 0)


def report(shard: int, incarnation: int, version: int, written: int, rows: int) -> ShardFacts:
    return ShardFacts(rows, written, 99, None, 0, 0.0, 1.0, version, 0, shard, incarnation)


def empty(shards: int) -> list[ShardFacts]:
    return [report(shard, 0, 0, 0, 0) for shard in range(shards)]


@pytest.mark.parametrize("seed", range(5))
def test_row_counts_once_for_repeated_and_late_reports(seed: int) -> None:
    chance = random.Random(seed)
    pace = ShardsPace(RateLimiter.min_size(1), empty(3))
    written, told = [0, 0, 0], [report(0, 0, 0, 0, 0)]
    for version in range(1, 60):
        shard = chance.randrange(3)
        written[shard] += chance.randint(0, 4)
        told.append(report(shard, 0, version, written[shard], min(7, written[shard])))
        pace.end(None, INSERT, 0, 0, chance.sample(told, min(len(told), 3)))
    chance.shuffle(told)
    pace.end(None, SAMPLE, 0, 5, told)
    assert pace.pace.state() == {"inserts": sum(written), "samples": 5}
    assert pace.size() == sum(min(7, rows) for rows in written)


def test_rows_of_a_shard_that_died_count_once() -> None:
    pace = ShardsPace(RateLimiter.min_size(1), empty(2))
    pace.end(None, INSERT, 0, 0, [report(0, 0, 1, 10, 10), report(1, 0, 1, 5, 5)])
    pace.died(0, 0, 12)  # clients still had two more rights
    assert (pace.size(), pace.stats()["inserts"]) == (5, 17)
    pace.end(None, INSERT, 0, 0, [report(0, 0, 2, 12, 12)])
    pace.came_back(report(0, 1, 0, 13, 13))  # it had saved one that nobody was told of
    assert (pace.size(), pace.stats()["inserts"]) == (18, 18)
    pace.end(None, INSERT, 0, 0, [report(0, 0, 3, 13, 13), report(0, 1, 1, 14, 14)])
    assert (pace.size(), pace.stats()["inserts"]) == (19, 19)
    pace.died(0, 0, 15)  # who was told of two that are lost says so now
    assert (pace.size(), pace.stats()["inserts"]) == (19, 21)
    pace.died(0, 1, 0)
    pace.came_back(report(0, 2, 0, 3, 3))
    pace.end(None, INSERT, 0, 0, [report(0, 2, 1, 4, 4)])
    assert (pace.size(), pace.stats()["inserts"]) == (9, 22)


class Desk(ActorPace):
    """The rights of clients, over shards with given reports."""

    def __init__(self, limiter: RateLimiter, shards: int = 2) -> None:
        self.reports: list[ShardFacts] = []
        self.counts = ShardsPace(limiter, empty(shards), lambda: self.reports)
        super().__init__(self.counts, asyncio.to_thread)

    async def known(self, client: str) -> asyncio.Future[None]:
        """Has a client known; what it gives ends when its process does."""
        lives: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.watch(client, [lives])
        return lives

    async def until(self, changed: Any) -> None:
        for _ in range(2000):
            if changed():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("nothing has changed")


def run(limiter: RateLimiter, test: Any, *, shards: int = 2) -> None:
    async def made() -> None:
        await test(Desk(limiter, shards))

    asyncio.run(made())


def test_rights_of_dead_clients_are_returned() -> None:
    async def test(desk: Desk) -> None:
        lives = await desk.known("a")
        await desk.known("b")
        assert await desk.admit("a", 0, INSERT, 3, 0.0, None) == 0
        assert await desk.admit("b", 0, INSERT, 2, 0.0, None) == -1
        waits = asyncio.create_task(desk.admit("b", 1, INSERT, 2, 20.0, None))
        too = asyncio.create_task(desk.admit("a", 1, INSERT, 2, 0.3, None))
        await asyncio.sleep(0.01)
        assert not waits.done()
        desk.reports = [report(0, 0, 1, 1, 1)]  # a write without a right
        lives.set_exception(ConnectionError("its owner has died"))
        waited = await waits
        assert waited is not None
        assert 0 < waited < 20
        assert await too == -1
        assert await desk.admit("a", 2, INSERT, 1, 0.0, None) is None
        assert await desk.admit("b", 2, INSERT, 2, 0.0, None) == -1
        assert await desk.admit("b", 3, INSERT, 1, 0.0, None) == 0
        assert desk.counts.stats()["inserts"] == 1

    run(RateLimiter.queue(4), test)


def test_a_client_that_leaves_holds_nothing_in_the_actor() -> None:
    async def test(desk: Desk) -> None:
        stays = asyncio.ensure_future(desk.stay("a"))
        await asyncio.sleep(0)
        await desk.watch("a", [stays])
        assert await desk.admit("a", 0, INSERT, 4, 0.0, None) == 0
        await desk.leave("a")
        await asyncio.wait_for(stays, 20)
        await desk.until(lambda: not desk._rights and not desk._staying and not desk._watches)
        await desk.known("b")
        assert await desk.admit("b", 0, INSERT, 4, 0.0, None) == 0

    run(RateLimiter.queue(4), test)


def test_abandoned_request_is_not_admitted_later() -> None:
    async def test(desk: Desk) -> None:
        await desk.known("a")
        waits = asyncio.create_task(desk.admit("a", 0, SAMPLE, 1, 20.0, None))
        await asyncio.sleep(0.01)
        await desk.end(("a", 0), SAMPLE, 1, 0, [])
        await desk.end(None, INSERT, 0, 0, [report(0, 0, 1, 1, 1)])
        assert await waits == -1
        assert desk.counts.may(SAMPLE, 1)
        with pytest.raises(
            RateLimiterTimeout, match=r"waited 7\.5 s for inserts: 1 inserted, 0 sa"
        ):
            await desk.admit("a", 1, SAMPLE, 2, 0.01, 7.5)
        assert 0.01 < desk.counts.stats()["sample_blocked_s"] < 5
        with pytest.raises(ValueError, match="at most 4 rows"):
            await desk.admit("a", 2, SAMPLE, 5, 20.0, None)

    run(RateLimiter.queue(4), test)


def test_shard_counts_are_polled_while_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose writer has got no answer, and told nobody."""
    monkeypatch.setattr(shard_pacing, "_POLL_S", 0.01)
    monkeypatch.setattr(shard_pacing, "_RETRY_S", 0.01)

    async def test(desk: Desk) -> None:
        await desk.known("a")
        waits = asyncio.create_task(desk.admit("a", 0, SAMPLE, 3, 20.0, None))
        await asyncio.sleep(0.05)
        assert not waits.done()
        desk.reports = [report(0, 0, 1, 2, 2), report(1, 0, 1, 1, 1)]
        waited = await asyncio.wait_for(waits, 20)
        assert waited is not None
        assert 0 < waited < 20

    run(RateLimiter.queue(4), test)


class Silent(Reply):
    def get(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        time.sleep(timeout)
        raise TimeoutError


def test_polls_ignore_silent_and_dead_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_ANSWERED_WITHIN_S", 0.01)
    answers = [Reply.done(one) for one in empty(3)]

    def shard(number: int, _: Any) -> Any:
        return SimpleNamespace(incarnation=0, call=lambda verb: answers[number])

    supervisor, told = Supervisor(3, shard), report(0, 0, 1, 1, 1)
    answers[:] = Reply.done(told), Silent(), Reply.done(error=ShardDied(2, 0))
    assert supervisor._facts() == [told]


def test_waiting_call_does_not_start_ray_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a thread does whose program has ended Ray."""
    sent: list[Any] = []

    def send(*message: Any) -> None:
        sent.append(message)

    ended = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setattr("replaykit.distributed.requests.ray_module", lambda: ended)
    actor = SimpleNamespace(pace=SimpleNamespace(remote=send))
    with pytest.raises(ActorLost):
        RayPace(actor, RateLimiter.queue(4), 1.0).admit(INSERT, 1, None)
    assert sent == []
