"""Show stored episodes as objects, and give tags to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch

from replaykit._compat import TensorDict, Uncompiled, as_tensor
from replaykit.episodes import EndReason, EpisodeIndex, Head
from replaykit.episodes.boundaries import EpisodeTable
from replaykit.errors import StaleAddress
from replaykit.storages.column_storage import ColumnStorage, with_episodes
from replaykit.storages.indexing import as_index, check_cells, check_range, ravel, unravel_index
from replaykit.storages.taken_rows import row_ids
from replaykit.structure import Branch
from replaykit.ted import REWARD

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer

Array = np.ndarray[Any, Any]


class EpisodeValues(NamedTuple):
    """The properties of J episodes at the time of a lookup, each int64 ``[J]``."""

    lane: Array
    id: Array
    begin: Array  # row id of the first row, even if overwritten
    evicted: Array  # number of rows before the first stored one
    first: Array  # row id of the first stored row
    last: Array  # row id of the last row
    length: Array
    element: Array  # slot of the first stored row; with lanes, slot * lanes + lane
    reason: Array
    head: Array

    @classmethod
    def none(cls) -> EpisodeValues:
        """Return an empty `EpisodeValues`."""
        return cls(*(np.zeros(0, np.int64) for _ in cls._fields))

    def at(self, which: Any) -> EpisodeValues:
        """Return the properties of some episodes, selected by a slice or NumPy index."""
        return EpisodeValues(*(values[which] for values in self))


def facts_of(by: EpisodeIndex, table: EpisodeTable) -> EpisodeValues:
    """Return the properties of episodes of an index."""
    lane, begin, first, last, code, head = table
    began = by.positions(begin, lane)
    return EpisodeValues(
        lane,
        by.ids(first, lane),
        began,
        first - begin,
        by.positions(first, lane),
        by.positions(last, lane),
        last - first + 1,
        by.element(first, lane),
        np.minimum(code, int(EndReason.CUT)),
        head,
    )


class EpisodeLookup(Uncompiled):
    """Lookups of the episodes of rows, given the index of the rows.

    ``extend`` returns such an index, and samples carry it. It is int64 ``[K]``, or ``[K, ndim]``
    for storages with lanes. Results are int64 ``[K]`` on the device of the index, and describe the
    rows that are stored now.

    Each method costs O(K). It raises IndexError if a row is not stored, and TypeError if the index
    is not of integers. A row id is the number of a row in write order, and is never used twice.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> done = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool)
        >>> index = rb.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> index[1:], rb.episodes.begin(index[1:]), rb.episodes.steps_to_end(index[1:])
        (tensor([1, 2, 3, 0]), tensor([0, 0, 3, 3]), tensor([1, 0, 1, 0]))
    """

    def __init__(self, storage: ColumnStorage) -> None:
        self._storage = storage

    def id(self, index: Any) -> torch.Tensor:
        """Return the ids of the rows' episodes.

        An id is unique in this buffer, also after a load into it.
        """
        return self._asked(index, lambda by, time, lane: by.ids(time, lane))

    def position(self, index: Any) -> torch.Tensor:
        """Return the row ids of the rows."""
        return self._asked(index, lambda by, time, lane: by.positions(time, lane))

    def begin(self, index: Any) -> torch.Tensor:
        """Return the row ids of the episodes' first rows, even if overwritten."""
        return self._asked(index, lambda by, time, lane: by.positions(by.begins(time, lane), lane))

    def end(self, index: Any) -> torch.Tensor:
        """Return the row ids of the episodes' last rows.

        For an open episode this is the row id of its newest row.
        """
        return self._asked(
            index, lambda by, time, lane: by.positions(by.spans(time, lane)[1], lane)
        )

    def step(self, index: Any) -> torch.Tensor:
        """Return the step of each row in its episode, starting at 0.

        Overwritten rows of the episode count, too.
        """
        return self._asked(index, lambda by, time, lane: time - by.begins(time, lane))

    def steps_to_end(self, index: Any) -> torch.Tensor:
        """Return the number of stored rows after each row in its episode."""
        return self._asked(index, lambda by, time, lane: by.spans(time, lane)[1] - time)

    def reason(self, index: Any) -> torch.Tensor:
        """Return the reason why each episode has no further row, as an ``EndReason``."""
        return self._asked(index, lambda by, time, lane: by.reasons(time, lane))

    def head(self, index: Any) -> torch.Tensor:
        """Return the kind of beginning of each episode's stored part, as a ``Head``."""
        return self._asked(index, lambda by, time, lane: by.heads(time, lane))

    def _asked(self, index: Any, question: Any) -> torch.Tensor:
        with self._storage.lock:
            elements, device = self._elements(index)
            if not len(elements):
                return torch.empty(0, dtype=torch.int64, device=device)
            by = self._storage.episodes
            answer = question(by, *by.time_and_lane(elements))
        return torch.from_numpy(np.ascontiguousarray(answer, np.int64)).to(device)

    def _elements(self, index: Any) -> tuple[Array, torch.device]:
        """Return the flat numbers of checked rows, and the device of the index.

        The caller holds the lock.
        """
        storage = self._storage
        at = as_tensor(index)
        if at.dtype == torch.bool or at.is_floating_point() or at.is_complex():
            if at.numel():
                raise TypeError(f"expected an index of integers, got {at.dtype}")
            at = at.to(torch.int64)
        dims = 1 if storage.ndim == 1 else 2
        if at.ndim != dims or (dims == 2 and at.shape[1] != storage.ndim):
            raise IndexError(
                f"expected an index of shape {'[K]' if dims == 1 else f'[K, {storage.ndim}]'}, "
                f"got {list(at.shape)}"
            )
        cells = at.detach().to(device="cpu", dtype=torch.int64)
        if not len(cells):
            return np.zeros(0, np.int64), at.device
        if dims == 1:
            check_range(cells, 0, storage.ledger.length)
        else:
            check_cells(cells, storage.visible_shape())
            cells = ravel(cells, storage.lanes)
        return np.ascontiguousarray(cells.numpy()), at.device


