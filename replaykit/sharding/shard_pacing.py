"""Count inserts and samples for the rate limiter of all shards."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import math
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from replaykit.pace import INSERT, SAMPLE, LimiterQueue, RateLimiter
from replaykit.sharding.protocol import ShardFacts

__all__ = [
    "MOST_CALLS",
    "LocalPace",
    "PaceKeeper",
    "Paced",
    "RayPace",
    "ShardCounts",
    "ShardsPace",
    "answer_of",
]


class ShardCounts(NamedTuple):
    """The counts of a shard that a client knows, taken from ``ShardFacts``."""

    shard: int
    incarnation: int
    version: int
    written: int
    rows: int
    loads: int = 0


class PaceKeeper(Protocol):
    """The counter for all clients of a sharded buffer, which admits their calls.

    The argument ``reports`` has the counts of the shards that the caller knows. If they include
    rows that were not counted before, these rows are counted as inserted.
    """

    limiter: RateLimiter
    far: bool
    """True if each call sends a message to another process."""

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[Any, bool]:
        """Wait until ``count`` rows may be inserted or sampled.

        Returns:
            The name of the right, and whether the right was available at once.

        Raises:
            RateLimiterTimeout: the timeout has passed.
            ValueError: the limiter can never admit so many rows.
            RuntimeError: the buffer was shut down.
            TimeoutError: the supervisor does not answer.
        """

    def end(
        self, name: Any, side: int, count: int, sampled: int, reports: list[ShardCounts]
    ) -> None:
        """End a right, and count the delivered samples; do not wait.

        ``name``: the name of the right, or None for rows that were stored without a right.
        """

    def may(self, side: int, count: int) -> bool:
        """Return whether ``count`` rows would be admitted now."""

    def emptied(self, reports: list[ShardCounts], counting_on: bool) -> None:
        """Reset the limiter after all rows were removed."""

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``LimiterQueue.stats``."""

    def state(self, reports: list[ShardCounts]) -> dict[str, int]:
        """Return ``LimiterQueue.state``, with all reports counted."""

    def load(self, state: Mapping[str, int] | None, reports: list[ShardCounts]) -> None:
        """Continue from a checked state, with the rows that were loaded."""


class _Counted:
    """The counts of one incarnation of a shard."""

    def __init__(self, incarnation: int, facts: ShardFacts) -> None:
        self.incarnation, self.version = incarnation, facts.version
        self.written, self.rows, self.loads = facts.written, facts.rows, facts.loads
        self.is_there = True


