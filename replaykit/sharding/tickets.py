"""How a client keeps the pace that a rate limiter sets to all of them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from replaykit.pace import INSERT, SAMPLE, checked_timeout
from replaykit.sharding.membership import Members
from replaykit.sharding.pacing import PaceKeeper

__all__ = ["Ticket", "Tickets"]

_FREE: contextlib.AbstractContextManager[Ticket | None] = contextlib.nullcontext()


class Tickets:
    """Rights of a client's calls to go on; none where nothing makes them wait. Thread-safe.

    Attributes:
        keeper: who counts for all clients; None without a rate limiter.
    """

    def __init__(self, members: Members) -> None:
        self._members, self.keeper = members, members.supervisor.pace

    def insert(self, timeout: float | None) -> contextlib.AbstractContextManager[Ticket | None]:
        """For a write that waits so many seconds at most."""
        return self._ticket(INSERT, timeout)

    def sample(self, timeout: float | None) -> contextlib.AbstractContextManager[Ticket | None]:
        """For a sample."""
        return self._ticket(SAMPLE, timeout)

    def _ticket(
        self, side: int, timeout: float | None
    ) -> contextlib.AbstractContextManager[Ticket | None]:
        timeout = checked_timeout(timeout)
        return _FREE if self.keeper is None else Ticket(self._members, self.keeper, side, timeout)

    def may_sample(self, count: int) -> bool:
        """Whether a sample would not wait."""
        return self.keeper is None or self.keeper.may(SAMPLE, count)

    def told(self) -> None:
        """Has rows counted that were stored without a ticket."""
        if self.keeper is not None:
            self.keeper.end(None, INSERT, 0, 0, self._members.table.told())

    def emptied(self, *, counting_on: bool) -> None:
        """All rows were let go."""
        if self.keeper is not None:
            self.keeper.emptied(self._members.table.told(), counting_on)


class Ticket:
    """The right of a call to insert or sample some rows. What is not used is given back, and with
    it goes what this client has learned of the rows in the shards.

    Attributes:
        keeper: who gives it.
        until: when the call stops waiting; None: never.
    """

    def __init__(
        self, members: Members, keeper: PaceKeeper, side: int, timeout: float | None
    ) -> None:
        self._members, self.keeper, self._side = members, keeper, side
        self._timeout = timeout
        self.until = None if timeout is None else time.monotonic() + timeout
        self._right: tuple[Any, int] | None = None
        self._sampled = 0

    def admit(self, count: int, timeout: float | None = None) -> bool:
        """Waits for the right, and returns whether it was there at once; see ``PaceKeeper``.

        Args:
            timeout: seconds; None: what is left to the call.
        """
        if timeout is None and self.until is not None:
            timeout = max(0.0, self.until - time.monotonic())
        name, at_once = self.keeper.admit(self._side, count, timeout)
        self._right = name, count
        return at_once

    def sampled(self, count: int) -> None:
        """Notes how many records were delivered."""
        self._sampled = count

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._right is not None:
            name, count = self._right
            told = self._members.table.told()
            self.keeper.end(name, self._side, count, self._sampled, told)
