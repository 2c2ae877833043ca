"""Draw from shards in proportion to their masses, and merge the answers into a batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit.distributed.members import Sent, ShardMembers, ShardTicket
from replaykit.distributed.protocol import GlobalIndex, ShardDied, ShardPart, ShardSilent, Terms
from replaykit.distributed.requests import JointReply, Taken, left_of
from replaykit.distributed.shard_config import DrawLaw, rows_of, scattered
from replaykit.errors import NotEnoughData, RateLimiterTimeout
from replaykit.interrupts import deferred
from replaykit.pace import SAMPLE
from replaykit.samplers import Sampler
from replaykit.samplers.priority_rules import importance_weights
from replaykit.samplers.window_forms import SEQUENCE_ID

if TYPE_CHECKING:
    from replaykit.distributed.sharded_client import ShardedClient

Array = np.ndarray[Any, Any]


def choose(
    masses: list[float], count: int, generator: torch.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draw shards in proportion to their masses, int64 ``[count]``.

    At least one mass must be positive. If the masses are counts, the draw uses exact integer
    arithmetic. If they are sums of ``v``, it uses float64, like the search in a sum tree.
    """
    upto = np.cumsum(np.asarray(masses))
    if upto.dtype.kind == "i":
        drawn = torch.randint(int(upto[-1]), (count,), generator=generator, device=generator.device)
        point = drawn.cpu().numpy()
    else:
        part = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        point = part.cpu().numpy() * upto[-1]
    last = int(np.flatnonzero(np.asarray(masses))[-1])  # rounding could give a later shard
    return np.minimum(np.searchsorted(upto, point, side="right"), last)


_SEEDS = 2**62
_ANSWER_S = 0.05
"""Minimum seconds to wait for masses, so that also calls without a wait get them."""


class Draws:
    """The draws of one client.

    To draw like a single buffer, the client draws a shard by its mass, and that shard draws a row.
    The client sends a request to every shard, even to shards without draws in the batch. The
    answers keep the table of masses up to date. Importance weights also need the smallest ``v`` of
    all shards.

    If a shard has died or has no eligible rows left, its draws are repeated among the other shards.
    So the batch has the distribution of the remaining rows.

    Args:
        law: the rule that divides the draws of the client's sampler.
        max_age: seconds for which the known mass of a shard is used.
        given: the random generator of the draws, or None for torch's global generator.
        generations: True to return the generations of rows even if neither the writer nor the
            sampler needs them.
    """

    def __init__(
        self,
        members: ShardMembers,
        law: DrawLaw,
        max_age: float,
        given: torch.Generator | None,
        *,
        generations: bool = False,
    ) -> None:
        self.members, self.law, self._max_age = members, law, max_age
        self.given, self.generations = given, generations

    @property
    def generator(self) -> torch.Generator:
        """The generator that draws shards and their seeds."""
        return torch.default_generator if self.given is None else self.given

    def refresh(self, batch_size: int) -> None:
        """Request new masses from shards whose masses are too old for a draw."""
        self.members.refresh(self.law.terms(batch_size), self._max_age)

    def begun(self, batch_size: int) -> Pending:
        """Request a batch from the shards; return the pending batch.

        If masses are not known, or none is positive, ``Pending.get`` sends the request later.
        """
        terms = self.law.terms(batch_size)
        assert terms is not None
        pending = Pending(self, batch_size, terms, self.law.draws(batch_size))
        pending.sent()
        return pending

    def _known(self, terms: Terms, until: float) -> list[float]:
        """Return the masses of all shards in these terms; request them if necessary.

        Raises:
            ShardSilent: other threads with this client keep asking for masses in other terms.
        """
        members = self.members
        while (masses := members.masses(terms)) is None:
            if (left := until - time.monotonic()) <= 0:
                raise ShardSilent(
                    f"no masses of all shards in {terms} in time: threads with different settings "
                    "need separate clients"
                )
            members.refresh(terms, float("inf"), left)
        return masses

    def _masses(self, terms: Terms, batch_size: int, within: float | None) -> list[float]:
        """Return masses of which at least one is positive.

        If no mass is positive, wait for restarts of shards, at most ``within`` seconds.
        """
        members = self.members
        within = members.timeout if within is None else min(members.timeout, within)
        until = time.monotonic() + max(within, _ANSWER_S)
        while not any(masses := self._known(terms, until)):
            members.refresh(terms, 0.0, max(0.0, until - time.monotonic()))
            if any(masses := self._known(terms, until)):
                break
            if away := members.away():
                members.wait_for(away, until)
            else:
                self._refuse(terms, batch_size)
        return masses

    def _least(self, shares: list[Share]) -> float:
        """Return the smallest probability of an eligible row, expressed as ``v``."""
        members = self.members
        least = [share.part.facts.smallest * share.likelier for share in shares]
        drawn = {share.shard for share in shares}
        for shard in members.there():
            facts = members.facts(shard)
            if shard not in drawn and facts is not None and facts.mass:
                least.append(facts.smallest)
        return min(least)

    def possible(self, batch_size: int) -> bool:
        """Return whether a batch can be drawn."""
        try:
            terms = self.law.terms(batch_size)
            self.law.draws(batch_size)
        except RuntimeError:
            return False
        assert terms is not None
        self.members.refresh(terms, 0.0)
        return any(self._known(terms, time.monotonic() + self.members.timeout))

    def _refuse(self, terms: Terms, batch_size: int) -> None:
        """Raise the error that a draw from the largest shard raises.

        All shards are live.
        """
        members = self.members
        rows = [members.rows_of(shard) for shard in range(len(members.shards))]
        if not any(rows):
            raise NotEnoughData("Cannot sample from an empty storage.")
        largest = rows.index(max(rows))
        draws = self.law.draws(batch_size)
        try:
            members.receive(largest, members.send(largest, "draw", draws, terms, 0, True))
        except ShardDied:
            return
        except (RuntimeError, KeyError) as error:
            text = error.args[0] if error.args else error
            raise type(error)(f"in none of the {len(rows)} shards, as in {largest}: {text}") from (
                None
            )


