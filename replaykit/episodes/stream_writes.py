"""How an index of interleaved streams is kept up with what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.codes import SEVERED, Head
from replaykit.episodes.index import EpisodeIndex
from replaykit.episodes.rule import BoundaryRule
from replaykit.episodes.stream_keys import cell_bytes, key_dtype, stream_keys
from replaykit.episodes.streams import StreamEpisodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.source import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

__all__ = ["StreamWrites"]

Array = np.ndarray[Any, Any]

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
