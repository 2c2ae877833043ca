"""Pack values for transfers between processes."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import TensorDict, fields_of, fresh_strided, has_names, new_tensordict
from replaykit.transfer import bytes_of, is_plain, pieces_of

__all__ = ["ITSELF", "Message", "opened", "pack", "seal", "unpack"]

_MOST_BYTES = 90_000
"""Ray keeps answers of up to 100 KiB out of its store, where they would be copied once more."""

_MOST_BLOCKS = 16
_SEAL_ALIGNMENT = 16
"""Of every block, as `malloc` aligns: the largest values are complex ones of 16 bytes."""

_HEAD = [struct.Struct(f"<HHI{blocks}I") for blocks in range(_MOST_BLOCKS + 1)]
"""Code, number of blocks, length of the header, lengths of the blocks; then the header, and every
block where the next multiple of the alignment is."""


def seal(message: list[Any]) -> list[Any] | bytes:
    """Returns a message as bytes that `opened` reads; as it is where it is large, or has no header.

    Cost: one copy.
    """
    if len(message) < 2 or type(message[1]) is not bytes:
        return message
    code, header, *blocks = message
    if len(blocks) > _MOST_BLOCKS or type(message[-1]) is dict:
        return message
    raws = [block.raw() for block in blocks]
    sizes = [len(raw) for raw in raws]
    if len(header) + sum(sizes) > _MOST_BYTES:
        return message
    head = _HEAD[len(sizes)]
    parts = [head.pack(code, len(sizes), len(header), *sizes), header]
    end = head.size + len(header)
    for raw, size in zip(raws, sizes, strict=True):
        parts += (bytes(-end % _SEAL_ALIGNMENT), raw)
        end += -end % _SEAL_ALIGNMENT + size
    return b"".join(parts)


def opened(data: bytes) -> tuple[int, bytes, list[torch.Tensor]]:
    """Returns code and header of a message, and its blocks as bytes in memory of their own."""
    code, count, length = _HEAD[0].unpack_from(data)
    head = _HEAD[count]
    sizes = head.unpack_from(data)[3:]
    end = head.size + length
    header = data[head.size : end]
    memory = bytearray(data)
    blocks = []
    for size in sizes:
        end += -end % _SEAL_ALIGNMENT
        blocks.append(torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end))
        end += size
    return code, header, blocks


Message = list[Any]

PLAIN, COLUMNS, PICKLED, SELF = range(4)
"""What a message is: a value as it is; a tensor or a TensorDict of tensors; anything else, pickled
with its tensors taken out; the object itself that a method was called on."""

_ALIGNMENT = 64
_TOGETHER_BYTES = 2**14
"""Pieces below this are put together: as a buffer of their own they would take longer."""

_NATIVE = (type(None), bool, int, float, str)

_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
"""A tensor: dtype, shape, strides, the byte in its piece that it begins with, number of the piece
(-1: it has no values)."""

_Lying = tuple[torch.dtype, torch.Size, tuple[int, ...], int, int]
"""The same before it is cut out: the value in its memory that it begins with, and which of them."""


class _Order(NamedTuple):
    """Of each piece the buffer that it is in and the byte there; bytes of that for small ones."""

    numbers: tuple[int, ...]
    shifts: tuple[int, ...]
    together: int


_Views = tuple[tuple[int, torch.dtype], ...]
"""Pieces to be looked at as values of a kind."""

_Parts = tuple[tuple[int, torch.Size, tuple[int, ...], int], ...]
"""Tensors over them: which of them, shape, strides, the value that it begins with."""


class _Itself:
    """Stands for the object that a method was called on."""


ITSELF = _Itself()


def pack(value: Any) -> Message:
    """Returns a message that `unpack` makes the value of.

    Nothing is copied but small pieces, and what is a small part of its memory: the message is to
    be sent, or pickled, before anybody changes the tensors. Gradients do not travel. Tensors on
    other devices are copied to the CPU.

    Raises:
        TypeError, pickle.PicklingError: something that cannot be pickled.
    """
    if value is ITSELF:
        return [SELF]
    if type(value) in _NATIVE:
        return [PLAIN, value]
    message = _as_columns(value)
    return _as_pickle(value) if message is None else message


def unpack(message: Message | bytes, *, own: bool = False, devices: bool = False) -> Any:
    """Returns the value of a message: its tensors lie in the memory that came with it.

    Args:
        message: of `pack`, sealed or not.
        own: copy that memory first. The arguments of a call lie in memory of Ray's that is gone
            when the call has returned: whatever may be kept in an actor has to be copied.
        devices: put tensors on the devices that they were on, where there is one. Otherwise they
            are on the CPU.
    """
    if isinstance(message, bytes):
        code, header, blocks = opened(message)
    else:
        code = message[0]
        if code == PLAIN:
            return message[1]
        if code == SELF:
            return ITSELF
        header = message[1]
        blocks = [_tensor_over(block, own=own) for block in message[2:]]
    if code == COLUMNS:
        tree, views, parts = _plan(header)
        leaves = iter(_placed(views, parts, blocks))
        return next(leaves) if tree is None else _build(tree, leaves)
    content, places, moved = pickle.loads(header)
    tensors = _placed(*_parts(places), blocks)
    if devices and moved and torch.cuda.is_available():
        for number, device in moved.items():
            tensors[number] = tensors[number].to(device)
    return _Unpickler(io.BytesIO(content), tensors).load()


# -- tensors and TensorDicts ------------------------------------------------------------------


def _as_columns(value: Any) -> Message | None:
    """The message of a plain tensor, or a plain TensorDict of them on the CPU; None for others."""
    leaves: list[torch.Tensor] = []
    if type(value) is torch.Tensor:
        tree = None
        leaves.append(value)
    elif type(value) is TensorDict:
        tree = _tree_of(value, leaves)
        if tree is None:
            return None
    else:
        return None
    found = _located(leaves)
    if found is None:
        return None
    places, blocks = found
    return [COLUMNS, _header(tree, places), *blocks]


def _tree_of(data: TensorDict, leaves: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """What a TensorDict is without its tensors, which are added to the list in order."""
    if has_names(data):
        return None
    children: list[tuple[str, Any]] = []
    for name, item in fields_of(data).items():
        if type(item) is torch.Tensor:
            leaves.append(item)
            children.append((name, None))
        elif type(item) is TensorDict:
            below = _tree_of(item, leaves)
            if below is None:
                return None
            children.append((name, below))
        else:
            return None
    return tuple(data.batch_size), data.device, tuple(children)


def _build(tree: tuple[Any, ...], leaves: Iterator[torch.Tensor]) -> TensorDict:
    batch_size, device, children = tree
    items = {
        name: next(leaves) if below is None else _build(below, leaves) for name, below in children
    }
    return new_tensordict(items, torch.Size(batch_size), device)


def _located(leaves: list[torch.Tensor]) -> tuple[tuple[_Place, ...], list[Any]] | None:
    """Where plain CPU tensors lie, and the pieces of memory; None where one is no such tensor.

    One loop in Python over the leaves, a microsecond each: it is on the way of every batch. What
    follows from how they lie is kept, since batches of one buffer lie alike.
    """
    # Two arrays may begin at one address and be two memories to torch, one of them longer: what is
    # sent of both is read from the one of them that is needed to the farthest byte.
    memories: dict[int, int] = {}
    lying: list[_Lying] = []
    for leaf in leaves:
        if not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return None
        dtype, offset = leaf.dtype, int(leaf.storage_offset())
        begin = leaf.data_ptr() - offset * dtype.itemsize
        memory = memories.setdefault(begin, len(memories))
        lying.append((dtype, leaf.shape, leaf.stride(), offset, memory))
    found = _cut(tuple(lying))
    if found is None:
        return _located_apart(leaves)
    places, cuts, order = found
    return places, _blocks([bytes_of(leaves[at], low, high) for at, low, high in cuts], order)


@lru_cache(maxsize=512)
def _cut(
    lying: tuple[_Lying, ...],
) -> tuple[tuple[_Place, ...], tuple[tuple[int, int, int], ...], _Order] | None:
    """The pieces that tensors are cut out with: of each the tensor to whose memory it belongs, its
    first byte there and the one after its last; None where they are a small part of a piece."""
    memories: dict[int, list[int]] = {}
    for number, (dtype, shape, stride, start, at) in enumerate(lying):
        itemsize, used, extent = _extent(dtype, shape, stride)
        if not used:
            continue
        offset = start * itemsize
        memory = memories.get(at)
        if memory is None:
            memories[at] = [offset, offset + extent, used, number]
            continue
        memory[0] = min(memory[0], offset)
        if offset + extent > memory[1]:
            memory[1], memory[3] = offset + extent, number
        memory[2] += used
    cuts: dict[int, tuple[int, int, int]] = {}
    for at, (first, last, used, number) in memories.items():
        first -= first % _ALIGNMENT
        if used * 2 < last - first:
            return None
        cuts[at] = (number, first, last)
    order = _order([last - first for _, first, last in cuts.values()])
    pieces = {at: (piece, cuts[at][1]) for piece, at in enumerate(cuts)}
    places: list[_Place] = []
    for dtype, shape, stride, start, at in lying:
        if not shape.numel():
            places.append((dtype, tuple(shape), stride, 0, -1))
            continue
        piece, first = pieces[at]
        begin = start * dtype.itemsize - first + order.shifts[piece]
        places.append((dtype, tuple(shape), stride, begin, order.numbers[piece]))
    return tuple(places), tuple(cuts.values()), order


def _extent(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of a value, of all values, and from the first of them to the end of the last."""
    size = dtype.itemsize
    last = sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    return size, shape.numel() * size, (last + 1) * size


