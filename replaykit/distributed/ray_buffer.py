"""Define `RayReplayBuffer` and the handles of its clients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from tensordict import is_tensorclass
from typing_extensions import Self

from replaykit._compat import is_tensordict
from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG, actor_class, start_ray
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import DataT
from replaykit.buffer.source import Later, MemberFacts, RemoteRequest
from replaykit.declared import Count, read_value
from replaykit.distributed.handle import Handle, SampleCall
from replaykit.distributed.host import (
    TOGETHER,
    Host,
    check_ahead,
    check_loader,
    check_rows,
    draw_seeded,
    member_facts,
    part_and_facts,
    readiness,
)
from replaykit.distributed.protocol import ITSELF, Message, pack
from replaykit.distributed.requests import (
    RemoteResult,
    Reply,
    RequestQueue,
    fetch,
    running_ray,
)
from replaykit.distributed.write_queue import SETTLING_S, WriteQueue, check_left, leave_all
from replaykit.errors import ActorLost, RateLimiterTimeout
from replaykit.keywords import named_after
from replaykit.pace import checked_timeout
from replaykit.storages.save_hooks import check_no_checkpointer
from replaykit.transfer import to_device

_LIFECYCLE = ("client", "close", "is_alive", "shutdown", "start")
_LOCAL = {
    "episodes": "use it in the actor, as in rb.run(lambda buffer: buffer.episodes.lengths)",
}
_RESTARTING = frozenset(
    {
        "append_transform",
        "drain",
        "empty",
        "insert_transform",
        "load",
        "load_state_dict",
        "loads",
        "resize",
        "set_rng",
        "set_sampler",
        "set_storage",
        "set_writer",
    }
)
"""The methods that make requested batches obsolete.

The handle drops its batches under way when it calls one of these.
"""

_WAITING = {
    "add": "writing",
    "cut": "writing",
    "extend": "writing",
    "flush": "writing",
    "sample": "sampling",
    "take": "sampling",
}
"""The thread group of each method that may wait, for a rate limiter or for rows.

