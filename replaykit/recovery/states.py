"""Numbers that change all at once."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaykit.recovery.files import MappedFile

__all__ = ["States"]

Array = np.ndarray[Any, Any]

_HEAD = 4
_SEQUENCE, _DURABLE, _COUNT, _CHECKSUM = range(_HEAD)
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
        a, b = even[_SEQUENCE], odd[_SEQUENCE]
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
        sequence, count = int(numbers[_SEQUENCE]), int(numbers[_COUNT])
        if sequence == _NONE:  # none yet, or one that was cut off before it counted
            return
        if sequence > 0 and sequence % 2 == turn and 0 <= count <= len(numbers) - _HEAD:
            durable, values = int(numbers[_DURABLE]), numbers[_HEAD : _HEAD + count]
            if numbers[_CHECKSUM] == _checksum(sequence, durable, values.data):
                return
            if durable:  # its number was on the disk before the rest of it
                numbers[_SEQUENCE] = _NONE
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
        sequence = head[_SEQUENCE]
        if sequence <= known:
            head = self._heads[known % 2]
            sequence = head[_SEQUENCE]
        found = sequence, head[_HEAD], head[_HEAD + 1], head[_HEAD + 2]
        return found if head[_SEQUENCE] == sequence != _NONE else None

    def glance(self) -> tuple[int, Array] | None:
        """Number and numbers of the latest state, a copy, for who holds no lock; None where it was
        about to be overwritten."""
        sequence = self.sequence
        turn = sequence % 2
        stop = _HEAD + self._heads[turn][_COUNT]
        if stop > len(self._numbers[turn]):
            return None
        numbers = self._numbers[turn][_HEAD:stop].copy()
        return (sequence, numbers) if self._heads[turn][_SEQUENCE] == sequence else None

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
        head[_SEQUENCE] = _NONE
        head[_HEAD : _HEAD + own] = numbers.data
        for at, number in enumerate(more, _HEAD + own):
            head[at] = number
        head[_COUNT], head[_DURABLE] = count, self._durable
        head[_CHECKSUM] = _checksum(sequence, self._durable, head[_HEAD:stop])
        head[_SEQUENCE] = sequence
        if self._durable:
            try:
                self._files[turn].sync()
            except OSError:
                head[_SEQUENCE] = _NONE
                raise
        return sequence


_before = struct.Struct("<3q").pack


def _checksum(sequence: int, durable: int, numbers: memoryview) -> int:
    return zlib.crc32(numbers, zlib.crc32(_before(sequence, durable, len(numbers))))
