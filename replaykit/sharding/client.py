"""What actors and learners call: methods of a buffer, over shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch

from replaykit.buffer.generic import DataT
from replaykit.keywords import named_after
from replaykit.remote.client import checked_count
from replaykit.sharding.facts import ShardLoss
from replaykit.sharding.loading import Loaded
from replaykit.sharding.membership import Members, check_on_loss
from replaykit.sharding.reading import rows_by
from replaykit.sharding.refused import REFUSED, refuse
from replaykit.sharding.routed import ClientSettings
from replaykit.sharding.sampling import check_generator
from replaykit.sharding.saving import load_all, save_all, state_of, take_state
from replaykit.sharding.updates import Updates

__all__ = ["ShardedClient"]


@named_after
class ShardedClient(Loaded[DataT]):
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
        self,
        settings: ClientSettings,
        members: Members,
        generator: torch.Generator | None,
        prefetch: int = 0,
    ) -> None:
        super().__init__(settings, members, generator, prefetch)
        self._updates = Updates(self)

    # -- description --------------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """By what law this client draws. ``alpha`` and ``beta`` may be set; a new ``alpha`` goes to
        the shards with the next draw, and is theirs for all clients until another one draws."""
        return self._sampler

    def __len__(self) -> int:
        """Rows stored in the shards that are there. Cost: one message to each."""
        self._check_open()
        self._members.refresh(None, 0.0)
        return sum(self._rows_of(shard) for shard in self._members.table.there())

    @property
    def initialized(self) -> bool:
        """Whether the parts of all shards have been made: they are before a handle is there."""
        return True

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

        With a rate limiter ``inserts``, ``samples``, ``insert_blocked_s`` and ``sample_blocked_s``
        are those of all clients. Cost: one message to each shard.

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
            name: sum(one.get(name, 0) for one in found.values())
            for name in ("size", "write_count", "capacity")
        }
        return {
            **total,
            "prefetch_queue_size": len(self._ahead),
            "initialized": True,
            "utilization": total["size"] / total["capacity"] if total["capacity"] else 0.0,
            "shards": [
                found[shard]["size"] if shard in found else None for shard in range(self.num_shards)
            ],
            "rows_lost": sum(loss.rows for loss in losses),
            "restarts": len(losses),
            **({} if self._tickets.keeper is None else self._tickets.keeper.stats()),
        }

    def __repr__(self) -> str:
        key = self._settings.shard_key
        return (
            f"{type(self).__name__}(num_shards={self.num_shards}, sampler={self._sampler!r}, "
            f"batch_size={self.batch_size}, shard_key={key!r})"
        )

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
        self._before_a_write()
        self._updates.priority(index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets priorities from a sample, as ``ReplayBuffer.update_tensordict_priority`` does."""
        self._before_a_write()
        self._updates.tensordict(data)

    def mark_update(self, index: Any) -> None:
        """Gives rows the sampler's default priority, the largest ever set in any shard; without
        priorities: nothing.

        Args:
            index: of rows, an int or int64 ``[K]``; -1 is ignored.

        Raises:
            IndexError: an index that is not stored; nothing has changed then.

        Cost: one message to each shard, and one more to those that are meant.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, PrioritizedSampler, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(10), backend="local",
            ...     sampler=lambda: PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0),
            ... ) as rb:
            ...     index = rb.extend(torch.arange(2))
            ...     rb.update_priority(index, 0.0)
            ...     rb.mark_update(1)
            ...     rb.sample(3)
            tensor([1, 1, 1])
        """
        self._before_a_write()
        if self._law.prioritized:
            self._members.refresh(None, 0.0)
            self._updates.priority(index, self._members.table.most())

    @property
    def dropped_updates(self) -> int:
        """Entries of this client's updates that were left out: rows written since, or lost."""
        return self._updates.dropped

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns rows by index, transformed: an int, a list, or int64 ``[K]``.

        A slice or a bool mask takes of all stored rows in the order of their indices, a key gives
        that column of ``rb[:]``.

        Raises:
            IndexError: a row that is not stored, a mask of another length. KeyError: no such key.
            TypeError: another kind of index.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.arange(5) * 10}, [5]))
            ...     rb[3]["x"], rb[1:3]["x"], rb["x"]
            (tensor(30), tensor([10, 20]), tensor([ 0, 10, 20, 30, 40]))
        """
        self._check_open()
        return rows_by(self, index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns all stored rows, or the first ``end``, in the order of their indices:
        ``rb[:end]``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(torch.arange(5))
            ...     rb.read_all_in_order(), rb.read_all_in_order(end=2)
            (tensor([0, 1, 2, 3, 4]), tensor([0, 1]))
        """
        return self[:end]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(f"rows of a {type(self).__name__} cannot be set: {REFUSED['set_at_']}")

    def __getattr__(self, name: str) -> NoReturn:
        refuse(type(self), name)

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
        self._before_a_write()
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
        self._before_a_write()
        load_all(self, path)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that the shards hold at one instant, as ``dumps`` saves it, as a
        dictionary. All rows come to this process: ``dumps`` leaves them where they are.

        Raises:
            RuntimeError: a shard died, or a client died with half a batch written.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(torch.arange(5))
            ...     state = rb.state_dict()
            ...     rb.empty()
            ...     rb.load_state_dict(state)
            ...     rb[:]
            tensor([0, 1, 2, 3, 4])
        """
        self._before_a_write()
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` of a buffer with as many shards gave; values are copied.

        Raises:
            ValueError: another number of shards or ``shard_key``, entries that are missing or do
                not fit; nothing has changed.
        """
        self._before_a_write()
        take_state(self, state_dict)

    dump = save = dumps
    load = loads

    # -- being sent ---------------------------------------------------------------------------

    def client(
        self,
        generator: torch.Generator | None = None,
        *,
        on_loss: Callable[[ShardLoss], None] | None = None,
        prefetch: int = 0,
    ) -> ShardedClient[DataT]:
        """Returns another handle, which can be pickled where the shards are elsewhere.

        Args:
            generator: what it draws with; None: torch's global generator of its process.
            on_loss: called with what was lost when it learns that a shard is back; None: a
                ShardLossWarning. It is pickled with the handle.
            prefetch: how many batches it has under way, as in the constructor.
        """
        self._check_open()
        check_generator(generator)
        check_on_loss(on_loss)
        members, prefetch = self._members.again(on_loss), checked_count("prefetch", prefetch)
        return ShardedClient(self._settings, members, generator, prefetch)

    def __getstate__(self) -> dict[str, Any]:
        state = None if self._generator is None else self._ahead.state()
        return {
            "settings": self._settings,
            "members": self._members,
            "generator": state,
            "prefetch": self._ahead.depth,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = None
        if state["generator"] is not None:
            generator = torch.Generator("cpu")
            generator.set_state(state["generator"])
        settings, members, prefetch = (state[k] for k in ("settings", "members", "prefetch"))
        ShardedClient.__init__(self, settings, members, generator, prefetch)
