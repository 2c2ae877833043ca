"""Make, lock and pace the components of a buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sized
from typing import Any, ClassVar, Generic, cast

import numpy as np
import torch
from tensordict import TensorDict
from typing_extensions import TypeVar

from replaykit._compat import Uncompiled, is_tensordict
from replaykit.buffer.component_checks import (
    check_consuming,
    check_not_ahead,
    check_shareable,
    check_transforms,
    check_transforms_of,
    common_parts,
    consuming_sampler,
)
from replaykit.buffer.prefetch import Drawn, Prefetcher
from replaykit.keywords import Replaced, checked_keywords
from replaykit.pace import LimiterQueue, RateLimiter
from replaykit.samplers import PrioritizedSampler, RandomSampler, Sampler, SampleUnit, Transition
from replaykit.storages import ListStorage, Storage
from replaykit.storages.save_hooks import check_no_checkpointer
from replaykit.structure import flatten
from replaykit.ted import unravel
from replaykit.transfer import Staging, device_named
from replaykit.transforms import Compose
from replaykit.transforms.history import needs_of
from replaykit.writers import RoundRobinWriter, Writer

__all__ = [
    "BufferCore",
    "DataT",
    "LockedStorage",
    "Pacing",
    "PrioritizedT",
    "SamplerT",
    "StorageT",
    "WriterT",
    "as_chain",
    "check_order",
    "checked_batch_size",
    "checked_limiter",
    "rows_given",
    "rows_of",
    "rows_stored",
]

# By default a plain ``ReplayBuffer`` means any buffer of TensorDicts. The variables are covariant,
# so that this includes a buffer with a special sampler.
DataT = TypeVar("DataT", default=TensorDict, covariant=True)
StorageT = TypeVar("StorageT", bound=Storage, default=Storage, covariant=True)
SamplerT = TypeVar("SamplerT", bound=Sampler, default=Sampler, covariant=True)
WriterT = TypeVar("WriterT", bound=Writer, default=Writer, covariant=True)
PrioritizedT = TypeVar("PrioritizedT", bound=Sampler, default=PrioritizedSampler, covariant=True)


class LockedStorage:
    """A context manager that holds the lock of a buffer's current storage.

    If ``set_storage`` replaces the storage during the wait for the lock, the wait continues for the
    lock of the new storage. This is a class, because a context manager made from a generator takes
    ten times as long as the lock itself.
    """

    __slots__ = ("_buffer", "_lock", "_patient", "_settled")

    def __init__(self, buffer: BufferCore, patient: bool, settled: bool) -> None:
        self._buffer, self._patient, self._settled = buffer, patient, settled

    def __enter__(self) -> Storage:
        buffer = self._buffer
        while True:
            storage = buffer._storage
            lock = self._lock = storage.lock
            if self._patient:
                lock.acquire_patiently()
            else:
                lock.acquire()
            try:
                if storage is buffer._storage:
                    if self._settled and buffer._prefetcher is not None:
                        buffer._prefetcher.read_all()
                    return storage
            except BaseException:  # an interrupt
                lock.release()
                raise
            lock.release()  # the storage was exchanged during the wait

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Pacing:
    """Tickets for calls that may wait for a rate limiter; None without a limiter."""

    _rate_limiter: RateLimiter | None = None
    _pace: LimiterQueue | None = None

    def _new_pace(self, storage: Storage, *, shared: bool) -> LimiterQueue | None:
        """Return the counts of the rate limiter for a storage; None without a limiter.

        Raises:
            ValueError: the storage is too small for its law.
        """
        if self._rate_limiter is None:
            return None
        self._rate_limiter.check_capacity(storage.max_size)
        return LimiterQueue(self._rate_limiter, storage.recovery.home.folder if shared else None)

    def _pace_stats(self) -> dict[str, Any]:
        if self._rate_limiter is None:
            return {}
        pace = LimiterQueue(self._rate_limiter) if self._pace is None else self._pace
        return pace.stats()

    def _size(self) -> int:
        return len(self)  # type: ignore[arg-type]


def checked_limiter(limiter: object) -> RateLimiter | None:
    """Return the argument ``rate_limiter``; TypeError if it is not a RateLimiter."""
    if limiter is None or isinstance(limiter, RateLimiter):
        return limiter
    raise TypeError(f"expected rate_limiter as a RateLimiter, got {type(limiter).__name__}")


def rows_of(rows: Any) -> int:
    """Return the number of prepared rows, summed over all lanes."""
    batch = getattr(rows, "batch", None)
    return len(rows) if batch is None else math.prod(batch)


def rows_stored(index: torch.Tensor) -> int:
    """Return how many rows were stored, given the index from a writer."""
    return len(index) if index.ndim > 1 else int(np.count_nonzero(index.numpy() >= 0))


def rows_given(data: Any, ndim: int, *, single: bool) -> int:
    """Return the likely number of rows in data before transforms.

    ``single``: the data is a batch of one row.
    """
    if is_tensordict(data) or hasattr(data, "batch_size"):
        shape = tuple(data.batch_size)
    elif isinstance(data, torch.Tensor):
        shape = tuple(data.shape)
    elif isinstance(data, list):
        if not data:
            return 0
        return len(data) * (1 if ndim == 1 else rows_given(data[0], ndim - 1, single=False))
    else:
        try:
            leaves = flatten(data, 0)[1]
        except TypeError:
            return 1 if single or not isinstance(data, Sized) else len(data)
        return max((rows_given(leaf, ndim, single=single) for leaf in leaves.values()), default=0)
    return math.prod(shape[:ndim]) if shape else 1


class BufferCore(Pacing, Uncompiled, Generic[DataT, StorageT, SamplerT, WriterT]):
    """A storage, a sampler, a writer and transforms, with their locks and generator.

    ``storage.lock`` guards everything that a draw or a write reads or changes: rows, ledger,
    components, the sampler's state and kept draws. All other work runs without the lock.
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

    @checked_keywords
    def __init__(
        self,
        *,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        sample_unit: SampleUnit | None = None,
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
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory are mutually exclusive, got both")
        if transform_factory is not None and not callable(transform_factory):
            raise TypeError(f"expected a callable transform_factory, got {transform_factory!r}")
        if sample_unit is not None and not isinstance(sample_unit, SampleUnit):
            raise TypeError(
                f"sample_unit must be a SampleUnit instance, got {type(sample_unit).__name__}"
            )
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"expected a callable collate_fn, got {type(collate_fn).__name__}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"expected a torch.Generator, got {type(generator).__name__}")
        for name, given, kind in (
            ("storage", storage, Storage),
            ("sampler", sampler, Sampler),
            ("writer", writer, Writer),
        ):
            if given is not None and not isinstance(given, kind) and not callable(given):
                raise TypeError(
                    f"{name} must be either a {kind.__name__} or a callable returning a {name} "
                    f"instance, got {_class_of(given)}"
                )
        self._rate_limiter = checked_limiter(rate_limiter)
        self._batch_size = None if batch_size is None else checked_batch_size(batch_size)
        depth = _checked_prefetch(prefetch, self._batch_size)
        chosen = consuming_sampler(consume_after_n_samples, sampler, depth)
        if dim_extend is not None and (type(dim_extend) is not int or dim_extend < 0):
            raise ValueError(f"dim_extend must be a positive value or 0, got {dim_extend!r}")
        self._dim_extend = dim_extend
        self._dim_of_storage = dim_extend is None
        self._sample_unit = Transition() if sample_unit is None else sample_unit
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._target = None if device is None else device_named(device)
        self._staging: Staging | None = None
        self._contiguous = bool(contiguous)
        self._shared = bool(shared)
        if shared:
            check_not_ahead(depth)
        self._generator = generator
        self._priority_key = unravel(priority_key)
        self._prefetch_depth = depth
        self._prefetcher: Prefetcher | None = None
        # Draws whose batches failed; they come next.
        self._retry: list[Drawn] = []
        self._draws_made = 0
        self._pass_ended = False
        # True after a load, until the rows are stored that transforms had held back before it.
        self._restarted = False
        self._closed = False
        self._initialized = False
        self._making = threading.RLock()
        self._makers = (storage, chosen, writer, transform, transform_factory)
        if delayed_init is None:
            delayed_init = transform_factory is not None
        if not delayed_init:
            self._initialize()

    def _initialize(self) -> None:
        """Make the components; keep none of them if an error occurs.

        A later call then tries again.
        """
        storage_maker, sampler_maker, writer_maker, transform, transform_factory = self._makers
        chain = as_chain(transform if transform_factory is None else transform_factory())
        sampler: Sampler = _made(sampler_maker, Sampler, RandomSampler)
        writer: Writer = _made(writer_maker, Writer, RoundRobinWriter)
        if getattr(sampler, "drop_last", False) and self._batch_size is None:
            raise ValueError(
                "Samplers with drop_last=True must work with a predictable batch-size: give the "
                "buffer a batch_size"
            )
        check_order(sampler, writer)
        # After all other checks, because making a storage may take long.
        storage: Storage = _made(storage_maker, Storage, lambda: ListStorage(1000))
        dim_extend = self._time_dim(storage)
        self._sample_unit.check(storage, sampler)
        self._check_consuming(sampler, storage, writer, chain)
        if self._shared:
            check_shareable(storage, writer, chain)
        if self._rate_limiter is not None:
            self._rate_limiter.check_capacity(storage.max_size)
        joining = False
        self._claim(sampler, writer)
        if self._shared:
            parts = common_parts(sampler, self._rate_limiter)
            joining = storage.share(parts)  # type: ignore[attr-defined]
        self._pace = self._new_pace(storage, shared=self._shared)
        writer.register_storage(storage)
        sampler.generator = self._generator
        sampler.attach(storage)
        self._dim_extend = writer.time_dim = dim_extend
        self._storage, self._sampler, self._writer = storage, sampler, writer
        self._set_transforms(chain)
        if self._prefetch_depth:
            self._prefetcher = Prefetcher(self._prefetch_depth, cast(Any, self))
        storage.attach(cast(Any, self))
        self._makers = (None, None, None, None, None)
        if self._pace is not None:
            self._pace.start_from(len(storage), joining=joining)
        self._initialized = True

    def _set_transforms(self, chain: Compose) -> None:
        """Set the chain, and compute which neighbours of a row it needs."""
        check_transforms_of(self._sampler, chain)
        if self._shared:
            check_transforms(chain)
        self._chain = chain
        self._needs = needs_of(list(chain))
        self._listening = chain.checking_writes

    def _check_consuming(
        self, sampler: Sampler, storage: Storage, writer: Writer, chain: Compose
    ) -> None:
        depth, unit = self._prefetch_depth, self._sample_unit
        check_consuming(sampler, storage, writer, unit, chain, prefetch=depth, shared=self._shared)

    def _ready(self) -> None:
        if not self._initialized:
            with self._making:
                if not self._initialized:
                    self._initialize()

    def _claim(self, *parts: Sampler | Writer) -> None:
        """Claim a sampler or writer for this buffer alone.

        Raises:
            ValueError: another buffer uses the part, and sharing would change that buffer's rows or
                pass.
        """
        for part in parts:
            owner = part.owner
            if owner is None or owner is self:
                continue
            if getattr(part, "stateless", False) and owner._generator is self._generator:
                continue
            if owner._sampler is part or owner._writer is part:
                raise ValueError(
                    f"expected a {type(part).__name__} for this buffer alone, got one that another "
                    "buffer uses"
                )
        for part in parts:
            part.owner = self

    def _time_dim(self, storage: Storage) -> int:
        """Return the time dimension of written data.

        This is the requested dimension, or by default the storage's last.
        """
        if self._dim_extend is None or self._dim_of_storage:
            return storage.ndim - 1
        if storage.ndim > 1 and self._dim_extend >= storage.ndim:
            raise ValueError(
                f"expected dim_extend below the {storage.ndim} dimensions of the storage's rows, "
                f"got {self._dim_extend}"
            )
        return self._dim_extend

    def _locked(self, *, patient: bool = False, settled: bool = True) -> LockedStorage:
        """Lock the current storage of the buffer; the context yields it.

        Args:
            patient: for a while, let processes that write without pause take the lock first.
            settled: first read the rows of prefetched draws, because the caller may change them.
        """
        if not self._initialized:
            self._ready()
        return LockedStorage(self, patient and self._shared, settled)

    # -- description --------------------------------------------------------------------------

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
        if not self._initialized:
            given = self._makers[0]
            # Unknown until the storage exists.
            capacity = given.max_size if isinstance(given, Storage) else None
            size = len(given) if isinstance(given, Storage) else 0
            count = 0
        else:
            size, count = self._size(), self.write_count
            capacity = self._storage.max_size
        queued = 0 if self._prefetcher is None else len(self._prefetcher)
        room = {} if capacity is None else {"capacity": capacity, "utilization": size / capacity}
        return {
            "size": size,
            "write_count": count,
            "prefetch_queue_size": queued,
            "initialized": self._initialized,
            **room,
            **self._pace_stats(),
        }

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


def _made(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    made = default() if given is None else given if isinstance(given, kind) else given()
    if not isinstance(made, kind):
        raise TypeError(f"expected a callable that returns a {kind.__name__}, got {made!r}")
    return made


def check_order(sampler: Sampler, writer: Writer) -> None:
    """Raise ValueError if the writer does not keep the row order that a sampler needs."""
    if sampler.needs_write_order and not writer.keeps_order:
        raise ValueError(
            f"{type(sampler).__name__} needs rows in the order in which they were written, which "
            f"{type(writer).__name__} does not keep"
        )


def _class_of(given: object) -> str:
    """Return a class name with its package; other libraries use the same names."""
    cls = type(given)
    module = cls.__module__.split(".")[0]
    return cls.__qualname__ if module == "builtins" else f"{module} {cls.__qualname__}"


def as_chain(transform: Any) -> Compose:
    """Return a separate chain for the buffer from the user's transforms."""
    if transform is None:
        return Compose()
    return transform.copy() if type(transform) is Compose else Compose(transform)


def checked_batch_size(batch_size: object) -> int:
    """Return a batch size; ValueError if it is not an int of at least 1."""
    if isinstance(batch_size, np.integer):
        batch_size = int(batch_size)
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"expected batch_size as an int of at least 1, got {batch_size!r}")
    return batch_size


def _checked_prefetch(prefetch: int | None, batch_size: int | None) -> int:
    if prefetch is None or prefetch == 0:
        return 0
    if type(prefetch) is not int or prefetch < 0:
        raise ValueError(f"expected prefetch as an int of at least 0, got {prefetch!r}")
    if batch_size is None:
        raise ValueError(
            "Dynamic batch-size specification is incompatible with multithreaded sampling: "
            "prefetch needs the buffer to have a batch_size"
        )
    return prefetch
