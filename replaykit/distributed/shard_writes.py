"""Number writes, route them to shards, and repeat them after a shard has died."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from replaykit._compat import as_tensor, is_tensordict
from replaykit.buffer.edit import (
    ConditionalUpdateResult,
    Patch,
    check_tracked,
    checked_handles,
    checked_patch,
)
from replaykit.buffer.priorities import (
    priorities_of,
    reduced_priority,
    without_priorities,
    written_priorities,
)
from replaykit.distributed.members import Sent, ShardMembers
from replaykit.distributed.protocol import (
    Agreement,
    BarrierBusy,
    SchemaReplaced,
    ShardDied,
    ShardSilent,
)
from replaykit.distributed.requests import RemoteResult, Reply
from replaykit.distributed.shard_config import check_stored, positions_of
from replaykit.distributed.write_queue import Stamp
from replaykit.errors import RateLimiterTimeout, SchemaError
from replaykit.interrupts import check, deferred, shielded
from replaykit.pace import INSERT
from replaykit.schema import Rows, Schema, split_leaves
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_client import ShardedClient


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
        send: Callable[[int, Stamp], Sent],
        *,
        again: bool = True,
        renew: Callable[[], object] | None = None,
    ) -> dict[int, Any]:
        """Send one part to each shard, in parallel; return the answers by shard.

        Args:
            send: function that sends the part of a shard with the given stamp. It raises ShardDied
                if the part is meant for an earlier incarnation.
            again: whether to send parts again to the successors of shards that have died.
                Otherwise, the result has no answers of these shards.
            renew: function that checks the write after a load, before a shard that has refused it
                for the load gets its part again.

        Raises:
            TimeoutError: a shard has not answered, or was not restarted; its part may be written.
            Errors of shards are raised after all shards have answered.
        """
        with deferred:
            with self._lock:
                number, self._next = self._next, self._next + 1
                self._under_way.add(number)
                done = min(self._under_way)
            try:
                bits = sum(1 << shard for shard in shards)
                stamp = Stamp(self._client, number, bits, done)
                return self._send(shards, lambda shard: send(shard, stamp), again, renew)
            finally:
                with self._lock:
                    self._under_way.discard(number)

    def to_all(self, verb: str, *args: Any) -> dict[int, Any]:
        """Send the same part to every shard; return the answers by shard."""
        members = self._members
        everyone = list(range(len(members.shards)))
        return self(everyone, lambda shard, stamp: members.send(shard, verb, stamp, *args))

    def _send(
        self,
        shards: list[int],
        send: Callable[[int], Sent],
        again: bool,
        renew: Callable[[], object] | None,
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
                        if members.is_there(shard):
                            with contextlib.suppress(ShardDied):
                                sent[shard] = send(shard)
                    busy = []
                    for shard, reply in sent.items():
                        try:
                            within = max(0.0, until - time.monotonic())
                            try:
                                answers[shard] = members.receive(shard, reply, within)
                            except SchemaReplaced:
                                assert renew is not None
                                renew()
                                busy.append(shard)
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
                try:
                    members.wait_for([shard], until)
                except Exception as error:
                    if not members.is_there(shard):
                        raise
                    refused = error  # of on_loss, and raised when the write is complete
            if left and time.monotonic() >= until:  # shards may have forgotten the write
                raise TimeoutError(f"shards {left} have died repeatedly, and have not answered")
        if refused is not None:
            raise refused
        return answers


_POLL_S = 0.005
_INTERRUPT_S = 0.05
"""Seconds between checks for Ctrl-C while a caller waits for an asynchronous write."""


class Delivery(Reply):
    """The future answer to a write that a thread sends to the shards.

    All calls of the future defer Ctrl-C, which could leave it locked for that thread.
    """

    def __init__(self, future: Future[Any], *, paced: bool) -> None:
        super().__init__()
        self._future, self._paced = future, paced

    @property
    def known(self) -> bool:
        with deferred:
            return self._future.done()

    @property
    def error(self) -> BaseException | None:
        with deferred:
            return self._future.exception() if self._future.done() else None

    def is_ready(self) -> bool:
        """Return whether ``get`` would not wait."""
        return self.known

    def get(self, timeout: float | None = None) -> Any:
        """Return the answer; raise RateLimiterTimeout or ShardSilent if it is late."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        with deferred:
            while not self._future.done():
                left = until - time.monotonic()
                if left <= 0:
                    break
                wait((self._future,), min(left, _INTERRUPT_S))
                check()
            else:
                return self._future.result()
        late = f"the rows have not been written within {timeout or 0:g} s"
        if self._paced:
            raise RateLimiterTimeout(f"{late}; they may still wait for samples")
        raise ShardSilent(late)

    async def wait(self) -> Any:
        """Return the answer to a coroutine."""
        return await asyncio.shield(asyncio.wrap_future(self._future))


