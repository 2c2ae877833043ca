"""The counts of all shards, and the actor that keeps them, without a Ray."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from replaykit import RateLimiter
from replaykit.distributed import shard_pacing, shards
from replaykit.distributed.protocol import ShardDied, ShardFacts
from replaykit.distributed.requests import Reply
from replaykit.distributed.shard_pacing import ActorPace, ShardsPace
from replaykit.distributed.shards import Supervisor
from replaykit.errors import RateLimiterTimeout
from replaykit.pace import INSERT, SAMPLE


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


class Answers:
    """A shard that answers with its facts, or does not."""

    def __init__(self, shard: int, answer: Any) -> None:
        self.incarnation, self.answer = 0, answer

    def call(self, verb: str) -> Reply:
        return self.answer


class Silent(Reply):
    def get(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        time.sleep(timeout)
        raise TimeoutError


def test_polls_ignore_silent_and_dead_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_ANSWERED_WITHIN_S", 0.01)
    known = [Reply.done(one) for one in empty(3)]
    supervisor = Supervisor(3, lambda number, _: Answers(number, known[number]))
    died, told = Reply.done(error=ShardDied(2, 0)), report(0, 0, 1, 1, 1)
    for shard, answer in enumerate((Reply.done(told), Silent(), died)):
        supervisor.shards[shard].answer = answer
    assert supervisor._facts() == [told]
