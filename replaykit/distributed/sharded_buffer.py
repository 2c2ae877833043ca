"""Define `ShardedReplayBuffer` and the handles of its clients."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from replaykit.buffer.component_checks import checked_batch_size, checked_limiter
from replaykit.buffer.components import DataT
from replaykit.distributed.client_samples import ShardLoader, check_generator
from replaykit.distributed.client_updates import Updates
from replaykit.distributed.client_writes import ClientSettings
from replaykit.distributed.handle import checked_count
from replaykit.distributed.membership import ShardMembers, check_on_loss
from replaykit.distributed.protocol import ShardLoss
from replaykit.distributed.routing import rows_by
from replaykit.distributed.shard_config import ShardRecipe, law_of
from replaykit.distributed.shard_saves import load_all, load_state, save_all, state_of
from replaykit.distributed.shards import LocalShard, RaySupervisor, Supervisor
from replaykit.errors import RateLimiterTimeout
from replaykit.keywords import checked_keywords, named_after
from replaykit.pace import RateLimiter
from replaykit.samplers import RandomSampler, Sampler

__all__ = ["REFUSED", "ShardedClient", "ShardedReplayBuffer", "refuse"]

_PARTS = "the functions given to the constructor make the parts of shards, which cannot change"
_EDITS = (
    "rows may have been overwritten, or lost with their shard, since they were read; "
    "update_if_present() changes those that are still stored"
)
_SAVES = "each shard saves itself, all at one instant; save other state separately"

REFUSED: dict[str, str] = {
    "append_transform": _PARTS,
    "as_remote": "its rows are in actors already; client() is a handle for other processes",
    "checkpointer": "dumps and loads have one format, for all shards together",
    "dim_extend": "rows of shards are along dimension 0, and shard_key distinguishes streams",
    "episodes": "the episode index is in the shards, which draw slices by it",
    "insert_transform": _PARTS,
    "priority_key": "the buffers of the shards have it",
    "register_load_hook": _SAVES,
    "register_save_hook": _SAVES,
    "service_backend": "its rows are in Ray actors; the constructor has backend=",
    "set_": _EDITS,
    "set_at_": _EDITS,
    "set_sampler": _PARTS,
    "set_storage": _PARTS,
    "set_writer": _PARTS,
    "join": "client() is a handle for other processes, which all see the same rows",
    "share": "client() is a handle for other processes, which all see the same rows",
    "shared": "client() is a handle for other processes, which all see the same rows",
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
        >>> from replaykit.distributed.sharded_buffer import refuse
        >>> refuse(ShardedClient, "writer")
        Traceback (most recent call last):
        AttributeError: a ShardedClient has no 'writer': every shard has a separate writer
    """
    if name in REFUSED:
        raise AttributeError(f"a {kind.__name__} has no {name!r}: {REFUSED[name]}")
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


@named_after
class ShardedClient(ShardLoader[DataT]):
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
        super().__init__(settings, members, generator, prefetch)
        self._updates = Updates(self)

    # -- description --------------------------------------------------------------------------

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
        return sum(self._rows_of(shard) for shard in self._members.table.there())

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
            **({} if self._tickets.keeper is None else self._tickets.keeper.stats()),
        }

    def __repr__(self) -> str:
        key = self._settings.shard_key
        return (
            f"{type(self).__name__}(num_shards={self.num_shards}, sampler={self._sampler!r}, "
            f"batch_size={self.batch_size}, shard_key={key!r})"
        )

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
        self._updates.priority(index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities from a sample.

        See ``ReplayBuffer.update_tensordict_priority``.
        """
        self._before_a_write()
        self._updates.tensordict(data)

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
            self._updates.priority(index, self._members.table.most())

    @property
    def dropped_updates(self) -> int:
        """The number of entries that this client's updates skipped.

        An entry is skipped if its row was overwritten or lost.
        """
        return self._updates.dropped

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
            After any of these errors, nothing has changed.
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
        members, prefetch = self._members.again(on_loss), checked_count("prefetch", prefetch)
        return ShardedClient(self._settings, members, generator, prefetch)

    def __getstate__(self) -> dict[str, Any]:
        state = None if self._generator is None else self._ahead.state()
        return {
            "settings": self._settings,
            "members": self._members,
            "generator": state,
            "prefetch": self._ahead.depth,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = None
        if state["generator"] is not None:
            generator = torch.Generator("cpu")
            generator.set_state(state["generator"])
        settings, members, prefetch = (state[k] for k in ("settings", "members", "prefetch"))
        ShardedClient.__init__(self, settings, members, generator, prefetch)


_FLUSH_S = 10.0
"""Seconds that ``close`` waits for writes that a rate limiter delays."""


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
        trial = recipe.make()  # raise errors before any actor starts
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
            members = ShardMembers(self._host.members(), self._host, on_loss, float(timeout))
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
            Exception: the error of a write whose result was not asked for.
            RuntimeError: writes were lost because they still waited for the rate limiter after 10
                seconds.
        """
        if not self._closed:
            self._closed = True
            paced = self._tickets.keeper is not None
            try:
                self._write_queue.flush(time.monotonic() + _FLUSH_S if paced else None)
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
            "expected a client of the sharded buffer for other processes, got the buffer that owns "
            "the shards: send buffer.client()"
        )


def _host(
    backend: str,
    recipe: ShardRecipe,
    remote: Any,
    init: Any,
    timeout: float,
    limiter: RateLimiter | None,
) -> Any:
    if backend == "ray":
        return RaySupervisor.start(recipe, remote, init, timeout, limiter)

    def start(shard: int, incarnation: int) -> LocalShard:
        return LocalShard(recipe, shard, incarnation)

    return Supervisor(recipe.num_shards, start, limiter)
