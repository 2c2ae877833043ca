"""Route rows to shards, and read rows of several shards as one container."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer.edit import column_of, is_key
from replaykit.distributed.protocol import ShardDied
from replaykit.schema import check_alike
from replaykit.storages.indexing import as_index
from replaykit.structure import Path, build, flatten
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_client import ShardedClient

Array = np.ndarray[Any, Any]


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
    joined = {path: scattered([leaves[path] for _, leaves in taken], into, count) for path in first}
    said = {piece.device for piece in pieces if is_tensordict(piece)}
    return build(root, joined, torch.Size([count]), said.pop() if len(said) == 1 else None)


def scattered(values: list[torch.Tensor], into: list[torch.Tensor], rows: int) -> torch.Tensor:
    """Merge tensors into one of ``rows`` rows; row j of value s becomes row ``into[s][j]``."""
    first = values[0]
    out = first.new_empty((rows, *first.shape[1:]))
    for value, numbers in zip(values, into, strict=True):
        out.index_copy_(0, numbers, value)
    return out


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
    there, slots = members.present(), names.slots(index)
    if bool((index < 0).any()):
        raise IndexError(f"expected indices of stored rows, got {int(index.min())}")
    check_stored(client, index)
    into = positions_of(client, index)
    if not into:  # return no rows, with the schema of the largest shard
        if not there:
            raise RuntimeError("all shards have died and are being restarted")
        into = {max(there, key=members.rows_of): index}
    replies = {shard: members.send(shard, "read", slots[mine]) for shard, mine in into.items()}
    pieces = []
    for shard, sent in replies.items():
        try:
            pieces.append(members.receive(shard, sent)[0])
        except ShardDied:
            raise RuntimeError(f"shard {shard} has died and is being restarted") from None
    return rows_of(pieces, list(into.values()))


def positions_of(client: ShardedClient, index: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the positions in an index of the rows of each shard; leave out entries -1."""
    shards = client._names.shards(index)
    found = [int(shard) for shard in shards.unique() if int(shard) >= 0]
    return {shard: (shards == shard).nonzero()[:, 0] for shard in found}


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
                members.rows_of(shard) if members.is_there(shard) else 2**62
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
