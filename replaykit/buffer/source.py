"""Define sources: buffers, handles and mixtures, from which others draw."""

from __future__ import annotations

import copy
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch.utils.data import get_worker_info

from replaykit._compat import Uncompiled
from replaykit.buffer.deliver import finished
from replaykit.buffer.draw import UnreadBatch, draw_apart, give_back
from replaykit.buffer.prefetch import Draw, DrawnBatch
from replaykit.episodes import EPISODES, WINDOWS, CountLaw
from replaykit.errors import NotEnoughData
from replaykit.registry import entry_of
from replaykit.samplers import Sampler, SampleUnit, Transition
from replaykit.samplers.window_measures import eligible_records
from replaykit.storages.indexing import check_range

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


_SEEDS = 2**62
_EPISODE = CountLaw.strict(1)

UNITS = ("rows", "episodes", "windows")
"""The units in which the minimum of a member is counted."""


class RemoteRequest(Protocol):
    """A pending request to a source, for a batch or for another answer."""

    def result(self, timeout: float | None = None) -> Any: ...


class Done:
    """The answer of a source that needs no wait."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer."""
        return self._value


class Later:
    """A request that starts when its result is needed.

    Args:
        make: function of the seconds to wait that returns the result.
    """

    def __init__(self, make: Callable[[float | None], Any]) -> None:
        self._make = make

    def result(self, timeout: float | None = None) -> Any:
        """Make the result."""
        return self._make(timeout)


@dataclass(frozen=True)
class MemberFacts:
    """The properties of a source that a mixture needs.

    Attributes:
        info_keys: keys in the info of each sample, without index, generations and marks of ends.
        prioritized: whether the member accepts priorities.
        priority_key: the key under which the member reads priorities.
        width: number of coordinates in an index.
        weights: dtype of ``priority_weight``.
        single: True if the member draws single rows, as many as requested. False if it draws
            windows.
        ordered: whether a transform needs the batches in the order of delivery.
        marks: keys of the marks of ends that the sampler adds to TensorDicts.
    """

    info_keys: frozenset[Any]
    prioritized: bool
    priority_key: tuple[str, ...]
    width: int
    weights: torch.dtype
    single: bool
    ordered: bool
    marks: frozenset[Any] = frozenset()


class DrawnRows(NamedTuple):
    """Rows ``[B, ...]`` that a source has drawn, with their info.

    ``info`` has ``index`` and ``index_generation``. ``data`` does not contain the info yet.
    """

    data: Any
    info: dict[Any, Any]


class Readiness(NamedTuple):
    """The number of rows of a member, and whether it can return the requested rows."""

    size: int
    ready: bool


class BatchStreams(Uncompiled, ABC):
    """A source of separate streams of batches for loaders.

    Each stream is drawn with a separate generator, and does not affect other draws. New rows and
    priorities have an effect from the next batch on.
    """

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """The properties of the buffer's sampler."""

    @abstractmethod
    def _size_of(self, batch_size: int | None) -> int:
        """Return the number of rows of a batch; RuntimeError if no batch size is known."""

    @abstractmethod
    def _check_loader(self) -> None:
        """Raise ValueError or TypeError if loaders cannot draw separate streams."""

    @abstractmethod
    def _check_workers(self, method: str | None = None) -> None:
        """Raise ValueError if worker processes could not reach the buffer.

        Args:
            method: the start method of the workers; None if this process is a worker.
        """

    @abstractmethod
    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        """Return a function that requests one batch per call.

        The function's argument is the number of rows. The batches are drawn with ``generator``.
        """

    def _asking_from(
        self, generator: torch.Generator, number: int, stride: int
    ) -> Callable[[int], RemoteRequest]:
        """Do the same, for the batches ``number``, ``number + stride``, ... of a loader."""
        return self._asking(generator)

    @abstractmethod
    def _carried(self, known: dict[int, Any]) -> Any:
        """Return an object whose ``made`` creates this source in a spawned process.

        Args:
            known: such objects by the ids of the buffers in this source.
        """

    def _copied_buffers(self) -> list[ReplayBuffer]:
        """Return the buffers whose rows worker processes would copy, and not follow."""
        return []


