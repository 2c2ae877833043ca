"""Define the methods that all handles of buffers in other processes have."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

from replaykit._ray import Carried
from replaykit.buffer.components import DataT
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.draw import check_iterable, size_or_default
from replaykit.buffer.source import BufferHandle


class SampleCall(NamedTuple):
    """The arguments of a sample; see ``Handle.sample``."""

    batch_size: int | None = None
    return_info: bool = False
    include_info: bool | None = None


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
    def _sample(self, call: SampleCall, timeout: float | None) -> Any:
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
        return self._sample(SampleCall(batch_size, return_info, include_info), timeout)

    def __iter__(self) -> Iterator[DataT]:
        """Yield the batches of ``next`` until the sampler has no more rows.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        check_iterable(self.batch_size)
        return iter(self.next, None)

    def _size_of(self, batch_size: int | None) -> int:
        return size_or_default(batch_size, lambda: self.batch_size)

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
