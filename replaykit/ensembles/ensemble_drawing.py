"""Batches of an ensemble: drawn by the members, put together here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from replaykit._compat import TensorDict
from replaykit.buffer.core import DataT
from replaykit.buffer.drawing import Lent, random_state, set_random_state, show
from replaykit.ensembles.batch_info import (
    IDS,
    INDEX,
    INNER,
    InfoSpec,
    Places,
    flat_rows,
    joined,
    length_of,
    merged,
    piece_of,
    put_back_marks,
    select,
    sliced,
    stacked,
)
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import Choice, filled, naming_member, requests
from replaykit.ensembles.remote_draws import Asking, Buffers, EnsembleDrawn, MemberDraw, lost
from replaykit.ensembles.remote_members import KnownMember, Member
from replaykit.interrupts import check, shielded
from replaykit.structure import contiguous
from replaykit.transfer import pin, to_device

__all__ = ["EnsembleDrawing"]


class EnsembleDrawing(Asking[DataT]):
    """``sample``, ``can_sample``, iteration, prefetch."""

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[DataT, TensorDict]: ...
    @overload
    def sample(
        self,
        batch_size: int | None,
        return_info: Literal[True],
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[DataT, TensorDict]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT | tuple[DataT, TensorDict]: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Draws a batch.

        Args:
            batch_size: number of rows of all parts together; None: that of the constructor.
            return_info: also return what is known of the draw.
            include_info: ``False`` leaves it out of the TensorDict; deprecated.
            timeout: seconds to wait for members elsewhere; None: as long as they live, those over
                shards their own ``timeout``. No others wait.

        Returns:
            For TensorDict content a TensorDict of batch size ``[K, B // K]`` for K parts, with
            ``("index", "index")``, int64 (``[K, B // K, ndim]`` where a member has lanes, -1 behind
            those of members with fewer), ``("index", "buffer_ids")``, the member of each row,
            ``index_generation``, and what samplers of members tell; see `ReplayBufferEnsemble`. For
            other content the data alone. It owns its memory. With ``return_info`` a pair of it and
            a TensorDict of what is known.

        Raises:
            RuntimeError: no batch size anywhere, or a transform that changed the number of rows.
            ValueError: a batch size that the number of parts does not divide; samples of members
                that differ in keys, shapes or dtypes: names them. The error of a member that cannot
                give its rows, with the number of the member. TimeoutError, ActorLost: a member
                elsewhere has not answered in time, or has ended.

        Where it raises, no row has left a pass, and the next batch is that which this would have
        been.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> one, other = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2))
            >>> _ = one.extend(TensorDict({"x": torch.arange(9)}, [9]))
            >>> _ = other.extend(TensorDict({"x": torch.arange(9) + 10}, [9]))
            >>> ensemble = ReplayBufferEnsemble(one, other, sample_from_all=True, batch_size=6)
            >>> batch = ensemble.sample()
            >>> batch.shape, batch["index", "buffer_ids"]
            (torch.Size([2, 3]), tensor([[0, 0, 0],
                    [1, 1, 1]]))
            >>> rows = batch["index", "index"] + 10 * batch["index", "buffer_ids"]
            >>> bool((batch["x"] == rows).all())
            True
        """
        found: Any = super().sample(batch_size, return_info, include_info, timeout=timeout)
        if not return_info:
            return found
        data, info = found
        told = TensorDict({}, info[INDEX].shape[:2])
        for key, value in info.items():
            told.set(key, value)
        return data, told

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now: every member that can be chosen is ready.

        Raises:
            RuntimeError: no batch size anywhere.
        """
        size = self._size_of(batch_size)
        known = self._known(size, everyone=True)
        with self._locked():
            if self._kept_of(size) is not None:
                return True
            return self._sampler.can_choose(size, Buffers(self._members, self._generator, known))

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Takes another source of randomness for members to be chosen by, and to draw from.

        Args:
            generator: None: members draw from their own, and are chosen by torch's global one.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"expected a torch.Generator, got {type(generator).__name__}")
        with self._locked():
            drawn: Any
            for drawn in self._take_prepared():
                self._return(drawn)
            self._generator = generator

    # -- drawing --------------------------------------------------------------------------------

    def _draw(self, size: int, lent: Lent | None = None, until: float | None = None) -> Any:
        known = self._known(size, until)
        with self._locked():
            return self._drawn_together(size, lent, known)

    def _drawn_together(self, size: int, lent: Lent | None, known: KnownMember) -> EnsembleDrawn:
        """Chooses members and has them draw; all of them or none. The lock is held."""
        sampler, generator = self._sampler, self._generator
        kept: EnsembleDrawn | None = None
        if lent is not None:
            generator = generator if lent.generator is None else lent.generator
            kept = lent.kept  # type: ignore[assignment]
        else:
            kept = self._kept_of(size)
            if kept is not None:
                self._pending.remove(kept)  # type: ignore[arg-type]
        noted = self._prefetcher is not None if lent is None else lent.noted
        before = random_state(generator)
        ended, was_out = sampler._ended, sampler.ran_out
        done: list[tuple[Any, Any]] = []
        try:
            if kept is None:
                members = Buffers(self._members, generator, known, trusting=True)
                choice = sampler.choose(size, members, generator)
                stored: dict[int, list[Any]] = {}
            else:
                choice = Choice(kept.members, kept.rows, frozenset())
                stored = {part.member: list(part.draws) for part in kept.parts}
            checks = self._checks(choice)
            # Who draws elsewhere does it while those here do.
            parts = [
                self._part(member, choice, generator, noted, stored.get(member, []), done)
                for member in sorted(set(choice.members), key=self._is_here)
            ]
            parts.sort(key=lambda part: part.member)
        except BaseException:
            for buffer, drawn in reversed(done):
                buffer._give_back(drawn)
            set_random_state(generator, before)
            if kept is not None and lent is None:
                self._pending.appendleft(kept)  # type: ignore[arg-type]
            raise
        if kept is None:
            over = {part.member for part in parts if any(draw.ran_out for draw in part.draws)}
            ran_out = sampler.note_ended(over, choice.possible)
        else:
            ran_out = kept.ran_out
            show(sampler, ran_out)
        return EnsembleDrawn(
            choice.members,
            choice.rows,
            size,
            parts,
            ran_out,
            lent=lent is not None,
            ended=ended,
            was_out=was_out,
            checks=checks,
            before=before,
            after=random_state(generator) if self._asks else None,
        )

    def _readable(self, draws: list[Any]) -> int:
        return len(draws)  # members say it of theirs when they read

    def _kept_of(self, size: int) -> EnsembleDrawn | None:
        """The next draw of that batch size that was made and not delivered. The lock is held."""
        for kept in self._pending:
            if kept.size == size:
                return kept  # type: ignore[return-value]
        return None

    def _part(
        self,
        member: int,
        choice: Choice,
        generator: torch.Generator | None,
        noted: bool,
        stored: list[Any],
        done: list[tuple[Any, Any]],
    ) -> MemberDraw:
        """Has a member draw for its parts of a batch. The lock is held.

        Args:
            stored: draws of it that were kept, to be read again.
            done: what has been drawn is noted there.
        """
        buffer, collate = self._members[member], self._collate_fns[member]
        plain = not isinstance(buffer, EnsembleCore)
        if isinstance(buffer, Member):
            return self._asked_of(member, choice, generator, stored)

        def draw(rows: int) -> tuple[Any, int, bool]:
            kept = stored.pop(0) if stored else None
            lent = Lent(generator, collate, noted, kept)
            drawn = buffer._draw(rows if kept is None else kept.size, lent)
            if kept is None:
                done.append((buffer, drawn))
            return drawn, len(drawn.anchors) if plain else drawn.size, drawn.ran_out

        times = choice.members.count(member)
        sampler = buffer.sampler if plain else None
        asked = [choice.rows] * times
        if sampler is not None:
            asked = requests(sampler, buffer._sample_unit, times, choice.rows)
        try:
            return MemberDraw(
                member, [one for rows in asked for one in filled(rows, draw, sampler)]
            )
        except Exception as error:
            raise naming_member(error, member) from error

    def _draws_at_once(self) -> bool:
        return False  # members have locks of their own, which others may hold

    def _free_lock(self) -> Any:
        return None

    def _draw_ahead(self, entry: Any) -> Any:
        known = self._known(self._size_of(None))
        with self._locked():
            prefetcher, sampler = self._prefetcher, self._sampler
            if prefetcher is None or not prefetcher.wanted(entry):
                return None
            entry.written = self._written()
            delivered = sampler.ran_out
            try:
                entry.drawn = drawn = self._drawn_together(self._size_of(None), None, known)
                drawn.late = _is_ordered(self)
            finally:
                show(sampler, delivered)
            return entry.drawn

    def _written(self) -> int:
        return sum(member._written() for member in self._members)

    def _give_back(self, drawn: Any, *, settled: bool = True) -> None:
        with self._locked(settled=settled):
            if drawn.lent:
                # Whose batch it was takes care of the generator.
                for part in reversed(drawn.parts):
                    for one in reversed(part.draws):
                        self._members[part.member]._give_back(one)
                self._sampler._ended = drawn.ended
            elif lost(drawn):
                self._drop(drawn)
            else:
                self._pending.extend([drawn.kept(), *self._take_prepared()])
            show(self._sampler, drawn.was_out)

    def _return(self, drawn: EnsembleDrawn) -> None:
        """Gives draws of members that will not be delivered back to them. The lock is held."""
        for part in reversed(drawn.parts):
            buffer = self._members[part.member]
            for one in reversed(part.draws):
                if isinstance(buffer, Member):
                    continue
                if isinstance(buffer, EnsembleDrawing):
                    with buffer._locked():
                        buffer._return(one)
                else:
                    with buffer._locked() as storage:
                        buffer._sampler.put_back([one.anchors], storage)

    # -- putting together -----------------------------------------------------------------------

    def _next(
        self,
        batch_size: int | None,
        *,
        merge: bool = True,
        needed: bool = True,
        until: float | None = None,
    ) -> tuple[Any, Any, dict[Any, Any]]:
        size = self._size_of(batch_size)
        queue = self._queue() if size == self._batch_size else None
        made = None
        if queue is None:
            drawn = self._draw(size, until=until)
        else:
            drawn, made = queue.next()
        try:
            drawn.wait_until(until)
            data, info = self._finish(drawn) if made is None else made
            if merge:
                data = merged(data, info, needed)
            check()  # the last moment at which the batch can still be the next one
        except BaseException as error:
            with shielded:
                self._give_back(drawn, settled=isinstance(error, Exception))
            raise
        if queue is not None:
            with self._locked(settled=False):
                show(self._sampler, drawn.ran_out)
        return drawn, data, info

    def _finish(self, drawn: Any) -> tuple[Any, dict[Any, Any]]:
        """Has members make their samples, puts them together, transforms and pins; no lock."""
        pieces: list[tuple[int, Any]] = []
        infos: list[dict[Any, Any]] = []
        found = {
            part.member: [self._finished(part.member, one) for one in part.draws]
            for part in drawn.parts
            if not isinstance(self._members[part.member], Member)
        }
        for member, come in self._awaited(drawn):
            found[member] = [self._as_rows(member, *piece) for piece in come]
        layout, width = InfoSpec.of(self._members), 0
        for part in drawn.parts:
            made, parts = found[part.member], drawn.members.count(part.member)
            count = sum(len(info[INDEX]) for _, info in made)
            rows = count // parts
            width = width or rows
            if rows != width or count % parts:
                raise ValueError(
                    f"expected {width} rows a part as of member {drawn.parts[0].member}, got "
                    f"{rows} of member {part.member}: give members sample units of one length"
                )
            pieces += [(part.member, data) for data, _ in made]
            infos += [layout.fill(info, rows) for _, info in made]
        places = Places(drawn.members, width)
        data = self._together(pieces, places)
        if len(self._chain):
            data = self._chain.forward(data)
        info = joined(infos, places, self._device)
        if self._contiguous:
            data = contiguous(data)
        if self._pin_memory and torch.cuda.is_available():
            data, info = pin((data, info))
        return data, info

    def _finished(self, member: int, drawn: Any) -> tuple[Any, dict[Any, Any]]:
        """A member's sample with its rows along dimension 0, and what is known of them."""
        buffer = self._members[member]
        if not isinstance(buffer, EnsembleCore):
            return self._as_rows(member, *piece_of(buffer, drawn))
        data, info = buffer._finish(drawn)
        rows = info[INDEX].shape[:2].numel()
        if length_of(data) != rows:
            data = flat_rows(data)
        info = {key: value.flatten(0, 1) for key, value in info.items()}
        inner = info.pop(INNER, None)
        ids = info.pop(IDS)[:, None]
        info[INNER] = ids if inner is None else torch.cat([ids, inner], 1)
        return self._filling(member, data, info)

    def _as_rows(self, member: int, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """What a buffer has drawn, in the words of the ensemble."""
        info = {INDEX: info["index"], **{key: info[key] for key in info if key != "index"}}
        return self._filling(member, put_back_marks(data, info), info)

    def _filling(self, member: int, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """The same with what is wanted of it, where it is wanted."""
        rows, made = len(info[INDEX]), length_of(data)
        if made != rows:
            raise RuntimeError(
                f"member {member}: its transforms or collate_fn made {made} of {rows} rows, so "
                "that they do not fill their part of the batch"
            )
        if self._keys is not None:
            data = select(data, self._keys, member)
        if self._device is not None:
            data = to_device(data, self._device)
        return data, info

    def _together(self, pieces: Sequence[tuple[int, Any]], places: Places) -> Any:
        collate: Callable[[list[Any]], Any] | None = self._collate_fn
        if collate is None:
            return stacked(pieces, places)
        return collate(sliced(pieces, places))


def _is_ordered(buffer: Any) -> bool:
    """Whether a transform of a buffer, or of a member, takes batches in the order of delivery."""
    return buffer._chain.ordered or any(map(_is_ordered, getattr(buffer, "_members", ())))
