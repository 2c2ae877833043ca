"""Write and read chunks: files with rows of one trajectory and a header.

A chunk is a file of one of two layouts. The layout ``safetensors`` is that of the library of this
name: the length of a JSON table, the table, and the bytes of all columns. The layout ``npz`` is
NumPy's. Both hold a header, the schema of the rows, and a checksum. No layout uses pickle.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.filesystem import disk_errors, make_directory, private_path
from replaykit.native import crc32
from replaykit.schema import Schema
from replaykit.structure import Leaf, build, raw_bytes
from replaykit.structure import Path as Key
from replaykit.transfer import BatchMemory

Partition = Literal["fifo", "protected"]
"""The folders below a root. Only chunks of the first one are evicted."""

Format = Literal["safetensors", "npz", "npz-compressed"]

FORMATS: Final = {"safetensors": ".safetensors", "npz": ".npz", "npz-compressed": ".npz"}
"""The suffix of the files of each format."""

_VERSION: Final = 1
_HEADER: Final = "replaykit_chunk"
_LINE: Final = re.compile(
    rb"%d ([0-9a-f]{16}) (\d{1,9}) (\d{1,18}) (reset|cut) (terminated|truncated|cut) "
    rb"(\d{1,18}) ([1-9]\d{0,17}) (\d{1,19})" % _VERSION
)
_START: Final = f'{{"__metadata__": {{"{_HEADER}": "'.encode()
_SCHEMA: Final = b'", "schema": "'
_TABLE: Final = re.compile(
    re.escape(_START) + rb"([^\"]{1,200}) (\d{1,10}) (\d{1,9})" + re.escape(_SCHEMA)
)
"""The begin of a table: header, checksum, and length of the schema, which follows."""
_NAME: Final = re.compile(
    r"([0-9]{19})-([0-9a-f]{16}-[0-9]{1,9})-([0-9]{8,18})\.(?:safetensors|npz)"
)
_MOST_TABLE: Final = 1 << 26
"""Most bytes of a table. A damaged length must not allocate any amount of memory."""
_MOST_ARRAY_HEADER: Final = 1 << 12
ZIP_ERRORS: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError)
"""Errors of damaged zip files. The last one is for flags that ask for a password."""

ROWS_BYTES: Final = 1 << 20
"""Bytes of the block that joined rows share. New memory costs more than a copy into it."""

_CODES: Final = {
    name: name.upper().replace("UINT", "U").replace("BFLOAT", "BF").replace("FLOAT", "F")
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32")
} | {"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float64": "F64"}
"""Names of dtypes in tables of the layout ``safetensors``. Other dtypes are stored as bytes."""


class DamagedChunk(ValueError):
    """A file is no whole chunk; the message gives the reason."""


class ChunkHeader(NamedTuple):
    """The header of a chunk.

    Attributes:
        writer: a random name of the writer, 16 hexadecimal digits.
        lane: the lane of the writer.
        number: the number of the chunk among those of this writer and lane, from 0 on.
        head: ``reset`` if the first row follows a reset; ``cut`` if the chunk continues the episode
            of the previous number.
        tail: the reason why the chunk ends. ``cut``: no flag ends its last row.
        step: number of steps of the episode before the first row.
        rows: number of rows.
        written: time of the write in nanoseconds since 1970; rises for each writer.
    """

    writer: str
    lane: int
    number: int
    head: Literal["reset", "cut"]
    tail: Literal["terminated", "truncated", "cut"]
    step: int
    rows: int
    written: int

    @property
    def stream(self) -> str:
        """The name of the writer with its lane."""
        return f"{self.writer}-{self.lane}"

    def line(self) -> bytes:
        """Return the header as text, after the version of the format."""
        return " ".join(map(str, (_VERSION, *self))).encode()

    @classmethod
    def parse(cls, line: bytes) -> ChunkHeader:
        """Return the header of a `line`. A pattern checks it, in two microseconds."""
        found = _LINE.fullmatch(line)
        if found is None:
            raise DamagedChunk(f"expected a header of version {_VERSION}, got {line[:100]!r}")
        writer, lane, number, head, tail, step, rows, written = found.groups()
        kinds: Any = head.decode(), tail.decode()
        numbers = int(step), int(rows), int(written)
        start = writer.decode(), int(lane), int(number)
        return cls._make((*start, *kinds, *numbers))


class _Column(NamedTuple):
    path: Key
    name: str
    leaf: Leaf
    row_bytes: int


class ChunkLayout:
    """The order of the columns of a schema in a chunk.

    Wide dtypes come first, so that every column is aligned without gaps.

    Args:
        schema: the schema of the rows.
        text: the schema as a JSON string without its quotes.
    """

    def __init__(self, schema: Schema, text: bytes) -> None:
        self.schema, self.text = schema, text
        leaves = sorted(schema.leaves.items(), key=lambda item: -item[1].dtype.itemsize)
        self.columns: list[_Column] = []
        taken = {_HEADER}
        for path, leaf in leaves:
            name = ".".join(map(str, path))
            while name in taken:
                name += "_"
            taken.add(name)
            size = leaf.shape.numel() * leaf.dtype.itemsize
            self.columns.append(_Column(path, name, leaf, size))
        self.row_bytes = schema.row_bytes()

    @classmethod
    def of(cls, schema: Schema) -> ChunkLayout:
        """Return the layout of the rows of a schema."""
        return cls(schema, json.dumps(json.dumps(schema.to_json())).encode()[1:-1])


@functools.lru_cache(maxsize=64)
def _layout_of(text: bytes) -> ChunkLayout:
    """Return the layout of a schema. The chunks of a run have one schema."""
    try:
        return ChunkLayout(Schema.from_json(json.loads(json.loads(b'"%b"' % text))), text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedChunk(f"its schema is damaged: {error}") from None


class Chunk(NamedTuple):
    """The content of a chunk.

    Attributes:
        header: its header.
        layout: its layout.
        parts: the bytes of its columns, in the order of the layout.
        nbytes: the size of its file.
    """

    header: ChunkHeader
    layout: ChunkLayout
    parts: Sequence[memoryview]
    nbytes: int

    def distinct(self, path: Key) -> list[Any]:
        """Return the different numbers of a column."""
        for column, part in zip(self.layout.columns, self.parts, strict=True):
            if column.path == path:
                return torch.frombuffer(bytearray(part), dtype=column.leaf.dtype).unique().tolist()
        raise KeyError(path)


# -- names --------------------------------------------------------------------------------------


def chunk_name(header: ChunkHeader, format: str) -> str:
    """Return the name of the file of a chunk. Names sort by age."""
    return f"{header.written:019d}-{header.stream}-{header.number:08d}{FORMATS[format]}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Return stream and number of a name that ``chunk_name`` made; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (found[2], int(found[3]))


def draft_of(name: str) -> bool:
    """Return whether a name is that of a chunk that a writer has not finished."""
    return name.startswith(".") and ".writing-" in name


# -- writing --------------------------------------------------------------------------------------


def encode_chunk(
    header: ChunkHeader, layout: ChunkLayout, leaves: Mapping[Key, torch.Tensor], format: str
) -> bytes:
    """Return the file of a chunk.

    Args:
        leaves: the columns by path, each ``[rows, *F]``.
        format: a key of `FORMATS`.
    """
    content = [raw_bytes(leaves[column.path]).numpy() for column in layout.columns]
    line = header.line()
    if format != "safetensors":
        return _encode_npz(line, layout, leaves, content, compress=format == "npz-compressed")
    body = b"".join(content)  # type: ignore[arg-type]
    checksum = crc32(body, zlib.crc32(layout.text, zlib.crc32(line)))
    table: dict[str, Any] = {}
    first = 0
    for column in layout.columns:
        until = first + column.row_bytes * header.rows
        code = _CODES.get(dtype_name(column.leaf.dtype))
        shape = [header.rows, *column.leaf.shape]
        if code is None:
            code, shape = "U8", [header.rows, column.row_bytes]
        table[column.name] = {"dtype": code, "shape": shape, "data_offsets": [first, until]}
        first = until
    columns = json.dumps(table).encode()[1:]
    sums = b"%d %d" % (checksum, len(layout.text))
    head = b"%b%b %b%b%b" % (_START, line, sums, _SCHEMA, layout.text)
    head += b'"}, ' + columns
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, body))


def _encode_npz(
    line: bytes,
    layout: ChunkLayout,
    leaves: Mapping[Key, torch.Tensor],
    content: Sequence[np.ndarray[Any, Any]],
    *,
    compress: bool,
) -> bytes:
    lines = np.frombuffer(line + b"\n" + layout.text, np.uint8)
    arrays: dict[str, Any] = {_HEADER: lines}
    for column, values in zip(layout.columns, content, strict=True):
        try:
            arrays[column.name] = leaves[column.path].contiguous().numpy()
        except TypeError:  # NumPy lacks the dtype
            arrays[column.name] = values.reshape(-1, column.row_bytes)
    file = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(file, **arrays)
    return file.getvalue()


def publish_chunk(target: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, and rename it.

    If the folder or the temporary file is removed meanwhile, both are made again once. The rename
    is durable after a sync of the folder, which costs as much as that of the file.

    Raises:
        OSError: the disk is full, or another file operation failed. No file is left.
    """
    for last in (False, True):
        draft = private_path(target, "writing")
        try:
            make_directory(target.parent)
            with disk_errors(target, len(data)):
                _write(draft, data)
                os.replace(draft, target)
        except FileNotFoundError:
            if last:
                raise
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        else:
            return


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading --------------------------------------------------------------------------------------


