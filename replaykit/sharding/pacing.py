"""The counts of a rate limiter over all shards."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from replaykit.pace import INSERT, SAMPLE, Pace, RateLimiter
from replaykit.sharding.facts import ShardFacts

__all__ = ["LocalPace", "PaceKeeper", "ShardsPace", "Told"]


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
        >>> from replaykit.sharding.facts import ShardFacts
        >>> from replaykit.sharding.pacing import ShardsPace, Told
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
