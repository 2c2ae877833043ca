"""Draw batches with the members of an ensemble, and combine their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from replaykit._compat import TensorDict
from replaykit.buffer.components import DataT
from replaykit.buffer.deliver import next_ahead
from replaykit.buffer.draw import (
    draw_queue,
    queue_of,
    random_state,
    rewind,
    set_random_state,
    show,
    size_of,
    withdraw,
)
from replaykit.buffer.prefetch import AheadBatch
from replaykit.ensembles.batch_info import (
    IDS,
    INDEX,
    INNER,
    BatchParts,
    InfoSpec,
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
from replaykit.ensembles.remote_draws import Asking, Buffers, EnsembleDrawn, MemberDraw
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
        """Draw a batch.

        Args:
            batch_size: number of rows of all parts together; None for the constructor's
                ``batch_size``.
            return_info: also return the info of the draw.
            include_info: if False, the TensorDict does not contain the info. Deprecated.
            timeout: seconds to wait for remote members. With None the call waits until they answer
                or end, or up to the ``timeout`` of a sharded buffer. Local members need no wait.

        Returns:
            For TensorDict rows, a TensorDict of batch size ``[K, B // K]`` for K parts. Its
            ``("index", "index")`` is int64. If a member has lanes, its shape is ``[K, B // K,
            ndim]``, padded with -1 for members with fewer dimensions. ``("index", "buffer_ids")``
            is the member of each row. The batch also has ``index_generation`` and the info of the
            members' samplers; see `ReplayBufferEnsemble`. For other rows, the data alone. The batch
            owns its memory. With ``return_info``, the result is a pair of the batch and a
            TensorDict of the info.

        Raises:
            RuntimeError: no batch size is given, or a transform changed the number of rows.
            ValueError: the number of parts does not divide the batch size, or samples of members
                differ in keys, shapes or dtypes. The error names the difference.
            TimeoutError, ActorLost: a remote member has not answered in time, or has ended.
            The error of a member that cannot return its rows, with the number of the member.

        If the call raises, all draws are rolled back. No row has left a pass, and the next call
        returns the batch that this call would have returned.

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
        collated = TensorDict({}, info[INDEX].shape[:2])
        for key, value in info.items():
            collated.set(key, value)
        return data, collated

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether ``sample`` would succeed now.

        It would succeed if every member that can be chosen is ready.

        Raises:
            RuntimeError: no batch size is given.
        """
        size = size_of(self, batch_size)
        known = self._known(size, everyone=True)
        with self._locked():
            return self._sampler.can_choose(size, Buffers(self._members, self._generator, known))

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Replace the generator that chooses members and draws their rows.

        Args:
            generator: the new generator. With None, torch's global generator chooses members, and
                each member draws with its own generator.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"expected a torch.Generator, got {type(generator).__name__}")
        with self._locked():
            rewind(self)
            self._generator = generator

    # -- drawing --------------------------------------------------------------------------------

    def _draw(  # type: ignore[override]
        self,
        size: int,
        generator: torch.Generator | None,
        collate: Any = None,
        *,
        numbered: bool = False,
    ) -> EnsembleDrawn:
        return self._drawn_together(size, self._known(size), generator)

    def _drawn_together(
        self, size: int, known: KnownMember, given: torch.Generator | None = None
    ) -> EnsembleDrawn:
        """Choose members; all of them draw, or none.

        Args:
            given: the generator of an outer ensemble, which resets it; None for the own generator.
        """
        with self._locked():
            return self._drawn_locked(size, known, given)

    def _drawn_locked(
        self, size: int, known: KnownMember, given: torch.Generator | None
    ) -> EnsembleDrawn:
        """Draw as ``_drawn_together`` does. The caller holds the lock."""
        sampler, generator = self._sampler, self._generator if given is None else given
        before = random_state(generator)
        ended, was_out = sampler._ended, sampler.ran_out
        done: list[tuple[Any, Any]] = []
        try:
            members = Buffers(self._members, generator, known, trusting=True)
            choice = sampler.choose(size, members, generator)
            checks = self._checks(choice)
            # Remote members come first, so that they draw at the same time as local members.
            parts = [
                self._part(member, choice, generator, done)
                for member in sorted(set(choice.members), key=self._is_here)
            ]
            parts.sort(key=lambda part: part.member)
        except BaseException:
            for buffer, batch in reversed(done):
                buffer._give_back(batch.draw)
            set_random_state(generator, before)
            raise
        over = {part.member for part in parts if any(one.draw.ran_out for one in part.draws)}
        self._draws_made += 1
        return EnsembleDrawn(
            choice.members,
            choice.rows,
            size,
            parts,
            sampler.mark_ended(over, choice.possible),
            ended=ended,
            was_out=was_out,
            checks=checks,
            before=before if given is None else None,
            after=random_state(generator) if given is None else None,
            number=self._draws_made,
        )

    def _part(
        self,
        member: int,
        choice: Choice,
        generator: torch.Generator | None,
        done: list[tuple[Any, Any]],
    ) -> MemberDraw:
        """Draw a member's parts of a batch. The caller holds the lock.

        Args:
            done: list to which new draws are appended.
        """
        buffer, collate = self._members[member], self._collate_fns[member]
        plain = not isinstance(buffer, EnsembleCore)
        if isinstance(buffer, Member):
            return self._asked_of(member, choice, generator)

        def draw(rows: int) -> tuple[Any, int, bool]:
            batch = buffer._draw(rows, generator, collate)
            done.append((buffer, batch))
            draw = batch.draw
            return batch, len(draw.anchors) if plain else draw.size, draw.ran_out

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

    def _before_draws(self) -> KnownMember:
        return self._known(size_of(self, None))

    def _draw_ahead(self, storage: Any, before: Any) -> AheadBatch:
        written = self._written()
        try:
            drawn = self._drawn_locked(size_of(self, None), before, None)
        except Exception as error:
            return AheadBatch(None, written, error=error)
        return AheadBatch(drawn, batch=drawn, late=_is_ordered(self))

    def _written(self) -> int:
        return sum(member._written() for member in self._members)

    def _give_back(self, drawn: EnsembleDrawn) -> None:  # type: ignore[override]
        """Undo a draw whose batch failed, and all later draws that were not delivered."""
        with self._locked(settled=False):
            draws: list[Any] = [drawn, *withdraw(self)]
            draws.sort(key=lambda one: one.number)
            self._undo(draws, self._storage)
            show(self._sampler, drawn.was_out)

    def _undo(self, draws: list[Any], storage: Any) -> None:
        """Undo draws of all members, and the choices of members. The caller holds the lock.

        The generator is reset, unless other code has used it since.
        """
        shown = self._sampler.ran_out
        for drawn in reversed(draws):
            for part in reversed(drawn.parts):
                for one in reversed(part.draws):
                    self._members[part.member]._give_back(one.draw)
            self._sampler._ended = drawn.ended
            if drawn.after is not None and torch.equal(random_state(self._generator), drawn.after):
                set_random_state(self._generator, drawn.before)
        show(self._sampler, shown)

    # -- putting together -----------------------------------------------------------------------

    def _next(
        self,
        batch_size: int | None,
        *,
        merge: bool = True,
        needed: bool = True,
        until: float | None = None,
    ) -> tuple[Any, Any, dict[Any, Any]]:
        size = size_of(self, batch_size)
        queue = queue_of(self) if size == self._batch_size else None
        if queue is None:
            drawn, made = self._drawn_together(size, self._known(size, until)), None
        else:
            batch = next_ahead(self, queue)
            drawn, made = batch.draw, batch.made
        try:
            drawn.wait_until(until)
            data, info = self._finish(drawn) if made is None else made
            if merge:
                data = merged(data, info, needed)
            if queue is not None and drawn.ran_out and not self._closed:
                draw_queue(self, queue, take=False)  # the next pass
            check()  # the last moment at which the batch can still be the next one
        except BaseException:
            with shielded:
                self._give_back(drawn)
            raise
        return drawn, data, info

    def _finish(self, drawn: Any) -> tuple[Any, dict[Any, Any]]:
        """Combine the samples of members, transform and pin them, without a lock."""
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
        places = BatchParts(drawn.members, width)
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
        """Return a member's sample with its rows along dimension 0, and its info."""
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
        """Return rows and info of a buffer, under the keys of the ensemble."""
        info = {INDEX: info["index"], **{key: info[key] for key in info if key != "index"}}
        return self._filling(member, put_back_marks(data, info), info)

    def _filling(self, member: int, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Return rows with the requested keys and device, and their info.

        Raises:
            RuntimeError: the number of rows has changed.
        """
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

    def _together(self, pieces: Sequence[tuple[int, Any]], places: BatchParts) -> Any:
        collate: Callable[[list[Any]], Any] | None = self._collate_fn
        if collate is None:
            return stacked(pieces, places)
        return collate(sliced(pieces, places))


def _is_ordered(buffer: Any) -> bool:
    """Return whether a transform of a buffer or member needs the order of delivery."""
    return buffer._chain.ordered or any(map(_is_ordered, getattr(buffer, "_members", ())))
