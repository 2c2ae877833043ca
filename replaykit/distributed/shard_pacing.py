"""Count inserts and samples for the rate limiter of all shards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from replaykit._ray import ray_module
from replaykit.distributed.protocol import ShardFacts
from replaykit.distributed.requests import fetch, running_ray
from replaykit.errors import ActorLost, RateLimiterTimeout
from replaykit.pace import INSERT, SAMPLE, LimiterQueue, RateLimiter

_POLL_S = 1.0
"""Seconds between polls of the shards' counts while a call waits.

Polls find the rows of writes whose answers were lost, since no client reports them.
"""

_RETRY_S = 0.5
"""Seconds after which a waiting call in the supervisor tries again without a notification."""


class ShardsPace:
    """The insert and sample counts of a sharded buffer. Thread-safe.

    Inserts are computed from the counts of written rows that shards report, not from the calls of
    writers. Therefore each row counts exactly once, even if answers arrive twice, late, out of
    order or through another client. A row counts even if its writer dies before it can report the
    row. Only ``admit`` waits.

    Args:
        limiter: the rate limiter to apply.
        facts: the facts of all shards at the start.
        poll: function that asks the shards for their counts while a call waits, or None if no
            answer of a shard can be lost.

    Attributes:
        far: True if each call sends a message to another process.

    Example:
        >>> from replaykit.pace import INSERT, SAMPLE, RateLimiter
        >>> from replaykit.distributed.protocol import ShardFacts
        >>> from replaykit.distributed.shard_pacing import ShardsPace
        >>> def facts(shard, rows, version):
        ...     return ShardFacts(rows, rows, 9, None, 0, 0.0, 1.0, version, shard=shard)
        >>> pace = ShardsPace(RateLimiter.queue(4), [facts(0, 0, 0), facts(1, 0, 0)])
        >>> pace.attempt(INSERT, 3), pace.attempt(INSERT, 2), pace.attempt(SAMPLE, 1)
        (True, False, False)
        >>> pace.end(None, INSERT, 3, 0, [facts(0, 2, 1), facts(1, 1, 1)])
        >>> pace.attempt(SAMPLE, 3), pace.pace.state()
        (True, {'inserts': 3, 'samples': 0})
    """

    far = False

    def __init__(
        self,
        limiter: RateLimiter,
        facts: list[ShardFacts],
        poll: Callable[[], list[ShardFacts]] | None = None,
    ) -> None:
        self.limiter = limiter
        self.pace = LimiterQueue(limiter) if poll is None else LimiterQueue(limiter, pause=_RETRY_S)
        self._poll, self._polled_at = poll, time.monotonic()
        self._lock = threading.Lock()
        self._shards = list(facts)
        self._there = [True] * len(facts)
        self._dead: dict[tuple[int, int], int] = {}  # counted rows of dead incarnations
        self.pace.start_from(self.size())

    def size(self) -> int:
        """Return the number of rows in live shards, according to the clients' reports."""
        return sum(one.rows for one, there in zip(self._shards, self._there, strict=True) if there)

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[Any, bool]:
        """Wait until ``count`` rows may be inserted or sampled.

        Returns:
            The name of the right, and whether the right was available at once.

        Raises:
            RateLimiterTimeout: the timeout has passed.
            ValueError: the limiter can never admit so many rows.
            RuntimeError: the buffer was shut down.
        """
        at_once = self.attempt(side, count)
        if not at_once:
            self.pace.admit(side, count, self._polled_size, timeout)
        return None, at_once

    def _polled_size(self) -> int:
        """Return the number of rows; poll the shards from time to time."""
        if self._poll is not None and time.monotonic() >= self._polled_at + _POLL_S:
            self._polled_at = time.monotonic()
            threading.Thread(target=self.count_polled, daemon=True).start()
        return self.size()

    def count_polled(self) -> None:
        """Count the rows that the shards have now."""
        if self._poll is not None:
            self.end(None, INSERT, 0, 0, self._poll())

    def attempt(self, side: int, count: int) -> bool:
        """Admit rows if no wait is necessary; return whether they are admitted."""
        with self._lock:
            return self.pace.attempt(side, count, self.size())

    def may(self, side: int, count: int) -> bool:
        """Return whether rows would be admitted now."""
        with self._lock:
            return self.pace.may(side, count, self.size())

    def end(
        self, name: Any, side: int, count: int, sampled: int, reports: Iterable[ShardFacts]
    ) -> None:
        """End the right to ``count`` rows, and count the delivered samples; do not wait.

        Args:
            name: the name of the right, or None for rows that were stored without a right.
            reports: the facts of the shards that the caller knows. If they include rows that were
                not counted before, these rows are counted as inserted.
        """
        with self._lock:
            written = self._learned(reports)
            if side == INSERT:
                self.pace.end(INSERT, count, written)
            else:
                if written:
                    self.pace.end(INSERT, 0, written)
                self.pace.end(SAMPLE, count, sampled)

    def _learned(self, reports: Iterable[ShardFacts]) -> int:
        """Store new counts; return the number of written rows not counted before."""
        found = 0
        for report in reports:
            now = self._shards[report.shard]
            if report.incarnation != now.incarnation:
                found += self._of_dead(report.shard, report.incarnation, report.written)
            elif report.version > now.version:
                if report.loads == now.loads:  # else ``load`` counts the rows
                    found += max(0, report.written - now.written)
                self._shards[report.shard] = report
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
                self._there[shard] = False
                found = max(0, written - now.written)
                self._shards[shard] = replace(now, written=now.written + found)
            else:
                found = self._of_dead(shard, incarnation, written)
            self.pace.end(INSERT, 0, found)

    def came_back(self, facts: ShardFacts) -> None:
        """Replace the counts of a dead shard by the counts of its successor.

        If the remaining rows are too few for sampling, the limiter starts to count again with these
        rows. Without this restart of the counts, the limiter would delay writes until the lost rows
        are sampled.
        """
        with self._lock:
            shard = facts.shard
            old = self._shards[shard]
            # Count restored rows that no client had reported, too.
            found = max(0, facts.written - old.written)
            self._dead[shard, old.incarnation] = old.written + found
            self._shards[shard] = facts
            self._there[shard] = True
            self.pace.end(INSERT, 0, found)
            if all(self._there) and self.size() < self.limiter.min_size_to_sample:
                self.pace.start_from(self.size(), counting_on=True)

    def emptied(self, reports: Iterable[ShardFacts], counting_on: bool) -> None:
        """Reset the limiter after all rows were removed; see ``ReplayBuffer.empty``."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(reports))
            self.pace.start_from(self.size(), counting_on=counting_on)

    # -- counts -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``LimiterQueue.stats``."""
        return self.pace.stats()

    def state(self, reports: Iterable[ShardFacts]) -> dict[str, int]:
        """Return ``LimiterQueue.state``, with all reports counted."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(reports))
            return self.pace.state()

    def load(self, state: Mapping[str, int] | None, reports: Iterable[ShardFacts]) -> None:
        """Continue from a checked state, with the rows that were loaded."""
        with self._lock:
            self._learned(reports)
            self.pace.load_state(state, self.size())

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

_Name = tuple[str, int]


class InSupervisor:
    """Call the methods of an object in the actor of the supervisor.

    Args:
        actor: the supervisor.
        path: the attributes of the supervisor that lead to the object, each with a dot after it.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, actor: Any, path: str, timeout: float) -> None:
        self._actor, self._path, self._timeout = actor, path, timeout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._ask, name)

    def _ask(self, name: str, *args: Any, extra: float = 0.0) -> Any:
        """Return the result of a method, which may wait ``extra`` seconds itself."""
        asked = self._actor.ask.remote(f"{self._path}{name}", args)
        return answer_of(asked, self._timeout + extra)


