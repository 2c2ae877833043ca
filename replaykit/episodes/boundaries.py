"""Find where episodes end: by flags, ids, cuts and missing rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from replaykit.episodes.episode_laws import GOES_ON, NOT_INIT, SEVERED, TERMINATED, TRUNCATED
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS, end_flags, format_key

__all__ = [
    "BoundColumns",
    "BoundaryRule",
    "CutMarks",
    "RowColumns",
    "RowNumbers",
    "RowSource",
    "SavedEpisodes",
    "between",
    "positions_from",
    "seams",
]


class CutMarks:
    """The rows that nothing follows, by their number, each with why: ``SEVERED`` or ``RESTORED``.

    The number of a row is ``position * lanes + lane``: it outlives every move of the row. Few of
    them: one a restart and one a ``cut()``.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes import CutMarks
        >>> marks = CutMarks()
        >>> marks.add(np.array([7, 3]), 4, lowest=0)
        >>> marks.among(0, 5)[0].tolist()
        [3]
    """

    def __init__(self, numbers: Sequence[int] = (), codes: Sequence[int] = ()) -> None:
        """Starts with those of rising ``numbers``, each with its code."""
        self.numbers = np.array(numbers, np.int64)
        self.codes = np.array(codes, np.uint8)

    def add(self, numbers: np.ndarray[Any, Any], code: int, lowest: int) -> None:
        """Adds rows, and forgets those below ``lowest``, which are stored no more."""
        kept = self.numbers >= lowest
        fresh = numbers[~np.isin(numbers, self.numbers[kept])]
        numbers = np.concatenate([self.numbers[kept], fresh])
        codes = np.concatenate([self.codes[kept], np.full(len(fresh), code, np.uint8)])
        order = np.argsort(numbers, kind="stable")
        self.numbers, self.codes = numbers[order], codes[order]

    def remove(self, numbers: np.ndarray[Any, Any], code: int) -> bool:
        """Forgets those of some rows that have a code; whether there were any."""
        gone = np.isin(self.numbers, numbers) & (self.codes == code)
        self.numbers, self.codes = self.numbers[~gone], self.codes[~gone]
        return bool(gone.any())

    def among(self, low: int, high: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Numbers in ``[low, high)``, rising, and their codes."""
        start, stop = np.searchsorted(self.numbers, [low, high])
        return self.numbers[start:stop], self.codes[start:stop]

    def clear(self) -> None:
        """Forgets all."""
        self.numbers, self.codes = self.numbers[:0], self.codes[:0]


class RowNumbers(Protocol):
    """Which rows are stored, and where: the part of a ledger that an index of episodes reads."""

    next_position: int
    length: int
    cursor: int
    cleared: int
    changes: int
    by_stream: bool

    @property
    def in_order(self) -> bool:
        """Return whether the stored rows lie in ring order."""

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions of the rows in slots, int64 of the same shape."""

    def write_order(self) -> torch.Tensor:
        """Return the slots of all stored rows in the order in which they were written."""

    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tables of positions and generations; None where they follow from the ring."""


