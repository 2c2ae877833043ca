"""Define the messages, facts and errors between processes, and how values are packed."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, fields_of, fresh_strided, has_names, new_tensordict
from replaykit.errors import SchemaError
from replaykit.schema import Schema
from replaykit.structure import Node, Path, build, flatten
from replaykit.transfer import bytes_of, is_plain


class ShardDied(ConnectionError):
    """Raised when a shard has died."""

    def __init__(self, shard: int, incarnation: int) -> None:
        super().__init__(f"shard {shard} (incarnation {incarnation}) has died")
        self.shard, self.incarnation = shard, incarnation

    def __reduce__(self) -> tuple[type[ShardDied], tuple[int, int]]:
        return ShardDied, (self.shard, self.incarnation)


class ShardSilent(TimeoutError):
    """Raised when a shard has not answered in time.

    The shard may still carry out the request.
    """


class BarrierBusy(RuntimeError):
    """Raised when another client is saving or loading all shards."""


class SchemaReplaced(RuntimeError):
    """Raised when a write was checked against the schema before the last load."""


class ShardLossWarning(UserWarning):
    """Warns that rows were lost with a shard that died.

    The text is ``str`` of a `ShardLoss`.
    """


class Agreement(NamedTuple):
    """The schema of rows before any transform, on which all clients have agreed.

    Attributes:
        loads: number of loads before the agreement.
        schema: the schema, or None if no row was written since.
    """

    loads: int
    schema: Schema | None


class Terms(NamedTuple):
    """The sampling settings that determine the mass of given rows.

    Attributes:
        length: number of rows in a window, or 0 if the sampler does not draw windows.
        alpha: exponent of priorities, or None without priorities.
    """

    length: int = 0
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The state of a shard at one instant.

    Here ``v`` is the value of a row's priority after the exponent ``alpha``, as in the samplers.

    Attributes:
        rows: number of stored rows.
        written: number of rows written since the first incarnation of the shard was made.
        capacity: maximum number of rows.
        terms: the terms of the mass, or None if the mass was not measured.
        mass: the weight with which a draw chooses this shard. The mass is an int count of rows,
            windows or episodes, or the float sum of ``v``.
        smallest: the smallest positive ``v`` of a stored row. It is infinite without priorities.
        most: the largest raw priority ever set, at least 1. It is the default priority of new rows.
        version: a number that grows with every change of the shard.
        loads: number of loads that replaced all rows, before restarts too. Loaded rows count as
            written.
        shard, incarnation: the numbers of the shard and of its incarnation.
    """

    rows: int
    written: int
    capacity: int
    terms: Terms | None
    mass: float
    smallest: float
    most: float
    version: int
    loads: int = 0
    shard: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """The loss of rows with a shard that died.

    Attributes:
        shard: the number of the shard.
        incarnation: the number of times that the shard had been restarted before.
        first, stop: the row ids of the lost rows are in the range ``[first, stop)``. Row ids count
            in the write order of the shard. The shard had acknowledged these rows to the clients
            that wrote them.
        rows: number of lost rows that would still be stored if the shard had not died.
        restored: number of rows restored from the shard's checkpoint, or 0 without a checkpoint.

    Example:
        >>> from replaykit import ShardLoss
        >>> str(ShardLoss(shard=2, incarnation=0, first=90, stop=100, rows=10, restored=90))
        'shard 2 died and came back with 90 rows; its 10 rows 90..99 are lost'
    """

    shard: int
    incarnation: int
    first: int
    stop: int
    rows: int
    restored: int

    def __str__(self) -> str:
        if not self.rows:
            return f"shard {self.shard} died and came back with {self.restored} rows; none is lost"
        return (
            f"shard {self.shard} died and came back with {self.restored} rows; its {self.rows} "
            f"rows {self.first}..{self.stop - 1} are lost"
        )


class ShardPart(NamedTuple):
    """A shard's share of a batch.

    Attributes:
        data: the drawn rows in their container, or None if no row was drawn.
        info: information about the drawn rows.
        values: ``v`` of each draw, float64, or None without priorities.
        facts: the facts of the shard at the draw.
    """

    data: Any
    info: dict[Any, Any]
    values: torch.Tensor | None
    facts: ShardFacts


