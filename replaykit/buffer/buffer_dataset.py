"""Iterate over a buffer as a data set for the workers of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from replaykit._compat import Uncompiled, shared_bytes
from replaykit._ray import Carried
from replaykit.buffer.core import checked_batch_size
from replaykit.buffer.drawing import Lent
from replaykit.buffer.prefetch import Drawn
from replaykit.buffer.sampling import Sampling
from replaykit.samplers import Sampler, SamplerWithoutReplacement, Transition
from replaykit.samplers.window_measures import eligible_records
from replaykit.transfer import Packing, View, is_plain
from replaykit.writers import ImmutableDatasetWriter

__all__ = [
    "BufferDataset",
    "DrawnRows",
    "Elsewhere",
    "MemberFacts",
    "Parcel",
    "Reader",
    "RemoteRequest",
    "Standing",
    "check_loaded",
    "check_workers",
    "for_readers",
    "stream_seed",
]


class RemoteRequest(Protocol):
    """A batch that was asked for."""

    def result(self, timeout: float | None = None) -> Any: ...


@dataclass(frozen=True)
class MemberFacts:
    """What an ensemble has to know of a member that draws in other processes.

    Attributes:
        sampler: name of the class of its sampler.
        tells: keys of what its samples always tell of their rows.
        prioritized: whether it takes priorities, and ``priority_key``: where it looks for them.
        width: numbers in an index.
        weights: dtype of ``priority_weight``.
        single: whether it draws single rows, however many at once; else windows.
        ordered: whether a transform takes batches in the order of delivery.
    """

    sampler: str
    tells: frozenset[Any]
    prioritized: bool
    priority_key: tuple[str, ...]
    width: int
    weights: torch.dtype
    single: bool
    ordered: bool


class DrawnRows(NamedTuple):
    """Rows that were drawn elsewhere, along dimension 0, and what is known of them.

    ``info`` has ``index`` and ``index_generation``, and nothing of it is in ``data`` yet.
    """

    data: Any
    info: dict[Any, Any]


class Standing(NamedTuple):
    """How many rows a member has, and whether it can give those that it was asked about."""

    size: int
    ready: bool


class Elsewhere(Uncompiled, ABC):
    """A handle of a buffer that makes its batches in other processes.

    Loaders ask it for streams of batches, each drawn with a generator of its own; what the handle
    itself draws is left alone. New rows and priorities count from the next batch on. Ensembles ask
    it for parts of their batches, each drawn with a seed. What is asked for is on its way at once
    wherever that needs no waiting.
    """

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """What the sampler is like."""

    @abstractmethod
    def _size_of(self, batch_size: int | None) -> int:
        """Number of rows of a batch; RuntimeError: none is known."""

    @abstractmethod
    def _check_loader(self) -> None:
        """Raises ValueError or TypeError where streams cannot be drawn beside the buffer's own."""

    @abstractmethod
    def _check_workers(self, method: str | None = None) -> None:
        """Raises ValueError where worker processes could not reach the buffer.

        Args:
            method: how they are started; None: this is one of them.
        """

    @abstractmethod
    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        """What asks for one batch after the other of so many rows, drawn with that generator."""

    @abstractmethod
    def _carried(self) -> Any:
        """What a spawned process gets in the place of the handle, to be ``made`` there."""

    # -- as a member of an ensemble -----------------------------------------------------------

    @abstractmethod
    def _facts_of_member(self) -> MemberFacts:
        """What its samples are like; ValueError or TypeError where it cannot be a member."""

    @abstractmethod
    def _be_fresh(self, rows: int) -> None:
        """Learns what a draw of so many rows needs to know, where it is too old; may wait."""

    @abstractmethod
    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        """Asks for draws of so many rows, which follow from a seed, the rows and priorities.

        Returns:
            A future of a list of `DrawnRows`, and `MemberFacts` if they have changed, else None.
        """

    @abstractmethod
    def _ask_standing(self, rows: int) -> RemoteRequest:
        """Asks for its `Standing`."""

    @abstractmethod
    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        """Asks whether rows are stored; -1 is any. The answer is None, or an IndexError."""

    @abstractmethod
    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        """Calls one of its methods."""

    @abstractmethod
    def _handed_on(self) -> Any:
        """A handle that can be pickled."""


