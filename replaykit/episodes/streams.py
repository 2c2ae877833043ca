"""Keep the episodes among the rows of streams, in the compiled core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from replaykit import native
from replaykit.episodes.boundaries import BoundaryRule, CountLaw, EpisodeTable, Found, Head
from replaykit.native import row_stride
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.episodes.boundaries import BoundColumns, RowColumns, SavedEpisodes

Array = np.ndarray[Any, Any]
Heads = Callable[[Array, Array, Array], Array]

_FLAGS: Final = frozenset(
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
_SIGNED_ZERO: Final = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""Dtypes with a negative zero, which has a set bit although the flag is not set."""

_TRUNCATED, _DONE, _TERMINAL, _INIT, _CODE, _ID = range(6)


def key_dtype(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return the dtype of stream keys for column values of this shape and dtype.

    It is int64 for a single integer or flag, else bytes.

    Example:
        >>> import torch
        >>> from replaykit.episodes.streams import key_dtype
        >>> key_dtype([1], torch.uint8), key_dtype([2], torch.float32)
        (<class 'numpy.int64'>, 'S8')
    """
    small = math.prod(shape) == 1 and not dtype.is_floating_point and not dtype.is_complex
    return np.int64 if small else f"S{max(1, math.prod(shape) * dtype.itemsize)}"


def stream_keys(values: torch.Tensor) -> Array:
    """Return a key ``[n]`` for each value of a column ``[n, *F]``.

    Keys are equal if all bits of the values are equal.

    Example:
        >>> import torch
        >>> from replaykit.episodes.streams import stream_keys
        >>> stream_keys(torch.tensor([[3], [1]])).tolist()
        [3, 1]
    """
    if values.dtype is torch.int64 and values.is_cpu and values.ndim == 1:
        return values.numpy()  # a fast path
    dtype = np.dtype(key_dtype(values.shape[1:], values.dtype))
    values = values.detach()
    if dtype == np.int64:
        return values.to(device="cpu", dtype=torch.int64).reshape(-1).numpy()
    own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    cells = own.view(-1).view(torch.uint8).numpy().reshape(len(values), -1)
    if not cells.shape[1]:
        return np.zeros(len(cells), dtype)
    return np.ascontiguousarray(cells).view(dtype).reshape(-1)


class ColumnReader:
    """The columns that end episodes, as the compiled core reads them.

    The core reads the stored columns if they are on the CPU, at regular distances, and have usual
    dtypes. Otherwise it reads copies.
    """

    def __init__(self, bound: BoundColumns, columns: RowColumns) -> None:
        self._bound, self._columns = bound, columns
        # The stored columns for the core, or None if it cannot read them.
        self._source: Any = None
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._read_addresses()

    @property
    def waits(self) -> bool:
        """True if a read of rows waits until the earlier work of their device has ended."""
        paths = self._bound.paths
        return self._source is None and not all(self._columns[path].is_cpu for path in paths)

    def stored(self, first: int, until: int) -> tuple[Any, int]:
        """Return columns for the core with the rows of slots ``[first, until)``.

        The second result is the number of the first of these rows in the columns.

        Raises:
            RuntimeError: the memory of the columns was released.
        """
        for tensor, address in self._watched:
            if tensor.data_ptr() != address:
                self._columns.refresh_addresses()
                self._read_addresses()
                break
        if self._source is not None:
            return self._source, first
        self._columns.refresh_addresses()
        leaves = self._columns.parts(self._bound.paths, first, until)
        return self.copied(leaves, until - first), 0

    def copied(self, leaves: Mapping[Path, torch.Tensor], rows: int) -> Any:
        """Return columns for the core with rows ``[n, *lanes, ...]``, copied if necessary."""
        return self._made(leaves, rows, copy=True)

    def _read_addresses(self) -> None:
        self._source = self._made(self._columns, self._columns.slots, copy=False)
        memory = {}
        if self._source is not None:
            for path in self._bound.paths:  # leaves of a record share memory, watched once
                tensor = self._columns[path]
                memory[tensor.untyped_storage().data_ptr()] = tensor
        self._watched = [(tensor, tensor.data_ptr()) for tensor in memory.values()]

    def _made(self, leaves: Any, rows: int, *, copy: bool) -> Any:
        """Return columns for the core, or None if it cannot read them without a copy."""
        bound, ndim, flags, ids, kept = self._bound, self._columns.ndim, [], [], []
        plain_done = _DONE if bound.terminal is None else _TRUNCATED
        roles: list[tuple[Path, int]] = [
            (path, _TRUNCATED if path[-1] == "truncated" else plain_done) for path in bound.flags
        ]
        if bound.terminal is not None:
            roles.append((bound.terminal, _TERMINAL))
        if bound.init is not None:
            roles.append((bound.init, _INIT))
        for path, role in [*roles, *((path, _ID) for path in bound.ids)]:
            tensor = leaves[path].detach()
            is_float, dtype = tensor.dtype in _SIGNED_ZERO, tensor.dtype
            stride = _stride(tensor, ndim)
            if role != _ID and not is_float and dtype not in _FLAGS:
                stride = None
            if stride is None:
                if not copy:
                    return None
                tensor = tensor if role == _ID else tensor != 0
                is_float = False
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
                stride = _stride(tensor, ndim)
            kept.append(tensor)
            values, size = tensor.shape[ndim:].numel(), tensor.dtype.itemsize
            if role == _ID:
                ids.append((tensor.data_ptr(), stride, values * size))
            else:
                flags.append((tensor.data_ptr(), stride, values, size, is_float, role))
        lanes = self._columns.lanes.numel()
        return native.core.EpisodeColumns(flags, ids, rows, lanes, kept if copy else None)


def _stride(tensor: torch.Tensor, ndim: int) -> int | None:
    """Return the row stride of a column in bytes; None if the core cannot read the column."""
    plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return row_stride(tensor, ndim) if tensor.device.type == "cpu" and plain else None


class StreamEpisodes:
    """The episodes among the stored rows of streams.

    The streams are the lanes. The *time* of a row is its sequence number in its lane, int64. No
    time is used twice. Rows with ``lo <= time < hi`` of a lane are stored. An *element*, int64, is
    the address of a row. A link of 8 bytes for each row leads to the ends of its episode.

    In a ring, all lanes have the same bounds. The slot of a row is ``time % slots``, and its
    element is ``slot * lanes + lane``.

    In a pool, the slots of a lane's rows may be any, and the element is the slot. Each row has the
    key of its stream. A stream is a lane as long as it has stored rows. Lanes are in the order of
    their keys, so that their numbers change when a lane is added or dropped.

    Args:
        start: the time of the first row of a ring.
        gone: int64 ``[lanes]``, the number of rows of the first row's episode that come before it
            in a ring.
        head: int64 ``[lanes]``, the ``Head`` of each lane's first episode.
        keys: dtype of keys in a pool; None for a ring.

    After a write, ``totals`` and ``find`` first take O(new episodes + lanes), for the eight laws
    that were used last. Each look-up then takes O(log episodes). Memory: 8 bytes per row, 8 per
    episode, and half a byte per episode and law. A pool takes 24 bytes per row, 16 per episode, and
    about 500 per lane. The core checks all bounds before it reads memory.

    Raises:
        ValueError, TypeError: an array has the wrong length or dtype.
        IndexError: a row is not stored, or a number is too large.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes import WINDOWS, CountLaw, StreamEpisodes
        >>> ring = StreamEpisodes(slots=8)
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
        gone: Array | None = None,
        head: Array | None = None,
        keys: Any = None,
    ) -> None:
        lanes = lanes if keys is None else 0
        self._core = core = native.core.Episodes(
            slots,
            lanes,
            start,
            np.zeros(lanes, np.int64) if gone is None else np.asarray(gone, np.int64),
            np.full(lanes, int(Head.RESET)) if head is None else np.asarray(head, np.int64),
        )
        self.slots, self._lanes, self.is_ring = slots, lanes, keys is None
        self.append_columns, self.nbytes = core.append_columns, core.nbytes
        # The keys of the lanes of a pool, and their records in the core. ``arrange`` adds and drops
        # the lanes of ``_started`` and ``_dropped`` when lanes are needed next.
        self._keys = np.zeros(0, keys)
        self._order = np.zeros(0, np.int64)
        self._started: dict[Any, int] = {}
        self._dropped: set[Any] = set()
        self._records: dict[Any, int] = {}  # of each key
        self._names: dict[int, Any] = {}  # the key of each record
        # Keys of streams that were open when their rows were removed.
        self.joined: set[Any] = set()
        self.numbering = 0
        self._per_lane = -1, np.zeros((6, 0), np.int64)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        self.arrange()
        return self._lanes

    @property
    def stream_count(self) -> int:
        """Number of lanes of a pool, in O(1)."""
        return len(self._records)

    @property
    def keys(self) -> Array:
        """The keys of the lanes of a pool, ascending."""
        self.arrange()
        return self._keys

    @property
    def lo(self) -> int:
        """Time of the oldest row of a ring."""
        return self._core.lo

    @property
    def hi(self) -> int:
        """Time of the next row of a ring."""
        return self._core.hi

    @property
    def version(self) -> int:
        """A number that changes with every change."""
        return self._core.version

    # -- writing ----------------------------------------------------------------------------------

    def append(self, codes: Array) -> None:
        """Append the codes of new rows to a ring, uint8 ``[n, lanes]``."""
        codes = np.ascontiguousarray(codes, np.uint8)
        flags = [(codes.ctypes.data, 1, 1, 1, False, _CODE)]
        columns = native.core.EpisodeColumns(flags, [], *codes.shape, codes)
        self.append_columns(columns, 0, len(codes), None, None)

    def close(self, lanes: Array, code: int) -> None:
        """End the open episodes of lanes, bool ``[lanes]``, with the code."""
        self._arranged.close(lanes, code)

    def append_streams(
        self,
        source: Any,
        first: int,
        keys: Array,
        slots: Array,
        row_ids: Array,
        *,
        segments: Array | None = None,
        stops: Array | None = None,
        heads: Heads | None = None,
    ) -> None:
        """Append the rows of ``source`` from ``first`` on to a pool.

        Args:
            keys: keys of the rows' streams, ``[n]``.
            slots: int64 ``[n]``. If a slot has a row, it is the oldest row of its stream.
            row_ids: int64 ``[n]``.
            segments: int64 ``[n]``, the number of the segment to which each row belongs. If
                consecutive rows of a lane are in different segments, the stream is cut between
                them.
            stops: uint8 ``[n]``, the code of a cut after the row, or 0.
            heads: returns how the first episodes of new lanes begin, given keys, slots and row ids
                of their first rows: int64 ``[m, 3]``, the number of rows before the first row in
                its episode, the ``Head``, and the row id of the episode's first row.
        """
        names, row, of = np.unique(keys, return_index=True, return_inverse=True)
        known_as = [self._records.get(key, -1) for key in names.tolist()]
        records = np.array(known_as, np.int64)
        if -1 in known_as:
            new = (records < 0).nonzero()[0]
            fresh = row[new]
            known = np.zeros((len(new), 3), np.int64)
            if heads is not None:
                known = heads(names[new], slots[fresh], row_ids[fresh])
            records[new] = self._start(names[new], known)
        self._drop(
            self._core.append_streams(source, first, records[of], slots, row_ids, segments, stops)
        )

    def run_of(self, keys: list[Any], count: int) -> int:
        """Return the first of ``count`` consecutive slots with all rows of streams of a pool.

        Return -1 if the rows, stream after stream, do not lie in this way.
        """
        return self._core.run_of([self._records[key] for key in keys], count)

    def replace_run(
        self, gone: list[Any], source: Any, first: int, count: int, key: Any, slot: int, row_id: int
    ) -> None:
        """Drop streams of a pool, and append rows of ``source`` from ``first`` on as a new stream.

        The rows are in ``count`` slots from ``slot`` on, and their row ids begin with ``row_id``.
        """
        records = [self._records[name] for name in gone] if gone else []
        head = int(Head.CUT if key in self.joined else Head.RESET)
        record = self._core.replace_run(source, first, count, records, slot, row_id, head)
        self._drop(records)
        self._name(key, record)

    def oldest(self, keys: list[Any], counts: Array) -> Array:
        """Return the slots of the oldest rows of streams of a pool, stream after stream."""
        records = np.array([self._records[key] for key in keys], np.int64)
        return self._core.oldest(records, counts)[0]

    def late_begins(self) -> Array:
        """Return the slots of the oldest rows of a pool's streams that are not resets.

        The order is arbitrary. Cost: O(streams with such a row since the last call).
        """
        return np.array(self._core.late_begins(), np.int64)

    def drop_oldest(self, keys: list[Any], counts: Array, *, forget: bool = False) -> None:
        """Drop the oldest rows of distinct streams of a pool.

        If a stream loses all its rows while its episode is open, its next row continues the
        episode. With ``forget``, it begins a new episode.
        """
        records = np.array([self._records[key] for key in keys], np.int64)
        still: set[Any] = set()
        if not forget:
            lane = np.searchsorted(self.keys, np.array(keys, self._keys.dtype))
            still = {keys[i] for i in np.flatnonzero(self.per_lane()[2, lane])}
        gone = self._drop(self._core.drop_oldest(records, counts))
        self.joined.update(still.intersection(gone))

    def relocate(self, source: Array, target: Array) -> None:
        """Move rows of a pool to slots without a row, int64 ``[K]`` each."""
        self._core.relocate(source, target)

    def _drop(self, records: list[int]) -> list[Any]:
        """Drop lanes without rows; return their keys."""
        if not records:
            return []
        gone = [self._names[record] for record in records]
        for key in gone:
            del self._names[self._records.pop(key)]
            if self._started.pop(key, None) is None:
                self._dropped.add(key)
        return gone

    def _start(self, keys: Array, known: Array) -> list[int]:
        """Start lanes, with heads as for ``append_streams``. Return their records."""
        names, found = keys.tolist(), []
        for key, (gone, head, row_id) in zip(names, known.tolist(), strict=True):
            if not head:
                head = int(Head.CUT if key in self.joined else Head.RESET)
            found.append(self._core.start(gone, head, row_id))
            self._name(key, found[-1])
        return found

    def _name(self, key: Any, record: int) -> None:
        """Give a key to a new lane."""
        self.joined.discard(key)
        self._records[key] = self._started[key] = record
        self._names[record] = key

    def arrange(self) -> None:
        """Number the lanes by their keys. Cost: O(lanes) after lanes were started or dropped."""
        if not (self._started or self._dropped):
            return
        keys, order = self._keys, self._order
        if self._dropped:
            gone = np.array(list(self._dropped), keys.dtype)
            keep = np.ones(len(keys), bool)
            keep[np.searchsorted(keys, gone)] = False
            keys, order = keys[keep], order[keep]
        if self._started:
            new = np.array(list(self._started), keys.dtype)
            by_key = np.argsort(new)
            at = np.searchsorted(keys, new[by_key])
            keys = np.insert(keys, at, new[by_key])
            order = np.insert(order, at, np.array(list(self._started.values()), np.int64)[by_key])
        self._keys, self._order, self._lanes = keys, order, len(order)
        self._started, self._dropped = {}, set()
        self._core.renumber(order)
        self.numbering += 1

    @property
    def _arranged(self) -> native.core.Episodes:
        """The core, whose lanes are numbered as of now."""
        if self._started or self._dropped:
            self.arrange()
        return self._core

    # -- rows -------------------------------------------------------------------------------------

    def lookup(self, time: Array, lane: Array) -> Array:
        """Return begin, last, last row's code, and head of episodes, int64 ``[4, K]``."""
        return self._arranged.lookup(time, lane)

    def around(self, element: Array) -> Array:
        """Return time, lane, begin, last, code, head of elements, int64 ``[6, K]``."""
        return self._arranged.around(element)

    def place(self, element: Array) -> Array:
        """Return time and lane of elements of any shape, int64 ``[2, ...]``."""
        return self._arranged.place(element.reshape(-1)).reshape(2, *element.shape)

    def rows(self, time: Array, lane: Array) -> Array:
        """Return facts of stored rows, int64 ``[5, K]``.

        They are: element; code; first and last time of the unbroken part of the stream around the
        row; and in a pool, the row id of the first row of the episode.
        """
        return self._arranged.rows(time, lane)

    def element(self, time: Array, lane: Array) -> Array:
        """Return the elements of stored rows, of any shape. This is the inverse of ``place``."""
        if self.is_ring:
            slot = time % self.slots
            return slot if self._lanes == 1 else slot * self._lanes + lane
        time, lane = np.broadcast_arrays(time, lane)
        return self.rows(time.reshape(-1), lane.reshape(-1))[0].reshape(time.shape)

    def per_lane(self) -> Array:
        """Return facts of the lanes, int64 ``[6, lanes]``. Cost: O(lanes) after a change.

        They are: lo and hi; whether the newest episode is open; the time at which the oldest row's
        episode began, or a negative number if that row is stored; and in a pool, the row id of the
        newest row, and the segment.
        """
        if self._per_lane[0] != self.version:
            self.arrange()
            self._per_lane = self.version, self._core.per_lane()
        return self._per_lane[1]

    def __contains__(self, key: Any) -> bool:
        """Return whether a pool has a lane with this key."""
        return key in self._records

    def known(self, keys: list[Any]) -> list[bool]:
        """Return whether a pool has lanes with these keys."""
        return [key in self._records for key in keys]

    def ranks(self, keys: Array) -> Array:
        """Return the numbers of the lanes of a pool with these keys; -1 if there is no lane."""
        known = np.array(self.known(keys.tolist()), bool)
        return np.where(known, np.searchsorted(self.keys, keys), -1)

    # -- all episodes -----------------------------------------------------------------------------

    def table(self) -> EpisodeTable:
        """Return all stored episodes. Cost: O(episodes)."""
        return tuple.__new__(EpisodeTable, self._arranged.table())

    def longest(self) -> int:
        """Return the count of stored rows of the longest episode. Cost: O(episodes)."""
        table = self.table()
        return int(np.max(table.last - table.first, initial=-1)) + 1

    def totals(self, law: CountLaw, kind: int) -> Array:
        """Return the counts of windows, episodes or rows of lanes, int64 ``[lanes]``."""
        return self._arranged.totals(law.key, kind)[0]

    def total(self, law: CountLaw, kind: int) -> int:
        """Return the sum of ``totals``."""
        return self._arranged.total(law.key, kind)

    def find(self, law: CountLaw, kind: int, number: Array) -> Found:
        """Look up windows, episodes or rows by number, int64 ``[K]``.

        Numbers count in the order of lanes, then of time.
        """
        return tuple.__new__(Found, self._arranged.find(law.key, kind, number))

    def pick(self, law: CountLaw, kind: int, number: Array) -> Array:
        """Return the elements of single rows by number, found by ``find``."""
        return self._arranged.pick(law.key, kind, number)[0]

    def slices(self, law: CountLaw, number: Array, length: int) -> Array:
        """Return elements of windows of ``length`` rows by number, window after window.

        The second row of int64 ``[2, K]`` has the position of each element's window in ``number``.
        """
        return self._arranged.slices(law.key, number, length)