class Losses:
    """The acknowledged rows that were lost with shards. Not thread-safe.

    Only the clients know which rows a dead shard has acknowledged. A client reports the newest
    facts of a shard when it notices the death of the shard, and when the client ends. Therefore a
    loss may grow until every client that wrote rows has noticed the death or ended.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], ShardFacts] = {}
        self._back: dict[tuple[int, int], ShardFacts] = {}

    def report(self, facts: ShardFacts) -> None:
        """Record facts that an incarnation has sent to a client, before or after its death."""
        name = (facts.shard, facts.incarnation)
        known = self._reported.get(name)
        if known is None or facts.version > known.version:
            self._reported[name] = facts

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """Record the facts of an incarnation's successor right after the restart."""
        self._back[shard, incarnation] = facts

    def newest(self, shard: int) -> ShardLoss:
        """Return the loss at the last restart of a shard that has been restarted."""
        return self.of(shard, max(lost for number, lost in self._back if number == shard))

    def of(self, shard: int, incarnation: int) -> ShardLoss:
        """Return the loss caused by the death of an incarnation with a successor."""
        facts = self._back[shard, incarnation]
        first = facts.written
        last = self._reported.get((shard, incarnation))
        stop = first if last is None else max(first, last.written)
        lost = 0 if last is None else min(stop - first, last.rows)
        return ShardLoss(shard, incarnation, stop - lost, stop, lost, facts.rows)

    def all(self) -> list[ShardLoss]:
        """Return all losses in the order of the restarts."""
        return [self.of(*name) for name in self._back]


_INCARNATION_BITS = 40
"""The number of low bits that hold the generation of the slot.

The incarnation is in the bits above. No ring makes 2 ** 40 laps.
"""


class GlobalIndex:
    """The conversion between indices and slots in shards.

    The index of a row is ``shard + num_shards * slot``. If rows go to the shards in turn, an
    empty buffer stores its first rows under 0, 1, 2, ..., as a single buffer does.

    The generation of an index combines the generation of the slot with the incarnation of the
    shard, in the bits above. A restarted shard writes the slots of lost rows again, and their
    generations in these slots repeat. The incarnation distinguishes the new rows from the lost
    rows.

    Example:
        >>> import torch
        >>> from replaykit.distributed.protocol import GlobalIndex
        >>> names = GlobalIndex(3)
        >>> index = names.join(1, torch.tensor([0, 1, -1]))
        >>> index, names.shards(index), names.slots(index)
        (tensor([ 1,  4, -1]), tensor([ 1,  1, -1]), tensor([ 0,  1, -1]))
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards

    def join(self, shard: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the indices of slots ``[K]`` of a shard, with -1 for negative slots."""
        return torch.where(slots >= 0, slots * self.num_shards + shard, -1)

    def shards(self, index: torch.Tensor) -> torch.Tensor:
        """Return the shards of indices ``[K]``, with -1 for negative indices."""
        return torch.where(index >= 0, index % self.num_shards, -1)

    def slots(self, index: torch.Tensor) -> torch.Tensor:
        """Return the slots of indices ``[K]`` in shards, with -1 for negative indices."""
        found = torch.div(index, self.num_shards, rounding_mode="floor")
        return torch.where(index >= 0, found, -1)

    @staticmethod
    def stamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """Return the public generations, which contain the incarnation; -1 stays."""
        if not incarnation:
            return generation
        return torch.where(
            generation >= 0, generation + (incarnation << _INCARNATION_BITS), generation
        )

    @staticmethod
    def unstamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """Return the generations of slots; the inverse of ``stamped``.

        Generations with another incarnation become -1, which no stored row has.
        """
        same = (generation >> _INCARNATION_BITS) == incarnation
        return torch.where(same, generation - (incarnation << _INCARNATION_BITS), -1)


_MOST_BYTES = 90_000
"""The maximum size of a sealed answer, in bytes.

Ray copies answers over 100 KiB once more, into its object store.
"""

_MOST_BLOCKS = 16


def seal(message: list[Any]) -> list[Any] | bytes:
    """Return a small message as bytes, which Ray transfers without pickling.

    Other messages and messages without a header are returned unchanged. Cost: one copy.
    """
    if len(message) < 2 or type(message[1]) is not bytes:
        return message
    sizes = [block.raw().nbytes for block in message[2:]]
    if len(sizes) > _MOST_BLOCKS or len(message[1]) + sum(sizes) > _MOST_BYTES:
        return message
    return pickle.dumps(message, protocol=5)


Message = list[Any]

PLAIN, COLUMNS, PICKLED, SELF = range(4)
"""The kinds of messages.

The kinds have this order. PLAIN is a plain value. COLUMNS is a tensor or a TensorDict of tensors.
PICKLED is any other value, pickled without its tensors. SELF means the object whose method was
called.
"""

_ALIGNMENT = 64
_TOGETHER_BYTES = 2**14
"""The size in bytes below which pieces share a buffer.

Separate buffers for small pieces would take longer.
"""

_NATIVE = (type(None), bool, int, float, str)

_LeafHeader = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
"""The place of a tensor: dtype, shape, strides, first byte in its piece, and piece.

The piece is given by its number, which is -1 for a tensor without values.
"""

