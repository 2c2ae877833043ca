"""Names of data sets that do not exist: the error names those that look like them."""

from __future__ import annotations

import pytest

from replaykit.datasets import (
    ManiSkillExperienceReplay,
    load_dataset,
    plan,
)
from replaykit.datasets.dataset import families
from replaykit.inspection import layout_named
from tests.support import LoopbackHub

LEAVING = "names with '/' between them as an id"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("libero:libero_spacial", ValueError, "(meant: 'libero_spatial'"),
        ("libero:libero_100", ValueError, "got 'libero_100'"),
        ("roboset:DAPG(expert)/dor_v2d-v1", ValueError, "(meant: 'DAPG(expert)/door_v2d-v1'"),
        ("roboset:dapg(expert)/door_v2d-v1", ValueError, "(meant: 'DAPG(expert)/door_v2d-v1'"),
        ("roboset:door", ValueError, "expected one of the data sets"),
        ("d4rl:hoper-medium-v2", FileNotFoundError, "(meant: 'hopper-medium-v2'"),
        ("d4rl:Hopper-Medium-v2", FileNotFoundError, "(meant: 'hopper-medium-v2'"),
        ("d4rl:mine", FileNotFoundError, "cannot be fetched: "),
        ("aloha:mine", FileNotFoundError, "pass local files"),
        ("isaaclab:mine", FileNotFoundError, "isaaclab:mine cannot be fetched"),
        ("robomimic:lift/ph/image", ValueError, "got 'lift/ph/image'"),
        *[
            (f"maniskill:{leaving}", ValueError, LEAVING)
            for leaving in ("", "a/../b", "/a", "a//b", ".", "a\\b")
        ],
        ("robomimc:lift/ph/low_dim", ValueError, "(meant: 'robomimic:lift/ph/low_dim'"),
        ("hopper-medium-v2", ValueError, "(meant: 'd4rl:hopper-medium-v2'"),
        ("d4rl/hopper-medium-v2", ValueError, "(meant: 'd4rl:hopper-medium-v2'"),
        ("other:libero_spatial", ValueError, "(meant: 'libero:libero_spatial'"),
        ("atari:pong", ValueError, "expected name as family:id"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(tmp_path, name, error, said):
    for ask in (lambda: load_dataset(name, 1, root=tmp_path), lambda: plan(name, root=tmp_path)):
        with pytest.raises(error) as caught:
            ask()
        assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_without_a_download_the_nearest_id_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"meant: 'PickCube-v1/motionplanning'"):
        ManiSkillExperienceReplay("PickCube-v1/motionplaning", 1, root=tmp_path, download=False)
    with pytest.raises(FileNotFoundError) as caught:
        ManiSkillExperienceReplay("PickCube-v1/motionplanning", 1, root=tmp_path, download=False)
    assert "meant" not in str(caught.value)


def test_an_id_that_the_hub_does_not_have_names_the_nearest(tmp_path, monkeypatch):
    with LoopbackHub({"farama-minari/D4RL": {"door/human-v2/data/main_data.hdf5": b"x"}}) as hub:
        for name, value in hub.env(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        for ask in (plan, lambda name: load_dataset(name, 1, root=tmp_path / "root")):
            with pytest.raises(FileNotFoundError, match="meant: 'D4RL/door/human-v2'"):
                ask("minari:D4RL/door/humam-v2")


def test_unrecognizable_name_gets_no_suggestion():
    with pytest.raises(ValueError) as caught:
        load_dataset("zzzz:qqqqqqqq", 1)
    assert "meant" not in str(caught.value)


@pytest.mark.parametrize(
    "family", sorted(name for name, kind in families().items() if kind.available_datasets)
)
def test_every_family_names_its_nearest(tmp_path, family):
    kind = families()[family]
    name = kind.available_datasets[0]
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        kind(name[:-1] + "~", 1, root=tmp_path, download=False)
    assert "meant: " in str(caught.value)


def test_unknown_layout_names_the_nearest_layout():
    with pytest.raises(ValueError, match="meant: 'robomimic'"):
        layout_named("robomimc")
