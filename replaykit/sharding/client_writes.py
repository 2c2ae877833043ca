"""Write rows to shards: numbered, routed, and repeated after a shard died."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from replaykit.buffer.row_updates import written_priorities
from replaykit.buffer.thread_pool import ThreadPool
from replaykit.errors import RateLimiterTimeout
from replaykit.interrupts import deferred, shielded
from replaykit.pace import INSERT
from replaykit.samplers import Sampler
from replaykit.schema import Rows, Schema, take_apart
from replaykit.sharding.membership import ShardMembers, Tickets
from replaykit.sharding.protocol import GlobalIndex, ShardDied, ShardSilent
from replaykit.sharding.routing import ByKey, InTurn, Router
from replaykit.sharding.shard_config import law_of
from replaykit.sharding.shard_draws import ShardedResult
from replaykit.sharding.shard_server import Stamp
from replaykit.sharding.shards import ShardReply
from replaykit.ted import unravel

__all__ = ["ClientSettings", "Routed", "ShardOutbox", "Writes"]


class Writes:
    """Numbers the writes of one client, and sends their parts. Thread-safe.

    A part whose shard dies before it has answered is sent once more to its successor, under the
    same number: what the successor has restored, it does not write twice.
    """

    def __init__(self, members: ShardMembers) -> None:
        self._members = members
        self._client = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._next = 0
        self._under_way: set[int] = set()

    def __call__(
        self,
        shards: list[int],
        send: Callable[[int, Stamp], tuple[int, ShardReply]],
        *,
        again: bool = True,
    ) -> dict[int, Any]:
        """Sends a part to each shard, all in flight at once; returns their answers.

        Args:
            send: sends the part of a shard, with this stamp. ShardDied: it is not for who is there
                now.
            again: whether parts of shards that have died are for their successors. If not, there
                is no answer of these.

        Raises:
            TimeoutError: a shard has not answered, or not come back; of its part nobody knows
                whether it is written. What a shard raised, after all have answered.
        """
        with deferred:
            number, done = self._begin()
            try:
                bits = sum(1 << shard for shard in shards)
                stamp = Stamp(self._client, number, bits, done)
                return self._send(shards, lambda shard: send(shard, stamp), again)
            finally:
                with self._lock:
                    self._under_way.discard(number)

    def _begin(self) -> tuple[int, int]:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._under_way.add(number)
            return number, min(self._under_way)

    def _send(
        self, shards: list[int], send: Callable[[int], tuple[int, ShardReply]], again: bool
    ) -> dict[int, Any]:
        members, answers, refused = self._members, {}, None
        until = time.monotonic() + members.timeout
        left = list(shards)
        while left:
            sent = {}
            with shielded:  # a write goes to all of its shards; Ctrl-C waits for their answers
                for shard in left:
                    if members.table.is_there(shard):
                        with contextlib.suppress(ShardDied):
                            sent[shard] = send(shard)
                for shard, reply in sent.items():
                    try:
                        within = max(0.0, until - time.monotonic())
                        answers[shard] = members.take(shard, reply, within)
                    except ShardDied:
                        continue
                    except Exception as error:
                        answers[shard], refused = None, error
            left = [shard for shard in left if shard not in answers]
            if left and not again:
                break
            for shard in left:
                members.wait_for([shard], until)
            if left and time.monotonic() >= until:  # shards may have forgotten it by now
                raise TimeoutError(f"shards {left} have died again and again, and not answered")
        if refused is not None:
            raise refused
        return answers


_MOST = 16
"""Writes under way, beyond which the oldest is waited for: they hold copies of their rows."""


_LOOK_AGAIN_S = 0.005


class ShardOutbox:
    """Brings writes to their shards in a thread of its own, one after the other. Thread-safe.

    The thread starts with the first write and ends with the outbox, after what was given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[_Write] = deque()
        self._crew: ThreadPool | None = None
        self._held_up = False

    def put(self, deliver: Callable[[], Any], *, paced: bool = False) -> ShardedResult:
        """Has a write done after those given before; returns what will come of it.

        ``paced``: it may be held up.
        """
        write = _Write(paced)
        with self._lock:
            if self._crew is None:
                self._crew = ThreadPool(1, "replaykit-outbox")
                weakref.finalize(self, self._crew.dismiss).atexit = False
            self._crew.give(functools.partial(_run, deliver, write))
            self._under_way.append(write)
            ahead = list(self._under_way)[:-_MOST]
        for other in ahead:
            other.done.wait()
        return ShardedResult(write.get, write.done.is_set)

    def settle(self, until: float | None = None, *, held_up: bool = True) -> None:
        """Waits until all is written.

        Args:
            until: no longer than that.
            held_up: also while one is held up.

        Raises:
            RateLimiterTimeout: not all is written by then.
            Exception: what a write has raised whose result nobody has asked for; once.
        """
        with self._lock:
            under_way = list(self._under_way)
        for write in under_way:
            if held_up:
                if not write.done.wait(None if until is None else max(0, until - time.monotonic())):
                    raise RateLimiterTimeout(
                        "writes that this handle was given before wait for samples"
                    )
            else:
                while not write.done.wait(_LOOK_AGAIN_S) and not self._held_up:
                    pass
        self.check()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """In the thread of the writes: while one waits for others than shards."""
        self._held_up = True
        try:
            yield
        finally:
            self._held_up = False

    def check(self) -> None:
        """Raises as ``settle`` what has been raised by now; does not wait."""
        with self._lock:
            while self._under_way and self._under_way[0].done.is_set():
                write = self._under_way.popleft()
                if write.error is not None and not write.asked:
                    write.asked = True
                    raise write.error


