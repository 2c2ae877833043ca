"""Rows on their way out, drawn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch

from replaykit._compat import is_tensordict
from replaykit.buffer.around import apply_all
from replaykit.buffer.drawing import Drawing, show, shows
from replaykit.buffer.generic import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.merging import merged, shaped, with_markers, with_masks
from replaykit.buffer.prefetch import Drawn
from replaykit.interrupts import allowed, check, deferred, shielded
from replaykit.leafwise import contiguous
from replaykit.pace import SAMPLE
from replaykit.transfer import Arrival, Staging, pin, to_device
from replaykit.transfer.engines import engine_for

__all__ = ["Sampling", "told_to_merge"]


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
        """Draws a batch.

        Args:
            batch_size: number of rows; None: that of the constructor.
            return_info: also return what is known of the draw. The data then goes without it
                where a transform changed the number of rows.
            include_info: ``False`` leaves ``index`` and the info out of the TensorDict;
                deprecated.
            timeout: seconds to wait where the buffer's rate limiter holds samples back; 0: none at
                all, None: without end. Without a rate limiter nothing waits.

        Returns:
            For TensorDict content a TensorDict of batch size ``[B]`` with ``index`` (int64 ``[B]``,
            ``[B, ndim]``), ``index_generation`` where the writer tracks it, and all that the
            sampler tells. For other content the data alone. It owns its memory and lies on the
            buffer's ``device``, or else on the storage's. With ``return_info`` a pair of it and a
            dict with ``index`` and the rest.

        Raises:
            RuntimeError: no batch size anywhere, nothing stored, or a transform that changed the
                number of rows; the buffer was shut down. ValueError: a batch size that is not an
                int of at least 1, or for which the rate limiter never has room.
            RateLimiterTimeout: writes lag behind; a TimeoutError. Nothing has changed then.

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
        merge = told_to_merge(include_info)
        _, data, info = self._in_turn(batch_size, timeout, merge=merge, needed=not return_info)
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now, without waiting. Draws nothing, changes nothing.

        Raises:
            RuntimeError: no batch size anywhere.
        """
        size = self._size_of(batch_size)
        if self._pace is not None and not self._pace.may(SAMPLE, size, self._size()):
            return False
        with self._locked() as storage:
            self._sampler.needs = self._needs
            if self._pending and not self._outdated(self._pending[0], storage):
                return True
            return self._sampler.can_sample(storage, size)

    def __iter__(self) -> Iterator[DataT]:
        """Yields batches until the sampler has run out: endless for draws with replacement.

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
        """Returns the next batch of an iteration of its own; None at its end, then starts over.

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
        """Joins the threads that prepare batches; sampling raises RuntimeError from now on.

        So do calls of this process that wait for a rate limiter, and those that would have to.
        """
        self._closed = True
        if self._pace is not None:
            self._pace.close()
        queue = self._queue()
        if queue is not None:
            queue.shutdown()

    def _used_up(self) -> bool:
        """Whether there was something, which was drawn as often as it can be."""
        self._ready()
        return self._sampler.consumes and len(self._storage) > 0 and not len(self)

    # -- the way of a batch -------------------------------------------------------------------

    def _in_turn(
        self,
        batch_size: int | None,
        timeout: float | None = None,
        *,
        merge: bool = True,
        needed: bool = True,
    ) -> tuple[Drawn, Any, dict[Any, Any]]:
        """The next batch, as soon as the rate limiter lets it be; it counts as it is delivered."""
        size = self._size_of(batch_size)
        with deferred, self._sample_ticket(timeout) as ticket:
            if ticket is not None:
                ticket.admit(size, self._size)
            found = self._next(batch_size, merge=merge, needed=needed)
            if ticket is not None:
                ticket.used(min(size, len(found[0].anchors)))
        return found

    def _next(
        self, batch_size: int | None, *, merge: bool = True, needed: bool = True
    ) -> tuple[Drawn, Any, dict[Any, Any]]:
        """Returns a draw, its data, and what is known of them.

        Where making the batch fails, the draw is the next one again.
        """
        size = self._size_of(batch_size)
        queue = self._queue() if size == self._batch_size else None
        made = None
        if queue is None:
            drawn = self._draw(size)
        else:
            drawn, made = queue.next()
        try:
            data, info = self._delivered(drawn, made, merge=merge, needed=needed)
            check()  # the last moment at which the batch can still be the next one
        except BaseException as error:
            with shielded:
                self._give_back(drawn, settled=isinstance(error, Exception))
            raise
        # Who draws ahead has the lock for as long as it reads: it is waited for at the ends of
        # passes only.
        if queue is not None and not shows(self._sampler, drawn.ran_out):
            with self._locked(settled=False):
                show(self._sampler, drawn.ran_out)
        return drawn, data, info

    def _delivered(
        self, drawn: Drawn, made: Any, *, merge: bool = True, needed: bool = True
    ) -> tuple[Any, dict[Any, Any]]:
        """A batch as its user gets it, and what is known of it.

        Args:
            made: what ``_finish`` has made of the draw; None: that is yet to do.
        """
        data, info = self._finish(drawn) if made is None else made
        if drawn.arrival is not None:
            drawn.arrival.order()  # in the thread that will use it
        if merge:
            data = merged(data, info, drawn.stack_dim, needed=needed)
        elif drawn.numbered and len(self._chain) and is_tensordict(data):
            data = data.exclude("index")
        rows = drawn.index.shape[0]
        shape = None if drawn.sampler is None else drawn.sampler.shape_of(rows)
        if shape is not None and is_tensordict(data):
            data = shaped(data, rows, shape)
        return data, info

    def _written(self) -> int:
        """A number that grows with every write: what failed before may work after it."""
        return self._storage.ledger.next_position

    def _finish(self, drawn: Drawn) -> tuple[Any, dict[Any, Any]]:
        """Collates, transforms, and pins or moves; no lock is held."""
        data, drawn.rows = drawn.rows, None
        if drawn.begun is not None:
            drawn.begun.wait()
            drawn.begun = None
        info = {**drawn.info, "index": drawn.index}
        sampler = drawn.sampler
        if sampler is not None:
            data = (sampler.complete_fresh if drawn.fresh else sampler.complete)(data, info)
        if len(self._chain) or self._collate_fn is not None:
            with allowed:  # users' code, which may take as long as it likes
                data = self._changed(drawn, data, info)
        elif drawn.collate is not None:
            data = drawn.collate(data)
        if self._contiguous:
            data = contiguous(data)  # what a list, a transform or a storage of one's own made
        if self._target is not None:
            (data, info), drawn.arrival = self._moved((data, info), self._target)
        if self._pin_memory and torch.cuda.is_available():
            data, info = pin((data, info))
        return data, info

    def _changed(self, drawn: Drawn, data: Any, info: dict[Any, Any]) -> Any:
        """Collate and transform rows; ``info`` loses the markers that transforms change."""
        if drawn.collate is not None:
            data = drawn.collate(data)
        if drawn.numbered and len(self._chain):
            data = merged(data, {"index": drawn.index}, drawn.stack_dim, needed=False)
        marked = len(info) > 1
        if marked and len(self._chain):
            data = with_masks(data, info)
        if drawn.fetched is not None:
            (chain, prepared), drawn.fetched = drawn.fetched, None
            if marked:
                # What was made of the rows, not what was read.
                changes = chain.changes
                markers = {
                    key: info.pop(key) for key in list(info) if key in changes or (key,) in changes
                }
                data = with_markers(data, markers)
            data = apply_all(chain, data, prepared)
        elif len(self._chain):
            data = self._chain.forward(data)
        return data

    def _moved(self, made: Any, target: torch.device) -> tuple[Any, Arrival | None]:
        """What was made on another device, or on its way there."""
        staging = self._staging
        if staging is None or staging.process != os.getpid():
            with self._making:
                staging = self._staging
                if staging is None or staging.process != os.getpid():
                    engine = engine_for(target)
                    if engine is None:
                        return to_device(made, target), None
                    # One for each batch in the making, and one whose copy is under way.
                    staging = self._staging = Staging(engine, self._prefetch_depth + 1)
        return staging.move(made)


def told_to_merge(include_info: bool | None) -> bool:
    """Whether what is known of a draw belongs into the batch; warns its caller's caller if not."""
    if include_info is None or include_info:
        return True
    warnings.warn(
        "include_info=False is deprecated; drop the keys from the batch instead",
        DeprecationWarning,
        stacklevel=3,
    )
    return False
