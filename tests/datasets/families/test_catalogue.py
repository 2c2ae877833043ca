"""The corpus classes: what they fetch, from where, and that it comes out as with `convert`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from replaykit.datasets import (
    D4RLExperienceReplay,
    ManiSkillExperienceReplay,
    MinariExperienceReplay,
    Policies,
    RobomimicExperienceReplay,
    convert,
    load_dataset,
)
from replaykit.datasets.families import D4RL, MINARI, D4RLLayout
from replaykit.errors import CorpusError
from tests.datasets.families.test_robomimic import demo
from tests.datasets.families.test_robomimic import write as write_demos
from tests.datasets.families.test_vd4rl import records
from tests.datasets.families.test_vd4rl import write as write_shards
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import write_steps
from tests.support import LoopbackHub

LEAVING = "names with '/' between them as an id"


def robomimic(path: Path) -> Path:
    demos = {f"demo_{k}": demo(k + 3, seed=k) for k in range(3)}
    return write_demos(path, demos, train=["demo_0", "demo_2"], valid=["demo_1"])


def corpus(family: str, folder: Path) -> Path:
    folder.mkdir()
    return CORPORA[family].write(folder)


@pytest.fixture
def hub(tmp_path, point_client_at):
    """A hub with one data set of each family that is hosted on one."""
    skill, cart = (corpus(family, tmp_path / family) for family in ("maniskill", "minari"))
    mimic = robomimic(tmp_path / "mimic.hdf5")
    # Eleven shards of three records; episodes go on from one to the next.
    shards = write_shards(tmp_path / "shards", records(11, 11, 11), *range(3, 33, 3))
    repos = {
        "robomimic/robomimic_datasets": {
            "v1.5/lift/ph/low_dim_v15.hdf5": mimic,
            "v1.5/lift/ph/demo_v15.hdf5": b"another file",
            "v1.5/lift/ph_more/low_dim_v15.hdf5": b"another folder",
        },
        "haosulab/ManiSkill_Demonstrations": {
            "demos/Pick-v1/rl/trajectory.h5": skill,
            "demos/Pick-v1/rl/trajectory.json": skill.with_suffix(".json"),
            "demos/Pick-v1/rl/sample.mp4": b"a film",
            "demos/PickCube-v1.zip": b"PK\x03\x04 an archive of the folder",
            "demos/PickCube-v1/motionplanning/trajectory.h5": skill,
            "demos/PickCube-v1/motionplanning/trajectory.json": skill.with_suffix(".json"),
        },
        "conglu/vd4rl": {
            **{f"main/run/expert/84px/{p.name}": p for p in shards},
            "main/run/expert/64px/a.npz": b"an episode",
        },
        "farama-minari/toys": {
            "cart/random-v0/data/main_data.hdf5": cart,
            "cart/random-v0/data/metadata.json": cart.with_name("metadata.json"),
        },
    }
    with LoopbackHub(repos) as hub:
        point_client_at(hub)
        yield hub


@pytest.mark.pitfall("IF9")
@pytest.mark.parametrize(
    ("name", "lengths", "seeds"),
    [
        ("robomimic:lift/ph/low_dim", [3, 4, 5], [-1] * 3),
        ("maniskill:Pick-v1/rl", [3, 4], [5, 7]),
        (f"maniskill:{ManiSkillExperienceReplay.available_datasets[0]}", [3, 4], [5, 7]),
        ("minari:toys/cart/random-v0", [4, 3], [7, 8]),
        ("vd4rl:main/run/expert/84px", [10] * 3, [-1] * 3),
    ],
)
def test_family_is_fetched_and_converted_once(tmp_path, hub, name, lengths, seeds):
    data = load_dataset(name, 2, root=tmp_path / "root")
    assert data.episode_table["length"].tolist() == lengths
    assert data.episode_table["source_seed"].tolist() == seeds
    assert not [r for r in hub.requests if re.search(r"sample\.mp4|demo_v15|\.zip", str(r))]
    origin = data.published.manifest.source["origin"]
    assert (origin["kind"], len(origin["commit"])) == ("hub", 40)
    assert len(data.sample()) == 2
    asked = len(hub.requests)
    again = load_dataset(name, 2, root=tmp_path / "root", download=False)
    assert (again[:] == data[:]).all()
    assert len(hub.requests) == asked


def test_filters_of_robomimic_are_splits(tmp_path, hub):
    train, valid = (
        RobomimicExperienceReplay("lift/ph/low_dim", 2, root=tmp_path / "root", split=split)
        for split in ("train", "valid")
    )
    assert train.episode_table["episode"].tolist() == [0, 2]
    assert valid.episode_table["episode"].tolist() == [1]
    assert set(train[:]["episode"].tolist()) == {0, 2}
    with pytest.raises(ValueError, match=r"split as one of \['train', 'valid'\] or a range"):
        RobomimicExperienceReplay("lift/ph/low_dim", 2, root=tmp_path / "root", split="test")


@pytest.mark.filterwarnings("ignore:.*V15:UserWarning")  # stale counts of robomimic
@pytest.mark.parametrize("family", ["robomimic", "roboset"])
def test_user_files_accept_any_id(tmp_path, family):
    path = corpus(family, tmp_path / "files")
    options = {"root": tmp_path / "root", "source": path}
    data = load_dataset(f"{family}:mine", 2, **options)
    assert data.data_path_root == tmp_path / "root/mine"
    check(CORPORA[family], path, data.published)
    with pytest.raises(ValueError, match=LEAVING):
        load_dataset(f"{family}:../up", 2, **options)
    with pytest.raises(ValueError, match=r"expected one of .*got 'mine'"):
        load_dataset(f"{family}:mine", 2, root=tmp_path / "root")


def test_ids_that_are_no_text_or_name_no_repository_are_refused(tmp_path):
    with pytest.raises(ValueError, match=LEAVING):
        ManiSkillExperienceReplay(3, 2, root=tmp_path)
    for download in (True, False):
        with pytest.raises(FileNotFoundError, match="'cart' names no repository"):
            MinariExperienceReplay("cart", 2, root=tmp_path, download=download)
    assert list(tmp_path.iterdir()) == []  # no lock file


def test_user_files_are_identified_by_their_content(tmp_path, monkeypatch):
    path = write_steps(tmp_path / "a.hdf5")
    options = {"root": tmp_path / "root", "source": path}
    made = D4RLExperienceReplay("mine", 2, **options).published.manifest.made
    with monkeypatch.context() as patch:  # as they were: nothing is read
        patch.setattr("replaykit.datasets.sources.sha256_of", lambda path: pytest.fail("read"))
        assert D4RLExperienceReplay("mine", 2, **options).published.manifest.made == made
    os.utime(path)  # touched, and the same
    assert D4RLExperienceReplay("mine", 2, **options).published.manifest.made == made
    size = path.stat().st_size
    write_steps(path, rewards=np.full(4, 2.0))
    assert path.stat().st_size == size
    with pytest.raises(RuntimeError, match="whose source is"):
        D4RLExperienceReplay("mine", 2, **options)
    data = D4RLExperienceReplay("mine", 2, download="force", **options)
    assert data[:]["next", "reward"].flatten().tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:.*V36:UserWarning")
def test_classes_take_policies_and_workers(tmp_path):
    paths = [write_steps(tmp_path / f"{k}.hdf5", rewards=np.full(4, 1.0 * k)) for k in range(2)]
    options = {"root": tmp_path / "root", "source": paths}
    policies = Policies(casts={"float64": "float32"}, exclude=[("next", "observation")])
    plain = convert(paths, D4RL, tmp_path / "plain", policies=policies)
    for _ in range(2):  # converted, then opened
        data = load_dataset("d4rl:mine", 2, policies=policies, workers=2, **options)
        assert data[:]["observation"].dtype == torch.float32
        assert (data[:] == plain[:]).all()
        assert data.published.columns.keys() == plain.published.columns.keys()
    for other in (None, Policies(constant="drop")):
        for download in (True, False):
            with pytest.raises(RuntimeError, match=r"other policies.*differ: policies$"):
                D4RLExperienceReplay("mine", 2, policies=other, download=download, **options)
    split = D4RLExperienceReplay("mine", 2, policies=policies, split_trajs=True, **options)
    assert split[:]["observation"].dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"other policies.*differ: policies$"):
        D4RLExperienceReplay("mine", 2, split_trajs=True, **options)
    data = D4RLExperienceReplay("mine", 2, download="force", **options)
    assert data[:]["observation"].dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"other policies.*differ: policies$"):
        D4RLExperienceReplay("mine", 2, policies=policies, **options)
    # Another kind of default: what was published without a word of policies is as it was.
    assert len(D4RLExperienceReplay("mine", 2, policies=Policies(), **options)) == len(data)


@pytest.mark.filterwarnings("ignore:.*infos/qvel. in a.hdf5 it stays the same:UserWarning")
def test_a_class_takes_a_layout_that_an_error_advises(tmp_path):
    """V39: Adroit human-v0 and cloned-v0 flag every 200 rows, wherever the hand is."""
    draw = np.linspace(0, 1, 40)[:, None] * np.ones(5)
    ends = {"terminals": np.zeros(40, bool), "timeouts": np.arange(40) % 10 == 9}
    state = {"observations": np.concatenate([draw, draw], 1), "infos/qpos": draw}
    write_steps(tmp_path / "a.hdf5", 40, **ends, **state, **{"infos/qvel": np.ones((40, 5))})
    options = {"root": tmp_path / "root", "source": tmp_path / "a.hdf5"}
    said = r"timeouts, record 9: 3 of 3 ends .*accept them with D4RLLayout\(unreliable_ends=True\)"
    with pytest.raises(CorpusError, match=rf"{said}.*V39"):
        D4RLExperienceReplay("mine", 2, **options)
    layout = D4RLLayout(unreliable_ends=True)
    for _ in range(2):
        data = D4RLExperienceReplay("mine", 2, layout=layout, **options)
        assert data.episode_table["length"].tolist() == [9, 9, 9, 9]
    with pytest.raises(RuntimeError, match=r"another layout.*differ: rules$"):
        D4RLExperienceReplay("mine", 2, **options)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"policies": {"casts": {}}}, TypeError, "expected policies as Policies or None, got {'ca"),
        ({"layout": "d4rl"}, TypeError, "expected layout as Layout or None, got 'd4rl'"),
        ({"workers": 0}, ValueError, "expected workers >= 1, got 0"),
        ({"policies": Policies(exclude=["acton"])}, ValueError, "exclude: 'acton' matches nothing"),
    ],
)
def test_other_options_are_refused(tmp_path, given, error, says):
    path = write_steps(tmp_path / "a.hdf5")
    with pytest.raises(error, match=says):
        D4RLExperienceReplay("mine", 2, root=tmp_path / "root", source=path, **given)
    assert not (tmp_path / "root/mine").exists()


@pytest.mark.parametrize("through", ["convert", "class"])
def test_changed_metadata_file_makes_another_data_set(tmp_path, through):
    path = corpus("minari", tmp_path / "cart")

    def made(force: bool = False) -> str:
        if through == "convert":
            data = convert(path, MINARI, tmp_path / "data", force=force)
        else:
            options = {"root": tmp_path / "root", "download": "force" if force else True}
            data = MinariExperienceReplay("a/b", 2, source=path, **options)
        return data.published.manifest.report["files"][0]["described_by"]["sha256"]

    first = made()
    assert made() == first
    metadata = path.with_name("metadata.json")
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "dataset_id": "other"}))
    with pytest.raises(RuntimeError, match=r"whose (files|source) is"):
        made()
    assert made(force=True) != first


def test_ids_of_minari_name_folders_of_its_repositories():
    ids = MinariExperienceReplay.available_datasets
    assert len(ids) == len(set(ids)) == 31 + 28
    for dataset_id in ids:
        namespace, _, folder = dataset_id.partition("/")
        assert namespace in ("D4RL", "mujoco")
        assert re.fullmatch(r"[a-z0-9]+/[a-z-]+-v[0-2]", folder)
        remote = MinariExperienceReplay.remote(dataset_id)
        assert (remote.repo_id, remote.directory) == (f"farama-minari/{namespace}", folder)
        assert (remote.suffix, remote.descriptions) == (".hdf5", ("/metadata.json",))
