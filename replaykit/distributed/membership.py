"""Track the live shards and rate limiter tickets of a client."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from replaykit.distributed.protocol import ShardDied, ShardFacts, ShardLoss, ShardLossWarning, Terms
from replaykit.distributed.shard_draws import ShardTable
from replaykit.distributed.shard_pacing import PaceKeeper
from replaykit.distributed.shards import AnySupervisor, Restored, Shard, ShardReply
from replaykit.interrupts import check
from replaykit.pace import INSERT, SAMPLE, checked_timeout

__all__ = ["ShardMembers", "ShardTicket", "Tickets", "check_on_loss"]

_POLL_S = 0.05
"""Seconds between two polls for the successor of a shard that died."""


class ShardMembers:
    """The shards of a client, to which it sends messages. Thread-safe.

    The object stores the `ShardFacts` in their answers, and notices when a shard dies.

    Args:
        shards: the shards and their incarnations when the client was made.
        supervisor: restarts the shards.
        on_loss: function called with a ``ShardLoss``, in the thread that notices the loss. With
            None, a warning is shown instead.
        timeout: seconds to wait for a shard.
    """

    def __init__(
        self,
        shards: list[tuple[Shard, int]],
        supervisor: AnySupervisor,
        on_loss: Callable[[ShardLoss], None] | None,
        timeout: float,
    ) -> None:
        self.supervisor, self.on_loss, self.timeout = supervisor, on_loss, timeout
        self.table = ShardTable(len(shards))
        self.shards = [shard for shard, _ in shards]
        self.table.incarnations = [incarnation for _, incarnation in shards]
        self._lock = threading.Lock()
        self._probed_at = [0.0] * len(shards)

    # -- messages -----------------------------------------------------------------------------

    def send(
        self, shard: int, verb: str, *args: Any, only: int | None = None
    ) -> tuple[int, ShardReply]:
        """Send a message to a shard; return the shard's incarnation and the future answer.

        Args:
            only: the incarnation that the message is for, or None for the present one.

        Raises:
            ShardDied: another incarnation has replaced ``only``.
        """
        with self._lock:
            to, incarnation = self.shards[shard], self.table.incarnations[shard]
        if only is not None and incarnation != only:
            raise ShardDied(shard, only)
        return incarnation, to.call(verb, *args)

    def incarnations(self) -> dict[int, int]:
        """Return the present incarnation of each live shard."""
        with self._lock:
            return {shard: self.table.incarnations[shard] for shard in self.table.there()}

    def receive(self, shard: int, sent: tuple[int, ShardReply], within: float | None = None) -> Any:
        """Wait for an answer and return it; store the facts in it.

        Raises:
            ShardDied: the shard has died; the supervisor is informed.
            ShardSilent: the shard has not answered in time.
            Errors of the shard are raised as well.
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
            if late is not None:  # another thread noticed the death first
                self.supervisor.report(shard, incarnation, *late)
        return answer

    def ask_all(self, verb: str, *args: Any) -> dict[int, Any]:
        """Send a message to all live shards; return the answers by shard.

        The result omits shards that die meanwhile.
        """
        replies = {shard: self.send(shard, verb, *args) for shard in self.present()}
        answers = {}
        for shard, sent in replies.items():
            try:
                answers[shard] = self.receive(shard, sent)
            except ShardDied:
                continue
        return answers

    def refresh(self, terms: Terms | None, max_age: float) -> None:
        """Ask live shards for facts that are missing or older than ``max_age`` seconds.

        Facts also count as missing if their mass was measured in other `Terms`.
        """
        self.present()
        old = self.table.old(terms, max_age)
        replies = {shard: self.send(shard, "facts", terms) for shard in old}
        for shard, sent in replies.items():
            try:
                self.receive(shard, sent)
            except ShardDied:
                continue

    # -- deaths -------------------------------------------------------------------------------

    def died(self, shard: int, incarnation: int) -> None:
        """Record the death of a shard and report it to the supervisor; do not wait."""
        known = self.table.lost(shard, incarnation)
        if known is not None:
            self.supervisor.report(shard, incarnation, *known)

    def present(self) -> list[int]:
        """Return the live shards, after polling for successors of the dead ones."""
        for shard in range(len(self.shards)):
            if not self.table.is_there(shard):
                now = time.monotonic()
                if now >= self._probed_at[shard] + _POLL_S:
                    self._probed_at[shard] = now
                    self._probe(shard, 0.0)
        return self.table.there()

    def wait_for(self, shards: Sequence[int], until: float) -> None:
        """Wait until one of these shards is live.

        Raises:
            TimeoutError: no shard has become live until the time ``until``.
        """
        while not any(self.table.is_there(shard) for shard in shards):
            if time.monotonic() >= until:
                who = f"shard {shards[0]}" if len(shards) == 1 else f"none of shards {shards}"
                has = "has not" if len(shards) == 1 else "has"
                raise TimeoutError(f"{who} {has} come back within {self.timeout} s")
            check()
            for shard in shards:
                self._probe(shard, _POLL_S)

    def _probe(self, shard: int, timeout: float) -> None:
        incarnation = self.table.incarnations[shard]
        found = self.supervisor.restored(shard, incarnation, timeout)
        if found is not None:
            self._rejoin(shard, incarnation, found)

    def _rejoin(self, shard: int, incarnation: int, found: Restored) -> None:
        with self._lock:
            if self.table.incarnations[shard] != incarnation:
                return  # another thread was faster
            self.shards[shard] = found.shard
            self.table.back(shard, found.incarnation)
        if self.on_loss is not None:
            self.on_loss(found.loss)
        else:
            warnings.warn(str(found.loss), ShardLossWarning, stacklevel=5)

    # -- copies -------------------------------------------------------------------------------

    def again(self, on_loss: Callable[[ShardLoss], None] | None) -> ShardMembers:
        """Return the same shards for another client, without known facts."""
        with self._lock:
            pairs = list(zip(self.shards, self.table.incarnations, strict=True))
        return ShardMembers(pairs, self.supervisor, on_loss, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        other = self.again(self.on_loss)
        pairs = list(zip(other.shards, other.table.incarnations, strict=True))
        return ShardMembers, (pairs, self.supervisor, self.on_loss, self.timeout)


def check_on_loss(on_loss: object) -> None:
    """Raise TypeError unless the argument can be called or is None."""
    if on_loss is not None and not callable(on_loss):
        raise TypeError(f"expected on_loss as a function of a ShardLoss, got {on_loss!r}")


_FREE: contextlib.AbstractContextManager[ShardTicket | None] = contextlib.nullcontext()


class Tickets:
    """The factory of tickets for a client's calls. Thread-safe.

    Without a rate limiter, its methods return empty contexts and no call waits.

    Attributes:
        keeper: the counter for all clients, or None without a rate limiter.
    """

    def __init__(self, members: ShardMembers) -> None:
        self._members, self.keeper = members, members.supervisor.pace

    def ticket(
        self, side: int, timeout: float | None
    ) -> contextlib.AbstractContextManager[ShardTicket | None]:
        """Return the ticket of a write or sample that waits at most ``timeout`` seconds."""
        timeout = checked_timeout(timeout)
        return (
            _FREE if self.keeper is None else ShardTicket(self._members, self.keeper, side, timeout)
        )

    def may_sample(self, count: int) -> bool:
        """Return whether a sample would not wait."""
        return self.keeper is None or self.keeper.may(SAMPLE, count)

    def count_unticketed(self) -> None:
        """Make the rate limiter count rows that were stored without a ticket."""
        if self.keeper is not None:
            self.keeper.end(None, INSERT, 0, 0, self._members.table.counts())

    def emptied(self, *, counting_on: bool) -> None:
        """Reset the rate limiter after all rows were removed."""
        if self.keeper is not None:
            self.keeper.emptied(self._members.table.counts(), counting_on)


class ShardTicket:
    """The right of a call to insert or sample some rows.

    A ticket is a context manager. On exit, the right ends, and the keeper receives the row counts
    of the shards that the client knows.

    Attributes:
        keeper: the counter that gives the right.
        until: the time at which the call stops waiting, or None if it waits without a limit.
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
        """Wait for the right; return whether it was available at once.

        See ``PaceKeeper.admit``.

        Args:
            timeout: seconds to wait, or None for the time that the call has left.
        """
        if timeout is None and self.until is not None:
            timeout = max(0.0, self.until - time.monotonic())
        name, at_once = self.keeper.admit(self._side, count, timeout)
        self._right = name, count
        return at_once

    def sampled(self, count: int) -> None:
        """Record the number of delivered samples."""
        self._sampled = count

    def __enter__(self) -> ShardTicket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._right is not None:
            name, count = self._right
            counts = self._members.table.counts()
            self.keeper.end(name, self._side, count, self._sampled, counts)
