"""Find where episodes end: by flags, ids, cuts and missing rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from replaykit.episodes.episode_laws import SEVERED
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS, end_flags, format_key


class CutMarks:
    """The rows after which streams were cut, each with ``SEVERED`` or ``RESTORED``.

    A mark is the number ``row id * lanes + lane`` of its row. This number does not change when the
    row moves to another slot. There are few marks: one per restart and one per call of ``cut()``.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes import CutMarks
        >>> marks = CutMarks()
        >>> marks.add(np.array([7, 3]), 4, lowest=0)
        >>> marks.among(0, 5)[0].tolist()
        [3]
    """

    def __init__(self, numbers: Sequence[int] = (), codes: Sequence[int] = ()) -> None:
        """Start with marks of ascending ``numbers``, each with its code."""
        self.numbers = np.array(numbers, np.int64)
        self.codes = np.array(codes, np.uint8)

    def add(self, numbers: np.ndarray[Any, Any], code: int, lowest: int) -> None:
        """Add marks, and drop marks below ``lowest``, whose rows are not stored."""
        kept = self.numbers >= lowest
        fresh = numbers[~np.isin(numbers, self.numbers[kept])]
        numbers = np.concatenate([self.numbers[kept], fresh])
        codes = np.concatenate([self.codes[kept], np.full(len(fresh), code, np.uint8)])
        order = np.argsort(numbers, kind="stable")
        self.numbers, self.codes = numbers[order], codes[order]

    def remove(self, numbers: np.ndarray[Any, Any], code: int) -> bool:
        """Drop the rows' marks that have this code. Return whether a mark was dropped."""
        gone = np.isin(self.numbers, numbers) & (self.codes == code)
        self.numbers, self.codes = self.numbers[~gone], self.codes[~gone]
        return bool(gone.any())

    def among(self, low: int, high: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the marks in ``[low, high)``, ascending, and their codes."""
        start, stop = np.searchsorted(self.numbers, [low, high])
        return self.numbers[start:stop], self.codes[start:stop]

    def clear(self) -> None:
        """Drop all marks."""
        self.numbers, self.codes = self.numbers[:0], self.codes[:0]


class RowNumbers(Protocol):
    """The part of a ledger that an episode index reads."""

    next_position: int
    length: int
    cursor: int
    cleared: int
    changes: int
    by_stream: bool

    @property
    def in_order(self) -> bool:
        """True if the stored rows are in ring order."""

    @property
    def place_in_log(self) -> tuple[int, int]:
        """The number of the log of changes, and the next row id."""

    def written_since(self, seen: tuple[int, int] | None) -> tuple[bool, Array]:
        """Return whether all rows were removed since, and the slots written after that."""

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the row ids of the rows in slots, int64 of the same shape."""

    def write_order(self) -> torch.Tensor:
        """Return the slots of all stored rows in write order."""

    def position_table(self) -> torch.Tensor | None:
        """Return the row ids of the stored rows by slot; None if counters determine them."""


class RowColumns(Protocol):
    """Columns of rows by path."""

    @property
    def schema(self) -> Schema:
        """The schema of a row."""

    @property
    def slots(self) -> int:
        """The number of slots of every lane."""

    @property
    def ndim(self) -> int:
        """The number of dimensions of a column before those of a row."""

    @property
    def lanes(self) -> torch.Size:
        """The sizes of the dimensions between slot and row."""

    @property
    def order(self) -> Sequence[Path]:
        """The paths of all columns."""

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return one column."""

    def refresh_addresses(self) -> None:
        """Read the memory addresses of the columns again."""


class SavedEpisodes(Protocol):
    """Information on episodes that a storage cannot derive from its rows."""

    @property
    def marks(self) -> CutMarks:
        """The marks of cuts."""

    @property
    def has_begins(self) -> bool:
        """True if another process or a checkpoint has stored the beginnings of episodes."""

    def pop_first_begins(self) -> Mapping[str, Any] | None:
        """Return the saved beginnings of the first episodes of lanes, or None."""


class RowSource(Protocol):
    """The part of a storage that an episode index reads."""

    @property
    def lock(self) -> Any:
        """The lock of the rows."""

    @property
    def ledger(self) -> RowNumbers:
        """The ledger, with the stored rows and their slots."""

    @property
    def indexes(self) -> SavedEpisodes:
        """Information on episodes that does not follow from the rows."""

    @property
    def lane_key(self) -> Path | None:
        """The key whose values identify interleaved streams."""

    def require(self) -> RowColumns:
        """Return the columns. Raises RuntimeError before the first write."""


_IS_INIT: Path = ("is_init",)


@dataclass(frozen=True)
class BoundaryRule:
    """The flags and ids that end episodes.

    Attributes:
        flags: keys of flags. A row ends an episode if any of its flags is set. Keys that are not
            stored are ignored. None: ``done``, ``truncated`` and ``terminated`` under ``next``. If
            no such flag is stored under ``next``, the flags at the root are used (`end_flags`).
        ids: keys of ids. An episode ends before a row of the same stream with another id. None: the
            stored keys among ``("collector", "traj_ids")``, ``episode`` and ``seed``.
        strict: whether to raise an error for data without any of these columns.

    Example:
        >>> from replaykit.episodes import BoundaryRule
        >>> BoundaryRule(flags=(("next", "done"),)).flags
        (('next', 'done'),)
    """

    flags: tuple[Path, ...] | None = None
    ids: tuple[Path, ...] | None = None
    strict: bool = False

    def bind(self, schema: Schema) -> BoundColumns:
        """Return the columns of the rule that are stored.

        Raises:
            KeyError: a given key is not stored; or, with ``strict``, no column can end an episode.
        """
        stored = schema.leaves
        flags = end_flags(stored) if self.flags is None else self.flags
        flags = tuple(path for path in flags if path in stored)
        if self.flags and not flags:
            raise KeyError(
                f"expected one of {_names(self.flags)} as flag of ends, got the columns "
                f"{_names(tuple(stored))}"
            )
        ids = [path for path in _or_default(self.ids, EPISODE_KEYS) if path in stored]
        if self.ids and len(ids) < len(self.ids):
            missing = tuple(path for path in self.ids if path not in stored)
            raise KeyError(
                f"expected {_names(missing)} as ids of trajectories, got the columns "
                f"{_names(tuple(stored))}"
            )
        # If the caller gave no keys, refuse data without any column that ends episodes.
        silent = (self.flags is None or self.ids is None) and not (flags or ids)
        if self.strict and silent and not (self.flags or self.ids):
            raise KeyError(
                f"expected a column that ends episodes ({_names(_FLAGS)}) or identifies them "
                f"({_names(EPISODE_KEYS)}), got {_names(tuple(stored))}; name one with end_key= "
                "or traj_key=, or pass () for both"
            )
        init = _IS_INIT if _IS_INIT in stored else None
        return BoundColumns(flags, tuple(ids), init, schema)


_FLAGS: tuple[Path, ...] = tuple(("next", name) for name in DEFAULT_DONE_KEYS)


class BoundColumns:
    """The columns of one schema that a rule uses.

    Attributes:
        flags, ids: keys of the columns.
        init: the key ``is_init``, or None.
        paths: all keys. If one of these columns is edited, the index must be rebuilt.
    """

    def __init__(
        self, flags: tuple[Path, ...], ids: tuple[Path, ...], init: Path | None, schema: Schema
    ) -> None:
        self.flags, self.ids, self.init = flags, ids, init
        self.paths = frozenset((*flags, *ids, *(() if init is None else (init,))))
        # `terminated` shows whether an end was a termination, even if another flag marks the end.
        found = [path for path in end_flags(schema.leaves) if path[-1] == "terminated"]
        self.terminal = found[0] if found else None
        if self.terminal is not None:
            self.paths |= {self.terminal}


def _or_default(given: tuple[Path, ...] | None, default: tuple[Path, ...]) -> tuple[Path, ...]:
    return default if given is None else given


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(format_key(path) for path in paths)


Array = np.ndarray[Any, Any]


def positions_from(ledger: RowNumbers, slot: int) -> Array | None:
    """Return the row ids of the stored rows in ring order, from a slot on.

    The result is None if the row ids are consecutive.
    """
    table = ledger.position_table()
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
    *,
    by_stream: bool = False,
) -> tuple[Array, Array, Array]:
    """Find the stored rows after which a stream was cut or rows are missing.

    Args:
        marks: marks of cuts.
        positions: row ids in ring order, as ``positions_from`` returns them, or in write order if
            rows lie by stream.
        oldest: the first row id.
        length: number of rows.
        upcoming: row id of the next write. The next row continues the streams of the last row only
            if its row id is the next number.

    Returns:
        Three values: the indices of the rows in ring order, int64 ``[n]``, ascending; the codes of
            their ends, uint8 ``[n, lanes]``, 0 in lanes that continue; and whether the rows and the
            next row have consecutive row ids.

    Cost: O(marks) if row ids are consecutive, otherwise a pass over the row ids.
    """
    if positions is None:
        severed = np.zeros(0, np.int64)
        numbers, codes = marks.among(oldest * lanes, (oldest + length) * lanes)
        rows = numbers // lanes - oldest
    else:
        severed = np.nonzero((np.diff(positions, append=upcoming) != 1) & (not by_stream))[0]
        numbers, codes = marks.among(
            int(positions.min()) * lanes, (int(positions.max()) + 1) * lanes
        )
        marked, of = np.unique(numbers // lanes, return_inverse=True)
        rows = _indices_in(positions, marked)[of]
        stored = rows >= 0
        rows, numbers, codes = rows[stored], numbers[stored], codes[stored]
    more = np.unique(rows)
    at = np.searchsorted(severed, more)
    new = np.append(severed, -1)[at] != more
    after = np.insert(severed, at[new], more[new])
    ends = np.zeros((len(after), lanes), np.uint8)
    ends[np.searchsorted(after, severed)] = SEVERED
    np.maximum.at(ends, (np.searchsorted(after, rows), numbers % lanes), codes)
    return after, ends, severed


def _indices_in(values: Array, wanted: Array) -> Array:
    """Return the position in ``values`` of each wanted value; -1 if it is absent.

    ``values`` are distinct, and ``wanted`` are ascending.
    """
    found = np.full(len(wanted), -1, np.int64)
    if len(wanted):
        at = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
        place = np.nonzero(wanted[at] == values)[0]
        found[at[place]] = place
    return found
