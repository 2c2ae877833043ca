"""Shards as clients see them: messages sent at once, answers taken later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from replaykit.pace import RateLimiter
from replaykit.sharding.errors import ShardDied
from replaykit.sharding.facts import ShardLoss
from replaykit.sharding.holder import ShardHolder
from replaykit.sharding.losses import Losses
from replaykit.sharding.pacing import LocalPace, PaceKeeper
from replaykit.sharding.recipe import ShardRecipe
from replaykit.structure import Node

__all__ = ["LocalShard", "LocalSupervisor", "Reply", "Restored", "Shard", "Supervisor"]

WRITES = frozenset({"extend", "update", "patch", "empty", "flush", "cut"})
"""What waits while all shards are saved; the first argument is the stamp."""


class Reply(Protocol):
    """An answer that may not be there yet."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer.

        Raises:
            ShardDied: there will be none. ShardSilent: not yet. What the shard raised.
        """

    def is_there(self) -> bool:
        """Whether ``result`` would not wait."""


class Shard(Protocol):
    """A ``ShardHolder`` somewhere."""

    def call(self, verb: str, *args: Any) -> Reply:
        """Asks for a method of the holder; does not wait for what is elsewhere."""


class Restored(NamedTuple):
    """A shard that has taken the place of one that died, and what was lost."""

    shard: Shard
    incarnation: int
    loss: ShardLoss


class Supervisor(Protocol):
    """Who restarts shards; one for all clients."""

    @property
    def pace(self) -> PaceKeeper | None:
        """Who counts for the rate limiter; None without one."""

    def report(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        """Told that a shard has died, and how many rows it is known to have had written, and how
        many stored; does not wait."""

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        """What has taken the place of that incarnation; None where nothing has after so long."""

    def losses(self) -> list[ShardLoss]:
        """All that was lost, in the order of the restarts, by what clients have told until now."""

    def agree(self, root: Node | None) -> Node | None:
        """How rows look: as the first client said; None where none has. With None: only asks."""

    def replace(self, root: Node | None) -> None:
        """Rows look like this from now on."""


class _Done:
    """An answer that is there."""

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error

    def is_there(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class LocalShard:
    """A shard in this process; calls are over when they return. Thread-safe."""

    def __init__(self, make: Callable[[], ShardHolder], shard: int, incarnation: int) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.holder: ShardHolder | None = make()
        self._changed = threading.Condition()

    def call(self, verb: str, *args: Any) -> Reply:
        holder = self.holder
        if holder is None:
            return _Done(None, ShardDied(self.shard, self.incarnation))
        try:
            answer = self._admitted(holder, verb, args)
            if verb not in WRITES:
                with self._changed:
                    self._changed.notify_all()
            else:
                holder.save_if_due()
        except Exception as error:
            return _Done(None, error)
        return _Done(answer, None)

    def _admitted(self, holder: ShardHolder, verb: str, args: tuple[Any, ...]) -> Any:
        method = getattr(holder, verb)
        while verb in WRITES:
            with holder.buffer._locked():
                if holder.admits(args[0]):
                    return method(*args)
            with self._changed:
                self._changed.wait(0.01)
        return method(*args)

    def kill(self) -> None:
        """Loses everything at once, as a process that is killed does."""
        self.holder = None


class LocalSupervisor:
    """Restarts shards of this process, when their successors are first asked for. Thread-safe."""

    def __init__(self, recipe: ShardRecipe, limiter: RateLimiter | None = None) -> None:
        self._recipe = recipe
        self._lock = threading.RLock()
        self._root: Node | None = None
        self._losses = Losses()
        self.shards = [self._made(shard, 0) for shard in range(recipe.num_shards)]
        self.pace: LocalPace | None = None
        if limiter is not None:
            facts = [shard.call("facts").result() for shard in self.shards]
            self.pace = LocalPace(limiter, facts)

    def _made(self, shard: int, incarnation: int) -> LocalShard:
        return LocalShard(lambda: ShardHolder(self._recipe, shard, incarnation), shard, incarnation)

    def report(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        with self._lock:
            self._losses.died(shard, incarnation, written, rows)
            if self.pace is not None:
                self.pace.died(shard, incarnation, written)

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        with self._lock:
            current = self.shards[shard]
            if current.incarnation == incarnation:
                current = self.shards[shard] = self._made(shard, incarnation + 1)
                facts = current.call("facts").result()
                self._losses.came_back(shard, incarnation, facts)
                if self.pace is not None:
                    self.pace.came_back(shard, incarnation + 1, facts)
            return Restored(current, current.incarnation, self._losses.newest(shard))

    def losses(self) -> list[ShardLoss]:
        with self._lock:
            return self._losses.all()

    def agree(self, root: Node | None) -> Node | None:
        with self._lock:
            if self._root is None:
                self._root = root
            return self._root

    def replace(self, root: Node | None) -> None:
        with self._lock:
            self._root = root

    def members(self) -> list[tuple[Shard, int]]:
        """The shards, and which incarnation of each."""
        return [(shard, shard.incarnation) for shard in self.shards]

    def close(self) -> None:
        """Ends all shards; who waits for a rate limiter gets a RuntimeError."""
        if self.pace is not None:
            self.pace.close()
        for shard in self.shards:
            if shard.holder is not None:
                shard.holder.close()
                shard.kill()