class ShardsPace:
    """The insert and sample counts of a sharded buffer. Thread-safe.

    No method waits. Inserts are computed from the counts of written rows that shards report, not
    from the calls of writers. Therefore each row counts exactly once, even if answers arrive twice,
    late, out of order or through another client. A row counts even if its writer dies before it can
    report the row.

    Args:
        limiter: the rate limiter to apply.
        facts: the facts of all shards at the start.

    Example:
        >>> from replaykit.pace import INSERT, SAMPLE, RateLimiter
        >>> from replaykit.sharding.protocol import ShardFacts
        >>> from replaykit.sharding.shard_pacing import ShardsPace, ShardCounts
        >>> pace = ShardsPace(RateLimiter.queue(4), [ShardFacts(0, 0, 9, None, 0, 0.0, 1.0, 0)] * 2)
        >>> pace.attempt(INSERT, 3), pace.attempt(INSERT, 2), pace.attempt(SAMPLE, 1)
        (True, False, False)
        >>> pace.ended(INSERT, 3, 0, [ShardCounts(0, 0, 1, 2, 2), ShardCounts(1, 0, 1, 1, 1)])
        >>> pace.attempt(SAMPLE, 3), pace.pace.state()
        (True, {'inserts': 3, 'samples': 0})
    """

    def __init__(self, limiter: RateLimiter, facts: list[ShardFacts]) -> None:
        self.limiter, self.pace = limiter, LimiterQueue(limiter)
        self._lock = threading.Lock()
        self._shards = [_Counted(0, one) for one in facts]
        self._dead: dict[tuple[int, int], int] = {}  # counted rows of dead incarnations
        self.pace.start_from(self.size())

    def size(self) -> int:
        """Return the number of rows in live shards, according to the clients' reports."""
        return sum(one.rows for one in self._shards if one.is_there)

    def attempt(self, side: int, count: int) -> bool:
        """Admit rows if no wait is necessary; return whether they are admitted."""
        with self._lock:
            return self.pace.attempt(side, count, self.size())

    def may(self, side: int, count: int) -> bool:
        """Return whether rows would be admitted now."""
        with self._lock:
            return self.pace.may(side, count, self.size())

    def ended(self, side: int, count: int, sampled: int, reports: Iterable[ShardCounts]) -> None:
        """End the right to ``count`` rows; count the new rows, and ``sampled`` samples."""
        with self._lock:
            written = self._learned(reports)
            if side == INSERT:
                self.pace.end(INSERT, count, written)
            else:
                if written:
                    self.pace.end(INSERT, 0, written)
                self.pace.end(SAMPLE, count, sampled)

    def _learned(self, reports: Iterable[ShardCounts]) -> int:
        """Store new counts; return the number of written rows not counted before."""
        found = 0
        for shard, incarnation, version, written, rows, loads in reports:
            now = self._shards[shard]
            if incarnation == now.incarnation:
                if version > now.version:
                    if loads == now.loads:  # else ``load`` counts the rows
                        found += max(0, written - now.written)
                    now.version, now.written, now.rows = version, written, rows
                    now.loads = loads
            else:
                found += self._of_dead(shard, incarnation, written)
        return found

    def _of_dead(self, shard: int, incarnation: int, written: int) -> int:
        known = self._dead.get((shard, incarnation), written)
        self._dead[shard, incarnation] = max(known, written)
        return max(0, written - known)

    # -- deaths and restarts ------------------------------------------------------------------

    def died(self, shard: int, incarnation: int, written: int) -> None:
        """Remove the rows of a shard that died after writing at least ``written`` rows."""
        with self._lock:
            now = self._shards[shard]
            if incarnation == now.incarnation:
                now.is_there = False
                found, now.written = max(0, written - now.written), max(written, now.written)
            else:
                found = self._of_dead(shard, incarnation, written)
            self.pace.end(INSERT, 0, found)

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """Replace the counts of a dead shard by the counts of its successor.

        If the remaining rows are too few for sampling, the limiter starts to count again with these
        rows. Without this restart of the counts, the limiter would delay writes until the lost rows
        are sampled.
        """
        with self._lock:
            old = self._shards[shard]
            # Count restored rows that no client had reported, too.
            found = max(0, facts.written - old.written)
            self._dead[shard, old.incarnation] = old.written + found
            self._shards[shard] = _Counted(incarnation, facts)
            self.pace.end(INSERT, 0, found)
            whole = all(one.is_there for one in self._shards)
            if whole and self.size() < self.limiter.min_size_to_sample:
                self.pace.start_from(self.size(), counting_on=True)

    def emptied(self, reports: Iterable[ShardCounts], counting_on: bool) -> None:
        """Reset the limiter after all rows were removed; see ``ReplayBuffer.empty``."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(reports))
            self.pace.start_from(self.size(), counting_on=counting_on)

    # -- counts -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``LimiterQueue.stats``."""
        return self.pace.stats()

    def state(self, reports: Iterable[ShardCounts]) -> dict[str, int]:
        """Return ``LimiterQueue.state``, with all reports counted."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(reports))
            return self.pace.state()

    def load(self, state: Mapping[str, int] | None, reports: Iterable[ShardCounts]) -> None:
        """Continue from a checked state, with the rows that were loaded."""
        with self._lock:
            self._learned(reports)
            self.pace.load_state(state, self.size())


class LocalPace(ShardsPace):
    """The counts for clients in this process.

    Their calls wait in this object.
    """

    far = False

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[None, bool]:
        """Wait for a right; its name is None."""
        at_once = self.attempt(side, count)
        if not at_once:
            self.pace.admit(side, count, self.size, timeout)
        return None, at_once

    def end(
        self, name: None, side: int, count: int, sampled: int, reports: list[ShardCounts]
    ) -> None:
        """End a right."""
        self.ended(side, count, sampled, reports)

    def close(self) -> None:
        """Make waiting calls raise RuntimeError."""
        self.pace.close()


MOST_CALLS = 10_000
"""Maximum number of concurrent calls in the supervisor.

The supervisor can answer a further call only while fewer than ``MOST_CALLS`` calls are waiting.
"""

_ASK_AGAIN_S = 5.0
"""Seconds that a call waits in the supervisor before its client asks again.

So a client notices a supervisor that does not answer, even during a long wait.
"""

_POLL_S = 1.0
"""Seconds between polls of the shards' counts while a call waits.

