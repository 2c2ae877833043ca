"""Write whole episodes, and remove whole episodes to make room."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from replaykit.declared import Count, vector
from replaykit.episodes.streams import stream_keys
from replaykit.errors import BufferFull
from replaykit.keywords import one_of, whole_number
from replaykit.schema import MatchedRows, Rows
from replaykit.storages import Storage
from replaykit.storages.episode_tags import EpisodeData
from replaykit.storages.removal import Replacement, check_removable, stream_index
from replaykit.ted import end_flags, format_key
from replaykit.writers.ring_writers import stream_numbers, streams_of
from replaykit.writers.writer import Writer, WriterState, check_tensordicts, ledger_of

if TYPE_CHECKING:
    from replaykit.episodes import EpisodeIndex
    from replaykit.storages.column_storage import ColumnStorage


class Evictor(ABC):
    """Orders the episodes that may be removed. The first ones are removed first.

    A custom evictor defines ``order``. A function of an ``EpisodeData`` also works as ``evict=`` of
    an EpisodeWriter. It returns a number for each episode, and the lowest are removed first.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import EpisodeWriter, LazyTensorStorage, ReplayBuffer
        >>> shortest_first = lambda episodes: episodes.length
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6, lane_key="id"),
        ...                   writer=EpisodeWriter(evict=shortest_first))
        >>> for id_, rows in ((0, 3), (1, 2), (2, 3)):
        ...     done = torch.arange(rows) == rows - 1
        ...     ids = torch.full((rows,), id_)
        ...     _ = rb.extend(TensorDict({"id": ids, "next": {"done": done}}, [rows]))
        >>> [episode.rows()["id"][0].item() for episode in rb.episodes]
        [0, 2]
    """

    @abstractmethod
    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        """Return the numbers of all episodes in the order of removal, int64 ``[J]``.

        Args:
            episodes: the stored episodes.
            draw: a function of a count, which returns random numbers in [0, 1), float64.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Fifo(Evictor):
    """Removes the episode first that was written first.

    Example:
        >>> from replaykit import EpisodeWriter, Fifo
        >>> EpisodeWriter(evict=Fifo()).evict
        Fifo()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.argsort(episodes.id)


class Uniform(Evictor):
    """Removes episodes at random, with probabilities in proportion to their lengths.

    A removed episode is the next of successive draws without replacement. So every stored row is
    equally likely to lose its episode.

    Example:
        >>> from replaykit import EpisodeWriter, Uniform
        >>> EpisodeWriter(evict=Uniform()).evict
        Uniform()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        # The order of the keys has the distribution (Efraimidis and Spirakis, 2006).
        return np.argsort(-np.log1p(-draw(len(episodes))) / episodes.length, kind="stable")


class MostSampled(Evictor):
    """Removes the episode first from which samplers have drawn most windows.

    The counts are those of ``Coverage``. Among equal counts, the oldest episode goes first.

    Example:
        >>> from replaykit import EpisodeWriter, MostSampled
        >>> EpisodeWriter(evict=MostSampled()).evict
        MostSampled()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.lexsort((episodes.id, -episodes.draws))


class Oldest(Evictor):
    """Removes the episode first whose tag is lowest, such as a time or a version.

    Args:
        tag: the name of a tag with one number per episode.

    Example:
        >>> from replaykit import EpisodeWriter, Oldest
        >>> EpisodeWriter(evict=Oldest("policy_version")).evict
        Oldest('policy_version')
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        values = episodes[self.tag].reshape(len(episodes), -1)
        if values.shape[1] != 1:
            raise ValueError(f"tag {self.tag!r}: expected one number, got {values.shape[1]}")
        return np.lexsort((episodes.id, values[:, 0]))

    def __repr__(self) -> str:
        return f"Oldest({self.tag!r})"


