"""Make batches in worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, cast

import torch
from torch.utils.data import DataLoader

from replaykit._compat import Uncompiled
from replaykit.buffer.buffer_dataset import BufferDataset, check_workers, stream_seed
from replaykit.buffer.components import DataT
from replaykit.buffer.source import BatchStreams
from replaykit.declared import Count, read_value


class BufferLoader(DataLoader[DataT]):
    """A ``DataLoader`` that counts the batches it delivers.

    ``rb.dataloader`` returns it. Every iteration is a new epoch, with another pass or other
    streams. Only one iteration can run. If an iteration stops early, the next iteration starts the
    next epoch, unless ``load_state_dict`` sets another point.

    Attributes:
        epoch: number of the current iteration, or of the next one between iterations.
        step: number of delivered batches of that iteration.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement())
        >>> _ = rb.extend(torch.arange(6))
        >>> loader = rb.dataloader(2)
        >>> whole = [batch.tolist() for batch in loader]
        >>> sorted(sum(whole, [])), loader.epoch
        ([0, 1, 2, 3, 4, 5], 1)
        >>> again = rb.dataloader(2)
        >>> again.load_state_dict({**again.state_dict(), "step": 1})
        >>> [batch.tolist() for batch in again] == whole[1:]
        True
    """

    dataset: BufferDataset

    def __init__(self, dataset: BufferDataset, *, workers: int = 0, **options: Any) -> None:
        read_value(Count, workers, "workers")
        if workers:
            check_workers(dataset.buffer, _start_method(options.get("multiprocessing_context")))
        # The base class draws the workers' seed from it, not from torch's global generator.
        generator = torch.Generator().manual_seed(stream_seed(dataset.seed, dataset.rank))
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=BufferDataset.collate,
            generator=generator,
            **options,
        )
        self.epoch = self.step = 0
        self._resumed = False
        self._turn: object = None

    def __iter__(self) -> Iterator[DataT]:  # type: ignore[override]
        if self.step and not self._resumed:
            self.epoch, self.step = self.epoch + 1, 0
        self._resumed = False
        dataset, turn = self.dataset, object()
        self._turn = turn
        dataset.begin(self.epoch, self.step)
        buffer, logs = dataset.buffer, []
        if self.num_workers and isinstance(buffer, BatchStreams):
            logs = [one.storage.ledger.log for one in buffer._copied_buffers()]
        elif self.num_workers and not buffer.shared:
            logs = [buffer.storage.ledger.log]
        seen = [(log, log.number) for log in logs]
        return self._counted(super().__iter__(), turn, seen)

    def _counted(
        self, batches: Iterator[Any], turn: object, seen: list[tuple[Any, int]]
    ) -> Iterator[Any]:
        for batch in batches:
            if self._turn is not turn:
                raise RuntimeError("expected one iteration at a time, but another one has begun")
            if any(log.rows_changed(number) for log, number in seen):
                raise RuntimeError(
                    "expected no writes while worker processes read the buffer, got other rows "
                    "than at the start; make it with shared=True, or use prefetch="
                )
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the point of the iteration, and the arguments that determine its batches.

        The batches also depend on rows and priorities. The buffer saves those.
        """
        return {"epoch": self.epoch, "step": self.step, **self._law()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration continue at the point of a saved state.

        Cost: the loader repeats the draws of delivered batches, without reading their rows.

        Raises:
            ValueError: the state is from a loader with other batches; nothing has changed.
        """
        law = self._law()
        places = {"epoch": state_dict.get("epoch"), "step": state_dict.get("step")}
        found = {name: state_dict.get(name) for name in law}
        if found != law or any(type(at) is not int or at < 0 for at in places.values()):
            raise ValueError(f"expected the state of a loader with {law}, got {dict(state_dict)}")
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
        self._resumed, self._turn = True, None

    def _law(self) -> dict[str, int]:
        dataset = self.dataset
        law = {
            "seed": dataset.seed,
            "batch_size": dataset.batch_size,
            "rank": dataset.rank,
            "world_size": dataset.world_size,
        }
        if not dataset.buffer.sampler.passes:
            law["workers"] = max(self.num_workers, 1)
        return law


class Loading(Uncompiled, Generic[DataT]):
    """``dataloader`` of a buffer, a handle or an ensemble."""

    _workers_start: str | None = None
    """The default start method of workers; None for that of ``DataLoader``."""

    def _pins(self, pin_memory: bool | None) -> bool:
        """Return whether batches of a loader on the CPU are pinned."""
        return bool(pin_memory)

    def dataloader(
        self,
        batch_size: int | None = None,
        *,
        workers: int = 0,
        steps: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
    ) -> BufferLoader[DataT]:
        """Return a ``DataLoader`` whose worker processes make or request batches.

        The workers draw, read and transform batches. `BufferDataset` describes their draws and the
        rows that they can read. ``docs/overlap.md`` compares workers with ``prefetch``. If the rows
        are in other processes, these make the batches, so the workers only wait. A handle from
        ``client(prefetch=n)`` without workers needs fewer processes.

        Args:
            batch_size: number of rows; None for the constructor's ``batch_size``.
            workers: number of processes. Each may need seconds to connect to Ray. With 0, this
                process makes or requests each batch.
            steps, seed, rank, world_size: as for `BufferDataset`.
            drop_last: as for `BufferDataset`; False for streams, which have no last batch.
            pin_memory: return batches in pinned memory if there is an accelerator; None for the
                buffer's setting.
            multiprocessing_context: the start method of workers. Those of remote buffers must be
                spawned, which is their default.
            prefetch_factor, persistent_workers, worker_init_fn, timeout: as for ``DataLoader``.
                Persistent workers read the rows that were stored when they started.

        Raises:
            TypeError, ValueError: as for `BufferDataset` and ``DataLoader``. Also if workers cannot
                read the rows or reach the buffer; the error gives the reason. A remote buffer must
                have no rate limiter, and its workers must not be forked.
            RuntimeError: no batch size is given, or spawned workers would have to copy the rows.
                With ``workers`` but without ``shared=True``, the iteration raises the same error if
                rows are written meanwhile.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4,
            ...                   sampler=SamplerWithoutReplacement())
            >>> _ = rb.extend(torch.arange(10))
            >>> loader = rb.dataloader(seed=7)
            >>> len(loader), sorted(torch.cat(list(loader)).tolist())
            (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        """
        dataset = BufferDataset(
            cast(Any, self),
            batch_size,
            steps=steps,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        if multiprocessing_context is None and workers:
            multiprocessing_context = self._workers_start
        return BufferLoader(
            dataset,
            workers=workers,
            pin_memory=self._pins(pin_memory) and torch.cuda.is_available(),
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )


def _start_method(context: Any) -> str:
    """Return the start method of a context; None means the default context."""
    if isinstance(context, str):
        return context
    found = multiprocessing if context is None else context
    return str(found.get_start_method())
