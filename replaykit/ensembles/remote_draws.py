"""Request draws from remote members, and hold the draw of an ensemble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from replaykit.buffer.buffer_dataset import DrawnRows, RemoteRequest
from replaykit.buffer.components import DataT
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import SIZE, Choice, naming_member
from replaykit.ensembles.ensemble_storage import rows_in
from replaykit.ensembles.remote_members import KnownMember, Member, RemoteDraw, left
from replaykit.errors import NotEnoughData
from replaykit.interrupts import allowed, deferred
from replaykit.pace import checked_timeout

__all__ = ["Asking", "Buffers", "EnsembleDrawn", "MemberDraw"]


@dataclass(slots=True)
class MemberDraw:
    """The draws of one member for a batch."""

    member: int
    draws: list[Any]


@dataclass(slots=True, eq=False)
class EnsembleDrawn:
    """A draw of an ensemble, with the members of its parts and their draws.

    Attributes:
        rows: number of rows that each part requests from its member.
        size: the batch size that was requested.
        ended: the members that had ended a pass before the draw.
        was_out: the sampler's ``ran_out`` before the draw.
        checks: for remote members that could have been chosen, the readiness requests and their
            numbers of rows.
        before, after: states of the ensemble's own generator; None if it was not used.
        until: the time on the monotonic clock at which the wait for rows ends; None for no limit.
        number: the number of the draw among those of the ensemble.
    """

    members: list[int]
    rows: int
    size: int
    parts: list[MemberDraw]
    ran_out: bool = False
    ended: frozenset[int] = frozenset()
    was_out: bool = False
    checks: list[tuple[int, RemoteRequest, int]] = field(default_factory=list)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    until: float | None = None
    number: int = 0

    @property
    def draw(self) -> EnsembleDrawn:
        """The draw itself, which also holds the batches of the members."""
        return self

    def wait_until(self, until: float | None) -> None:
        """Limit the wait for remote members to a time on the monotonic clock."""
        self.until = until
        for part in self.parts:
            for one in part.draws:
                if isinstance(one, EnsembleDrawn):
                    one.wait_until(until)


class Asking(EnsembleCore[DataT]):
    """The requests of an ensemble to remote members, and the waits for answers.

    Before a choice, the ensemble requests the data for it: sizes, and with ``unready="skip"`` also
    readiness. It then requests rows from the chosen members. It holds the lock for this, but does
    not wait. It waits for the answers later, without the lock, when it combines the batch. While
    the chosen members draw, it requests the readiness of the members that could have been chosen.
    """

    @property
    def _asks(self) -> bool:
        """Return whether there are remote members at any depth."""
        return any(
            isinstance(member, Member) or (isinstance(member, Asking) and member._asks)
            for member in self._members
        )

    if TYPE_CHECKING:

        def _next(self, *args: Any, **made: Any) -> Any: ...

    def _is_here(self, number: int) -> bool:
        return not isinstance(self._members[number], Member)

    def _far(self) -> list[tuple[int, Member]]:
        """Return the remote members that can be chosen, with their numbers."""
        p = self._sampler._p
        return [
            (number, member)
            for number, member in enumerate(self._members)
            if isinstance(member, Member) and (not isinstance(p, torch.Tensor) or p[number] > 0)
        ]

    def _in_turn(self, batch_size: int | None, timeout: float | None = None, **made: bool) -> Any:
        seconds = checked_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        with deferred:
            return self._next(batch_size, until=until, **made)

    def _known(
        self, size: int, until: float | None = None, *, everyone: bool = False
    ) -> KnownMember:
        """Request the data for a choice from all remote members at once, and wait.

        Args:
            everyone: send the requests in any case.
        """
        known, far = KnownMember(), self._far()
        if not far:
            return known
        sampler, rows = self._sampler, max(1, size // self._sampler.num_buffer_sampled)
        if everyone or sampler._p == SIZE or sampler.unready == "skip":
            for number, member in far:
                try:
                    known.ask(number, member, rows)
                except Exception as error:
                    raise naming_member(error, number) from error
            with allowed:
                known.wait(naming_member, until)
            if not everyone and sampler.unready == "raise":
                known.trust()
        for number, member in far:
            try:
                member.handle._be_fresh(rows)
            except Exception as error:
                raise naming_member(error, number) from error
        return known

    def _checks(self, choice: Choice) -> list[Any]:
        """Request the readiness of members that could have been chosen but were not."""
        checks: list[Any] = []
        if self._sampler.unready == "skip":
            return checks  # they were ready before the choice
        for number in sorted(choice.possible - set(choice.members)):
            member = self._members[number]
            if isinstance(member, Member):
                try:
                    asked = member.handle._ask_readiness(choice.rows)
                except Exception as error:
                    raise naming_member(error, number) from error
                checks.append((number, asked, choice.rows))
        return checks

    def _asked_of(
        self,
        number: int,
        choice: Choice,
        generator: torch.Generator | None,
    ) -> MemberDraw:
        """Request a remote member's parts of a batch."""
        member = self._members[number]
        try:
            times = choice.members.count(number)
            return MemberDraw(number, [member.asked(times, choice.rows, generator)])
        except Exception as error:
            raise naming_member(error, number) from error

    def _awaited(self, drawn: EnsembleDrawn) -> Iterator[tuple[int, list[DrawnRows]]]:
        """Wait for the rows of remote members; yield them by member."""
        number, until = -1, drawn.until
        try:
            for part in drawn.parts:
                number = part.member
                if isinstance(self._members[number], Member):
                    one: RemoteDraw = part.draws[0]
                    with allowed:
                        pieces = one.pieces(until)
                    yield number, pieces
            for number, asked, rows in drawn.checks:
                with allowed:
                    if not asked.result(left(until)).ready:
                        refuse(self._members[number], rows)
        except Exception as error:
            raise naming_member(error, number) from error


def refuse(member: Member, rows: int) -> None:
    """Raise the error of a member that is not ready."""
    RemoteDraw(member, [rows], 0).pieces(None)
    raise NotEnoughData(f"expected {rows} rows, but it is not ready to return them")


class Buffers:
    """The buffers of an ensemble as the members among which to choose.

    Args:
        known: the answers of remote members.
        trusting: treat remote members as ready if no readiness was requested. The request follows
            during the draws.
    """

    def __init__(
        self,
        members: Sequence[Any],
        generator: torch.Generator | None,
        known: KnownMember,
        *,
        trusting: bool = False,
    ) -> None:
        self.members, self.generator, self.known = members, generator, known
        self.trusting = trusting

    def size(self, member: int) -> int:
        """Return the number of rows of a member."""
        readiness = self.known.get(member)
        return rows_in(self.members[member].storage) if readiness is None else readiness.size

    def ready(self, member: int, rows: int) -> bool:
        """Return whether a member can return ``rows`` rows now."""
        buffer = self.members[member]
        if isinstance(buffer, Member):
            readiness = self.known.get(member)
            return self.trusting if readiness is None else readiness.ready
        if isinstance(buffer, EnsembleCore) or not buffer.sampler.consumes:
            return buffer.can_sample(rows)
        return len(buffer) >= rows  # fewer rows would not fill a part

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raise the error of a member that cannot return its rows."""
        buffer = self.members[member]
        try:
            batch = buffer._draw(rows, self.generator)
        except Exception as error:
            raise naming_member(error, member) from error
        buffer._give_back(batch.draw)  # the member is ready now, or only a draw can show that
        raise NotEnoughData(
            f"member {member}: expected {rows} rows, but it is not ready to return them"
        )