class RowColumns(Protocol):
    """Columns of rows by path."""

    @property
    def schema(self) -> Schema:
        """Return the schema of a row."""

    @property
    def slots(self) -> int:
        """Return how many rows of every lane there is room for."""

    @property
    def ndim(self) -> int:
        """Return how many dimensions of a column come before those of a row."""

    @property
    def lanes(self) -> torch.Size:
        """Return the sizes of the dimensions between slot and row."""

    @property
    def order(self) -> Sequence[Path]:
        """Return the paths of all columns."""

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return one column."""

    def follow_memory(self) -> None:
        """Look again where the columns lie in memory."""


class SavedEpisodes(Protocol):
    """What a storage knows of episodes that does not follow from the rows it has."""

    @property
    def marks(self) -> CutMarks:
        """Return where streams were cut."""

    @property
    def is_told(self) -> bool:
        """Return whether another process or a checkpoint has noted how episodes began."""

    def take_heads(self) -> Mapping[str, Any] | None:
        """Return how the first episodes of lanes began, if that was saved."""

    def saved_streams(self) -> tuple[list[list[int]], bool]:
        """Return how the first episodes of streams began, and whether the list is complete."""


class RowSource(Protocol):
    """A storage, as an index of episodes sees it."""

    @property
    def ledger(self) -> RowNumbers:
        """Return which rows are stored, and where."""

    @property
    def indexes(self) -> SavedEpisodes:
        """Return what is known of episodes beyond the rows."""

    @property
    def lane_key(self) -> Path | None:
        """Return the key whose values tell interleaved streams apart."""

    def require(self) -> RowColumns:
        """Return the columns; RuntimeError before the first write."""


_IS_INIT: Path = ("is_init",)


@dataclass(frozen=True)
class BoundaryRule:
    """Which flags and which ids end an episode, and which column names the stream of a row.

    Attributes:
        flags: keys of which any one that is set ends an episode; those that are not stored are
            left out. None: ``done``, ``truncated`` and ``terminated`` under ``next``, or at the
            root where none of them is there (`end_flags`).
        ids: keys of which a change between rows that follow each other ends an episode. None:
            ``("collector", "traj_ids")``, ``episode`` and ``seed``, those that are stored.
        strict: refuse data without any such column.

    Example:
        >>> from replaykit.episodes import BoundaryRule
        >>> BoundaryRule(flags=(("next", "done"),)).flags
        (('next', 'done'),)
    """

    flags: tuple[Path, ...] | None = None
    ids: tuple[Path, ...] | None = None
    strict: bool = False

    def bind(self, schema: Schema) -> BoundColumns:
        """Returns the columns that there are of those it names.

        Raises:
            KeyError: a key that was asked for is not stored, or nothing that could end an episode.
        """
        stored = schema.leaves
        flags = end_flags(stored) if self.flags is None else self.flags
        flags = tuple(path for path in flags if path in stored)
        if self.flags and not flags:
            raise KeyError(
                f"expected one of {_names(self.flags)} to end episodes by, got the columns "
                f"{_names(tuple(stored))}"
            )
        ids = [path for path in _or_default(self.ids, EPISODE_KEYS) if path in stored]
        if self.ids and len(ids) < len(self.ids):
            missing = tuple(path for path in self.ids if path not in stored)
            raise KeyError(
                f"expected {_names(missing)} to tell trajectories apart, got the columns "
                f"{_names(tuple(stored))}"
            )
        # Whoever names one kind of column has decided; else data that tells nothing is refused.
        silent = (self.flags is None or self.ids is None) and not (flags or ids)
        if self.strict and silent and not (self.flags or self.ids):
            raise KeyError(
                f"expected a column that ends episodes ({_names(_FLAGS)}) or tells them apart "
                f"({_names(EPISODE_KEYS)}), got {_names(tuple(stored))}; name one with end_key= "
                "or traj_key=, or give both as ()"
            )
        init = _IS_INIT if _IS_INIT in stored else None
        return BoundColumns(flags, tuple(ids), init, schema)


_FLAGS: tuple[Path, ...] = tuple(("next", name) for name in DEFAULT_DONE_KEYS)


class BoundColumns:
    """The columns of one schema that a rule goes by.

    Attributes:
        flags, ids: their keys. ``init``: that of ``is_init``, or None.
        paths: all of them; an edit of any makes what was noted old.
    """

    def __init__(
        self, flags: tuple[Path, ...], ids: tuple[Path, ...], init: Path | None, schema: Schema
    ) -> None:
        self.flags, self.ids, self.init = flags, ids, init
        self.paths = frozenset((*flags, *ids, *(() if init is None else (init,))))
        # Whether an end was a termination is told by `terminated`, whatever it is found by.
        told = [path for path in end_flags(schema.leaves) if path[-1] == "terminated"]
        self.terminal = told[0] if told else None
        if self.terminal is not None:
            self.paths |= {self.terminal}

    def codes(
        self, leaves: Mapping[Path, torch.Tensor], ndim: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Reads rows ``[n, *lanes, ...]`` that follow each other.

        Returns:
            uint8 ``[n, lanes]`` without the ends that ids make, and the ids, uint8
            ``[n, lanes, bytes]``; None where there are none.
        """
        shape = _cells(leaves, self.paths, ndim)
        codes = np.zeros(shape, np.uint8)
        for path in self.flags:
            is_set = _is_set(leaves[path], ndim, shape)
            if self.terminal is not None or path[-1] == "truncated":
                codes[is_set] = TRUNCATED
            else:  # `done` alone is read as terminated
                codes[is_set & (codes == GOES_ON)] = TERMINATED
        if self.terminal is not None:
            codes[_is_set(leaves[self.terminal], ndim, shape) & (codes != GOES_ON)] = TERMINATED
        if self.init is not None:
            codes[~_is_set(leaves[self.init], ndim, shape)] |= NOT_INIT
        if not self.ids:
            return codes, None
        parts = []
        for path in self.ids:
            values = leaves[path].detach()
            own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
            size = values.shape[ndim:].numel() * values.dtype.itemsize
            parts.append(own.view(-1).view(torch.uint8).numpy().reshape(*shape, size))
        return codes, np.concatenate(parts, -1)


