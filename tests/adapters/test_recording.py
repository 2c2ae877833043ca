"""Recorded episodes: equal to a log in plain Python, and there after a kill at any instant."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from replaykit.adapters import RecordReplay, open_recording, record, recording_folder
from replaykit.errors import CheckpointError, SchemaError
from tests.prepared import python
from tests.support.refusals import refuses


class Counting(gymnasium.Env[Any, Any]):
    """Nested random observations; the seed of an episode decides its length and its end."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (4, 5), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-9, 9, (2,), np.float32))),
            "mask": spaces.MultiBinary(3),
        }
    )
    action_space = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.integers(1, 9))
        return self._observation(), {"count": 0}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended, odd = self.count >= self.length, self.length % 2 == 1
        info = {"count": self.count, "nested": {"share": self.count / 3}, "text": "left out"}
        reward = self.np_random.random()
        return self._observation(), reward, ended and odd, ended and not odd, info

    def _observation(self) -> dict[str, Any]:
        draw = self.np_random
        return {
            "image": draw.integers(0, 256, (4, 5), dtype=np.uint8),
            "pair": (draw.integers(9), draw.random(2, dtype=np.float32)),
            "mask": draw.integers(0, 2, 3, dtype=np.int8),
        }


INFO_KEYS = ["count", ("nested", "share")]


class Logged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps the values of every step in lists."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.log: list[Any] = []

    def reset(self, **arguments: Any) -> Any:
        self.before, info = self.env.reset(**arguments)
        return self.before, info

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.log.append((self.before, action, *result))
        self.before = result[0]
        return result


def check_rows(rb: Any, log: list[Any], seeds: list[int]) -> None:
    """Compare all rows with a log of `Counting`."""
    rows = rb[:]
    assert len(rows) == len(log)
    episode = 0
    for row, (before, action, after, reward, terminated, truncated, info) in zip(
        rows, log, strict=True
    ):
        for value, found in ((before, row), (after, row["next"])):
            assert found["observation", "image"].numpy().tobytes() == value["image"].tobytes()
            assert found["observation", "mask"].tolist() == value["mask"].tolist()
            assert found["observation", "pair", "0"].tolist() == [value["pair"][0]]
            assert (found["observation", "pair", "1"].numpy() == value["pair"][1]).all()
        assert (row["action", "move"].numpy() == action["move"]).all()
        assert row["action", "grip"].tolist() == [action["grip"]]
        assert row["next", "reward"].tolist() == [np.float32(reward)]
        assert row["next", "info", "count"].tolist() == [info["count"]]
        assert row["next", "info", "nested", "share"].tolist() == [
            np.float32(info["nested"]["share"])
        ]
        assert row["next", "terminated"].item() == terminated
        assert row["next", "truncated"].item() == truncated
        assert row["next", "done"].item() == (terminated or truncated)
        assert (row["episode"].item(), row["source_seed"].item()) == (episode, seeds[episode])
        episode += terminated or truncated
    assert all(each.complete for each in rb.episodes)
    assert len(rb.episodes) == episode == len(seeds)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_every_row_equals_the_steps_of_the_environment(tmp_path):
    env = Logged(Counting())
    rb = record(env, None, tmp_path / "a", episodes=12, seed=5, info_keys=INFO_KEYS)
    check_rows(rb, env.log, list(range(5, 17)))
    assert rb["next", "reward"].dtype == torch.float32
    assert rb["next", "info", "count"].dtype == torch.int64
    assert rb["observation", "mask"].dtype == torch.int8


def test_a_second_call_continues_and_a_third_has_nothing_to_do(tmp_path):
    whole, parts = Logged(Counting()), Logged(Counting())
    record(whole, None, tmp_path / "a", episodes=9, seed=0, info_keys=INFO_KEYS)
    for count in (2, 7, 9):
        rb = record(parts, None, tmp_path / "b", episodes=count, seed=0, info_keys=INFO_KEYS)
    check_rows(rb, whole.log, list(range(9)))
    assert len(parts.log) == len(whole.log)
    before = len(parts.log)
    record(parts, None, tmp_path / "b", episodes=4, seed=0, info_keys=INFO_KEYS)
    assert len(parts.log) == before


