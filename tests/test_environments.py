"""Rows made of what environments take and give, against a plain loop over single environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorObservationWrapper
from gymnasium.wrappers.vector import DictInfoToList
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SliceSampler,
    StackFrames,
    VectorSteps,
    transition,
)
from tests.support.refusals import refuses

ENVS = 3
MODES = list(AutoresetMode)


class Walk(gymnasium.Env[Any, Any]):
    """Observes the number of the environment, of its episode, and of the step.

    Episode ``e`` of environment ``n`` has ``2 + (2 * e + n) % 4`` steps; every other one is cut
    short. The reward says after which observation and action it came.
    """

    def __init__(self, number: int, nested: bool = False) -> None:
        self.number, self.nested, self.episode, self.time = number, nested, -1, 0
        box = spaces.Box(-1, 1000, (3,), np.float32)
        if nested:
            parts = spaces.Tuple((box, spaces.Discrete(100)))
            self.observation_space: Any = spaces.Dict({"image": box, "parts": parts})
        else:
            self.observation_space = box
        self.action_space = spaces.Discrete(5)

    def seen(self) -> Any:
        values = np.array([self.number, self.episode, self.time], np.float32)
        if self.nested:
            return {"image": values, "parts": (-values / 1000, np.int64(self.time))}
        return values

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.time + action / 10
        self.time += 1
        over = self.time == 2 + (2 * self.episode + self.number) % 4
        cut = self.episode % 2 == 1
        return self.seen(), reward, over and not cut, over and cut, {"time": self.time}


def action_of(env: int, episode: int, time: int) -> int:
    return (env + 2 * episode + 3 * time) % 5


def expected(env: int, count: int) -> list[tuple[Any, ...]]:
    """What an environment does alone: (before, action, reward, after, terminated, truncated)."""
    alone, found = Walk(env), []
    before, _ = alone.reset()
    while len(found) < count:
        action = action_of(*map(int, before))
        after, reward, terminated, truncated, _ = alone.step(action)
        found.append((before.tolist(), action, reward, after.tolist(), terminated, truncated))
        before = alone.reset()[0] if terminated or truncated else after
    return found


def rows_of(rows: Any) -> list[tuple[Any, ...]]:
    """The same of rows."""
    after = rows["next"]
    return [
        (before, action, pytest.approx(reward), last, terminated, truncated)
        for before, (action,), (reward,), last, (terminated,), (truncated,) in zip(
            rows["observation"].tolist(),
            rows["action"].tolist(),
            after["reward"].tolist(),
            after["observation"].tolist(),
            after["terminated"].tolist(),
            after["truncated"].tolist(),
            strict=True,
        )
    ]


def make_envs(kind: Any, mode: AutoresetMode, *, nested: bool = False, **others: Any) -> Any:
    makers = [partial(Walk, number, nested) for number in range(ENVS)]
    return kind(makers, autoreset_mode=mode, **others)


def play(steps: VectorSteps, count: int, write: Callable[[TensorDict], Any]) -> None:
    """Takes ``count`` steps; each environment's action follows from what it observes."""
    observation, _ = steps.reset()
    for _ in range(count):
        if steps.autoreset == "disabled" and steps.ended.any():
            steps.reset(options={"reset_mask": steps.ended})
        seen = steps.observation
        seen = seen["image"] if isinstance(seen, dict) else seen
        assert seen.shape == observation["image" if isinstance(observation, dict) else ...].shape
        write(steps.step(np.array([action_of(*map(int, row)) for row in seen])))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "others"),
    [(SyncVectorEnv, {}), (SyncVectorEnv, {"copy": False}), (AsyncVectorEnv, {})],
    ids=["sync", "sync without copies", "async"],
)
def test_rows_equal_those_of_each_environment_run_alone(
    kind: Any, others: dict[str, Any], mode: AutoresetMode
) -> None:
    envs = make_envs(kind, mode, **others)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, lane_key="env"))
    written: list[TensorDict] = []
    try:
        play(VectorSteps(envs), 40, lambda rows: (written.append(rows), rb.extend(rows)))
    finally:
        envs.close()
    together = torch.cat(written)
    for env in range(ENVS):
        own = together[together["env"] == env]
        assert len(own) == 40 if mode != AutoresetMode.NEXT_STEP else 25 < len(own) < 40
        assert expected(env, len(own)) == rows_of(own)
        episodes = [e for e in rb.episodes if int(e.rows()["env"][0]) == env]
        assert [row for e in episodes for row in rows_of(e.rows())] == rows_of(own)
        for episode in episodes:
            assert len(set(episode.rows()["observation"][:, 1].tolist())) == 1
            assert len(set(episode.rows()["episode"].tolist())) == 1
    ends = together["next", "done"]
    assert torch.equal(ends, together["next", "terminated"] | together["next", "truncated"])
    pairs = torch.stack([together["observation"][:, :2].sum(-1), together["env"]], -1).unique(dim=0)
    assert len(together["episode"].unique()) == len(pairs)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_nested_spaces_have_their_true_last_observation(mode: AutoresetMode, kind: Any) -> None:
    envs = make_envs(kind, mode, nested=True)
    written: list[TensorDict] = []
    try:
        play(VectorSteps(envs), 30, written.append)
    finally:
        envs.close()
    rows = torch.cat(written)
    for seen in (rows["observation"], rows["next", "observation"]):
        assert set(seen.keys(True, True)) == {"image", ("parts", "0"), ("parts", "1")}
        assert torch.equal(seen["parts", "0"], -seen["image"] / 1000)
        assert torch.equal(seen["parts", "1"], seen["image"][:, 2:].long())
    plain = rows.select("action", "next", "env")
    plain["observation"] = rows["observation", "image"]
    plain["next", "observation"] = rows["next", "observation", "image"]
    for env in range(ENVS):
        own = plain[plain["env"] == env]
        assert expected(env, len(own)) == rows_of(own)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_infos_may_be_a_list_with_a_dict_of_each_environment(
    mode: AutoresetMode, nested: bool
) -> None:
    steps = VectorSteps(DictInfoToList(make_envs(SyncVectorEnv, mode, nested=nested)))
    written: list[TensorDict] = []
    play(steps, 30, written.append)
    assert [type(each) for each in steps.infos] == [dict] * ENVS
    rows = torch.cat(written)
    for keys in (("observation",), ("next", "observation")) if nested else ():
        seen = rows[keys]
        assert torch.equal(seen["parts", "0"], -seen["image"] / 1000)
        rows[keys] = seen["image"]
    for env in range(ENVS):
        own = rows[rows["env"] == env]
        assert expected(env, len(own)) == rows_of(own)


STORAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "by stream": lambda: {"storage": LazyTensorStorage(50, lane_key="env")},
    "a ring for each": lambda: {
        "storage": LazyTensorStorage(60, lane_key="env"),
        "writer": LaneWriter(20),
    },
    "flat": lambda: {"storage": LazyTensorStorage(50)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STORAGES)
def test_windows_and_transforms_never_mix_episodes(name: str, mode: AutoresetMode) -> None:
    """Rings have gone round; a flat storage gives windows of one row, but none that is false."""
    n_step = NStep(3, 0.9)
    stack = StackFrames("observation", 2)
    sampled = {
        "slices": ReplayBuffer(
            batch_size=24,
            sampler=SliceSampler(slice_len=4, strict_length=False),
            **STORAGES[name](),
        ),
        "n-step": ReplayBuffer(batch_size=24, transform=n_step, **STORAGES[name]()),
        "stacks": ReplayBuffer(batch_size=24, transform=stack, **STORAGES[name]()),
    }

    def write(rows: TensorDict) -> None:
        for rb in sampled.values():
            rb.extend(rows)

    play(VectorSteps(make_envs(SyncVectorEnv, mode)), 60, write)
    lengths = set()
    for _ in range(40):
        windows = sampled["slices"].sample()
        starts = torch.cat([torch.tensor([True]), windows["next", "truncated"][:-1, 0]])
        starts[1:] |= windows["next", "terminated"][:-1, 0]
        for window in windows.split(
            torch.diff(starts.nonzero()[:, 0], append=torch.tensor([len(windows)])).tolist()
        ):
            seen = window["observation"]
            assert len(seen[:, :2].unique(dim=0)) == 1
            assert torch.equal(seen[1:, 2], seen[:-1, 2] + 1)
            lengths.add(len(window))
        batch = sampled["n-step"].sample()
        first, last = batch["observation"], batch["next", "observation"]
        assert torch.equal(first[:, :2], last[:, :2])
        gone = (last[:, 2] - first[:, 2]).long()
        assert set(gone.tolist()) <= ({1} if name == "flat" else {1, 2, 3})
        for row, steps, total in zip(
            first.long().tolist(),
            gone.tolist(),
            batch["next", "reward"][:, 0].tolist(),
            strict=True,
        ):
            env, episode, time = row
            rewards = [t + action_of(env, episode, t) / 10 for t in range(time, time + steps)]
            assert total == pytest.approx(sum(r * 0.9**k for k, r in enumerate(rewards)))
        frames = sampled["stacks"].sample()["observation"].view(24, 2, 3)
        assert torch.equal(frames[:, 0, :2], frames[:, 1, :2])
        assert (frames[:, 1, 2] - frames[:, 0, 2] <= 1).all()
    assert max(lengths) == (1 if name == "flat" else 4)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_add_writes_a_vector_step_to_all_lanes(mode: AutoresetMode) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(300, ndim=2),
        batch_size=24,
        sampler=SliceSampler(slice_len=4, strict_length=False),
    )
    play(VectorSteps(make_envs(SyncVectorEnv, mode)), 40, rb.add)
    assert rb[:].batch_size == (ENVS, 40)
    for env in range(ENVS):
        assert expected(env, 40) == rows_of(rb[:][env])
    assert all(len(e.rows()["observation"][:, :2].unique(dim=0)) == 1 for e in rb.episodes)


