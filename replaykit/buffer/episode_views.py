"""Show stored episodes as objects, and cut streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from replaykit._compat import TensorDict, Uncompiled, as_tensor
from replaykit.buffer.core import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.writing import Writing
from replaykit.episodes import EndReason, EpisodeIndex, Head
from replaykit.errors import StaleAddress
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import as_index, check_cells, check_range, ravel, unravel_index
from replaykit.storages.ledger import Ledger

__all__ = [
    "Episode",
    "EpisodeLookup",
    "EpisodeValues",
    "Episodes",
    "Streams",
    "facts_of",
    "positions",
]

Array = np.ndarray[Any, Any]


class EpisodeValues(NamedTuple):
    """What was known of episodes when they were looked up; int64 ``[J]`` each."""

    lane: Array
    id: Array
    begin: Array  # position of the first row, stored or not
    evicted: Array  # rows before the first stored one
    first: Array  # position of the first stored row
    last: Array  # position of the last one
    length: Array
    element: Array  # where the first stored row lies
    reason: Array
    head: Array

    @classmethod
    def none(cls) -> EpisodeValues:
        """Of no episode."""
        return cls(*(np.zeros(0, np.int64) for _ in cls._fields))

    def at(self, which: Any) -> EpisodeValues:
        """Of some of the episodes: a slice, or what NumPy indexes by."""
        return EpisodeValues(*(values[which] for values in self))


def facts_of(
    by: EpisodeIndex,
    lane: Array,
    begin: Array,
    first: Array,
    last: Array,
    code: Array,
    head: Array,
) -> EpisodeValues:
    """Facts of episodes as an index tells them: see ``episodes.found.Table``."""
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


def positions(ledger: Ledger, slots: Array) -> Array:
    """Positions of the rows in slots int64 ``[K]``."""
    return np.asarray(ledger.positions(torch.from_numpy(np.ascontiguousarray(slots))).numpy())


class EpisodeLookup(Uncompiled):
    """Answers for rows, by their ``index`` as ``extend`` returned it and samples carry it.

    An index is int64 ``[K]``, for storages with lanes ``[K, ndim]``; answers are ``[K]`` on its
    device. Each method raises IndexError for rows that are not stored, TypeError for anything but
    integers, and costs O(K). They see what is stored now. A position is the number of a row in
    the order of writing, never used twice.

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
        """Ids of the episodes: that of no other one, in this buffer or after a load into it."""
        return self._asked(index, lambda by, time, lane: by.ids(time, lane))

    def position(self, index: Any) -> torch.Tensor:
        """Positions of the rows themselves."""
        return self._asked(index, lambda by, time, lane: by.positions(time, lane))

    def begin(self, index: Any) -> torch.Tensor:
        """Positions of the episodes' first rows, also of those that were overwritten."""

        def begin(by: EpisodeIndex, time: Array, lane: Array) -> Array:
            return by.positions(by.begins(time, lane), lane)

        return self._asked(index, begin)

    def end(self, index: Any) -> torch.Tensor:
        """Positions of the episodes' last rows; of an open one: of its newest row so far."""

        def end(by: EpisodeIndex, time: Array, lane: Array) -> Array:
            return by.positions(by.spans(time, lane)[1], lane)

        return self._asked(index, end)

    def step(self, index: Any) -> torch.Tensor:
        """Rows of the episode before this one, those that were overwritten too: from 0."""
        return self._asked(index, lambda by, time, lane: time - by.begins(time, lane))

    def steps_to_end(self, index: Any) -> torch.Tensor:
        """Stored rows of the episode after this one: 0 at its last."""
        return self._asked(index, lambda by, time, lane: by.spans(time, lane)[1] - time)

    def reason(self, index: Any) -> torch.Tensor:
        """Why the episodes have no further row: an ``EndReason`` each."""
        return self._asked(index, lambda by, time, lane: by.reasons(time, lane))

    def head(self, index: Any) -> torch.Tensor:
        """How the stored parts of the episodes begin: a ``Head`` each."""
        return self._asked(index, lambda by, time, lane: by.heads(time, lane))

    def _asked(self, index: Any, question: Any) -> torch.Tensor:
        with self._storage.lock:
            elements, device = self._elements(index)
            if not len(elements):
                return torch.empty(0, dtype=torch.int64, device=device)
            by = self._storage.episodes
            answer = question(by, *by.place(elements))
        return torch.from_numpy(np.ascontiguousarray(answer, np.int64)).to(device)

    def _elements(self, index: Any) -> tuple[Array, torch.device]:
        """Flat numbers of checked rows, and where the index lies; the lock is held."""
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


_REWARD = ("next", "reward")
_BLOCK = 2**20
"""Rows of which the rewards are taken out at a time: 8 bytes and a few numbers each."""


