"""Batches to other devices and into pinned memory: packed, and without waiting for them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from replaykit._compat import fresh_strided
from replaykit.structure import map_tensors

__all__ = [
    "Arrival",
    "CudaEngine",
    "Engine",
    "Packing",
    "Piece",
    "Staging",
    "View",
    "bytes_of",
    "device_named",
    "engine_for",
    "is_plain",
    "pieces_of",
    "pin",
    "to_device",
    "view_in",
]

ALIGNMENT = 64
"""Bytes: no value is larger, and so each piece begins where its values may begin."""


class View(NamedTuple):
    """A tensor as a part of a block: ``offset`` counts values of its dtype."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor in a block, uint8 ``[n]``, without a copy."""
        unit = self.dtype.itemsize
        whole = len(block) // unit * unit  # other tensors of the block may have smaller values
        memory = block[:whole].view(self.dtype)
        return fresh_strided([memory], [(0, self.shape, self.stride, self.offset)])[0]


class Piece(NamedTuple):
    """Bytes of one memory, uint8 ``[n]``: those from its byte ``first`` on, in which the tensors
    at ``places`` of a list lie."""

    raw: torch.Tensor
    places: list[int]
    first: int


class Packing:
    """Tensors laid one after the other in a block of bytes.

    Those that are views of one memory stay views of one another. They have to be plain
    (`is_plain`) and are not changed; the block is written by ``fill`` only.

    Args:
        tensors: on any device, all on one.
        pieces: what ``pieces_of`` has found of them, or some of it; None: all.

    Attributes:
        nbytes: size of the block.
        views: by place in ``tensors``.
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
            for place in piece.places:
                self.views[place] = view_in(tensors[place], self.nbytes - piece.first)
            self._offsets.append(self.nbytes)
            self.nbytes += -(-len(piece.raw) // ALIGNMENT) * ALIGNMENT

    def fill(self, block: torch.Tensor) -> None:
        """Copies the bytes into a block, uint8, of at least ``nbytes``."""
        for piece, offset in zip(self._pieces, self._offsets, strict=True):
            block[offset : offset + len(piece.raw)].copy_(piece.raw)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, and nothing follows from where it came from."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def pieces_of(tensors: list[torch.Tensor]) -> list[Piece]:
    """The memories of tensors, each with those that are views of it.

    Of a memory of which they are a small part each of them is a piece of its own: a contiguous
    copy, which takes its place in the list.
    """
    memories: dict[tuple[torch.device, int, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        # Two arrays may begin at one address and be two memories to torch, one of them longer.
        memory = tensor.untyped_storage()
        key = (tensor.device, memory.data_ptr(), memory.nbytes())
        memories.setdefault(key, []).append(place)
    pieces = []
    for places in memories.values():
        spans = [_span(tensors[place]) for place in places]
        first = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        last = max(stop for _, stop in spans)
        if sum(tensors[place].nbytes for place in places) * 2 >= last - first:
            pieces.append(Piece(bytes_of(tensors[places[0]], first, last), places, first))
            continue
        for place in places:
            tensors[place] = tensors[place].clone(memory_format=torch.contiguous_format)
            raw = bytes_of(tensors[place], 0, tensors[place].nbytes)
            pieces.append(Piece(raw, [place], 0))
    return pieces


def view_in(tensor: torch.Tensor, shift: int) -> View:
    """The tensor in another memory, ``shift`` bytes further there than in its own."""
    offset = int(tensor.storage_offset()) + shift // tensor.dtype.itemsize
    return View(tensor.dtype, tensor.shape, tensor.stride(), offset)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the tensor in its memory, and the one after its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + reach + 1) * size


def bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The bytes of a tensor's memory, uint8, as a view."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return raw


_ALONE_BYTES = 2**20
"""Larger pieces move alone: putting them beside the others first would cost more than a copy."""

_Move = Callable[[torch.Tensor], torch.Tensor]


def to_device(data: Any, device: Any, *, non_blocking: bool = False) -> Any:
    """Moves a batch to a device; its small tensors go in one copy.

    Args:
        data: a TensorDict, tensorclass, tensor, or pytree of them, as ``sample`` returns them.
        device: where to.
        non_blocking: do not wait for copies from pinned memory, as ``Tensor.to``.

    Returns:
        The same container with the same values, shapes, dtypes and strides on the device. Tensors
        that were views of one allocation are so again, except small parts of a large one: these
        are moved without the rest, and contiguous. What lies on the device already is the
        same object. Objects that are no tensors stay.

    Cost: one copy for all tensors below 1 MiB, one for each larger one.

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
    """Returns a device with its index, as tensors that are made there carry it.

    Raises:
        ValueError: there is none of that name here. TypeError: it is no name of one.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"expected device as one that torch has here, got {device!r}: {reason}"
        ) from None


def pin(data: Any) -> Any:
    """Returns a batch in pinned memory: its small tensors in one allocation.

    Tensors on other devices than the CPU stay.
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
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(data, note)
    packed = [t for t in tensors if not stays(t) and is_plain(t)]
    found = dict(zip(map(id, packed), _move_packed(packed, move, pinned), strict=True))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in found:
            return found[id(tensor)]
        return tensor if stays(tensor) else move(tensor)

    return map_tensors(data, place, device=device)


