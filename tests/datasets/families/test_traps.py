"""The traps of published files, in the layout of every family that they can occur in.

What comes out is compared with rows that are computed with h5py alone, or it is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets.publishing import Published
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA, leaves
from tests.datasets.mutated.running import check

FLAGS = {
    "roboset": ["done"],
    "d4rl-v0": ["terminals", "timeouts"],
    "d4rl-v2": ["terminals", "timeouts"],
    "minari": ["terminations", "truncations"],
    "robomimic": ["dones"],
    "libero": ["dones"],
    "maniskill": ["terminated", "truncated"],
    "vd4rl": ["discount", "step_type"],
}
REWARDS = dict.fromkeys(FLAGS, "rewards") | {"vd4rl": "reward"}
GROUPED = ("roboset", "roboset-real", "minari", "robomimic", "robosuite", "libero", "isaaclab",
           "maniskill")  # fmt: skip
STATES = {
    "roboset": "observations",
    "roboset-real": "data/qp_arm",
    "d4rl-v0": "observations",
    "d4rl-v2": "next_observations",
    "minari": "observations/x",
    "robomimic": "next_obs/position",
    "robosuite": "states",
    "libero": "obs/rgb",
    "isaaclab": "obs/joint_pos",
    "maniskill": "obs/agent/qpos",
    "vd4rl": "observation",
    "aloha": "observations/qpos",
}
"""An array of states of each family: of T + 1 records in Minari and ManiSkill, of T elsewhere."""


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(family: str, folder: str = "files") -> Path:
        (tmp_path / folder).mkdir()
        return CORPORA[family].write(tmp_path / folder)

    return write


@pytest.fixture
def convert(quietly: Any) -> Callable[..., Published]:
    def run(family: str, *paths: Path) -> Published:
        published: Published = quietly(paths, CORPORA[family].layout).published
        return published

    return run


def edit(path: Path, name: str, change: Callable[[np.ndarray], Any]) -> int:
    """Replaces a dataset of every episode; returns in how many it was found."""
    found = 0
    with h5py.File(path, "a") as file:
        for known in [known for known, _ in leaves(file) if f"/{known}".endswith(f"/{name}")]:
            values = file[known][()]
            del file[known]
            file[known] = change(values)
            found += 1
    return found


def episodes_of(file: h5py.File) -> dict[str, h5py.Group]:
    above = file.get("data", file)
    return {name: node for name, node in above.items() if isinstance(node, h5py.Group)}


def describe(path: Path, **change: Any) -> None:
    """Changes what the file beside says."""
    for beside in path.parent.glob("*.json"):
        beside.write_text(json.dumps(json.loads(beside.read_text()) | change))


@pytest.mark.parametrize("kind", ["float64", "int64", "uint8", "another rank"])
@pytest.mark.parametrize("family", FLAGS)
def test_flags_of_any_type_and_rank(written, convert, family, kind):
    """N17: replay-v1 of D4RL has flags of float64, on which bitwise operators fail.

    N37: rewards (N, 1) with flags (N,), and the other way round, broadcast to (N, N).
    """
    path = written(family)
    if kind == "another rank":
        turn = np.ravel if family.startswith("d4rl") else lambda values: values[:, None]
        for name in (REWARDS[family], FLAGS[family][0]):
            assert edit(path, name, turn)
    else:
        for name in FLAGS[family]:
            assert edit(path, name, lambda values: values.astype(kind))
    found = convert(family, path)
    check(CORPORA[family], path, found)
    assert found.columns["next", "reward"].shape == (found.rows, 1)
    assert found.columns["next", "terminated"].shape == (found.rows, 1)


# What becomes of a flag that is set from the second record before the end on: an error with a
# rule, or lengths of episodes.
HELD: dict[str, tuple[str, float, str | list[int]]] = {
    "roboset": ("done", 1, "V53"),
    "minari": ("terminations", 1, "V31"),
    "libero": ("dones", 1, "V31"),
    "maniskill": ("terminated", 1, "V31"),
    "vd4rl": ("discount", 0, "V31"),
    "robomimic": ("dones", 1, [4, 3]),
    "d4rl-v2": ("terminals", 1, [4, 4, 1]),
}


@pytest.mark.parametrize("family", HELD)
def test_flags_that_are_held(written, convert, family):
    """N31: success is held in robomimic, the goal in AntMaze; elsewhere the writer cannot do so."""
    name, value, outcome = HELD[family]
    path = written(family)

    def hold(values: np.ndarray) -> np.ndarray:
        values[-3 : -1 if family == "d4rl-v2" else None] = value
        return values

    assert edit(path, name, hold)
    if isinstance(outcome, str):
        with pytest.raises(CorpusError, match=rf"{path.name}: .*{name}, record \d: .*{outcome}"):
            convert(family, path)
        return
    found = convert(family, path)
    check(CORPORA[family], path, found)
    assert found.episodes["length"].tolist() == outcome


@pytest.mark.parametrize(
    ("family", "name", "rule"),
    [
        ("roboset", "done", "V12"),
        ("minari", "terminations", "V04"),
        ("minari", "truncations", "V12"),
        ("robomimic", "dones", "V12"),
        ("libero", "dones", "V12"),
        ("maniskill", "terminated", "V12"),
        ("d4rl-v2", "terminals", "V04"),
        ("vd4rl", "step_type", "V04"),
        ("d4rl-v0", "timeouts", None),
        ("isaaclab", "@success", None),
        ("robomimic", "@num_samples", None),
        ("libero", "@num_samples", None),
        ("minari", "@total_steps", None),
    ],
)
def test_flags_and_attributes_that_are_missing(written, convert, family, name, rule):
    """What says why an episode ended must be there, but for what releases leave out."""
    path = written(family)
    with h5py.File(path, "a") as file:
        for node in episodes_of(file).values() if family in GROUPED else [file]:
            if name.startswith("@"):
                del node.attrs[name[1:]]
            else:
                del node[name]
    if rule is None:
        check(CORPORA[family], path, convert(family, path))
        return
    with pytest.raises(CorpusError, match=rf"{path.name}: .*{name}.*\[{rule}\]"):
        convert(family, path)


@pytest.mark.parametrize("how", ["longer", "shorter"])
@pytest.mark.parametrize("family", STATES)
def test_states_of_another_number_than_the_layout_says(written, convert, family, how):
    """T + 1 observations where T belong, and T where T + 1 do: all rows would be misaligned."""
    path, name = written(family), STATES[family]
    if how == "longer":
        assert edit(path, name, lambda values: np.concatenate([values, values[-1:]]))
    else:
        assert edit(path, name, lambda values: values[:-1])
    with pytest.raises(CorpusError, match=rf"{path.name}: .*records.*\[V11\]"):
        convert(family, path)


@pytest.mark.parametrize(
    ("family", "name", "outcome"),
    [
        *((family, "num_samples", "refused") for family in ("robomimic", "libero", "isaaclab")),
        ("minari", "total_steps", "refused"),
        *((family, "total", "reported") for family in ("robomimic", "libero", "isaaclab")),
        ("libero", "num_demos", "reported"),
        ("robomimic", "num_demos", "ignored"),
        ("minari", "num_samples", "ignored"),
    ],
)
def test_attributes_that_are_stale(written, convert, family, name, outcome):
    """V15: totals are left behind where demonstrations were deleted, which is reported."""
    path = written(family)
    with h5py.File(path, "a") as file:
        nodes = [*episodes_of(file).values(), *([file["data"]] if "data" in file else [])]
        for node in nodes:
            node.attrs[name] = 12345
    if outcome == "refused":
        with pytest.raises(CorpusError, match=rf"{path.name}: .*{name}' says 12345 \[V15\]"):
            convert(family, path)
        return
    found = convert(family, path)
    check(CORPORA[family], path, found)
    said = [
        (note["count"], note["first"])
        for note in found.manifest.report["warnings"]
        if note["rule"] == "V15" and f"{name!r} says 12345" in note["text"]
    ]
    assert said == ([(1, f"{path.name}: data")] if outcome == "reported" else [])


@pytest.mark.parametrize("family", GROUPED)
def test_gaps_in_the_numbering_and_numbers_of_two_digits(written, convert, family):
    """The eleventh comes after the second, whatever the order of bytes and of creation is."""
    path = written(family)
    with h5py.File(path, "a") as file:
        names = list(episodes_of(file))
        prefix = re.sub(r"[0-9]+$", "", names[0])
        above = file.get("data", file)
        above.move(names[0], f"{prefix}100")
        above.move(names[1], f"{prefix}20")
    said = [{"episode_id": 100, "elapsed_steps": 3}, {"episode_id": 20, "elapsed_steps": 4}]
    if family == "maniskill":
        describe(path, episodes=said)
    found = convert(family, path)
    check(CORPORA[family], path, found)
    assert found.episodes["episode"].tolist() == [20, 100]


@pytest.mark.parametrize("family", GROUPED)
def test_corpus_without_an_episode(written, convert, family):
    path = written(family)
    with h5py.File(path, "a") as file:
        above = file.get("data", file)
        for name in list(episodes_of(file)):
            del above[name]
    describe(path, total_episodes=0, total_steps=0, episodes=[])
    with pytest.raises(CorpusError, match=rf"{path.name}: no .*V(38|04)\]"):
        convert(family, path)


@pytest.mark.parametrize("family", CORPORA)
def test_episode_without_a_record(written, convert, family):
    """It is skipped and told of; a file that has no other is empty."""
    path = written(family)
    extra = {"minari": 1, "maniskill": 1}.get(family, 0)
    with h5py.File(path, "a") as file:
        group = next(iter(episodes_of(file).values())) if family in GROUPED else file
        steps = len(group[STATES[family]])
        for name, node in list(leaves(group)):
            values = node[()]
            if len(values) in (steps, steps - extra):
                del group[name]
                group[name] = values[: len(values) - steps + extra]
        for name in ("num_samples", "total_steps"):
            if name in group.attrs:
                group.attrs[name] = 0
    said = [{"episode_id": 0, "elapsed_steps": 0}, {"episode_id": 2, "elapsed_steps": 4}]
    describe(path, total_steps=3, episodes=said)
    if family not in GROUPED:
        with pytest.raises(CorpusError, match=rf"{path.name}: no episode gives a row.*V38"):
            convert(family, path)
        return
    found = convert(family, path)
    check(CORPORA[family], path, found)
    (skipped,) = found.manifest.report["skipped"]
    assert skipped["why"] == "it has 0 records, so it gives no row [V37]"
    assert len(found.episodes) == 1


OPTIONAL = {
    "roboset": "env_infos/state/qpos",
    "roboset-real": "derived/pose",
    "d4rl-v2": "infos/goal",
    "minari": "infos/k",
    "robosuite": "joint_torques",
    "libero": "robot_states",
    "isaaclab": "states/articulation/robot/pos",
    "maniskill": "env_states/actors/cube",
    "aloha": "base_action",
}
"""What a file may lack or have otherwise."""


@pytest.mark.parametrize("family", OPTIONAL)
def test_text_in_place_of_numbers_is_left_out_and_reported(written, convert, family):
    path, name = written(family), OPTIONAL[family]
    extra = "note" if family != "d4rl-v2" else "infos/note"
    with h5py.File(path, "a") as file:
        for group in episodes_of(file).values() if family in GROUPED else [file]:
            shape = group[name].shape[:1]
            for target in (name, extra):
                if target in group:
                    del group[target]
                group.create_dataset(
                    target, data=np.full(shape, "pick the cube", object), dtype=h5py.string_dtype()
                )
    found = convert(family, path)
    check(CORPORA[family], path, found)
    left_out = {entry["key"]: entry["why"] for entry in found.manifest.report["left_out"]}
    assert "text" in left_out[name]
    assert extra in left_out


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, OPTIONAL[family]) for family in ("roboset", "d4rl-v2", "robosuite", "libero")),
        *((family, STATES[family]) for family in ("d4rl-v0", "robomimic", "isaaclab", "vd4rl")),
    ],
)
def test_array_in_one_file_and_group_in_another(tmp_path, written, convert, family, name):
    """Optional ones are left out of both and told of; required ones are refused by name."""
    one, two = written(family, "one"), written(family, "two")
    two = two.rename(two.parent / ("2.hdf5" if family == "vd4rl" else f"other{two.suffix}"))
    with h5py.File(two, "a") as file:
        for group in episodes_of(file).values() if family in GROUPED else [file]:
            group.move(name, f"{name}_")
            group.move(f"{name}_", f"{name}/deep")
    if name == OPTIONAL.get(family):
        found = convert(family, one, two)
        left_out = {entry["key"]: entry["why"] for entry in found.manifest.report["left_out"]}
        assert "an array in some episodes and a group in others" in left_out[name]
        assert f"{name}/deep" in left_out
        assert set(found.columns["seed",].tolist()) == {0, 1}
        return
    with pytest.raises(CorpusError, match=rf"{two.name}: .*V(04|10|11|12)\]"):
        convert(family, one, two)
