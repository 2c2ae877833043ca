"""Chunks that were compressed with deflate (gzip), inflated by ISA-L where that is installed.

HDF5 inflates with zlib, which is most of the time of reading such an array; ISA-L does the same in
about half of it. Whatever is not as plain as that is left to HDF5: other filters, types that
have to be converted, chunks that were never written, and damaged ones, for which it has the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST_BYTES", "inflate"]

LEAST_BYTES: Final = 1 << 15
"""Bytes up to which asking how an array is stored takes longer than it saves."""
_LEAST_CHUNK_BYTES: Final = 1 << 11
"""Bytes of a chunk below which asking for it takes longer than inflating it."""
_ZLIB_FORMAT: Final = 15
_NO_CHUNK: Final = (OSError, ValueError, KeyError, RuntimeError)
"""What h5py makes of HDF5's errors where a chunk was never written or cannot be read."""
_Decompress = Callable[[bytes, int], bytes | None]


def inflate(node: Any, start: int, stop: int, into: npt.NDArray[Any], memory_type: Any) -> bool:
    """Reads records ``start .. stop - 1`` of an H5 dataset chunk by chunk.

    Args:
        node: the low-level dataset.
        start, stop: the records.
        into: takes them; contiguous, of their size.
        memory_type: the H5 type of ``into``.

    Returns:
        Whether it did. If not, ``into`` holds anything, and HDF5 has to read.
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
        place = [slice(first - start, last - start)]
        place += [slice(at, at + n) for at, n in zip(corner[1:], chunk[1:], strict=True)]
        part = records[tuple(place)]
        # The chunks at the upper edges reach beyond the array.
        inside = [slice(first - corner[0], last - corner[0]), *map(slice, part.shape[1:])]
        part[...] = values[tuple(inside)]
    return True


def _content(
    node: Any, corner: tuple[int, ...], decompress: _Decompress, nbytes: int
) -> bytes | None:
    """The bytes of a chunk; ``None`` if it passed by a filter, or cannot be had."""
    try:
        skipped_filters, stored = node.read_direct_chunk(corner)
    except _NO_CHUNK:
        # Whatever it is, HDF5 meets it too, and says what is wrong with the file.
        return None
    return None if skipped_filters else decompress(stored, nbytes)


def _is_shuffled(properties: Any) -> bool | None:
    """Whether chunks are shuffled before they are deflated; ``None`` if it is anything else."""
    from h5py import h5d, h5z

    if properties.get_layout() != h5d.CHUNKED:
        return None
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    if filters == [h5z.FILTER_DEFLATE]:
        return False
    return True if filters == [h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE] else None


@lru_cache(maxsize=1)
def _decompressor() -> _Decompress | None:
    """What inflates a chunk of so many bytes; ``None`` from it if the chunk is damaged."""
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    damaged: Any = isal_zlib.error  # a class, of which its stubs say that it is an exception

    def decompress(stored: bytes, nbytes: int) -> bytes | None:
        stream = isal_zlib.decompressobj(_ZLIB_FORMAT)
        try:
            # One byte more would show that there is more: memory is taken for no more than that.
            content = stream.decompress(stored, nbytes + 1)
        except damaged:
            return None
        return content if stream.eof else None

    return decompress
