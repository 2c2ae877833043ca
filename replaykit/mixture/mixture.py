"""Draw from several sources as one: choose members, join their rows, prefetch, roll back."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch

from replaykit._compat import is_tensordict
from replaykit.buffer.components import as_chain
from replaykit.buffer.draw import random_state, set_random_state, size_or_default
from replaykit.buffer.prefetch import AheadBatch, Prefetcher
from replaykit.buffer.source import (
    BufferSource,
    Done,
    DrawnRows,
    HandleSource,
    MemberFacts,
    Readiness,
    RemoteRequest,
    Source,
    SourceDraw,
    seconds_left,
)
from replaykit.errors import NotEnoughData
from replaykit.interrupts import Lock, ProcessLock, allowed, check, deferred, shielded
from replaykit.mixture import joining
from replaykit.mixture.choosing import (
    Candidates,
    Choice,
    SamplerEnsemble,
    member_named,
    naming_member,
)
from replaykit.mixture.joining import IDS, INDEX
from replaykit.pace import checked_timeout
from replaykit.structure import contiguous
from replaykit.transfer import pin, to_device
from replaykit.transforms import Compose


def gathered(
    requests: Mapping[Any, Callable[[], RemoteRequest]], until: float | None = None
) -> dict[Any, Any]:
    """Send all requests, wait for all answers, then raise the first error.

    Args:
        requests: functions that send a request, by the number or name of the member.
        until: the time on the monotonic clock at which the wait ends.
    """
    sent: dict[Any, RemoteRequest] = {}
    answers: dict[Any, Any] = {}
    failed: list[tuple[Any, Exception]] = []
    for member, send in requests.items():
        try:
            sent[member] = send()
        except Exception as error:
            failed.append((member, error))
    for member, request in sent.items():
        try:
            with allowed:
                answers[member] = request.result(seconds_left(until))
        except Exception as error:
            failed.append((member, error))
    if failed:
        member, first = failed[0]
        raise naming_member(first, member) from first
    return answers


@dataclass(slots=True, eq=False)
class MixtureDraw:
    """A draw of a mixture: the members of its parts, their draws, and how to undo it.

    Attributes:
        members: the member of each part.
        parts: the draw of each of these members.
        ran_out: whether the draw ended the pass of the mixture.
        ended: the members that had ended a pass before the draw.
        was_out: the sampler's ``ran_out`` before the draw.
        step: the number of the batch, from which a function computes weights.
        checks: for remote members that could have been chosen, the readiness requests and their
            number of rows.
        before, after: states of the mixture's own generator; None if it was not used.
        number: the number of the draw among those of the mixture.
    """

    members: list[int]
    parts: dict[int, SourceDraw]
    ran_out: bool
    ended: frozenset[int]
    was_out: bool
    step: int
    checks: list[tuple[int, RemoteRequest, int]]
    before: torch.Tensor | None
    after: torch.Tensor | None
    number: int


class _Parts:
    """The draws of a mixture that is a source of another one."""

    def __init__(self, mixture: Mixture, draws: list[MixtureDraw]) -> None:
        self._mixture, self.draws = mixture, draws

    @property
    def ran_out(self) -> bool:
        return any(draw.ran_out for draw in self.draws)

    def pieces(self, until: float | None) -> list[DrawnRows]:
        return [self._mixture.piece(draw, until) for draw in self.draws]

    def undo(self) -> None:
        for draw in reversed(self.draws):
            self._mixture.give_back(draw)


@dataclass(eq=False)
class Mixture:
    """Several sources that are drawn from as one. A mixture is a source itself.

    The lock guards the choice of members, the generator and the queue of prefetched batches. The
    lock of each member guards that member. A thread takes the lock of a mixture before those of its
    members. It holds several members' locks only to save or load, and takes them in a fixed order.

    Before a choice, the mixture requests the data for it from remote members: sizes, and with
    ``unready="skip"`` also readiness. It then requests rows from the chosen members, and lets local
    members draw. It holds the lock for this, but does not wait. It waits for the answers later,
    without the lock, when it joins the rows. While the chosen members draw, it requests the
    readiness of the members that could have been chosen.

    Attributes:
        make_chain: a function that makes the transforms at the first use; None after that.
        depth: number of batches that are prefetched.
    """

    sources: list[Source]
    sampler: SamplerEnsemble
    make_chain: Callable[[], Any] | None
    batch_size: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    keys: list[Any] | None = None
    device: torch.device | None = None
    generator: torch.Generator | None = None
    priority_key: Any = None
    pin_memory: bool = False
    contiguous: bool = False
    depth: int = 0
    closed: bool = False
    _chain: Compose | None = None
    _prefetcher: Prefetcher | None = field(default=None, init=False)
    _draws_made: int = field(default=0, init=False)

    remote = False

    def __post_init__(self) -> None:
        self.sampler.follow(self.sources)
        if self.depth and not self.closed:
            self._prefetcher = Prefetcher(self.depth, cast(Any, self))

    lock = ProcessLock(lambda mixture: Lock())
    """The re-entrant lock of the mixture."""

    @property
    def initialized(self) -> bool:
        """True if the transforms exist."""
        return self._chain is not None

    @property
    def chain(self) -> Compose:
        """The transforms of batches."""
        if self._chain is None:
            with self.lock:
                if self._chain is None:
                    assert self.make_chain is not None
                    self.chain = as_chain(self.make_chain())
                    self.make_chain = None
        assert self._chain is not None
        return self._chain

    @chain.setter
    def chain(self, chain: Compose) -> None:
        if chain.spans_rows:
            raise ValueError(
                "expected transforms of batches, got one that reads the rows around those of a "
                "batch, holds rows back or follows writes; give it to the members"
            )
        self._chain = chain

    def walk(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the mixture and all sources in it, with their names in a checkpoint.

        The names of mixtures are prefixes for the names of their members.
        """
        yield path, self
        for number, source in enumerate(self.sources):
            name = f"{path}members/{number}"
            if isinstance(source, Mixture):
                yield from source.walk(f"{name}/")
            else:
                yield name, source

    # -- as a source --------------------------------------------------------------------------

    @property
    def facts(self) -> MemberFacts:
        """The common properties of the sources' samples."""
        return joining.joint([source.facts for source in self.sources], ordered=self.chain.ordered)

    @property
    def size(self) -> int:
        """Number of stored rows."""
        return sum(source.size for source in self.sources)

    def ready(self, rows: int) -> bool:
        """Return whether a draw of ``rows`` rows would succeed now."""
        answers = self.asked(rows, everyone=True)
        with self.lock:
            return self.sampler.can_choose(rows, Candidates(self.sources, self.generator, answers))

    def ask(self, rows: int) -> RemoteRequest:
        """Return the `Readiness` of the mixture."""
        return Done(Readiness(self.size, self.ready(rows)))

    def refresh(self, rows: int) -> None:
        """Do nothing, because each draw updates remote members."""

    def draw(self, parts: int, rows: int, generator: torch.Generator | None) -> _Parts:
        """Draw parts of a batch of another mixture, or change nothing."""
        made = _Parts(self, [])
        try:
            for _ in range(parts):
                made.draws.append(self.drawn(rows, self.asked(rows), generator))
        except BaseException:
            made.undo()
            raise
        return made

    def refuse(self, rows: int, generator: torch.Generator | None) -> NoReturn:
        """Raise the error of a member that cannot return its rows."""
        source, answers = generator or self.generator, self.asked(rows, everyone=True)
        before = random_state(source)
        try:  # a draw does not wait for the answers of remote members, so it would not raise theirs
            self.sampler.choose(rows, Candidates(self.sources, source, answers), source)
        finally:
            set_random_state(source, before)
        self.draw(1, rows, generator).undo()
        raise NotEnoughData(f"expected {rows} rows, but it is not ready to return them")

    def piece(self, draw: MixtureDraw, until: float | None) -> DrawnRows:
        """Return the rows of a draw along dimension 0. Their index does not name the members."""
        data, info = self.read(draw, until)
        parts = info[INDEX].shape[:2]
        rows = parts.numel()
        if is_tensordict(data):
            stacked = data.batch_size[:2] == parts
        else:
            stacked = self.collate_fn is None and not len(self.chain)
        if stacked or joining.length_of(data) != rows:
            data = joining.flat_rows(data)
        info = {key: value.flatten(0, 1) for key, value in info.items() if key != IDS}
        return DrawnRows(data, {"index": info.pop(INDEX), **info})

    def apart(self) -> Mixture:
        """Return a copy for a loader. Its draws do not change this mixture."""
        _ = self.chain
        sources, sampler = [source.apart() for source in self.sources], self.sampler.alone()
        own: dict[str, Any] = {"generator": None, "pin_memory": False, "depth": 0, "closed": False}
        return replace(self, sources=sources, sampler=sampler, **own)

    # -- drawing ------------------------------------------------------------------------------

    def size_of(self, batch_size: int | None) -> int:
        """Return the number of rows of a batch.

        Raises:
            RuntimeError: no batch size is given, or the mixture was shut down.
            ValueError: the batch size is not an int of at least 1.
        """
        if self.closed:
            raise RuntimeError("this buffer was shut down")
        return size_or_default(batch_size, lambda: self.batch_size)

    def asked(
        self, size: int, until: float | None = None, *, everyone: bool = False
    ) -> dict[int, Readiness]:
        """Request the data for a choice from all remote members at once, and wait.

        Args:
            everyone: send the requests in any case.
        """
        p, sampler = self.sampler.weights.p, self.sampler
        far = {
            number: source
            for number, source in enumerate(self.sources)
            if source.remote and (not isinstance(p, torch.Tensor) or p[number] > 0)
        }
        rows = max(1, size // sampler.num_buffer_sampled) if far else 0
        answers: dict[int, Readiness] = {}
        if far and (everyone or sampler.weights.needs_sizes or sampler.unready == "skip"):
            answers = gathered(
                {n: functools.partial(source.ask, rows) for n, source in far.items()}, until
            )
            if not everyone and sampler.unready == "raise":
                # The draw of a member that is not ready raises.
                answers = {n: answer._replace(ready=True) for n, answer in answers.items()}
        for number, source in far.items():
            with member_named(number):
                source.refresh(rows)
        return answers

    def drawn(
        self,
        size: int,
        answers: Mapping[int, Readiness],
        given: torch.Generator | None = None,
    ) -> MixtureDraw:
        """Choose members; all of them draw, or none.

        Args:
            answers: the result of ``asked``.
            given: the generator of an outer mixture or of a loader, which resets it; None for the
                own generator.
        """
        with self.lock:
            sampler, generator = self.sampler, self.generator if given is None else given
            before = random_state(generator)
            ended, was_out = sampler._ended, sampler.ran_out
            parts: dict[int, SourceDraw] = {}
            try:
                candidates = Candidates(self.sources, generator, answers)
                choice = sampler.choose(size, candidates, generator)
                checks = self._checks(choice)
                # Remote members come first, so that they draw at the same time as local members.
                for number in sorted(set(choice.members), key=self._is_local):
                    with member_named(number):
                        times, source = choice.members.count(number), self.sources[number]
                        parts[number] = source.draw(times, choice.rows, generator)
            except BaseException:
                for part in reversed(parts.values()):
                    part.undo()
                set_random_state(generator, before)
                raise
            step = sampler.weights.step
            sampler.weights.step += sampler.weights.stride
            over = {number for number, part in parts.items() if part.ran_out}
            self._draws_made += 1
            return MixtureDraw(
                choice.members,
                dict(sorted(parts.items())),
                sampler.mark_ended(over, choice.possible),
                ended,
                was_out,
                step,
                checks,
                before if given is None else None,
                random_state(generator) if given is None else None,
                self._draws_made,
            )

    def _is_local(self, number: int) -> bool:
        return not self.sources[number].remote

    def _checks(self, choice: Choice) -> list[tuple[int, RemoteRequest, int]]:
        """Request the readiness of members that could have been chosen but were not."""
        checks: list[tuple[int, RemoteRequest, int]] = []
        if self.sampler.unready == "skip":
            return checks  # they were ready before the choice
        for number in sorted(choice.possible - set(choice.members)):
            if self.sources[number].remote:
                with member_named(number):
                    request = self.sources[number].ask(choice.rows)
                checks.append((number, request, choice.rows))
        return checks

    def read(self, draw: MixtureDraw, until: float | None = None) -> tuple[Any, dict[Any, Any]]:
        """Join the rows of members, transform and pin them, without a lock.

        Args:
            until: the time on the monotonic clock at which the wait for remote members ends.
        """
        made: dict[int, list[tuple[Any, dict[Any, Any]]]] = {}
        for number in sorted(draw.parts, key=self._is_local, reverse=True):
            pieces = self._pieces(number, draw.parts[number], until)
            made[number] = [self._filling(number, piece) for piece in pieces]
        for number, request, rows in draw.checks:
            with member_named(number), allowed:
                if not request.result(seconds_left(until)).ready:
                    self.sources[number].refuse(rows, None)
        facts, width = self.facts, 0
        samples: list[tuple[int, Any]] = []
        infos: list[dict[Any, Any]] = []
        for number in draw.parts:
            rows, rest = divmod(
                sum(len(info[INDEX]) for _, info in made[number]), draw.members.count(number)
            )
            width = width or rows
            if rows != width or rest:
                raise ValueError(
                    f"expected {width} rows a part as of member {min(draw.parts)}, got {rows} of "
                    f"member {number}: give members sample units of one length"
                )
            samples += [(number, data) for data, _ in made[number]]
            infos += [joining.with_defaults(*one, rows, facts) for one in made[number]]
        places = joining.BatchParts(draw.members, width)
        if self.collate_fn is None:
            data = joining.stacked(samples, places)
        else:
            data = self.collate_fn(joining.sliced(samples, places))
        if len(self.chain):
            data = self.chain.forward(data)
        info = joining.joined(infos, places, self.device)
        if self.contiguous:
            data = contiguous(data)
        if self.pin_memory and torch.cuda.is_available():
            data, info = pin((data, info))
        return data, info

    _finish = read  # for prefetch threads

    def _pieces(self, number: int, part: SourceDraw, until: float | None) -> list[DrawnRows]:
        if not self.sources[number].remote:
            return part.pieces(until)
        with member_named(number), allowed:
            return part.pieces(until)

    def _filling(self, member: int, piece: DrawnRows) -> tuple[Any, dict[Any, Any]]:
        """Return rows with the requested keys and device, and their info.

        Raises:
            RuntimeError: the number of rows has changed.
        """
        info = {INDEX if key == "index" else key: value for key, value in piece.info.items()}
        data, rows = piece.data, len(info[INDEX])
        made = joining.length_of(data)
        if made != rows:
            raise RuntimeError(
                f"member {member}: its transforms or collate_fn made {made} of {rows} rows, so "
                "that they do not fill their part of the batch"
            )
        if self.keys is not None:
            data = joining.select(data, self.keys, member)
        data = joining.put_back_marks(data, info)
        if self.device is not None:
            data = to_device(data, self.device)
        return data, info

    # -- in turn ------------------------------------------------------------------------------

    def next_in_turn(
        self,
        batch_size: int | None,
        timeout: float | None = None,
        *,
        merge: bool = True,
        needed: bool = True,
    ) -> tuple[MixtureDraw, Any, dict[Any, Any]]:
        """Return the next draw, its data and its info; roll it back if this fails.

        Args:
            merge: put the info into the data.
            needed: raise an error if the info does not fit the data.
        """
        seconds = checked_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        with deferred:
            size = self.size_of(batch_size)
            queue = self._queue() if size == self.batch_size else None
            answers = self.asked(size, until)
            if queue is None:
                draw = self.drawn(size, answers)
                batch = AheadBatch(draw, batch=draw, late=True)
            else:
                batch = self._take(queue, answers)
            try:
                if queue is not None:
                    batch.wait(cast(Any, self))
                if batch.error is not None:
                    raise batch.error
                data, info = self.read(batch.draw, until) if batch.made is None else batch.made
                if merge:
                    data = joining.merged(data, info, needed)
                check()  # the last moment at which the batch can still be the next one
            except BaseException:
                with shielded:
                    self.give_back(batch.draw)
                raise
            return batch.draw, data, info

    def _queue(self) -> Prefetcher | None:
        """Return the prefetcher. A forked process gets a new one, and undoes its draws."""
        queue = self._prefetcher
        if queue is not None and queue.process != os.getpid():
            with self.lock:
                if self._prefetcher is queue:
                    self._prefetcher = Prefetcher(queue.depth, cast(Any, self))
                    self._undo(queue.pending())
        return self._prefetcher

    def _take(self, queue: Prefetcher, answers: Mapping[int, Readiness]) -> AheadBatch:
        """Draw until the queue is full; remove and return its next batch."""
        assert self.batch_size is not None
        size = self.batch_size

        def ahead() -> AheadBatch:
            try:
                draw = self.drawn(size, answers)
            except Exception as error:
                return AheadBatch(None, error=error)
            return AheadBatch(draw, batch=draw, late=self.facts.ordered)

        with self.lock:
            fresh = queue.top_up(queue.depth + 1, ahead)
            batch = queue.pop()
            if batch.draw is None and batch not in fresh:  # rows may have been written since
                batch = ahead()
            if batch.draw is None:
                assert batch.error is not None
                raise batch.error
            # Users see the sampler as of the batch that is delivered.
            self.sampler.ran_out = batch.draw.ran_out
        queue.submit([one for one in fresh if one is not batch])
        return batch

    def queued(self) -> int:
        """Return the number of prefetched batches."""
        queue = self._queue()
        return 0 if queue is None else len(queue)

    def give_back(self, draw: MixtureDraw) -> None:
        """Undo a draw whose batch failed, and all later draws that were not delivered."""
        with self.lock:
            self._undo(sorted([draw, *self.drop()], key=lambda one: one.number))
            self.sampler.ran_out = draw.was_out

    def rewind(self) -> None:
        """Undo all draws that were not delivered."""
        with self.lock:
            self._undo(self.drop())

    def drop(self) -> list[MixtureDraw]:
        """Drop all batches that were not delivered; return their draws in order."""
        queue = self._queue()
        return [] if queue is None else queue.clear()

    def _undo(self, draws: list[MixtureDraw]) -> None:
        """Undo draws, given in order: those of members, and the choices of members.

        The generator is reset, unless other code has used it since. The caller holds the lock.
        """
        shown = self.sampler.ran_out
        for draw in reversed(draws):
            for part in reversed(draw.parts.values()):
                part.undo()
            self.sampler._ended, self.sampler.weights.step = draw.ended, draw.step
            if draw.after is not None and torch.equal(random_state(self.generator), draw.after):
                set_random_state(self.generator, draw.before)
        self.sampler.ran_out = shown

    def shut_down(self) -> None:
        """Join the prefetch threads, and undo the draws that were not delivered."""
        self.closed = True
        queue = self._queue()
        if queue is not None:
            queue.shutdown()
            self.rewind()


RowSource = BufferSource | HandleSource
"""A source that stores rows."""
