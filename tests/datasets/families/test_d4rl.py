"""D4RL: flat files of every release, each row against what h5py reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets import open as open_dataset
from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.families.d4rl import D4RL, D4RLLayout
from replaykit.datasets.publishing import Published
from replaykit.errors import CorpusError
from replaykit.inspection import guess_layout
from tests.datasets.converted import growth, needs_proc
from tests.datasets.mutated.corpora import leaves
from tests.datasets.trials import assert_ted, write_steps
from tests.datasets.trials import quietly as quiet_dataset


def test_late_simulator_state_of_antmaze_is_the_state_arrived_at(shared, quietly):
    path = shared("d4rl/antmaze-umaze-v0.hdf5")
    with h5py.File(path) as file:
        source = {name: node[()] for name, node in leaves(file)}
    arrived = np.concatenate([source["infos/qpos"], source["infos/qvel"]], 1)
    last = source["timeouts"][:, None].astype(bool)
    inside = ~last[:-1, 0]
    np.testing.assert_array_equal(arrived[:-1][inside], source["observations"][1:][inside])
    data = quietly(path, D4RL)
    assert_ted(data.published)
    columns = {
        ("observation",): source["observations"],
        ("action",): source["actions"],
        ("next", "observation"): arrived,
        ("next", "reward"): source["rewards"][:, None],
        ("info", "goal"): source["infos/goal"],
        ("next", "truncated"): last,
        ("next", "terminated"): last & source["terminals"][:, None].astype(bool),
    }
    assert {key for key in data.published.columns if "info" in key} == {("info", "goal")}
    for key, values in columns.items():
        found = data.published.columns[key].numpy()
        assert (found.dtype, found.tobytes()) == (values.dtype, values.tobytes()), key


def arrays(*lengths: int, width: int = 3, seed: int = 0) -> dict[str, Any]:
    """Steps of episodes that time out, all states different."""
    draw = np.random.default_rng(seed)
    count = sum(lengths)
    states = [draw.normal(size=(length + 1, width)).astype(np.float32) for length in lengths]
    ends = np.cumsum(lengths) - 1
    return {
        "observations": np.concatenate([s[:-1] for s in states]),
        "next_observations": np.concatenate([s[1:] for s in states]),
        "actions": draw.uniform(-1, 1, (count, 2)).astype(np.float32),
        "rewards": np.arange(count, dtype=np.float32),
        "terminals": np.zeros(count, np.bool_),
        "timeouts": np.isin(np.arange(count), ends),
    }


def write(path: Path, values: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            if value is not None:
                file[name] = value
    return path


@pytest.mark.parametrize(
    ("unrecorded", "kept"), [("terminated", [4, 2]), ("drop", [3, 2]), ("keep", [4, 3])]
)
def test_last_steps_into_unknown_states(tmp_path, quietly, unrecorded, kept):
    values = {**arrays(4, 3), "next_observations": None}
    values["terminals"] = np.arange(7) == 3
    values["timeouts"] = np.arange(7) == 6
    data = quietly(
        write(tmp_path / "a.hdf5", values), D4RL, policies=Policies(unrecorded=unrecorded)
    )
    assert data.episode_table["length"].tolist() == kept
    rows = data[:]
    if unrecorded == "drop":
        assert ("next", "observed") not in data.published.columns
        assert data.episode_table["truncated"].tolist() == [True, True]
        return
    unknown = (~rows["next", "observed"].flatten()).nonzero().flatten().tolist()
    assert unknown == ([3] if unrecorded == "terminated" else [3, 6])
    assert (rows["next", "observation"][unknown] == rows["observation"][unknown]).all()
    assert data.episode_table["terminated"].tolist() == [True, False]


def test_bad_episodes_are_skipped_together_and_named_or_kept(tmp_path, quietly):
    values = arrays(4, 3, 5, 2)
    values["actions"][5, 1] = np.nan
    kept = quietly(
        write(tmp_path / "a.hdf5", values), D4RL, "kept", policies=Policies(on_invalid="keep")
    )
    np.testing.assert_array_equal(kept[:]["action"], values["actions"])
    (note,) = kept.published.manifest.report["warnings"]
    assert (note["rule"], note["first"]) == ("V20", "a.hdf5: actions, record 5")
    values["observations"][9, 0] = np.inf
    values["next_observations"][8, 0] = np.inf
    path = write(tmp_path / "a.hdf5", values)
    with pytest.raises(CorpusError, match=r"a\.hdf5: actions, record 5: .*NaN.*V20"):
        quietly(path, D4RL)
    data = quietly(path, D4RL, policies=Policies(on_invalid="skip"))
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [4, 2]
    assert data.episode_table["episode"].tolist() == [0, 3]
    at = [0, 1, 2, 3, 12, 13]
    np.testing.assert_array_equal(data[:]["action"], values["actions"][at])
    skipped = {e["name"]: e["why"] for e in data.published.manifest.report["skipped"]}
    assert skipped.keys() == {"[4:7]", "[7:12]"}
    assert "actions, record 5" in skipped["[4:7]"]


OTHERS = {
    **{
        f"no {name}": ({name: None}, rf"no arrays '{name}' .*V04")
        for name in ("observations", "actions", "rewards", "terminals")
    },
    **{
        f"short {name}": ({name: lambda x: x[:-1]}, rf"{name}: .*V11")
        for name in ("rewards", "timeouts", "next_observations", "infos/x")
    },
    "narrow": ({"next_observations": lambda x: x[:, :2]}, r"next_observations: has shape .*V10"),
    "wide": ({"next_observations": np.float64}, r"next_observations: has shape .*observ.*V10"),
}


@pytest.mark.parametrize("fault", OTHERS)
def test_arrays_of_another_layout_are_named(tmp_path, quietly, fault):
    change, said = OTHERS[fault]
    values = arrays(4, 3) | {"infos/x": np.zeros(7)}
    for name, make in change.items():
        values[name] = None if make is None else make(values[name])
    with pytest.raises(CorpusError, match=rf"a\.hdf5: {said}"):
        quietly(write(tmp_path / "a.hdf5", values), D4RL)


def test_files_of_two_releases_are_not_mixed(tmp_path, quietly):
    one = write(tmp_path / "a.hdf5", arrays(4))
    two = write(tmp_path / "b.hdf5", {**arrays(4), "next_observations": None})
    with pytest.raises(CorpusError, match=r"b\.hdf5: the file has .*next_observations.*V10"):
        quietly([one, two], D4RL)


def test_single_end_flag_without_a_reset_is_reported_and_metadata_is_no_column(tmp_path, quietly):
    """V39: the flags say so, and but for one step they stand apart."""
    values = arrays(8, 4) | {
        "metadata/policy/weight": np.ones((12, 4)),
        "metadata/algorithm": b"SAC",
    }
    values["terminals"] = np.arange(12) == 4
    data = quietly(write(tmp_path / "a.hdf5", values), D4RL)
    assert data.episode_table["length"].tolist() == [5, 3, 4]
    notes = data.published.manifest.report["warnings"]
    assert [(n["rule"], n["count"], n["first"]) for n in notes] == [
        ("V39", 1, "a.hdf5: next.observation, record 4")
    ]
    assert not [key for key in data.published.columns if "metadata" in key]
    assert data.published.manifest.report["left_out"] == []


def in_blocks(path: Path, target: Path, block_bytes: int) -> Published:
    options = ConvertOptions(block_bytes=block_bytes)
    return quiet_dataset(
        target, get_sources=lambda: local_sources(path), layout=D4RL, options=options
    )


def as_antmaze(values: dict[str, Any]) -> dict[str, Any]:
    """The same steps as v0 logs them: the simulator's state is the one arrived at."""
    after = values.pop("next_observations")
    return values | {"infos/qpos": after[:, :2], "infos/qvel": after[:, 2:]}


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 24])
@pytest.mark.parametrize(
    ("releases", "lengths", "terminals", "timeouts", "terminated", "flags"),
    [
        ("v2 v0", (7, 5), [4, 5, 6, 9, 10, 11], [], [True, True], "terminals, record 4"),
        ("v2 v0", (7, 5), [4, 5], [6, 11], [False, False], "terminals, record 4"),
        ("v2 v0", (8, 4, 3), [5, 6], [7, 10, 11, 14], [False] * 3, "terminals, record 5"),
        ("v0", (7, 6, 5), [], [4, 10, 15], [False] * 3, "timeouts, record 4"),
    ],
)
def test_flags_before_the_reset_end_no_episode(
    tmp_path, quietly, block_bytes, releases, lengths, terminals, timeouts, terminated, flags
):
    """N31: AntMaze flags every step at which the goal is held; v0 also times out too early."""
    at = np.arange(sum(lengths))
    for release in releases.split():
        values = arrays(*lengths)
        values["terminals"], values["timeouts"] = np.isin(at, terminals), np.isin(at, timeouts)
        after = values["next_observations"].copy()
        if release == "v0":
            values = as_antmaze(values)
        path = write(tmp_path / f"{release}.hdf5", values)
        found = in_blocks(path, tmp_path / release, block_bytes)
        assert_ted(found)
        assert found.episodes["length"].tolist() == list(lengths)
        lasts = np.isin(at, np.cumsum(lengths) - 1)
        over = np.zeros(len(at), bool)
        over[lasts] = terminated
        np.testing.assert_array_equal(found.columns["next", "observation"], after)
        np.testing.assert_array_equal(found.columns["observation",], values["observations"])
        np.testing.assert_array_equal(found.columns["action",], values["actions"])
        np.testing.assert_array_equal(found.columns["next", "reward"][:, 0], values["rewards"])
        np.testing.assert_array_equal(found.columns["next", "terminated"][:, 0], over)
        np.testing.assert_array_equal(found.columns["next", "done"][:, 0], lasts)
        (note,) = found.manifest.report["warnings"]
        assert (note["rule"], note["first"]) == ("V39", f"{release}.hdf5: {flags}")
        if not terminals:
            said = "3 of 3 ends are flagged where the environment was not reset"
            assert note["text"].startswith(said)


