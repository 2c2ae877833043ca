"""Run shards in this process or in Ray actors, and restart dead shards."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from replaykit._ray import actor_class, ray_module, start_ray
from replaykit.distributed.host import Host
from replaykit.distributed.protocol import (
    Agreement,
    Losses,
    ShardDied,
    ShardFacts,
    ShardLoss,
    pack,
)
from replaykit.distributed.requests import Reply, fetch, running_ray
from replaykit.distributed.shard_config import ShardRecipe
from replaykit.distributed.shard_pacing import (
    MOST_CALLS,
    ActorPace,
    InSupervisor,
    RayPace,
    ShardsPace,
)
from replaykit.distributed.shard_server import ShardHolder
from replaykit.pace import RateLimiter
from replaykit.schema import Schema

_WRITES = frozenset({"extend", "update", "patch", "empty", "flush", "cut"})


class LocalShard:
    """A shard in this process. Thread-safe.

    ``call`` returns after the called method has ended.
    """

    def __init__(self, recipe: ShardRecipe, shard: int, incarnation: int) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.holder: ShardHolder | None = ShardHolder(recipe, shard, incarnation)

    def call(self, verb: str, *args: Any) -> Reply:
        """Call a method of the holder; return its answer."""
        holder = self.holder
        if holder is None:
            return Reply.done(error=ShardDied(self.shard, self.incarnation))
        try:
            answer = getattr(holder, verb)(*args)
            if verb in _WRITES:
                holder.save_if_due()
        except Exception as error:
            return Reply.done(error=error)
        return Reply.done(answer)

    def kill(self) -> None:
        """Drop the holder with all its rows, as if its process was killed."""
        self.holder = None

    def close(self) -> None:
        """End the shard; wait for its saves."""
        if self.holder is not None:
            self.holder.close()
        self.kill()


DEFAULT_SHARD_CONFIG: dict[str, Any] = {"num_cpus": 0.1, "num_gpus": 0}
"""The default resources of a shard.

The resources are small because a shard waits most of the time.
"""

_SLOW = frozenset({"begin_save", "finish_save", "prepare_load", "prepare_state", "commit_load"})
"""The methods that work on files.

The shard answers other messages meanwhile.
"""

_THREADS = {"files": 4}
"""The threads of an actor for the methods that work on files. One thread runs all others."""


class RayShard:
    """The handle of a shard in an actor. It can be pickled."""

    def __init__(self, actor: Any, shard: int, incarnation: int) -> None:
        self.actor, self.shard, self.incarnation = actor, shard, incarnation

    @classmethod
    def start(
        cls, recipe: ShardRecipe, config: dict[str, Any], shard: int, incarnation: int
    ) -> RayShard:
        """Start the actor of a shard; do not wait."""
        groups = {**_THREADS, **config.get("concurrency_groups", {})}
        actor = actor_class(Host, {**config, "concurrency_groups": groups}).remote(
            ShardHolder,
            {"recipe": recipe, "shard": shard, "incarnation": incarnation, "saves": True},
        )
        return cls(actor, shard, incarnation)

    def call(self, verb: str, *args: Any) -> Reply:
        """Send a message; do not wait."""
        method = self.actor.ask
        if verb in _SLOW:
            method = method.options(concurrency_group="files")
        return Reply(method.remote(verb, pack(args)))

    def kill(self) -> None:
        """End the actor. It may still be running, but unreachable."""
        ray_module().kill(self.actor, no_restart=True)

    close = kill


Shard: TypeAlias = LocalShard | RayShard


class Restored(NamedTuple):
    """The successor of a dead shard, with the loss."""

    shard: Any
    loss: ShardLoss


_STARTING_S = 180.0
"""Minimum seconds to wait for the start of shards.

