"""Move batches to other devices, and make large ones in memory that is no longer used."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from replaykit._compat import fresh_strided
from replaykit.structure import each_tensor, map_tensors

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


def views_of(block: torch.Tensor, views: Collection[View]) -> list[torch.Tensor]:
    """Return tensors in a block, uint8 ``[n]``, without a copy."""
    memories: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {view.dtype for view in views}:
        # Other tensors of the block may have smaller values.
        whole = block.nbytes // dtype.itemsize * dtype.itemsize
        memories[dtype] = block[:whole].view(dtype)
    return fresh_strided(memories, views)


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
        for raw, numbers, first in pieces:
            shift = self.nbytes - first
            for number in numbers:
                self.views[number] = view_in(tensors[number], shift)
            self._offsets.append(self.nbytes)
            self.nbytes += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT

    def fill(self, block: torch.Tensor) -> None:
        """Copy the bytes into a block, uint8, of at least ``nbytes`` bytes."""
        there = block.numpy() if block.is_cpu else None
        for (raw, _, _), start in zip(self._pieces, self._offsets, strict=True):
            stop = start + raw.nbytes
            if there is not None and raw.nbytes < _ALONE_BYTES:
                # torch would wake its threads, which costs more than so few bytes.
                there[start:stop] = raw.numpy()
            else:
                block[start:stop].copy_(raw)

    def unpacked(self, block: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the tensors in a copy of the block, by position in ``tensors``."""
        return dict(zip(self.views, views_of(block, self.views.values()), strict=True))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of the tensor represent it completely.

    A plain tensor is dense, not empty, and without gradients. It is neither of a subclass, nor a
    lazy conjugate, negative or zero.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and tensor.nbytes > 0
    )


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy if it is not plain (`is_plain`)."""
    if is_plain(tensor):
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor.detach())  # the result may be of the tensor's subclass
    return plain


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
    for (_, _, nbytes), numbers in memories.items():
        covered = sum([tensors[number].nbytes for number in numbers])
        first, last = 0, nbytes
        # For a small memory the exact range would take longer than the copy of all bytes.
        if nbytes >= _ALONE_BYTES or 2 * covered < nbytes:
            spans = [_span(tensors[number]) for number in numbers]
            first = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
            last = max(stop for _, stop in spans)
        if 2 * covered >= last - first:
            pieces.append(Piece(bytes_of(tensors[numbers[0]], first, last), numbers, first))
            continue
        for number in numbers:
            tensors[number] = tensors[number].clone(memory_format=torch.contiguous_format)
            raw = bytes_of(tensors[number], 0, tensors[number].nbytes)
            pieces.append(Piece(raw, [number], 0))
    return pieces


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of the tensor's bytes in its memory."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + reach + 1) * size


def view_in(tensor: torch.Tensor, shift: int) -> View:
    """Return the view of a tensor in a copy of its memory.

    Args:
        shift: the count of bytes to add to the offset of the values in the memory.
    """
    dtype = tensor.dtype
    offset = int(tensor.storage_offset()) + shift // dtype.itemsize
    return View(dtype, tensor.shape, tensor.stride(), offset)


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

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target, non_blocking=non_blocking)

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device == target

    return _moved(data, move, stays, device=target, pinned=target.type == "cuda")


def put_on(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a small tensor of the CPU on a device, without waiting for a CUDA device."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # Only from pinned memory does a copy never wait for earlier work of the device.
    return (tensor.pin_memory() if tensor.is_cpu else tensor).to(device, non_blocking=True)


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

    # Returns a block that is packed in pinned memory without a copy.
    return _moved(data, torch.Tensor.pin_memory, stays, device=None, pinned=True)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch on its way to a CUDA device: the event at its end, and its memory there."""

    event: Any
    blocks: list[torch.Tensor]

    def order(self) -> None:
        """Make the calling thread's later work on the device wait for the batch.

        The memory is not reused before that work has ended, even if the caller releases it earlier.
        The calling thread does not wait.
        """
        stream = torch.cuda.current_stream(self.blocks[0].device)
        stream.wait_event(self.event)
        for block in self.blocks:
            block.record_stream(stream)


