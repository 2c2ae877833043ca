"""Describe the committed state of a recoverable storage and of its parts."""

from __future__ import annotations

import contextlib
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from replaykit.episodes import CutMarks
from replaykit.recovery.recovery_folder import RecoveryFolder, Tables
from replaykit.storages.ledger import Ledger

if TYPE_CHECKING:
    from replaykit.storages.episode_tags import EpisodeTags
    from replaykit.storages.recoverable import Recovery
    from replaykit.storages.tensors import LazyTensorStorage

Array = np.ndarray[Any, Any]


class CommittedPriorities(NamedTuple):
    """The counts of a sampler's priorities.

    Attributes:
        length: number of priorities.
        most: the largest priority ever set.
        dropped: number of updates that came too late.
    """

    length: int
    most: float
    dropped: int


class _Counter:
    """One number of a state, at a fixed place."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __get__(self, state: CommittedState, kind: Any = None) -> int:
        return int(state.view[self.at])

    def __set__(self, state: CommittedState, value: int) -> None:
        state.view[self.at] = value


class _List:
    """A list of numbers of a state, after the fixed numbers and all lists before it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __get__(self, state: CommittedState, kind: Any = None) -> Array:
        return state.numbers[state.starts[self.at] : state.starts[self.at + 1]]

    def __set__(self, state: CommittedState, values: Any) -> None:
        state.numbers[state.starts[self.at] : state.starts[self.at + 1]] = values


_FIXED, _PER_SAMPLER, _PER_STREAM = 16, 3, 4
_SHORT_LOG = 4096
"""A log may have this many numbers more than twice those of its first entry."""

TAGS, CUTS = range(2)
"""The numbers of the logs."""

_TABLES = Tables.TAGS, Tables.CUTS
"""The first of the two tables of each log."""

Place = tuple[int, int]
"""The number of a log and the length of its entries, 0 if it has none."""

Places = tuple[Place, Place]

_MOVING = [0, 1, 2, 9]
"""The counters that writes at the cursor change."""