Methods that must stay in order with such methods also have a group.
"""


_Class = TypeVar("_Class", bound=type)


def _forwarding(cls: _Class) -> _Class:
    """Give a class of handles the public methods and properties of a buffer that it lacks."""
    for name in dir(ReplayBuffer):
        if name.startswith("_") or name in _LIFECYCLE or name in _LOCAL or hasattr(cls, name):
            continue
        original = inspect.getattr_static(ReplayBuffer, name)
        if isinstance(original, property):
            setattr(cls, name, _forwarded_property(name))
        elif inspect.isfunction(original):
            setattr(cls, name, _forwarded(name, original))
    return cls


def _forwarded(name: str, original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        return self._invoke(name, *args, **keywords)

    functools.update_wrapper(method, original)
    method.__doc__ = f"{_first_line(original)} Like ``ReplayBuffer.{name}``, but in the actor."
    return method


def _forwarded_property(name: str) -> property:
    return property(
        lambda self: self.run(getattr, name),
        doc=f"{_first_line(getattr(ReplayBuffer, name))} An object is returned as a copy.",
    )


def _first_line(original: Any) -> str:
    return (original.__doc__ or "").strip().split("\n\n")[0].replace("\n        ", " ")


_SEEDS = 2**62
_PLAIN = SampleCall()


@named_after
@_forwarding
class RayReplayBufferClient(Handle[DataT]):
    """A handle of a buffer in a Ray actor.

    A handle has the methods of the buffer and raises its errors. ``RayReplayBuffer.client()`` makes
    handles. They can be pickled and sent to other actors and tasks. The receiver gets a separate
    handle without calls under way. Deleting a handle does not end the actor.

    Calls of one handle, including asynchronous calls, reach the buffer in the order in which they
    were made. All results are copies. So the caller may change a batch. Changes to a component such
    as ``sampler`` do not reach the actor.

    On the node of the actor, the tensors of a large batch are copied once, into Ray's object store.
    These tensors stay in the store as long as any of them is in use. Small tensors are part of the
    answer. Tensors on accelerators are sent as CPU tensors unless the actor has a GPU. Gradients
    are not sent.

    Raises:
        ActorLost (a RuntimeError): the actor has ended.
        ValueError: ``prefetch`` is used with a sampler that uses rows up. The constructor and every
            sample raise this error.
        Calls also raise the errors of the buffer. The ``__cause__`` of such an error has the
            traceback in the actor.

    Cost: one round trip for each call that waits. With ``prefetch`` and ``write_rows``, several
    calls share a round trip.

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
        super().__init__()
        self._actor, self._cls, self._devices, self._paced = actor, cls, devices, paced
        self._methods: dict[tuple[str, str | None], Any] = {}
        self._depth = read_value(Count, prefetch or 0, "prefetch")
        self._write_rows = read_value(Count, write_rows or 0, "write_rows")
        if not (isinstance(write_seconds, (int, float)) and write_seconds > 0):
            raise ValueError(f"expected write_seconds above 0, got {write_seconds!r}")
        self._write_seconds = write_seconds
        self._write_queue = WriteQueue(self._write, self._write_rows, write_seconds, actor)
        late = RateLimiterTimeout if paced else TimeoutError
        self._samples: RequestQueue | None = None
        # With a rate limiter, each batch needs a separate message, so that a waiting batch does not
        # delay others.
        fitting = (count for count in TOGETHER if not paced and 2 * count <= self._depth)
        self._together = next(fitting, 1)
        if self._depth:
            self._samples = RequestQueue(
                self._request_ahead, self._depth, late, together=self._together
            )
        self._name = uuid.uuid4().hex
        self._passing = threading.Lock()
        self._begin_pass(0)
        if self._depth and not checked:
            self.run(check_ahead)

    def _maker(self, **options: Any) -> Callable[[], RayReplayBufferClient[DataT]]:
        """Return a function that makes another handle of the actor."""
        given = {"devices": self._devices, "paced": self._paced, **options}
        return functools.partial(RayReplayBufferClient, self._live(), self._cls, **given)

    def __reduce__(self) -> tuple[Any, ...]:
        make = self._maker(
            prefetch=self._depth,
            write_rows=self._write_rows,
            write_seconds=self._write_seconds,
            checked=True,  # do not call the actor, since it may be unpickling this handle
        )
        return make, ()

    def _handed_on(self) -> Any:
        return self._maker()()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._cls.__name__})"

    # -- calls --------------------------------------------------------------------------------

    def _live(self) -> Any:
        actor = self._actor
        if actor is None:
            raise RuntimeError("this buffer was closed")
        running_ray()
        return actor

    def _method(self, name: str, threads: str | None, results: int = 1) -> Any:
        """Return the actor method of that name with its options, from a cache."""
        actor = self._live()
        found = self._methods.get((name, threads))
        if found is None:
            options: dict[str, Any] = {"num_returns": results} if results > 1 else {}
            if threads and self._paced:
                options["concurrency_group"] = threads
            found = getattr(actor, name)
            found = self._methods[name, threads] = found.options(**options) if options else found
        return found

    def _send(self, name: str | Message, args: Sequence[Any], keywords: Mapping[str, Any]) -> Reply:
        """Send a call of a method of the buffer, or of a packed function; do not wait."""
        packed = [self._packed(arg) for arg in args]
        named = {key: self._packed(value) for key, value in keywords.items()}
        threads = _WAITING.get(name) if isinstance(name, str) else None
        return Reply(self._method("call", threads).remote(name, packed, named))

    def _packed(self, value: Any) -> Message:
        if not self._devices and (
            isinstance(value, torch.Tensor) or is_tensordict(value) or is_tensorclass(value)
        ):
            device = value.device
            if device is not None and device.type != "cpu":
                value = to_device(value, "cpu")
        return pack(value)

    def _request(self, function: Any, /, *args: Any, **keywords: Any) -> RemoteResult:
        """Request a call of a method or of ``function(buffer, ...)``, after pending writes."""
        if isinstance(function, str):
            self._before(function)
            return RemoteResult(self._send(function, args, keywords), self._own)
        self._before("run")
        return RemoteResult(self._send(pack(function), args, keywords), self._own)

    def _invoke(self, name: str, /, *args: Any, **keywords: Any) -> Any:
        return self._request(name, *args, **keywords).result()

    def _own(self, result: Any) -> Any:
        return self if result is ITSELF else result

    def _before(self, name: str) -> None:
        self._write_queue.send()
        if name in _RESTARTING:
            self._drop_ahead()

    def _drop_ahead(self) -> None:
        if self._samples is not None:
            self._samples.drop()
        self._steps.drop()

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call ``function(buffer, *args, **keywords)`` in the actor; return its result.

        Use this method to combine several calls, or to read from objects that cannot be sent. For
        example, call ``rb.run(lambda buffer: buffer.episodes.lengths)``. All other calls wait until
        the function has returned.
        """
        return self._request(function, *args, **keywords).result()

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the buffer, for example ``data_path`` of a data set."""
        if name.startswith("_") or name in _LIFECYCLE:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in _LOCAL:
            raise AttributeError(f"{name!r} cannot be sent: {_LOCAL[name]}")
        found = inspect.getattr_static(self._cls, name, None)
        if callable(found) or isinstance(found, (classmethod, staticmethod)):
            return functools.partial(self._invoke, name)
        return self.run(getattr, name)

    # -- methods and properties of the buffer -------------------------------------------------

    batch_size = _forwarded_property("batch_size")
    sampler = _forwarded_property("sampler")

    def __len__(self) -> int:
        return int(self._invoke("__len__"))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._invoke("__setitem__", index, value)

    def _read_rows(self, index: Any) -> Any:
        return self._invoke("__getitem__", index)

    @property
    def service_backend(self) -> str:
        """Always ``"ray"``, since the buffer is in a Ray actor."""
        return "ray"

    @property
    def checkpointer(self) -> None:
        """Always None, since a buffer saves itself in a single format.

        Setting any other value raises TypeError.
        """
        return None

    @checkpointer.setter
    def checkpointer(self, value: object) -> None:
        check_no_checkpointer(value)

    @property
    def dim_extend(self) -> int:
        """The time dimension of written data. It cannot be changed later."""
        return int(self.run(getattr, "dim_extend"))

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        self.run(setattr, "dim_extend", value)

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any, **keywords: Any) -> Any:
        """Store one row and return its index.

        The arguments and errors are the same as those of ``ReplayBuffer.add``. With ``write_rows``,
        the call does not wait and returns the result of ``add_async``.
        """
        if self._write_rows > 1 and not keywords:
            return self.add_async(data)
        return self._invoke("add", data, **keywords)

    def extend(self, data: Any, **keywords: Any) -> Any:
        """Store a batch and return its index.

        The arguments and errors are the same as those of ``ReplayBuffer.extend``. With
        ``write_rows``, the call does not wait and returns the result of ``extend_async``.
        """
        if self._write_rows > 1 and not keywords:
            return self.extend_async(data)
        return self._invoke("extend", data, **keywords)

    def add_async(self, data: Any, **keywords: Any) -> RemoteResult:
        """Send one row to be stored; do not wait.

        Returns:
            A future with the result or error of ``add``. If the caller does not ask the future for
            its result, the next write, ``flush`` or ``close`` raises the error.
        """
        return self._put("add", data, keywords)

    def extend_async(self, data: Any, **keywords: Any) -> RemoteResult:
        """Send a batch to be stored, like ``add_async``; do not wait.

        If more than 16 messages are unanswered, the call waits for the answer to the oldest
        message.
        """
        return self._put("extend", data, keywords)

    def flush(self) -> Any:
        """Wait until all writes of this handle are stored, and flush the transforms.

        Returns:
            The same as ``ReplayBuffer.flush``.

        Raises:
            Exception: the error of a write whose result was not asked for.
        """
        self._write_queue.flush()
        return self._invoke("flush")

    def _write(self, counts: list[int], rows: Message) -> Any:
        return self._method("write", "writing").remote(counts, rows)

    def _put(self, name: str, data: Any, keywords: Mapping[str, Any]) -> RemoteResult:
        rows = None if keywords else data
        return self._write_queue.put(
            lambda: self._send(name, (data,), keywords), rows, single=name == "add"
        )

    # -- sampling -----------------------------------------------------------------------------

    def _sample(self, call: SampleCall, timeout: float | None) -> Any:
        timeout = checked_timeout(timeout)
        if call == _PLAIN:
            if self._samples is not None:
                self._write_queue.send()
                return self._samples.next(timeout)
            if timeout is None:
                self._write_queue.send()
                return self._request_sample().get()
        keywords = {} if timeout is None else {"timeout": timeout}
        return self._invoke("sample", *call, **keywords)

    def sample_async(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        **keywords: Any,
    ) -> RemoteResult:
        """Request a batch without waiting for it.

        Use ``await`` or ``result()`` to get the batch. With ``prefetch``, the result is a batch
        under way, as for ``sample``.

        Example::

            first, second = rb.sample_async(), rb.sample_async()
            batch = first.result()   # or: await first
        """
        self._write_queue.send()
        call = SampleCall(batch_size, return_info, include_info)
        if call == _PLAIN and not keywords:
            if self._samples is not None:
                return RemoteResult(self._samples.take())
            return RemoteResult(self._request_sample())
        return self._request("sample", *call, **keywords)

    def _request_sample(self) -> Reply:
        return Reply(self._method("sample", "sampling").remote())

    def _request_ahead(self, count: int) -> list[Reply]:
        return _replies(self._method(f"sample_{count}", "ahead", count).remote(), count)

    def next(self) -> DataT | None:
        """Return the next batch of the buffer's iteration, or None at its end.

        All handles share one iteration. After the iteration has ended, the next call starts it
        again. With ``prefetch``, more batches of the same pass are under way.
        """
        self._write_queue.send()
        steps = self._steps
        batch = steps.next()
        if batch is None:
            with self._passing:
                if steps is self._steps:  # only the first thread that reaches the end
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

    # -- for loaders and ensembles ------------------------------------------------------------

    def _check_loader(self) -> None:
        self.run(check_loader)

    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        def asked(size: int) -> RemoteRequest:
            seed = int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))
            return Later(lambda timeout: self._request(draw_seeded, size, seed).result(timeout))

        return asked

    def _facts_of_member(self) -> MemberFacts:
        return cast(MemberFacts, self.run(member_facts))

    def _be_fresh(self, rows: int) -> None:
        """Do nothing, since a handle has no data that could be outdated."""

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        return self._request(part_and_facts, rows, seed, known)

    def _ask_readiness(self, rows: int) -> RemoteRequest:
        return self._request(readiness, rows)

    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        return self._request(check_rows, index.cpu())

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        return self._request(name, *args, **keywords)


