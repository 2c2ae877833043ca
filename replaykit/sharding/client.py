"""What actors and learners call: methods of a buffer, over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from replaykit._compat import as_tensor
from replaykit.buffer.core import checked_batch_size
from replaykit.sharding.batches import finished
from replaykit.sharding.draws import Draws
from replaykit.sharding.facts import ShardLoss
from replaykit.sharding.membership import Members
from replaykit.sharding.patches import Patched
from replaykit.sharding.reading import rows_at
from replaykit.sharding.routed import ClientSettings
from replaykit.sharding.saving import load_all, save_all
from replaykit.sharding.updates import Updates

__all__ = ["ShardedClient"]


class ShardedClient(Patched):
    """A handle of a sharded buffer, with all of its methods but those that end it.

    Made by ``ShardedReplayBuffer.client()``; it can be pickled and sent to other processes. Each
    client has a table of masses of its own and, unless it was given one, torch's global generator.
    Every method may be called from any thread.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
        >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
        ...                          backend="local") as rb:
        ...     actor, learner = rb.client(), rb.client(torch.Generator().manual_seed(0))
        ...     _ = actor.extend(torch.arange(6) * 10)
        ...     batch = learner.sample(4)
        >>> bool((batch % 10 == 0).all())
        True
    """

    def __init__(
        self, settings: ClientSettings, members: Members, generator: torch.Generator | None
    ) -> None:
        super().__init__(settings, members, generator)
        self._draws, self._updates = Draws(self), Updates(self)

    # -- description --------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self._settings.num_shards

    @property
    def batch_size(self) -> int | None:
        """Default number of rows of a sample."""
        return self._settings.batch_size

    @property
    def sampler(self) -> Any:
        """By what law this client draws. ``alpha`` and ``beta`` may be set; a new ``alpha`` goes to
        the shards with the next draw, and is theirs for all clients until another one draws."""
        return self._sampler

    @property
    def generator(self) -> torch.Generator | None:
        """Where the randomness of draws comes from; None: torch's global generator."""
        return self._generator

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draws with this generator from now on."""
        self._generator = generator

    def __len__(self) -> int:
        """Rows stored in the shards that are there. Cost: one message to each."""
        self._check_open()
        self._members.refresh(None, 0.0)
        return sum(self._rows_of(shard) for shard in self._members.table.there())

    @property
    def write_count(self) -> int:
        """Rows written to the shards that are there, since they were made or restored."""
        return int(self.stats()["write_count"])

    @property
    def losses(self) -> list[ShardLoss]:
        """All that was lost with shards that died, as far as clients have told until now."""
        return self._members.supervisor.losses()

    def stats(self) -> dict[str, Any]:
        """Returns what ``ReplayBuffer.stats`` does over all shards that are there, and of shards:

        ``shards``: size of each, None while it is being restarted. ``rows_lost``: rows that were
        acknowledged and are gone. ``restarts``: how many shards have come back.

        Cost: one message to each shard.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(torch.arange(5))
            ...     rb.stats()["size"], rb.stats()["shards"]
            (5, [3, 2])
        """
        self._check_open()
        found = self._members.ask_all("stats")
        losses = self.losses
        total = {
            name: sum(one[name] for one in found.values())
            for name in ("size", "write_count", "capacity")
        }
        return {
            **total,
            "prefetch_queue_size": 0,
            "initialized": True,
            "utilization": total["size"] / total["capacity"] if total["capacity"] else 0.0,
            "shards": [
                found[shard]["size"] if shard in found else None for shard in range(self.num_shards)
            ],
            "rows_lost": sum(loss.rows for loss in losses),
            "restarts": len(losses),
        }

    def __repr__(self) -> str:
        key = self._settings.shard_key
        return (
            f"{type(self).__name__}(num_shards={self.num_shards}, sampler={self._sampler!r}, "
            f"batch_size={self.batch_size}, shard_key={key!r})"
        )

    # -- sampling -----------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draws a batch, as one big buffer with all the rows does.

        Args:
            batch_size: number of rows; None: that of the constructor.
            return_info: also return what is known of the draw.

        Returns:
            As ``ReplayBuffer.sample``; ``index`` names rows of any shard.

        Raises:
            RuntimeError: no batch size anywhere, or nothing that can be drawn.
            ValueError: a batch size that is not an int of at least 1.
            TimeoutError: all shards have died, and none has come back.

        Exact where nobody else writes or updates meanwhile: P(i) and ``priority_weight`` are those
        of one big buffer. Beside others see ``docs/sharding.md``: shards are drawn by masses of the
        last reply, at most ``max_age`` seconds old, and weights are of the probabilities that the
        rows then had.

        Cost: one message to each shard, all in flight at once, and one copy of the batch.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, PrioritizedSampler, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(10), batch_size=1000,
            ...     sampler=lambda: PrioritizedSampler(alpha=0.7, beta=0.9), backend="local",
            ... ) as rb:
            ...     index = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
            ...     rb.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
            ...     weights = rb.sample()["priority_weight"]
            >>> sorted({f"{weight:.3f}" for weight in weights.tolist()})
            ['0.418', '0.501', '0.646', '1.000']
        """
        self._check_open()
        data, info = self._draws.next(self._size_of(batch_size))
        data = finished(data, info, self._sampler)
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now. Draws nothing. Cost: one message to each shard."""
        self._check_open()
        return self._draws.possible(self._size_of(batch_size))

    def _size_of(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return checked_batch_size(batch_size)
        if self.batch_size is None:
            raise RuntimeError(
                "expected a batch_size, in the constructor or in sample(); got neither"
            )
        return self.batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yields batches for ever; RuntimeError where the buffer has no batch size."""
        if self.batch_size is None:
            raise RuntimeError("iteration needs the buffer to have a batch_size")
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield self.sample()

    def next(self) -> Any:
        """Returns the next batch of an iteration, which has no end: draws are with replacement."""
        return self.sample()

    # -- priorities ---------------------------------------------------------------------------

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Sets priorities of rows, as ``ReplayBuffer.update_priority`` does.

        Args:
            index: of rows, int64 ``[K]``; -1 is ignored. Or, without ``priority``, a sample.
            priority: a number, ``[K]`` or ``[K, 1]``.
            generation: ``index_generation`` of a sample: rows that were written since, or lost with
                their shard, are left out.

        Raises:
            ValueError: a priority that is NaN, negative or infinite; other numbers of entries.
            IndexError: an index that is not stored. Nothing has changed then.

        Updates for a shard that is being restarted are dropped, as its rows may be lost: its
        priorities come back as they were saved. Cost: one message to each shard that is meant.
        """
        self._check_open()
        self._updates.priority(index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets priorities from a sample, as ``ReplayBuffer.update_tensordict_priority`` does."""
        self._check_open()
        self._updates.tensordict(data)

    @property
    def dropped_updates(self) -> int:
        """Entries of this client's updates that were left out: rows written since, or lost."""
        return self._updates.dropped

    # -- reading ------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Returns rows by index, transformed: an int, a list, or int64 ``[K]``.

        A slice takes of all stored rows in the order of their indices.

        Raises:
            IndexError: a row that is not stored. TypeError: another kind of index.
        """
        self._check_open()
        if isinstance(index, int):
            return rows_at(self, torch.tensor([index]))[0]
        if isinstance(index, slice):
            found = self._members.ask_all("stored_slots")
            rows = [self._names.join(shard, slots) for shard, slots in found.items()]
            stored = torch.cat(rows).sort().values
            return rows_at(self, stored[list(range(*index.indices(len(stored))))])
        index = as_tensor(index)
        if index.ndim != 1 or index.is_floating_point() or index.dtype is torch.bool:
            raise TypeError(
                f"expected an index as an int, slice or int64 [K], got {index.dtype} "
                f"{list(index.shape)}"
            )
        return rows_at(self, index.to(torch.int64))

    # -- saving -------------------------------------------------------------------------------

    def dumps(self, path: Any) -> None:
        """Saves all shards as they are at one instant, between two writes; all or nothing.

        A batch is in the checkpoint with all its rows or with none, whichever shards they went to.
        Writes and updates wait while every shard takes note of what it holds, not while files are
        written; sampling goes on.

        Args:
            path: a directory that all shards can write to.

        Raises:
            RuntimeError: a shard died, or a client died with half a batch written.
            OSError: the disk refused. What was there before stays, and is what ``loads`` reads.
        """
        self._check_open()
        save_all(self, path)

    def loads(self, path: Any) -> None:
        """Takes over what ``dumps`` of a sharded buffer has saved, of any number of shards.

        With as many shards every row keeps its index. With another number the rows are dealt out
        anew, in turn or by key, with their priorities; episodes stay whole, and no window goes over
        a seam. Where they do not all fit, a UserWarning says how many were left out.

        Each shard reads its share, block by block; the rows that it had are let go when all shards
        have read theirs.

        Raises:
            FileNotFoundError: there is no checkpoint. CheckpointError: it is damaged.
            ValueError: other keys, or kinds of sampler, or of another ``shard_key``.
            Nothing has changed then.
        """
        self._check_open()
        load_all(self, path)

    dump = save = dumps
    load = loads

    # -- being sent ---------------------------------------------------------------------------

    def client(
        self,
        generator: torch.Generator | None = None,
        *,
        on_loss: Callable[[ShardLoss], None] | None = None,
    ) -> ShardedClient:
        """Returns another handle, which can be pickled where the shards are elsewhere.

        Args:
            generator: what it draws with; None: torch's global generator of its process.
            on_loss: called with what was lost when it learns that a shard is back; None: a
                ShardLossWarning. It is pickled with the handle.
        """
        self._check_open()
        return ShardedClient(self._settings, self._members.again(on_loss), generator)

    def __getstate__(self) -> dict[str, Any]:
        state = None if self._generator is None else self._generator.get_state()
        return {"settings": self._settings, "members": self._members, "generator": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = None
        if state["generator"] is not None:
            generator = torch.Generator("cpu")
            generator.set_state(state["generator"])
        ShardedClient.__init__(self, state["settings"], state["members"], generator)
