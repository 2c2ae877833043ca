"""How much memory text and values of varying length take, found out before HDF5 reads them.

Such a value is a reference to a piece of the file: a length and an address. A compressed chunk of
a kilobyte may hold a million references to one large piece, each of which becomes an object of its
own. A length may also be a lie, for which HDF5 takes the memory before it notices. So the lengths
are read as plain bytes first, and added up.
"""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5_storage import DEFLATE, FLETCHER32, LZF, SHUFFLE
from replaykit.datasets.engine.h5_types import not_numbers
from replaykit.errors import CorpusError

__all__ = ["MOST_TEXT_BYTES", "OBJECT_BYTES", "attribute_problem", "pieces_of", "require_texts"]

MOST_TEXT_BYTES: Final = 1 << 30
"""Bytes that the texts, or the values of varying length, of one reading may take."""
OBJECT_BYTES: Final = 128
"""Bytes that each of them takes as a Python object, besides its content."""
_PIECE_BYTES: Final = 16 << 20
"""Bytes of them that HDF5 reads at once."""
_MOST_LENGTH: Final = (1 << 32) - 1
"""The length that a reference can say at most."""
_LENGTH_BYTES: Final = 4
_PLAIN: Final = (DEFLATE, SHUFFLE, FLETCHER32, LZF)
"""Filters that do the same to plain bytes as to references."""
_REMEDY: Final = "look where the file comes from: no data set holds so much text in one array"


def require_texts(nbytes: int) -> None:
    """Checks what texts take against `MOST_TEXT_BYTES`.

    Raises:
        CorpusError: they take more.
    """
    if nbytes > MOST_TEXT_BYTES:
        raise CorpusError(
            f"its texts take at least {nbytes:,} bytes of memory, expected at most "
            f"{MOST_TEXT_BYTES:,}: {_REMEDY}"
        )


def pieces_of(node: Any, start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the ranges of records to read one after the other, none of which is large.

    Args:
        node: the low-level dataset, whose values lie in this file; its chunks have been checked.
        start, stop: the records; all of a dataset without dimensions.

    Raises:
        CorpusError: their values take more memory than `MOST_TEXT_BYTES`; or they hold references
            of another kind.

    Cost: reads the references, 16 bytes for each value, and none of what they lead to.
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
    """Says why the values of an attribute are not to be read; ``None`` if they are.

    The references of an attribute cannot be read as plain bytes: several are read only where they
    stay within the bound if each leads to the whole file.

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
    """Returns the bytes of one item of values of varying length, or zero; and those of a value.

    Raises:
        CorpusError: values lead to others that lead to others, or to objects of the file.
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
    """Cuts records where the bytes of a piece are full; ``totals`` are those up to each record."""
    pieces, begin = [], 0
    while begin < len(totals):
        before = totals[begin - 1] if begin else 0.0
        end = max(begin + 1, int(np.searchsorted(totals, before + _PIECE_BYTES, "right")))
        pieces.append((start + begin, start + end))
        begin = end
    return pieces


def _lengths(node: Any, start: int, stop: int, records: int, each: int) -> npt.NDArray[np.float64]:
    """Returns how many items the values of each record have, by their references."""
    from h5py import h5d

    file, properties = _file_of(node), node.get_create_plist()
    width = _LENGTH_BYTES + file.get_create_plist().get_sizes()[0] + 4
    layout = properties.get_layout()
    if layout == h5d.CONTIGUOUS and node.get_offset() is not None:
        nbytes = records * each * width
        at = node.get_offset() + (start if node.shape else 0) * each * width
        content = _pread(file.get_vfd_handle(), nbytes, at)
        return _said(content, width).reshape(records, each).sum(axis=1, dtype=np.float64)
    # What cannot be seen may lead to the whole file each time.
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
    """Returns the lengths that references of so many bytes begin with."""
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
    """Returns the lengths in one chunk; ``None`` where its filters are not undone here."""
    mask, content = node.read_direct_chunk(corner)
    chunk = properties.get_chunk()
    nbytes = math.prod(chunk) * width
    filters = [properties.get_filter(at) for at in range(properties.get_nfilters())]
    filters = [each for at, each in enumerate(filters) if not mask >> at & 1]
    if filters:
        # Bytes are shuffled by the size that the file says, which HDF5 takes from the type.
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
    """Undoes filters by HDF5: the chunk is one of plain bytes in a file in memory."""
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
