"""Route rows to shards, merge rows from shards, and reshard saved rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.deliver import merged, shaped
from replaykit.buffer.edit import column_of, is_key
from replaykit.buffer.state import of_another_kind
from replaykit.buffer.write import store_rows
from replaykit.checkpoint import Checkpoint
from replaykit.distributed.protocol import GlobalIndex, ShardDied, ShardPart
from replaykit.distributed.shard_config import ShardRecipe
from replaykit.samplers import RandomSampler, Sampler
from replaykit.samplers.priority_rules import importance_weights
from replaykit.samplers.window_forms import SEQUENCE_ID
from replaykit.schema import check_alike, split_leaves
from replaykit.storages import LazyTensorStorage
from replaykit.storages.indexing import as_index
from replaykit.structure import Path, build, flatten
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_buffer import ShardedClient

__all__ = [
    "ByKey",
    "InTurn",
    "Router",
    "Share",
    "batch_of",
    "check_sampler",
    "check_stored",
    "finished",
    "load_share",
    "rows_at",
    "rows_by",
    "rows_of",
    "stable_hash",
]

Array = np.ndarray[Any, Any]


class Share:
    """The rows that one shard contributed to a batch.

    Args:
        shard, incarnation: numbers of the shard and its incarnation.
        numbers: the numbers of the draws that the shard made for the batch, int64 ``[draws]``.
        mass: the mass with which the client drew the shard.
        part: the answer of the shard.
    """

    def __init__(
        self, shard: int, incarnation: int, numbers: Array, mass: float, part: ShardPart
    ) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.numbers, self.mass, self.part = torch.from_numpy(numbers), mass, part

    @property
    def likelier(self) -> float:
        """The factor by which an outdated mass raised the probability of the rows.

        It is 1 if the mass was exact.
        """
        found = self.part.facts.mass
        return self.mass / found if found else 1.0

    def draw_of_row(self) -> torch.Tensor:
        """Return the number of each row's draw in the batch, int64 ``[rows]``."""
        window = self.part.info.get(SEQUENCE_ID)
        return self.numbers if window is None else self.numbers[window]


def batch_of(
    shares: list[Share], names: GlobalIndex, sampler: Sampler, least: float
) -> tuple[Any, dict[Any, Any]]:
    """Return the rows in the order of the draws, and information about them.

    Args:
        least: the smallest probability of a stored row, expressed as ``v * likelier``.
    """
    draws = torch.cat([share.draw_of_row() for share in shares])
    first = torch.argsort(draws, stable=True)
    order = torch.empty_like(first)
    order[first] = torch.arange(len(draws))
    into = list(order.split([len(share.draw_of_row()) for share in shares]))
    info = _info(shares, names, into, len(draws))
    if shares[0].part.values is not None:
        weight = _weights(shares, sampler, least)
        info["priority_weight"] = weight[draws[first]]
    return rows_of([share.part.data for share in shares], into), info