class Episodes(EpisodeLookup):
    """The episodes of a buffer, in the order of time, lane after lane: what ``rb.episodes`` gives.

    A snapshot, taken when its episodes are first asked for: later writes do not change which
    episodes these are, nor how long. Rows are read when they are asked for; those that have been
    overwritten since raise StaleAddress, and no other row ever takes their place. What is asked by
    an index (``begin`` and so on, see `EpisodeLookup`) is answered for what is stored now.

    ``len``, iteration, an int, and a slice, list, LongTensor or bool mask ``[J]`` work as for a
    list; the latter give Episodes. Every property is int64 ``[J]`` for J episodes, on the CPU.

    Cost: the snapshot and each property O(J) without a step of Python per episode; ``returns`` one
    pass over the rewards; an object is made for an episode only when that is asked for.

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
                    self._known = facts_of(index, *index.table())
                else:
                    self._known = EpisodeValues.none()
        return self._known

    # -- which ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._facts.id)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: Any) -> Episodes: ...

    def __getitem__(self, index: Any) -> Episode | Episodes:
        """Returns one episode for an int, Episodes for anything else.

        Raises:
            IndexError: no such episode. TypeError: not something that indexes.
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
        """Returns the episodes of which ``predicate(episode)`` is true.

        Calls it once per episode; for millions take a mask: ``episodes[episodes.lengths > 9]``.

        Raises:
            TypeError: the predicate cannot be called.
        """
        if not callable(predicate):
            raise TypeError(f"expected a callable predicate, got {type(predicate).__name__}")
        return self._picked(np.array([bool(predicate(one)) for one in self], bool))

    def of(self, index: Any) -> Episodes:
        """Returns the episodes of rows, one for each: int64 ``[K]`` (``[K, ndim]``) gives K.

        Raises:
            IndexError: rows that are not stored. TypeError: not integers.
        """
        with self._storage.lock:
            elements, _ = self._elements(index)
            if not len(elements):
                return Episodes(self._storage)._picked(slice(0, 0))
            by = self._storage.episodes
            time, lane = by.place(elements)
            first, last = by.spans(time, lane)
            begin, code, head = by.begins(time, lane), by.reasons(time, lane), by.heads(time, lane)
            return Episodes(self._storage, facts_of(by, lane, begin, first, last, code, head))

    # -- what they are --------------------------------------------------------------------------

    @property
    def ids(self) -> torch.Tensor:
        """That of no other episode, in this buffer or after a load into it."""
        return _own(self._facts.id)

    @property
    def lengths(self) -> torch.Tensor:
        """Stored rows."""
        return _own(self._facts.length)

    @property
    def reasons(self) -> torch.Tensor:
        """Why there is no further row: an ``EndReason`` each."""
        return _own(self._facts.reason)

    @property
    def heads(self) -> torch.Tensor:
        """How the stored parts begin: a ``Head`` each."""
        return _own(self._facts.head)

    @property
    def lanes(self) -> torch.Tensor:
        """Numbers of the lanes; 0 where the storage has none."""
        return _own(self._facts.lane)

    @property
    def begins(self) -> torch.Tensor:
        """Positions of the first rows, also of those that are stored no more."""
        return _own(self._facts.begin)

    @property
    def starts(self) -> torch.Tensor:
        """Index of the first stored rows; ``[J, ndim]`` for storages with lanes."""
        return self._index(self._facts.element.copy())

    @property
    def returns(self) -> torch.Tensor:
        """Sums of the stored rewards: float64 ``[J]``, of vectors ``[J, *features]``.

        Raises:
            KeyError: there is no ``("next", "reward")``. StaleAddress: rows were overwritten.
        """
        return self._sums(_REWARD)

    @property
    def index(self) -> torch.Tensor:
        """Index of all rows, episode after episode: ``[N]``, or ``[N, ndim]``.

        Raises:
            StaleAddress: rows were overwritten.
        """
        with self._storage.lock:
            found = [elements for _, elements in self._blocks(_BLOCK)]
        return self._index(np.concatenate(found) if found else np.zeros(0, np.int64))

    def rows(self) -> TensorDict:
        """Reads all rows, episode after episode and in the order of time.

        Returns:
            A fresh TensorDict ``[N]`` (or tensorclass), as stored: without the buffer's
            transforms.

        Raises:
            StaleAddress: rows were overwritten. RuntimeError: nothing was written yet.
        """
        with self._storage.lock:
            return self._storage.read(self.index)

    def __repr__(self) -> str:
        return f"Episodes({len(self)} episodes, {int(self._facts.length.sum())} rows)"

    # -- rows -----------------------------------------------------------------------------------

    def _blocks(self, size: int) -> Iterator[tuple[Array, Array]]:
        """Yields of all rows, in pieces, the numbers of their episodes and their elements.

        The lock is held.

        Raises:
            StaleAddress: rows were overwritten.
        """
        facts, storage = self._facts, self._storage
        if not len(facts.id):
            return
        ledger, lanes = storage.ledger, storage.lanes.numel()
        self._check_stored(positions(ledger, facts.element // lanes) == facts.first)
        index = storage.episodes
        start, lane = index.place(facts.element)
        stop = np.broadcast_to(index.bounds(lane)[1], lane.shape)
        self._check_stored(start + facts.length <= stop)
        end = index.element(start + facts.length - 1, lane) // lanes
        self._check_stored(positions(ledger, end) == facts.last)
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
            position = positions(ledger, elements // lanes)
            rest = facts.length[which] - 1 - step
            kept = facts.first[which] + step <= position
            self._check_stored(kept & (position <= facts.last[which] - rest))
            yield which, elements

    def _check_stored(self, stored: Array) -> None:
        if not stored.all():
            raise StaleAddress(
                f"expected the rows of {len(self)} episodes to be there as they were looked up, "
                "but rows were overwritten since; take rb.episodes again"
            )

    def _index(self, elements: Array) -> torch.Tensor:
        index, ndim = torch.from_numpy(np.ascontiguousarray(elements)), self._storage.ndim
        if ndim == 1:
            return index
        if not len(index):  # perhaps nothing was written yet, and lanes are not known
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
    """One episode; see `Episodes`.

    Attributes are those of the moment at which it was looked up.

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
        """That of no other episode, in this buffer or after a load into it."""
        return int(self._only._facts.id[0])

    @property
    def length(self) -> int:
        """Number of stored rows."""
        return int(self._only._facts.length[0])

    def __len__(self) -> int:
        return self.length

    @property
    def lane(self) -> int:
        """Number of the lane; 0 where the storage has none."""
        return int(self._only._facts.lane[0])

    @property
    def begin(self) -> int:
        """Position of the first row, also where that is stored no more."""
        return int(self._only._facts.begin[0])

    @property
    def end(self) -> int:
        """Position of the last stored row."""
        return int(self._only._facts.last[0])

    @property
    def evicted(self) -> int:
        """How many of its first rows were overwritten."""
        return int(self._only._facts.evicted[0])

    @property
    def reason(self) -> EndReason:
        """Why it has no further row."""
        return EndReason(int(self._only._facts.reason[0]))

    @property
    def head(self) -> Head:
        """How its stored part begins."""
        return Head(int(self._only._facts.head[0]))

    @property
    def complete(self) -> bool:
        """Whether it is stored from the environment's reset to its end, terminated or truncated."""
        ended = self.reason in (EndReason.TERMINATED, EndReason.TRUNCATED)
        return ended and self.head == Head.RESET

    @property
    def total_reward(self) -> float | torch.Tensor:
        """Sum of its stored rewards, in float64; a tensor where a reward is one.

        Raises:
            KeyError: there is no ``("next", "reward")``. StaleAddress: rows were overwritten.
        """
        total = self._only.returns[0]
        return total if total.ndim else float(total)

    @property
    def index(self) -> torch.Tensor:
        """Index of its rows in the order of time: int64 ``[n]``, ``[n, ndim]`` with lanes.

        Raises:
            StaleAddress: rows were overwritten.
        """
        return self._only.index

    def rows(self) -> TensorDict:
        """Reads its rows in the order of time: a fresh TensorDict ``[n]``, as stored, without the
        buffer's transforms.

        Raises:
            StaleAddress: rows were overwritten.
        """
        return self._only.rows()

    def __repr__(self) -> str:
        return f"Episode(id={self.id}, length={self.length}, reason={self.reason.name})"


def _own(values: Array) -> torch.Tensor:
    """A tensor that can be changed without the snapshot being so."""
    return torch.from_numpy(values.astype(np.int64, copy=True))


class Streams(Writing[DataT, StorageT, SamplerT, WriterT]):
    """``episodes``, ``cut``."""

    @property
    def episodes(self) -> Episodes:
        """The stored episodes as objects, and what is known of each row's; see `Episodes`.

        Cost: none before something is asked.

        Raises:
            RuntimeError: a storage that does not know where episodes end, or records that are no
                TensorDicts.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> done = torch.tensor([0, 0, 1, 0], dtype=torch.bool)
            >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [4]))
            >>> [episode.length for episode in rb.episodes]
            [3, 1]
        """
        with self._locked() as storage:
            if not isinstance(storage, ColumnStorage):
                raise RuntimeError(
                    f"a {type(storage).__name__} does not know where episodes end; use a tensor or "
                    "memmap storage"
                )
            if storage.initialized:
                _ = storage.episodes  # refuses here what has no keys
            return Episodes(storage)

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Ends the episodes that are being written, without a flag: the stream is severed there.

        What is written next belongs to another episode, which begins in the middle. Rows that
        transforms hold back are stored before, as by ``flush``, those of all lanes.

        Args:
            lane: number of a lane, or several; None: all. In a storage with ``lane_key`` the
                lanes are its streams, by what stands in that column.

        Raises:
            IndexError: no such lane. RuntimeError: a storage that does not know where episodes
                end.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> for _ in range(2):
            ...     _ = rb.extend(TensorDict({"next": {"done": torch.zeros(3, dtype=bool)}}, [3]))
            ...     rb.cut()
            >>> rb.episodes.lengths
            tensor([3, 3])
        """
        with self._locked() as storage:
            storage.lanes_named(lane)  # refuses before anything is stored
            if type(storage).cut is not Storage.cut:
                self.flush()
            self._writer.cut(lane)
