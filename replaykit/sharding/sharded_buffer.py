"""Define `ShardedReplayBuffer` and the handles of its clients."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch
from typing_extensions import Self

from replaykit.buffer.core import DataT, checked_batch_size, checked_limiter
from replaykit.errors import RateLimiterTimeout
from replaykit.keywords import checked_keywords, named_after
from replaykit.pace import RateLimiter
from replaykit.remote.ray_buffer import checked_count
from replaykit.samplers import RandomSampler, Sampler
from replaykit.sharding.client_samples import ShardLoader, check_generator
from replaykit.sharding.client_updates import Updates
from replaykit.sharding.client_writes import ClientSettings
from replaykit.sharding.membership import ShardMembers, check_on_loss
from replaykit.sharding.protocol import ShardLoss
from replaykit.sharding.routing import rows_by
from replaykit.sharding.shard_config import ShardRecipe, law_of
from replaykit.sharding.shard_saves import load_all, save_all, state_of, take_state
from replaykit.sharding.shards import LocalSupervisor

__all__ = ["REFUSED", "ShardedClient", "ShardedReplayBuffer", "refuse"]

_PARTS = "the parts of shards are made by the functions that the constructor got, and stay"
_EDITS = (
    "stored rows may have been overwritten, or lost with their shard, since anybody looked; "
    "update_if_present() changes those that are still there"
)
_SAVES = "all shards are saved at one instant, each by itself; keep what is yours beside it"

REFUSED: dict[str, str] = {
    "append_transform": _PARTS,
    "as_remote": "its rows lie in actors already; client() is a handle for other processes",
    "checkpointer": "dumps and loads have one format, for all shards together",
    "dim_extend": "rows of shards lie along dimension 0, streams are told apart by shard_key",
    "episodes": "the index of episodes lies in the shards; slices are drawn by it",
    "insert_transform": _PARTS,
    "priority_key": "it was given to the buffers of the shards, which look for it",
    "register_load_hook": _SAVES,
    "register_save_hook": _SAVES,
    "service_backend": "its rows lie in actors of Ray; the constructor has backend=",
    "set_": _EDITS,
    "set_at_": _EDITS,
    "set_sampler": _PARTS,
    "set_storage": _PARTS,
    "set_writer": _PARTS,
    "share": "client() is a handle for other processes, which all see the same rows",
    "shared": "client() is a handle for other processes, which all see the same rows",
    "storage": "rows lie in the storages of the shards; rb[...] reads them",
    "transform": _PARTS,
    "update_": _EDITS,
    "write_all": _EDITS,
    "writer": "every shard has a writer of its own",
}
"""Public names of ``ReplayBuffer`` that a sharded one has not, and the reason."""


def refuse(kind: type, name: str) -> NoReturn:
    """Raises the AttributeError of a name that is not there.

    Example:
        >>> from replaykit.sharding import ShardedClient
        >>> from replaykit.sharding.sharded_buffer import refuse
        >>> refuse(ShardedClient, "writer")
        Traceback (most recent call last):
        AttributeError: a ShardedClient has no 'writer': every shard has a writer of its own
    """
    if name in REFUSED:
        raise AttributeError(f"a {kind.__name__} has no {name!r}: {REFUSED[name]}")
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


@named_after
class ShardedClient(ShardLoader[DataT]):
    """A handle of a sharded buffer, with all of its methods but those that end it.

    Made by ``ShardedReplayBuffer.client()``; it can be pickled and sent to other processes. Each
    client has a table of masses of its own and, unless it was given one, torch's global generator.
    Every method may be called from any thread.

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
        """By what law this client draws. ``alpha`` and ``beta`` may be set; a new ``alpha`` goes to
        the shards with the next draw, and is theirs for all clients until another one draws."""
        return self._sampler

    def __len__(self) -> int:
        """Rows stored in the shards that are there. Cost: one message to each."""
        self._check_open()
        self._members.refresh(None, 0.0)
        return sum(self._rows_of(shard) for shard in self._members.table.there())

    @property
    def initialized(self) -> bool:
        """Whether the parts of all shards have been made: they are before a handle is there."""
        return True

    @property
    def write_count(self) -> int:
        """Rows written to the shards that are there, since they were made or restored."""
        return int(self.stats()["write_count"])

    @property
    def losses(self) -> list[ShardLoss]:
        """All that was lost with shards that died, as far as clients have told until now."""
        return self._members.supervisor.losses()

    def stats(self) -> dict[str, Any]:
        """Returns what ``ReplayBuffer.stats`` does over all shards that are there, and of shards:

        ``shards``: size of each, None while it is being restarted. ``rows_lost``: rows that were
        acknowledged and are gone. ``restarts``: how many shards have come back.

        With a rate limiter ``inserts``, ``samples``, ``insert_blocked_s`` and ``sample_blocked_s``
        are those of all clients. Cost: one message to each shard.

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
        """Sets priorities of rows, as ``ReplayBuffer.update_priority`` does.

        Args:
            index: of rows, int64 ``[K]``; -1 is ignored. Or, without ``priority``, a sample.
            priority: a number, ``[K]`` or ``[K, 1]``.
            generation: ``index_generation`` of a sample: rows that were written since, or lost with
                their shard, are left out.

        Raises:
            ValueError: a priority that is NaN, negative or infinite; other numbers of entries.
            IndexError: an index that is not stored. Nothing has changed then.

        Updates for a shard that is being restarted are dropped, as its rows may be lost: its
        priorities come back as they were saved. Cost: one message to each shard that is meant.
        """
        self._before_a_write()
        self._updates.priority(index, priority, generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets priorities from a sample, as ``ReplayBuffer.update_tensordict_priority`` does."""
        self._before_a_write()
        self._updates.tensordict(data)

    def mark_update(self, index: Any) -> None:
        """Gives rows the sampler's default priority, the largest ever set in any shard; without
        priorities: nothing.

        Args:
            index: of rows, an int or int64 ``[K]``; -1 is ignored.

        Raises:
            IndexError: an index that is not stored; nothing has changed then.

        Cost: one message to each shard, and one more to those that are meant.

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
        """Entries of this client's updates that were left out: rows written since, or lost."""
        return self._updates.dropped

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns rows by index, transformed: an int, a list, or int64 ``[K]``.

        A slice or a bool mask takes of all stored rows in the order of their indices, a key gives
        that column of ``rb[:]``.

        Raises:
            IndexError: a row that is not stored, a mask of another length. KeyError: no such key.
            TypeError: another kind of index.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.arange(5) * 10}, [5]))
            ...     rb[3]["x"], rb[1:3]["x"], rb["x"]
            (tensor(30), tensor([10, 20]), tensor([ 0, 10, 20, 30, 40]))
        """
        self._check_open()
        return rows_by(self, index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns all stored rows, or the first ``end``, in the order of their indices:
        ``rb[:end]``.

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
        """Saves all shards as they are at one instant, between two writes; all or nothing.

        A batch is in the checkpoint with all its rows or with none, whichever shards they went to.
        Writes and updates wait while every shard takes note of what it holds, not while files are
        written; sampling goes on.

        Args:
            path: a directory that all shards can write to.

        Raises:
            RuntimeError: a shard died, or a client died with half a batch written.
            OSError: the disk refused. What was there before stays, and is what ``loads`` reads.
        """
        self._before_a_write()
        save_all(self, path)

    def loads(self, path: Any) -> None:
        """Takes over what ``dumps`` of a sharded buffer has saved, of any number of shards.

        With as many shards every row keeps its index. With another number the rows are dealt out
        anew, in turn or by key, with their priorities; episodes stay whole, and no window goes over
        a seam. Where they do not all fit, a UserWarning says how many were left out.

        Each shard reads its share, block by block; the rows that it had are let go when all shards
        have read theirs.

        Raises:
            FileNotFoundError: there is no checkpoint. CheckpointError: it is damaged.
            ValueError: other keys, or kinds of sampler, or of another ``shard_key``.
            Nothing has changed then.
        """
        self._before_a_write()
        load_all(self, path)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that the shards hold at one instant, as ``dumps`` saves it, as a
        dictionary. All rows come to this process: ``dumps`` leaves them where they are.

        Raises:
            RuntimeError: a shard died, or a client died with half a batch written.

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
        """Takes over what ``state_dict`` of a buffer with as many shards gave; values are copied.

        Raises:
            ValueError: another number of shards or ``shard_key``, entries that are missing or do
                not fit; nothing has changed.
        """
        self._before_a_write()
        take_state(self, state_dict)

    dump = save = dumps
    load = loads

    # -- being sent ---------------------------------------------------------------------------

    def client(
        self,
        generator: torch.Generator | None = None,
        *,
        on_loss: Callable[[ShardLoss], None] | None = None,
        prefetch: int = 0,
    ) -> ShardedClient[DataT]:
        """Returns another handle, which can be pickled where the shards are elsewhere.

        Args:
            generator: what it draws with; None: torch's global generator of its process.
            on_loss: called with what was lost when it learns that a shard is back; None: a
                ShardLossWarning. It is pickled with the handle.
            prefetch: how many batches it has under way, as in the constructor.
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
            all shards to start, and then at least three minutes.
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
            members = ShardMembers(self._host.members(), self._host, on_loss, float(timeout))
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
    from replaykit.sharding.shards import RaySupervisor

    return RaySupervisor.start(recipe, remote, init, timeout, limiter)
