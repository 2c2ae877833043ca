"""Exchange the components of a buffer while it is in use."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from typing_extensions import Self

from replaykit._compat import arange
from replaykit.buffer.buffer_state import saved_sampler
from replaykit.buffer.component_checks import (
    check_consuming,
    check_not_ahead,
    check_shareable,
    common_parts,
    refuse_exchange,
)
from replaykit.buffer.core import DataT, SamplerT, StorageT, WriterT, check_order
from replaykit.buffer.drawing import Drawing
from replaykit.samplers import Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.writers import Writer

__all__ = ["Components", "of_another_kind", "restarted"]


class Components(Drawing[DataT, StorageT, SamplerT, WriterT]):
    """``set_storage``, ``set_sampler``, ``set_writer``, ``set_rng``, transforms.

    If the components cannot work together, a setter raises and keeps the old component.
    """

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
        _check_type("storage", storage, Storage)
        refuse_exchange(self, "storage")
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"expected a callable collate_fn, got {type(collate_fn).__name__}")
        with self._both_locked(storage) as previous:
            if self._rate_limiter is not None:
                self._rate_limiter.check_capacity(storage.max_size)
            dim_extend, sampler = self._time_dim(storage), self._sampler
            self._sample_unit.check(storage, sampler)
            self._check_consuming(sampler, storage, self._writer, self._chain)
            self._writer.register_storage(storage)
            before = sampler.state_dict()
            try:
                sampler.empty()
                sampler.attach(storage)
            except BaseException:
                self._writer.register_storage(previous)
                sampler.attach(previous)
                sampler.load_state_dict(before)
                raise
            self._drop_draws()
            if self._pace is not None:
                self._pace.start_from(len(storage))
            previous.detach(cast(Any, self))
            self._storage, self._collate_fn = storage, collate_fn
            self._dim_extend = self._writer.time_dim = dim_extend
            storage.attach(cast(Any, self))
        return previous

    @contextlib.contextmanager
    def _both_locked(self, other: Storage) -> Iterator[Storage]:
        """Lock the buffer's storage and another storage; yield the buffer's storage.

        The locks are always taken in the same order, because two buffers may exchange their
        storages at the same time.
        """
        self._ready()
        while True:
            storage = self._storage
            first, second = sorted((storage, other), key=id)
            with first.lock, second.lock:
                if storage is self._storage:
                    yield storage
                    return

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
        _check_type("sampler", sampler, Sampler)
        refuse_exchange(self, "sampler")
        with self._locked() as storage:
            if getattr(sampler, "drop_last", False) and self._batch_size is None:
                raise ValueError(
                    "Samplers with drop_last=True must work with a predictable batch-size: give "
                    "the buffer a batch_size"
                )
            self._sample_unit.check(storage, sampler)
            self._check_consuming(sampler, storage, self._writer, self._chain)
            check_order(sampler, self._writer)
            self._claim(sampler)
            sampler.attach(storage)
            sampler.generator = self._generator
            self._rewind()
            previous, self._sampler = self._sampler, sampler
        return previous

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
        _check_type("writer", writer, Writer)
        refuse_exchange(self, "writer")
        with self._locked() as storage:
            check_order(self._sampler, writer)
            self._check_consuming(self._sampler, storage, writer, self._chain)
            self._claim(writer)
            writer.register_storage(storage)
            writer.time_dim = self.dim_extend
            previous, self._writer = self._writer, writer
            self._rewind()
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Replace the random generator; None for torch's global generator."""
        if generator is not None:
            _check_type("generator", generator, torch.Generator)
        with self._locked():
            self._rewind()
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
        if bool(shared) == self._shared:
            return self
        if not shared:
            raise RuntimeError(
                "a shared buffer stays shared: other processes may have it; make a new buffer"
            )
        self._ready()
        check_not_ahead(self._prefetch_depth)
        with self._making:
            storage, sampler, writer = self._storage, self._sampler, self._writer
            unit, chain = self._sample_unit, self._chain
            check_consuming(sampler, storage, writer, unit, chain, prefetch=0, shared=True)
            check_shareable(storage, writer, chain)
            storage.share(common_parts(sampler, self._rate_limiter))  # type: ignore[attr-defined]
            self._shared = True
            self._pace = self._new_pace(storage, shared=True)
            writer.register_storage(storage)
            sampler.attach(storage)
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
        return self._insert(None, transform, invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Insert a transform before position ``index`` of the chain; return the buffer.

        Prefetched batches are drawn again.

        Raises:
            RuntimeError: ``transform`` is neither a callable nor an object with ``forward`` or
                ``inv``.
            IndexError: ``index`` is not a position in the chain.
        """
        return self._insert(index, transform, invert)

    def _insert(self, index: int | None, transform: Any, invert: bool) -> Self:
        with self._locked():
            chain = self._chain.copy()
            chain.insert(len(chain) if index is None else index, transform, invert=invert)
            self._set_transforms(chain)
            self._rewind()
        return self


def _check_type(name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"expected {name} as a {kind.__name__}, got {type(given).__name__}")


def of_another_kind(saved: Any, sampler: Sampler) -> bool:
    """Return whether a saved state belongs to another kind of sampler."""
    kind = saved.get("_kind") if isinstance(saved, Mapping) else None
    return isinstance(kind, str) and kind != sampler.kind


def restarted(sampler: Sampler, saved: Mapping[str, Any], content: Content) -> dict[str, Any]:
    """Return the state of a new sampler over the loaded rows.

    The saved state belongs to another kind of sampler. A warning names the parts that are kept.

    Raises:
        ValueError: the saved priorities are invalid.
    """
    fresh = copy.deepcopy(sampler)
    fresh.empty()
    state, count = saved_sampler(fresh), content.rows * content.lanes.numel()
    how = "which starts over"
    if sampler.prioritized and "_priorities" in state:
        raw = torch.ones(count, dtype=torch.float64, device="cpu")
        most, how = 1.0, "which gives each row priority 1"
        if "_priorities" in saved:
            other = SavedPriorities.from_state(dict(saved), torch.float64)
            most, raw = other.max_priority, other.priorities
            how = "which keeps the priorities and its own exponents"
        law = state["_alpha"], state["_beta"], state["_eps"]
        state |= SavedPriorities(*law, most, 0, raw).to_state()
    elif sampler.consumes:
        fresh.extend(arange(content.rows))
        state = saved_sampler(fresh)
    warnings.warn(
        f"the state of a {saved['_kind']!r} sampler is left out: this buffer has a "
        f"{sampler.kind!r} one, {how}",
        UserWarning,
        stacklevel=3,
    )
    return state