_Lying = tuple[torch.dtype, torch.Size, tuple[int, ...], int, int]
"""A tensor in its memory: dtype, shape, strides, first value, number of the memory."""


class _Order(NamedTuple):
    """The buffer and offset of each piece, and the size of the buffer of small pieces."""

    numbers: tuple[int, ...]
    shifts: tuple[int, ...]
    together: int


_Views = tuple[tuple[int, torch.dtype], ...]
"""The pieces, with the dtypes of their views."""

_Parts = tuple[tuple[int, torch.Size, tuple[int, ...], int], ...]
"""The tensors over the views, as number of the view, shape, strides and first value."""


class _Itself:
    """The marker in a message for the object whose method was called."""


ITSELF = _Itself()


def pack(value: Any) -> Message:
    """Return a message that `unpack` converts back into the value.

    The function copies small pieces, and tensors that are a small part of their memory. The message
    shares memory with all other tensors, so send or pickle the message before these tensors change.
    Gradients are not sent. Tensors on other devices are copied to the CPU.

    Raises:
        TypeError, pickle.PicklingError: the value cannot be pickled.
    """
    if value is ITSELF:
        return [SELF]
    if type(value) in _NATIVE:
        return [PLAIN, value]
    message = _as_columns(value)
    return _as_pickle(value) if message is None else message


def unpack(message: Message | bytes, *, own: bool = False, devices: bool = False) -> Any:
    """Return the value of a message.

    The tensors use the memory of the message, unless ``own`` is set.

    Args:
        message: a result of `pack`, sealed or not.
        own: True to copy the memory of the message first. Arguments of a call are in memory that
            Ray frees when the call has returned. So values that an actor may store must be copied.
        devices: True to put tensors on their original devices, if there is an accelerator.
            Otherwise they are on the CPU.
    """
    sealed = isinstance(message, bytes)
    parts: Message = pickle.loads(message) if isinstance(message, bytes) else message
    code = parts[0]
    if code == PLAIN:
        return parts[1]
    if code == SELF:
        return ITSELF
    header = parts[1]
    # Unlike bytearrays, bytes of equal content may be one object.
    blocks = [_tensor_over(block, own=own or sealed) for block in parts[2:]]
    if code == COLUMNS:
        tree, views, leaf_parts = _plan(header)
        leaves = iter(_over_blocks(views, leaf_parts, blocks))
        return next(leaves) if tree is None else _build(tree, leaves)
    content, places, moved = pickle.loads(header)
    tensors = _over_blocks(*_parts(places), blocks)
    if devices and moved and torch.cuda.is_available():
        for number, device in moved.items():
            tensors[number] = tensors[number].to(device)
    return _Unpickler(io.BytesIO(content), tensors).load()


# -- tensors and TensorDicts ------------------------------------------------------------------


def _as_columns(value: Any) -> Message | None:
    """Return the message of a plain CPU tensor, or of a TensorDict of such tensors.

    For other values the result is None.
    """
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
    for leaf in leaves:
        if not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return None
    places, blocks = _located(leaves)
    return [COLUMNS, _header(tree, places), *blocks]