def answer_of(ref: Any, within: float) -> Any:
    """Return the answer of the supervisor.

    Raises:
        TimeoutError: the supervisor does not answer within ``within`` seconds.
        RuntimeError: the supervisor has ended.
    """
    try:
        return fetch(ref, None if within == math.inf else within)
    except ray_module().exceptions.GetTimeoutError:
        raise TimeoutError(
            f"the supervisor of the shards has not answered within {within:g} s"
        ) from None
    except ActorLost:
        raise RuntimeError(
            "the shards have ended: their buffer was closed, or its process has died"
        ) from None


class ActorPace:
    """The rights of clients in other processes, in the actor of the supervisor.

    All methods run in one event loop. A right belongs to a client, and ends when the process of the
    client dies.

    Args:
        counts: the counts of the rate limiter.
        in_thread: function that calls a function in a thread.
    """

    def __init__(self, counts: ShardsPace, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._counts, self._in_thread = counts, in_thread
        self._asking: set[_Name] = set()
        self._rights: dict[str, dict[int, tuple[int, int]]] = {}
        self._staying: dict[str, asyncio.Event] = {}
        self._watches: set[asyncio.Task[None]] = set()

    # -- clients ------------------------------------------------------------------------------

    async def stay(self, client: str) -> None:
        """Wait until the client has left.

        The client's process owns the reference to the result. If that process dies, the wait of
        ``watch`` for the reference raises an error.
        """
        await self._staying.setdefault(client, asyncio.Event()).wait()

    async def watch(self, client: str, stay: list[Any]) -> None:
        """End the rights of a client when it leaves or its process dies.

        Args:
            stay: a list with the client's reference to the result of ``stay``.
        """
        self._rights.setdefault(client, {})
        self._watches.add(watch := asyncio.create_task(self._watch(client, stay[0])))
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, client: str, stay: Any) -> None:
        with contextlib.suppress(Exception):  # any error means that the process has died
            await stay
        self._asking = {name for name in self._asking if name[0] != client}
        # Rows that it wrote but could not report also count.
        await self._in_thread(self._counts.count_polled)
        for side, count in self._rights.pop(client, {}).values():
            self._counts.end(None, side, count, 0, ())
        await self.leave(client)

    async def leave(self, client: str) -> None:
        """Forget a client that is not needed any more."""
        event = self._staying.pop(client, None)
        if event is not None:
            event.set()

    # -- admission ----------------------------------------------------------------------------

    async def admit(
        self, client: str, number: int, side: int, count: int, within: float, last: float | None
    ) -> float | None:
        """Wait for a right.

        Args:
            client, number: the two parts of the right's name.
            within: seconds to wait.
            last: the timeout of the whole call if it passes during this request, or None if the
                client will ask again.

        Returns:
            The seconds that the call waited. Negative seconds mean that the right is not available
            yet, and None that the client is not known.
        """
        if client not in self._rights:
            return None
        name, begun, at_once = (client, number), time.monotonic(), True
        self._asking.add(name)
        try:
            if not self._counts.attempt(side, count):
                at_once = False
                await self._in_thread(self._counts.admit, side, count, within)
        except RateLimiterTimeout:
            if last is None or name not in self._asking:
                return -1
            raise self._counts.pace.late(side, count, self._counts.size(), last) from None
        else:
            if name not in self._asking:  # its client does not wait any more
                self._counts.end(None, side, count, 0, ())
                return -1
            self._rights[client][number] = side, count
            return 0 if at_once else time.monotonic() - begun
        finally:
            self._asking.discard(name)

    async def end(
        self, name: _Name | None, side: int, count: int, sampled: int, reports: list[ShardFacts]
    ) -> None:
        """End a right, or cancel a request for a right."""
        held = 0
        if name is not None:
            self._asking.discard(name)
            _, held = self._rights.get(name[0], {}).pop(name[1], (side, 0))
        self._counts.end(None, side, held, sampled, reports)


