"""Define the handle of a sharded buffer, with its methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from replaykit._compat import is_tensordict
from replaykit.buffer.components import DataT, check_generator
from replaykit.buffer.deliver import merged, shaped, should_merge
from replaykit.buffer.edit import ConditionalUpdateResult
from replaykit.buffer.source import DrawnRows, Later, MemberFacts, Readiness, RemoteRequest
from replaykit.declared import Count, read_value
from replaykit.distributed.handle import Handle, SampleCall
from replaykit.distributed.members import ShardMembers, ShardTicket, Tickets, check_on_loss
from replaykit.distributed.protocol import GlobalIndex, ShardLoss
from replaykit.distributed.requests import RemoteResult, RequestQueue, Taken
from replaykit.distributed.shard_config import (
    ByKey,
    ClientSettings,
    InTurn,
    Router,
    check_stored,
    law_of,
    rows_by,
)
from replaykit.distributed.shard_draws import Draws, PacedSample, Pending
from replaykit.distributed.shard_saves import load_all, load_state, save_all, state_of
from replaykit.distributed.shard_writes import (
    Sender,
    Writes,
    cut_streams,
    index_of_one,
    patch_rows,
    send_rows,
    set_priorities,
    set_sample_priorities,
    write_rows,
)
from replaykit.distributed.shards import Supervisor
from replaykit.distributed.write_queue import WriteQueue
from replaykit.interrupts import deferred
from replaykit.keywords import named_after
from replaykit.pace import SAMPLE
from replaykit.schema import Schema
from replaykit.ted import unravel

_PARTS = "the functions given to the constructor make the parts of shards, which cannot change"
_EDITS = (
    "rows may have been overwritten, or lost with their shard, since they were read; "
    "update_if_present() changes those that are still stored"
)
_SAVES = "each shard saves itself, all at one instant; save other state separately"

_STREAMS = "streams and episodes are indexed in the shards"

REFUSED: dict[str, str] = {
    "append_transform": _PARTS,
    "as_remote": "its rows are in actors already; client() is a handle for other processes",
    "checkpointer": "dumps and loads have one format, for all shards together",
    "drain": _STREAMS,
    "dim_extend": "rows of shards are along dimension 0, and shard_key distinguishes streams",
    "episodes": "the episode index is in the shards, which draw slices by it",
    "insert_transform": _PARTS,
    "on": "rows are written and sampled in the shards; stats() has their counts",
    "priority_key": "the buffers of the shards have it",
    "register_load_hook": _SAVES,
    "register_save_hook": _SAVES,
    "service_backend": "its rows are in Ray actors; the constructor has backend=",
    "remove_oldest": _STREAMS,
    "reopen": _STREAMS,
    "resize": "the capacity of shards is fixed; load a checkpoint into shards of another capacity",
    "set_": _EDITS,
    "set_at_": _EDITS,
    "set_sampler": _PARTS,
    "set_storage": _PARTS,
    "set_writer": _PARTS,
    "join": "client() is a handle for other processes, which all see the same rows",
    "share": "client() is a handle for other processes, which all see the same rows",
    "shared": "client() is a handle for other processes, which all see the same rows",
    "tag": _STREAMS,
    "take": _STREAMS,
    "storage": "rows are in the storages of the shards; rb[...] reads them",
    "transform": _PARTS,
    "update_": _EDITS,
    "write_all": _EDITS,
    "writer": "every shard has a separate writer",
}
"""The public names of ``ReplayBuffer`` that a sharded buffer lacks, with reasons."""


def refuse(kind: type, name: str) -> NoReturn:
    """Raise the AttributeError for a missing name.

    Example:
        >>> from replaykit import ShardedClient
        >>> from replaykit.distributed.sharded_client import refuse
        >>> refuse(ShardedClient, "writer")
        Traceback (most recent call last):
        AttributeError: a ShardedClient has no 'writer': every shard has a separate writer
    """
    if name in REFUSED:
        raise AttributeError(f"a {kind.__name__} has no {name!r}: {REFUSED[name]}")
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


@named_after
class ShardedClient(Handle[DataT]):
    """A handle of a sharded buffer.

    A handle has all methods of the buffer except those that end it.
    ``ShardedReplayBuffer.client()`` makes handles, which can be pickled and sent to other
    processes. Each handle has a separate table of masses. It draws with the generator given to it,
    or else with torch's global generator. All methods are thread-safe.

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
        members: ShardMembers,
        generator: torch.Generator | None,
        prefetch: int = 0,
    ) -> None:
        super().__init__()
        self._settings, self._members = settings, members
        self._names = GlobalIndex(self.num_shards)
        key = settings.shard_key
        self._router: Router = (
            InTurn(self.num_shards) if key is None else ByKey(self.num_shards, key)
        )
        self._sampler: Any = copy.deepcopy(settings.sampler)
        self._law = law_of(self._sampler)
        self._writes = Writes(members)
        self._write_queue, self._sender = WriteQueue(actor=object()), Sender()
        self._tickets = Tickets(members)
        self._stored: Schema | None = None  # of rows after the inverse transforms
        self._priority_key = unravel(settings.priority_key)
        # No part refers to the client, so it ends, and reports its writes, with its last reference.
        self._draws = Draws(members, self._law, settings.max_age, generator)
        begun = functools.partial(self._draws.begun, settings.batch_size or 0)
        self._ahead = RequestQueue(lambda count: [begun() for _ in range(count)], prefetch)
        self._dropped_updates = 0
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

    # -- description --------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._members.shards)

    @property
    def batch_size(self) -> int | None:
        """The default number of rows in a batch."""
        return self._settings.batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """The random generator of the draws, or None for torch's global generator."""
        return self._draws.given

    @property
    def sampler(self) -> Any:
        """The sampler with the settings of this client's draws.

        The attributes ``alpha`` and ``beta`` may be set. The next draw sends a new ``alpha`` to the
        shards. The shards use this ``alpha`` for all clients until a draw of another client changes
        it.
        """
        return self._sampler

    def __len__(self) -> int:
        """Return the number of rows in all live shards.

        Cost: one message to each shard.
        """
        self._check_open()
        self._members.refresh(None, 0.0)
        return self._members.rows()

    @property
    def initialized(self) -> bool:
        """Always True, since all shards are complete before a handle exists."""
        return True

    @property
    def write_count(self) -> int:
        """The number of rows written to live shards since their creation or restoration."""
        return int(self.stats()["write_count"])

    @property
    def losses(self) -> list[ShardLoss]:
        """All losses with dead shards that clients have reported."""
        return self._members.supervisor.losses()

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``ReplayBuffer.stats`` for all live shards, and more.

        ``shards`` has the size of each shard, or None during its restart. ``rows_lost`` is the
        number of acknowledged rows that were lost. ``restarts`` is the number of restarts.

        With a rate limiter, ``inserts``, ``samples``, ``insert_blocked_s`` and ``sample_blocked_s``
        count the calls of all clients. Cost: one message to each shard.

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
            **self._tickets.stats(),
        }

    def __repr__(self) -> str:
        key = self._settings.shard_key
        return (
            f"{type(self).__name__}(num_shards={self.num_shards}, sampler={self._sampler!r}, "
            f"batch_size={self.batch_size}, shard_key={key!r})"
        )

    # -- writing ------------------------------------------------------------------------------

    def add(self, data: Any, *, timeout: float | None = None) -> int | None:
        """Store one row and return its index.

        The result is None if an inverse transform drops the row. The arguments and errors are the
        same as those of ``extend``.
        """
        return index_of_one(write_rows(self, data, single=True, timeout=timeout))

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
        return write_rows(self, data, update_priority=update_priority, timeout=timeout)

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
        call waits for the oldest write. A program that ends waits up to five seconds for its
        writes, and warns of writes that may be lost; ``flush`` waits for all.

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
        return send_rows(self, data, update_priority=update_priority)

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
        return send_rows(self, data, single=True)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows, and drop batches under way.

        The keys, shapes and memory of the rows stay. A rate limiter starts to count again.

        Args:
            empty_write_count: True to reset ``write_count`` to 0. The counts of a rate limiter in
                ``stats`` are then also reset to 0.
        """
        self._before_a_write()
        with deferred:
            self._writes.to_all("empty", empty_write_count)
            self._tickets.emptied(counting_on=not empty_write_count)
            self._router.dealt = 0
            self._drop_ahead()

    def flush(self) -> torch.Tensor:
        """Store the rows that the shards' transforms hold back.

        Transforms treat the rows that they hold back as complete; see ``ReplayBuffer.flush``.

        Returns:
            The index of each row, int64 ``[K]``, ordered by shard.

        Raises:
            TimeoutError: a shard has died and was not restarted, or does not answer.

        A rate limiter counts these rows, but does not delay them. The call waits for all earlier
        writes of this handle, even for writes that the rate limiter delays. Cost: one message to
        each shard.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     rb.flush()
            tensor([], dtype=torch.int64)
        """
        self._check_open()
        self._write_queue.flush()
        answers = self._writes.to_all("flush")
        self._tickets.count_unticketed()
        return torch.cat([self._names.join(shard, answers[shard][0]) for shard in sorted(answers)])

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """End all open episodes without a flag.

        Rows that are written later belong to other episodes. These episodes count as if their
        oldest steps were missing. See ``ReplayBuffer.cut``.

        Args:
            lane: values of the column ``lane_key``. These values name the streams to cut, which may
                be in any shards. None cuts all streams.

        Raises:
            IndexError: a stream has no stored rows. After this error, no stream was cut.
            TimeoutError: a shard has died and was not restarted, or does not answer.

        Like ``flush``, the call first stores the rows that transforms hold back. Cost: one message
        to each shard, or two messages with ``lane``.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer, SliceSampler
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(100), shard_key="env",
            ...     sampler=lambda: SliceSampler(slice_len=2), backend="local",
            ... ) as rb:
            ...     for first in (0, 2):
            ...         _ = rb.extend(TensorDict({
            ...             "env": torch.zeros(2).long(), "t": torch.arange(first, first + 2),
            ...             "next": {"done": torch.zeros(2, dtype=bool)}}, [2]))
            ...         rb.cut()
            ...     starts = rb.sample(200)["t"][::2]
            >>> starts.unique()
            tensor([0, 2])
        """
        self._check_open()
        self._write_queue.flush()
        cut_streams(self, lane)

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Write values into the rows that were not overwritten since the draw.

        Args:
            index: the ``index`` of the rows in a sample, int64 ``[K]``.
            generation: the ``index_generation`` of the rows, int64 ``[K]``. Rows with -1 are never
                updated, nor are rows that were drawn before a restart of their shard.
            patch, version_key, version, require_newer: as for ``ReplayBuffer.update_if_present``.

        Returns:
            The outcome for each row, in the order of ``index``.

        Raises:
            ValueError: the patch has the ``shard_key``, but rows cannot move to other shards.
            TimeoutError: a shard has not answered. The values of its rows may have been written.
            The errors of ``ReplayBuffer.update_if_present`` are raised before any row has changed.

        A reader sees all updates of a shard or none, but the shards may be updated at different
        times. Cost: one message to each shard with rows in ``index``, and one more for the first
        patch.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, RoundRobinWriter, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(2), backend="local",
            ...     writer=lambda: RoundRobinWriter(track_generations=True),
            ... ) as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
            ...     _ = rb.add(TensorDict({"x": torch.ones(())}, []))  # displaces the row at 0
            ...     result = rb.update_if_present(
            ...         index=torch.tensor([0, 1]), generation=torch.tensor([0, 0]),
            ...         patch={"x": torch.tensor([5.0, 5.0])})
            ...     result.updated.tolist(), rb[:]["x"].tolist()
            ([False, True], [1.0, 5.0, 0.0, 0.0])
        """
        self._before_a_write()
        return patch_rows(self, index, generation, patch, version_key, version, require_newer)

    # -- priorities ---------------------------------------------------------------------------

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Set the priorities of rows, like ``ReplayBuffer.update_priority``.

        Args:
            index: the indices of the rows, int64 ``[K]``; -1 is ignored. Without ``priority``, a
                sample.
            priority: a number for all rows, or a tensor ``[K]`` or ``[K, 1]``.
            generation: the ``index_generation`` of the rows in a sample, int64 ``[K]``. Rows that
                were overwritten since, or lost with their shard, are skipped.

        Raises:
            ValueError: a priority is NaN, negative or infinite, or the numbers of entries differ.
            IndexError: a row of the index is not stored.
            After any of these errors, nothing has changed.

        Updates for a shard during its restart are dropped, since its rows may be lost. The restart
        restores the saved priorities. Cost: one message to each shard with rows in ``index``.
        """
        self._before_a_write()
        set_priorities(self, index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities from a sample.

        See ``ReplayBuffer.update_tensordict_priority``.
        """
        self._before_a_write()
        set_sample_priorities(self, data)

    def mark_update(self, index: Any) -> None:
        """Give rows the default priority.

        The default is the largest priority that was ever set in any shard. If the sampler has no
        priorities, this does nothing.

        Args:
            index: the indices of the rows, an int or int64 ``[K]``; -1 is ignored.

        Raises:
            IndexError: a row of the index is not stored; nothing has changed then.

        Cost: one message to each shard, and one more to each shard with rows in ``index``.

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
            set_priorities(self, index, self._members.most())

    @property
    def dropped_updates(self) -> int:
        """The number of entries that this client's updates skipped.

        An entry is skipped if its row was overwritten or lost.
        """
        return self._dropped_updates

    # -- sampling -----------------------------------------------------------------------------

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of all later draws, and drop the batches under way."""
        check_generator(generator)
        self._drop_ahead()
        self._draws.given = generator

    def _sample(self, call: SampleCall, timeout: float | None) -> Any:
        self._check_open()
        size, merge = self._size_of(call.batch_size), should_merge(call.include_info, 4)
        with deferred, self._tickets.ticket(SAMPLE, timeout) as ticket:
            ahead = self._is_ahead(size)
            early = self._admitted(ticket, size, alone=not ahead)
            if early is None:
                self._draws.refresh(size)
                drawn = self._ahead.next() if ahead else self._draws.begun(size).get()
            else:
                drawn = early.get()
            return self._made(call.return_info, merge, size, drawn, ticket)

    def _is_ahead(self, size: int) -> bool:
        """Return whether batches of this size are prefetched."""
        return self._ahead.depth > 0 and size == self.batch_size

    def _admitted(self, ticket: ShardTicket, size: int, *, alone: bool) -> Pending | None:
        """Wait for the right to sample; return the batch requested meanwhile, or None.

        If the right must be requested by a message, the client requests a batch from the shards at
        the same time. It discards that batch if the right was not available at once, since rows
        have been written meanwhile.

        Args:
            alone: True if no batches of this size are prefetched.
        """
        asked = None
        if alone and ticket.keeper is not None and ticket.keeper.far and self._enough():
            self._draws.refresh(size)
            asked = self._draws.begun(size)
        at_once = False
        try:
            at_once = ticket.admit(size)
        finally:
            if asked is not None and not at_once:
                asked.undo()
        return asked if at_once else None

    def sample_async(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> RemoteResult:
        """Request a batch without waiting for it.

        Args:
            batch_size, return_info, include_info: as for ``sample``.

        Returns:
            A future with the result or error of ``sample``. Use ``await`` or ``result()`` to get
            it. With ``prefetch`` the future holds the oldest batch under way.

        If the known masses of the shards are older than ``max_age``, the call waits for new masses.
        With a rate limiter, ``result(timeout)`` also waits for the limiter. The limiter counts a
        batch when it is delivered. The client sends the request for a batch as soon as it knows
        that enough rows are stored.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          batch_size=2, backend="local") as rb:
            ...     _ = rb.extend(torch.ones(6))
            ...     first, second = rb.sample_async(), rb.sample_async(3)
            ...     first.result(), second.result()
            (tensor([1., 1.]), tensor([1., 1., 1.]))
        """
        self._check_open()
        size, merge = self._size_of(batch_size), should_merge(include_info)
        made = functools.partial(self._made, return_info, merge, size)
        if self._tickets.keeper is None:
            return RemoteResult(self._take(size), made)
        return RemoteResult(PacedSample(self, size, made))

    def _take(self, size: int) -> Taken | Pending:
        """Return a batch under way, which may have been requested before."""
        self._draws.refresh(size)
        if self._is_ahead(size):
            return self._ahead.take()
        return self._draws.begun(size)

    def _drop_ahead(self) -> None:
        dropped = [one for one in self._ahead.drop() if one.before is not None]
        if dropped:
            dropped[0].undo(dropped[-1])

    def _generator_state(self) -> torch.Tensor | None:
        """Return the state of the generator before the draws of the batches under way."""
        if self.generator is None:
            return None
        drawn = [one.before for one in self._ahead.under_way() if one.before is not None]
        return drawn[0] if drawn else self.generator.get_state()

    def _enough(self) -> bool:
        """Return whether enough rows are known to be stored for a rate limiter to admit samples."""
        assert self._tickets.keeper is not None
        return self._members.rows() >= self._tickets.keeper.limiter.min_size_to_sample

    def _made(
        self,
        return_info: bool,
        merge: bool,
        size: int,
        drawn: tuple[Any, dict[Any, Any]],
        ticket: ShardTicket | None = None,
    ) -> Any:
        data, info = drawn
        count = len(info["index"])
        if merge:
            data = merged(data, info, 0)
        shape = self._sampler.shape_of(count)
        if shape is not None and is_tensordict(data):
            data = shaped(data, count, shape)
        if ticket is not None:
            ticket.sampled(min(size, count))
        return (data, info) if return_info else data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether ``sample`` would succeed now; draw nothing.

        Cost: one message to each shard, and one to the rate limiter.
        """
        self._check_open()
        size = self._size_of(batch_size)
        return self._tickets.may_sample(size) and self._draws.possible(size)

    def next(self) -> DataT:
        """Return the next batch of the endless iteration, drawn with replacement."""
        return self.sample()

    # -- reading ------------------------------------------------------------------------------

    def _read_rows(self, index: Any) -> Any:
        self._check_open()
        return rows_by(self, index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return all stored rows, or the first ``end`` rows, in index order.

        The result equals ``rb[:end]``.

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
        """Save all shards to a checkpoint, as of one instant between two writes.

        The save succeeds for all shards or for none. The checkpoint has all rows of a batch or
        none, even if the batch went to several shards. Writes and updates wait while the shards
        freeze their rows, but not while the shards write files. Samples do not wait.

        Args:
            path: a directory that all shards can write to.

        Raises:
            RuntimeError: a shard died, or a client died after writing only some parts of a batch.
            OSError: files could not be written.
            After an error, an earlier checkpoint stays valid.
        """
        self._before_a_write()
        save_all(self, path)

    def loads(self, path: Any) -> None:
        """Load a checkpoint of a sharded buffer with any number of shards.

        With the same number of shards, every row keeps its index. With another number, the rows are
        assigned to the shards again, in turn or by key. The rows keep their priorities. Episodes
        stay whole, and no window crosses from the rows of one saved shard to the rows of another.
        If not all rows fit, a UserWarning reports the number of dropped rows.

        Each shard reads its share in blocks. When all shards have read their shares, they drop
        their old rows.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the checkpoint is damaged.
            ValueError: keys, the kind of sampler or the ``shard_key`` differ.
            RuntimeError: a shard died, or another client loaded rows at the same time.
            After any of these errors, nothing has changed.
            RuntimeError: shards died in the last step, and a second try failed. The other shards
                have loaded their rows; load again.
        """
        self._before_a_write()
        load_all(self, path)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of all shards as of one instant.

        The dictionary has the same content as a checkpoint of ``dumps``. Unlike ``dumps``, this
        method copies all rows into the calling process.

        Raises:
            RuntimeError: a shard died, or a client died after writing only some parts of a batch.

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
        """Load a copy of a ``state_dict`` from a buffer with the same number of shards.

        Raises:
            ValueError: the number of shards or the ``shard_key`` differs, or entries are missing or
                do not fit. Nothing has changed then.
        """
        self._before_a_write()
        load_state(self, state_dict)

    dump = save = dumps
    load = loads

    # -- other handles ------------------------------------------------------------------------

    def client(
        self,
        generator: torch.Generator | None = None,
        *,
        on_loss: Callable[[ShardLoss], None] | None = None,
        prefetch: int = 0,
    ) -> ShardedClient[DataT]:
        """Return another handle.

        It can be pickled if the shards are in actors.

        Args:
            generator: the random generator of the handle's draws, or None for torch's global
                generator in the process of the handle.
            on_loss: function called with a ``ShardLoss`` when the handle notices the restart of a
                shard. None shows a ShardLossWarning instead. The function is pickled with the
                handle.
            prefetch: number of batches to request ahead, as in the constructor.
        """
        self._check_open()
        check_generator(generator)
        check_on_loss(on_loss)
        members = self._members.again(on_loss)
        prefetch = read_value(Count, prefetch or 0, "prefetch")
        return ShardedClient(self._settings, members, generator, prefetch)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "settings": self._settings,
            "members": self._members,
            "generator": self._generator_state(),
            "prefetch": self._ahead.depth,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = None
        if state["generator"] is not None:
            generator = torch.Generator("cpu")
            generator.set_state(state["generator"])
        settings, members, prefetch = (state[k] for k in ("settings", "members", "prefetch"))
        ShardedClient.__init__(self, settings, members, generator, prefetch)

    # -- for loaders and mixtures -------------------------------------------------------------

    def _check_loader(self) -> None:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without rate_limiter: a loader that continues from a state "
                "requests batches again, and these would count twice"
            )

    def _check_workers(self, method: str | None = None) -> None:
        if isinstance(self._members.supervisor, Supervisor):
            raise ValueError(
                "expected shards in actors (backend='ray') for worker processes, got shards in "
                "this process; make batches without workers"
            )
        super()._check_workers(method)

    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        self._check_open()
        return self._alike(generator).sample_async

    def _facts_of_member(self) -> MemberFacts:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without a rate limiter, since it does not count draws of an "
                f"ensemble, got {self._tickets.keeper.limiter!r}"
            )
        sampler = self._sampler
        return MemberFacts(
            info_keys=frozenset(sampler.info_keys),
            prioritized=sampler.prioritized,
            priority_key=self._priority_key,
            width=1,
            weights=getattr(sampler, "dtype", torch.float32),
            single=not sampler.draws_windows,
            ordered=False,
            marks=frozenset(sampler._marks),
        )

    def _be_fresh(self, rows: int) -> None:
        self._check_open()
        self._draws.refresh(rows)

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        self._check_open()
        seeded = torch.Generator().manual_seed(seed)
        age = self._settings.max_age
        draws = Draws(self._members, self._law, age, seeded, generations=True)
        asked = [(count, draws.begun(count)) for count in rows]
        return Later(lambda timeout: ([_filled(*one, timeout) for one in asked], None))

    def _ask_readiness(self, rows: int) -> RemoteRequest:
        return Later(lambda timeout: Readiness(len(self), self._draws.possible(rows)))

    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        return Later(lambda timeout: check_stored(self, index.cpu().reshape(-1)))

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        return Later(lambda timeout: getattr(self, name)(*args, **keywords))

    def _handed_on(self) -> Any:
        self._check_open()
        return self._alike(None)

    def _alike(self, generator: torch.Generator | None) -> ShardedClient:
        """Return another handle with the same sampler settings and no batches under way."""
        settings = replace(self._settings, sampler=copy.deepcopy(self._sampler))
        return ShardedClient(settings, self._members.again(self._members.on_loss), generator)


def _filled(count: int, pending: Pending, timeout: float | None) -> DrawnRows:
    """Wait for a part of a mixture's batch; raise ValueError if it has another number of rows."""
    piece = DrawnRows(*pending.get(timeout))
    found = len(piece.info["index"])
    if found != count:
        raise ValueError(
            f"expected {count} rows, got {found}: windows of different lengths do not fill a part "
            "of a batch; use strict ones, or pad_output=True"
        )
    return piece
