"""Draw from shards in proportion to their masses, and prefetch batches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from replaykit.distributed.protocol import ShardDied, ShardFacts, ShardPart, ShardSilent, Terms
from replaykit.distributed.requests import RemoteResult
from replaykit.distributed.routing import Share, batch_of
from replaykit.distributed.shard_pacing import ShardCounts
from replaykit.distributed.shards import ShardReply
from replaykit.errors import NotEnoughData, RateLimiterTimeout

if TYPE_CHECKING:
    from replaykit.distributed.client_samples import Sampled

__all__ = [
    "Draws",
    "Pending",
    "PendingBatch",
    "SampleAnswer",
    "ShardRequests",
    "ShardTable",
    "ShardedResult",
    "choose",
]


class ShardTable:
    """The newest known facts of every shard. Thread-safe.

    Attributes:
        incarnations: for each shard, the incarnation that the facts describe.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.incarnations = [0] * num_shards
        self._lock = threading.Lock()
        self._facts: list[ShardFacts | None] = [None] * num_shards
        self._heard = [-float("inf")] * num_shards
        self._there = [True] * num_shards
        self._told: dict[tuple[int, int], int] = {}  # rows written to dead incarnations

    def learn(self, shard: int, incarnation: int, facts: ShardFacts) -> tuple[int, int] | None:
        """Store facts, unless newer facts are known.

        Returns:
            The counts of rows written and stored, if these facts correct the counts recorded for a
            death; otherwise None. Facts correct these counts if they come from an answer that was
            read after the death of its sender was noticed. They must also count more written rows
            than ``lost`` returned.
        """
        with self._lock:
            known = self._facts[shard]
            if incarnation != self.incarnations[shard] or not self._there[shard]:
                name = (shard, incarnation)
                if facts.written <= self._told.get(name, facts.written):
                    return None
                self._told[name] = facts.written
                return facts.written, facts.rows
            if known is None or facts.version >= known.version:
                self._facts[shard] = facts
                self._heard[shard] = time.monotonic()
            return None

    def lost(self, shard: int, incarnation: int) -> tuple[int, int] | None:
        """Record a death; return the known counts of rows written and stored.

        The result is None if the death was already known.
        """
        with self._lock:
            if incarnation != self.incarnations[shard] or not self._there[shard]:
                return None
            self._there[shard] = False
            known = self._facts[shard]
            told = (0, 0) if known is None else (known.written, known.rows)
            self._told[shard, incarnation] = told[0]
            return told

    def back(self, shard: int, incarnation: int) -> None:
        """Record that a shard is live again, with unknown facts."""
        with self._lock:
            self.incarnations[shard], self._there[shard] = incarnation, True
            self._facts[shard], self._heard[shard] = None, -float("inf")

    def facts(self, shard: int) -> ShardFacts | None:
        """Return the newest facts of a shard, even if it has died."""
        return self._facts[shard]

    def is_there(self, shard: int) -> bool:
        """Return whether the shard is live, as far as the client knows."""
        return self._there[shard]

    def there(self) -> list[int]:
        """Return the live shards, as far as the client knows."""
        return [shard for shard in range(self.num_shards) if self._there[shard]]

    def old(self, terms: Terms | None, max_age: float) -> list[int]:
        """Return the live shards whose mass is unknown or older than ``max_age`` seconds.

        A mass in other terms counts as unknown.
        """
        oldest = time.monotonic() - max_age
        found = []
        for shard in self.there():
            facts = self._facts[shard]
            wrong = facts is None or (terms is not None and facts.terms != terms)
            if wrong or self._heard[shard] <= oldest:
                found.append(shard)
        return found

    def masses(self, terms: Terms) -> list[float] | None:
        """Return the mass of every shard in these terms, with 0 for dead shards.

        The result is None if the mass of a live shard is not known in these terms. Another thread
        may have asked for masses in other terms meanwhile.
        """
        found: list[float] = []
        with self._lock:
            for facts, there in zip(self._facts, self._there, strict=True):
                if there and (facts is None or facts.terms != terms):
                    return None
                found.append(facts.mass if there and facts is not None else 0)
        return found

    def counts(self) -> list[ShardCounts]:
        """Return the known row counts of the live shards."""
        with self._lock:
            known = zip(self._facts, self._there, self.incarnations, strict=True)
            return [
                ShardCounts.of(shard, incarnation, facts)
                for shard, (facts, there, incarnation) in enumerate(known)
                if there and facts is not None
            ]

    def most(self) -> float:
        """Return the largest raw priority ever set in any shard, at least 1.

        It is the default priority of new rows.
        """
        with self._lock:
            return max((facts.most for facts in self._facts if facts is not None), default=1.0)


