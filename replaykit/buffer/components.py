"""Exchanging a buffer's components while it is in use."""

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
    refuse_exchange,
)
from replaykit.buffer.core import BufferCore, DataT, SamplerT, StorageT, WriterT, check_order
from replaykit.buffer.drawing import put_back
from replaykit.samplers import Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.writers import Writer

__all__ = ["Components", "begun_anew", "of_another_kind"]


class Components(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``set_storage``, ``set_sampler``, ``set_writer``, ``set_rng``, transforms.

    A setter that would give a combination that cannot work raises and keeps the old component.
    """

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Takes another storage; writer, sampler, generator and listeners move to it.

        The next write continues after the new storage's newest row. A rate limiter counts anew.

        Args:
            storage: the new storage.
            collate_fn: from now on; None: the new storage's own.

        Returns:
            The previous storage.

        Raises:
            TypeError: not a Storage. ValueError: the writer cannot work with it; nothing changed.

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
            self._take_prepared()
            if self._pace is not None:
                self._pace.start_from(len(storage))
            previous.detach(cast(Any, self))
            self._storage, self._collate_fn = storage, collate_fn
            self._dim_extend = self._writer.time_dim = dim_extend
            storage.attach(cast(Any, self))
        return previous

    @contextlib.contextmanager
    def _both_locked(self, other: Storage) -> Iterator[Storage]:
        """Holds the locks of the buffer's storage and of another; gives the buffer's.

        Always in the same order: two buffers may exchange their storages at the same time.
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
        """Takes another sampler, which sees the stored rows at once; returns the previous one.

        Raises:
            TypeError: not a Sampler. ValueError: ``drop_last`` without a batch size; slices with a
                writer that does not keep the order of rows.

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
            previous = self._sampler
            put_back(self._take_prepared(), previous, storage)
            self._sampler = sampler
        return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Takes another writer, which goes on at the storage's cursor; returns the previous one.

        Raises:
            TypeError: not a Writer. ValueError: it cannot work with the storage, or the sampler not
                with it.

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
            put_back(self._take_prepared(), self._sampler, storage)
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Takes another source of randomness; None: torch's global generator."""
        if generator is not None:
            _check_type("generator", generator, torch.Generator)
        with self._locked() as storage:
            put_back(self._take_prepared(), self._sampler, storage)
            self._generator = generator
            self._sampler.generator = generator

    def share(self, shared: bool = True) -> Self:
        """Has processes that get the buffer write and sample the same rows; returns the buffer.

        The same as ``shared=True`` of the constructor, for a buffer that is there already. It is
        called before the first write, and before other threads use the buffer.

        Args:
            shared: False is for buffers that are not shared, and does nothing.

        Raises:
            ValueError: parts that cannot be shared, rows that are stored already, or ``prefetch``;
                nothing has changed. RuntimeError: ``shared=False`` of a shared buffer.

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
            storage.share()  # type: ignore[attr-defined]
            self._shared = True
            self._pace = self._new_pace(storage, shared=True)
            writer.register_storage(storage)
            sampler.attach(storage)
        return self

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Adds a transform at the end of the chain; returns the buffer.

        Args:
            transform: callable, or object with ``forward`` or ``inv``.
            invert: use ``inv`` on reading and ``forward`` on writing.

        Raises:
            RuntimeError: neither callable nor such an object.

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
        """Adds a transform before position ``index`` of the chain; returns the buffer.

        Batches that were prepared ahead are made anew, from the same rows.

        Raises:
            RuntimeError: neither callable nor an object with ``forward`` or ``inv``.
            IndexError: no such position.
        """
        return self._insert(index, transform, invert)

    def _insert(self, index: int | None, transform: Any, invert: bool) -> Self:
        with self._locked():
            chain = self._chain.copy()
            chain.insert(len(chain) if index is None else index, transform, invert=invert)
            self._take_chain(chain)
            # The rows are read again: the old chain may have edited what was read.
            self._pending.extend(self._take_prepared())
            for drawn in self._pending:
                drawn.random = None  # it was the old chain's
        return self


def _check_type(name: str, given: object, kind: type) -> None:
    if not isinstance(given, kind):
        raise TypeError(f"expected {name} as a {kind.__name__}, got {type(given).__name__}")


def of_another_kind(saved: Any, sampler: Sampler) -> bool:
    """Whether a saved state is that of a sampler of another kind."""
    kind = saved.get("_kind") if isinstance(saved, Mapping) else None
    return isinstance(kind, str) and kind != sampler.kind


def begun_anew(sampler: Sampler, saved: Mapping[str, Any], content: Content) -> dict[str, Any]:
    """The state of a sampler that knows of rows which a sampler of another kind has drawn from;
    says what it keeps of the other one's.

    Raises:
        ValueError: priorities that are none.
    """
    fresh = copy.deepcopy(sampler)
    fresh.empty()
    state, count = saved_sampler(fresh), content.rows * content.lanes.numel()
    how = "which begins anew"
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
