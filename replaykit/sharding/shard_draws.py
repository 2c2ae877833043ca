"""Draw from shards by their masses, and request batches ahead."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.errors import NotEnoughData, RateLimiterTimeout
from replaykit.sharding.protocol import ShardDied, ShardFacts, ShardPart, ShardSilent, Terms
from replaykit.sharding.routing import Share, batch_of
from replaykit.sharding.shard_pacing import Told
from replaykit.sharding.shards import ShardReply

if TYPE_CHECKING:
    from replaykit.sharding.client_samples import Sampled

__all__ = [
    "Draws",
    "Pending",
    "PendingBatch",
    "ShardRequests",
    "ShardTable",
    "ShardedResult",
    "choose",
]


class ShardTable:
    """The newest facts of every shard that are known here; thread-safe.

    Attributes:
        incarnations: which one of every shard the facts are of.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.incarnations = [0] * num_shards
        self._lock = threading.Lock()
        self._facts: list[ShardFacts | None] = [None] * num_shards
        self._heard = [-float("inf")] * num_shards
        self._there = [True] * num_shards
        self._told: dict[tuple[int, int], int] = {}  # rows written to those that have died

    def learn(self, shard: int, incarnation: int, facts: ShardFacts) -> tuple[int, int] | None:
        """Takes facts over, unless newer ones are known.

        Returns:
            Rows written and stored, where the facts are of an incarnation that is noted as dead,
            and say that it was written more than ``lost`` knew: an answer that was taken later.
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
        """Notes that a shard has died; returns how many rows it is known to have had written and
        stored, or None where the death is known already."""
        with self._lock:
            if incarnation != self.incarnations[shard] or not self._there[shard]:
                return None
            self._there[shard] = False
            known = self._facts[shard]
            told = (0, 0) if known is None else (known.written, known.rows)
            self._told[shard, incarnation] = told[0]
            return told

    def back(self, shard: int, incarnation: int) -> None:
        """Notes that a shard is there again; what it holds it has to be asked."""
        with self._lock:
            self.incarnations[shard], self._there[shard] = incarnation, True
            self._facts[shard], self._heard[shard] = None, -float("inf")

    def facts(self, shard: int) -> ShardFacts | None:
        """The newest facts of a shard, also of one that has died."""
        return self._facts[shard]

    def is_there(self, shard: int) -> bool:
        """Whether the shard is not known to have died."""
        return self._there[shard]

    def there(self) -> list[int]:
        """The shards that are not known to have died."""
        return [shard for shard in range(self.num_shards) if self._there[shard]]

    def old(self, terms: Terms | None, max_age: float) -> list[int]:
        """The shards of which there is no mass in these terms that is younger than ``max_age``."""
        oldest = time.monotonic() - max_age
        found = []
        for shard in self.there():
            facts = self._facts[shard]
            wrong = facts is None or (terms is not None and facts.terms != terms)
            if wrong or self._heard[shard] <= oldest:
                found.append(shard)
        return found

    def masses(self, terms: Terms) -> list[float] | None:
        """The mass of every shard in these terms; 0 of those that are not there.

        None where a shard is there whose mass is not known in these terms: what another thread has
        asked or learned since may be in others.
        """
        found: list[float] = []
        with self._lock:
            for facts, there in zip(self._facts, self._there, strict=True):
                if there and (facts is None or facts.terms != terms):
                    return None
                found.append(facts.mass if there and facts is not None else 0)
        return found

    def told(self) -> list[Told]:
        """What is known of the rows of every shard that is there."""
        with self._lock:
            known = zip(self._facts, self._there, self.incarnations, strict=True)
            return [
                Told(shard, incarnation, facts.version, facts.written, facts.rows, facts.loads)
                for shard, (facts, there, incarnation) in enumerate(known)
                if there and facts is not None
            ]

    def most(self) -> float:
        """The largest raw priority ever set, at least 1: what new rows get."""
        with self._lock:
            return max((facts.most for facts in self._facts if facts is not None), default=1.0)


def choose(
    masses: list[float], count: int, generator: torch.Generator | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draws shards in proportion to their masses, int64 ``[count]``; one has a mass.

    Counts are drawn exactly, as integers; sums of ``v`` in float64, as a tree is searched.
    """
    upto = np.cumsum(np.asarray(masses))
    device = "cpu" if generator is None else generator.device
    if upto.dtype.kind == "i":
        drawn = torch.randint(int(upto[-1]), (count,), generator=generator, device=device)
        point = drawn.cpu().numpy()
    else:
        part = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        point = part.cpu().numpy() * upto[-1]
    last = int(np.flatnonzero(np.asarray(masses))[-1])  # which rounding may go beyond
    return np.minimum(np.searchsorted(upto, point, side="right"), last)


