"""Numbers that change all at once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from replaykit.recovery.files import MappedFile

__all__ = ["States"]

Array = np.ndarray[Any, Any]

_HEAD = 3
_SEQUENCE, _COUNT, _CHECKSUM = range(_HEAD)
_NONE = 0


class States:
    """A vector of int64 numbers on disk: the latest one that was committed, and room for the next.

    Two files take turns. The number of a state is stored last: that one store of 8 bytes is what
    commits it, and with it everything that was noted in the journal under that number.

    Args:
        folder: where the files lie.
        durable: a state is on the disk before ``commit`` returns.

    Cost of ``commit``: a copy of the numbers.

    Example:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from replaykit.recovery import States
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     States(Path(folder)).commit(np.array([3, 4]))
        ...     found = States(Path(folder))
        ...     found.sequence, found.latest().tolist()
        (1, [3, 4])
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self._durable = durable
        self._files = [MappedFile(folder / f"state-{turn}.bin", 8 * _HEAD) for turn in (0, 1)]
        self._numbers = [file.bytes.view(np.int64) for file in self._files]
        self.sequence = max(self._number_of(turn) for turn in (0, 1))
        """Number of the latest state; 0 where there is none."""

    def _number_of(self, turn: int) -> int:
        """The number of a file's state; 0 where it is none, or not a whole one."""
        numbers = self._numbers[turn]
        sequence, count = int(numbers[_SEQUENCE]), int(numbers[_COUNT])
        if sequence <= 0 or sequence % 2 != turn or not 0 <= count <= len(numbers) - _HEAD:
            return _NONE
        whole = numbers[_CHECKSUM] == _checksum(sequence, numbers[_HEAD : _HEAD + count])
        return sequence if whole else _NONE

    def latest(self) -> Array:
        """The numbers that were committed last, a copy."""
        if not self.sequence:
            return np.zeros(0, np.int64)
        numbers = self._numbers[self.sequence % 2]
        return numbers[_HEAD : _HEAD + int(numbers[_COUNT])].copy()

    def commit(self, numbers: Array) -> None:
        """Has these int64 numbers be the state from now on.

        Raises:
            OSError: no room; the state is the one of before.
        """
        sequence, count = self.sequence + 1, len(numbers)
        to = self._numbers[sequence % 2]
        if _HEAD + count > len(to):
            file = self._files[sequence % 2]
            file.grow(8 * (_HEAD + count))
            to = self._numbers[sequence % 2] = file.bytes.view(np.int64)
        to[_SEQUENCE] = _NONE
        to[_HEAD : _HEAD + count] = numbers
        to[_COUNT] = count
        to[_CHECKSUM] = _checksum(sequence, numbers)
        to[_SEQUENCE] = sequence
        if self._durable:
            self._files[sequence % 2].sync()
        self.sequence = sequence


def _checksum(sequence: int, numbers: Array) -> int:
    return zlib.crc32(numbers.data, sequence & 0xFFFFFFFF)
