"""Journal what is about to be overwritten, and switch states atomically."""

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

__all__ = ["Journal", "MappedFile", "States"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_GRAIN = mmap.PAGESIZE


class MappedFile:
    """The bytes of a file as memory that everybody who maps it shares.

    What was stored there is in the kernel's hands: it stays if this process is killed. Against loss
    of power it takes ``sync``.

    Args:
        path: the file; made if it is not there.
        nbytes: to begin with; a longer file keeps its length.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; names the file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import MappedFile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = MappedFile(Path(folder) / "numbers", 16)
        ...     file.bytes[3] = 7
        ...     (Path(folder) / "numbers").read_bytes()[:5]
        b'\\x00\\x00\\x00\\x07\\x00'
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        # Not through a link: what is written here lies in its folder.
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
            # Blocks are taken now: where there is no room a store into the mapping would kill.
            try:
                with disk_errors(self.path, nbytes):
                    os.truncate(self._fd, nbytes)
                    reserve_blocks(self._fd, nbytes)
            except BaseException:
                # A file of that size would be taken to have its blocks.
                with contextlib.suppress(OSError):
                    os.truncate(self._fd, before)
                raise
        mapping = mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_WRITE)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    def grow(self, nbytes: int) -> None:
        """Makes room for so many bytes, at least doubling; what is there stays.

        Raises:
            OSError: the disk has too little room; nothing has changed.
        """
        if nbytes > len(self.bytes):
            self._map(max(nbytes, 2 * len(self.bytes)))

    def follow(self) -> None:
        """Maps the file as long as it is now: another process may have had it grow."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(self.bytes):
            self._map(nbytes)

    def sync(self) -> None:
        """Waits until what was stored is on the disk."""
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


_HEAD = 4
_NUMBER, _DURABLE, _COUNT, _CHECKSUM = range(_HEAD)
_NONE = 0


class States:
    """A vector of int64 numbers on disk: the latest one that was committed, and room for the next.

    Two files take turns. The number of a state is stored last: that one store of 8 bytes is what
    commits it, and with it everything that was noted in the journal under that number.

    Args:
        folder: where the files lie.
        durable: a state is on the disk before ``commit`` returns.

    Raises:
        ValueError: a state is damaged, otherwise than a loss of power does it to a durable one.

    Cost of ``commit``: a copy of the numbers.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.recovery import States
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
        self._look()
        for turn in (0, 1):
            self._check(turn)

    @property
    def sequence(self) -> int:
        """Number of the latest state; 0 where there is none.

        As it stands in the files, and nowhere else: a commit that an exception interrupts has
        counted or not, and what comes next goes by the same number as who opens them.
        """
        even, odd = self._heads
        a, b = even[_NUMBER], odd[_NUMBER]
        return a if a > b else b

    @property
    def memory(self) -> tuple[Array, Array]:
        """The bytes of both files, uint8."""
        even, odd = self._files
        return even.bytes, odd.bytes

    def _look(self) -> None:
        # One number through a memoryview takes a third of what it takes through an array.
        even, odd = (numbers.data for numbers in self._numbers)
        self._heads = (even, odd)

    def _check(self, turn: int) -> None:
        numbers = self._numbers[turn]
        sequence, count = int(numbers[_NUMBER]), int(numbers[_COUNT])
        if sequence == _NONE:  # none yet, or one that was cut off before it counted
            return
        if sequence > 0 and sequence % 2 == turn and 0 <= count <= len(numbers) - _HEAD:
            durable, values = int(numbers[_DURABLE]), numbers[_HEAD : _HEAD + count]
            if numbers[_CHECKSUM] == _state_checksum(sequence, durable, values.data):
                return
            if durable:  # its number was on the disk before the rest of it
                numbers[_NUMBER] = _NONE
                return
        raise ValueError(f"{self._files[turn].path} is damaged: its checksum is another one")

    def latest(self) -> Array:
        """The numbers that were committed last, a copy."""
        sequence = self.sequence
        if not sequence:
            return np.zeros(0, np.int64)
        return self.look().copy()

    def look(self) -> Array:
        """The same as it lies there, good until the next but one is committed."""
        turn = self.sequence % 2
        stop = _HEAD + self._heads[turn][_COUNT]
        if stop > len(self._numbers[turn]):  # another process had its file grow
            self._files[turn].follow()
            self._numbers[turn] = self._files[turn].bytes.view(np.int64)
            self._look()
        return self._numbers[turn][_HEAD:stop]

    def first(self, known: int) -> tuple[int, int, int, int] | None:
        """Number and first three numbers of the latest state, of at least as many, for who knows
        state ``known`` and holds no lock; None where it was about to be overwritten.

        Both lie in one line of the cache, which another processor has to hand over.
        """
        head = self._heads[(known + 1) % 2]
        sequence = head[_NUMBER]
        if sequence <= known:
            head = self._heads[known % 2]
            sequence = head[_NUMBER]
        found = sequence, head[_HEAD], head[_HEAD + 1], head[_HEAD + 2]
        return found if head[_NUMBER] == sequence != _NONE else None

    def glance(self) -> tuple[int, Array] | None:
        """Number and numbers of the latest state, a copy, for who holds no lock; None where it was
        about to be overwritten."""
        sequence = self.sequence
        turn = sequence % 2
        stop = _HEAD + self._heads[turn][_COUNT]
        if stop > len(self._numbers[turn]):
            return None
        numbers = self._numbers[turn][_HEAD:stop].copy()
        return (sequence, numbers) if self._heads[turn][_NUMBER] == sequence else None

    def commit(self, numbers: Array, more: Sequence[int] = ()) -> int:
        """Has these int64 numbers be the state from now on, and ``more`` behind them.

        Returns:
            Its number.

        Raises:
            OSError: no room, or the disk failed; the state is the one of before.
        """
        sequence, own = self.sequence + 1, len(numbers)
        count, turn = own + len(more), sequence % 2
        stop = _HEAD + count
        head = self._heads[turn]
        if stop > len(head):
            file = self._files[turn]
            file.grow(8 * stop)
            self._numbers[turn] = file.bytes.view(np.int64)
            self._look()
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