class Parcel:
    """Arrives as the batch itself where it is unpickled.

    Its tensors are copied once, into one block of shared memory that the receiver has for itself;
    sent as they are, each would be a file of its own to be opened there. Containers and objects are
    pickled around them; tensors that are more than their bytes go with these.

    Cost: one copy of the batch where it is sent, none where it arrives.
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
    """Pickles everything but plain tensors, which it keeps."""

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
    return _Back(pickled, [view.of(block) for view in views]).load()


@dataclass(frozen=True)
class Reader:
    """What a spawned process makes a buffer of that reads the same rows and writes none."""

    rows: Any
    sampler: Sampler
    generations: bool
    options: dict[str, Any]

    def made(self) -> Sampling:
        writer = ImmutableDatasetWriter()
        writer.tracks_generations = self.generations
        return Sampling(
            storage=self.rows.opened(), sampler=self.sampler, writer=writer, **self.options
        )


def for_readers(buffer: Sampling | Elsewhere) -> Any:
    """What a spawned process gets in the place of a buffer; what is not the buffer is ``made``."""
    if isinstance(buffer, Elsewhere):
        return buffer._carried()
    rows = buffer.storage.for_readers()
    if rows is buffer.storage:
        return buffer
    return Reader(
        rows,
        buffer._sampler,
        buffer._writer.tracks_generations,
        {
            "sample_unit": buffer._sample_unit,
            "collate_fn": buffer._collate_fn,
            "transform": buffer._chain,
            "batch_size": buffer._batch_size,
            "contiguous": buffer._contiguous,
        },
    )


def check_workers(buffer: Any, method: str | None = None) -> None:
    """Checks that worker processes can read the rows of a buffer.

    Args:
        method: how they are started, where that is known.

    Raises:
        ValueError: names what keeps them from it. RuntimeError: the rows would have to be copied.
    """
    if isinstance(buffer, Elsewhere):
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
    """The batches of a buffer, drawn and made where it is iterated over: in each worker process.

    For a ``DataLoader`` that has ``batch_size=None``, since batches come whole. The buffer's own
    draws, its generator and its pass are left alone.

    With a sampler that goes through the rows pass by pass (`SamplerWithoutReplacement`,
    `SliceSamplerWithoutReplacement`) an iteration is one pass, and all ranks and workers together
    get each of its batches once: rank r of R those at r, r + R, ..., in an order that does not
    depend on the number of workers. With any other sampler each worker of each rank draws a stream
    of its own, seeded by ``seed``, epoch, rank and worker; it ends after ``steps``.

    Workers read the rows where they lie. Forked ones have those that there were when they were
    started, of any storage. Spawned ones open the files of a ``LazyMemmapStorage`` or a data set;
    with ``shared=True`` either kind follows what is written. Handles of a buffer in actors of Ray
    ask these for batches, from workers that are spawned; they follow what is written too.

    Args:
        buffer: a ReplayBuffer or a data set, for workers without ``device``; or a handle of a
            buffer in actors.
        batch_size: number of rows; None: that of the buffer.
        steps: batches of an iteration, of all workers of this rank together; None: it has no end.
            Only with samplers that have no passes.
        seed: the same for all ranks.
        rank, world_size: of this process; None: those of ``torch.distributed`` where it was
            initialized, else 0 of 1.
        drop_last: leave out a last batch that would be shorter, and the last ones where not every
            rank would get one. Only with samplers that have passes.

    Raises:
        TypeError: no ReplayBuffer with rows of its own (an ensemble has none); ``rank`` without
            ``world_size``. ValueError: a number that cannot be, an option that is for other
            samplers; a buffer whose samples are counted, by a rate limiter or because they use
            records up. RuntimeError: no batch size anywhere.

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
        buffer: Sampling | Elsewhere,
        batch_size: int | None = None,
        *,
        steps: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        check_loaded(buffer)
        for name, value, least in (("steps", steps, 1), ("seed", seed, None)):
            if value is None and name == "steps":
                continue
            if type(value) is not int or (least is not None and value < least):
                bound = "" if least is None else f" of at least {least}"
                raise ValueError(f"expected {name} as an int{bound}, got {value!r}")
        sampler = buffer.sampler
        passes = sampler.passes
        if passes and steps is not None:
            raise ValueError(
                f"expected steps=None with {type(sampler).__name__}, whose pass is an "
                f"iteration, got {steps}"
            )
        if drop_last and not passes:
            raise ValueError(
                "expected drop_last with a sampler that goes through the rows pass by pass, got "
                f"{type(sampler).__name__}"
            )
        self.batch_size = (
            buffer._size_of(None) if batch_size is None else checked_batch_size(batch_size)
        )
        self.steps, self.seed, self.drop_last = steps, seed, bool(drop_last)
        self.rank, self.world_size = _place(rank, world_size)
        self._buffer: Any = buffer
        # Shared with workers, which go on from one iteration to the next without being told.
        self._at = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()
        self._at[_WRITTEN] = -1
        # By how much numbers of writes differ in this process from those where it came from.
        self._shift = 0

    @staticmethod
    def collate(batch: Any) -> Any:
        """The batch as it is: the ``collate_fn`` of a ``DataLoader`` over this."""
        return batch

    @property
    def buffer(self) -> Any:
        """Whose batches these are."""
        return self._buffer

    @property
    def epoch(self) -> int:
        """Which pass, or which streams, an iteration that begins now draws."""
        return int(self._at[_EPOCH])

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses what the next iteration draws, in workers too.

        Args:
            epoch: number of the pass, or of the streams.
            start: how many batches of it this rank has had already.

        Raises:
            ValueError: one of them is not an int of at least 0.
        """
        for name, value in (("epoch", epoch), ("start", start)):
            if type(value) is not int or value < 0:
                raise ValueError(f"expected {name} as an int of at least 0, got {value!r}")
        self._at[_EPOCH], self._at[_START], self._at[_WRITTEN] = epoch, start, -1

    def begin(self, epoch: int, start: int) -> None:
        """``set_epoch`` for an iteration that begins now, of the rows that there are now."""
        self.set_epoch(epoch, start)
        if isinstance(self._buffer, Elsewhere):
            return
        with self._buffer._locked() as storage:
            self._at[_WRITTEN] = storage.ledger.next_position

    def __len__(self) -> int:
        """Batches of an iteration of this rank, all workers together.

        Raises:
            TypeError: that is not known before: without ``steps``, or for slices.
        """
        if self.steps is not None:
            return self.steps
        buffer = self._buffer
        sampler = buffer.sampler
        if type(sampler) is not SamplerWithoutReplacement or (
            type(buffer._sample_unit) is not Transition
        ):
            raise TypeError(
                f"the batches of a {type(sampler).__name__} have no number that is known before; "
                "give steps= where it has no passes"
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
        """Draws, reads, transforms: in the process that asks for the batches."""
        buffer, info = self._buffer, get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, start, written = self._at.tolist()
        if info is not None:
            check_workers(buffer)
        if isinstance(buffer, Elsewhere):
            asks = _Asks(buffer, self.batch_size)
            for asked, _ in self._stream(asks, epoch, start, worker, workers):
                yield asked.batch() if info is None else Parcel(asked.batch())
            return
        buffer._ready()
        if info is not None:
            buffer._pin_memory = False  # of this process alone; the one that trains does that
        passes, own = buffer._sampler.passes, False
        if info is not None:
            own = buffer.shared and buffer._sampler.prioritized
            if written >= 0 and (passes or not buffer.shared):
                _check_written(buffer, written + self._shift)
        draws = _Draws(
            buffer,
            buffer._sampler if own else _sampler_of(buffer, drop_last=self.drop_last),
            self.batch_size,
        )
        made = self._pass if passes else self._stream
        for drawn, seed in made(draws, epoch, start, worker, workers):
            batch = draws.read(drawn, seed)
            yield batch if info is None else Parcel(batch)

    def _pass(
        self, draws: _Draws, epoch: int, start: int, worker: int, workers: int
    ) -> Iterator[tuple[Drawn, int]]:
        """Those of the batches of a pass that are this worker's: all draw all, and read theirs."""
        draws.seed(self.seed, epoch)
        written = draws.buffer.storage.ledger.next_position
        number, ended = 0, False
        while not ended:
            mine = None
            for rank in range(self.world_size):
                drawn, seed = draws.next()
                if rank == self.rank:
                    mine = drawn, seed
                ended = drawn.ran_out
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
        """The draws of a stream; which one, is such that batches come in turn from ``start`` on."""
        stream = (start + worker) % workers
        draws.seed(self.seed, epoch, self.rank, stream)
        number, ended = stream, False
        while not ended and (self.steps is None or number < self.steps):
            drawn, seed = draws.next()
            if number >= start:
                yield drawn, seed
            number, ended = number + workers, drawn.ran_out

    # -- to another process -------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if get_spawning_popen() is not None:
            check_workers(self._buffer)
            state["_buffer"] = for_readers(self._buffer)
            if not isinstance(self._buffer, Elsewhere):
                state["_handed"] = self._buffer.storage.ledger.next_position
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        handed = state.pop("_handed", None)
        self.__dict__.update(state)
        if isinstance(self._buffer, (Carried, Reader)):
            self._buffer = self._buffer.made()
        if handed is not None and not self._buffer.shared:
            self._shift = self._buffer.storage.ledger.next_position - handed


