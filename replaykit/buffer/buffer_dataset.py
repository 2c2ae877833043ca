"""Iterate over a buffer in workers of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from replaykit._compat import shared_bytes
from replaykit.buffer.deliver import deliver_batch
from replaykit.buffer.draw import checked_batch_size, choose_rows, read_earlier, size_of
from replaykit.buffer.prefetch import Draw
from replaykit.buffer.source import BatchStreams, RemoteRequest, loading_sampler
from replaykit.declared import Count, Positive, read_value
from replaykit.samplers import Sampler, SamplerWithoutReplacement, Transition
from replaykit.samplers.window_measures import eligible_records
from replaykit.transfer import Packing, View, is_plain, views_of
from replaykit.writers import ImmutableDatasetWriter

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


class Parcel:
    """A wrapper that unpickles as the batch itself.

    Pickling copies the tensors once, into one block of shared memory that only the receiver uses.
    Without the block, each tensor would be a file that the receiver has to open. Containers and
    other objects are pickled outside this block. So are tensors that have more content than their
    bytes.

    Cost: one copy of the batch in the sender, and none in the receiver.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        around = _Around()
        around.dump(self._batch)
        packing = Packing(around.tensors)
        block = shared_bytes(packing.nbytes)
        packing.fill(block)
        views = [packing.views[place] for place in range(len(around.tensors))]
        return _opened, (around.stream.getvalue(), block, views)


class _Around(pickle.Pickler):
    """A pickler of all objects except plain tensors, which it collects in ``tensors``."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.tensors: list[torch.Tensor] = []
        super().__init__(self.stream, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or not value.is_cpu or not is_plain(value):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Back(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self._tensors[place]


def _opened(pickled: bytes, block: torch.Tensor, views: Sequence[View]) -> Any:
    return _Back(pickled, views_of(block, views)).load()


@dataclass
class Reader:
    """The parts of a read-only buffer that a spawned process makes over the same rows."""

    rows: Any
    sampler: Sampler
    generations: bool
    options: dict[str, Any]
    _made: ReplayBuffer | None = None

    def made(self) -> ReplayBuffer:
        """Return the one buffer with these parts."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> ReplayBuffer:
        from replaykit.buffer.replay_buffer import ReplayBuffer  # imports this module

        writer = ImmutableDatasetWriter()
        writer.tracks_generations = self.generations
        return ReplayBuffer(
            storage=self.rows.opened(), sampler=self.sampler, writer=writer, **self.options
        )


def for_readers(buffer: ReplayBuffer | BatchStreams, known: dict[int, Any] | None = None) -> Any:
    """Return the object that a spawned process gets in place of a buffer.

    The result is the buffer, or an object whose ``made`` creates a buffer, handle or mixture there.

    Args:
        known: the objects by the ids of their buffers. A mixture may have a buffer twice.
    """
    known = {} if known is None else known
    if id(buffer) not in known:
        known[id(buffer)] = _for_readers(buffer, known)
    return known[id(buffer)]


def _for_readers(buffer: ReplayBuffer | BatchStreams, known: dict[int, Any]) -> Any:
    if isinstance(buffer, BatchStreams):
        return buffer._carried(known)
    rows = buffer.storage.for_readers()
    if rows is buffer.storage:
        return buffer
    return Reader(
        rows,
        buffer._sampler,
        buffer._writer.tracks_generations,
        {
            "sample_unit": buffer._windows or buffer._sample_unit,
            "collate_fn": buffer._collate_fn,
            "transform": buffer._chain,
            "batch_size": buffer._batch_size,
            "contiguous": buffer._contiguous,
        },
    )


def check_workers(buffer: Any, method: str | None = None) -> None:
    """Check that worker processes can read the rows of a buffer.

    Args:
        method: the start method of the workers, if known.

    Raises:
        ValueError: workers cannot read the rows; the error gives the reason.
        RuntimeError: workers would have to copy the rows.
    """
    if isinstance(buffer, BatchStreams):
        buffer._check_workers(method)
        return
    if buffer._target is not None:
        raise ValueError(
            f"expected a buffer without device for workers, got device={str(buffer._target)!r}: "
            "they make batches on the CPU; move these with to_device, or use prefetch="
        )
    if str(buffer.storage.device).partition(":")[0] not in ("cpu", "auto"):
        raise ValueError(
            f"expected rows on the CPU for workers, got a {type(buffer.storage).__name__} on "
            f"{buffer.storage.device}; use prefetch="
        )
    if method not in (None, "fork"):
        buffer.storage.for_readers()