def test_a_reset_in_the_middle_begins_another_episode() -> None:
    steps = VectorSteps(make_envs(SyncVectorEnv, AutoresetMode.NEXT_STEP))
    rb = ReplayBuffer(storage=LazyTensorStorage(100, lane_key="env"))
    for _ in range(3):
        steps.reset()
        rb.extend(steps.step(np.zeros(ENVS, int)))
    assert len(rb.episodes) == 3 * ENVS
    steps.reset(options={"reset_mask": np.array([True, False, False])})
    rows = steps.step(np.zeros(ENVS, int))
    rb.extend(rows)
    assert rows["observation"][:, 2].tolist()[:1] == [0]
    assert len(rb.episodes) == 3 * ENVS + 1


def test_a_step_in_which_all_environments_are_reset_writes_nothing() -> None:
    envs = SyncVectorEnv([partial(Walk, 0)], autoreset_mode=AutoresetMode.NEXT_STEP)
    steps, rb = VectorSteps(envs), ReplayBuffer(storage=LazyTensorStorage(100, lane_key="env"))
    play(steps, 3, rb.extend)
    assert (len(rb), len(rb.episodes)) == (2, 1)
    assert len(rb.extend(steps.step(np.zeros(1, int)))) == 1


def test_rows_do_not_change_with_the_environment_or_each_other() -> None:
    steps = VectorSteps(make_envs(SyncVectorEnv, AutoresetMode.NEXT_STEP, copy=False))
    steps.reset()
    action = np.array([1, 2, 3])
    first = steps.step(action)
    kept = first.clone()
    first["next", "observation"].zero_()  # a row may be edited: the next one is as it was
    action += 1
    second = steps.step(action)
    assert torch.equal(second["observation"], kept["next", "observation"])
    assert torch.equal(first["observation"], kept["observation"])
    assert torch.equal(first["action"], kept["action"])