class Pending(JointReply):
    """A batch under way, with requests to shards and their answers.

    The value is a pair of the rows and the information about them. If a shard has not answered in
    time, the next ``get`` continues with the answers received so far. The errors are those of
    ``ShardedClient.sample``.

    Attributes:
        before, after: the states of the generator before and after the last draw of shards; None if
            no request was sent yet.
    """

    def __init__(self, draws: Draws, batch_size: int, terms: Terms, count: int) -> None:
        super().__init__()
        self._draws, self._batch_size, self._terms = draws, batch_size, terms
        self._left = np.arange(count)
        self._shards: Array = self._left[:0]
        self._masses: list[float] = []
        self._sent: dict[int, Sent] | None = None
        self._shares: list[Share] = []
        self.before: torch.Tensor | None = None
        self.after: torch.Tensor | None = None

    def sent(self) -> None:
        """Send the missing requests, unless the masses of shards are not known."""
        if self._sent is None and len(self._left) and not self.known:
            masses = self._draws.members.masses(self._terms)
            if masses is not None and any(masses):
                self._ask(masses)

    def _ask(self, masses: list[float]) -> None:
        """Draw a shard for each missing draw, and send a request to every live shard."""
        members = self._draws.members
        self._masses, generator = masses, self._draws.generator
        self.before = generator.get_state()
        self._shards = choose(masses, len(self._left), generator)
        seeds = torch.randint(
            _SEEDS, (len(masses),), generator=generator, device=generator.device
        ).tolist()
        self.after = generator.get_state()
        counts = np.bincount(self._shards, minlength=len(masses)).tolist()
        generations = self._draws.generations
        self._sent = {
            shard: members.send(
                shard, "draw", counts[shard], self._terms, seeds[shard], False, generations
            )
            for shard in members.there()
        }

    def undo(self, last: Pending | None = None) -> None:
        """Roll back the random numbers of this batch, and of later batches up to ``last``.

        If other random numbers were drawn since, or if none were drawn, the call does nothing.
        """
        last, generator = self if last is None else last, self._draws.generator
        if self.before is None or last.after is None:
            return
        if torch.equal(generator.get_state(), last.after):
            generator.set_state(self.before)

    def _make(self, timeout: float | None) -> tuple[Any, dict[Any, Any]]:
        until = None if timeout is None else time.monotonic() + timeout
        while len(self._left):
            if self._sent is None:
                self._ask(self._draws._masses(self._terms, self._batch_size, left_of(until)))
            self._take(until)
        return self._batch()

    def _make_from_known(self) -> tuple[Any, dict[Any, Any]]:
        """Make the batch from answers that have arrived; raise ShardSilent if some are missing."""
        while len(self._left):
            self.sent()  # a shard has died, or the masses were not known
            if self._sent is None or not all(reply.is_ready() for _, reply in self._sent.values()):
                raise ShardSilent("some shards have not answered yet")
            self._take(time.monotonic())
        return self._batch()

    def _batch(self) -> tuple[Any, dict[Any, Any]]:
        draws = self._draws
        names, least = GlobalIndex(len(draws.members.shards)), draws._least(self._shares)
        return batch_of(self._shares, names, draws.law.sampler, least)

    def _take(self, until: float | None) -> None:
        assert self._sent is not None
        members = self._draws.members
        for shard, sent in list(self._sent.items()):
            part: ShardPart | None = None
            with contextlib.suppress(ShardDied):
                part = members.receive(shard, sent, left_of(until))
            del self._sent[shard]
            if part is not None and part.data is not None:
                numbers = torch.from_numpy(self._left[self._shards == shard])
                self._shares.append(Share(shard, sent[0], numbers, self._masses[shard], part))
        come = [share.numbers.numpy() for share in self._shares]
        self._left = np.setdiff1d(self._left, np.concatenate([self._left[:0], *come]))
        self._sent = None

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait; request the draws of dead shards again."""
        if not self.known:
            with contextlib.suppress(Exception):  # it is the answer, or some answers are missing
                self._settled(self._make_from_known, 0.0)
        return self.known


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class PacedSample(JointReply):
    """The future batch of a call that a rate limiter may delay.

    The batch is requested as soon as enough rows are known to be stored.

    Args:
        finish: function that makes the result of the call from a drawn batch and its ticket.
    """

    def __init__(
        self, client: ShardedClient, size: int, finish: Callable[[Any, ShardTicket], Any]
    ) -> None:
        super().__init__()
        self._client, self._size, self._finish = client, size, finish
        self._asking = threading.Lock()
        self._asked: Taken | Pending | None = None
        if client._enough():
            self._batch()

    def _batch(self) -> Taken | Pending:
        """Return the batch under way; request it if necessary."""
        with self._asking:
            if self._asked is None:
                self._asked = self._client._take(self._size)
            return self._asked

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait."""
        if self.known:
            return True
        return self._client._tickets.may_sample(self._size) and self._batch().is_ready()

    def _make(self, timeout: float | None) -> Any:
        return self._delivered(timeout, timeout)

    def _delivered(self, timeout: float | None, held_up: float | None) -> Any:
        """Return the result of the call, after at most ``held_up`` seconds of delay."""
        with deferred, self._client._tickets.ticket(SAMPLE, held_up) as ticket:
            ticket.admit(self._size)
            left = None if timeout is None else left_of(ticket.until)
            return self._finish(self._batch().get(left), ticket)

    async def wait(self) -> Any:
        """Return the batch to a coroutine.

        While a rate limiter delays the call, no thread waits. The event loop has few threads, and
        the call that ends the delay may need one.
        """
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(
                    self._settled, lambda: self._delivered(None, 0.0), None
                )
            except RateLimiterTimeout:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


