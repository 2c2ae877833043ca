"""Files of every family: what is fetched in place of H5 is named for what it is, and refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import (
    D4RLExperienceReplay,
    RobomimicExperienceReplay,
    convert,
    load_dataset,
    plan,
)
from replaykit.datasets.families import D4RL, d4rl, robomimic
from replaykit.errors import CorpusError, DownloadError
from tests.datasets.trials import write_steps
from tests.support import Fault, LoopbackHub, lfs_pointer

HOSTED = {
    "roboset:DAPG(expert)/pen_v2d-v1": "jdvakil/RoboSet_Sim/DAPG(expert)/pen_v2d-v1/seed0/x.h5",
    "robomimic:lift/ph/low_dim": "robomimic/robomimic_datasets/v1.5/lift/ph/low_dim_v15.hdf5",
    "libero:libero_goal": "yifengzhu-hf/LIBERO-datasets/libero_goal/open_demo.hdf5",
    "minari:toys/cart/random-v0": "farama-minari/toys/cart/random-v0/data/main_data.hdf5",
    "maniskill:Pick-v1/rl": "haosulab/ManiSkill_Demonstrations/demos/Pick-v1/rl/t.h5",
    "vd4rl:main/run/expert/84px": "conglu/vd4rl/main/run/expert/84px/1.hdf5",
}
STRANGE = {
    "a Git LFS pointer": lfs_pointer(b"data"),
    "an HTML page": b"<!DOCTYPE html><html>log in</html>",
    "a Python pickle": pickle.dumps({"actions": [1]}),
    "a zip archive": b"PK\x03\x04" + b"\0" * 40,
}


@pytest.fixture
def hub(tmp_path: Path, point_client_at: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub that is also a web server, which D4RL is fetched from."""
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    with LoopbackHub() as hub:
        point_client_at(hub)
        monkeypatch.setenv("REPLAYKIT_D4RL_URL", f"{hub.url}/datasets/me/d4rl/resolve/main/")
        yield hub


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "a Git LFS pointer") for name in HOSTED),
        *(("robomimic:lift/ph/low_dim", what) for what in STRANGE),
    ],
)
def test_non_h5_download_is_named_and_publishes_nothing(
    hub: LoopbackHub, tmp_path: Path, name: str, what: str
) -> None:
    repo_id, path = re.fullmatch("([^/]+/[^/]+)/(.+)", HOSTED[name]).groups()
    # Beside what some families want to have there.
    hub.commit(repo_id, {path: STRANGE[what], str(Path(path).with_name("metadata.json")): b"{}"})
    # The bytes are those that the Hub lists: fetching them again would change nothing.
    advice = "never loaded; save the trace" if "pickle" in what else "again does not help"
    said = rf"{Path(path).name}: not an HDF5 file but {what}.*{advice}"
    with pytest.raises(CorpusError, match=said):
        load_dataset(name, 2, root=tmp_path / "root")
    left = [found for found in (tmp_path / "root").rglob("*") if found.is_file()]
    assert [found.suffix for found in left] == [".lock"]