def test_actions_may_be_tensors() -> None:
    steps = VectorSteps(make_envs(SyncVectorEnv, AutoresetMode.NEXT_STEP))
    steps.reset()
    rows = steps.step(torch.tensor([0, 1, 2]))
    assert rows["action"].tolist() == [[0], [1], [2]]
    assert rows["next", "reward"].tolist() == [[0.0], [pytest.approx(0.1)], [pytest.approx(0.2)]]


def test_first_lane_separates_lanes_of_vector_environments() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, lane_key="env"))
    both = [
        VectorSteps(make_envs(SyncVectorEnv, AutoresetMode.NEXT_STEP), first_lane=first)
        for first in (0, ENVS)
    ]
    for steps in both:
        steps.reset()
    for _ in range(5):
        for steps in both:
            rb.extend(steps.step(np.zeros(ENVS, int)))
    assert sorted(rb["env"].unique().tolist()) == list(range(2 * ENVS))
    assert all(len(e.rows()["observation"][:, 1].unique()) == 1 for e in rb.episodes)


def test_a_reset_that_ignores_its_mask_is_refused() -> None:
    """CartPole's own vector environment resets all environments at any reset."""
    envs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    steps = VectorSteps(envs)
    steps.reset(seed=0)
    steps.step(np.ones(3, int))
    mask = np.array([True, False, False])
    with pytest.raises(RuntimeError, match=r"environments \[1, 2\].*'reset_mask'"):
        steps.reset(options={"reset_mask": mask})
    refuses(RuntimeError, r"expected reset\(\)", steps.step, np.ones(3, int))
    refuses(RuntimeError, "of all environments", steps.reset, options={"reset_mask": mask})
    before, _ = steps.reset(seed=1)
    assert steps.step(np.ones(3, int))["observation"].tolist() == before.tolist()


def test_after_an_interrupted_step_only_a_reset_of_all_environments_goes_on() -> None:
    """The environment took a step whose row was lost, so the next row would be none."""

    class Interrupted(Walk):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            found = super().step(action)
            if action == 4:
                raise KeyboardInterrupt
            return found

    steps = VectorSteps(SyncVectorEnv([partial(Interrupted, 1)]))
    steps.reset()
    first = steps.step(np.zeros(1, int))
    with pytest.raises(KeyboardInterrupt):
        steps.step(np.array([4]))
    refuses(RuntimeError, r"expected reset\(\)", steps.step, np.zeros(1, int))
    before, _ = steps.reset()
    row = steps.step(np.zeros(1, int))
    assert row["observation"].tolist() == before.tolist()
    assert row["episode"].item() != first["episode"].item()


def test_step_before_reset_or_after_an_end_is_refused() -> None:
    steps = VectorSteps(make_envs(SyncVectorEnv, AutoresetMode.DISABLED))
    with pytest.raises(RuntimeError, match=r"expected reset\(\) before the first step"):
        steps.step(np.zeros(ENVS, int))
    steps.reset()
    while not steps.ended.any():
        steps.step(np.zeros(ENVS, int))
    with pytest.raises(RuntimeError, match=r"environments \[0\] have ended.*reset_mask"):
        steps.step(np.zeros(ENVS, int))
    steps.reset(options={"reset_mask": steps.ended})
    assert len(steps.step(np.zeros(ENVS, int))) == ENVS


@pytest.mark.parametrize(
    ("real", "said", "message"),
    [
        (AutoresetMode.NEXT_STEP, "same_step", "infos.'final_obs'.*not SAME_STEP"),
        (AutoresetMode.SAME_STEP, "next_step", "not NEXT_STEP"),
    ],
)
def test_wrong_autoreset_mode_is_detected_while_stepping(
    real: AutoresetMode, said: str, message: str
) -> None:
    makers = [lambda: gymnasium.wrappers.TimeLimit(Walk(0), 1) for _ in range(2)]
    steps = VectorSteps(SyncVectorEnv(makers, autoreset_mode=real), autoreset=said)
    steps.reset()

    def two_steps() -> None:
        for _ in range(2):
            steps.step(np.zeros(2, int))

    refuses(RuntimeError, message, two_steps)


