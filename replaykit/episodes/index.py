"""Index the episodes among stored rows as rows are written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.boundaries import (
    CONTINUES,
    RESTORED,
    SEVERED,
    WINDOWS,
    BoundaryRule,
    BoundColumns,
    CountLaw,
    EndReason,
    Head,
    positions_from,
    seams,
)
from replaykit.episodes.streams import (
    ColumnReader,
    StreamEpisodes,
    heads_to_save,
    key_dtype,
    known_heads,
    stream_keys,
)
from replaykit.transfer import as_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

Array = np.ndarray[Any, Any]

_EVICTED, _RESET, _CUT = int(Head.EVICTED), int(Head.RESET), int(Head.CUT)

_BEHIND = 256
"""Number of rows of interleaved streams that may wait, so that they are indexed together."""

_PARTS = 16
"""Rows on a device may wait until they fill one of as many parts of the slots."""

_LEAST = 16 * _BEHIND
"""Number of slots from which on rows may wait. It is at least twice the waiting rows."""

_BLOCK = 2**20
"""Number of rows of interleaved streams that a rebuild indexes in one step."""


class EpisodeIndex:
    """The beginnings and ends of all episodes of a column storage, and their reasons.

    An *element*, int64, is the address of a row. It is the slot, or ``slot * lanes + lane`` in a
    storage with lanes. The *time* of a row is its sequence number in its lane.
    ``time_and_lane`` and ``element`` convert between elements and times. Arguments must belong to
    stored rows. The caller must hold the lock of the storage.

    With a ``lane_key``, the streams that have stored rows are the lanes, in the order of their
    keys. A lane's number is valid until the next write. Consecutive rows of a stream have
    consecutive times, even if rows of other streams are between them in the ring. A stream whose
    last row is lost is forgotten. If it is written again, it begins with a reset.

    Every write calls ``append`` or ``placed`` for its rows, at a cost proportional to their number.
    If rows were moved or edited, or were written without such a call, the next call of ``sync``
    rebuilds the index. The rebuild takes one pass over the columns that end episodes.

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

    def __init__(self, storage: RowSource, rule: BoundaryRule, *, before: int = 0) -> None:
        columns = storage.require()
        self.rule = rule
        self.bound: BoundColumns = rule.bind(columns.schema)
        self.key: Path | None = storage.lane_key
        if self.key is not None:  # the key never changes within a lane
            self.bound.ids = tuple(path for path in self.bound.ids if path != self.key)
            self.bound.paths |= {self.key}
        self._storage, self._columns = storage, columns
        self._reader = ColumnReader(self.bound, columns)
        self.slots = columns.slots
        self._use(self._new(columns.lanes.numel()))
        # The row id of the next row to index, and the ledger's count of changes at that time.
        ledger = storage.ledger
        self._noted = ledger.next_position - before
        self._changes = ledger.changes
        self._edited = False
        # Number of rebuilds. Each rebuild gives rows new times.
        self.rebuilt = 0
        self._versions = 0  # sum of the versions of earlier ``_streams``
        # All rows from this row id on were appended.
        self._ordered_from = 0
        # The heads of a ring's next episodes after its rows were cleared.
        self._after_clear = np.full(self.lanes, _RESET)
        # True if the next write uses a free slot, or the slot of the oldest row in ring order.
        self._is_ring = True
        self._place = ledger.place_in_log  # as of ``_noted``, for rows that are placed later
        if ledger.length and (self._noted > ledger.cleared or not before):
            self._rebuild()

    def _use(self, streams: StreamEpisodes) -> None:
        """Answer queries by streams, without a call in between. `StreamEpisodes` describes them.

        ``pool`` has the streams without the rows that ``sync`` would index.
        """
        self._streams = self.pool = streams
        self.time_and_lane, self.element = streams.place, streams.element
        self.around, self.episodes_at = streams.around, streams.lookup
        self.totals, self.total = streams.totals, streams.total
        self.find, self.slices = streams.find, streams.slices
        self.table, self.longest, self.nbytes = streams.table, streams.longest, streams.nbytes

    def _new(self, lanes: int, **start: Any) -> StreamEpisodes:
        if self.key is None:
            return StreamEpisodes(self.slots, lanes, **start)
        leaf = self._columns.schema.leaves[self.key]
        return StreamEpisodes(self.slots, keys=key_dtype(leaf.shape, leaf.dtype))

    @property
    def lanes(self) -> int:
        """Number of lanes, or of streams that have stored rows."""
        return self._streams.lanes

    @property
    def in_ring(self) -> bool:
        """True if the next row of a lane lies in its next slot, round the ring."""
        return self.key is None

    @property
    def _in_order(self) -> bool:
        """True if the difference between time and row id is the same for all rows of a ring.

        After placed rows, it becomes True again when all of these are overwritten.
        """
        return self._noted - (self._streams.hi - self._streams.lo) >= self._ordered_from

    @property
    def indexed_until(self) -> int:
        """Row id of the next row to index; before a rebuild, row id of the oldest row."""
        ledger = self._storage.ledger
        return ledger.next_position - ledger.length if self._is_outdated else self._noted

    @property
    def _is_outdated(self) -> bool:
        """True if the index has to read all stored rows again."""
        return self._edited or self._storage.ledger.changes != self._changes

    # -- following writes -----------------------------------------------------------------------

    def edited(self) -> None:
        """Follow an edit that is about to change a column that ends episodes, or has changed it."""
        if self.key is not None:
            self.sync()
        self._edited = True

    def append(self, rows: Rows) -> None:
        """Follow a write of rows at the cursor; index these rows now or later."""
        behind, most = self._storage.ledger.next_position - self._noted, 1
        if self._reader.waits:
            if behind == len(rows) <= self.slots and rows.on_cpu():
                self.append_rows(rows)
                return
            most = self.slots // _PARTS
        elif self.key is not None:
            most = _BEHIND
        may_wait = self._noted and self.slots >= _LEAST and not self._is_outdated
        if behind >= most or not may_wait:
            self.sync()

    def sync(self) -> None:
        """Index all rows written since the last call. Cost: O(rows written)."""
        ledger = self._storage.ledger
        if self._is_outdated:
            self._rebuild()
            return
        behind = ledger.next_position - self._noted
        if not behind:
            return
        if ledger.by_stream:
            self._append_placed(behind)
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
        ledger, count = self._storage.ledger, len(rows)
        before = ledger.next_position - count
        if ledger.changes != self._changes and ledger.cleared == before:
            self._restart(0)
            self._is_ring = True
        elif ledger.changes != self._changes or self._noted != before or not self._is_ring:
            self._rebuild()
            return
        # All rows that were edited or placed earlier are overwritten.
        if count >= self.slots:
            self._edited, self._ordered_from = False, 0
        columns = rows.leaves
        for start in range(0, count, self.slots):
            stop = min(count, start + self.slots)
            leaves = {path: columns[path][start:stop] for path in self.bound.paths}
            row_ids = np.arange(before + start, before + stop)
            slots = (ledger.cursor - ledger.next_position + row_ids) % self.slots
            self._append_leaves(leaves, slots, row_ids)
        self._noted, self._changes = ledger.next_position, ledger.changes

    def placed(self, rows: Rows, slots: Array | range) -> None:
        """Index the last rows written, each in a slot of its stream.

        ``slots`` are int64 ``[n]`` or a range: free slots after the stored rows, or the slot of the
        oldest row of the stream.
        """
        ledger, count = self._storage.ledger, len(rows)
        if self._is_outdated or ledger.next_position - self._noted != count:
            self._rebuild()
            return
        row_ids, first = np.arange(self._noted, self._noted + count), int(slots[0])
        if isinstance(slots, range) or (slots == np.arange(first, first + count)).all():
            self._append_stored(first, first + count, row_ids)
        else:
            columns = rows.leaves
            leaves = {path: columns[path] for path in self.bound.paths}
            self._append_leaves(leaves, slots, row_ids)
        self._noted = ledger.next_position
        self.leave_ring()

    def replace_run(self, gone: list[Any], key: Any, slot: int, count: int) -> None:
        """Forget streams, and index the last ``count`` rows written as a new stream.

        The index has all other rows. The new rows are in consecutive slots, without a stored row.
        """
        source, first = self._reader.stored(slot, slot + count)
        self._streams.replace_run(gone, source, first, count, key, slot, self._noted)
        self._noted += count
        self.leave_ring()

    def leave_ring(self) -> None:
        """Note that rows do not lie in a ring any more, up to the present place in the log."""
        self._place, self._is_ring = self._storage.ledger.place_in_log, False

    def follow_moves(self, slots: Array, before: int) -> None:
        """Index the streams again that have or had rows in slots, int64 ``[K]``, distinct.

        All other rows are in the index, which had the rows of slots below ``before``. No stream is
        cut without a flag. Cost: O(rows of these streams).
        """
        ledger, pool = self._storage.ledger, self._streams
        assert self.key is not None
        try:
            now = slots[slots < ledger.length]
            lanes = pool.place(slots[slots < before])[1]
            given = self._columns[self.key][torch.from_numpy(now)]
            found = pool.ranks(np.unique(stream_keys(given)))
            lanes = np.unique(np.concatenate([lanes, found[found >= 0]]))
            keys, sizes = self.keys(lanes), self.sizes()[lanes]
            stay = pool.oldest(keys, sizes)
            slots = np.concatenate([stay[~np.isin(stay, slots)], now])
            going_on = {keys[i] for i in np.flatnonzero(pool.per_lane()[2, lanes])}
            pool.drop_oldest(keys, sizes, forget=True)
            row_ids = self.row_ids(slots)
            order = row_ids.argsort()
            self._append_found(slots[order], row_ids[order])
            pool.joined.update(key for key in going_on if key not in pool)
        except BaseException:
            self._edited = True  # the next use indexes all rows again
            raise
        self._noted, self._changes = ledger.next_position, ledger.changes
        self.leave_ring()

    def _append_placed(self, behind: int) -> None:
        """Index the newest ``behind`` rows, which another process wrote by stream."""
        ledger = self._storage.ledger
        slots = np.unique(ledger.written_since(self._place)[1])
        row_ids = self.row_ids(slots)
        order = np.argsort(row_ids)[np.count_nonzero(row_ids < self._noted) :]
        if len(order) != behind:  # rows were overwritten before they were indexed
            self._rebuild()
            return
        self._append_found(slots[order], row_ids[order])
        self._noted = ledger.next_position
        self.leave_ring()

    def _append_found(self, slots: Array, row_ids: Array) -> None:
        """Index stored rows of streams, in the order of their ids."""
        at = torch.from_numpy(slots)
        leaves = {path: self._columns[path][at] for path in self.bound.paths}
        heads = partial(known_heads, self._new(0), 0, self._storage.indexes, self.rule)
        self._append_leaves(leaves, slots, row_ids, heads=heads)

    def close(self, lanes: Array, code: int) -> None:
        """End the open episodes of lanes, bool ``[lanes]``, with the code."""
        self.sync()
        self._streams.close(lanes, code)
        if code == RESTORED and self.key is not None and self._ordered_from:
            self._edited = True  # streams that missing rows have ended end by this code, too

    def _append_stored(
        self,
        first: int,
        until: int,
        row_ids: Array | None = None,
        cuts: tuple[Array, Array] | None = None,
        **more: Any,
    ) -> None:
        """Index the stored rows of slots ``[first, until)``.

        A ring is cut after the rows ``cuts``; see ``seams``. For streams, ``row_ids`` are given if
        rows were not appended, and ``more`` has cuts and heads as for ``append_streams``.
        """
        source, at = self._reader.stored(first, until)
        if self.key is None:
            after, ends = (None, None) if cuts is None else (cuts[0] + at, cuts[1])
            self._streams.append_columns(source, at, at + until - first, after, ends)
            return
        slots = np.arange(first, until)
        if row_ids is None:
            ledger = self._storage.ledger
            row_ids = ledger.next_position - 1 - (ledger.cursor - 1 - slots) % self.slots
        keys = stream_keys(self._columns[self.key][first:until])
        self._streams.append_streams(source, at, keys, slots, row_ids, **more)

    def _append_leaves(
        self, leaves: Mapping[Path, torch.Tensor], slots: Array, row_ids: Array, **more: Any
    ) -> None:
        """Index rows of a batch, with cuts and heads as for ``_append_stored``."""
        leaves = {path: as_plain(leaf) for path, leaf in leaves.items()}
        source = self._reader.copied(leaves, len(slots))
        if self.key is None:
            self._streams.append_columns(source, 0, len(slots), None, None)
        else:
            keys = stream_keys(leaves[self.key])
            self._streams.append_streams(source, 0, keys, slots, row_ids, **more)

    def _rebuild(self) -> None:
        """Index all stored rows again, at new times, in one pass over the columns.

        If the first row of an episode was overwritten, its beginning is kept, provided that its
        rows are the same.
        """
        old = self._streams
        old.arrange()
        try:
            self._index_all(old)
        except BaseException:
            self._use(old)  # the next rebuild needs its beginnings
            raise

    def _index_all(self, old: StreamEpisodes) -> None:
        ledger, noted, slots = self._storage.ledger, self._noted, self.slots
        length = ledger.length
        # The oldest row is in slot 0. In a full ring, it is at the cursor.
        start = ledger.cursor if length == slots else 0
        order, row_ids = None, positions_from(ledger, start)
        if ledger.by_stream and length:
            order = ledger.write_order()
            row_ids = ledger.positions(order).numpy()
        oldest = ledger.next_position - length if row_ids is None else int(row_ids[0])

        after, ends, severed = seams(
            self._storage.indexes.marks,
            row_ids,
            oldest,
            length,
            old.lanes if self.key is None else 1,
            ledger.next_position,
            by_stream=ledger.by_stream,
        )

        def heads(keys: Array | None, slot: Array, row_id: Array) -> Array:
            if len(severed):  # any row may have cut the first episodes
                return np.zeros((len(row_id), 3), np.int64)
            return known_heads(old, noted, self._storage.indexes, self.rule, keys, slot, row_id)

        if self.key is None and length:
            lanes, cleared = np.arange(old.lanes), 0 if len(severed) else ledger.cleared
            known = heads(None, start * old.lanes + lanes, np.full(old.lanes, oldest))
            self._restart(start, known, unknown=oldest != cleared)
        else:
            self._restart(start)
        self._ordered_from = ledger.next_position if len(severed) else 0
        if self.key is None:
            turn = min(length, slots - start)  # number of the first row that wraps to slot 0
            for first, until, slot in ((0, turn, start), (turn, length, 0)):
                low, high = np.searchsorted(after, (first, until))
                cuts = (after[low:high] - first, ends[low:high]) if low < high else None
                if first < until:
                    self._append_stored(slot, slot + until - first, cuts=cuts)
        elif length:
            stops = np.zeros(length, np.uint8)
            stops[after] = ends[:, 0]
            self._append_blocks(start, order, row_ids, oldest, severed, stops, heads)
        self._noted, self._changes, self._edited = ledger.next_position, ledger.changes, False
        self._place = ledger.place_in_log
        self._is_ring = not ledger.by_stream and (length == slots or ledger.cursor == length)

    def _append_blocks(
        self,
        start: int,
        order: torch.Tensor | None,
        row_ids: Array | None,
        oldest: int,
        severed: Array,
        stops: Array,
        heads: Any,
    ) -> None:
        """Index the stored rows of streams in blocks, from the slot ``start`` on or in an order."""
        length, slots, done = len(stops), self.slots, 0
        while done < length:
            # A block ends at the last slot, because its rows are read as one slice.
            until = min(length, done + _BLOCK, slots - start if done < slots - start else length)
            part = slice(done, until)
            ids = np.arange(oldest + done, oldest + until) if row_ids is None else row_ids[part]
            # Rows of different segments do not follow one another.
            segments = np.searchsorted(severed, np.arange(done, until))
            cuts: dict[str, Any] = {"segments": segments, "stops": stops[part], "heads": heads}
            if order is None:
                first = (start + done) % slots
                self._append_stored(first, first + until - done, ids, **cuts)
            else:
                leaves = {path: self._columns[path][order[part]] for path in self.bound.paths}
                self._append_leaves(leaves, order[part].numpy(), ids, **cuts)
            done = until
        # The next row continues only streams of the last segment. A rebuild after that row would
        # cut the same streams.
        self._streams.close(self._streams.per_lane()[5] != len(severed), SEVERED)

    def _restart(self, start: int, known: Array | None = None, *, unknown: bool = False) -> None:
        """Begin without rows, at times that are new.

        ``start`` is the slot of the first row. ``known`` has the result of ``known_heads`` for a
        ring. The other beginnings are ``unknown``, unless the rows come after a clear.
        """
        old, ledger = self._streams, self._storage.ledger
        went_on = ledger.cleared == self._noted  # open episodes of cleared rows may continue
        self._versions += old.version + 1
        self.rebuilt += 1
        if self.key is not None:
            self._use(new := self._new(0))
            new.joined = set(old.joined)
            if went_on:
                new.joined.update(old.keys[old.per_lane()[2] != 0].tolist())
            return
        lanes = old.lanes
        if old.hi > old.lo:
            self._after_clear = np.where(went_on & (old.per_lane()[2] != 0), _CUT, _RESET)
        gone, head = np.zeros(lanes, np.int64), self._after_clear
        if known is not None:
            gone = known[:, 0]
            head = np.where(known[:, 1] > 0, known[:, 1], _CUT if unknown else head)
        start += -(-old.hi // self.slots) * self.slots
        self._use(self._new(lanes, start=start, gone=gone, head=head))

    # -- state ----------------------------------------------------------------------------------

    def first(self) -> tuple[int, Any, Any]:
        """Return the row id of the oldest row, and the beginnings of its episodes.

        A beginning consists of a row id and a ``Head``, ``[lanes]`` each. The row id is -1 if the
        episode begins with the oldest row. Storages in files call this after every write, if rows
        lie in a ring.
        """
        self.sync()
        lo, hi = self._streams.lo, self._streams.hi
        if self.lanes != 1 or hi == lo or not self._in_order:
            known = self.state()
            return known["oldest"], known["begin"], known["head"]
        _, _, begin, _, _, head = self._streams.around(np.array([lo % self.slots]))[:, 0].tolist()
        oldest = self._noted - (hi - lo)
        begin = -1 if begin == lo else begin + oldest - lo
        return oldest, (begin,), (_RESET if head == _EVICTED else head,)

    def _misses_rows(self) -> bool:
        """Return whether the first or the last row of a ring shows that row ids are missing.

        The rows of a ring are in order only if their ids rise by 1 up to the next row's.
        """
        ledger = self._storage.ledger
        if ledger.in_order or not ledger.length:
            return False
        first = ledger.cursor if ledger.length == self.slots else 0
        ends = self.row_ids(np.array([first, (first - 1) % ledger.length]) * self.lanes)
        return ends.tolist() != [ledger.next_position - ledger.length, ledger.next_position - 1]

    def state(self, kept: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the part of the index that cannot be derived from the rows.

        This part consists of the beginnings of episodes whose first rows are not stored.

        Args:
            kept: slots of the stored rows to save, int64 ``[K]``; None for all rows.

        Cost: as ``sync``; O(1) after rows were placed in a ring, of which no begin is saved.
        """
        unknown: dict[str, Any] = {"oldest": -1, "begin": [], "head": []}
        if self.key is None and kept is None and self._misses_rows():
            return unknown
        self.sync()
        streams = self._streams
        if self.key is None:
            lane = np.arange(self.lanes)
            if streams.hi == streams.lo or not (self._in_order or kept is not None):
                return unknown
            slot, oldest = streams.lo % self.slots, self._noted - (streams.hi - streams.lo)
            if kept is not None:
                row_ids = self._storage.ledger.positions(kept)
                at = int(row_ids.argmin())
                slot, oldest = int(kept[at]), int(row_ids[at])
            _, _, gone, head = heads_to_save(streams, slot * self.lanes + lane, lane).T
            begin = np.where(gone > 0, oldest - gone, -1)
            return {"oldest": oldest, "begin": begin, "head": head}
        slots = streams.late_begins() if kept is None else kept.numpy()
        if not len(slots):  # without the numbers of lanes, which cost O(lanes)
            return {"oldest": -1, "begin": [], "head": [], "streams": []}
        row_id, lane = self.row_ids(slots), streams.place(slots)[1]
        order = np.lexsort((row_id, lane))
        first = order[np.flatnonzero(np.diff(lane[order], prepend=-1))]
        rows = heads_to_save(streams, slots[first], row_id[first])
        rows = rows[(rows[:, 2] > 0) | (rows[:, 3] != _RESET)]  # without rows that are resets
        return {"oldest": -1, "begin": [], "head": [], "streams": rows.tolist()}

    # -- streams --------------------------------------------------------------------------------

    def sizes(self, keys: Array | None = None) -> Array:
        """Return the count of stored rows of every stream, or of the streams ``keys``.

        ``stream_keys`` describes keys. The count is 0 for a stream without stored rows.
        """
        lo, hi = self._streams.per_lane()[:2]
        if keys is None:
            return hi - lo
        return np.append(hi - lo, 0)[self._streams.ranks(keys)]

    def lanes_with(self, keys: Array | list[Any]) -> Array:
        """Return the lanes of the streams with these keys that have stored rows, ascending."""
        lane = self._streams.ranks(np.asarray(keys, self._streams.keys.dtype))
        return np.sort(lane[lane >= 0])

    def oldest(self) -> int:
        """Return the lowest stored row id of streams. Cost: O(streams).

        At least one row must be stored.
        """
        lane = np.arange(self.lanes)
        return int(self.row_ids(self.element(self.bounds(lane)[0], lane)).min())

    def keys(self, lanes: Array) -> list[Any]:
        """Return the keys (``stream_keys``) of lanes, given by number or as bool ``[lanes]``."""
        return list(self._streams.keys[lanes].tolist())

    # -- rows -----------------------------------------------------------------------------------

    def row_ids(self, element: Array) -> Array:
        """Return the row ids of stored elements."""
        slots = element // self.lanes if self.key is None else element
        return self._storage.ledger.positions(torch.from_numpy(slots)).numpy()

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """Return ``lo, hi`` of lanes. Rows with ``lo <= time < hi`` are stored.

        In a ring, these are two ints, since all lanes have the same bounds.
        """
        if self.key is None:
            return self._streams.lo, self._streams.hi
        lo, hi = self._streams.per_lane()[:2, lane]
        return lo, hi

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return the times of the first stored row and the last row of rows' episodes."""
        begin, last, _, _ = self._streams.lookup(time, lane)
        return np.maximum(begin, self.bounds(lane)[0]), last

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Return the elements of single rows, given their numbers among the drawable rows."""
        return self._streams.pick(law, WINDOWS, number)

    def ended_among(self, slots: Array) -> tuple[Array, Array, Array]:
        """Return the ends of episodes among the rows in distinct slots, int64 ``[K]``.

        An end is a row that terminated or was truncated. The result has three arrays: time, lane
        and ``EndReason``, int64 ``[m]`` each.
        """
        if self.key is None:
            slots = (slots[:, None] * self.lanes + np.arange(self.lanes)).reshape(-1)
        time, lane = self.time_and_lane(slots)
        code = self._streams.rows(time, lane)[1]
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        return time[ended], lane[ended], code[ended]

    def begins(self, time: Array, lane: Array) -> Array:
        """Return the times at which rows' episodes began, even before all stored rows."""
        return self._streams.lookup(time, lane)[0]

    def heads(self, time: Array, lane: Array) -> Array:
        """Return the ``Head`` of the episodes of rows."""
        return self._streams.lookup(time, lane)[3]

    def reasons(self, time: Array, lane: Array) -> Array:
        """Return the ``EndReason`` of the episodes of rows."""
        return np.minimum(self._streams.lookup(time, lane)[2], int(EndReason.CUT))

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return first and last time of the unbroken part of a stream around each row.

        An unbroken part may contain several episodes. It ends at the write seam, at missing rows
        and at restarts.
        """
        _, _, first, last, _ = self._streams.rows(time, lane)
        return first, last

    def positions(self, time: Array, lane: Array) -> Array:
        """Return the row ids of rows.

        The rows may include overwritten rows whose episode has stored rows. For the first row of an
        episode, the result is exact. For other overwritten rows of interleaved streams, the result
        is a lower bound.
        """
        if self.key is None and self._storage.ledger.in_order:
            return time + (self._storage.ledger.next_position - self._streams.hi)
        stored = np.maximum(time, self.bounds(lane)[0])
        found = self.row_ids(self.element(stored, lane))
        if self.key is None:
            return found - (stored - time)
        begin = self.begins(stored, lane)
        gone = self._streams.rows(stored, lane)[4] + time - begin
        return np.where(time < stored, gone, found)

    def ids(self, time: Array, lane: Array) -> Array:
        """Return unique episode ids.

        They are the row ids of first rows, or ``row id * lanes + lane`` in a ring of lanes.
        """
        if self.key is not None:
            return self._streams.rows(time, lane)[4]
        return self.positions(self.begins(time, lane), lane) * self.lanes + lane

    # -- windows --------------------------------------------------------------------------------

    def runs(self, start: Array, length: int) -> Array:
        """Return the elements of ``length`` rows of a lane, from each element ``[K]`` on."""
        if self.key is None:
            element = (start[:, None] + np.arange(0, length * self.lanes, self.lanes)).reshape(-1)
            element %= self.slots * self.lanes
            return element
        time, lane = self.time_and_lane(start)
        every = (time[:, None] + np.arange(length)).reshape(-1)
        return self.element(every, np.repeat(lane, length))

    def eligible_starts(self, law: CountLaw, time: Array, lane: Array) -> Array:
        """Return whether windows of a law may start with these stored rows, bool ``[K]``.

        Windows start with the first ``law.count`` usable rows of an episode.
        """
        begin, last, code, head = self.episodes_at(time, lane)
        first = np.maximum(begin, self.bounds(lane)[0])
        count, _, skip = law.counts(last + 1 - first, head == int(Head.RESET), code == CONTINUES)
        number = time - first - skip
        return np.asarray((number >= 0) & (number < count))

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._versions + self._streams.version

    def newest_version(self) -> int:
        """Return ``version`` after indexing all rows written, also by other processes."""
        with self._storage.lock:
            self.sync()
            return self.version

    @property
    def numbering(self) -> int:
        """A number that changes when streams are added or dropped."""
        self._streams.arrange()
        return self._streams.numbering

    def stored_rows(self) -> int:
        """Return the number of stored rows of all lanes."""
        return int(self.sizes().sum())
