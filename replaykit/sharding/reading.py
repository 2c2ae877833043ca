"""Rows by index, place or key, from whichever shards have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.buffer.editing import column_of, is_key
from replaykit.sharding.batches import rows_of
from replaykit.sharding.errors import ShardDied
from replaykit.storages.indexing import as_index

if TYPE_CHECKING:
    from replaykit.sharding.client import ShardedClient

__all__ = ["check_stored", "rows_at", "rows_by"]


def rows_by(client: ShardedClient, index: Any) -> Any:
    """Returns what ``rb[index]`` stands for.

    Numbers are names of rows. Slices and masks are of all rows that are there, in the order of
    their names; so is a column.
    """
    if is_key(index):
        return column_of(rows_by(client, slice(None)), index)
    by_place = isinstance(index, slice) or index is Ellipsis
    if not by_place:
        refused = isinstance(index, (bool, np.bool_))
        index = as_tensor(index)
        by_place = index.dtype is torch.bool
        if refused or index.ndim > 1 or (index.is_floating_point() and index.numel()):
            raise TypeError(
                f"expected an index as an int, slice, mask, key or int64 [K], got {index.dtype} "
                f"{list(index.shape)}"
            )
    if by_place:
        found = client._members.ask_all("stored_slots")
        rows = [client._names.join(shard, slots) for shard, slots in found.items()]
        stored = torch.cat(rows).sort().values
        return rows_at(client, stored[as_index(index, len(stored))])
    rows = rows_at(client, index.to(torch.int64).reshape(-1))
    return rows if index.ndim else rows[0]


def rows_at(client: ShardedClient, index: torch.Tensor) -> Any:
    """Returns rows of indices, int64 ``[K]``, in their order.

    Raises:
        IndexError: a row that is not stored. RuntimeError: its shard is being restarted; nothing
            was ever written.
    """
    names, members = client._names, client._members
    there = members.present()
    shards, slots = names.shards(index), names.slots(index)
    if bool((index < 0).any()):
        raise IndexError(f"expected indices of stored rows, got {int(index.min())}")
    check_stored(client, index)
    asked = [int(shard) for shard in shards.unique()]
    if not asked:  # nothing, of a shard that knows what rows look like
        asked = [max(there, key=client._rows_of)]
    into = [(shards == shard).nonzero()[:, 0] for shard in asked]
    replies = [
        members.send(shard, "read", slots[mine]) for shard, mine in zip(asked, into, strict=True)
    ]
    pieces = []
    for shard, sent in zip(asked, replies, strict=True):
        try:
            pieces.append(members.take(shard, sent)[0])
        except ShardDied:
            raise RuntimeError(f"shard {shard} has died and is being restarted") from None
    return rows_of(pieces, into)


def check_stored(client: ShardedClient, index: torch.Tensor) -> None:
    """Raises IndexError unless indices ``[K]`` are -1 or of stored rows; may ask the shards.

    Of a shard that is being restarted all indices pass.
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
