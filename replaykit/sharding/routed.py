"""Writes of a client: which rows go where."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replaykit.buffer.priorities import written_priorities
from replaykit.samplers import Sampler
from replaykit.schema import Rows, Schema, take_apart
from replaykit.sharding.ahead import ShardedResult
from replaykit.sharding.laws import law_of
from replaykit.sharding.membership import Members
from replaykit.sharding.naming import Names
from replaykit.sharding.outbox import Outbox
from replaykit.sharding.routing import ByKey, InTurn, Router
from replaykit.sharding.writes import Writes
from replaykit.ted import unravel

__all__ = ["ClientSettings", "Routed"]


@dataclass(frozen=True)
class ClientSettings:
    """What clients of one sharded buffer agree on.

    Attributes:
        sampler: what the shards' samplers are like. A copy of a client's own; its ``alpha`` and
            ``beta`` are those that the client draws by.
        transformed: whether transforms change rows on their way in.
        tracked: whether writers track generations.
    """

    num_shards: int
    sampler: Sampler
    batch_size: int | None
    shard_key: Any
    priority_key: Any
    max_age: float
    timeout: float
    transformed: bool
    tracked: bool


class Routed:
    """The parts of a client, and ``add``, ``extend``, ``empty``."""

    def __init__(
        self,
        settings: ClientSettings,
        members: Members,
        generator: torch.Generator | None,
    ) -> None:
        self._settings, self._members, self._generator = settings, members, generator
        self._names = Names(settings.num_shards)
        self._router: Router = (
            InTurn(settings.num_shards)
            if settings.shard_key is None
            else ByKey(settings.num_shards, settings.shard_key)
        )
        self._sampler: Any = copy.deepcopy(settings.sampler)
        self._law = law_of(self._sampler)
        self._writes = Writes(members)
        self._outbox = Outbox()
        self._schema: Schema | None = None
        self._stored: Schema | None = None
        self._priority_key = unravel(settings.priority_key)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this buffer was shut down")

    def _before_a_write(self) -> None:
        """Waits for writes that were not waited for: before rows are dealt, or looked for."""
        self._check_open()
        self._outbox.settle()

    def _rows_of(self, shard: int) -> int:
        facts = self._members.table.facts(shard)
        return 0 if facts is None else facts.rows

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any) -> int | None:
        """Stores one row; returns its index, None where an inverse transform swallows it.

        Raises: as ``extend``.
        """
        index = self._write(data, single=True, update_priority=None)
        return int(index[0]) if len(index) else None

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Stores a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: rows along dimension 0, or a list of rows.
            update_priority: ``False`` ignores priorities that the data carries.

        Returns:
            The index of each row, int64 ``[B]``; of rows that an inverse transform has made others
            of: those of what was stored, shard by shard.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first write of all clients,
                also where a transform would make them alike; a ValueError.
            ValueError: priorities that are NaN, negative or infinite.
            KeyError, TypeError: there is no column of integers under ``shard_key``.
            TimeoutError: the shard of a key has died, and has not come back.

        Nothing has changed if it raises one of the first three. Readers see all of a shard's rows
        of the batch or none, and those of different shards one after the other. When it returns,
        the rows count as committed: they are there until they are overwritten, or named as lost.

        Cost: one message to each shard, all in flight at once.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=3, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     rb.extend(TensorDict({"x": torch.arange(5) * 10}, [5]))
            ...     rb[3]["x"]
            tensor([0, 1, 2, 3, 4])
            tensor(30)
        """
        return self._write(data, single=False, update_priority=update_priority)

    def extend_async(self, data: Any, *, update_priority: bool | None = None) -> ShardedResult:
        """Sends a batch to be stored, and does not wait: the result is awaited, or asked for.

        Args:
            data, update_priority: as for ``extend``. The rows are copied; the data may be changed.

        Returns:
            What ``extend`` will return, or raise of the shards.

        Raises:
            As ``extend``, of rows that are refused. What an earlier write has raised whose result
            nobody has asked for; this one is not written then.

        Writes of one handle are stored in their order, and what else it writes or updates, saves or
        closes waits for them and raises what they have raised, unless it was asked for; a sample
        does not wait. Where more than 16 are under way the oldest is waited for. Those that are
        under way when the process ends may be lost: ``flush`` waits for them.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     under_way = [rb.extend_async(torch.zeros(2)) for _ in range(2)]
            ...     [index.result().tolist() for index in under_way], len(rb)
            ([[0, 1], [2, 3]], 4)
        """
        self._check_open()
        self._outbox.check()  # before any row is dealt
        deliver = self._prepared(data, single=False, update_priority=update_priority)
        return self._outbox.put(functools.partial(deliver, self._writes))

    def _write(self, data: Any, *, single: bool, update_priority: bool | None) -> torch.Tensor:
        self._before_a_write()
        deliver = self._prepared(data, single=single, update_priority=update_priority)
        return deliver(self._writes)

    def _prepared(
        self, data: Any, *, single: bool, update_priority: bool | None
    ) -> Callable[[Callable[..., dict[int, Any]]], torch.Tensor]:
        """Checks and deals rows; returns what writes copies of them, by ``Writes``."""
        optional = (self._priority_key,)
        known = self._known_schema()
        rows = take_apart(data, 1, single=single, optional=optional, schema=known)
        if not len(rows):
            return lambda writes: torch.empty(0, dtype=torch.int64, device="cpu")
        key, sampler = self._priority_key, self._sampler
        priorities = written_priorities(
            data, key, sampler, len(rows), wanted=update_priority, single=single
        )
        self._router.check(rows.leaves)
        self._agree(rows, known)
        # The last that can refuse is over: a row that is dealt is written.
        shards = self._router.route(rows.leaves, len(rows), self._members.present())
        chosen = {
            int(shard): torch.from_numpy((shards == shard).nonzero()[0])
            for shard in dict.fromkeys(shards.tolist())
        }
        members, names, root, count = self._members, self._names, rows.root, len(rows)
        parts = {
            shard: (
                {path: leaf.index_select(0, mine) for path, leaf in rows.leaves.items()},
                None if priorities is None else priorities.index_select(0, mine),
            )
            for shard, mine in chosen.items()
        }

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "extend", stamp, root, *parts[shard], members.table.most())

        def deliver(writes: Callable[..., dict[int, Any]]) -> torch.Tensor:
            slots = {shard: answer[0] for shard, answer in writes(sorted(chosen), send).items()}
            if any(len(slots[shard]) != len(mine) for shard, mine in chosen.items()):
                return torch.cat([names.join(shard, found) for shard, found in slots.items()])
            index = torch.empty(count, dtype=torch.int64, device="cpu")
            for shard, mine in chosen.items():
                index[mine] = names.join(shard, slots[shard])
            return index

        return deliver

    def _known_schema(self) -> Schema | None:
        """How rows look, if anybody has said: as they are given, before any transform."""
        if self._schema is None:
            root = self._members.supervisor.agree(None)
            self._schema = None if root is None else Schema(root)
        return self._schema

    def _agree(self, rows: Rows, known: Schema | None) -> None:
        """Refuses rows that look other than the first ones of all clients."""
        if known is None:
            root = self._members.supervisor.agree(rows.root)
            assert root is not None
            known = self._schema = Schema(root)
        known.check(rows.root)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all rows; keys, shapes and memory stay."""
        self._before_a_write()
        members = self._members

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "empty", stamp, empty_write_count)

        self._writes(list(range(self._settings.num_shards)), send)
        if isinstance(self._router, InTurn):
            self._router.dealt = 0
