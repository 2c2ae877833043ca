"""Request draws from remote members, and hold the draw of an ensemble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from replaykit.buffer.buffer_dataset import DrawnRows, RemoteRequest
from replaykit.buffer.core import DataT
from replaykit.buffer.drawing import Lent, random_state, set_random_state
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import SIZE, Choice, naming_member
from replaykit.ensembles.ensemble_storage import rows_in
from replaykit.ensembles.remote_members import KnownMember, Member, RemoteDraw, left
from replaykit.errors import NotEnoughData
from replaykit.interrupts import allowed, deferred
from replaykit.pace import checked_timeout

__all__ = ["Asking", "Buffers", "EnsembleDrawn", "MemberDraw", "lost"]


@dataclass(slots=True)
class MemberDraw:
    """What one member has drawn for a batch."""

    member: int
    draws: list[Any]


@dataclass(slots=True, eq=False)
class EnsembleDrawn:
    """A draw of an ensemble: the members of its parts, and what each of them drew.

    ``rows``: that a member is asked for, a part. ``size``: the batch size asked for. ``lent``: it
    is part of the batch of an ensemble above. ``ended``: who had ended a pass before it. ``late``:
    the batch is made when it is delivered. ``checks``: members elsewhere that could have been
    chosen, whether they are ready, and for how many rows. ``before``, ``after``: of the generator.
    ``lost``: a member elsewhere did not give its rows. ``until``: how long these are waited for.
    """

    members: list[int]
    rows: int
    size: int
    parts: list[MemberDraw]
    ran_out: bool = False
    lent: bool = False
    ended: frozenset[int] = frozenset()
    was_out: bool = False
    random: Any = field(default=None)
    late: bool = False
    checks: list[tuple[int, RemoteRequest, int]] = field(default_factory=list)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    lost: bool = False
    until: float | None = None

    def kept(self) -> EnsembleDrawn:
        """The draw alone, to be delivered later."""
        parts = [
            MemberDraw(part.member, [draw.kept() for draw in part.draws]) for part in self.parts
        ]
        return EnsembleDrawn(self.members, self.rows, self.size, parts, self.ran_out)

    def wait_until(self, until: float | None) -> None:
        """Has it wait for members elsewhere until an instant of the monotonic clock."""
        self.until = until
        for part in self.parts:
            for one in part.draws:
                if isinstance(one, EnsembleDrawn):
                    one.wait_until(until)


class Asking(EnsembleCore[DataT]):
    """What an ensemble asks of members elsewhere, and when it waits for them.

    Who is chosen is asked for rows while the lock is held, which does not wait; the answers are
    waited for when the batch is put together, without it. What the choice itself depends on (sizes,
    and with ``unready="skip"`` who is ready) is asked before. The others that could have been
    chosen are asked whether they are ready beside the draws.
    """

    @property
    def _asks(self) -> bool:
        """Whether there are members elsewhere, here or below."""
        return any(
            isinstance(member, Member) or (isinstance(member, Asking) and member._asks)
            for member in self._members
        )

    if TYPE_CHECKING:

        def _next(self, *args: Any, **made: Any) -> Any: ...

        def _return(self, drawn: EnsembleDrawn) -> None: ...

    def _is_here(self, number: int) -> bool:
        return not isinstance(self._members[number], Member)

    def _far(self) -> list[tuple[int, Member]]:
        """Members elsewhere that can be chosen, by their numbers."""
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
        """Asks members elsewhere for what a choice depends on, all at a time, and waits.

        Args:
            everyone: ask them in any case.
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
        """Asks those that could have been chosen, and were not, whether they are ready."""
        checks: list[Any] = []
        if self._sampler.unready == "skip":
            return checks  # that is why they could
        for number in sorted(choice.possible - set(choice.members)):
            member = self._members[number]
            if isinstance(member, Member):
                try:
                    asked = member.handle._ask_standing(choice.rows)
                except Exception as error:
                    raise naming_member(error, number) from error
                checks.append((number, asked, choice.rows))
        return checks

    def _asked_of(
        self,
        number: int,
        choice: Choice,
        generator: torch.Generator | None,
        stored: list[Any],
    ) -> MemberDraw:
        """Asks a member elsewhere for its parts of a batch, or for a draw that was kept."""
        member = self._members[number]
        try:
            if stored:
                stored[0].ask()
                return MemberDraw(number, [stored[0]])
            times = choice.members.count(number)
            return MemberDraw(number, [member.asked(times, choice.rows, generator)])
        except Exception as error:
            raise naming_member(error, number) from error

    def _awaited(self, drawn: EnsembleDrawn) -> Iterator[tuple[int, list[DrawnRows]]]:
        """Waits for the rows of members elsewhere; yields them by member."""
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
            drawn.lost = True
            raise naming_member(error, number) from error

    def _drop(self, drawn: EnsembleDrawn) -> None:
        """Gives up a draw of which a member elsewhere did not give its part, and those after it.

        The others have their rows again, and the generator is as before, unless somebody else has
        used it since. The lock is held.
        """
        later: list[Any] = self._take_prepared()
        for other in (*reversed(later), drawn):
            self._return(other)
        self._sampler._ended = drawn.ended
        if drawn.after is not None and torch.equal(random_state(self._generator), drawn.after):
            set_random_state(self._generator, drawn.before)


def refuse(member: Member, rows: int) -> None:
    """Raises the error of a member that is not ready."""
    RemoteDraw(member, [rows], 0).pieces(None)
    raise NotEnoughData(f"expected {rows} rows, it was not ready to give them")


def lost(drawn: Any) -> bool:
    """Whether a member elsewhere, or one below a member, did not give its rows."""
    return isinstance(drawn, EnsembleDrawn) and (
        drawn.lost or any(lost(one) for part in drawn.parts for one in part.draws)
    )


class Buffers:
    """The buffers of an ensemble as members of a choice.

    Args:
        known: what members elsewhere have said of themselves.
        trusting: those that were not asked count as ready: they are asked beside the draws.
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
        """Rows that a member holds."""
        standing = self.known.get(member)
        return rows_in(self.members[member].storage) if standing is None else standing.size

    def ready(self, member: int, rows: int) -> bool:
        """Whether a member can give that many rows now."""
        buffer = self.members[member]
        if isinstance(buffer, Member):
            standing = self.known.get(member)
            return self.trusting if standing is None else standing.ready
        if isinstance(buffer, EnsembleCore) or not buffer.sampler.consumes:
            return buffer.can_sample(rows)
        return len(buffer) >= rows  # what it gives less of fills no part

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raises the error of a member that cannot."""
        buffer = self.members[member]
        try:
            drawn = buffer._draw(rows, Lent(self.generator))
        except Exception as error:
            raise naming_member(error, member) from error
        buffer._give_back(drawn)  # it has become ready, or cannot tell before
        raise NotEnoughData(f"member {member}: expected {rows} rows, it was not ready to give them")
