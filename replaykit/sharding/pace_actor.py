"""The counts of a rate limiter in the actor that all clients ask."""

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
from collections.abc import Mapping
from typing import Any

from replaykit.pace import INSERT, RateLimiter
from replaykit.sharding.facts import ShardFacts
from replaykit.sharding.pacing import ShardsPace, Told

__all__ = ["MOST_CALLS", "Paced", "RayPace", "answer_of"]

MOST_CALLS = 10_000
"""Calls that may wait in the supervisor at a time. It goes on answering all others beside them as
long as they are fewer."""

_ASK_AGAIN_S = 5.0
"""How long a call waits there before its client asks anew, so that a supervisor that does not
answer is told from a limiter that does not let it go on."""

_LOOK_AGAIN_S = 1.0
"""Seconds between looks what shards hold, while somebody waits: rows of a write whose answer was
lost are told by nobody else."""

_ANSWERED_WITHIN_S = 1.0

_Name = tuple[str, int]


def answer_of(ref: Any, within: float) -> Any:
    """Returns what the supervisor answers.

    Raises:
        TimeoutError: it does not, within that many seconds. RuntimeError: it has ended.
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
    """What a supervisor actor does for a rate limiter. All of it runs in one event loop.

    A right belongs to a client: when the process dies that has the client, whatever was under way
    in it is so no more.
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
        self._looked = time.monotonic()

    @abc.abstractmethod
    async def _facts(self, shard: Any) -> ShardFacts:
        """What a shard says of itself; of the actor that this is mixed into."""

    _shards: list[Any]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- deaths -------------------------------------------------------------------------------

    def _pace_died(self, shard: int, incarnation: int, written: int) -> None:
        if self._counts is not None:
            self._counts.died(shard, incarnation, written)
            self._tell()

    def _pace_came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        if self._counts is not None:
            self._counts.came_back(shard, incarnation, facts)
            self._tell()

    async def pace_stay(self, client: str) -> None:
        """Returns when the client has left. What it gives belongs to the client's process: when
        that dies there is nobody any more whom it could be asked of."""
        await self._staying.setdefault(client, asyncio.Event()).wait()

    async def pace_watch(self, client: str, stay: list[Any]) -> None:
        """Has what a client has under way forgotten when its process dies.

        Args:
            stay: what ``pace_stay`` has given it.
        """
        self._rights.setdefault(client, {})
        self._watches.add(watch := asyncio.create_task(self._watch(client, stay[0])))
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, client: str, stay: Any) -> None:
        with contextlib.suppress(Exception):  # whatever is raised: it is not there any more
            await stay
        assert self._counts is not None
        self._asking = {name for name in self._asking if name[0] != client}
        await self._look()  # what it has written counts, although it could not tell
        for side, count in self._rights.pop(client, {}).values():
            self._counts.ended(side, count, 0, ())
        self._leave(client)
        self._tell()

    async def pace_leave(self, client: str) -> None:
        """A client is not needed any more."""
        self._leave(client)

    def _leave(self, client: str) -> None:
        event = self._staying.pop(client, None)
        if event is not None:
            event.set()

    async def _look(self) -> None:
        """Asks the shards what they hold; those that do not answer soon are left out."""
        assert self._counts is not None
        self._looked = time.monotonic()
        asked = {asyncio.ensure_future(self._facts(shard)): shard for shard in self._shards}
        there, silent = await asyncio.wait(asked, timeout=_ANSWERED_WITHIN_S)
        for answer in silent:
            answer.cancel()
        told = [
            Told(asked[answer].shard, asked[answer].incarnation, *_counted(answer.result()))
            for answer in there
            if answer.exception() is None
        ]
        self._counts.ended(INSERT, 0, 0, told)
        self._tell()

    # -- going on -----------------------------------------------------------------------------

    async def pace_admit(
        self, client: str, number: int, side: int, count: int, within: float, last: float | None
    ) -> tuple[bool, Any]:
        """Waits for a right; returns whether it went well, and for how many seconds, or the error.
        A negative number: there is none yet. None: who is this client?

        Args:
            client, number: name the right.
            within: seconds to wait.
            last: the timeout of the call that has passed then; None: it will ask again.
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
        """Until something has changed, but no longer than that."""
        changed = self._changed
        looking = self._looking is not None and not self._looking.done()
        if not looking and time.monotonic() >= self._looked + _LOOK_AGAIN_S:
            self._looking = asyncio.create_task(self._look())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), min(within, _LOOK_AGAIN_S))

    async def pace_end(
        self, name: _Name | None, side: int, count: int, sampled: int, told: list[Told]
    ) -> None:
        """Takes a right back, also one that is still asked for."""
        assert self._counts is not None
        held = 0
        if name is not None:
            self._asking.discard(name)
            _, held = self._rights.get(name[0], {}).pop(name[1], (side, 0))
        self._counts.ended(side, held, sampled, told)
        self._tell()

    async def pace_do(self, verb: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the counts that does not wait."""
        found = getattr(self._counts, verb)(*args)
        self._tell()
        return found


class RayPace:
    """The counts as clients see them; can be pickled, and is another client then.

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
        """Waits for a right; cost: one message."""
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
                self.end(name, side, count, 0, [])  # it may still be given
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
        """This client's name, by which the supervisor notices when its process dies."""
        with self._lock:
            if self._client is None:
                client = uuid.uuid4().hex
                self._stay = self._actor.pace_stay.remote(client)
                self._actor.pace_watch.remote(client, [self._stay])
                weakref.finalize(self, _leave, self._actor, client).atexit = False
                self._client = client
            return self._client

    def end(
        self, name: _Name | None, side: int, count: int, sampled: int, told: list[Told]
    ) -> None:
        """Gives it back. Cost: one message that nobody waits for."""
        self._actor.pace_end.remote(name, side, count, sampled, told)

    def may(self, side: int, count: int) -> bool:
        """Whether rows would be admitted now."""
        return bool(self._do("may", side, count))

    def emptied(self, told: list[Told], counting_on: bool) -> None:
        """All rows were let go."""
        self._do("emptied", told, counting_on)

    def stats(self) -> dict[str, Any]:
        """What ``Pace.stats`` says."""
        return dict(self._do("stats"))

    def state(self, told: list[Told]) -> dict[str, int]:
        """What ``Pace.state`` says."""
        return dict(self._do("state", told))

    def load(self, state: Mapping[str, int] | None, told: list[Told]) -> None:
        """Goes on from a state."""
        self._do("load", state, told)

    def _do(self, verb: str, *args: Any) -> Any:
        return answer_of(self._actor.pace_do.remote(verb, args), self._timeout)

    def __getstate__(self) -> tuple[Any, RateLimiter, float]:
        return self._actor, self.limiter, self._timeout

    def __setstate__(self, state: tuple[Any, RateLimiter, float]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def _counted(facts: ShardFacts) -> tuple[int, int, int, int]:
    return facts.version, facts.written, facts.rows, facts.loads


def _leave(actor: Any, client: str) -> None:
    with contextlib.suppress(Exception):  # a finalizer: the actor may have ended before
        actor.pace_leave.remote(client)