class CommittedState:
    """One committed state of a storage and its parts, in int64 numbers.

    The parts are samplers and writers. The attributes read and change the numbers in place.

    Args:
        numbers: the numbers of a state, which this object does not copy. They may be followed by
            ``more`` numbers, which do not belong to it.

    Attributes:
        cursor, length, next_position, cleared, by_stream: the counters of the ledger.
        positions, generations: lengths of the ledger's tables; -1 for a table whose numbers follow
            from the counters.
        oldest: row id of the oldest row, if ``has_episodes``. It is -1, with an empty ``begin``, if
            the begins are unknown.
        counts: the count of each writer, in the order in which the writers were added.
        begin, head: for the first episode of each lane, the place and the kind of its beginning.
        marks, codes: the cuts of streams in older folders; otherwise ``logs`` has their place.
        streams: four numbers for each interleaved stream.
        logs: the places of tags and of cuts, see ``write_log``. Older folders have only the place
            of tags. Without tags and cuts, it is empty.
        more: count of the numbers that follow those of this object.

    Raises:
        ValueError: no state has these numbers.
    """

    cursor, length, next_position, cleared, by_stream = map(_Counter, range(5))
    positions, generations = map(_Counter, (5, 6))
    has_episodes, oldest, more = map(_Counter, (8, 9, 14))
    counts, begin, head, marks, codes, streams, logs = map(_List, range(1, 8))

    def __init__(self, numbers: Array) -> None:
        if len(numbers) < _FIXED:
            raise ValueError(f"expected at least {_FIXED} numbers, got {len(numbers)}")
        # A memoryview reads and writes single numbers in a third of the time of an array.
        self.view: Any = numbers.data
        self.floats: Any = numbers.view(np.float64).data
        marks, heads, streams, samplers, writers, more, logs = (
            self.view[at] for at in (7, 10, 11, 12, 13, 14, 15)
        )
        sizes = (
            samplers * _PER_SAMPLER,
            writers,
            heads,
            heads,
            marks,
            marks,
            streams * _PER_STREAM,
            logs,
        )
        self.starts = list(accumulate(sizes, initial=_FIXED))
        own = self.starts[-1]
        if min(*sizes, more) < 0 or len(numbers) not in (own, own + more):
            raise ValueError(f"expected {own} numbers and {more} more, got {len(numbers)}")
        self.numbers = numbers[:own]

    @classmethod
    def empty(cls) -> CommittedState:
        """Return the state of an empty storage without parts."""
        return cls.of(Ledger(1), None, priorities=[], counts=[])

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        known: dict[str, Any] | None,
        *,
        priorities: list[CommittedPriorities],
        counts: list[int],
        places: Places = ((0, 0), (0, 0)),
        more: int = 0,
    ) -> CommittedState:
        """Return the state of a ledger and of the parts.

        Args:
            known: the begins of the first episodes, as ``EpisodeIndex.state``; None if unknown.
            places: the places of tags and of cuts.
        """
        logs = [*places[0], *places[1]] if any(map(any, places)) else []
        heads = known or {"oldest": 0, "begin": (), "head": ()}
        begin = np.asarray(heads["begin"], np.int64)
        streams = np.asarray(heads.get("streams", ()), np.int64).reshape(-1)
        fixed = [
            ledger.cursor,
            ledger.length,
            ledger.next_position,
            ledger.cleared,
            ledger.by_stream,
            -1 if ledger.in_order else ledger.length,
            ledger.generation_count,
            0,
            known is not None,
            heads["oldest"],
            len(begin),
            len(streams) // _PER_STREAM,
            len(priorities),
            len(counts),
            more,
            len(logs),
            *(0 for _ in range(_PER_SAMPLER * len(priorities) + len(counts))),
        ]
        lists = fixed, begin, heads["head"], streams, logs
        state = cls(np.concatenate([np.asarray(part, np.int64) for part in lists]))
        state.set_parts(priorities, counts)
        return state

    @property
    def priorities(self) -> list[CommittedPriorities]:
        """The counts of each sampler's priorities, in the order in which samplers were added."""
        view, floats = self.view, self.floats
        return [
            CommittedPriorities(view[at], floats[at + 1], view[at + 2])
            for at in range(_FIXED, self.starts[1], _PER_SAMPLER)
        ]

    def set_parts(self, priorities: list[CommittedPriorities], counts: list[int]) -> bool:
        """Set the numbers of all parts; return False if the number of parts has changed."""
        if (len(priorities), len(counts)) != (self.view[12], self.view[13]):
            return False
        at, view = _FIXED, self.view
        for length, most, dropped in priorities:
            view[at], self.floats[at + 1], view[at + 2] = length, most, dropped
            at += _PER_SAMPLER
        for place, count in enumerate(counts, at):
            view[place] = count
        return True

    @property
    def places(self) -> Places:
        """The places of tags and of cuts."""
        tags, tags_stop, cuts, cuts_stop = [*self.logs.tolist(), 0, 0, 0, 0][:4]
        return (tags, tags_stop), (cuts, cuts_stop)

    def set_places(self, places: Places) -> bool:
        """Set the places of tags and of cuts; return False if the state has none."""
        if len(self.logs) < 4:
            return False
        self.logs = [*places[0], *places[1]]
        return True

    def heads(self) -> dict[str, Any] | None:
        """Return the begins of the first episodes, as ``EpisodeIndex.state``; None if unknown."""
        if not self.has_episodes:
            return None
        return {
            "oldest": self.oldest,
            "begin": self.begin.tolist(),
            "head": self.head.tolist(),
            "streams": self.streams.reshape(-1, _PER_STREAM).tolist(),
        }

    def advance(
        self,
        ledger: Ledger,
        first: tuple[int, Any, Any] | None,
    ) -> bool:
        """Become the state after a write at the cursor, and return whether that was possible.

        Every ``extend`` calls this. If more has changed than a write at the cursor changes, or if
        there are interleaved streams, return False and change nothing.

        Args:
            first: the result of ``EpisodeIndexes.first_known``.
        """
        view, starts = self.view, self.starts
        lanes = starts[3] - starts[2]
        if (
            first is None
            or view[3:6].tolist() != [ledger.cleared, ledger.by_stream, -1]
            or not ledger.in_order
            or view[6] != ledger.generation_count
            or view[8:12].tolist() != [1, view[9], lanes, 0]
            or len(first[1]) != lanes
        ):
            return False
        view[0], view[1], view[2] = ledger.cursor, ledger.length, ledger.next_position
        view[9] = first[0]
        if lanes == 1:
            (view[starts[2]],), (view[starts[3]],) = first[1:]
        else:
            self.begin, self.head = first[1:]
        return True

    def only_moved(self, before: CommittedState) -> bool:
        """Return whether only writes at the cursor came after an earlier state."""
        if self.starts != before.starts or self.positions >= 0:
            return False
        fixed, known = (state.view[:_FIXED].tolist() for state in (self, before))
        for at in _MOVING:
            fixed[at] = known[at]
        cuts = slice(self.starts[4], self.starts[6])
        same = np.array_equal(self.numbers[cuts], before.numbers[cuts])
        return fixed == known and same and np.array_equal(self.logs, before.logs)


