"""Names of data sets that do not exist: the error names those that look like them."""

from __future__ import annotations

import pytest

from replaykit.datasets import (
    D4RLExperienceReplay,
    LiberoExperienceReplay,
    ManiSkillExperienceReplay,
    RobosetExperienceReplay,
    load_dataset,
    plan,
)
from replaykit.datasets.dataset import families
from replaykit.inspection import layout_named
from tests.support import LoopbackHub


@pytest.mark.parametrize(
    ("family", "given", "meant"),
    [
        (LiberoExperienceReplay, "libero_spacial", "'libero_spatial'"),
        (RobosetExperienceReplay, "DAPG(expert)/dor_v2d-v1", "'DAPG(expert)/door_v2d-v1'"),
        (RobosetExperienceReplay, "dapg(expert)/door_v2d-v1", "'DAPG(expert)/door_v2d-v1'"),
        (D4RLExperienceReplay, "hoper-medium-v2", "'hopper-medium-v2'"),
        (D4RLExperienceReplay, "Hopper-Medium-v2", "'hopper-medium-v2'"),
    ],
)
def test_a_class_and_its_plan_name_the_nearest_id(tmp_path, family, given, meant):
    for ask in (lambda: family(given, 1, root=tmp_path), lambda: family.plan(given, root=tmp_path)):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            ask()
        assert f"(meant: {meant}" in str(caught.value)
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("robomimc:lift/ph/low_dim", "'robomimic:lift/ph/low_dim'"),
        ("hopper-medium-v2", "'d4rl:hopper-medium-v2'"),
        ("d4rl/hopper-medium-v2", "'d4rl:hopper-medium-v2'"),
        ("other:libero_spatial", "'libero:libero_spatial'"),
    ],
)
def test_a_name_without_its_family_names_the_data_set(given, meant):
    for ask in (plan, lambda name: load_dataset(name, 1)):
        with pytest.raises(ValueError) as caught:
            ask(given)
        assert f"(meant: {meant}" in str(caught.value)


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
