"""Data sets that Minari wrote as Arrow and Parquet, compared with those it wrote as HDF5."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import minari  # noqa: F401
import numpy as np
import pyarrow as pa
import pytest
import torch
from gymnasium import spaces

from replaykit.datasets import MinariArrowExperienceReplay, Policies, convert, load_dataset
from replaykit.datasets.families import MINARI, MINARI_ARROW
from tests.datasets.families.mutations import SEEDS, refusals, refused

LENGTHS = (5, 1, 8)
OBSERVATIONS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (32, 36, 3), np.uint8),
        "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-9, 9, (2, 2), np.float64))),
        "words": spaces.Text(6, charset="abcé"),
        "keys": spaces.MultiBinary(3),
    }
)
ACTIONS = spaces.Dict({"move": spaces.Box(-9, 9, (2,)), "grip": spaces.MultiDiscrete([3, 4])})


def write(folder: Path, form: str, *, jpeg: bool = True) -> Path:
    """Write a data set with Minari's own storage, and return its folder."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    random = np.random.default_rng(3)
    folder.mkdir(parents=True)
    storage = MinariStorage.new(
        folder / "data", observation_space=OBSERVATIONS, action_space=ACTIONS, data_format=form,
        jpeg_encoding=jpeg,
    )  # fmt: skip
    episodes = []
    for number, length in enumerate(LENGTHS):
        steps = length + 1
        episodes.append(
            EpisodeBuffer(
                id=None,
                seed=number + 40 if number else None,
                observations={
                    "image": random.integers(0, 256, (steps, 32, 36, 3), dtype=np.uint8),
                    "pair": (random.integers(0, 9, steps), random.random((steps, 2, 2))),
                    "words": ["abcé"[: at % 4] + "a" for at in range(steps)],
                    "keys": random.integers(0, 2, (steps, 3), dtype=np.int8),
                },
                actions={
                    "move": random.random((length, 2)).astype(np.float32),
                    "grip": random.integers(0, 3, (length, 2)),
                },
                rewards=random.random(length),
                terminations=np.arange(length) == (length - 1 if number else -1),
                truncations=np.arange(length) == (-1 if number else length - 1),
                infos={"count": np.arange(steps), "body": {"speed": random.random((steps, 2))}},
            )
        )
    storage.update_episodes(episodes)
    return folder


@pytest.mark.parametrize("jpeg", [True, False])
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_every_item_is_that_of_the_h5_storage(form, jpeg, tmp_path):
    with pytest.warns(UserWarning, match="int8"):
        wanted = convert(write(tmp_path / "h5", "hdf5", jpeg=jpeg), MINARI, tmp_path / "a")
    data = convert(write(tmp_path / "set", form, jpeg=jpeg), MINARI_ARROW, tmp_path / "b")
    rows, others = (each[:].flatten_keys().to_dict() for each in (data, wanted))
    assert rows.keys() == others.keys()
    for key, values in others.items():
        assert rows[key].dtype == values.dtype, key
        assert rows[key].equal(values), key
    for name in ("length", "source_seed", "terminated", "truncated", "episode"):
        assert data.episode_table[name].tolist() == wanted.episode_table[name].tolist()
    assert torch.allclose(data.episode_table["return"], wanted.episode_table["return"])


def test_the_family_opens_like_others(tmp_path, fetched):
    folder = write(tmp_path / "set", "arrow")
    kwargs = {"source": folder, "root": tmp_path / "root"}
    assert len(load_dataset("minari-arrow:me/a-v0", 4, **kwargs)) == sum(LENGTHS)
    data = MinariArrowExperienceReplay("me/a-v0", 4, episodes=[2], **kwargs)
    assert data.sample()["observation", "image"].shape == (4, 32, 36, 3)
    write(tmp_path / "repo/hand/a-v0", "arrow")
    again = fetched("minari-arrow:me/hand/a-v0", "farama-minari/me", tmp_path / "repo")
    assert (again[again[:]["episode"] == 2] == data[:]).all()


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def metadata(below: str = "", **changes: Any) -> Any:
    """Return a fault of the description of the set, or of an episode."""
    return lambda folder: edited(folder / f"{below}metadata.json", **changes)


def infos(column: Any) -> Any:
    return lambda folder: rewritten(folder, "infos", column)


