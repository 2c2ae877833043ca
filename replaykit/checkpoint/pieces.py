"""Where the rows of saved tensors lie, and which of these places a later save names again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Piece", "Pieces", "files_to_leave", "runs"]

_MOST_FILES = 128
_SLACK_BYTES = 2**20


@dataclass(frozen=True)
class Piece:
    """Rows that lie one after the other: ``rows`` of them from ``first`` on, in a file."""

    first: int
    rows: int
    file: str
    offset: int


class Pieces:
    """Pieces of one tensor, rising by row; each row lies in at most one of them.

    Args:
        row_bytes: bytes of a row.
    """

    def __init__(self, row_bytes: int, pieces: Iterable[Piece] = ()) -> None:
        self.row_bytes = row_bytes
        self.pieces = sorted(pieces, key=lambda piece: piece.first)

    @classmethod
    def of_record(cls, pieces: Sequence[Sequence[Any]], row_bytes: int) -> Pieces:
        """Reads the pieces of a manifest, ``[file, offset, rows]`` in row order."""
        found, first = [], 0
        for file, offset, rows in pieces:
            found.append(Piece(first, rows, file, offset))
            first += rows
        return cls(row_bytes, found)

    def to_record(self) -> list[list[Any]]:
        """Returns them as a manifest has them; what lies one after the other is one piece."""
        joined: list[list[Any]] = []
        for piece in self.pieces:
            last = joined[-1] if joined else None
            if (
                last
                and last[0] == piece.file
                and last[1] + last[2] * self.row_bytes == (piece.offset)
            ):
                last[2] += piece.rows
            else:
                joined.append([piece.file, piece.offset, piece.rows])
        return joined

    def spans(self, chosen: Iterable[tuple[int, int]]) -> Pieces:
        """Returns the pieces of the rows ``first..stop`` of each span."""
        starts = [piece.first for piece in self.pieces]
        found = []
        for first, stop in chosen:
            number = bisect_right(starts, first) - 1
            while number < len(starts) and self.pieces[number].first < stop:
                piece = self.pieces[number]
                low, high = max(first, piece.first), min(stop, piece.first + piece.rows)
                offset = piece.offset + (low - piece.first) * self.row_bytes
                found.append(Piece(low, high - low, piece.file, offset))
                number += 1
        return Pieces(self.row_bytes, found)

    def nbytes(self) -> dict[str, int]:
        """Returns how many bytes of each file these rows are."""
        total: dict[str, int] = {}
        for piece in self.pieces:
            total[piece.file] = total.get(piece.file, 0) + piece.rows * self.row_bytes
        return total


def runs(chosen: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Returns the runs of True in bool ``[n]`` as ``(first, stop)``.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint.pieces import runs
        >>> runs(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


def files_to_leave(live: Mapping[str, int], sizes: Mapping[str, int]) -> set[str]:
    """Returns the files whose rows are better written anew.

    So that a checkpoint takes at most half as much again as its rows, and few files. Of the files
    written anew most is dead or they are the smallest, so that all saves together write at most a
    few times what has changed.

    Args:
        live: bytes of each file that would be named again.
        sizes: bytes of all files.

    Example:
        >>> from replaykit.checkpoint.pieces import files_to_leave
        >>> sizes = {"a": 100 << 20, "b": 100 << 20}
        >>> files_to_leave({"a": 99 << 20, "b": 10 << 20}, sizes)
        {'b'}
    """
    left = dict(live)
    size, used = sum(sizes[name] for name in left), sum(left.values())
    for name in sorted(live, key=lambda name: live[name] / max(sizes[name], 1)):
        if size <= 1.5 * used + _SLACK_BYTES:
            break
        size, used = size - sizes[name], used - left.pop(name)
    if len(left) > _MOST_FILES:
        smallest = sorted(left, key=lambda name: left[name])
        for name in smallest[: len(left) - _MOST_FILES // 2]:
            del left[name]
    return set(live) - set(left)
