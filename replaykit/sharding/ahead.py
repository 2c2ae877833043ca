"""Batches that shards are asked for before anybody wants them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch

from replaykit.errors import RateLimiterTimeout
from replaykit.sharding.draws import Draws, Pending
from replaykit.sharding.errors import ShardSilent

if TYPE_CHECKING:
    from replaykit.sharding.sampling import Sampled

__all__ = ["Ahead", "Asked", "ShardedResult"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Ahead:
    """Keeps ``depth`` batches of the client's own size under way, and hands them out in order.

    Shards and rows are drawn when a batch is asked for, in the order in which the batches are
    handed out: with the same masses and rows they are those that would be drawn without. A batch
    that will not be handed out gives its random numbers back, if nobody has used others since.

    ``_lock`` guards the queue and the draws; nobody waits for an answer with it.
    """

    def __init__(self, client: Sampled, draws: Draws, depth: int) -> None:
        self._client, self._draws, self.depth = client, draws, depth
        self._lock = threading.Lock()
        self._under_way: deque[Asked] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, batch_size: int) -> Pending:
        """Returns the oldest batch under way, and asks for further ones."""
        return self._take(batch_size).pending

    def _take(self, batch_size: int) -> Asked:
        self._draws.refresh(batch_size)
        with self._lock:
            # Those for which there was nothing to draw from are tried again.
            self._under_way = deque(one for one in self._under_way if one.pending.was_sent)
            while len(self._under_way) <= self.depth:
                self._under_way.append(self.asked(batch_size))
            return self._under_way.popleft()

    def next(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Waits for the oldest batch.

        One that failed may have been asked for too early: the next one is taken, at last one that
        is asked for now.

        Raises:
            ShardSilent: a shard has not answered; the batch stays under way. Otherwise what a
                batch raises that was asked for after this call.
        """
        with self._lock:
            early = set(self._under_way)
        while True:
            asked = self._take(batch_size)
            try:
                return asked.pending.get()
            except ShardSilent:
                with self._lock:
                    self._under_way.appendleft(asked)
                raise
            except Exception:
                if asked not in early:
                    raise

    def asked(self, batch_size: int) -> Asked:
        """A batch that the shards have been asked for, if their masses are known; it is not among
        those that are handed out."""
        before = self._random().get_state()
        pending = self._draws.begun(batch_size, patient=False)
        return Asked(pending, before, self._random().get_state())

    def _random(self) -> torch.Generator:
        generator = self._client.generator
        return torch.default_generator if generator is None else generator

    def state(self) -> torch.Tensor:
        """The state of the generator with which the batches that follow would be drawn again."""
        with self._lock:
            return self._under_way[0].before if self._under_way else self._random().get_state()

    def drop(self) -> None:
        """Forgets what is under way."""
        with self._lock:
            if self._under_way:
                self.undo(self._under_way[0], self._under_way[-1])
            self._under_way.clear()

    def undo(self, first: Asked, last: Asked) -> None:
        """Gives back the random numbers of batches that follow one another, if nobody has used
        others since."""
        random = self._random()
        if torch.equal(random.get_state(), last.after):
            random.set_state(first.before)


class Asked:
    """A batch under way, and the states of the generator around its draw."""

    def __init__(self, pending: Pending, before: torch.Tensor, after: torch.Tensor) -> None:
        self.pending, self.before, self.after = pending, before, after


class ShardedResult:
    """What a call will return: wait for it with ``result()``, or with ``await``. Thread-safe.

    Example:
        >>> import asyncio, torch
        >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
        >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
        ...                          batch_size=4, backend="local") as rb:
        ...     _ = rb.extend(torch.zeros(6))
        ...     ahead = rb.sample_async()
        ...     async def learn():
        ...         return await rb.sample_async()
        ...     ahead.result(), asyncio.run(learn())
        (tensor([0., 0., 0., 0.]), tensor([0., 0., 0., 0.]))
    """

    def __init__(
        self, get: Callable[[float | None, float | None], Any], come: Callable[[], bool]
    ) -> None:
        self._get, self._come = get, come
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: Exception | None = None
        self._known = False

    def done(self) -> bool:
        """Whether ``result`` would not wait, but for shards that have died meanwhile."""
        return self._known or self._come()

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Args:
            timeout: seconds to wait for a shard, and for a rate limiter; None: the ``timeout`` of
                the buffer, and for a rate limiter without end.

        Raises:
            TimeoutError: a shard has not answered, or a RateLimiterTimeout; may be asked for again.
                Otherwise whatever the call raised.
        """
        return self._result(timeout, timeout)

    def _result(self, timeout: float | None, held_up: float | None) -> Any:
        """``held_up``: seconds to wait for a rate limiter."""
        with self._lock:
            if not self._known:
                try:
                    self._value = self._get(timeout, held_up)
                except (ShardSilent, RateLimiterTimeout):
                    raise
                except Exception as error:
                    self._error = error
                self._known = True
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        """Holds no thread while a rate limiter holds it up: those of a loop are few, and what lets
        it go on may need one too."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.to_thread(self._result, None, 0.0)
            except RateLimiterTimeout:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
