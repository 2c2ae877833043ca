"""Read replies of actors, and keep requests for batches under way."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from replaykit._ray import ray_module
from replaykit.distributed.protocol import Message, ShardSilent, unpack
from replaykit.errors import ActorLost, RateLimiterTimeout
from replaykit.interrupts import acquire, allowed, deferred
from replaykit.pace import checked_timeout

_MOST_ERRORS = 5
"""Maximum number of different errors that an error text lists."""


@dataclass(frozen=True)
class Failed:
    """An error in place of a value, with its traceback in the actor."""

    error: Exception
    text: str


class _InActor(Exception):
    """The cause of a local error, with the traceback in the actor."""


def fetch(ref: Any, timeout: float | None = None) -> Any:
    """Return the value of an object reference.

    Raises:
        ActorLost: the actor or Ray has ended.
        TimeoutError: no value is available within ``timeout`` seconds.
        Exception: the error of the call in the actor. The ``__cause__`` of the error has the
            traceback in the actor.
    """
    ray = running_ray()
    try:
        with allowed:
            return ray.get(ref, timeout=timeout)
    except Exception as error:
        local = local_error(error)
        if local is error:
            raise
        raise local from error


def running_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ActorLost: Ray is no longer running. Without this error, the call would start Ray again,
            without the old actors.
    """
    ray = ray_module()
    if not ray.is_initialized():
        raise ActorLost("Ray is not running any more, and the actor of this buffer has ended")
    return ray


def local_error(error: Exception) -> Exception:
    """Return the error that a local call would raise for an error of Ray; any other error as is."""
    exceptions = ray_module().exceptions
    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, exceptions.RayTaskError):
            return cause
    if isinstance(error, (exceptions.RayActorError, exceptions.ObjectLostError)):
        return ActorLost(f"the actor of this buffer has ended: {error}")
    return error


