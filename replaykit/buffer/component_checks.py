"""Check which components of a buffer can be combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.declared import Count, Positive, read_value
from replaykit.keywords import whole_number
from replaykit.pace import RateLimiter
from replaykit.samplers import ConsumingSampler, RandomSampler, Sampler, SampleUnit, Transition
from replaykit.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from replaykit.storages.content import Content
from replaykit.storages.restorable import why_not_mapped
from replaykit.ted import format_key
from replaykit.transforms import Compose, Windows
from replaykit.writers import RoundRobinWriter, Writer
from replaykit.writers.ring_writers import check_lane_key


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


def check_anchors(sampler: Sampler, unit: object) -> None:
    """Raise ValueError if a sampler itself draws windows."""
    if not sampler.draws_anchors:
        raise ValueError(
            f"expected a sampler of single rows with {type(unit).__name__} as sample_unit, got "
            f"{type(sampler).__name__}, which draws windows itself; use slices of one row "
            "(slice_len=1), or pass the windows as transform="
        )


def check_consuming(
    sampler: Sampler,
    storage: Storage,
    writer: Writer,
    unit: SampleUnit,
    chain: Compose,
    *,
    prefetch: int,
    shared: bool,
) -> None:
    """Check that a buffer of these parts can use rows up.

    Raises:
        TypeError: the storage or the writer cannot reuse single slots.
        ValueError: the buffer has lanes, prefetch or windows, transforms read neighbouring rows, or
            other processes share it.
    """
    if not sampler.consumes:
        return
    name = type(sampler).__name__
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
    if shared:
        raise ValueError(
            f"expected a {name} without shared=True: each process would count only its own draws"
        )
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


def check_shareable(storage: Storage, writer: Writer) -> None:
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
        check_lane_key(storage, writer)


def common_parts(sampler: Sampler, writer: Writer, limiter: RateLimiter | None) -> dict[str, bool]:
    """Return the parts that buffers over shared rows must have in common."""
    return {
        "prioritized sampler": bool(sampler.prioritized),
        "writer of streams, such as LaneWriter": writer.kind in ("lanes", "episodes"),
        "rate limiter": limiter is not None,
    }


def refuse_exchange(buffer: Any, part: str) -> None:
    """Raise RuntimeError if the buffer is shared. Its parts cannot be replaced."""
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
    collate_fn: object,
    transform: object,
    transform_factory: object,
    generator: object,
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


def _class_of(given: object) -> str:
    """Return a class name with its package; other libraries use the same names."""
    cls = type(given)
    module = cls.__module__.split(".")[0]
    return cls.__qualname__ if module == "builtins" else f"{module} {cls.__qualname__}"


def checked_batch_size(batch_size: object) -> int:
    """Return a batch size; ValueError if it is not an int of at least 1."""
    number = int(batch_size) if isinstance(batch_size, np.integer) else batch_size
    return cast(int, read_value(Positive, number, "batch_size"))


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


def check_type(name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"expected {name} as a {kind.__name__}, got {type(given).__name__}")
