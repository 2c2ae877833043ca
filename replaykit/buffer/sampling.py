"""Rows on their way out, drawn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.buffer.core import BufferCore, checked_batch_size
from replaykit.buffer.prefetch import Drawn
from replaykit.samplers import Sampler
from replaykit.storages import Storage

__all__ = ["Sampling"]


class Sampling(BufferCore):
    """``sample``, ``can_sample``, iteration."""

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> Any:
        """Draws a batch.

        Args:
            batch_size: number of rows; None: that of the constructor.
            return_info: also return what is known of the draw. The data then goes without it
                where a transform changed the number of rows.
            include_info: ``False`` leaves ``index`` and the info out of the TensorDict;
                deprecated.

        Returns:
            For TensorDict content a TensorDict of batch size ``[B]`` with ``index`` (int64 ``[B]``,
            ``[B, ndim]``), ``index_generation`` where the writer tracks it, and all that the
            sampler tells. For other content the data alone. It owns its memory and lies on the
            storage's device. With ``return_info`` a pair of it and a dict with ``index`` and the
            rest.

        Raises:
            RuntimeError: no batch size anywhere, nothing stored, or a transform that changed the
                number of rows. ValueError: a batch size that is not an int of at least 1.

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
        if include_info is not None and not include_info:
            warnings.warn(
                "include_info=False is deprecated; drop the keys from the batch instead",
                DeprecationWarning,
                stacklevel=2,
            )
        drawn, data, info = self._next(batch_size)
        if include_info is None or include_info:
            data = _merged(data, info, drawn.stack_dim, needed=not return_info)
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now. Draws nothing and changes nothing.

        Raises:
            RuntimeError: no batch size anywhere.
        """
        size = self._size_of(batch_size)
        with self._locked() as storage:
            return bool(self._pending) or self._sampler.can_sample(storage, size)

    def __iter__(self) -> Iterator[Any]:
        """Yields batches until the sampler has run out: endless for draws with replacement.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        if self._batch_size is None:
            raise RuntimeError("iteration needs the buffer to have a batch_size")
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        ran_out = False
        while not ran_out:
            drawn, data, info = self._next(None)
            ran_out = drawn.ran_out
            yield _merged(data, info, drawn.stack_dim)

    def next(self) -> Any:
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
            raise RuntimeError("iteration needs the buffer to have a batch_size")
        if self._pass_ended:
            self._pass_ended = False
            return None
        drawn, data, info = self._next(None)
        self._pass_ended = drawn.ran_out
        return _merged(data, info, drawn.stack_dim)

    def shutdown(self) -> None:
        """Joins the threads that prepare batches; sampling raises RuntimeError from now on."""
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.shutdown()

    # -- the way of a batch -------------------------------------------------------------------

    def _size_of(self, batch_size: int | None) -> int:
        self._ready()
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        if batch_size is not None:
            return checked_batch_size(batch_size)
        if self._batch_size is None:
            raise RuntimeError(
                "expected a batch_size, in the constructor or in sample(); got neither"
            )
        return self._batch_size

    def _next(self, batch_size: int | None) -> tuple[Drawn, Any, dict[Any, Any]]:
        """Returns a draw, its data, and what is known of them."""
        size = self._size_of(batch_size)
        if self._prefetcher is not None and size == self._batch_size:
            drawn, (data, info) = self._prefetcher.next()
            with self._locked():
                self._sampler.ran_out = drawn.ran_out
        else:
            drawn = self._draw(size)
            data, info = self._finish(drawn)
        return drawn, data, info

    def _draw(self, size: int) -> Drawn:
        with self._locked() as storage:
            return self._drawn(storage, size)

    def _draw_ahead(self, entry: Any) -> Drawn | None:
        """Draws for a prefetched batch; None if nobody waits for it any more."""
        with self._locked() as storage:
            prefetcher, sampler = self._prefetcher, self._sampler
            if prefetcher is None or not prefetcher.wanted(entry):
                return None
            entry.written = storage.ledger.next_position
            # What users see of the sampler belongs to the batch that they got last.
            delivered = sampler._shown = sampler.ran_out
            try:
                entry.drawn = self._drawn(storage, self._size_of(None))
            finally:
                sampler.ran_out, sampler._shown = delivered, None
            return entry.drawn

    def _written(self) -> int:
        """A number that grows with every write: what failed before may work after it."""
        return self._storage.ledger.next_position

    def _drawn(self, storage: Storage, size: int) -> Drawn:
        drawn = self._kept(storage) if size == self._batch_size else None
        if drawn is None:
            anchors, info = self._sampler.sample(storage, size)
            anchors = _as_index(anchors, storage.ndim)
            index, info = self._sample_unit.expand(anchors, dict(info), storage)
            drawn = Drawn(index, info, _ended(self._sampler), anchors)
        if self._writer.tracks_generations or self._sampler.prioritized:
            slots = drawn.index[:, 0] if storage.ndim > 1 else drawn.index
            drawn.info["index_generation"] = storage.ledger.generations(slots)
        own = self._collate_fn is not None
        drawn.rows = storage.read(drawn.index, own=own)
        drawn.collate = self._collate_fn if own else storage.collate
        drawn.stack_dim = 0 if own else storage.stack_dim
        return drawn

    def _kept(self, storage: Storage) -> Drawn | None:
        """A draw made earlier, if there is one whose rows are still stored."""
        while self._pending:
            kept = self._pending.popleft()
            if torch.as_tensor(storage.contains(kept.index)).all():
                self._sampler.ran_out = kept.ran_out
                return kept
        return None

    def _finish(self, drawn: Drawn) -> tuple[Any, dict[Any, Any]]:
        """Collates, transforms and pins; no lock is held."""
        data, drawn.rows = drawn.rows, None
        if drawn.collate is not None:
            data = drawn.collate(data)
        if len(self._chain):
            data = self._chain.forward(data)
        info = {**drawn.info, "index": drawn.index}
        if self._pin_memory and torch.cuda.is_available():
            data = _pinned(data)
            info = {key: _pinned(value) for key, value in info.items()}
        return data, info


