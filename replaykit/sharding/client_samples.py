"""Sample from shards, also ahead of time and in loaders."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import torch

from replaykit._ray import Carried
from replaykit.buffer.buffer_dataset import DrawnRows, MemberFacts, RemoteRequest, Standing
from replaykit.buffer.core import DataT, checked_batch_size
from replaykit.buffer.dataloader import LoadingElsewhere
from replaykit.buffer.sampling import told_to_merge
from replaykit.pace import RateLimiter
from replaykit.sharding.client_updates import Streamed
from replaykit.sharding.client_writes import ClientSettings
from replaykit.sharding.membership import ShardMembers, ShardTicket
from replaykit.sharding.routing import check_stored, finished
from replaykit.sharding.shard_draws import Draws, Pending, ShardedResult, ShardRequests
from replaykit.sharding.shards import LocalSupervisor

if TYPE_CHECKING:
    from replaykit.sharding.sharded_buffer import ShardedClient

__all__ = ["Sampled", "ShardLoader", "check_generator"]


class Sampled(Streamed, Generic[DataT]):
    """``sample``, ``sample_async``, ``can_sample``, iteration, and the generator."""

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
        """Forgets all rows, and batches under way; keys, shapes and memory stay. The law of a rate
        limiter begins anew.

        Args:
            empty_write_count: whether ``write_count`` starts again at 0, and the counts of a rate
                limiter in ``stats``.
        """
        super().empty(empty_write_count)
        self._ahead.drop()

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self._settings.num_shards

    @property
    def batch_size(self) -> int | None:
        """Default number of rows of a sample."""
        return self._settings.batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """Where the randomness of draws comes from; None: torch's global generator."""
        return self._generator

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draws with this generator from now on, also what is under way."""
        check_generator(generator)
        self._ahead.drop()
        self._generator = generator

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[DataT, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None,
        return_info: Literal[True],
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[DataT, dict[Any, Any]]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT | tuple[DataT, dict[Any, Any]]: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Draws a batch, as one big buffer with all the rows does.

        Args:
            batch_size: number of rows; None: that of the constructor.
            return_info: also return what is known of the draw.
            include_info: as for ``ReplayBuffer.sample``; deprecated.
            timeout: seconds to wait where the rate limiter holds samples back; 0: none at all,
                None: without end. Without a rate limiter nothing waits.

        Returns:
            As ``ReplayBuffer.sample``; ``index`` names rows of any shard.

        Raises:
            RuntimeError: no batch size anywhere, or nothing that can be drawn.
            ValueError: a batch size that is not an int of at least 1, or for which the rate limiter
                never has room.
            RateLimiterTimeout: writes lag behind; a TimeoutError. Nothing has changed then.
            TimeoutError: all shards have died, and none has come back.

        Exact where nobody else writes or updates meanwhile: P(i) and ``priority_weight`` are those
        of one big buffer. Beside others see ``docs/sharding.md``: shards are drawn by masses of the
        last reply, at most ``max_age`` seconds old, and weights are of the probabilities that the
        rows then had. With ``prefetch`` batches of the default size have been asked for by calls
        before: see there.

        Cost: one message to each shard, all in flight at once, and one copy of the batch; with a
        rate limiter one message beside them, and one that nobody waits for.

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
        size, merge = self._size_of(batch_size), told_to_merge(include_info)
        with self._tickets.sample(timeout) as ticket:
            ahead = self._ahead.depth > 0 and size == self.batch_size
            early = None if ticket is None else self._admitted(ticket, size, alone=not ahead)
            if early is not None:
                drawn = early.get()
            else:
                drawn = self._ahead.next(size) if ahead else self._draws.next(size)
            return self._made(drawn, return_info, size, ticket, merge=merge)

    def _admitted(self, ticket: ShardTicket, size: int, *, alone: bool) -> Pending | None:
        """Waits for the right to a sample; returns what was drawn meanwhile, if it is a batch of
        the instant at which the right was given.

        Where that takes a message the shards are asked beside it. If the right was not there at
        once nothing was drawn: rows have come since.
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
    ) -> ShardedResult:
        """Asks all shards for a batch and does not wait: the result is awaited, or asked for.

        Args:
            batch_size, return_info, include_info: as for ``sample``.

        Returns:
            What ``sample`` will return, or raise. With ``prefetch`` the oldest batch under way.

        Waits for the shards' masses where those known are older than ``max_age``. With a rate
        limiter who asks for the result waits for that too, ``result(timeout)`` so long at most; a
        batch counts when it is delivered, and is asked for as soon as enough rows are known here.

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
        size, merge = self._size_of(batch_size), told_to_merge(include_info)
        asked = _Sooner(self, size)
        if self._tickets.keeper is None or self._enough(self._tickets.keeper.limiter):
            asked.pending()

        def made(within: float | None, held_up: float | None) -> Any:
            with self._tickets.sample(held_up) as ticket:
                if ticket is not None:
                    ticket.admit(size)
                drawn = asked.pending().get(within)
                return self._made(drawn, return_info, size, ticket, merge=merge)

        return ShardedResult(made, asked.has_come)

    def _enough(self, limiter: RateLimiter) -> bool:
        """Whether so many rows are known here that a batch is one that samples may be of."""
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
        """Whether ``sample`` would succeed now. Draws nothing. Cost: one message to each shard, and
        to who counts for a rate limiter."""
        self._check_open()
        size = self._size_of(batch_size)
        return self._tickets.may_sample(size) and self._draws.possible(size)

    def _size_of(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return checked_batch_size(batch_size)
        if self.batch_size is None:
            raise RuntimeError(
                "batch_size not specified: give it to the constructor or to sample()"
            )
        return self.batch_size

    def __iter__(self) -> Iterator[DataT]:
        """Yields batches for ever, and waits for a rate limiter without end.

        Raises:
            RuntimeError: the buffer has no batch size.
        """
        if self.batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during "
                "construction; give the buffer a batch_size"
            )
        return self._batches()

    def _batches(self) -> Iterator[DataT]:
        while True:
            yield self.sample()

    def next(self) -> DataT:
        """Returns the next batch of an iteration, which has no end: draws are with replacement."""
        return self.sample()


class _Sooner:
    """A batch that is asked for when somebody wants it, if not before. Thread-safe."""

    def __init__(self, client: Sampled[Any], size: int) -> None:
        self._client, self._size = client, size
        self._lock = threading.Lock()
        self._pending: Pending | None = None

    def pending(self) -> Pending:
        """Asks for it, unless that was done."""
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
        """Whether it is there, and may be delivered; asks for it if it may."""
        return self._client._tickets.may_sample(self._size) and self.pending().has_come()


def check_generator(generator: object) -> None:
    """Raises TypeError where it is no generator, nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"expected generator as a torch.Generator, got {generator!r}")


