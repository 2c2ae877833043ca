"""CRC-32 of bytes from the CRC-32s of their parts.

Two columns share nearly all bytes of a block: an observation is stored as the one before a step
and as the next one of the step that led to it. What they share is read through once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from replaykit.native import crc32

__all__ = ["LEAST_SHARED", "crc32_of_file", "crc32_of_parts", "joined_crc32"]

LEAST_SHARED: Final = 1 << 22
"""Bytes from which on joining two checksums costs less than computing one."""
_BLOCK_BYTES: Final = 1 << 20
_POLYNOMIAL: Final = 0xEDB88320


def joined_crc32(first: int, second: int, length: int) -> int:
    """Returns the CRC-32 of two byte strings in a row, given theirs and the second's length.

    Cost: some 32 steps for each bit that is set in the length, about 100 microseconds.

    Example:
        >>> import zlib
        >>> from replaykit.datasets.checksum import joined_crc32
        >>> joined_crc32(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    # The checksum is linear: that of the first string goes on through as many zeros.
    power = 0
    while length:
        if length & 1:
            first = _applied(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


def crc32_of_file(path: Path) -> int:
    """Returns the CRC-32 of a file, read in blocks of 1 MiB."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found = crc32(block, found)
    return found


def crc32_of_parts(block: memoryview, start: int, shared: tuple[int, int, int] | None) -> int:
    """Continues a CRC-32 over a block of which that of one part is known.

    Args:
        block: bytes.
        start: the checksum of what comes before the block.
        shared: first byte, byte after the last, and CRC-32 of a part of the block; or ``None``.
    """
    if shared is None:
        return crc32(block, start)
    first, stop, known = shared
    start = crc32(block[:first], start)
    return crc32(block[stop:], joined_crc32(start, known, stop - first))


@lru_cache(maxsize=64)
def _zeros(power: int) -> tuple[int, ...]:
    """Returns what ``2 ** power`` zero bytes do to each single bit of a checksum."""
    if power:
        half = _zeros(power - 1)
        return tuple(_applied(half, column) for column in half)
    columns = []
    for bit in range(32):
        value = 1 << bit
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        columns.append(value)
    return tuple(columns)


def _applied(matrix: tuple[int, ...], vector: int) -> int:
    total, bit = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[bit]
        vector >>= 1
        bit += 1
    return total
