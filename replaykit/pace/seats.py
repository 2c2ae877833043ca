"""Which of the processes around a table still live."""

from __future__ import annotations

import os
from pathlib import Path

from replaykit.recovery import OpenFile, is_held, let_go_in_children, open_to_lock

__all__ = ["Seat"]


class Seat(OpenFile):
    """A number that nobody else has as long as it lives; the kernel takes back that of a process
    that dies.

    A forked child has it not, and takes another one.

    Args:
        folder: where there is a file for each number.

    Raises:
        RuntimeError: all numbers are taken.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.pace.seats import Seat
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = Seat(Path(folder)), Seat(Path(folder))
        ...     numbers, taken = (one.number, other.number), not one.empty(1)
        ...     other.let_go()
        ...     free = one.empty(1)
        ...     one.let_go()
        >>> numbers, taken, free
        ((0, 1), True, True)
    """

    MOST = 1 << 12

    def __init__(self, folder: Path) -> None:
        import fcntl

        self._folder = folder
        for number in range(self.MOST):
            self._fd = open_to_lock(self._file(number), os.O_CREAT)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.let_go()
                continue
            self.number = number
            let_go_in_children(self)
            return
        raise RuntimeError(f"expected at most {self.MOST} processes that share a buffer")

    def empty(self, number: int) -> bool:
        """Whether nobody has that number."""
        try:
            return not is_held(self._file(number))
        except FileNotFoundError:
            return True

    def _file(self, number: int) -> Path:
        return self._folder / f"seat-{number}"
