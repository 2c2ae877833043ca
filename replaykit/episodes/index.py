"""Index the episodes of a ring of rows as rows are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.boundaries import BoundaryRule, BoundColumns, between, positions_from, seams
from replaykit.episodes.episode_laws import (
    GOES_ON,
    ROWS,
    SWITCHED,
    WINDOWS,
    CountLaw,
    EndReason,
    Found,
    Head,
)
from replaykit.episodes.ring_kernels import new_ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

__all__ = ["EpisodeIndex", "RingWrites", "StaticEpisodes", "Windows"]

Array = np.ndarray[Any, Any]

_EVICTED, _RESET = int(Head.EVICTED), int(Head.RESET)


class RingWrites:
    """The half of `EpisodeIndex` that is told of rows; what it notes of them lies in ``_ring``."""

    def __init__(self, storage: RowSource, rule: BoundaryRule, *, before: int = 0) -> None:
        columns = storage.require()
        self.rule = rule
        self.bound: BoundColumns = rule.bind(columns.schema)
        self._storage, self._columns = storage, columns
        self.lanes = columns.lanes.numel()
        self.slots = columns.slots
        self._ring = new_ring(self.slots, self.lanes)
        self._lane_numbers = np.arange(self.lanes)
        # Up to which record, and of which state of the ledger, rows have been noted.
        ledger = storage.ledger
        self._noted = ledger.next_position - before
        self._changes = ledger.changes
        self._edited = False
        self._after_clear = np.full(self.lanes, int(Head.RESET), np.int64)
        # How often all rows were noted anew, at other times.
        self.rebuilt = 0
        # Rows from this position on were written at the cursor, one after the other.
        self._ordered_from = 0
        # Whether the next write takes the place of no row, or of the oldest in ring order.
        self._is_ring = True
        self._versions = 0  # of the rings before this one
        if ledger.length and (self._noted > ledger.cleared or not before):
            self._rebuild()

    @property
    def _in_order(self) -> bool:
        """Whether times and positions of the noted rows differ by one number, as they do again once
        no row is left of those that lay otherwise."""
        return self._noted - (self._ring.hi - self._ring.lo) >= self._ordered_from

    @property
    def noted(self) -> int:
        """Position from which on rows have yet to be noted: the oldest one's, where all have."""
        ledger = self._storage.ledger
        if self._edited or ledger.changes != self._changes:
            return ledger.next_position - ledger.length
        return self._noted

    # -- being told of writes -------------------------------------------------------------------

    def edited(self) -> None:
        """Told that a column that bounds episodes was changed in place."""
        self._edited = True

    def follow(self, count: int) -> None:
        """Told of ``count`` rows that were written at the cursor."""
        self.sync()

    def sync(self) -> None:
        """Takes note of all that was written. Cost: O(rows written since)."""
        ledger = self._storage.ledger
        if ledger.changes != self._changes or self._edited:
            self._rebuild()
            return
        behind = ledger.next_position - self._noted
        if not behind:
            return
        # Rows are gone that nobody looked at, or the cursor stood among stored ones.
        if behind > self.slots or not self._is_ring:
            self._rebuild()
            return
        first = (ledger.cursor - behind) % self.slots
        until = min(self.slots, first + behind)
        self._note(first, until)
        if first + behind > self.slots:
            self._note(0, first + behind - self.slots)
        self._noted = ledger.next_position

    def note_rows(self, rows: Rows) -> None:
        """Takes note of rows that were written last, also of those that are stored no more."""
        ledger = self._storage.ledger
        before = ledger.next_position - len(rows)
        if ledger.changes != self._changes and ledger.cleared == before:
            start = -(-self._ring.hi // self.slots) * self.slots
            self._begin_ring(start, None, self._head_after_clear())
            self._is_ring = True
        elif ledger.changes != self._changes or self._noted != before or not self._is_ring:
            self._rebuild()
            return
        # What was edited or placed before is stored no more.
        if len(rows) >= self.slots:
            self._edited, self._ordered_from = False, 0
        leaves = rows.leaves
        self._append({path: leaves[path] for path in self.bound.paths} or leaves)
        self._noted, self._changes = ledger.next_position, ledger.changes

    def close(self, lanes: Array, code: int) -> None:
        """Ends the open episodes of lanes, bool ``[lanes]``, with that code."""
        self.sync()
        self._ring.close(lanes, code)
        if lanes.all():
            self._ring.forget_ids()

    def _note(self, first: int, until: int) -> None:
        """Notes rows from where they are stored."""
        self._note_ending(first, until, None)

    def _note_ending(self, first: int, until: int, ends: tuple[Array, Array] | None) -> None:
        """The same with ends that no column tells of, as for ``NativeRing.append_columns``."""
        columns = self._columns
        if self._ring.append_columns(self.bound, columns, first, until, ends):
            return
        columns.follow_memory()
        views = {path: columns[path][first:until] for path in self.bound.paths}
        if not views:
            path = columns.order[0]
            views = {path: columns[path][first:until]}
        self._append(views, None if ends is None else (ends[0] - first, ends[1]))

    def _append(
        self, leaves: Mapping[Path, torch.Tensor], ends: tuple[Array, Array] | None = None
    ) -> None:
        codes, ids = self.bound.codes(leaves, self._columns.ndim)
        if ends is not None:
            after, said = ends
            codes[after] |= np.where(codes[after] & 7 == GOES_ON, said, 0).astype(codes.dtype)
        if ids is not None:
            last = self._ring.last_ids()
            if last is not None:
                switched = (ids[0] != last).any(-1)
                if switched.any():
                    self._ring.close(switched, SWITCHED)
            codes[:-1][(codes[:-1] & 7 == GOES_ON) & (ids[1:] != ids[:-1]).any(-1)] |= SWITCHED
            self._ring.set_last_ids(ids[-1])
        if ends is None:
            self._ring.append(codes)
        else:
            self._ring.append_severed(codes, *ends)

    def _rebuild(self) -> None:
        """Notes all stored rows anew, at times above those given out; one pass over the columns.

        Where an episode began whose first row is gone is kept, as long as its rows are the same.
        """
        ledger, old, lanes = self._storage.ledger, self._ring, self.lanes
        length, slots = ledger.length, self.slots
        # In a ring that is not full rows lie from slot 0 on; in a full one from the cursor on.
        start_slot = ledger.cursor if length == slots else 0
        positions = positions_from(ledger, start_slot)
        oldest = ledger.next_position - length if positions is None else int(positions[0])
        # Times of rows that are stored no more are not negative either.
        above = max(old.hi, oldest) if length else old.hi
        start = -(-above // slots) * slots + start_slot
        begin = np.full(lanes, -1, np.int64)
        head = np.full(lanes, int(Head.RESET), np.int64)
        known = self._told(oldest) if length and self._trusts_others else None
        if known is None and length:
            known = self._heads(start_slot, oldest)
        if known is not None:
            began, head = known
            begin = np.where(began >= 0, start - (oldest - began), -1)
        elif not length or oldest == ledger.cleared:
            head = self._head_after_clear()
        else:  # nobody knows what came before
            head = np.full(lanes, int(Head.CUT), np.int64)
        self._begin_ring(start, begin, head)
        marks = self._storage.indexes.marks
        after, ends, in_order = seams(marks, positions, oldest, length, lanes, ledger.next_position)
        self._ordered_from = 0 if in_order else ledger.next_position
        turn = min(length, slots - start_slot)  # the number of the row in slot 0, if there is one
        for first, until, slot in ((0, turn, start_slot), (turn, length, 0)):
            low, high = np.searchsorted(after, (first, until))
            stops = (after[low:high] + (slot - first), ends[low:high])
            if first < until:
                self._note_ending(slot, slot + until - first, stops if low < high else None)
        self._noted, self._changes, self._edited = ledger.next_position, ledger.changes, False
        self._is_ring = length == slots or ledger.cursor == length

    def _begin_ring(self, start: int, begin: Array | None, head: Array) -> None:
        self.rebuilt += 1
        self._versions += self._ring.version + 1
        self._ring = new_ring(self.slots, self.lanes, start=start, begin=begin, head=head)

    def _head_after_clear(self) -> Array:
        """How the first episodes begin of what was written after all rows were forgotten."""
        if self._ring.hi > self._ring.lo:
            went_on = self._ring.open_lanes & (self._storage.ledger.cleared == self._noted)
            self._after_clear = np.where(went_on, int(Head.CUT), int(Head.RESET))
        return self._after_clear

    def _heads(self, slot: int, position: int) -> tuple[Array, Array] | None:
        """Where the episodes of the row in a slot began, as positions, -1 where with itself; and
        how those that begin with it do. None: nothing was ever noted of that row."""
        ring = self._ring
        newest = ring.hi - 1
        time = newest - (newest - slot) % self.slots
        if position < self._noted and time >= ring.lo:
            asked = np.empty((2, self.lanes), np.int64)
            asked[0], asked[1] = time, self._lane_numbers
            begin, _, _, head = ring.lookup(*asked)
            begin[begin == time] = -1
            begin[begin >= 0] += position - time
            head[head == _EVICTED] = _RESET
            return begin, head
        return self._told(position)

    @property
    def _trusts_others(self) -> bool:
        """Whether what others have noted of the first episodes counts more: by the same rule."""
        return self._storage.indexes.is_told and self.rule == BoundaryRule()

    def _told(self, position: int) -> tuple[Array, Array] | None:
        """The same as somebody else has noted it."""
        saved = self._storage.indexes.take_heads()
        if saved is None or saved["oldest"] != position:
            return None
        return np.array(saved["begin"]), np.array(saved["head"])

    # -- state ----------------------------------------------------------------------------------

    def first(self) -> tuple[int, Any, Any]:
        """Position of the oldest row, where the episodes of its lanes began, -1 where with it, and
        ``Head``, each ``[lanes]``. What keeps rows in files asks after every write."""
        self.sync()
        ring = self._ring
        lo, hi = ring.lo, ring.hi
        if self.lanes != 1 or hi == lo or not self._in_order:
            known = self.state()
            return known["oldest"], known["begin"], known["head"]
        began, head = ring.first()
        oldest = self._noted - (hi - lo)
        begin = -1 if began == lo else began + oldest - lo
        return oldest, (begin,), (_RESET if head == _EVICTED else head,)

    def state(self, kept: torch.Tensor | None = None) -> dict[str, Any]:
        """Returns what does not follow from the rows: where headless episodes began.

        Args:
            kept: slots of the rows that will be left of those stored, int64 ``[K]``; None: all.
        """
        self.sync()
        ring = self._ring
        if ring.hi == ring.lo or not (self._in_order or kept is not None):
            return {"oldest": -1, "begin": [], "head": []}
        slot, oldest = ring.lo % self.slots, self._noted - (ring.hi - ring.lo)
        if kept is not None:
            positions = self._storage.ledger.positions(kept)
            first = int(positions.argmin())
            slot, oldest = int(kept[first]), int(positions[first])
        known = self._heads(slot, oldest)
        assert known is not None  # the ring has a row
        return {"oldest": oldest, "begin": known[0], "head": known[1]}


_ALL_ROWS = CountLaw(1, 0)

Windows = Found
"""Windows looked up by their number."""


class EpisodeIndex(RingWrites):
    """Where the episodes of a column storage begin and end, and why.

    Rows are addressed as *elements*, int64: the slot, or ``slot * lanes + lane`` where the storage
    has lanes. In a lane rows are counted by *time*, which is never used twice:
    ``place``/``element`` go from one to the other. What is asked for is answered for stored rows;
    nothing is checked here, and the storage's lock is held.

    The write path tells it of every row (``sync``), in time proportional to the rows written. Rows
    that were written past it, moved or edited are noted at the next question: an edit of a column
    that bounds episodes costs one pass over those columns.

    Args:
        storage: whose rows; it has been written to.
        rule: which columns bound episodes.
        before: number of newest rows, just written, that ``sync`` or ``note_rows`` will bring.

    Raises:
        KeyError: as ``BoundaryRule.bind``. RuntimeError: rows that are no TensorDicts.

    Example:
        >>> import numpy as np, torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.episodes import WINDOWS, CountLaw
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8))
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [6]))
        >>> index = rb.storage.episodes
        >>> index.totals(CountLaw.strict(2), WINDOWS).tolist()
        [4]
        >>> time, lane = index.place(np.array([1, 5]))
        >>> [times.tolist() for times in index.spans(time, lane)]
        [[0, 3], [2, 5]]
    """

    # -- rows -----------------------------------------------------------------------------------

    def place(self, element: Array) -> tuple[Array, Array]:
        """Time and lane of stored elements."""
        if self.lanes == 1:
            slot, lane = element, np.zeros(element.shape, np.int64)
        else:
            slot, lane = np.divmod(element, self.lanes)
        newest = self._ring.hi - 1
        return newest - (newest - slot) % self.slots, lane

    def element(self, time: Array, lane: Array) -> Array:
        """Elements of rows; the inverse of ``place``."""
        if self.lanes == 1:
            return time % self.slots
        return (time % self.slots) * self.lanes + lane

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """``lo, hi`` of lanes: stored rows are those with ``lo <= time < hi``."""
        return self._ring.lo, self._ring.hi

    @property
    def lowest(self) -> int:
        """Time of the oldest stored rows, in an index whose lanes have one."""
        return self._ring.lo

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First stored and last row of the episodes of stored rows, as times."""
        begin, last, _, _ = self._ring.lookup(time, lane)
        return np.maximum(begin, self.bounds(lane)[0]), last

    def around(self, element: Array) -> Array:
        """Time, lane, begin, last, code of the last row and ``Head`` of stored elements, in one
        call: int64 ``[6, K]``."""
        return self._ring.around(element)

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Elements of single rows by number: ``find`` of a law of one row, and ``element``."""
        return self._ring.pick(law, WINDOWS, number)

    def episodes_at(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Begin and last row of the episodes of stored rows, code of the last row, ``Head``."""
        return self._ring.lookup(time, lane)

    def ended_among(self, newest: int) -> tuple[Array, Array, Array]:
        """Rows with which an episode terminated or was truncated, among the ``newest`` stored ones
        of every lane: time, lane and ``EndReason``, int64 ``[m]``. Cost: O(newest)."""
        lo, hi = self._ring.lo, self._ring.hi
        time = np.repeat(np.arange(max(lo, hi - newest), hi), self.lanes)
        lane = np.tile(np.arange(self.lanes), len(time) // self.lanes)
        code = self._ring.codes(time, lane) if len(time) else time
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        return time[ended], lane[ended], code[ended].astype(np.int64)

    def begins(self, time: Array, lane: Array) -> Array:
        """Times at which episodes began, also where that row is stored no more."""
        return self._ring.lookup(time, lane)[0]

    def heads(self, time: Array, lane: Array) -> Array:
        """``Head`` of the episodes of rows."""
        return self._ring.lookup(time, lane)[3]

    def reasons(self, time: Array, lane: Array) -> Array:
        """``EndReason`` of the episodes of rows."""
        return np.minimum(self._ring.lookup(time, lane)[2], int(EndReason.CUT))

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First and last row of what can be read without a gap around rows: across episodes, not
        across the write seam, nor where rows are missing or a run was restarted."""
        return between(self._ring.severed(), *self.bounds(lane), time, lane)

    def positions(self, time: Array, lane: Array) -> Array:
        """Positions (``Ledger``) of rows, also of those stored no more that came before stored
        ones of their episode."""
        ledger = self._storage.ledger
        if ledger.in_order:
            return time + (ledger.next_position - self._ring.hi)
        lo = self._ring.lo
        stored = np.maximum(time, lo)
        found = ledger.positions(torch.from_numpy(stored % self.slots)).numpy()
        return found - (stored - time)

    def ids(self, time: Array, lane: Array) -> Array:
        """Episode ids: ``position * lanes + lane`` of the first row; never used twice."""
        begin = self.begins(time, lane)
        return self.positions(begin, lane) * self.lanes + lane

    # -- windows --------------------------------------------------------------------------------

    def totals(self, law: CountLaw, kind: int) -> Array:
        """int64 ``[lanes]``: windows (episodes, rows) of every lane."""
        return self._ring.totals(law, kind)

    def total(self, law: CountLaw, kind: int) -> int:
        """The sum of ``totals``."""
        return self._ring.total(law, kind)

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Looks windows up by number: lanes in order, in a lane in the order of time."""
        return self._ring.find(law, kind, number)

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Elements of windows of ``length`` rows by number, one window after another, and the place
        of each one's window among the numbers: ``find`` and ``element`` in one."""
        return self._ring.slices(law, number, length)

    def runs(self, start: Array, length: int) -> Array:
        """Elements of ``length`` rows of a lane from stored elements ``[K]`` on, one run after
        another."""
        steps = np.arange(0, length * self.lanes, self.lanes)
        element = (start[:, None] + steps).reshape(-1)
        element %= self.slots * self.lanes
        return element

    def eligible_starts(self, law: CountLaw, time: Array, lane: Array) -> Array:
        """Bool ``[K]``: whether windows of a law may start with these stored rows.

        It is so for the first ``law.count`` rows of an episode, those without history left out.
        """
        begin, last, code, head = self.episodes_at(time, lane)
        first = np.maximum(begin, self.bounds(lane)[0])
        count, _, skip = law.counts(last + 1 - first, head == int(Head.RESET), code == GOES_ON)
        number = time - first - skip
        return np.asarray((number >= 0) & (number < count))

    def table(self) -> Any:
        """All stored episodes; see ``found.Table``. Cost: O(episodes)."""
        return self._ring.table()

    def longest(self) -> int:
        """Rows of the longest episode. Cost: O(episodes)."""
        return self._ring.longest()

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._versions + self._ring.version

    @property
    def numbering(self) -> int:
        """Changes where lanes come or go, and a number may mean another lane than before."""
        return 0

    def stored_rows(self) -> int:
        """Number of stored rows, all lanes together."""
        return int(self.totals(_ALL_ROWS, ROWS).sum())

    def nbytes(self) -> int:
        """Bytes that the index takes."""
        return self._ring.nbytes()


class StaticEpisodes(EpisodeIndex):
    """The index of rows that are not written any more, of which the ends are given.

    Args:
        storage: whose rows; it has no lanes.
        ends: bool ``[N]``, True at the last rows of episodes, in the order of slots. The last slot
            goes on in the first one where the ring has wrapped.

    Cost: O(N).
    """

    def __init__(self, storage: RowSource, ends: torch.Tensor) -> None:
        columns, ledger = storage.require(), storage.ledger
        self.rule = BoundaryRule(flags=(), ids=())
        self.bound = self.rule.bind(columns.schema)
        self._storage, self._columns = storage, columns
        self.lanes, self.slots = 1, columns.slots
        start = ledger.cursor if ledger.length == self.slots and ledger.in_order else 0
        self._ring = new_ring(self.slots, 1, start=start)
        codes = np.where(ends.numpy(), SWITCHED, GOES_ON).astype(np.uint8)
        self._ring.append(np.roll(codes, -start)[:, None])
        self._noted, self._changes = ledger.next_position, ledger.changes
        self._edited, self._ordered_from, self._versions, self.rebuilt = False, 0, 0, 0

    @property
    def is_old(self) -> bool:
        """Whether rows were written since, which it knows nothing of."""
        ledger = self._storage.ledger
        return ledger.next_position != self._noted or ledger.changes != self._changes

    def edited(self) -> None:
        """Columns have no say in it."""

    def sync(self) -> None:
        """Nothing to take note of: what was given holds until the next write."""

    def note_rows(self, rows: Any) -> None:
        """As ``sync``."""
