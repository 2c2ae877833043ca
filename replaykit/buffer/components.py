"""Make, check, lock, describe and exchange the components of a buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict
from typing_extensions import TypeVar

from replaykit._compat import arange
from replaykit.buffer.draw import drop_draws, rewind
from replaykit.buffer.prefetch import Prefetcher
from replaykit.declared import Count, read_value
from replaykit.keywords import whole_number
from replaykit.pace import LimiterQueue, RateLimiter
from replaykit.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SampleUnit,
    Transition,
)
from replaykit.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from replaykit.storages.content import Content
from replaykit.storages.removal import check_removable
from replaykit.storages.restorable import why_not_mapped
from replaykit.ted import format_key
from replaykit.transforms import Compose, Windows
from replaykit.transforms.history import needs_of
from replaykit.writers import RoundRobinWriter, Writer

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer

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

    def __init__(self, buffer: ReplayBuffer, patient: bool, settled: bool) -> None:
        self._buffer, self._patient, self._settled = buffer, patient, settled

    def __enter__(self) -> Storage:
        buffer = self._buffer
        while True:
            storage = buffer._storage
            lock = self._lock = storage.lock
            if self._patient:
                lock.acquire(patient=True)
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


def _made(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    made = default() if given is None else given if isinstance(given, kind) else given()
    if not isinstance(made, kind):
        raise TypeError(f"expected a callable that returns a {kind.__name__}, got {made!r}")
    return made


def as_chain(transform: Any) -> Compose:
    """Return a separate chain for the buffer from the user's transforms."""
    if transform is None:
        return Compose()
    return transform.copy() if type(transform) is Compose else Compose(transform)


def limiter_queue(buffer: ReplayBuffer, storage: Storage, *, shared: bool) -> LimiterQueue | None:
    """Return the counts of the rate limiter for a storage; None without a limiter.

    Raises:
        ValueError: the storage is too small for its law.
    """
    if buffer._rate_limiter is None:
        return None
    buffer._rate_limiter.check_capacity(storage.max_size)
    return LimiterQueue(buffer._rate_limiter, storage.recovery.home.folder if shared else None)


def make_parts(buffer: ReplayBuffer) -> None:
    """Make the components; keep none of them if an error occurs.

    A later call then tries again.
    """
    storage_maker, sampler_maker, writer_maker, transform, transform_factory = buffer._makers
    chain = as_chain(transform if transform_factory is None else transform_factory())
    sampler: Sampler = _made(sampler_maker, Sampler, RandomSampler)
    writer: Writer = _made(writer_maker, Writer, RoundRobinWriter)
    check_order(sampler, writer, buffer._batch_size)
    # After all other checks, because making a storage may take long.
    storage: Storage = _made(storage_maker, Storage, lambda: ListStorage(1000))
    dim_extend = time_dim_of(buffer, storage)
    check_uses(buffer, sampler, storage, writer, chain)
    if buffer._shared:
        check_shareable(storage, writer, sampler)
    if buffer._rate_limiter is not None:
        buffer._rate_limiter.check_capacity(storage.max_size)
    joining = False
    claim_parts(buffer, sampler, writer)
    if buffer._shared:
        parts = common_parts(sampler, writer, buffer._rate_limiter)
        joining = storage.share(parts)  # type: ignore[attr-defined]
    buffer._pace = limiter_queue(buffer, storage, shared=buffer._shared)
    writer.register_storage(storage)
    sampler.generator = buffer._generator
    sampler.attach(storage)
    buffer._dim_extend = writer.time_dim = dim_extend
    buffer._storage, buffer._sampler, buffer._writer = storage, sampler, writer
    set_chain(buffer, chain)
    if buffer._prefetch_depth:
        buffer._prefetcher = Prefetcher(buffer._prefetch_depth, cast(Any, buffer))
    storage.attach(cast(Any, buffer))
    buffer._makers = (None, None, None, None, None)
    if buffer._pace is not None:
        buffer._pace.start_from(len(storage), joining=joining)
    buffer._initialized = True


def chain_of_draws(buffer: ReplayBuffer, storage: Storage, chain: Compose) -> Compose:
    """Return the windows that a sample consists of, if any, followed by the transforms.

    Raises:
        ValueError: a transform does not fit the storage.
    """
    if buffer._windows is not None:
        chain = chain.copy()
        chain.insert(0, buffer._windows)
    for transform in chain:
        if isinstance(transform, Windows):
            transform.bind(getattr(storage, "fps", None))
    return chain