_SEEDS = 2**62


class Draws:
    """Makes the batches of one client.

    A draw of one big buffer is a draw of a shard with ``mass / sum of masses``, and of a row by the
    shard itself. All shards are asked, also those with no draw: their answers keep the table young,
    and importance weights need the smallest ``v`` of all.

    Where a shard has died, or has nothing to draw from any more, its draws are made again among the
    others, so that the batch is one of the rows that are there.

    Args:
        seeded: what to draw with; None: the client's generator.
        generations: whether batches have those of their rows in any case.
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
        """What shards and seeds are drawn with."""
        return self._client.generator if self._seeded is None else self._seeded

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Returns rows and what is known of them."""
        return self.begun(batch_size).get()

    def refresh(self, batch_size: int) -> None:
        """Asks the shards whose masses are too old for a draw."""
        client = self._client
        client._members.refresh(client._law.terms(batch_size), client._settings.max_age)

    def begun(self, batch_size: int, *, patient: bool = True) -> Pending:
        """Returns a batch that the shards have been asked for.

        ``patient``: waits until masses are known by which shards can be drawn. Otherwise the batch
        whose masses are not known waits for them when it is asked for.
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
        """Masses of all shards in these terms; asks those of which only others are known.

        Raises:
            TimeoutError: threads that share the client ask in other terms all the time.
        """
        members = self._client._members
        while (masses := members.table.masses(terms)) is None:
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"no masses of all shards in {terms} within {members.timeout} s: threads that "
                    "draw differently need clients of their own"
                )
            members.refresh(terms, float("inf"))
        return masses

    def _masses(self, terms: Terms, batch_size: int, until: float) -> list[float]:
        """Masses of which one is above 0; waits for shards where none is there."""
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
        """The smallest probability of a stored row that could be drawn, in the unit of ``v``."""
        table = self._client._members.table
        least = [share.part.facts.smallest * share.likelier for share in shares]
        drawn = {share.shard for share in shares}
        for shard in table.there():
            facts = table.facts(shard)
            if shard not in drawn and facts is not None and facts.mass:
                least.append(facts.smallest)
        return min(least)

    def possible(self, batch_size: int) -> bool:
        """Whether there is anything to draw from."""
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
        """Raises what the largest shard says of a draw; all of them are there."""
        members = self._client._members
        rows = [self._client._rows_of(shard) for shard in range(members.table.num_shards)]
        if not any(rows):
            raise NotEnoughData("Cannot sample from an empty storage.")
        largest = rows.index(max(rows))
        draws = self._client._law.draws(batch_size)
        try:
            members.take(largest, members.send(largest, "draw", draws, terms, 0, True))
        except ShardDied:
            return
        except (RuntimeError, KeyError) as error:
            text = error.args[0] if error.args else error
            raise type(error)(f"in none of the {len(rows)} shards, as in {largest}: {text}") from (
                None
            )


class Pending:
    """A batch under way: what each shard was asked for, and what has come. Not thread-safe.

    Attributes:
        was_sent: whether shards have been asked for it.
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
        """Draws shards for what has not come yet, and sends to all of them.

        Args:
            masses: of all shards; None: waits until there are some.
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
        """Waits, and returns rows and what is known of them; once.

        Args:
            within: seconds to wait for an answer; None: those of the client.

        Raises:
            ShardSilent: a shard has not answered; what has come is kept for the next call.
                Otherwise as ``ShardedClient.sample``.
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
                part = members.take(shard, sent, within)
            del self._sent[shard]
            if part is not None and part.data is not None:
                numbers = self._left[self._shards == shard]
                self._shares.append(Share(shard, sent[0], numbers, self._masses[shard], part))
        come = [share.numbers.numpy() for share in self._shares]
        self._left = np.setdiff1d(self._left, np.concatenate([self._left[:0], *come]))
        self._sent = None

    def has_come(self) -> bool:
        """Whether ``get`` would most likely not wait."""
        return self._sent is not None and all(reply.is_there() for _, reply in self._sent.values())


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class ShardRequests:
    """Keeps ``depth`` batches of the client's own size under way, and hands them out in order.

    Shards and rows are drawn when a batch is asked for, in the order in which the batches are
    handed out: with the same masses and rows they are those that would be drawn without. A batch
    that will not be handed out gives its random numbers back, if nobody has used others since.

    ``_lock`` guards the queue and the draws; nobody waits for an answer with it.
    """

    def __init__(self, client: Sampled, draws: Draws, depth: int) -> None:
        self._client, self._draws, self.depth = client, draws, depth
        self._lock = threading.Lock()
        self._under_way: deque[PendingBatch] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, batch_size: int) -> Pending:
        """Returns the oldest batch under way, and asks for further ones."""
        return self._take(batch_size).pending

    def _take(self, batch_size: int) -> PendingBatch:
        self._draws.refresh(batch_size)
        with self._lock:
            # Those for which there was nothing to draw from are tried again.
            self._under_way = deque(one for one in self._under_way if one.pending.was_sent)
            while len(self._under_way) <= self.depth:
                self._under_way.append(self.asked(batch_size))
            return self._under_way.popleft()

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Waits for the oldest batch.

        One that failed may have been asked for too early: the next one is taken, at last one that
        is asked for now.

        Raises:
            ShardSilent: a shard has not answered; the batch stays under way. Otherwise what a
                batch raises that was asked for after this call.
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
        """A batch that the shards have been asked for, if their masses are known; it is not among
        those that are handed out."""
        before = self._random().get_state()
        pending = self._draws.begun(batch_size, patient=False)
        return PendingBatch(pending, before, self._random().get_state())

    def _random(self) -> torch.Generator:
        generator = self._client.generator
        return torch.default_generator if generator is None else generator

    def state(self) -> torch.Tensor:
        """The state of the generator with which the batches that follow would be drawn again."""
        with self._lock:
            return self._under_way[0].before if self._under_way else self._random().get_state()

    def drop(self) -> None:
        """Forgets what is under way."""
        with self._lock:
            if self._under_way:
                self.undo(self._under_way[0], self._under_way[-1])
            self._under_way.clear()

    def undo(self, first: PendingBatch, last: PendingBatch) -> None:
        """Gives back the random numbers of batches that follow one another, if nobody has used
        others since."""
        random = self._random()
        if torch.equal(random.get_state(), last.after):
            random.set_state(first.before)