class _Draws:
    """Draws of a sampler, one after the other; rows are read for those that are asked for.

    Each has a seed of its own for what transforms draw, so that it does not matter who reads it,
    and whether those before it were read.
    """

    def __init__(self, buffer: Sampling, sampler: Sampler, size: int) -> None:
        self.buffer, self._sampler, self._size = buffer, sampler, size
        self._generator = torch.Generator()
        self._transforms = torch.Generator()

    def seed(self, *numbers: int) -> None:
        """Begins anew."""
        self._generator.manual_seed(stream_seed(*numbers))

    def next(self) -> tuple[Drawn, int]:
        """The next draw and its seed."""
        with self.buffer._locked() as storage:
            drawn = self.buffer._sampled(storage, self._sampler, self._size, self._generator)
        return drawn, int(torch.randint(2**62, (), generator=self._generator, device="cpu"))

    def read(self, drawn: Drawn, seed: int) -> Any:
        """The batch of a draw."""
        buffer = self.buffer
        lent = Lent(
            self._transforms.manual_seed(seed), kept=drawn, generations=False, numbered=True
        )
        with buffer._locked() as storage:
            found = buffer._drawn(storage, drawn.size, lent)
        return buffer._delivered(found, None)[0]


class _Asks:
    """Batches that a handle asks for, one after the other, as `_Draws` draws them."""

    def __init__(self, handle: Elsewhere, size: int) -> None:
        self._handle, self._size = handle, size
        self._ask: Callable[[int], RemoteRequest] | None = None

    def seed(self, *numbers: int) -> None:
        """Begins anew."""
        self._ask = self._handle._asking(torch.Generator().manual_seed(stream_seed(*numbers)))

    def next(self) -> tuple[_AskedFor, int]:
        """The next batch, which may be on its way."""
        assert self._ask is not None
        return _AskedFor(self._ask(self._size)), 0