def test_a_number_of_steps_or_episodes_ends_a_recording(tmp_path):
    env = gymnasium.make("CartPole-v1")
    rb = record(env, lambda observation: int(observation[2] > 0), tmp_path, steps=100, seed=1)
    assert len(rb) == 100
    assert rb[-1]["next", "truncated"].item()
    assert not rb[-1]["next", "terminated"].item()
    assert all(episode.complete for episode in rb.episodes)
    rb = record(env, lambda observation: torch.tensor(1), tmp_path, steps=130, seed=1)
    assert len(rb) == 130
    assert rb[:]["action"][100:].unique().tolist() == [1]
    assert rb[:]["source_seed"].unique().tolist() == list(range(1, len(rb.episodes) + 1))
    # With both limits the first one that is reached counts.
    rb = record(env, None, tmp_path, steps=137, episodes=200, seed=1)
    assert len(rb) == 137
    count = len(rb.episodes) + 2
    assert len(record(env, None, tmp_path, steps=10_000, episodes=count, seed=1).episodes) == count


def test_arrays_that_the_environment_reuses_are_copied(tmp_path):
    class Reusing(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(0, 99, (1,), np.float64)
        action_space = spaces.Box(-1, 1, (1,))
        buffer = np.zeros(1)

        def reset(self, **arguments: Any) -> Any:
            self.buffer[:] = 0
            return self.buffer, {}

        def step(self, action: Any) -> Any:
            self.buffer += 1
            action[:] = 0
            return self.buffer, 1, bool(self.buffer[0] == 4), False, {}

    rb = record(Reusing(), lambda o: np.full(1, o[0] / 8, np.float32), tmp_path, episodes=1)
    assert rb["observation"].flatten().tolist() == [0, 1, 2, 3]
    assert rb["next", "observation"].flatten().tolist() == [1, 2, 3, 4]
    assert rb["action"].flatten().tolist() == [0, 1 / 8, 2 / 8, 3 / 8]
    assert rb["observation"].dtype == torch.float64
    assert rb["source_seed"].unique().tolist() == [-1]


def test_reset_and_close_store_an_unfinished_episode_as_truncated(tmp_path):
    env = RecordReplay(gymnasium.make("CartPole-v1"), tmp_path)
    for steps in (3, 5):
        env.reset(seed=steps)
        for _ in range(steps):
            env.step(1)
    assert (env.episodes, env.rows) == (1, 3)
    env.reset()
    env.reset()
    assert (env.episodes, env.rows) == (2, 8)
    env.step(0)
    env.close()
    rb = open_recording(tmp_path)
    assert rb.episodes.lengths.tolist() == [3, 5, 1]
    assert rb["next", "truncated"].flatten().nonzero().flatten().tolist() == [2, 7, 8]
    assert not rb["next", "terminated"].any()
    assert rb["source_seed"].tolist() == [3] * 3 + [5] * 5 + [-1]


def test_an_episode_is_visible_when_step_returns_its_end(tmp_path):
    env = RecordReplay(gymnasium.make("CartPole-v1"), tmp_path)
    refuses(RuntimeError, "has no episode yet", open_recording, tmp_path)
    for count in range(1, 4):
        env.reset(seed=count)
        ended = False
        steps = 0
        while not ended:
            if count > 1:
                assert len(open_recording(tmp_path).episodes) == count - 1
            _, _, terminated, truncated, _ = env.step(1)
            ended, steps = terminated or truncated, steps + 1
        assert open_recording(tmp_path).episodes.lengths[-1] == steps
    env.close()


def test_discard_and_an_error_in_a_block_drop_the_unfinished_episode(tmp_path):
    with RecordReplay(gymnasium.make("CartPole-v1"), tmp_path) as env:
        env.reset(seed=0)
        env.step(1)
        env.discard()
        refuses(RuntimeError, "expected reset", env.step, 1)
        env.reset(seed=1)
        env.step(0)
        env.reset()
        env.step(0)
        env.discard()
    assert open_recording(tmp_path).episodes.lengths.tolist() == [1]
    with contextlib.suppress(ZeroDivisionError), RecordReplay(env.env, tmp_path) as again:
        again.reset(seed=1)
        again.step(0)
        raise ZeroDivisionError
    assert open_recording(tmp_path).episodes.lengths.tolist() == [1]


def test_an_error_of_the_environment_drops_its_episode(tmp_path):
    class Failing(Counting):
        def step(self, action: Any) -> Any:
            if self.count == 2:
                raise OSError("the robot is gone")
            return (*super().step(action)[:2], False, False, {"count": 1})

    env = RecordReplay(Failing(), tmp_path)
    env.reset(seed=0)
    action = env.action_space.sample()
    env.step(action)
    env.reset(seed=0)
    env.step(action)
    env.step(action)
    refuses(OSError, "robot", env.step, action)
    env.close()
    assert open_recording(tmp_path).episodes.lengths.tolist() == [1]


def test_steps_outside_an_episode_raise(tmp_path):
    env = RecordReplay(gymnasium.make("CartPole-v1"), tmp_path)
    refuses(RuntimeError, r"expected reset\(\) before step", env.step, 0)
    env.reset(seed=0)
    ended = False
    while not ended:
        ended = env.step(1)[2]
    refuses(RuntimeError, "automatically belongs around", env.step, 0)
    env.close()


def test_files_grow_and_keep_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_folder, "_FIRST_BYTES", 1000)
    monkeypatch.setattr(recording_folder, "_COPIED", 300)
    env = Logged(Counting())
    early: dict[int, tuple[Any, Any]] = {}
    for count in (1, 4, 40):
        rb = record(env, None, tmp_path, episodes=count, seed=0, info_keys=INFO_KEYS, durable=False)
        early[len(rb)] = rb, rb[:]
    check_rows(rb, env.log, list(range(40)))
    folders = list(tmp_path.glob("rows-*"))
    assert [f.name for f in folders] == [
        json.loads((tmp_path / "committed.json").read_text())["folder"]
    ]
    assert int(folders[0].name[5:]) > 100
    for rows, (buffer, copied) in early.items():  # earlier buffers keep the files that were removed
        assert (buffer[:] == copied).all()
        assert len(buffer) == rows