def choose(
    masses: list[float], count: int, generator: torch.Generator | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draw shards in proportion to their masses, int64 ``[count]``.

    At least one mass must be positive. If the masses are counts, the draw uses exact integer
    arithmetic. If they are sums of ``v``, it uses float64, like the search in a sum tree.
    """
    upto = np.cumsum(np.asarray(masses))
    device = "cpu" if generator is None else generator.device
    if upto.dtype.kind == "i":
        drawn = torch.randint(int(upto[-1]), (count,), generator=generator, device=device)
        point = drawn.cpu().numpy()
    else:
        part = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        point = part.cpu().numpy() * upto[-1]
    last = int(np.flatnonzero(np.asarray(masses))[-1])  # rounding could give a later shard
    return np.minimum(np.searchsorted(upto, point, side="right"), last)


_SEEDS = 2**62


class Draws:
    """The draws of one client.

    To draw like a single buffer, the client draws a shard by its mass, and that shard draws a row.
    The client sends a request to every shard, even to shards without draws in the batch. The
    answers keep the table of masses up to date. Importance weights also need the smallest ``v`` of
    all shards.

    If a shard has died or has no eligible rows left, its draws are repeated among the other shards.
    So the batch has the distribution of the remaining rows.

    Args:
        seeded: the random generator of the draws, or None for the client's generator.
        generations: True to return the generations of rows even if neither the writer nor the
            sampler needs them.
    """

    def __init__(
        self,
        client: Sampled,
        seeded: torch.Generator | None = None,
        *,
        generations: bool = False,
    ) -> None:
        self._client, self._seeded, self.generations = client, seeded, generations

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that draws shards and their seeds."""
        return self._client.generator if self._seeded is None else self._seeded

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Return the rows of a batch, and the information about them."""
        return self.begun(batch_size).get()

    def refresh(self, batch_size: int) -> None:
        """Request new masses from shards whose masses are too old for a draw."""
        client = self._client
        client._members.refresh(client._law.terms(batch_size), client._settings.max_age)

    def begun(self, batch_size: int, *, patient: bool = True) -> Pending:
        """Request a batch from the shards; return the pending batch.

        ``patient`` is True to wait until the masses of all shards are known and at least one is
        positive. If it is False and a mass is not known, ``Pending.get`` sends the request later.
        """
        client = self._client
        terms = client._law.terms(batch_size)
        assert terms is not None
        pending = Pending(self, batch_size, terms, client._law.draws(batch_size))
        if patient:
            self.refresh(batch_size)
            pending.ask()
        else:
            masses = client._members.table.masses(terms)
            if masses is not None and any(masses):
                pending.ask(masses)
        return pending

    def _known(self, terms: Terms, until: float) -> list[float]:
        """Return the masses of all shards in these terms; request them if necessary.

        Raises:
            TimeoutError: other threads with this client keep asking for masses in other terms.
        """
        members = self._client._members
        while (masses := members.table.masses(terms)) is None:
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"no masses of all shards in {terms} within {members.timeout} s: threads with "
                    "different settings need separate clients"
                )
            members.refresh(terms, float("inf"))
        return masses

    def _masses(self, terms: Terms, batch_size: int, until: float) -> list[float]:
        """Return masses of which at least one is positive.

        If no mass is positive, wait for restarts of shards.
        """
        members = self._client._members
        while True:
            masses = self._known(terms, until)
            if any(masses):
                return masses
            members.refresh(terms, 0.0)
            masses = self._known(terms, until)
            if any(masses):
                return masses
            away = [s for s in range(members.table.num_shards) if not members.table.is_there(s)]
            if away:
                members.wait_for(away, until)
            else:
                self._refuse(terms, batch_size)

    def _least(self, shares: list[Share]) -> float:
        """Return the smallest probability of an eligible row, expressed as ``v``."""
        table = self._client._members.table
        least = [share.part.facts.smallest * share.likelier for share in shares]
        drawn = {share.shard for share in shares}
        for shard in table.there():
            facts = table.facts(shard)
            if shard not in drawn and facts is not None and facts.mass:
                least.append(facts.smallest)
        return min(least)

    def possible(self, batch_size: int) -> bool:
        """Return whether a batch can be drawn."""
        client = self._client
        try:
            terms = client._law.terms(batch_size)
            client._law.draws(batch_size)
        except RuntimeError:
            return False
        assert terms is not None
        client._members.refresh(terms, 0.0)
        return any(self._known(terms, time.monotonic() + client._members.timeout))

    def _refuse(self, terms: Terms, batch_size: int) -> None:
        """Raise the error that a draw from the largest shard raises.

        All shards are live.
        """
        members = self._client._members
        rows = [self._client._rows_of(shard) for shard in range(members.table.num_shards)]
        if not any(rows):
            raise NotEnoughData("Cannot sample from an empty storage.")
        largest = rows.index(max(rows))
        draws = self._client._law.draws(batch_size)
        try:
            members.receive(largest, members.send(largest, "draw", draws, terms, 0, True))
        except ShardDied:
            return
        except (RuntimeError, KeyError) as error:
            text = error.args[0] if error.args else error
            raise type(error)(f"in none of the {len(rows)} shards, as in {largest}: {text}") from (
                None
            )


class Pending:
    """A batch under way, with requests to shards and their answers. Not thread-safe.

    Attributes:
        was_sent: whether the requests to the shards have been sent.
    """

    def __init__(self, draws: Draws, batch_size: int, terms: Terms, count: int) -> None:
        self._draws, self._batch_size, self._terms = draws, batch_size, terms
        self._left = np.arange(count)
        self._shards: np.ndarray[Any, Any] = self._left[:0]
        self._masses: list[float] = []
        self._sent: dict[int, tuple[int, ShardReply]] | None = None
        self._shares: list[Share] = []
        self.was_sent = False

    def ask(self, masses: list[float] | None = None) -> None:
        """Draw a shard for each missing draw, and send a request to every live shard.

        Args:
            masses: the masses of all shards, or None to wait until one is positive.
        """
        client = self._draws._client
        members = client._members
        if masses is None:
            until = time.monotonic() + members.timeout
            masses = self._draws._masses(self._terms, self._batch_size, until)
        self._masses, generator = masses, self._draws.generator
        self._shards = choose(masses, len(self._left), generator)
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(_SEEDS, (client.num_shards,), generator=generator, device=device)
        counts = np.bincount(self._shards, minlength=client.num_shards)
        self._sent = {
            shard: members.send(
                shard, "draw", int(counts[shard]), self._terms, seed, False, self._draws.generations
            )
            for shard, seed in enumerate(seeds.tolist())
            if members.table.is_there(shard)
        }
        self.was_sent = True

    def get(self, within: float | None = None) -> tuple[Any, dict[Any, Any]]:
        """Wait for the batch; return its rows and the information about them.

        After this method has returned, do not call it again.

        Args:
            within: seconds to wait for an answer, or None for the timeout of the client.

        Raises:
            ShardSilent: a shard has not answered. The next call continues with the answers received
                so far.
            Other errors are the same as those of ``ShardedClient.sample``.
        """
        client = self._draws._client
        while len(self._left):
            if self._sent is None:
                self.ask()
            self._take(within)
        least = self._draws._least(self._shares)
        return batch_of(self._shares, client._names, client._sampler, least)

    def _take(self, within: float | None) -> None:
        assert self._sent is not None
        members = self._draws._client._members
        for shard, sent in list(self._sent.items()):
            part: ShardPart | None = None
            with contextlib.suppress(ShardDied):
                part = members.receive(shard, sent, within)
            del self._sent[shard]
            if part is not None and part.data is not None:
                numbers = self._left[self._shards == shard]
                self._shares.append(Share(shard, sent[0], numbers, self._masses[shard], part))
        come = [share.numbers.numpy() for share in self._shares]
        self._left = np.setdiff1d(self._left, np.concatenate([self._left[:0], *come]))
        self._sent = None

    def has_come(self) -> bool:
        """Return whether ``get`` would probably return without waiting."""
        return self._sent is not None and all(reply.is_there() for _, reply in self._sent.values())


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class ShardRequests:
    """The queue of a client's prefetched batches, which have the default size.

    The queue holds up to ``depth`` batches. Shards and rows are drawn when a batch is requested, in
    the order of delivery. If masses and rows do not change, the draws equal those of a client
    without prefetching. When a batch is dropped, its random numbers are rolled back, unless more
    numbers were drawn since. ``_lock`` guards the queue and the draws. No thread holds it while it
    waits for an answer.
    """

    def __init__(self, client: Sampled, draws: Draws, depth: int) -> None:
        self._client, self._draws, self.depth = client, draws, depth
        self._lock = threading.Lock()
        self._under_way: deque[PendingBatch] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, batch_size: int) -> Pending:
        """Return the oldest batch under way, and request more batches."""
        return self._take(batch_size).pending

    def _take(self, batch_size: int) -> PendingBatch:
        self._draws.refresh(batch_size)
        with self._lock:
            # Batches that were not sent for lack of known masses are requested again.
            self._under_way = deque(one for one in self._under_way if one.pending.was_sent)
            while len(self._under_way) <= self.depth:
                self._under_way.append(self.asked(batch_size))
            return self._under_way.popleft()

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Wait for the oldest batch, and return it.

        If that batch fails, it may have been requested too early. The call then tries the next
        batches, and finally a batch that it requests itself.

        Raises:
            ShardSilent: a shard has not answered; the batch stays under way.
            Exception: the error of the batch that this call has requested itself.
        """
        with self._lock:
            early = set(self._under_way)
        while True:
            asked = self._take(batch_size)
            try:
                return asked.pending.get()
            except ShardSilent:
                with self._lock:
                    self._under_way.appendleft(asked)
                raise
            except Exception:
                if asked not in early:
                    raise

    def asked(self, batch_size: int) -> PendingBatch:
        """Request a batch if masses are known; do not add it to the queue."""
        before = self._random().get_state()
        pending = self._draws.begun(batch_size, patient=False)
        return PendingBatch(pending, before, self._random().get_state())

    def _random(self) -> torch.Generator:
        generator = self._client.generator
        return torch.default_generator if generator is None else generator

    def state(self) -> torch.Tensor:
        """Return the state of the generator before the draws of the batches under way."""
        with self._lock:
            return self._under_way[0].before if self._under_way else self._random().get_state()

    def drop(self) -> None:
        """Drop all batches under way."""
        with self._lock:
            if self._under_way:
                self.undo(self._under_way[0], self._under_way[-1])
            self._under_way.clear()

    def undo(self, first: PendingBatch, last: PendingBatch) -> None:
        """Roll back the random numbers of consecutive batches.

        If other random numbers were drawn since, the call does nothing.
        """
        random = self._random()
        if torch.equal(random.get_state(), last.after):
            random.set_state(first.before)


class PendingBatch:
    """A batch under way, with the generator states before and after its draw."""

    def __init__(self, pending: Pending, before: torch.Tensor, after: torch.Tensor) -> None:
        self.pending, self.before, self.after = pending, before, after


class SampleAnswer:
    """The future batch of a call, with the methods of a `Reply`. Thread-safe.

    Args:
        get: function of the seconds to wait for a shard and for a rate limiter.
        come: function that returns whether ``get`` would not wait.
    """

    def __init__(
        self, get: Callable[[float | None, float | None], Any], come: Callable[[], bool]
    ) -> None:
        self._get, self._come = get, come
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: Exception | None = None
        self._known = False

    def sent(self) -> NoReturn:
        """Raise TypeError, since a batch needs several messages."""
        raise TypeError("expected the result of a call with one message, got one of several")

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait. If a shard has died, it may still wait."""
        return self._known or self._come()

    def get(self, timeout: float | None = None) -> Any:
        """Return the batch.

        Args:
            timeout: seconds to wait for a shard, and for a rate limiter. With None the wait for a
                shard is limited by the ``timeout`` of the buffer, and the wait for a rate limiter
                is unlimited.
        """
        return self._within(timeout, timeout)

    def _within(self, timeout: float | None, held_up: float | None) -> Any:
        """Return the batch, after at most ``held_up`` seconds of waiting for a rate limiter."""
        with self._lock:
            if not self._known:
                try:
                    self._value = self._get(timeout, held_up)
                except (ShardSilent, RateLimiterTimeout):
                    raise
                except Exception as error:
                    self._error = error
                self._known = True
        if self._error is not None:
            raise self._error
        return self._value

    async def wait(self) -> Any:
        """Return the batch to a coroutine.

        While a rate limiter delays the call, no thread waits. The event loop has few threads, and
        the call that ends the delay may need one.
        """
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(self._within, None, 0.0)
            except RateLimiterTimeout:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


ShardedResult = RemoteResult
"""The name of `RemoteResult` in releases before both were one class."""
