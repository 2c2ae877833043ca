"""Run shards in this process or in Ray actors, and restart dead shards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from replaykit._ray import actor_class, start_ray
from replaykit.pace import RateLimiter
from replaykit.sharding.protocol import (
    Losses,
    ShardDied,
    ShardFacts,
    ShardLoss,
    ShardSilent,
    decoded,
    encoded,
)
from replaykit.sharding.shard_config import ShardRecipe
from replaykit.sharding.shard_pacing import (
    MOST_CALLS,
    LocalPace,
    Paced,
    PaceKeeper,
    RayPace,
    answer_of,
)
from replaykit.sharding.shard_server import ShardHolder
from replaykit.structure import Node

__all__ = [
    "LocalShard",
    "LocalSupervisor",
    "RayShard",
    "RaySupervisor",
    "Restored",
    "Shard",
    "ShardReply",
    "Supervisor",
]

WRITES = frozenset({"extend", "update", "patch", "empty", "flush", "cut"})
"""The methods that wait while shards are frozen.

The first argument of these methods is the `Stamp` of the write.
"""


class ShardReply(Protocol):
    """An answer that may not have arrived yet."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it.

        Raises:
            ShardDied: the shard has died.
            ShardSilent: the shard has not answered in time.
            Errors of the shard are raised as well.
        """

    def is_there(self) -> bool:
        """Return whether ``result`` would return without waiting."""


class Shard(Protocol):
    """A ``ShardHolder`` in this or another process."""

    def call(self, verb: str, *args: Any) -> ShardReply:
        """Call a method of the holder; if the holder is remote, do not wait."""


class Restored(NamedTuple):
    """The successor of a dead shard, with the loss."""

    shard: Shard
    incarnation: int
    loss: ShardLoss


class Supervisor(Protocol):
    """The object that restarts shards.

    All clients share one supervisor.
    """

    @property
    def pace(self) -> PaceKeeper | None:
        """The counts of the rate limiter, or None without a rate limiter."""

    def report(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        """Report the death of a shard; do not wait.

        ``written`` and ``rows`` are the counts of rows written and stored, as far as the client
        knows.
        """

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        """Return the successor of an incarnation, or None if there is none in time."""

    def losses(self) -> list[ShardLoss]:
        """Return all losses that clients have reported, in the order of restarts."""

    def agree(self, root: Node | None) -> Node | None:
        """Return the schema of rows, or None if it is not set yet.

        ``root``: the schema to set if none is set yet, or None to set nothing.
        """

    def replace(self, root: Node | None) -> None:
        """Set another schema of rows, or None for an unknown schema."""


class _Done:
    """An answer that has arrived."""

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error

    def is_there(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class LocalShard:
    """A shard in this process. Thread-safe.

    ``call`` returns after the called method has ended.
    """

    def __init__(self, make: Callable[[], ShardHolder], shard: int, incarnation: int) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.holder: ShardHolder | None = make()
        self._changed = threading.Condition()

    def call(self, verb: str, *args: Any) -> ShardReply:
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
        """Drop the holder with all its rows, as if its process was killed."""
        self.holder = None


class LocalSupervisor:
    """The supervisor of shards in this process. Thread-safe.

    A shard is restarted when a client first asks for its successor.
    """

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
        """Return the shards, each with its incarnation."""
        return [(shard, shard.incarnation) for shard in self.shards]

    def close(self) -> None:
        """End all shards; calls that wait for a rate limiter raise RuntimeError."""
        if self.pace is not None:
            self.pace.close()
        for shard in self.shards:
            if shard.holder is not None:
                shard.holder.close()
                shard.kill()


DEFAULT_SHARD_CONFIG: dict[str, Any] = {"num_cpus": 0.1, "num_gpus": 0}
"""The default resources of a shard.

The resources are small because a shard waits most of the time.
"""

_SLOW = frozenset({"begin_save", "finish_save", "prepare_load", "prepare_state", "commit_load"})
"""The methods that work on files.

The shard answers other messages meanwhile.
"""

_STARTING_S = 180.0
"""Minimum seconds to wait for the start of shards.

