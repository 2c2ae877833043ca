"""Reading of values of H5 datasets with bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5_checks import DEFLATE, FLETCHER32, LZF, SHUFFLE, not_numbers
from replaykit.errors import CorpusError

LEAST_BYTES: Final = 1 << 15
"""Smallest size in bytes of an array that `inflate` should read.

For a smaller array, finding out its storage takes more time than `inflate` saves.
"""
_LEAST_CHUNK_BYTES: Final = 1 << 11
"""Size of a chunk below which it takes longer to fetch than to inflate."""
_ZLIB_FORMAT: Final = 15
_NO_CHUNK: Final = (OSError, ValueError, KeyError, RuntimeError)
"""The exceptions that h5py raises for a chunk that was never written or cannot be read."""
_Decompress = Callable[[bytes, int], bytes | None]


def inflate(node: Any, start: int, stop: int, into: npt.NDArray[Any], memory_type: Any) -> bool:
    """Read records ``start .. stop - 1`` of an H5 dataset chunk by chunk.

    Args:
        node: the low-level dataset.
        start, stop: the records.
        into: a contiguous array that receives the records, and has their size.
        memory_type: the H5 type of ``into``.

    Returns:
        True if all records were read. Otherwise ``into`` holds arbitrary values, and the caller
        must read the records with HDF5.
    """
    decompress = _decompressor()
    if decompress is None:
        return False
    properties = node.get_create_plist()
    is_shuffled = _is_shuffled(properties)
    if is_shuffled is None or not node.get_type().equal(memory_type):
        return False
    chunk = properties.get_chunk()
    shape = node.get_space().get_simple_extent_dims()
    records = into.reshape(stop - start, *shape[1:])
    nbytes = math.prod(chunk) * into.itemsize
    if nbytes < _LEAST_CHUNK_BYTES or stop > shape[0]:
        return False
    grid = [range(start - start % chunk[0], stop, chunk[0])]
    grid += [range(0, size, step) for size, step in zip(shape[1:], chunk[1:], strict=True)]
    for corner in product(*grid):
        content = _content(node, corner, decompress, nbytes)
        if content is None or len(content) != nbytes:
            return False
        found = np.frombuffer(content, np.uint8)
        if is_shuffled:
            found = np.ascontiguousarray(found.reshape(into.itemsize, -1).T).reshape(-1)
        values = found.view(into.dtype).reshape(chunk)
        first, last = max(corner[0], start), min(corner[0] + chunk[0], stop)
        location = [slice(first - start, last - start)]
        location += [slice(at, at + n) for at, n in zip(corner[1:], chunk[1:], strict=True)]
        part = records[tuple(location)]
        # The chunks at the upper edges extend beyond the array.
        inside = [slice(first - corner[0], last - corner[0]), *map(slice, part.shape[1:])]
        part[...] = values[tuple(inside)]
    return True


def _content(
    node: Any, corner: tuple[int, ...], decompress: _Decompress, nbytes: int
) -> bytes | None:
    """Return the bytes of a chunk; ``None`` if it is unreadable or skipped filters."""
    try:
        skipped_filters, stored = node.read_direct_chunk(corner)
    except _NO_CHUNK:
        # HDF5 finds the same error when it reads the chunk, and reports it.
        return None
    return None if skipped_filters else decompress(stored, nbytes)


def _is_shuffled(properties: Any) -> bool | None:
    """Return whether deflated chunks are also shuffled; ``None`` for other filters."""
    from h5py import h5d, h5z

    if properties.get_layout() != h5d.CHUNKED:
        return None
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    if filters == [h5z.FILTER_DEFLATE]:
        return False
    return True if filters == [h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE] else None


@lru_cache(maxsize=1)
def _decompressor() -> _Decompress | None:
    """Return a function that inflates a chunk, or ``None`` if isal is not installed.

    The function returns ``None`` for a damaged chunk.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    damaged: Any = isal_zlib.error  # a class, although its stubs declare an instance

    def decompress(stored: bytes, nbytes: int) -> bytes | None:
        stream = isal_zlib.decompressobj(_ZLIB_FORMAT)
        try:
            # A limit of one more byte detects a chunk that is too long, and bounds the memory.
            content = stream.decompress(stored, nbytes + 1)
        except damaged:
            return None
        return content if stream.eof else None

    return decompress