class Share(NamedTuple):
    """The rows that one shard contributed to a batch.

    Attributes:
        shard, incarnation: numbers of the shard and its incarnation.
        numbers: the numbers of the draws that the shard made for the batch, int64 ``[draws]``.
        mass: the mass with which the client drew the shard.
        part: the answer of the shard.
    """

    shard: int
    incarnation: int
    numbers: torch.Tensor
    mass: float
    part: ShardPart

    @property
    def likelier(self) -> float:
        """The factor by which an outdated mass raised the probability of the rows.

        It is 1 if the mass was exact.
        """
        found = self.part.facts.mass
        return self.mass / found if found else 1.0

    def draw_of_row(self) -> torch.Tensor:
        """Return the number of each row's draw in the batch, int64 ``[rows]``."""
        window = self.part.info.get(SEQUENCE_ID)
        return self.numbers if window is None else self.numbers[window]


def batch_of(
    shares: list[Share], names: GlobalIndex, sampler: Sampler, least: float
) -> tuple[Any, dict[Any, Any]]:
    """Return the rows in the order of the draws, and information about them.

    Args:
        least: the smallest probability of a stored row, expressed as ``v * likelier``.
    """
    draws = torch.cat([share.draw_of_row() for share in shares])
    first = torch.argsort(draws, stable=True)
    order = torch.empty_like(first)
    order[first] = torch.arange(len(draws))
    into = list(order.split([len(share.draw_of_row()) for share in shares]))
    info = _info(shares, names, into, len(draws))
    if shares[0].part.values is not None:
        weight = _weights(shares, sampler, least)
        info["priority_weight"] = weight[draws[first]]
    return rows_of([share.part.data for share in shares], into), info


def _info(
    shares: list[Share], names: GlobalIndex, into: list[torch.Tensor], rows: int
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key in shares[0].part.info:
        if key == "priority_weight":
            continue
        values = []
        for share in shares:
            value = share.part.info[key]
            if key in ("index", "anchor_index"):
                value = names.join(share.shard, value)
            elif key in ("index_generation", "anchor_generation"):
                value = names.stamped(value, share.incarnation)
            elif key == SEQUENCE_ID:
                value = share.draw_of_row()
            values.append(value)
        found[key] = scattered(values, into, rows)
    return found


def _weights(shares: list[Share], sampler: Any, least: float) -> torch.Tensor:
    """Return the ``priority_weight`` of each draw ``[draws]``.

    The weights use the actual probabilities of the draws.
    """
    count = sum(len(share.numbers) for share in shares)
    value = torch.empty(count, dtype=torch.float64)
    for share in shares:
        assert share.part.values is not None
        value[share.numbers] = share.part.values * share.likelier
    if sampler.weight_norm == "batch":
        least = float(value.min())
    return importance_weights(value, least, sampler.beta, sampler.dtype)
