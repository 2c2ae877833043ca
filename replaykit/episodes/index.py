"""One truth about episodes for everything that samples, looks at or transforms sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes.codes import GOES_ON, EndReason, Head
from replaykit.episodes.found import Found
from replaykit.episodes.law import ROWS, WINDOWS, CountLaw
from replaykit.episodes.ring_writes import RingWrites
from replaykit.episodes.seams import between

__all__ = ["EpisodeIndex", "Windows"]

Array = np.ndarray[Any, Any]

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
