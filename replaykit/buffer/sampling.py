"""Rows on their way out, drawn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from replaykit._compat import is_tensordict
from replaykit.buffer.core import BufferCore, checked_batch_size
from replaykit.buffer.prefetch import Drawn
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
            return_info: also return what is known of the draw.
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
        _, data, info = self._next(batch_size)
        if include_info is not False:
            data = self._merged(data, info)
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
        ran_out = False
        while not ran_out:
            ran_out, data, info = self._next(None)
            yield self._merged(data, info)

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
        if self._iterator is None:
            self._iterator = iter(self)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        return batch

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

    def _next(self, batch_size: int | None) -> tuple[bool, Any, dict[str, Any]]:
        """Returns whether a pass ended, the data, and what is known of them."""
        size = self._size_of(batch_size)
        if self._prefetcher is not None and size == self._batch_size:
            drawn, (data, info) = self._prefetcher.next()
            self._sampler.ran_out = drawn.ran_out
        else:
            drawn = self._draw(size)
            data, info = self._finish(drawn)
        return drawn.ran_out, data, info

    def _draw(self, size: int) -> Drawn:
        with self._locked() as storage:
            return self._drawn(storage, size)

    def _draw_ahead(self, entry: Any) -> Drawn | None:
        """Draws for a prefetched batch; None if nobody waits for it any more."""
        with self._locked() as storage:
            prefetcher, sampler = self._prefetcher, self._sampler
            if prefetcher is None or not prefetcher.wanted(entry):
                return None
            delivered = sampler.ran_out
            entry.drawn = self._drawn(storage, self._size_of(None))
            # What users see of the sampler belongs to the batch that they got last.
            sampler.ran_out = delivered
            return entry.drawn

    def _drawn(self, storage: Storage, size: int) -> Drawn:
        if self._pending and size == self._batch_size:
            kept = self._pending.popleft()
            index, info, ran_out = kept.index, kept.info, kept.ran_out
            self._sampler.ran_out = ran_out
        else:
            drawn, info = self._sampler.sample(storage, size)
            index = torch.stack(tuple(drawn), -1) if isinstance(drawn, tuple) else drawn
            ran_out = self._sampler.ran_out
            index, info = self._sample_unit.expand(index, dict(info), storage)
            if self._writer.tracks_generations or self._sampler.prioritized:
                slots = index[:, 0] if storage.ndim > 1 else index
                info["index_generation"] = storage.ledger.generations(slots)
        own = self._collate_fn is not None
        return Drawn(index, info, ran_out, storage.read(index, own=own))

    def _finish(self, drawn: Drawn) -> tuple[Any, dict[str, Any]]:
        """Collates, transforms and pins; no lock is held."""
        collate = self._storage.collate if self._collate_fn is None else self._collate_fn
        data, drawn.rows = collate(drawn.rows), None
        if len(self._chain):
            data = self._chain.forward(data)
        info = {"index": drawn.index, **drawn.info}
        if self._pin_memory and torch.cuda.is_available():
            data = _pinned(data)
            info = {key: _pinned(value) for key, value in info.items()}
        return data, info

    def _merged(self, data: Any, info: dict[str, Any]) -> Any:
        """Puts the info of a draw into a TensorDict; other data stay as they are."""
        if not is_tensordict(data):
            return data
        if data.is_locked:
            data = data.copy()
        rows = info["index"].shape[0]
        dim = self._storage.stack_dim if self._collate_fn is None else 0
        dim = dim if dim >= 0 else dim + data.batch_dims
        if data.batch_dims <= dim or data.batch_size[dim] != rows:
            raise RuntimeError(
                f"a transform or collate_fn made batch size {list(data.batch_size)} of {rows} rows,"
                " so that index and info no longer belong to them; call sample(return_info=True, "
                "include_info=False) and read them from the info dict"
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
    if is_tensordict(data) or isinstance(data, torch.Tensor):
        return data.pin_memory() if data.device is None or data.device.type == "cpu" else data
    if isinstance(data, dict):
        return {key: _pinned(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        items = [_pinned(value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data
