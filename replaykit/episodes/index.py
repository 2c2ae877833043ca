"""Index the episodes of a ring of rows as rows are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.boundaries import BoundaryRule, BoundColumns, between, positions_from, seams
from replaykit.episodes.episode_laws import (
    CONTINUES,
    ROWS,
    SWITCHED,
    WINDOWS,
    CountLaw,
    EndReason,
    Found,
    Head,
)
from replaykit.episodes.ring import RingEpisodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

__all__ = ["EpisodeIndex", "RingWrites", "StaticEpisodes", "Windows"]

Array = np.ndarray[Any, Any]

_EVICTED, _RESET = int(Head.EVICTED), int(Head.RESET)


class RingWrites:
    """The part of `EpisodeIndex` that follows writes, with its data in ``_ring``."""

    def __init__(self, storage: RowSource, rule: BoundaryRule, *, before: int = 0) -> None:
        columns = storage.require()
        self.rule = rule
        self.bound: BoundColumns = rule.bind(columns.schema)
        self._storage, self._columns = storage, columns
        self.lanes = columns.lanes.numel()
        self.slots = columns.slots
        self._ring = RingEpisodes(self.slots, self.lanes)
        self._lane_numbers = np.arange(self.lanes)
        # The row id of the next row to index, and the ledger's count of changes at that time.
        ledger = storage.ledger
        self._noted = ledger.next_position - before
        self._changes = ledger.changes
        self._edited = False
        self._after_clear = np.full(self.lanes, int(Head.RESET), np.int64)
        # Number of rebuilds. Each rebuild gives rows new times.
        self.rebuilt = 0
        # All rows from this row id on were appended.
        self._ordered_from = 0
        # True if the next write uses a free slot, or the slot of the oldest row in ring order.
        self._is_ring = True
        self._versions = 0  # sum of the versions of earlier rings
        if ledger.length and (self._noted > ledger.cleared or not before):
            self._rebuild()

    @property
    def _in_order(self) -> bool:
        """True if the difference between time and row id is the same for all indexed rows.

        After placed rows, it becomes True again when all of these are overwritten.
        """
        return self._noted - (self._ring.hi - self._ring.lo) >= self._ordered_from

    @property
    def indexed_until(self) -> int:
        """Row id of the next row to index; before a rebuild, row id of the oldest row."""
        ledger = self._storage.ledger
        if self._edited or ledger.changes != self._changes:
            return ledger.next_position - ledger.length
        return self._noted

    # -- following writes -----------------------------------------------------------------------

    def edited(self) -> None:
        """Follow an edit of a column that ends episodes."""
        self._edited = True

    def append(self, count: int) -> None:
        """Follow a write of ``count`` rows at the cursor."""
        self.sync()

    def sync(self) -> None:
        """Index all rows written since the last call. Cost: O(rows written)."""
        ledger = self._storage.ledger
        if ledger.changes != self._changes or self._edited:
            self._rebuild()
            return
        behind = ledger.next_position - self._noted
        if not behind:
            return
        # Rows were overwritten before they were indexed, or the cursor was between stored rows.
        if behind > self.slots or not self._is_ring:
            self._rebuild()
            return
        first = (ledger.cursor - behind) % self.slots
        until = min(self.slots, first + behind)
        self._append_stored(first, until)
        if first + behind > self.slots:
            self._append_stored(0, first + behind - self.slots)
        self._noted = ledger.next_position

    def append_rows(self, rows: Rows) -> None:
        """Index the last rows written, including rows that are already overwritten."""
        ledger = self._storage.ledger
        before = ledger.next_position - len(rows)
        if ledger.changes != self._changes and ledger.cleared == before:
            start = -(-self._ring.hi // self.slots) * self.slots
            self._begin_ring(start, None, self._head_after_clear())
            self._is_ring = True
        elif ledger.changes != self._changes or self._noted != before or not self._is_ring:
            self._rebuild()
            return
        # All rows that were edited or placed earlier are overwritten.
        if len(rows) >= self.slots:
            self._edited, self._ordered_from = False, 0
        leaves = rows.leaves
        self._append({path: leaves[path] for path in self.bound.paths} or leaves)
        self._noted, self._changes = ledger.next_position, ledger.changes

    def close(self, lanes: Array, code: int) -> None:
        """End the open episodes of lanes, bool ``[lanes]``, with the code."""
        self.sync()
        self._ring.close(lanes, code)
        if lanes.all():
            self._ring.forget_ids()

    def _append_stored(self, first: int, until: int) -> None:
        """Index the stored rows of slots ``[first, until)``."""
        self._append_with_ends(first, until, None)

    def _append_with_ends(self, first: int, until: int, ends: tuple[Array, Array] | None) -> None:
        """Index stored rows, with ends as for ``RingEpisodes.append_columns``."""
        columns = self._columns
        if self._ring.append_columns(self.bound, columns, first, until, ends):
            return
        columns.refresh_addresses()
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
            codes[after] |= np.where(codes[after] & 7 == CONTINUES, said, 0).astype(codes.dtype)
        if ids is not None:
            last = self._ring.last_ids()
            if last is not None:
                switched = (ids[0] != last).any(-1)
                if switched.any():
                    self._ring.close(switched, SWITCHED)
            codes[:-1][(codes[:-1] & 7 == CONTINUES) & (ids[1:] != ids[:-1]).any(-1)] |= SWITCHED
            self._ring.set_last_ids(ids[-1])
        if ends is None:
            self._ring.append(codes)
        else:
            self._ring.append_severed(codes, *ends)

    def _rebuild(self) -> None:
        """Index all stored rows again, at new times, in one pass over the columns.

        If the first row of an episode was overwritten, its beginning is kept, provided that its
        rows are the same.
        """
        ledger, old, lanes = self._storage.ledger, self._ring, self.lanes
        length, slots = ledger.length, self.slots
        # The oldest row is in slot 0. In a full ring, it is at the cursor.
        start_slot = ledger.cursor if length == slots else 0
        positions = positions_from(ledger, start_slot)
        oldest = ledger.next_position - length if positions is None else int(positions[0])
        # Even times of rows that are no longer stored must not be negative.
        above = max(old.hi, oldest) if length else old.hi
        start = -(-above // slots) * slots + start_slot
        begin = np.full(lanes, -1, np.int64)
        head = np.full(lanes, int(Head.RESET), np.int64)
        known = self._saved_begin(oldest) if length and self._trusts_others else None
        if known is None and length:
            known = self._heads(start_slot, oldest)
        if known is not None:
            began, head = known
            begin = np.where(began >= 0, start - (oldest - began), -1)
        elif not length or oldest == ledger.cleared:
            head = self._head_after_clear()
        else:  # earlier rows are unknown
            head = np.full(lanes, int(Head.CUT), np.int64)
        self._begin_ring(start, begin, head)
        marks = self._storage.indexes.marks
        after, ends, in_order = seams(marks, positions, oldest, length, lanes, ledger.next_position)
        self._ordered_from = 0 if in_order else ledger.next_position
        turn = min(length, slots - start_slot)  # number of the first row that wraps to slot 0
        for first, until, slot in ((0, turn, start_slot), (turn, length, 0)):
            low, high = np.searchsorted(after, (first, until))
            stops = (after[low:high] + (slot - first), ends[low:high])
            if first < until:
                self._append_with_ends(slot, slot + until - first, stops if low < high else None)
        self._noted, self._changes, self._edited = ledger.next_position, ledger.changes, False
        self._is_ring = length == slots or ledger.cursor == length

    def _begin_ring(self, start: int, begin: Array | None, head: Array) -> None:
        self.rebuilt += 1
        self._versions += self._ring.version + 1
        self._ring = RingEpisodes(self.slots, self.lanes, start=start, begin=begin, head=head)

    def _head_after_clear(self) -> Array:
        """Return the ``Head`` of the first episodes after the storage was cleared."""
        if self._ring.hi > self._ring.lo:
            went_on = self._ring.open_lanes & (self._storage.ledger.cleared == self._noted)
            self._after_clear = np.where(went_on, int(Head.CUT), int(Head.RESET))
        return self._after_clear

    def _heads(self, slot: int, position: int) -> tuple[Array, Array] | None:
        """Return the beginnings of the episodes of a slot's row, and their ``Head``.

        A beginning is a row id, or -1 if the episode begins with this row. The result is None if
        the row was never indexed.
        """
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
        return self._saved_begin(position)

    @property
    def _trusts_others(self) -> bool:
        """True if saved beginnings take precedence, because both follow the default rule."""
        return self._storage.indexes.has_begins and self.rule == BoundaryRule()

    def _saved_begin(self, position: int) -> tuple[Array, Array] | None:
        """Return the result of ``_heads`` as saved by another process or a checkpoint."""
        saved = self._storage.indexes.pop_first_begins()
        if saved is None or saved["oldest"] != position:
            return None
        return np.array(saved["begin"]), np.array(saved["head"])

    # -- state ----------------------------------------------------------------------------------

    def first(self) -> tuple[int, Any, Any]:
        """Return the row id of the oldest row, and the beginnings of its episodes.

        A beginning consists of a row id and a ``Head``, ``[lanes]`` each. The row id is -1 if the
        episode begins with the oldest row. Storages in files call this after every write.
        """
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
        """Return the part of the index that cannot be derived from the rows.

        This part consists of the beginnings of episodes whose first rows are not stored.

        Args:
            kept: slots of the stored rows to save, int64 ``[K]``; None for all rows.
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
"""Windows that were looked up by number."""