def test_resets_that_nothing_shows_are_refused(tmp_path, quietly):
    """A wrong structure of episodes is worse than none."""
    values = arrays(7, 6, 5)
    values["timeouts"] = np.arange(18) == 12
    path = write(tmp_path / "a.hdf5", as_antmaze(values))
    with pytest.raises(CorpusError, match=r"a\.hdf5: next\.observation, record 6: .*V22"):
        quietly(path, D4RL)
    values = {**arrays(8, 4), "next_observations": None}
    values["terminals"] = np.isin(np.arange(12), [5, 6])
    path = write(tmp_path / "b.hdf5", values)
    with pytest.raises(CorpusError, match=r"b\.hdf5: terminals, record 5: is set .*held.*V39"):
        quietly(path, D4RL)
    data = quietly(path, D4RLLayout(unreliable_ends=True))
    assert data.episode_table["length"].tolist() == [6, 1, 3]
    assert data.episode_table["terminated"].tolist() == [True, True, False]


@needs_proc
def test_peak_memory_does_not_grow_with_a_flat_file(tmp_path):
    """80 MB of steps in blocks of 1 MiB: 16 MB of slack, of which the episode list is some."""
    count, length = 400_000, 250
    write(tmp_path / "small.hdf5", arrays(5, 5))
    with h5py.File(tmp_path / "large.hdf5", "w") as file:
        states = np.arange(count, dtype=np.float32)[:, None] + np.arange(24, dtype=np.float32)
        file.create_dataset("observations", data=states, chunks=(1000, 24))
        file.create_dataset("next_observations", data=states + 1, chunks=(1000, 24))
        file["actions"] = states[:, :2]
        file["rewards"] = states[:, 0]
        file["terminals"] = np.zeros(count, np.bool_)
        file["timeouts"] = np.arange(count) % length == length - 1
    files = (tmp_path / "small.hdf5", tmp_path / "large.hdf5")
    assert growth(*files, tmp_path, "D4RL", 1 << 20) < 16 << 20
    data = open_dataset(tmp_path / "large")
    assert len(data) == count
    assert data.episode_table["length"].tolist() == [length] * (count // length)
    assert data[:]["next", "reward"][:, 0].tolist()[::40_000] == list(range(0, count, 40_000))


CUTS = (0, 3, 7, 8, 9, 10, 11, 12, 13, 14, 18, 20)
"""Eleven parts, of several lengths; episodes end elsewhere."""


def cut(
    path: Path, values: dict[str, Any], first: int = 0, whole: str | None = None, longer: str = ""
) -> Path:
    """Writes arrays in parts.

    ``whole``: how they are at the root too; ``longer``: the array of which one record more is in
    the first part, and one fewer in the second.
    """
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            if whole is not None:
                file[name] = value
            cuts = [0, CUTS[1] + (name == longer), *CUTS[2:]]
            for k, (start, stop) in enumerate(pairwise(cuts)):
                at = f"virtual/{k + first}/{name}"
                if whole == "mapped":
                    layout = h5py.VirtualLayout((stop - start, *value.shape[1:]), value.dtype)
                    layout[:] = h5py.VirtualSource(file[name])[start:stop]
                    file.create_virtual_dataset(at, layout)
                else:
                    file[at] = value[start:stop]
    return path


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("whole", [None, "copied", "mapped"])
@pytest.mark.parametrize("lacking", [(), ("next_observations",)])
def test_parts_are_the_whole(tmp_path, quietly, first, whole, lacking):
    """In the order of their numbers; episodes go on from one to the next."""
    values = {name: value for name, value in arrays(5, 8, 7).items() if name not in lacking}
    values["infos/goal"] = np.arange(40.0).reshape(20, 2)
    path = cut(tmp_path / "cut.hdf5", values, first, whole)
    data = quietly(path, D4RL)
    assert guess_layout([path]).layout == "d4rl"
    assert_ted(data.published)
    plain = quietly(write(tmp_path / "plain.hdf5", values), D4RL, target="plain")
    columns = plain.published.columns
    assert data.published.columns.keys() == columns.keys()
    for key, column in columns.items():
        assert data.published.columns[key].numpy().tobytes() == column.numpy().tobytes(), key
    assert data.episode_table["length"].tolist() == plain.episode_table["length"].tolist()
    reports = [each.published.manifest.report for each in (data, plain)]
    assert [report["left_out"] for report in reports] == [[], []]
    assert reports[0]["warnings"] == reports[1]["warnings"]


def test_values_and_blocks_that_lie_in_several_parts(tmp_path, quietly):
    values = arrays(5, 8, 7)
    path = cut(tmp_path / "a.hdf5", values)
    one, many = (in_blocks(path, tmp_path / f"{size}", size) for size in (1 << 24, 60))
    for key, column in one.columns.items():
        assert many.columns[key].numpy().tobytes() == column.numpy().tobytes(), key
    values["actions"][9, 0] = np.nan
    with pytest.raises(CorpusError, match=r"a\.hdf5: actions, record 9: .*V20"):
        quietly(cut(path, values), D4RL)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["4"], r"virtual: the chunk 4 is missing.*V32"),
        (["0", "1"], r"virtual: the chunk 1 is missing.*V32"),
        (["3/observations"], r".*observations.*V\d\d"),
        (["3/actions"], r".*actions.*V\d\d"),
        (["3/terminals"], r".*terminals.*V\d\d"),
        ([], r"observations: .*chunks have \[4, 3, .*'actions' \[3, 4, .*V10"),
    ],
)
def test_parts_that_are_missing_or_unequal_are_named(tmp_path, quietly, lost, said):
    """Of unequal parts all arrays are as long as they should be, and rows would be misaligned."""
    path = cut(tmp_path / "a.hdf5", arrays(5, 8, 7), longer="" if lost else "observations")
    with h5py.File(path, "a") as file:
        for name in lost:
            del file["virtual"][name]
    with pytest.raises(CorpusError, match=rf"a\.hdf5: {said}"):
        quietly(path, D4RL)


@pytest.mark.parametrize("change", [-1, 1])
def test_actions_of_another_length_than_the_flags_are_named(tmp_path, quietly, change):
    path = write_steps(tmp_path / "a.hdf5", actions=np.zeros((4 + change, 2), np.float32))
    message = rf"terminals: has shape \[4\], but 'actions' \[{4 + change}, 2\] \[V11\]"
    with pytest.raises(CorpusError, match=message):
        quietly(path, D4RL)
