"""Exports, read back by Minari, d3rlpy, h5py and replaykit."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    MinariExperienceReplay,
    ReplayBuffer,
    RobomimicExperienceReplay,
    transition,
)
from replaykit.adapters import (
    record,
    to_d3rlpy,
    to_minari,
    to_robomimic,
)
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import MINARI, ROBOMIMIC
from replaykit.errors import SchemaError
from tests.support.refusals import refuses

SHARED = Path(__file__).parents[3] / "shared/data"
SHA256 = {
    "robomimic/robomimic_ph_lift_low_dim.hdf5": (
        "143fbf6bc2b7c649bd2e88c0de659df4cc48c207eb6dd41b01c11847b12a992f"
    ),
    "minari_generated/cartpole/random-v0/data/main_data.hdf5": (
        "ee44c46af92d5749527b24d2f6f640bebf905d4a3c36637c2e575d251e575474"
    ),
}


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"sample file {path} not present")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256[name]:
        pytest.skip(f"sample file {path} has another sha256")
    return path


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for Minari's data sets."""
    folder = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder


class Nested(gymnasium.Env[Any, Any]):
    """Dict and Tuple spaces with an image, and infos."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (32, 32, 3), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(5), spaces.Box(-9, 9, (2,), np.float64))),
        }
    )
    action_space = spaces.Dict({"move": spaces.Box(-1, 1, (1,)), "grip": spaces.Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.integers(1, 6))
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended, odd = self.count >= self.length, self.length % 2 == 1
        info = {"count": self.count, "body": {"speed": np.arange(2) / self.count}}
        return self._observation(), self.np_random.random(), ended and odd, ended and not odd, info

    def _observation(self) -> dict[str, Any]:
        draw = self.np_random
        pair = (draw.integers(5), np.array([5e-324, -0.0]) if self.count == 1 else draw.random(2))
        return {"image": draw.integers(0, 256, (32, 32, 3), dtype=np.uint8), "pair": pair}


@pytest.fixture
def nested(tmp_path: Path) -> ReplayBuffer[Any, Any, Any, Any]:
    keys = ["count", ("body", "speed")]
    return record(
        Nested(), None, tmp_path / "nested", episodes=6, seed=2, info_keys=keys, durable=False
    )


@pytest.fixture
def cartpole(tmp_path: Path) -> ReplayBuffer[Any, Any, Any, Any]:
    env = gymnasium.make("CartPole-v1", max_episode_steps=20)
    return record(env, None, tmp_path / "cartpole", episodes=8, seed=0, durable=False)


def same(value: Any, tensor: torch.Tensor) -> bool:
    """Compare an array and a tensor bit for bit, dtypes included."""
    array = tensor.contiguous().numpy()
    return value.dtype == array.dtype and np.asarray(value).tobytes() == array.tobytes()


def files_below(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def test_minari_reads_the_same_bits(nested):
    to_minari(nested, "arm/nested/random-v3", env=Nested(), author="me", description="tests")
    found = minari.load_dataset("arm/nested/random-v3")
    assert found.total_episodes == 6
    assert found.total_steps == len(nested)
    assert found.observation_space == Nested.observation_space
    assert found.action_space == Nested.action_space
    assert found.storage.metadata["author"] == {"me"}
    assert [m["seed"] for m in found.storage.get_episode_metadata(range(6))] == list(range(2, 8))
    for episode, stored in zip(nested.episodes, found.iterate_episodes(), strict=True):
        rows = episode.rows()
        seen, after = rows["observation"], rows["next", "observation"]
        for values, key in (
            (stored.observations["image"], "image"),
            (stored.observations["pair"][0][:, None], ("pair", "0")),
            (stored.observations["pair"][1], ("pair", "1")),
        ):
            assert same(values[:-1], seen[key])
            assert same(values[1:], after[key])
        assert same(stored.actions["move"], rows["action", "move"])
        assert same(stored.actions["grip"], rows["action", "grip"][:, 0])
        assert same(stored.rewards, rows["next", "reward"][:, 0])
        assert same(stored.terminations, rows["next", "terminated"][:, 0])
        assert same(stored.truncations, rows["next", "truncated"][:, 0])
        assert stored.infos["count"].tolist() == [0, *range(1, len(rows) + 1)]
        assert same(stored.infos["body"]["speed"][1:], rows["next", "info", "body", "speed"])


def test_a_converted_minari_export_is_exported_the_same_again(nested, datasets, tmp_path):
    """Also the parts of tuples, infos and seeds."""
    to_minari(nested, "arm/nested-v0", env=Nested())
    file = datasets / "arm/nested-v0/data/main_data.hdf5"
    data = MinariExperienceReplay("arm/nested-v0", 4, source=file, root=tmp_path / "root")
    rows = nested[:].exclude("source_seed")
    for key in rows.keys(True, True):
        parts = (key,) if isinstance(key, str) else key
        name = tuple(f"_index_{part}" if part.isdigit() else part for part in parts)
        assert same(data[:][name].numpy(), rows[key]), key
    assert data.episode_table["source_seed"].tolist() == list(range(2, 8))
    to_minari(data, "single-v1", env=Nested())
    first, second = (minari.load_dataset(name) for name in ("arm/nested-v0", "single-v1"))
    assert sorted(minari.list_local_datasets()) == ["arm/nested-v0", "single-v1"]
    assert minari.namespace.list_local_namespaces() == ["arm"]
    for one, other in zip(first.iterate_episodes(), second.iterate_episodes(), strict=True):
        assert one.observations["image"].tobytes() == other.observations["image"].tobytes()
        assert one.observations["pair"][1].tobytes() == other.observations["pair"][1].tobytes()
        assert one.infos["count"].tobytes() == other.infos["count"].tobytes()
    seeds = [m["seed"] for m in second.storage.get_episode_metadata(range(6))]
    assert seeds == list(range(2, 8))


def compared(old: Path, new: Path, data: Any, again: Any, below: str = "") -> int:
    """Compare files and what was converted from them; return the number of arrays below a name."""
    for key in data[:].keys(True, True):
        assert same(again[:][key].numpy(), data[:][key]), key
    seen = []
    with h5py.File(old) as first, h5py.File(new) as second:

        def compare(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset) and name.startswith(below) and "info" not in name:
                seen.append(name)
                assert second[name].dtype == node.dtype
                assert second[name][()].tobytes() == node[()].tobytes()

        first.visititems(compare)
    return len(seen)


def test_a_sample_of_minari_is_the_same_after_a_round_trip(datasets, tmp_path):
    path = shared("minari_generated/cartpole/random-v0/data/main_data.hdf5")
    data = convert(path, MINARI, tmp_path / "a")
    to_minari(data, "cartpole/again-v0", env="CartPole-v1")
    new = datasets / "cartpole/again-v0"
    again = convert(new, MINARI, tmp_path / "c")
    assert compared(path, new / "data/main_data.hdf5", data, again) == 25
    padded = MinariExperienceReplay("a/b-v0", 2, source=path, root=tmp_path, split_trajs=True)
    refuses(SchemaError, r"one value per row for d3rlpy.*split_trajs", to_d3rlpy, padded)


def test_a_sample_of_robomimic_is_the_same_after_a_round_trip(tmp_path):
    path = shared("robomimic/robomimic_ph_lift_low_dim.hdf5")
    with pytest.warns(UserWarning, match="the split"):
        data = convert(path, ROBOMIMIC, tmp_path / "a")
    filters = {"train": [1], "valid": [0]}
    new = to_robomimic(data, tmp_path / "b.hdf5", filters=filters)
    again = convert(new, ROBOMIMIC, tmp_path / "c")
    assert compared(path, new, data, again, "data/") == 52
    assert again.published.manifest.report["splits"] == filters


def test_an_episode_without_a_flag_at_its_end_is_truncated_there(datasets):
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    states, no = torch.arange(6.0)[:, None], torch.zeros(5, dtype=torch.bool)
    rb.extend(transition(states[:-1], states[:-1], no.float(), states[1:], no, no, batch_size=5))
    box = spaces.Box(-9, 9, (1,))
    found = to_minari(rb, "open-v0", observation_space=box, action_space=box)
    assert found[0].truncations.tolist() == [False] * 4 + [True]
    assert not found[0].terminations.any()
    assert found.storage.metadata.get("env_spec") is None


def test_existing_minari_data_is_kept_or_replaced_whole(cartpole, nested, datasets):
    to_minari(cartpole, "a/b-v0", env=gymnasium.spec("CartPole-v1"))
    recovered = minari.load_dataset("a/b-v0").recover_environment()
    assert recovered.spec.id == "CartPole-v1"
    recovered.close()
    with pytest.raises(FileExistsError, match=r"b-v0 exists; pass overwrite=True"):
        to_minari(nested, "a/b-v0", env=Nested())
    assert minari.load_dataset("a/b-v0").total_steps == len(cartpole)
    to_minari(nested, "a/b-v0", env=Nested(), overwrite=True)
    assert minari.load_dataset("a/b-v0").total_steps == len(nested)
    (datasets / "mine-v0").mkdir()
    (datasets / "mine-v0/thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="not a former export"):
        to_minari(nested, "mine-v0", env=Nested(), overwrite=True)
    assert files_below(datasets) == [
        "a/b-v0/data/main_data.hdf5",
        "a/b-v0/data/metadata.json",
        "a/namespace_metadata.json",
        "mine-v0/thesis.tex",
    ]


def test_spaces_that_do_not_fit_are_refused_by_key(cartpole, nested, datasets):
    box = spaces.Box(-9, 9, (3,))
    with pytest.raises(ValueError, match="expected env=, or both"):
        to_minari(cartpole, "a-v0", observation_space=box)
    with pytest.raises(SchemaError, match=r"key 'observation': expected the shape \[3\].*\[4\]"):
        to_minari(cartpole, "a-v0", observation_space=box, action_space=spaces.Discrete(2))
    with pytest.raises(SchemaError, match=r"key 'action': .*fixed shape, got Text"):
        to_minari(cartpole, "a-v0", env="CartPole-v1", action_space=spaces.Text(3))
    with pytest.raises(KeyError, match=r"'observation', 'depth'"):
        to_minari(nested, "a-v0", env=Nested(), observation_space=spaces.Dict({"depth": box}))
    refuses(TypeError, "expected env as an id", to_minari, cartpole, "a-v0", env=3)
    for dataset_id in ("noversion", "a/b", "/a-v0", "a/../b-v0", "a b-v0", "", 3):
        text = "expected dataset_id as"
        refuses(ValueError, text, to_minari, cartpole, dataset_id, env="CartPole-v1")
    assert not datasets.exists()


def test_d3rlpy_has_the_same_bits(cartpole):
    found = to_d3rlpy(cartpole)
    assert found.size() == 8
    timeouts = 0
    for episode, stored in zip(cartpole.episodes, found.episodes, strict=True):
        rows = episode.rows()
        assert same(stored.observations, rows["observation"])
        assert same(stored.actions, rows["action"])
        assert same(stored.rewards, rows["next", "reward"])
        assert stored.terminated == rows["next", "terminated"][-1].item()
        timeouts += not stored.terminated
        for t in range(stored.transition_count):
            one = found.transition_picker(stored, t)
            assert same(one.observation, rows[t]["observation"])
            assert one.terminal == rows[t]["next", "terminated"].item()
            if not one.terminal:
                assert same(one.next_observation, rows[t]["next", "observation"])
    assert 0 < timeouts < 8
    # d3rlpy has no next observation for the last row of an episode that did not terminate.
    assert found.transition_count == len(cartpole) - timeouts
    info = found.dataset_info
    assert (info.action_space.name, info.action_size) == ("DISCRETE", 2)
    assert found.sample_transition_batch(64).observations.shape == (64, 4)


def test_continuous_actions_and_nested_observations_of_d3rlpy(tmp_path):
    env = gymnasium.make("Pendulum-v1", max_episode_steps=30)
    rb = record(env, lambda _: np.ones(1, np.float32), tmp_path / "a", episodes=2, seed=0)
    found = to_d3rlpy(rb)
    # Whole numbers do not make the actions discrete.
    assert found.dataset_info.action_space.name == "CONTINUOUS"
    assert found.dataset_info.action_size == 1
    assert to_d3rlpy(rb, discrete=True, action_size=5).dataset_info.action_size == 5

    rows = {"z": torch.randn(4, 3), "a": {"x": torch.randn(4, 2)}}
    after = {"z": rows["z"].roll(-1, 0), "a": {"x": rows["a"]["x"].roll(-1, 0)}}
    no = torch.zeros(4, dtype=torch.bool)
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(
        transition(rows, torch.rand(4, 2), torch.ones(4), after, no, ~no.cumsum(0).bool() & no,
                   batch_size=4)
    )  # fmt: skip
    (episode,) = to_d3rlpy(rb).episodes
    assert same(episode.observations[0], rows["a"]["x"])
    assert same(episode.observations[1], rows["z"])
    assert not episode.terminated


def test_the_layout_is_that_of_robomimic(cartpole, tmp_path):
    args = {"env_name": "CartPole-v1", "type": 2, "env_kwargs": {}}
    filters = {"train": [0, 1, 2, 3, 4, 5], "valid": [6, 7]}
    path = to_robomimic(cartpole, tmp_path / "new/a.hdf5", env_args=args, filters=filters)
    with h5py.File(path) as file:
        assert set(file) == {"data", "mask"}
        assert file["data"].attrs["total"] == len(cartpole)
        assert json.loads(file["data"].attrs["env_args"]) == args
        assert [name.decode() for name in file["mask/valid"]] == ["demo_6", "demo_7"]
        assert list(file["data"]) == [f"demo_{n}" for n in range(8)]
        for number, episode in enumerate(cartpole.episodes):
            demo, rows = file[f"data/demo_{number}"], episode.rows()
            assert set(demo) == {"obs", "next_obs", "actions", "rewards", "dones"}
            assert demo.attrs["num_samples"] == len(rows)
            assert same(demo["obs/flat"][()], rows["observation"])
            assert same(demo["next_obs/flat"][()], rows["next", "observation"])
            assert same(demo["actions"][()], rows["action"])
            assert same(demo["rewards"][()], rows["next", "reward"][:, 0])
            assert demo["dones"].dtype == np.int64
            assert demo["dones"][()].tolist() == rows["next", "terminated"][:, 0].tolist()


def test_deeper_parts_get_joined_names_without_collisions(tmp_path):
    def rows(**parts: Any) -> ReplayBuffer[Any, Any, Any, Any]:
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        end = torch.tensor([False, False, True])
        one = torch.ones(3, 2)
        rb.extend(transition(parts, one, torch.ones(3), parts, end, ~end & end, batch_size=3))
        return rb

    x = torch.ones(3, 2)
    path = to_robomimic(rows(arm={"pos": x, "vel": x}, cube=x), tmp_path / "a.hdf5")
    with h5py.File(path) as file:
        assert set(file["data/demo_0/obs"]) == {"arm_pos", "arm_vel", "cube"}
    with pytest.raises(SchemaError, match=r"'arm_pos'.*rename"):
        to_robomimic(rows(arm={"pos": x}, arm_pos=x), tmp_path / "b.hdf5")
    with pytest.raises(ValueError, match=r"filters\['train'\]: expected positions of 1 episodes"):
        to_robomimic(rows(x=x), tmp_path / "b.hdf5", filters={"train": [1]})
    assert files_below(tmp_path) == ["a.hdf5"]


def export(name: str, tmp_path: Path) -> Any:
    box = spaces.Box(-9, 9, (2,))
    return {
        "minari": lambda data: to_minari(data, "a-v0", observation_space=box, action_space=box),
        "d3rlpy": to_d3rlpy,
        "robomimic": lambda data: to_robomimic(data, tmp_path / "a.hdf5"),
    }[name]


def good_rows() -> TensorDict:
    end = torch.tensor([False, False, True])
    x = torch.arange(8.0).view(4, 2)
    return transition(x[:-1], x[:-1], torch.ones(3), x[1:], end, ~end & end, batch_size=3)


@pytest.mark.parametrize("name", ["minari", "d3rlpy", "robomimic"])
def test_data_that_no_format_keeps_is_refused(name, nested, tmp_path, datasets):
    before, call = files_below(tmp_path), export(name, tmp_path)

    def stored(rows: TensorDict) -> ReplayBuffer[Any, Any, Any, Any]:
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.extend(rows)
        return rb

    flags = [("next", flag) for flag in ("terminated", "truncated", "done")]
    for missing, key in (
        (["observation"], "'observation'"),
        (["action"], "'action'"),
        ([("next", "reward")], r"\('next', 'reward'\)"),
        ([("next", "observation")], r"\('next', 'observation'\)"),
        (flags, r"\('next', 'terminated'\)"),
    ):
        rb = stored(good_rows().exclude(*missing))
        refuses(KeyError, f"key {key}: expected such a column", call, rb)
    refuses(ValueError, "at least one episode", call, ReplayBuffer(storage=LazyTensorStorage(10)))
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([1, 2])
    refuses(RuntimeError, "where episodes end", call, rb)
    refuses(TypeError, "expected data as a ReplayBuffer", call, good_rows())
    rows = good_rows()
    rows["next", "reward"] = torch.ones(3, 2)
    refuses(SchemaError, r"'next', 'reward'\): expected one value per row", call, stored(rows))
    if name != "minari":
        refuses(SchemaError, r"key 'action': expected one array .*'move'", call, nested)
    assert not datasets.exists()
    assert files_below(tmp_path) == before


def test_nan_is_kept_and_equals_itself(tmp_path):
    rows = good_rows()
    rows["next", "observation"][0] = rows["observation"][1] = float("nan")
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(rows)
    (episode,) = to_d3rlpy(rb).episodes
    assert same(episode.observations, rows["observation"])
    found = export("minari", tmp_path)(rb)[0]
    assert same(found.observations[1:], rows["next", "observation"])


@pytest.mark.parametrize("name", ["minari", "d3rlpy"])
def test_observations_that_do_not_follow_are_named(name, tmp_path, datasets):
    rows = good_rows()
    rows["next", "observation"][1, 0] = -0.0
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.cat([good_rows(), rows]))
    with pytest.raises(ValueError, match=r"'next', 'observation'\): in episode 1.*row 1 .*row 2"):
        export(name, tmp_path)(rb)
    assert not files_below(tmp_path)
    assert not list(datasets.glob("*"))


def test_a_part_of_a_data_set_is_exported_alone(cartpole, tmp_path):
    path = to_robomimic(cartpole, tmp_path / "a.hdf5", filters={"train": [1, 4]})
    whole = convert(path, ROBOMIMIC, tmp_path / "a")
    part = CorpusExperienceReplay(whole.published, episodes=[1, 4])
    found = to_d3rlpy(part)
    assert [len(e) for e in found.episodes] == part.episodes.lengths.tolist()
    assert [len(e) for e in found.episodes] == cartpole.episodes.lengths[[1, 4]].tolist()
    part = RobomimicExperienceReplay("my/set", 4, source=path, root=tmp_path, split="train")
    assert part.episodes.lengths.tolist() == cartpole.episodes.lengths[[1, 4]].tolist()


@pytest.mark.parametrize("library", ["minari", "d3rlpy"])
def test_missing_libraries_are_named(library, cartpole, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    call = export(library, tmp_path)
    refuses(ImportError, rf"pip install 'replaykit\[{library}\]'", call, cartpole)


def test_done_alone_shows_terminations(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(good_rows().exclude(("next", "terminated"), ("next", "truncated")))
    assert to_d3rlpy(rb).episodes[0].terminated
    with h5py.File(to_robomimic(rb, tmp_path / "a.hdf5")) as file:
        assert file["data/demo_0/dones"][()].tolist() == [0, 0, 1]
