"""Buffers for Stable-Baselines3, compared with the buffers of that library."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
)
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize
from stable_baselines3.her import HerReplayBuffer

from replaykit import LinearScheduler, NStep
from replaykit.adapters import SB3HerReplayBuffer, SB3ReplayBuffer
from replaykit.adapters.sb3 import PrioritizedSamples
from tests.prepared import python
from tests.support.refusals import refuses

Array = np.ndarray[Any, Any]
Step = tuple[Any, Any, Array, Array, Array, list[dict[str, Any]]]

BOX = spaces.Box(-1, 1, (2,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (5,), np.float32),
    "float64": spaces.Box(-1, 1, (2, 3), np.float64),
    "image": spaces.Box(0, 255, (3, 6, 6), np.uint8),
    "discrete": spaces.Discrete(7),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (1, 4, 4), np.uint8), "x": BOX}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "discrete": spaces.Discrete(3),
    "multi-binary": spaces.MultiBinary(2),
}


def rollout(
    space: spaces.Space[Any], action: spaces.Space[Any], envs: int, count: int, seed: int
) -> Iterator[Step]:
    """Yield the arguments of ``add``: episodes of random lengths, some of which time out."""
    rng = np.random.default_rng(seed)
    space.seed(seed)
    action.seed(seed)

    def drawn(old: Any = None, ended: Any = None) -> Any:
        one = [space.sample() for _ in range(envs)]
        if old is not None:
            one = [new if end else kept for new, kept, end in zip(one, old, ended, strict=True)]
        return one

    def joined(parts: list[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: np.stack([part[key] for part in parts]) for key in parts[0]}
        return np.stack(parts)

    before = drawn()
    for _ in range(count):
        after = drawn()
        ended = rng.random(envs) < 0.15
        late = ended & (rng.random(envs) < 0.5)
        actions = np.stack([np.asarray(action.sample()) for _ in range(envs)])
        infos = [{"TimeLimit.truncated": bool(each)} if each else {} for each in late]
        yield joined(before), joined(after), actions, rng.normal(size=envs), ended, infos
        before = drawn(after, ended)


def assert_equal(found: Any, expected: Any) -> None:
    """Compare all fields of Stable-Baselines3's samples, with dtypes and strides."""
    for name in expected._fields:
        one, other = getattr(found, name), getattr(expected, name)
        if isinstance(other, dict):
            assert one.keys() == other.keys()
            pairs = [(one[key], other[key]) for key in other]
        elif other is None:
            assert one is None, name
            pairs = []
        else:
            pairs = [(one, other)]
        for a, b in pairs:
            assert a.dtype == b.dtype, name
            assert a.stride() == b.stride(), name
            assert torch.equal(a, b), name


def both(one: Any, other: Any, rows: int, seed: int, env: Any = None) -> tuple[Any, Any]:
    """Draw a batch from each of two buffers with the same seed."""
    np.random.seed(seed)  # noqa: NPY002
    first = one.sample(rows, env=env)
    np.random.seed(seed)  # noqa: NPY002
    return first, other.sample(rows, env=env)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dedup", [False, True], ids=["dense", "dedup"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize(
    ("space", "action"),
    [*((space, "box") for space in OBSERVATIONS), *(("vector", action) for action in ACTIONS)],
)
def test_batches_equal(space: str, action: str, envs: int, dedup: bool) -> None:
    given: tuple[Any, Any] = OBSERVATIONS[space], ACTIONS[action]
    kind: Any = DictReplayBuffer if space == "dict" else ReplayBuffer
    for seed, timeouts in ((0, True), (1, False)):
        expected: Any = kind(
            40, *given, device="cpu", n_envs=envs, handle_timeout_termination=timeouts
        )
        found = SB3ReplayBuffer(
            *(40, *given),
            device="cpu",
            n_envs=envs,
            handle_timeout_termination=timeouts,
            dedup_next=dedup,
        )
        for number, step in enumerate(rollout(*given, envs, 60, seed)):
            expected.add(*step)
            found.add(*step)
            counts = (expected.pos, expected.full, expected.size(), expected.buffer_size)
            assert (found.pos, found.full, found.size(), found.buffer_size) == counts
            if number % 7 == 3:
                assert_equal(*both(found, expected, 16, number))
                positions = np.arange(found.size())
                np.random.seed(number)  # noqa: NPY002
                one = found._get_samples(positions)
                np.random.seed(number)  # noqa: NPY002
                assert_equal(one, expected._get_samples(positions))
        assert found.full