def test_a_failed_growth_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_folder, "_FIRST_BYTES", 1)
    env = Logged(Counting())
    record(env, None, tmp_path, episodes=2, seed=0, info_keys=INFO_KEYS)
    with monkeypatch.context() as patched:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(recording_folder.RecordingFolder, "_opened", full)
        with pytest.raises(OSError, match="No space"):
            record(env, None, tmp_path, episodes=9, seed=0, info_keys=INFO_KEYS)
    del env.log[len(open_recording(tmp_path)) :]
    rb = record(env, None, tmp_path, episodes=9, seed=0, info_keys=INFO_KEYS)
    check_rows(rb, env.log, list(range(9)))


def test_a_reader_finds_rows_that_a_writer_has_moved_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_folder, "_FIRST_BYTES", 1)
    env, inner = gymnasium.make("CartPole-v1"), recording_folder._read_committed
    record(env, None, tmp_path, episodes=2, seed=0)
    stale = [inner(tmp_path)]
    expected = record(env, None, tmp_path, episodes=6, seed=0)
    assert not (tmp_path / stale[0].folder).exists()
    monkeypatch.setattr(
        recording_folder, "_read_committed", lambda path: stale.pop() if stale else inner(path)
    )
    assert (open_recording(tmp_path)[:] == expected[:]).all()
    assert not stale


def test_opened_rows_are_private_and_accept_no_writes(tmp_path):
    rb = record(gymnasium.make("CartPole-v1"), None, tmp_path, episodes=3, seed=0)
    before = contents(tmp_path)
    rows = rb[:].clone()
    with pytest.raises(RuntimeError):
        rb.extend(rows)
    rb.set_at_("action", torch.tensor([7]), 0)
    assert rb[0]["action"].item() == 7
    assert contents(tmp_path) == before
    again = open_recording(tmp_path)
    assert (again[:] == rows).all()


def test_metadata_is_json_that_names_environment_spaces_and_versions(tmp_path):
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    record(env, None, tmp_path, episodes=1, seed=3)
    record(env, None, tmp_path, episodes=2)
    found = json.loads((tmp_path / "recording.json").read_text())
    assert found["env_id"] == "FrozenLake-v1"
    assert found["observation_space"] == {
        "type": "Discrete",
        "dtype": "int64",
        "shape": [],
        "n": 16,
        "start": 0,
    }
    first, second = found["sessions"]
    assert (first["seed"], second["seed"]) == (3, None)
    assert (first["first_episode"], second["first_episode"]) == (0, 1)
    assert first["env_kwargs"]["is_slippery"] is False
    assert first["versions"]["gymnasium"] == gymnasium.__version__
    committed = json.loads((tmp_path / "committed.json").read_text())
    assert committed["episodes"] == 2
    assert committed["rows"] == len(open_recording(tmp_path))
    # Infinite bounds become strict JSON.
    record(gymnasium.make("CartPole-v1"), None, tmp_path / "b", episodes=1, seed=0)
    text = (tmp_path / "b/recording.json").read_text()
    space = json.loads(text, parse_constant=pytest.fail)["observation_space"]
    assert space["high"][1] == "inf"