class _AskedFor:
    """A batch under way, one of a stream without an end."""

    ran_out = False

    def __init__(self, asked: RemoteRequest) -> None:
        self._asked = asked

    def batch(self) -> Any:
        return self._asked.result()


def check_loaded(buffer: Any) -> None:
    """Raises TypeError or ValueError where others cannot draw beside the buffer's own draws."""
    if isinstance(buffer, Elsewhere):
        buffer._check_loader()
        return
    if not isinstance(buffer, Sampling) or type(buffer)._finish is not Sampling._finish:
        raise TypeError(
            f"expected a ReplayBuffer with rows of its own, got {type(buffer).__name__}"
        )
    if buffer.sampler.consumes:
        raise ValueError(
            "expected a sampler that leaves the buffer as it is, got "
            f"{type(buffer.sampler).__name__}, whose draws use records up"
        )
    if buffer._pace is not None:
        raise ValueError(
            "expected a buffer without rate_limiter, which would not know of the samples that "
            "workers draw"
        )


def stream_seed(*numbers: int) -> int:
    """A seed that follows from numbers, in which every bit of them counts."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _sampler_of(buffer: Sampling, *, drop_last: bool) -> Sampler:
    """A sampler like the buffer's, at the beginning of a pass."""
    with buffer._locked() as storage:
        sampler = copy.deepcopy(buffer._sampler, {id(storage): storage})
    if sampler.passes:
        sampler.empty()
    if drop_last:
        sampler.drop_last = True  # type: ignore[attr-defined]
    return sampler


def _check_written(buffer: Sampling, written: int) -> None:
    with buffer._locked() as storage:
        now = storage.ledger.next_position
    if now != written:
        raise RuntimeError(
            f"expected a buffer that nobody writes, got {abs(now - written)} rows written since "
            "the iteration or its workers began; with a sampler that has no passes, shared=True "
            "lets workers follow"
        )


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise TypeError("expected rank and world_size, got one of them")
    if rank is None or world_size is None:
        known = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not known:
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, value in (("rank", rank), ("world_size", world_size)):
        if type(value) is not int:
            raise ValueError(f"expected {name} as an int, got {value!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank below world_size, got {rank} of {world_size}")
    return rank, world_size