@pytest.mark.parametrize("dedup", [False, True], ids=["dense", "dedup"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("steps", [2, 3, 11, 50])
def test_n_step_batches_equal(steps: int, envs: int, dedup: bool) -> None:
    options: Any = {"device": "cpu", "n_envs": envs, "n_steps": steps, "gamma": 0.97}
    for space in ("vector", "image", "discrete"):
        given = OBSERVATIONS[space], BOX
        expected = NStepReplayBuffer(45, *given, **options)
        found = SB3ReplayBuffer(45, *given, **options, dedup_next=dedup)
        for number, step in enumerate(rollout(*given, envs, 80, steps)):
            expected.add(*step)
            found.add(*step)
            if number % 5 == 2:
                assert_equal(*both(found, expected, 32, number))


def test_n_step_batches_of_dicts_equal_the_transform_of_the_package() -> None:
    space = OBSERVATIONS["dict"]
    found = SB3ReplayBuffer(30, space, BOX, device="cpu", n_envs=2, n_steps=3, gamma=0.5)
    for step in rollout(space, BOX, 2, 25, 0):
        found.add(*step)
    plain = type(found.rb)(storage=found.rb.storage, transform=NStep(3, 0.5))
    np.random.seed(4)  # noqa: NPY002
    batch = found.sample(64)
    np.random.seed(4)  # noqa: NPY002
    position, env = (np.random.randint(0, n, size=64) for n in (15, 2))  # noqa: NPY002
    rows = plain[torch.from_numpy(position * 2 + env)]
    assert torch.equal(batch.observations["image"], rows["observation", "image"])
    assert torch.equal(batch.next_observations["x"], rows["next", "observation", "x"])
    assert torch.allclose(batch.rewards, rows["next", "reward"])
    assert torch.equal(batch.discounts, rows["discount"])
    assert torch.equal(batch.dones == 0, rows["bootstrap"])


@pytest.mark.parametrize(("space", "steps"), [("vector", 1), ("vector", 3), ("dict", 1)])
def test_vec_normalize_normalizes_batches(space: str, steps: int) -> None:
    class Random(gymnasium.Env[Any, Any]):
        observation_space = OBSERVATIONS[space]
        action_space = BOX

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), float(action.sum()), False, False, {}

    keys = ["x"] if space == "dict" else None
    env = VecNormalize(DummyVecEnv([Random, Random]), clip_reward=0.5, norm_obs_keys=keys)
    env.seed(0)
    env.reset()
    for _ in range(20):
        env.step(np.random.default_rng(0).normal(size=(2, 2)))
    env.training = False
    given: tuple[Any, Any] = OBSERVATIONS[space], BOX
    options: Any = {"device": "cpu", "n_envs": 2}
    expected: Any
    if steps > 1:
        expected = NStepReplayBuffer(40, *given, **options, n_steps=steps, gamma=0.9)
    else:
        expected = (DictReplayBuffer if space == "dict" else ReplayBuffer)(40, *given, **options)
    found = SB3ReplayBuffer(40, *given, **options, n_steps=steps, gamma=0.9)
    for step in rollout(*given, 2, 30, 0):
        expected.add(*step)
        found.add(*step)
    for seed in range(5):
        assert_equal(*both(found, expected, 32, seed, env))
    assert not torch.equal(found.sample(16, env=env).rewards.abs().max(), torch.tensor(0.0))


def test_reset_and_extend() -> None:
    given = OBSERVATIONS["vector"], BOX
    expected, found = (kind(20, *given, device="cpu") for kind in (ReplayBuffer, SB3ReplayBuffer))
    steps = list(rollout(*given, 1, 25, 0))
    for buffer in (expected, found):
        buffer.extend(*zip(*steps, strict=True))
    assert_equal(*both(found, expected, 32, 0))
    for buffer in (expected, found):
        buffer.reset()
        assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
        buffer.extend(*zip(*steps[3:9], strict=True))
        assert (buffer.pos, buffer.full, buffer.size()) == (6, False, 6)
    assert_equal(*both(found, expected, 32, 1))


class Curve(BaseCallback):
    """Records the rewards of episodes, and the losses at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def _on_step(self) -> bool:
        names = ("train/loss", "train/actor_loss", "train/critic_loss", "train/ent_coef")
        logged = self.model.logger.name_to_value
        self.values.append([logged[name] for name in names if name in logged])
        self.values.append(
            [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        )
        return True


def trained(kind: Any, env: str, envs: int, steps: int, **options: Any) -> tuple[Any, list[Any]]:
    made = DummyVecEnv([lambda: Monitor(gymnasium.make(env))] * envs)
    model = kind("MlpPolicy", made, seed=7, device="cpu", learning_starts=64, **options)
    curve = Curve()
    model.learn(steps, callback=curve, log_interval=1000)
    return model, curve.values


def assert_same_training(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> None:
    assert sum(len(values) for values in one[1]) > 20
    assert one[1] == other[1]
    found, expected = one[0].policy.state_dict(), other[0].policy.state_dict()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


TRAININGS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "dqn": (DQN, "CartPole-v1", 600, {"train_freq": 2, "target_update_interval": 50}),
    "sac": (SAC, "Pendulum-v1", 300, {"batch_size": 32, "train_freq": 2}),
    "td3": (TD3, "Pendulum-v1", 300, {"batch_size": 32, "train_freq": 2}),
}


@pytest.mark.programs
@pytest.mark.parametrize(("envs", "n_steps"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("name", TRAININGS)
def test_training_equals_to_the_bit(name: str, envs: int, n_steps: int) -> None:
    kind, env, steps, options = TRAININGS[name]
    options = {**options, "buffer_size": 250, "gamma": 0.95}
    kwargs = {"n_steps": n_steps, "gamma": 0.95, "dedup_next": True} if n_steps > 1 else {}
    expected = trained(kind, env, envs, steps, **options, n_steps=n_steps)
    found = trained(
        *(kind, env, envs, steps),
        **options,
        replay_buffer_class=SB3ReplayBuffer,
        replay_buffer_kwargs=kwargs,
    )
    peer = NStepReplayBuffer if n_steps > 1 else ReplayBuffer
    assert type(expected[0].replay_buffer) is peer
    assert found[0].replay_buffer.full
    assert_same_training(found, expected)


def test_a_second_learn_ends_the_open_episode() -> None:
    model, _ = trained(
        *(DQN, "CartPole-v1", 1, 40),
        replay_buffer_class=SB3ReplayBuffer,
        replay_buffer_kwargs={"n_steps": 50, "gamma": 1.0},
    )
    buffer = model.replay_buffer
    lengths = buffer.rb.episodes.lengths.tolist()
    model.learn(4)
    assert buffer.rb.episodes.lengths.tolist() == [*lengths, 4]
    assert buffer.rb.episodes[-2].reason.name == "CUT"
    newest = buffer._get_samples(np.array([40 - lengths[-1]]))
    assert newest.rewards.item() == lengths[-1]


class Point(gymnasium.Env[Any, Any]):
    """A point that moves to a goal in the plane."""

    def __init__(self, steps: int = 7, near: float = 0.6) -> None:
        box = spaces.Box(-5, 5, (2,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict.fromkeys(names, box))
        self.action_space = BOX
        self.steps, self.near = steps, near

    def _seen(self) -> dict[str, Array]:
        return {
            "observation": self.at.copy(),
            "achieved_goal": self.at.copy(),
            "desired_goal": self.goal.copy(),
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.number = np.zeros(2, np.float32), 0
        self.goal = self.np_random.uniform(-2, 2, 2).astype(np.float32)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = np.clip(self.at + np.asarray(action, np.float32), -5, 5)
        self.number += 1
        reward = float(self.compute_reward(self.at, self.goal, {}))
        info = {"number": self.number}
        return self._seen(), reward, reward == 0, self.number >= self.steps, info

    def compute_reward(self, achieved: Any, goal: Any, infos: Any) -> Any:
        apart = np.linalg.norm(np.asarray(achieved) - goal, axis=-1)
        bonus = sum(info["number"] for info in infos) if len(infos) and infos[0] else 0
        return -(apart > self.near).astype(np.float32) + np.float32(bonus)


def hindsight(kind: Any, envs: int, steps: int, *, normal: bool = False, **kwargs: Any) -> Any:
    env: VecEnv = DummyVecEnv([Point] * envs)
    if normal:
        env = VecNormalize(env)
    model = SAC(
        *("MultiInputPolicy", env),
        replay_buffer_class=kind,
        replay_buffer_kwargs=kwargs,
        buffer_size=120,
        learning_starts=60,
        batch_size=32,
        train_freq=4,
        seed=3,
        device="cpu",
    )
    return model.learn(steps)


@pytest.mark.covering(2)
@pytest.mark.parametrize("normal", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("envs", [1, 3])
def test_hindsight_equals_to_the_bit(envs: int, strategy: str, normal: bool) -> None:
    shared: Any = {
        "goal_selection_strategy": strategy,
        "copy_info_dict": strategy == "final",
        "n_sampled_goal": 3,
    }
    expected = hindsight(HerReplayBuffer, envs, 180, normal=normal, **shared)
    found = hindsight(SB3HerReplayBuffer, envs, 180, normal=normal, **shared, dedup_next=envs > 1)
    assert found.replay_buffer.full
    for name, values in expected.policy.state_dict().items():
        assert torch.equal(found.policy.state_dict()[name], values), name
    env = found.get_vec_normalize_env()
    for seed in range(4):
        pair = both(found.replay_buffer, expected.replay_buffer, 41, seed, env)
        assert_equal(*pair)


def test_hindsight_draws_only_ended_episodes() -> None:
    env: Any = DummyVecEnv([lambda: Point(steps=4, near=-1)])
    buffer = SB3HerReplayBuffer(10, env.observation_space, env.action_space, env, device="cpu")
    refuses(RuntimeError, "expected a whole episode that has ended, got none", buffer.sample, 4)
    seen: Any = env.reset()
    for number in range(13):
        after, reward, done, infos = env.step(np.full((1, 2), -1, np.float32))
        following: Any = infos[0].get("terminal_observation", None)
        following = after if following is None else {k: v[None] for k, v in following.items()}
        buffer.add(seen, following, np.zeros((1, 2)), reward, done, infos)
        seen = after
        if number == 2:
            refuses(RuntimeError, "learning_starts", buffer.sample, 4)
    # Rows 3 to 12 are stored. Row 3 has lost its episode, and row 12 is in an open episode.
    assert [len(e) for e in buffer.rb.episodes] == [1, 4, 4, 1]
    drawn = buffer.sample(500).observations["observation"][:, 0]
    assert sorted(set(drawn.tolist())) == [-3, -2, -1, 0]
    buffer.truncate_last_trajectory()
    assert buffer._ended_runs()[1].sum() == 9


class Pixels(gymnasium.Env[Any, Any]):
    """Random images in short episodes."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def _seen(self) -> Array:
        return self.np_random.integers(0, 256, (36, 36, 1)).astype(np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.number += 1
        ended = bool(self.np_random.random() < 0.05)
        return self._seen(), float(action), ended, self.number >= 9, {}


def pixels(kind: Any, envs: int, **kwargs: Any) -> Any:
    model = DQN(
        *("CnnPolicy", VecFrameStack(DummyVecEnv([Pixels] * envs), 4)),
        replay_buffer_class=kind,
        replay_buffer_kwargs=kwargs,
        buffer_size=60,
        learning_starts=20,
        batch_size=8,
        train_freq=8,
        target_update_interval=10,
        seed=1,
        device="cpu",
    )
    model.learn(70)
    return model.learn(40)


@pytest.mark.parametrize("envs", [1, 2])
def test_images_and_stacked_frames_equal_to_the_bit(envs: int) -> None:
    expected = pixels(ReplayBuffer, envs)
    for kwargs in (
        {"dedup_next": True},
        {"frame_stack": 4},
        {"frame_stack": 4, "dedup_next": True},
    ):
        found = pixels(SB3ReplayBuffer, envs, **kwargs)
        assert found.replay_buffer.full
        for name, values in expected.policy.state_dict().items():
            assert torch.equal(found.policy.state_dict()[name], values), name
        for seed in range(10):
            assert_equal(*both(found.replay_buffer, expected.replay_buffer, 60, seed))


def frames(envs: int, count: int, episode: int) -> Iterator[Step]:
    """Yield steps of stacks of 4 frames of 84 x 84 pixels."""
    rng = np.random.default_rng(0)

    def frame() -> Array:
        return rng.integers(0, 256, (envs, 1, 84, 84), np.uint8)

    stack = np.zeros((envs, 4, 84, 84), np.uint8)
    stack[:, 3:] = frame()
    for number in range(count):
        after = np.concatenate([stack[:, 1:], frame()], axis=1)
        ended = number % episode == episode - 1
        zeros = np.zeros(envs)
        yield stack, after, zeros.astype(int), zeros, np.full(envs, ended), [{}] * envs
        stack = after
        if ended:
            stack = np.zeros_like(after)
            stack[:, 3:] = frame()


def test_n_step_stacks_equal() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    options: Any = {"device": "cpu", "n_envs": 2, "n_steps": 3, "gamma": 0.99}
    expected = NStepReplayBuffer(24, space, spaces.Discrete(2), **options)
    found = SB3ReplayBuffer(
        24, space, spaces.Discrete(2), **options, frame_stack=4, dedup_next=True
    )
    for number, step in enumerate(frames(2, 30, 7)):
        expected.add(*step)
        found.add(*step)
        assert_equal(*both(found, expected, 16, number))
        if number % 5 == 4:  # a copy continues the open episodes
            found = pickle.loads(pickle.dumps(found))
            state = found._step.__getstate__()  # earlier releases saved an array
            found._step.__setstate__({**state, "after": state["after"][""]})


@pytest.mark.parametrize("envs", [1, 4])
def test_memory(envs: int) -> None:
    space, rows = spaces.Box(0, 255, (4, 84, 84), np.uint8), 2_000
    dense = ReplayBuffer(rows, space, spaces.Discrete(6), device="cpu", n_envs=envs)
    names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    theirs = sum(getattr(dense, name).nbytes for name in names)
    del dense
    for kwargs, most in (
        ({"dedup_next": True}, 0.52),
        ({"frame_stack": 4}, 0.26),
        ({"frame_stack": 4, "dedup_next": True}, 0.135),
    ):
        made = SB3ReplayBuffer(rows, space, spaces.Discrete(6), device="cpu", n_envs=envs, **kwargs)
        for step in frames(envs, rows // envs + 20, 500):
            made.add(*step)
        assert made.full
        ours = made.rb.storage.nbytes
        assert ours <= most * theirs, (kwargs, ours / theirs)


def test_observations_that_are_no_stacks_are_refused() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = SB3ReplayBuffer(24, space, spaces.Discrete(2), device="cpu", frame_stack=4)
    obs, after, *other = next(frames(1, 1, 9))
    rest: Any = other
    with pytest.raises(ValueError, match="expected observations of a VecFrameStack"):
        buffer.add(obs, after[:, ::-1], *rest)
    obs = obs.copy()
    obs[:, 0] = 1
    refuses(ValueError, "zeros before the first frame of an episode", buffer.add, obs, after, *rest)
    assert buffer.size() == 0


class PrioritizedDQN(DQN):
    """DQN with importance weights, as on the page ``docs/coming_from/stable_baselines3.md``."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        buffer: Any = self.replay_buffer
        for _ in range(gradient_steps):
            batch = buffer.sample(batch_size, env=self._vec_normalize_env)
            discount = self.gamma if batch.discounts is None else batch.discounts
            with torch.no_grad():
                following = self.q_net_target(batch.next_observations).amax(1, keepdim=True)
                target = batch.rewards + (1 - batch.dones) * discount * following
            value = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = torch.nn.functional.smooth_l1_loss(value, target, reduction="none")
            self.policy.optimizer.zero_grad()
            (batch.weights * loss).mean().backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priority(batch, (target - value).abs())
        self._n_updates += gradient_steps


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("envs", [1, 3])
def test_a_subclass_of_dqn_trains_by_priority(envs: int, steps: int) -> None:
    kwargs = {"prioritized": True, "n_steps": steps, "gamma": 0.99}
    model, _ = trained(
        *(PrioritizedDQN, "CartPole-v1", envs, 300),
        replay_buffer_class=SB3ReplayBuffer,
        replay_buffer_kwargs=kwargs,
        buffer_size=200,
    )
    batch = model.replay_buffer.sample(64)
    assert type(batch) is PrioritizedSamples
    assert batch.weights.shape == batch.rewards.shape == (64, 1)
    assert batch.weights.dtype == torch.float32
    assert len(set(batch.weights.flatten().tolist())) > 10
    assert (batch.discounts is None) == (steps == 1)
    annealing = LinearScheduler(model.replay_buffer.rb, "beta", final_value=1.0, num_steps=2)
    annealing.step()
    assert model.replay_buffer.rb.sampler.beta == pytest.approx(0.7)


def test_unchanged_algorithms_accept_prioritized_samples() -> None:
    for name in ("dqn", "sac"):
        kind, env, _, options = TRAININGS[name]
        trained(
            *(kind, env, 1, 100),
            **options,
            replay_buffer_class=SB3ReplayBuffer,
            replay_buffer_kwargs={"prioritized": True},
        )


def test_rows_are_drawn_by_priority() -> None:
    space = OBSERVATIONS["vector"]
    options: Any = {"device": "cpu", "n_envs": 2, "prioritized": True, "alpha": 1.0, "beta": 1.0}
    buffer = SB3ReplayBuffer(8, space, BOX, **options)
    steps = list(rollout(space, BOX, 2, 6, 0))
    for step in steps[:4]:
        buffer.add(*step)
    torch.manual_seed(0)
    batch = buffer.sample(2000)
    assert torch.equal(batch.indices.bincount(minlength=8) > 0, torch.ones(8, dtype=torch.bool))
    for step, chosen in zip(*(torch.unique(batch.indices // 2), range(4)), strict=True):
        rows = batch.indices // 2 == step
        env = batch.indices[rows] % 2
        assert torch.equal(batch.observations[rows], torch.from_numpy(steps[chosen][0])[env])
    buffer.update_priority(batch, batch.indices + 1)
    drawn = buffer.sample(36_000)
    counts = drawn.indices.bincount(minlength=8) / 1000
    assert torch.allclose(counts, torch.arange(1.0, 9), atol=0.25)
    expected = 1 / (drawn.indices + 1.0)
    assert torch.allclose(drawn.weights.squeeze(1), expected / expected.max())
    # Rows that were overwritten since the draw keep the priority of new rows.
    for step in steps[4:]:
        buffer.add(*step)
    buffer.update_priority(batch, torch.zeros(2000, 1))
    assert set((buffer.sample(200).indices).tolist()) == {0, 1, 2, 3}


KILLED = """
import os, signal, sys
import numpy as np
from replaykit.adapters import SB3ReplayBuffer
from tests.adapters.test_sb3 import BOX, OBSERVATIONS, rollout

buffer = SB3ReplayBuffer(
    60, OBSERVATIONS["image"], BOX, device="cpu", n_envs=int(sys.argv[2]), storage=sys.argv[1],
    recover=True, dedup_next=True, prioritized=True,
)
for number, step in enumerate(rollout(OBSERVATIONS["image"], BOX, int(sys.argv[2]), 70, 5)):
    buffer.add(*step)
    if number == 64:
        batch = buffer.sample(8)
        buffer.update_priority(batch, np.full(8, 3.0))
        print(",".join(map(str, batch.indices.tolist())), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("envs", [1, 2])
def test_rows_outlive_a_kill(tmp_path: Path, envs: int) -> None:
    child = subprocess.run(
        [*python(), "-c", KILLED, str(tmp_path / "rows"), str(envs)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    space = OBSERVATIONS["image"]
    options: Any = {"device": "cpu", "n_envs": envs}
    expected = ReplayBuffer(60, space, BOX, **options)
    more = list(rollout(space, BOX, envs, 70, 5))
    for step in more[:65]:
        expected.add(*step)
    files = {**options, "storage": tmp_path / "rows", "recover": True, "dedup_next": True}
    weighted = SB3ReplayBuffer(60, space, BOX, **files, prioritized=True)
    assert (weighted.pos, weighted.full) == (expected.pos, expected.full)
    drawn = {int(index) for index in child.stdout.split(",")}
    torch.manual_seed(0)
    counts = weighted.sample(4000).indices.bincount(minlength=60)
    assert min(counts[sorted(drawn)]) > max(counts[sorted(set(range(60)) - drawn)])
    del weighted
    found = SB3ReplayBuffer(60, space, BOX, **files)
    for step in more[65:]:
        assert_equal(*both(found, expected, 60, 0))
        expected.add(*step)
        found.add(*step)
    assert_equal(*both(found, expected, 60, 1))
    del found
    refuses(ValueError, "max_size", SB3ReplayBuffer, 90, space, BOX, **files)


def test_another_number_of_environments_is_refused(tmp_path: Path) -> None:
    space = OBSERVATIONS["vector"]
    files: Any = {"device": "cpu", "storage": tmp_path, "recover": True}
    buffer = SB3ReplayBuffer(12, space, BOX, **files, n_envs=2)
    for step in rollout(space, BOX, 2, 6, 0):
        buffer.add(*step)
    del buffer
    with pytest.raises(ValueError, match=r"expected rows of 3 environments.*\[0, 1, 0\]"):
        SB3ReplayBuffer(12, space, BOX, **files, n_envs=3)


@pytest.mark.parametrize(
    "kwargs", [{}, {"storage": "rows"}, {"n_steps": 3, "gamma": 0.9, "dedup_next": True}]
)
def test_replay_buffers_are_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, _ = trained(
        *(DQN, "CartPole-v1", 2, 200),
        replay_buffer_class=SB3ReplayBuffer,
        replay_buffer_kwargs=kwargs,
        buffer_size=160,
    )
    model.save("model")
    model.save_replay_buffer("rows.pkl")
    if "storage" in kwargs:
        fresh: Any = DQN.load("model", device="cpu").replay_buffer
        refuses(RuntimeError, "rows", fresh.rb.extend, model.replay_buffer.rb[:2])
    loaded = DQN.load("model", env=model.get_env(), device="cpu")
    loaded.load_replay_buffer("rows.pkl")
    one, other = loaded.replay_buffer, model.replay_buffer
    assert isinstance(one, SB3ReplayBuffer)
    assert (one.pos, one.full, one.size()) == (other.pos, other.full, other.size())
    assert_equal(*both(one, other, 64, 0))
    loaded.learn(60, reset_num_timesteps=False)
    assert one.pos != other.pos


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("size", [40, 60])
def test_checkpoints_are_loaded_into_any_capacity(tmp_path: Path, size: int, envs: int) -> None:
    space = OBSERVATIONS["vector"]
    steps = list(rollout(space, BOX, envs, 100, 0))
    saved = SB3ReplayBuffer(40, space, BOX, device="cpu", n_envs=envs)
    for step in steps[:50]:
        saved.add(*step)
    saved.rb.dumps(tmp_path / "checkpoint")
    found = SB3ReplayBuffer(size, space, BOX, device="cpu", n_envs=envs)
    found.rb.loads(tmp_path / "checkpoint")
    assert found.full == (size == 40)
    assert found.size() == 40 // envs
    if size == 40:
        assert found.pos == saved.pos
        assert_equal(*both(found, saved, 50, 0))
    for number, step in enumerate(steps[50:]):
        position = found.pos
        assert position == ((50 if size == 40 else 40 // envs) + number) % found.buffer_size
        found.add(*step)
        stored = found._get_samples(np.full(50, position)).observations
        assert set(map(tuple, stored.tolist())) == set(map(tuple, step[0].tolist()))
    assert found.full


def test_a_loaded_hindsight_buffer_ends_its_open_episode(tmp_path: Path) -> None:
    model = hindsight(SB3HerReplayBuffer, 2, 100, copy_info_dict=True)
    model.save_replay_buffer(tmp_path / "rows.pkl")
    before = model.replay_buffer._ended_runs()[1].sum()
    model.load_replay_buffer(tmp_path / "rows.pkl", truncate_last_traj=False)
    assert model.replay_buffer._ended_runs()[1].sum() == before
    model.load_replay_buffer(tmp_path / "rows.pkl")
    assert model.replay_buffer._ended_runs()[1].sum() > before
    assert model.replay_buffer.sample(9).rewards.shape == (9, 1)
    model.replay_buffer.env = None
    refuses(RuntimeError, r"call set_env\(env\)", model.replay_buffer.sample, 9)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optimize_memory_usage": True}, "replay_buffer_kwargs={'dedup_next': True}"),
        ({"n_steps": 0}, "expected n_steps as an int of at least 1, got 0"),
        ({"frame_stack": 1.5}, "expected frame_stack as an int of at least 1, got 1.5"),
        ({"frame_stack": 3}, "frame_stack=3: expected an array whose first axis"),
        ({"gamma": 1.5}, r"gamma: expected a number in \[0, 1\], got 1.5"),
        ({"n_steps": 3}, "gamma: expected the discount of the algorithm with n_steps=3, got None"),
        ({"alpha": 0.6}, "alpha: expected None without prioritized=True, got 0.6"),
        ({"beta": 0.0}, "beta: expected None without prioritized=True, got 0.0"),
        ({"recover": True}, "expected storage= with the folder of the rows, got 'memory'"),
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    refuses(ValueError, message, SB3ReplayBuffer, 8, OBSERVATIONS["vector"], BOX, **kwargs)


def test_prioritized_exponents_have_defaults() -> None:
    given = OBSERVATIONS["vector"], BOX
    for options, expected in (({}, (0.6, 0.4)), ({"alpha": 0.0, "beta": 1.0}, (0.0, 1.0))):
        sampler: Any = SB3ReplayBuffer(8, *given, prioritized=True, **options).rb.sampler
        assert (sampler.alpha, sampler.beta) == expected


def test_hindsight_arguments_are_checked() -> None:
    env: Any = DummyVecEnv([Point])
    given = (8, env.observation_space, env.action_space, env)
    for kwargs, message in (
        ({"goal_selection_strategy": "past"}, r"expected one of \['episode', 'final', 'future'\]"),
        ({"copy_info_dict": True, "recover": True, "storage": "x"}, "expected recover=False"),
    ):
        refuses(ValueError, message, SB3HerReplayBuffer, *given, **kwargs)


def test_wrong_calls_are_refused() -> None:
    buffer = SB3ReplayBuffer(8, OBSERVATIONS["vector"], BOX, device="cpu", n_envs=2)
    step: list[Any] = list(next(rollout(OBSERVATIONS["vector"], BOX, 2, 1, 0)))
    for number, name in enumerate(("obs", "next_obs", "action", "reward")):
        wrong = list(step)
        wrong[number] = np.zeros((2, 9))
        words = rf"{name}: expected the shape .*got \(2, 9\)"
        refuses(ValueError, words, buffer.add, *wrong)
    assert buffer.size() == 0
    refuses(RuntimeError, "got an empty buffer", buffer.sample, 3)
    words = r"replay_buffer_kwargs={'prioritized': True}"
    refuses(RuntimeError, words, buffer.update_priority, None, torch.zeros(3))


def test_the_package_is_imported_at_first_use_and_named_if_it_is_missing() -> None:
    code = (
        "import sys, replaykit.adapters; assert 'stable_baselines3' not in sys.modules; "
        "sys.modules['stable_baselines3'] = None; replaykit.adapters.SB3ReplayBuffer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError" in done.stderr
    assert "pip install 'replaykit[sb3]'" in done.stderr