class _Write:
    """A write under way, and what has come of it."""

    def __init__(self, paced: bool) -> None:
        self.paced = paced
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.asked = False

    def get(self, within: float | None, held_up: float | None) -> Any:
        if self.paced and not self.done.wait(held_up):
            raise RateLimiterTimeout(
                f"rows that were sent have not been written within {held_up or 0:g} s; they may "
                "still wait for samples"
            )
        if not self.done.wait(within):
            raise ShardSilent(f"rows that were sent have not been written within {within or 0:g} s")
        self.asked = True
        if self.error is not None:
            raise self.error
        return self.value


def _run(deliver: Callable[[], Any], write: _Write) -> None:
    try:
        write.value = deliver()
    except BaseException as error:
        write.error = error
    finally:
        write.done.set()


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


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
        members: ShardMembers,
        generator: torch.Generator | None,
    ) -> None:
        self._settings, self._members, self._generator = settings, members, generator
        self._names = GlobalIndex(settings.num_shards)
        self._router: Router = (
            InTurn(settings.num_shards)
            if settings.shard_key is None
            else ByKey(settings.num_shards, settings.shard_key)
        )
        self._sampler: Any = copy.deepcopy(settings.sampler)
        self._law = law_of(self._sampler)
        self._writes = Writes(members)
        self._tickets = Tickets(members)
        self._outbox = ShardOutbox()
        self._schema: Schema | None = None
        self._stored: Schema | None = None
        self._priority_key = unravel(settings.priority_key)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this buffer was shut down")

    def _before_a_write(self) -> None:
        """Waits for writes that were not waited for: before rows are looked for, or let go.

        Not for those that a rate limiter holds up: their rows are not there yet, and what holds
        them up may be what this caller does next.
        """
        self._check_open()
        self._outbox.settle(held_up=False)

    def _rows_of(self, shard: int) -> int:
        facts = self._members.table.facts(shard)
        return 0 if facts is None else facts.rows

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout: float | None = None) -> int | None:
        """Stores one row; returns its index, None where an inverse transform swallows it.

        Args and errors: as ``extend``.
        """
        return _one(self._write(data, single=True, timeout=timeout))

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Stores a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: rows along dimension 0, or a list of rows.
            update_priority: ``False`` ignores priorities that the data carries.
            timeout: seconds to wait where the rate limiter has no room for the rows, or for this
                handle's writes before that it holds up; 0: none at all, None: without end.

        Returns:
            The index of each row, int64 ``[B]``; of rows that an inverse transform has made others
            of: those of what was stored, shard by shard.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first write of all clients,
                also where a transform would make them alike; a ValueError.
            ValueError: priorities that are NaN, negative or infinite.
            KeyError, TypeError: there is no column of integers under ``shard_key``.
            RateLimiterTimeout: samples lag behind; a TimeoutError. RuntimeError: the buffer was
                shut down meanwhile.
            TimeoutError: the shard of a key has died, and has not come back.

        Nothing has changed if it raises one of the first five. What a shard's own transforms raise,
        or its disk, leaves the parts of the batch that other shards have stored. Readers see all of
        a shard's rows of the batch or none, and those of different shards one after the other. When
        it returns, the rows count as committed: they are there until they are overwritten, or named
        as lost.

        Cost: one message to each shard, all in flight at once; with a rate limiter one more before
        them, and one that nobody waits for.

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
        return self._write(data, update_priority=update_priority, timeout=timeout)

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

        With a rate limiter they wait for samples in their order, without end; what is not a write
        does not wait for those that are held up.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     under_way = [rb.extend_async(torch.zeros(2)) for _ in range(2)]
            ...     [index.result().tolist() for index in under_way], len(rb)
            ([[0, 1], [2, 3]], 4)
        """
        return self._sent(data, update_priority=update_priority)

    def add_async(self, data: Any) -> ShardedResult:
        """Sends one row to be stored, and does not wait; as ``extend_async``.

        Returns:
            What ``add`` will return, or raise.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     [rb.add_async(torch.tensor(row)) for row in (5, 6, 7)][-1].result(), rb[:]
            (2, tensor([5, 6, 7]))
        """
        return self._sent(data, single=True)

    def _sent(
        self, data: Any, *, single: bool = False, update_priority: bool | None = None
    ) -> ShardedResult:
        self._check_open()
        self._outbox.check()  # before any row is dealt
        made = _one if single else _all
        rows, priorities = self._checked(data, single=single, update_priority=update_priority)
        if not len(rows):
            return self._outbox.put(lambda: made(_NOTHING))
        keeper, tickets, outbox = self._tickets.keeper, self._tickets, self._outbox
        if keeper is None:
            self._agree(rows)
            written, writes = self._dealt(rows, priorities), self._writes
            return outbox.put(lambda: made(written(writes)))
        refusal = keeper.limiter.never(INSERT, len(rows), 0)
        if refusal is not None:
            raise ValueError(f"{refusal}: {keeper.limiter!r}")
        self._agree(rows)
        leaves = {path: leaf.clone() for path, leaf in rows.leaves.items()}
        copied = Rows(rows.root, leaves, rows.batch)
        given = None if priorities is None else priorities.clone()

        def deliver() -> Any:
            with tickets.insert(None) as ticket:
                assert ticket is not None
                try:
                    ticket.admit(len(copied), 0.0)
                except RateLimiterTimeout:
                    with outbox.held_up():
                        ticket.admit(len(copied))
                return made(self._dealt(copied, given)(self._writes))

        return outbox.put(deliver, paced=True)

    def _write(
        self,
        data: Any,
        *,
        single: bool = False,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        self._check_open()
        with self._tickets.insert(timeout) as ticket:
            self._outbox.settle(None if ticket is None else ticket.until)
            rows, priorities = self._checked(data, single=single, update_priority=update_priority)
            if not len(rows):
                return _NOTHING
            if ticket is not None:
                ticket.admit(len(rows))
            self._agree(rows)
            return self._dealt(rows, priorities)(self._writes)

    def _checked(
        self, data: Any, *, single: bool, update_priority: bool | None
    ) -> tuple[Rows, torch.Tensor | None]:
        """Rows that nothing here can refuse any more but ``_agree``, and their priorities."""
        optional = (self._priority_key,)
        known = self._known_schema()
        rows = take_apart(data, 1, single=single, optional=optional, schema=known)
        if not len(rows):
            return rows, None
        key, sampler = self._priority_key, self._sampler
        priorities = written_priorities(
            data, key, sampler, len(rows), wanted=update_priority, single=single
        )
        self._router.check(rows.leaves)
        if known is not None:
            known.check(rows.root)
        return rows, priorities

    def _dealt(
        self, rows: Rows, priorities: torch.Tensor | None
    ) -> Callable[[Callable[..., dict[int, Any]]], torch.Tensor]:
        """Deals rows, which will be written; returns what writes copies of them, by ``Writes``."""
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

    def _agree(self, rows: Rows) -> None:
        """Refuses rows that look other than the first ones of all clients. The last that can: a row
        that is dealt is written."""
        known = self._schema
        if known is None:
            root = self._members.supervisor.agree(rows.root)
            assert root is not None
            known = self._schema = Schema(root)
        known.check(rows.root)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all rows; keys, shapes and memory stay. The law of a rate limiter begins anew.

        Args:
            empty_write_count: whether ``write_count`` starts again at 0, and the counts of a rate
                limiter in ``stats``.
        """
        self._before_a_write()
        members = self._members

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "empty", stamp, empty_write_count)

        self._writes(list(range(self._settings.num_shards)), send)
        self._tickets.emptied(counting_on=not empty_write_count)
        if isinstance(self._router, InTurn):
            self._router.dealt = 0


def _one(index: torch.Tensor) -> int | None:
    return int(index[0]) if len(index) else None


def _all(index: torch.Tensor) -> torch.Tensor:
    return index
