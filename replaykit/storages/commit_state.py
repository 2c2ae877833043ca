"""Describe the committed state of a recoverable storage and of its parts."""

from __future__ import annotations

import struct
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from replaykit.storages.ledger import Ledger

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "Changed",
    "CommittedPriorities",
    "CommittedState",
    "PriorityKeeper",
    "RecoverableWriter",
    "index_of_part",
    "insert_part",
    "set_alone",
    "still_there",
]

Array = np.ndarray[Any, Any]

_FIXED = 16
_OLDEST = 9
_STREAM = 4

_NO_NUMBERS = np.zeros(0, np.int64)
_NO_STREAMS = np.zeros((0, _STREAM), np.int64)


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


@dataclass
class CommittedState:
    """One committed state of a storage and its parts.

    The parts are samplers and writers. ``moved_on`` and ``follow`` change the state in place.

    Attributes:
        cursor, length, next_position, cleared, by_stream: the counters of the ledger.
        positions, generations: lengths of the ledger's tables; -1 for a table whose numbers follow
            from the counters.
        marks, codes: the cuts of streams.
        oldest: row id of the oldest row. It is None without episodes. It is -1, with an empty
            ``begin``, if the begins are unknown.
        begin, head: for the first episode of each lane, the place and the kind of its beginning.
        streams: four numbers for each interleaved stream.
        priorities: the counts of each sampler's priorities, in the order in which the samplers were
            added.
        counts: the count of each writer, in the order in which the writers were added.
        more: count of the numbers that follow those of this object.
    """

    cursor: int
    length: int
    next_position: int
    cleared: int
    by_stream: bool
    positions: int
    generations: int
    marks: Array
    codes: Array
    oldest: int | None = None
    begin: Array = field(default_factory=lambda: _NO_NUMBERS)
    head: Array = field(default_factory=lambda: _NO_NUMBERS)
    streams: Array = field(default_factory=lambda: _NO_STREAMS)
    priorities: list[CommittedPriorities] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    more: int = 0
    _encoded: Array = field(default_factory=lambda: _NO_NUMBERS)

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        episodes: dict[str, Any] | None,
        *,
        positions: int,
        generations: int,
        priorities: list[CommittedPriorities],
        counts: list[int],
        more: int = 0,
    ) -> CommittedState:
        """Return the state of a ledger and of episode indexes (``EpisodeIndexes.known``)."""
        heads = None if episodes is None else episodes["heads"]
        known: dict[str, Any] = {}
        if heads is not None:
            known = {
                "oldest": heads["oldest"],
                "begin": np.asarray(heads["begin"], np.int64),
                "head": np.asarray(heads["head"], np.int64),
            }
            if "streams" in heads:
                streams = np.asarray(heads["streams"], np.int64)
                known["streams"] = streams.reshape(-1, _STREAM)
        return cls(
            ledger.cursor,
            ledger.length,
            ledger.next_position,
            ledger.cleared,
            ledger.by_stream,
            positions,
            generations,
            _NO_NUMBERS if episodes is None else episodes["marks"],
            _NO_NUMBERS if episodes is None else episodes["codes"],
            priorities=priorities,
            counts=counts,
            more=more,
            **known,
        )

    def episodes(self) -> dict[str, Any]:
        """Return the state of episodes, as ``EpisodeIndexes.state`` does."""
        heads = None
        if self.oldest is not None:
            heads = {
                "oldest": self.oldest,
                "begin": np.asarray(self.begin, np.int64).tolist(),
                "head": np.asarray(self.head, np.int64).tolist(),
                "streams": self.streams.tolist(),
            }
        marks, codes = self.marks.tolist(), self.codes.tolist()
        return {"marks": marks, "codes": codes, "heads": heads, "root_flags": True}

    def encode(self) -> Array:
        """Return the state as int64 numbers, in an array that this object keeps."""
        tables = [n for t in self.priorities for n in (t.length, _bits(t.most), t.dropped)]
        fixed = (
            self.cursor,
            self.length,
            self.next_position,
            self.cleared,
            self.by_stream,
            self.positions,
            self.generations,
            len(self.marks),
            self.oldest is not None,
            0 if self.oldest is None else self.oldest,
            len(self.begin),
            len(self.streams),
            len(self.priorities),
            len(self.counts),
            self.more,
            0,
        )
        numbers = np.array([*fixed, *tables, *self.counts], np.int64)
        lists = [self.begin, self.head]
        if len(self.marks):
            lists += self.marks, self.codes.astype(np.int64)
        if len(self.streams):
            lists.append(self.streams.reshape(-1))
        self._encoded = np.concatenate([numbers, *lists])
        return self._encoded

    def moved_on(
        self,
        ledger: Ledger,
        first: tuple[int, Any, Any] | None,
        priorities: list[CommittedPriorities],
        counts: list[int],
    ) -> Array | None:
        """Become the state after a write at the cursor, and return its numbers.

        Every ``extend`` calls this, so it encodes only the numbers that have changed.

        Args:
            first: the result of ``EpisodeIndexes.first_known``.

        Returns:
            None if more has changed than a write at the cursor changes, or if there are interleaved
            streams. This object has not changed then.
        """
        numbers, lanes = self._encoded, len(self.begin)
        if (
            first is None
            or not len(numbers)
            or self.cleared != ledger.cleared
            or self.by_stream != ledger.by_stream
            or not self.positions == self.generations == -1
            or not (ledger.in_order and ledger.counted)
            or self.oldest is None
            or len(first[1]) != lanes
            or len(priorities) != len(self.priorities)
            or len(counts) != len(self.counts)
            or len(self.streams)
        ):
            return None
        self.cursor, self.length = ledger.cursor, ledger.length
        self.next_position = ledger.next_position
        self.oldest = first[0]
        self.priorities, self.counts = priorities, counts
        view = numbers.data
        view[0], view[1], view[2] = self.cursor, self.length, self.next_position
        view[_OLDEST] = self.oldest
        at = _FIXED
        for table in priorities:
            view[at], view[at + 1], view[at + 2] = table.length, _bits(table.most), table.dropped
            at += 3
        for count in counts:
            view[at] = count
            at += 1
        if lanes == 1:
            (view[at],), (view[at + 1],) = first[1:]
        else:
            numbers[at : at + lanes], numbers[at + lanes : at + 2 * lanes] = first[1:]
        if self.begin.base is not numbers:
            self.begin, self.head = numbers[at : at + lanes], numbers[at + lanes : at + 2 * lanes]
        return numbers

    def follow(self, numbers: Array) -> bool:
        """Become the state of these numbers, and return whether that was possible.

        If more has changed than a write at the cursor changes, return False and change nothing.
        """
        mine = self._encoded
        if len(numbers) != len(mine) or not self.positions == self.generations == -1:
            return False
        fixed = numbers[:_FIXED].tolist()
        if fixed[3:_OLDEST] != mine[3:_OLDEST].tolist():
            return False
        if fixed[_OLDEST + 1 :] != mine[_OLDEST + 1 : _FIXED].tolist():
            return False
        lanes, tables, counts = len(self.begin), len(self.priorities), len(self.counts)
        heads = _FIXED + 3 * tables + counts
        marks = heads + 2 * lanes
        streams = marks + 2 * len(self.marks)
        if streams > marks and not np.array_equal(numbers[marks:streams], mine[marks:streams]):
            return False
        mine[:] = numbers
        self.cursor, self.length, self.next_position = fixed[:3]
        if self.oldest is not None:
            self.oldest = fixed[_OLDEST]
        if tables:
            rows = numbers[_FIXED : _FIXED + 3 * tables].reshape(-1, 3).tolist()
            self.priorities = [CommittedPriorities(n, _float(most), late) for n, most, late in rows]
        self.counts = numbers[heads - counts : heads].tolist()
        self.begin, self.head = mine[heads : heads + lanes], mine[heads + lanes : marks]
        self.streams = mine[streams:].reshape(-1, _STREAM)
        return True

    @classmethod
    def of_numbers(cls, numbers: Array) -> CommittedState:
        """Decode a copy of numbers with ``more``; none give the state of an empty storage."""
        if not len(numbers):
            return cls(0, 0, 0, 0, False, -1, -1, _NO_NUMBERS, _NO_NUMBERS)
        found = cls.decode(numbers.copy())
        found._encoded = numbers[: len(numbers) - found.more].copy()
        return found

    @classmethod
    def decode(cls, numbers: Array) -> CommittedState:
        """Decode the result of ``encode``, and skip the ``more`` numbers that follow.

        Raises:
            ValueError: ``encode`` cannot return the numbers.
        """
        if len(numbers) < _FIXED:
            raise ValueError(f"expected at least {_FIXED} numbers, got {len(numbers)}")
        fixed = numbers[:_FIXED].tolist()
        marks, heads, streams, tables, counts, more = (fixed[at] for at in (7, 10, 11, 12, 13, 14))
        sizes = [tables * 3, counts, heads, heads, marks, marks, streams * _STREAM, more]
        if min(sizes) < 0 or sum(sizes) != len(numbers) - _FIXED:
            raise ValueError(f"expected {sizes} numbers, got {len(numbers) - _FIXED}")
        parts = np.split(numbers[_FIXED:], np.cumsum(sizes)[:-1])
        rows = parts[0].reshape(-1, 3).tolist()
        return cls(
            cursor=fixed[0],
            length=fixed[1],
            next_position=fixed[2],
            cleared=fixed[3],
            by_stream=bool(fixed[4]),
            positions=fixed[5],
            generations=fixed[6],
            marks=parts[4],
            codes=parts[5],
            oldest=fixed[9] if fixed[8] else None,
            begin=parts[2],
            head=parts[3],
            streams=parts[6].reshape(-1, _STREAM),
            priorities=[
                CommittedPriorities(length, _float(most), late) for length, most, late in rows
            ],
            counts=parts[1].tolist(),
            more=more,
        )