_EPOCH, _START, _WRITTEN = range(3)


class BufferDataset(IterableDataset):
    """An iterable of a buffer's batches, which the iterating process makes.

    Use it in a ``DataLoader`` with ``batch_size=None``, because each item is a whole batch. With
    workers, each worker makes its batches. An iteration changes neither the buffer's own draws, nor
    its generator, nor its pass.

    With a sampler that works in passes (`SamplerWithoutReplacement`,
    `SliceSamplerWithoutReplacement`), one iteration is one pass. All ranks and workers together
    return each batch of the pass once. Rank r of R returns batches r, r + R, and so on. Their order
    does not depend on the number of workers.

    With any other sampler, and from an ensemble, each worker of each rank draws a separate stream.
    The seed of a stream is computed from ``seed``, epoch, rank and worker. The streams end when
    ``steps`` batches have been returned.

    Workers read the rows without a copy of the storage. Forked workers support any storage, and see
    the rows that were stored when they started. Spawned workers open the files of a
    ``LazyMemmapStorage`` or a data set. With ``shared=True`` both kinds of workers also see later
    writes. If the buffer is a handle of Ray actors, spawned workers request batches from the
    actors. These batches include later writes.

    Args:
        buffer: a ReplayBuffer, a data set, an ensemble, or a handle of a buffer in actors. A buffer
            that workers read must not have a ``device``.
        batch_size: number of rows; None for the buffer's batch size.
        steps: number of batches of an iteration, counted over all workers of this rank. None for no
            end. Only for samplers without passes.
        seed: base of all seeds; the same for all ranks.
        rank, world_size: rank of this process and number of ranks. None for the values of
            ``torch.distributed`` if it is initialized, else 0 and 1.
        drop_last: leave out a shorter last batch. Also leave out last batches that only some ranks
            would get. Only for samplers with passes.

    Raises:
        TypeError: ``buffer`` is no buffer, or ``rank`` is given without ``world_size``.
        ValueError: a number is out of range, or an option is for other samplers. Also if a rate
            limiter counts the samples, or if the sampler uses rows up.
        RuntimeError: no batch size is given.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from replaykit import BufferDataset, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(100))
        >>> dataset = BufferDataset(rb, steps=3, seed=1)
        >>> loader = DataLoader(dataset, batch_size=None, collate_fn=BufferDataset.collate)
        >>> [batch.shape for batch in loader]
        [torch.Size([4]), torch.Size([4]), torch.Size([4])]
    """

    def __init__(
        self,
        buffer: ReplayBuffer | BatchStreams,
        batch_size: int | None = None,
        *,
        steps: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        check_loaded(buffer)
        read_value(int, seed, "seed")
        if steps is not None:
            read_value(Positive, steps, "steps")
        sampler = buffer.sampler
        passes = sampler.passes
        if passes and steps is not None:
            raise ValueError(
                f"expected steps=None with {type(sampler).__name__}, whose pass is an "
                f"iteration, got {steps}"
            )
        if drop_last and not passes:
            raise ValueError(
                "expected drop_last with a sampler that draws the rows in passes, got "
                f"{type(sampler).__name__}"
            )
        if batch_size is not None:
            self.batch_size = checked_batch_size(batch_size)
        else:
            given: Any = buffer
            own = isinstance(buffer, BatchStreams)
            self.batch_size = given._size_of(None) if own else size_of(given, None)
        self.steps, self.seed, self.drop_last = steps, seed, bool(drop_last)
        self.rank, self.world_size = _shard_of_process(rank, world_size)
        self._buffer: Any = buffer
        # Shared with workers. Persistent workers read it when the next iteration starts.
        self._at = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()
        self._at[_WRITTEN] = -1
        # Difference between row ids in this process and in the one that pickled the data set.
        self._shift = 0

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch unchanged. Use it as ``collate_fn`` of the ``DataLoader``."""
        return batch

    @property
    def buffer(self) -> Any:
        """The buffer or handle that the batches come from."""
        return self._buffer

    @property
    def epoch(self) -> int:
        """The number that identifies the pass, or the streams, of the next iteration."""
        return int(self._at[_EPOCH])

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the pass, or the streams, of the next iteration, also in workers.

        Args:
            epoch: the number that identifies the pass, or the streams.
            start: number of batches to skip, which this rank has already received.

        Raises:
            ValueError: ``epoch`` or ``start`` is not an int of at least 0.
        """
        read_value(Count, epoch, "epoch")
        read_value(Count, start, "start")
        self._at[_EPOCH], self._at[_START], self._at[_WRITTEN] = epoch, start, -1

    def begin(self, epoch: int, start: int) -> None:
        """Call ``set_epoch`` for an iteration over the rows that are stored now.

        If rows are written afterwards, workers whose draws depend on the stored rows raise
        RuntimeError.
        """
        self.set_epoch(epoch, start)
        self._at[_WRITTEN] = _written_in(self._buffer)

    def __len__(self) -> int:
        """Return the number of batches of an iteration of this rank, over all workers.

        Raises:
            TypeError: the number is unknown in advance, without ``steps`` or for slices.
        """
        if self.steps is not None:
            return self.steps
        buffer = self._buffer
        sampler = buffer.sampler
        if type(sampler) is not SamplerWithoutReplacement or (
            type(buffer._sample_unit) is not Transition
        ):
            raise TypeError(
                f"the number of batches of a {type(sampler).__name__} is not known in advance; "
                "give steps= if it has no passes"
            )
        with buffer._locked() as storage:
            rows = len(storage)
            if buffer._needs:
                rows = eligible_records(storage, buffer._needs).count
        short = 0 if self.drop_last or sampler.drop_last else self.batch_size - 1
        whole, rest = divmod((rows + short) // self.batch_size, self.world_size)
        return whole + int(not self.drop_last and self.rank < rest)

    # -- drawing ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield batches that the iterating process draws, reads and transforms."""
        buffer, info = self._buffer, get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, start, written = self._at.tolist()
        if info is not None:
            check_workers(buffer)
        if isinstance(buffer, BatchStreams):
            if info is not None and written >= 0:
                _check_written(buffer, written + self._shift)
            asks = _Asks(buffer, self.batch_size, workers)
            for asked, _ in self._stream(asks, epoch, start, worker, workers):
                yield asked.batch() if info is None else Parcel(asked.batch())
            return
        buffer._ready()
        if info is not None:
            buffer._pin_memory = False  # only in this process; the training process pins batches
        passes, own = buffer._sampler.passes, False
        if info is not None:
            own = buffer.shared and buffer._sampler.prioritized
            if written >= 0 and (passes or not buffer.shared):
                _check_written(buffer, written + self._shift)
        draws = _Draws(
            buffer,
            buffer._sampler if own else loading_sampler(buffer, drop_last=self.drop_last),
            self.batch_size,
        )
        made = self._pass if passes else self._stream
        for draw, seed in made(draws, epoch, start, worker, workers):
            batch = draws.read(draw, seed)
            yield batch if info is None else Parcel(batch)

    def _pass(
        self, draws: _Draws, epoch: int, start: int, worker: int, workers: int
    ) -> Iterator[tuple[Draw, int]]:
        """Yield this worker's draws of a pass, with their seeds.

        Every worker of every rank makes all draws, but reads only rows of the draws that it yields.
        """
        draws.seed(self.seed, epoch)
        written = draws.buffer.storage.ledger.next_position
        number, ended = 0, False
        while not ended:
            mine = None
            for rank in range(self.world_size):
                draw, seed = draws.next()
                if rank == self.rank:
                    mine = draw, seed
                ended = draw.ran_out
                if ended and self.drop_last and rank + 1 < self.world_size:
                    return
                if ended:
                    break
            _check_written(draws.buffer, written)
            if mine is None:
                return
            if number >= start and (number - start) % workers == worker:
                yield mine
            number += 1

    def _stream(
        self, draws: Any, epoch: int, start: int, worker: int, workers: int
    ) -> Iterator[tuple[Any, int]]:
        """Yield the draws of a stream, with their seeds.

        The loader takes batches from the workers in turn. The stream is chosen so that batch number
        ``start`` comes first.
        """
        stream = (start + worker) % workers
        draws.seed(self.seed, epoch, self.rank, stream)
        number, ended = stream, False
        while not ended and (self.steps is None or number < self.steps):
            draw, seed = draws.next()
            if number >= start:
                yield draw, seed
            number, ended = number + workers, draw.ran_out

    # -- to another process -------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if get_spawning_popen() is not None:
            check_workers(self._buffer)
            state["_buffer"] = for_readers(self._buffer)
            state["_handed"] = _written_in(self._buffer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        handed = state.pop("_handed", None)
        self.__dict__.update(state)
        if not isinstance(self._buffer, BatchStreams) and hasattr(self._buffer, "made"):
            self._buffer = self._buffer.made()
        buffer = self._buffer
        if handed is not None and (isinstance(buffer, BatchStreams) or not buffer.shared):
            self._shift = _written_in(buffer) - handed


class _Draws:
    """Draws of a sampler, one after the other. Rows are read only on request.

    Each draw has a separate seed for the random numbers of transforms. Its batch is therefore the
    same in any worker, even if earlier draws were not read.
    """

    def __init__(self, buffer: ReplayBuffer, sampler: Sampler, size: int) -> None:
        self.buffer, self._sampler, self._size = buffer, sampler, size
        self._generator = torch.Generator()
        self._transforms = torch.Generator()

    def seed(self, *numbers: int) -> None:
        """Begin a stream."""
        self._generator.manual_seed(stream_seed(*numbers))

    def next(self) -> tuple[Draw, int]:
        """Return the next draw and its seed."""
        with self.buffer._locked() as storage:
            draw = choose_rows(
                self.buffer, storage, self._size, False, self._generator, sampler=self._sampler
            )
        return draw, int(torch.randint(2**62, (), generator=self._generator, device="cpu"))

    def read(self, draw: Draw, seed: int) -> Any:
        """Return the batch of a draw."""
        buffer = self.buffer
        generator = self._transforms.manual_seed(seed)
        with buffer._locked() as storage:
            batch = read_earlier(buffer, draw, storage, generator)
        return deliver_batch(buffer, batch, None)[0]


class _Asks:
    """Requests for batches of a handle or mixture, one after the other, like `_Draws`."""

    def __init__(self, handle: BatchStreams, size: int, workers: int) -> None:
        self._handle, self._size, self._workers = handle, size, workers
        self._ask: Callable[[int], RemoteRequest] | None = None

    def seed(self, *numbers: int) -> None:
        """Begin a stream, whose first batch has the last of the numbers."""
        generator = torch.Generator().manual_seed(stream_seed(*numbers))
        self._ask = self._handle._asking_from(generator, numbers[-1], self._workers)

    def next(self) -> tuple[_AskedFor, int]:
        """Request the next batch; return without waiting for it."""
        assert self._ask is not None
        return _AskedFor(self._ask(self._size)), 0


class _AskedFor:
    """A requested batch of an endless stream."""

    ran_out = False

    def __init__(self, asked: RemoteRequest) -> None:
        self._asked = asked

    def batch(self) -> Any:
        return self._asked.result()


def check_loaded(buffer: Any) -> None:
    """Raise TypeError or ValueError if loaders cannot draw separately from the buffer."""
    if isinstance(buffer, BatchStreams):
        buffer._check_loader()
        return
    if not hasattr(buffer, "_sample_unit"):
        raise TypeError(
            f"expected a ReplayBuffer, an ensemble or a handle, got {type(buffer).__name__}"
        )
    if buffer.sampler.consumes:
        raise ValueError(
            "expected a sampler whose draws leave the buffer unchanged, got "
            f"{type(buffer.sampler).__name__}, which uses rows up"
        )
    if buffer._pace is not None:
        raise ValueError(
            "expected a buffer without rate_limiter: it would not count the samples that workers "
            "draw"
        )


def stream_seed(*numbers: int) -> int:
    """Return a seed that depends on every bit of the given numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _written_in(buffer: Any) -> int:
    """Return the number of rows ever written to the buffers that workers read themselves."""
    copied = buffer._copied_buffers() if isinstance(buffer, BatchStreams) else [buffer]
    count = 0
    for one in copied:
        with one._locked() as storage:
            count += storage.ledger.next_position
    return count


def _check_written(buffer: Any, written: int) -> None:
    now = _written_in(buffer)
    if now != written:
        raise RuntimeError(
            f"expected no writes during an iteration, got {abs(now - written)} rows written since "
            "it or its workers began; with a sampler that has no passes, shared=True lets workers "
            "follow writes"
        )


def _shard_of_process(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise TypeError("expected rank and world_size together, got one of them")
    if rank is None or world_size is None:
        known = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not known:
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    read_value(int, rank, "rank")
    read_value(int, world_size, "world_size")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank below world_size, got {rank} of {world_size}")
    return rank, world_size
