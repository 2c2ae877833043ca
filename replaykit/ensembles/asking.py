"""Members elsewhere, asked beside those that are here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from replaykit.buffer.elsewhere import Piece
from replaykit.buffer.generic import DataT
from replaykit.buffer.random_states import random_state, set_random_state
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.drawn import EnsembleDrawn, Part
from replaykit.ensembles.elsewhere import Drawn, Known, Member, left
from replaykit.ensembles.pairs import naming_member
from replaykit.ensembles.sampler import Choice
from replaykit.ensembles.weights import SIZE
from replaykit.errors import NotEnoughData
from replaykit.interrupts import allowed, deferred
from replaykit.pace import checked_timeout

__all__ = ["Asking", "lost"]


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

    def _known(self, size: int, until: float | None = None, *, everyone: bool = False) -> Known:
        """Asks members elsewhere for what a choice depends on, all at a time, and waits.

        Args:
            everyone: ask them in any case.
        """
        known, far = Known(), self._far()
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
    ) -> Part:
        """Asks a member elsewhere for its parts of a batch, or for a draw that was kept."""
        member = self._members[number]
        try:
            if stored:
                stored[0].ask()
                return Part(number, [stored[0]])
            times = choice.members.count(number)
            return Part(number, [member.asked(times, choice.rows, generator)])
        except Exception as error:
            raise naming_member(error, number) from error

    def _awaited(self, drawn: EnsembleDrawn) -> Iterator[tuple[int, list[Piece]]]:
        """Waits for the rows of members elsewhere; yields them by member."""
        number, until = -1, drawn.until
        try:
            for part in drawn.parts:
                number = part.member
                if isinstance(self._members[number], Member):
                    one: Drawn = part.draws[0]
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
    Drawn(member, [rows], 0).pieces(None)
    raise NotEnoughData(f"expected {rows} rows, it was not ready to give them")


def lost(drawn: Any) -> bool:
    """Whether a member elsewhere, or one below a member, did not give its rows."""
    return isinstance(drawn, EnsembleDrawn) and (
        drawn.lost or any(lost(one) for part in drawn.parts for one in part.draws)
    )