def read_chunk(path: str, memory: memoryview | None = None) -> Chunk:
    """Read a whole chunk, and check its checksum.

    Args:
        memory: the place for the bytes of the file, if they fit there.

    Raises:
        FileNotFoundError: the file is gone.
        DamagedChunk: the file is no whole chunk of this or an older version.
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if memory is None or size > len(memory):
            memory = memoryview(bytearray(size))
        view = memory[: _read_fully(descriptor, memory[:size])]
    finally:
        os.close(descriptor)
    if view[:2] == b"PK":
        return _decode_npz(bytes(view))
    head = _decode_table(bytes(view[:8]), lambda size: bytes(view[8 : 8 + size]))
    header, layout, body = head.header, head.layout, view[head.start :]
    if len(body) != header.rows * layout.row_bytes:
        expected = header.rows * layout.row_bytes
        raise DamagedChunk(f"expected {expected} bytes of rows, got {len(body)}")
    if crc32(body, head.known) != head.checksum:
        raise DamagedChunk("the checksum is wrong")
    parts, first = [], 0
    for column in layout.columns:
        until = first + column.row_bytes * header.rows
        parts.append(body[first:until])
        first = until
    return Chunk(header, layout, parts, len(view))


def read_header(path: str) -> tuple[ChunkHeader, ChunkLayout, int]:
    """Read the header of a chunk without its rows.

    Returns:
        The header, the layout, and the position of the rows in the file; -1 for the layout ``npz``.

    Raises:
        FileNotFoundError, DamagedChunk, OSError: as for `read_chunk`. The rows are not checked.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(8)
        if start[:2] != b"PK":
            return _decode_table(start, file.read)[:3]
    with _zip_errors(), zipfile.ZipFile(path) as found:
        return (*_decode_lines(found), -1)