Starting a process takes seconds, even if the process answers quickly later.
"""

_ANSWERED_WITHIN_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LOG = logging.getLogger(__name__)


class Supervisor:
    """The owner of the shards, which restarts them. Thread-safe.

    All clients share one supervisor, which also keeps the schema and the losses.

    Args:
        num_shards: number of shards.
        start: function that starts an incarnation of a shard.
        limiter: the rate limiter of all clients together.
        far: True if shards start in other processes. A shard is then restarted in the background
            when its death is reported, again and again while its machine is unavailable. Otherwise
            it is restarted when a client first asks for its successor.

    Attributes:
        pace: the counts of the rate limiter, or None without a rate limiter.
    """

    def __init__(
        self,
        num_shards: int,
        start: Callable[[int, int], Any],
        limiter: RateLimiter | None = None,
        *,
        far: bool = False,
    ) -> None:
        self._start, self._far = start, far
        self._changed = threading.Condition(threading.RLock())
        self._agreed = Agreement(0, None)
        self._losses = Losses()
        self._restarting: set[int] = set()
        self.shards = [start(shard, 0) for shard in range(num_shards)]
        facts = [reply.get() for reply in [shard.call("facts") for shard in self.shards]]
        self.pace: ShardsPace | None = None
        if limiter is not None:
            self.pace = ShardsPace(limiter, facts, self._facts if far else None)

    def learn(self, facts: Sequence[ShardFacts]) -> None:
        """Record the newest facts of shards that a client knows at its end; do not wait."""
        with self._changed:
            for each in facts:
                self._losses.report(each)

    def report(self, shard: int, incarnation: int, facts: ShardFacts | None) -> None:
        """Report the death of a shard, and its newest facts that a client knows; do not wait."""
        with self._changed:
            if facts is not None:
                self._losses.report(facts)
            if self.pace is not None:
                self.pace.died(shard, incarnation, 0 if facts is None else facts.written)
            if self._far:
                self._see_to(shard, incarnation)

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        """Return the successor of an incarnation, or None if there is none in time."""
        with self._changed:
            self._see_to(shard, incarnation)
            self._changed.wait_for(lambda: self.shards[shard].incarnation > incarnation, timeout)
            found = self.shards[shard]
            if found.incarnation <= incarnation:
                return None
            # If the successor has died or hangs, its callers will notice.
            return Restored(found, self._losses.newest(shard))

    def _see_to(self, shard: int, incarnation: int) -> None:
        """Restart a shard, unless it has a successor or a restart is under way."""
        if self.shards[shard].incarnation != incarnation or shard in self._restarting:
            return
        self._restarting.add(shard)
        if self._far:
            threading.Thread(target=self._restart, args=(shard,), daemon=True).start()
        else:
            self._restart(shard)

    def _restart(self, number: int) -> None:
        """Start the next incarnation of a shard."""
        died = old = self.shards[number]
        pause = _FIRST_PAUSE_S
        try:
            while True:
                old.kill()
                new = self._start(number, old.incarnation + 1)
                try:
                    facts = new.call("restarted", self._agreed.loads).get()
                    break
                except Exception as error:  # it died too, or cannot read its checkpoint
                    if not self._far:
                        raise
                    _LOG.warning("shard %d could not be restarted, trying again: %s", number, error)
                    time.sleep(pause)
                    old, pause = new, min(2 * pause, _LONGEST_PAUSE_S)
            with self._changed:
                self._losses.came_back(number, died.incarnation, facts)
                if self.pace is not None:
                    self.pace.came_back(facts)
                self.shards[number] = new
                self._changed.notify_all()
        finally:
            self._restarting.discard(number)

    def _facts(self) -> list[ShardFacts]:
        """Ask the shards for their facts; ignore shards that do not answer soon."""
        until = time.monotonic() + _ANSWERED_WITHIN_S
        found: list[ShardFacts] = []
        for reply in [shard.call("facts") for shard in self.shards]:
            with contextlib.suppress(Exception):
                found.append(reply.get(max(0.0, until - time.monotonic())))
        return found

    def losses(self) -> list[ShardLoss]:
        """Return all losses that clients have reported, in the order of restarts."""
        with self._changed:
            return self._losses.all()

    def agree(self, schema: Schema | None) -> Agreement:
        """Return the schema of rows; set it to ``schema`` if none is set yet."""
        with self._changed:
            if self._agreed.schema is None:
                self._agreed = self._agreed._replace(schema=schema)
            return self._agreed

    def replace(self, schema: Schema | None) -> Agreement:
        """Set the schema of rows that are being loaded, or None if they have none."""
        with self._changed:
            self._agreed = Agreement(self._agreed.loads + 1, schema)
            return self._agreed

    def close(self) -> None:
        """End all shards; calls that wait for a rate limiter here raise RuntimeError."""
        if self.pace is not None and not self._far:
            self.pace.close()
        for shard in self.shards:
            shard.close()


class SupervisorActor:
    """The actor with the supervisor of shards in other actors.

    The shards end with the actor, and the actor ends with its creator. Calls that wait run in
    threads, which the pool starts when it needs them.
    """

    def __init__(
        self, recipe: ShardRecipe, config: dict[str, Any], limiter: RateLimiter | None = None
    ) -> None:
        self._recipe, self._config, self._limiter = recipe, config, limiter
        self._threads = ThreadPoolExecutor(MOST_CALLS, "replaykit-supervisor")

    async def start(self) -> list[RayShard]:
        """Start all shards and return them."""
        start = functools.partial(RayShard.start, self._recipe, self._config)
        make = functools.partial(Supervisor, far=True)
        count = self._recipe.num_shards
        self._supervisor = await self._in_thread(make, count, start, self._limiter)
        if self._supervisor.pace is not None:
            self._desk = ActorPace(self._supervisor.pace, self._in_thread)
        return list(self._supervisor.shards)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def ask(self, name: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the supervisor or of its counts."""
        method = operator.attrgetter(name)(self._supervisor)
        if name == "restored":
            return await self._in_thread(method, *args)
        return method(*args)

    async def pace(self, name: str, args: tuple[Any, ...]) -> Any:
        """Call a method of `ActorPace`."""
        return await getattr(self._desk, name)(*args)