class LowestPriority(Evictor):
    """Removes the episode first whose largest row priority is lowest.

    The buffer needs a sampler with priorities. Among equal priorities, the oldest episode goes
    first.

    Example:
        >>> from replaykit import EpisodeWriter, LowestPriority
        >>> EpisodeWriter(evict=LowestPriority()).evict
        LowestPriority()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.lexsort((episodes.id, episodes.priority))


class ByNumber(Evictor):
    """Removes the episodes first for which a function returns the lowest numbers."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        found = np.asarray(self.number(episodes))
        if found.shape != (len(episodes),) or found.dtype.kind not in "biuf":
            raise ValueError(
                f"evict: expected a number for each of {len(episodes)} episodes, got "
                f"{found.dtype} {list(found.shape)}"
            )
        return np.lexsort((episodes.id, found))

    def __repr__(self) -> str:
        return repr(self.number)


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _EpisodeWriterState(WriterState):
    """The state of the writer, with the stream of each row.

    ``protected`` are the streams with the bool tag that protects them; None in older states.
    """

    lanes: Annotated[Any, vector(torch.int64)]
    evicted: Count
    protected: list[Count] | None = None

    def __post_init__(self) -> None:
        if len(self.lanes) != self.ledger.length:
            raise ValueError(
                f"expected the streams of {self.ledger.length} rows, got {len(self.lanes)}"
            )