def write_log(
    home: RecoveryFolder, which: int, part: EpisodeTags | CutMarks, place: Place
) -> Place:
    """Append the changes of tags or cuts to a log; return the place of all of them, for a state.

    Two tables take turns to hold the logs. The first entry of a log has the whole part. Once the
    other entries need as much room, the whole part goes into a new log, and the tables of both
    latest states are unchanged.

    Args:
        which: ``TAGS`` or ``CUTS``.
        place: the committed place.

    Cost: O(K log J) on average for K changed tags or cuts of J.
    """
    number, used = place
    changed = part.changed if used else None
    entry = part.packed(changed)
    if changed is not None:
        whole = int(home.table(_TABLES[which] + number % 2, 1)[0])
        if used + len(entry) > 2 * whole + _SHORT_LOG:
            changed, entry = None, part.packed(None)
    if not len(entry):  # other processes know the log of this number
        return number, 0 if changed is None else used
    if changed is None:
        number, used = number + 1, 0
    stop = used + 1 + len(entry)
    cells = home.table(_TABLES[which] + number % 2, stop)
    cells[used], cells[used + 1 : stop] = len(entry), entry
    return number, stop


def read_log(
    home: RecoveryFolder,
    which: int,
    part: EpisodeTags | CutMarks,
    state: CommittedState,
    known: CommittedState | None,
) -> None:
    """Set the tags or cuts of a state.

    Args:
        which: ``TAGS`` or ``CUTS``.
        known: the state that the part has followed; None if there is none.

    Raises:
        ValueError: the table holds other numbers.
    """
    (number, stop), at, entries = state.places[which], 0, []
    if known is not None:
        there, until = known.places[which]
        if (there, until) == (number, stop):
            return
        at = until if there == number and until < stop else 0
    table, whole = _TABLES[which] + number % 2, not at
    cells = home.table(table, stop) if stop else np.zeros(0, np.int64)
    try:
        while at < stop:
            first, until = at + 1, at + 1 + int(cells[at])
            if not first < until <= stop:
                raise ValueError(f"expected at most {stop - first} numbers, got {until - first}")
            entries.append(cells[first:until])
            at = until
        part.unpack(entries, whole=whole)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        name = f"table {table} of {home.folder}"
        raise ValueError(f"{name} holds no {type(part).__name__}: {error}") from None


def read_cuts(
    home: RecoveryFolder, state: CommittedState, known: CommittedState | None, cuts: CutMarks
) -> CutMarks:
    """Return the cuts of a state.

    Args:
        known: the state that ``cuts`` have followed; None if there is none.

    Raises:
        ValueError: the table holds no cuts.
    """
    if known is None:
        cuts = CutMarks(state.marks.tolist(), state.codes.tolist())
    if not len(state.marks):  # else the next commit writes them to a log
        read_log(home, CUTS, cuts, state, known)
    return cuts