def _located_apart(leaves: list[torch.Tensor]) -> tuple[tuple[_Place, ...], list[Any]]:
    """The same where some tensors are a small part of their memory: these are copied alone."""
    full = [leaf.detach() for leaf in leaves if leaf.numel()]
    pieces = pieces_of(full)
    raws = [raw.cpu() for raw, _, _ in pieces]
    order = _order([len(raw) for raw in raws])
    where: dict[int, tuple[int, int]] = {}
    for piece, (_, inside, first) in enumerate(pieces):
        for place in inside:
            begin = int(full[place].storage_offset()) * full[place].itemsize
            where[place] = (begin - first + order.shifts[piece], order.numbers[piece])
    places, place = [], 0
    for leaf in leaves:
        shape = tuple(leaf.shape)
        if not leaf.numel():
            places.append((leaf.dtype, shape, leaf.stride(), 0, -1))
            continue
        places.append((leaf.dtype, shape, full[place].stride(), *where[place]))
        place += 1
    return tuple(places), _blocks(raws, order)


def _order(sizes: list[int]) -> _Order:
    """Which pieces are put together: small ones, where there are several."""
    small = [number for number, size in enumerate(sizes) if size < _TOGETHER_BYTES]
    if len(small) < 2:
        return _Order(tuple(range(len(sizes))), (0,) * len(sizes), 0)
    numbers, shifts, end = [0] * len(sizes), [0] * len(sizes), 0
    for number in small:
        shifts[number] = end
        end += -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
    alone = sorted(set(range(len(sizes))) - set(small))
    for block, number in enumerate(alone, 1):
        numbers[number] = block
    return _Order(tuple(numbers), tuple(shifts), end)