class Reply:
    """The answer to a message, or to the messages of one call.

    The answer is read only once. Several threads may wait for it concurrently, each with a separate
    timeout. ``_lock`` guards the answer. Subclasses make the answer from several messages.

    Args:
        ref: the object reference, or None if the message has not been sent yet.
        send: function that sends the message and sets ``ref``.

    Attributes:
        small: whether the answer was small enough to be sealed.
    """

    def __init__(self, ref: Any = None, send: Callable[[], None] | None = None) -> None:
        self.ref = ref
        self._send = send
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None
        self._known = self.small = False

    @property
    def known(self) -> bool:
        """Return whether the answer has been read."""
        return self._known

    @property
    def error(self) -> BaseException | None:
        """The error that ``get`` raises, or None if none is known."""
        return self._error

    @classmethod
    def done(cls, value: Any = None, error: Exception | None = None) -> Self:
        """Return an answer that is known already."""
        self = cls()
        self._value, self._error, self._known = value, error, True
        return self

    def sent(self) -> Any:
        """Send the message if necessary; return the object reference."""
        if self.ref is None and self._send is not None:
            self._send()
        return self.ref

    def get(self, timeout: float | None = None) -> Any:
        """Return the value.

        Raises:
            TimeoutError: the answer has not arrived within ``timeout`` seconds.
            The errors of `fetch` are raised as well.
        """
        if not self.known:
            ref = self.sent()
            try:
                message = fetch(ref, timeout)
            except ray_module().exceptions.GetTimeoutError:
                raise TimeoutError(f"no answer within {timeout:g} seconds") from None
            except Exception as error:
                self.store(None, error)
            else:
                self.store(message, None)
        return self._found()

    def store(self, message: Message | bytes | None, error: Exception | None) -> None:
        """Store the answer, or the error of sending or receiving; the first one counts."""
        with self._lock:
            if self._known:
                return
            if message is not None:
                self.small = type(message) is bytes
                try:
                    self._value = unpack_reply(message)
                except Exception as unreadable:
                    error = unreadable
            self._error, self._known = error, True

    def _found(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    async def wait(self) -> Any:
        """Return the value to a coroutine; raise the errors of `fetch`."""
        if not self.known:
            ref = self.sent()
            try:
                message = await ref
            except Exception as error:
                self.store(None, local_error(error))
            else:
                self.store(message, None)
        return self._found()

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait."""
        if self.known:
            return True
        ready, _ = running_ray().wait([self.sent()], timeout=0, fetch_local=False)
        return bool(ready)


class JointReply(Reply, ABC):
    """An answer that is made from the answers to several messages.

    One thread makes the answer, and other threads wait for it. After an answer that is late, the
    next ``get`` continues. Any other error is the answer, even a TimeoutError of a shard.
    """

    @abstractmethod
    def _make(self, timeout: float | None) -> Any:
        """Wait for the answers to the messages; return the joint answer."""

    def get(self, timeout: float | None = None) -> Any:
        return self._settled(lambda: self._make(timeout), timeout)

    def _settled(self, make: Callable[[], Any], timeout: float | None) -> Any:
        with deferred:
            if not acquire(self._lock, timeout):
                raise TimeoutError(f"no answer within {timeout:g} seconds")
            try:
                if not self._known:
                    try:
                        self._value = make()
                    except (ShardSilent, RateLimiterTimeout):
                        raise
                    except Exception as error:
                        self._error = error
                    self._known = True
            finally:
                self._lock.release()
        return self._found()

    async def wait(self) -> Any:
        return await asyncio.to_thread(self.get)


class RemoteResult:
    """The future result of a call.

    Get the result with ``result()`` or ``await``.

    Example:
        >>> from replaykit import RayReplayBufferClient
        >>> def learn(handle: RayReplayBufferClient, update):
        ...     ahead = handle.sample_async()
        ...     for _ in range(100):
        ...         batch, ahead = ahead.result(), handle.sample_async()
        ...         update(batch)
    """

    def __init__(self, reply: Reply | Taken, pick: Callable[[Any], Any] | None = None) -> None:
        self._reply = reply
        self._pick = pick
        self._found: list[Any] = []

    @property
    def ref(self) -> Any:
        """Ray's object reference, for example for ``ray.wait``.

        The object is encoded; ``result`` returns its value. With ``prefetch``, the reference
        belongs to one request, but ``result`` may return the batch of another request. A call of a
        sharded buffer sends several messages, so it has no reference.
        """
        ref = self._reply.sent()
        if ref is None:
            raise TypeError("expected the result of a call with one message, got one of several")
        return ref

    def done(self) -> bool:
        """Return whether ``result`` would not wait."""
        return self._reply.is_ready()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the call.

        Raises:
            ValueError: the timeout is negative or NaN.
            TimeoutError: no result is available within ``timeout`` seconds.
            Errors of the call itself are raised as well.
        """
        return self._picked(self._reply.get(checked_timeout(timeout)))

    def __await__(self) -> Generator[Any, None, Any]:
        value = yield from self._reply.wait().__await__()
        return self._picked(value)

    def _picked(self, value: Any) -> Any:
        if self._pick is None:
            return value
        if not self._found:
            self._found.append(self._pick(value))
        return self._found[0]


ShardedResult = RemoteResult
"""The name of `RemoteResult` in releases before both were one class."""


def unpack_reply(message: Message | bytes) -> Any:
    """Return the value of an answer, or raise its error."""
    value = unpack(message, devices=True)
    if type(value) is Failed:
        raise value.error from _InActor(value.text)
    return value


def joined_texts(errors: Sequence[Exception]) -> str:
    """Return the joined texts of errors; equal texts appear once, with a count."""
    counts = Counter(f"{type(error).__name__}: {error}" for error in errors)
    texts = [text if count == 1 else f"{text} ({count} times)" for text, count in counts.items()]
    more = len(texts) - _MOST_ERRORS
    return "; ".join(texts[:_MOST_ERRORS]) + (f"; and {more} others" if more > 0 else "")


def one_of(errors: Sequence[Exception]) -> Exception:
    """Return an error with the type of the first error and the texts of all."""
    first = errors[0]
    if len(errors) == 1:
        return first
    text = f"{first}; {len(errors) - 1} more writes have failed: {joined_texts(errors[1:])}"
    try:
        found = type(first)(text)
    except Exception:  # this type cannot be made from a text
        found = RuntimeError(f"{type(first).__name__}: {text}")
    found.__cause__ = first
    return found


_Entry = tuple[int, Reply]
"""A request, as its number and its reply."""


class RequestQueue:
    """A queue of requests under way, which returns their answers.

    ``_lock`` guards the queue. No thread holds it while it waits for an answer.

    Args:
        request: function that sends a message to request the given number of batches. It returns a
            reply for each batch.
        depth: maximum number of requests under way. With 0, a request is sent only when a caller
            needs a batch.
        late: the error type for an answer that has not arrived in time; None for that of the reply.
        together: number of batches that one message requests after batches have proved small. Up to
            ``together - 1`` fewer requests are then under way. A caller never waits for a batch
            that was not requested yet.
    """

    def __init__(
        self,
        request: Callable[[int], Sequence[Reply]],
        depth: int,
        late: type[TimeoutError] | None = None,
        *,
        together: int = 1,
    ) -> None:
        self._request, self.depth, self._late = request, depth, late
        self._together = together
        self._are_small = False
        self._lock = threading.Lock()
        self._queue: list[_Entry] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._queue)

    def take(self) -> Taken:
        """Take the oldest request, and send more requests."""
        with self._lock:
            before = self._made
            for _, reply in self._queue:  # possibly they could not be sent before
                reply.sent()
            return Taken(self, self._oldest(), before)

    def _oldest(self) -> _Entry:
        together = self._together if self._are_small else 1
        room = self.depth + 1 - len(self._queue)
        if room >= together or not self._queue:
            while room > 0:
                replies = self._request(together if room >= together else 1)
                self._queue += enumerate(replies, self._made)
                self._made += len(replies)
                room -= len(replies)
        return self._queue.pop(0)

    def observe(self, reply: Reply) -> None:
        """Record whether batches are small."""
        self._are_small = reply.small

    def next(self, timeout: float | None = None) -> Any:
        """Return the next batch; see `Taken` for the treatment of failed requests.

        Raises:
            TimeoutError: no batch has arrived within ``timeout`` seconds. The request stays under
                way.
            Exception: the error of a request that was sent after the start of this call.
        """
        taken = self.take()
        try:
            return taken.get(timeout)
        except BaseException as error:
            if taken.entry[1].error is None:  # its answer has not been read
                with self._lock:
                    insort(self._queue, taken.entry)
                if isinstance(error, TimeoutError) and self._late is not None:
                    raise self._late(
                        f"a prefetched batch has not arrived within {timeout or 0:g} s: the actor "
                        "has not answered yet"
                    ) from None
            raise

    def pass_over(self, taken: Taken, failed: _Entry) -> None:
        """Replace a failed request by the oldest request under way."""
        with self._lock:
            if taken.entry is failed:
                taken.entry = self._oldest()

    def under_way(self) -> list[Any]:
        """Return the requests under way, the oldest first."""
        with self._lock:
            return [reply for _, reply in self._queue]

    def drop(self) -> list[Any]:
        """Drop all requests under way; return them, the oldest first."""
        with self._lock:
            dropped, self._queue = self._queue, []
            return [reply for _, reply in dropped]