_double, _whole = struct.Struct("=d"), struct.Struct("=q")


def _bits(number: float) -> int:
    return int(_whole.unpack(_double.pack(number))[0])


def _float(bits: int) -> float:
    return float(_double.unpack(_whole.pack(bits))[0])


class Changed(NamedTuple):
    """The changes of a sampler's priorities since the last ``priorities_changed``.

    Attributes:
        elements: the elements whose priorities were set, int64 ``[K]`` without repeats; None for
            all.
        values: the raw priorities of these elements, float64 ``[K]``, or ``[length]`` for all
            elements.
        length: number of priorities.
        most: the largest priority ever set.
        dropped: number of updates that came too late.
    """

    elements: Array | None
    values: Array
    length: int
    most: float
    dropped: int


class PriorityKeeper(Protocol):
    """A sampler whose priorities are recovered."""

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Return whether the sampler still follows the storage."""

    def priorities_changed(self, *, everything: bool = False) -> Changed | None:
        """Return the changes since the last call; None if there are none.

        With ``everything``, return all priorities.
        """

    def priorities_pending(self) -> bool:
        """Return whether ``priorities_changed`` might return changes."""

    def restore_priorities(self, priorities: torch.Tensor, most: float, dropped: int) -> None:
        """Load the priorities of an earlier sampler, float64 ``[length]``."""

    def follow_priorities(self, changed: Changed) -> None:
        """Load the changes of another process.

        ``priorities_changed`` does not return these changes.
        """


class RecoverableWriter(Protocol):
    """A writer whose count is recovered."""

    _write_count: int

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Return whether the writer still writes to the storage."""


def index_of_part(parts: list[weakref.ref[Any]], part: Any) -> int:
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


def insert_part(parts: list[weakref.ref[Any]], place: int, part: Any) -> None:
    """Insert a part at ``place``, the result of ``index_of_part``.

    The part precedes the part that it replaces. The replacement may fail, so both stay in the list
    until ``still_there`` finds the part in use.
    """
    others = [known for known in parts[place:] if known() is not part]
    parts[place:] = [weakref.ref(part), *others]


def set_alone(parts: list[weakref.ref[Any]], part: Any) -> None:
    """Make a part the only part of the list.

    Raises:
        RuntimeError: the list has a part of another buffer.
    """
    other = parts[0]() if parts else None
    if other is not None and other is not part and other.owner is not part.owner:
        raise RuntimeError(
            f"expected one buffer over a storage that processes share, got another one with a "
            f"{type(part).__name__}"
        )
    parts[:] = [weakref.ref(part)]


def still_there(
    parts: list[weakref.ref[Any]], storage: LazyTensorStorage
) -> list[weakref.ref[Any]]:
    """Return the parts that still exist and still use the storage."""
    return [known for known in parts if (part := known()) is not None and part.works_on(storage)]
