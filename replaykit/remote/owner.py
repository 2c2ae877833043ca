"""A buffer in an actor of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from typing_extensions import Self

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG, start_ray
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.generic import DataT
from replaykit.errors import ActorLost
from replaykit.remote.client import RayReplayBufferClient
from replaykit.remote.host import Host
from replaykit.remote.outbox import leave_all
from replaykit.remote.replies import fetch, one_of, running_ray

__all__ = ["RayReplayBuffer"]

_SETTLING_SECONDS = 10.0
"""How long `close` waits for writes that a rate limiter holds up, since nobody may sample again."""

_ENDING_SECONDS = 10.0
"""How long `close` waits until the actor has gone."""

_STARTING_SECONDS = 60.0
"""After how long somebody looks whether the cluster has what an actor asks for at all."""

_WAITING_SAMPLERS = 64
"""Samples that may wait for rows at one time, where the buffer has a rate limiter."""


class RayReplayBuffer(RayReplayBufferClient[DataT]):
    """Starts a buffer in a Ray actor, and owns the actor.

    Has every method and property of the buffer, and those of `RayReplayBufferClient`; ``client()``
    gives handles to others. ``with RayReplayBuffer(...) as rb:`` closes it at the end.

    Args:
        replay_buffer_cls: class of the buffer; data sets and ensembles too.
        ray_init_config: options of ``ray.init``, which is called if Ray is not running yet. Ray
            then goes on running until the program ends, or ``ray.shutdown()``.
        remote_config: options of the actor, as for ``ray.remote``; one CPU and no GPU by default.
        delayed_init: have the buffer make its components at its first use.
        kwargs: arguments of the buffer. They are pickled: storage, sampler and writer best go as
            functions that make them, transforms as ``transform_factory``.

    Raises:
        RuntimeError: ray is not installed. ValueError: a class that makes a rate limiter itself.
            TimeoutError: the actor asks for more than the whole cluster has, which in a minute has
            not grown; one that only waits for others is waited for. Otherwise what the buffer's own
            constructor raises.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, RayReplayBuffer
        >>> def collect_and_learn():  # starts Ray where it is not running
        ...     with RayReplayBuffer(storage=lambda: LazyTensorStorage(1000), batch_size=32) as rb:
        ...         rb.extend(TensorDict({"x": torch.arange(100)}, [100]))
        ...         for_learners = rb.client(prefetch=4)
        ...         for_actors = rb.client(write_rows=64)
        ...         return for_learners.sample()
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: type = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        delayed_init: bool = False,
        **kwargs: Any,
    ) -> None:
        self._actor = None
        ray = start_ray(ray_init_config)
        options = dict(DEFAULT_REMOTE_CLASS_CONFIG if remote_config is None else remote_config)
        devices = bool(options.get("num_gpus"))
        paced = kwargs.get("rate_limiter") is not None
        if paced:
            # One thread for all writes keeps their order; samples wait beside each other.
            # So does one for iteration: the end of a pass is told after its last batch.
            groups = {"writing": 1, "stepping": 1, "sampling": _WAITING_SAMPLERS}
            options["concurrency_groups"] = {**groups, **options.get("concurrency_groups", {})}
        if delayed_init:
            kwargs["delayed_init"] = True
        host = ray.remote(**options)(Host) if options else ray.remote(Host)
        actor = host.remote(replay_buffer_cls, kwargs, devices=devices)
        try:
            if _ready(actor, options) and not paced:
                raise ValueError(
                    f"expected rate_limiter= of {type(self).__name__}, found a limiter that "
                    f"{replay_buffer_cls.__name__} makes itself: who waits would hold up all others"
                )
        except BaseException:
            _end(actor)
            raise
        super().__init__(actor, replay_buffer_cls, devices=devices, paced=paced)
        self._closing = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RayReplayBuffer stays where it is; hand out its client()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(
        self, *, prefetch: int = 0, write_rows: int = 0, write_seconds: float = 0.05
    ) -> RayReplayBufferClient[DataT]:
        """Returns a handle that can be pickled, and does not end the actor.

        Args:
            prefetch: samples under way before they are asked for, at most: small ones go together,
                two at a time from 4 on, four from 8 on. Batches may predate later writes and
                priorities by at most that many. ``empty``, loads and exchanged components give up
                what the handle that calls them has under way; other handles are still given theirs,
                of the rows from before.
            write_rows: writes of fewer rows go together, up to this many; ``add`` and ``extend``
                then do not wait and return what ``add_async`` returns. Every call of the handle
                that is no write sends them first.
            write_seconds: how long a row may be kept at most.

        Raises:
            ValueError: a negative number, or ``prefetch`` with a sampler that uses rows up.
            RuntimeError: the buffer was closed.

        Cost: none; with ``prefetch`` one round trip.
        """
        return RayReplayBufferClient(
            self._live(),
            self._cls,
            devices=self._devices,
            paced=self._paced,
            prefetch=prefetch,
            write_rows=write_rows,
            write_seconds=write_seconds,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the actor is there: not closed, and not died."""
        actor = self._actor
        try:
            if actor is None:
                return False
            ray = running_ray()
            ref = actor.ready.remote()
            ready, _ = ray.wait([ref], timeout=1.0)
            if ready:
                fetch(ref)
        except ActorLost:
            return False
        return True  # or busy

    def close(self) -> None:
        """Ends the actor, once all that this process's handles have written is stored.

        What handles in other processes have under way is lost; they get ActorLost. Ray goes on
        running. Later calls raise RuntimeError; closing again does nothing. The actor's process
        takes a moment to end, until which files that it recovers are in use.

        Raises:
            Exception: what a write has raised whose result nobody has asked for, ActorLost too; of
                several the first, with the others in its text. The actor has ended then as well.
                RuntimeError: so has it where writes are lost that a rate limiter still held up
                after 10 seconds.
        """
        with self._closing:
            if self._actor is None:
                return
            actor = self._actor
            failed: list[Exception] = []
            try:
                until = time.monotonic() + _SETTLING_SECONDS if self._paced else None
                failed, unanswered = leave_all(until, actor)
                if unanswered:
                    failed.append(
                        RuntimeError(
                            "writes still had to wait for samples when the buffer was closed: they "
                            "are lost"
                        )
                    )
            finally:
                self._actor = None
                self._drop_ahead()
                _end(actor)
        if failed:
            raise one_of(failed)

    def shutdown(self) -> None:
        """The same as ``close``."""
        self.close()


def _ready(actor: Any, options: Mapping[str, Any]) -> Any:
    """What the buffer's ``ready`` returns, once it is made, which may take long.

    Raises:
        TimeoutError: the cluster has not what the actor asks for, so that it cannot start.
    """
    ref = actor.ready.remote()
    ready, _ = running_ray().wait([ref], timeout=_STARTING_SECONDS)
    if not ready:
        asked = {
            **options.get("resources", {}),
            **{
                name: options[option]
                for option, name in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory"))
                if options.get(option)
            },
        }
        there = running_ray().cluster_resources()
        lacking = {name: there.get(name, 0) for name in asked if there.get(name, 0) < asked[name]}
        if lacking:
            raise TimeoutError(
                f"the actor has not started within {_STARTING_SECONDS:g} s: it asks for {asked}, "
                f"and of these the whole cluster has {lacking}; remote_config= changes what it "
                "asks for"
            )
    return fetch(ref)


def _end(actor: Any) -> None:
    """Kills an actor and waits until nobody is answered any more."""
    with contextlib.suppress(ActorLost):
        running_ray().kill(actor, no_restart=True)
        until = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < until:
            try:
                fetch(actor.ready.remote(), timeout=1.0)
            except ActorLost:
                return
            except Exception:  # it is busy, or says why it is of no use
                pass
            time.sleep(0.01)
