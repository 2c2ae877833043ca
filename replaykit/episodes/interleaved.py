"""Index the episodes of streams whose rows lie interleaved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.boundaries import BoundaryRule
from replaykit.episodes.episode_laws import SEVERED, WINDOWS, CountLaw, EndReason, Head
from replaykit.episodes.index import EpisodeIndex, Windows
from replaykit.episodes.streams import StreamEpisodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

__all__ = ["InterleavedIndex", "StreamWrites", "cell_bytes", "key_dtype", "stream_keys"]

Array = np.ndarray[Any, Any]


def key_dtype(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Returns the dtype of the keys of cells of some shape: int64 for a whole number or a flag,
    else bytes.

    Example:
        >>> import torch
        >>> from replaykit.episodes.interleaved import key_dtype
        >>> key_dtype([1], torch.uint8), key_dtype([2], torch.float32)
        (<class 'numpy.int64'>, 'S8')
    """
    small = math.prod(shape) == 1 and not dtype.is_floating_point and not dtype.is_complex
    return np.int64 if small else f"S{max(1, cell_bytes(shape, dtype))}"


def stream_keys(values: torch.Tensor) -> Array:
    """Returns a key for each cell of a column ``[n, *F]``, equal where all bits are: ``[n]``.

    Example:
        >>> import torch
        >>> from replaykit.episodes.interleaved import stream_keys
        >>> stream_keys(torch.tensor([[3], [1]])).tolist()
        [3, 1]
    """
    dtype = np.dtype(key_dtype(values.shape[1:], values.dtype))
    values = values.detach()
    if dtype == np.int64:
        return values.to(device="cpu", dtype=torch.int64).reshape(-1).numpy()
    own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    cells = own.view(-1).view(torch.uint8).numpy().reshape(len(values), -1)
    if not cells.shape[1]:
        return np.zeros(len(cells), dtype)
    return np.ascontiguousarray(cells).view(dtype).reshape(-1)