def _is_set(tensor: torch.Tensor, ndim: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Bool ``[n, lanes]``: where any number of a cell is not zero."""
    size = tensor.shape[ndim:].numel()
    found = (tensor.detach() != 0).cpu().numpy().reshape(*shape, size)
    return np.asarray(found[..., 0] if found.shape[-1] == 1 else found.any(-1))


def _cells(
    leaves: Mapping[Path, torch.Tensor], paths: frozenset[Path], ndim: int
) -> tuple[int, int]:
    leaf = leaves[next(iter(paths))] if paths else next(iter(leaves.values()))
    return leaf.shape[0], leaf.shape[1:ndim].numel()


def _or_default(given: tuple[Path, ...] | None, default: tuple[Path, ...]) -> tuple[Path, ...]:
    return default if given is None else given


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(format_key(path) for path in paths)


Array = np.ndarray[Any, Any]


def positions_from(ledger: RowNumbers, slot: int) -> Array | None:
    """Positions of the stored rows from a slot on, round the ring; None: each is one more than that
    of the row before."""
    table = ledger.tables()[0]
    if table is None or not ledger.length:
        return None
    return np.roll(table.numpy(), -slot)


def seams(
    marks: CutMarks,
    positions: Array | None,
    oldest: int,
    length: int,
    lanes: int,
    upcoming: int,
) -> tuple[Array, Array, bool]:
    """Finds after which of all stored rows their streams were cut, or other rows are missing.

    Args:
        marks: where somebody has cut.
        positions: of the rows in ring order, as ``positions_from`` gives them.
        oldest: the first of them.
        length: how many rows.
        upcoming: position of the next row that is written: it goes on from the last one only where
            it is one more.

    Returns:
        The numbers of the rows, int64 ``[n]``, rising; the codes of their ends uint8
        ``[n, lanes]``, 0 in lanes that go on; and whether the rows, and the next one, lie in
        the order of their positions without a gap.

    Cost: O(1) for rows in order beside the marks; else a pass over the positions.
    """
    if positions is None:
        severed = np.zeros(0, np.int64)
        numbers, codes = marks.among(oldest * lanes, (oldest + length) * lanes)
        rows = numbers // lanes - oldest
    else:
        severed = np.nonzero(np.diff(positions, append=upcoming) != 1)[0]
        numbers, codes = marks.among(
            int(positions.min()) * lanes, (int(positions.max()) + 1) * lanes
        )
        marked, of = np.unique(numbers // lanes, return_inverse=True)
        rows = _places(positions, marked)[of]
        stored = rows >= 0
        rows, numbers, codes = rows[stored], numbers[stored], codes[stored]
    more = np.unique(rows)
    at = np.searchsorted(severed, more)
    new = np.append(severed, -1)[at] != more
    after = np.insert(severed, at[new], more[new])
    ends = np.zeros((len(after), lanes), np.uint8)
    ends[np.searchsorted(after, severed)] = SEVERED
    np.maximum.at(ends, (np.searchsorted(after, rows), numbers % lanes), codes)
    return after, ends, not len(severed)


def _places(values: Array, wanted: Array) -> Array:
    """Where each of some rising values lies among others, all distinct; -1: nowhere."""
    found = np.full(len(wanted), -1, np.int64)
    if len(wanted):
        at = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
        place = np.nonzero(wanted[at] == values)[0]
        found[at[place]] = place
    return found


def between(severed: Array, lo: Any, hi: Any, time: Array, lane: Array) -> tuple[Array, Array]:
    """First and last row of what can be read without a gap around rows, as times.

    Args:
        severed: time and lane of the rows that nothing follows, int64 ``[m, 2]``.
        lo, hi: what is stored of the lanes of the rows.
    """
    first, last = np.full_like(time, 0) + lo, np.full_like(time, 0) + hi - 1
    if len(severed):
        reach = int(np.max(hi) - np.min(lo)) + 1
        keys = np.sort(severed[:, 1] * reach + severed[:, 0] - np.min(lo))
        own = lane * reach
        after = np.searchsorted(keys, own + time - np.min(lo))
        ends = np.append(keys, np.iinfo(np.int64).max)[after] - own
        last = np.where(ends < reach, np.minimum(last, ends + np.min(lo)), last)
        starts = np.insert(keys, 0, -1)[after] - own
        first = np.where(starts >= 0, np.maximum(first, starts + np.min(lo) + 1), first)
    return first, last
