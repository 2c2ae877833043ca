"""Define handles of buffers in other processes, and forward calls to a buffer in an actor."""

from __future__ import annotations

import functools
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit._ray import Carried
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import DataT
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.draw import check_iterable, checked_batch_size
from replaykit.buffer.source import BufferHandle, Later, MemberFacts, RemoteRequest
from replaykit.distributed.host import (
    check_loader,
    check_rows,
    draw_seeded,
    member_facts,
    part_and_facts,
    readiness,
)
from replaykit.distributed.protocol import ITSELF, Message, pack
from replaykit.distributed.requests import RemoteResult, Reply, running_ray
from replaykit.storages.save_hooks import check_no_checkpointer
from replaykit.transfer import to_device


class Handle(Loading[DataT], BufferHandle):
    """A handle that requests batches from one or more servers.

    Subclasses send the requests. Worker processes of data loaders get a copy of the handle.
    """

    _workers_start = "spawn"

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """The default number of rows in a batch."""

    @abstractmethod
    def _sample(
        self,
        batch_size: int | None,
        return_info: bool,
        include_info: bool | None,
        timeout: float | None,
    ) -> Any:
        """Draw a batch; see ``sample``."""

    @abstractmethod
    def _read_rows(self, index: Any) -> Any:
        """Return rows; see ``__getitem__``."""

    @abstractmethod
    def next(self) -> DataT | None:
        """Return the next batch of the iteration, or None at its end."""

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
        return_info: Literal[True] = ...,
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
        *,
        timeout: float | None = None,
    ) -> Any:
        """Draw a batch, like ``ReplayBuffer.sample``.

        Args:
            batch_size: number of rows. None uses the batch size of the buffer.
            return_info: True to also return information about the draw.
            include_info: as for ``ReplayBuffer.sample``; deprecated.
            timeout: seconds to wait for the rate limiter. With 0 the call does not wait, and with
                None it waits without a limit.

        Returns:
            The same as ``ReplayBuffer.sample``. With shards, the ``index`` names rows of any shard.

        Raises:
            RuntimeError: there is no batch size, or no row can be drawn.
            ValueError: the batch size is not an int of at least 1, or the rate limiter can never
                admit so many rows.
            RateLimiterTimeout (a TimeoutError): the rate limiter has not admitted the sample in
                time, because too few rows were written. After this error, nothing has changed.
            TimeoutError: no answer has arrived in time. A later call returns that batch.

        With ``prefetch``, a batch of the default size was already requested by an earlier call. A
        call for another size draws a new batch.

        With shards, draws are exact while no other client writes or updates priorities. The
        probabilities P(i) and the ``priority_weight`` then equal those of a single large buffer.
        Otherwise, the client draws shards by the masses in their last replies, at most ``max_age``
        seconds old. In that case, the weights correct for the probabilities that the draw really
        used; see ``docs/sharding.md``.

        Cost: one round trip, or one message to each shard in parallel, and one copy of the batch.
        With shards, a rate limiter adds two messages. The first message is sent in parallel with
        the messages to the shards. The call does not wait for the second message.
        """
        return self._sample(batch_size, return_info, include_info, timeout)

    def __iter__(self) -> Iterator[DataT]:
        """Yield the batches of ``next`` until the sampler has no more rows.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        check_iterable(self.batch_size)
        return iter(self.next, None)

    def _size_of(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else checked_batch_size(batch_size)
        if size is None:
            raise RuntimeError(
                "batch_size not specified: expected a batch_size, of the buffer or in this call"
            )
        return int(size)

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        """Return the transformed rows of an index, or a column.

        The index is an int, a list, or an int64 tensor ``[K]``. A slice or a bool mask selects from
        all stored rows in the order of their indices. A key returns that column of ``rb[:]``.

        Raises:
            IndexError: a row is not stored, or a mask has the wrong length.
            KeyError: there is no such key.
            TypeError: the index has another type.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.arange(5) * 10}, [5]))
            ...     rb[3]["x"], rb[1:3]["x"], rb["x"]
            (tensor(30), tensor([10, 20]), tensor([ 0, 10, 20, 30, 40]))
        """
        return self._read_rows(index)

    # -- for loaders --------------------------------------------------------------------------

    def _check_workers(self, method: str | None = None) -> None:
        if method == "fork" or self._process != os.getpid():
            raise ValueError(
                "expected spawned worker processes (multiprocessing_context='spawn'): a forked one "
                "has no connection to Ray"
            )

    def _carried(self, known: dict[int, Any]) -> Carried:
        return Carried.of(self._handed_on())


def checked_count(name: str, value: Any) -> int:
    """Return a checked count; None means 0.

    Raises:
        ValueError: the value is not an int of at least 0.
    """
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ValueError(f"expected {name} as an int of at least 0, got {value!r}")
    return value


# -- a buffer in an actor --------------------------------------------------------------------------

_LIFECYCLE = ("client", "close", "is_alive", "shutdown", "start")
_LOCAL = {
    "episodes": "use it in the actor, as in rb.run(lambda buffer: buffer.episodes.lengths)",
}
RESTARTING = frozenset(
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


def forwarding(cls: _Class) -> _Class:
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
        return self._invoke(name, args, keywords)

    functools.update_wrapper(method, original)
    method.__doc__ = f"{_first_line(original)} Like ``ReplayBuffer.{name}``, but in the actor."
    return method


def _forwarded_property(name: str) -> property:
    return property(
        lambda self: self._read(name),
        doc=f"{_first_line(getattr(ReplayBuffer, name))} An object is returned as a copy.",
    )


def _first_line(original: Any) -> str:
    return (original.__doc__ or "").strip().split("\n\n")[0].replace("\n        ", " ")


class Forwarding(Handle[DataT]):
    """A handle that forwards calls to a buffer in an actor by name.

    Args:
        actor: the handle of a `Host` actor.
        cls: class of the buffer.
        devices: whether the actor accepts tensors on accelerators. If False, they are sent as CPU
            tensors.
        paced: whether the buffer has a rate limiter. Calls that may wait then run in separate
            threads of the actor.
    """

    def __init__(self, actor: Any, cls: type, *, devices: bool, paced: bool) -> None:
        super().__init__()
        self._actor = actor
        self._cls = cls
        self._devices = devices
        self._paced = paced
        self._methods: dict[tuple[str, str | None], Any] = {}

    # -- calls --------------------------------------------------------------------------------

    def _live(self) -> Any:
        actor = self._actor
        if actor is None:
            raise RuntimeError("this buffer was closed")
        running_ray()
        return actor

    def _submit(self, name: str | Message, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Send a call; return the object reference of its result."""
        packed = [self._packed(arg) for arg in args]
        named = {key: self._packed(value) for key, value in keywords.items()}
        threads = _WAITING.get(name) if isinstance(name, str) else None
        return self._method("call", threads).remote(name, packed, named)

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

    def _packed(self, value: Any) -> Message:
        if not self._devices and (
            isinstance(value, torch.Tensor) or is_tensordict(value) or is_tensorclass(value)
        ):
            device = value.device
            if device is not None and device.type != "cpu":
                value = to_device(value, "cpu")
        return pack(value)

    def _invoke(self, name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Send the pending writes of this handle, call a method, and return its result."""
        self._before(name)
        return self._own(Reply(self._submit(name, args, keywords)).get())

    def _before(self, name: str) -> None:
        """Send everything that must precede a call; subclasses override this method."""

    def _own(self, result: Any) -> Any:
        return self if result is ITSELF else result

    def _read(self, name: str) -> Any:
        return self._own(self._apply(getattr, name).result())

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call ``function(buffer, *args, **keywords)`` in the actor; return its result.

        Use this method to combine several calls, or to read from objects that cannot be sent. For
        example, call ``rb.run(lambda buffer: buffer.episodes.lengths)``. All other calls wait until
        the function has returned.
        """
        self._before("run")
        return self._own(Reply(self._submit(pack(function), args, keywords)).get())

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the buffer, for example ``data_path`` of a data set."""
        if name.startswith("_") or name in _LIFECYCLE:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in _LOCAL:
            raise AttributeError(f"{name!r} cannot be sent: {_LOCAL[name]}")
        found = inspect.getattr_static(self._cls, name, None)
        if callable(found) or isinstance(found, (classmethod, staticmethod)):
            return functools.partial(self._called, name)
        return self._read(name)

    def _called(self, name: str, *args: Any, **keywords: Any) -> Any:
        return self._invoke(name, args, keywords)

    # -- methods and properties of the buffer -------------------------------------------------

    batch_size = _forwarded_property("batch_size")
    sampler = _forwarded_property("sampler")

    def __len__(self) -> int:
        return int(self._invoke("__len__", (), {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._invoke("__setitem__", (index, value), {})

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
        return int(self._read("dim_extend"))

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        self._apply(setattr, "dim_extend", value).result()

    # -- for loaders and ensembles ------------------------------------------------------------

    def _apply(self, function: Callable[..., Any], *args: Any) -> RemoteResult:
        """Request ``function(buffer, *args)``, after the pending writes of this handle.

        The actor imports the function by its name.
        """
        self._before("run")
        return RemoteResult(Reply(self._method("apply", None).remote(function, *args)))

    def _check_loader(self) -> None:
        self._apply(check_loader).result()

    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        def asked(size: int) -> RemoteRequest:
            seed = int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))
            return Later(lambda timeout: self._apply(draw_seeded, size, seed).result(timeout))

        return asked

    def _facts_of_member(self) -> MemberFacts:
        return cast(MemberFacts, self._apply(member_facts).result())

    def _be_fresh(self, rows: int) -> None:
        """Do nothing, since a handle has no data that could be outdated."""

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        return self._apply(part_and_facts, rows, seed, known)

    def _ask_readiness(self, rows: int) -> RemoteRequest:
        return self._apply(readiness, rows)

    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        return self._apply(check_rows, index.cpu())

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        self._before(name)
        return RemoteResult(Reply(self._submit(name, args, keywords)))


_SEEDS = 2**62
