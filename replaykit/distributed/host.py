"""Implement the actor that holds a buffer and answers messages."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.buffer_dataset import check_loaded
from replaykit.buffer.deliver import deliver_batch
from replaykit.buffer.draw import draw_apart
from replaykit.buffer.source import BatchStreams, BufferSource, MemberFacts, check_hosted
from replaykit.distributed.protocol import ITSELF, Message, pack, seal, unpack
from replaykit.distributed.requests import Failed
from replaykit.errors import RateLimiterTimeout
from replaykit.storages import TensorStorage
from replaykit.writers import RoundRobinWriter, TensorDictRoundRobinWriter

_P = ParamSpec("_P")

Sent = Message | bytes
"""The type of an answer. Small answers are sealed into bytes."""

TOGETHER = (4, 2)
"""The counts of batches that one call may request.

The methods are ``sample_4``, ``sample_2``, ``step_4`` and ``step_2``. Each count has a separate
method, because Ray needs the count as ``num_returns``.
"""

_COPIED_AT_ONCE = ("add", "extend")
"""The methods during which a tensor storage copies the written rows."""

_REFUSALS = (KeyError, RateLimiterTimeout, TypeError, ValueError)
"""The errors that a write raises before it changes anything."""

_MOST_PASSES = 1024
"""The number of handles whose last pass is recorded.

The record is needed until all requests that a handle had under way at the end of the pass have
arrived. These arrive immediately after the end.
"""


def _travelling(error: Exception) -> Exception:
    """Return the error, or a RuntimeError if the receiver cannot unpickle the error."""
    try:
        unpack(pack(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _answering(method: Callable[_P, Message]) -> Callable[_P, Sent]:
    """Wrap a method so that small answers are sealed and errors can be sent."""

    @functools.wraps(method)
    def answer(*args: _P.args, **keywords: _P.kwargs) -> Sent:
        try:
            return seal(method(*args, **keywords))
        except Exception as error:
            found = _travelling(error)
            if found is error:
                raise
            raise found from error

    return answer


def _each(count: int, method: Callable[_P, Sent]) -> Callable[_P, list[Sent]]:
    """Return a method that returns the answers of ``count`` successive calls.

    If a call fails, the later calls still run.
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


def check_ahead(buffer: Any) -> None:
    """Raise ValueError if batches must not be requested ahead.

    They must not be requested ahead if the sampler uses rows up, because rows in batches that no
    caller receives would be lost.
    """
    if getattr(buffer.sampler, "consumes", False):
        raise ValueError(
            f"expected a client without prefetch for a {type(buffer.sampler).__name__}: batches "
            "that are never delivered would use rows up"
        )


def check_loader(buffer: Any) -> None:
    """Raise TypeError or ValueError if loaders cannot draw independently of the buffer."""
    check_loaded(buffer)
    if isinstance(buffer, BatchStreams):
        raise TypeError(
            f"expected a ReplayBuffer that stores rows itself, got {type(buffer).__name__}"
        )
    if buffer.sampler.passes:
        raise ValueError(
            "expected a sampler that draws with replacement for a loader of a buffer in an actor, "
            f"got a {type(buffer.sampler).__name__}, whose pass belongs to the buffer: iterate "
            "over the handle, or over client(prefetch=n)"
        )


def draw_seeded(buffer: Any, size: int, seed: int) -> Any:
    """Return a batch drawn with a seed; do not change the results of the buffer's other draws."""
    generator = torch.Generator().manual_seed(seed)
    return deliver_batch(buffer, draw_apart(buffer, size, generator, numbered=True), None)[0]


# -- as a member of a mixture ----------------------------------------------------------------------


def member_facts(buffer: Any) -> MemberFacts:
    """Return the properties of the buffer that a mixture needs.

    Raises:
        TypeError, ValueError: it cannot be a source of mixtures in other processes.
    """
    check_hosted(buffer)
    return BufferSource(buffer).facts


def part_and_facts(buffer: Any, rows: list[int], seed: int, known: Any) -> tuple[Any, Any]:
    """Return the buffer's part of a batch, and its facts unless they are ``known``."""
    facts, source = member_facts(buffer), BufferSource(buffer)
    pieces = source.draw_counts(rows, torch.Generator().manual_seed(seed)).pieces(None)
    return pieces, None if facts == known else facts


def readiness(buffer: Any, rows: int) -> Any:
    """Return the number of rows, and whether the buffer can return ``rows`` now."""
    check_hosted(buffer)
    return BufferSource(buffer).ask(rows).result()


def check_rows(buffer: Any, index: torch.Tensor) -> None:
    """Raise IndexError if any of these rows is not stored."""
    BufferSource(buffer).check_stored(index).result()


