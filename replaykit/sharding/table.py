"""What a client knows of the shards, and draws from first."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from replaykit.sharding.facts import ShardFacts, Terms
from replaykit.sharding.pacing import Told

__all__ = ["ShardTable", "choose"]


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