SHAPED = pa.struct([pa.field("a", pa.list_(pa.int64(), 1), metadata={b"shape": b"x"})])
MOVE = {"type": "Box", "dtype": "float64", "shape": [2], "low": 0, "high": 1}
WRONG = {
    "no episode": (lambda d: shutil.rmtree(d / "1"), r"files of .*1/ are missing", "V32"),
    "no metadata": (lambda d: (d / "2/metadata.json").unlink(), "2/metadata.json are mis", "V32"),
    "other steps": (metadata("2/", total_steps=7), "total_steps is 14", "V15"),
    "other total": (metadata(total_steps=3), "total_steps is 3", "V15"),
    "huge episode": (
        metadata("1/", total_steps=10**14),
        r"1/part-0\.arrow: episode_1: has 2 entries, expected 100000000000001",
        "V34",
    ),
    "more episodes": (metadata(total_episodes=4), "episode_3: files", "V32"),
    "fewer than none": (metadata(total_episodes=-1), "total_episodes is -1", "V15"),
    "many episodes": (
        metadata(total_episodes=10**12),
        "total_episodes is 1000000000000, but there are",
        "V15",
    ),
    "text rewards": (lambda d: rewritten(d, "rewards", ["a"] * 6), "'rewards' is object", "V12"),
    "shape of infos": (infos(pa.array([{"a": [1]}] * 6, SHAPED)), "invalid literal", "V10"),
    "other format": (metadata(data_format="hdf5"), "0 files named", "V04"),
    "no space": (metadata(action_space=None), "no action_space", "V12"),
    "other space": (metadata(action_space='{"type": "Sequence"}'), "Sequence", "V04"),
    "other dtype": (
        metadata(action_space=json.dumps({"type": "Dict", "subspaces": {"move": MOVE}})),
        "'action/move' is float32, expected float64",
        "V10",
    ),
    "cut": (lambda d: cut(next(d.glob("1/*.arrow"))), r"1/part-0\.arrow", "V03"),
}


def rewritten(folder: Path, name: str, column: Any) -> None:
    path = next(folder.glob("0/*.arrow"))
    table = pa.ipc.open_file(path.read_bytes()).read_all()
    table = table.set_column(table.column_names.index(name), name, pa.array(column))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_files_are_refused_by_name(fault, tmp_path):
    folder = write(tmp_path / "set", "arrow")
    refused(folder, folder / "data", MINARI_ARROW, *WRONG[fault])


def test_infos_of_some_episodes_are_left_out_and_reported(tmp_path):
    folder = write(tmp_path / "set", "arrow")
    infos([{"count": at, "more": 0.5} for at in range(6)])(folder / "data")
    with pytest.warns(UserWarning, match="left out"):
        data = convert(folder, MINARI_ARROW, tmp_path / "a")
    assert data[:]["info", "count"].tolist() == [at for length in LENGTHS for at in range(length)]
    assert {key for key in data.published.columns if "info" in key} == {
        ("info", "count"), ("next", "info", "count"),
    }  # fmt: skip
    assert data.published.manifest.report["left_out"] == [
        {"key": "info/more", "why": "2 of 3 episodes do not have it as float64 []"},
        {"key": "info/body/speed", "why": "1 of 3 episodes do not have it as float64 [2]"},
    ]


@pytest.mark.parametrize(
    ("bad", "change", "why"),
    [
        *((bad, lambda d: cut(next(d.glob("*.arrow"))), r"\[V03\]") for bad in (0, 1)),
        (0, lambda d: (d / "metadata.json").write_text("{"), r"/0/metadata.json: .*\[V15\]"),
        (1, lambda d: (d / "metadata.json").write_text("[" * 9999), r"/1/metadata.json.*\[V03\]"),
        (1, lambda d: (d / "metadata.json").unlink(), r"1/metadata.json are missing \[V32\]"),
        (1, lambda d: edited(d / "metadata.json", total_steps=2), r"expected 3 .*\[V34\]"),
        (0, shutil.rmtree, r"files of 0/ are missing \[V32\]"),
    ],
)
def test_bad_episodes_can_be_left_out(bad, change, why, tmp_path):
    folder = write(tmp_path / "set", "arrow")
    change(folder / f"data/{bad}")
    with pytest.warns(UserWarning, match="skipped|left out"):
        data = convert(folder, MINARI_ARROW, tmp_path / "a", policies=Policies(on_invalid="skip"))
    assert data.episode_table["length"].tolist() == [LENGTHS[1 - bad], 8]
    assert data.episode_table["episode"].tolist() == [1 - bad, 2]
    (skipped,) = data.published.manifest.report["skipped"]
    assert re.search(why, skipped["why"]), skipped


def test_a_wrong_total_of_an_h5_file_is_a_finding(tmp_path):
    folder = write(tmp_path / "set", "hdf5")
    edited(folder / "data/metadata.json", total_steps="x")
    with pytest.warns(UserWarning, match="description says 'x'.*V15"):
        assert len(convert(folder, MINARI, tmp_path / "a", policies=Policies(on_invalid="skip")))


@SEEDS
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_damaged_bytes_give_an_error_or_the_right_values(form, seed, tmp_path):
    """Arrow files have no checksums, so other values in them are those of the file."""
    folder = write(tmp_path / "set", form)
    wanted = convert(folder, MINARI_ARROW, tmp_path / "a")[:]

    def right(data: Any, name: str) -> None:
        assert len(data) == len(wanted)
        assert name.endswith(f".{form}") or (data[:] == wanted).all()

    assert refusals(folder, MINARI_ARROW, tmp_path, right, seed=seed) > 20
