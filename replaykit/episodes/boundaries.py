"""Define ends of episodes, and find them: by flags, ids, cuts and missing rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS, end_flags, format_key

Array = np.ndarray[Any, Any]


class EndReason(IntEnum):
    """The reason why an episode has no further row.

    ``OPEN``: the last row of the episode is the newest row of its stream, so the episode may
    continue. ``TERMINATED``: the task ended, so a target must not bootstrap. ``TRUNCATED``: a time
    limit ended the episode, so a target may bootstrap. ``CUT``: the stream was cut without a flag,
    by another trajectory id, ``cut()``, a restore or a placed row.

    Example:
        >>> from replaykit.episodes import EndReason
        >>> EndReason(1).name, int(EndReason.CUT)
        ('TERMINATED', 3)
    """

    OPEN = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3


class Head(IntEnum):
    """The kind of beginning of the stored part of an episode.

    ``RESET``: the first stored row follows a reset of the environment. ``CUT``: the stream was
    recorded only from the middle of an episode on. ``EVICTED``: the first row of the episode was
    overwritten.

    Example:
        >>> from replaykit.episodes import Head
        >>> Head.RESET.name
        'RESET'
    """

    RESET = 1
    CUT = 2
    EVICTED = 3


CONTINUES: Final = 0
SWITCHED: Final = 3
"""A cut because the next row has another trajectory id. The next episode begins with a reset."""
SEVERED: Final = 4
"""A cut by ``cut()``, or because rows are missing. The next episode begins in its middle."""
RESTORED: Final = 5
"""A cut by a restart, or before a reset. The next episode begins with a reset."""


class Found(NamedTuple):
    """The positions of windows that were looked up by number; int64 ``[K]`` each.

    Attributes:
        lane: the lane of the window's episode.
        base: time of the first row that windows of the episode may use.
        rows: number of rows that windows of the episode may use, from ``base`` on.
        count: number of windows of the episode.
        rest: index of the window among the windows of its episode.
    """

    lane: Array
    base: Array
    rows: Array
    count: Array  # type: ignore[assignment]
    rest: Array


class EpisodeTable(NamedTuple):
    """All stored episodes, by lane and in the order of time; int64 ``[J]`` each.

    ``begin`` is the time at which the episode began, even if that row is no longer stored.
    ``first`` is the time of its first stored row. ``code`` is the code of its last row. ``head`` is
    a ``Head``.
    """

    lane: Array
    begin: Array
    first: Array
    last: Array
    code: Array
    head: Array


WINDOWS, EPISODES, ROWS = 0, 1, 2
"""Kinds of counts: windows, episodes that have a window, and stored rows of these episodes."""


@dataclass(frozen=True)
class Needs:
    """The rows around a row that the transforms of a buffer need.

    A row can be drawn only if these rows are stored.

    Attributes:
        past: number of rows before the row. A row with fewer earlier rows can be drawn if the reset
            of its episode is stored, because padding then completes its history.
        open_future: number of rows after the row while its episode is open.
        closed: True if the row's episode must have ended.
        intact: True if the row's episode must be stored from its reset on.
        future: number of rows after the row, even if its episode has ended.

    Example:
        >>> from replaykit.episodes import Needs
        >>> Needs(past=3) | Needs(past=1, closed=True)
        Needs(past=3, open_future=0, closed=True, intact=False, future=0)
    """

    past: int = 0
    open_future: int = 0
    closed: bool = False
    intact: bool = False
    future: int = 0

    def __or__(self, other: Needs) -> Needs:
        """Return the combined needs of both."""
        return Needs(
            max(self.past, other.past),
            max(self.open_future, other.open_future),
            self.closed or other.closed,
            self.intact or other.intact,
            max(self.future, other.future),
        )

    def __bool__(self) -> bool:
        return self._any

    @cached_property
    def _any(self) -> bool:
        numbers = self.past, self.open_future, self.future
        return max(numbers) > 0 or self.closed or self.intact

    @cached_property
    def single(self) -> CountLaw:
        """The `CountLaw` for draws of single rows with these needs."""
        return CountLaw.strict(1).needing(self)


NOTHING = Needs()


@dataclass(frozen=True)
class CountLaw:
    """The rule for the number of windows of an episode with n stored rows.

    The rule excludes the first ``past`` rows, unless the episode begins with its reset. It also
    excludes the last ``open_future`` rows if the episode is open. If m rows are left, the number of
    windows is:

        m >= least:     m + add, at least 0
        1 <= m < least: below

    Attributes:
        least: smallest m for the first formula.
        add: ``1 - T`` plus the number of rows by which windows of T rows may extend beyond both
            ends.
        below: number of windows of an episode with ``1 <= m < least``, 0 or 1.
        past: number of stored rows that a window needs before its first row.
        open_future: number of stored rows that a window needs after its last row while its episode
            is open.
        closed: True if only episodes that have ended have windows.
        intact: True if only episodes that are stored from their reset on have windows.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes import CountLaw
        >>> rows, yes, no = np.array([2, 3, 9]), np.array(True), np.array(False)
        >>> CountLaw.strict(3).counts(rows, reset=yes, is_open=no)[0].tolist()
        [0, 1, 7]
    """

    least: int
    add: int
    below: int = 0
    past: int = 0
    open_future: int = 0
    closed: bool = False
    intact: bool = False

    @classmethod
    def strict(cls, length: int) -> CountLaw:
        """Return the law for windows of ``length`` rows inside their episode."""
        return cls(length, 1 - length)

    def counts(self, stored: Array, reset: Array, is_open: Array) -> tuple[Array, Array, Array]:
        """Return the window counts of many episodes.

        Args:
            stored: number of stored rows of each episode, int64 ``[J]``.
            reset: whether the episodes begin with their reset, bool ``[J]``.
            is_open: whether the episodes are open, bool ``[J]``.

        Returns:
            For each episode, the count of windows, the count of rows that windows may use, and the
            count of excluded rows before them.
        """
        skip = np.where(reset, 0, self.past)
        rows = stored - skip
        if self.open_future:
            rows -= np.where(is_open, self.open_future, 0)
        windows = rows + self.add
        if self.least + self.add < 0:
            windows = np.maximum(windows, 0)
        count = np.where(rows >= self.least, windows, self.below)
        if self.below or self.least < 1:  # otherwise the count is already 0 if no row is left
            count[rows < 1] = 0
        if self.closed:
            count[is_open] = 0
        if self.intact:
            count[~reset] = 0
        return count, rows, skip

    def needing(self, needs: Needs) -> CountLaw:
        """Return the law that also satisfies the needs of transforms."""
        return replace(
            self,
            # A window needs these rows as if it were longer.
            least=self.least + needs.future,
            add=self.add - needs.future,
            below=0 if needs.future else self.below,
            past=needs.past,
            open_future=needs.open_future,
            closed=needs.closed,
            intact=needs.intact,
        )

    @cached_property
    def key(self) -> tuple[int, int, int, int, int, bool, bool]:
        """The law as the compiled core expects it."""
        numbers = self.least, self.add, self.below, self.past, self.open_future
        return *numbers, self.closed, self.intact


class LoggedPart:
    """A part of a storage whose changes a commit appends to a log, by number."""

    # Arrays of the numbers that changed since the last commit; None if all count as changed.
    _changed: list[Array] | None = None

    def _note(self, numbers: Array) -> None:
        if self._changed is not None:
            self._changed.append(numbers)

    @property
    def uncommitted(self) -> bool:
        """True if there were changes or loads since ``committed``."""
        return self._changed is None or bool(self._changed)

    @property
    def changed(self) -> Array | None:
        """The numbers that changed since ``committed``; None if all count as changed."""
        return None if self._changed is None else np.unique(np.concatenate(self._changed))

    def committed(self) -> None:
        """Record that all changes are committed."""
        self._changed = []


class CutMarks(LoggedPart):
    """The rows after which streams were cut, each with ``SEVERED`` or ``RESTORED``.

    A mark is the number ``row id * lanes + lane`` of its row. This number does not change when the
    row moves to another slot. There is one mark per restart and one per call of ``cut()``.

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

    def add(self, numbers: Array, code: int, lowest: int) -> None:
        """Add marks, and drop marks below ``lowest``, whose rows are not stored."""
        start = int(self.numbers.searchsorted(lowest))
        known, codes, fresh = self.numbers[start:], self.codes[start:], np.sort(numbers)
        at = known.searchsorted(fresh)
        new = np.append(known, -1)[at] != fresh
        self.numbers = np.insert(known, at[new], fresh[new])
        self.codes = np.insert(codes, at[new], code)
        if new.any():
            self._note(fresh[new])

    def remove(self, numbers: Array, code: int) -> bool:
        """Drop the rows' marks that have this code. Return whether a mark was dropped."""
        gone = np.isin(self.numbers, numbers) & (self.codes == code)
        if gone.any():
            self.numbers, self.codes = self.numbers[~gone], self.codes[~gone]
            self._changed = None
        return bool(gone.any())

    def among(self, low: int, high: int) -> tuple[Array, Array]:
        """Return the marks in ``[low, high)``, ascending, and their codes."""
        start, stop = np.searchsorted(self.numbers, [low, high])
        return self.numbers[start:stop], self.codes[start:stop]

    def clear(self) -> None:
        """Drop all marks."""
        if len(self.numbers):
            self.numbers, self.codes, self._changed = self.numbers[:0], self.codes[:0], None

    def packed(self, numbers: Array | None) -> Array:
        """Return those of the marks that exist, or all, and their codes, int64, for a commit."""
        at: Any = slice(None)
        if numbers is not None:
            at, until = (self.numbers.searchsorted(numbers, side) for side in ("left", "right"))
            at = at[at < until]
        return np.concatenate([self.numbers[at], self.codes[at]])

    def unpack(self, entries: Sequence[Array], *, whole: bool) -> None:
        """Add the marks of results of ``packed``, in this order; they are all committed then.

        Args:
            whole: remove all other marks.

        Raises:
            ValueError: the entries are not those of marks.
        """
        if whole:
            self.clear()
        halves = [entry.reshape(2, -1) for entry in entries]
        numbers, codes = np.concatenate([np.zeros((2, 0), np.int64), *halves], axis=1)
        if not np.isin(codes, (SEVERED, RESTORED)).all():
            raise ValueError(f"expected the codes {SEVERED} and {RESTORED}, got {np.unique(codes)}")
        for code in (SEVERED, RESTORED):
            self.add(np.unique(numbers[codes == code]), code, lowest=0)
        self.committed()


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

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return one column."""

    def parts(self, paths: Iterable[Path], first: int, until: int) -> dict[Path, torch.Tensor]:
        """Return the slots ``[first, until)`` of some columns, possibly copied to the CPU."""

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
        wanted = EPISODE_KEYS if self.ids is None else self.ids
        ids = [path for path in wanted if path in stored]
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
        # `terminated` shows whether an end was a termination, even if another flag marks the end.
        found = [path for path in end_flags(schema.leaves) if path[-1] == "terminated"]
        self.terminal = found[0] if found else None
        named = (*flags, *ids, init, self.terminal)
        self.paths: frozenset[Path] = frozenset(path for path in named if path is not None)


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(format_key(path) for path in paths)


def positions_from(ledger: RowNumbers, slot: int) -> Array | None:
    """Return the row ids of the stored rows in ring order, from a slot on.

    The result is None if the ledger has no table of row ids, because they are consecutive.
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