Starting a process takes seconds, even if the process answers quickly later.
"""

_POLL_S = 0.005
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LOG = logging.getLogger(__name__)


class _ShardActor:
    """A holder in a separate process.

    Its event loop handles one message after the other, except for messages that work on files. If
    the holder cannot be constructed, the answer to every message is that error. So the error keeps
    its type.
    """

    def __init__(self, recipe: ShardRecipe, shard: int, incarnation: int) -> None:
        self._failure: Exception | None = None
        self._saver: Any = None
        try:
            self._holder = ShardHolder(recipe, shard, incarnation)
        except Exception as error:
            self._failure = error

    async def call(self, verb: str, args: Any) -> tuple[bool, Any]:
        """Run a method of the holder.

        Returns:
            True and the answer, or False and an error.
        """
        if self._failure is not None:
            return False, self._failure
        try:
            return True, encoded(await self._answer(verb, decoded(args, own=True)))
        except Exception as error:
            return False, error

    async def _answer(self, verb: str, args: tuple[Any, ...]) -> Any:
        if self._saver is None and self._holder.recipe.checkpoint_dir is not None:
            self._saver = asyncio.create_task(self._save_again_and_again())
        method = getattr(self._holder, verb)
        if verb in WRITES:
            while not self._holder.admits(args[0]):
                await asyncio.sleep(_POLL_S)
        elif verb in _SLOW:
            return await asyncio.to_thread(method, *args)
        return method(*args)

    async def _save_again_and_again(self) -> None:
        pause = max(0.01, min(1.0, self._holder.recipe.checkpoint_interval / 4))
        while True:
            await asyncio.sleep(pause)
            await asyncio.to_thread(self._holder.save_if_due)


class _RayReply:
    """The answer of an actor."""

    def __init__(self, ref: Any, shard: int, incarnation: int) -> None:
        self._ref, self._shard, self._incarnation = ref, shard, incarnation

    def is_there(self) -> bool:
        import ray

        return bool(ray.wait([self._ref], timeout=0, fetch_local=False)[0])

    def result(self, timeout: float | None = None) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

        within = None if timeout is None or timeout == float("inf") else timeout
        try:
            went_well, value = ray.get(self._ref, timeout=within)
        except (RayActorError, ObjectLostError):
            raise ShardDied(self._shard, self._incarnation) from None
        except GetTimeoutError:
            text = f"shard {self._shard} has not answered within {timeout:g} s"
            raise ShardSilent(text) from None
        if not went_well:
            raise value
        return decoded(value)


class RayShard:
    """The handle of a shard in an actor. It can be pickled."""

    def __init__(self, actor: Any, shard: int, incarnation: int) -> None:
        self.actor, self.shard, self.incarnation = actor, shard, incarnation

    def call(self, verb: str, *args: Any) -> ShardReply:
        """Send a message; do not wait."""
        ref = self.actor.call.remote(verb, encoded(args))
        return _RayReply(ref, self.shard, self.incarnation)


class _SupervisorActor(Paced):
    """The owner of the shards.

    The shards end with the supervisor, and the supervisor ends with its creator.
    """

    def __init__(
        self, recipe: ShardRecipe, config: dict[str, Any], limiter: RateLimiter | None = None
    ) -> None:
        self._recipe, self._config, self._limiter = recipe, config, limiter
        self._losses = Losses()
        self._root: Node | None = None
        self._shards: list[RayShard] = []
        self._restarts: dict[int, Any] = {}

    async def start(self) -> tuple[bool, Any]:
        """Start all shards; return True and the shards, or False and an error."""
        try:
            self._shards = [self._made(shard, 0) for shard in range(self._recipe.num_shards)]
            facts = await asyncio.gather(*(self._facts(shard) for shard in self._shards))
            if self._limiter is not None:
                self._begin_pace(self._limiter, facts)
        except Exception as error:
            return False, error
        return True, self._shards

    def _made(self, shard: int, incarnation: int) -> RayShard:
        actor = actor_class(_ShardActor, self._config).remote(self._recipe, shard, incarnation)
        return RayShard(actor, shard, incarnation)

    async def _facts(self, shard: RayShard) -> ShardFacts:
        went_well, value = await shard.actor.call.remote("facts", encoded(()))
        if not went_well:
            raise value
        found: ShardFacts = decoded(value)
        return found

    async def report(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        """Record the death of a shard, and restart it."""
        self._losses.died(shard, incarnation, written, rows)
        self._pace_died(shard, incarnation, written)
        self._see_to(shard, incarnation)

    def _see_to(self, shard: int, incarnation: int) -> None:
        """Restart a shard, unless it has a successor or a restart is under way."""
        if self._shards[shard].incarnation == incarnation and shard not in self._restarts:
            self._restarts[shard] = asyncio.create_task(self._restart(shard))

    async def _restart(self, number: int) -> None:
        """Start the next incarnation of a shard; retry while its machine is unavailable."""
        import ray

        died = old = self._shards[number]
        pause = _FIRST_PAUSE_S
        try:
            while True:
                ray.kill(old.actor, no_restart=True)  # it may still be running, but unreachable
                new = self._made(number, old.incarnation + 1)
                try:
                    facts = await self._facts(new)
                    break
                except Exception as error:  # it died too, or cannot read its checkpoint
                    _LOG.warning("shard %d could not be restarted, trying again: %s", number, error)
                    await asyncio.sleep(pause)
                    old, pause = new, min(2 * pause, _LONGEST_PAUSE_S)
            self._losses.came_back(number, died.incarnation, facts)
            self._pace_came_back(number, new.incarnation, facts)
            self._shards[number] = new
        finally:
            del self._restarts[number]

    async def restored(self, shard: int, incarnation: int, timeout: float) -> Any:
        """Return the successor of an incarnation, or None if there is none in time."""
        for again in range(2):
            found = self._shards[shard]
            if found.incarnation > incarnation:
                # If the successor has died or hangs, its callers will notice.
                return Restored(found, found.incarnation, self._losses.newest(shard))
            self._see_to(shard, incarnation)
            if not again:
                await asyncio.wait([self._restarts[shard]], timeout=timeout)
        return None

    async def losses(self) -> list[ShardLoss]:
        """Return all losses."""
        return self._losses.all()

    async def agree(self, root: Node | None) -> Node | None:
        """Return the schema of rows, which the first call with a schema sets."""
        if self._root is None:
            self._root = root
        return self._root

    async def replace(self, root: Node | None) -> None:
        """Set another schema of rows, or None for an unknown schema."""
        self._root = root

    async def close(self) -> None:
        """End all shards."""
        import ray

        for task in self._restarts.values():
            task.cancel()
        for shard in self._shards:
            ray.kill(shard.actor, no_restart=True)


class RaySupervisor:
    """The handle of a supervisor actor. It can be pickled."""

    def __init__(
        self,
        actor: Any,
        shards: list[RayShard],
        timeout: float,
        limiter: RateLimiter | None = None,
    ) -> None:
        self._actor, self._shards, self._timeout = actor, shards, timeout
        self.pace = None if limiter is None else RayPace(actor, limiter, timeout)

    @classmethod
    def start(
        cls,
        recipe: ShardRecipe,
        remote_config: dict[str, Any] | None,
        ray_init_config: dict[str, Any] | None,
        timeout: float,
        limiter: RateLimiter | None = None,
    ) -> RaySupervisor:
        """Start the supervisor and the shards, and Ray if it is not running.

        Raises:
            RuntimeError: ray is not installed.
            TimeoutError: the shards have not started, for example because the cluster has too few
                resources.
            Errors in the construction of a shard are raised as well.
        """
        ray = start_ray(ray_init_config)
        config = {**DEFAULT_SHARD_CONFIG, **(remote_config or {})}
        options = {"num_cpus": 0, "max_concurrency": MOST_CALLS}
        actor = actor_class(_SupervisorActor, options).remote(recipe, config, limiter)
        try:
            within = max(timeout, _STARTING_S)
            try:
                went_well, shards = ray.get(actor.start.remote(), timeout=within)
            except TimeoutError:
                raise TimeoutError(
                    f"{recipe.num_shards} shards have not started within {within:g} s; each needs "
                    f"{config}: request less in remote_config=; `ray status` prints the resources"
                ) from None
            if not went_well:
                raise shards
        except BaseException:
            ray.kill(actor, no_restart=True)  # its shards end with it
            raise
        return cls(actor, shards, timeout, limiter)

    def members(self) -> list[tuple[Shard, int]]:
        """Return the shards, each with its incarnation."""
        return [(shard, shard.incarnation) for shard in self._shards]

    def report(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        self._actor.report.remote(shard, incarnation, written, rows)

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        asked = self._actor.restored, shard, incarnation, timeout
        found: Restored | None = self._ask(*asked, extra=timeout)
        return found

    def losses(self) -> list[ShardLoss]:
        found: list[ShardLoss] = self._ask(self._actor.losses)
        return found

    def agree(self, root: Node | None) -> Node | None:
        found: Node | None = self._ask(self._actor.agree, root)
        return found

    def replace(self, root: Node | None) -> None:
        self._ask(self._actor.replace, root)

    def _ask(self, method: Any, *args: Any, extra: float = 0.0) -> Any:
        """Call a method of the supervisor.

        The supervisor may wait ``extra`` seconds before it answers.
        """
        return answer_of(method.remote(*args), self._timeout + extra)

    def close(self) -> None:
        """End the shards and the supervisor.

        Ray keeps running for other users.
        """
        import ray

        if ray.is_initialized():
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._ask(self._actor.close)
            ray.kill(self._actor, no_restart=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": []}
