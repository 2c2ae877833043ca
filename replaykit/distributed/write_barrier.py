"""Record the writes that a shard has received, and hold up writes during a save."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from replaykit.distributed.protocol import BarrierBusy

_REFUSED: Any = object()
"""The marker that is recorded instead of an answer for a refused part."""


class Stamp(NamedTuple):
    """The write to which a message belongs.

    Attributes:
        client, number: the client, and the sequence number of the write among the client's writes.
        shards: bit mask in which bit s is set if shard s has a part of the write.
        done: all writes of this client with sequence numbers below ``done`` have ended.
    """

    client: str
    number: int
    shards: int
    done: int


class KnownWrites(NamedTuple):
    """The writes of which a shard has received parts.

    Attributes:
        came: for each write, the bit mask of the shards that have parts of it. Writes that ended
            long ago are left out, and so are writes of clients that have been silent for long.
        done: for each client, the number below which all writes have ended.
    """

    came: dict[tuple[str, int], int]
    done: dict[str, int]


def missing_parts(found: dict[int, KnownWrites]) -> dict[int, set[tuple[str, int]]]:
    """Return the missing parts of incomplete writes, by shard.

    Example:
        >>> from replaykit.distributed.write_barrier import KnownWrites, missing_parts
        >>> ahead = KnownWrites({("a", 7): 0b11}, {"a": 7})
        >>> missing_parts({0: ahead, 1: KnownWrites({}, {"a": 5})})
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
    """The record of the writes that a shard has received, and a gate for new writes.

    The gate delays new writes while all shards freeze their rows for a save. A batch can have parts
    in several shards. If any part was written before the freeze, all shards admit the other parts.
    If no part was written before the freeze, all parts wait. After the admitted parts have arrived,
    every batch is in the shards completely or not at all.

    A client sends a part again if the answer was lost with a connection or a shard. The shard then
    gives the same answer, even after a restart from a checkpoint.

    Args:
        within: seconds after which a client has finished a write or given up.

    The class is not thread-safe; callers hold the lock of the shard. Memory: the writes under way
    of each client that has written in the last ``4 * within + 60`` seconds. Clients do not repeat
    older writes.
    """

    def __init__(self, within: float = 60.0) -> None:
        self._answers: dict[str, dict[int, tuple[int, Any]]] = {}
        self._done: dict[str, int] = {}
        # The time of each client's last write, ordered so that the first client has been silent
        # longest. A save considers only writes that are newer than all forgotten writes. So no
        # shard waits for a forgotten write.
        self._heard: dict[str, float] = {}
        self._young_s, self._forgotten_s = 2 * within + 30, 4 * within + 60
        self._token: str | None = None
        self._until = 0.0
        self._through: set[tuple[str, int]] = set()

    # -- writes -------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """Return whether a part may be written now, or has already been written."""
        if not self.frozen:
            return True
        name = (stamp.client, stamp.number)
        return name in self._through or self.answer(stamp) is not None

    def answer(self, stamp: Stamp) -> tuple[Any] | None:
        """Return the answer to a written part as a 1-tuple, or None for other parts."""
        found = self._answers.get(stamp.client, {}).get(stamp.number)
        return None if found is None or found[1] is _REFUSED else (found[1],)

    def came(self, stamp: Stamp, answer: Any) -> None:
        """Record a written part and its answer, a plain value or a tensor."""
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
        """Record a refused part, so that no save waits for it."""
        self.came(stamp, _REFUSED)

    # -- saves --------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """True while new writes have to wait.

        New writes wait at most for the seconds given to ``freeze``.
        """
        return self._token is not None and time.monotonic() < self._until

    def freeze(self, token: str, seconds: float) -> KnownWrites:
        """Start to delay new writes; return the writes that have already been received.

        Raises:
            BarrierBusy: another client is already delaying writes.
        """
        if self.frozen and self._token != token:
            raise BarrierBusy("another client is saving or loading all shards; try again later")
        now = time.monotonic()
        self._token, self._until, self._through = token, now + seconds, set()
        came = {
            (client, number): shards
            for client, known in self._answers.items()
            if now - self._heard[client] < self._young_s
            for number, (shards, _) in known.items()
        }
        return KnownWrites(came, dict(self._done))

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Admit the parts of writes that were begun in other shards."""
        self.check(token)
        self._through |= writes

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Return whether the parts of these writes have been received."""
        return all(
            number in self._answers.get(client, {}) or number < self._done.get(client, 0)
            for client, number in writes
        )

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """Forget these writes, since their other parts will not arrive."""
        for client, number in writes:
            self._answers.get(client, {}).pop(number, None)

    def check(self, token: str) -> None:
        """Raise RuntimeError unless writes have been delayed since ``freeze``."""
        if not self.frozen or self._token != token:
            raise RuntimeError("the shards were held back for too long, and accept writes again")

    def thaw(self, token: str) -> None:
        """Admit new writes if this token belongs to the current freeze."""
        if self._token == token:
            self._token, self._through = None, set()

    # -- state --------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """Return the writes under way, as plain values."""
        return [
            [client, number, shards, answer.tolist() if hasattr(answer, "tolist") else answer]
            for client, known in self._answers.items()
            for number, (shards, answer) in known.items()
            if answer is not _REFUSED
        ]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        """Replace all recorded writes."""
        self._answers, self._done, self._heard = {}, {}, {}
        now = time.monotonic()
        for client, number, shards, answer in state:
            self._answers.setdefault(client, {})[number] = (shards, answer)
            self._heard[client] = now
