"""The counts of all shards, and the actor that keeps them, without a Ray."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from replaykit import RateLimiter
from replaykit.errors import RateLimiterTimeout
from replaykit.pace import INSERT, SAMPLE
from replaykit.sharding import shard_pacing
from replaykit.sharding.protocol import ShardFacts
from replaykit.sharding.shard_pacing import Paced, ShardCounts, ShardsPace


def facts(rows: int, version: int = 0, written: int | None = None) -> ShardFacts:
    return ShardFacts(rows, rows if written is None else written, 99, None, 0, 0.0, 1.0, version)


@pytest.mark.parametrize("seed", range(5))
def test_row_counts_once_for_repeated_and_late_reports(seed: int) -> None:
    chance = random.Random(seed)
    pace = ShardsPace(RateLimiter.min_size(1), [facts(0)] * 3)
    written, told = [0, 0, 0], [ShardCounts(0, 0, 0, 0, 0)]
    for version in range(1, 60):
        shard = chance.randrange(3)
        written[shard] += chance.randint(0, 4)
        told.append(ShardCounts(shard, 0, version, written[shard], min(7, written[shard])))
        pace.ended(INSERT, 0, 0, chance.sample(told, min(len(told), 3)))
    chance.shuffle(told)
    pace.ended(SAMPLE, 0, 5, told)
    assert pace.pace.state() == {"inserts": sum(written), "samples": 5}
    assert pace.size() == sum(min(7, rows) for rows in written)


def test_rows_of_a_shard_that_died_count_once() -> None:
    pace = ShardsPace(RateLimiter.min_size(1), [facts(0)] * 2)
    pace.ended(INSERT, 0, 0, [ShardCounts(0, 0, 1, 10, 10), ShardCounts(1, 0, 1, 5, 5)])
    pace.died(0, 0, 12)  # somebody had been told of two more
    assert (pace.size(), pace.stats()["inserts"]) == (5, 17)
    pace.ended(INSERT, 0, 0, [ShardCounts(0, 0, 2, 12, 12)])
    pace.came_back(0, 1, facts(13, written=13))  # it had saved one that nobody was told of
    assert (pace.size(), pace.stats()["inserts"]) == (18, 18)
    pace.ended(INSERT, 0, 0, [ShardCounts(0, 0, 3, 13, 13), ShardCounts(0, 1, 1, 14, 14)])
    assert (pace.size(), pace.stats()["inserts"]) == (19, 19)
    pace.died(0, 0, 15)  # who was told of two that are lost says so now
    assert (pace.size(), pace.stats()["inserts"]) == (19, 21)
    pace.died(0, 1, 0)
    pace.came_back(0, 2, facts(3, written=3))
    pace.ended(INSERT, 0, 0, [ShardCounts(0, 2, 1, 4, 4)])
    assert (pace.size(), pace.stats()["inserts"]) == (9, 22)


class Desk(Paced):
    """A supervisor of shards that say what they are told to."""

    silent = dead = -1

    def __init__(self, limiter: RateLimiter, shards: int = 2) -> None:
        self.facts = [facts(0)] * shards
        self._shards = [type("Shard", (), {"shard": n, "incarnation": 0}) for n in range(shards)]
        self._begin_pace(limiter, self.facts)

    async def _facts(self, shard: Any) -> ShardFacts:
        if shard.shard == self.silent:
            await asyncio.Event().wait()
        if shard.shard == self.dead:
            raise ConnectionError("has died")
        return self.facts[shard.shard]

    async def known(self, client: str) -> asyncio.Future[None]:
        """Has a client known; what it gives ends when its process does."""
        lives: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.pace_watch(client, [lives])
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
        assert await desk.pace_admit("a", 0, INSERT, 3, 0.0, None) == (True, 0)
        assert await desk.pace_admit("b", 0, INSERT, 2, 0.0, None) == (True, -1)
        waits = asyncio.create_task(desk.pace_admit("b", 1, INSERT, 2, 20.0, None))
        too = asyncio.create_task(desk.pace_admit("a", 1, INSERT, 2, 20.0, None))
        await asyncio.sleep(0.01)
        assert not waits.done()
        desk.facts = [facts(1, version=1), facts(0)]  # which nobody was told of
        lives.set_exception(ConnectionError("its owner has died"))
        assert 0 < (await waits)[1] < 20
        assert await too == (True, -1)
        assert await desk.pace_admit("a", 2, INSERT, 1, 0.0, None) == (True, None)
        assert await desk.pace_admit("b", 2, INSERT, 2, 0.0, None) == (True, -1)
        assert await desk.pace_admit("b", 3, INSERT, 1, 0.0, None) == (True, 0)
        assert desk._counts is not None
        assert desk._counts.stats()["inserts"] == 1

    run(RateLimiter.queue(4), test)


def test_silent_shards_do_not_delay_return_of_dead_clients_rights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_pacing, "_ANSWERED_WITHIN_S", 0.01)

    async def test(desk: Desk) -> None:
        desk.silent, desk.dead = 1, 2
        lives = await desk.known("a")
        assert await desk.pace_admit("a", 0, INSERT, 4, 0.0, None) == (True, 0)
        desk.facts[0] = facts(1, version=1)
        lives.set_exception(ConnectionError("its owner has died"))
        await desk.until(lambda: not desk._rights)
        assert await desk.pace_do("may", (INSERT, 3)) is True
        assert await desk.pace_do("may", (INSERT, 4)) is False

    run(RateLimiter.queue(4), test, shards=3)


def test_a_client_that_leaves_holds_nothing_in_the_actor() -> None:
    async def test(desk: Desk) -> None:
        stays = asyncio.ensure_future(desk.pace_stay("a"))
        await asyncio.sleep(0)
        await desk.pace_watch("a", [stays])
        assert await desk.pace_admit("a", 0, INSERT, 4, 0.0, None) == (True, 0)
        await desk.pace_leave("a")
        await asyncio.wait_for(stays, 20)
        await desk.until(lambda: not desk._rights and not desk._staying and not desk._watches)
        await desk.known("b")
        assert await desk.pace_admit("b", 0, INSERT, 4, 0.0, None) == (True, 0)

    run(RateLimiter.queue(4), test)


def test_abandoned_request_is_not_admitted_later() -> None:
    async def test(desk: Desk) -> None:
        await desk.known("a")
        waits = asyncio.create_task(desk.pace_admit("a", 0, SAMPLE, 1, 20.0, None))
        await asyncio.sleep(0.01)
        await desk.pace_end(("a", 0), SAMPLE, 1, 0, [])
        await desk.pace_end(None, INSERT, 0, 0, [ShardCounts(0, 0, 1, 1, 1)])
        assert await waits == (True, -1)
        assert await desk.pace_do("may", (SAMPLE, 1)) is True
        went_well, error = await desk.pace_admit("a", 1, SAMPLE, 2, 0.01, 7.5)
        assert not went_well
        assert isinstance(error, RateLimiterTimeout)
        assert "a sample of 2 rows waited 7.5 s for inserts: 1 inserted, 0 sampled" in str(error)
        assert 0.01 < (await desk.pace_do("stats", ()))["sample_blocked_s"] < 5
        went_well, error = await desk.pace_admit("a", 2, SAMPLE, 5, 20.0, None)
        assert not went_well
        assert isinstance(error, ValueError)

    run(RateLimiter.queue(4), test)


def test_shard_counts_are_polled_while_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose writer has got no answer, and told nobody."""
    monkeypatch.setattr(shard_pacing, "_POLL_S", 0.01)

    async def test(desk: Desk) -> None:
        await desk.known("a")
        waits = asyncio.create_task(desk.pace_admit("a", 0, SAMPLE, 3, 20.0, None))
        await asyncio.sleep(0.05)
        assert not waits.done()
        desk.facts = [facts(2, version=1), facts(1, version=1)]
        assert 0 < (await asyncio.wait_for(waits, 20))[1] < 20

    run(RateLimiter.queue(4), test)
