"""Define the prioritized buffers, those of TorchRL, and the reader of its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch

from replaykit.buffer.components import DataT, PrioritizedT, SamplerT, StorageT, WriterT, as_chain
from replaykit.buffer.replay_buffer import ReplayBuffer
from replaykit.buffer.state import (
    BufferState,
    apply_state,
    generator_state,
    saved_generator,
    saved_sampler,
)
from replaykit.checkpoint.torchrl_files import TorchRLCheckpoint, TorchRLPriorities, open_torchrl
from replaykit.declared import encode_state
from replaykit.keywords import Replaced, as_share, checked_keywords
from replaykit.samplers import PrioritizedSampler, Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.schema import Schema, split_leaves
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from replaykit.storages.content import Content, Group
from replaykit.ted import DONE, REWARD, format_key, unravel
from replaykit.transforms import Compose, HindsightGoal
from replaykit.transforms.history import Surroundings, require_all


def rows_by_name(name: str, data: Any, tensordicts: Any) -> Any:
    """Return the rows that a caller passed as ``data`` or ``tensordicts``.

    Raises:
        TypeError: both ``data`` and ``tensordicts`` are given.
        ValueError: the data has no rows.
    """
    if tensordicts is not None:
        if data is not None:
            raise TypeError("expected data or tensordicts, got both: they are one argument")
        data = tensordicts
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        raise ValueError(
            f"{name} only accepts TensorDictBase subclasses, and dicts, lists, tensors and "
            f"tensorclasses that are stored alike; expected rows, got {data!r:.80}"
        )
    return data


class TensorDictReplayBuffer(ReplayBuffer[DataT, StorageT, SamplerT, WriterT]):
    """A ReplayBuffer whose ``rb[...]`` carries ``index``, as samples do.

    TorchRL has this class for rows that are TensorDicts. All other behaviour is that of the base
    class.

    Example:
        >>> from replaykit import TensorDictReplayBuffer
        >>> len(TensorDictReplayBuffer())
        0
    """

    _reads_index = True

    def __init__(
        self,
        *,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        priority_key: Any = "td_error",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            storage=storage, sampler=sampler, writer=writer, priority_key=priority_key, **kwargs
        )

    def extend(
        self,
        data: Any = None,
        *,
        tensordicts: Any = None,
        update_priority: bool | None = None,
        timeout: float | None = None,
        overwrite: bool = True,
        tags: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Store a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: TensorDicts, or other rows that ``ReplayBuffer.extend`` accepts.
            tensordicts: the name of ``data`` in TorchRL.
            update_priority, timeout, overwrite, tags: as for ``ReplayBuffer.extend``.

        Raises:
            TypeError: both ``data`` and ``tensordicts`` are given.
            ValueError: the data has no rows.
            Other errors as for ``ReplayBuffer.extend``.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, TensorDictReplayBuffer
            >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
            >>> rb.extend(tensordicts=TensorDict({"x": torch.zeros(3)}, [3]))
            tensor([0, 1, 2])
        """
        rows = rows_by_name(type(self).__name__, data, tensordicts)
        return ReplayBuffer.extend(
            self,
            rows,
            update_priority=update_priority,
            timeout=timeout,
            overwrite=overwrite,
            tags=tags,
        )