class RaySupervisor(InSupervisor):
    """The handle of a supervisor actor, with the methods of `Supervisor`. It can be pickled."""

    def __init__(
        self,
        actor: Any,
        shards: list[RayShard],
        timeout: float,
        limiter: RateLimiter | None = None,
    ) -> None:
        super().__init__(actor, "", timeout)
        self.shards = shards
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
        actor = actor_class(SupervisorActor, options).remote(recipe, config, limiter)
        within = max(timeout, _STARTING_S)
        try:
            shards = fetch(actor.start.remote(), within)
        except BaseException as error:
            ray.kill(actor, no_restart=True)  # its shards end with it
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise TimeoutError(
                    f"{recipe.num_shards} shards have not started within {within:g} s; each needs "
                    f"{config}: request less in remote_config=; `ray status` prints the resources"
                ) from None
            raise
        return cls(actor, shards, timeout, limiter)

    def learn(self, facts: Sequence[ShardFacts]) -> None:
        """Call ``Supervisor.learn``; do not wait."""
        running_ray()  # at the end of a program, Ray may have ended before
        self._actor.ask.remote("learn", (facts,))

    def report(self, shard: int, incarnation: int, facts: ShardFacts | None) -> None:
        """Call ``Supervisor.report``; do not wait."""
        self._actor.ask.remote("report", (shard, incarnation, facts))

    def restored(self, shard: int, incarnation: int, timeout: float) -> Restored | None:
        """Call ``Supervisor.restored``."""
        found: Restored | None = self._ask("restored", shard, incarnation, timeout, extra=timeout)
        return found

    def close(self) -> None:
        """End the shards and the supervisor.

        Ray keeps running for other users.
        """
        ray = ray_module()
        if ray.is_initialized():
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._ask("close")
            ray.kill(self._actor, no_restart=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shards": []}


AnySupervisor: TypeAlias = Supervisor | RaySupervisor