_MOST_BYTES: Final = 1 << 16
"""Size of a dataset above which opening it takes little of the time to read it."""
_LEAST_ROOM: Final = 1 << 16
"""Room of a file, in bytes, below which holding values saves no time."""
_ENTRY_BYTES: Final = 256
"""Bytes that name and location of a dataset take in addition to its values."""
_ALIGNED: Final = 16


class HeldValues:
    """Complete datasets of one file, in one block of memory.

    Args:
        room: number of bytes, including 256 bytes for each dataset in addition to its values.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.h5_values import HeldValues
        >>> held = HeldValues(1000)
        >>> values = held.room_for("Trial0/time", (3,), np.dtype("int64"))
        >>> values[:] = 7
        >>> held.put("Trial0/time", values)
        >>> held.get("Trial0/time"), held.get("Trial1/time")
        (array([7, 7, 7]), None)
        >>> held.room_for("Trial1/time", (90,), np.dtype("int64")) is None
        True
    """

    def __init__(self, room: int) -> None:
        self._left = room
        # Pages of memory that are never written take no memory.
        self._memory = np.empty(room, np.uint8)
        self._used = 0
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": self._memory[: self._used], "_left": 0}

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._places

    def room_for(
        self, dataset: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any] | None:
        """Return memory for the values of a dataset; ``None`` if they should not be held.

        The memory is only reserved by a later call of `put`. Without that call, the next call of
        this method may return the same memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 < nbytes <= min(self._left - _ENTRY_BYTES - _ALIGNED, _MOST_BYTES):
            return None
        if dataset in self._places:
            return None
        return self._values(self._used, shape, dtype)

    def put(self, dataset: str, values: npt.NDArray[Any]) -> None:
        """Hold the values in the memory that `room_for` returned last."""
        self._places[dataset] = (self._used, values.shape, values.dtype)
        nbytes = values.nbytes + -values.nbytes % _ALIGNED
        self._used += nbytes
        self._left -= nbytes + _ENTRY_BYTES

    def get(self, dataset: str) -> npt.NDArray[Any] | None:
        """Return the held values of a dataset, which must not be changed, or ``None``."""
        location = self._places.get(dataset)
        return None if location is None else self._values(*location)

    def _values(self, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self._memory, at)


class Held:
    """The held values of several files, each with an equal share of the memory.

    Args:
        room: number of bytes for all files together.
        files: the paths of the files.
    """

    def __init__(self, room: int, files: Iterable[Path]) -> None:
        paths = set(files)
        share = room // max(1, len(paths))
        self.share = share if share >= _LEAST_ROOM else 0
        """Room of each file in bytes; zero if holding values would save no time."""
        self._files: dict[Path, HeldValues] = {}

    def of(self, file: Path) -> HeldValues:
        """Return the held values of a file. The caller may add more values."""
        if file not in self._files:
            self._files[file] = HeldValues(self.share)
        return self._files[file]

    def store(self, file: Path, values: HeldValues) -> None:
        """Store the values that another process has read from a file."""
        self._files[file] = values


MOST_TEXT_BYTES: Final = 1 << 30
"""Greatest number of bytes for the texts or variable-length values of one read."""
OBJECT_BYTES: Final = 128
"""Bytes of a variable-length value as a Python object, without its content."""
_PIECE_BYTES: Final = 16 << 20
"""Bytes of variable-length values that HDF5 reads at once."""
_MOST_LENGTH: Final = (1 << 32) - 1
"""The greatest length that a reference can have."""
_LENGTH_BYTES: Final = 4
_PLAIN: Final = (DEFLATE, SHUFFLE, FLETCHER32, LZF)
"""Filters that treat plain bytes in the same way as references."""
_REMEDY: Final = "check the origin of the file: no known data set holds so much text in one array"


def require_texts(nbytes: int) -> None:
    """Check that texts take at most `MOST_TEXT_BYTES` of memory.

    Raises:
        CorpusError: the texts take more memory.
    """
    if nbytes > MOST_TEXT_BYTES:
        raise CorpusError(
            f"its texts take at least {nbytes:,} bytes of memory, expected at most "
            f"{MOST_TEXT_BYTES:,}: {_REMEDY}"
        )


def pieces_of(node: Any, start: int, stop: int) -> list[tuple[int, int]]:
    """Return ranges of records that can be read with bounded memory, in order.

    Args:
        node: the low-level dataset. Its values must be in this file, and its chunks must be
            checked.
        start, stop: the records ``start .. stop - 1``. A dataset without dimensions is one record.

    Raises:
        CorpusError: the values take more memory than `MOST_TEXT_BYTES`, or are references of
            another kind.

    Cost: the references are read, at 16 bytes for each value. The referenced values are not read.
    """
    shape = node.shape
    if shape:
        stop = min(stop, shape[0])
    records = max(0, stop - start) if shape else 1
    each = math.prod(shape[1:])
    require_texts(records * each * OBJECT_BYTES)
    if not records * each:
        return [(start, stop)]
    base, size = _content_of(node.get_type())
    if base:
        sizes = _lengths(node, start, stop, records, each) * base + each * OBJECT_BYTES
    else:
        require_texts(records * each * size)
        sizes = np.full(records, each * max(size, OBJECT_BYTES), np.float64)
    require_texts(int(sizes.sum()))
    return _cut(np.cumsum(sizes), start)


def attribute_problem(attribute: Any) -> str | None:
    """Return why the values of an attribute must not be read, or ``None``.

    The lengths of the values are not known, because the references of an attribute cannot be read
    as plain bytes. An attribute with several values is only read if its size would stay within the
    bound even if each value were as long as the file.

    Args:
        attribute: the low-level attribute.
    """
    if attribute.shape is None:  # it has no value
        return None
    count = math.prod(attribute.shape)
    try:
        base, size = _content_of(attribute.get_type())
    except CorpusError as error:
        return str(error)
    if base:
        size = 0 if count == 1 else base * min(_file_of(attribute).get_filesize(), _MOST_LENGTH)
    if count * max(size, OBJECT_BYTES) <= MOST_TEXT_BYTES:
        return None
    return (
        f"its {count:,} values could take {count * max(size, OBJECT_BYTES):,} bytes of memory, "
        f"expected at most {MOST_TEXT_BYTES:,}: write them as one text, or as text of fixed length"
    )


def _content_of(kind: Any) -> tuple[int, int]:
    """Return the size of an item and the size of a value, in bytes.

    Items are the parts of variable-length values. For other values the first size is 0.

    Raises:
        CorpusError: the values are not text, numbers, or sequences of numbers.
    """
    from h5py import h5t

    if isinstance(kind, h5t.TypeStringID) and kind.is_variable_str():
        return 1, 0
    if isinstance(kind, h5t.TypeVlenID):
        base = kind.get_super()
        dtype = np.dtype(base.dtype)
        if not_numbers(dtype.newbyteorder("=")) is None:
            return max(base.get_size(), dtype.itemsize), 0
        raise CorpusError(f"it holds sequences of {dtype}, expected text or sequences of numbers")
    if isinstance(kind, h5t.TypeReferenceID):
        return 0, kind.get_size()
    dtype = np.dtype(kind.dtype)
    if dtype.hasobject:
        raise CorpusError(f"it holds values of type {kind.dtype}, expected text or numbers")
    return 0, max(kind.get_size(), dtype.itemsize)


def _file_of(node: Any) -> Any:
    from h5py import h5i

    return h5i.get_file_id(node)


def _cut(totals: npt.NDArray[np.float64], start: int) -> list[tuple[int, int]]:
    """Cut records into pieces of `_PIECE_BYTES`.

    ``totals`` has the number of bytes up to each record.
    """
    pieces, begin = [], 0
    while begin < len(totals):
        before = totals[begin - 1] if begin else 0.0
        end = max(begin + 1, int(np.searchsorted(totals, before + _PIECE_BYTES, "right")))
        pieces.append((start + begin, start + end))
        begin = end
    return pieces


def _lengths(node: Any, start: int, stop: int, records: int, each: int) -> npt.NDArray[np.float64]:
    """Return the number of items of each record, which is read from the references."""
    from h5py import h5d

    file, properties = _file_of(node), node.get_create_plist()
    width = _LENGTH_BYTES + file.get_create_plist().get_sizes()[0] + 4
    layout = properties.get_layout()
    if layout == h5d.CONTIGUOUS and node.get_offset() is not None:
        nbytes = records * each * width
        at = node.get_offset() + (start if node.shape else 0) * each * width
        content = _pread(file.get_vfd_handle(), nbytes, at)
        return _said(content, width).reshape(records, each).sum(axis=1, dtype=np.float64)
    # The value of a reference that cannot be read may be as long as the whole file.
    whole = float(min(file.get_filesize(), _MOST_LENGTH))
    is_filled = properties.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
    unwritten = whole if is_filled else 0.0
    if layout != h5d.CHUNKED:
        return np.full(records, each * (whole if layout == h5d.COMPACT else unwritten))
    found = np.zeros(records)
    chunk = properties.get_chunk()
    grid = [range(start - start % chunk[0], stop, chunk[0])]
    grid += [range(0, n, step) for n, step in zip(node.shape[1:], chunk[1:], strict=True)]
    for corner in product(*grid):
        first, last = max(corner[0], start), min(corner[0] + chunk[0], stop)
        inside = [slice(first - corner[0], last - corner[0])]
        inside += [
            slice(0, min(step, n - at))
            for at, n, step in zip(corner[1:], node.shape[1:], chunk[1:], strict=True)
        ]
        lengths: npt.NDArray[Any] | None = None
        if node.get_chunk_info_by_coord(corner).byte_offset is None:
            lengths = np.full(chunk, unwritten)
        else:
            lengths = _lengths_of_chunk(node, properties, corner, width)
        if lengths is None:
            lengths = np.full(chunk, whole)
        total = lengths[tuple(inside)].reshape(last - first, -1).sum(axis=1, dtype=np.float64)
        found[first - start : last - start] += total
    return found


def _said(content: bytes, width: int) -> npt.NDArray[Any]:
    """Return the lengths at the beginning of references of ``width`` bytes."""
    whole = np.frombuffer(content, np.uint8).reshape(-1, width)
    return np.ascontiguousarray(whole[:, :_LENGTH_BYTES]).view("<u4").reshape(-1)


def _pread(descriptor: int, nbytes: int, at: int) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        more = os.pread(descriptor, nbytes - len(content), at + len(content))
        if not more:
            raise CorpusError("the file ends before its values do: fetch it again")
        content += more
    return bytes(content)


def _lengths_of_chunk(
    node: Any, properties: Any, corner: tuple[int, ...], width: int
) -> npt.NDArray[Any] | None:
    """Return the lengths in one chunk; ``None`` if its filters are not supported."""
    mask, content = node.read_direct_chunk(corner)
    chunk = properties.get_chunk()
    nbytes = math.prod(chunk) * width
    filters = [properties.get_filter(at) for at in range(properties.get_nfilters())]
    filters = [each for at, each in enumerate(filters) if not mask >> at & 1]
    if filters:
        # The file stores the item size of the shuffle, but HDF5 derives it from the type.
        sizes = {tuple(values) for code, _, values, _ in filters if code == SHUFFLE}
        size = next(iter(sizes), (width,)) or (0,)
        if (
            any(code not in _PLAIN for code, _, _, _ in filters)
            or len(sizes) > 1
            or any(len(values) != 1 for values in sizes)
            or size[0] < 1
            or nbytes % size[0]
        ):
            return None
        content = _unfiltered(content, filters, size[0], nbytes // size[0])
    if len(content) != nbytes:
        raise CorpusError(
            f"the chunk at {list(corner)} has {len(content):,} bytes, expected {nbytes:,}: fetch "
            "the file again"
        )
    return _said(content, width).reshape(chunk)


def _unfiltered(content: bytes, filters: list[Any], size: int, count: int) -> bytes:
    """Undo filters by reading the chunk as plain bytes from an HDF5 file in memory."""
    from h5py import h5d, h5f, h5p, h5s, h5t

    access, create = h5p.create(h5p.FILE_ACCESS), h5p.create(h5p.DATASET_CREATE)
    access.set_fapl_core(1 << 20, False)
    create.set_chunk((count,))
    for code, flags, values, _ in filters:
        create.set_filter(code, flags, tuple(values))
    file = h5f.create(b"replaykit-references", fapl=access)
    try:
        kind = h5t.create(h5t.OPAQUE, size)
        kind.set_tag(b"")
        plain = h5d.create(file, b"x", kind, h5s.create_simple((count,)), create)
        plain.write_direct_chunk((0,), content)
        into = np.empty(count, f"V{size}")
        plain.read(h5s.ALL, h5s.ALL, into, kind)
        return into.tobytes()
    finally:
        file.close()