def test_autoreset_mode_comes_from_metadata_or_argument() -> None:
    envs = make_envs(SyncVectorEnv, AutoresetMode.SAME_STEP)
    assert repr(VectorSteps(envs)) == "VectorSteps(num_envs=3, autoreset='same_step')"
    with pytest.raises(ValueError, match="autoreset: expected one of 'next_step', 'same_step'"):
        VectorSteps(envs, autoreset="sometimes")
    refuses(ValueError, "first_lane", VectorSteps, envs, first_lane=-1)
    envs.metadata = {}
    refuses(ValueError, r"'autoreset_mode' in the metadata.*autoreset=", VectorSteps, envs)
    assert VectorSteps(envs, autoreset="NEXT_STEP").autoreset == "next_step"


def test_rows_hold_observations_of_the_outermost_wrapper() -> None:
    class Halved(VectorObservationWrapper):  # type: ignore[type-arg]
        def observations(self, observations: Any) -> Any:
            return observations / 2

    envs = Halved(make_envs(SyncVectorEnv, AutoresetMode.NEXT_STEP))
    steps = VectorSteps(envs)
    steps.reset()
    assert steps.step(np.zeros(ENVS, int))["next", "observation"][:, 2].tolist() == [0.5] * 3


# -- one transition -------------------------------------------------------------------------------


def test_a_transition_has_the_keys_shapes_and_dtypes_of_ted() -> None:
    row = transition(np.zeros(4), 1, 0, np.ones(4), np.bool_(False), True)
    found = {key: (tuple(row[key].shape), row[key].dtype) for key in row.keys(True, True)}
    assert found == {
        "observation": ((4,), torch.float64),
        "action": ((1,), torch.int64),
        ("next", "observation"): ((4,), torch.float64),
        ("next", "reward"): ((1,), torch.float32),
        ("next", "terminated"): ((1,), torch.bool),
        ("next", "truncated"): ((1,), torch.bool),
        ("next", "done"): ((1,), torch.bool),
    }
    assert row.batch_size == row["next"].batch_size == ()
    assert row["next", "done"].tolist() == [True]


@pytest.mark.parametrize("reward", [1, 1.0, np.float64(1), np.float32(1), np.array([1]), [1.0]])
def test_rewards_of_any_kind_have_one_dtype(reward: Any) -> None:
    row = transition(0, 0, reward, 0, False, False)
    assert torch.equal(row["next", "reward"], torch.tensor([1.0]))


@pytest.mark.parametrize("shape", [[5], [5, 1]])
def test_batched_transition_equals_single_transitions(shape: list[int]) -> None:
    draw = np.random.default_rng(0)
    before, after = draw.normal(size=(2, 5, 3)).astype(np.float32)
    action, reward = draw.integers(9, size=5), draw.normal(size=5)
    ended, cut = draw.random((2, 5)) < 0.5
    many = transition(
        before, action, reward.reshape(shape), after, ended.reshape(shape), cut, batch_size=5
    )
    for at in range(5):
        one = transition(before[at], action[at], reward[at], after[at], ended[at], cut[at])
        assert (many[at] == one).all()
    grid = transition(
        *(torch.from_numpy(x).unflatten(0, (1, 5)) for x in (before, action, reward, after)),
        ended[None],
        cut[None],
        batch_size=(1, 5),
    )
    assert (grid[0] == many).all()