def _move_packed(tensors: list[torch.Tensor], move: _Move, pinned: bool) -> list[torch.Tensor]:
    """Moves tensors, memory by memory; those that share it share it afterwards."""
    tensors = list(tensors)
    pieces = pieces_of(tensors)
    moved: list[Any] = [None] * len(tensors)
    small: dict[torch.device, list[Piece]] = {}
    for piece in pieces:
        if len(piece.raw) < _ALONE_BYTES:
            small.setdefault(piece.raw.device, []).append(piece)
            continue
        there = move(piece.raw)
        for place in piece.places:
            moved[place] = view_in(tensors[place], -piece.first).of(there)
    for source, group in small.items():
        packing = Packing(tensors, group)
        stage = torch.empty(
            packing.nbytes,
            dtype=torch.uint8,
            device=source,
            pin_memory=pinned and source.type == "cpu",
        )
        packing.fill(stage)
        there = move(stage)
        for place, view in packing.views.items():
            moved[place] = view.of(there)
    return moved


class Engine(Protocol):
    """Copies blocks to a device, one after the other, in a stream of its own.

    An *event* is what the engine gives out for a copy: it has happened when the copy is over.
    """

    device: torch.device

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns host memory, uint8 ``[nbytes]``, that the engine can copy from by itself."""

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Asks for a copy of pinned bytes and returns at once.

        Returns:
            Memory of the device that nobody else has, and the event. Neither may be looked at, nor
            ``host`` written, before the event.
        """

    def wait(self, event: Any) -> None:
        """Has the calling thread sleep until the event has happened."""

    def order(self, event: Any, there: torch.Tensor) -> None:
        """Has what the caller asks of the device from now on come after the event.

        ``there``: the copy, whose memory is then kept until that is over, even if it is let go
        before. The calling thread does not wait.
        """


class CudaEngine:
    """Copies in a CUDA stream beside those in which the learner works."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            # Taken from the memory of that stream: what is there already was used in it last.
            there = host.to(self.device, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # who waits sleeps, and leaves the processor
            event.record(self._stream)
        return there, event

    def wait(self, event: Any) -> None:
        event.synchronize()

    def order(self, event: Any, there: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        there.record_stream(stream)


def engine_for(device: torch.device) -> Engine | None:
    """Returns what copies to a device; None where copies are made by who asks for them."""
    return CudaEngine(device) if device.type == "cuda" else None


_LEAST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch that is on its way to a device."""

    engine: Engine
    event: Any
    there: torch.Tensor

    def order(self) -> None:
        """Has what the calling thread asks of the device from now on find the batch there."""
        self.engine.order(self.event, self.there)


@dataclass(slots=True)
class _Slot:
    """A pinned buffer; ``event``: of the copy that may still read it."""

    host: torch.Tensor | None = None
    event: Any = None


class Staging:
    """A ring of pinned buffers in front of a device.

    Any number of threads may move batches at the same time; those for which there is no buffer wait
    until another thread has filled one. No lock is held while anything is packed, copied or waited
    for.

    Args:
        engine: what copies.
        slots: number of buffers. Memory: that of as many of the largest batches, up to twice.
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        self.engine = engine
        self.process = os.getpid()
        self._free: deque[_Slot] = deque(_Slot() for _ in range(slots))
        self._changed = threading.Condition()

    def move(self, data: Any) -> tuple[Any, Arrival | None]:
        """Asks for a batch to be copied to the device.

        Args:
            data: as for ``to_device``.

        Returns:
            The same container with the same values, shapes, dtypes and strides on the device, in
            memory of its own, and what has to be told ``order()`` by the thread that uses it; None
            where nothing went through the ring.

        Cost: the bytes of the batch written once into pinned memory, and one copy to the device.
        What is more than its bytes (sparse tensors, those with gradients) or lies on another device
        moves by itself, and is waited for.
        """
        target = self.engine.device
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and is_plain(tensor):
                tensors.append(tensor)
            return tensor

        map_tensors(data, note)
        arrival, found = None, {}
        if tensors:
            packing = Packing(tensors)
            arrival = self._send(packing)
            for number, view in packing.views.items():
                found[id(tensors[number])] = view.of(arrival.there)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            there = found.get(id(tensor))
            return tensor.to(target) if there is None else there

        return map_tensors(data, place, device=target), arrival

    def _send(self, packing: Packing) -> Arrival:
        slot = self._take()
        try:
            if slot.event is not None:
                self.engine.wait(slot.event)
                slot.event = None
            if slot.host is None or len(slot.host) < packing.nbytes:
                slot.host = None  # both at once would be more than the ring may have
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
        """The buffer whose copy was asked for first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            return self._free.popleft()


def _room(nbytes: int) -> int:
    """A size that batches a little larger fit into as well."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