def test_an_episode_that_could_not_be_stored_is_stored_at_the_end(tmp_path, monkeypatch):
    env = RecordReplay(Scripted((None,) * 5, (None, None, True, None, None)), tmp_path)
    action = np.zeros(1, np.float32)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    env.reset(seed=4)
    env.step(action)
    with monkeypatch.context() as patched:
        patched.setattr(recording_folder.RecordingFolder, "append", full)
        refuses(OSError, "No space", env.step, action)
        refuses(RuntimeError, "the episode has ended", env.step, action)
    env.close()
    rb = open_recording(tmp_path)
    assert rb["next", "terminated"].flatten().tolist() == [False, True]
    assert not rb["next", "truncated"].any()


def test_a_path_with_something_else_is_refused_unchanged(tmp_path):
    env = gymnasium.make("CartPole-v1")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("mine")
    before = contents(tmp_path)
    refuses(NotADirectoryError, "file", record, env, None, tmp_path / "file", episodes=1)
    refuses(FileExistsError, r"thesis\.tex", RecordReplay, env, tmp_path / "folder")
    refuses(FileNotFoundError, "is not a recording", open_recording, tmp_path / "folder")
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert len(record(env, None, tmp_path / "empty", episodes=1).episodes) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": "Acrobot-v1"}, "another env_id"),
        ({"spaces": True}, "another action_space"),
        ({"info_keys": ["x"]}, "another info_keys"),
    ],
)
def test_a_recording_of_something_else_is_refused_unchanged(tmp_path, change, message):
    record(gymnasium.make("CartPole-v1"), None, tmp_path, episodes=2, seed=0)
    before = contents(tmp_path)
    env = gymnasium.make(change.get("env", "CartPole-v1"))
    if "spaces" in change:
        env.action_space = spaces.Discrete(3)
    with pytest.raises(ValueError, match=message):
        record(env, None, tmp_path, episodes=3, info_keys=change.get("info_keys", ()))
    assert contents(tmp_path) == before


def test_two_writers_are_refused_and_a_closed_one_is_not(tmp_path):
    first = RecordReplay(gymnasium.make("CartPole-v1"), tmp_path)
    refuses(RuntimeError, "in use", RecordReplay, gymnasium.make("CartPole-v1"), tmp_path)
    first.close()
    RecordReplay(gymnasium.make("CartPole-v1"), tmp_path).close()