class EpisodeWriter(Writer):
    """A writer that stores whole episodes, and makes room by removing whole episodes.

    The storage must have a ``lane_key``, whose value identifies the episode of a row. A write has
    the rows of one or several whole episodes, one after another. Before the rows are written, the
    writer removes episodes until the new rows fit. So the storage never has more than ``max_size``
    rows, and often fewer. An episode without a flag at its last row ends as a cut.

    When an episode is removed, rows of the last slots move to its slots. They keep their row ids,
    priorities and tags. An index with a generation from before no longer names them.

    Args:
        evict: the order in which episodes are removed: ``Fifo()`` (the default), ``Uniform()``,
            ``MostSampled()``, ``LowestPriority()``, ``Oldest(tag)``, or a function of an
            ``EpisodeData`` that returns a number for each episode. The lowest goes first.
        over_long: treatment of an episode of more than ``max_size`` rows. ``"error"``: refuse it.
            ``"split"``: cut it into pieces. The last piece of ``max_size`` rows stays stored, since
            it takes the room of the pieces before.
        max_episodes: the number of episodes that may be stored; None for no limit.
        on_duplicate: treatment of an episode whose identity is stored. ``"error"``: refuse it.
            ``"replace"``: the new episode replaces the stored one.
        protect: the episodes that are never removed: the name of a bool tag, or a function of an
            ``EpisodeData`` that returns bool ``[J]``. ``rb.tag`` sets tags at any time. Only
            ``rb.empty(protected=True)`` and calls that name their rows remove such episodes. A load
            into less capacity keeps those with a tag, and otherwise the newest episodes.
        track_generations: whether samples carry ``index_generation``; see RoundRobinWriter.

    Attributes:
        evicted: number of episodes that were removed to make room since the last ``empty``, or
            since a recovery. Each process that shares a storage counts the removals it has made.

    Raises:
        ValueError: an argument is unknown; the storage has no ``lane_key``.
        ValueError: on write, an episode is too long, is already stored, has its rows in several
            places of the batch, or ends before its last row.
        BufferFull: on write, too many of the stored episodes are protected.

    After an error nothing has changed.

    Cost: O(rows written and removed + episodes). ``Fifo`` takes the same time for any number of
    episodes that are written and removed one by one.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import EpisodeWriter, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, lane_key="id"), writer=EpisodeWriter())
        >>> for id_, rows in enumerate((4, 3, 3, 2)):
        ...     done = torch.arange(rows) == rows - 1
        ...     ids = torch.full((rows,), id_)
        ...     _ = rb.extend(TensorDict({"id": ids, "next": {"done": done}}, [rows]))
        ...     print(len(rb), rb.writer.full)
        4 False
        7 False
        10 False
        8 True
    """

    kind = "episodes"
    _declared = _EpisodeWriterState
    mapped_entries = ("_ledger", "_lanes")

    def __init__(
        self,
        evict: Evictor | Callable[[EpisodeData], Any] | None = None,
        over_long: str = "error",
        max_episodes: int | None = None,
        on_duplicate: str = "error",
        protect: str | Callable[[EpisodeData], Any] | None = None,
        *,
        track_generations: bool = False,
    ) -> None:
        super().__init__()
        evict = Fifo() if evict is None else evict
        if not isinstance(evict, Evictor) and (isinstance(evict, type) or not callable(evict)):
            raise TypeError(f"evict: expected an Evictor or a function, got {evict!r}")
        if not (protect is None or isinstance(protect, str) or callable(protect)):
            raise TypeError(f"protect: expected a tag or a function, got {protect!r}")
        self.evict: Evictor = evict if isinstance(evict, Evictor) else ByNumber(evict)
        self.over_long = one_of("over_long", over_long, ("error", "split"))
        self.on_duplicate = one_of("on_duplicate", on_duplicate, ("error", "replace"))
        if max_episodes is not None:
            max_episodes = whole_number("max_episodes", max_episodes, 1)
        self.max_episodes, self.protect = max_episodes, protect
        self.tracks_generations = track_generations
        self.evicted = 0
        # Keys and lengths of the stored episodes, oldest first, for an index and a number of the
        # ledger's log. Only ``Fifo`` without protected episodes uses this.
        self._queue: deque[tuple[Any, int]] = deque()
        self._queue_of: EpisodeIndex | None = None
        self._queue_at = -1

    @property
    def full(self) -> bool:
        """True if episodes were removed to make room since the last ``empty``."""
        return self.evicted > 0

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to. Raises ValueError if it cannot remove single rows."""
        check_removable(storage, type(self).__name__)
        super().register_storage(storage)

    @property
    def _columns(self) -> ColumnStorage:
        storage: Any = self.storage
        return storage

    # -- writing ------------------------------------------------------------------------------

    def write(self, rows: Any) -> torch.Tensor:
        """Store whole episodes; return the slot of each row, -1 for rows that are not stored."""
        storage: Any = self.storage if self._storage is None else self._storage  # faster
        if not len(rows):
            return self._no_rows()
        if (written := self._write_run(storage, rows)) is not None:
            return written
        index = None
        if storage.initialized:
            index = stream_index(storage, type(self).__name__)
        else:
            check_tensordicts(rows, self)
        keys, lengths, is_open = self._episodes_of(rows)
        slots = storage.slots_for(rows)
        skipped = self._skipped(len(rows), lengths, slots)
        count = len(rows) - skipped
        replaced, victims = self._victims(index, keys, count, slots)
        gone = {**replaced, **victims}
        if skipped:
            rows = _part(storage.apart(rows), skipped)
        storage.accept(rows)
        if index is None:
            index = storage.episodes  # the index follows this write
        if not index.pool.stream_count:
            self._set_queue((), index)
        known = self._has_queue(index)
        counts = np.array(list(gone.values()), np.int64)
        again = bool(replaced or skipped)
        change = Replacement(storage, list(gone), counts, count, forget=True, again=again)
        targets = torch.from_numpy(change.slots)
        change.joined = keys.tolist() if skipped else ()
        change.make(rows)
        self.evicted += len(victims)
        if is_open.any():
            chosen = np.zeros(index.lanes, bool)
            chosen[index.lanes_with(keys[is_open])] = True
            storage.indexes.cut(chosen)
        self._count(count)
        if known:
            self._follow(index, keys, lengths - skipped)
        if not skipped:
            return targets
        return torch.cat([torch.full((skipped,), -1, dtype=torch.int64, device="cpu"), targets])

    def _write_run(self, storage: ColumnStorage, rows: Rows) -> torch.Tensor | None:
        """Write one new episode to consecutive slots; return the slots.

        Return None if the write needs other steps: if rows have to move, if an identity is stored
        or the episode is open, or if the order of removal is not known.
        """
        index, ledger = storage.indexes.only_current(), storage.ledger
        if index is not self._queue_of or self._queue_at != ledger.log.number:
            return None
        plain = storage.recovery is None or not storage.recovery.shared
        if index is None or type(rows) is not MatchedRows or not plain:
            return None
        key, count = rows.whole_episode(storage.lane_key), rows.batch[0]
        if key is None or key in index.pool or not ledger.oldest_first:
            return None
        gone: list[Any] = []
        need, found = count - (ledger.slots - ledger.length), 0
        excess = 0 if self.max_episodes is None else index.pool.stream_count + 1 - self.max_episodes
        for name, size in self._queue:
            if found >= need and len(gone) >= excess:
                break
            gone.append(name)
            found += size
        if (gone and found != count) or found < need:
            return None
        slot = index.pool.run_of(gone, count) if gone else ledger.length
        if slot < 0:
            return None
        storage.accept(rows)
        slots = range(slot, slot + count)
        tables = ledger.reserve(slots)
        storage.write_ring(slot, rows, 0)
        ledger.place_in_streams(slots, tables)
        storage.indexes.replaced_run(gone, key, slot, count)
        for _ in gone:
            self._queue.popleft()
        self._queue.append((key, count))
        self._queue_at = ledger.log.number
        self.evicted += len(gone)
        self._write_count += count
        return torch.from_numpy(np.arange(slot, slot + count))

    def _episodes_of(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Return key, length, and lack of an end of each episode of a batch."""
        lane_key, leaves = self._columns.lane_key, rows.leaves
        assert lane_key is not None
        keys = stream_keys(leaves[lane_key])
        if keys[0] == keys[-1] and (keys == keys[0]).all():  # a fast path
            last = np.array([len(keys) - 1])
        else:
            last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True))
        names = keys[last]
        if len(names) > 1 and len(set(names.tolist())) < len(names):
            raise ValueError(
                f"expected the rows of an episode one after another, by {format_key(lane_key)}; "
                "got rows of other episodes between them"
            )
        is_open = np.ones(len(names), bool)
        for key in end_flags(leaves):
            flag = leaves[key]
            flag = flag if flag.dtype is torch.bool and flag.is_cpu else (flag != 0).cpu()
            at = flag.numpy().reshape(-1).nonzero()[0]
            if not len(at):
                continue
            at = at // (flag.numel() // len(keys))
            if at[0] == last[-1]:  # a fast path
                is_open[-1] = False
                continue
            ends = last.searchsorted(at)
            inside = at[last[ends] != at]
            if len(inside):
                raise ValueError(
                    f"key {format_key(key)}: expected the end of an episode at its last row, got "
                    f"one at row {inside[0]} of the batch; give each episode its own "
                    f"{format_key(lane_key)}"
                )
            is_open[ends] = False
        lengths = last + 1
        lengths[1:] -= last[:-1] + 1
        return names, lengths, is_open

    def _skipped(self, rows: int, lengths: Array, slots: int) -> int:
        """Return how many rows of a too long episode are not stored."""
        if rows <= slots:
            return 0
        if self.over_long == "error" or len(lengths) > 1:
            long = lengths.max() > slots and self.over_long == "error"
            raise ValueError(
                f"expected episodes of at most {slots} rows in all, got {len(lengths)} of {rows} "
                f"rows{'; over_long=split cuts long episodes' if long else ''}"
            )
        return rows - slots

    def _victims(
        self, index: EpisodeIndex | None, keys: Array, rows: int, slots: int
    ) -> tuple[dict[Any, int], dict[Any, int]]:
        """Return the lengths of the episodes to replace and to remove, by key."""
        limit, given = self.max_episodes, keys.tolist()
        if limit is not None and len(keys) > limit:
            raise ValueError(f"expected at most {limit} episodes, got {len(keys)}")
        if index is None:
            return {}, {}
        replaced = {}
        known = [key for key in given if key in index.pool]
        if known:
            if self.on_duplicate == "error":
                raise ValueError(
                    f"expected an episode whose {format_key(self._columns.lane_key or ())} is not "
                    f"stored, got {known[0]!r}; on_duplicate='replace' replaces the stored one"
                )
            sizes = index.sizes(np.array(known, keys.dtype)).tolist()
            replaced = dict(zip(known, sizes, strict=True))
        length = self.storage.ledger.length
        need = rows - (slots - length + sum(replaced.values()))
        excess = 0 if limit is None else index.pool.stream_count + len(keys) - len(replaced) - limit
        if need <= 0 and excess <= 0:
            return replaced, {}
        victims, found = {}, 0
        for key, size in self._in_order(index, replaced):
            victims[key] = size
            found += size
            if found >= need and len(victims) >= excess:
                return replaced, victims
        raise BufferFull(
            f"expected room for {rows} rows of {len(keys)} episodes in {slots} slots, got {length} "
            f"stored rows, of which {found} may be removed; the others are protected"
        )

    def _in_order(self, index: EpisodeIndex, replaced: dict[Any, int]) -> Iterable[tuple[Any, int]]:
        """Return key and length of the episodes that may be removed, in the order of removal."""
        if type(self.evict) is not Fifo or self.protect is not None:
            return self._ordered(index, replaced)
        if not self._has_queue(index):
            self._set_queue(self._ordered(index, {}), index)
        return ((key, size) for key, size in self._queue if key not in replaced)

    def _follow(self, index: EpisodeIndex, keys: Array, lengths: Array) -> None:
        """Remember the order of the episodes for the next write."""
        if type(self.evict) is Fifo and self.protect is None:
            queue = self._queue
            while queue and queue[0][0] not in index.pool:
                queue.popleft()
            queue.extend(zip(keys.tolist(), lengths.tolist(), strict=True))
            if index.pool.stream_count == len(queue):
                self._queue_at = self.storage.ledger.log.number

    def _has_queue(self, index: EpisodeIndex) -> bool:
        return self._queue_of is index and self._queue_at == self.storage.ledger.log.number

    def _set_queue(self, episodes: Iterable[tuple[Any, int]], index: EpisodeIndex) -> None:
        self._queue, self._queue_of = deque(episodes), index
        self._queue_at = self.storage.ledger.log.number

    def _ordered(self, index: EpisodeIndex, replaced: dict[Any, int]) -> list[tuple[Any, int]]:
        lanes = self._order(index.lanes_with(list(replaced)))
        sizes = index.sizes()[lanes].tolist()
        return list(zip(index.keys(lanes), sizes, strict=True))

    def _data(self) -> EpisodeData:
        """Return the stored episodes."""
        storage, owner = self._columns, self.owner
        sampler: Any = None if owner is None else owner.sampler
        priorities = None
        if hasattr(sampler, "stored_priorities"):
            priorities = partial(sampler.stored_priorities, storage)
        return storage.indexes.data(priorities)

    def protected(self, data: EpisodeData | None = None) -> Array:
        """Return the lanes with protected episodes, bool ``[lanes]``. The caller holds the lock."""
        storage, data = self._columns, self._data() if data is None else data
        kept = np.zeros(len(data), bool)
        if not isinstance(self.protect, str):
            kept |= False if self.protect is None else np.asarray(self.protect(data), bool)
        elif self.protect in storage.indexes.tags.names:
            kept |= data[self.protect].reshape(len(data), -1).any(1)
        # An identity with several episodes is removed as a whole, or not at all.
        held = np.zeros(storage.episodes.lanes, bool)
        held[data.lane[kept]] = True
        return held

    def _order(self, replaced: Array) -> Array:
        """Return the lanes that may be removed, in the order of removal."""
        data = self._data()
        order = np.asarray(self.evict.order(data, self._random), np.int64)
        held = self.protected(data)
        held[replaced] = True
        lanes = data.lane[order]
        lanes = lanes[np.sort(np.unique(lanes, return_index=True)[1])]
        return np.asarray(lanes[~held[lanes]])

    def _random(self, count: int) -> Array:
        owner = self.owner
        generator = None if owner is None else owner._generator
        device = "cpu" if generator is None else generator.device
        drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        return np.asarray(drawn.cpu().numpy())

    def kept_rows(self, slots: int) -> torch.Tensor | None:
        storage = self._columns
        length = storage.ledger.length
        if length <= slots:
            return super().kept_rows(slots)
        index, gone, left = stream_index(storage, "resize()"), [], length
        for key, size in self._in_order(index, {}):
            gone.append(key)
            left -= size
            if left <= slots:
                break
        else:
            raise BufferFull(
                f"expected protected episodes of at most {slots} rows, got {left}; the capacity is "
                f"{storage.ledger.slots}"
            )
        lanes = index.lanes_with(gone)
        order = storage.ledger.write_order()
        return order[torch.from_numpy(~np.isin(stream_numbers(storage)[order.numpy()], lanes))]

    @contextlib.contextmanager
    def resized(self, max_size: int) -> Iterator[torch.Tensor | None]:
        storage = self._columns
        before = storage.episodes.pool.stream_count if storage.initialized else 0
        with super().resized(max_size) as kept:
            evicted = before - storage.episodes.pool.stream_count if before else 0
            yield kept
        self.evicted += evicted

    def empty(self, empty_write_count: bool = True) -> None:
        super().empty(empty_write_count)
        self.evicted = 0

    # -- state --------------------------------------------------------------------------------

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """Return the slots of the rows to keep: of protected episodes, then of the newest ones.

        Raises BufferFull if the protected episodes do not fit.
        """
        order = ledger_of(state).write_order()
        lanes = streams_of(state)[order].numpy()
        counts, newest = np.bincount(lanes), np.zeros(int(lanes.max(initial=-1)) + 1, np.int64)
        np.maximum.at(newest, lanes, np.arange(len(lanes)))
        given = None if self.protect is None else state.get("_protected")
        held = np.intersect1d(np.array(given or [], np.int64), lanes)
        newest[held] += len(lanes)
        by_age = np.argsort(-newest, kind="stable")
        fits = np.cumsum(counts[by_age]) <= capacity
        if not fits[: len(held)].all():
            raise BufferFull(
                f"expected protected episodes of at most {capacity} rows, got {counts[held].sum()}"
            )
        kept = np.zeros(len(counts), bool)
        kept[by_age[fits]] = True
        return order[torch.from_numpy(kept[lanes])]

    def state_dict(self) -> dict[str, Any]:
        """Return the writer's state, with each row's stream and the number of removed episodes."""
        storage = self._columns
        with storage.lock:
            lanes = torch.from_numpy(stream_numbers(storage))
            named = isinstance(self.protect, str) and len(lanes)
            held = self.protected().nonzero()[0].tolist() if named else []
            more = {"_lanes": lanes, "_evicted": self.evicted, "_protected": held}
            return {**super().state_dict(), **more}

    def restore(self, state_dict: dict[str, Any], rows: torch.Tensor | None) -> None:
        super().restore(state_dict, rows)
        self.evicted = state_dict["_evicted"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_queue": deque(), "_queue_of": None}

    def __repr__(self) -> str:
        return f"EpisodeWriter(evict={self.evict!r}, write_count={self.write_count})"


def _part(rows: Rows, first: int) -> Rows:
    leaves = {path: leaf[first:] for path, leaf in rows.leaves.items()}
    return Rows(rows.root, leaves, torch.Size([rows.batch[0] - first]))