class BufferHandle(BatchStreams):
    """A handle of a buffer that makes its batches in other processes.

    Mixtures request parts of their batches, and each part is drawn with a seed. The handle sends a
    request immediately, unless it would have to wait to send it.
    """

    @abstractmethod
    def _facts_of_member(self) -> MemberFacts:
        """Return the properties of the buffer's samples.

        Raises:
            TypeError, ValueError: the buffer cannot be a member.
        """

    @abstractmethod
    def _be_fresh(self, rows: int) -> None:
        """Update outdated data for a draw of ``rows`` rows; may wait."""

    @abstractmethod
    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        """Request draws of ``rows`` rows. Seed, stored rows and priorities determine them.

        Returns:
            A future. Its result is a list of `DrawnRows`, and `MemberFacts` if they differ from
            ``known``, else None.
        """

    @abstractmethod
    def _ask_readiness(self, rows: int) -> RemoteRequest:
        """Request the buffer's `Readiness` for a draw of ``rows`` rows."""

    @abstractmethod
    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        """Request a check that rows are stored. An entry -1 is not checked.

        The answer is None, or an IndexError.
        """

    @abstractmethod
    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        """Request a call of a method of the buffer."""

    @abstractmethod
    def _handed_on(self) -> Any:
        """Return a handle that can be pickled."""


class SourceDraw(Protocol):
    """A draw of a source, whose rows may still be on their way."""

    @property
    def ran_out(self) -> bool:
        """True if the draw has ended a pass."""

    def pieces(self, until: float | None) -> list[DrawnRows]:
        """Wait for the rows, at most up to a time on the monotonic clock; transform them."""

    def undo(self) -> None:
        """Return the source to its state before the draw."""


class Source(Protocol):
    """Return parts of batches to a mixture: a buffer, a handle of one, or another mixture.

    ``ask`` and ``draw`` only send a request if the source is remote. The caller waits for the
    answers later, without a lock.

    Attributes:
        remote: whether requests go to other processes. They are sent before local sources draw.
    """

    remote: bool

    @property
    def sampler(self) -> Sampler:
        """The sampler, or a description of it."""

    @property
    def facts(self) -> MemberFacts:
        """The properties of the source's samples."""

    @property
    def size(self) -> int:
        """Number of stored rows."""

    def ready(self, rows: int) -> bool:
        """Return whether the source can return ``rows`` rows now."""

    def ask(self, rows: int) -> RemoteRequest:
        """Request the source's `Readiness` for a draw of ``rows`` rows."""

    def refresh(self, rows: int) -> None:
        """Update outdated data for a draw of ``rows`` rows; may wait."""

    def draw(self, parts: int, rows: int, generator: torch.Generator | None) -> SourceDraw:
        """Draw parts of a batch.

        Args:
            parts: the number of parts.
            rows: number of rows of each part.
            generator: source of randomness; None for that of the source.
        """

    def refuse(self, rows: int, generator: torch.Generator | None) -> NoReturn:
        """Raise the error of a source that cannot return ``rows`` rows."""

    def apart(self) -> Source:
        """Return a copy for a loader. Its draws do not change this source."""