class Host:
    """The object in an actor, which holds one buffer or shard and answers messages.

    The messages have the format of `protocol`. The constructor makes the buffer. Ray also calls
    the constructor when it restarts the actor. If making the buffer fails, the first call raises
    the error, so that the caller gets an error of the same type.

    Args:
        cls: class of the buffer, or `ShardHolder`.
        arguments: keyword arguments for the class.
        devices: whether tensors may be put on the devices on which the caller had them.
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

    @_answering
    def ready(self) -> Message:
        """Return whether the buffer has a rate limiter.

        The call returns after the buffer is made. If the constructor of the buffer failed, its
        error is raised.
        """
        if self._failure is not None:
            raise self._failure
        return pack(getattr(self._buffer, "_rate_limiter", None) is not None)

    @_answering
    def ask(self, name: str, args: Message) -> Message:
        """Return the result of a method of the held object, as `RayShard` requests it."""
        if self._failure is not None:
            raise self._failure
        return pack(getattr(self._buffer, name)(*unpack(args, own=True)))

    # These methods have no arguments, since a first argument takes a tenth of the time of a call.

    @_answering
    def sample(self) -> Message:
        """Return a batch with the buffer's batch size."""
        return pack(self._buffer.sample())

    @_answering
    def sample_1(self) -> Message:
        """Return a batch that the caller requests ahead."""
        check_ahead(self._buffer)
        return pack(self._buffer.sample())

    sample_2 = _each(2, sample_1)
    sample_4 = _each(4, sample_1)

    @_answering
    def call(
        self, name: str | Message, args: list[Message], keywords: dict[str, Message]
    ) -> Message:
        """Return the result of a method of the buffer, or of a packed function of the buffer.

        If the result is the buffer itself, return ``ITSELF``. Calls in other threads than the
        usual one may wait for other calls.
        """
        own = name not in _COPIED_AT_ONCE or not self._copies()
        positional = [unpack(arg, own=own, devices=self._devices) for arg in args]
        named = {
            key: unpack(value, own=own, devices=self._devices) for key, value in keywords.items()
        }
        if isinstance(name, str):
            method = getattr(self._buffer, name)
        else:
            method = functools.partial(unpack(name, own=True, devices=self._devices), self._buffer)
        result = method(*positional, **named)
        return pack(ITSELF if result is self._buffer else result)

    @_answering
    def step(self, client: str, number: int, ahead: bool = False) -> Message:
        """Return the next batch of the buffer's iteration, or None at the end of a pass.

        Args:
            client: name of the client.
            number: count of passes whose end the client has received. A request that the client
                sent before it received the end of a pass has a lower number. Such a request draws
                nothing from the next pass.
            ahead: whether the batch is requested ahead.
        """
        if self._passes.get(client, 0) > number:
            return pack(None)
        if ahead:
            check_ahead(self._buffer)
        return pack(self._next_of(client, number))

    step_2 = _each(2, step)
    step_4 = _each(4, step)

    def _next_of(self, client: str, number: int) -> Any:
        batch = self._buffer.next()
        if batch is None:
            self._passes.pop(client, None)
            self._passes[client] = number + 1  # this entry is now the newest
            if len(self._passes) > _MOST_PASSES:
                del self._passes[next(iter(self._passes))]
        return batch

    @_answering
    def write(self, counts: list[int], rows: Message) -> Message:
        """Write the rows of several calls in their order.

        Args:
            counts: for each call, the number of rows if it was ``extend``, or 0 if it was ``add``.
            rows: the rows of all calls, one after the other.

        Returns:
            For each call, a pair: whether the call succeeded, and its result or error.
        """
        data = unpack(rows, devices=self._devices)
        return pack(self._outcomes(counts, data))

    def _outcomes(self, counts: list[int], data: Any) -> list[tuple[bool, Any]]:
        try:
            index = self._together(data) if len(counts) > 1 else None
        except Exception as error:  # it is unknown which rows are stored
            return [(False, _travelling(error))] * len(counts)
        outcomes: list[tuple[bool, Any]] = []
        start = 0
        for count in counts:
            rows = slice(start, start + count) if count else start
            start += max(count, 1)
            try:
                if index is not None:
                    outcomes.append((True, index[rows] if count else int(index[rows])))
                else:
                    write = self._buffer.extend if count else self._buffer.add
                    outcomes.append((True, write(self._own(data[rows]))))
            except Exception as error:
                outcomes.append((False, _travelling(error)))
        return outcomes

    def _together(self, data: Any) -> torch.Tensor | None:
        """Make all calls as one write; return the index.

        The result is None if a common write might behave differently from single calls, or if it
        was refused. A refused write has changed nothing. The caller then makes single calls to find
        the call that is refused. The common write does not wait for a rate limiter. The limiter
        might never admit so many rows at once, although it admits each single call.
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
            index: torch.Tensor = buffer.extend(data, timeout=0)
        except _REFUSALS:
            return None
        return index

    def _copies(self) -> bool:
        """Return whether the storage copies rows.

        A list storage stores the objects themselves.
        """
        buffer = self._buffer
        return getattr(buffer, "initialized", False) and isinstance(buffer.storage, TensorStorage)

    def _own(self, rows: Any) -> Any:
        """Return rows that the storage may keep, copied if necessary."""
        return rows if self._copies() else rows.clone()
