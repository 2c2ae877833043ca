"""Define `ShardedReplayBuffer`, which makes and ends the shards of one buffer."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from replaykit.buffer.components import DataT, check_generator, checked_limiter
from replaykit.buffer.draw import checked_batch_size
from replaykit.declared import Count, read_value
from replaykit.distributed.members import ShardMembers, check_on_loss
from replaykit.distributed.protocol import ShardLoss
from replaykit.distributed.shard_config import ClientSettings, ShardRecipe, law_of
from replaykit.distributed.sharded_client import ShardedClient
from replaykit.distributed.shards import LocalShard, RaySupervisor, Supervisor
from replaykit.distributed.write_queue import SETTLING_S, check_left
from replaykit.keywords import checked_keywords, one_of, whole_number
from replaykit.pace import RateLimiter
from replaykit.samplers import RandomSampler, Sampler


class ShardedReplayBuffer(ShardedClient[DataT]):
    """A replay buffer whose rows are in several processes or on several machines.

    Batches have the same probabilities and weights as batches of a single buffer with all the rows.
    Each shard is a ``ReplayBuffer`` in a Ray actor. The given functions make its parts. If a shard
    dies, it is restarted and loads its latest checkpoint. Meanwhile, samples come from the other
    shards. Lost rows are counted. See ``docs/sharding.md``.

    Args:
        num_shards: number of shards.
        storage: function that returns the storage of a shard, a tensor or memmap storage with
            ``ndim=1``. Its ``max_size`` is the capacity of one shard.
        sampler: function that returns the sampler of a shard, a RandomSampler, SliceSampler,
            PrioritizedSampler or PrioritizedSliceSampler with independent draws. None uses
            RandomSampler.
        writer: function that returns the writer of a shard. The writer must store rows in write
            order.
        batch_size: default number of rows in a batch.
        shard_key: key of an integer column. Rows with the same value go to the same shard, so that
            episodes with this value stay whole. With None, rows go to the shards in turn. A key is
            required for slices. It is also required for transforms that read neighbouring rows,
            hold rows back or follow writes.
        transform_factory: function that returns the transform of a shard. Each shard's transform
            has a separate state.
        priority_key: key of the priorities in written data and in samples.
        generator: the random generator of this client's draws.
        checkpoint_dir: directory of the shards' own checkpoints. It must be on a file system that
            all machines share, or on the machine where the shard always restarts. With None, a
            restarted shard is empty.
        checkpoint_interval: seconds between two saves of a shard.
        on_loss: function called with a ``ShardLoss`` after the restart of a shard. None shows a
            ShardLossWarning instead.
        max_age: seconds for which a client uses a known mass of a shard. Changes that the client
            itself makes are known at once. With 0 it requests the masses before every draw.
        timeout: seconds to wait for an answer, or for the restart of a shard. The constructor waits
            this long for the start of all shards, but at least three minutes.
        backend: ``"ray"`` for one actor per shard, or ``"local"`` for all shards in this process,
            without Ray.
        remote_config: options of the actors. By default, each actor gets a tenth of a CPU and no
            GPU.
        prefetch: number of batches of the default size to request ahead, while the learner works. A
            sample returns the oldest batch and requests another one. Draws are the same as without
            prefetching, but may use rows and priorities from up to that many calls ago. ``empty``,
            ``loads`` and ``set_rng`` drop batches under way. With 0, no batch is requested ahead.
        rate_limiter: limits how far writes may run ahead of samples, and samples ahead of writes.
            The rows of all clients count together. See ``RateLimiter`` and ``docs/pace.md``.
        ray_init_config: options of ``ray.init``, which is called if Ray is not running yet. Ray
            then runs until the program ends, or until ``ray.shutdown()``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of range, or a part cannot be used in shards.
        RuntimeError: ray is not installed.
        TimeoutError: the shards have not started, for example because the cluster has too few
            resources.
        FileExistsError: ``checkpoint_dir`` belongs to another buffer.

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
        num_shards = whole_number("num_shards", num_shards, 1)
        one_of("backend", backend, ("ray", "local"))
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
        prefetch = read_value(Count, prefetch or 0, "prefetch")
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
        trial = recipe.make()  # raise errors before any actor starts
        tracked = trial.writer.tracks_generations
        capacity = num_shards * trial.storage.max_size
        trial.shutdown()
        if limiter is not None:
            limiter.check_capacity(capacity)
        settings = ClientSettings(
            sampler=copy.deepcopy(like),
            batch_size=batch_size,
            shard_key=shard_key,
            priority_key=priority_key,
            max_age=float(max_age),
            tracked=tracked,
        )
        self._host: Any
        if backend == "ray":
            self._host = RaySupervisor.start(
                recipe, remote_config, ray_init_config, timeout, limiter
            )
        else:
            start = functools.partial(LocalShard, recipe)
            self._host = Supervisor(num_shards, start, limiter)
        try:
            members = ShardMembers(self._host.shards, self._host, on_loss, float(timeout))
            super().__init__(settings, members, generator, prefetch)
        except BaseException:
            self._host.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Return whether the buffer is still open."""
        return not self._closed

    def close(self) -> None:
        """Finish the writes under way, and end all shards.

        The rows of the shards are lost, but their checkpoints stay. Closing a buffer again does
        nothing.

        Raises:
            Exception: the error of a write whose result was not asked for. If there are several,
                the first is raised, and its text lists the others.
            RuntimeError: writes were lost because they still waited for the rate limiter after 10
                seconds.
        """
        if not self._closed:
            self._closed = True
            paced = self._tickets.keeper is not None
            try:
                left = self._write_queue.leave(time.monotonic() + SETTLING_S if paced else None)
            finally:
                self._host.close()
            check_left(*left)

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "expected a client of the sharded buffer for other processes, got the buffer that owns "
            "the shards: send buffer.client()"
        )
