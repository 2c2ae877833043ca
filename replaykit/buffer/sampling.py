"""Sample batches: draw, read, transform, and attach the info of the draw."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, overload

import torch
from tensordict import lazy_stack

from replaykit._compat import (
    LazyStackedTensorDict,
    TensorDict,
    fields_of,
    is_tensordict,
    put_all,
)
from replaykit.buffer.core import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.drawing import Drawing
from replaykit.buffer.prefetch import AheadBatch, Drawn, Outdated, Prefetcher
from replaykit.buffer.row_context import apply_all
from replaykit.interrupts import allowed, check, deferred, shielded
from replaykit.pace import SAMPLE, checked_timeout
from replaykit.structure import contiguous
from replaykit.transfer import Arrival, Staging, engine_for, pin, to_device

__all__ = [
    "Sampling",
    "is_ragged",
    "merged",
    "put_fresh",
    "shaped",
    "should_merge",
    "with_each",
    "with_markers",
    "with_masks",
]

_MASKS = ("validity_mask", ("collector", "mask"))


def merged(data: Any, info: dict[Any, Any], dim: int, *, needed: bool = True) -> Any:
    """Put the info of a draw into a TensorDict with rows along ``dim``.

    Other data are returned unchanged. So is a TensorDict whose rows no longer fit the info, unless
    the info is ``needed``.

    Raises:
        RuntimeError: the info is ``needed`` and does not fit.
    """
    rows = info["index"].shape[0]
    if type(data) is TensorDict and not dim and _put_all(data, info, rows):
        return data
    if not is_tensordict(data):
        return data
    if data.is_locked:
        data = data.copy()
    dim = dim if dim >= 0 else dim + data.batch_dims
    if data.batch_dims <= dim or data.batch_size[dim] != rows:
        if not needed:
            return data
        raise RuntimeError(
            f"a transform or collate_fn made batch size {list(data.batch_size)} of {rows} rows, "
            "so that index and info no longer belong to them; call sample(return_info=True), "
            "which returns them apart from the data"
        )
    found = {
        key: value
        for key, value in info.items()
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows
    }
    if is_ragged(data) and data.stack_dim == dim:
        return with_each(data, found)
    for key, value in found.items():
        data.set(key, _over_rows(value, data.batch_size, dim))
    return data


def put_fresh(data: Any, info: dict[Any, Any]) -> bool:
    """Put the info into rows that were just read, if it has one value per row; else return False.

    Nothing is checked that a read guarantees.
    """
    if type(data) is not TensorDict:
        return False
    index = info["index"]
    rows, device = index.shape[0], index.device
    if data.batch_size != (rows,):  # each row is a trajectory
        return False
    for key, value in info.items():
        if type(key) is not str or type(value) is not torch.Tensor:
            return False
        if value.shape[:1] != (rows,) or value.device != device:
            return False
    put_all(data, info)
    return True


def is_ragged(data: Any) -> bool:
    """Return whether rows of different batch sizes are stacked.

    Such a stack cannot be one tensor.
    """
    return isinstance(data, LazyStackedTensorDict) and -1 in data.batch_size


def with_each(data: LazyStackedTensorDict, values: Mapping[Any, torch.Tensor]) -> Any:
    """Return a stack of copies of the rows, with an added value for each row.

    Args:
        values: tensors ``[B, ...]`` by key, for the rows along ``data.stack_dim``.
    """
    rows = [row.copy() for row in data.tensordicts]
    for key, value in values.items():
        for row, part in zip(rows, value, strict=True):
            row.set(key, part.expand(*row.batch_size, *part.shape).clone())
    return lazy_stack(rows, data.stack_dim)


def shaped(data: Any, rows: int, shape: tuple[int, ...]) -> Any:
    """Return a flat batch in another batch shape, if no row is missing."""
    return data.reshape(shape) if data.batch_size == (rows,) else data


def with_masks(data: Any, info: dict[Any, Any]) -> Any:
    """Put the padding masks into a batch for its transforms."""
    for key in _MASKS:
        mask = info.get(key)
        if mask is not None and is_tensordict(data) and data.batch_size == mask.shape:
            data.set(key, mask)
    return data


def with_markers(data: Any, markers: dict[Any, Any]) -> Any:
    """Put the sampler's markers into a batch for transforms to change."""
    for key, value in markers.items():
        fits = isinstance(value, torch.Tensor) and is_tensordict(data)
        if fits and value.shape[:1] == data.batch_size[:1]:
            data.set(key, value)
    return data