def _ended(sampler: Sampler) -> bool:
    """Whether the draw just made ended a pass, whatever ``ran_out`` shows meanwhile."""
    overridden = type(sampler).ran_out is not Sampler.ran_out
    return sampler.ran_out if overridden else sampler._ran_out


def _as_index(drawn: Any, ndim: int) -> torch.Tensor:
    """What a sampler drew as int64 ``[B]`` or ``[B, ndim]``; it may be a tuple of coordinates."""
    if isinstance(drawn, tuple):
        drawn = drawn[0] if ndim == 1 and len(drawn) == 1 else torch.stack(drawn, -1)
    return torch.as_tensor(drawn, dtype=torch.int64)


def _merged(data: Any, info: dict[Any, Any], dim: int, *, needed: bool = True) -> Any:
    """Puts the info of a draw into a TensorDict whose rows lie along ``dim``; other data stay.

    Where it does not belong to the rows any more: an error if it is ``needed``.
    """
    if not is_tensordict(data):
        return data
    if data.is_locked:
        data = data.copy()
    rows = info["index"].shape[0]
    dim = dim if dim >= 0 else dim + data.batch_dims
    if data.batch_dims <= dim or data.batch_size[dim] != rows:
        if not needed:
            return data
        raise RuntimeError(
            f"a transform or collate_fn made batch size {list(data.batch_size)} of {rows} rows, "
            "so that index and info no longer belong to them; call sample(return_info=True), "
            "which gives them beside the data"
        )
    for key, value in info.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows:
            data.set(key, _over_rows(value, data.batch_size, dim))
    return data


def _over_rows(value: torch.Tensor, batch: torch.Size, dim: int) -> torch.Tensor:
    """Repeats ``[B, ...]`` over the other batch dimensions, those that the rows have themselves."""
    if len(batch) == 1:
        return value
    shape = [1] * len(batch)
    shape[dim] = batch[dim]
    return value.reshape(*shape, *value.shape[1:]).expand(*batch, *value.shape[1:]).clone()


def _pinned(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.pin_memory() if data.device.type == "cpu" else data
    if is_tensordict(data) or is_tensorclass(data):
        return data.pin_memory() if data.device is None or data.device.type == "cpu" else data
    if isinstance(data, dict):
        return {key: _pinned(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        items = [_pinned(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data
