"""A handle of a buffer in an actor, for whoever writes or samples."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal, overload

from replaykit.buffer.generic import DataT
from replaykit.errors import RateLimiterTimeout
from replaykit.keywords import named_after
from replaykit.pace import checked_timeout
from replaykit.remote.ahead import Ahead
from replaykit.remote.forwarding import _RESTARTING
from replaykit.remote.host import TOGETHER
from replaykit.remote.loading import Loaded
from replaykit.remote.outbox import Outbox
from replaykit.remote.packing import Message
from replaykit.remote.replies import RemoteResult, Reply, fetch

__all__ = ["RayReplayBufferClient"]


@named_after
class RayReplayBufferClient(Loaded[DataT]):
    """A buffer in a Ray actor, to be used like the buffer itself: the same methods, arguments,
    results and errors.

    Made by ``RayReplayBuffer.client()``. It can be pickled and handed to other actors and tasks,
    which then have one of their own, with nothing under way. Collecting it does not end the actor.

    Calls of one handle reach the buffer in the order in which they were made, the asynchronous ones
    too. What comes back is a copy: batches belong to the caller, as always, and so do components
    such as ``sampler``, whose changes stay here.

    Tensors of a large batch on the node of the actor are copied once, into Ray's store, and lie
    there as long as one of them lives; small ones come with the answer. Tensors on accelerators go
    as CPU tensors unless the actor has a GPU. Gradients do not travel.

    Raises:
        ActorLost: the actor has ended (a RuntimeError). ValueError: with ``prefetch``, a sampler
            that uses rows up, in the constructor and at every sample. Otherwise what the buffer
            raises, with the traceback of the actor as the cause.

    Cost: one round trip for a call that waits; with ``prefetch`` and ``write_rows`` a part of it.

    Example:
        >>> from replaykit import RayReplayBufferClient
        >>> def collect(handle: RayReplayBufferClient, rows):  # in an actor or task of Ray
        ...     for row in rows:
        ...         handle.add(row)  # small writes go together, with client(write_rows=64)
        ...     handle.flush()
    """

    def __init__(
        self,
        actor: Any,
        cls: type,
        *,
        devices: bool = False,
        paced: bool = False,
        prefetch: int = 0,
        write_rows: int = 0,
        write_seconds: float = 0.05,
        checked: bool = False,
    ) -> None:
        super().__init__(actor, cls, devices=devices, paced=paced)
        self._depth = checked_count("prefetch", prefetch)
        self._write_rows = checked_count("write_rows", write_rows)
        if not (isinstance(write_seconds, (int, float)) and write_seconds > 0):
            raise ValueError(f"expected write_seconds above 0, got {write_seconds!r}")
        self._write_seconds = write_seconds
        self._outbox = Outbox(
            self._write, self._write_alone, self._write_rows, write_seconds, actor
        )
        late = RateLimiterTimeout if paced else TimeoutError
        self._samples: Ahead | None = None
        # Where a batch may have to wait for a rate limiter it keeps no other one back.
        fitting = (count for count in TOGETHER if not paced and 2 * count <= self._depth)
        self._together = next(fitting, 1)
        if self._depth:
            self._samples = Ahead(
                self._request_ahead, self._depth, late, any_order=paced, together=self._together
            )
        self._name = uuid.uuid4().hex
        self._passing = threading.Lock()
        self._begin_pass(0)
        if self._depth and not checked:
            fetch(self._method("check_ahead", None).remote())

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(
            RayReplayBufferClient,
            devices=self._devices,
            paced=self._paced,
            prefetch=self._depth,
            write_rows=self._write_rows,
            write_seconds=self._write_seconds,
            checked=True,  # nothing is asked of an actor that may be who unpickles
        )
        return make, (self._live(), self._cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._cls.__name__})"

    def _before(self, name: str) -> None:
        self._outbox.send()
        if name in _RESTARTING:
            self._drop_ahead()

    def _drop_ahead(self) -> None:
        if self._samples is not None:
            self._samples.drop()
        self._steps.drop()

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any, **keywords: Any) -> Any:
        """Stores one row and returns its position; as ``add_async`` with ``write_rows``.

        Args and errors: as ``ReplayBuffer.add``.
        """
        if self._write_rows > 1 and not keywords:
            return self._outbox.put("add", data, keywords)
        return self._invoke("add", (data,), keywords)

    def extend(self, data: Any, **keywords: Any) -> Any:
        """Stores a batch and returns where; as ``extend_async`` with ``write_rows``.

        Args and errors: as ``ReplayBuffer.extend``.
        """
        if self._write_rows > 1 and not keywords:
            return self._outbox.put("extend", data, keywords)
        return self._invoke("extend", (data,), keywords)

    def add_async(self, data: Any, **keywords: Any) -> RemoteResult:
        """Sends one row to be stored, and does not wait.

        Returns:
            What ``add`` will return, or raise. Errors whose result nobody asks for are raised by
            the next write, by ``flush`` or ``close``.
        """
        return self._outbox.put("add", data, keywords)

    def extend_async(self, data: Any, **keywords: Any) -> RemoteResult:
        """Sends a batch to be stored, and does not wait; as ``add_async``.

        Waits where more than 16 messages are unanswered, until the oldest has been.
        """
        return self._outbox.put("extend", data, keywords)

    def flush(self) -> Any:
        """Waits until all that this handle has written is stored, also what transforms hold back.

        Returns:
            As ``ReplayBuffer.flush``.

        Raises:
            Exception: what a write has raised whose result nobody has asked for.
        """
        self._outbox.settle()
        return self._invoke("flush", (), {})

    def _write(self, counts: list[int], rows: Message) -> Any:
        return self._method("write", "writing").remote(counts, rows)

    def _write_alone(self, name: str, data: Any, keywords: Mapping[str, Any]) -> Any:
        return self._submit(name, (data,), keywords)

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        return self._invoke("__getitem__", (index,), {})

    # -- sampling -----------------------------------------------------------------------------

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
    ) -> tuple[DataT, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None,
        return_info: Literal[True],
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[DataT, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT | tuple[DataT, dict[Any, Any]]: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        **keywords: Any,
    ) -> Any:
        """Draws a batch; as ``ReplayBuffer.sample``.

        With ``prefetch`` it is the oldest of those under way, drawn up to that many calls ago, and
        with a rate limiter the oldest that has come; a call with a batch size or ``return_info`` is
        served directly.

        Raises:
            RateLimiterTimeout: as ``ReplayBuffer.sample``; with ``prefetch`` where none of those
                under way has come by then, for whatever reason. What is late comes with a later
                call. Without a rate limiter that is a TimeoutError.
        """
        timeout = checked_timeout(keywords.get("timeout"))
        if _is_plain(batch_size, return_info, include_info, keywords):
            if self._samples is not None:
                self._outbox.send()
                return self._samples.next(timeout)
            if timeout is None:
                self._outbox.send()
                return self._request_sample().get()
        return self._invoke("sample", (batch_size, return_info, include_info), keywords)

    def sample_async(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        **keywords: Any,
    ) -> RemoteResult:
        """Asks for a batch and does not wait: the result is awaited, or asked for.

        With ``prefetch`` it is one of those under way, as for ``sample``.

        Example::

            first, second = rb.sample_async(), rb.sample_async()
            batch = first.result()   # or: await first
        """
        self._outbox.send()
        if _is_plain(batch_size, return_info, include_info, keywords) and not keywords:
            if self._samples is not None:
                return RemoteResult(self._samples.take())
            return RemoteResult(self._request_sample())
        args = (batch_size, return_info, include_info)
        return RemoteResult(Reply(self._submit("sample", args, keywords)))

    def _request_sample(self) -> Reply:
        return Reply(self._method("sample", "sampling").remote())

    def _request_ahead(self, count: int) -> list[Reply]:
        return _replies(self._method(f"sample_{count}", "sampling", count).remote(), count)

    def __iter__(self) -> Iterator[DataT]:
        """Yields batches until the sampler has run out, by ``next``.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        if self.batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during "
                "construction; give the buffer a batch_size"
            )
        return iter(self.next, None)

    def next(self) -> DataT | None:
        """Returns the next batch of the buffer's own iteration, which all handles share; None at
        its end, then starts over. With ``prefetch`` further ones of the same pass are under way."""
        self._outbox.send()
        steps = self._steps
        batch = steps.next()
        if batch is None:
            with self._passing:
                if steps is self._steps:  # of several threads at the end the first
                    self._begin_pass(self._pass + 1)
        return batch

    def _begin_pass(self, number: int) -> None:
        self._pass = number
        self._steps = Ahead(
            lambda count: self._request_steps(number, count), self._depth, together=self._together
        )

    def _request_steps(self, number: int, count: int) -> list[Reply]:
        method = self._method("step" if count == 1 else f"step_{count}", "stepping", count)
        return _replies(method.remote(self._name, number, self._depth > 0), count)


def _replies(refs: Any, count: int) -> list[Reply]:
    """The answers to a message, of which Ray returns one reference or several."""
    return [Reply(refs)] if count == 1 else [Reply(ref) for ref in refs]


def _is_plain(
    batch_size: int | None,
    return_info: bool,
    include_info: bool | None,
    keywords: Mapping[str, Any],
) -> bool:
    """Whether a batch is asked for as all others are."""
    return (
        batch_size is None
        and not return_info
        and include_info is None
        and (not keywords or keywords.keys() == {"timeout"})
    )


def checked_count(name: str, value: Any) -> int:
    """Returns a number of things; None is none.

    Raises:
        ValueError: not an int of at least 0.
    """
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ValueError(f"expected {name} as an int of at least 0, got {value!r}")
    return value