def _read_fully(descriptor: int, memory: memoryview) -> int:
    """Read a file into memory; return the number of bytes."""
    count = 0
    while count < len(memory):
        more = os.readv(descriptor, [memory[count:]])
        if not more:
            break
        count += more
    return count


class _Head(NamedTuple):
    header: ChunkHeader
    layout: ChunkLayout
    start: int  # position of the rows in the file
    checksum: int  # of header, schema and rows
    known: int  # checksum of header and schema


def _decode_table(start: bytes, read: Callable[[int], bytes]) -> _Head:
    """Decode the first 8 bytes of a file, and the table that ``read`` returns for its size."""
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > _MOST_TABLE:
        raise DamagedChunk("the file is no chunk")
    head = read(size)
    found = _TABLE.match(head)
    if found is None:
        raise DamagedChunk("the file is no chunk")
    line, checksum, length = found.groups()
    schema = head[found.end() : found.end() + int(length)]
    known = zlib.crc32(schema, zlib.crc32(line))
    return _Head(ChunkHeader.parse(line), _layout_of(schema), 8 + size, int(checksum), known)


def _decode_lines(file: zipfile.ZipFile) -> tuple[ChunkHeader, ChunkLayout]:
    line, _, schema = read_array(file, _HEADER).tobytes().partition(b"\n")
    return ChunkHeader.parse(line), _layout_of(schema)


def _decode_npz(data: bytes) -> Chunk:
    with _zip_errors(), zipfile.ZipFile(io.BytesIO(data)) as found:
        header, layout = _decode_lines(found)
        parts = []
        for column in layout.columns:
            expected = column.row_bytes * header.rows
            size = found.getinfo(f"{column.name}.npy").file_size
            if not expected < size <= expected + _MOST_ARRAY_HEADER:
                raise DamagedChunk(f"expected {expected} bytes in column {column.name!r}")
            parts.append(memoryview(read_array(found, column.name).tobytes()))
        return Chunk(header, layout, parts, len(data))