def _blocks(pieces: list[torch.Tensor], order: _Order) -> list[Any]:
    """The buffers that are sent of pieces."""
    if not order.together:
        return [_buffer(raw) for raw in pieces]
    stage = torch.empty(order.together, dtype=torch.uint8, device="cpu")
    blocks = [_buffer(stage)]
    for raw, number, shift in zip(pieces, order.numbers, order.shifts, strict=True):
        if number:
            blocks.append(_buffer(raw))
        else:
            stage[shift : shift + len(raw)] = raw
    return blocks


def _buffer(raw: torch.Tensor) -> pickle.PickleBuffer:
    array: Any = raw.numpy()
    return pickle.PickleBuffer(array)


@lru_cache(maxsize=512)
def _header(tree: tuple[Any, ...] | None, places: tuple[_Place, ...]) -> bytes:
    return pickle.dumps((tree, places), protocol=5)


@lru_cache(maxsize=512)
def _plan(header: bytes) -> tuple[Any, _Views, _Parts]:
    tree, places = pickle.loads(header)
    return tree, *_parts(places)


def _parts(places: tuple[_Place, ...]) -> tuple[_Views, _Parts]:
    """The pieces of memory as values of a kind, each once, and the tensors over them."""
    views: dict[tuple[int, torch.dtype], int] = {}
    parts = []
    for dtype, shape, stride, offset, number in places:
        view = views.setdefault((number, dtype), len(views))
        parts.append((view, torch.Size(shape), stride, offset // dtype.itemsize))
    return tuple(views), tuple(parts)


def _placed(views: _Views, parts: _Parts, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, over the blocks."""
    memories = []
    for number, dtype in views:
        if number < 0:
            memories.append(torch.empty(0, dtype=dtype, device="cpu"))
            continue
        block, size = blocks[number], dtype.itemsize
        extra = block.numel() % size
        memories.append((block[:-extra] if extra else block).view(dtype))
    return fresh_strided(memories, parts)


class _Memory:
    """Lets NumPy take memory for its own to change that Ray calls read-only.

    What is in a message belongs to whoever asked for it, and nobody else has it.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.owner = array
        found = array.__array_interface__
        self.__array_interface__ = {**found, "data": (found["data"][0], False)}


def _tensor_over(block: Any, *, own: bool) -> torch.Tensor:
    array = np.frombuffer(block, np.uint8)
    if own:
        array = array.copy()
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


# -- anything else ----------------------------------------------------------------------------


def _as_pickle(value: Any) -> Message:
    """The message of any object: pickled, with the tensors in it as pieces beside it."""
    tensors: list[torch.Tensor] = []
    file = io.BytesIO()
    _pickler()(file, tensors).dump(value)
    devices = {number: t.device for number, t in enumerate(tensors) if t.device.type != "cpu"}
    places, blocks = _located_apart(tensors)
    content = (file.getvalue(), places, devices)
    return [PICKLED, pickle.dumps(content, protocol=5), *blocks]


@lru_cache(maxsize=1)
def _pickler() -> Callable[[io.BytesIO, list[torch.Tensor]], Any]:
    from cloudpickle import Pickler

    class Extracting(Pickler):
        """Takes tensors out of what it pickles; one that is there twice is there twice again."""

        def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
            super().__init__(file, protocol=5)
            self._tensors = tensors
            self._numbers: dict[int, int] = {}

        def persistent_id(self, obj: Any) -> int | None:
            if type(obj) is not torch.Tensor or not _travels(obj):
                return None
            number = self._numbers.setdefault(id(obj), len(self._tensors))
            if number == len(self._tensors):
                self._tensors.append(obj)
            return number

    return Extracting


def _travels(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, now or once it is detached."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return False
    return not tensor.numel() or is_plain(tensor.detach())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self._tensors[number]