_BLOCK = 2**20
"""Number of rows per read of rewards. Each takes 8 bytes and a few numbers."""


class Episodes(EpisodeLookup):
    """The stored episodes of a buffer, in order of time, lane after lane.

    ``rb.episodes`` returns this object. The first access to an episode takes a snapshot, so later
    writes change neither the episodes nor their lengths. Rows are read only when requested. If rows
    were overwritten since the snapshot, the read raises StaleAddress and never returns other rows.
    Methods that take an index, such as ``begin`` (see `EpisodeLookup`), describe the rows that are
    stored now.

    ``len``, iteration and an int index work as for a list. A slice, list, LongTensor or bool mask
    ``[J]`` returns Episodes. Unless its description differs, each property of J episodes is int64
    ``[J]`` on the CPU.

    Cost: O(J) for the snapshot and for each property, without a Python step per episode.
    ``returns`` makes one pass over the rewards. An Episode object is created only on access.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> done = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"next": {"reward": torch.ones(6, 1), "done": done}}, [6]))
        >>> episodes = rb.episodes
        >>> len(episodes), episodes.lengths, episodes.returns
        (3, tensor([3, 2, 1]), tensor([3., 2., 1.], dtype=torch.float64))
        >>> episodes[episodes.lengths > 1][-1]
        Episode(id=3, length=2, reason=TERMINATED)
        >>> episodes.filter(lambda episode: episode.complete).index
        tensor([0, 1, 2, 3, 4])
    """

    def __init__(self, storage: ColumnStorage, facts: EpisodeValues | None = None) -> None:
        super().__init__(storage)
        self._known = facts

    @property
    def _facts(self) -> EpisodeValues:
        if self._known is None:
            with self._storage.lock:
                if self._storage.ledger.length:
                    index = self._storage.episodes
                    self._known = facts_of(index, index.table())
                else:
                    self._known = EpisodeValues.none()
        return self._known

    # -- selection ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._facts.id)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: Any) -> Episodes: ...

    def __getitem__(self, index: Any) -> Episode | Episodes:
        """Return one episode for an int, and Episodes for any other index.

        Raises:
            IndexError: no such episode.
            TypeError: not an index.
        """
        at = as_index(index, len(self))
        if isinstance(at, int):
            return Episode(self._picked(slice(at, at + 1)))
        return self._picked(at if isinstance(at, slice) else at.numpy())

    def _picked(self, at: Any) -> Episodes:
        return Episodes(self._storage, self._facts.at(at))

    def __iter__(self) -> Iterator[Episode]:
        for number in range(len(self)):
            yield self[number]

    def filter(self, predicate: Callable[[Episode], Any]) -> Episodes:
        """Return the episodes for which ``predicate(episode)`` is true.

        The method calls the predicate once per episode. For millions of episodes a mask such as
        ``episodes[episodes.lengths > 9]`` is faster.

        Raises:
            TypeError: the predicate is not callable.
        """
        if not callable(predicate):
            raise TypeError(f"expected a callable predicate, got {type(predicate).__name__}")
        return self._picked(np.array([bool(predicate(one)) for one in self], bool))

    def of(self, index: Any) -> Episodes:
        """Return the episode of each row of an index.

        For an index int64 ``[K]`` (``[K, ndim]`` with lanes) the result has K episodes.

        Raises:
            IndexError: a row is not stored.
            TypeError: the index is not of integers.
        """
        with self._storage.lock:
            elements, _ = self._elements(index)
            if not len(elements):
                return Episodes(self._storage)._picked(slice(0, 0))
            by = self._storage.episodes
            time, lane = by.time_and_lane(elements)
            first, last = by.spans(time, lane)
            begin, code, head = by.begins(time, lane), by.reasons(time, lane), by.heads(time, lane)
            table = EpisodeTable(lane, begin, first, last, code, head)
            return Episodes(self._storage, facts_of(by, table))

    # -- description ----------------------------------------------------------------------------

    @property
    def ids(self) -> torch.Tensor:
        """Ids of the episodes, unique in this buffer, also after a load into it."""
        return _own(self._facts.id)

    @property
    def lengths(self) -> torch.Tensor:
        """Count of stored rows of each episode."""
        return _own(self._facts.length)

    @property
    def reasons(self) -> torch.Tensor:
        """Reason why each episode has no further row, an ``EndReason``."""
        return _own(self._facts.reason)

    @property
    def heads(self) -> torch.Tensor:
        """Kind of beginning of each episode's stored part, a ``Head``."""
        return _own(self._facts.head)

    @property
    def lanes(self) -> torch.Tensor:
        """Lane of each episode, numbered from 0; 0 for a storage without lanes."""
        return _own(self._facts.lane)

    @property
    def begins(self) -> torch.Tensor:
        """Row id of each episode's first row, even if that row is overwritten."""
        return _own(self._facts.begin)

    @property
    def starts(self) -> torch.Tensor:
        """Index of each episode's first stored row; ``[J, ndim]`` with lanes."""
        return self._index(self._facts.element.copy())

    @property
    def returns(self) -> torch.Tensor:
        """Sums of the stored rewards, float64 ``[J]``; ``[J, *features]`` for vectors.

        Raises:
            KeyError: there is no ``("next", "reward")``.
            StaleAddress: rows were overwritten.
        """
        return self._sums(REWARD)

    @property
    def index(self) -> torch.Tensor:
        """Index of all rows, ``[N]``, or ``[N, ndim]`` with lanes; ordered by episode.

        Raises:
            StaleAddress: rows were overwritten.
        """
        with self._storage.lock:
            found = [elements for _, elements in self._blocks(_BLOCK)]
        return self._index(np.concatenate(found) if found else np.zeros(0, np.int64))

    def rows(self) -> TensorDict:
        """Read all rows, ordered by episode and by time.

        Returns:
            A new TensorDict or tensorclass ``[N]`` of the stored rows. The buffer's transforms do
            not apply.

        Raises:
            StaleAddress: rows were overwritten.
            RuntimeError: no row was written yet.
        """
        with self._storage.lock:
            return self._storage.read(self.index)

    def __repr__(self) -> str:
        return f"Episodes({len(self)} episodes, {int(self._facts.length.sum())} rows)"

    # -- rows -----------------------------------------------------------------------------------

    def _blocks(self, size: int) -> Iterator[tuple[Array, Array]]:
        """Yield pieces of all rows, as numbers of their episodes and flat numbers.

        The caller holds the lock.

        Raises:
            StaleAddress: rows were overwritten.
        """
        facts, storage = self._facts, self._storage
        if not len(facts.id):
            return
        self._check_stored(row_ids(storage, facts.element) == facts.first)
        index = storage.episodes
        start, lane = index.time_and_lane(facts.element)
        stop = np.broadcast_to(index.bounds(lane)[1], lane.shape)
        self._check_stored(start + facts.length <= stop)
        end = index.element(start + facts.length - 1, lane)
        self._check_stored(row_ids(storage, end) == facts.last)
        ends = np.cumsum(facts.length)
        for low in range(0, int(ends[-1]), size):
            high = min(low + size, int(ends[-1]))
            from_, to = np.searchsorted(ends, [low, high - 1], side="right")
            numbers = np.arange(from_, to + 1)
            begins = ends[numbers] - facts.length[numbers]
            counts = np.minimum(ends[numbers], high) - np.maximum(begins, low)
            which = np.repeat(numbers, counts)
            step = np.arange(low, high) - np.repeat(begins, counts)
            elements = index.element(start[which] + step, lane[which])
            position = row_ids(storage, elements)
            rest = facts.length[which] - 1 - step
            kept = facts.first[which] + step <= position
            self._check_stored(kept & (position <= facts.last[which] - rest))
            yield which, elements

    def _check_stored(self, stored: Array) -> None:
        if not stored.all():
            raise StaleAddress(
                f"expected the rows of {len(self)} episodes as they were at the snapshot, but rows "
                "were overwritten since; get rb.episodes again"
            )

    def _index(self, elements: Array) -> torch.Tensor:
        index, ndim = torch.from_numpy(np.ascontiguousarray(elements)), self._storage.ndim
        if ndim == 1:
            return index
        if not len(index):  # lanes are unknown if nothing was written yet
            return index.view(0, 1).expand(0, ndim)
        return unravel_index(index, self._storage.lanes)

    def _sums(self, key: tuple[str, ...]) -> torch.Tensor:
        storage = self._storage
        with storage.lock:
            if not storage.initialized:
                return torch.zeros(0, dtype=torch.float64, device="cpu")
            storage.leaf(key)
            column = storage.require().column(key, storage.ledger.length).detach()
            features = column.shape[storage.ndim :]
            values = column.flatten(0, storage.ndim - 1)
            sums = np.zeros((len(self), features.numel()))
            for which, elements in self._blocks(max(1, _BLOCK // max(features.numel(), 1))):
                at = torch.from_numpy(elements).to(values.device)
                part = values.index_select(0, at).to(device="cpu", dtype=torch.float64)
                starts = np.flatnonzero(np.diff(which, prepend=-1))
                taken = part.view(len(which), features.numel()).numpy()
                sums[which[starts]] += np.add.reduceat(taken, starts, axis=0)
        found = torch.from_numpy(sums)
        return found[:, 0] if features.numel() == 1 else found.view(len(self), *features)


class Episode(Uncompiled):
    """One episode of a buffer; see `Episodes`.

    Its attributes describe the episode at the time of the snapshot.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"x": torch.arange(6), "next": {"done": done}}, [6]))
        >>> first, second = rb.episodes
        >>> first.length, first.begin, first.head.name, first.reason.name, first.rows()["x"]
        (1, 0, 'EVICTED', 'TERMINATED', tensor([2]))
        >>> second.index, second.rows()["x"], second.complete
        (tensor([3, 0, 1]), tensor([3, 4, 5]), False)
    """

    def __init__(self, only: Episodes) -> None:
        self._only = only

    @property
    def id(self) -> int:
        """Id of the episode, unique in this buffer, also after a load into it."""
        return int(self._only._facts.id[0])

    @property
    def length(self) -> int:
        """Number of stored rows."""
        return int(self._only._facts.length[0])

    def __len__(self) -> int:
        return self.length

    @property
    def lane(self) -> int:
        """The episode's lane, numbered from 0; 0 for a storage without lanes."""
        return int(self._only._facts.lane[0])

    @property
    def begin(self) -> int:
        """Row id of the first row, even if it is overwritten."""
        return int(self._only._facts.begin[0])

    @property
    def end(self) -> int:
        """Row id of the last stored row."""
        return int(self._only._facts.last[0])

    @property
    def evicted(self) -> int:
        """Count of the episode's first rows that new rows have replaced."""
        return int(self._only._facts.evicted[0])

    @property
    def reason(self) -> EndReason:
        """Reason why the episode has no further row."""
        return EndReason(int(self._only._facts.reason[0]))

    @property
    def head(self) -> Head:
        """Kind of beginning of the stored part."""
        return Head(int(self._only._facts.head[0]))

    @property
    def complete(self) -> bool:
        """True if the episode is stored from the environment's reset to its end.

        Its last row is terminated or truncated.
        """
        ended = self.reason in (EndReason.TERMINATED, EndReason.TRUNCATED)
        return ended and self.head == Head.RESET

    @property
    def total_reward(self) -> float | torch.Tensor:
        """Sum of the stored rewards in float64; a tensor if a reward is a vector.

        Raises:
            KeyError: there is no ``("next", "reward")``.
            StaleAddress: rows were overwritten.
        """
        total = self._only.returns[0]
        return total if total.ndim else float(total)

    @property
    def index(self) -> torch.Tensor:
        """Index of the rows in order of time, int64 ``[n]``; ``[n, ndim]`` with lanes.

        Raises:
            StaleAddress: rows were overwritten.
        """
        return self._only.index

    def rows(self) -> TensorDict:
        """Read the rows in order of time, as a new TensorDict ``[n]``.

        The rows are returned as stored. The buffer's transforms do not apply.

        Raises:
            StaleAddress: rows were overwritten.
        """
        return self._only.rows()

    def __repr__(self) -> str:
        return f"Episode(id={self.id}, length={self.length}, reason={self.reason.name})"


def _own(values: Array) -> torch.Tensor:
    """Return a tensor that can be changed without effect on the snapshot."""
    return torch.from_numpy(values.astype(np.int64, copy=True))


def tag_episodes(
    buffer: ReplayBuffer, index: Any, values: Mapping[str, Any], generation: Any
) -> int:
    """Set tags of the episodes of rows; return how many rows are stored."""
    with buffer._locked() as storage:
        columns = with_episodes(storage)
        at = as_tensor(index).detach().to("cpu")
        at = at if at.numel() else at.long()  # torch makes an empty list float32
        if at.is_floating_point() or at.dtype == torch.bool:
            raise TypeError(f"expected an index of integers, got {at.dtype}")
        at = at.reshape(-1, storage.ndim) if storage.ndim > 1 else at.reshape(-1)
        slots = at[:, 0] if storage.ndim > 1 else at
        _ = columns.episodes  # raises for rows that have none
        fits = (slots >= 0) & (slots < storage.ledger.length)
        if generation is not None:
            known = as_tensor(generation).cpu().reshape(-1)
            if len(known) != len(slots):
                raise ValueError(f"expected {len(slots)} generations, got {len(known)}")
            fits &= storage.ledger.generations(slots.contiguous()) == known
        return _set(storage, at, fits, values)


def check_tags(storage: Any, rows: Any, values: Mapping[str, Any]) -> None:
    """Check the tags of rows that are about to be written; raise as ``tag_episodes`` does."""
    with_episodes(storage)
    root = rows.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        raise RuntimeError("expected rows with tags as TensorDicts, which show where episodes end")
    storage.indexes.tags.checked(values, math.prod(rows.batch))


def tag_written(storage: Any, index: torch.Tensor, values: Mapping[str, Any]) -> None:
    """Set checked tags of the episodes of rows that were written to ``index``. This cannot fail.

    The index is -1 for rows that were not stored. The caller holds the lock.
    """
    _set(storage, index, (index[:, 0] if storage.ndim > 1 else index) >= 0, values)


def _set(storage: Any, at: torch.Tensor, fits: torch.Tensor, values: Mapping[str, Any]) -> int:
    """Set tags of the episodes of rows that are stored, bool ``[K]``; return their number."""
    given = storage.indexes.tags.checked(values, len(fits))
    given = {name: tensor[fits] for name, tensor in given.items()}
    chosen = at[fits]
    flat = ravel(chosen, storage.lanes) if storage.ndim > 1 else chosen
    storage.indexes.set_tags(np.ascontiguousarray(flat.numpy(), np.int64), given)
    return len(flat)
