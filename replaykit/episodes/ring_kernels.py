"""Keep the episodes of a ring in the compiled core, if it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from replaykit import native
from replaykit.episodes.episode_laws import CountLaw, EpisodeTable, Found
from replaykit.episodes.ring import RingEpisodes
from replaykit.native.fallback import row_stride
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.episodes.boundaries import BoundColumns

__all__ = ["NativeRing", "new_ring"]

Array = np.ndarray[Any, Any]

_FLAGS: Final = frozenset(
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
_SIGNED_ZERO: Final = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Numbers whose highest bit alone makes a zero too."""

_TRUNCATED, _DONE, _TERMINAL, _INIT = range(4)


class NativeRing:
    """What ``RingEpisodes`` is, with the same arguments, face and results.

    After a write ``totals`` and ``find`` cost O(new episodes + lanes), and a search
    O(log episodes), by the laws asked for before; the eight used last are kept. 8 bytes a row, 8 an
    episode and half a byte an episode and law. Reads of other memory than what is stored are
    refused.

    Raises:
        ValueError, TypeError: arrays of another length or dtype. IndexError: rows that are not
            stored, numbers beyond what there is.

    Example:
        >>> import numpy as np
        >>> from replaykit import native
        >>> from replaykit.episodes.episode_laws import WINDOWS, CountLaw
        >>> from replaykit.episodes.ring_kernels import new_ring
        >>> ring = new_ring(slots=8, lanes=1)
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
        core = native.core()
        self._core = made = core.Episodes(
            slots,
            lanes,
            start,
            None if begin is None else np.asarray(begin, np.int64),
            None if head is None else np.asarray(head, np.int64),
        )
        self._new_columns = core.EpisodeColumns
        self.slots, self.lanes = slots, lanes
        # Every write and every draw goes through these: no look-up of attributes on the way.
        self.append = made.append
        self.close = made.close
        self.forget_ids = made.forget_ids
        self.longest = made.longest
        self.nbytes = made.nbytes
        self._find, self._totals, self._lookup = made.find, made.totals, made.lookup
        self._note = made.append_columns
        self._around, self._pick, self._total = made.around, made.pick, made.total
        self._slices = made.slices
        # Columns that rows were noted from: as the core takes them, or None where it cannot.
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

    # -- rows from where they are stored ----------------------------------------------------------

    def append_columns(
        self,
        bound: BoundColumns,
        columns: Any,
        first: int,
        until: int,
        ends: tuple[Array, Array] | None = None,
    ) -> bool:
        """Notes the rows in slots ``[first, until)`` of ``columns``, ids and all.

        Args:
            ends: slots after which streams end although no column says so, int64 ``[n]``, rising,
                and ``SEVERED`` or ``RESTORED`` for each lane, 0 where it goes on: uint8
                ``[n, lanes]``.

        Returns:
            False where that is for ``append``: columns on another device, values in pieces, or of
            a dtype that the core does not read.

        Raises:
            IndexError: slots that there are not. ValueError: other codes. RuntimeError: memory of
            the columns is gone.
        """
        if columns is not self._columns or bound is not self._bound:
            self._look_at(bound, columns)
        for tensor, address in self._watched:
            if tensor.data_ptr() != address:
                columns.follow_memory()
                self._look_at(bound, columns)
                break
        if self._source is None:
            return False
        if ends is None:
            self._note(self._source, first, until)
        else:
            self._core.append_ending(self._source, first, until, *ends)
        return True

    def append_severed(self, codes: Array, after: Array, ends: Array) -> None:
        """As ``RingEpisodes`` has it. One by one: what the core reads itself goes the other way."""
        done = 0
        for row, own in zip(after.tolist(), ends, strict=True):
            self.append(codes[done : row + 1])
            done = row + 1
            for code in np.unique(own[own > 0]).tolist():
                self.close(own == code, code)
        self.append(codes[done:])

    def _look_at(self, bound: BoundColumns, columns: Any) -> None:
        self._bound, self._columns = bound, columns
        self._source = self._as_source(bound, columns)
        memory = {}
        if self._source is not None:
            for path in bound.paths:  # leaves of one record move together
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
        """Ids of the newest row, uint8 ``[lanes, bytes]``; None: the next ones are compared with
        nothing."""
        found = self._core.last_ids()
        if found is None:
            return None
        return np.frombuffer(found, np.uint8).reshape(self.lanes, len(found) // self.lanes)

    def set_last_ids(self, ids: Array) -> None:
        """Tells the ids of the newest row, when it came by ``append``."""
        self._core.set_last_ids(ids.tobytes())

    # -- one row ----------------------------------------------------------------------------------

    def lookup(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Begin and last of the episodes of stored rows, the last row's code, the head."""
        out = np.empty((4, len(time)), np.int64)
        self._lookup(time, lane, out)
        begin, last, code, head = out
        return begin, last, code, head

    def first(self) -> tuple[int, int]:
        """Begin and head of the oldest row's episode, in a ring of one lane."""
        found: tuple[int, int] = self._core.first()
        return found

    def around(self, element: Array) -> Array:
        """Time, lane, begin, last, code and head of stored elements: int64 ``[6, K]``."""
        out = np.empty((6, len(element)), np.int64)
        self._around(element, out)
        return out

    def codes(self, time: Array, lane: Array) -> Array:
        """What was noted of stored rows."""
        out = np.empty((1, len(time)), np.int64)
        self._core.codes(time, lane, out)
        return out[0]

    @property
    def open_lanes(self) -> Array:
        """Bool ``[lanes]``: whether the newest row's episode may go on."""
        return self._per_lane()[0] != 0

    @property
    def head_begin(self) -> Array:
        """int64 ``[lanes]``: where the episode of the oldest row began if that is gone, else -1."""
        return self._per_lane()[1]

    def _per_lane(self) -> Array:
        out = np.empty((2, self.lanes), np.int64)
        self._core.per_lane(out)
        return out

    def severed(self) -> Array:
        """Time and lane of the rows that were severed from what follows: int64 ``[m, 2]``."""
        return np.array(self._core.severed(), np.int64).reshape(-1, 2)

    # -- all episodes -----------------------------------------------------------------------------

    def table(self) -> EpisodeTable:
        """All stored episodes. Cost: O(episodes)."""
        out = np.empty((6, self._core.count()), np.int64)
        self._core.table(out)
        return tuple.__new__(EpisodeTable, out)

    def totals(self, law: CountLaw, kind: int) -> Array:
        """int64 ``[lanes]``: how many windows, episodes or rows there are in each lane."""
        out = np.empty((1, self.lanes), np.int64)
        self._totals(*law.key(), kind, out)
        return out[0]

    def total(self, law: CountLaw, kind: int) -> int:
        """The sum of ``totals``."""
        return self._total(*law.key(), kind)

    def find(self, law: CountLaw, kind: int, number: Array) -> Found:
        """Looks windows (episodes, rows) up by their number, int64 ``[K]``."""
        out = np.empty((5, len(number)), np.int64)
        self._find(*law.key(), kind, number, out)
        return tuple.__new__(Found, out)

    def pick(self, law: CountLaw, kind: int, number: Array) -> Array:
        """Elements of single rows by their number: what ``find`` says, in the ring."""
        out = np.empty((1, len(number)), np.int64)
        self._pick(*law.key(), kind, number, out)
        return out[0]

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Elements of windows of ``length`` rows by number, one window after another, and the place
        of each one's window among the numbers."""
        rows = len(number) * length
        element, window = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self._slices(*law.key(), number, length, element, window)
        return element, window


def _cells(tensor: torch.Tensor, ndim: int) -> tuple[int | None, int]:
    """Bytes between the cells of a column, None where the core cannot read it; values of a cell."""
    values = tensor.shape[ndim:].numel()
    plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type != "cpu" or not plain:
        return None, values
    return row_stride(tensor, ndim), values


def new_ring(slots: int, lanes: int, **options: Any) -> Any:
    """Returns an empty ring of episodes; the options are those of ``RingEpisodes``."""
    kernel = RingEpisodes if native.core() is None else NativeRing
    return kernel(slots, lanes, **options)
