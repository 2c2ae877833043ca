"""Move batches to other devices, and make large ones in memory that is no longer used."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from replaykit._compat import fresh_strided
from replaykit.structure import map_tensors

ALIGNMENT = 64
"""Alignment of pieces in bytes, which suits values of all dtypes."""

_ALONE_BYTES = 2**20
"""Size from which pieces are copied separately, which is then cheaper than packing."""


class View(NamedTuple):
    """A tensor as a part of a block. ``offset`` counts values of its dtype."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def views_of(block: torch.Tensor, views: Sequence[View]) -> list[torch.Tensor]:
    """Return tensors in a block, uint8 ``[n]``, without a copy."""
    memories: list[torch.Tensor] = []
    numbers: dict[torch.dtype, int] = {}
    for dtype in {view.dtype for view in views}:
        # Other tensors of the block may have smaller values.
        whole = len(block) // dtype.itemsize * dtype.itemsize
        numbers[dtype] = len(memories)
        memories.append(block[:whole].view(dtype))
    return fresh_strided(memories, [(numbers[view[0]], *view[1:]) for view in views])


class Piece(NamedTuple):
    """Bytes of one tensor memory, uint8 ``[n]``, from byte ``first`` of the memory on.

    The bytes contain the tensors whose positions in a list of tensors are ``numbers``.
    """

    raw: torch.Tensor
    numbers: list[int]
    first: int


