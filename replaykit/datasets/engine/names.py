"""Millions of short texts in one buffer: 8 bytes each over their own."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

__all__ = ["Names"]


class Names:
    """Texts in order, which take no object each.

    Example:
        >>> from replaykit.datasets.engine.names import Names
        >>> names = Names(["demo_0", "", "demo_12"])
        >>> len(names), names[2], list(names)
        (3, 'demo_12', ['demo_0', '', 'demo_12'])
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("q")
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Adds a text at the end."""
        self._text += name.encode("utf-8")
        self._ends.append(len(self._text))

    def cut(self, count: int) -> None:
        """Keeps the first ones only."""
        del self._ends[count:]
        del self._text[self._ends[-1] if self._ends else 0 :]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = self._ends[index - 1] if index else 0
        return self._text[begin : self._ends[index]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))