class EpisodeIndex(RingWrites):
    """The beginnings and ends of all episodes of a column storage, and their reasons.

    An *element*, int64, is the address of a row. It is the slot, or ``slot * lanes + lane`` in a
    storage with lanes. The *time* of a row is its sequence number in its lane. No time is used
    twice. ``time_and_lane`` and ``element`` convert between elements and times. Arguments must
    belong to stored rows, which is not checked. The caller must hold the lock of the storage.

    Every write calls ``sync`` for its rows, at a cost proportional to their number. If rows were
    moved or edited, or were written without ``sync``, the next call of ``sync`` rebuilds the index.
    The rebuild takes one pass over the columns that end episodes.

    Args:
        storage: the storage, which must have rows.
        rule: the columns that end episodes.
        before: count of the newest rows that are not indexed yet, because ``sync`` or
            ``append_rows`` will index them.

    Raises:
        KeyError: as ``BoundaryRule.bind`` does.
        RuntimeError: the rows are not TensorDicts.

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
        >>> time, lane = index.time_and_lane(np.array([1, 5]))
        >>> [times.tolist() for times in index.spans(time, lane)]
        [[0, 3], [2, 5]]
    """

    # -- rows -----------------------------------------------------------------------------------

    def time_and_lane(self, element: Array) -> tuple[Array, Array]:
        """Return time and lane of stored elements."""
        if self.lanes == 1:
            slot, lane = element, np.zeros(element.shape, np.int64)
        else:
            slot, lane = np.divmod(element, self.lanes)
        newest = self._ring.hi - 1
        return newest - (newest - slot) % self.slots, lane

    def element(self, time: Array, lane: Array) -> Array:
        """Return the elements of rows. This is the inverse of ``time_and_lane``."""
        if self.lanes == 1:
            return time % self.slots
        return (time % self.slots) * self.lanes + lane

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """Return ``lo, hi`` of lanes. Rows with ``lo <= time < hi`` are stored."""
        return self._ring.lo, self._ring.hi

    @property
    def lowest(self) -> int:
        """Time of the oldest stored rows, which is the same in all lanes."""
        return self._ring.lo

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return the times of the first stored row and the last row of rows' episodes."""
        begin, last, _, _ = self._ring.lookup(time, lane)
        return np.maximum(begin, self.bounds(lane)[0]), last

    def around(self, element: Array) -> Array:
        """Return the positions of stored elements in their episodes, int64 ``[6, K]``.

        The six rows of the array are time, lane, begin, last, code of the last row, and ``Head``.
        """
        return self._ring.around(element)

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Return the elements of single rows, given their numbers among the drawable rows."""
        return self._ring.pick(law, WINDOWS, number)

    def episodes_at(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Return begin, last, code of the last row, and ``Head`` of rows' episodes."""
        return self._ring.lookup(time, lane)

    def ended_among(self, newest: int) -> tuple[Array, Array, Array]:
        """Return the ends of episodes among the ``newest`` stored rows of every lane.

        An end is a row that terminated or was truncated. The result has three arrays: time, lane
        and ``EndReason``, int64 ``[m]`` each. Cost: O(newest).
        """
        lo, hi = self._ring.lo, self._ring.hi
        time = np.repeat(np.arange(max(lo, hi - newest), hi), self.lanes)
        lane = np.tile(np.arange(self.lanes), len(time) // self.lanes)
        code = self._ring.codes(time, lane) if len(time) else time
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        return time[ended], lane[ended], code[ended].astype(np.int64)

    def begins(self, time: Array, lane: Array) -> Array:
        """Return the times at which rows' episodes began, even before all stored rows."""
        return self._ring.lookup(time, lane)[0]

    def heads(self, time: Array, lane: Array) -> Array:
        """Return the ``Head`` of the episodes of rows."""
        return self._ring.lookup(time, lane)[3]

    def reasons(self, time: Array, lane: Array) -> Array:
        """Return the ``EndReason`` of the episodes of rows."""
        return np.minimum(self._ring.lookup(time, lane)[2], int(EndReason.CUT))

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return first and last time of the unbroken part of a stream around each row.

        An unbroken part may contain several episodes. It ends at the write seam, at missing rows
        and at restarts.
        """
        return between(self._ring.severed(), *self.bounds(lane), time, lane)

    def positions(self, time: Array, lane: Array) -> Array:
        """Return the row ids of rows.

        The rows may include overwritten rows whose episode has stored rows.
        """
        ledger = self._storage.ledger
        if ledger.in_order:
            return time + (ledger.next_position - self._ring.hi)
        lo = self._ring.lo
        stored = np.maximum(time, lo)
        found = ledger.positions(torch.from_numpy(stored % self.slots)).numpy()
        return found - (stored - time)

    def ids(self, time: Array, lane: Array) -> Array:
        """Return unique episode ids, which are ``row id * lanes + lane`` of first rows."""
        begin = self.begins(time, lane)
        return self.positions(begin, lane) * self.lanes + lane

    # -- windows --------------------------------------------------------------------------------

    def totals(self, law: CountLaw, kind: int) -> Array:
        """Return the number of windows, episodes or rows of every lane, int64 ``[lanes]``."""
        return self._ring.totals(law, kind)

    def total(self, law: CountLaw, kind: int) -> int:
        """Return the sum of ``totals``."""
        return self._ring.total(law, kind)

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Look up windows by number, which counts in the order of lanes, then of time."""
        return self._ring.find(law, kind, number)

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Return elements of windows of ``length`` rows by number, window after window.

        The second array has the position of each element's window in ``number``. The call combines
        ``find`` and ``element``.
        """
        return self._ring.slices(law, number, length)

    def runs(self, start: Array, length: int) -> Array:
        """Return the elements of ``length`` rows of a lane, from each element ``[K]`` on."""
        steps = np.arange(0, length * self.lanes, self.lanes)
        element = (start[:, None] + steps).reshape(-1)
        element %= self.slots * self.lanes
        return element

    def eligible_starts(self, law: CountLaw, time: Array, lane: Array) -> Array:
        """Return whether windows of a law may start with these stored rows, bool ``[K]``.

        Windows start with the first ``law.count`` usable rows of an episode. Rows without enough
        history are not usable.
        """
        begin, last, code, head = self.episodes_at(time, lane)
        first = np.maximum(begin, self.bounds(lane)[0])
        count, _, skip = law.counts(last + 1 - first, head == int(Head.RESET), code == CONTINUES)
        number = time - first - skip
        return np.asarray((number >= 0) & (number < count))

    def table(self) -> Any:
        """Return all stored episodes as an ``EpisodeTable``. Cost: O(episodes)."""
        return self._ring.table()

    def longest(self) -> int:
        """Return the count of stored rows of the longest episode. Cost: O(episodes)."""
        return self._ring.longest()

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._versions + self._ring.version

    @property
    def numbering(self) -> int:
        """A number that changes when lanes are added or removed, which renumbers them."""
        return 0

    def stored_rows(self) -> int:
        """Return the number of stored rows of all lanes."""
        return int(self.totals(_ALL_ROWS, ROWS).sum())

    def nbytes(self) -> int:
        """Return the size of the index in bytes."""
        return self._ring.nbytes()


class StaticEpisodes(EpisodeIndex):
    """The index of the current rows with given ends, valid until the next write.

    Args:
        storage: a storage without lanes.
        ends: bool ``[N]``, True at the last rows of episodes, in slot order. If the ring has
            wrapped, the first slot follows the last slot.

    Cost: O(N).
    """

    def __init__(self, storage: RowSource, ends: torch.Tensor) -> None:
        columns, ledger = storage.require(), storage.ledger
        self.rule = BoundaryRule(flags=(), ids=())
        self.bound = self.rule.bind(columns.schema)
        self._storage, self._columns = storage, columns
        self.lanes, self.slots = 1, columns.slots
        start = ledger.cursor if ledger.length == self.slots and ledger.in_order else 0
        self._ring = RingEpisodes(self.slots, 1, start=start)
        codes = np.where(ends.numpy(), SWITCHED, CONTINUES).astype(np.uint8)
        self._ring.append(np.roll(codes, -start)[:, None])
        self._noted, self._changes = ledger.next_position, ledger.changes
        self._edited, self._ordered_from, self._versions, self.rebuilt = False, 0, 0, 0

    @property
    def is_old(self) -> bool:
        """True if rows were written that the index does not have."""
        ledger = self._storage.ledger
        return ledger.next_position != self._noted or ledger.changes != self._changes

    def edited(self) -> None:
        """Do nothing, because columns do not end these episodes."""

    def sync(self) -> None:
        """Do nothing, because the given ends are valid until the next write."""

    def append_rows(self, rows: Any) -> None:
        """Do nothing, because the given ends are valid until the next write."""
