"""Describe which rows of a storage in files count, and which components keep state there."""

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
    "KeptCount",
    "KeptState",
    "KeptTable",
    "PriorityKeeper",
    "place_of",
    "set_alone",
    "still_there",
    "take_place",
]

Array = np.ndarray[Any, Any]

_FIXED = 16
_OLDEST = 9
_STREAM = 4

_NO_NUMBERS = np.zeros(0, np.int64)
_NO_STREAMS = np.zeros((0, _STREAM), np.int64)


class KeptTable(NamedTuple):
    """A sampler's priorities: how many, the largest ever set, updates that came too late."""

    length: int
    most: float
    dropped: int


@dataclass
class KeptState:
    """One committed state of a storage and its parts; see ``moved_on`` for what may change.

    Attributes:
        cursor, length, next_position, cleared, by_stream: of the ledger.
        positions, generations: lengths of its tables; -1: they follow from the counters.
        marks, codes: where streams were severed.
        oldest, begin, head: position of the oldest row, and how the first episodes of the lanes
            began; ``oldest`` -1 with ``begin`` empty: nothing is known; None: no episodes.
        streams: of interleaved streams, four numbers each.
        priorities, counts: of the samplers and writers, in the order in which they came.
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
    priorities: list[KeptTable] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _encoded: Array = field(default_factory=lambda: _NO_NUMBERS)

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        episodes: dict[str, Any] | None,
        *,
        positions: int,
        generations: int,
        priorities: list[KeptTable],
        counts: list[int],
    ) -> KeptState:
        """Takes the state of a ledger and of an episode index (``EpisodeIndexes.known``)."""
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
            **known,
        )

    def episodes(self) -> dict[str, Any]:
        """As ``EpisodeIndexes.state`` gave it."""
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
        """Returns it as int64 numbers, which belong to this object."""
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
            0,
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
        priorities: list[KeptTable],
        counts: list[int],
    ) -> Array | None:
        """Becomes the state after a write at the cursor, with the same parts and marks, without
        streams; returns its numbers, None where it has become another one than that.

        What an ``extend`` costs beside its rows: so only what differs is encoded.

        Args:
            first: as ``EpisodeIndexes.first_known`` gave it.
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
        """Becomes the state of these numbers, where they are those of a write at the cursor and
        what this one is of has stayed; else False, and it is as before."""
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
            self.priorities = [KeptTable(n, _float(most), late) for n, most, late in rows]
        self.counts = numbers[heads - counts : heads].tolist()
        self.begin, self.head = mine[heads : heads + lanes], mine[heads + lanes : marks]
        self.streams = mine[streams:].reshape(-1, _STREAM)
        return True

    @classmethod
    def of_numbers(cls, numbers: Array) -> KeptState:
        """The state of some numbers, of which it takes a copy; none: that of an empty storage."""
        if not len(numbers):
            return cls(0, 0, 0, 0, False, -1, -1, _NO_NUMBERS, _NO_NUMBERS)
        found = cls.decode(numbers.copy())
        found._encoded = numbers.copy()
        return found

    @classmethod
    def decode(cls, numbers: Array) -> KeptState:
        """Reads what ``encode`` gave; ValueError where it cannot have."""
        if len(numbers) < _FIXED:
            raise ValueError(f"expected at least {_FIXED} numbers, got {len(numbers)}")
        fixed = numbers[:_FIXED].tolist()
        marks, heads, streams, tables, counts = (fixed[at] for at in (7, 10, 11, 12, 13))
        sizes = [tables * 3, counts, heads, heads, marks, marks, streams * _STREAM]
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
            priorities=[KeptTable(length, _float(most), late) for length, most, late in rows],
            counts=parts[1].tolist(),
        )


_double, _whole = struct.Struct("=d"), struct.Struct("=q")


def _bits(number: float) -> int:
    return int(_whole.unpack(_double.pack(number))[0])


def _float(bits: int) -> float:
    return float(_double.unpack(_whole.pack(bits))[0])


class Changed(NamedTuple):
    """What has become of a sampler's priorities since somebody asked.

    Attributes:
        elements: which were set, int64 ``[K]`` without repeats; None: all.
        values: their raw priorities, float64 ``[K]``; of all ``[length]``.
        length: how many there are.
        most: the largest one ever set.
        dropped: updates that came too late.
    """

    elements: Array | None
    values: Array
    length: int
    most: float
    dropped: int


class PriorityKeeper(Protocol):
    """A sampler whose priorities are to be there again."""

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Whether it is still told of what becomes of the storage."""

    def priorities_changed(self, *, everything: bool = False) -> Changed | None:
        """What has changed since the last call, or all of it; None: nothing."""

    def priorities_pending(self) -> bool:
        """Whether ``priorities_changed`` might return something."""

    def take_kept(self, priorities: torch.Tensor, most: float, dropped: int) -> None:
        """Takes priorities over that it had, float64 ``[length]``."""

    def take_changed(self, changed: Changed) -> None:
        """Takes over what another process has made of them; it is not told of as a change."""


class KeptCount(Protocol):
    """A writer whose count is to be there again."""

    _write_count: int

    def works_on(self, storage: LazyTensorStorage) -> bool:
        """Whether it still writes to the storage."""


def place_of(parts: list[weakref.ref[Any]], part: Any) -> int:
    """Where a part is, or the one of the same buffer in whose stead it comes; else behind all."""
    for place, known in enumerate(parts):
        other = known()
        if other is part or (
            other is not None and part.owner is not None and other.owner is part.owner
        ):
            return place
    return len(parts)


def take_place(parts: list[weakref.ref[Any]], place: int, part: Any) -> None:
    """Puts a part where ``place_of`` says, before the one in whose stead it comes.

    Both stay until ``still_there`` tells which of them is in use: the exchange may not come about.
    """
    others = [known for known in parts[place:] if known() is not part]
    parts[place:] = [weakref.ref(part), *others]


def set_alone(parts: list[weakref.ref[Any]], part: Any) -> None:
    """Makes a part the only one.

    Raises:
        RuntimeError: another one is there, of another buffer.
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
    """Those that have neither gone nor been given something else to work on."""
    return [known for known in parts if (part := known()) is not None and part.works_on(storage)]
