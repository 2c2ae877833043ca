"""Request batches from an actor ahead of time, and read its replies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import warnings
from bisect import insort
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replaykit._ray import ray_module
from replaykit.errors import ActorLost
from replaykit.remote.wire_format import Message, unpack

__all__ = [
    "Failed",
    "RemoteResult",
    "Reply",
    "RequestQueue",
    "Taken",
    "fetch",
    "first_come",
    "one_of",
    "raise_as_local",
    "running_ray",
    "told",
    "until_one_comes",
]

_HERE = os.path.dirname(__file__)
_MOST_TOLD = 5
"""Different errors that are told one by one."""


@dataclass(frozen=True)
class Failed:
    """An error in the place of one of several values, and its traceback in the actor."""

    error: Exception
    text: str


class _InActor(Exception):
    """The traceback of an error, as the cause of what is raised here."""


def fetch(ref: Any, timeout: float | None = None) -> Any:
    """Returns what an object reference stands for.

    Raises:
        ActorLost: the actor has ended, or Ray. TimeoutError: not within that many seconds.
            Otherwise what the call has raised in the actor, whose traceback is the cause.
    """
    ray = running_ray()
    try:
        return ray.get(ref, timeout=timeout)
    except Exception as error:
        raise_as_local(error)
        raise


def running_ray() -> Any:
    """Returns ray.

    Raises:
        ActorLost: it is not running any more; asked for anything it would start again, without the
            actors that there were.
    """
    ray = ray_module()
    if not ray.is_initialized():
        raise ActorLost("Ray is not running any more, and the actor of this buffer has ended")
    return ray


def raise_as_local(error: BaseException) -> None:
    """Raises what a local call would have raised in the place of an error of Ray's; returns where
    it is none."""
    exceptions = ray_module().exceptions
    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, exceptions.RayTaskError) or not isinstance(cause, BaseException):
            return
        raise cause from error
    if isinstance(error, exceptions.RayActorError):
        raise ActorLost(f"the actor of this buffer has ended: {error}") from error


class Reply:
    """The answer to one message, which is read once however often it is asked for.

    Several may wait for it at a time, each as long as it likes: ``_lock`` guards what is known.

    Args:
        ref: the object reference; None where the message has not been sent yet.
        send: sends it, after which ``ref`` is set.

    Attributes:
        known: whether the answer has been read.
        error: what ``get`` has found to raise.
        small: whether what has come was sealed.
    """

    def __init__(self, ref: Any = None, send: Callable[[], None] | None = None) -> None:
        self.ref = ref
        self._send = send
        self._lock = threading.Lock()
        self._value: Any = None
        self.error: Exception | None = None
        self.known = False
        self.small = False

    def sent(self) -> Any:
        """Returns the object reference, once the message is on its way."""
        if self.ref is None and self._send is not None:
            self._send()
        return self.ref

    def get(self, timeout: float | None = None) -> Any:
        """Returns the value; raises what `fetch` raises."""
        if not self.known:
            ref = self.sent()
            try:
                message = fetch(ref, timeout)
            except ray_module().exceptions.GetTimeoutError:
                raise TimeoutError(f"no answer within {timeout:g} seconds") from None
            except Exception as error:
                self._take(None, error)
            else:
                self._take(message, None)
        return self._found()

    def _take(self, message: Message | bytes | None, error: Exception | None) -> None:
        """Notes what has come, which whoever comes first does; others may wait for it meanwhile."""
        with self._lock:
            if self.known:
                return
            if message is not None:
                self.small = type(message) is bytes
                try:
                    self._value = unpack_reply(message)
                except Exception as unreadable:
                    error = unreadable
            self.error, self.known = error, True

    def _found(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._value

    async def wait(self) -> Any:
        """Returns the value to a coroutine; raises what `fetch` raises."""
        if not self.known:
            ref = self.sent()
            try:
                message = await ref
            except Exception as error:
                try:
                    raise_as_local(error)
                except Exception as local:
                    error = local
                self._take(None, error)
            else:
                self._take(message, None)
        return self._found()

    def fail(self, error: Exception) -> None:
        """Has ``get`` raise this: the message could not be sent."""
        self._take(None, error)

    def is_ready(self) -> bool:
        """Whether ``get`` would not wait."""
        if self.known:
            return True
        ready, _ = running_ray().wait([self.sent()], timeout=0, fetch_local=False)
        return bool(ready)


def first_come(replies: Sequence[Reply], timeout: float | None) -> Reply | None:
    """Returns the first of several that has come; None: none has, within that many seconds."""
    for reply in replies:
        if reply.known:
            return reply
    refs = [reply.sent() for reply in replies]
    ready, _ = running_ray().wait(refs, num_returns=1, timeout=timeout)
    return replies[refs.index(ready[0])] if ready else None


async def until_one_comes(replies: Sequence[Reply]) -> None:
    """Waits, in a coroutine, until one of several has come."""
    if any(reply.known for reply in replies):
        return
    loop = asyncio.get_running_loop()
    there: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not there.done():
            there.set_result(None)

    def come(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell)

    for reply in replies:
        reply.sent().future().add_done_callback(come)
    await there


class Answer(Protocol):
    """What a `RemoteResult` is told by: a `Reply`, or one of several."""

    def sent(self) -> Any: ...

    def get(self, timeout: float | None = None) -> Any: ...

    async def wait(self) -> Any: ...

    def is_ready(self) -> bool: ...


class RemoteResult:
    """What a call will return: wait for it with ``result()``, or with ``await``.

    Example:
        >>> from replaykit import RayReplayBufferClient
        >>> def learn(handle: RayReplayBufferClient, update):
        ...     ahead = handle.sample_async()
        ...     for _ in range(100):
        ...         batch, ahead = ahead.result(), handle.sample_async()
        ...         update(batch)
    """

    def __init__(self, reply: Answer, pick: Callable[[Any], Any] | None = None) -> None:
        self._reply = reply
        self._pick = pick

    @property
    def ref(self) -> Any:
        """Ray's object reference, to be given to ``ray.wait`` with others.

        What it holds is packed: the value comes from ``result``. With ``prefetch`` it is that of
        the request that is waited for, in whose place ``result`` may take another one.
        """
        return self._reply.sent()

    def done(self) -> bool:
        """Whether ``result`` would not wait."""
        return self._reply.is_ready()

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Raises:
            TimeoutError: it has not, within that many seconds. Otherwise whatever it raised.
        """
        return self._picked(self._reply.get(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        value = yield from self._reply.wait().__await__()
        return self._picked(value)

    def _picked(self, value: Any) -> Any:
        return value if self._pick is None else self._pick(value)


def unpack_reply(message: Message | bytes) -> Any:
    """Returns the value of an answer, after what the call had to warn of; raises its error."""
    if type(message) is not bytes:
        told = message[-1]
        if type(told) is dict:
            message = message[:-1]
            for packed in told["warnings"]:
                warnings.warn(unpack(packed), stacklevel=_depth())
    value = unpack(message, devices=True)
    if type(value) is Failed:
        raise value.error from _InActor(value.text)
    return value


def _depth() -> int:
    """How many calls above the caller of this somebody else than this package's part asked."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame, depth = frame.f_back, depth + 1
    return depth


def told(errors: Sequence[Exception]) -> str:
    """Says what errors there are; those that say the same as one."""
    counts = Counter(f"{type(error).__name__}: {error}" for error in errors)
    texts = [text if count == 1 else f"{text} ({count} times)" for text, count in counts.items()]
    more = len(texts) - _MOST_TOLD
    return "; ".join(texts[:_MOST_TOLD]) + (f"; and {more} others" if more > 0 else "")


def one_of(errors: Sequence[Exception]) -> Exception:
    """Returns an error of the kind of the first that names all of them."""
    first = errors[0]
    if len(errors) == 1:
        return first
    text = f"{first}; {len(errors) - 1} more writes have failed: {told(errors[1:])}"
    try:
        found = type(first)(text)
    except Exception:  # made of something else than a text
        found = RuntimeError(f"{type(first).__name__}: {text}")
    found.__cause__ = first
    return found


_Entry = tuple[int, Reply]
"""A request: the how manyth it is, and its answer."""


class RequestQueue:
    """Keeps up to ``depth`` requests under way, and hands out their answers.

    ``_lock`` guards the queue; nobody waits for an answer with it.

    Args:
        request: sends a message that asks for so many batches, and returns the reply of each.
        depth: how many are under way at most; 0: each is asked for when it is needed.
        late: what to raise where an answer has not come in time.
        any_order: hand out whatever has come, the oldest first. Requests that wait in the actor for
            a rate limiter go on in no order there: who would wait for the oldest might wait for
            rows that only come once the batch that is here has been used.
        together: how many are asked for by one message, once batches are known to be small. Then
            that many fewer may be under way, but one: what is waited for has been sent before.
    """

    def __init__(
        self,
        request: Callable[[int], list[Reply]],
        depth: int,
        late: type[TimeoutError] = TimeoutError,
        *,
        any_order: bool = False,
        together: int = 1,
    ) -> None:
        self._request, self._depth, self._late = request, depth, late
        self.any_order = any_order
        self._together = together
        self._are_small = False
        self._lock = threading.Lock()
        self._queue: list[_Entry] = []
        self._made = 0

    def take(self) -> Taken:
        """Takes the oldest request, and sends further ones."""
        with self._lock:
            before = self._made
            return Taken(self, self._oldest(), before)

    def _oldest(self) -> _Entry:
        together = self._together if self._are_small else 1
        room = self._depth + 1 - len(self._queue)
        if room >= together or not self._queue:
            while room > 0:
                replies = self._request(together if room >= together else 1)
                self._queue += enumerate(replies, self._made)
                self._made += len(replies)
                room -= len(replies)
        return self._queue.pop(0)

    def look(self, reply: Reply) -> None:
        """Takes note of what batches are like."""
        self._are_small = reply.small

    def next(self, timeout: float | None = None) -> Any:
        """Returns the next batch; see `Taken` for those that failed.

        Raises:
            TimeoutError: or ``late``: not within that many seconds; the request stays under way.
                Otherwise what `Reply.get` raises of a request that was made after this call.
        """
        taken = self.take()
        try:
            return taken.get(timeout)
        except BaseException as error:
            if taken.entry[1].error is None:  # nobody knows yet what it is
                with self._lock:
                    insort(self._queue, taken.entry)
                if isinstance(error, TimeoutError):
                    raise self._late(
                        f"a batch that was asked for ahead waited {timeout or 0:g} s: "
                        "the actor has not answered yet"
                    ) from None
            raise

    def pass_over(self, taken: Taken, failed: _Entry) -> None:
        """Gives the oldest of those under way in the place of one that has failed."""
        with self._lock:
            if taken.entry is failed:
                taken.entry = self._oldest()

    def exchange(self, taken: Taken, timeout: float | None) -> bool:
        """Gives one that has come in the place of one that has not; False: none has, in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if taken.entry[1].is_ready():
                return True
            found = first_come(self.choice(taken), _left(until))
            if found is None:
                return False
            with self._lock:
                for place, entry in enumerate(self._queue):
                    if entry[1] is found:
                        del self._queue[place]
                        insort(self._queue, taken.entry)
                        taken.entry = entry
                        return True

    def choice(self, taken: Taken) -> list[Reply]:
        """The answers that may be given to whoever has taken that one."""
        with self._lock:
            return [taken.entry[1], *(reply for _, reply in self._queue)]

    def drop(self) -> None:
        """Forgets what is under way."""
        with self._lock:
            self._queue.clear()


class Taken:
    """The answer to a request that was made ahead, to be asked like a `Reply`.

    One that failed may have been made too early: then it is the next one's answer, at last that of
    one that was made after this was taken, and the error of that one, which nobody else is told.
    What has been drawn is handed out, whatever else has failed.

    Attributes:
        entry: the request whose answer it is, as far as is known.
    """

    def __init__(self, ahead: RequestQueue, entry: _Entry, before: int) -> None:
        self._ahead, self._before = ahead, before
        self.entry = entry

    def sent(self) -> Any:
        """Returns the object reference of that request."""
        return self.entry[1].sent()

    def get(self, timeout: float | None = None) -> Any:
        """Returns the batch; TimeoutError: not within that many seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._ahead.any_order and not self._ahead.exchange(self, _left(until)):
                raise TimeoutError(f"no answer within {timeout or 0:g} seconds")
            entry = self.entry
            try:
                batch = entry[1].get(_left(until))
                self._ahead.look(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    async def wait(self) -> Any:
        """Returns the batch to a coroutine."""
        while True:
            if self._ahead.any_order:
                await until_one_comes(self._ahead.choice(self))
                if not self._ahead.exchange(self, 0.0):
                    continue  # somebody else has taken it
            entry = self.entry
            try:
                batch = await entry[1].wait()
                self._ahead.look(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    def is_ready(self) -> bool:
        """Whether ``get`` would not wait."""
        while True:
            if self._ahead.any_order:
                self._ahead.exchange(self, 0.0)
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
        """Whether it failed and was asked for before this was taken; then the next one counts."""
        number, reply = entry
        if reply.error is None or number >= self._before:
            return False
        self._ahead.pass_over(self, entry)
        return True


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
