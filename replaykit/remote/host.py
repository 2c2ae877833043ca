"""The buffer inside of its actor."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.buffer_dataset import check_loaded
from replaykit.buffer.drawing import Lent
from replaykit.ensembles.batch_info import check_stored, facts_of, part_of, standing_of
from replaykit.errors import RateLimiterTimeout
from replaykit.remote.requests import Failed
from replaykit.remote.wire_format import ITSELF, Message, pack, seal, unpack
from replaykit.storages import TensorStorage
from replaykit.writers import RoundRobinWriter, TensorDictRoundRobinWriter

__all__ = ["TOGETHER", "Host"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

Sent = Message | bytes
"""An answer, sealed where it is small."""

TOGETHER = (4, 2)
"""How many batches one call may be asked for, by ``sample_4``, ``sample_2`` and ``step_4``,
``step_2``; Ray is told as many results (``num_returns``)."""

_COPIED_AT_ONCE = ("add", "extend")
"""Methods whose rows a tensor storage copies before they return."""

_REFUSALS = (KeyError, RateLimiterTimeout, TypeError, ValueError)
"""What a write raises before it has changed anything."""

_MOST_PASSES = 1024
"""Handles whose last pass is known: until the requests have come that they had under way when it
ended, and these follow at once."""


def _travelling(error: Exception) -> Exception:
    """An error as it is; one that the other end could not make again with its kind and text."""
    try:
        unpack(pack(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _answering(method: Callable[_P, Message]) -> Callable[_P, Sent]:
    """The method, with small answers sealed, and errors that travel."""

    @functools.wraps(method)
    def answer(*args: _P.args, **keywords: _P.kwargs) -> Sent:
        return seal(method(*args, **keywords))

    return _telling(answer)


def _each(count: int, method: Callable[_P, Sent]) -> Callable[_P, list[Sent]]:
    """A method that answers as that many calls of another one would, one after the other.

    Each of them may fail by itself: those after it are made nevertheless.
    """

    def several(*args: _P.args, **keywords: _P.kwargs) -> list[Sent]:
        answers: list[Sent] = []
        for _ in range(count):
            try:
                answers.append(method(*args, **keywords))
            except Exception as error:
                answers.append(pack(Failed(error, traceback.format_exc())))
        return answers

    return several


def _telling(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method, with errors that travel."""

    @functools.wraps(method)
    def told(*args: _P.args, **keywords: _P.kwargs) -> _R:
        try:
            return method(*args, **keywords)
        except Exception as error:
            found = _travelling(error)
            if found is error:
                raise
            raise found from error

    return told