def set_chain(buffer: ReplayBuffer, chain: Compose) -> None:
    """Set the chain, and compute which neighbours of a row it needs."""
    check_transforms_of(buffer._sampler, chain)
    buffer._chain = chain
    buffer._draw_chain = chain_of_draws(buffer, buffer._storage, chain)
    buffer._needs = buffer._sample_unit.anchor_needs(needs_of(list(buffer._draw_chain)))
    buffer._listening = chain.checking_writes


def check_uses(
    buffer: ReplayBuffer, sampler: Sampler, storage: Storage, writer: Writer, chain: Compose
) -> None:
    buffer._sample_unit.check(storage, sampler)
    if buffer._windows is not None and not sampler.draws_anchors:
        raise ValueError(
            f"expected a sampler of single rows with {type(buffer._windows).__name__} as "
            f"sample_unit, got {type(sampler).__name__}, which draws windows itself; use slices of "
            "one row (slice_len=1), or pass the windows as transform="
        )
    chain = chain_of_draws(buffer, storage, chain)
    check_order(sampler, writer, buffer._batch_size)
    check_consuming(buffer, sampler, storage, writer, chain)
    check_chain(chain, storage, writer)


def claim_parts(buffer: ReplayBuffer, *parts: Sampler | Writer) -> None:
    """Claim a sampler or writer for this buffer alone.

    Raises:
        ValueError: another buffer uses the part, and sharing would change that buffer's rows or
            pass.
    """
    for part in parts:
        owner = part.owner
        if owner is None or owner is buffer:
            continue
        if getattr(part, "stateless", False) and owner._generator is buffer._generator:
            continue
        if owner._sampler is part or owner._writer is part:
            raise ValueError(
                f"expected a {type(part).__name__} for this buffer alone, got one that another "
                "buffer uses"
            )
    for part in parts:
        part.owner = buffer


def time_dim_of(buffer: ReplayBuffer, storage: Storage) -> int:
    """Return the time dimension of written data.

    This is the requested dimension, or by default the storage's last.
    """
    if buffer._dim_extend is None or buffer._dim_of_storage:
        return storage.ndim - 1
    if storage.ndim > 1 and buffer._dim_extend >= storage.ndim:
        raise ValueError(
            f"expected dim_extend below the {storage.ndim} dimensions of the storage's rows, "
            f"got {buffer._dim_extend}"
        )
    return buffer._dim_extend


