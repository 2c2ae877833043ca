"""``dataloader``: batches that worker processes make."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import torch
from torch.utils.data import DataLoader

from replaykit.buffer.buffer_dataset import BufferDataset, Elsewhere, check_workers, stream_seed
from replaykit.buffer.core import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.sampling import Sampling

__all__ = ["BufferLoader", "Loading", "LoadingElsewhere"]


class BufferLoader(DataLoader[DataT]):
    """A ``DataLoader`` over a buffer that counts what it has delivered; made by ``rb.dataloader``.

    Every iteration is another epoch: another pass, or other streams. One iteration at a time. Where
    it is left before its end, the next one is that of the next epoch, unless ``load_state_dict``
    says where to go on.

    Attributes:
        epoch: number of the iteration that is under way, or comes next.
        step: batches of it that were delivered.

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
        if type(workers) is not int or workers < 0:
            raise ValueError(f"expected workers as an int of at least 0, got {workers!r}")
        if workers:
            check_workers(dataset.buffer, _start_method(options.get("multiprocessing_context")))
        # Of its own: the base class draws a seed for workers from it, or from torch's global one.
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
        seen = _state(dataset.buffer)
        return self._counted(super().__iter__(), turn, seen)

    def _counted(self, batches: Iterator[Any], turn: object, seen: Any) -> Iterator[Any]:
        buffer = self.dataset.buffer
        apart = self.num_workers > 0 and not (isinstance(buffer, Elsewhere) or buffer.shared)
        for batch in batches:
            if self._turn is not turn:
                raise RuntimeError("expected one iteration at a time, another one has begun")
            if apart and _state(buffer) != seen:
                raise RuntimeError(
                    "expected a buffer that nobody writes while worker processes read it, got "
                    "other rows than there were; make it with shared=True, or use prefetch="
                )
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Returns where the iteration is, and what its batches follow from.

        They follow from the rows and priorities too, which are the buffer's to save.
        """
        return {"epoch": self.epoch, "step": self.step, **self._law()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next iteration go on where the state was taken.

        Cost: batches that were delivered are drawn again, and not read.

        Raises:
            ValueError: the state of a loader whose batches are others. Nothing has changed then.
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


class Loading(Sampling[DataT, StorageT, SamplerT, WriterT]):
    """``dataloader``."""

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
        """Returns a ``DataLoader`` of batches that worker processes draw, read and transform.

        See `BufferDataset` for what they draw and which rows they can read, and
        ``docs/overlap.md`` for when to use it and when ``prefetch``.

        Args:
            batch_size: number of rows; None: that of the constructor.
            workers: number of processes; 0: batches are made by this one, when they are asked for.
            steps, seed, rank, world_size, drop_last: as for `BufferDataset`.
            pin_memory: have batches in pinned memory, where there is an accelerator; None: as the
                buffer does.
            multiprocessing_context, prefetch_factor, persistent_workers, worker_init_fn, timeout:
                as for ``DataLoader``. Workers that persist read the rows there were at their start.

        Raises:
            TypeError, ValueError: as `BufferDataset` and ``DataLoader`` do; rows that worker
                processes cannot read, by name. RuntimeError: no batch size anywhere, rows that
                spawned ones would have to copy; while it is iterated over, with ``workers`` and
                without ``shared=True``: rows were written.

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
            self,
            batch_size,
            steps=steps,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        pinned = self._pin_memory if pin_memory is None else bool(pin_memory)
        return BufferLoader(
            dataset,
            workers=workers,
            pin_memory=pinned and self._target is None and torch.cuda.is_available(),
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )


class LoadingElsewhere(Elsewhere, Generic[DataT]):
    """``dataloader`` of a handle."""

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
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
    ) -> BufferLoader[DataT]:
        """Returns a ``DataLoader`` whose worker processes ask for batches, each with a seed and a
        handle of its own. They are made where the rows are: without workers, and with
        ``client(prefetch=n)``, less processes wait for them.

        Args:
            batch_size: number of rows; None: that of the buffer.
            workers: number of processes, which take seconds to connect with Ray; 0: this one asks.
            steps, seed, rank, world_size: as for `BufferDataset`.
            drop_last: only False: these batches are streams.
            pin_memory: have batches in pinned memory, where there is an accelerator.
            multiprocessing_context: how they are started: "spawn" by default, or "forkserver".
            prefetch_factor, persistent_workers, worker_init_fn, timeout: as for ``DataLoader``.

        Raises:
            TypeError, ValueError: as `BufferDataset` and ``DataLoader`` do; a buffer that has a
                rate limiter; workers that are forked, or cannot reach the buffer. RuntimeError: no
                batch size anywhere.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(torch.arange(8))
            ...     first, again = (list(rb.dataloader(4, steps=3, seed=7)) for _ in range(2))
            >>> len(first), torch.equal(torch.cat(first), torch.cat(again))
            (3, True)
        """
        dataset = BufferDataset(
            self,
            batch_size,
            steps=steps,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        return BufferLoader(
            dataset,
            workers=workers,
            pin_memory=bool(pin_memory) and torch.cuda.is_available(),
            multiprocessing_context=("spawn" if workers else None)
            if multiprocessing_context is None
            else multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )


def _start_method(context: Any) -> str:
    """How processes of a context are started; None: of the default one."""
    if isinstance(context, str):
        return context
    found = multiprocessing if context is None else context
    return str(found.get_start_method())


def _state(buffer: Any) -> tuple[int, int, int] | None:
    """Numbers of which one changes with every write; None where writes do not matter."""
    if isinstance(buffer, Elsewhere):
        return None
    storage = buffer.storage
    return storage.ledger.next_position, storage.ledger.changes, storage.edits