def send(
    data: Any, target: torch.device, *, own: Collection[int], aside: bool
) -> tuple[Any, Arrival | None]:
    """Start to move a batch to a device, as ``to_device`` does.

    Args:
        own: addresses of pinned memory of at least 1 MiB that only this batch uses. It is copied
            from where it is. All other memory is first copied into pinned memory.
        aside: copy in a separate CUDA stream, which does not wait for the device's earlier work.
            Blocks of at least 1 MiB are always copied there, so that they leave pinned memory soon.

    Returns:
        The batch on the device, and its arrival if a separate stream copies it, else None. The
        thread that uses the batch must first call ``order()`` of the arrival.
    """
    if target.type != "cuda":
        return to_device(data, target), None
    stream, blocks = _stream_for_copies(target), []

    def start(block: torch.Tensor) -> torch.Tensor:
        if not aside and block.nbytes < _ALONE_BYTES:
            return block.to(target, non_blocking=True)
        # Allocated for this stream, so that earlier uses of the memory end first.
        with torch.cuda.stream(stream):
            blocks.append(block.to(target, non_blocking=True))
        return blocks[-1]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target)

    def alone(raw: torch.Tensor) -> bool:
        return not raw.is_cpu or raw.data_ptr() in own

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device == target

    moved = _moved(data, move, stays, device=target, pinned=True, move_block=start, alone=alone)
    if not blocks:
        return moved, None
    event = torch.cuda.Event()
    event.record(stream)
    return moved, Arrival(event, blocks)


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of this process for copies to a CUDA device."""
    return torch.cuda.Stream(device)


def _moved(
    data: Any,
    move: _Move,
    stays: Callable[[torch.Tensor], bool],
    *,
    device: torch.device | None,
    pinned: bool = False,
    move_block: _Move | None = None,
    alone: Callable[[torch.Tensor], bool] = lambda raw: True,
) -> Any:
    """Return the container with tensors moved, of which ``stays`` is False.

    Args:
        device: the target; None for the CPU's pinned memory.
        pinned: pack tensors of the CPU in pinned memory. Torch reuses it after the copy has ended.
        move_block: moves the bytes of plain tensors; None for ``move``, which moves all others.
        alone: returns whether to move bytes of at least 1 MiB without packing them.
    """
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> None:
        if not stays(tensor) and is_plain(tensor):
            tensors.append(tensor)

    each_tensor(data, add)
    moved = _move_packed(tensors, move_block or move, alone, pinned=pinned)
    found = dict(zip(map(id, tensors), moved, strict=True))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        there = found.get(id(tensor))
        if there is None:
            return tensor if stays(tensor) else move(tensor)
        return there

    return map_tensors(data, copied, device=device)


def _move_packed(
    tensors: list[torch.Tensor],
    move: _Move,
    alone: Callable[[torch.Tensor], bool] = lambda raw: True,
    *,
    pinned: bool = False,
) -> list[torch.Tensor]:
    """Move the memories of tensors; tensors that shared memory share it again.

    Args:
        move: moves bytes.
        alone, pinned: as for ``_moved``.
    """
    tensors = list(tensors)
    moved: list[Any] = [None] * len(tensors)
    small: dict[torch.device, list[Piece]] = {}
    for piece in pieces_of(tensors):
        raw, numbers, first = piece
        if raw.nbytes < _ALONE_BYTES or not alone(raw):
            small.setdefault(raw.device, []).append(piece)
            continue
        there = move(raw)
        views = [view_in(tensors[number], -first) for number in numbers]
        for number, tensor in zip(numbers, views_of(there, views), strict=True):
            moved[number] = tensor
    for source, group in small.items():
        packing = Packing(tensors, group)
        staged = pinned and source.type == "cpu"
        block = torch.empty(packing.nbytes, dtype=torch.uint8, device=source, pin_memory=staged)
        packing.fill(block)
        for number, tensor in packing.unpacked(move(block)).items():
            moved[number] = tensor
    return moved


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
        pinned: None, or a process and a list of addresses. In this process, tensors of at least a
            megabyte lie in pinned memory, which torch reuses itself, and their addresses are added.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by the number of the last tensor over each
        self._sizes: dict[int, int] = {}  # for each size, the number of the last tensor
        self._numbers = itertools.count()
        self.allocations = 0
        self.pinned: tuple[int, list[int]] | None = None

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, on the CPU."""
        nbytes = math.prod(shape) * dtype.itemsize
        pinned = self.pinned  # another thread may replace it
        if pinned is not None and nbytes >= REUSED_FROM and pinned[0] == os.getpid():
            tensor = torch.empty(shape, dtype=dtype, device=_CPU, pin_memory=True)
            pinned[1].append(tensor.data_ptr())
            return tensor
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
