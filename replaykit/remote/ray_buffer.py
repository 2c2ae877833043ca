"""Define `RayReplayBuffer` and the handles of its clients."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn, overload

from typing_extensions import Self

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG, start_ray
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.core import DataT
from replaykit.errors import ActorLost, RateLimiterTimeout
from replaykit.keywords import named_after
from replaykit.pace import checked_timeout
from replaykit.remote.calls import _RESTARTING, RemoteLoader
from replaykit.remote.host import TOGETHER, Host
from replaykit.remote.requests import RemoteResult, Reply, RequestQueue, fetch, one_of, running_ray
from replaykit.remote.wire_format import Message
from replaykit.remote.write_queue import WriteQueue, leave_all

__all__ = ["RayReplayBuffer", "RayReplayBufferClient"]


@named_after
class RayReplayBufferClient(RemoteLoader[DataT]):
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
        self._outbox = WriteQueue(
            self._write, self._write_alone, self._write_rows, write_seconds, actor
        )
        late = RateLimiterTimeout if paced else TimeoutError
        self._samples: RequestQueue | None = None
        # Where a batch may have to wait for a rate limiter it keeps no other one back.
        fitting = (count for count in TOGETHER if not paced and 2 * count <= self._depth)
        self._together = next(fitting, 1)
        if self._depth:
            self._samples = RequestQueue(
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
        self._steps = RequestQueue(
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


_SETTLING_SECONDS = 10.0
"""How long `close` waits for writes that a rate limiter holds up, since nobody may sample again."""

_ENDING_SECONDS = 10.0
"""How long `close` waits until the actor has gone."""

_STARTING_SECONDS = 60.0
"""After how long somebody looks whether the cluster has what an actor asks for at all."""

_WAITING_SAMPLERS = 64
"""Samples that may wait for rows at one time, where the buffer has a rate limiter."""


class RayReplayBuffer(RayReplayBufferClient[DataT]):
    """Starts a buffer in a Ray actor, and owns the actor.

    Has every method and property of the buffer, and those of `RayReplayBufferClient`; ``client()``
    gives handles to others. ``with RayReplayBuffer(...) as rb:`` closes it at the end.

    Args:
        replay_buffer_cls: class of the buffer; data sets and ensembles too.
        ray_init_config: options of ``ray.init``, which is called if Ray is not running yet. Ray
            then goes on running until the program ends, or ``ray.shutdown()``.
        remote_config: options of the actor, as for ``ray.remote``; one CPU and no GPU by default.
        delayed_init: have the buffer make its components at its first use.
        kwargs: arguments of the buffer. They are pickled: storage, sampler and writer best go as
            functions that make them, transforms as ``transform_factory``.

    Raises:
        RuntimeError: ray is not installed. ValueError: a class that makes a rate limiter itself.
            TimeoutError: the actor asks for more than the whole cluster has, which in a minute has
            not grown; one that only waits for others is waited for. Otherwise what the buffer's own
            constructor raises.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, RayReplayBuffer
        >>> def collect_and_learn():  # starts Ray where it is not running
        ...     with RayReplayBuffer(storage=lambda: LazyTensorStorage(1000), batch_size=32) as rb:
        ...         rb.extend(TensorDict({"x": torch.arange(100)}, [100]))
        ...         for_learners = rb.client(prefetch=4)
        ...         for_actors = rb.client(write_rows=64)
        ...         return for_learners.sample()
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: type = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        delayed_init: bool = False,
        **kwargs: Any,
    ) -> None:
        self._actor = None
        ray = start_ray(ray_init_config)
        options = dict(DEFAULT_REMOTE_CLASS_CONFIG if remote_config is None else remote_config)
        devices = bool(options.get("num_gpus"))
        paced = kwargs.get("rate_limiter") is not None
        if paced:
            # One thread for all writes keeps their order; samples wait beside each other.
            # So does one for iteration: the end of a pass is told after its last batch.
            groups = {"writing": 1, "stepping": 1, "sampling": _WAITING_SAMPLERS}
            options["concurrency_groups"] = {**groups, **options.get("concurrency_groups", {})}
        if delayed_init:
            kwargs["delayed_init"] = True
        host = ray.remote(**options)(Host) if options else ray.remote(Host)
        actor = host.remote(replay_buffer_cls, kwargs, devices=devices)
        try:
            if _ready(actor, options) and not paced:
                raise ValueError(
                    f"expected rate_limiter= of {type(self).__name__}, found a limiter that "
                    f"{replay_buffer_cls.__name__} makes itself: who waits would hold up all others"
                )
        except BaseException:
            _end(actor)
            raise
        super().__init__(actor, replay_buffer_cls, devices=devices, paced=paced)
        self._closing = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayReplayBuffer stays where it is; hand out its client()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(
        self, *, prefetch: int = 0, write_rows: int = 0, write_seconds: float = 0.05
    ) -> RayReplayBufferClient[DataT]:
        """Returns a handle that can be pickled, and does not end the actor.

        Args:
            prefetch: samples under way before they are asked for, at most: small ones go together,
                two at a time from 4 on, four from 8 on. Batches may predate later writes and
                priorities by at most that many. ``empty``, loads and exchanged components give up
                what the handle that calls them has under way; other handles are still given theirs,
                of the rows from before.
            write_rows: writes of fewer rows go together, up to this many; ``add`` and ``extend``
                then do not wait and return what ``add_async`` returns. Every call of the handle
                that is no write sends them first.
            write_seconds: how long a row may be kept at most.

        Raises:
            ValueError: a negative number, or ``prefetch`` with a sampler that uses rows up.
            RuntimeError: the buffer was closed.

        Cost: none; with ``prefetch`` one round trip.
        """
        return RayReplayBufferClient(
            self._live(),
            self._cls,
            devices=self._devices,
            paced=self._paced,
            prefetch=prefetch,
            write_rows=write_rows,
            write_seconds=write_seconds,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the actor is there: not closed, and not died."""
        actor = self._actor
        try:
            if actor is None:
                return False
            ray = running_ray()
            ref = actor.ready.remote()
            ready, _ = ray.wait([ref], timeout=1.0)
            if ready:
                fetch(ref)
        except ActorLost:
            return False
        return True  # or busy

    def close(self) -> None:
        """Ends the actor, once all that this process's handles have written is stored.

        What handles in other processes have under way is lost; they get ActorLost. Ray goes on
        running. Later calls raise RuntimeError; closing again does nothing. The actor's process
        takes a moment to end, until which files that it recovers are in use.

        Raises:
            Exception: what a write has raised whose result nobody has asked for, ActorLost too; of
                several the first, with the others in its text. The actor has ended then as well.
                RuntimeError: so has it where writes are lost that a rate limiter still held up
                after 10 seconds.
        """
        with self._closing:
            if self._actor is None:
                return
            actor = self._actor
            failed: list[Exception] = []
            try:
                until = time.monotonic() + _SETTLING_SECONDS if self._paced else None
                failed, unanswered = leave_all(until, actor)
                if unanswered:
                    failed.append(
                        RuntimeError(
                            "writes still had to wait for samples when the buffer was closed: they "
                            "are lost"
                        )
                    )
            finally:
                self._actor = None
                self._drop_ahead()
                _end(actor)
        if failed:
            raise one_of(failed)

    def shutdown(self) -> None:
        """The same as ``close``."""
        self.close()


def _ready(actor: Any, options: Mapping[str, Any]) -> Any:
    """What the buffer's ``ready`` returns, once it is made, which may take long.

    Raises:
        TimeoutError: the cluster has not what the actor asks for, so that it cannot start.
    """
    ref = actor.ready.remote()
    ready, _ = running_ray().wait([ref], timeout=_STARTING_SECONDS)
    if not ready:
        asked = {
            **options.get("resources", {}),
            **{
                name: options[option]
                for option, name in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory"))
                if options.get(option)
            },
        }
        there = running_ray().cluster_resources()
        lacking = {name: there.get(name, 0) for name in asked if there.get(name, 0) < asked[name]}
        if lacking:
            raise TimeoutError(
                f"the actor has not started within {_STARTING_SECONDS:g} s: it asks for {asked}, "
                f"and of these the whole cluster has {lacking}; remote_config= changes what it "
                "asks for"
            )
    return fetch(ref)


def _end(actor: Any) -> None:
    """Kills an actor and waits until nobody is answered any more."""
    with contextlib.suppress(ActorLost):
        running_ray().kill(actor, no_restart=True)
        until = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < until:
            try:
                fetch(actor.ready.remote(), timeout=1.0)
            except ActorLost:
                return
            except Exception:  # it is busy, or says why it is of no use
                pass
            time.sleep(0.01)
