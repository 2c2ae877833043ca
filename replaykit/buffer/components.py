"""Make, lock, describe and exchange the components of a buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDict
from typing_extensions import TypeVar

from replaykit.buffer.component_checks import (
    check_anchors,
    check_chain,
    check_consuming,
    check_not_ahead,
    check_order,
    check_shareable,
    check_transforms_of,
    check_type,
    common_parts,
    refuse_exchange,
)
from replaykit.buffer.draw import drop_draws, rewind
from replaykit.buffer.prefetch import Prefetcher
from replaykit.pace import LimiterQueue
from replaykit.samplers import PrioritizedSampler, RandomSampler, Sampler
from replaykit.storages import ListStorage, Storage
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


def pace_stats(buffer: ReplayBuffer) -> dict[str, Any]:
    if buffer._rate_limiter is None:
        return {}
    pace = LimiterQueue(buffer._rate_limiter) if buffer._pace is None else buffer._pace
    return pace.stats()


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
        check_shareable(storage, writer)
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
    buffer._needs = needs_of(list(buffer._draw_chain))
    buffer._listening = chain.checking_writes


def check_uses(
    buffer: ReplayBuffer, sampler: Sampler, storage: Storage, writer: Writer, chain: Compose
) -> None:
    depth, unit = buffer._prefetch_depth, buffer._sample_unit
    unit.check(storage, sampler)
    if buffer._windows is not None:
        check_anchors(sampler, buffer._windows)
    chain = chain_of_draws(buffer, storage, chain)
    check_order(sampler, writer, buffer._batch_size)
    check_consuming(sampler, storage, writer, unit, chain, prefetch=depth, shared=buffer._shared)
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
    room = {} if capacity is None else {"capacity": capacity, "utilization": size / capacity}
    return {
        "size": size,
        "write_count": count,
        "prefetch_queue_size": queued,
        "initialized": buffer._initialized,
        **room,
        **pace_stats(buffer),
    }


def exchange_storage(
    buffer: ReplayBuffer, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
) -> Storage:
    """Replace the storage; return the previous one."""
    check_type("storage", storage, Storage)
    refuse_exchange(buffer, "storage")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"expected a callable collate_fn, got {type(collate_fn).__name__}")
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
    check_type("sampler", sampler, Sampler)
    refuse_exchange(buffer, "sampler")
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
    check_type("writer", writer, Writer)
    refuse_exchange(buffer, "writer")
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
        unit, chain = buffer._sample_unit, buffer._chain
        check_consuming(sampler, storage, writer, unit, chain, prefetch=0, shared=True)
        check_shareable(storage, writer)
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
