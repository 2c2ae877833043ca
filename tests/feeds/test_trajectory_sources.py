"""Trajectories of other libraries: the written steps as TED, without pickle."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    AlfCheckpoint,
    AmagoTrajectories,
    EmoteTable,
    EpisodeWriter,
    TrajectoryChunks,
    TrajectorySource,
    TrajectoryWriter,
    feed_trajectories,
)
from replaykit.episodes import EndReason, Head
from tests.feeds.trajectories import buffer_of, rows_of, steps_in
from tests.support.refusals import refuses

Array = np.ndarray[Any, Any]


def amago(
    folder: Path, name: str, first: int, count: int, *, ended: bool, more: Any = None
) -> None:
    """Write a trajectory of ``count`` rows, whose arrays show the number of their step."""
    step = np.arange(first, first + count + 1)
    arrays = {
        "_OBS_KEY_observation": np.stack([step, -step], 1).astype(np.float32),
        "_OBS_KEY_goal": step.astype(np.uint8)[:, None],
        "time_idxs": step,
        "rl2s": np.zeros((count + 1, 4), np.float32),
        "rews": step[1:, None].astype(np.float32) * 10,
        "actions": step[:-1, None].astype(np.float32) + 0.5,
        "dones": (step[1:, None] == first + count) & ended,
    }
    save = np.savez if count % 2 else np.savez_compressed
    save(folder / name, **(arrays | (more or {})))


def emote(path: Path, lengths: dict[int, int], **changes: Any) -> None:
    """Write a table with one episode of each identity; odd ones were interrupted."""
    columns = ["obs", "actions", "rewards", "terminal", "logits"]
    more = {"obs": 1, "terminal": None}
    data: dict[str, list[float]] = {name: [] for name in columns}
    ranges: dict[str, list[tuple[int, int, int]]] = {name: [] for name in columns}
    for identity, length in lengths.items():
        for name in columns:
            extra = more.get(name, 0)
            size = 1 if extra is None else length + extra
            values = [100 * identity + step for step in range(size)]
            ranges[name].append((identity, len(data[name]), size))
            data[name] += [float(identity % 2)] if extra is None else values
    settings = {"part_keys": columns, "ids": list(lengths), "length_key": "actions", **changes}
    settings["columns"] = [("terminal", "TagColumn", {}), ("obs", "Column", {})]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("version", str(changes.get("version", 1)))
        file.writestr("configuration.json", json.dumps(settings))
        for name in columns:
            with file.open(f"{name}.npy", "w") as member:
                np.save(member, np.array(data[name], np.float32))
            with file.open(f"{name}.ranges.npy", "w") as member:
                np.save(member, np.array(ranges[name]))


def alf(path: Path, kinds: list[str], length: int, prefix: str = "_replay_buffer.") -> None:
    """Write rings of steps: first, in the middle, last (terminated ``L``, truncated ``T``)."""
    lanes = len(kinds)
    state: dict[str, torch.Tensor] = {
        "_current_pos": torch.tensor([len(kind) for kind in kinds]),
        "_current_size": torch.tensor([min(length, len(kind)) for kind in kinds]),
        "time_step|step_type": torch.zeros(lanes, length, dtype=torch.int32),
        "time_step|discount": torch.ones(lanes, length),
        "time_step|prev_action": torch.zeros(lanes, length),
    }
    names = ("time_step|observation|x", "time_step|reward", "action")
    state |= {name: torch.zeros(lanes, length) for name in names}
    for lane, kind in enumerate(kinds):
        for position, letter in enumerate(kind):
            at = (lane, position % length)
            state["time_step|step_type"][at] = {"F": 0, "M": 1, "L": 2, "T": 2}[letter]
            state["time_step|discount"][at] = letter != "L"
            for factor, name in enumerate(names, 1):
                state[name][at] = factor * 1000 + 100 * lane + position
    torch.save({"algorithm": {prefix + name: value for name, value in state.items()}}, path)


@pytest.mark.acceptance("C50")
def test_amago_trajectories(tmp_path: Path) -> None:
    amago(tmp_path, "a", 0, 4, ended=True)
    amago(tmp_path, "b", 4, 3, ended=False)
    source = AmagoTrajectories(tmp_path)
    assert isinstance(source, TrajectorySource)
    assert [source.length(n) for n in range(len(source))] == [4, 3]
    assert source.tags(1) == {"head": "cut", "tail": "cut", "file": "b.npz"}
    rows = source.load(0)
    step = torch.arange(5.0)[:, None]
    for key, values in {
        ("observation", "goal"): step[:-1],
        ("next", "observation", "goal"): step[1:],
        ("action",): step[:-1] + 0.5,
        ("next", "reward"): step[1:] * 10,
        ("next", "done"): step[1:] == 4,
        ("next", "truncated"): step[1:] > 9,
        ("time_idx",): step[:-1],
    }.items():
        assert rows[key].float().equal(values.float()), key
    alone = tmp_path / "alone"
    alone.mkdir()
    np.savez(
        alone / "c", **{k: v for k, v in np.load(tmp_path / "a.npz").items() if "goal" not in k}
    )
    assert AmagoTrajectories(alone).load(0)["observation"].equal(rows["observation", "observation"])
    part = source.load(0, ["action", ("next", "done")], 2, 4)
    assert sorted(part.keys(True, True), key=str) == [("next", "done"), "action"]
    assert part["action"].equal(rows["action"][2:])
    rb = buffer_of()
    assert feed_trajectories(rb, source) == 7
    assert [(e.reason, e.head, e.length) for e in rb.episodes] == [
        (EndReason.TERMINATED, Head.RESET, 4),
        (EndReason.CUT, Head.RESET, 3),
    ]


def test_amago_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    amago(tmp_path, "a", 0, 3, ended=True, more={"actions": np.zeros((2, 1), np.float32)})
    with pytest.raises(
        ValueError, match=r"a\.npz: expected 3 values in array 'actions', got shape"
    ):
        AmagoTrajectories(tmp_path).load(0)
    np.savez(tmp_path / "a", rews=np.zeros((3, 1)))
    refuses(ValueError, r"a\.npz: it has no array 'time_idxs'", AmagoTrajectories(tmp_path).tags, 0)
    np.savez(tmp_path / "a", rews=np.array([{}]))
    refuses(ValueError, "'rews' holds pickled objects", AmagoTrajectories(tmp_path).length, 0)
    (tmp_path / "a.npz").write_bytes(b"PK")
    refuses(ValueError, r"a\.npz: File is not a zip file", AmagoTrajectories(tmp_path).length, 0)
    (tmp_path / "b.traj").write_bytes(pickle.dumps({}))
    refuses(ValueError, r"b\.traj is a pickle, .* save_trajs_as='npz'", AmagoTrajectories, tmp_path)
    with pytest.raises(FileNotFoundError):
        AmagoTrajectories(tmp_path / "none")


@pytest.mark.acceptance("C50", "F51")
def test_an_emote_table_of_a_hundred_episodes(tmp_path: Path) -> None:
    path = tmp_path / "table.zip"
    lengths = {identity: 1 + identity % 4 for identity in range(-50, 50)}
    emote(path, lengths)
    source = EmoteTable(path)
    rb = buffer_of()
    assert feed_trajectories(rb, source) == sum(lengths.values())
    for number, (identity, episode) in enumerate(zip(lengths, rb.episodes, strict=True)):
        rows, count = episode.rows(), lengths[identity]
        step = 100.0 * identity + torch.arange(count + 1)
        assert rows["observation", "obs"].equal(step[:-1])
        assert rows["next", "observation", "obs"].equal(step[1:])
        assert rows["logits"].equal(step[:-1])
        assert rows["action"].equal(step[:-1])
        assert rows["next", "reward"].flatten().equal(step[:-1])
        expected = EndReason.TRUNCATED if identity % 2 else EndReason.TERMINATED
        assert (episode.reason, episode.length) == (expected, count)
        tags = source.tags(number)
        assert (tags["identity"], tags["terminal"]) == (identity, identity % 2)
    streams = buffer_of(lane_key="id")
    streams.extend(TensorDict({"id": torch.tensor([99])}, [1]).update(source.load(0)[:1]))
    whole = buffer_of(lane_key="id", writer=EpisodeWriter(max_episodes=60))
    for lanes, kept in ((streams, [*lengths, 99]), (whole, [*lengths][40:])):
        feed_trajectories(lanes, source)
        assert [int(episode.rows()["id"][0]) for episode in lanes.episodes] == kept
    assert streams.episodes[100].reason is EndReason.OPEN
    part = source.load(99, ["action", ("next", "truncated")], -2)
    assert part["action"].tolist() == [4900, 4901]
    assert part["next", "truncated"].flatten().tolist() == [False, True]


def test_emote_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.zip"
    emote(path, {1: 3}, version=2)
    with pytest.raises(
        ValueError, match=r"table\.zip is no table of Emote: expected version 1, got 2"
    ):
        EmoteTable(path)
    emote(path, {1: 3})
    refuses(ValueError, "has no column 'torques', only", EmoteTable, path, actions="torques")
    with pytest.raises(ValueError, match="column 'terminal' has 1 values in episode 1, expected 3"):
        EmoteTable(path, rewards="terminal").load(0)
    emote(path, {1: 3}, ids=[1, 2])
    refuses(ValueError, "column 'actions' lacks episode 2", EmoteTable(path).length, 1)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pickle", pickle.dumps({}))
    refuses(ValueError, "of the pickled version", EmoteTable, path)
    with pytest.raises(FileNotFoundError):
        EmoteTable(tmp_path / "none.zip")


@pytest.mark.acceptance("C50", "F23")
def test_alf_checkpoints_pair_each_step_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    alf(path, ["FMMLFMT", "MLFMMMMMMM", "F", ""], 8)
    source = AlfCheckpoint(path)
    rb = buffer_of()
    feed_trajectories(rb, source)
    found = [
        (
            source.tags(n)["lane"],
            source.tags(n)["position"],
            source.length(n),
            source.tags(n)["head"],
        )
        for n in range(len(source))
    ]
    assert found == [(0, 0, 3, "reset"), (0, 4, 2, "reset"), (1, 2, 7, "reset")]
    for (lane, first, count, _), episode in zip(found, rb.episodes, strict=True):
        rows, step = episode.rows(), 100.0 * lane + first + torch.arange(count + 1)
        assert rows["observation", "x"].equal(1000 + step[:-1])
        assert rows["next", "observation", "x"].equal(1000 + step[1:])
        assert rows["next", "reward"].flatten().equal(2000 + step[1:])
        assert rows["action"].equal(3000 + step[:-1])
    assert [e.reason.name for e in rb.episodes] == ["TERMINATED", "TRUNCATED", "CUT"]
    assert source.load(2, ["action"], 3, 5)["action"].tolist() == [3105, 3106]


def test_alf_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with pytest.raises(FileNotFoundError):
        AlfCheckpoint(path)
    torch.save({"x": torch.zeros(2)}, path)
    refuses(ValueError, r"expected one buffer in .*ckpt, got \[\]", AlfCheckpoint, path)
    torch.save({"x": Path("a")}, path)
    refuses(ValueError, "is no checkpoint of tensors", AlfCheckpoint, path)
    torch.save({"a._current_pos": torch.zeros(1), "b._current_pos": torch.zeros(1)}, path)
    refuses(ValueError, r"got \['a\.', 'b\.'\]; name one with buffer=", AlfCheckpoint, path)
    refuses(ValueError, r"the buffer 'b\.' has no column 'reward'", AlfCheckpoint, path, buffer="b")


def test_chunks_are_a_source(tmp_path: Path) -> None:
    for format in ("safetensors", "npz"):
        with TrajectoryWriter(tmp_path, max_len=4, format=format) as writer:  # type: ignore[arg-type]
            writer.extend(rows_of(3, 0, 10, [9]))
    source = TrajectoryChunks(tmp_path)
    rb = buffer_of()
    assert feed_trajectories(rb, source) == 20
    assert steps_in(rb[:]) == [(3, step) for step in range(10)] * 2
    for number in (1, 4):
        part = source.load(number, ["half", ("next", "reward")], 1, 3)
        assert part["half"].float().tolist() == [5, 6]
        assert part["next", "reward"].flatten().tolist() == [18, 21]
        refuses(KeyError, "no column 'none'", source.load, number, ["none"])
    (path,) = (path for path in (tmp_path / "fifo").glob("*-00000000.safetensors"))
    path.write_bytes(path.read_bytes()[:-200])
    refuses(ValueError, r"\.safetensors: it lacks rows of column", source.load, 0)
    path.write_bytes(b"junk")
    refuses(ValueError, r"\.safetensors: the file is no chunk", TrajectoryChunks, tmp_path)
