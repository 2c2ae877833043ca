"""Keep the episodes of a ring of rows, with one stream per lane, in the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from replaykit import native
from replaykit.episodes.episode_laws import CountLaw, EpisodeTable, Found
from replaykit.native import row_stride
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.episodes.boundaries import BoundColumns

__all__ = ["RingEpisodes"]

Array = np.ndarray[Any, Any]

_FLAGS: Final = frozenset(
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
_SIGNED_ZERO: Final = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Dtypes with a negative zero, which has a set bit although the flag is not set."""

_TRUNCATED, _DONE, _TERMINAL, _INIT = range(4)


class RingEpisodes:
    """The episodes among the rows ``lo <= time < hi`` of each of ``lanes`` lanes.

    The *time* of a row is its sequence number in its lane, int64. No time is used twice. The slot
    of a row is ``time % slots``.

    Args:
        start: the time of the first row.
        begin: int64 ``[lanes]``, the time at which the episode of a lane's first row began; -1 if
            the episode begins with that row.
        head: int64 ``[lanes]``, the ``Head`` of each lane's first episode; None for ``Head.RESET``.

    After a write, ``totals`` and ``find`` first take O(new episodes + lanes), for the eight laws
    that were used last. Each look-up then takes O(log episodes). Memory: 8 bytes per row, 8 per
    episode, and half a byte per episode and law. The core checks all bounds before it reads memory.

    Raises:
        ValueError, TypeError: an array has the wrong length or dtype.
        IndexError: a row is not stored, or a number is too large.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes.episode_laws import WINDOWS, CountLaw
        >>> from replaykit.episodes import RingEpisodes
        >>> ring = RingEpisodes(slots=8)
        >>> ring.append(np.array([[0], [0], [1], [0], [0]], np.uint8))
        >>> ring.totals(CountLaw.strict(2), WINDOWS).tolist()
        [3]
        >>> ring.find(CountLaw.strict(2), WINDOWS, np.array([2])).base.tolist()
        [3]
    """

    def __init__(
        self,
        slots: int,
        lanes: int = 1,
        *,
        start: int = 0,
        begin: Array | None = None,
        head: Array | None = None,
    ) -> None:
        self._core = made = native.core.Episodes(
            slots,
            lanes,
            start,
            None if begin is None else np.asarray(begin, np.int64),
            None if head is None else np.asarray(head, np.int64),
        )
        self._new_columns = native.core.EpisodeColumns
        self.slots, self.lanes = slots, lanes
        # Every write and draw calls these methods. Storing them here saves a look-up per call.
        self.append = made.append
        self.close = made.close
        self.forget_ids = made.forget_ids
        self.longest = made.longest
        self.nbytes = made.nbytes
        self._find, self._totals, self._lookup = made.find, made.totals, made.lookup
        self._append_run = made.append_columns
        self._around, self._pick, self._total = made.around, made.pick, made.total
        self._slices = made.slices
        # The columns of the indexed rows. `_source` is None if the core cannot read them.
        self._bound: BoundColumns | None = None
        self._columns: Any = None
        self._source: Any = None
        self._watched: list[tuple[torch.Tensor, int]] = []

    @property
    def lo(self) -> int:
        """Time of the oldest row."""
        return self._core.lo

    @property
    def hi(self) -> int:
        """Time of the next row."""
        return self._core.hi

    @property
    def version(self) -> int:
        """A number that changes with every change."""
        return self._core.version

    # -- rows read from their columns -------------------------------------------------------------

    def append_columns(
        self,
        bound: BoundColumns,
        columns: Any,
        first: int,
        until: int,
        ends: tuple[Array, Array] | None = None,
    ) -> bool:
        """Append the rows in slots ``[first, until)`` of ``columns``, with their ids.

        Args:
            ends: the cuts without a flag, as slots, int64 ``[n]``, ascending, and codes, uint8
                ``[n, lanes]``. A code is ``SEVERED``, ``RESTORED``, or 0 in lanes that continue.

        Returns:
            True if the rows were appended. False if the caller must use ``append``, because the
            columns are on another device, are not contiguous, or have a dtype that the core does
            not read.

        Raises:
            IndexError: a slot does not exist.
            ValueError: a code is unknown.
            RuntimeError: the memory of the columns was released.
        """
        if columns is not self._columns or bound is not self._bound:
            self._read_addresses(bound, columns)
        for tensor, address in self._watched:
            if tensor.data_ptr() != address:
                columns.refresh_addresses()
                self._read_addresses(bound, columns)
                break
        if self._source is None:
            return False
        if ends is None:
            self._append_run(self._source, first, until)
        else:
            self._core.append_ending(self._source, first, until, *ends)
        return True

    def append_severed(self, codes: Array, after: Array, ends: Array) -> None:
        """Append codes of new rows, and cut streams after the rows ``after``.

        If the core can read the columns, callers use ``append_columns`` instead.

        Args:
            codes: uint8 ``[n, lanes]``, including the codes of the cuts.
            after: int64 ``[m]``, indices of rows among the new rows.
            ends: uint8 ``[m, lanes]``, the code of the cut, or 0 in lanes that are not cut.
        """
        done = 0
        for row, own in zip(after.tolist(), ends, strict=True):
            self.append(codes[done : row + 1])
            done = row + 1
            for code in np.unique(own[own > 0]).tolist():
                self.close(own == code, code)
        self.append(codes[done:])

    def _read_addresses(self, bound: BoundColumns, columns: Any) -> None:
        self._bound, self._columns = bound, columns
        self._source = self._as_source(bound, columns)
        memory = {}
        if self._source is not None:
            for path in bound.paths:  # leaves of a record share memory, which is watched once
                tensor = columns[path]
                memory[tensor.untyped_storage().data_ptr()] = tensor
        self._watched = [(tensor, tensor.data_ptr()) for tensor in memory.values()]

    def _as_source(self, bound: BoundColumns, columns: Any) -> Any:
        plain_done = _DONE if bound.terminal is None else _TRUNCATED
        roles: list[tuple[Path, int]] = [
            (path, _TRUNCATED if path[-1] == "truncated" else plain_done) for path in bound.flags
        ]
        if bound.terminal is not None:
            roles.append((bound.terminal, _TERMINAL))
        if bound.init is not None:
            roles.append((bound.init, _INIT))
        ndim = columns.ndim
        flags, ids = [], []
        for path, role in roles:
            tensor = columns[path]
            stride, values = _cells(tensor, ndim)
            is_float = tensor.dtype in _SIGNED_ZERO
            if stride is None or not (is_float or tensor.dtype in _FLAGS):
                return None
            size = tensor.dtype.itemsize
            flags.append((tensor.data_ptr(), stride, values, size, is_float, role))
        for path in bound.ids:
            tensor = columns[path]
            stride, values = _cells(tensor, ndim)
            if stride is None:
                return None
            ids.append((tensor.data_ptr(), stride, values * tensor.dtype.itemsize))
        return self._new_columns(flags, ids, columns.slots, self.lanes)

    def last_ids(self) -> Array | None:
        """Return the ids of the newest row, uint8 ``[lanes, bytes]``, or None."""
        found = self._core.last_ids()
        if found is None:
            return None
        return np.frombuffer(found, np.uint8).reshape(self.lanes, len(found) // self.lanes)

    def set_last_ids(self, ids: Array) -> None:
        """Set the ids of the newest row after ``append``."""
        self._core.set_last_ids(ids.tobytes())

    # -- one row ----------------------------------------------------------------------------------

    def lookup(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Return begin, last, code of the last row, and head of stored rows' episodes."""
        out = np.empty((4, len(time)), np.int64)
        self._lookup(time, lane, out)
        begin, last, code, head = out
        return begin, last, code, head

    def first(self) -> tuple[int, int]:
        """Return begin and head of the oldest row's episode; the ring must have one lane."""
        found: tuple[int, int] = self._core.first()
        return found

    def around(self, element: Array) -> Array:
        """Return time, lane, begin, last, code, head of elements, int64 ``[6, K]``."""
        out = np.empty((6, len(element)), np.int64)
        self._around(element, out)
        return out

    def codes(self, time: Array, lane: Array) -> Array:
        """Return the codes of stored rows."""
        out = np.empty((1, len(time)), np.int64)
        self._core.codes(time, lane, out)
        return out[0]

    @property
    def open_lanes(self) -> Array:
        """True in lanes whose newest episode may continue, bool ``[lanes]``."""
        return self._per_lane()[0] != 0

    @property
    def head_begin(self) -> Array:
        """Time at which the oldest row's episode began, int64 ``[lanes]``.

        The time is -1 in lanes in which the first row of this episode is stored.
        """
        return self._per_lane()[1]

    def _per_lane(self) -> Array:
        out = np.empty((2, self.lanes), np.int64)
        self._core.per_lane(out)
        return out

    def severed(self) -> Array:
        """Return time and lane of the rows after which streams are cut, int64 ``[m, 2]``."""
        return np.array(self._core.severed(), np.int64).reshape(-1, 2)

    # -- all episodes -----------------------------------------------------------------------------

    def table(self) -> EpisodeTable:
        """Return all stored episodes. Cost: O(episodes)."""
        out = np.empty((6, self._core.count()), np.int64)
        self._core.table(out)
        return tuple.__new__(EpisodeTable, out)

    def totals(self, law: CountLaw, kind: int) -> Array:
        """Return the counts of windows, episodes or rows of lanes, int64 ``[lanes]``."""
        out = np.empty((1, self.lanes), np.int64)
        self._totals(*law.key(), kind, out)
        return out[0]

    def total(self, law: CountLaw, kind: int) -> int:
        """Return the sum of ``totals``."""
        return self._total(*law.key(), kind)

    def find(self, law: CountLaw, kind: int, number: Array) -> Found:
        """Look up windows, episodes or rows by number, int64 ``[K]``."""
        out = np.empty((5, len(number)), np.int64)
        self._find(*law.key(), kind, number, out)
        return tuple.__new__(Found, out)

    def pick(self, law: CountLaw, kind: int, number: Array) -> Array:
        """Return the elements of single rows by number, found by ``find``."""
        out = np.empty((1, len(number)), np.int64)
        self._pick(*law.key(), kind, number, out)
        return out[0]

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Return elements of windows of ``length`` rows by number, window after window.

        The second array has the position of each element's window in ``number``.
        """
        rows = len(number) * length
        element, window = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self._slices(*law.key(), number, length, element, window)
        return element, window


def _cells(tensor: torch.Tensor, ndim: int) -> tuple[int | None, int]:
    """Return the row stride of a column in bytes, and its count of numbers per row.

    The stride is None if the core cannot read the column.
    """
    values = tensor.shape[ndim:].numel()
    plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type != "cpu" or not plain:
        return None, values
    return row_stride(tensor, ndim), values
