"""Stored episodes as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import torch

from replaykit._compat import TensorDict, Uncompiled
from replaykit.buffer.episode_facts import Facts, facts_of, positions
from replaykit.buffer.episode_lookup import EpisodeLookup
from replaykit.episodes import EndReason, Head
from replaykit.errors import StaleAddress
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import as_index, unravel_index

__all__ = ["Episode", "Episodes"]

Array = np.ndarray[Any, Any]

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

    def __init__(self, storage: ColumnStorage, facts: Facts | None = None) -> None:
        super().__init__(storage)
        self._known = facts

    @property
    def _facts(self) -> Facts:
        if self._known is None:
            with self._storage.lock:
                if self._storage.ledger.length:
                    index = self._storage.episodes
                    self._known = facts_of(index, *index.table())
                else:
                    self._known = Facts.none()
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
