"""What an operation is about to overwrite, so that it can be taken back."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from replaykit.recovery.files import MappedFile

__all__ = ["Journal"]

Array = np.ndarray[Any, Any]

_HEADER = 64
_SEQUENCE, _USED, _CHECKED = range(3)
_ENTRY = 6
_pack_entry = struct.Struct(f"={_ENTRY}q").pack_into
"""Numbers before an entry: target, bytes a row, rows, the first one (-1: listed), all bytes of what
follows, checksum."""


class Journal:
    """Rows of arrays as they were before an operation that has not been committed.

    The operation has a number. Entries are appended to a mapped file, each whole before it counts;
    those of another operation than the one that was under way mean nothing, so that a commit, which
    moves the number on, forgets them.

    Args:
        file: where it lies.
        durable: entries are on the disk before ``save`` returns, with checksums by which those are
            told that a loss of power has cut off.

    Cost: a copy of the rows.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.recovery import Journal, MappedFile
        >>> rows = np.arange(6, dtype=np.uint8).reshape(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     journal = Journal(MappedFile(Path(folder) / "journal", 4096))
        ...     journal.save(1, target=0, rows=rows, at=np.array([2]))
        ...     rows[2] = 99
        ...     journal.undo(1, {0: rows})
        True
        >>> rows[2].tolist()
        [4, 5]
    """

    def __init__(self, file: MappedFile, *, durable: bool = False) -> None:
        self._file, self._durable = file, durable
        self._look()

    def _look(self) -> None:
        self._bytes = self._file.bytes
        self._plain = self._bytes.data
        # One number through a memoryview takes a third of what it takes through an array.
        self._head = self._bytes[:_HEADER].view(np.int64).data

    def save(self, sequence: int, target: int, rows: Array, at: Array | range) -> None:
        """Notes rows of an array as they are now.

        Args:
            sequence: number of the operation.
            target: number of the array.
            rows: uint8 ``[N, bytes]``.
            at: which, int64 ``[K]``, or a range of steps of 1.

        Raises:
            OSError: no room; nothing has changed, and nothing may be overwritten.
        """
        head = self._head
        if head[_SEQUENCE] != sequence or not head[_USED]:
            head[_USED] = 0
            head[_CHECKED] = self._durable
            head[_SEQUENCE] = sequence
        count, width = len(at), rows.shape[1]
        listed = 0 if type(at) is range else 8 * count
        nbytes = listed + (count * width + 7 & ~7)
        start = _HEADER + head[_USED]
        stop = start + 8 * _ENTRY + nbytes
        if stop > len(self._bytes):
            self._file.grow(stop)
            self._look()
            head = self._head
        body = start + 8 * _ENTRY
        if type(at) is range:
            first = at.start
            self._bytes[body : body + count * width] = rows[first : at.stop].reshape(-1)
        else:
            first = -1
            to = self._bytes[body + listed : body + listed + count * width].reshape(count, width)
            self._bytes[body : body + listed].view(np.int64)[...] = at
            np.take(rows, at, axis=0, out=to)
        _pack_entry(self._plain, start, target, width, count, first, nbytes, 0)
        if self._durable:
            checksum = _checksum(sequence, self._bytes[start : body - 8], self._bytes[body:stop])
            _pack_entry(self._plain, start, target, width, count, first, nbytes, checksum)
        head[_USED] = stop - _HEADER
        if self._durable:
            self._file.sync()

    def save_run(self, sequence: int, target: int, rows: Array, first: int, until: int) -> None:
        """``save`` of the rows from ``first`` to ``until``, in less time: every ``extend`` does it
        once a ring is full."""
        head, width = self._head, rows.shape[1]
        same = head[_SEQUENCE] == sequence
        nbytes = (until - first) * width
        body = _HEADER + 8 * _ENTRY + (head[_USED] if same else 0)
        stop = body + (nbytes + 7 & ~7)
        if self._durable or stop > len(self._plain):
            self.save(sequence, target, rows, range(first, until))
            return
        if not same:  # in this order: what is noted of another operation never counts for this one
            head[_USED] = 0
            head[_CHECKED] = False
            head[_SEQUENCE] = sequence
        self._bytes[body : body + nbytes] = rows[first:until].reshape(-1)
        _pack_entry(
            self._plain, body - 8 * _ENTRY, target, width, until - first, first, stop - body, 0
        )
        head[_USED] = stop - _HEADER

    @property
    def memory(self) -> Array:
        """The bytes of the file, uint8."""
        return self._bytes

    @property
    def sequence(self) -> int:
        """Number of the latest operation that has noted anything; 0: none has."""
        return self._head[_SEQUENCE]

    def used(self, sequence: int) -> int:
        """How much an operation has noted, in bytes: a point to which it can be taken back."""
        head = self._head
        return head[_USED] if head[_SEQUENCE] == sequence else 0

    def pending(self, sequence: int) -> bool:
        """Whether an operation has noted anything."""
        return self.used(sequence) > 0

    def undo(self, sequence: int, targets: Mapping[int, Array], since: int = 0) -> bool:
        """Puts back what an operation has noted, the latest first; whether there was anything.

        Can be interrupted and run again.

        Args:
            since: only what it has noted from that point on, as ``used`` gave it.

        Raises:
            ValueError: it names an array or rows that there are not; nothing has changed.
        """
        if self.used(sequence) <= since:
            return False
        entries = self._entries(sequence, targets, since)
        for rows, at, values in reversed(entries):
            if isinstance(at, range):
                rows[at.start : at.stop] = values
            else:
                rows[at] = values
        return bool(entries)

    def forget(self, sequence: int, since: int = 0) -> None:
        """Lets go of what an operation has noted, after it was taken back."""
        if self.used(sequence) > since:
            self._head[_USED] = since
            if self._durable:
                self._file.sync()

    def _entries(
        self, sequence: int, targets: Mapping[int, Array], since: int
    ) -> list[tuple[Array, Array | range, Array]]:
        found: list[tuple[Array, Array | range, Array]] = []
        start, end = _HEADER + since, _HEADER + self._head[_USED]
        if end > len(self._bytes):  # another process had the file grow
            self._file.follow()
            self._look()
        checked = bool(self._head[_CHECKED])
        while start < end:
            body = start + 8 * _ENTRY
            if body > len(self._bytes):
                if checked:
                    break
                raise ValueError(f"{self._file.path} is shorter than what was noted in it")
            target, width, count, first, nbytes, checksum = (
                int(number) for number in self._bytes[start:body].view(np.int64)
            )
            stop = body + nbytes
            whole = nbytes >= 0 and stop <= min(end, len(self._bytes))
            if checked and not (
                whole
                and checksum
                == _checksum(sequence, self._bytes[start : body - 8], self._bytes[body:stop])
            ):
                break  # cut off by a loss of power: what it was noted for has not begun
            rows = targets.get(target)
            listed = 0 if first >= 0 else 8 * count
            if (
                not whole
                or rows is None
                or rows.shape[1] != width
                or nbytes != listed + -(-count * width // 8) * 8
            ):
                raise ValueError(f"{self._file.path} does not fit the files beside it")
            at: Array | range = range(first, first + count)
            lowest, highest = first, first + count - 1
            if first < 0:
                at = self._bytes[body : body + listed].view(np.int64)
                lowest, highest = (int(at.min()), int(at.max())) if count else (0, 0)
            if count and not (lowest >= 0 and highest < len(rows)):
                raise ValueError(f"{self._file.path} names rows that there are not")
            values = self._bytes[body + listed : body + listed + count * width]
            found.append((rows, at, values.reshape(count, width)))
            start = stop
        return found


def _checksum(sequence: int, head: Array, body: Array) -> int:
    # With the number of the operation: what an earlier one has left in the same place, of the same
    # size, is whole as well.
    return zlib.crc32(body.data, zlib.crc32(head.data, sequence & 0xFFFFFFFF))