class Sender:
    """The thread that makes the asynchronous writes of one client, in their order. Thread-safe.

    The thread ends when it has made all writes. It is a daemon, since a write may wait for samples
    without end; the end of the program waits for writes in ``write_queue``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, deliver: Callable[[], Any]) -> Future[Any]:
        """Let the thread call a function after all earlier functions; return its future result."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._left:
                threading.Thread(target=self._run, name="replaykit-writes", daemon=True).start()
            self._left.append((future, deliver))
        return future

    def _run(self) -> None:
        left = True
        while left:
            with self._lock:
                future, deliver = self._left[0]
            try:
                future.set_result(deliver())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._left.popleft()
                left = bool(self._left)


# -- new rows --------------------------------------------------------------------------------------

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


def write_rows(
    client: ShardedClient,
    data: Any,
    *,
    single: bool = False,
    update_priority: bool | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Store rows and return their index; see ``ShardedClient.extend``."""
    client._check_open()
    with deferred, client._tickets.ticket(INSERT, timeout) as ticket:
        client._write_queue.flush(ticket.until)
        rows, priorities = _checked(client, data, single, update_priority)
        if not len(rows):
            return _NOTHING
        ticket.admit(len(rows))
        return _dealt(client, rows, priorities, _agreed(client, rows))()


def send_rows(
    client: ShardedClient,
    data: Any,
    *,
    single: bool = False,
    update_priority: bool | None = None,
) -> RemoteResult:
    """Let a thread store copies of rows; see ``ShardedClient.extend_async``."""
    client._check_open()
    client._write_queue.check()  # before any row is assigned to a shard
    made: Callable[[torch.Tensor], Any] = index_of_one if single else lambda index: index
    rows, priorities = _checked(client, data, single, update_priority)
    count, tickets, write_queue = len(rows), client._tickets, client._write_queue
    if not count:
        return in_thread(client, lambda: made(_NOTHING))
    tickets.check_insert(count)
    agreed = _agreed(client, rows)

    def deliver() -> Any:
        with tickets.ticket(INSERT, None) as ticket:
            try:
                ticket.admit(count, 0.0)
            except RateLimiterTimeout:
                write_queue.held_up = True
                try:
                    ticket.admit(count)
                finally:
                    write_queue.held_up = False
            return made(written())

    with deferred:
        written = _dealt(client, rows, priorities, agreed)
        return in_thread(client, deliver, paced=tickets.keeper is not None)


def in_thread(
    client: ShardedClient, deliver: Callable[[], Any], *, paced: bool = False
) -> RemoteResult:
    """Call ``deliver`` in a thread after all earlier writes; return its future result."""
    return client._write_queue.put(lambda: Delivery(client._sender.submit(deliver), paced=paced))


def index_of_one(index: torch.Tensor) -> int | None:
    """Return the index of a single row, or None if a transform dropped it."""
    return int(index[0]) if len(index) else None


def _checked(
    client: ShardedClient, data: Any, single: bool, update_priority: bool | None
) -> tuple[Rows, torch.Tensor | None]:
    """Check rows and return them with their priorities.

    Only ``_agreed`` can still refuse the returned rows.
    """
    members = client._members
    known = members.agreed if members.agreed.schema is not None else members.agree()
    try:
        return _checked_by(client, known.schema, data, single, update_priority)
    except SchemaError:
        now = members.agree()
        if now.loads == known.loads:
            raise
    return _checked_by(client, now.schema, data, single, update_priority)


def _checked_by(
    client: ShardedClient,
    known: Schema | None,
    data: Any,
    single: bool,
    update_priority: bool | None,
) -> tuple[Rows, torch.Tensor | None]:
    key = client._priority_key
    rows = split_leaves(data, 1, single=single, optional=(key,), schema=known)
    if not len(rows):
        return rows, None
    priorities = written_priorities(
        data, key, client._sampler, len(rows), wanted=update_priority, single=single
    )
    client._router.check(rows.leaves)
    if known is not None:
        known.check(rows.root)
    return rows, priorities


def _agreed(client: ShardedClient, rows: Rows) -> Agreement:
    """Refuse rows whose schema differs from the schema of the first written rows.

    This is the last check before the rows are assigned to shards and written.
    """
    agreed = client._members.agreed
    if agreed.schema is None:
        return client._members.agree(rows.root)
    agreed.schema.check(rows.root)
    return agreed


def _dealt(
    client: ShardedClient, rows: Rows, priorities: torch.Tensor | None, agreed: Agreement
) -> Callable[[], torch.Tensor]:
    """Assign rows to shards; return a function that writes copies of them.

    The caller must call that function, because the router has already counted the rows. The
    function does not refer to the client, which may be deleted before a thread calls it.
    """
    members, names, writes = client._members, client._names, client._writes
    shards = client._router.route(rows.leaves, len(rows), members.present())
    chosen = {
        int(shard): torch.from_numpy((shards == shard).nonzero()[0])
        for shard in dict.fromkeys(shards.tolist())
    }
    root, count = rows.root, len(rows)
    parts = {
        shard: (
            {path: leaf.index_select(0, mine) for path, leaf in rows.leaves.items()},
            None if priorities is None else priorities.index_select(0, mine),
        )
        for shard, mine in chosen.items()
    }

    def send(shard: int, stamp: Any) -> Any:
        loads = agreed.loads
        return members.send(shard, "extend", stamp, loads, root, *parts[shard], members.most())

    def renew() -> None:
        nonlocal agreed
        agreed = members.agree(root)

    def deliver() -> torch.Tensor:
        answers = writes(sorted(chosen), send, renew=renew)
        slots = {shard: answer[0] for shard, answer in answers.items()}
        if any(len(slots[shard]) != len(mine) for shard, mine in chosen.items()):
            return torch.cat([names.join(shard, found) for shard, found in slots.items()])
        index = torch.empty(count, dtype=torch.int64, device="cpu")
        for shard, mine in chosen.items():
            index[mine] = names.join(shard, slots[shard])
        return index

    return deliver


# -- stored rows -----------------------------------------------------------------------------------


def set_priorities(
    client: ShardedClient, index: Any, priority: Any, generation: Any = None
) -> None:
    """Set priorities; see ``ShardedClient.update_priority``."""
    if without_priorities(client.sampler, above=2):
        return
    if priority is None and is_tensordict(index):
        set_sample_priorities(client, index)
        return
    where = as_tensor(index).cpu().reshape(-1)
    if where.is_floating_point() or where.dtype is torch.bool:
        raise TypeError(f"expected an index of integers, got {where.dtype}")
    where = where.to(torch.int64)
    values = as_tensor(priority).detach().cpu().to(torch.float64)
    values = values.expand(len(where)).contiguous() if not values.ndim else values.reshape(-1)
    given = None if generation is None else as_tensor(generation).cpu().reshape(-1)
    for name, found in (("priorities", values), ("generations", given)):
        if found is not None and len(found) != len(where):
            raise ValueError(f"expected {len(where)} {name}, got {len(found)}")
    client._sampler.check_priorities(values)
    client._members.present()
    # `check_stored` is valid for these incarnations only, since a successor has other rows.
    meant = client._members.incarnations()
    check_stored(client, where)
    chosen, answers = _change_rows(client, "update", where, given, meant, values.__getitem__)
    client._dropped_updates += sum(answer[0] for answer in answers.values())
    client._dropped_updates += sum(len(chosen[shard]) for shard in chosen.keys() - answers.keys())


def _change_rows(
    client: ShardedClient,
    verb: str,
    where: torch.Tensor,
    given: torch.Tensor | None,
    meant: dict[int, int],
    part_of: Callable[[torch.Tensor], Any],
) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """Send a change of rows to each incarnation in ``meant`` that has some of them.

    Args:
        where, given: indices and generations of the rows, int64 ``[K]``.
        part_of: function that returns the change at some positions of ``where``.

    Returns:
        The positions of the rows of each shard, and the answers of shards that have not died.
    """
    names, members = client._names, client._members
    slots, chosen = names.slots(where), positions_of(client, where)

    def send(shard: int, stamp: Stamp) -> Sent:
        mine, only = chosen[shard], meant[shard]
        seen = None if given is None else names.unstamped(given[mine], only)
        return members.send(shard, verb, stamp, slots[mine], seen, part_of(mine), only=only)

    shards = [shard for shard in chosen if shard in meant]
    return chosen, client._writes(shards, send, again=False)


def set_sample_priorities(client: ShardedClient, data: Any) -> None:
    """Set priorities from a sample."""
    sampler, key = client._sampler, client._priority_key
    found = priorities_of(data, sampler, key) if sampler.prioritized else None
    if found is not None:
        index, value, generation = found
        value = reduced_priority(value, len(index), sampler, key)
        set_priorities(client, index, value, generation)


def patch_rows(
    client: ShardedClient, index: torch.Tensor, generation: torch.Tensor, *patch: Any
) -> ConditionalUpdateResult:
    """Write values into rows; see ``ShardedClient.update_if_present``."""
    known = client._stored
    try:
        return _patched(client, index, generation, *patch)
    except (KeyError, ValueError):
        client._stored = None
        if known is None or _stored_schema(client).root == known.root:
            raise
    return _patched(client, index, generation, *patch)  # after a load by another client


def _patched(
    client: ShardedClient, index: torch.Tensor, generation: torch.Tensor, *patch: Any
) -> ConditionalUpdateResult:
    check_tracked(client._settings.tracked)
    handles, given = checked_handles(1, index, generation)
    where = handles[:, 0]
    checked = checked_patch(_stored_schema(client).leaf, len(where), *patch)
    key = client._settings.shard_key
    if key is not None and unravel(key) in {*checked.values, checked.version_key}:
        raise ValueError(
            f"expected a patch without the shard_key {format_key(unravel(key))}: rows cannot "
            "move to other shards"
        )

    def part_of(mine: torch.Tensor) -> Patch:
        values = {
            path: value.detach().cpu().index_select(0, mine)
            for path, value in checked.values.items()
        }
        versions = None if checked.versions is None else checked.versions[mine]
        return checked._replace(values=values, versions=versions)

    meant = client._members.incarnations()
    chosen, answers = _change_rows(client, "patch", where, given, meant, part_of)
    found = torch.zeros(1 if checked.versions is None else 2, len(where), dtype=torch.bool)
    for shard, answer in answers.items():
        found[:, chosen[shard]] = torch.as_tensor(answer[0], dtype=torch.bool)
    rejected = None if checked.versions is None else found[1]
    return ConditionalUpdateResult(found[0], rejected, batch_size=[len(where)])


def _stored_schema(client: ShardedClient) -> Schema:
    """Return the schema of the stored rows, after the inverse transforms.

    Raises:
        RuntimeError: nothing is stored.
    """
    members = client._members
    members.present()
    if not members.rows():
        members.refresh(None, 0.0)
    if client._stored is None and members.rows():
        roots = members.ask_all("layout").values()
        client._stored = next((Schema(root) for root in roots if root is not None), None)
    if client._stored is None or not members.rows():
        raise RuntimeError("nothing is stored")
    return client._stored


# -- streams ---------------------------------------------------------------------------------------


def cut_streams(client: ShardedClient, lane: Any) -> None:
    """End open episodes; see ``ShardedClient.cut``."""
    members = client._members
    where: dict[int, torch.Tensor | None] = dict.fromkeys(range(client.num_shards))
    if lane is not None:
        where = _shards_of(members, as_tensor(lane).cpu())
    client._writes(
        list(where), lambda shard, stamp: members.send(shard, "cut", stamp, where[shard])
    )
    client._tickets.count_unticketed()


def _shards_of(members: ShardMembers, lanes: torch.Tensor) -> dict[int, torch.Tensor | None]:
    """Return the keys of the given streams by shard, for shards with rows of them.

    Raises:
        IndexError: no shard has rows of some stream.
    """
    members.wait_for_all()
    answers = members.ask_all("streams", lanes)
    found = {shard: answer for shard, answer in answers.items() if answer is not None}
    if not found:
        return {}  # nothing to cut, as in one buffer without rows
    known = torch.stack([has for _, has in found.values()]).any(0)
    if not bool(known.all()):
        missing = next(iter(found.values()))[0][~known].tolist()
        raise IndexError(f"expected streams with stored rows, got {missing}")
    return {shard: cells[has] for shard, (cells, has) in found.items() if bool(has.any())}