@pytest.mark.parametrize("name", ["recording.json", "committed.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"format": "replaykit-recording"}'])
def test_damaged_files_are_named(tmp_path, name, content):
    env = gymnasium.make("CartPole-v1")
    record(env, None, tmp_path, episodes=2, seed=0)
    (tmp_path / name).write_text(content)
    for call in (lambda: open_recording(tmp_path), lambda: RecordReplay(env, tmp_path)):
        refuses(CheckpointError, name, call)


def test_lost_and_short_row_files_are_named(tmp_path):
    record(gymnasium.make("CartPole-v1"), None, tmp_path, episodes=2, seed=0)
    file = next(tmp_path.glob("rows-*/records.memmap"))
    file.write_bytes(file.read_bytes()[:100])
    refuses(CheckpointError, r"records\.memmap", open_recording, tmp_path)
    file.unlink()
    refuses(CheckpointError, r"records\.memmap is gone", open_recording, tmp_path)


def test_wrong_arguments_are_refused_before_the_folder_exists(tmp_path):
    env, path = gymnasium.make("CartPole-v1"), tmp_path / "a"
    refuses(ValueError, "episodes= or steps=", record, env, None, path)
    text = "expected steps as an int of at least 1 or None, got 0"
    refuses(ValueError, text, record, env, None, path, steps=0)
    refuses(TypeError, "expected policy as a function", record, env, 3, path, steps=1)
    text = "the string 'success'"
    refuses(TypeError, text, record, env, None, path, steps=1, info_keys="success")
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    refuses(TypeError, r"VectorSteps.*recover=True", record, vector, None, path, steps=1)
    vector.close()
    env.observation_space = spaces.Dict({"a": spaces.Text(4)})
    refuses(ValueError, r"\('observation', 'a'\).*Text", RecordReplay, env, path)
    assert not path.exists()


class Scripted(gymnasium.Env[Any, Any]):
    """Gives the results of steps from a list."""

    observation_space = spaces.Dict({"x": spaces.Box(-9, 9, (2,))})
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def reset(self, **arguments: Any) -> Any:
        return {"x": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        given = self.results.pop(0)
        usual = ({"x": np.zeros(2, np.float32)}, 1.0, False, False, {"x": 1, "y": [1.0, 2.0]})
        return tuple(a if a is not None else b for a, b in zip(given, usual, strict=True))


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (({"x": np.zeros(3, np.float32)}, None, None, None, None), SchemaError, r"\[2\].*\[3\]"),
        (({"x": np.zeros(2)}, None, None, None, None), SchemaError, "float32.*float64"),
        (({"y": np.zeros(2)}, None, None, None, None), SchemaError, r"'observation', 'x'"),
        (({"x": [0, 0], "y": 1}, None, None, None, None), SchemaError, "expected 1 parts"),
        ((None, np.zeros(2), None, None, None), TypeError, "reward as one number"),
        ((None, None, 1.0, None, None), TypeError, "expected terminated as bool"),
        ((None, None, None, None, {"x": 1}), KeyError, r"'y' of info_keys.*'x'"),
        ((None, None, None, None, {"x": 1.5, "y": [1.0, 2.0]}), SchemaError, "'info', 'x'"),
        ((None, None, None, None, {"x": 1, "y": [1.0]}), SchemaError, r"\[2\].*\[1\]"),
        ((None, None, None, None, {"x": "a", "y": [1.0, 2.0]}), TypeError, "'info', 'x'"),
    ],
)
def test_values_that_do_not_fit_are_named_and_drop_the_episode(tmp_path, result, error, message):
    end = (None, None, True, None, None)
    usual = (None,) * 5
    action = np.zeros(1, np.float32)
    env = RecordReplay(Scripted(usual, end, usual, result, end), tmp_path, info_keys=["x", "y"])
    env.reset()
    env.step(action)
    env.step(action)
    env.reset()
    env.step(action)
    refuses(error, message, env.step, action)
    env.reset()
    env.step(action)
    env.close()
    assert open_recording(tmp_path).episodes.lengths.tolist() == [2, 1]


def test_an_action_that_does_not_fit_reaches_no_environment(tmp_path):
    env = RecordReplay(Scripted((None,) * 5), tmp_path)
    env.reset()
    env.step([0.5])
    for action in (np.zeros(1), np.zeros(2, np.float32)):
        refuses(SchemaError, "key 'action'", env.step, action)
    env.close()
    assert open_recording(tmp_path)["action"].tolist() == [[0.5]]
    env = RecordReplay(Scripted(), tmp_path)
    env.reset()
    with pytest.raises(SchemaError, match="expected float32, as in the rows before, got float64"):
        env.step(np.zeros(1))
    env.close()


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("recording", "gymnasium", "gymnasium"), ("sb3", "stable_baselines3.her", "sb3")],
)
def test_missing_packages_are_named(module, package, extra, monkeypatch):
    name = f"replaykit.adapters.{module}"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    refuses(ImportError, rf"pip install 'replaykit\[{extra}\]'", importlib.import_module, name)


CHILD = """
import json, os, signal, sys
import gymnasium, torch
from replaykit.adapters import RecordReplay, record, recording_folder
torch.set_num_threads(1)
recording_folder._FIRST_BYTES = 3000
folder, log, point, durable = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def patched(owner, name, before, skipped):
    inner, calls = getattr(owner, name), [0]
    def call(*arguments, **keywords):
        calls[0] += 1
        if before and calls[0] > skipped: die()
        found = inner(*arguments, **keywords)
        if not before and calls[0] > skipped: die()
        return found
    setattr(owner, name, call)

if point != "anywhere":
    name, when, skipped = point.split(":")
    owner = recording_folder if name == "remove_tree" else recording_folder.RecordingFolder
    patched(owner, name, when == "before", int(skipped))

class Log(gymnasium.Wrapper):
    rows = []
    def reset(self, **arguments):
        self.before, info = self.env.reset(**arguments)
        self.rows = []
        return self.before, info
    def step(self, action):
        result = self.env.step(action)
        self.rows.append([self.before.tolist(), int(action), result[0].tolist(), *result[1:4]])
        self.before = result[0]
        if any(result[2:4]):
            with open(log, "a") as file:
                file.write(json.dumps([self.env.episodes - 1, self.rows]) + "\\n")
        return result

env = Log(RecordReplay(gymnasium.make("CartPole-v1"), folder, durable=durable == "yes"))
print(env.env.episodes, flush=True)
seed = env.env.episodes
while True:
    env.action_space.seed(seed)
    env.reset(seed=seed)
    ended = False
    while not ended:
        result = env.step(env.action_space.sample())
        ended = result[2] or result[3]
    seed += 1
"""