def _put_all(data: TensorDict, info: dict[Any, Any], rows: int) -> bool:
    """Merge as ``merged`` does for one batch dimension and device; else return False."""
    if data.is_locked or data.batch_size != (rows,):
        return False
    device = data.device
    if len(info) == 1 and info["index"].device == device:
        put_all(data, info)
        return True
    on_cpu = device is not None and device.type == "cpu"
    plain: dict[str, torch.Tensor] = {}
    nested: dict[str, dict[str, torch.Tensor]] = {}
    fields = fields_of(data)
    for key, value in info.items():
        within = type(key) is tuple and len(key) == 2
        if within:
            found = fields.get(key[0])
            if type(found) is TensorDict and fields_of(found).get(key[1]) is value:
                continue  # already in the data
        if type(value) is not torch.Tensor or not value.ndim or value.shape[0] != rows:
            return False
        if not (on_cpu and value.is_cpu) and value.device != device:
            return False
        if type(key) is str:
            plain[key] = value
        elif within:
            nested.setdefault(key[0], {})[key[1]] = value
        else:
            return False
    inner = []
    for name, values in nested.items():
        part: Any = fields.get(name)
        if type(part) is not TensorDict or part.is_locked or part.batch_size != (rows,):
            return False
        inner.append((part, values))
    put_all(data, plain)
    for part, values in inner:
        put_all(part, values)
    return True


def _over_rows(value: torch.Tensor, batch: torch.Size, dim: int) -> torch.Tensor:
    """Expand ``[B, ...]`` over the batch dimensions inside the rows."""
    if len(batch) == 1:
        return value
    shape = [1] * len(batch)
    shape[dim] = batch[dim]
    return value.reshape(*shape, *value.shape[1:]).expand(*batch, *value.shape[1:]).clone()


