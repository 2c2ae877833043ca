"""Define `ReplayBuffer`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, overload

import torch
from typing_extensions import Self

from replaykit._compat import as_tensor, is_tensordict
from replaykit._ray import actor_class
from replaykit.buffer import (
    components,
    deliver,
    draw,
    edit,
    priorities,
    resizing,
    state,
    stream_rows,
    write,
)
from replaykit.buffer.components import (
    DataT,
    LockedStorage,
    SamplerT,
    StorageT,
    WriterT,
    check_collate_fn,
    check_generator,
    check_kinds,
    check_not_ahead,
    checked_limiter,
    checked_prefetch,
    consuming_sampler,
)
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.draw import checked_batch_size
from replaykit.buffer.edit import (
    ConditionalUpdateResult,
    checked_handles,
    checked_patch,
    patchable,
    patched,
)
from replaykit.buffer.episodes import Episodes, tag_episodes
from replaykit.buffer.events import Event, Observers
from replaykit.buffer.prefetch import Draw, Prefetcher
from replaykit.checkpoint import save_snapshot
from replaykit.episodes import Needs
from replaykit.keywords import Replaced, checked_keywords, named_after
from replaykit.pace import SAMPLE, LimiterQueue, RateLimiter
from replaykit.samplers import Sampler, SampleUnit, Transition
from replaykit.storages import Storage
from replaykit.storages.column_storage import with_episodes
from replaykit.storages.memmap import join_storage
from replaykit.storages.save_hooks import Hook, check_no_checkpointer
from replaykit.ted import unravel
from replaykit.transfer import device_named
from replaykit.transforms import Compose, Windows
from replaykit.writers import Writer
from replaykit.writers.writer import single_index


@named_after
class ReplayBuffer(Loading[DataT], Generic[DataT, StorageT, SamplerT, WriterT]):
    """Rows in a storage, chosen by a sampler and placed by a writer.

    Args:
        storage: a storage, or a function that makes it. Default: ``ListStorage(1000)``.
        sampler: a sampler, or a function that makes it. Default: ``RandomSampler()``.
        writer: a writer, or a function that makes it. Default: ``RoundRobinWriter()``.
        sample_unit: the law that turns a drawn row into the rows of a batch. Default:
            ``Transition()``, which returns the drawn row alone. Or `Windows`, whose keys alone are
            read.
        collate_fn: a function that combines the rows that were read. Transforms receive its result.
            By default, rows of tensor storages are unchanged and rows of lists are stacked.
        pin_memory: pin the CPU tensors of a batch if there is a CUDA device.
        device: device of batches after the transforms; None for the storage's device. A batch is
            copied to a CUDA device from pinned memory, and no call waits for the copy.
        prefetch: number of batches that threads prepare in advance; needs ``batch_size``. See
            ``docs/overlap.md``.
        transform: a callable, an object with ``forward`` or ``inv``, or a Compose of them.
        transform_factory: a function that makes the transform; implies ``delayed_init``.
        batch_size: default number of rows of a batch.
        dim_extend: the time dimension of written data. Default: ``storage.ndim - 1``.
        generator: source of all randomness. Default: torch's global generator.
        consume_after_n_samples: number of draws after which the slot of a row is free for new rows.
            A ``ConsumingSampler`` with this number replaces a RandomSampler.
        priority_key: the key of priorities in written rows and in batches.
        delayed_init: make the components only at first use.
        contiguous: make every tensor of a batch contiguous. By default small columns are strided
            views of one allocation, which is faster.
        shared: let processes that receive the buffer, spawned or forked, or that call ``join``,
            write and sample the same rows. Requires a LazyTensorStorage or LazyMemmapStorage, and
            a RoundRobinWriter. See ``docs/sharing.md``.
        compilable: no effect; accepted for compatibility with TorchRL. Compiled functions may call
            every method. The call breaks the graph and runs uncompiled. With ``fullgraph=True``,
            ``torch.compile`` raises an error.
        rate_limiter: makes writes and samples wait for each other, so that neither runs too far
            ahead. See ``RateLimiter`` and ``docs/pace.md``.

    Raises:
        TypeError: an argument has another type, or both ``transform`` and ``transform_factory`` are
            given.
        ValueError: a value is out of range, or components do not work together.

    All methods may be called from any thread. A read never returns a half-written row.

    For type checkers, a batch is a TensorDict. ``storage``, ``sampler`` and ``writer`` have the
    types of the arguments; with the plain annotation ``ReplayBuffer`` they may have any type. For
    other rows, annotate the type of a batch:
    ``rb: ReplayBuffer[torch.Tensor] = ReplayBuffer(...)``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4,
        ...                   generator=torch.Generator().manual_seed(0))
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3)}, [20]))
        >>> rb.sample()["index"]
        tensor([ 4, 19, 13,  0])
    """

    _replaced: ClassVar[dict[str, Replaced]] = {
        "checkpointer": Replaced(
            (None,),
            "dumps(path) and loads(path) of the buffer write and read checkpoints, in one format "
            "for all storages; leave checkpointer out",
        ),
        "service_backend": Replaced(
            ("direct",), "RayReplayBuffer(**arguments) has the buffer in an actor of Ray"
        ),
        "service_backend_options": Replaced(
            (None, {}), "RayReplayBuffer takes ray_init_config= and remote_config="
        ),
        "transport": Replaced(
            ("auto", "direct"),
            "A direct ReplayBuffer only supports transport='auto' or 'direct'; that of "
            "RayReplayBuffer is Ray's own",
        ),
        "transport_options": Replaced(
            (None, {}),
            "transport_options are only valid for a remote ReplayBuffer; that of RayReplayBuffer "
            "needs none",
        ),
    }

    _reads_index = False
    """True if ``rb[...]`` carries ``index``, also for transforms, as samples do."""

    # The parts, which ``make_parts`` sets.
    _storage: Storage
    _sampler: Sampler
    _writer: Writer
    _chain: Compose
    _draw_chain: Compose  # of samples, but not of rb[...]
    _needs: Needs
    _listening: list[Any]
    _pace: LimiterQueue | None = None
    _observers: Observers | None = None

    @checked_keywords
    def __init__(
        self,
        *,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        sample_unit: SampleUnit | Windows | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        device: torch.device | str | int | None = None,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        consume_after_n_samples: int | None = None,
        priority_key: Any = "td_error",
        delayed_init: bool | None = None,
        contiguous: bool = False,
        shared: bool = False,
        compilable: bool = False,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        check_kinds(storage, sampler, writer, sample_unit, transform, transform_factory)
        check_collate_fn(collate_fn)
        check_generator(generator)
        self._rate_limiter = checked_limiter(rate_limiter)
        self._batch_size = None if batch_size is None else checked_batch_size(batch_size)
        depth = checked_prefetch(prefetch, self._batch_size)
        chosen = consuming_sampler(consume_after_n_samples, sampler, depth)
        if dim_extend is not None and (type(dim_extend) is not int or dim_extend < 0):
            raise ValueError(f"dim_extend must be a positive value or 0, got {dim_extend!r}")
        self._dim_extend = dim_extend
        self._dim_of_storage = dim_extend is None
        # Windows are read by the chain of transforms, around single rows.
        self._windows = sample_unit if isinstance(sample_unit, Windows) else None
        self._sample_unit = sample_unit if isinstance(sample_unit, SampleUnit) else Transition()
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._target = None if device is None else device_named(device)
        self._contiguous = bool(contiguous)
        self._shared = bool(shared)
        if shared:
            check_not_ahead(depth)
        self._generator = generator
        self._priority_key = unravel(priority_key)
        self._prefetch_depth = depth
        self._prefetcher: Prefetcher | None = None
        # Draws whose batches failed; they come next.
        self._retry: list[Draw] = []
        self._draws_made = 0
        self._pass_ended = False
        # True after a load, until the rows are stored that transforms had held back before it.
        self._restarted = False
        self._closed = False
        self._arrivals = stream_rows.Arrivals()
        self._initialized = False
        self._making = threading.RLock()
        self._makers = (storage, chosen, writer, transform, transform_factory)
        if delayed_init is None:
            delayed_init = transform_factory is not None
        if not delayed_init:
            components.make_parts(self)

    def _ready(self) -> None:
        if not self._initialized:
            with self._making:
                if not self._initialized:
                    components.make_parts(self)

    def _locked(self, *, patient: bool = False, settled: bool = True) -> LockedStorage:
        """Lock the current storage of the buffer; the context yields it.

        Args:
            patient: for a while, let processes that write without pause take the lock first.
            settled: first read the rows of prefetched draws, because the caller may change them.
        """
        if not self._initialized:
            self._ready()
        return LockedStorage(self, patient and self._shared, settled)

    @property
    def initialized(self) -> bool:
        """True if the components exist. With ``delayed_init`` they may not exist yet."""
        return self._initialized

    @property
    def storage(self) -> StorageT:
        """The storage, which holds the rows."""
        self._ready()
        return self._storage  # type: ignore[return-value]

    @property
    def sampler(self) -> SamplerT:
        """The sampler, which chooses the rows of a batch."""
        self._ready()
        return self._sampler  # type: ignore[return-value]

    @property
    def writer(self) -> WriterT:
        """The writer, which chooses the slots of new rows."""
        self._ready()
        return self._writer  # type: ignore[return-value]

    @property
    def transform(self) -> Compose:
        """The chain of transforms, possibly empty."""
        self._ready()
        return self._chain

    @property
    def batch_size(self) -> int | None:
        """Default number of rows of a batch."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The time dimension of written data, fixed by the constructor."""
        self._ready()
        assert self._dim_extend is not None
        return self._dim_extend

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        if value != self.dim_extend:
            raise RuntimeError(f"dim_extend is {self.dim_extend} and cannot be changed later")

    @property
    def priority_key(self) -> Any:
        """The key of priorities in written rows and in batches, as it was given."""
        key = self._priority_key
        return key if len(key) > 1 else key[0]

    @property
    def service_backend(self) -> str:
        """Always ``"direct"``: the buffer is in the process that made it."""
        return "direct"

    @property
    def checkpointer(self) -> None:
        """Always None, because a buffer saves itself. Other values raise TypeError."""
        return None

    @checkpointer.setter
    def checkpointer(self, value: object) -> None:
        check_no_checkpointer(value)

    @property
    def write_count(self) -> int:
        """Number of rows written through this buffer, summed over all lanes."""
        self._ready()
        self._storage.poll(whole=True)
        return self._writer.write_count

    @property
    def shared(self) -> bool:
        """True if processes that receive this buffer write and sample the same rows."""
        return self._shared

    def __len__(self) -> int:
        """Return the number of stored rows.

        With a sampler that uses rows up, this counts only rows that can still be drawn.
        """
        self._ready()
        if self._sampler.consumes:
            with self._locked(settled=False) as storage:
                return self._sampler.left(storage)
        return len(self._storage)

    def stats(self) -> dict[str, Any]:
        """Return size, write count, prefetched batches, capacity and utilization.

        With a rate limiter, ``inserts`` and ``samples`` are its counts. ``insert_blocked_s`` and
        ``sample_blocked_s`` are the total seconds that calls have waited for it. In a shared buffer
        all four cover all processes.

        The method also works before initialization, and changes nothing. If the storage was given
        as a function, capacity and utilization are missing until the function has made the storage.
        Cost: O(1).

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> _ = rb.extend(torch.zeros(5))
            >>> rb.stats()["size"], rb.stats()["utilization"]
            (5, 0.5)
        """
        return components.stats_of(self)

    def __repr__(self) -> str:
        if not self._initialized:
            return f"{type(self).__name__}(not initialized)"
        parts = [
            f"storage={self._storage!r}",
            f"sampler={self._sampler!r}",
            f"writer={self._writer!r}",
            f"batch_size={self._batch_size}",
            f"transform={self._chain!r}",
        ]
        inside = ",\n".join("    " + part.replace("\n", "\n    ") for part in parts)
        return f"{type(self).__name__}(\n{inside})"

    # -- sampling ---------------------------------------------------------------------------------

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
        """Draw a batch.

        Args:
            batch_size: number of rows; None for the constructor's ``batch_size``.
            return_info: also return the info of the draw. If a transform changed the number of
                rows, the data does not include the info.
            include_info: if False, the TensorDict has neither ``index`` nor the info. Deprecated.
            timeout: maximum seconds to wait for the buffer's rate limiter. With 0 the call does not
                wait; None is no limit. Without a rate limiter it has no effect.

        Returns:
            For TensorDict rows, a TensorDict of batch size ``[B]``. It contains ``index`` (int64
            ``[B]`` or ``[B, ndim]``), ``index_generation`` if the writer tracks it, and the info of
            the sampler. For other rows, the data alone. The batch owns its memory. It is on the
            buffer's ``device``, or by default on the storage's. With ``return_info``, the result is
            a pair of the batch and a dict with ``index`` and the info.

        Raises:
            RuntimeError: no batch size is given, nothing is stored, a transform changed the number
                of rows, or the buffer was shut down.
            ValueError: the batch size is not an int of at least 1, or is more than the rate limiter
                can ever admit.
            RateLimiterTimeout: the timeout has passed before writes caught up; a TimeoutError.
                Nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
            >>> _ = rb.extend(TensorDict({"x": torch.arange(5) * 10}, [5]))
            >>> batch = rb.sample()
            >>> batch.shape, bool((batch["x"] == batch["index"] * 10).all())
            (torch.Size([3]), True)
        """
        merge = include_info is None or deliver.should_merge(include_info)
        needed = not return_info
        _, data, info = deliver.next_in_turn(self, batch_size, timeout, merge=merge, needed=needed)
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether ``sample`` would succeed now without waiting.

        The call draws nothing and changes nothing.

        Raises:
            RuntimeError: no batch size is given.
        """
        size = draw.size_of(self, batch_size)
        if self._pace is not None and not self._pace.may(SAMPLE, size, len(self)):
            return False
        with self._locked(settled=False) as storage:
            self._sampler.needs = self._needs
            kept = size == self._batch_size and bool(self._retry)
            if kept and not draw.is_outdated(self, self._retry[0], storage):
                return True
            return self._sampler.can_sample(storage, size)

    def __iter__(self) -> Iterator[DataT]:
        """Yield batches until the end of the sampler's pass.

        With draws with replacement, the iteration never ends.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        draw.check_iterable(self._batch_size)
        return deliver.batches_of(self)

    def next(self) -> DataT | None:
        """Return the next batch of the buffer's own iteration, or None at its end.

        The call after None starts the next iteration.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2,
            ...                   sampler=SamplerWithoutReplacement(shuffle=False))
            >>> _ = rb.extend(torch.arange(3))
            >>> rb.next(), rb.next(), rb.next()
            (tensor([0, 1]), tensor([2]), None)
        """
        draw.check_iterable(self._batch_size)
        if self._pass_ended or deliver.is_used_up(self):
            self._pass_ended = False
            return None
        drawn, data, _ = deliver.next_in_turn(self, None)
        self._pass_ended = drawn.ran_out
        return data

    def shutdown(self) -> None:
        """Join the prefetch threads. Later calls of ``sample`` raise RuntimeError.

        Draws of batches that were not delivered are undone, so a later save lacks no row of a pass.
        In this process, calls that wait for a rate limiter, or would have to, also raise
        RuntimeError.
        """
        deliver.shut_down(self)

    # -- writing ----------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout: float | None = None) -> int | torch.Tensor | None:
        """Store one row.

        Args:
            data: one row, as a TensorDict, tensor, tensorclass or pytree; for a ListStorage any
                object. The batch dimensions of a TensorDict belong to the row. For ``ndim > 1``,
                one time step of all lanes, ``[*lanes]``. Leaves of pytrees may be arrays, NumPy
                scalars, Python numbers and lists of numbers. A Python float gets torch's default
                dtype, an int int64. See ``docs/environments.md``.
            timeout: as for ``extend``.

        Returns:
            The slot of the row; for ``ndim > 1``, the slots int64 ``[prod(lanes), ndim]``. None if
            the writer refuses the row or an inverse transform drops it.

        Raises:
            SchemaError: keys, shapes or dtypes differ from the first write; a ValueError.
            TypeError: the storage cannot hold a value.
            RateLimiterTimeout: as for ``extend``; a TimeoutError.

        If the first row is a TensorDict with batch dimensions, a UserWarning is issued. Such a row
        is usually a batch that was meant for ``extend``. Storages for rows of several shapes do not
        warn.

        If the call raises, nothing has changed, unless a custom sampler or transform raises after
        the rows are stored. Cost: O(1).

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> rb.add(torch.tensor(5.0)), rb.add(torch.tensor(6.0)), rb.add(torch.tensor(7.0))
            (0, 1, 0)
        """
        if not self._initialized:
            self._ready()
        single = not self._chain.entries
        if not self._writer.write_count:
            write.warn_of_batch(data, self._storage)
        if not single:
            # Transforms receive a batch of one row, as in extend.
            data = self.storage.batch_of_one(data, self.dim_extend)
        index = write.write_in_turn(self, data, timeout, single, None)
        if self._observers is not None:
            self._observers.after_write(self)
        count = index.shape[0]
        if index.ndim == 1 and count != 1:
            return index if count else None
        return single_index(index) if count else None

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
        overwrite: bool = True,
        tags: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows.

        Args:
            data: a TensorDict, tensorclass, tensor or pytree with rows along dimension 0; for
                ``ndim > 1``, of shape ``[*lanes, T]``. Also a list with one element per row, each
                as for ``add``. A list costs one Python step per row. A tuple is a pytree. For list
                storages, however, its elements are the rows.
            update_priority: if False, ignore the priorities under ``priority_key`` in the data. The
                rows then get the sampler's default priority.
            timeout: maximum seconds to wait until the buffer's rate limiter admits the rows. With 0
                the call does not wait; None is no limit. Without a rate limiter it has no effect,
                unless ``overwrite`` is False.
            overwrite: if False, do not replace rows that ``take`` has not returned, but wait until
                there is room for the whole batch. A waiting call holds no lock.
            tags: values of the episodes of the rows, as for ``tag``; or None. Rows and tags are
                stored together.

        Returns:
            The slot of each row, int64 ``[B]``. For ``ndim > 1`` the shape is ``[T * prod(lanes),
            ndim]``, with time first. The slot is -1 for a row that the writer refused.

        Raises:
            SchemaError: keys, shapes or dtypes differ from the first write; a ValueError. Also if a
                tag differs from the first values of the tag.
            ValueError: priorities are NaN, negative or infinite, or there is not one per row. Also
                if the rate limiter can never admit that many rows in one call.
            TypeError: the storage cannot hold a value.
            RateLimiterTimeout: the timeout has passed before samples caught up; a TimeoutError.
            TimeoutError: with ``overwrite=False``, there was no room in time.
            RuntimeError: the buffer was shut down during the wait.
            Closed: with ``overwrite=False``, ``close`` was called; a RuntimeError.

        If the call raises, nothing has changed, unless a custom sampler or transform raises after
        the rows are stored. Readers get all rows of the batch or none. Cost: one pass over the
        bytes.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
            tensor([0, 1, 2])
            >>> rb.extend(TensorDict({"y": torch.zeros(3)}, [3]))
            Traceback (most recent call last):
            replaykit.errors.SchemaError: key 'x': expected float32 [], got nothing; key 'y': ...
        """
        if not self._initialized:
            self._ready()
        if overwrite:
            index = write.write_in_turn(self, data, timeout, False, update_priority, tags=tags)
        else:
            with stream_rows.Room(self, timeout) as room:
                index = write.write_in_turn(self, data, timeout, False, update_priority, room, tags)
        if self._observers is not None:
            self._observers.after_write(self)
        return index

    def flush(self) -> torch.Tensor:
        """Store the rows that transforms hold back, as if their streams ended here.

        For example, ``NStep(..., when="write")`` holds rows back. The first write after a load
        begins with a flush, so that no row spans the restart. A rate limiter counts the flushed
        rows, but the flush does not wait for it.

        Returns:
            The slot of each row, as for ``extend``.

        Raises:
            As for ``extend``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> rb.flush()
            tensor([], dtype=torch.int64)
        """
        return self._observed(write.flush_rows(self))

    def empty(
        self, empty_write_count: bool = True, *, lane: Any = None, protected: bool = False
    ) -> None:
        """Remove all rows, including rows that transforms hold back.

        Keys, shapes and memory stay. A removed row's index and generation never name a row again.

        Args:
            empty_write_count: reset ``write_count``, and a rate limiter's counts in ``stats``, to
                0. The rate limiter itself starts over in any case. If rows stay because of ``lane``
                or ``protected``, the counts and the rate limiter go on.
            lane: remove only the rows of these streams, as ``remove_oldest`` does; None for all.
            protected: also remove the episodes that an EpisodeWriter protects.

        Raises:
            RuntimeError: the writer does not allow writing.
            IndexError, ValueError: as ``remove_oldest`` does, with ``lane``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> _ = rb.extend(torch.zeros(2))
            >>> rb.empty()
            >>> len(rb), rb.write_count
            (0, 0)
        """
        stream_rows.empty_streams(self, empty_write_count, lane, protected)
        self._observed(None)

    def _observed(self, result: Any) -> Any:
        """Call the functions for events after rows were removed; return the result."""
        if self._observers is not None:
            self._observers.after_write(self)
        return result

    def remove_oldest(self, n: int, *, lane: Any = None) -> int:
        """Remove up to ``n`` of the oldest rows of each stream; return how many rows are gone.

        The storage needs a ``lane_key``, and the buffer a LaneWriter or EpisodeWriter. Rows of the
        last slots move to the free slots; they keep row ids, priorities and tags.

        Args:
            lane: a stream, or several, named by their values of the lane key; None for all.

        Raises:
            IndexError: a stream has no stored rows, and the writer's ``lanes`` do not name it.
            ValueError: ``n`` is negative, a stream is named twice, or single rows of the storage
                cannot be removed.

        Cost: O(rows removed + streams).

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"),
            ...                   writer=LaneWriter(4))
            >>> env = torch.arange(6) % 2
            >>> _ = rb.extend(TensorDict({"env": env, "x": torch.arange(6)}, [6]))
            >>> rb.remove_oldest(2, lane=1), sorted(rb[:]["x"].tolist())
            (2, [0, 2, 4, 5])
        """
        return self._observed(stream_rows.remove_stream_rows(self, n, lane, "remove_oldest()"))

    def take(self, n: int, lanes: Any = None, *, timeout: float | None = 0) -> DataT | None:
        """Take the ``n`` oldest rows of each stream out, and return them as ``[B, n]``.

        The buffer is then a queue: each row is taken once, also if several processes share it. Rows
        are returned as stored, without transforms. The streams are in the order of ``lanes``, or in
        that of their keys. Without ``lane_key``, the lanes of the storage are the streams, or all
        rows are one stream.

        With a LaneWriter or EpisodeWriter the rows are removed at once, unless processes share a
        storage with ``dedup_next``. In other buffers they keep their slots until new rows replace
        them, and samplers can still draw them. ``extend(overwrite=False)`` replaces no other rows.

        Args:
            lanes: streams, named by their values of the lane key, or lanes by number; None for the
                ``lanes`` of the LaneWriter, or else for all that have rows left.
            timeout: seconds to wait for missing rows; None for no limit, 0 to raise at once. A
                waiting call holds no lock.

        Returns:
            The rows; None after ``close`` or ``shutdown``, until ``reopen``.

        Raises:
            NotEnoughData: with ``timeout=0``, a stream has too few rows, or none.
            TimeoutError: the rows did not come in time.
            IndexError: there is no such lane, or the ``lanes`` of the LaneWriter do not name it.
            ValueError: ``n`` exceeds the rows of a stream; no stream is named, or one twice; or the
                sampler uses rows up.
            RuntimeError: the storage has no tensors, or rows of streams were placed by hand.

        After an error nothing has changed. If a process is killed during the call, its rows count
        as taken only if the call was about to return. Cost: O(rows taken + streams * log rows).

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"),
            ...                   writer=LaneWriter(4))
            >>> env = torch.arange(6) % 2
            >>> _ = rb.extend(TensorDict({"env": env, "x": torch.arange(6)}, [6]))
            >>> rb.take(2)["x"], len(rb)
            (tensor([[0, 2],
                    [1, 3]]), 2)
        """
        return self._observed(stream_rows.take_rows(self, n, lanes, timeout))

    def close(self) -> None:
        """End the waits of ``take`` and ``extend(overwrite=False)`` in all processes.

        Waiting and later calls of ``take`` return None, and those of ``extend(overwrite=False)``
        raise ``Closed`` and store nothing. No row is lost: ``reopen`` undoes the call. All other
        calls go on; ``shutdown`` ends the prefetch threads.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> _ = rb.extend(torch.arange(2), overwrite=False)
            >>> rb.close()
            >>> rb.take(1, timeout=60) is None
            True
            >>> rb.reopen()
            >>> rb.take(1)
            tensor([[0]])
        """
        stream_rows.close_queues(self, True)

    def reopen(self) -> None:
        """Undo ``close``, and the effect of ``shutdown`` on ``take``."""
        stream_rows.close_queues(self, False)

    def drain(self, skip: int = 0, *, aligned: bool = False) -> DataT:
        """Remove all rows, and return them in order of time as ``[lanes, T]``.

        All lanes or streams must have equally many rows. No write comes between the read and the
        removal. Rows are returned as stored. TensorDicts also get their row ids under
        ``"position"``, unless they have this key. Rows that were taken are not returned.

        Args:
            skip: number of the oldest rows of each lane that are left out, but also removed.
            aligned: also refuse streams that have got different numbers of rows, of which some were
                overwritten or taken. They count since the rows were loaded, or were first indexed
                in this process.

        Raises:
            NotEnoughData: the lanes have different numbers of rows, or at most ``skip``.
            RuntimeError: the storage has no lanes.
            ValueError: the sampler uses rows up.

        After an error nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
            >>> _ = rb.extend(TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2, 3]))
            >>> rb.drain(skip=1)["x"], len(rb)
            (tensor([[1, 2],
                    [4, 5]]), 0)
        """
        return self._observed(stream_rows.drain_rows(self, skip, aligned))

    def resize(self, n: int) -> int:
        """Change the capacity to ``n`` rows; return the number of rows that were evicted.

        If rows do not fit, the oldest ones are evicted. A TensorDictMaxValueWriter evicts those of
        lowest rank, and an EpisodeWriter whole episodes, in the order of its ``evict``. Rows that
        stay keep their row ids, episodes, tags, priorities, returns and counts of draws. They may
        move to other slots. A row that keeps its slot keeps its generation, and no earlier index
        with its generation names another row. Other buffers over the storage follow.

        Args:
            n: capacity, as ``max_size`` of the storage. With lanes, it counts the rows of all
                lanes, and is rounded up to whole time steps.

        Raises:
            ValueError: ``n`` is below 1, or too small for the rate limiter, or too large for the
                sampler's ``max_capacity``.
            BufferFull: the streams of a LaneWriter, or the protected episodes of an EpisodeWriter,
                do not fit.
            RuntimeError: the storage has ``recover=True`` or ``shared=True``, whose files have a
                fixed size, or is a data set.
            MemoryError, OSError: there is no room for the rows.

        After an error nothing has changed.

        Cost: a copy of all rows. During the call, old and new rows take memory.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
            >>> _ = rb.extend(torch.arange(6))
            >>> rb.resize(3), rb[:]
            (1, tensor([3, 4, 5]))
            >>> rb.resize(5), rb.extend(torch.arange(6, 9)), rb[:]
            (0, tensor([3, 4, 0]), tensor([8, 4, 5, 6, 7]))
        """
        return resizing.resize_rows(self, n)

    def mark_update(self, index: Any) -> None:
        """Give rows the sampler's default priority. No effect without priorities.

        Also call it to report rows that another buffer over the same storage has written.
        """
        with self._locked() as storage:
            self._sampler.mark_update(index, storage=storage)

    # -- reading and editing ----------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...

    @overload
    def __getitem__(self, index: Any) -> DataT: ...

    def __getitem__(self, index: Any) -> Any:
        """Return stored rows in physical order, or a column.

        Args:
            index: int, slice, list, LongTensor or bool mask. For ``ndim > 1`` also a tuple of
                these. It applies to the layout of written data, so that ``rb[i] == rb[:][i]``. A
                key selects a column of ``rb[:]``.

        The rows are collated and transformed. Without transforms, ints and slices of tensor
        storages return views. TensorDicts of a TensorDictReplayBuffer carry ``index``, as samples
        do. It is int64 in the shape of the rows, or ``[..., ndim]`` with lanes. TensorDicts of a
        ReplayBuffer do not carry it.

        Raises:
            IndexError: a row is not stored.
            KeyError: the key does not exist.
            RuntimeError: nothing was written yet.
        """
        if edit.is_key(index):
            return edit.column_of(self[:], index)
        cells: list[torch.Tensor] = []
        rows = edit.rows_at(self, index, cells)
        if not cells or not is_tensordict(rows):
            return rows
        return edit.with_index(rows, cells[0], self._storage)

    def read_all_in_order(self, end: int | None = None) -> DataT:
        """Return all stored rows, or the first ``end``, in slot order: ``rb[:end]``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(5))
            >>> rb.read_all_in_order(), rb.read_all_in_order(end=2)
            (tensor([3, 4, 2]), tensor([3, 4]))
        """
        return self[:end]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored rows, or a column if ``index`` is a key.

        Inverse transforms apply to rows. Length, cursor, ``write_count``, priorities and
        generations do not change.

        Values for all rows may add columns, as in ``rb["advantage"] = x``, ``rb[:] = rows`` and
        ``write_all(rows)``. Rows written later without these columns get zeros in them, until they
        are edited. An edit whose rows lack added columns leaves these columns unchanged. After an
        added column, the buffer draws its prefetched batches again.

        Raises:
            IndexError: a row is not stored.
            SchemaError: keys, shapes or dtypes differ, or a new key would mark the ends of
                episodes.
            RuntimeError: columns are added to rows that are shared, recovered, or from a data set.

        A new column needs memory for all slots. It is stored separately from the rows' records, so
        a sample makes one more memory access per row.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> _ = rb.extend(TensorDict({"reward": torch.arange(3.0)}, [3]))
            >>> rb["advantage"] = rb["reward"] - rb["reward"].mean()
            >>> rb[:2]["advantage"]
            tensor([-1.,  0.])
            >>> _ = rb.add(TensorDict({"reward": torch.tensor(7.0)}, []))
            >>> rb["advantage"]
            tensor([-1.,  0.,  1.,  0.])
        """
        edit.set_rows(self, index, value)

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first ``end`` stored rows in slot order: ``rb[:end] = data``.

        Args:
            data: the new rows. If they replace all stored rows, they may have new keys.
            end: number of rows; None for as many as ``data`` has.

        Raises:
            IndexError: more rows are given than are stored.
            SchemaError, RuntimeError: as for ``rb[...] = data``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(3))
            >>> rb.write_all(torch.tensor([7, 8]))
            >>> rb[:]
            tensor([7, 8, 2])
        """
        edit.set_first_rows(self, data, end)

    def set_(self, key: Any, value: torch.Tensor) -> Self:
        """Replace a whole column; return the buffer. Transforms do not apply.

        To add a column, use ``rb[key] = value``.

        Args:
            key: a stored key; a tuple for a nested key.
            value: a tensor ``[N, *F]``; with lanes, ``[*lanes, T, *F]``.

        Raises:
            KeyError: the column does not exist.
            SchemaError: the shape or dtype differs; nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
            >>> rb.set_("x", torch.tensor([1.0, 2.0]))["x"]
            tensor([1., 2.])
        """
        return self.set_at_(key, value, None)

    def set_at_(self, key: Any, value: torch.Tensor, index: Any) -> Self:
        """Replace some rows of a column; return the buffer. Transforms do not apply.

        Args:
            value: a tensor ``[K, *F]``, or ``[*F]`` if ``index`` is an int.
            index: int, slice, list, LongTensor or bool mask of rows.

        Raises:
            KeyError, IndexError, SchemaError: as for ``set_`` and indexing; nothing has changed.
        """
        with self._locked() as storage:
            edit.columns_of(self).edit_columns(
                {unravel(key): value}, index, time_dim=edit.layout_of(self, storage)
            )
        return self

    def update_(
        self,
        input_dict_or_td: Any,
        clone: bool = False,
        *,
        keys_to_update: Sequence[Any] | None = None,
    ) -> Self:
        """Replace several whole columns; return the buffer. Transforms do not apply.

        Args:
            input_dict_or_td: nested mapping or TensorDict of columns ``[N, *F]``.
            clone: copy the values first. Needed if the values are views of the buffer's own
                columns.
            keys_to_update: replace only these keys, and all keys nested below them. Keys missing
                from the input are ignored.

        Raises:
            KeyError, SchemaError: as for ``set_``; nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(TensorDict({"a": torch.zeros(1), "b": torch.ones(1)}, [1]))
            >>> _ = rb.update_({"a": rb["b"], "b": rb["a"]}, clone=True)
            >>> rb["a"], rb["b"]
            (tensor([1.]), tensor([0.]))
        """
        edit.set_columns(self, input_dict_or_td, clone, keys_to_update=keys_to_update)
        return self

    # -- priorities and conditional updates -------------------------------------------------------

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Set the priorities of rows, if the sampler has priorities.

        Args:
            index: slots, int64 ``[K]`` (``[K, ndim]``). Or, without ``priority``, a TensorDict as
                for ``update_tensordict_priority``.
            priority: a number, or a tensor ``[K]`` or ``[K, 1]``. All values are finite and not
                negative.
            generation: the generation of each slot when it was sampled. Slots written since are
                skipped.

        If the sampler has no priorities, nothing changes and a UserWarning is issued.

        Example:
            >>> import torch, warnings
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> _ = rb.extend(torch.zeros(2))
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
            >>> str(caught[0].message)
            'RandomSampler has no priorities; the update has no effect'
        """
        if not self._initialized:
            self._ready()
        if not self._sampler.prioritized and priorities.without_priorities(self._sampler, above=1):
            return
        if priority is None and is_tensordict(index):
            self.update_tensordict_priority(index)
            return
        values = priority
        if not isinstance(values, torch.Tensor):
            # Python numbers would lose half of their digits in torch's default dtype.
            values = as_tensor(priority, dtype=torch.float64)
        dims = values.ndim
        if dims > 1 and values.shape[-1] == 1 and values.numel() == values.shape[0]:
            values = values.reshape(-1)
        elif dims > 1 and values.ndim == self._storage.ndim:
            # The value is in the layout of written data. The index from `extend` has time first.
            values = values.transpose(0, self.dim_extend).reshape(-1)
        with self._locked(settled=False) as storage:
            self._sampler.update_priority(index, values, storage=storage, generation=generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities that the learner has written into a sample.

        Args:
            data: a TensorDict from ``sample``, with values under ``priority_key``. Their shape is
                ``[B]``, ``[B, 1]``, or has more dimensions, which are reduced.

        Rows that were overwritten since the sample are skipped. If the sampler has no priorities,
        nothing happens. There is no warning, because a learner may call this method after every
        batch. In a buffer of sequences, an anchor gets the largest priority among the valid rows of
        its window. Other rows keep their priorities.

        Raises:
            KeyError: the data has no ``priority_key`` or no ``index``.
            TypeError: the data is not a TensorDict.
            ValueError: a priority is NaN, negative or infinite; nothing has changed.
        """
        priorities.update_from_sample(self, data)

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Write values into rows whose slots have not been overwritten.

        A row is live if its slot still has the given generation. Other rows stay unchanged.

        Args:
            index: slots from a sample, int64 ``[K]`` or ``[K, ndim]``.
            generation: ``index_generation`` of the slots, int64 ``[K]``; -1 is never live.
            patch: a mapping of keys to tensors ``[K, *F]``, or a TensorDict. For ``ndim > 1`` also
                in the layout of written data, ``[*lanes, T, *F]``. ``index`` must then be the index
                that ``extend`` returned for that data.
            version_key, version: given together or not at all. ``version`` is an int, or one int
                per row. A live row is patched only if its ``version`` is at least the stored
                version under ``version_key``. The patch stores the new version.
            require_newer: patch only if ``version`` is larger than the stored one.

        If a row occurs several times, its last values are stored. With versions, the values with
        the highest version are stored. If several values have this version, the last of them are
        stored. A patch does not advance the generation.

        Raises:
            RuntimeError: the writer does not track generations, the storage is a list, or nothing
                is stored.
            KeyError: a patch key or the version key is not stored.
            TypeError: the patch is not a mapping.
            ValueError: shapes, dtypes or lengths differ, or the version key is in the patch.

        If it raises, nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2),
            ...                   writer=RoundRobinWriter(track_generations=True))
            >>> _ = rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
            >>> seen = rb.sample(8)
            >>> _ = rb.add(TensorDict({"x": torch.ones(())}, []))  # displaces the record in slot 0
            >>> result = rb.update_if_present(
            ...     index=torch.tensor([0, 1]), generation=torch.tensor([0, 0]),
            ...     patch={"x": torch.tensor([5.0, 5.0])})
            >>> result.updated.tolist(), rb["x"].tolist()
            ([False, True], [1.0, 5.0])
        """
        with self._locked() as storage:
            columns = patchable(storage, self._writer)
            handles, generation = checked_handles(storage.ndim, index, generation)
            checked = checked_patch(
                columns.leaf,
                len(handles),
                patch,
                version_key,
                version,
                require_newer,
                ndim=storage.ndim,
                time_dim=self.dim_extend,
            )
            live, rejected = patched(columns, handles, generation, checked)
        return ConditionalUpdateResult(live, rejected, batch_size=[len(handles)])

    # -- exchanging components --------------------------------------------------------------------

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Replace the storage; return the previous one.

        The writer and the sampler use the new storage from then on, and the buffer follows its
        writes. The next write continues after the storage's newest row. A rate limiter restarts its
        counts.

        Args:
            storage: the new storage.
            collate_fn: the new ``collate_fn``; None for the new storage's default.

        Returns:
            The previous storage.

        Raises:
            TypeError: ``storage`` is not a Storage.
            ValueError: the other components cannot work with the storage; nothing has changed.
            RuntimeError: the buffer is shared.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, TensorStorage
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> old = rb.set_storage(TensorStorage(torch.arange(2)))
            >>> len(old), len(rb)
            (0, 2)
        """
        return components.exchange_storage(self, storage, collate_fn)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; return the previous one.

        The new sampler can immediately draw all stored rows.

        Raises:
            TypeError: ``sampler`` is not a Sampler.
            ValueError: the sampler has ``drop_last`` but no batch size is known, or another buffer
                uses it. Also if the sampler draws slices, but the writer does not keep the order of
                rows.
            RuntimeError: the buffer is shared.

        Example:
            >>> from replaykit import ReplayBuffer, SamplerWithoutReplacement
            >>> rb = ReplayBuffer()
            >>> rb.set_sampler(SamplerWithoutReplacement())
            RandomSampler()
        """
        return components.exchange_sampler(self, sampler)

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer; return the previous one.

        The new writer continues at the storage's cursor.

        Raises:
            TypeError: ``writer`` is not a Writer.
            ValueError: the writer cannot work with the storage or with the sampler.
            RuntimeError: the buffer is shared.

        Example:
            >>> from replaykit import ImmutableDatasetWriter, ReplayBuffer
            >>> rb = ReplayBuffer()
            >>> rb.set_writer(ImmutableDatasetWriter())
            RoundRobinWriter(write_count=0)
        """
        return components.exchange_writer(self, writer)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Replace the random generator; None for torch's global generator."""
        check_generator(generator)
        with self._locked():
            draw.rewind(self)
            self._generator = generator
            self._sampler.generator = generator

    def share(self, shared: bool = True) -> Self:
        """Let processes that receive the buffer share its rows; return the buffer.

        All of them write and sample the same rows, as with ``shared=True`` in the constructor. Call
        this method before the first write, and before other threads use the buffer.

        Args:
            shared: False has no effect, and is allowed only if the buffer is not shared.

        Raises:
            ValueError: a component cannot be shared, rows are already stored, or ``prefetch`` is
                set. Nothing has changed.
            RuntimeError: ``shared=False`` for a shared buffer.

        Example:
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> rb.share().shared
            True
        """
        components.share_rows(self, shared)
        return self

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end of the chain; return the buffer.

        Args:
            transform: a callable, or an object with ``forward`` or ``inv``.
            invert: use ``inv`` for reads and ``forward`` for writes.

        Raises:
            RuntimeError: ``transform`` is neither a callable nor such an object.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.append_transform(lambda x: x + 1).extend(torch.zeros(2))
            >>> rb[:]
            tensor([1., 1.])
        """
        components.insert_into_chain(self, None, transform, invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Insert a transform before position ``index`` of the chain; return the buffer.

        Prefetched batches are drawn again.

        Raises:
            RuntimeError: ``transform`` is neither a callable nor an object with ``forward`` or
                ``inv``.
            IndexError: ``index`` is not a position in the chain.
        """
        components.insert_into_chain(self, index, transform, invert)
        return self

    # -- saving -----------------------------------------------------------------------------------

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the whole buffer into a directory, or leave the directory unchanged.

        A checkpoint holds the stored rows, cursor, write count and generations. It also holds the
        states of the sampler, the transforms and the generator. Prefetched batches are drawn again
        after the save, and after a load. The files are raw arrays and JSON, without pickle.

        The checkpoint holds the buffer as of the instant of the call. Other threads can sample and
        write meanwhile. They wait at most while 8 MiB are copied. A writer that is about to
        overwrite unsaved rows also waits until these rows are copied.

        Args:
            path: the directory. It is created with its parents. If it holds a checkpoint, it is
                replaced atomically.
            keep: the maximum number of checkpoints in the directory afterwards, including the new
                one. ``loads(path, version=...)`` reads the older ones.

        Raises:
            TypeError: a value cannot be saved. The error names it, and nothing was written.
            ValueError: ``keep`` is below 1, or ``path`` is empty.
            CheckpointError: ``manifest.json`` in the directory does not belong to a checkpoint.
                Other files in the directory are not changed.
            OSError: a file operation failed; the error names the file.

        Cost: the first save makes one pass over the bytes of the stored rows. A later save may
        write fewer rows, if one of this buffer's last four saves has written to the same directory.
        It then writes only the rows and priorities that were written since that save, in chunks of
        1/4096 of the capacity. It writes all rows if code outside the buffer may have changed them.
        For a TensorStorage this is always so. For other storages it is so while a view of rows
        (``rb[a:b]``) exists, and for one save after that. Rows of lists, and rows that pass through
        a hook, are always written.

        With ``shared=True`` it is enough that one of the last sixteen saves by any process has
        written to the directory. A save then writes the rows that any process has written since
        that save. It first copies these rows in memory, while writers wait. A first save therefore
        needs memory for all stored rows and priorities. It frees that memory in steps of about 64
        MiB as it writes.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=2,
            ...                   generator=torch.Generator().manual_seed(0))
            >>> _ = rb.extend(torch.arange(10))
            >>> other = ReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     other.loads(folder)
            >>> [bool((rb.sample() == other.sample()).all()) for _ in range(3)]
            [True, True, True]
        """
        save_snapshot(path, lambda base: state.snapshot_of(self, path, base), keep=keep)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        mmap: bool = False,
        verify: bool | None = None,
    ) -> None:
        """Load a buffer that ``dumps`` saved.

        This buffer and the saved one then draw the same batches. The writer must be of the saved
        kind. The storage may have another kind and capacity. With the same capacity every row keeps
        its slot. With another capacity the rows are stored in write order from slot 0. A smaller
        storage keeps the newest rows, or the largest with a TensorDictMaxValueWriter. A UserWarning
        reports the number of dropped rows. The buffer still stores where their episodes began, as
        in a ring that has overwritten first rows.

        The sampler may also be of another kind. It then starts over with the loaded rows. A
        prioritized sampler uses the saved priorities, or 1 for each
        row if none were saved. A UserWarning reports the choice.

        The load ends open episodes. The first write or ``flush`` after the load stores the rows
        that transforms held back. These rows are cut short, so that none of them spans the restart.

        Args:
            path: the directory.
            version: the number of a checkpoint that ``dumps(path, keep=...)`` has kept.
                ``replaykit.checkpoint.checkpoint_versions`` lists the numbers. None for the newest.
            mmap: leave the rows in the files, and read them page by page as they are sampled. A
                checkpoint of any size then opens in milliseconds. The files are mapped
                copy-on-write, so later writes change pages in memory and never reach the files. The
                files may be replaced or removed meanwhile, but must not be truncated or written to.
                The storage must be a LazyTensorStorage on the CPU, without load hooks and never
                written to. Its ``dedup_next`` and ``lane_key`` must equal the saved ones. Its
                capacity must let every row keep its slot.
            verify: read every file and compare its checksum. None verifies only without ``mmap``.
                File sizes and the checksum of the manifest are always compared.

        Raises:
            FileNotFoundError: there is no checkpoint, or no checkpoint of that version.
            CheckpointError: the checkpoint is damaged, or has a newer format; the error names the
                file.
            ValueError: keys, shapes, dtypes, lanes or kind of writer differ. With ``mmap``, also if
                the storage cannot map these files.
            OSError: the operating system cannot map the files.

        If rows get other slots, because the capacity differs, then an index and a generation from
        before the save do not name them.

        The load checks everything first. If it raises, nothing has changed. Without ``mmap``, the
        buffer does not use the files after the load. With ``mmap``, some state is read later, in
        O(rows). The first draw or update reads priorities, draw counts, the order of policy
        versions and the rest of a pass. The first write, or first use of episodes, reads the
        columns that show where episodes end.

        Cost: one pass over the files. With ``mmap``, the load reads all state except rows and
        priorities. The size of that state depends on the rows in two cases only. If rows were
        placed, cleared, ranked or in streams (``lane_key``), the load reads 8 to 16 bytes per row.
        For a pass without replacement over episodes, it reads 8 bytes per episode.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
            >>> _ = rb.extend(torch.arange(4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     other = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
            ...     other.loads(folder, mmap=True)
            ...     _ = other.extend(torch.tensor([40, 50]))
            ...     rb.loads(folder)
            >>> other[:], rb[:]
            (tensor([40, 50,  2,  3]), tensor([0, 1, 2, 3]))
        """
        state.load_checkpoint(self, path, version=version, mmap=mmap, verify=verify)

    dump = save = dumps

    load = loads

    def register_save_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows before ``dumps`` writes them.

        The hook receives a copy of all rows. It also receives the path as ``path=`` if it accepts
        that argument. If the hook has attributes ``shift`` and ``is_full``, they are set before the
        call. ``shift`` is the slot after the newest row, and ``is_full`` is True if every slot
        holds a row. Hooks run in the order of registration. They are not saved.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.tensor([1.0, 2.0]))
            >>> rb.register_save_hook(lambda data: data * 2)
            >>> rb.register_load_hook(lambda data: data / 2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb.dumps(folder)
            ...     rb.loads(folder)
            >>> rb[:]
            tensor([1., 2.])
        """
        self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows after ``loads`` has read them.

        The hook receives the saved rows. If it accepts an argument ``out=``, it also receives the
        buffer's current rows, or None if there are none. Hooks run in the order of registration.
        """
        self.storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary with copies of everything that ``dumps`` saves.

        Later writes do not change the dictionary, and changes of the dictionary do not affect the
        buffer.

        Raises:
            TypeError: rows are pytrees other than TensorDicts and tensors.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(2))
            >>> state = rb.state_dict()
            >>> rb.empty()
            >>> rb.load_state_dict(state)
            >>> rb[:]
            tensor([0, 1])
        """
        return state.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state from ``state_dict``, by the rules of ``loads``.

        Raises:
            ValueError: entries are missing, or do not fit this buffer; nothing has changed.
        """
        state.load_state(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return state.pickled_state(self)

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        state.restore_pickled(self, pickled)

    # -- episodes ---------------------------------------------------------------------------------

    @property
    def episodes(self) -> Episodes:
        """The stored episodes as objects, with lookups by index; see `Episodes`.

        Cost: none before the first access.

        Raises:
            RuntimeError: the storage has no episode index, or rows are not TensorDicts.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> done = torch.tensor([0, 0, 1, 0], dtype=torch.bool)
            >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [4]))
            >>> [episode.length for episode in rb.episodes]
            [3, 1]
        """
        with self._locked() as storage:
            columns = with_episodes(storage)
            if columns.initialized:
                _ = columns.episodes  # raises if rows have no keys
            return Episodes(columns)

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """End the open episodes, although no flag marks their end.

        The next rows of these streams belong to new episodes, which begin in the middle. If the
        newest row of a stream has ended its episode, the next row follows a reset as usual. Before
        the cut, the buffer stores the rows that transforms hold back, as ``flush`` does, in all
        lanes.

        Args:
            lane: number of a lane, or several numbers; None for all lanes. With ``lane_key``, a
                lane is a stream of the storage, named by its value in that column.

        Raises:
            IndexError: the lane does not exist.
            RuntimeError: the storage has no episode index.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> for _ in range(2):
            ...     _ = rb.extend(TensorDict({"next": {"done": torch.zeros(3, dtype=bool)}}, [3]))
            ...     rb.cut()
            >>> rb.episodes.lengths
            tensor([3, 3])
        """
        with self._locked() as storage:
            storage.lanes_named(lane)  # raises before anything is stored
            if type(storage).cut is not Storage.cut:
                write.flush_rows(self)
            self._writer.cut(lane)
        self._observed(None)

    def tag(self, index: Any, values: Mapping[str, Any], *, generation: Any = None) -> int:
        """Set tags of the episodes of rows, such as a task, a source or a success.

        A tag is a value of an episode. Its first value fixes shape and dtype, and episodes without
        a value have zeros. Tags may be set at any time while a row of the episode is stored. They
        are part of checkpoints and of commits. Samplers choose episodes by tags
        (``SliceSampler(where=)``), the transforms ``Tag`` and ``ExpandTag`` return them, and an
        EpisodeWriter protects episodes by a tag.

        Args:
            index: rows of the episodes, int64 ``[K]``, or ``[K, ndim]`` with lanes.
            values: the value of each tag, for all of these episodes; or a tensor ``[K, *F]``.
            generation: the generations of the rows, int64 ``[K]``. Values for rows that were
                overwritten or removed are dropped.

        Returns:
            The number of rows that are still stored.

        Raises:
            RuntimeError: the storage has no episode index.
            SchemaError: shape or dtype differ from the first value.
            TypeError, ValueError: the index, a count of values or a name is wrong.

        After an error nothing has changed. Cost: O(K log J) for J episodes.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
            >>> solved = SliceSampler(slice_len=1, where=lambda episodes: episodes["success"])
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=solved, batch_size=64)
            >>> done = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)
            >>> index = rb.extend(TensorDict({"t": torch.arange(5), "next": {"done": done}}, [5]))
            >>> rb.tag(index[2:3], {"success": True})
            1
            >>> rb.sample()["t"].unique().tolist()
            [2, 3, 4]
        """
        return tag_episodes(self, index, values, generation)

    def _pins(self, pin_memory: bool | None) -> bool:
        pinned = self._pin_memory if pin_memory is None else bool(pin_memory)
        return pinned and self._target is None

    # -- events -----------------------------------------------------------------------------------

    def on(
        self, event: str, fn: Callable[[Event], object], *, state: Any = None
    ) -> Callable[[], None]:
        """Call a function after each event of a kind, in the thread that causes the event.

        The function is called after the change, without a lock. If it raises, the error is logged,
        and the caller of the buffer does not notice it. Ctrl-C waits until all functions have
        returned. They are neither pickled nor saved, and forked processes do not call them.

        Args:
            event: "write" after rows are stored, "episode_end" if their flags end episodes,
                "evict" after stored rows are replaced or removed, or "sample" after a batch is
                delivered. Draws of loaders and ensembles cause no events.
            fn: a function of an `Event`.
            state: an object with ``state_dict`` and ``load_state_dict``, which checkpoints of the
                buffer include.

        Returns:
            A function that removes ``fn``.

        Raises:
            ValueError: the kind is unknown.
            TypeError: ``fn`` cannot be called, or ``state`` lacks a method.

        Cost: a lock of the storage for each write. Without any function, there is no cost.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> remove = rb.on("evict", lambda event: print(event.count, "rows were replaced"))
            >>> _ = rb.extend(torch.zeros(2))
            >>> _ = rb.extend(torch.zeros(3))
            2 rows were replaced
            >>> remove()
        """
        self._ready()
        with self._making:
            observers = self._observers
            if observers is None or observers.inherited:
                observers = Observers(self)
            remove = observers.add(event, fn, state)
            self._observers = observers
        return remove

    # -- handles ----------------------------------------------------------------------------------

    def client(self) -> ReplayBuffer:
        """Return the buffer itself, which is its own handle in this process.

        ``RayReplayBuffer.client()`` returns a handle that can be sent to other processes. With
        ``shared=True`` the buffer itself can be sent.
        """
        return self

    @classmethod
    def join(cls, path: str | os.PathLike[str], **parts: Any) -> Self:
        """Return a buffer over the rows that processes share in a folder.

        The calling process need not be related to the process that made the buffer with
        ``shared=True``. It may write, sample and set priorities like all others. If the storage has
        ``recover=True``, the rows are also found after all processes have ended or were killed.

        Args:
            path: the ``scratch_dir`` of the buffer's storage.
            parts: arguments of the constructor other than ``storage`` and ``shared``. The sampler
                has priorities, and there is a rate limiter, if the other processes' buffers have.

        Raises:
            FileNotFoundError: no processes have shared rows in the folder.
            ValueError: a part is not that of the other processes; the error names it.
            RuntimeError: all processes have ended, and the storage has no ``recover=True``.
            RuntimeError: a process recovers the rows without ``shared=True``, for five seconds.
            CheckpointError: a file in the folder is damaged.

        Cost: the files are mapped, not read. An index of episodes or priorities reads its columns
        at its first use.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from replaykit import LazyMemmapStorage, ReplayBuffer
            >>> folder = tempfile.mkdtemp()
            >>> storage = LazyMemmapStorage(10, scratch_dir=folder, recover=True)
            >>> rb = ReplayBuffer(storage=storage, shared=True)
            >>> _ = rb.extend({"x": torch.arange(3)})
            >>> other = ReplayBuffer.join(folder)  # also in another process
            >>> other[:]["x"].tolist()
            [0, 1, 2]
        """
        for name in ("storage", "shared"):
            if name in parts:
                raise TypeError(f"join() finds the {name} in the folder; got {name}=")
        storage = join_storage(Path(path).expanduser())
        return cls(storage=storage, shared=True, **parts)  # type: ignore[arg-type]

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Return a Ray actor class of this buffer.

        Its ``.remote(...)`` takes the buffer's arguments and starts an actor.

        Args:
            remote_config: options of ``ray.remote``. Default: one CPU and no GPU.

        Raises:
            RuntimeError: ray is not installed.
        """
        return actor_class(cls, remote_config)

    # -- called by prefetch threads ---------------------------------------------------------------

    _read_ahead = draw.read_ahead
    _finish = deliver.finish_batch

    # -- called by the storage ------------------------------------------------------------------

    def _about_to_write(self) -> None:
        """Prepare the sampler for the first write to loaded rows.

        The storage calls this with its lock held.

        Raises:
            CheckpointError: the saved data for the sampler are contradictory.
        """
        self._sampler.about_to_write()