def logged(log: Path) -> dict[int, Any]:
    """Return the steps of the episodes in a log, by number; a last line may be incomplete."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return dict(json.loads(line) for line in lines)


def check_killed(folder: Path, log: Path, kills: int) -> int:
    """Compare a recording with the episodes in a log; return the number of its episodes."""
    known = logged(log)
    if not known:
        return 0
    rb = open_recording(folder)
    episodes = [episode.rows() for episode in rb.episodes]
    assert all(episode.complete for episode in rb.episodes)
    # A process may have died after the end of an episode was stored, before it was logged.
    assert len(known) <= len(episodes) <= len(known) + kills
    for number, steps in known.items():
        rows, columns = episodes[number], list(zip(*steps, strict=True))
        assert rows["episode"].unique().tolist() == [number]
        assert rows["observation"].tolist() == list(columns[0])
        assert rows["action"].flatten().tolist() == list(columns[1])
        assert rows["next", "observation"].tolist() == list(columns[2])
        assert rows["next", "reward"].flatten().tolist() == list(columns[3])
        assert rows["next", "terminated"].flatten().tolist() == list(columns[4])
        assert rows["next", "truncated"].flatten().tolist() == list(columns[5])
    return len(episodes)


def check_continued(folder: Path, whole: Path, count: int) -> None:
    """Record more episodes, and compare all of them with a recording that was never killed."""
    env = gymnasium.make("CartPole-v1")
    rb = record(env, None, folder, episodes=count, seed=0, durable=False)
    expected = record(env, None, whole, episodes=len(rb.episodes), seed=0, durable=False)
    assert (rb[:] == expected[:]).all()
    assert len(list(folder.glob("rows-*"))) == 1


def child(folder: Path, log: Path, point: str, durable: str = "no") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python(), "-c", CHILD, str(folder), str(log), point, durable],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_ended_episode_survives_kills(tmp_path):
    folder, log = tmp_path / "a", tmp_path / "log"
    count = 0
    for attempt, durable in enumerate(("no", "yes", "no")):
        process = child(folder, log, "anywhere", durable)
        try:
            assert process.stdout is not None
            # Each process continues after the episodes that the one before had ended. The reader
            # does not see an episode that was stored a moment before the kill.
            assert int(process.stdout.readline()) - count in (0, 1)
            limit = time.monotonic() + 60
            while len(logged(log)) < count + 3:
                assert time.monotonic() < limit, "the child records nothing"
                time.sleep(0.002)
            time.sleep(0.011 * attempt)
        finally:
            process.kill()
            process.communicate()
        count = check_killed(folder, log, attempt + 1)
    check_continued(folder, tmp_path / "whole", count + 2)


@pytest.mark.parametrize(
    "point",
    [
        "_write:after:0",  # only the header is there
        "append:before:2",
        "append:after:2",
        "commit:before:3",
        "commit:after:3",
        "_opened:after:1",  # while the rows move to a larger folder
        "remove_tree:before:4",
    ],
)
def test_a_kill_at_any_point_loses_no_ended_episode(tmp_path, point):
    folder, log = tmp_path / "a", tmp_path / "log"
    process = child(folder, log, point)
    try:
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    count = check_killed(folder, log, 1)
    assert count > 1 or point.startswith("_write")
    check_continued(folder, tmp_path / "whole", count + 2)


# A signal may arrive in a callback of the garbage collector, from which Python raises nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_drops_only_the_interrupted_episode(tmp_path, monkeypatch):
    """Signals arrive in policies, in environments and in writes."""
    monkeypatch.setattr(recording_folder, "_FIRST_BYTES", 3000)
    env = gymnasium.make("CartPole-v1")
    expected = record(env, None, tmp_path / "a", episodes=40, seed=0, durable=False)
    errors = []
    for attempt in range(40):
        timer = threading.Timer(0.005 * attempt, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            try:
                record(env, None, tmp_path / "b", episodes=40, seed=0, durable=False)
            finally:
                timer.join()
        except KeyboardInterrupt as error:
            errors.append(error)  # with its traceback, as an interactive session keeps it
    assert errors
    rb = record(env, None, tmp_path / "b", episodes=40, seed=0, durable=False)
    assert (rb[:] == expected[:]).all()