class Sampling(Drawing[DataT, StorageT, SamplerT, WriterT]):
    """``sample``, ``can_sample``, iteration."""

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
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[DataT, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None,
        return_info: Literal[True],
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
        merge = include_info is None or should_merge(include_info)
        _, data, info = self._in_turn(batch_size, timeout, merge=merge, needed=not return_info)
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether ``sample`` would succeed now without waiting.

        The call draws nothing and changes nothing.

        Raises:
            RuntimeError: no batch size is given.
        """
        size = self._size_of(batch_size)
        if self._pace is not None and not self._pace.may(SAMPLE, size, self._size()):
            return False
        with self._locked(settled=False) as storage:
            self._sampler.needs = self._needs
            if self._retry and not self._outdated(self._retry[0], storage):
                return True
            return self._sampler.can_sample(storage, size)

    def __iter__(self) -> Iterator[DataT]:
        """Yield batches until the end of the sampler's pass.

        With draws with replacement, the iteration never ends.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        if self._batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during "
                "construction; give the buffer a batch_size"
            )
        return self._batches()

    def _batches(self) -> Iterator[DataT]:
        ran_out = False
        while not (ran_out or self._used_up()):
            drawn, data, _ = self._in_turn(None)
            ran_out = drawn.ran_out
            yield data

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
        if self._batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during "
                "construction; give the buffer a batch_size"
            )
        if self._pass_ended or self._used_up():
            self._pass_ended = False
            return None
        drawn, data, _ = self._in_turn(None)
        self._pass_ended = drawn.ran_out
        return data

    def shutdown(self) -> None:
        """Join the prefetch threads. Later calls of ``sample`` raise RuntimeError.

        In this process, calls that wait for a rate limiter, or would have to, also raise
        RuntimeError.
        """
        self._closed = True
        if self._pace is not None:
            self._pace.close()
        queue = self._queue()
        if queue is not None:
            queue.shutdown()
            with self._locked(settled=False):
                queue.clear()

    def _used_up(self) -> bool:
        """Return whether rows are stored, but none can be drawn again."""
        self._ready()
        return self._sampler.consumes and len(self._storage) > 0 and not len(self)

    # -- making a batch -----------------------------------------------------------------------

    def _in_turn(
        self,
        batch_size: int | None,
        timeout: float | None = None,
        *,
        merge: bool = True,
        needed: bool = True,
    ) -> tuple[Drawn, Any, dict[Any, Any]]:
        """Return the next batch once the rate limiter admits it; count it at delivery."""
        size = self._size_of(batch_size)
        if timeout is not None:
            timeout = checked_timeout(timeout)
        if self._pace is None:
            with deferred:
                return self._next(size, merge=merge, needed=needed)
        with deferred, self._pace.ticket(SAMPLE, timeout) as ticket:
            ticket.admit(size, self._size)
            found = self._next(size, merge=merge, needed=needed)
            ticket.used(min(size, len(found[0].anchors)))
        return found

    def _next(
        self, size: int, *, merge: bool = True, needed: bool = True
    ) -> tuple[Drawn, Any, dict[Any, Any]]:
        """Return a draw, its data and its info.

        If making the batch fails, the draw comes next again.
        """
        queue = None
        if self._prefetcher is not None and size == self._batch_size:
            queue = self._queue()
        if queue is None:
            drawn = self._draw(size) if self._shared else self._draw_held(size)
            made = None
        else:
            batch = self._next_ahead(queue)
            drawn, made = batch.drawn, batch.made
        try:
            data, info = self._delivered(drawn, made, merge=merge, needed=needed)
            if queue is not None and drawn.ran_out and not self._closed:
                self._draw_queue(queue, take=False)  # the next pass
            check()  # the last moment at which the batch can still be the next one
        except BaseException:
            with shielded:
                self._give_back(drawn)
            raise
        return drawn, data, info

    def _next_ahead(self, queue: Prefetcher) -> AheadBatch:
        """Return the next batch of the queue, read and finished unless it is ``late``.

        Raises:
            Exception: any error that occurred while the batch was made. The next call tries the
                same batch again.
        """
        while True:
            batch = self._draw_queue(queue, take=True)
            assert batch is not None
            if batch.error is None:
                try:
                    batch.wait(self)
                except BaseException:  # an interrupt
                    with shielded:
                        self._give_back(batch.drawn)
                    raise
            error = batch.error
            if error is None:
                return batch
            if isinstance(error, Outdated):
                with shielded:
                    self._refuse(batch.drawn)
                continue
            if batch.drawn is not None:
                with shielded:
                    self._give_back(batch.drawn)
                raise error
            # A failed draw is tried again if rows were written since.
            if batch.drawn is None and self._written() == batch.written:
                raise error

    def _delivered(
        self, drawn: Drawn, made: Any, *, merge: bool = True, needed: bool = True
    ) -> tuple[Any, dict[Any, Any]]:
        """Return a batch in the form for the caller, and its info.

        Args:
            made: the result of ``_finish`` for the draw; None if ``_finish`` was not called yet.
        """
        data, info = self._finish(drawn) if made is None else made
        if drawn.arrival is not None:
            drawn.arrival.order()  # in the thread that will use the batch
        if merge and not (drawn.fresh and self._target is None and put_fresh(data, info)):
            data = merged(data, info, drawn.stack_dim, needed=needed)
        elif drawn.numbered and self._chain.entries and is_tensordict(data):
            data = data.exclude("index")
        if drawn.sampler is not None:
            rows = drawn.index.shape[0]
            shape = drawn.sampler.shape_of(rows)
            if shape is not None and is_tensordict(data):
                data = shaped(data, rows, shape)
        return data, info

    def _written(self) -> int:
        """Return a number that grows with every write, so that failed draws are retried."""
        return self._storage.ledger.next_position

    def _finish(self, drawn: Drawn) -> tuple[Any, dict[Any, Any]]:
        """Collate, transform, and pin or move a batch, without a lock."""
        data, drawn.rows = drawn.rows, None
        if drawn.begun is not None:
            drawn.begun.wait()
            drawn.begun = None
        info = {**drawn.info, "index": drawn.index}
        sampler = drawn.sampler
        if sampler is not None:
            data = (sampler.complete_fresh if drawn.fresh else sampler.complete)(data, info)
        if self._chain.entries or self._collate_fn is not None:
            with allowed:  # user code, which may take long
                data = self._changed(drawn, data, info)
        elif drawn.collate is not None:
            data = drawn.collate(data)
        if self._contiguous:
            data = contiguous(data)  # needed for lists, transforms and custom storages
        if self._target is not None:
            (data, info), drawn.arrival = self._moved((data, info), self._target)
        if self._pin_memory and torch.cuda.is_available():
            data, info = pin((data, info))
        return data, info

    def _changed(self, drawn: Drawn, data: Any, info: dict[Any, Any]) -> Any:
        """Collate and transform rows; remove markers from ``info`` that transforms change."""
        if drawn.collate is not None:
            data = drawn.collate(data)
        if drawn.numbered and self._chain.entries:
            data = merged(data, {"index": drawn.index}, drawn.stack_dim, needed=False)
        marked = len(info) > 1
        if marked and self._chain.entries:
            data = with_masks(data, info)
        if drawn.fetched is not None:
            (chain, prepared), drawn.fetched = drawn.fetched, None
            if marked:
                # The batch gets the markers as changed by the transforms.
                changes = chain.changes
                markers = {
                    key: info.pop(key) for key in list(info) if key in changes or (key,) in changes
                }
                data = with_markers(data, markers)
            data = apply_all(chain, data, prepared)
        elif self._chain.entries:
            data = self._chain.forward(data)
        return data

    def _moved(self, made: Any, target: torch.device) -> tuple[Any, Arrival | None]:
        """Move a batch to another device.

        Returns:
            The batch, and its arrival if the copy is unfinished, else None.
        """
        staging = self._staging
        if staging is None or staging.process != os.getpid():
            with self._making:
                staging = self._staging
                if staging is None or staging.process != os.getpid():
                    engine = engine_for(target)
                    if engine is None:
                        return to_device(made, target), None
                    # One for each unfinished batch, and one for an unfinished copy.
                    staging = self._staging = Staging(engine, self._prefetch_depth + 1)
        return staging.move(made)


def should_merge(include_info: bool | None) -> bool:
    """Return whether to put the info into the batch; if not, warn the caller's caller."""
    if include_info is None or include_info:
        return True
    warnings.warn(
        "include_info=False is deprecated; drop the keys from the batch instead",
        DeprecationWarning,
        stacklevel=3,
    )
    return False