_MOST_GONE = 2**56
"""Highest number of overwritten rows of an episode that the core takes."""


def known_heads(
    old: StreamEpisodes,
    noted: int,
    indexes: SavedEpisodes,
    rule: BoundaryRule,
    keys: Array | None,
    element: Array,
    row_id: Array,
) -> Array:
    """Return the beginnings of the episodes of first rows of lanes, int64 ``[m, 3]``.

    The columns are the number of rows before the row in its episode, the ``Head``, and the row id
    of the episode's first row. If the beginning is unknown, the ``Head`` is 0.

    Args:
        old: the episodes of rows with row ids below ``noted``.
        indexes: the saved beginnings.
        rule: the rule of the index.
        keys: the keys of the streams of the rows; None for rows in a ring.
        element: the elements of the rows, int64 ``[m]``.
        row_id: their row ids, int64 ``[m]``.
    """
    known = np.zeros((len(row_id), 3), np.int64)
    # Saved beginnings take precedence if both follow the default rule.
    trusted = indexes.has_begins and rule == BoundaryRule()
    has_rows = bool(old.lanes)
    if keys is None:
        has_rows = (old.hi - 1 - element[0] // old.lanes) % old.slots < old.hi - old.lo
    saved: Mapping[str, Any] | None = None
    if trusted or not has_rows:
        saved = indexes.pop_first_begins()
    if saved is not None and keys is None and saved["oldest"] == row_id[0]:
        begin = np.asarray(saved["begin"], np.int64)
        known[:, 0] = np.where(begin >= 0, row_id - begin, 0)
        known[:, 1] = saved["head"]
    elif saved is not None and keys is not None:
        given = np.array(saved.get("streams", []), np.int64).reshape(-1, 4)
        _, at, of = np.intersect1d(row_id, given[:, 0], return_indices=True)
        known[:, 1] = int(Head.RESET) if trusted and saved.get("now", False) else 0
        known[at] = given[of][:, [2, 3, 1]]
    rest = np.flatnonzero((row_id < noted) & (known[:, 1] == 0)) if has_rows else row_id[:0]
    if len(rest):
        if keys is not None:
            try:
                lane = old.place(element[rest])[1]
            except IndexError:  # a removal that failed has dropped rows that are still stored
                table = old.table()
                rows = table.last + 1 - table.first
                time = np.arange(rows.sum()) + np.repeat(table.first - np.cumsum(rows) + rows, rows)
                held = old.element(time, np.repeat(table.lane, rows))
                rest = rest[np.isin(element[rest], held)]
                lane = old.place(element[rest])[1]
            rest = rest[old.keys[lane] == keys[rest]]
        _, first, gone, head = heads_to_save(old, element[rest], row_id[rest]).T
        known[rest] = np.stack([gone, head, first], 1)
    known[:, 0] = np.minimum(known[:, 0], _MOST_GONE)
    return known


def heads_to_save(streams: StreamEpisodes, element: Array, row_id: Array) -> Array:
    """Return the beginnings of the episodes of rows, int64 ``[m, 4]``.

    The columns are the id of the row, the id of the first row of its episode, the number of rows
    between them, and the ``Head``. If rows of the episode are missing, the ``Head`` is RESET. In a
    ring, the second column is -1.
    """
    time, lane, begin, _, _, head = streams.around(element)
    head = np.where(head == int(Head.EVICTED), int(Head.RESET), head)
    return np.stack([row_id, streams.rows(time, lane)[4], time - begin, head], 1)