@contextmanager
def _zip_errors() -> Iterator[None]:
    """Convert errors of a damaged zip file to `DamagedChunk`."""
    try:
        yield
    except DamagedChunk:
        raise
    except (*ZIP_ERRORS, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # EINVAL is a position before the begin of the file
        raise DamagedChunk(f"the file is no chunk: {error}") from None


def read_array(
    file: zipfile.ZipFile,
    name: str,
    start: int = 0,
    stop: int | None = None,
    count: int | None = None,
) -> np.ndarray[Any, Any]:
    """Read the rows ``[start, stop)`` of an array in a zip file; never unpickle.

    Args:
        count: the number of rows that the array must have.

    The function decompresses the array up to ``stop``, and keeps only these rows.

    Raises:
        ValueError: there is no such array, it holds objects, or its values are incomplete or not
            ``count``.
    """
    if f"{name}.npy" not in file.NameToInfo:
        raise ValueError(f"it has no array {name!r}")
    if file.getinfo(f"{name}.npy").compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name!r} has a compression that NumPy does not write")
    with file.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(member)
        if dtype.hasobject:
            raise ValueError(f"array {name!r} holds pickled objects, which are not read")
        if count is not None and shape[:1] != (count,):
            raise ValueError(f"expected {count} values in array {name!r}, got shape {shape}")
        row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        if not shape or (fortran and len(shape) > 1):
            whole = np.frombuffer(_exactly(member, row * (shape or (1,))[0], name), dtype)
            whole = whole.reshape(shape, order="F")
            return whole[start:stop] if shape else whole
        first, until, _ = slice(start, stop).indices(shape[0])
        member.seek(first * row, os.SEEK_CUR)
        rows = max(0, until - first)
        return np.frombuffer(_exactly(member, rows * row, name), dtype).reshape(rows, *shape[1:])


def _exactly(file: Any, nbytes: int, name: str) -> bytearray:
    data = bytearray(file.read(nbytes))
    if len(data) != nbytes:
        raise ValueError(f"expected {nbytes} bytes of array {name!r}, got {len(data)}")
    return data


def read_columns(
    path: str,
    header: ChunkHeader,
    layout: ChunkLayout,
    start: int,
    keys: Collection[Key] | None,
    first: int,
    until: int,
) -> Any:
    """Read the rows ``[first, until)`` of some columns of a chunk; check no checksum.

    Args:
        start: the position of the rows in the file, as `read_header` returns it.
        keys: the columns; None for all.

    Raises:
        KeyError: a key is not stored.
        DamagedChunk: the file is too short.
    """
    schema = layout.schema
    if keys is not None:
        for key in keys:
            schema.leaf(key)
        schema = schema.part(keys)
    count, leaves = max(0, until - first), {}
    with nullcontext() if start >= 0 else zipfile.ZipFile(path) as found:
        for column in layout.columns:
            if column.path in schema.leaves:
                size = column.row_bytes
                if found is None:
                    flat = np.fromfile(path, np.uint8, count * size, offset=start + first * size)
                else:
                    with _zip_errors():
                        rows = read_array(found, column.name, first, until)
                    flat = rows.reshape(-1).view(np.uint8)
                if flat.size != count * size:
                    raise DamagedChunk(f"it lacks rows of column {column.name!r}")
                block = torch.from_numpy(flat) if flat.size else torch.empty(0, dtype=torch.uint8)
                values = block.view(column.leaf.dtype)
                leaves[column.path] = values.view(count, *column.leaf.shape)
            start += column.row_bytes * header.rows
    return build(schema.root, leaves, torch.Size([count]), None)


def join_rows(chunks: Sequence[Chunk], memory: BatchMemory | None = None) -> Any:
    """Return the rows of chunks of one layout, one after the other, as a TensorDict.

    Args:
        memory: takes the columns from the `ROWS_BYTES` of an earlier result that is not in use.

    Cost: one copy of the bytes.
    """
    layout, count = chunks[0].layout, sum(chunk.header.rows for chunk in chunks)
    total = sum(_padded(column.row_bytes * count) for column in layout.columns)
    if memory is None or total > ROWS_BYTES:
        block = torch.empty(total, dtype=torch.uint8, device="cpu")
    else:
        block = memory.new((ROWS_BYTES,), torch.uint8)
    # Not block.numpy(), after which `BatchMemory` would not find the block idle.
    array = (ctypes.c_ubyte * block.numel()).from_address(block.data_ptr())
    view, first, leaves = memoryview(array).cast("B"), 0, {}
    for place, column in enumerate(layout.columns):
        until = first
        for chunk in chunks:
            part = chunk.parts[place]
            view[until : until + len(part)] = part
            until += len(part)
        values = block[first:until].view(column.leaf.dtype)
        leaves[column.path] = values.view(count, *column.leaf.shape)
        first += _padded(until - first)
    return build(layout.schema.root, leaves, torch.Size([count]), None)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
