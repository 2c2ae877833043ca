"""TFRecord files, and the ``tf.train.Example`` messages in them, read without TensorFlow.

A TFRecord file is a row of records: the length in 8 bytes, its checksum, the data, its checksum.
Numbers are little-endian, and checksums are CRC-32C with a mask. An Example is a protobuf message:
a map from names to lists of bytes, of floats, or of integers.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.errors import import_extra

_HEADER: Final = 12
_FOOTER: Final = 4
_MASK: Final = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LISTS: Final = {1: "bytes", 2: "floats", 3: "integers"}

Array = npt.NDArray[Any]


def masked_crc(data: Any) -> int:
    """Return the masked CRC-32C of some bytes.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    module = import_extra("google_crc32c", "TFRecord files need google-crc32c", "rlds")
    crc = module.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class RecordFile:
    """A TFRecord file, of which only the headers of records are read when it is opened.

    Attributes:
        spans: first byte and end of the data of each record, int64 ``[R, 2]``.

    Raises:
        ValueError: a header is damaged, or the file ends inside a record.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        spans: list[tuple[int, int]] = []
        at = 0
        while at < size:
            header = self._memory[at : at + _HEADER]
            if len(header) < _HEADER:
                raise ValueError(f"it ends inside the header of record {len(spans)}")
            length, crc = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != crc:
                raise ValueError(f"the length of record {len(spans)} has a wrong checksum")
            stop = at + _HEADER + length
            if stop + _FOOTER > size:
                raise ValueError(f"it ends inside record {len(spans)} of {length:,} bytes")
            spans.append((at + _HEADER, stop))
            at = stop + _FOOTER
        self.spans = np.array(spans, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.spans)

    def example(self, number: int) -> Example:
        """Return a record, whose data is read when it is used. The checksum is not checked."""
        start, stop = self.spans[number].tolist()
        return Example(memoryview(self._memory)[start:stop])

    def check(self, number: int) -> None:
        """Check the checksum of a record's data.

        Raises:
            ValueError: it is wrong.
        """
        start, stop = self.spans[number].tolist()
        (crc,) = struct.unpack("<I", self._memory[stop : stop + _FOOTER])
        if masked_crc(self._memory[start:stop]) != crc:
            raise ValueError(f"the data of record {number} has a wrong checksum")


class Example:
    """A message ``tf.train.Example``: lists of bytes, floats or integers by name.

    Args:
        data: the encoded message.

    Raises:
        ValueError: the data is not such a message.

    Example:
        >>> from replaykit.datasets.families.tf_examples import Example
        >>> number = b"\\x0a\\x01a\\x12\\x05\\x1a\\x03\\x0a\\x01\\x07"
        >>> example = Example(memoryview(b"\\x0a\\x0c\\x0a\\x0a" + number))
        >>> example.names, example.integers("a")
        (['a'], array([7]))
    """

    def __init__(self, data: memoryview) -> None:
        self._features: dict[str, memoryview] = {}
        for features in _fields(data, 1):
            for entry in _fields(features, 1):
                (name,) = list(_fields(entry, 1)) or [memoryview(b"")]
                values = list(_fields(entry, 2))
                self._features[bytes(name).decode()] = values[-1] if values else memoryview(b"")

    @property
    def names(self) -> list[str]:
        """The names of all features."""
        return list(self._features)

    def kind(self, name: str) -> str | None:
        """Return ``"bytes"``, ``"floats"``, ``"integers"``, or None for a feature without any."""
        found = None
        for number, _, _ in _walk(self._features[name]):
            found = _LISTS.get(number, found)
        return found

    def _parts(self, name: str, number: int, single: int) -> Iterator[tuple[int, Any]]:
        """Yield wire type and value of the entries of a list, which may be packed."""
        for values in _fields(self._features[name], number):
            for field, kind, value in _walk(values):
                if field == 1 and kind not in (single, _BYTES):
                    raise ValueError(f"a list has an entry of the wrong type {kind}")
                if field == 1:
                    yield kind, value

    def bytes(self, name: str) -> list[memoryview]:
        """Return the entries of a list of bytes, without copying them."""
        return [_data(value) for _, value in self._parts(name, 1, _BYTES)]

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Return a list of floats."""
        parts = [
            np.frombuffer(value if kind == _BYTES else struct.pack("<I", value), "<f4")
            for kind, value in self._parts(name, 2, _FIXED32)
        ]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a list of integers."""
        parts = [
            _varints(value) if kind == _BYTES else np.array([value], np.uint64)
            for kind, value in self._parts(name, 3, _VARINT)
        ]
        found = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
        return found.view(np.int64)


def _varints(data: Any) -> npt.NDArray[np.uint64]:
    """Decode packed integers of 7 bits in each byte."""
    octets = np.frombuffer(data, np.uint8)
    last = octets < 0x80
    if not len(octets):
        return np.zeros(0, np.uint64)
    if not last[-1]:
        raise ValueError("a list of integers ends inside a number")
    starts = np.append(0, np.flatnonzero(last)[:-1] + 1)
    places = np.arange(len(octets)) - np.repeat(starts, np.diff(np.append(starts, len(octets))))
    if places.max() > 9:
        raise ValueError("an integer has more than 10 bytes")
    shifted = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    found: npt.NDArray[np.uint64] = np.bitwise_or.reduceat(shifted, starts)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a message ends inside a number")
        octet = data[at]
        found |= (octet & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if octet < 0x80:
            return found & (2**64 - 1), at


def _walk(data: memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
    """Yield number, wire type and value of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a message has a field of the unknown type {kind}")
        part = data[at : at + size]
        if len(part) < size:
            raise ValueError("a message ends inside a field")
        at += size
        if kind == _BYTES:
            yield tag >> 3, kind, part
        else:
            yield tag >> 3, kind, int.from_bytes(part, "little")


def _data(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a message has a number, expected bytes")
    return value


def _fields(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the values of the fields of one number, which are messages or bytes."""
    for found, _, value in _walk(data):
        if found == number:
            yield _data(value)
