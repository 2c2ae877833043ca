"""A client's draws: shards first, by their masses, then rows in each of them."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.errors import NotEnoughData
from replaykit.sharding.batches import Share, batch_of
from replaykit.sharding.errors import ShardDied
from replaykit.sharding.facts import Part, Terms
from replaykit.sharding.shards import Reply
from replaykit.sharding.table import choose

if TYPE_CHECKING:
    from replaykit.sharding.sampling import Sampled

__all__ = ["Draws", "Pending"]

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
        self._sent: dict[int, tuple[int, Reply]] | None = None
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
            part: Part | None = None
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