class PrioritizedReplayBuffer(ReplayBuffer[DataT, StorageT, PrioritizedT, WriterT]):
    """A ReplayBuffer with a PrioritizedSampler over all slots of its storage.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer, weight_norm, stratified:
            options of the PrioritizedSampler.
        sampler: a sampler to use instead.
        sampler_device: device of the priorities; by default the CPU.
        kwargs: all other arguments of ReplayBuffer.

    Raises:
        TypeError: ``sampler`` is given together with ``sampler_device`` or an option of the
            sampler, or ReplayBuffer has no such argument.
        ValueError: as for ReplayBuffer and PrioritizedSampler.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100),
        ...                              batch_size=4)
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3)}, [20]))
        >>> batch = rb.sample()
        >>> rb.update_priority(batch["index"], torch.rand(4), generation=batch["index_generation"])
        >>> batch["priority_weight"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    _replaced: ClassVar[dict[str, Replaced]] = {
        "sync": Replaced(
            (True,),
            "shared=True has several processes write and one of them draw by priority; leave "
            "sync out",
        ),
    }

    @checked_keywords
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: PrioritizedT | Callable[[], PrioritizedT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        sampler_device: torch.device | str | int | None = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        weight_norm: str = "global",
        stratified: bool = False,
        **kwargs: Any,
    ) -> None:
        if sampler is not None and sampler_device is not None:
            raise TypeError("expected sampler or sampler_device, got both")
        given = {
            "dtype": dtype is not torch.float,
            "reduction": reduction != "max",
            "max_priority_within_buffer": max_priority_within_buffer,
            "weight_norm": weight_norm != "global",
            "stratified": stratified,
        }
        if sampler is not None and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise TypeError(f"expected a sampler or its options, got sampler and {names}")
        own: Any = PrioritizedSampler(
            alpha=alpha,
            beta=beta,
            eps=eps,
            dtype=dtype,
            reduction=reduction,
            max_priority_within_buffer=max_priority_within_buffer,
            device=sampler_device,
            weight_norm=weight_norm,
            stratified=stratified,
        )
        super().__init__(
            storage=storage, sampler=own if sampler is None else sampler, writer=writer, **kwargs
        )


class TensorDictPrioritizedReplayBuffer(
    PrioritizedReplayBuffer[DataT, StorageT, PrioritizedT, WriterT]
):
    """A PrioritizedReplayBuffer whose ``rb[...]`` carries ``index``, as samples do.

    TorchRL has this class for rows that are TensorDicts. Everything else is as in
    PrioritizedReplayBuffer.

    Args:
        alpha, beta, eps, reduction, max_priority_within_buffer, weight_norm, stratified: options of
            the PrioritizedSampler.
        priority_key: the key of priorities in written rows and in batches.
        sampler_device: device of the priorities; by default the CPU.
        kwargs: all other arguments of ReplayBuffer, except ``sampler``.

    Raises:
        TypeError: ``sampler`` is given, or ReplayBuffer has no such argument.
        ValueError: as for ReplayBuffer and PrioritizedSampler.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, batch_size=8,
        ...                                        storage=LazyTensorStorage(100))
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(50, 3)}, [50]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(8)
        >>> rb.update_tensordict_priority(batch)
    """

    _reads_index = True

    @checked_keywords
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: Any = "td_error",
        eps: float = 1e-8,
        sampler_device: torch.device | str | int | None = None,
        reduction: str = "max",
        storage: StorageT | Callable[[], StorageT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        **kwargs: Any,
    ) -> None:
        if "sampler" in kwargs:
            raise TypeError("a TensorDictPrioritizedReplayBuffer makes its own sampler; got one")
        super().__init__(
            alpha=alpha,
            beta=beta,
            priority_key=priority_key,
            eps=eps,
            sampler_device=sampler_device,
            reduction=reduction,
            storage=storage,
            writer=writer,
            **kwargs,
        )

    extend = TensorDictReplayBuffer.extend


def read_torchrl(
    path: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    sampler: Sampler | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ReplayBuffer:
    """Make a buffer from a checkpoint of TorchRL's ``ReplayBuffer.dumps(path)``.

    The function reads checkpoints of TorchRL 0.3 and later. The storage must be memory-mapped or a
    tensor storage, with a round-robin writer. The sampler must be a RandomSampler, a
    PrioritizedSampler or a sampler of slices. Only JSON and raw values are read. No pickle is
    opened, and no code from the files runs. The directory is not changed, and not used afterwards.

    The buffer takes from the files every stored row in its slot, capacity, cursor, write count and
    batch size. It also takes the state of a generator on the CPU, and ``alpha``, ``beta``, ``eps``
    and the priorities of a PrioritizedSampler.

    The episode index is computed from the columns. TorchRL saves powers of the priorities, from
    which the raw priorities are computed. The probabilities equal those of TorchRL up to the
    precision of the saved powers. With ``alpha=0`` all powers are 1, so each row gets the largest
    priority. TorchRL's TensorDictReplayBuffer stores a column ``index``. This column is not read,
    because every sample has a separate ``index``.

    Generations, prefetched batches (``prefetch.pkl``) and the rest of a pass (of
    SamplerWithoutReplacement and others) are not read. Nor is the state of transforms
    (``transform.t``), which causes a UserWarning.

    Args:
        path: the directory.
        storage: the storage for the rows, of any kind and capacity. Its rows are replaced. A
            smaller storage keeps the newest rows. None for a LazyTensorStorage of the same
            capacity.
        sampler: the sampler. A sampler with priorities takes the saved priorities; others start
            over. None for a PrioritizedSampler with the saved exponents, or a RandomSampler.
        scratch_dir: folder for a LazyMemmapStorage of the same capacity, instead of ``storage``.
        options: further arguments of ReplayBuffer. ``batch_size`` and ``generator`` override the
            saved values.

    Raises:
        FileNotFoundError: there is no checkpoint of TorchRL.
        CheckpointError: a file is missing, is a link, or contradicts another file in size or
            content. The error names it.
        ValueError: the checkpoint has parts that cannot be read; the error names them. These parts
            are nested tensors, tensorclasses, lists, and all other entries that are not plain
            tensors. Also other writers, and other samplers if ``sampler`` is not given.
        TypeError: both ``storage`` and ``scratch_dir`` are given.

    TorchRL's directories have no checksums and are overwritten in place. After an interrupted save,
    only files of a wrong size are detected.

    Cost: one pass over the stored rows.

    Example:
        >>> from replaykit import read_torchrl
        >>> rb = read_torchrl("tests/checkpoint/fixtures/torchrl_prioritized")
        >>> rb.storage.max_size, len(rb), rb.write_count, rb.sampler.alpha
        (10, 10, 13, 0.7)
        >>> rb[3]["next", "reward"].item()
        3.0
    """
    if storage is not None and scratch_dir is not None:
        raise TypeError("expected storage or scratch_dir, got both")
    ndim = None if storage is None else storage.ndim
    saved = open_torchrl(path, ndim)
    if saved.other_sampler is not None and sampler is None:
        raise ValueError(
            f"expected the state of a RandomSampler or PrioritizedSampler, got "
            f"{saved.other_sampler}, which is not read; give sampler=, which then starts over"
        )
    if saved.transforms:
        warnings.warn(
            f"the state of transforms in {os.fspath(path)}/transform.t is a pickle and is not "
            "read; give transform= with the state that they need",
            stacklevel=2,
        )
    if storage is None:
        capacity = saved.slots * saved.lanes.numel()
        storage = (
            LazyTensorStorage(capacity, ndim=saved.ndim)
            if scratch_dir is None
            else LazyMemmapStorage(capacity, ndim=saved.ndim, scratch_dir=scratch_dir)
        )
    found = saved.priorities
    if sampler is None and found is not None:
        dtype = torch.float32 if found.single else torch.float64
        sampler = PrioritizedSampler(alpha=found.alpha, beta=found.beta, eps=found.eps, dtype=dtype)
    options.setdefault("batch_size", saved.batch_size)
    if saved.generator is not None and options.get("generator") is None:
        state = {"device": "cpu", "state": saved.generator}
        options["generator"] = saved_generator(state, " in rng_state")
    buffer = ReplayBuffer(storage=storage, sampler=sampler, **options)
    with buffer._locked():
        apply_state(cast(Any, buffer), _state(buffer, saved))
    return buffer


def _state(buffer: ReplayBuffer, saved: TorchRLCheckpoint) -> BufferState:
    """Return the state that a buffer of this package would have saved."""
    rows = split_leaves(saved.rows, saved.ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    elements = saved.length * saved.lanes.numel()
    sampler = buffer.sampler
    state = saved_sampler(sampler)
    if sampler.prioritized and "_priorities" in state:
        found = saved.priorities or TorchRLPriorities(
            state["_alpha"], state["_beta"], state["_eps"], 1.0, torch.ones(elements), single=True
        )
        state |= encode_state(
            SavedPriorities(found.alpha, found.beta, found.eps, found.max_priority, 0, found.raw)
        )
    return BufferState(
        content=Content(saved.length, saved.lanes, (group,)),
        storage=None,
        writer={
            "_kind": "round_robin",
            "_write_count": saved.written * saved.lanes.numel(),
            "_cursor": saved.cursor,
            "_ledger": {
                "slots": saved.slots,
                "length": saved.length,
                "cursor": saved.cursor,
                "next_position": saved.written,
                "positions": None,
                "generations": None,
            },
            "_episodes": None,
        },
        sampler=state,
        transforms=buffer._chain.state_dict(),
        generator=generator_state(buffer._generator),
        undelivered=[],
    )


class _FirstRowsGoal(HindsightGoal):
    """New goals for the first rows of a batch, whose rewards a function of the rows returns."""

    relabels = False  # the function needs whole rows, so it cannot change those of later transforms

    def __init__(
        self, share: float, strategy: str, goal: Any, achieved: Any, reward: Any, reward_fn: Any
    ) -> None:
        super().__init__(share, strategy, scope="step")
        self.achieved, self.goal, self.reward = map(unravel, (achieved, goal, reward))
        self.row_rewards = reward_fn
        self.changes = frozenset({self.goal, ("next", *self.goal), self.reward})
        self.relabel_keys = ()

    def fetch(self, around: Surroundings) -> Any:
        count = int(len(around) * self.p)
        if not count:
            return None
        time, lane = self._targets(around, around.time, around.uniform(len(around)))
        return count, around.seen(around.fetch([self.achieved], time, lane))[self.achieved]

    def apply(self, data: Any, fetched: Any, around: Surroundings) -> Any:
        require_all(data, [self.goal, self.achieved], self)
        if fetched is None:
            return data
        count, goals = fetched
        part, both = data[:count].clone(), (self.goal, ("next", *self.goal))
        keys = [key for key in both if data.get(key, None) is not None]
        for key in keys:
            part.get(key).copy_(goals[:count])
        reward = part.get(self.reward)
        reward.copy_(torch.as_tensor(self.row_rewards(part)).reshape(reward.shape))
        for key in (*keys, self.reward):
            value = data.get(key).clone()
            value[:count] = part.get(key)
            data.set(key, value)
        return data


class HERReplayBuffer(TensorDictReplayBuffer[DataT, StorageT, SamplerT, WriterT]):
    """A TensorDictReplayBuffer with hindsight goals, as TorchRL has it.

    The first ``int(her_ratio * B)`` rows of a batch get a goal that was achieved in a stored row of
    their episode, at the row itself or later. ``reward_fn`` computes their rewards. Stored rows do
    not change. The transform `HindsightGoal` has more options, and changes rows that n-step sums
    read.

    Args:
        reward_fn: a function of a TensorDict ``[n]``, which has the new goals. It returns rewards
            ``[n, 1]`` or ``[n]``.
        her_ratio: share of rows that get new goals, in [0, 1].
        strategy: "future", "final", "episode" or "random", as for `HindsightGoal`.
        goal_key: key of the goal. ``("next", goal_key)`` gets the same goal if it is stored.
        achieved_goal_key: key of the goal that a row has achieved.
        reward_key: key of the reward.
        end_key: must be ``("next", "done")``. The storage finds episodes by its episode index.
        sampler: chooses the rows; by default ``RandomSampler()``.
        transform: transforms that run after the goals are replaced.
        kwargs: other arguments of TensorDictReplayBuffer.

    Raises:
        ValueError: ``her_ratio`` is outside [0, 1], ``strategy`` is unknown, or ``end_key`` is
            another key.
        TypeError: ``reward_fn`` cannot be called.
        KeyError: when a batch is read, a goal is absent.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import HERReplayBuffer, LazyTensorStorage
        >>> def reward_fn(rows):
        ...     return (rows["achieved_goal"] == rows["desired_goal"]).float()
        >>> rb = HERReplayBuffer(reward_fn, her_ratio=0.5, storage=LazyTensorStorage(100),
        ...                      strategy="final", batch_size=4)
        >>> _ = rb.extend(TensorDict({
        ...     "achieved_goal": torch.arange(3.0)[:, None],
        ...     "desired_goal": torch.full((3, 1), 9.0),
        ...     "next": {"reward": torch.zeros(3, 1), "done": torch.tensor([[0], [0], [1]]).bool()},
        ... }, [3]))
        >>> rb.sample()["desired_goal"].flatten()
        tensor([2., 2., 9., 9.])
    """

    def __init__(
        self,
        reward_fn: Callable[[Any], torch.Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: str = "future",
        goal_key: Any = "desired_goal",
        achieved_goal_key: Any = "achieved_goal",
        reward_key: Any = REWARD,
        end_key: Any = DONE,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        transform: Any = None,
        **kwargs: Any,
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"expected reward_fn as a function, got {type(reward_fn).__name__}")
        if unravel(end_key) != DONE:
            raise ValueError(
                f"expected end_key as {format_key(DONE)}, by which the storage finds the ends of "
                f"episodes, got {end_key!r}"
            )
        goals = _FirstRowsGoal(
            as_share("her_ratio", her_ratio),
            str(getattr(strategy, "value", strategy)),
            goal_key,
            achieved_goal_key,
            reward_key,
            reward_fn,
        )
        super().__init__(sampler=sampler, transform=Compose(goals, *as_chain(transform)), **kwargs)
        self.reward_fn, self.her_ratio, self.strategy = reward_fn, goals.p, goals.strategy