def _tree_of(data: TensorDict, leaves: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Return the structure of a plain TensorDict; append its tensors to ``leaves``.

    For other TensorDicts the result is None.
    """
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


def _located(leaves: list[torch.Tensor]) -> tuple[tuple[_LeafHeader, ...], list[Any]]:
    """Return the places of dense CPU tensors, and the buffers of their pieces.

    Tensors that are a small part of their memory are copied. Cost: one loop over the leaves of a
    batch, about a microsecond per leaf. The cuts are cached, since all batches of a buffer have the
    same layout.
    """
    # Two tensors may begin at the same address and have two torch storages of different sizes. Both
    # are then read through the storage whose tensors extend to the farthest byte.
    memories: dict[int, int] = {}
    lying: list[_Lying] = []
    for leaf in leaves:
        dtype, offset = leaf.dtype, int(leaf.storage_offset())
        begin = leaf.data_ptr() - offset * dtype.itemsize
        memory = memories.setdefault(begin, len(memories))
        lying.append((dtype, leaf.shape, leaf.stride(), offset, memory))
    sparse, places, cuts, order = _cut(tuple(lying))
    if sparse:
        dense = [
            leaf.detach().clone(memory_format=torch.contiguous_format) if at in sparse else leaf
            for leaf, (*_, at) in zip(leaves, lying, strict=True)
        ]
        return _located(dense)
    return places, _blocks([bytes_of(leaves[at], low, high) for at, low, high in cuts], order)


@lru_cache(maxsize=512)
def _cut(
    lying: tuple[_Lying, ...],
) -> tuple[frozenset[int], tuple[_LeafHeader, ...], tuple[tuple[int, int, int], ...], _Order]:
    """Return the sparse memories, the places of tensors, the pieces to cut out, and their order.

    A piece is given by three numbers: a tensor in its memory, the first byte there, and the end. A
    memory is sparse if tensors are a small part of its piece.
    """
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
    sparse: set[int] = set()
    for at, (first, last, used, number) in memories.items():
        first -= first % _ALIGNMENT
        if used * 2 < last - first:
            sparse.add(at)
        cuts[at] = (number, first, last)
    order = _order([last - first for _, first, last in cuts.values()])
    pieces = {at: (piece, cuts[at][1]) for piece, at in enumerate(cuts)}
    places: list[_LeafHeader] = []
    for dtype, shape, stride, start, at in lying:
        if not shape.numel():
            places.append((dtype, tuple(shape), stride, 0, -1))
            continue
        piece, first = pieces[at]
        begin = start * dtype.itemsize - first + order.shifts[piece]
        places.append((dtype, tuple(shape), stride, begin, order.numbers[piece]))
    return frozenset(sparse), tuple(places), tuple(cuts.values()), order


def _extent(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, int, int]:
    """Return three sizes in bytes: a value, all values, and the range that they span."""
    size = dtype.itemsize
    last = sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    return size, shape.numel() * size, (last + 1) * size


def _order(sizes: list[int]) -> _Order:
    """Choose the pieces that share a buffer.

    These are the small pieces, if there are several.
    """
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
    """Return the buffers in which the pieces are sent."""
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
def _header(tree: tuple[Any, ...] | None, places: tuple[_LeafHeader, ...]) -> bytes:
    return pickle.dumps((tree, places), protocol=5)


@lru_cache(maxsize=512)
def _plan(header: bytes) -> tuple[Any, _Views, _Parts]:
    tree, places = pickle.loads(header)
    return tree, *_parts(places)


def _parts(places: tuple[_LeafHeader, ...]) -> tuple[_Views, _Parts]:
    """Return the distinct views of the pieces, and the tensors over the views."""
    views: dict[tuple[int, torch.dtype], int] = {}
    parts = []
    for dtype, shape, stride, offset, number in places:
        view = views.setdefault((number, dtype), len(views))
        parts.append((view, torch.Size(shape), stride, offset // dtype.itemsize))
    return tuple(views), tuple(parts)


def _over_blocks(views: _Views, parts: _Parts, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors over the blocks."""
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
    """A wrapper that lets NumPy write to memory that Ray marks as read-only.

    This is safe, since the memory of a message belongs only to its receiver.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.owner = array
        found = array.__array_interface__
        self.__array_interface__ = {**found, "data": (found["data"][0], False)}


def _tensor_over(block: Any, *, own: bool) -> torch.Tensor:
    if type(block) is bytearray:  # of a sealed message, which is a copy
        return torch.frombuffer(block, dtype=torch.uint8)
    array = np.frombuffer(block, np.uint8)
    if own:
        array = array.copy()
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


# -- anything else ----------------------------------------------------------------------------


def _as_pickle(value: Any) -> Message:
    """Return the message of any object, pickled with its tensors as separate pieces."""
    tensors: list[torch.Tensor] = []
    file = io.BytesIO()
    _pickler()(file, tensors).dump(value)
    devices = {number: t.device for number, t in enumerate(tensors) if t.device.type != "cpu"}
    places, blocks = _located([tensor.cpu() for tensor in tensors])
    content = (file.getvalue(), places, devices)
    return [PICKLED, pickle.dumps(content, protocol=5), *blocks]


@lru_cache(maxsize=1)
def _pickler() -> Callable[[io.BytesIO, list[torch.Tensor]], Any]:
    from cloudpickle import Pickler

    class Extracting(Pickler):
        """A pickler that stores tensors separately.

        A tensor that occurs twice remains a single object.
        """

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

        def reducer_override(self, obj: Any) -> Any:
            """Reduce a container to its structure and leaves, which is ten times as fast."""
            if type(obj) is TensorDict or is_tensorclass(type(obj)):
                device = obj.device
                if (device is None or device.type == "cpu") and not has_names(obj):
                    with contextlib.suppress(TypeError, SchemaError):  # it has other values
                        return _rebuilt, (*flatten(obj, obj.batch_dims), obj.batch_size, device)
            return super().reducer_override(obj)

    return Extracting


def _rebuilt(
    root: Node, leaves: dict[Path, torch.Tensor], size: torch.Size, device: torch.device | None
) -> Any:
    return build(root, leaves, size, device)


def _travels(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor represent it completely after detaching it."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return False
    return not tensor.numel() or is_plain(tensor.detach())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self._tensors[number]
