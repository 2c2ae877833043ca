"""The rows of a checkpoint of m shards, as one of n shards gets them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import of_another_kind
from replaykit.checkpoint import Checkpoint
from replaykit.samplers import RandomSampler
from replaykit.schema import take_apart
from replaykit.sharding.batches import rows_of
from replaykit.sharding.recipe import ShardRecipe
from replaykit.sharding.routing import ByKey
from replaykit.storages import LazyTensorStorage
from replaykit.ted import unravel

__all__ = ["check_sampler", "load_share"]

Array = np.ndarray[Any, Any]

_BLOCK_ROWS = 8192


@dataclass
class _Source:
    """A saved shard, opened: its rows stay in the files, where they can."""

    buffer: ReplayBuffer
    order: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.order)


def load_share(
    buffer: ReplayBuffer, recipe: ShardRecipe, shard: int, sources: list[str]
) -> tuple[int, int]:
    """Fills a new buffer with the rows that belong to a shard now, with their priorities.

    Rows that were dealt out in turn are dealt anew, in the same order.
    Rows with a key come shard by shard, each in the order in which it was written, so that what
    followed one another still does; the stream is cut where one shard ends and the next begins.

    Returns:
        How many rows belong here, and how many of them did not fit: the first ones.

    Raises:
        CheckpointError: a saved shard is damaged; every one is read and checked by one of the
            shards that are loaded.

    Cost: one pass over the rows that belong here and the key column of all; memory for a block of
    8192 rows beside what is filled.
    """
    with contextlib.ExitStack() as open_files:
        opened = []
        for number, path in enumerate(sources):
            opened.append(_open(recipe, path, number % recipe.num_shards == shard))
            open_files.callback(opened[-1].buffer.shutdown)
        count = 0
        if recipe.shard_key is None:
            for block in _dealt(opened, recipe.num_shards, shard):
                count += len(block)
                _copy(buffer, opened, block)
        else:
            key = ByKey(recipe.num_shards, recipe.shard_key)
            for one in opened:
                for slots, ended in _with_key(one, key, shard):
                    count += len(slots)
                    if len(slots):
                        _store(buffer, *_read(one, slots))
                    if ended is not None:
                        _sever(buffer, ended)
        for one in opened:
            _take_default(buffer, one.buffer)
    return count, max(0, count - buffer.storage.max_size)


def check_sampler(buffer: ReplayBuffer, path: str) -> None:
    """Raises ValueError where a shard was saved with a sampler of another kind: what a buffer alone
    begins anew, a shard has to agree about with the others."""
    with Checkpoint(path) as saved:
        state = saved.part("sampler", mapped=("_priorities",))
        if of_another_kind(state, buffer.sampler):
            raise ValueError(
                f"expected the state of a {buffer.sampler.kind!r} sampler, got {state['_kind']!r}"
            )


def _open(recipe: ShardRecipe, path: str, verify: bool) -> _Source:
    with Checkpoint(path) as saved:
        capacity = saved.manifest["max_size"]
    like: Any = recipe.storage()
    dedup, lane_key = like.dedup_next, like.lane_key
    storage = LazyTensorStorage(capacity, dedup_next=dedup, lane_key=lane_key)
    buffer = ReplayBuffer(
        storage=storage,
        sampler=RandomSampler if recipe.sampler is None else recipe.sampler,
        writer=recipe.writer,
        transform_factory=recipe.transform_factory,
        priority_key=recipe.priority_key,
        delayed_init=False,
    )
    check_sampler(buffer, path)
    in_files = not dedup and lane_key is None
    buffer.loads(path, mmap=in_files, verify=verify or not in_files)
    buffer.flush()  # what transforms held back is stored where its stream ended
    order = storage.ledger.write_order() if len(storage) else torch.empty(0, dtype=torch.int64)
    return _Source(buffer, order)


def _dealt(opened: list[_Source], num_shards: int, shard: int) -> Iterator[Array]:
    """Blocks of rows that are dealt to a shard: int64 ``[K, 2]``, source and slot of each.

    The order of all rows is that in which they were dealt out: by how many rows had been written to
    their shard before them, then by shard.
    """
    rows = np.array([one.rows for one in opened])
    until = np.array([one.buffer.storage.ledger.next_position for one in opened])
    oldest = until - rows
    for first in range(int(oldest.min()), int(until.max()), _BLOCK_ROWS):
        position = np.arange(first, min(first + _BLOCK_ROWS, int(until.max())))[:, None]
        before = np.clip(position - oldest, 0, rows).sum(1, keepdims=True)
        there = (position >= oldest) & (position < until)
        number = before + np.cumsum(there, 1) - 1
        at, source = np.nonzero(there & (number % num_shards == shard))
        slots = np.empty(len(at), np.int64)
        for which, one in enumerate(opened):
            chosen = source == which
            slots[chosen] = one.order.numpy()[position[at[chosen], 0] - oldest[which]]
        if len(at):
            yield np.stack([source, slots], 1)


def _with_key(one: _Source, key: ByKey, shard: int) -> Iterator[tuple[torch.Tensor, Any]]:
    """Blocks of slots of a shard's rows in the order of writing, and what nothing follows after a
    block although no column says so: the keys of streams, True for all that there is, or None.

    A row that belongs elsewhere may be the one at which all were severed, or its stream.
    """
    storage: Any = one.buffer.storage
    for first in range(0, one.rows, _BLOCK_ROWS):
        slots = one.order[first : first + _BLOCK_ROWS]
        columns = take_apart(storage.get(slice(0, len(storage))), 1).leaves
        column = columns[key.key].index_select(0, slots)
        mine = torch.from_numpy(key.route({key.key: column}, len(slots), []) == shard)
        positions = storage.ledger.positions(slots).numpy()
        start = 0
        for last in np.flatnonzero(np.isin(positions, storage.indexes.marks.numbers)).tolist():
            streams: Any = True
            if storage.lane_key is not None:
                streams = columns[unravel(storage.lane_key)][slots[last : last + 1]]
            yield slots[start : last + 1][mine[start : last + 1]], streams
            start = last + 1
        yield slots[start:][mine[start:]], None
    if one.rows:
        yield one.order[:0], True


def _sever(buffer: ReplayBuffer, streams: Any) -> None:
    """Ends what is open of all rows, or of streams if there are rows of them."""
    if len(buffer):
        with contextlib.suppress(IndexError):
            buffer.cut(None if streams is True else streams)


def _copy(buffer: ReplayBuffer, opened: list[_Source], block: Array) -> None:
    """Stores a block of rows in its order, whichever sources they are from."""
    pieces, places = [], []
    for which, one in enumerate(opened):
        mine = np.flatnonzero(block[:, 0] == which)
        if len(mine):
            pieces.append(_read(one, torch.from_numpy(block[mine, 1])))
            places.append(torch.from_numpy(mine))
    _store(buffer, rows_of([rows for rows, _ in pieces], places), _joined(pieces, places))


def _read(one: _Source, slots: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """Rows as they are stored, and their raw priorities."""
    storage, sampler = one.buffer.storage, one.buffer.sampler
    raw = None
    if sampler.prioritized:
        raw = sampler._following(storage).raw[slots].clone()  # type: ignore[attr-defined]
    return storage.get(slots), raw


def _store(buffer: ReplayBuffer, data: Any, raw: torch.Tensor | None) -> None:
    slots = buffer._store(data, update_priority=False)
    if raw is not None:
        buffer.update_priority(slots, raw)


def _joined(
    pieces: list[tuple[Any, torch.Tensor | None]], places: list[torch.Tensor]
) -> torch.Tensor | None:
    if pieces[0][1] is None:
        return None
    out = pieces[0][1].new_empty(sum(len(place) for place in places))
    for (_, raw), place in zip(pieces, places, strict=True):
        assert raw is not None
        out[place] = raw
    return out


def _take_default(buffer: ReplayBuffer, source: ReplayBuffer) -> None:
    mine: Any = buffer.sampler
    theirs: Any = source.sampler
    if mine.prioritized:
        mine._stored.most = max(mine._stored.most, theirs._stored.most)