def stats_of(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return size, write count, prefetched batches, capacity and utilization."""
    if not buffer._initialized:
        given = buffer._makers[0]
        # Unknown until the storage exists.
        capacity = given.max_size if isinstance(given, Storage) else None
        size = len(given) if isinstance(given, Storage) else 0
        count = 0
    else:
        size, count = len(buffer), buffer.write_count
        capacity = buffer._storage.max_size
    queued = 0 if buffer._prefetcher is None else len(buffer._prefetcher)
    limiter, pace = buffer._rate_limiter, buffer._pace
    if limiter is not None and pace is None:
        pace = LimiterQueue(limiter)
    room = {} if capacity is None else {"capacity": capacity, "utilization": size / capacity}
    return {
        "size": size,
        "write_count": count,
        "prefetch_queue_size": queued,
        "initialized": buffer._initialized,
        **room,
        **({} if pace is None else pace.stats()),
    }


def exchange_storage(
    buffer: ReplayBuffer, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
) -> Storage:
    """Replace the storage; return the previous one."""
    check_exchange(buffer, "storage", storage, Storage)
    check_collate_fn(collate_fn)
    with both_locked(buffer, storage) as previous:
        if buffer._rate_limiter is not None:
            buffer._rate_limiter.check_capacity(storage.max_size)
        dim_extend, sampler = time_dim_of(buffer, storage), buffer._sampler
        check_uses(buffer, sampler, storage, buffer._writer, buffer._chain)
        buffer._writer.register_storage(storage)
        rewind(buffer)
        before = sampler.state_dict()
        try:
            sampler.empty()
            sampler.attach(storage)
        except BaseException:
            buffer._writer.register_storage(previous)
            sampler.attach(previous)
            sampler.load_state_dict(before)
            raise
        drop_draws(buffer)
        if buffer._pace is not None:
            buffer._pace.start_from(len(storage))
        previous.detach(cast(Any, buffer))
        buffer._storage, buffer._collate_fn = storage, collate_fn
        buffer._dim_extend = buffer._writer.time_dim = dim_extend
        storage.attach(cast(Any, buffer))
    return previous


@contextlib.contextmanager
def both_locked(buffer: ReplayBuffer, other: Storage) -> Iterator[Storage]:
    """Lock the buffer's storage and another storage; yield the buffer's storage.

    The locks are always taken in the same order, because two buffers may exchange their
    storages at the same time.
    """
    buffer._ready()
    while True:
        storage = buffer._storage
        first, second = sorted((storage, other), key=id)
        with first.lock, second.lock:
            if storage is buffer._storage:
                yield storage
                return


def exchange_sampler(buffer: ReplayBuffer, sampler: Sampler) -> Sampler:
    """Replace the sampler; return the previous one."""
    check_exchange(buffer, "sampler", sampler, Sampler)
    with buffer._locked() as storage:
        check_uses(buffer, sampler, storage, buffer._writer, buffer._chain)
        claim_parts(buffer, sampler)
        sampler.attach(storage)
        sampler.generator = buffer._generator
        rewind(buffer)
        previous, buffer._sampler = buffer._sampler, sampler
    return previous


def exchange_writer(buffer: ReplayBuffer, writer: Writer) -> Writer:
    """Replace the writer; return the previous one."""
    check_exchange(buffer, "writer", writer, Writer)
    with buffer._locked() as storage:
        check_uses(buffer, buffer._sampler, storage, writer, buffer._chain)
        claim_parts(buffer, writer)
        writer.register_storage(storage)
        writer.time_dim = buffer.dim_extend
        previous, buffer._writer = buffer._writer, writer
        rewind(buffer)
    return previous


def share_rows(buffer: ReplayBuffer, shared: bool) -> None:
    """Let processes that receive the buffer share its rows."""
    if bool(shared) == buffer._shared:
        return
    if not shared:
        raise RuntimeError(
            "a shared buffer stays shared: other processes may have it; make a new buffer"
        )
    buffer._ready()
    check_not_ahead(buffer._prefetch_depth)
    with buffer._making:
        storage, sampler, writer = buffer._storage, buffer._sampler, buffer._writer
        check_shareable(storage, writer, sampler)
        storage.share(common_parts(sampler, writer, buffer._rate_limiter))  # type: ignore[attr-defined]
        buffer._shared = True
        buffer._pace = limiter_queue(buffer, storage, shared=True)
        writer.register_storage(storage)
        sampler.attach(storage)


def insert_into_chain(
    buffer: ReplayBuffer, index: int | None, transform: Any, invert: bool
) -> None:
    """Insert a transform before a position of the chain; None: at its end."""
    with buffer._locked():
        chain = buffer._chain.copy()
        chain.insert(len(chain) if index is None else index, transform, invert=invert)
        check_chain(chain, buffer._storage, buffer._writer)
        set_chain(buffer, chain)
        rewind(buffer)


def consuming_sampler(
    uses: object, sampler: Sampler | Callable[[], Sampler] | None, prefetch: int
) -> Sampler | Callable[[], Sampler] | None:
    """Return a sampler for ``consume_after_n_samples``, or a function that makes it.

    Raises:
        TypeError: the number is not an int.
        ValueError: the number is below 1, the sampler draws by another law, or ``prefetch`` is set.
    """
    if uses is None:
        return sampler
    count = whole_number("consume_after_n_samples", uses, 1)
    if prefetch:
        raise ValueError(f"expected consume_after_n_samples without prefetch, got {prefetch}")
    if sampler is None:
        return ConsumingSampler(count)
    if isinstance(sampler, Sampler):
        return _consuming(count, sampler)
    made = sampler
    return lambda: _consuming(count, made())


def _consuming(count: int, sampler: Any) -> Any:
    if type(sampler) is RandomSampler:
        return ConsumingSampler(count)
    if isinstance(sampler, ConsumingSampler) and sampler.max_sample_count == count:
        return sampler
    raise ValueError(
        f"expected consume_after_n_samples={count} with a RandomSampler, or a ConsumingSampler "
        f"with the same number, got {sampler!r}"
    )


def uses_of(sampler: Sampler) -> int | None:
    """Return how often a sampler may draw each row; None for no limit."""
    return sampler.max_sample_count if isinstance(sampler, ConsumingSampler) else None


def check_consuming(
    buffer: ReplayBuffer, sampler: Sampler, storage: Storage, writer: Writer, chain: Compose
) -> None:
    """Check that a buffer of these parts can use rows up.

    Raises:
        TypeError: the storage or the writer cannot reuse single slots.
        ValueError: the buffer has lanes, prefetch or windows, or transforms read neighbouring rows.
    """
    if not sampler.consumes:
        return
    name, prefetch, unit = type(sampler).__name__, buffer._prefetch_depth, buffer._sample_unit
    if not isinstance(storage, (ListStorage, TensorStorage)):
        raise TypeError(
            f"expected a list or tensor storage for a {name}, got {type(storage).__name__}"
        )
    if not isinstance(writer, RoundRobinWriter):
        raise TypeError(
            f"expected a writer with write_at for a {name}, such as RoundRobinWriter, got "
            f"{type(writer).__name__}"
        )
    if storage.ndim > 1:
        raise ValueError(f"expected ndim=1 for a {name}, got ndim={storage.ndim}")
    if prefetch:
        raise ValueError(f"expected a {name} without prefetch, got {prefetch}")
    if not isinstance(unit, Transition):
        raise ValueError(f"expected a {name} without a {type(unit).__name__}: slots are reused")
    check_transforms_of(sampler, chain)


def check_transforms_of(sampler: Sampler, chain: Compose) -> None:
    """Raise ValueError if transforms read neighbours of rows that a sampler uses up."""
    if sampler.consumes and chain.reads_around:
        raise ValueError(
            f"expected a {type(sampler).__name__} without transforms that read the rows around: "
            "slots are reused, so that neighbouring slots may hold other rows"
        )


def check_chain(chain: Compose, storage: Storage, writer: Writer) -> None:
    """Raise ValueError if a transform cannot work with the storage and the writer.

    A transform with the method ``check_parts(storage, writer)`` decides this itself.
    """
    for entry in chain.entries:
        check = getattr(entry.transform, "check_parts", None)
        if callable(check):
            check(storage, writer)


def check_mappable(storage: Storage) -> None:
    """Raise ValueError with the reason if a storage cannot leave rows in files."""
    kind = type(storage).__name__
    if not isinstance(storage, LazyTensorStorage) or isinstance(storage, LazyMemmapStorage):
        why = f"got a {kind}, which cannot map the files"
    elif storage.initialized or storage.ledger.next_position:
        why = f"got one that was written to, with {len(storage)} rows"
    elif str(storage.device).partition(":")[0] not in ("auto", "cpu"):
        why = f"got one on {storage.device}"
    elif storage.load_hooks:
        why = "got load hooks, which change the rows that were read"
    else:
        return
    raise ValueError(
        f"expected a new LazyTensorStorage on the CPU for mmap=True, {why}; load without mmap"
    )


def check_mapped_rows(
    storage: LazyTensorStorage, content: Content, slots: int, rows: torch.Tensor | None
) -> None:
    """Raise ValueError if saved rows cannot be mapped unchanged.

    Args:
        slots: the number of slots after the load.
        rows: as for ``Storage.load_content``.
    """
    if rows is not None and not torch.equal(rows, arange(content.rows)):
        raise ValueError(
            f"expected the saved capacity for mmap=True, got {slots} slots, where the "
            f"{content.rows} rows would have to take other slots; load without mmap"
        )
    if not content.groups:
        return
    pairs = storage.pairs_for(content.single_group().schema)
    found = why_not_mapped(content, pairs)
    if found is not None:
        path, why = found
        raise ValueError(
            f"expected rows that can be mapped unchanged for mmap=True, got "
            f"{format_key(path)}, {why}; load without mmap"
        )


def check_not_ahead(depth: int) -> None:
    """Raise ValueError if a shared buffer is to prefetch batches."""
    if depth:
        raise ValueError(
            "Cannot share prefetched replay buffers: expected prefetch=0 or shared=False, got "
            f"prefetch={depth}; other processes may overwrite the rows of prefetched batches"
        )


def check_shareable(storage: Storage, writer: Writer, sampler: Sampler) -> None:
    """Check that the parts of a buffer can be shared.

    Raises:
        ValueError: a part cannot be shared. The error names it and parts that can be shared.
    """
    if not isinstance(storage, LazyTensorStorage):
        raise ValueError(
            "expected a LazyTensorStorage or LazyMemmapStorage for shared=True, whose memory "
            f"processes can share, got {type(storage).__name__}"
        )
    if writer.kind not in ("round_robin", "lanes", "episodes"):
        raise ValueError(
            "expected a RoundRobinWriter, LaneWriter or EpisodeWriter for shared=True, got "
            f"{type(writer).__name__}, whose order is known to one process only"
        )
    if writer.kind in ("lanes", "episodes"):
        check_removable(storage, f"a {type(writer).__name__}")
    if sampler.consumes:
        raise ValueError(
            f"expected a {type(sampler).__name__} without shared=True: each process would count "
            "only its own draws"
        )


def common_parts(sampler: Sampler, writer: Writer, limiter: RateLimiter | None) -> dict[str, bool]:
    """Return the parts that buffers over shared rows must have in common."""
    return {
        "prioritized sampler": bool(sampler.prioritized),
        "writer of streams, such as LaneWriter": writer.kind in ("lanes", "episodes"),
        "rate limiter": limiter is not None,
    }


def check_exchange(buffer: Any, part: str, given: object, kind: type) -> None:
    """Check the new part of a buffer.

    Raises:
        TypeError: it has the wrong type.
        RuntimeError: the buffer is shared, so its parts cannot be replaced.
    """
    if not isinstance(given, kind):
        raise TypeError(f"expected {part} as a {kind.__name__}, got {type(given).__name__}")
    if buffer._shared:
        raise RuntimeError(
            f"the {part} of a shared buffer cannot be replaced: other processes use the present "
            "one; make a new buffer"
        )


def checked_limiter(limiter: object) -> RateLimiter | None:
    """Return the argument ``rate_limiter``; TypeError if it is not a RateLimiter."""
    if limiter is None or isinstance(limiter, RateLimiter):
        return limiter
    raise TypeError(f"expected rate_limiter as a RateLimiter, got {type(limiter).__name__}")


def check_order(sampler: Sampler, writer: Writer, batch_size: int | None) -> None:
    """Raise ValueError if a sampler needs a row order or a batch size that is missing."""
    if getattr(sampler, "drop_last", False) and batch_size is None:
        raise ValueError(
            "Samplers with drop_last=True must work with a predictable batch-size: give the "
            "buffer a batch_size"
        )
    if sampler.needs_write_order and not writer.keeps_order:
        raise ValueError(
            f"{type(sampler).__name__} needs rows in the order in which they were written, which "
            f"{type(writer).__name__} does not keep"
        )


def check_kinds(
    storage: object,
    sampler: object,
    writer: object,
    sample_unit: object,
    transform: object,
    transform_factory: object,
) -> None:
    """Raise TypeError if an argument of a buffer has the wrong type."""
    if transform is not None and transform_factory is not None:
        raise TypeError("transform and transform_factory are mutually exclusive, got both")
    if transform_factory is not None and not callable(transform_factory):
        raise TypeError(f"expected a callable transform_factory, got {transform_factory!r}")
    if sample_unit is not None and not isinstance(sample_unit, (SampleUnit, Windows)):
        raise TypeError(
            f"sample_unit must be a SampleUnit instance, got {type(sample_unit).__name__}"
        )
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


def _class_of(given: object) -> str:
    """Return a class name with its package; other libraries use the same names."""
    cls = type(given)
    module = cls.__module__.split(".")[0]
    return cls.__qualname__ if module == "builtins" else f"{module} {cls.__qualname__}"


def checked_prefetch(prefetch: int | None, batch_size: int | None) -> int:
    if prefetch is None or prefetch == 0:
        return 0
    read_value(Count, prefetch, "prefetch")
    if batch_size is None:
        raise ValueError(
            "Dynamic batch-size specification is incompatible with multithreaded sampling: "
            "prefetch needs the buffer to have a batch_size"
        )
    return prefetch


def check_generator(generator: object) -> None:
    """Raise TypeError unless the argument is a torch generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"expected generator as a torch.Generator, got {type(generator).__name__}")


def check_collate_fn(collate_fn: object) -> None:
    """Raise TypeError unless the argument is a function or None."""
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"expected a callable collate_fn, got {type(collate_fn).__name__}")