def cell_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns how many bytes a cell of a column takes."""
    return math.prod(shape) * dtype.itemsize


_BEHIND = 256
"""Rows that may have been written and are not noted yet: small writes are noted together."""

_LEAST = 16 * _BEHIND
"""Slots from which on that is so: twice the rows behind have to fit."""

_BLOCK = 2**20
"""Rows that are noted at a time when all are noted anew."""


class StreamWrites(EpisodeIndex):
    """The half of ``InterleavedIndex`` that is told of writes, notes rows anew, and is saved.

    Everything is kept in ``StreamEpisodes``; what is asked of it is for ``InterleavedIndex``.
    """

    def __init__(self, storage: RowSource, rule: BoundaryRule, *, before: int = 0) -> None:
        columns = storage.require()
        assert storage.lane_key is not None
        self.rule = rule
        self.key: Path = storage.lane_key
        self.bound = rule.bind(columns.schema)
        # In a lane the key never changes.
        self.bound.ids = tuple(path for path in self.bound.ids if path != self.key)
        self.bound.paths |= {self.key}
        self._storage, self._columns = storage, columns
        self.slots = columns.slots
        leaves = columns.schema.leaves
        ids = (leaves[path] for path in self.bound.ids)
        self._id_bytes = sum(cell_bytes(leaf.shape, leaf.dtype) for leaf in ids)
        self._streams = self._new()
        self._past = 0  # versions of the streams that are gone
        self.rebuilt = 0
        ledger = storage.ledger
        self._noted = ledger.next_position - before
        self._changes = ledger.changes
        self._edited = False
        self._is_ring = True
        self._placed = np.zeros(0, np.int64)  # slots of the rows placed last, if no others came
        if ledger.length and (self._noted > ledger.cleared or not before):
            self._rebuild()

    def _new(self) -> StreamEpisodes:
        leaf = self._columns.schema.leaves[self.key]
        return StreamEpisodes(self.slots, key_dtype(leaf.shape, leaf.dtype), self._id_bytes)

    @property
    def lanes(self) -> int:  # type: ignore[override]
        """Number of streams that have stored rows."""
        return len(self._streams.order)

    # -- being told of writes -------------------------------------------------------------------

    def edited(self) -> None:
        """Told that a column that bounds episodes is about to be changed in place."""
        self.sync()
        self._edited = True

    def follow(self, count: int) -> None:
        """Told of ``count`` rows that were written at the cursor: notes them now or soon."""
        behind = self._storage.ledger.next_position - self._noted
        if behind >= _BEHIND or self.slots < _LEAST or not self._noted:
            self.sync()

    def note_rows(self, rows: Rows) -> None:
        """Takes note of rows that were written last, also of those that are stored no more."""
        ledger, count = self._storage.ledger, len(rows)
        plain = ledger.changes == self._changes and not self._edited and self._is_ring
        if not plain or ledger.next_position - self._noted != count:
            self._rebuild()
            return
        for start in range(0, count, self.slots):
            stop = min(count, start + self.slots)
            leaves = {path: rows.leaves[path][start:stop] for path in self.bound.paths}
            positions = np.arange(start, stop) + (ledger.next_position - count)
            slots = (ledger.cursor - ledger.next_position + positions) % self.slots
            self._add(leaves, slots, positions)
        self._noted = ledger.next_position

    def placed(self, rows: Rows, slots: Array, displacing: Array, turn: Array) -> None:
        """Takes note of rows that were written last, each at a slot of its own stream.

        Args:
            slots: int64 ``[n]``, free ones up from the stored rows, or those of the oldest rows of
                the streams: in each turn one of them.
            displacing: bool ``[n]``, which of them had a row before.
            turn: int64 ``[n]``, rising in each stream; no slot comes twice in a turn.
        """
        ledger, count = self._storage.ledger, len(rows)
        plain = ledger.changes == self._changes and not self._edited
        if not plain or ledger.next_position - self._noted != count:
            self._rebuild()
            return
        leaves = {path: rows.leaves[path] for path in self.bound.paths}
        positions = np.arange(self._noted, self._noted + count)
        if not turn.any():
            self._add(leaves, slots, positions, displaced=slots[displacing])
        else:
            order = np.argsort(turn, kind="stable")
            for at in np.split(order, np.flatnonzero(np.diff(turn[order])) + 1):
                which = torch.from_numpy(at)
                part = {path: leaf[which] for path, leaf in leaves.items()}
                gone = slots[at[displacing[at]]]
                self._add(part, slots[at], positions[at], displaced=gone)
        self._noted, self._is_ring, self._placed = ledger.next_position, False, slots

    def close(self, lanes: Array, code: int) -> None:
        """Ends the open episodes of lanes, bool ``[lanes]``, with that code."""
        self.sync()
        self._streams.close(lanes, code)

    def _note(self, first: int, until: int) -> None:
        ledger = self._storage.ledger
        leaves = {path: self._columns[path][first:until] for path in self.bound.paths}
        slots = np.arange(first, until)
        positions = ledger.next_position - 1 - (ledger.cursor - 1 - slots) % self.slots
        self._add(leaves, slots, positions)

    def _add(
        self, leaves: Mapping[Path, torch.Tensor], slots: Array, positions: Array, **stops: Any
    ) -> None:
        codes, ids = self.bound.codes(leaves, 1)
        self._streams.append(
            stream_keys(leaves[self.key]),
            codes[:, 0],
            None if ids is None else ids[:, 0],
            slots,
            positions,
            **stops,
        )

    def _rebuild(self) -> None:
        """Notes all stored rows anew; one pass over the columns.

        Where an episode began whose first row is gone is kept, as long as its rows are the same.
        """
        ledger, old, slots = self._storage.ledger, self._streams, self.slots
        length = ledger.length
        noted, new = self._noted, self._new()
        self._streams = new
        self._past += old.version + 1
        new.joined = set(old.joined)
        if ledger.cleared > 0 and ledger.cleared == self._noted:
            new.joined.update(old.keys[old.lane.open[old.order] >= 0].tolist())
        # In a ring that is not full rows lie from slot 0 on; in a full one from the cursor on.
        start = ledger.cursor if length == slots else 0
        order = (np.arange(length) + start) % slots
        if ledger.by_stream:
            order = ledger.write_order().numpy()
        positions = ledger.positions(torch.from_numpy(order)).numpy() if length else order
        # Where streams lose their own oldest rows, none is missing between two that are stored.
        jumps = (np.diff(positions) != 1) & (not ledger.by_stream)
        segments = np.concatenate([[0], np.cumsum(jumps)])
        stops = np.zeros(length, np.uint8)
        if length:
            low, high = int(positions.min()), int(positions.max()) + 1
            marks, codes = self._storage.indexes.marks.among(low, high)
            by_position = np.argsort(positions, kind="stable")
            rows = by_position[np.searchsorted(positions[by_position], marks)]
            kept = positions[rows] == marks
            stops[rows[kept]] = codes[kept]
        done = 0
        while done < length:
            # Up to the end of the columns: rows are read as they lie there.
            until = min(length, done + _BLOCK, slots - start if done < slots - start else length)
            part, first = slice(done, until), int(order[done])
            lying: Any = slice(first, first + until - done)
            if ledger.by_stream:
                lying = torch.from_numpy(order[part])
            leaves = {path: self._columns[path][lying] for path in self.bound.paths}
            self._add(
                leaves,
                order[part],
                positions[part],
                segments=segments[part],
                stops=stops[part],
                displaced=order[:0] if ledger.by_stream else None,
            )
            done = until
        if length and not ledger.by_stream and positions[-1] + 1 != ledger.next_position:
            # Rows were placed by hand since: the next one goes on from none of these.
            self._streams.close(np.ones(self.lanes, np.bool_), SEVERED)
        self._noted, self._changes, self._edited = ledger.next_position, ledger.changes, False
        # Whether the next write takes the place of no row, or of the oldest in ring order.
        self._is_ring = ledger.length == slots or ledger.cursor == length
        self._is_ring &= not ledger.by_stream
        self._restore(old, noted)
        self.rebuilt += 1

    # -- state ----------------------------------------------------------------------------------

    def _heads(self, slots: Array) -> Array:  # type: ignore[override]
        """Of each of some rows that is not the reset of its episode: int64 ``[m, 4]``, its position
        and that of the first row of the episode, the rows between, ``Head``."""
        streams = self._streams
        time, record = streams.place(slots)
        one = streams.owner(time, record)
        position = self._storage.ledger.positions(torch.from_numpy(slots)).numpy()
        gone = time - streams.episode.begin[one]
        head = streams.episode.head[one].astype(np.int64)
        found = np.stack([position, streams.episode.position[one], gone, head], 1)
        return found[(gone > 0) | (head != int(Head.RESET))]

    def _oldest_of(self, kept: torch.Tensor) -> Array:
        """The oldest ones of some rows of each lane, as slots."""
        slots = kept.numpy()
        slots = slots[np.argsort(self._storage.ledger.positions(kept).numpy(), kind="stable")]
        _, first = np.unique(self._streams.place(slots)[1], return_index=True)
        return np.asarray(slots[first])

    def _restore(self, old: StreamEpisodes, noted: int) -> None:
        """Takes over how lanes began: from streams with which rows below a position were noted, or
        else from what was saved."""
        streams = self._streams
        lane, episode, order = streams.lane, streams.episode, streams.order
        if not len(order):
            return
        one = streams.at(order, lane.first[order])
        slots = streams.slot(lane.lo[order], order)
        position = self._storage.ledger.positions(torch.from_numpy(slots)).numpy()
        known = np.zeros((len(order), 4), np.int64)
        saved: list[list[int]] = []
        whole, trusted = False, self._trusts_others
        if trusted or not old.stored:
            saved, whole = self._storage.indexes.saved_streams()
        told = np.full(len(order), whole and trusted)
        if saved:
            given = np.array(saved, np.int64)
            given = given[np.argsort(given[:, 0], kind="stable")]
            at = np.minimum(np.searchsorted(given[:, 0], position), len(given) - 1)
            listed = given[at, 0] == position
            known[listed], told[listed] = given[at[listed]], True
        if old.stored:
            same = np.flatnonzero((position < noted) & ~told)
            time, record = old.place(slots[same])
            same, time, record = (
                part[old.keys[old.rank[record]] == streams.keys[same]]
                for part in (same, time, record)
            )
            was = old.owner(time, record)
            gone = time - old.episode.begin[was]
            known[same, 1:] = np.stack([old.episode.position[was], gone, old.episode.head[was]], 1)
        # A row that is stored as the first of its episode has nothing to be told but its head.
        told = (known[:, 2] > 0) | (known[:, 3] > int(Head.RESET))
        one, known = one[told], known[told]
        episode.begin[one] -= known[:, 2]
        episode.position[one], episode.head[one] = known[:, 1], known[:, 3]
        streams.version += 1

    def first(self) -> tuple[int, Any, Any]:
        """Nothing of what ``EpisodeIndex.first`` tells: how streams began, ``state`` says."""
        return -1, [], []

    def state(self, kept: torch.Tensor | None = None) -> dict[str, Any]:
        """Returns what does not follow from the rows: how lanes began; ``kept`` as for every
        index."""
        self.sync()
        lane, order = self._streams.lane, self._streams.order
        first = self._streams.slot(lane.lo[order], order) if kept is None else self._oldest_of(kept)
        streams = self._heads(first).tolist() if self.lanes else []
        return {"oldest": -1, "begin": [], "head": [], "streams": streams}


class InterleavedIndex(StreamWrites):
    """Where episodes begin and end among rows of which a column says to which stream they belong.

    The streams that have stored rows are the lanes, in the order of their keys; a lane's number is
    good until the next write. Rows of a stream that were written one after the other have
    consecutive times, whatever lies between them. A stream of which no row is left is forgotten:
    when it comes again it begins with a reset.

    Cost: O(rows written + streams among them), without a step of Python per row; ``totals``
    O(streams), ``find`` O(K log episodes). 24 bytes a row, and what episodes and streams take.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
        >>> done = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)
        >>> rows = {"env": torch.arange(6) % 2, "next": {"done": done}}
        >>> _ = rb.extend(TensorDict(rows, [6]))
        >>> index = rb.storage.episodes
        >>> type(index).__name__, index.lanes, index.longest()
        ('InterleavedIndex', 2, 3)
    """

    def _positions(self, slots: Array) -> Array:
        return self._storage.ledger.positions(torch.from_numpy(slots)).numpy()

    def sizes(self, keys: Array | None = None) -> Array:
        """Number of stored rows of every stream, or of those of some keys (``stream_keys``): 0
        where there is none."""
        streams = self._streams
        lane = streams.lane
        if keys is None:
            return lane.hi[streams.order] - lane.lo[streams.order]
        found, record = np.zeros(len(keys), np.int64), streams.records(keys)
        known = record >= 0
        found[known] = (lane.hi - lane.lo)[record[known]]
        return found

    def nth(self, keys: Array, number: Array) -> Array:
        """Slots of stored rows of streams by their keys, counted from the oldest, from 0."""
        record = self._streams.records(keys)
        return self._streams.slot(self._streams.lane.lo[record] + number, record)

    def oldest(self) -> int:
        """The least position of a stored row, of which there must be one. Cost: O(streams)."""
        streams = self._streams
        slots = streams.slot(streams.lane.lo[streams.order], streams.order)
        return int(self._positions(slots).min())

    def newest(self, lanes: Array | None = None) -> Array:
        """Positions of the newest rows of lanes, bool ``[lanes]``; None: of all."""
        streams = self._streams
        return streams.lane.newest[streams.order if lanes is None else streams.order[lanes]]

    def lanes_of(self, keys: Any) -> Array:
        """Bool ``[lanes]``: the lanes of some keys.

        Raises:
            IndexError: nothing of that stream is stored. TypeError: floats for whole numbers.
        """
        self.sync()
        streams, chosen = self._streams, np.zeros(self.lanes, bool)
        leaf = self._columns.schema.leaves[self.key]
        values = torch.as_tensor(keys, device="cpu")
        if values.is_floating_point() and not leaf.dtype.is_floating_point:
            raise TypeError(f"expected keys of streams as {leaf.dtype}, got {values.dtype}")
        cells = values.to(leaf.dtype).reshape(-1, *leaf.shape)
        for key, own in zip(stream_keys(cells).tolist(), cells.tolist(), strict=True):
            if key not in streams.known:
                raise IndexError(f"expected a stream of which rows are stored, got {own!r}")
            chosen[streams.rank[streams.known[key]]] = True
        return chosen

    def keys(self, lanes: Array) -> list[Any]:
        """The keys (``stream_keys``) of lanes, bool ``[lanes]``."""
        found: list[Any] = self._streams.keys[lanes].tolist()
        return found

    # -- rows -----------------------------------------------------------------------------------

    def place(self, element: Array) -> tuple[Array, Array]:
        """Time and lane of stored elements."""
        time, record = self._streams.place(element)
        return time, self._streams.rank[record]

    def element(self, time: Array, lane: Array) -> Array:
        """Elements of rows; the inverse of ``place``."""
        return self._streams.slot(time, self._streams.order[lane])

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """``lo, hi`` of lanes: stored rows are those with ``lo <= time < hi``."""
        record = self._streams.order[lane]
        return self._streams.lane.lo[record], self._streams.lane.hi[record]

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First stored and last row of the episodes of stored rows, as times."""
        streams, one = self._streams, self._owner(time, lane)
        first = np.maximum(streams.episode.begin[one], streams.lane.lo[streams.order[lane]])
        return first, streams.last(one)

    def episodes_at(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Begin and last row of the episodes of stored rows, code of the last row, ``Head``."""
        streams, one = self._streams, self._owner(time, lane)
        episode = streams.episode
        code = episode.code[one].astype(np.int64)
        return episode.begin[one], streams.last(one), code, streams.heads(one)

    def around(self, element: Array) -> Array:
        """Time, lane, begin, last, code of the last row and ``Head`` of stored elements: int64
        ``[6, K]``.

        Raises:
            IndexError: rows that are not stored.
        """
        stored = self._storage.ledger.length
        wrong = (element < 0) | (element >= stored)
        if wrong.any():
            raise IndexError(f"expected elements of stored rows, got {element[wrong][0]}")
        time, lane = self.place(element)
        return np.stack([time, lane, *self.episodes_at(time, lane)])

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Elements of single rows by number: ``find`` of a law of one row, and ``element``."""
        found = self.find(law, WINDOWS, number)
        return self.element(found.base + found.rest, found.lane)

    def ended_among(self, newest: int) -> tuple[Array, Array, Array]:
        """Rows with which an episode terminated or was truncated, among the ``newest`` stored ones
        of all: time, lane and ``EndReason``, int64 ``[m]``. Cost: O(newest), or of rows written by
        stream, where these are more than were written last, O(rows)."""
        ledger, streams = self._storage.ledger, self._streams
        slots = np.arange(ledger.length)
        if newest < ledger.length and self._is_ring:
            slots = (ledger.cursor - newest + np.arange(newest)) % self.slots
        elif newest < ledger.length and ledger.by_stream:
            if newest <= len(self._placed):
                slots = np.unique(self._placed[len(self._placed) - newest :])
            slots = slots[self._positions(slots) >= ledger.next_position - newest]
        if not len(slots):
            return slots, slots, slots
        time, lane = self.place(slots)
        one = self._owner(time, lane)
        code = streams.episode.code[one].astype(np.int64)
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        ended &= streams.last(one) == time
        return time[ended], lane[ended], code[ended]

    def begins(self, time: Array, lane: Array) -> Array:
        """Times at which episodes began, also where that row is stored no more."""
        return self._streams.episode.begin[self._owner(time, lane)]

    def heads(self, time: Array, lane: Array) -> Array:
        """``Head`` of the episodes of rows."""
        return self._streams.heads(self._owner(time, lane))

    def reasons(self, time: Array, lane: Array) -> Array:
        """``EndReason`` of the episodes of rows."""
        code = self._streams.episode.code[self._owner(time, lane)]
        return np.minimum(code, int(EndReason.CUT)).astype(np.int64)

    def _owner(self, time: Array, lane: Array) -> Array:
        return self._streams.owner(time, self._streams.order[lane])

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First and last row of what can be read without a gap around rows: across episodes, not
        across the write seam, nor where rows are missing or a run was restarted."""
        lo, hi = self.bounds(lane)
        first, last = lo.copy(), hi - 1
        severed = self._streams.severed()
        if not len(severed):
            return first, last
        record = self._streams.order[lane]
        by = np.lexsort((severed[:, 0], severed[:, 1]))
        at, own = severed[by, 0], severed[by, 1]
        begin, end = np.searchsorted(own, record), np.searchsorted(own, record, side="right")
        low = int(at.min())
        reach = max(int(at.max()), int(np.max(time, initial=0))) - low + 2
        after = np.searchsorted(own * reach + at - low, record * reach + np.maximum(time - low, 0))
        after = np.where(time < low, begin, after)
        bounded = np.append(at, 0)
        last = np.where(after < end, bounded[after], last)
        return np.where(after > begin, np.maximum(first, bounded[after - 1] + 1), first), last

    def positions(self, time: Array, lane: Array) -> Array:
        """Positions (``Ledger``) of rows; of those stored no more only of the first of an episode.

        What was written between them is not known: for the others it is a lower bound.
        """
        streams = self._streams
        lo = self.bounds(lane)[0]
        stored = np.maximum(time, lo)
        slots = torch.from_numpy(np.ascontiguousarray(self.element(stored, lane)))
        found = self._storage.ledger.positions(slots).numpy()
        one = self._owner(stored, lane)
        gone = streams.episode.position[one] + time - streams.episode.begin[one]
        return np.where(time < lo, gone, found)

    def ids(self, time: Array, lane: Array) -> Array:
        """Episode ids: the position of the first row; never used twice."""
        return self._streams.episode.position[self._owner(time, lane)]

    # -- windows --------------------------------------------------------------------------------

    def totals(self, law: CountLaw, kind: int) -> Array:
        """int64 ``[lanes]``: windows (episodes, rows) of every lane."""
        return self._streams.sums(law, kind).totals()

    def total(self, law: CountLaw, kind: int) -> int:
        """The sum of ``totals``."""
        return int(self.totals(law, kind).sum())

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Looks windows up by number: lanes in order, in a lane in the order of time."""
        return Windows(*self._streams.sums(law, kind).find(number))

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Elements of windows of ``length`` rows by number, one window after another, and the place
        of each one's window among the numbers: ``find`` and ``element`` in one."""
        found = self.find(law, WINDOWS, number)
        time = (found.base + found.rest)[:, None] + np.arange(length)
        lane = np.repeat(found.lane, length)
        window = np.repeat(np.arange(len(number)), length)
        return self.element(time.reshape(-1), lane), window

    def runs(self, start: Array, length: int) -> Array:
        """Elements of ``length`` rows of a stream from stored elements ``[K]`` on, one run after
        another."""
        time, lane = self.place(start)
        every = (time[:, None] + np.arange(length)).reshape(-1)
        return self.element(every, np.repeat(lane, length))

    def table(self) -> Any:
        """All stored episodes; see ``found.Table``. Cost: O(episodes)."""
        return self._streams.table()

    def longest(self) -> int:
        """Rows of the longest episode. Cost: O(episodes)."""
        table = self._streams.table()
        return int((table.last - table.first).max()) + 1 if len(table.last) else 0

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._past + self._streams.version

    @property
    def numbering(self) -> int:
        """Changes where streams come or go, and a number may mean another one than before."""
        return self._streams.numbering

    def stored_rows(self) -> int:
        """Number of stored rows, all lanes together."""
        return self._streams.stored

    def nbytes(self) -> int:
        """Bytes that the index takes."""
        return self._streams.nbytes()