class PendingBatch:
    """A batch under way, and the states of the generator around its draw."""

    def __init__(self, pending: Pending, before: torch.Tensor, after: torch.Tensor) -> None:
        self.pending, self.before, self.after = pending, before, after


class ShardedResult:
    """What a call will return: wait for it with ``result()``, or with ``await``. Thread-safe.

    Example:
        >>> import asyncio, torch
        >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
        >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
        ...                          batch_size=4, backend="local") as rb:
        ...     _ = rb.extend(torch.zeros(6))
        ...     ahead = rb.sample_async()
        ...     async def learn():
        ...         return await rb.sample_async()
        ...     ahead.result(), asyncio.run(learn())
        (tensor([0., 0., 0., 0.]), tensor([0., 0., 0., 0.]))
    """

    def __init__(
        self, get: Callable[[float | None, float | None], Any], come: Callable[[], bool]
    ) -> None:
        self._get, self._come = get, come
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: Exception | None = None
        self._known = False

    def done(self) -> bool:
        """Whether ``result`` would not wait, but for shards that have died meanwhile."""
        return self._known or self._come()

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Args:
            timeout: seconds to wait for a shard, and for a rate limiter; None: the ``timeout`` of
                the buffer, and for a rate limiter without end.

        Raises:
            TimeoutError: a shard has not answered, or a RateLimiterTimeout; may be asked for again.
                Otherwise whatever the call raised.
        """
        return self._result(timeout, timeout)

    def _result(self, timeout: float | None, held_up: float | None) -> Any:
        """``held_up``: seconds to wait for a rate limiter."""
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

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        """Holds no thread while a rate limiter holds it up: those of a loop are few, and what lets
        it go on may need one too."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(self._result, None, 0.0)
            except RateLimiterTimeout:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