class Taken:
    """The answer to a request sent in advance, with the methods of a `Reply`.

    A request may fail because it was sent too early. A failed request is replaced by the next
    request, and finally by a request that is sent after the take. Only the error of that final
    request is raised. So all drawn batches are returned, even if other requests failed.

    Attributes:
        entry: the request that currently provides the answer.
    """

    def __init__(self, ahead: RequestQueue, entry: _Entry, before: int) -> None:
        self._ahead, self._before = ahead, before
        self.entry = entry

    def sent(self) -> Any:
        """Return the object reference of the current request."""
        return self.entry[1].sent()

    def get(self, timeout: float | None = None) -> Any:
        """Return the batch; raise TimeoutError if it does not arrive in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            entry = self.entry
            try:
                batch = entry[1].get(left_of(until))
                self._ahead.observe(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    async def wait(self) -> Any:
        """Return the batch to a coroutine."""
        while True:
            entry = self.entry
            try:
                batch = await entry[1].wait()
                self._ahead.observe(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait."""
        while True:
            entry = self.entry
            if not entry[1].is_ready():
                return False
            try:
                entry[1].get()
            except Exception:
                if self._passed_over(entry):
                    continue
            return True

    def _passed_over(self, entry: _Entry) -> bool:
        """Replace a request that failed and was sent before the take.

        Returns:
            Whether the request was replaced.
        """
        number, reply = entry
        if reply.error is None or number >= self._before:
            return False
        self._ahead.pass_over(self, entry)
        return True


def left_of(until: float | None) -> float | None:
    """Return the seconds until a time of ``time.monotonic()``, or None without a limit."""
    return None if until is None else max(0.0, until - time.monotonic())