class ShardLoader(Sampled[DataT], LoadingElsewhere[DataT]):
    """``dataloader``, and what `BufferDataset` asks for."""

    def __init__(
        self,
        settings: ClientSettings,
        members: ShardMembers,
        generator: torch.Generator | None,
        prefetch: int,
    ) -> None:
        super().__init__(settings, members, generator, prefetch)
        self._process = os.getpid()

    def _check_loader(self) -> None:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without rate_limiter: batches that a loader has asked for once "
                "more, to go on where it was, would count twice"
            )

    def _check_workers(self, method: str | None = None) -> None:
        if isinstance(self._members.supervisor, LocalSupervisor):
            raise ValueError(
                "expected shards in actors (backend='ray') for worker processes, got shards in "
                "this process; make batches without workers"
            )
        if method == "fork" or self._process != os.getpid():
            raise ValueError(
                "expected worker processes that are spawned (multiprocessing_context='spawn'): "
                "one that was forked has no connection with Ray"
            )

    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        self._check_open()
        return self._alike(generator).sample_async

    def _carried(self) -> Carried:
        self._check_open()
        return Carried.of(self._alike(None))

    # -- as a member of an ensemble -----------------------------------------------------------

    def _facts_of_member(self) -> MemberFacts:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without a rate limiter, which does not see draws of an "
                f"ensemble, got {self._tickets.keeper.limiter!r}"
            )
        sampler = self._sampler
        return MemberFacts(
            sampler=type(sampler).__name__,
            tells=frozenset(sampler.tells),
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

    def _ask_standing(self, rows: int) -> RemoteRequest:
        def standing() -> Standing:
            ready = self._draws.possible(rows)
            return Standing(len(self), ready)  # type: ignore[arg-type]

        return _Later(standing)

    def _ask_stored(self, index: torch.Tensor) -> RemoteRequest:
        return _Later(lambda: check_stored(self, index.cpu().reshape(-1)))  # type: ignore[arg-type]

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> RemoteRequest:
        return _Later(lambda: getattr(self, name)(*args, **keywords))

    def _handed_on(self) -> Any:
        self._check_open()
        return self._alike(None)

    def _alike(self, generator: torch.Generator | None) -> ShardedClient:
        """A handle that draws by the same law as this one now, and has asked for nothing yet."""
        from replaykit.sharding.sharded_buffer import ShardedClient

        settings = replace(self._settings, sampler=copy.deepcopy(self._sampler))
        return ShardedClient(settings, self._members.again(self._members.on_loss), generator)


class _Part:
    """Batches under way, each of so many rows."""

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
    """What is asked when the answer is wanted: it takes more than one message."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def result(self, timeout: float | None = None) -> Any:
        return self._ask()
