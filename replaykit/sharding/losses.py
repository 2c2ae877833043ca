"""What was lost with shards that died, by what clients know of them."""

from __future__ import annotations

from replaykit.sharding.facts import ShardFacts, ShardLoss

__all__ = ["Losses"]


class Losses:
    """Counts rows that were acknowledged to somebody and did not come back. Not thread-safe.

    A client tells what it has been acknowledged when it notices a death; others may have been
    acknowledged more, and tell that when they notice it. So a loss may grow until every client
    that wrote has been told.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        self._back: dict[tuple[int, int], ShardFacts] = {}

    def died(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        """A client says that this incarnation has died after so many rows at least, of which
        ``rows`` were stored."""
        name = (shard, incarnation)
        self._told[name] = max(self._told.get(name, (0, 0)), (written, rows))

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """The successor of this incarnation is there, with what its checkpoint had."""
        self._back[shard, incarnation] = facts

    def newest(self, shard: int) -> ShardLoss:
        """What was lost when a shard came back last; it has."""
        return self.of(shard, max(lost for number, lost in self._back if number == shard))

    def of(self, shard: int, incarnation: int) -> ShardLoss:
        """What was lost with an incarnation whose successor is there."""
        facts = self._back[shard, incarnation]
        first = facts.written
        written, rows = self._told.get((shard, incarnation), (0, 0))
        stop = max(first, written)
        lost = min(stop - first, rows)
        return ShardLoss(shard, incarnation, stop - lost, stop, lost, facts.rows)

    def all(self) -> list[ShardLoss]:
        """All losses, in the order in which the shards came back."""
        return [self.of(*name) for name in self._back]
