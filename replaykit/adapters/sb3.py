"""Replay buffers for Stable-Baselines3 that store their rows in a `ReplayBuffer`.

Importing this module imports Stable-Baselines3. Importing ``replaykit`` does not.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import TensorDict, fields_of
from replaykit.buffer import ReplayBuffer
from replaykit.declared import Positive, read_value
from replaykit.episodes import EndReason, Head
from replaykit.errors import NotEnoughData
from replaykit.keywords import as_share
from replaykit.samplers import PrioritizedSampler, Sampler
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage
from replaykit.transforms import Compose, StackFrames

try:
    from gymnasium import spaces
    from stable_baselines3.common import buffers as sb3_buffers
    from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.utils import get_device
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer
    from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY
except ImportError as error:
    raise ImportError(
        "replaykit.adapters.sb3 expected the packages stable_baselines3 and gymnasium, got "
        f"{error}; install them with: pip install 'replaykit[sb3]'"
    ) from error

from replaykit.adapters.sb3_rows import (
    ENV,
    REWARDS,
    STEPS,
    Array,
    GlobalNumpySampler,
    Observation,
    RewardsAhead,
    SB3Ring,
    SB3Step,
    draw_integers,
    equal_rows,
    fill_observation,
    same_observations,
    shaped_observation,
    shaped_values,
)

Tensors = torch.Tensor | dict[str, torch.Tensor]
Path = tuple[str, ...]


class PrioritizedSamples(NamedTuple):
    """A batch that a prioritized `SB3ReplayBuffer` returns.

    It has the fields of Stable-Baselines3's ``ReplayBufferSamples``, and three more fields.

    Attributes:
        observations, next_observations: tensors ``[B, *F]``, or a dict of them by key.
        actions: ``[B, action_dim]``.
        dones: float32 ``[B, 1]``; 1 if the step terminated, 0 also at time limits.
        rewards: float32 ``[B, 1]``.
        discounts: float32 ``[B, 1]`` with n-step returns, else None.
        weights: importance weights, float32 ``[B, 1]``.
        indices: slots of the rows, int64 ``[B]``.
        generations: generations of these slots, int64 ``[B]``. They let the buffer detect rows that
            were overwritten since the draw.
    """

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    indices: torch.Tensor
    generations: torch.Tensor


class SB3ReplayBuffer(sb3_buffers.ReplayBuffer):
    """A replay buffer for DQN, SAC and TD3 of Stable-Baselines3.

    Pass it as ``replay_buffer_class``, and its own arguments as ``replay_buffer_kwargs``. The
    observation space may be a ``Dict``. Without prioritization, the draws use NumPy's global
    generator in the order of Stable-Baselines3. A training with one seed then equals the training
    with Stable-Baselines3's ``ReplayBuffer`` or ``NStepReplayBuffer`` to the bit.

    Args:
        buffer_size: capacity in rows. Each environment has ``buffer_size // n_envs`` of them.
        observation_space, action_space: spaces of the environment.
        device: device of the samples. The rows are stored on the CPU or in files.
        n_envs: number of environments.
        optimize_memory_usage: must be False; use ``dedup_next`` instead.
        handle_timeout_termination: whether a time limit (``infos["TimeLimit.truncated"]``) does not
            count as a terminal state.
        n_steps: largest number of rewards in a return.
        gamma: discount of one step. ``n_steps > 1`` requires it, with the value of the algorithm.
        prioritized: draw rows by priority. Samples are then `PrioritizedSamples`. Only a ``train``
            method that calls `update_priority` changes priorities.
        alpha, beta: exponents of the priorities and of the importance weights, for
            ``prioritized=True``. ``None`` means 0.6 and 0.4.
        dedup_next: store each observation once, instead of once as the observation of a row and
            once as the next observation of the row before. Samples do not change.
        frame_stack: number of frames that a ``VecFrameStack`` stacks along the first axis of the
            observations. The buffer then stores single frames and returns stacks. Samples do not
            change.
        storage: ``"memory"``, or the folder of memory-mapped files.
        recover: whether a later buffer with the same ``storage`` continues with the stored rows,
            also after a kill.

    Raises:
        ValueError: an argument is out of range, arguments cannot be combined, or the files in
            ``storage`` were made with other arguments.

    Attributes:
        rb: the `ReplayBuffer` with the rows, for checkpoints, episodes and schedulers. Write only
            through this object.

    A sample and a write cost O(rows); see ``docs/coming_from/stable_baselines3.md`` for times.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from replaykit.adapters import SB3ReplayBuffer
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=SB3ReplayBuffer,
        ...             buffer_size=1_000, learning_starts=50, seed=0, device="cpu")
        >>> _ = model.learn(64)
        >>> model.replay_buffer.size(), model.replay_buffer.sample(8).observations.shape
        (64, torch.Size([8, 4]))
        >>> len(model.replay_buffer.rb.episodes) > 1
        True
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float | None = None,
        prioritized: bool = False,
        alpha: float | None = None,
        beta: float | None = None,
        dedup_next: bool = False,
        frame_stack: int = 1,
        storage: str | os.PathLike[str] = "memory",
        recover: bool = False,
    ) -> None:
        # The constructors of Stable-Baselines3 allocate arrays for all rows, so none of them is
        # called. These are the attributes that its algorithms and callbacks read.
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment]
        self.action_dim = get_action_dim(action_space)
        self.device = get_device(device)
        self.n_envs = n_envs
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage: expected False, got True; pass "
                "replay_buffer_kwargs={'dedup_next': True} to store each observation once"
            )
        for name, count in (("n_steps", n_steps), ("frame_stack", frame_stack)):
            read_value(Positive, count, name)
        if gamma is None and n_steps > 1:
            raise ValueError(
                f"gamma: expected the discount of the algorithm with n_steps={n_steps}, got None; "
                f"pass replay_buffer_kwargs={{'n_steps': {n_steps}, 'gamma': ...}}"
            )
        for name, exponent in (("alpha", alpha), ("beta", beta)):
            if exponent is not None and not prioritized:
                raise ValueError(
                    f"{name}: expected None without prioritized=True, got {exponent!r}; pass "
                    "replay_buffer_kwargs={'prioritized': True} as well"
                )
        if recover and storage == "memory":
            raise ValueError(
                "recover=True: expected storage= with the folder of the rows, got 'memory'"
            )
        self.n_steps, self.prioritized = n_steps, prioritized
        # A single reward is not discounted.
        self.gamma = 1.0 if gamma is None else as_share("gamma", gamma)
        self._frame = self._frame_size(frame_stack)
        action = self._maybe_cast_dtype(action_space.dtype), self.action_dim
        self._step = SB3Step(observation_space, self.obs_shape, action, n_envs, self._frame)
        # Rows that transforms or goals combine must follow one another in time.
        self._joins_rows = n_steps > 1 or frame_stack > 1
        older = frame_stack - 1
        self._ring = SB3Ring(self.buffer_size, n_envs, older)
        sampler: Sampler = GlobalNumpySampler(self._ring)
        if prioritized:
            sampler = PrioritizedSampler(
                alpha=0.6 if alpha is None else alpha, beta=0.4 if beta is None else beta
            )
        transforms: list[Any] = [RewardsAhead(n_steps)] if n_steps > 1 else []
        if older:
            transforms.append(StackFrames(["observation"], frame_stack, pad="zero"))
        self.rb: ReplayBuffer[TensorDict] = ReplayBuffer(
            storage=self._new_storage(storage, dedup_next=dedup_next, recover=recover),
            sampler=sampler,
            transform=Compose(*transforms) if transforms else None,
        )

    def _frame_size(self, count: int) -> int:
        """Return the size of the first axis of one frame; 0 for observations without frames."""
        if count == 1:
            return 0
        shape: Any = self.obs_shape
        if isinstance(shape, dict) or not shape or shape[0] % count:
            raise ValueError(
                f"frame_stack={count}: expected an array whose first axis is a multiple of {count} "
                f"as observation, got {self.observation_space}"
            )
        return int(shape[0]) // count

    def _new_storage(
        self, folder: str | os.PathLike[str], *, dedup_next: bool, recover: bool
    ) -> LazyTensorStorage:
        slots = self._ring.writes * self.n_envs
        parts: Any = self.obs_shape
        keys: list[Any] = ["observation"]
        if isinstance(parts, dict):
            keys = [("observation", key) for key in parts]
        options: dict[str, Any] = {
            "lane_key": ENV if self.n_envs > 1 else None,
            "dedup_next": keys if dedup_next else False,
            # An algorithm may reset the environment in the middle of an episode.
            "on_mismatch": "dense",
        }
        if folder == "memory":
            return LazyTensorStorage(slots, **options)
        made = LazyMemmapStorage(slots, scratch_dir=folder, recover=recover, **options)
        if self.n_envs > 1 and len(made):
            found = made.read(torch.arange(self.n_envs))[ENV].tolist()
            if found != list(range(self.n_envs)):
                raise ValueError(
                    f"storage {os.fspath(folder)!r}: expected rows of {self.n_envs} environments "
                    f"in turn, got rows of the environments {found}; use the n_envs of the run "
                    "that wrote them"
                )
        return made

    # -- counts -------------------------------------------------------------------------------

    @property
    def pos(self) -> int:  # type: ignore[override]
        """The position that the next write fills, below ``buffer_size``."""
        return self._ring.written(self.rb.storage) % self.buffer_size

    @property
    def full(self) -> bool:  # type: ignore[override]
        """True if all positions have rows, so that the next write replaces rows."""
        return self._ring.written(self.rb.storage) >= self.buffer_size

    def size(self) -> int:
        """Return the number of positions with rows; each has one row per environment."""
        return self._ring.size(self.rb.storage)

    def reset(self) -> None:
        """Remove all rows."""
        self.rb.empty()
        self._step.ended = None

    # -- writing ------------------------------------------------------------------------------

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one row of each environment.

        Args:
            obs, next_obs: observations ``[n_envs, *F]``, or dicts of them.
            action: ``[n_envs, *A]``.
            reward, done: ``[n_envs]``.
            infos: one dict for each environment.

        Raises:
            ValueError: an array has another shape; or with ``frame_stack``, observations are not
                stacks of consecutive frames. Nothing has changed.
        """
        step = self._step
        before = shaped_observation(step.before, obs, "obs")
        after = shaped_observation(step.after, next_obs, "next_obs")
        actions = shaped_values(step.action, action, "action")
        rewards = shaped_values(step.reward, reward, "reward")
        ended = shaped_values(step.terminated, done, "done")
        late: Any = False
        if self.handle_timeout_termination:
            late = [[info.get("TimeLimit.truncated", False)] for info in infos]
        if self._joins_rows:
            broken = self._breaks(before, after)
            if broken is not None and broken.any():
                self.rb.cut(np.flatnonzero(broken).tolist() if self.n_envs > 1 else None)
        fill_observation(step.before, before)
        fill_observation(step.after, after)
        step.action[...], step.reward[...], step.truncated[...] = actions, rewards, late
        np.greater(ended, step.truncated, out=step.terminated)  # ended and not late
        self.rb.extend(step.rows)
        step.ended = (step.terminated | step.truncated)[:, 0]

    def _breaks(self, before: Observation, after: Observation) -> Array | None:
        """Return a mask of the environments whose open episode does not continue, or None.

        An algorithm resets its environments at the start of ``learn``, and no flag shows this.

        Raises:
            ValueError: with ``frame_stack``, the observations are no stacks of frames.
        """
        fresh, broken = np.ones(self.n_envs, np.bool_), None
        ended = self._step.ended
        if ended is not None:
            broken = ~(same_observations(before, self._step.after) | ended)
            fresh = broken | ended
        if self._frame:
            stack, following = before[""], after[""]
            shifted = equal_rows(following[:, : -self._frame], stack[:, self._frame :])
            first = (stack[:, : -self._frame] == 0).reshape(self.n_envs, -1).all(1)
            bad = np.flatnonzero(~shifted | (fresh & ~first))
            if len(bad):
                raise ValueError(
                    "frame_stack: expected observations of a VecFrameStack, zeros before the first "
                    "frame of an episode and one new frame per step along the first axis, got "
                    f"others in the environments {bad.tolist()}; leave frame_stack out"
                )
        return broken

    # -- sampling -----------------------------------------------------------------------------

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw a batch.

        Args:
            batch_size: number of rows.
            env: normalizes observations and rewards.

        Returns:
            ``ReplayBufferSamples``, for dicts ``DictReplayBufferSamples``, or `PrioritizedSamples`.

        Raises:
            NotEnoughData: the buffer is empty; a RuntimeError.
        """
        return self._samples(self.rb.sample(batch_size), env)

    def _get_samples(self, batch_inds: Array, env: VecNormalize | None = None) -> Any:
        envs = draw_integers(0, self.n_envs, len(batch_inds))
        return self._samples(self._rows(np.asarray(batch_inds), envs), env)

    def _rows(self, position: Array, env: Array) -> Any:
        """Read rows, with the transforms, as a batch ``[B]``."""
        slots = torch.from_numpy(self._ring.slots(self.rb.storage, position, env))
        return self.rb[slots].set("index", slots)

    def _samples(self, batch: Any, env: VecNormalize | None) -> Any:
        """Return a batch of rows in the form of Stable-Baselines3."""
        leaves = fields_of(batch)
        following = fields_of(leaves["next"])
        discounts = None
        if self.n_steps > 1:
            returns, factors = self._returns(leaves, env)
            rewards, discounts = torch.from_numpy(returns), self._given(torch.from_numpy(factors))
        else:
            rewards = following["reward"]
            if env is not None:
                rewards = torch.from_numpy(self._normalize_reward(rewards.numpy(), env))
        found: tuple[Any, ...] = (
            self._normalized(leaves["observation"], env),
            self._given(leaves["action"]),
            self._normalized(following["observation"], env),
            self._given(following["terminated"].float()),
            self._given(rewards),
            discounts,
        )
        if self.prioritized and "priority_weight" in leaves:
            weights = leaves["priority_weight"].to(torch.float32).unsqueeze(-1)
            rows = leaves["index"], leaves["index_generation"]
            return PrioritizedSamples._make((*found, self._given(weights), *rows))
        if isinstance(found[0], dict):
            return DictReplayBufferSamples(*found)
        return ReplayBufferSamples(*found)

    def _returns(self, leaves: Mapping[str, Any], env: VecNormalize | None) -> tuple[Array, Array]:
        """Return discounted sums and the discounts of the next state, float32 ``[B, 1]`` each.

        float32 operations in this order give the bits of ``NStepReplayBuffer``.
        """
        rewards = self._normalize_reward(leaves[REWARDS].numpy(), env)
        steps = leaves[STEPS].numpy()[:, None]
        numbers = np.arange(self.n_steps, dtype=np.float32)[None]
        discounted = np.where(numbers < steps, rewards * self.gamma**numbers, np.float32(0))
        return discounted.sum(axis=1, keepdims=True), self.gamma ** steps.astype(np.float32)

    def _normalized(self, observation: Any, env: VecNormalize | None) -> Tensors:
        """Return observations on the device of the samples, normalized by ``env``."""
        if isinstance(observation, torch.Tensor):
            if env is not None:
                observation = torch.as_tensor(env.normalize_obs(observation.numpy()))
            return self._given(observation)
        leaves: Any = dict(observation.items())
        if env is not None:
            leaves = env.normalize_obs({key: leaf.numpy() for key, leaf in leaves.items()})
        return {key: self._given(torch.as_tensor(leaf)) for key, leaf in leaves.items()}

    def _given(self, leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.contiguous()
        return leaf if self.device.type == "cpu" else leaf.to(self.device)

    # -- priorities ---------------------------------------------------------------------------

    def update_priority(self, samples: PrioritizedSamples, priority: torch.Tensor | Array) -> None:
        """Set the priorities of the rows of a batch.

        Rows that were overwritten since the draw do not change.

        Args:
            samples: a batch of ``sample``.
            priority: numbers ``[B]`` or ``[B, 1]`` of at least 0, such as absolute errors.

        Raises:
            RuntimeError: the buffer was made without ``prioritized=True``.
            ValueError: a priority is NaN, negative or infinite. Nothing has changed.
        """
        if not self.prioritized:
            raise RuntimeError(
                "expected a buffer with priorities, got one of uniform draws; pass "
                "replay_buffer_kwargs={'prioritized': True}"
            )
        values = torch.as_tensor(priority).detach().reshape(-1).cpu()
        self.rb.update_priority(samples.indices, values, generation=samples.generations)


class SB3HerReplayBuffer(SB3ReplayBuffer, HerReplayBuffer):
    """A buffer of Stable-Baselines3 that replaces goals by goals achieved later (HER).

    The draws equal those of Stable-Baselines3's ``HerReplayBuffer`` to the bit. Only rows of
    episodes that have ended are drawn, and only of episodes that are stored from their first row
    on. Of each batch, the share ``n_sampled_goal / (n_sampled_goal + 1)`` gets new goals.
    ``env.compute_reward`` gives the rewards for them.

    Args:
        buffer_size, action_space, device, n_envs: as for `SB3ReplayBuffer`.
        optimize_memory_usage, handle_timeout_termination: as for `SB3ReplayBuffer`.
        dedup_next, storage, recover: as for `SB3ReplayBuffer`.
        observation_space: a ``Dict`` with ``achieved_goal`` and ``desired_goal``.
        env: the environment that computes rewards; algorithms pass it.
        n_sampled_goal: number of rows with new goals for each row with its own goal.
        goal_selection_strategy: the row that a new goal comes from: ``"future"``, ``"final"`` or
            ``"episode"``.
        copy_info_dict: whether to store the infos and pass them to ``compute_reward``. They are not
            part of the stored rows, so this cannot be combined with ``recover``.

    Raises:
        ValueError: as for `SB3ReplayBuffer`; or the strategy is unknown, or ``copy_info_dict`` is
            combined with ``recover``.

    Cost of a draw: O(B + n_envs), where Stable-Baselines3 reads one number for each row of the
    buffer.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.envs import BitFlippingEnv
        >>> from replaykit.adapters import SB3HerReplayBuffer
        >>> env = BitFlippingEnv(n_bits=4, continuous=False, max_steps=4)
        >>> model = DQN("MultiInputPolicy", env, replay_buffer_class=SB3HerReplayBuffer,
        ...             replay_buffer_kwargs={"n_sampled_goal": 4}, buffer_size=1_000,
        ...             learning_starts=50, seed=0, device="cpu")
        >>> _ = model.learn(64)
        >>> sorted(model.replay_buffer.sample(8).observations)
        ['achieved_goal', 'desired_goal', 'observation']
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        *,
        dedup_next: bool = False,
        storage: str | os.PathLike[str] = "memory",
        recover: bool = False,
    ) -> None:
        strategy: Any = goal_selection_strategy
        if isinstance(strategy, str):
            strategy = KEY_TO_GOAL_STRATEGY.get(strategy.lower())
        if not isinstance(strategy, GoalSelectionStrategy):
            raise ValueError(
                f"goal_selection_strategy: expected one of {sorted(KEY_TO_GOAL_STRATEGY)}, got "
                f"{goal_selection_strategy!r}"
            )
        if copy_info_dict and recover:
            raise ValueError(
                "copy_info_dict=True: expected recover=False, got True; infos do not outlive the "
                "process"
            )
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
            dedup_next=dedup_next,
            storage=storage,
            recover=recover,
        )
        self.env = env
        self.goal_selection_strategy = strategy
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - (1.0 / (n_sampled_goal + 1))
        self.copy_info_dict = copy_info_dict
        self._joins_rows = True
        slots = self._ring.writes * n_envs if copy_info_dict else 0
        self._infos = np.full(slots, None, dtype=object)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one row of each environment, as `SB3ReplayBuffer` does."""
        first = self.pos * self.n_envs
        super().add(obs, next_obs, action, reward, done, infos)
        if self.copy_info_dict:
            for number, info in enumerate(infos):
                self._infos[first + number] = info

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw a batch; the rows with new goals come last.

        Args:
            batch_size: number of rows.
            env: normalizes observations and rewards.

        Returns:
            ``DictReplayBufferSamples``.

        Raises:
            NotEnoughData: no episode has ended; a RuntimeError.
            RuntimeError: the buffer has no environment.
        """
        if self.env is None:
            raise RuntimeError(
                "expected an environment that computes rewards, got none; call set_env(env)"
            )
        position, envs = _drawn(self.buffer_size, self._ended_runs(), batch_size)
        fresh = int(self.her_ratio * batch_size)
        order = np.roll(np.arange(batch_size), -fresh)
        position, envs = position[order], envs[order]
        batch = self._rows(position, envs)
        if fresh:
            self._set_goals(batch, fresh, position, envs)
        return self._samples(batch, env)

    def _ended_runs(self) -> tuple[Array, Array]:
        """Return first position and count of the rows of whole episodes that have ended.

        There is one run of rows in each environment. Older rows belong to an episode that has lost
        its first row, and newer rows to an open episode.
        """
        count = self.size()
        if not count:
            return np.zeros(self.n_envs, np.int64), np.zeros(self.n_envs, np.int64)
        oldest = self.pos if self.full else 0
        envs = np.arange(self.n_envs)
        ends = [np.full(self.n_envs, at) for at in (oldest, (self.pos - 1) % self.buffer_size)]
        slots = [self._ring.slots(self.rb.storage, at, envs) for at in ends]
        found = self.rb.episodes.of(torch.from_numpy(np.concatenate(slots)))
        lengths = found.lengths.numpy()
        lost = np.where(found.heads.numpy() == Head.EVICTED, lengths, 0)[: self.n_envs]
        still = np.where(found.reasons.numpy() == EndReason.OPEN, lengths, 0)[self.n_envs :]
        return oldest + lost, np.maximum(count - lost - still, 0)

    def _set_goals(self, batch: Any, fresh: int, position: Array, envs: Array) -> None:
        """Set new goals and rewards in the last ``fresh`` rows of a batch."""
        assert self.env is not None
        position, envs = position[-fresh:], envs[-fresh:]
        index = batch["index"][-fresh:]
        step = self.rb.episodes.step(index).numpy()
        length = step + self.rb.episodes.steps_to_end(index).numpy() + 1
        if self.goal_selection_strategy == GoalSelectionStrategy.FINAL:
            chosen = length - 1
        elif self.goal_selection_strategy == GoalSelectionStrategy.FUTURE:
            chosen = draw_integers(step, length, fresh)
        else:
            chosen = draw_integers(0, length, fresh)
        at = (position - step + chosen) % self.buffer_size
        goals = self._rows(at, envs)["next", "observation", "achieved_goal"]
        achieved = batch["next", "observation", "achieved_goal"][-fresh:]
        infos: Sequence[Any] = [{} for _ in range(fresh)]
        if self.copy_info_dict:
            infos = copy.deepcopy(self._infos[index.numpy()])
        rewards = self.env.env_method(
            "compute_reward", achieved.numpy(), goals.numpy(), infos, indices=[0]
        )[0]
        for part in (batch, batch["next"]):
            part["observation", "desired_goal"][-fresh:] = goals
        values = torch.as_tensor(np.asarray(rewards).astype(np.float32)).reshape(-1, 1)
        batch["next", "reward"][-fresh:] = values

    def truncate_last_trajectory(self) -> None:
        """End the open episodes, as ``load_replay_buffer`` does by default."""
        if self.size():
            self.rb.cut()


def _drawn(positions: int, runs: tuple[Array, Array], count: int) -> tuple[Array, Array]:
    """Draw rows; return their positions and environments, int64 ``[count]`` each.

    Rows are numbered by position, then by environment, as in Stable-Baselines3.

    Args:
        positions: number of positions of the ring.
        runs: first position and number of positions for each environment.
        count: number of rows to draw.
    """
    starts = runs[0] % positions
    stops = starts + runs[1]
    # Between two neighbouring bounds, every environment has either all positions or none.
    wrapped = np.maximum(stops - positions, 0)
    bounds = [starts, np.minimum(stops, positions), wrapped, np.array([0, positions])]
    between = np.unique(np.concatenate(bounds))
    low = between[:-1, None]
    inside = ((low >= starts) & (low < stops)) | (low < wrapped)
    envs, width = np.argsort(~inside, axis=1, kind="stable"), inside.sum(axis=1)
    until = np.cumsum(np.diff(between) * width)
    total = int(until[-1])
    if not total:
        raise NotEnoughData(
            "expected a whole episode that has ended, got none; choose learning_starts larger "
            "than the longest episode, and buffer_size several times as large"
        )
    number = draw_integers(0, total, count)
    part = np.searchsorted(until, number, side="right")
    offset = number - np.where(part > 0, until[part - 1], 0)
    return between[part] + offset // width[part], envs[part, offset % width[part]]