def test_d4rl_is_fetched_by_its_id_and_converted_once(hub: LoopbackHub, tmp_path: Path) -> None:
    file = write_steps(tmp_path / "steps.hdf5")
    hub.commit("me/d4rl", {"maze2d/maze2d-umaze-sparse-v1.hdf5": file})
    data = load_dataset("d4rl:maze2d-umaze-v1", 2, root=tmp_path / "root")
    assert data.episode_table["length"].tolist() == [4]
    source = data.published.manifest.source
    url = f"{hub.url}/datasets/me/d4rl/resolve/main/maze2d/maze2d-umaze-sparse-v1.hdf5"
    assert source["origin"] == {"kind": "http", "urls": [url], "license": "cc-by-4.0"}
    assert source["files"] == [
        {
            "name": "maze2d-umaze-sparse-v1.hdf5",
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
    ]
    hub.clear_log()
    again = load_dataset("d4rl:maze2d-umaze-v1", 2, root=tmp_path / "root", download=False)
    assert (again[:] == data[:]).all()
    assert hub.requests == []


def test_d4rl_is_verified_where_the_checksum_is_known(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_steps(tmp_path / "steps.hdf5")
    good = file.read_bytes()
    known = hashlib.sha256(good).hexdigest()
    table = {"a-v9": ("x/a-v9.hdf5", len(good), known)}
    monkeypatch.setattr(d4rl, "_table", lambda: table)
    assert D4RLExperienceReplay.available_datasets == ["a-v9"]
    wrong = good[:-1] + bytes([good[-1] ^ 1])
    hub.commit("me/d4rl", {"x/a-v9.hdf5": wrong})
    with pytest.raises(DownloadError, match=f"expected sha256 {known}"):
        D4RLExperienceReplay("a-v9", 2, root=tmp_path / "root")
    hub.commit("me/d4rl", {"x/a-v9.hdf5": good})
    hub.faults.append(Fault(method="GET", cut_after=500, times=1))
    assert len(D4RLExperienceReplay("a-v9", 2, root=tmp_path / "root")) == 4


def test_d4rl_table_lists_the_location_of_every_id() -> None:
    ids = D4RLExperienceReplay.available_datasets
    files = {name: d4rl.d4rl_file(name) for name in ids}
    unique = set(files.values())
    assert (len(ids), len(unique), len({file.url for file in unique})) == (179, 174, 174)
    sums = [file.sha256 for file in unique if file.sha256]
    assert len(set(sums)) == len(sums) == 98
    medium = files["hopper-medium-v2"]
    assert medium.url == f"{d4rl.d4rl_base()}/gym_mujoco_v2/hopper_medium-v2.hdf5"
    assert (medium.size, medium.sha256) == (
        152_756_557,
        "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0",
    )
    assert d4rl.d4rl_file("mine") is None


def test_unhosted_ids_need_user_files_once(hub: LoopbackHub, tmp_path: Path) -> None:
    options: Any = {"batch_size": 2, "root": tmp_path / "root"}
    with pytest.raises(FileNotFoundError, match="d4rl:mine cannot be fetched"):
        D4RLExperienceReplay("mine", **options)
    path = write_steps(tmp_path / "a.hdf5")
    data = D4RLExperienceReplay("mine", **options, source=path)
    assert (D4RLExperienceReplay("mine", **options)[:] == data[:]).all()
    assert sorted(each.name for each in (tmp_path / "root").iterdir()) == [".mine.lock", "mine"]
    # Under an id that is hosted, files of one's own are not those of the corpus.
    D4RLExperienceReplay("maze2d-open-v0", **options, source=path)
    with pytest.raises(RuntimeError, match="whose source is"):
        D4RLExperienceReplay("maze2d-open-v0", **options)
    assert hub.requests == []


def test_urls_are_converted_like_files(hub: LoopbackHub, tmp_path: Path) -> None:
    files = {f"x/part{k}/steps.hdf5": write_steps(tmp_path / f"{k}.hdf5", 3 + k) for k in range(3)}
    hub.commit("me/own", files)
    base = f"{hub.url}/datasets/me/own/resolve/main"
    given = {
        f"{base}/{name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
    }
    data = convert(given, D4RL, tmp_path / "data")
    assert data.episode_table["length"].tolist() == [3, 4, 5]
    names = [file["name"] for file in data.published.manifest.source["files"]]
    assert names == [f"part{k}/steps.hdf5" for k in range(3)]
    assert len(convert(list(given), D4RL, tmp_path / "again")) == 12
    one = D4RLExperienceReplay("mine", 2, root=tmp_path / "root", source=next(iter(given)))
    assert len(one) == 3
    hub.clear_log()
    again = D4RLExperienceReplay("mine", 2, root=tmp_path / "root", source=next(iter(given)))
    assert len(again) == 3
    assert hub.requests == []
    wrong = dict.fromkeys(given, "0" * 64)
    with pytest.raises(DownloadError, match="expected sha256 0000"):
        convert(wrong, D4RL, tmp_path / "wrong")
    with pytest.raises(ValueError, match="either web URLs or paths"):
        convert([*given, tmp_path / "0.hdf5"], D4RL, tmp_path / "mixed")


def test_file_urls_and_checksums_of_local_files(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "a b.hdf5")
    assert len(convert(path.as_uri(), D4RL, tmp_path / "one")) == 4
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(convert({path: good}, D4RL, tmp_path / "two")) == 4
    assert len(convert({path.as_uri(): None}, D4RL, tmp_path / "three")) == 4
    with pytest.raises(CorpusError, match=f"expected sha256 {'0' * 64}, got {good}"):
        convert({path.as_uri(): "0" * 64}, D4RL, tmp_path / "four")
    with pytest.raises(ValueError, match="expected file:///path"):
        convert("file://elsewhere/a.hdf5", D4RL, tmp_path / "five")


def test_hub_plan_lists_missing_files_and_fetches_nothing(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = "demos/Pick-v1/rl"
    episode = {"episodes": [{"episode_id": 0, "elapsed_steps": 3, "episode_seed": 5}]}
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["traj_0/obs"], file["traj_0/actions"] = np.zeros((4, 2)), np.ones((3, 1))
        file["traj_0/terminated"] = file["traj_0/truncated"] = np.zeros(3, bool)
    hub.commit(
        "haosulab/ManiSkill_Demonstrations",
        {
            f"{folder}/t.h5": tmp_path / "t.h5",
            f"{folder}/t.json": json.dumps(episode).encode(),
            f"{folder}/t.mp4": b"film",
        },
    )
    found = plan("maniskill:Pick-v1/rl", root=tmp_path / "root")
    size = (tmp_path / "t.h5").stat().st_size
    sizes = {file.name: (file.size, file.is_cached) for file in found.files}
    assert sizes == {
        f"{folder}/t.h5": (size, False),
        f"{folder}/t.json": (len(json.dumps(episode)), False),
    }
    assert found.missing_bytes == found.nbytes == size + len(json.dumps(episode))
    assert (found.name, found.is_converted) == ("maniskill:Pick-v1/rl", False)
    assert found.target == tmp_path / "root" / "Pick-v1" / "rl"
    assert found.origin["commit"] == hub.head("haosulab/ManiSkill_Demonstrations")
    assert found.free_bytes > 0
    assert not [request for request in hub.requests if request.route == "resolve"]
    load_dataset("maniskill:Pick-v1/rl", 2, root=tmp_path / "root")
    found = plan("maniskill:Pick-v1/rl", root=tmp_path / "root")
    assert (found.is_converted, found.missing_bytes) == (True, 0)


def test_a_plan_of_the_web_asks_for_sizes_only(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_steps(tmp_path / "steps.hdf5")
    hub.commit("me/d4rl", {"maze2d/maze2d-umaze-sparse-v1.hdf5": file})
    found = plan("d4rl:maze2d-umaze-v1", root=tmp_path / "root")
    assert [(each.name, each.size, each.is_cached) for each in found.files] == [
        ("maze2d-umaze-sparse-v1.hdf5", file.stat().st_size, False)
    ]
    assert [request.method for request in hub.requests] == ["HEAD"]
    hub.clear_log()
    assert plan("d4rl:hopper-medium-v2").nbytes == 152_756_557
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert plan("d4rl:maze2d-umaze-v1").files[0].size is None
    assert hub.requests == []


def test_plan_of_a_missing_repository_is_an_error(hub: LoopbackHub) -> None:
    with pytest.raises(FileNotFoundError, match="there is no dataset repository"):
        plan("minari:toys/none/v0")


def trajectories(path: Path, actions: int) -> Path:
    with h5py.File(path, "w") as file:
        group = file.create_group("traj_0")
        group["actions"] = np.zeros((3, actions), np.float32)
        group["obs"] = np.arange(4.0 * actions, dtype=np.float32).reshape(4, actions)
        group["terminated"] = group["truncated"] = np.arange(3) == 2
    return path


def test_a_file_of_a_folder_of_maniskill_is_a_data_set(hub: LoopbackHub, tmp_path: Path) -> None:
    """A folder holds files of several modes, which are not of one kind."""
    folder = "demos/Pick-v1/rl"
    said = json.dumps({"env_info": {"env_id": "Pick-v1"}, "episodes": [{"episode_id": 0}]}).encode()
    hub.commit(
        "haosulab/ManiSkill_Demonstrations",
        {
            f"{folder}/trajectory.none.arm.h5": trajectories(tmp_path / "a.h5", 2),
            f"{folder}/trajectory.none.arm.json": said,
            f"{folder}/trajectory.none.arm.old.h5": trajectories(tmp_path / "c.h5", 5),
            f"{folder}/trajectory.state.ee.h5": trajectories(tmp_path / "b.h5", 4),
        },
    )
    with pytest.raises(CorpusError, match="V10"):
        load_dataset("maniskill:Pick-v1/rl", 2, root=tmp_path / "root")
    name = "maniskill:Pick-v1/rl/trajectory.none.arm"
    data = load_dataset(name, 2, root=tmp_path / "root")
    assert data[:]["action"].shape == (3, 2)
    (file,) = data.published.manifest.source["files"]
    assert file["name"] == f"{folder}/trajectory.none.arm.h5"
    found = plan(name, root=tmp_path / "root")
    assert [Path(each.name).name for each in found.files] == [
        "trajectory.none.arm.h5", "trajectory.none.arm.json",
    ]  # fmt: skip


def test_first_release_of_robomimic_is_on_its_authors_server(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo["actions"], demo["rewards"], demo["dones"] = np.zeros((2, 1)), np.ones(2), np.zeros(2)
        demo["obs/x"] = demo["next_obs/x"] = np.ones((2, 3))
    content = (tmp_path / "a.hdf5").read_bytes()
    hub.commit("me/first", {"lift/ph/image.hdf5": content})
    monkeypatch.setenv("REPLAYKIT_ROBOMIMIC_URL", f"{hub.url}/datasets/me/first/resolve/main")
    name = "robomimic:v0.1/lift/ph/image"
    with pytest.raises(DownloadError, match="expected 837,217,792"):
        load_dataset(name, 2, root=tmp_path / "root")
    monkeypatch.setitem(robomimic._SIZES, "lift/ph/image", len(content))
    data = load_dataset(name, 2, root=tmp_path / "root")
    assert data[:]["observation", "x"].shape == (2, 3)
    assert data.published.manifest.source["origin"]["license"] == "mit"
    ids = [id_ for id_ in RobomimicExperienceReplay.available_datasets if id_.startswith("v0.1/")]
    sizes = [RobomimicExperienceReplay.remote(id_).known_bytes for id_ in ids]
    assert len(ids) == 22
    assert all(size is not None for size in sizes)
    monkeypatch.delenv("REPLAYKIT_ROBOMIMIC_URL")
    (file_,) = RobomimicExperienceReplay.remote("v0.1/lift/ph/low_dim").files
    assert file_.url.endswith("rt_benchmark/lift/ph/low_dim.hdf5")
    assert (file_.size, file_.sha256[:8]) == (18_548_952, "18106c8c")
