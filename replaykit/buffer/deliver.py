"""Deliver batches: collate, transform, move, and attach the info of the draw."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import lazy_stack

from replaykit._compat import (
    LazyStackedTensorDict,
    TensorDict,
    fields_of,
    is_tensordict,
    layout_of,
    put_all,
    uncompiled,
)
from replaykit.buffer.components import DataT
from replaykit.buffer.draw import (
    draw_locked,
    draw_queue,
    draw_shared,
    give_back,
    queue_of,
    rewind,
    size_of,
)
from replaykit.buffer.prefetch import AheadBatch, Draw, DrawnBatch, Outdated, Prefetcher
from replaykit.buffer.row_context import apply_all
from replaykit.interrupts import allowed, check, deferred, shielded
from replaykit.pace import SAMPLE, checked_timeout
from replaykit.structure import contiguous
from replaykit.transfer import pin, send

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


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


def with_info(data: Any, info: Mapping[Any, Any]) -> Any:
    """Put masks or markers of the sampler into a batch for its transforms."""
    for key, value in info.items():
        fits = isinstance(value, torch.Tensor) and is_tensordict(data)
        if fits and value.shape[:1] == data.batch_size[:1]:
            data.set(key, value)
    return data


def _put_all(data: TensorDict, info: dict[Any, Any], rows: int) -> bool:
    """Merge as ``merged`` does for one batch dimension and device; else return False."""
    is_locked, batch_size, device = layout_of(data)
    if is_locked or batch_size != (rows,):
        return False
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


def should_merge(include_info: bool | None, depth: int = 3) -> bool:
    """Return whether to put the info into the batch; if not, warn the caller's caller.

    ``depth``: number of frames up to that caller.
    """
    if include_info is None or include_info:
        return True
    warnings.warn(
        "include_info=False is deprecated; drop the keys from the batch instead",
        DeprecationWarning,
        stacklevel=depth,
    )
    return False


@uncompiled  # its frames run in the function that iterates
def batches_of(buffer: ReplayBuffer) -> Iterator[DataT]:
    ran_out = False
    while not (ran_out or is_used_up(buffer)):
        drawn, data, _ = next_in_turn(buffer, None)
        ran_out = drawn.ran_out
        yield data


def shut_down(buffer: ReplayBuffer) -> None:
    """Join the prefetch threads, and undo the draws that were not delivered."""
    buffer._closed = True
    buffer._arrivals.close()
    if buffer._pace is not None:
        buffer._pace.close()
    queue = queue_of(buffer)
    if queue is not None:
        queue.shutdown()
        with buffer._locked(settled=False):
            rewind(buffer)


def is_used_up(buffer: ReplayBuffer) -> bool:
    """Return whether rows are stored, but none can be drawn again."""
    buffer._ready()
    return buffer._sampler.consumes and len(buffer._storage) > 0 and not len(buffer)


def next_in_turn(
    buffer: ReplayBuffer,
    batch_size: int | None,
    timeout: float | None = None,
    *,
    merge: bool = True,
    needed: bool = True,
) -> tuple[Draw, Any, dict[Any, Any]]:
    """Return the next batch once the rate limiter admits it; count it at delivery."""
    size = size_of(buffer, batch_size)
    if timeout is not None:
        timeout = checked_timeout(timeout)
    if buffer._pace is None:
        with deferred:
            found = next_batch(buffer, size, merge=merge, needed=needed)
    else:
        with deferred, buffer._pace.ticket(SAMPLE, timeout) as ticket:
            ticket.admit(size, buffer.__len__)
            found = next_batch(buffer, size, merge=merge, needed=needed)
            ticket.used(min(size, len(found[0].anchors)))
    if buffer._observers is not None:
        buffer._observers.after_sample(found[0].index)
    return found


def next_batch(
    buffer: ReplayBuffer, size: int, *, merge: bool = True, needed: bool = True
) -> tuple[Draw, Any, dict[Any, Any]]:
    """Return a draw, its data and its info.

    If making the batch fails, the draw comes next again.
    """
    queue = None
    if buffer._prefetcher is not None and size == buffer._batch_size:
        queue = queue_of(buffer)
    if queue is None:
        batch = (draw_shared if buffer._shared else draw_locked)(buffer, size)
        made = None
    else:
        ahead = next_ahead(buffer, queue)
        batch, made = ahead.batch, ahead.made
    draw = batch.draw
    try:
        data, info = deliver_batch(buffer, batch, made, merge=merge, needed=needed)
        if queue is not None and draw.ran_out and not buffer._closed:
            draw_queue(buffer, queue, take=False)  # the next pass
        check()  # the last moment at which the batch can still be the next one
    except BaseException:
        with shielded:
            give_back(buffer, draw)
        raise
    return draw, data, info


def next_ahead(buffer: ReplayBuffer, queue: Prefetcher) -> AheadBatch:
    """Return the next batch of the queue, read and finished unless it is ``late``.

    Raises:
        Exception: any error that occurred while the batch was made. The next call tries the
            same batch again.
    """
    while True:
        batch = draw_queue(buffer, queue, take=True)
        assert batch is not None
        error = batch.error
        if error is None:
            try:
                batch.wait(buffer)
                error = batch.error
            except BaseException as interrupt:
                error = interrupt
        if error is None:
            return batch
        if batch.draw is not None:
            with shielded:
                give_back(buffer, batch.draw)
        # A failed draw is tried again if rows were written since.
        elif buffer._storage.ledger.next_position != batch.written:
            continue
        if not isinstance(error, Outdated):
            raise error


def deliver_batch(
    buffer: ReplayBuffer, batch: DrawnBatch, made: Any, *, merge: bool = True, needed: bool = True
) -> tuple[Any, dict[Any, Any]]:
    """Return a batch in the form for the caller, and its info.

    Args:
        made: the result of ``finish_batch`` for the batch; None if it was not called yet.
    """
    data, info = finish_batch(buffer, batch, aside=False) if made is None else made
    if batch.arrival is not None:
        batch.arrival.order()  # in the thread that will use the batch
    if merge:
        data = merged(data, info, batch.stack_dim, needed=needed)
    elif batch.numbered and buffer._chain.entries and is_tensordict(data):
        data = data.exclude("index")
    if batch.sampler is not None:
        rows = batch.draw.index.shape[0]
        shape = batch.sampler.shape_of(rows)
        if shape is not None and is_tensordict(data):
            data = shaped(data, rows, shape)
    return data, info


def finished(buffer: ReplayBuffer, batch: DrawnBatch) -> tuple[Any, dict[Any, Any]]:
    """Finish a batch for use in this thread."""
    found = finish_batch(buffer, batch)
    if batch.arrival is not None:
        batch.arrival.order()
    return found


def finish_batch(
    buffer: ReplayBuffer, batch: DrawnBatch, *, aside: bool = True
) -> tuple[Any, dict[Any, Any]]:
    """Collate, transform, and pin or move a batch, without a lock.

    The thread that uses it must first order its arrival. ``aside`` is passed to `send`.
    """
    data, batch.rows = batch.rows, None
    if batch.begun is not None:
        batch.begun.wait()
        batch.begun = None
    info = {**batch.draw.info, "index": batch.draw.index}
    sampler = batch.sampler
    if sampler is not None:
        data = (sampler.complete_fresh if batch.fresh else sampler.complete)(data, info)
    if buffer._draw_chain.entries or buffer._collate_fn is not None:
        with allowed:  # user code, which may take long
            data = transform_rows(buffer, batch, data, info)
    elif batch.collate is not None:
        data = batch.collate(data)
    if buffer._contiguous:
        data = contiguous(data)  # needed for lists, transforms and custom storages
    if buffer._target is not None:
        sent = send((data, info), buffer._target, own=batch.pinned, aside=aside)
        (data, info), batch.arrival = sent
    if buffer._pin_memory and torch.cuda.is_available():
        data, info = pin((data, info))
    return data, info


def transform_rows(buffer: ReplayBuffer, batch: DrawnBatch, data: Any, info: dict[Any, Any]) -> Any:
    """Collate and transform rows; remove markers from ``info`` that transforms change."""
    if batch.collate is not None:
        data = batch.collate(data)
    if batch.numbered and buffer._chain.entries:
        data = merged(data, {"index": batch.draw.index}, batch.stack_dim, needed=False)
    marked = len(info) > 1
    if marked and buffer._chain.entries:
        data = with_info(data, {key: info[key] for key in _MASKS if key in info})
    if batch.fetched is not None:
        (chain, prepared), batch.fetched = batch.fetched, None
        if marked:
            # The batch gets the markers as changed by the transforms.
            changes = chain.changes
            markers = {
                key: info.pop(key) for key in list(info) if key in changes or (key,) in changes
            }
            data = with_info(data, markers)
        data = apply_all(chain, data, prepared)
    elif buffer._chain.entries:
        data = buffer._chain.forward(data)
    return data