class RayPace(InSupervisor):
    """The access of one client to the `ShardsPace` in a supervisor actor.

    A pickled copy is another client.

    Args:
        actor: the supervisor.
        timeout: seconds to wait for an answer.
    """

    far = True

    def __init__(self, actor: Any, limiter: RateLimiter, timeout: float) -> None:
        super().__init__(actor, "pace.", timeout)
        self.limiter = limiter
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._client: str | None = None
        self._stay: Any = None

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[_Name, bool]:
        """Wait for a right, like ``ShardsPace.admit``.

        Raises:
            TimeoutError: the supervisor does not answer.

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
                asked = self._send("admit", *name, side, count, within, last)
                found = answer_of(asked, self._timeout + within)
            except BaseException:
                self.end(name, side, count, 0, [])  # the supervisor may still give the right
                raise
            if found is not None and found >= 0:
                return name, at_once and found == 0
            at_once = False
            if found is None:
                with self._lock:
                    self._client = None

    def _send(self, name: str, *args: Any) -> Any:
        running_ray()  # a thread may still wait when the program ends Ray
        return self._actor.pace.remote(name, args)

    def _known(self) -> str:
        """Return the client's name.

        The first call also makes the supervisor watch the process of the client.
        """
        with self._lock:
            if self._client is None:
                client = uuid.uuid4().hex
                self._stay = self._send("stay", client)
                self._send("watch", client, [self._stay])
                weakref.finalize(self, _leave, self._actor, client).atexit = False
                self._client = client
            return self._client

    def end(
        self, name: _Name | None, side: int, count: int, sampled: int, reports: list[ShardFacts]
    ) -> None:
        """End a right. Cost: one message; the call does not wait."""
        self._send("end", name, side, count, sampled, reports)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayPace, (self._actor, self.limiter, self._timeout)


PaceKeeper: TypeAlias = ShardsPace | RayPace


def _leave(actor: Any, client: str) -> None:
    with contextlib.suppress(Exception):  # in this finalizer the actor may have ended already
        actor.pace.remote("leave", (client,))