class Packing:
    """A layout of tensors, one after the other, in a block of bytes.

    Views of one memory stay views of one memory. The tensors must be plain (`is_plain`), and are
    not changed. Only ``fill`` writes to the block.

    Args:
        tensors: tensors on the same device.
        pieces: some of the tensors' pieces, from ``pieces_of``; None for all.

    Attributes:
        nbytes: size of the block.
        views: the views, by position in ``tensors``.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece] | None = None
    ) -> None:
        if pieces is None:
            tensors = list(tensors)
            pieces = pieces_of(tensors)
        self._pieces = pieces
        self._offsets: list[int] = []
        self.nbytes = 0
        self.views: dict[int, View] = {}
        for piece in pieces:
            for number in piece.numbers:
                self.views[number] = view_in(tensors[number], self.nbytes - piece.first)
            self._offsets.append(self.nbytes)
            self.nbytes += -(-len(piece.raw) // ALIGNMENT) * ALIGNMENT

    def fill(self, block: torch.Tensor) -> None:
        """Copy the bytes into a block, uint8, of at least ``nbytes`` bytes."""
        for piece, offset in zip(self._pieces, self._offsets, strict=True):
            there = block[offset : offset + len(piece.raw)]
            if block.is_cpu and len(there) < _ALONE_BYTES:
                # torch would wake its threads, which costs more than so few bytes.
                np.copyto(there.numpy(), piece.raw.numpy())
            else:
                there.copy_(piece.raw)

    def unpacked(self, block: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the tensors in a copy of the block, by position in ``tensors``."""
        return dict(zip(self.views, views_of(block, list(self.views.values())), strict=True))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of the tensor represent it completely.

    A plain tensor is dense, not empty, and without gradients. It is neither of a subclass, nor a
    lazy conjugate or negative.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def pieces_of(tensors: list[torch.Tensor]) -> list[Piece]:
    """Return the memories of tensors, each with the tensors that are views of it.

    If the tensors are a small part of their memory, each tensor is a separate piece. A contiguous
    copy then replaces the tensor in the list.
    """
    memories: dict[tuple[torch.device, int, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        # Two memories of different sizes may begin at the same address.
        memory = tensor.untyped_storage()
        key = (tensor.device, memory.data_ptr(), memory.nbytes())
        memories.setdefault(key, []).append(number)
    pieces = []
    for numbers in memories.values():
        spans = [_span(tensors[number]) for number in numbers]
        first = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        last = max(stop for _, stop in spans)
        if sum(tensors[number].nbytes for number in numbers) * 2 >= last - first:
            pieces.append(Piece(bytes_of(tensors[numbers[0]], first, last), numbers, first))
            continue
        for number in numbers:
            tensors[number] = tensors[number].clone(memory_format=torch.contiguous_format)
            raw = bytes_of(tensors[number], 0, tensors[number].nbytes)
            pieces.append(Piece(raw, [number], 0))
    return pieces


def view_in(tensor: torch.Tensor, shift: int) -> View:
    """Return the view of a tensor in a copy of its memory.

    Args:
        shift: the count of bytes to add to the offset of the values in the memory.
    """
    offset = int(tensor.storage_offset()) + shift // tensor.dtype.itemsize
    return View(tensor.dtype, tensor.shape, tensor.stride(), offset)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of the tensor's bytes in its memory."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + reach + 1) * size


def bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return bytes of a tensor's memory, uint8, as a view."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return raw


_Move = Callable[[torch.Tensor], torch.Tensor]


def to_device(data: Any, device: Any, *, non_blocking: bool = False) -> Any:
    """Move a batch to a device; its small tensors are moved in one copy.

    Args:
        data: a TensorDict, tensorclass, tensor, or pytree of these, as ``sample`` returns.
        device: the target device.
        non_blocking: do not wait for copies from pinned memory, as in ``Tensor.to``.

    Returns:
        The same container with the same values, shapes, dtypes and strides on the device. Views of
        one allocation stay views of one allocation. Small parts of a large allocation are moved
        without the rest, and become contiguous. Tensors that are already on the device and objects
        other than tensors are not copied.

    Cost: one copy for all tensors below 1 MiB, and one for each larger tensor.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, to_device
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
        >>> rows = {"x": torch.arange(9.0), "y": torch.arange(9)}
        >>> _ = rb.extend(TensorDict(rows, [9]))
        >>> batch = to_device(rb.sample(), "cuda" if torch.cuda.is_available() else "cpu")
        >>> bool((batch["x"] == batch["y"]).all())
        True
    """
    target = device_named(device)
    staged = target.type == "cuda"

    def move(block: torch.Tensor) -> torch.Tensor:
        return block.to(target, non_blocking=non_blocking)

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device == target

    return _moved(data, move, stays, device=target, pinned=staged)


def device_named(device: Any) -> torch.device:
    """Return a device with the index that new tensors on it have.

    Raises:
        ValueError: this machine has no such device.
        TypeError: the argument is not a device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"expected a device that torch can use here, got {device!r}: {reason}"
        ) from None


def pin(data: Any) -> Any:
    """Return a batch in pinned memory, with its small tensors in one allocation.

    Tensors on devices other than the CPU are not copied.
    """

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.is_pinned()

    return _moved(data, torch.Tensor.pin_memory, stays, device=None, pinned=False)


def _moved(
    data: Any,
    move: _Move,
    stays: Callable[[torch.Tensor], bool],
    *,
    device: torch.device | None,
    pinned: bool,
) -> Any:
    packed = _plain_tensors(data, lambda tensor: not stays(tensor))
    found = dict(zip(map(id, packed), _move_packed(packed, move, pinned), strict=True))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in found:
            return found[id(tensor)]
        return tensor if stays(tensor) else move(tensor)

    return map_tensors(data, copied, device=device)


def _plain_tensors(data: Any, fits: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Return the plain tensors of a batch for which ``fits`` returns True."""
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        if fits(tensor) and is_plain(tensor):
            tensors.append(tensor)
        return tensor

    map_tensors(data, add)
    return tensors


def _move_packed(tensors: list[torch.Tensor], move: _Move, pinned: bool) -> list[torch.Tensor]:
    """Move the memories of tensors; tensors that shared memory share it again."""
    tensors = list(tensors)
    pieces = pieces_of(tensors)
    moved: list[Any] = [None] * len(tensors)
    small: dict[torch.device, list[Piece]] = {}
    for piece in pieces:
        if len(piece.raw) < _ALONE_BYTES:
            small.setdefault(piece.raw.device, []).append(piece)
            continue
        there = move(piece.raw)
        views = [view_in(tensors[number], -piece.first) for number in piece.numbers]
        for number, tensor in zip(piece.numbers, views_of(there, views), strict=True):
            moved[number] = tensor
    for source, group in small.items():
        packing = Packing(tensors, group)
        stage = torch.empty(
            packing.nbytes,
            dtype=torch.uint8,
            device=source,
            pin_memory=pinned and source.type == "cpu",
        )
        packing.fill(stage)
        for number, tensor in packing.unpacked(move(stage)).items():
            moved[number] = tensor
    return moved


class Engine(Protocol):
    """A protocol of objects that copy blocks to a device in a separate stream.

    Copies run one after the other. The engine returns an *event* for each copy. The event happens
    when the copy has ended.
    """

    device: torch.device

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 ``[nbytes]``, for asynchronous copies."""

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start a copy of pinned bytes and return at once.

        Returns:
            New memory on the device, and the event. Before the event, the caller must neither read
            the memory nor write to ``host``.
        """

    def wait(self, event: Any) -> None:
        """Block the calling thread until the event has happened."""

    def order(self, event: Any, there: torch.Tensor) -> None:
        """Make the caller's later work on the device wait for the event.

        ``there``, the memory of the copy, is not reused before that work has ended, even if the
        caller releases it earlier. The calling thread does not wait.
        """


class CudaEngine:
    """An engine with a CUDA stream that is separate from the learner's streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            # Allocated for this stream, so that earlier uses of the memory end first.
            there = host.to(self.device, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
            event.record(self._stream)
        return there, event

    def wait(self, event: Any) -> None:
        event.synchronize()

    def order(self, event: Any, there: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        there.record_stream(stream)


def engine_for(device: torch.device) -> Engine | None:
    """Return the engine for a device; None if the caller copies to it directly."""
    return CudaEngine(device) if device.type == "cuda" else None


_LEAST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch whose copy to a device may be unfinished."""

    engine: Engine
    event: Any
    there: torch.Tensor

    def order(self) -> None:
        """Make the calling thread's later work on the device wait for the batch."""
        self.engine.order(self.event, self.there)


@dataclass(slots=True)
class _Slot:
    """A pinned buffer, with the ``event`` of a copy that may still read it."""

    host: torch.Tensor | None = None
    event: Any = None


class Staging:
    """A ring of pinned buffers in front of a device.

    Any number of threads may move batches at the same time. If no buffer is free, a thread waits
    until another thread has filled its buffer. No lock is held during packing, copies or waits.

    Args:
        engine: the engine that makes the copies.
        slots: number of buffers. Each buffer takes as much memory as the largest batch, or up to
            twice as much.
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        self.engine = engine
        self.process = os.getpid()
        self._free: deque[_Slot] = deque(_Slot() for _ in range(slots))
        self._changed = threading.Condition()

    def move(self, data: Any) -> tuple[Any, Arrival | None]:
        """Start a copy of a batch to the device.

        Args:
            data: as for ``to_device``.

        Returns:
            The same container with the same values, shapes, dtypes and strides in new memory on the
            device, and its arrival. The thread that uses the batch must first call ``order()`` of
            the arrival. The arrival is None if nothing was copied through the ring.

        Cost: one write of the batch's bytes into pinned memory, and one copy to the device. Sparse
        tensors, tensors with gradients and tensors on other devices are copied one by one. The call
        waits for these copies.
        """
        target = self.engine.device
        tensors = _plain_tensors(data, lambda tensor: tensor.is_cpu)
        arrival, found = None, {}
        if tensors:
            packing = Packing(tensors)
            arrival = self._send(packing)
            for number, tensor in packing.unpacked(arrival.there).items():
                found[id(tensors[number])] = tensor

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            there = found.get(id(tensor))
            return tensor.to(target) if there is None else there

        return map_tensors(data, copied, device=target), arrival

    def _send(self, packing: Packing) -> Arrival:
        slot = self._take()
        try:
            if slot.event is not None:
                self.engine.wait(slot.event)
                slot.event = None
            if slot.host is None or len(slot.host) < packing.nbytes:
                slot.host = None  # freed first, because both would exceed the memory of the ring
                slot.host = self.engine.pinned(_room(packing.nbytes))
            block = slot.host[: packing.nbytes]
            packing.fill(block)
            there, slot.event = self.engine.copy(block)
            return Arrival(self.engine, slot.event, there)
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()

    def _take(self) -> _Slot:
        """Return the free buffer whose last copy started first; wait for a free buffer."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.popleft()


def _room(nbytes: int) -> int:
    """Return a size with room for slightly larger batches."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


REUSED_FROM = 2**20
"""Bytes of a tensor from which on its memory is reused. The search for a block takes as long as
copying 100 KiB, while new memory may cost five times as much as the copy into it."""

_REUSED_TO = 2**27
"""Bytes of the largest tensor whose memory is reused. Larger ones are rarely batches, and too large
to be kept without a use."""

_LATELY = 64
"""Number of the last tensors whose size and memory are known. A search looks at all of them at
worst."""

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""Returns the number of tensors, and other owners in C++, of a tensor storage."""

_call: Any = partial.__call__

_CPU = torch.device("cpu")
"""Passed to each allocation, because torch would use the caller's default device."""


class BatchMemory:
    """Blocks of memory for tensors, each in use as long as a tensor or a view owns it.

    A block is an ordinary tensor storage of torch, so its tensors support the same operations as
    others. This object shares the ownership of the last blocks. A block is idle if nothing else
    owns it. When this object dies, torch frees the idle blocks, and each other block with its last
    tensor.

    Only sizes that recur among the last 64 tensors get blocks, and only blocks of the last 64
    tensors are known. A new block causes the release of idle blocks, until they take at most as
    many bytes as the known blocks in use. So all known blocks take at most twice the bytes that
    were in use at the last allocation.

    Several threads may use the object, and so may forked processes. There is no lock. A thread
    removes a block from the known blocks before it uses the block, and only one thread can.

    Attributes:
        allocations: number of tensors of at least a megabyte that got new memory.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by the number of the last tensor over each
        self._sizes: dict[int, int] = {}  # for each size, the number of the last tensor
        self._numbers = itertools.count()
        self.allocations = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, on the CPU."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = None
        if REUSED_FROM <= nbytes <= _REUSED_TO and _counts_owners():
            number = next(self._numbers)
            if self._recurs(nbytes, number):
                block = self._idle(nbytes, number) or self._allocate(nbytes)
        if block is None:
            self.allocations += nbytes >= REUSED_FROM
            return torch.empty(shape, dtype=dtype, device=_CPU)
        tensor = block.tensor(shape, dtype)
        self._blocks[number] = block  # with its tensor, the block is not idle
        return tensor

    def _recurs(self, nbytes: int, number: int) -> bool:
        """Return whether one of the last tensors had this size, and record the size."""
        last = self._sizes.pop(nbytes, -_LATELY)
        self._sizes[nbytes] = number
        if len(self._sizes) > _LATELY:
            self._sizes = dict(list(self._sizes.items())[1:])
        return last > number - _LATELY

    def new_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor with the shape and device of a tensor."""
        if tensor.is_cpu:
            return self.new(tensor.shape, dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        """Copy the object, also into another process, without its blocks."""
        return BatchMemory, ()

    def clear(self) -> None:
        """Free the idle blocks, and leave the others to their tensors."""
        self._blocks.clear()

    def _idle(self, nbytes: int, number: int) -> _Block | None:
        """Return an idle block of this size, which is no longer known; None without one.

        The search starts with the block that was used last, which is most likely in the caches.
        """
        known = list(self._blocks.items())
        for last, block in reversed(known):
            if (
                block.nbytes == nbytes
                and block.is_idle()
                and self._blocks.pop(last, None) is not None
            ):
                break
        else:
            block = None
        for last, _ in known:
            if last > number - _LATELY:
                break
            self._blocks.pop(last, None)
        return block

    def _allocate(self, nbytes: int) -> _Block:
        used, idle = nbytes, []
        for last, block in list(self._blocks.items()):
            if block.is_lost():
                self._blocks.pop(last, None)
            elif block.is_idle():
                idle.append((last, block.nbytes))
            else:
                used += block.nbytes
        spare = sum(size for _, size in idle)
        for last, size in idle:
            if spare <= used:
                break
            self._blocks.pop(last, None)
            spare -= size
        self.allocations += 1
        return _Block(nbytes)


class _Block:
    """A tensor storage of torch, and a way to find out whether others own it too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=_CPU).untyped_storage()
        self._counts = (
            partial(sys.getrefcount, self._memory),
            partial(_use_count, self._memory._cdata),
        )
        self._alone = self._owners()

    def _owners(self) -> tuple[int, ...]:
        """Return the number of owners in Python, and of owners in C++.

        An owner in Python may turn into one in C++, or the reverse, but only with the interpreter
        lock. Both counts are read in one call, which keeps the lock.
        """
        return tuple(map(_call, self._counts))

    def is_idle(self) -> bool:
        """Return whether the block may be used for a new tensor."""
        return self._owners() == self._alone and not self.is_lost()

    def is_lost(self) -> bool:
        """Return whether the block cannot be used again.

        Other processes may map shared memory. After a conversion to NumPy, torch would refuse to
        resize new tensors in the block.
        """
        memory = self._memory
        return memory.nbytes() != self.nbytes or not memory.resizable() or memory.is_shared()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the block."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        empty = torch.empty(0, dtype=dtype, device=_CPU)
        return empty.set_(self._memory, 0, tuple(shape), tuple(reversed(strides)))


@cache
def _counts_owners() -> bool:
    """Return whether this version of torch counts all owners of a tensor storage."""
    if _use_count is None:
        return False
    block = _Block(8)
    tensor = block.tensor((1,), torch.int64)
    seen = [block.is_idle()]
    view = tensor[:]
    del tensor
    seen.append(block.is_idle())
    memory = view.untyped_storage()
    del view
    seen.append(block.is_idle())
    del memory
    return seen == [False, False, False] and block.is_idle()