def _replies(refs: Any, count: int) -> list[Reply]:
    """Return the replies to a message, for which Ray returns one or more references."""
    return [Reply(refs)] if count == 1 else [Reply(ref) for ref in refs]


_ENDING_SECONDS = 10.0
"""Seconds that `close` waits for the end of the actor."""

_STARTING_SECONDS = 60.0
"""Seconds after which the cluster is checked for the resources of the actor."""

_WAITING_SAMPLERS = 64
"""Maximum number of samples that wait for rows at once, with a rate limiter."""


class RayReplayBuffer(RayReplayBufferClient[DataT]):
    """A buffer in a Ray actor that this object starts and owns.

    The object has all methods and properties of the buffer and of `RayReplayBufferClient`.
    ``client()`` makes handles for other processes. A statement ``with RayReplayBuffer(...) as rb:``
    closes the buffer at its end.

    Args:
        replay_buffer_cls: class of the buffer. It may also be a class of data sets or ensembles.
        ray_init_config: options of ``ray.init``, which is called if Ray is not running yet. Ray
            then runs until the program ends, or until ``ray.shutdown()``.
        remote_config: options of the actor, as for ``ray.remote``. By default, the actor gets one
            CPU and no GPU.
        delayed_init: True to make the buffer's components when it is first used.
        kwargs: arguments of the buffer, which are pickled. Therefore pass functions that return the
            storage, sampler and writer, and pass transforms as ``transform_factory``.

    Raises:
        RuntimeError: ray is not installed.
        ValueError: the class of the buffer makes a rate limiter itself.
        TimeoutError: after a minute, the cluster still has fewer resources in total than the actor
            needs. If the resources are only in use, the call keeps waiting.
        The constructor also raises the errors of the buffer's constructor.

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
        start_ray(ray_init_config)
        options = dict(DEFAULT_REMOTE_CLASS_CONFIG if remote_config is None else remote_config)
        devices = bool(options.get("num_gpus"))
        paced = kwargs.get("rate_limiter") is not None
        if paced:
            # A single thread for all writes keeps their order. A single thread for iteration
            # reports the end of a pass after its last batch. A single thread for prefetched
            # batches answers their requests in order. Other samples wait in parallel.
            groups = {"writing": 1, "stepping": 1, "ahead": 1, "sampling": _WAITING_SAMPLERS}
            options["concurrency_groups"] = {**groups, **options.get("concurrency_groups", {})}
        if delayed_init:
            kwargs["delayed_init"] = True
        actor = actor_class(Host, options).remote(replay_buffer_cls, kwargs, devices=devices)
        try:
            if _ready(actor, options) and not paced:
                raise ValueError(
                    f"expected rate_limiter= of {type(self).__name__}, found a limiter that "
                    f"{replay_buffer_cls.__name__} makes itself: a waiting call would block all "
                    "others"
                )
        except BaseException:
            _end(actor)
            raise
        super().__init__(actor, replay_buffer_cls, devices=devices, paced=paced)
        self._closing = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayReplayBuffer cannot be pickled; send its client()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(
        self, *, prefetch: int = 0, write_rows: int = 0, write_seconds: float = 0.05
    ) -> RayReplayBufferClient[DataT]:
        """Return a handle that can be pickled and does not own the actor.

        Args:
            prefetch: maximum number of batches to request ahead. If batches are small, one message
                requests two batches with a ``prefetch`` of at least 4, and four batches with at
                least 8. A batch can miss the writes and updates of the last ``prefetch`` calls.
                ``empty``, loads and changes of components drop the batches under way of the calling
                handle. Other handles still return their prefetched batches, which have old rows.
            write_rows: number of rows up to which smaller writes are combined into one message.
                ``add`` and ``extend`` then do not wait, and return futures like ``add_async``. Any
                other call of the handle first sends the pending rows.
            write_seconds: maximum seconds for which a row waits before it is sent.

        Raises:
            ValueError: a number is negative, or ``prefetch`` is given for a sampler that uses rows
                up.
            RuntimeError: the buffer was closed.

        Cost: one round trip with ``prefetch``, otherwise none.
        """
        given = {"prefetch": prefetch, "write_rows": write_rows, "write_seconds": write_seconds}
        return self._maker(**given)()

    @property
    def is_alive(self) -> bool:
        """Return whether the actor is alive and the buffer is open."""
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
        """End the actor after all writes of handles in this process are stored.

        Calls of other processes that are under way are lost, and raise ActorLost. Ray continues to
        run. Later calls of the buffer raise RuntimeError, but closing it again does nothing. The
        process of the actor takes a moment to end. Until the process has ended, it may still use
        the files of its storage.

        Raises:
            Exception: the error of a write whose result was not asked for, or ActorLost. If there
                are several errors, the first is raised, and its text lists the others.
            RuntimeError: writes were lost because they still waited for the rate limiter after 10
                seconds.
            After any of these errors, the actor has ended.
        """
        with self._closing:
            if self._actor is None:
                return
            actor = self._actor
            try:
                left = leave_all(time.monotonic() + SETTLING_S if self._paced else None, actor)
            finally:
                self._actor = None
                self._drop_ahead()
                _end(actor)
        check_left(*left)

    shutdown = close


def _ready(actor: Any, options: Mapping[str, Any]) -> Any:
    """Wait until the buffer is made; return the result of ``Host.ready``.

    Raises:
        TimeoutError: the cluster lacks the resources that the actor needs to start.
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
                f"the actor has not started within {_STARTING_SECONDS:g} s: it needs {asked}, but "
                f"the whole cluster has only {lacking}; request less in remote_config="
            )
    return Reply(ref).get()


def _end(actor: Any) -> None:
    """Kill an actor and wait until it no longer answers calls."""
    with contextlib.suppress(ActorLost):
        running_ray().kill(actor, no_restart=True)
        until = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < until:
            try:
                fetch(actor.ready.remote(), timeout=1.0)
            except ActorLost:
                return
            except Exception:  # the actor is busy, or its buffer could not be made
                pass
            time.sleep(0.01)
