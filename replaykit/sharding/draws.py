"""A client's draws: shards first, by their masses, then rows in each of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.errors import NotEnoughData
from replaykit.sharding.batches import Share, batch_of
from replaykit.sharding.errors import ShardDied
from replaykit.sharding.facts import Part, Terms
from replaykit.sharding.table import choose

if TYPE_CHECKING:
    from replaykit.sharding.client import ShardedClient

__all__ = ["Draws"]

_SEEDS = 2**62


class Draws:
    """Makes the batches of one client.

    A draw of one big buffer is a draw of a shard with ``mass / sum of masses``, and of a row by the
    shard itself. All shards are asked, also those with no draw: their answers keep the table young,
    and importance weights need the smallest ``v`` of all.

    Where a shard has died, or has nothing to draw from any more, its draws are made again among the
    others, so that the batch is one of the rows that are there.
    """

    def __init__(self, client: ShardedClient) -> None:
        self._client = client

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Returns rows and what is known of them."""
        client = self._client
        members, law = client._members, client._law
        terms = law.terms(batch_size)
        assert terms is not None
        left = np.arange(law.draws(batch_size))
        until = time.monotonic() + members.timeout
        members.refresh(terms, client._settings.max_age)
        shares: list[Share] = []
        while len(left):
            masses = self._masses(terms, batch_size, until)
            shards = choose(masses, len(left), client.generator)
            found = self._ask(shards, left, masses, terms)
            shares += found
            got = [share.numbers.numpy() for share in found]
            left = np.setdiff1d(left, np.concatenate([left[:0], *got]))
        return batch_of(shares, client._names, client._sampler, self._least(shares))

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

    def _ask(
        self, shards: np.ndarray[Any, Any], left: np.ndarray[Any, Any], masses: Any, terms: Terms
    ) -> list[Share]:
        client, members = self._client, self._client._members
        device = "cpu" if client.generator is None else client.generator.device
        seeds = torch.randint(
            _SEEDS, (client.num_shards,), generator=client.generator, device=device
        ).tolist()
        counts = np.bincount(shards, minlength=client.num_shards)
        replies = {
            shard: members.send(shard, "draw", int(counts[shard]), terms, seeds[shard])
            for shard in members.table.there()
        }
        found = []
        for shard, sent in replies.items():
            try:
                part: Part = members.take(shard, sent)
            except ShardDied:
                continue
            if part.data is not None:
                numbers = left[shards == shard]
                found.append(Share(shard, sent[0], numbers, masses[shard], part))
        return found

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