class BufferSource:
    """A buffer of this process as a source.

    Draws do not use the batches that the buffer has prefetched. Their info has generations.

    Args:
        buffer: an initialized buffer.
        collate: replaces the buffer's ``collate_fn``; None to use the ``collate_fn``.
        sampler: a loader's sampler, whose draws are never undone; None for the buffer's.
    """

    remote = False

    def __init__(
        self,
        buffer: ReplayBuffer,
        collate: Callable[[Any], Any] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.buffer, self.collate, self._sampler = buffer, collate, sampler

    @property
    def sampler(self) -> Sampler:
        """The sampler that draws."""
        return self.buffer._sampler if self._sampler is None else self._sampler

    @property
    def facts(self) -> MemberFacts:
        """The properties of the buffer's samples."""
        buffer, sampler = self.buffer, self.sampler
        return MemberFacts(
            info_keys=frozenset((*sampler.info_keys, *buffer._sample_unit.info_keys)),
            prioritized=sampler.prioritized,
            priority_key=buffer._priority_key,
            width=buffer._storage.ndim,
            weights=torch.promote_types(torch.float32, getattr(sampler, "dtype", torch.float32)),
            single=draws_single_rows(sampler, buffer._sample_unit),
            ordered=buffer._chain.ordered,
            marks=frozenset(sampler._marks),
        )

    @property
    def size(self) -> int:
        """Number of stored rows."""
        return len(self.buffer._storage)

    def ready(self, rows: int) -> bool:
        """Return whether the buffer can return ``rows`` rows now."""
        buffer, sampler = self.buffer, self.sampler
        with buffer._locked(settled=False) as storage:
            sampler.needs = buffer._needs
            if sampler.consumes:
                return sampler.left(storage) >= rows  # fewer rows would not fill a part
            return sampler.can_sample(storage, rows)

    def stored(self, unit: str, rows: int) -> int:
        """Return how many rows, episodes or windows are stored.

        Args:
            unit: one of `UNITS`. Windows are those that the sampler can draw.
            rows: number of rows of a draw.
        """
        buffer, slicing = self.buffer, getattr(self.sampler, "_slicing", None)
        with buffer._locked(settled=False) as storage:
            count = len(storage)
            if unit == "rows" or not count:
                return count
            if unit == "episodes":
                _ = buffer.episodes  # raises for a storage without episodes
                return int(storage.episodes.total(_EPISODE, EPISODES))  # type: ignore[attr-defined]
            if slicing is None:
                return eligible_records(storage, buffer._needs).count if buffer._needs else count
            request = slicing.request(storage, slicing.size.slice_len or rows, buffer._needs)
            return int(request.episodes.total(request.law, WINDOWS))

    def ask(self, rows: int) -> RemoteRequest:
        """Return the buffer's `Readiness`."""
        return Done(Readiness(self.size, self.ready(rows)))

    def refresh(self, rows: int) -> None:
        """Do nothing, because the buffer is in this process."""

    def draw(self, parts: int, rows: int, generator: torch.Generator | None) -> BufferDraw:
        """Draw parts of a batch, or change nothing."""
        single = draws_single_rows(self.sampler, self.buffer._sample_unit)
        return self.draw_counts([parts * rows] if single else [rows] * parts, generator)

    def draw_counts(self, counts: list[int], generator: torch.Generator | None) -> BufferDraw:
        """Make a draw for each number of rows, or change nothing.

        A draw may be short if it ends a pass over the buffer. The next pass then provides the rest.

        Raises:
            ValueError: a draw is short for another reason, or the missing rows are not a whole
                number of slices.
        """
        made = BufferDraw(self.buffer, [])
        try:
            for wanted in counts:
                left = wanted
                while left:
                    batch = self._draw(left, generator)
                    made.batches.append(batch)
                    left -= len(batch.draw.anchors)
                    self._check_left(wanted, left, batch.draw)
        except BaseException:
            made.undo()
            raise
        return made

    def _check_left(self, wanted: int, left: int, draw: Draw) -> None:
        """Raise ValueError if another draw cannot return the rows that are left."""
        slicing = getattr(self.sampler, "_slicing", None)
        said = f"expected {wanted} rows, got {wanted - left}"
        if left > 0 and not (draw.ran_out and len(draw.anchors)):
            raise ValueError(
                f"{said}: windows of different lengths do not fill a part of a batch; use strict "
                "ones, or pad_output=True"
            )
        if left > 0 and slicing is not None and slicing.size.num_slices is not None:
            raise ValueError(
                f"{said} at the end of a pass, and with num_slices= the rest is not a whole number "
                "of slices; use slice_len="
            )
        if left < 0:
            raise ValueError(said)

    def _draw(self, rows: int, generator: torch.Generator | None) -> DrawnBatch | UnreadBatch:
        buffer, collate, sampler = self.buffer, self.collate, self._sampler
        if sampler is None or generator is None:
            return draw_apart(buffer, rows, generator, collate, sampler=sampler)
        return UnreadBatch.drawn(buffer, rows, generator, collate, sampler)

    def refuse(self, rows: int, generator: torch.Generator | None) -> NoReturn:
        """Raise the error of the buffer, which cannot return ``rows`` rows."""
        batch = self._draw(rows, generator)
        give_back(self.buffer, batch.draw)  # it is ready now, or only a draw can show that
        raise NotEnoughData(f"expected {rows} rows, but it is not ready to return them")

    def apart(self) -> BufferSource:
        """Return a source that draws for a loader, with a separate pass.

        In a worker process, draws by priority follow the priorities that other processes set.
        """
        buffer = self.buffer
        own = get_worker_info() is not None and buffer.shared and buffer._sampler.prioritized
        return BufferSource(buffer, self.collate, None if own else loading_sampler(buffer))

    def check_stored(self, index: torch.Tensor) -> RemoteRequest:
        """Raise IndexError if a row is not stored."""
        check_stored(self.buffer.storage, index)
        return Done(None)

    def call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        """Call a method of the buffer."""
        return Done(getattr(self.buffer, name)(*args, **keywords))


class BufferDraw:
    """The batches that a buffer of this process has drawn, and read unless they are a loader's."""

    def __init__(self, buffer: ReplayBuffer, batches: list[DrawnBatch | UnreadBatch]) -> None:
        self._buffer, self.batches = buffer, batches

    @property
    def ran_out(self) -> bool:
        """True if a draw has ended a pass."""
        return any(batch.draw.ran_out for batch in self.batches)

    def pieces(self, until: float | None) -> list[DrawnRows]:
        """Transform the rows; return them along dimension 0."""
        return [self._piece(batch) for batch in self.batches]

    def _piece(self, batch: DrawnBatch | UnreadBatch) -> DrawnRows:
        if isinstance(batch, UnreadBatch):
            batch = batch.read()
        data, info = finished(self._buffer, batch)
        if batch.stack_dim:
            data = data.transpose(0, batch.stack_dim)
        return DrawnRows(data, info)

    def undo(self) -> None:
        """Undo the draws, the last one first."""
        for batch in reversed(self.batches):
            give_back(self._buffer, batch.draw)


class HandleSource:
    """A remote buffer as a source.

    Its samples are drawn with seeds from the generator of the mixture. This does not affect the
    buffer's own draws. An undelivered draw has therefore changed nothing in the buffer.

    Args:
        handle: the handle of the buffer.
        facts: the latest known properties of the buffer's samples; None to request them.
    """

    remote = True

    def __init__(self, handle: BufferHandle, facts: MemberFacts | None = None) -> None:
        self.handle = handle
        self._facts = handle._facts_of_member() if facts is None else facts

    @property
    def sampler(self) -> Sampler:
        """The handle's description of the sampler."""
        sampler: Sampler = self.handle.sampler
        return sampler

    @property
    def facts(self) -> MemberFacts:
        """The latest known properties of the buffer's samples."""
        return self._facts

    @property
    def size(self) -> int:
        """Number of stored rows."""
        return len(self.handle)  # type: ignore[arg-type]

    def ready(self, rows: int) -> bool:
        """Return whether the buffer can return ``rows`` rows now; wait for its answer."""
        return bool(self.ask(rows).result().ready)

    def ask(self, rows: int) -> RemoteRequest:
        """Request the buffer's `Readiness`."""
        return self.handle._ask_readiness(rows)

    def refresh(self, rows: int) -> None:
        """Update outdated data for a draw of ``rows`` rows; may wait."""
        self.handle._be_fresh(rows)

    def draw(self, parts: int, rows: int, generator: torch.Generator | None) -> HandleDraw:
        """Request the rows of some parts of a batch, without waiting."""
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(_SEEDS, (), generator=generator, device=device))
        counts = [parts * rows] if self._facts.single else [rows] * parts
        return HandleDraw(self, self.handle._ask_part(counts, seed, self._facts))

    def learn(self, facts: MemberFacts | None) -> None:
        """Replace the known properties, if they have changed."""
        if facts is not None:
            self._facts = facts

    def refuse(self, rows: int, generator: torch.Generator | None) -> NoReturn:
        """Raise the error of the buffer, which cannot return ``rows`` rows."""
        self.handle._ask_part([rows], 0, self._facts).result()
        raise NotEnoughData(f"expected {rows} rows, but it is not ready to return them")

    def apart(self) -> HandleSource:
        """Return the source itself, because draws with seeds change nothing."""
        return self

    def check_stored(self, index: torch.Tensor) -> RemoteRequest:
        """Request a check that rows are stored."""
        return self.handle._ask_stored(index)

    def call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        """Request a call of a method of the buffer."""
        return self.handle._ask_call(name, *args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        if multiprocessing.context.get_spawning_popen() is not None:
            return _carried_source, (self.handle._carried({}), self._facts)
        return HandleSource, (self.handle._handed_on(), self._facts)


def _carried_source(carried: Any, facts: MemberFacts) -> HandleSource:
    return HandleSource(carried.made(), facts)


class HandleDraw:
    """The request for a remote buffer's parts of a batch."""

    ran_out = False

    def __init__(self, source: HandleSource, request: RemoteRequest) -> None:
        self._source, self._request = source, request

    def pieces(self, until: float | None) -> list[DrawnRows]:
        """Wait for the rows."""
        found, facts = self._request.result(seconds_left(until))
        self._source.learn(facts)
        return list(found)

    def undo(self) -> None:
        """Do nothing, because the draw has changed nothing in the buffer."""


def loading_sampler(buffer: ReplayBuffer, *, drop_last: bool = False) -> Sampler:
    """Return a copy of the buffer's sampler, at the beginning of a pass."""
    with buffer._locked() as storage:
        sampler = copy.deepcopy(buffer._sampler, {id(storage): storage})
    if sampler.passes:
        sampler.empty()
    if drop_last:
        sampler.drop_last = True  # type: ignore[attr-defined]
    return sampler


def seconds_left(until: float | None) -> float | None:
    """Return the seconds until a time on the monotonic clock."""
    return None if until is None else max(0.0, until - time.monotonic())


def draws_single_rows(sampler: Sampler, unit: SampleUnit | None) -> bool:
    """Return whether one draw can return the rows of all parts.

    A sampler of windows, or a custom sampler, makes one draw per part, because its windows may
    depend on the count of requested rows.
    """
    entry = entry_of(type(sampler))
    single = entry is not None and entry.single_rows and (unit is None or type(unit) is Transition)
    return single and not getattr(sampler, "drop_last", False)


def check_hosted(buffer: Any) -> None:
    """Raise TypeError or ValueError if a buffer in an actor cannot be a source of a mixture."""
    if isinstance(buffer, BatchStreams):
        raise TypeError(
            "expected a ReplayBuffer that stores rows itself in the actor of a member, got "
            f"{type(buffer).__name__}; make its members members of the ensemble"
        )
    check_unlimited(buffer)
    if buffer.sampler.passes or buffer.sampler.consumes:
        raise ValueError(
            "expected a sampler that draws with replacement in an actor, got a "
            f"{type(buffer.sampler).__name__}: it could not roll back draws that are not delivered"
        )


def check_unlimited(buffer: ReplayBuffer) -> None:
    """Raise ValueError if a buffer has a rate limiter."""
    if buffer._rate_limiter is not None:
        raise ValueError(
            "expected a buffer without a rate limiter, which does not see draws of an ensemble, "
            f"got {buffer._rate_limiter!r}"
        )


def check_stored(storage: Any, index: torch.Tensor) -> None:
    """Raise IndexError if a row of an index is not stored.

    The index is ``[K]`` or ``[K, ndim]``. An entry -1 is not checked.
    """
    cells = index.reshape(len(index), -1)
    for column, limit in enumerate((storage.ledger.length, *storage.lanes)):
        check_range(cells[:, column], -1, limit)
