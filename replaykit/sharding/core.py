"""The sharded buffer: it makes the shards, and ends them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from replaykit.buffer.core import checked_batch_size
from replaykit.buffer.generic import DataT
from replaykit.buffer.pacing import checked_limiter
from replaykit.errors import RateLimiterTimeout
from replaykit.keywords import checked_keywords
from replaykit.pace import RateLimiter
from replaykit.remote.client import checked_count
from replaykit.samplers import RandomSampler, Sampler
from replaykit.sharding.client import ShardedClient
from replaykit.sharding.facts import ShardLoss
from replaykit.sharding.laws import law_of
from replaykit.sharding.membership import Members, check_on_loss
from replaykit.sharding.recipe import ShardRecipe
from replaykit.sharding.routed import ClientSettings
from replaykit.sharding.sampling import check_generator
from replaykit.sharding.shards import LocalSupervisor

__all__ = ["ShardedReplayBuffer"]

_SETTLING_S = 10.0
"""How long writes that a rate limiter holds up are waited for at the end."""


class ShardedReplayBuffer(ShardedClient[DataT]):
    """One buffer whose rows lie in several processes or machines.

    A batch is one of a single buffer with all the rows: the same probabilities, the same weights.
    What a shard is: a ``ReplayBuffer`` in a Ray actor, made of the factories. A shard that dies is
    restarted, and reads the checkpoint that it has last made of itself; sampling goes on from the
    others meanwhile, and what is lost is counted. See ``docs/sharding.md``.

    Args:
        num_shards: how many.
        storage: makes the storage of a shard, a tensor or memmap storage with ``ndim=1``; its
            ``max_size`` is that of one shard.
        sampler: makes the sampler of a shard: RandomSampler, SliceSampler, PrioritizedSampler or
            PrioritizedSliceSampler, with independent draws. None: RandomSampler.
        writer: makes the writer of a shard; one that keeps the order.
        batch_size: default number of rows of a sample.
        shard_key: column of integers; rows with the same value go to the same shard, and episodes
            that it names stay whole. None: rows are dealt out in turn. Needed with slices, and with
            transforms that read the rows around, hold rows back or follow what is written.
        transform_factory: makes the transform of a shard; each has its own state.
        priority_key: where written data and learners put priorities.
        generator: where the randomness of this client's draws comes from.
        checkpoint_dir: where each shard saves itself, on a file system that all machines see (or
            on the shard's, if it always restarts there). None: a shard that dies comes back empty.
        checkpoint_interval: seconds between two such saves.
        on_loss: called with a ``ShardLoss`` when a shard is back; None: a ShardLossWarning.
        max_age: seconds for which a shard's mass is drawn by without being asked for anew. What
            this client does itself it always knows; 0: it asks before every draw.
        timeout: seconds to wait for an answer, or for a shard to come back; at the beginning for
            all shards to start, and then at least a minute.
        backend: ``"ray"``: an actor each. ``"local"``: all in this process, without Ray.
        remote_config: options of the actors; what they leave out is a tenth of a CPU, and no GPU,
            each.
        prefetch: how many batches of the default size the shards are asked for ahead, while the
            learner works: a sample then takes the oldest, and sends a request for another. The same
            draws as without, each of what the shards held when it was asked for, so at most that
            many calls ago: writes and updates in between act on later ones. ``empty``, ``loads``
            and ``set_rng`` drop what is under way. 0: none.
        rate_limiter: which of writing and sampling waits so that neither gets ahead of the other by
            more than it allows; rows written and sampled by all clients count together. See
            ``RateLimiter`` and ``docs/pace.md``.
        ray_init_config: options of ``ray.init``, which is called if Ray is not running yet. Ray
            then goes on running until the program ends, or ``ray.shutdown()``.

    Raises:
        TypeError: an argument of another kind. ValueError: numbers out of range, parts that do not
            divide among shards.
        RuntimeError: ray is not installed. TimeoutError: the shards have not started, as where the
            cluster has no room for them. FileExistsError: another buffer's shards are in
            ``checkpoint_dir``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer, SliceSampler
        >>> with ShardedReplayBuffer(
        ...     num_shards=3, storage=lambda: LazyTensorStorage(100), batch_size=8,
        ...     sampler=lambda: SliceSampler(slice_len=4), shard_key="episode", backend="local",
        ... ) as rb:
        ...     episode = torch.arange(40) // 10
        ...     _ = rb.extend(TensorDict({"episode": episode, "t": torch.arange(40)}, [40]))
        ...     batch = rb.sample().reshape(2, 4)
        >>> bool((batch["t"].diff(dim=1) == 1).all()), bool((batch["episode"].diff() == 0).all())
        (True, True)
    """

    @checked_keywords
    def __init__(
        self,
        *,
        num_shards: int,
        storage: Callable[[], Any],
        sampler: Callable[[], Sampler] | None = None,
        writer: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        shard_key: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        priority_key: Any = "td_error",
        generator: torch.Generator | None = None,
        checkpoint_dir: Any = None,
        checkpoint_interval: float = 60.0,
        on_loss: Callable[[ShardLoss], None] | None = None,
        max_age: float = 1.0,
        timeout: float = 60.0,
        prefetch: int = 0,
        rate_limiter: RateLimiter | None = None,
        backend: str = "ray",
        remote_config: dict[str, Any] | None = None,
        ray_init_config: dict[str, Any] | None = None,
    ) -> None:
        self._closed = True
        if type(num_shards) is not int:
            raise TypeError(f"expected num_shards as an int, got {num_shards!r}")
        if num_shards < 1:
            raise ValueError(f"expected num_shards of at least 1, got {num_shards}")
        if backend not in ("ray", "local"):
            raise ValueError(f"expected backend as 'ray' or 'local', got {backend!r}")
        factories = (storage, sampler, writer, transform_factory)
        names = ("storage", "sampler", "writer", "transform_factory")
        for name, factory in zip(names, factories, strict=True):
            if (factory is not None and not callable(factory)) or (factory is None is storage):
                raise TypeError(
                    f"expected {name} as a function that makes one for each shard, got {factory!r}"
                )
        for name, seconds in (
            ("checkpoint_interval", checkpoint_interval),
            ("max_age", max_age),
            ("timeout", timeout),
        ):
            if not seconds >= 0:
                raise ValueError(f"expected {name} of at least 0 seconds, got {seconds}")
        prefetch = checked_count("prefetch", prefetch)
        batch_size = None if batch_size is None else checked_batch_size(batch_size)
        check_generator(generator)
        check_on_loss(on_loss)
        limiter = checked_limiter(rate_limiter)
        like = RandomSampler() if sampler is None else sampler()
        law = law_of(like)
        recipe = ShardRecipe(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform_factory=transform_factory,
            priority_key=priority_key,
            checkpoint_dir=None if checkpoint_dir is None else str(checkpoint_dir),
            checkpoint_interval=float(checkpoint_interval),
            num_shards=num_shards,
            shard_key=shard_key,
            terms=law.terms(batch_size),
            timeout=float(timeout),
        )
        trial = recipe.make()  # refuses what does not go together before any actor is started
        tracked = trial.writer.tracks_generations
        capacity = num_shards * trial.storage.max_size
        trial.shutdown()
        if limiter is not None:
            limiter.check_capacity(capacity)
        settings = ClientSettings(
            num_shards=num_shards,
            sampler=copy.deepcopy(like),
            batch_size=batch_size,
            shard_key=shard_key,
            priority_key=priority_key,
            max_age=float(max_age),
            timeout=float(timeout),
            transformed=transform_factory is not None,
            tracked=tracked,
        )
        self._host = _host(backend, recipe, remote_config, ray_init_config, timeout, limiter)
        try:
            members = Members(self._host.members(), self._host, on_loss, float(timeout))
            super().__init__(settings, members, generator, prefetch)
        except BaseException:
            self._host.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it has not been closed."""
        return not self._closed

    def close(self) -> None:
        """Ends all shards, after writes that are under way; their rows are gone, checkpoints stay.
        May be called again.

        Raises:
            Exception: what a write has raised whose result nobody has asked for. RuntimeError:
                writes are lost that a rate limiter still held up after 10 seconds.
        """
        if not self._closed:
            self._closed = True
            paced = self._tickets.keeper is not None
            try:
                self._outbox.settle(time.monotonic() + _SETTLING_S if paced else None)
            except RateLimiterTimeout:
                raise RuntimeError(
                    "writes still had to wait for samples when the buffer was closed: they are lost"
                ) from None
            finally:
                self._host.close()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "expected a client of the sharded buffer for other processes, got the buffer, which "
            "ends the shards: send buffer.client()"
        )


def _host(
    backend: str,
    recipe: ShardRecipe,
    remote: Any,
    init: Any,
    timeout: float,
    limiter: RateLimiter | None,
) -> Any:
    if backend == "local":
        return LocalSupervisor(recipe, limiter)
    from replaykit.sharding.actors import RaySupervisor

    return RaySupervisor.start(recipe, remote, init, timeout, limiter)