class PriorityKeeper(Protocol):
    """A sampler whose priorities are recovered."""

    owner: Any

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Return whether the sampler still follows the storage."""

    def use_column(self, column: PriorityColumn) -> None:
        """Write priorities into a column from now on, when they are set."""

    def settle_priorities(self, *, written: bool = True) -> tuple[int, float, int]:
        """Give the default to new rows, and write priorities that the column lacks.

        Args:
            written: whether rows may have been written since the last call.

        Returns:
            The numbers of ``CommittedPriorities``.

        Raises:
            OSError: there is no room for the priorities.
        """

    def follow_priorities(
        self, elements: Array | None, values: Array, counts: CommittedPriorities
    ) -> None:
        """Load priorities of an earlier sampler, or the changes of another process.

        The column has these priorities already.

        Args:
            elements: the elements whose priorities were set, int64 ``[K]``; None for all.
            values: their raw priorities, float64 ``[K]``.
        """


class PriorityColumn:
    """The committed priorities of a sampler, in a table of a recovery folder.

    The sampler writes each priority into the table when it is set, and the old value is journaled
    first. So a commit copies no priorities, unless an earlier write to the table was not possible.

    Attributes:
        sampler: a weak reference to the sampler.
        number: number of the table.
        counts: the counts at the latest commit, or at the latest state that was followed.
        written: whether priorities were written since then.
        whole: whether the next commit writes all priorities.
        direct: sets elements in the core, as long as no file has to grow; or None.
    """

    def __init__(self, sampler: PriorityKeeper, recovery: Recovery) -> None:
        self.sampler, self._recovery = weakref.ref(sampler), weakref.ref(recovery)
        self.number, self.counts = -1, CommittedPriorities(0, 1.0, 0)
        self.written, self.whole = False, True
        self.direct: Any = None

    def __call__(self) -> Any:
        """Return the sampler; None if it has been deleted."""
        return self.sampler()

    def set(self, at: Any, values: Any) -> None:
        """Write priorities that were set.

        Args:
            at: the elements: a range, or int64 ``[K]`` as an array or as a tensor of any device.
            values: a number for all elements, or a tensor ``[K]``.
        """
        if self.whole:
            return
        self.written = True
        if type(at) is not range:
            at = at if type(at) is np.ndarray else at.cpu().numpy()
            if not isinstance(values, torch.Tensor):
                values = np.full(len(at), values)
            else:
                values = values.contiguous().cpu().numpy()
            if self.direct is not None and self.direct.set(at, values):
                return
        self.whole = True
        with contextlib.suppress(OSError):  # the commit tries again, and raises the error
            self.write(at, values)

    def write(self, at: Array | range, values: Any) -> None:
        """Write priorities in any case; if ``at`` has all elements, the column is whole again.

        Args:
            values: a number if ``at`` is a range, or an array ``[K]``.

        Raises:
            OSError: there is no room to journal the old priorities. None has changed then.
        """
        recovery = self._recovery()
        if recovery is not None and recovery.writable:
            home, sharing = recovery.home, recovery.sharing
            home.set(self.number, values, at)
            logging = () if sharing is None else sharing.log_priorities(self.number, at)
            self.direct = home.column(self.number, *logging)
            self.written, self.whole = True, False

    @property
    def pending(self) -> bool:
        """True if the sampler has priorities that are not committed."""
        sampler = self.sampler()
        if sampler is not None and sampler.settle_priorities() != self.counts:
            return True
        return self.whole or self.written

    def follow(self, found: tuple[Array | None, Array], counts: CommittedPriorities) -> None:
        """Load priorities of the table; see ``PriorityKeeper.follow_priorities``."""
        sampler = self.sampler()
        if sampler is not None:
            sampler.follow_priorities(*found, counts)
        self.counts, self.written, self.whole = counts, False, False


class RecoverableWriter(Protocol):
    """A writer whose count is recovered."""

    _write_count: int

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Return whether the writer still writes to the storage."""


Parts = list[Any]
"""References to parts, which return None after the deletion of a part."""


def index_of_part(parts: Parts, part: Any) -> int:
    """Return the index of a part, or of the part that it replaces.

    A part replaces another part of the same buffer. If the list has neither of them, return the
    length of the list.
    """
    for place, known in enumerate(parts):
        other = known()
        if other is part or (
            other is not None and part.owner is not None and other.owner is part.owner
        ):
            return place
    return len(parts)


def insert_part(parts: Parts, place: int, reference: Any) -> None:
    """Insert a reference to a part at ``place``, the result of ``index_of_part``.

    The part precedes the part that it replaces. The replacement may fail, so both stay in the list
    until ``still_there`` finds the part in use.
    """
    others = [known for known in parts[place:] if known() is not reference()]
    parts[place:] = [reference, *others]


def set_alone(parts: Parts, reference: Any) -> None:
    """Make a part the only part of the list.

    Raises:
        RuntimeError: the list has a part of another buffer.
    """
    other, part = parts[0]() if parts else None, reference()
    if other is not None and other is not part and other.owner is not part.owner:
        raise RuntimeError(
            f"expected one buffer over a storage that processes share, got another one with a "
            f"{type(part).__name__}"
        )
    parts[:] = [reference]


def still_there(parts: Parts, storage: LazyTensorStorage) -> Parts:
    """Return the parts that still exist and still use the storage."""
    return [known for known in parts if (part := known()) is not None and part.works_on(storage)]