Polls find the rows of writes whose answers were lost, since no client reports them.
"""

_ANSWERED_WITHIN_S = 1.0

_Name = tuple[str, int]


def answer_of(ref: Any, within: float) -> Any:
    """Return the answer of the supervisor.

    Raises:
        TimeoutError: the supervisor does not answer within ``within`` seconds.
        RuntimeError: the supervisor has ended.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ref, timeout=None if within == math.inf else within)
    except GetTimeoutError:
        raise TimeoutError(
            f"the supervisor of the shards has not answered within {within:g} s"
        ) from None
    except RayActorError:
        raise RuntimeError(
            "the shards have ended: their buffer was closed, or its process has died"
        ) from None


class Paced:
    """The rate limiter of a supervisor actor.

    All methods run in one event loop. A right belongs to a client, and ends when the process of the
    client dies.
    """

    _counts: ShardsPace | None = None

    def _begin_pace(self, limiter: RateLimiter, facts: list[ShardFacts]) -> None:
        self._counts = ShardsPace(limiter, facts)
        self._changed = asyncio.Event()
        self._asking: set[_Name] = set()
        self._rights: dict[str, dict[int, tuple[int, int]]] = {}
        self._staying: dict[str, asyncio.Event] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._polled_at = time.monotonic()

    @abc.abstractmethod
    async def _facts(self, shard: Any) -> ShardFacts:
        """Return the facts of a shard; subclasses define this method."""

    _shards: list[Any]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- deaths -------------------------------------------------------------------------------

    def _pace_died(self, shard: int, incarnation: int, written: int) -> None:
        if self._counts is not None:
            self._counts.died(shard, incarnation, written)
            self._notify()

    def _pace_came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        if self._counts is not None:
            self._counts.came_back(shard, incarnation, facts)
            self._notify()

    async def pace_stay(self, client: str) -> None:
        """Wait until the client has left.

        The client's process owns the reference to the result. If that process dies, the wait of
        `pace_watch` for the reference raises an error.
        """
        await self._staying.setdefault(client, asyncio.Event()).wait()

    async def pace_watch(self, client: str, stay: list[Any]) -> None:
        """End the rights of a client when it leaves or its process dies.

        Args:
            stay: a list with the client's reference to the result of ``pace_stay``.
        """
        self._rights.setdefault(client, {})
        self._watches.add(watch := asyncio.create_task(self._watch(client, stay[0])))
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, client: str, stay: Any) -> None:
        with contextlib.suppress(Exception):  # any error means that the process has died
            await stay
        assert self._counts is not None
        self._asking = {name for name in self._asking if name[0] != client}
        await self._poll()  # also count rows that it wrote but could not report
        for side, count in self._rights.pop(client, {}).values():
            self._counts.ended(side, count, 0, ())
        self._leave(client)
        self._notify()

    async def pace_leave(self, client: str) -> None:
        """Forget a client that is not needed any more."""
        self._leave(client)

    def _leave(self, client: str) -> None:
        event = self._staying.pop(client, None)
        if event is not None:
            event.set()

    async def _poll(self) -> None:
        """Ask the shards for their counts; ignore shards that do not answer soon."""
        assert self._counts is not None
        self._polled_at = time.monotonic()
        asked = {asyncio.ensure_future(self._facts(shard)): shard for shard in self._shards}
        there, silent = await asyncio.wait(asked, timeout=_ANSWERED_WITHIN_S)
        for answer in silent:
            answer.cancel()
        reports = [
            ShardCounts(asked[answer].shard, asked[answer].incarnation, *_counted(answer.result()))
            for answer in there
            if answer.exception() is None
        ]
        self._counts.ended(INSERT, 0, 0, reports)
        self._notify()

    # -- admission ----------------------------------------------------------------------------

    async def pace_admit(
        self, client: str, number: int, side: int, count: int, within: float, last: float | None
    ) -> tuple[bool, Any]:
        """Wait for a right.

        Args:
            client, number: the two parts of the right's name.
            within: seconds to wait.
            last: the timeout of the whole call if it passes during this request, or None if the
                client will ask again.

        Returns:
            True and the seconds that the call waited, or False and an error. Negative seconds mean
            that the right is not available yet. None in place of the seconds means that the client
            is not known.
        """
        assert self._counts is not None
        if client not in self._rights:
            return True, None
        name, begun, waits = (client, number), time.monotonic(), False
        self._asking.add(name)
        try:
            while True:
                if name not in self._asking:
                    return True, -1
                if self._counts.attempt(side, count):
                    self._rights[client][number] = side, count
                    return True, time.monotonic() - begun if waits else 0
                size = self._counts.size()
                self._counts.pace.check(side, count, size)
                left = begun + within - time.monotonic()
                if left <= 0 and last is not None:
                    raise self._counts.pace.late(side, count, size, last)
                if left <= 0:
                    return True, -1
                waits = True
                await self._wait(left)
        except Exception as error:
            return False, error
        finally:
            self._asking.discard(name)
            if waits:
                self._counts.pace.waited(side, time.monotonic() - begun)

    async def _wait(self, within: float) -> None:
        """Wait until a count changes, for at most ``within`` seconds."""
        changed = self._changed
        polling = self._looking is not None and not self._looking.done()
        if not polling and time.monotonic() >= self._polled_at + _POLL_S:
            self._looking = asyncio.create_task(self._poll())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), min(within, _POLL_S))

    async def pace_end(
        self, name: _Name | None, side: int, count: int, sampled: int, reports: list[ShardCounts]
    ) -> None:
        """End a right, or cancel a request for a right."""
        assert self._counts is not None
        held = 0
        if name is not None:
            self._asking.discard(name)
            _, held = self._rights.get(name[0], {}).pop(name[1], (side, 0))
        self._counts.ended(side, held, sampled, reports)
        self._notify()

    async def pace_do(self, verb: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the counts that returns without waiting."""
        found = getattr(self._counts, verb)(*args)
        self._notify()
        return found


class RayPace:
    """The access of one client to the counts in a supervisor actor.

    A pickled copy is another client.

    Args:
        actor: the supervisor.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, actor: Any, limiter: RateLimiter, timeout: float) -> None:
        self._actor, self.limiter, self._timeout = actor, limiter, timeout
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._client: str | None = None
        self._stay: Any = None

    far = True

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[_Name, bool]:
        """Wait for a right.

        Cost: one message, and one more for every 5 seconds of waiting.
        """
        until = None if timeout is None else time.monotonic() + timeout
        at_once = True
        while True:
            left = math.inf if until is None else until - time.monotonic()
            last = timeout if left <= _ASK_AGAIN_S else None
            within = max(0.0, min(left, _ASK_AGAIN_S))
            name = (self._known(), next(self._numbers))
            try:
                asked = self._actor.pace_admit.remote(*name, side, count, within, last)
                went_well, found = answer_of(asked, self._timeout + within)
            except BaseException:
                self.end(name, side, count, 0, [])  # the supervisor may still give the right
                raise
            if not went_well:
                raise found
            if found is not None and found >= 0:
                return name, at_once and found == 0
            at_once = False
            if found is None:
                with self._lock:
                    self._client = None

    def _known(self) -> str:
        """Return the client's name.

        The first call also makes the supervisor watch the process of the client.
        """
        with self._lock:
            if self._client is None:
                client = uuid.uuid4().hex
                self._stay = self._actor.pace_stay.remote(client)
                self._actor.pace_watch.remote(client, [self._stay])
                weakref.finalize(self, _leave, self._actor, client).atexit = False
                self._client = client
            return self._client

    def end(
        self, name: _Name | None, side: int, count: int, sampled: int, reports: list[ShardCounts]
    ) -> None:
        """End a right. Cost: one message; the call does not wait."""
        self._actor.pace_end.remote(name, side, count, sampled, reports)

    def may(self, side: int, count: int) -> bool:
        """Return whether rows would be admitted now."""
        return bool(self._do("may", side, count))

    def emptied(self, reports: list[ShardCounts], counting_on: bool) -> None:
        """Reset the limiter after all rows were removed."""
        self._do("emptied", reports, counting_on)

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``LimiterQueue.stats``."""
        return dict(self._do("stats"))

    def state(self, reports: list[ShardCounts]) -> dict[str, int]:
        """Return ``LimiterQueue.state``, with all reports counted."""
        return dict(self._do("state", reports))

    def load(self, state: Mapping[str, int] | None, reports: list[ShardCounts]) -> None:
        """Continue from a checked state, with the rows that were loaded."""
        self._do("load", state, reports)

    def _do(self, verb: str, *args: Any) -> Any:
        return answer_of(self._actor.pace_do.remote(verb, args), self._timeout)

    def __getstate__(self) -> tuple[Any, RateLimiter, float]:
        return self._actor, self.limiter, self._timeout

    def __setstate__(self, state: tuple[Any, RateLimiter, float]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def _counted(facts: ShardFacts) -> tuple[int, int, int, int]:
    return facts.version, facts.written, facts.rows, facts.loads


def _leave(actor: Any, client: str) -> None:
    with contextlib.suppress(Exception):  # in this finalizer the actor may have ended already
        actor.pace_leave.remote(client)
