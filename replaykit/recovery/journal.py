"""Journal rows before they are overwritten, and commit states atomically."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaykit.filesystem import disk_errors, reserve_blocks

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_GRAIN = mmap.PAGESIZE


class MappedFile:
    """The bytes of a file, as memory that is shared by all processes that map it.

    The kernel keeps all stored bytes even if this process is killed. Only ``sync`` protects them
    from a loss of power.

    Args:
        path: the file, which is made if it does not exist.
        nbytes: the least size. A longer file keeps its length.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; the error names it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.journal import MappedFile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = MappedFile(Path(folder) / "numbers", 16)
        ...     file.bytes[3] = 7
        ...     (Path(folder) / "numbers").read_bytes()[:5]
        b'\\x00\\x00\\x00\\x07\\x00'
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        # Never open a link, so that all writes stay in the folder.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            self._map(max(nbytes, os.fstat(self._fd).st_size, 1))
        except BaseException:
            os.close(self.__dict__.pop("_fd"))
            raise

    def _map(self, nbytes: int) -> None:
        nbytes = -(-nbytes // _GRAIN) * _GRAIN
        before = os.fstat(self._fd).st_size
        if before < nbytes:
            # Reserve blocks now, because on a full disk a store into the mapping kills the process.
            try:
                with disk_errors(self.path, nbytes):
                    os.truncate(self._fd, nbytes)
                    reserve_blocks(self._fd, nbytes)
            except BaseException:
                # A file of the new size would count as a file with reserved blocks.
                with contextlib.suppress(OSError):
                    os.truncate(self._fd, before)
                raise
        mapping = mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_WRITE)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes``, at least double the present size; keep the contents.

        Raises:
            OSError: the disk has too little room. Nothing has changed then.
        """
        if nbytes > len(self.bytes):
            self._map(max(nbytes, 2 * len(self.bytes)))

    def remap(self) -> None:
        """Map the file with its present length, which another process may have changed."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(self.bytes):
            self._map(nbytes)

    def sync(self) -> None:
        """Wait until all stored bytes are on disk."""
        os.fsync(self._fd)

    def __del__(self) -> None:
        fd = self.__dict__.pop("_fd", None)
        if fd is not None:
            os.close(fd)


Array = np.ndarray[Any, Any]

_HEADER = 64
_SEQUENCE, _USED, _CHECKED = range(3)
_ENTRY = 6
_pack_entry = struct.Struct(f"={_ENTRY}q").pack_into
"""Format of the numbers before an entry of the journal.

They are the target, the bytes per row, the number of rows and the first row (-1 if the rows are
listed). Then follow the number of bytes after these numbers, and a checksum.
"""


