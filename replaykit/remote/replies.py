"""What an actor answers, read once, with the errors that a local buffer would raise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replaykit._ray import ray_module
from replaykit.errors import ActorLost
from replaykit.remote.packing import Message, unpack

__all__ = [
    "Failed",
    "RemoteResult",
    "Reply",
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
