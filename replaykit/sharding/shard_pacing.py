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

from replaykit.pace import INSERT, SAMPLE, Pace, RateLimiter
from replaykit.sharding.protocol import ShardFacts

__all__ = [
    "MOST_CALLS",
    "LocalPace",
    "PaceKeeper",
    "Paced",
    "RayPace",
    "ShardsPace",
    "Told",
    "answer_of",
]


class Told(NamedTuple):
    """What a client knows of a shard: of ``ShardFacts`` what rows are counted by."""

    shard: int
    incarnation: int
    version: int
    written: int
    rows: int
    loads: int = 0


class PaceKeeper(Protocol):
    """Who counts for all clients of a sharded buffer, and lets them go on.

    ``told`` is what the caller knows of the shards: rows written since count as inserted.
    """

    limiter: RateLimiter
    far: bool
    """Whether a question takes a message."""

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[Any, bool]:
        """Waits until ``count`` rows may be inserted or sampled; returns the name of this right,
        and whether it was there at once.

        Raises:
            RateLimiterTimeout: they may not yet. ValueError: they never will.
            RuntimeError: the buffer was shut down. TimeoutError: nobody answers.
        """

    def end(self, name: Any, side: int, count: int, sampled: int, told: list[Told]) -> None:
        """Gives a right back, of which so many samples were delivered; does not wait.

        ``name``: None for what nobody waited for.
        """

    def may(self, side: int, count: int) -> bool:
        """Whether ``count`` rows would be admitted now."""

    def emptied(self, told: list[Told], counting_on: bool) -> None:
        """Told that all rows were let go."""

    def stats(self) -> dict[str, Any]:
        """What ``Pace.stats`` says."""

    def state(self, told: list[Told]) -> dict[str, int]:
        """What ``Pace.state`` says, with all that is told."""

    def load(self, state: Mapping[str, int] | None, told: list[Told]) -> None:
        """Goes on from a state that was checked, with the rows that were loaded."""


class _Counted:
    """What is counted of one incarnation of a shard."""

    def __init__(self, incarnation: int, facts: ShardFacts) -> None:
        self.incarnation, self.version = incarnation, facts.version
        self.written, self.rows, self.loads = facts.written, facts.rows, facts.loads
        self.is_there = True


class ShardsPace:
    """The counts of one buffer whose rows lie in shards. Thread-safe; nothing here waits.

    What is inserted follows from how many rows shards say they have written, not from what writers
    say: answers that come twice, late, in any order or from anybody count a row once, also one
    whose writer has died before it could tell.

    Args:
        limiter: the law.
        facts: of all shards, as they begin.

    Example:
        >>> from replaykit.pace import INSERT, SAMPLE, RateLimiter
        >>> from replaykit.sharding.protocol import ShardFacts
        >>> from replaykit.sharding.shard_pacing import ShardsPace, Told
        >>> pace = ShardsPace(RateLimiter.queue(4), [ShardFacts(0, 0, 9, None, 0, 0.0, 1.0, 0)] * 2)
        >>> pace.attempt(INSERT, 3), pace.attempt(INSERT, 2), pace.attempt(SAMPLE, 1)
        (True, False, False)
        >>> pace.ended(INSERT, 3, 0, [Told(0, 0, 1, 2, 2), Told(1, 0, 1, 1, 1)])
        >>> pace.attempt(SAMPLE, 3), pace.pace.state()
        (True, {'inserts': 3, 'samples': 0})
    """

    def __init__(self, limiter: RateLimiter, facts: list[ShardFacts]) -> None:
        self.limiter, self.pace = limiter, Pace(limiter)
        self._lock = threading.Lock()
        self._shards = [_Counted(0, one) for one in facts]
        self._dead: dict[tuple[int, int], int] = {}  # rows counted of those that have died
        self.pace.start_from(self.size())

    def size(self) -> int:
        """Rows in the shards that are there, as far as anybody has told."""
        return sum(one.rows for one in self._shards if one.is_there)

    def attempt(self, side: int, count: int) -> bool:
        """Admits rows at once, or not at all."""
        with self._lock:
            return self.pace.attempt(side, count, self.size())

    def may(self, side: int, count: int) -> bool:
        """Whether rows would be admitted."""
        with self._lock:
            return self.pace.may(side, count, self.size())

    def ended(self, side: int, count: int, sampled: int, told: Iterable[Told]) -> None:
        """Rows that were admitted are not under way any more, and so many were sampled."""
        with self._lock:
            written = self._learned(told)
            if side == INSERT:
                self.pace.end(INSERT, count, written)
            else:
                if written:
                    self.pace.end(INSERT, 0, written)
                self.pace.end(SAMPLE, count, sampled)

    def _learned(self, told: Iterable[Told]) -> int:
        """Takes over what is new, and returns how many rows were written that nobody knew of."""
        found = 0
        for shard, incarnation, version, written, rows, loads in told:
            now = self._shards[shard]
            if incarnation == now.incarnation:
                if version > now.version:
                    if loads == now.loads:  # else ``load`` says what counts
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

    # -- what happens to shards ---------------------------------------------------------------

    def died(self, shard: int, incarnation: int, written: int) -> None:
        """A shard has died after so many rows were written at least: it has none that are there."""
        with self._lock:
            now = self._shards[shard]
            if incarnation == now.incarnation:
                now.is_there = False
                found, now.written = max(0, written - now.written), max(written, now.written)
            else:
                found = self._of_dead(shard, incarnation, written)
            self.pace.end(INSERT, 0, found)

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """This incarnation has taken the place of one that died.

        Where fewer rows are left than samples need, the law begins anew with those: it would hold
        writes back for rows that cannot be sampled any more.
        """
        with self._lock:
            old = self._shards[shard]
            # What it has of its predecessor and nobody had been told of is there, too.
            found = max(0, facts.written - old.written)
            self._dead[shard, old.incarnation] = old.written + found
            self._shards[shard] = _Counted(incarnation, facts)
            self.pace.end(INSERT, 0, found)
            whole = all(one.is_there for one in self._shards)
            if whole and self.size() < self.limiter.min_size_to_sample:
                self.pace.start_from(self.size(), counting_on=True)

    def emptied(self, told: Iterable[Told], counting_on: bool) -> None:
        """All rows were let go; see ``ReplayBuffer.empty``."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(told))
            self.pace.start_from(self.size(), counting_on=counting_on)

    # -- counts -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What ``Pace.stats`` says."""
        return self.pace.stats()

    def state(self, told: Iterable[Told]) -> dict[str, int]:
        """What ``Pace.state`` says, with all that is told."""
        with self._lock:
            self.pace.end(INSERT, 0, self._learned(told))
            return self.pace.state()

    def load(self, state: Mapping[str, int] | None, told: Iterable[Told]) -> None:
        """Goes on from a state that was checked, with the rows that were loaded."""
        with self._lock:
            self._learned(told)
            self.pace.load_state(state, self.size())


class LocalPace(ShardsPace):
    """The same as clients in this process see it: who has to wait does so here."""

    far = False

    def admit(self, side: int, count: int, timeout: float | None) -> tuple[None, bool]:
        """Waits for a right, which has no name."""
        at_once = self.attempt(side, count)
        if not at_once:
            self.pace.admit(side, count, self.size, timeout)
        return None, at_once

    def end(self, name: None, side: int, count: int, sampled: int, told: list[Told]) -> None:
        """Gives it back."""
        self.ended(side, count, sampled, told)

    def close(self) -> None:
        """Has those who wait raise RuntimeError."""
        self.pace.close()


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