class Journal:
    """Old rows of arrays, saved before an operation that is not committed yet.

    Each operation has a sequence number. Entries are appended to a mapped file. An entry is valid
    if it is whole and belongs to the current operation. A commit increases the sequence number, and
    so drops all entries.

    Args:
        file: the file of the journal.
        durable: whether entries are on disk before ``save`` returns. Checksums show which entries
            were truncated by a loss of power.

    Cost: a copy of the rows.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.recovery.journal import Journal, MappedFile
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
        self._pass_addresses()

    def _pass_addresses(self) -> None:
        self._bytes = self._file.bytes
        self._plain = self._bytes.data
        # A memoryview reads a single number in a third of the time of an array.
        self._head = self._bytes[:_HEADER].view(np.int64).data

    def save(self, sequence: int, target: int, rows: Array, at: Array | range) -> None:
        """Journal the present values of rows of an array.

        Args:
            sequence: sequence number of the operation.
            target: number of the array.
            rows: the array, uint8 ``[N, bytes]``.
            at: positions of the rows, int64 ``[K]``, or a range with step 1.

        Raises:
            OSError: there is no room. Nothing has changed, and the caller must not overwrite the
                rows.
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
            self._pass_addresses()
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

    def sync(self) -> None:
        """Wait until the file is on disk."""
        self._file.sync()

    @property
    def memory(self) -> Array:
        """The bytes of the file, uint8."""
        return self._bytes

    @property
    def sequence(self) -> int:
        """Sequence number of the latest operation with entries; 0 if there is none."""
        return self._head[_SEQUENCE]

    def used(self, sequence: int) -> int:
        """Return the size of an operation's entries in bytes, as ``since`` for ``undo``."""
        head = self._head
        return head[_USED] if head[_SEQUENCE] == sequence else 0

    def undo(self, sequence: int, targets: Mapping[int, Array], since: int = 0) -> bool:
        """Restore the old rows of an operation, the latest entry first.

        The call may be interrupted and repeated.

        Args:
            since: restore only entries after this point, a result of ``used``.

        Returns:
            Whether there was an entry.

        Raises:
            ValueError: an entry names an array or rows that do not exist. Nothing has changed then.
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
        """Drop the entries of an operation after it was rolled back."""
        if self.used(sequence) > since:
            self._head[_USED] = since
            if self._durable:
                self._file.sync()

    def _entries(
        self, sequence: int, targets: Mapping[int, Array], since: int
    ) -> list[tuple[Array, Array | range, Array]]:
        found: list[tuple[Array, Array | range, Array]] = []
        start, end = _HEADER + since, _HEADER + self._head[_USED]
        if end > len(self._bytes):  # another process has grown the file
            self._file.remap()
            self._pass_addresses()
        checked = bool(self._head[_CHECKED])
        while start < end:
            body = start + 8 * _ENTRY
            if body > len(self._bytes):
                if checked:
                    break
                raise ValueError(f"{self._file.path} is shorter than its header says")
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
                break  # a loss of power truncated the entry, before any of its rows was overwritten
            rows = targets.get(target)
            listed = 0 if first >= 0 else 8 * count
            if (
                not whole
                or rows is None
                or rows.shape[1] != width
                or nbytes != listed + -(-count * width // 8) * 8
            ):
                raise ValueError(f"{self._file.path} does not match the files of the rows")
            at: Array | range = range(first, first + count)
            lowest, highest = first, first + count - 1
            if first < 0:
                at = self._bytes[body : body + listed].view(np.int64)
                lowest, highest = (int(at.min()), int(at.max())) if count else (0, 0)
            if count and not (lowest >= 0 and highest < len(rows)):
                raise ValueError(f"{self._file.path} names rows that do not exist")
            values = self._bytes[body + listed : body + listed + count * width]
            found.append((rows, at, values.reshape(count, width)))
            start = stop
        return found


def _checksum(sequence: int, head: Array, body: Array) -> int:
    # The checksum includes the number of the operation. Otherwise an old entry of the same size at
    # the same offset would also be valid.
    return zlib.crc32(body.data, zlib.crc32(head.data, sequence & 0xFFFFFFFF))


_HEAD = 4
_NUMBER, _DURABLE, _COUNT, _CHECKSUM = range(_HEAD)
_NONE = 0


class States:
    """A vector of int64 numbers on disk, with room for the next vector.

    A vector is called a state, and states have rising sequence numbers. Two files take turns. The
    sequence number of a state is stored last. This store of 8 bytes commits the state, and all
    changes that were journaled under that sequence number.

    Args:
        folder: the folder of the files.
        durable: whether a state is on disk before ``commit`` returns.

    Raises:
        ValueError: a state is damaged. But a durable state that a loss of power has damaged is
            dropped without an error.

    Cost of ``commit``: a copy of the numbers.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.recovery.journal import States
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = States(Path(folder)).commit(np.array([3, 4]))
        ...     found = States(Path(folder))
        ...     found.sequence, found.latest().tolist()
        (1, [3, 4])
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self._durable = durable
        self._files = [MappedFile(folder / f"state-{turn}.bin", 8 * _HEAD) for turn in (0, 1)]
        self._numbers = [file.bytes.view(np.int64) for file in self._files]
        self._pass_addresses()
        for turn in (0, 1):
            self._check(turn)

    @property
    def sequence(self) -> int:
        """Sequence number of the latest state; 0 if there is none.

        It is always read from the files. So if an exception interrupts a commit, this process and
        other processes agree whether the commit took effect.
        """
        even, odd = self._heads
        a, b = even[_NUMBER], odd[_NUMBER]
        return a if a > b else b

    @property
    def memory(self) -> tuple[Array, Array]:
        """The bytes of both files, uint8."""
        even, odd = self._files
        return even.bytes, odd.bytes

    def sync(self) -> None:
        """Wait until both files are on disk."""
        for file in self._files:
            file.sync()

    def _pass_addresses(self) -> None:
        # A memoryview reads a single number in a third of the time of an array.
        even, odd = (numbers.data for numbers in self._numbers)
        self._heads = (even, odd)

    def _check(self, turn: int) -> None:
        numbers = self._numbers[turn]
        sequence, count = int(numbers[_NUMBER]), int(numbers[_COUNT])
        if sequence == _NONE:  # there is no state yet, or a commit was interrupted
            return
        if sequence > 0 and sequence % 2 == turn and count >= 0:
            durable, values = int(numbers[_DURABLE]), numbers[_HEAD : _HEAD + count]
            if len(values) == count and (
                numbers[_CHECKSUM] == _state_checksum(sequence, durable, values.data)
            ):
                return
            if durable:  # at the loss of power, its number was on disk, and not all of the rest
                numbers[_NUMBER] = _NONE
                return
        raise ValueError(f"{self._files[turn].path} is damaged: its checksum does not match")

    def latest(self) -> Array:
        """Return a copy of the numbers that were committed last."""
        sequence = self.sequence
        if not sequence:
            return np.zeros(0, np.int64)
        return self.view().copy()

    def view(self) -> Array:
        """Return a view of the latest numbers, valid until the second commit from now."""
        turn = self.sequence % 2
        stop = _HEAD + self._heads[turn][_COUNT]
        if stop > len(self._numbers[turn]):  # another process has grown the file
            self._files[turn].remap()
            self._numbers[turn] = self._files[turn].bytes.view(np.int64)
            self._pass_addresses()
        return self._numbers[turn][_HEAD:stop]

    def first(self, known: int) -> tuple[int, int, int, int] | None:
        """Return the latest state's sequence number and first three values, without a lock.

        The state must have at least three values. ``known`` is the sequence number of a state that
        the caller has read. All four numbers are in one cache line, to save transfers from another
        processor.

        Returns:
            The four numbers, or None if a commit was overwriting them.
        """
        head = self._heads[(known + 1) % 2]
        sequence = head[_NUMBER]
        if sequence <= known:
            head = self._heads[known % 2]
            sequence = head[_NUMBER]
        found = sequence, head[_HEAD], head[_HEAD + 1], head[_HEAD + 2]
        return found if head[_NUMBER] == sequence != _NONE else None

    def glance(self) -> tuple[int, Array] | None:
        """Return the sequence number and a copy of the latest state, without a lock.

        Returns:
            None if a commit was overwriting the state, or if its file has grown.
        """
        sequence = self.sequence
        turn = sequence % 2
        stop = _HEAD + self._heads[turn][_COUNT]
        if stop > len(self._numbers[turn]):
            return None
        numbers = self._numbers[turn][_HEAD:stop].copy()
        return (sequence, numbers) if self._heads[turn][_NUMBER] == sequence else None

    def commit(self, numbers: Array, more: Sequence[int] = ()) -> int:
        """Commit int64 ``numbers``, followed by ``more``, as the new state.

        Returns:
            The number of the state.

        Raises:
            OSError: there is no room, or the disk failed. The state has not changed then.
        """
        sequence, own = self.sequence + 1, len(numbers)
        count, turn = own + len(more), sequence % 2
        stop = _HEAD + count
        head = self._heads[turn]
        if stop > len(head):
            file = self._files[turn]
            file.grow(8 * stop)
            self._numbers[turn] = file.bytes.view(np.int64)
            self._pass_addresses()
            head = self._heads[turn]
        head[_NUMBER] = _NONE
        head[_HEAD : _HEAD + own] = numbers.data
        for at, number in enumerate(more, _HEAD + own):
            head[at] = number
        head[_COUNT], head[_DURABLE] = count, self._durable
        head[_CHECKSUM] = _state_checksum(sequence, self._durable, head[_HEAD:stop])
        head[_NUMBER] = sequence
        if self._durable:
            try:
                self._files[turn].sync()
            except OSError:
                head[_NUMBER] = _NONE
                raise
        return sequence


_before = struct.Struct("<3q").pack


def _state_checksum(sequence: int, durable: int, numbers: memoryview) -> int:
    return zlib.crc32(numbers, zlib.crc32(_before(sequence, durable, len(numbers))))
