"""The datasets of H5 files as columns: those that differ by their episode only are one column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.h5 import H5File, Leaf, open_h5
from replaykit.inspection.table import evenly

__all__ = ["H5Column", "OpenFiles", "found_columns"]

Array = npt.NDArray[Any]

_NUMBER: Final = re.compile(r"[0-9]+")


class OpenFiles:
    """H5 files of which one is open at a time; a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: tuple[Path, H5File] | None = None

    def get(self, path: Path) -> H5File:
        """Returns a file, open until another one is asked for.

        Raises:
            CorpusError: it is no H5 file, or damaged.
        """
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = (path, self._stack.enter_context(open_h5(path)))
        return self._open[1]

    def close(self) -> None:
        """Closes the file that is open."""
        self._open = None
        self._stack.close()
        self._stack = ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Piece:
    """A dataset, or some records of one: those of an episode."""

    path: Path
    dataset: str
    start: int
    rows: int


@dataclass
class H5Column:
    """The datasets of one kind, one after the other.

    Attributes:
        pattern: their path, with ``*`` for the numbers in which they differ.
        shape: of one record.
        dtype: of the values.
        problem: why the values are no numbers, if they are not.
        pieces: the datasets, in the order of files and names.
        cuts: the episodes, where they are not the pieces.
    """

    files: OpenFiles
    pattern: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    problem: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    cuts: list[Piece] | None = None
    differs: int = 0
    _starts: Array | None = None

    @property
    def rows(self) -> int:
        """How many records all of them have."""
        return sum(piece.rows for piece in self.pieces)

    def read(self, start: int, stop: int) -> Array:
        """Returns records as if all pieces were one."""
        if self._starts is None:
            self._starts = np.cumsum([0, *(piece.rows for piece in self.pieces)])
        found = []
        number = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            piece, base = self.pieces[number], int(self._starts[number])
            end = min(stop, base + piece.rows)
            if end > start:
                found.append(self._read(piece, start - base, end - base))
            start, number = end, number + 1
        return np.concatenate(found) if found else np.empty((0, *self.shape), self.dtype)

    def episode(self, number: int, most: int) -> Array:
        """Returns so many records of an episode, evenly, in at most eight reads."""
        parts = self.pieces if self.cuts is None else self.cuts
        if number >= len(parts):
            return np.empty((0, *self.shape), self.dtype)
        piece = parts[number]
        if piece.rows <= most:
            return self._read(piece, 0, piece.rows)
        length = max(1, most // 8)
        starts = evenly(np.arange(piece.rows - length + 1), max(1, most // length))
        return np.concatenate([self._read(piece, int(at), int(at) + length) for at in starts])

    def _read(self, piece: Piece, start: int, stop: int) -> Array:
        file = self.files.get(piece.path)
        block = file.read(piece.dataset, piece.start + start, piece.start + stop)
        return block.reshape(stop - start, *self.shape)


def found_columns(files: OpenFiles, paths: Sequence[Path]) -> dict[str, H5Column]:
    """Returns the datasets of files as columns, by their pattern.

    Numbers in a path are what datasets of one kind differ in if there are several such; those of
    the last part tell keys apart and stay. Cost: opens every dataset once, reads none.
    """
    found: dict[str, H5Column] = {}
    for path in paths:
        file = files.get(path)
        several = _several(file)
        listed = sorted(_leaves(file), key=lambda leaf: natural_key(leaf.path))
        for leaf in listed:
            _add(found, files, path, leaf, _pattern(leaf.path, several))
    return found


def _several(file: H5File) -> set[str]:
    """Returns the patterns of groups of which the file has more than one, or that look it."""
    times: dict[str, int] = {}
    for group in _groups(file):
        pattern = _NUMBER.sub("*", group)
        times[pattern] = times.get(pattern, 0) + 1
    return {pattern for pattern in times if "*" in pattern}


def _groups(file: H5File) -> Iterator[str]:
    for member in file.members():
        if not member.is_group:
            continue
        yield member.name
        if member.children:
            for child in file.members(member.name):
                if child.is_group:
                    yield f"{member.name}/{child.name}"


def _leaves(file: H5File) -> Iterator[Leaf]:
    # Group by group: what one walk may find is bounded, so that damaged files end it.
    for member in file.members():
        if not member.is_group:
            continue
        children = list(file.members(member.name))
        if children and all(child.is_group for child in children):
            for child in children:
                above = f"{member.name}/{child.name}"
                for leaf in file.leaves(above):
                    yield Leaf(f"{above}/{leaf.path}", leaf.shape, leaf.dtype, leaf.problem)
        else:
            for leaf in file.leaves(member.name):
                yield Leaf(f"{member.name}/{leaf.path}", leaf.shape, leaf.dtype, leaf.problem)
    groups = [member.name for member in file.members() if member.is_group]
    yield from file.leaves("", without=groups)


def _pattern(path: str, several: set[str]) -> str:
    parts = path.split("/")
    for depth in (2, 1):
        if len(parts) <= depth:
            continue
        head = _NUMBER.sub("*", "/".join(parts[:depth]))
        if head in several:
            # Above the episode nothing is a number of an episode.
            above = (
                parts[: depth - 1]
                if _NUMBER.sub("*", "/".join(parts[: depth - 1])) not in several
                else []
            )
            start = "/".join([*above, *head.split("/")[len(above) :]])
            return "/".join([start, *parts[depth:]])
    return path


def _add(
    found: dict[str, H5Column], files: OpenFiles, path: Path, leaf: Leaf, pattern: str
) -> None:
    rows = leaf.shape[0] if leaf.shape else 1
    shape, dtype = tuple(leaf.shape[1:]), np.dtype(leaf.dtype)
    column = found.get(pattern)
    if column is None:
        column = found[pattern] = H5Column(files, pattern, shape, dtype, leaf.problem)
    same = (column.shape, column.dtype) == (shape, dtype)
    if not same or (column.problem is None) != (leaf.problem is None):
        column.differs += 1
        return
    column.pieces.append(Piece(path, leaf.path, 0, rows))
