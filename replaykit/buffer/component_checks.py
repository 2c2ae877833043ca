"""Check which components of a buffer can be combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.samplers import ConsumingSampler, RandomSampler, Sampler, SampleUnit, Transition
from replaykit.samplers.consuming import checked_uses
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
from replaykit.transforms import Compose
from replaykit.writers import RoundRobinWriter, Writer

__all__ = [
    "check_consuming",
    "check_mappable",
    "check_mapped_rows",
    "check_not_ahead",
    "check_shareable",
    "check_transforms",
    "check_transforms_of",
    "consuming_sampler",
    "refuse_exchange",
    "uses_of",
]


def consuming_sampler(
    uses: object, sampler: Sampler | Callable[[], Sampler] | None, prefetch: int
) -> Sampler | Callable[[], Sampler] | None:
    """Returns the sampler that ``consume_after_n_samples`` asks for, or what makes it.

    Raises:
        TypeError: no int. ValueError: below 1, a sampler that draws otherwise, or ``prefetch``.
    """
    if uses is None:
        return sampler
    count = checked_uses("consume_after_n_samples", uses)
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
        f"expected consume_after_n_samples={count} with a RandomSampler, or a ConsumingSampler of "
        f"as many, got {sampler!r}"
    )


def uses_of(sampler: Sampler) -> int | None:
    """How often a sampler draws each record; None: there is no limit."""
    return sampler.max_sample_count if isinstance(sampler, ConsumingSampler) else None


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
    """Checks that records can be used up in such a buffer.

    Raises:
        TypeError: a storage or a writer whose slots cannot be written again one by one.
        ValueError: lanes, batches made ahead, windows, transforms that read the rows around, or
            other processes.
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
            f"expected a {name} without shared=True: each process would count draws of its own"
        )
    if not isinstance(unit, Transition):
        raise ValueError(f"expected a {name} without a {type(unit).__name__}: slots are reused")
    check_transforms_of(sampler, chain)


def check_transforms_of(sampler: Sampler, chain: Compose) -> None:
    """Raises ValueError where transforms read the rows around those that a sampler uses up."""
    if sampler.consumes and chain.reads_around:
        raise ValueError(
            f"expected a {type(sampler).__name__} without transforms that read the rows around: "
            "slots are reused, so that others lie there"
        )


def check_mappable(storage: Storage) -> None:
    """Raises ValueError where rows cannot stay in files for a storage; says why."""
    kind = type(storage).__name__
    if not isinstance(storage, LazyTensorStorage) or isinstance(storage, LazyMemmapStorage):
        why = f"got a {kind}, whose rows lie elsewhere"
    elif storage.initialized or storage.ledger.next_position:
        why = f"got one that was written to, with {len(storage)} rows"
    elif str(storage.device).partition(":")[0] not in ("auto", "cpu"):
        why = f"got one on {storage.device}"
    elif storage.load_hooks:
        why = "got load hooks, which change what was read"
    else:
        return
    raise ValueError(
        f"expected a new LazyTensorStorage on the CPU for mmap=True, {why}; load without mmap"
    )


def check_mapped_rows(
    storage: LazyTensorStorage, content: Content, slots: int, rows: torch.Tensor | None
) -> None:
    """Raises ValueError where saved rows cannot be used as they lie.

    Args:
        slots: how many there will be.
        rows: as for ``Storage.load_content``.
    """
    if rows is not None and not torch.equal(rows, arange(content.rows)):
        raise ValueError(
            f"expected the capacity that was saved for mmap=True, got {slots} slots, in "
            f"which the {content.rows} rows would have to lie elsewhere; load without mmap"
        )
    if not content.groups:
        return
    pairs = storage.pairs_for(content.single_group().schema)
    found = why_not_mapped(content, pairs, slots, linked=storage.lane_key is not None)
    if found is not None:
        path, why = found
        raise ValueError(
            f"expected rows that lie in files as they are for mmap=True, got "
            f"{format_key(path)}, {why}; load without mmap"
        )


def check_not_ahead(depth: int) -> None:
    """Raises ValueError where batches would be prepared ahead by a shared buffer."""
    if depth:
        raise ValueError(
            "Cannot share prefetched replay buffers: expected prefetch=0 or shared=False, got "
            f"prefetch={depth}; other processes may overwrite what is drawn ahead"
        )


def check_shareable(storage: Storage, writer: Writer, chain: Compose) -> None:
    """Checks that the parts of a buffer can be shared, before anything is.

    Raises:
        ValueError: names the part that cannot, and what can.
    """
    if not isinstance(storage, LazyTensorStorage):
        raise ValueError(
            "expected a LazyTensorStorage or LazyMemmapStorage for shared=True, whose memory "
            f"processes can share, got {type(storage).__name__}"
        )
    if not isinstance(writer, RoundRobinWriter):
        raise ValueError(
            f"expected a RoundRobinWriter for shared=True, got {type(writer).__name__}, whose "
            "order is known to one process only"
        )
    check_transforms(chain)


def check_transforms(chain: Compose) -> None:
    """Raises ValueError where a transform follows every write, which another process may make."""
    for transform in chain.told_of_writes:
        raise ValueError(
            f"expected transforms that need not be told of writes for shared=True, got "
            f"{type(transform).__name__}: other processes write too"
        )


def refuse_exchange(buffer: Any, part: str) -> None:
    """Raises RuntimeError where a part of a shared buffer is about to be exchanged."""
    if buffer._shared:
        raise RuntimeError(
            f"the {part} of a shared buffer cannot be exchanged: other processes have the one "
            "before; make a new buffer"
        )