class Host:
    """Holds one buffer; answers messages (`packing`).

    The buffer is made with the actor, also when Ray starts it again. What fails then is told by
    the first call, so that it has its own type.

    Args:
        cls: class of the buffer.
        arguments: its keyword arguments.
        devices: whether tensors may go to the devices that they were on at the caller.
    """

    def __init__(self, cls: type, arguments: dict[str, Any], *, devices: bool = False) -> None:
        self._devices = devices
        self._failure: BaseException | None = None
        self._passes: dict[str, int] = {}
        self._buffer: Any = None
        try:
            self._buffer = cls(**arguments)
        except Exception as error:
            self._failure = error
        self._limited = getattr(self._buffer, "_rate_limiter", None) is not None

    @_telling
    def ready(self) -> bool:
        """Returns, when the buffer is there, whether it has a rate limiter; raises what making it
        has raised."""
        if self._failure is not None:
            raise self._failure
        return self._limited

    def check_ahead(self) -> None:
        """Raises ValueError where batches must not be asked for ahead.

        What nobody takes in the end would be used up for nothing.
        """
        sampler = self._buffer.sampler
        if getattr(sampler, "consumes", False):
            raise ValueError(
                f"expected a client without prefetch for a {type(sampler).__name__}: rows of "
                "batches that nobody takes would be used up"
            )

    @_telling
    def check_loader(self) -> None:
        """Raises TypeError or ValueError where others cannot draw beside the buffer's own draws."""
        check_loaded(self._buffer)
        sampler = self._buffer.sampler
        if sampler.passes:
            raise ValueError(
                "expected a sampler that draws with replacement for a loader of a buffer in an "
                f"actor, got a {type(sampler).__name__}, whose pass is the buffer's: iterate over "
                "the handle, or client(prefetch=n)"
            )

    @_answering
    def draw(self, size: int, seed: int) -> Message:
        """Returns a batch drawn with a seed; the buffer's own draws are left alone."""
        lent = Lent(torch.Generator().manual_seed(seed), numbered=True)

        def made() -> Message:
            return pack(self._buffer._delivered(self._buffer._draw(size, lent), None)[0])

        return self._with_warnings(made)

    # -- as a member of an ensemble -----------------------------------------------------------

    @_answering
    def facts(self) -> Message:
        """Returns what an ensemble has to know of the buffer, which has to be fit for one."""
        return pack(facts_of(self._buffer))

    @_answering
    def part(self, rows: list[int], seed: int, known: Any) -> Message:
        """Returns what the buffer gives to a batch, and its facts where these are not the known
        ones."""

        def made() -> Message:
            pieces, facts = part_of(self._buffer, rows, seed), facts_of(self._buffer)
            return pack((pieces, None if facts == known else facts))

        return self._with_warnings(made)

    @_answering
    def standing(self, rows: int) -> Message:
        """Returns how many rows there are, and whether the buffer can give that many."""
        return pack(standing_of(self._buffer, rows))

    @_telling
    def check_stored(self, index: Message) -> None:
        """Raises IndexError where one of these rows is not stored."""
        check_stored(self._buffer, unpack(index, devices=self._devices))

    # Ray takes a tenth of the time of a call for its first argument: these have none.

    @_answering
    def sample(self) -> Message:
        """Returns a batch of the buffer's own batch size."""
        return self._with_warnings(lambda: pack(self._buffer.sample()))

    @_answering
    def sample_1(self) -> Message:
        """Returns a batch before anybody needs it."""
        self.check_ahead()
        return self._with_warnings(lambda: pack(self._buffer.sample()))

    sample_2 = _each(2, sample_1)
    sample_4 = _each(4, sample_1)

    @_answering
    def call(self, name: str, args: list[Message], keywords: dict[str, Message]) -> Message:
        """Returns what a method of the buffer returns; ``ITSELF`` for the buffer itself."""
        own = name not in _COPIED_AT_ONCE or not self._copies()
        positional, named = self._arguments(args, keywords, own=own)
        method = getattr(self._buffer, name)
        return self._with_warnings(lambda: self._packed(method(*positional, **named)))

    @_answering
    def wait(self, name: str, args: list[Message], keywords: dict[str, Message]) -> Message:
        """The same for a method that may wait for others: many run at a time."""
        positional, named = self._arguments(args, keywords)
        return self._packed(getattr(self._buffer, name)(*positional, **named))

    @_answering
    def read(self, name: str) -> Message:
        """Returns an attribute of the buffer."""
        return self._packed(getattr(self._buffer, name))

    @_telling
    def assign(self, name: str, value: Message) -> None:
        """Sets an attribute of the buffer."""
        setattr(self._buffer, name, unpack(value, own=True, devices=self._devices))

    @_answering
    def run(self, function: Message, args: list[Message], keywords: dict[str, Message]) -> Message:
        """Returns ``function(buffer, *args, **keywords)``."""
        called = unpack(function, own=True, devices=self._devices)
        positional, named = self._arguments(args, keywords)
        return self._packed(called(self._buffer, *positional, **named))

    @_answering
    def step(self, client: str, number: int, ahead: bool = False) -> Message:
        """Returns the next batch of the buffer's own iteration; None where the pass has ended.

        ``number`` counts the passes that this client has seen the end of: what it asked for ahead,
        before it knew of an end, draws nothing from the next pass.
        """
        if self._passes.get(client, 0) > number:
            return pack(None)
        if ahead:
            self.check_ahead()
        return self._with_warnings(lambda: pack(self._next_of(client, number)))

    step_2 = _each(2, step)
    step_4 = _each(4, step)

    def _next_of(self, client: str, number: int) -> Any:
        batch = self._buffer.next()
        if batch is None:
            self._passes.pop(client, None)
            self._passes[client] = number + 1  # the last of them
            if len(self._passes) > _MOST_PASSES:
                del self._passes[next(iter(self._passes))]
        return batch

    @_answering
    def write(self, counts: list[int], rows: Message) -> Message:
        """Writes what several calls have handed over, in their order.

        Args:
            counts: of each call, how many rows it extended by; 0: it added one.
            rows: those of all calls, one after the other.

        Returns:
            Of each call whether it succeeded, and its result or error.
        """
        data = unpack(rows, devices=self._devices)
        return self._with_warnings(lambda: pack(self._outcomes(counts, data)))

    def _outcomes(self, counts: list[int], data: Any) -> list[tuple[bool, Any]]:
        whole = self._together(counts, data) if len(counts) > 1 else None
        if whole is not None:
            return whole
        outcomes: list[tuple[bool, Any]] = []
        start = 0
        for count in counts:
            stop = start + max(count, 1)
            try:
                if count:
                    outcomes.append((True, self._buffer.extend(self._own(data[start:stop]))))
                else:
                    outcomes.append((True, self._buffer.add(self._own(data[start]))))
            except Exception as error:
                outcomes.append((False, _travelling(error)))
            start = stop
        return outcomes

    def _together(self, counts: list[int], data: Any) -> list[tuple[bool, Any]] | None:
        """All calls as one, where that is the same; None where it is not, or it was refused.

        What was refused has changed nothing, and each call alone says which of them it is. It does
        not wait for a rate limiter: all of them might need more room than there can be, and each of
        them less. After any other error it is not known what is stored, and nothing is written
        again.
        """
        buffer = self._buffer
        if (
            not isinstance(buffer, ReplayBuffer)
            or type(buffer).add is not ReplayBuffer.add
            or type(buffer).extend is not ReplayBuffer.extend
            or type(buffer.writer) not in (RoundRobinWriter, TensorDictRoundRobinWriter)
            or not isinstance(buffer.storage, TensorStorage)
            or buffer.storage.ndim > 1
            or len(buffer.transform)
            or len(data) > buffer.storage.max_size
        ):
            return None
        try:
            index = buffer.extend(data, timeout=0)
        except _REFUSALS:
            return None
        except Exception as error:
            return [(False, _travelling(error))] * len(counts)
        outcomes: list[tuple[bool, Any]] = []
        start = 0
        for count in counts:
            stop = start + max(count, 1)
            outcomes.append((True, index[start:stop] if count else int(index[start])))
            start = stop
        return outcomes

    def _arguments(
        self, args: list[Message], keywords: dict[str, Message], *, own: bool = True
    ) -> tuple[list[Any], dict[str, Any]]:
        return (
            [unpack(arg, own=own, devices=self._devices) for arg in args],
            {name: unpack(arg, own=own, devices=self._devices) for name, arg in keywords.items()},
        )

    def _copies(self) -> bool:
        """Whether rows are copied when they are stored: lists keep what they get."""
        buffer = self._buffer
        return getattr(buffer, "initialized", False) and isinstance(buffer.storage, TensorStorage)

    def _own(self, rows: Any) -> Any:
        """Rows that may be kept."""
        return rows if self._copies() else rows.clone()

    def _packed(self, result: Any) -> Message:
        return pack(ITSELF if result is self._buffer else result)

    def _with_warnings(self, make: Callable[[], Message]) -> Message:
        """An answer, and what there was to warn of meanwhile, which is told where it was asked for.

        With a rate limiter warnings stay here: to catch them changes what holds for all threads.
        """
        if self._limited:
            return make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = make()
        if not caught:
            return answer
        return [*answer, {"warnings": [pack(warning.message) for warning in caught]}]
