"""Sample from shards, with prefetching and data loaders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from replaykit.buffer.components import DataT
from replaykit.buffer.deliver import should_merge
from replaykit.buffer.source import DrawnRows, MemberFacts, Readiness, RemoteRequest
from replaykit.distributed.client_updates import Streamed
from replaykit.distributed.client_writes import ClientSettings
from replaykit.distributed.membership import ShardMembers, ShardTicket
from replaykit.distributed.requests import RemoteResult
from replaykit.distributed.routing import check_stored, finished
from replaykit.distributed.shard_draws import Draws, Pending, SampleAnswer, ShardRequests
from replaykit.distributed.shards import Supervisor
from replaykit.pace import SAMPLE, RateLimiter

if TYPE_CHECKING:
    from replaykit.distributed.sharded_buffer import ShardedClient

__all__ = ["Sampled", "ShardLoader", "check_generator"]


class Sampled(Streamed[DataT]):
    """The sampling methods and the random generator of a client."""

    def __init__(
        self,
        settings: ClientSettings,
        members: ShardMembers,
        generator: torch.Generator | None,
        prefetch: int,
    ) -> None:
        super().__init__(settings, members, generator)
        self._draws = Draws(self)
        self._ahead = ShardRequests(self, self._draws, prefetch)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows, and drop batches under way.

        The keys, shapes and memory of the rows stay. A rate limiter starts to count again.

        Args:
            empty_write_count: True to reset ``write_count`` to 0. The counts of a rate limiter in
                ``stats`` are then also reset to 0.
        """
        super().empty(empty_write_count)
        self._ahead.drop()

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return self._settings.num_shards

    @property
    def batch_size(self) -> int | None:
        """The default number of rows in a batch."""
        return self._settings.batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """The random generator of the draws, or None for torch's global generator."""
        return self._generator

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of all later draws, and drop the batches under way."""
        check_generator(generator)
        self._ahead.drop()
        self._generator = generator

    def _sample(
        self,
        batch_size: int | None,
        return_info: bool,
        include_info: bool | None,
        timeout: float | None,
    ) -> Any:
        self._check_open()
        size, merge = self._size_of(batch_size), should_merge(include_info, 4)
        with self._tickets.ticket(SAMPLE, timeout) as ticket:
            ahead = self._ahead.depth > 0 and size == self.batch_size
            early = None if ticket is None else self._admitted(ticket, size, alone=not ahead)
            if early is not None:
                drawn = early.get()
            else:
                drawn = self._ahead.next(size) if ahead else self._draws.next(size)
            return self._made(drawn, return_info, size, ticket, merge=merge)

    def _admitted(self, ticket: ShardTicket, size: int, *, alone: bool) -> Pending | None:
        """Wait for the right to sample; return the batch requested meanwhile, or None.

        If the right must be requested by a message, the client requests a batch from the shards at
        the same time. It discards that batch if the right was not available at once, since rows
        have been written meanwhile.

        Args:
            alone: True if no batches of this size are prefetched.
        """
        asked = None
        if alone and ticket.keeper.far and self._enough(ticket.keeper.limiter):
            self._draws.refresh(size)
            asked = self._ahead.asked(size)
        at_once = False
        try:
            at_once = ticket.admit(size)
        finally:
            if asked is not None and not at_once:
                self._ahead.undo(asked, asked)
        return asked.pending if at_once and asked is not None and asked.pending.was_sent else None

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
        asked = _Sooner(self, size)
        if self._tickets.keeper is None or self._enough(self._tickets.keeper.limiter):
            asked.pending()

        def made(within: float | None, held_up: float | None) -> Any:
            with self._tickets.ticket(SAMPLE, held_up) as ticket:
                if ticket is not None:
                    ticket.admit(size)
                drawn = asked.pending().get(within)
                return self._made(drawn, return_info, size, ticket, merge=merge)

        return RemoteResult(SampleAnswer(made, asked.has_come))

    def _enough(self, limiter: RateLimiter) -> bool:
        """Return whether at least ``min_size_to_sample`` rows are known to be stored."""
        return sum(map(self._rows_of, self._members.table.there())) >= limiter.min_size_to_sample

    def _made(
        self,
        drawn: tuple[Any, dict[Any, Any]],
        return_info: bool,
        size: int,
        ticket: ShardTicket | None,
        *,
        merge: bool,
    ) -> Any:
        data, info = drawn
        count = len(info["index"])
        data = finished(data, info, self._sampler, merge=merge)
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


class _Sooner:
    """A batch that is requested when it is first needed. Thread-safe."""

    def __init__(self, client: Sampled[Any], size: int) -> None:
        self._client, self._size = client, size
        self._lock = threading.Lock()
        self._pending: Pending | None = None

    def pending(self) -> Pending:
        """Return the batch under way; request it if necessary."""
        client, size = self._client, self._size
        with self._lock:
            if self._pending is None:
                if client._ahead.depth and size == client.batch_size:
                    self._pending = client._ahead.take(size)
                else:
                    client._draws.refresh(size)
                    self._pending = client._draws.begun(size, patient=False)
            return self._pending

    def has_come(self) -> bool:
        """Return whether the batch has arrived and may be delivered.

        If the rate limiter would admit a batch that is not requested yet, this call requests it.
        """
        return self._client._tickets.may_sample(self._size) and self.pending().has_come()


def check_generator(generator: object) -> None:
    """Raise TypeError unless the argument is a generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"expected generator as a torch.Generator, got {generator!r}")


class ShardLoader(Sampled[DataT]):
    """The methods of a client for data loaders and ensembles."""

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

    # -- as a member of an ensemble -----------------------------------------------------------

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
        )

    def _be_fresh(self, rows: int) -> None:
        self._check_open()
        self._draws.refresh(rows)

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> RemoteRequest:
        self._check_open()
        draws = Draws(self, torch.Generator().manual_seed(seed), generations=True)
        return _Part([(count, draws.begun(count, patient=False)) for count in rows])

    def _ask_readiness(self, rows: int) -> RemoteRequest:
        def readiness() -> Readiness:
            ready = self._draws.possible(rows)
            return Readiness(len(self), ready)  # type: ignore[arg-type]

        return _Later(readiness)

    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        return _Later(lambda: check_stored(self, index.cpu().reshape(-1)))  # type: ignore[arg-type]

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        return _Later(lambda: getattr(self, name)(*args, **keywords))

    def _handed_on(self) -> Any:
        self._check_open()
        return self._alike(None)

    def _alike(self, generator: torch.Generator | None) -> ShardedClient:
        """Return another handle with the same sampler settings and no batches under way."""
        from replaykit.distributed.sharded_buffer import ShardedClient

        settings = replace(self._settings, sampler=copy.deepcopy(self._sampler))
        return ShardedClient(settings, self._members.again(self._members.on_loss), generator)


class _Part:
    """Batches under way, each with its number of rows."""

    def __init__(self, asked: list[tuple[int, Pending]]) -> None:
        self._asked = asked

    def result(self, timeout: float | None = None) -> tuple[list[DrawnRows], None]:
        pieces = []
        for count, pending in self._asked:
            piece = DrawnRows(*pending.get(timeout))
            found = len(piece.info["index"])
            if found != count:
                raise ValueError(
                    f"expected {count} rows, got {found}: windows of different lengths do not fill "
                    "a part of a batch; use strict ones, or pad_output=True"
                )
            pieces.append(piece)
        return pieces, None


class _Later:
    """A request that needs several messages, and starts when its result is needed."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def result(self, timeout: float | None = None) -> Any:
        return self._ask()
