"""Track the shards that a client talks to, and its tickets of the rate limiter."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from replaykit.interrupts import check
from replaykit.pace import INSERT, SAMPLE, checked_timeout
from replaykit.sharding.protocol import ShardDied, ShardFacts, ShardLoss, ShardLossWarning, Terms
from replaykit.sharding.shard_draws import ShardTable
from replaykit.sharding.shard_pacing import PaceKeeper
from replaykit.sharding.shards import Restored, Shard, ShardReply, Supervisor

__all__ = ["ShardMembers", "ShardTicket", "Tickets", "check_on_loss"]

_LOOK_AGAIN = 0.05
"""Seconds between two questions whether a shard is back, while there are others."""


class ShardMembers:
    """Sends messages to shards, learns from the answers, and notices deaths. Thread-safe.

    Args:
        shards: as they were when the client was made.
        supervisor: who restarts them.
        on_loss: called with what was lost, in the thread that learns it; None: a warning.
        timeout: seconds after which waiting for a shard is given up.
    """

    def __init__(
        self,
        shards: list[tuple[Shard, int]],
        supervisor: Supervisor,
        on_loss: Callable[[ShardLoss], None] | None,
        timeout: float,
    ) -> None:
        self.supervisor, self.on_loss, self.timeout = supervisor, on_loss, timeout
        self.table = ShardTable(len(shards))
        self.shards = [shard for shard, _ in shards]
        self.table.incarnations = [incarnation for _, incarnation in shards]
        self._lock = threading.Lock()
        self._looked = [0.0] * len(shards)

    # -- messages -----------------------------------------------------------------------------

    def send(
        self, shard: int, verb: str, *args: Any, only: int | None = None
    ) -> tuple[int, ShardReply]:
        """Asks a shard; returns which incarnation was asked, and the answer to come.

        Args:
            only: which incarnation it is for; None: whichever is there.

        Raises:
            ShardDied: it was for one that another has taken the place of.
        """
        with self._lock:
            to, incarnation = self.shards[shard], self.table.incarnations[shard]
        if only is not None and incarnation != only:
            raise ShardDied(shard, only)
        return incarnation, to.call(verb, *args)

    def incarnations(self) -> dict[int, int]:
        """Which incarnation of each shard that is there is talked to."""
        with self._lock:
            return {shard: self.table.incarnations[shard] for shard in self.table.there()}

    def take(self, shard: int, sent: tuple[int, ShardReply], within: float | None = None) -> Any:
        """Takes an answer; facts in it are learned.

        Raises:
            ShardDied: there is none; it is noted. ShardSilent: not in time. What the shard raised.
        """
        incarnation, reply = sent
        try:
            answer = reply.result(self.timeout if within is None else within)
        except ShardDied:
            self.died(shard, incarnation)
            raise ShardDied(shard, incarnation) from None
        facts = answer if isinstance(answer, ShardFacts) else None
        if isinstance(answer, tuple):
            facts = next((item for item in answer if isinstance(item, ShardFacts)), None)
        if facts is not None:
            late = self.table.learn(shard, incarnation, facts)
            if late is not None:  # another thread has noticed a death before this was taken
                self.supervisor.report(shard, incarnation, *late)
        return answer

    def ask_all(self, verb: str, *args: Any) -> dict[int, Any]:
        """Asks all shards that are there; answers by shard, of those that gave one."""
        replies = {shard: self.send(shard, verb, *args) for shard in self.present()}
        answers = {}
        for shard, sent in replies.items():
            try:
                answers[shard] = self.take(shard, sent)
            except ShardDied:
                continue
        return answers

    def refresh(self, terms: Terms | None, max_age: float) -> None:
        """Asks the shards of which nothing young enough is known."""
        self.present()
        old = self.table.old(terms, max_age)
        replies = {shard: self.send(shard, "facts", terms) for shard in old}
        for shard, sent in replies.items():
            try:
                self.take(shard, sent)
            except ShardDied:
                continue

    # -- deaths -------------------------------------------------------------------------------

    def died(self, shard: int, incarnation: int) -> None:
        """Notes a death, and has the shard restarted; does not wait."""
        known = self.table.lost(shard, incarnation)
        if known is not None:
            self.supervisor.report(shard, incarnation, *known)

    def present(self) -> list[int]:
        """The shards that are there; looks whether others have come back."""
        for shard in range(len(self.shards)):
            if not self.table.is_there(shard):
                now = time.monotonic()
                if now >= self._looked[shard] + _LOOK_AGAIN:
                    self._looked[shard] = now
                    self._look(shard, 0.0)
        return self.table.there()

    def wait_for(self, shards: Sequence[int], until: float) -> None:
        """Waits until one of these shards is there.

        Raises:
            TimeoutError: none is at that time.
        """
        while not any(self.table.is_there(shard) for shard in shards):
            if time.monotonic() >= until:
                who = f"shard {shards[0]}" if len(shards) == 1 else f"none of shards {shards}"
                has = "has not" if len(shards) == 1 else "has"
                raise TimeoutError(f"{who} {has} come back within {self.timeout} s")
            check()
            for shard in shards:
                self._look(shard, _LOOK_AGAIN)

    def _look(self, shard: int, timeout: float) -> None:
        incarnation = self.table.incarnations[shard]
        found = self.supervisor.restored(shard, incarnation, timeout)
        if found is not None:
            self._take_back(shard, incarnation, found)

    def _take_back(self, shard: int, incarnation: int, found: Restored) -> None:
        with self._lock:
            if self.table.incarnations[shard] != incarnation:
                return  # another thread was faster
            self.shards[shard] = found.shard
            self.table.back(shard, found.incarnation)
        if self.on_loss is not None:
            self.on_loss(found.loss)
        else:
            warnings.warn(str(found.loss), ShardLossWarning, stacklevel=5)

    # -- being handed on ----------------------------------------------------------------------

    def again(self, on_loss: Callable[[ShardLoss], None] | None) -> ShardMembers:
        """The same shards for another client, which knows nothing of them yet."""
        with self._lock:
            pairs = list(zip(self.shards, self.table.incarnations, strict=True))
        return ShardMembers(pairs, self.supervisor, on_loss, self.timeout)

    def __getstate__(self) -> tuple[Any, ...]:
        other = self.again(self.on_loss)
        pairs = list(zip(other.shards, other.table.incarnations, strict=True))
        return pairs, self.supervisor, self.on_loss, self.timeout

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def check_on_loss(on_loss: object) -> None:
    """Raises TypeError where it is nothing that can be called with what was lost, nor None."""
    if on_loss is not None and not callable(on_loss):
        raise TypeError(f"expected on_loss as a function of a ShardLoss, got {on_loss!r}")


_FREE: contextlib.AbstractContextManager[ShardTicket | None] = contextlib.nullcontext()


class Tickets:
    """Rights of a client's calls to go on; none where nothing makes them wait. Thread-safe.

    Attributes:
        keeper: who counts for all clients; None without a rate limiter.
    """

    def __init__(self, members: ShardMembers) -> None:
        self._members, self.keeper = members, members.supervisor.pace

    def insert(
        self, timeout: float | None
    ) -> contextlib.AbstractContextManager[ShardTicket | None]:
        """For a write that waits so many seconds at most."""
        return self._ticket(INSERT, timeout)

    def sample(
        self, timeout: float | None
    ) -> contextlib.AbstractContextManager[ShardTicket | None]:
        """For a sample."""
        return self._ticket(SAMPLE, timeout)

    def _ticket(
        self, side: int, timeout: float | None
    ) -> contextlib.AbstractContextManager[ShardTicket | None]:
        timeout = checked_timeout(timeout)
        return (
            _FREE if self.keeper is None else ShardTicket(self._members, self.keeper, side, timeout)
        )

    def may_sample(self, count: int) -> bool:
        """Whether a sample would not wait."""
        return self.keeper is None or self.keeper.may(SAMPLE, count)

    def told(self) -> None:
        """Has rows counted that were stored without a ticket."""
        if self.keeper is not None:
            self.keeper.end(None, INSERT, 0, 0, self._members.table.told())

    def emptied(self, *, counting_on: bool) -> None:
        """All rows were let go."""
        if self.keeper is not None:
            self.keeper.emptied(self._members.table.told(), counting_on)


class ShardTicket:
    """The right of a call to insert or sample some rows. What is not used is given back, and with
    it goes what this client has learned of the rows in the shards.

    Attributes:
        keeper: who gives it.
        until: when the call stops waiting; None: never.
    """

    def __init__(
        self, members: ShardMembers, keeper: PaceKeeper, side: int, timeout: float | None
    ) -> None:
        self._members, self.keeper, self._side = members, keeper, side
        self._timeout = timeout
        self.until = None if timeout is None else time.monotonic() + timeout
        self._right: tuple[Any, int] | None = None
        self._sampled = 0

    def admit(self, count: int, timeout: float | None = None) -> bool:
        """Waits for the right, and returns whether it was there at once; see ``PaceKeeper``.

        Args:
            timeout: seconds; None: what is left to the call.
        """
        if timeout is None and self.until is not None:
            timeout = max(0.0, self.until - time.monotonic())
        name, at_once = self.keeper.admit(self._side, count, timeout)
        self._right = name, count
        return at_once

    def sampled(self, count: int) -> None:
        """Notes how many records were delivered."""
        self._sampled = count

    def __enter__(self) -> ShardTicket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._right is not None:
            name, count = self._right
            told = self._members.table.told()
            self.keeper.end(name, self._side, count, self._sampled, told)
