"""When a shard may be written to: what makes the saves of all shards one instant."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

from replaykit.sharding.errors import BarrierBusy

__all__ = ["Barrier", "Known", "Stamp", "missing_parts"]


_REFUSED: Any = object()
"""The answer to a part that was not written."""


class Stamp(NamedTuple):
    """Which write this is part of.

    Attributes:
        client, number: name the write. ``shards``: bit s is set where shard s has a part of it.
        done: all writes of this client with lower numbers have been acknowledged to it.
    """

    client: str
    number: int
    shards: int
    done: int


class Known(NamedTuple):
    """What has come to a shard.

    Attributes:
        came: writes, and in which shards they have parts. Those that are long done, or whose
            clients have long been silent, are left out.
        done: by client the number below which all writes were acknowledged to it.
    """

    came: dict[tuple[str, int], int]
    done: dict[str, int]


def missing_parts(found: dict[int, Known]) -> dict[int, set[tuple[str, int]]]:
    """Which parts of writes that were begun have not come, by shard.

    Example:
        >>> from replaykit.sharding.barrier import Known, missing_parts
        >>> missing_parts({0: Known({("a", 7): 0b11}, {"a": 7}), 1: Known({}, {"a": 5})})
        {1: {('a', 7)}}
    """
    done: dict[str, int] = {}
    for known in found.values():
        for client, number in known.done.items():
            done[client] = max(number, done.get(client, 0))
    missing: dict[int, set[tuple[str, int]]] = {}
    for known in found.values():
        for name, bits in known.came.items():
            if name[1] < done.get(name[0], 0):
                continue
            for shard, other in found.items():
                if bits >> shard & 1 and name not in other.came:
                    missing.setdefault(shard, set()).add(name)
    return missing


class Barrier:
    """Knows which writes have come, and lets none begin while all shards are saved.

    A batch has parts in several shards. One that was begun anywhere when the shards were frozen is
    let through everywhere; one that was not waits everywhere. So when all that were begun have
    come, what the shards hold is what one big buffer held between two writes.

    A part that comes again, since the answer to it was lost with a connection or a shard, is known
    and gets the same answer, also after a restart from a checkpoint.

    Args:
        within: seconds within which a client is done with a write, or gives it up.

    Not thread-safe: whoever holds the shard guards it. Memory: the writes under way of each client
    that has written in the last ``4 * within + 60`` seconds; nobody asks for older ones again.
    """

    def __init__(self, within: float = 60.0) -> None:
        self._answers: dict[str, dict[int, tuple[int, Any]]] = {}
        self._done: dict[str, int] = {}
        # When each client wrote last, from who has been silent longest. What a save asks others
        # for is younger than what is forgotten, so that no shard misses what another forgot.
        self._heard: dict[str, float] = {}
        self._young_s, self._forgotten_s = 2 * within + 30, 4 * within + 60
        self._token: str | None = None
        self._until = 0.0
        self._through: set[tuple[str, int]] = set()

    # -- writes -------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """Whether a part may be written now, or has been."""
        if not self.frozen:
            return True
        name = (stamp.client, stamp.number)
        return name in self._through or self.answer(stamp) is not None

    def answer(self, stamp: Stamp) -> tuple[Any] | None:
        """What was answered to a part that has been written; None where it has not."""
        found = self._answers.get(stamp.client, {}).get(stamp.number)
        return None if found is None or found[1] is _REFUSED else (found[1],)

    def came(self, stamp: Stamp, answer: Any) -> None:
        """Notes a part that was written, and what is answered: a plain value or a tensor."""
        known = self._answers.setdefault(stamp.client, {})
        done = self._done[stamp.client] = max(stamp.done, self._done.get(stamp.client, 0))
        for number in [number for number in known if number < done]:
            del known[number]
        known[stamp.number] = (stamp.shards, answer)
        now = time.monotonic()
        self._heard.pop(stamp.client, None)
        self._heard[stamp.client] = now
        for client, heard in list(itertools.islice(self._heard.items(), 2)):
            if now - heard > self._forgotten_s:
                for table in (self._heard, self._answers, self._done):
                    table.pop(client, None)

    def refused(self, stamp: Stamp) -> None:
        """Notes a part that was not written and will not be: no save waits for it."""
        self.came(stamp, _REFUSED)

    # -- saves --------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Whether writes wait. They do not wait longer than was promised."""
        return self._token is not None and time.monotonic() < self._until

    def freeze(self, token: str, seconds: float) -> Known:
        """Keeps writes out; returns those that have come.

        Raises:
            BarrierBusy: somebody else does.
        """
        if self.frozen and self._token != token:
            raise BarrierBusy("somebody else saves or loads all shards at this moment")
        now = time.monotonic()
        self._token, self._until, self._through = token, now + seconds, set()
        came = {
            (client, number): shards
            for client, known in self._answers.items()
            if now - self._heard[client] < self._young_s
            for number, (shards, _) in known.items()
        }
        return Known(came, dict(self._done))

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Lets parts in of writes that were begun elsewhere."""
        self.check(token)
        self._through |= writes

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Whether the parts of these writes have come."""
        return all(
            number in self._answers.get(client, {}) or number < self._done.get(client, 0)
            for client, number in writes
        )

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """No longer waits for the other parts of these writes: they will not come."""
        for client, number in writes:
            self._answers.get(client, {}).pop(number, None)

    def check(self, token: str) -> None:
        """Raises RuntimeError where writes have not been kept out since ``freeze``."""
        if not self.frozen or self._token != token:
            raise RuntimeError("the shards were held back for too long, and are written to again")

    def thaw(self, token: str) -> None:
        """Lets writes in, if it was this token that kept them out."""
        if self._token == token:
            self._token, self._through = None, set()

    # -- state --------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """The writes under way, as plain values."""
        return [
            [client, number, shards, answer.tolist() if hasattr(answer, "tolist") else answer]
            for client, known in self._answers.items()
            for number, (shards, answer) in known.items()
            if answer is not _REFUSED
        ]

    def load(self, state: list[list[Any]]) -> None:
        """Takes the place of what was known."""
        self._answers, self._done, self._heard = {}, {}, {}
        now = time.monotonic()
        for client, number, shards, answer in state:
            self._answers.setdefault(client, {})[number] = (shards, answer)
            self._heard[client] = now
