"""Number writes, route them to shards, and repeat them after a shard has died."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from replaykit.buffer.components import DataT
from replaykit.buffer.priorities import written_priorities
from replaykit.distributed.handle import Handle
from replaykit.distributed.membership import ShardMembers, Tickets
from replaykit.distributed.protocol import BarrierBusy, GlobalIndex, ShardDied, ShardSilent
from replaykit.distributed.requests import RemoteResult
from replaykit.distributed.routing import ByKey, InTurn, Router
from replaykit.distributed.shard_config import law_of
from replaykit.distributed.shards import ShardReply
from replaykit.distributed.write_barrier import Stamp
from replaykit.distributed.write_queue import WriteQueue
from replaykit.errors import RateLimiterTimeout
from replaykit.interrupts import deferred, shielded
from replaykit.pace import INSERT
from replaykit.samplers import Sampler
from replaykit.schema import Rows, Schema, split_leaves
from replaykit.ted import unravel

__all__ = ["ClientSettings", "Delivery", "Routed", "Writes"]


class Writes:
    """The writes of one client, numbered and sent in parts. Thread-safe.

    If a shard dies before it has answered, the client sends the part again to the successor of the
    shard. The sequence number of the write stays the same. Therefore a successor that has restored
    the part from a checkpoint does not write it twice.
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
        """Send one part to each shard, in parallel; return the answers by shard.

        Args:
            send: function that sends the part of a shard with the given stamp. It raises ShardDied
                if the part is meant for an earlier incarnation.
            again: whether to send parts again to the successors of shards that have died.
                Otherwise, the result has no answers of these shards.

        Raises:
            TimeoutError: a shard has not answered, or was not restarted; its part may be written.
            Errors of shards are raised after all shards have answered.
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
            with shielded:  # Ctrl-C waits until all shards of a write have answered
                busy = list(left)
                while busy:
                    sent = {}
                    for shard in busy:
                        if members.table.is_there(shard):
                            with contextlib.suppress(ShardDied):
                                sent[shard] = send(shard)
                    busy = []
                    for shard, reply in sent.items():
                        try:
                            within = max(0.0, until - time.monotonic())
                            answers[shard] = members.receive(shard, reply, within)
                        except ShardDied:
                            continue
                        except BarrierBusy:
                            busy.append(shard)
                        except Exception as error:
                            answers[shard], refused = None, error
                    if busy:
                        time.sleep(_POLL_S)
                        if time.monotonic() >= until:
                            raise ShardSilent(f"shards {busy} have not admitted the write in time")
            left = [shard for shard in left if shard not in answers]
            if left and not again:
                break
            for shard in left:
                members.wait_for([shard], until)
            if left and time.monotonic() >= until:  # shards may have forgotten the write
                raise TimeoutError(f"shards {left} have died repeatedly, and have not answered")
        if refused is not None:
            raise refused
        return answers


_POLL_S = 0.005


class Delivery:
    """The future answer to a write that a thread sends to the shards."""

    def __init__(self, future: Future[Any], *, paced: bool) -> None:
        self._future, self._paced = future, paced

    @property
    def known(self) -> bool:
        """Return whether the write has ended."""
        return self._future.done()

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait."""
        return self.known

    @property
    def error(self) -> BaseException | None:
        """The error of the write, or None if it has not failed."""
        return self._future.exception() if self.known else None

    def sent(self) -> NoReturn:
        """Raise TypeError, since a write is several messages."""
        raise TypeError("expected the result of a call with one message, got one of several")

    def get(self, timeout: float | None = None) -> Any:
        """Return the answer; raise RateLimiterTimeout or ShardSilent if it is late."""
        if not wait((self._future,), timeout).done:
            if self._paced:
                raise RateLimiterTimeout(
                    f"the rows have not been written within {timeout or 0:g} s; they may still "
                    "wait for samples"
                )
            raise ShardSilent(f"the rows have not been written within {timeout or 0:g} s")
        return self._future.result()

    async def wait(self) -> Any:
        """Return the answer to a coroutine."""
        return await asyncio.shield(asyncio.wrap_future(self._future))


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class ClientSettings:
    """The settings that all clients of one sharded buffer share.

    Attributes:
        sampler: a sampler with the settings of the shards' samplers. Each client has a copy of this
            sampler, and draws with the ``alpha`` and ``beta`` of the copy.
        transformed: whether inverse transforms change rows before they are stored.
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


class Routed(Handle[DataT]):
    """The parts of a client, and its methods that write or remove rows."""

    def __init__(
        self,
        settings: ClientSettings,
        members: ShardMembers,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
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
        self._write_queue = WriteQueue()
        self._thread: ThreadPoolExecutor | None = None
        self._schema: Schema | None = None
        self._stored: Schema | None = None
        self._priority_key = unravel(settings.priority_key)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this buffer was shut down")

    def _before_a_write(self) -> None:
        """Wait for asynchronous writes.

        Calls that name, save or remove rows wait here first. They do not wait for writes that a
        rate limiter delays, since these may need the caller's next samples.
        """
        self._check_open()
        self._write_queue.flush(held_up=False)

    def _rows_of(self, shard: int) -> int:
        facts = self._members.table.facts(shard)
        return 0 if facts is None else facts.rows

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout: float | None = None) -> int | None:
        """Store one row and return its index.

        The result is None if an inverse transform drops the row. The arguments and errors are the
        same as those of ``extend``.
        """
        return _one(self._write(data, single=True, timeout=timeout))

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows, like ``ReplayBuffer.extend``.

        Args:
            data: rows along dimension 0, or a list of rows.
            update_priority: False to ignore priorities in the data.
            timeout: seconds to wait for the rate limiter, or for earlier writes of this handle that
                the rate limiter delays. With 0 the call does not wait, and with None it waits
                without a limit.

        Returns:
            The index of each row, int64 ``[B]``. If an inverse transform changes the number of
            rows, the result has the index of each stored row, ordered by shard.

        Raises:
            SchemaError (a ValueError): keys, shapes or dtypes differ from those in the first write
                of any client. The comparison is made before any transform changes the rows.
            ValueError: priorities are NaN, negative or infinite.
            KeyError, TypeError: there is no column of integers under ``shard_key``.
            RateLimiterTimeout (a TimeoutError): the rate limiter has not admitted the rows in time,
                because too few samples were drawn.
            RuntimeError: the buffer was shut down during the call.
            TimeoutError: the shard of a key has died, and was not restarted in time.

        After any of these errors except the last, nothing has changed. If a transform or the disk
        of one shard raises an error, the other shards have stored their parts of the batch. Within
        a shard, a reader sees all rows of the batch or none, but shards may store their parts at
        different times. When the call returns, the rows are committed. The rows stay stored until
        they are overwritten, or until their loss is reported.

        Cost: one message to each shard, all in parallel. A rate limiter adds one message before
        them, and one more message for which the call does not wait.

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

    def extend_async(self, data: Any, *, update_priority: bool | None = None) -> RemoteResult:
        """Send a batch to be stored; do not wait.

        Args:
            data, update_priority: as for ``extend``. The rows are copied, so the caller may change
                the data afterwards.

        Returns:
            A future with the result of ``extend``, or with the error of a shard. Use ``await`` or
            ``result()`` to get the result.

        Raises:
            The errors of ``extend`` are raised for rows that are refused. The error of an earlier
            write is raised if its result was not asked for. In both cases, this batch is not
                written.

        Writes of one handle are stored in order. Other writes, updates, saves and ``close`` wait
        for the asynchronous writes of the handle. These calls raise the errors of writes whose
        results were not asked for. Samples do not wait. If more than 16 writes are under way, the
        call waits for the oldest write. Writes that are still under way when the process ends may
        be lost; ``flush`` waits for them.

        With a rate limiter, each asynchronous write waits without a time limit until the limiter
        admits its rows. The writes keep their order. Calls that do not write rows do not wait for
        such delayed writes.

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

    def add_async(self, data: Any) -> RemoteResult:
        """Send one row to be stored, like ``extend_async``; do not wait.

        Returns:
            A future with the result or error of ``add``.

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
    ) -> RemoteResult:
        self._check_open()
        self._write_queue.check()  # before any row is assigned to a shard
        made = _one if single else _all
        rows, priorities = self._checked(data, single=single, update_priority=update_priority)
        if not len(rows):
            return self._in_thread(lambda: made(_NOTHING))
        keeper, tickets, write_queue = self._tickets.keeper, self._tickets, self._write_queue
        if keeper is None:
            self._agree(rows)
            written, writes = self._dealt(rows, priorities), self._writes
            return self._in_thread(lambda: made(written(writes)))
        refusal = keeper.limiter.never(INSERT, len(rows), 0)
        if refusal is not None:
            raise ValueError(f"{refusal}: {keeper.limiter!r}")
        self._agree(rows)
        leaves = {path: leaf.clone() for path, leaf in rows.leaves.items()}
        copied = Rows(rows.root, leaves, rows.batch)
        given = None if priorities is None else priorities.clone()

        def deliver() -> Any:
            with tickets.ticket(INSERT, None) as ticket:
                assert ticket is not None
                try:
                    ticket.admit(len(copied), 0.0)
                except RateLimiterTimeout:
                    write_queue.held_up = True
                    try:
                        ticket.admit(len(copied))
                    finally:
                        write_queue.held_up = False
                return made(self._dealt(copied, given)(self._writes))

        return self._in_thread(deliver, paced=True)

    def _in_thread(self, deliver: Callable[[], Any], *, paced: bool = False) -> RemoteResult:
        """Call ``deliver`` in a thread after all earlier writes; return its future result.

        The thread ends when it has made all writes and the handle was deleted.
        """

        def send() -> Delivery:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "replaykit-writes")
            refused: list[bool] = []
            try:
                future = self._thread.submit(lambda: None if refused else deliver())
            except RuntimeError:  # no thread can be started
                refused.append(True)
                raise
            return Delivery(future, paced=paced)

        return self._write_queue.put(send)

    def _write(
        self,
        data: Any,
        *,
        single: bool = False,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        self._check_open()
        with self._tickets.ticket(INSERT, timeout) as ticket:
            self._write_queue.flush(None if ticket is None else ticket.until)
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
        """Check rows and return them with their priorities.

        Only ``_agree`` can still refuse the returned rows.
        """
        optional = (self._priority_key,)
        known = self._known_schema()
        rows = split_leaves(data, 1, single=single, optional=optional, schema=known)
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
        """Assign rows to shards; return a function that writes copies of them.

        The caller must call that function with a ``Writes``, because the router has already counted
        the rows.
        """
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
        """Return the schema of rows before any transform, or None if it is not known yet."""
        if self._schema is None:
            root = self._members.supervisor.agree(None)
            self._schema = None if root is None else Schema(root)
        return self._schema

    def _agree(self, rows: Rows) -> None:
        """Refuse rows whose schema differs from the schema of the first written rows.

        This is the last check before the rows are assigned to shards and written.
        """
        known = self._schema
        if known is None:
            root = self._members.supervisor.agree(rows.root)
            assert root is not None
            known = self._schema = Schema(root)
        known.check(rows.root)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows.

        The keys, shapes and memory of the rows stay. A rate limiter starts to count again.

        Args:
            empty_write_count: True to reset ``write_count`` to 0. The counts of a rate limiter in
                ``stats`` are then also reset to 0.
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