def test_ambiguous_arguments_of_transition_are_refused() -> None:
    before = np.zeros((8, 4))
    with pytest.raises(ValueError, match=r"expected one reward per row.*\[8\]; pass batch_size="):
        transition(before, np.zeros(8), np.zeros(8), before, False, False)
    with pytest.raises(ValueError, match="expected one terminated per row"):
        transition(before, 0, 0.0, before, np.zeros(8, bool), False)
    ends = np.zeros(8, bool)
    with pytest.raises(ValueError, match=r"begins with batch_size \[8\], got \[7\]"):
        transition(before, np.zeros(7), np.zeros(8), before, ends, ends, batch_size=8)
    with pytest.raises(TypeError, match="expected terminated as bool"):
        transition(0, 0, False, 0, 1.0, False)  # reward and flag exchanged
    with pytest.raises(TypeError, match=r"'truncated'.*got dict"):
        transition(0, 0, 0.0, 0, False, {})  # done and info, as older environments gave them
    refuses(TypeError, r"'observation'.*got NoneType", transition, None, 0, 0.0, 0, False, False)
    with pytest.raises(ValueError, match=r"next observation differs.*float64 \[4\], got float32"):
        transition(np.zeros(4), 0, 0.0, np.zeros(4, np.float32), False, False)
    refuses(ValueError, "batch_size", transition, 0, 0, 0.0, 0, False, False, batch_size=-1)


def test_spaces_may_be_nested() -> None:
    seen = {"image": np.zeros((2, 2), np.uint8), "rest": (np.float32(1), {"x": 3})}
    row = transition(seen, (1, [0.5, 0.5]), 1.0, seen, False, False)
    assert row["observation", "image"].dtype == torch.uint8
    assert row["observation", "rest", "0"].tolist() == [1.0]
    assert row["next", "observation", "rest", "1", "x"].tolist() == [3]
    assert row["action", "1"].tolist() == [0.5, 0.5]


def test_a_row_owns_its_memory() -> None:
    before, after, action = np.zeros(2), torch.zeros(2, dtype=torch.float64), np.zeros(1)
    row = transition(before, action, 0.0, after, False, False)
    before += 1
    after += 1
    action += 1
    assert row["observation"].tolist() == row["next", "observation"].tolist() == [0, 0]
    assert row["action"].tolist() == [0]


def test_single_transitions_make_episodes() -> None:
    env = Walk(1)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    before, _ = env.reset()
    for _ in range(20):
        action = action_of(*map(int, before))
        after, reward, terminated, truncated, _ = env.step(action)
        rb.add(transition(before, action, reward, after, terminated, truncated))
        before = env.reset()[0] if terminated or truncated else after
    assert rows_of(rb[:]) == expected(1, 20)
    assert rb.sample()["next", "reward"].shape == (4, 1)
    assert all(len(e.rows()["observation"][:, 1].unique()) == 1 for e in rb.episodes)


@pytest.mark.parametrize("kind", ["Graph", "OneOf", "Sequence", "Text"])
@pytest.mark.parametrize("place", ["alone", "nested", "action"])
def test_spaces_without_batches_are_refused_by_name(kind: str, place: str) -> None:
    """With two environments, values [2] of one would pass for a batch of both."""
    box = gymnasium.spaces.Box(0, 1, (2,))
    space = {
        "Graph": gymnasium.spaces.Graph(box, None),
        "OneOf": gymnasium.spaces.OneOf([box, gymnasium.spaces.Discrete(2)]),
        "Sequence": gymnasium.spaces.Sequence(box),
        "Text": gymnasium.spaces.Text(4),
    }[kind]
    inside = gymnasium.spaces.Tuple([box, gymnasium.spaces.Dict({"x": box, "y": space})])
    is_action = place == "action"

    class Still(gymnasium.Env[Any, Any]):
        observation_space = box if is_action else {"alone": space, "nested": inside}[place]
        action_space = space if is_action else gymnasium.spaces.Discrete(2)

    envs = gymnasium.vector.SyncVectorEnv([Still, Still])
    key = {"alone": "'observation'", "nested": r"\('observation', 1, 'y'\)", "action": "'action'"}
    refuses(ValueError, rf"one shape, got {kind} at key {key[place]}: ", VectorSteps, envs)


def test_vector_steps_refuses_a_single_environment() -> None:
    with pytest.raises(TypeError, match=r"vector environment.*transition"):
        VectorSteps(gymnasium.make("CartPole-v1"))
