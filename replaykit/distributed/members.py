"""Track the live shards and rate limiter tickets of a client."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from replaykit.distributed.protocol import (
    Agreement,
    ShardDied,
    ShardFacts,
    ShardLoss,
    ShardLossWarning,
    ShardSilent,
    Terms,
)
from replaykit.distributed.requests import Reply, left_of
from replaykit.distributed.shard_pacing import PaceKeeper
from replaykit.distributed.shards import AnySupervisor, Shard
from replaykit.errors import ActorLost
from replaykit.interrupts import check
from replaykit.pace import INSERT, SAMPLE, checked_timeout
from replaykit.schema import Schema
from replaykit.structure import Node

Sent: TypeAlias = tuple[int, Reply]
"""A message under way: the incarnation of the shard, and the future answer."""

_POLL_S = 0.05
"""Seconds between two polls for the successor of a shard that died."""


class ShardMembers:
    """The shards of a client, to which it sends messages. Thread-safe.

    The object stores the newest `ShardFacts` of every shard from its answers, and notices when a
    shard dies. ``_lock`` guards the shards and their facts.

    Args:
        shards: the shards when the client was made.
        supervisor: restarts the shards.
        on_loss: function called with a ``ShardLoss``, in the thread that notices the loss. With
            None, a warning is shown instead.
        timeout: seconds to wait for a shard.

    Attributes:
        shards: the present shards. A dead shard stays until its successor is known.
        agreed: the schema of rows that the client knows, of the first or a later load.
    """

    def __init__(
        self,
        shards: list[Shard],
        supervisor: AnySupervisor,
        on_loss: Callable[[ShardLoss], None] | None,
        timeout: float,
    ) -> None:
        self.supervisor, self.on_loss, self.timeout = supervisor, on_loss, timeout
        self.shards = list(shards)
        self.agreed = Agreement(0, None)
        self._lock = threading.Lock()
        self._probed_at = [0.0] * len(shards)
        self._facts: list[ShardFacts | None] = [None] * len(shards)
        self._heard = [-math.inf] * len(shards)
        self._reported: dict[tuple[int, int], int] = {}  # versions of facts of dead incarnations
        weakref.finalize(self, _report_facts, supervisor, self._facts, os.getpid())

    # -- messages -----------------------------------------------------------------------------

    def send(self, shard: int, verb: str, *args: Any, only: int | None = None) -> Sent:
        """Send a message to a shard; return the shard's incarnation and the future answer.

        Args:
            only: the incarnation that the message is for, or None for the present one.

        Raises:
            ShardDied: another incarnation has replaced ``only``.
        """
        to = self.shards[shard]
        if only is not None and to.incarnation != only:
            raise ShardDied(shard, only)
        return to.incarnation, to.call(verb, *args)

    def receive(self, shard: int, sent: Sent, within: float | None = None) -> Any:
        """Wait for an answer and return it; store the facts in it.

        Raises:
            ShardDied: the shard has died; the supervisor is informed.
            ShardSilent: the shard has not answered in time.
            Errors of the shard are raised as well.
        """
        incarnation, reply = sent
        timeout = self.timeout if within is None else within
        try:
            answer = reply.get(None if timeout == math.inf else timeout)
        except (ShardDied, ActorLost):
            self.died(shard, incarnation)
            raise ShardDied(shard, incarnation) from None
        except TimeoutError:
            if reply.known:  # an error of the shard
                raise
            text = f"shard {shard} has not answered within {timeout:g} s"
            raise ShardSilent(text) from None
        for item in answer if isinstance(answer, tuple) else (answer,):
            if isinstance(item, ShardFacts):
                self._learn(item)
        return answer

    def ask_all(self, verb: str, *args: Any) -> dict[int, Any]:
        """Send a message to all live shards; return the answers by shard.

        The result omits shards that die meanwhile.
        """
        return self.ask(self.present(), verb, *args)

    def ask(
        self, shards: Sequence[int], verb: str, *args: Any, within: float | None = None
    ) -> dict[int, Any]:
        """Send a message to some shards; return the answers, without those of dead shards."""
        answers = {}
        for shard, sent in [(shard, self.send(shard, verb, *args)) for shard in shards]:
            with contextlib.suppress(ShardDied):
                answers[shard] = self.receive(shard, sent, within)
        return answers

    def agree(self, root: Node | None = None) -> Agreement:
        """Ask for the schema of all clients; with ``root``, agree on it if there is none.

        Raises:
            SchemaError: the clients have agreed on another schema than ``root``.
        """
        self.agreed = agreed = self.supervisor.agree(None if root is None else Schema(root))
        if root is not None and agreed.schema is not None:
            agreed.schema.check(root)
        return agreed

    # -- facts --------------------------------------------------------------------------------

    def refresh(self, terms: Terms | None, max_age: float, within: float | None = None) -> None:
        """Ask live shards for facts that are missing or older than ``max_age`` seconds.

        Facts also count as missing if their mass was measured in other `Terms`. ``within``: seconds
        to wait, as for ``receive``.
        """
        oldest, old = time.monotonic() - max_age, []
        for shard in self.present():
            facts = self._facts[shard]
            wrong = facts is None or (terms is not None and facts.terms != terms)
            if wrong or self._heard[shard] <= oldest:
                old.append(shard)
        self.ask(old, "facts", terms, within=within)

    def _learn(self, facts: ShardFacts) -> None:
        """Store facts, unless newer facts are known.

        The facts may come from an answer that was read after the death of its sender was noticed.
        If they are newer than the facts that were reported with the death, they are reported too.
        """
        shard, name = facts.shard, (facts.shard, facts.incarnation)
        with self._lock:
            if facts.incarnation == self.shards[shard].incarnation and self.is_there(shard):
                known = self._facts[shard]
                if known is None or facts.version >= known.version:
                    self._facts[shard] = facts
                    self._heard[shard] = time.monotonic()
                return
            if facts.version <= self._reported.get(name, facts.version):
                return
            self._reported[name] = facts.version
        self.supervisor.report(*name, facts)

    def facts(self, shard: int) -> ShardFacts | None:
        """Return the newest facts of a shard, even if it has died."""
        return self._facts[shard]

    def rows_of(self, shard: int) -> int:
        """Return the known number of rows of a shard."""
        facts = self._facts[shard]
        return 0 if facts is None else facts.rows

    def rows(self) -> int:
        """Return the known number of rows in live shards."""
        return sum(map(self.rows_of, self.there()))

    def is_there(self, shard: int) -> bool:
        """Return whether the shard is live, as far as the client knows."""
        return (shard, self.shards[shard].incarnation) not in self._reported

    def there(self) -> list[int]:
        """Return the live shards, as far as the client knows."""
        return list(filter(self.is_there, range(len(self.shards))))

    def away(self) -> list[int]:
        """Return the shards that are being restarted, as far as the client knows."""
        return list(itertools.filterfalse(self.is_there, range(len(self.shards))))

    def incarnations(self) -> dict[int, int]:
        """Return the present incarnation of each live shard."""
        with self._lock:
            return {shard: self.shards[shard].incarnation for shard in self.there()}

    def masses(self, terms: Terms) -> list[float] | None:
        """Return the mass of every shard in these terms, with 0 for dead shards.

        The result is None if the mass of a live shard is not known in these terms. Another thread
        may have asked for masses in other terms meanwhile.
        """
        with self._lock:
            live = {shard: self._facts[shard] for shard in self.there()}
        if any(facts is None or facts.terms != terms for facts in live.values()):
            return None
        return [
            facts.mass if (facts := live.get(shard)) else 0 for shard in range(len(self.shards))
        ]

    def reports(self) -> list[ShardFacts]:
        """Return the known facts of the live shards."""
        with self._lock:
            found = [self._facts[shard] for shard in self.there()]
        return [facts for facts in found if facts is not None]

    def most(self) -> float:
        """Return the largest raw priority ever set in any shard, at least 1.

        It is the default priority of new rows.
        """
        with self._lock:
            return max((facts.most for facts in self._facts if facts is not None), default=1.0)

    # -- deaths -------------------------------------------------------------------------------

    def died(self, shard: int, incarnation: int) -> None:
        """Record the death of a shard and report it to the supervisor; do not wait."""
        with self._lock:
            if incarnation != self.shards[shard].incarnation or not self.is_there(shard):
                return  # it is known
            known = self._facts[shard]
            self._reported[shard, incarnation] = -1 if known is None else known.version
        self.supervisor.report(shard, incarnation, known)

    def present(self) -> list[int]:
        """Return the live shards, after polling for successors of the dead ones."""
        for shard in self.away():
            now = time.monotonic()
            if now >= self._probed_at[shard] + _POLL_S:
                self._probed_at[shard] = now
                self._probe(shard, 0.0)
        return self.there()

    def wait_for(self, shards: Sequence[int], until: float) -> None:
        """Wait until one of these shards is live.

        Raises:
            ShardSilent: no shard has become live until the time ``until``.
        """
        while not any(map(self.is_there, shards)):
            if time.monotonic() >= until:
                who = f"shard {shards[0]}" if len(shards) == 1 else f"none of shards {shards}"
                has = "has not" if len(shards) == 1 else "has"
                raise ShardSilent(f"{who} {has} come back in time")
            check()
            for shard in shards:
                self._probe(shard, _POLL_S)

    def wait_for_all(self) -> None:
        """Wait until all shards are live, at most ``timeout`` seconds."""
        until = time.monotonic() + self.timeout
        for shard in range(len(self.shards)):
            self.wait_for([shard], until)

    def _probe(self, shard: int, timeout: float) -> None:
        incarnation = self.shards[shard].incarnation
        found = self.supervisor.restored(shard, incarnation, timeout)
        if found is None:
            return
        with self._lock:
            if self.shards[shard].incarnation != incarnation:
                return  # another thread was faster
            self.shards[shard] = found.shard
            self._facts[shard], self._heard[shard] = None, -math.inf
        if self.on_loss is not None:
            self.on_loss(found.loss)
        else:
            warnings.warn(str(found.loss), ShardLossWarning, stacklevel=4)

    # -- copies -------------------------------------------------------------------------------

    def again(self, on_loss: Callable[[ShardLoss], None] | None) -> ShardMembers:
        """Return the same shards for another client, without known facts."""
        return ShardMembers(self.shards, self.supervisor, on_loss, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardMembers, (list(self.shards), self.supervisor, self.on_loss, self.timeout)


def _report_facts(
    supervisor: AnySupervisor, facts: Sequence[ShardFacts | None], process: int
) -> None:
    """Report the facts that a client knows at its end; no other client may know them."""
    known = [each for each in facts if each is not None]
    if known and process == os.getpid():  # a forked process has no connection to Ray
        with contextlib.suppress(Exception):  # the shards may have ended first
            supervisor.learn(known)


def check_on_loss(on_loss: object) -> None:
    """Raise TypeError unless the argument can be called or is None."""
    if on_loss is not None and not callable(on_loss):
        raise TypeError(f"expected on_loss as a function of a ShardLoss, got {on_loss!r}")


class Tickets:
    """The factory of tickets for a client's calls. Thread-safe.

    Without a rate limiter, no call waits, and its methods do nothing.

    Attributes:
        keeper: the counter for all clients, or None without a rate limiter.
    """

    def __init__(self, members: ShardMembers) -> None:
        self._members, self.keeper = members, members.supervisor.pace

    def ticket(self, side: int, timeout: float | None) -> ShardTicket:
        """Return the ticket of a write or sample that waits at most ``timeout`` seconds."""
        return ShardTicket(self._members, self.keeper, side, checked_timeout(timeout))

    def check_insert(self, count: int) -> None:
        """Raise ValueError if so many rows are always too many for one write."""
        refusal = None if self.keeper is None else self.keeper.limiter.never(INSERT, count, 0)
        if self.keeper is not None and refusal is not None:
            raise ValueError(f"{refusal}: {self.keeper.limiter!r}")

    def may_sample(self, count: int) -> bool:
        """Return whether a sample would not wait."""
        return self.keeper is None or self.keeper.may(SAMPLE, count)

    def count_unticketed(self) -> None:
        """Make the rate limiter count rows that were stored without a ticket."""
        if self.keeper is not None:
            self.keeper.end(None, INSERT, 0, 0, self._members.reports())

    def stats(self) -> dict[str, Any]:
        """Return the counts of the rate limiter."""
        return {} if self.keeper is None else self.keeper.stats()

    def state(self) -> dict[str, int] | None:
        """Return the state of the rate limiter while no write is admitted.

        The client has just received the counts of all shards.
        """
        return None if self.keeper is None else self.keeper.state(self._members.reports())

    def load(self, state: dict[str, int] | None) -> None:
        """Continue from a state of the rate limiter, with the rows that were loaded."""
        if self.keeper is not None:
            self.keeper.load(state, self._members.reports())

    def emptied(self, *, counting_on: bool) -> None:
        """Reset the rate limiter after all rows were removed."""
        if self.keeper is not None:
            self.keeper.emptied(self._members.reports(), counting_on)


class ShardTicket:
    """The right of a call to insert or sample some rows.

    A ticket is a context manager. On exit, the right ends, and the keeper receives the row counts
    of the shards that the client knows.

    Attributes:
        keeper: the counter that gives the right, or None if every call has it.
        until: the time at which the call stops waiting, or None if it waits without a limit.
    """

    def __init__(
        self, members: ShardMembers, keeper: PaceKeeper | None, side: int, timeout: float | None
    ) -> None:
        self._members, self.keeper, self._side = members, keeper, side
        self.until: float | None = None
        if timeout is not None and keeper is not None:
            self.until = time.monotonic() + timeout
        self._right: tuple[Any, int] | None = None
        self._sampled = 0

    def admit(self, count: int, timeout: float | None = None) -> bool:
        """Wait for the right; return whether it was available at once.

        See ``PaceKeeper.admit``.

        Args:
            timeout: seconds to wait, or None for the time that the call has left.
        """
        if self.keeper is None:
            return True
        timeout = left_of(self.until) if timeout is None else timeout
        name, at_once = self.keeper.admit(self._side, count, timeout)
        self._right = name, count
        return at_once

    def sampled(self, count: int) -> None:
        """Record the number of delivered samples."""
        self._sampled = count

    def __enter__(self) -> ShardTicket:
        return self

    def __exit__(self, *_: object) -> None:
        if self.keeper is not None and self._right is not None:
            name, count = self._right
            counts = self._members.reports()
            self.keeper.end(name, self._side, count, self._sampled, counts)