def _info(
    shares: list[Share], names: GlobalIndex, into: list[torch.Tensor], rows: int
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key in shares[0].part.info:
        if key == "priority_weight":
            continue
        values = []
        for share in shares:
            value = share.part.info[key]
            if key in ("index", "anchor_index"):
                value = names.join(share.shard, value)
            elif key in ("index_generation", "anchor_generation"):
                value = names.stamped(value, share.incarnation)
            elif key == SEQUENCE_ID:
                value = share.draw_of_row()
            values.append(value)
        found[key] = _scattered(values, into, rows)
    return found


def _weights(shares: list[Share], sampler: Any, least: float) -> torch.Tensor:
    """Return the ``priority_weight`` of each draw ``[draws]``.

    The weights use the actual probabilities of the draws.
    """
    count = sum(len(share.numbers) for share in shares)
    value = torch.empty(count, dtype=torch.float64)
    for share in shares:
        assert share.part.values is not None
        value[share.numbers] = share.part.values * share.likelier
    if sampler.weight_norm == "batch":
        least = float(value.min())
    return importance_weights(value, least, sampler.beta, sampler.dtype)


def rows_of(pieces: list[Any], into: list[torch.Tensor]) -> Any:
    """Merge containers into one; row j of piece s becomes row ``into[s][j]``.

    Raises:
        SchemaError: the containers differ in keys, shapes or dtypes.
        RuntimeError: transforms have changed the number of rows.

    Cost: one copy of the bytes, and a few Python steps for each leaf and piece.
    """
    taken = [flatten(piece, 1) for piece in pieces]
    root, first = taken[0]
    count = sum(len(rows) for rows in into)
    for shard, (other, leaves) in enumerate(taken):
        if other != root:
            check_alike((0, root), (shard, other))
        if any(leaf.shape[0] != len(into[shard]) for leaf in leaves.values()):
            raise RuntimeError(
                f"expected transforms that keep the number of drawn rows, {len(into[shard])}; one "
                "of them changed it"
            )
    joined = {
        path: _scattered([leaves[path] for _, leaves in taken], into, count) for path in first
    }
    said = {piece.device for piece in pieces if is_tensordict(piece)}
    return build(root, joined, torch.Size([count]), said.pop() if len(said) == 1 else None)


def _scattered(values: list[torch.Tensor], into: list[torch.Tensor], rows: int) -> torch.Tensor:
    first = values[0]
    out = first.new_empty((rows, *first.shape[1:]))
    for value, numbers in zip(values, into, strict=True):
        out.index_copy_(0, numbers, value)
    return out


def finished(data: Any, info: dict[Any, Any], sampler: Sampler, *, merge: bool) -> Any:
    """Return a batch in the shape that the sampler requires.

    ``merge``: whether to add the information about the rows to the batch.
    """
    if merge:
        data = merged(data, info, 0)
    shape = sampler.shape_of(info["index"].shape[0])
    if shape is not None and is_tensordict(data):
        data = shaped(data, info["index"].shape[0], shape)
    return data


def rows_by(client: ShardedClient, index: Any) -> Any:
    """Return the rows ``rb[index]``.

    Integers are indices of rows. Slices and masks select from all rows in live shards, in the order
    of their indices. A key selects a column of all these rows.
    """
    if is_key(index):
        return column_of(rows_by(client, slice(None)), index)
    by_position = isinstance(index, slice) or index is Ellipsis
    if not by_position:
        refused = isinstance(index, (bool, np.bool_))
        index = as_tensor(index)
        by_position = index.dtype is torch.bool
        if refused or index.ndim > 1 or (index.is_floating_point() and index.numel()):
            raise TypeError(
                f"expected an index as an int, slice, mask, key or int64 [K], got {index.dtype} "
                f"{list(index.shape)}"
            )
    if by_position:
        found = client._members.ask_all("stored_slots")
        rows = [client._names.join(shard, slots) for shard, slots in found.items()]
        stored = torch.cat(rows).sort().values
        return rows_at(client, stored[as_index(index, len(stored))])
    rows = rows_at(client, index.to(torch.int64).reshape(-1))
    return rows if index.ndim else rows[0]


def rows_at(client: ShardedClient, index: torch.Tensor) -> Any:
    """Return the rows of indices, int64 ``[K]``, in the order of the indices.

    Raises:
        IndexError: a row is not stored.
        RuntimeError: the shard of a row is being restarted, or nothing was ever written.
    """
    names, members = client._names, client._members
    there = members.present()
    shards, slots = names.shards(index), names.slots(index)
    if bool((index < 0).any()):
        raise IndexError(f"expected indices of stored rows, got {int(index.min())}")
    check_stored(client, index)
    asked = [int(shard) for shard in shards.unique()]
    if not asked:  # return no rows, with the schema of the largest shard
        if not there:
            raise RuntimeError("all shards have died and are being restarted")
        asked = [max(there, key=client._rows_of)]
    into = [(shards == shard).nonzero()[:, 0] for shard in asked]
    replies = [
        members.send(shard, "read", slots[mine]) for shard, mine in zip(asked, into, strict=True)
    ]
    pieces = []
    for shard, sent in zip(asked, replies, strict=True):
        try:
            pieces.append(members.receive(shard, sent)[0])
        except ShardDied:
            raise RuntimeError(f"shard {shard} has died and is being restarted") from None
    return rows_of(pieces, into)


def check_stored(client: ShardedClient, index: torch.Tensor) -> None:
    """Raise IndexError unless each index ``[K]`` is -1 or names a stored row.

    The check may send messages to the shards. It accepts all indices of a shard that is being
    restarted.
    """
    names, members = client._names, client._members
    shards, slots = names.shards(index), names.slots(index)
    for again in (True, False):
        rows = torch.tensor(
            [
                client._rows_of(shard) if members.table.is_there(shard) else 2**62
                for shard in range(names.num_shards)
            ]
        )
        wrong = (index < -1) | ((index >= 0) & (slots >= rows[shards.clamp(min=0)]))
        if not wrong.any():
            return
        if again:
            members.refresh(None, 0.0)
    at = int(wrong.nonzero()[0])
    raise IndexError(f"expected indices of stored rows, got {int(index[at])} at {at}")


_STEP, _MIX, _LAST = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def stable_hash(keys: Array) -> Array:
    """Return hashes of integers ``[K]``, uint64.

    The hashes are the same in all processes and on all machines. The function is the mixer of
    SplitMix64 (Steele, Lea, Flood 2014). It is a bijection, so different keys have different
    hashes.

    Example:
        >>> import numpy as np
        >>> from replaykit.distributed.routing import stable_hash
        >>> stable_hash(np.array([0, 1])) % np.uint64(10)
        array([5, 5], dtype=uint64)
    """
    mixed = keys.astype(np.int64).view(np.uint64) + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _LAST
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class InTurn:
    """A router that assigns rows to the live shards in turn. Thread-safe.

    If all shards are live, row k goes to shard ``k % num_shards``, counting from the first routed
    row.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._lock = threading.Lock()
        self.dealt = 0

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Accept any rows."""

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Return the shard of each row, int64 ``[count]``; ``there`` has the live shards."""
        with self._lock:
            first, self.dealt = self.dealt, self.dealt + count
        number = (first + np.arange(count)) % self.num_shards
        if len(there) in (0, self.num_shards):  # if none is live, rows wait for a restart
            return number
        chosen = np.asarray(there)
        gone = ~np.isin(number, chosen)
        number[gone] = chosen[(first + np.flatnonzero(gone)) % len(chosen)]
        return number


class ByKey:
    """A router that sends rows with the same value under a key to the same shard.

    The shard of a key stays the same when shards die.

    Args:
        key: key of an integer or bool column, ``[B]`` or ``[B, k]``.
    """

    def __init__(self, num_shards: int, key: Any) -> None:
        self.num_shards, self.key = num_shards, unravel(key)

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Raise KeyError if the key is missing, or TypeError if it has no integers."""
        column = leaves.get(self.key)
        if column is None:
            raise KeyError(f"expected the shard_key {format_key(self.key)} in the rows; got none")
        if column.is_floating_point() or column.is_complex():
            raise TypeError(
                f"expected integers under the shard_key {format_key(self.key)}, got {column.dtype}"
            )

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Return the shards of checked rows, int64 ``[count]``."""
        column = leaves[self.key]
        values = column.detach().cpu().reshape(count, -1).to(torch.int64).numpy()
        mixed = np.zeros(count, np.uint64)
        for number in range(values.shape[1]):
            mixed = stable_hash((mixed ^ stable_hash(values[:, number])).view(np.int64))
        return (mixed % np.uint64(self.num_shards)).astype(np.int64)


Router = InTurn | ByKey


_BLOCK_ROWS = 8192


@dataclass
class _Source:
    """The open checkpoint of a shard, whose rows stay in the files if possible.

    Attributes:
        order: slots of the rows, from the oldest to the newest.
    """

    buffer: ReplayBuffer
    order: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.order)


def load_share(
    buffer: ReplayBuffer, recipe: ShardRecipe, shard: int, sources: list[str]
) -> tuple[int, int]:
    """Fill a new buffer with the rows and priorities that now belong to a shard.

    Without a shard key, rows are assigned to shards in turn, in the order of the first assignment.
    With a shard key, the saved shards are read one after the other, each in write order. Therefore
    the rows of a stream keep their order. Streams are cut at each change from one saved shard to
    another.

    Returns:
        The count of rows that belong to the shard, and the count of these rows that did not fit. If
        rows do not fit, the oldest rows are dropped.

    Raises:
        CheckpointError: a saved shard is damaged. Each saved shard is verified by one of the
            loading shards.

    Cost: one pass over the rows of the shard, and one over the key column of all rows. Memory: a
    block of 8192 rows, in addition to the new buffer.
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
            _default_value(buffer, one.buffer)
    return count, max(0, count - buffer.storage.max_size)


def check_sampler(buffer: ReplayBuffer, path: str) -> None:
    """Raise ValueError if a shard was saved with a sampler of another kind.

    A single buffer would continue with a new sampler state, but all shards must have the same kind
    of sampler.
    """
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
    buffer.flush()  # store held-back rows at the end of their stream
    order = storage.ledger.write_order() if len(storage) else torch.empty(0, dtype=torch.int64)
    return _Source(buffer, order)


def _dealt(opened: list[_Source], num_shards: int, shard: int) -> Iterator[Array]:
    """Yield blocks of the rows that are assigned to a shard in turn.

    A block is int64 ``[K, 2]``, with the source and slot of each row. Rows are sorted by their row
    id in the saved shard, then by shard. This is the order in which they were first assigned.
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
    """Yield blocks of slots in write order, and the streams to cut after each block.

    The slots hold the rows of the loading shard. The streams end after the block although no column
    shows it. They are given by their keys, as True for all streams, or as None for no stream. The
    row at such a cut may belong to another shard.
    """
    storage: Any = one.buffer.storage
    for first in range(0, one.rows, _BLOCK_ROWS):
        slots = one.order[first : first + _BLOCK_ROWS]
        columns = split_leaves(storage.get(slice(0, len(storage))), 1).leaves
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
    """Cut all streams, or the given streams if they have rows."""
    if len(buffer):
        with contextlib.suppress(IndexError):
            buffer.cut(None if streams is True else streams)


def _copy(buffer: ReplayBuffer, opened: list[_Source], block: Array) -> None:
    """Store a block of rows from several sources, in the order of the block."""
    pieces, into = [], []
    for which, one in enumerate(opened):
        mine = np.flatnonzero(block[:, 0] == which)
        if len(mine):
            pieces.append(_read(one, torch.from_numpy(block[mine, 1])))
            into.append(torch.from_numpy(mine))
    raw = [priorities for _, priorities in pieces if priorities is not None]
    _store(
        buffer,
        rows_of([rows for rows, _ in pieces], into),
        _scattered(raw, into, len(block)) if raw else None,
    )


def _read(one: _Source, slots: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """Return rows as they are stored, and their raw priorities or None."""
    storage, sampler = one.buffer.storage, one.buffer.sampler
    raw = None
    if sampler.prioritized:
        raw = sampler._table.follow(storage).raw[slots].clone()  # type: ignore[attr-defined]
    return storage.get(slots), raw


def _store(buffer: ReplayBuffer, data: Any, raw: torch.Tensor | None) -> None:
    slots = store_rows(buffer, data, update_priority=False)
    if raw is not None:
        buffer.update_priority(slots, raw)


def _default_value(buffer: ReplayBuffer, source: ReplayBuffer) -> None:
    mine: Any = buffer.sampler
    theirs: Any = source.sampler
    if mine.prioritized:
        mine._table.most = max(mine._table.most, theirs._table.most)
