"""Buffers whose records are used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replaykit.samplers import ConsumingSampler, RandomSampler, Sampler, SampleUnit, Transition
from replaykit.samplers.consuming import checked_uses
from replaykit.storages import ListStorage, Storage, TensorStorage
from replaykit.transforms import Compose
from replaykit.writers import RoundRobinWriter, Writer

__all__ = ["check_consuming", "check_transforms_of", "consuming_sampler", "uses_of"]


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
