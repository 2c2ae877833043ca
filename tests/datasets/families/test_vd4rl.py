"""V-D4RL: shards that the test writes, each row by the time it happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.families.d4rl import VD4RL
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted


def records(*lengths: int, terminated: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    """Episodes of so many records, as the recorder writes them: the action comes with where it led.

    ``terminated``: those whose discount is zero at the end.
    """
    draw = np.random.default_rng(seed)
    count = sum(lengths)
    kinds = np.concatenate([[0] + [1] * (n - 2) + [2] for n in lengths])
    discount = np.ones(count, np.float32)
    discount[np.cumsum(lengths)[list(terminated)] - 1] = 0
    action = draw.uniform(-1, 1, (count, 2)).astype(np.float32)
    action[kinds == 0] = 0  # nothing led to the first record
    return {
        "observation": draw.integers(0, 256, (count, 3, 4, 4), np.uint8),
        "action": action,
        "reward": draw.normal(size=count).astype(np.float32),
        "discount": discount,
        "step_type": kinds.astype(np.float32),
    }


def write(folder: Path, values: dict[str, Any], *cuts: int, first: int = 1) -> list[Path]:
    """Writes shards that end before records ``cuts``."""
    folder.mkdir(exist_ok=True)
    paths = []
    total = len(values["step_type"])
    for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, total), strict=True)):
        path = folder / f"{first + number}.hdf5"
        with h5py.File(path, "w") as file:
            for name, value in values.items():
                file.create_dataset(name, data=value[start:stop], compression="gzip")
        paths.append(path)
    return paths


@pytest.mark.parametrize("cuts", [(3,), (6, 9), (2, 4), (3, 8, 12), tuple(range(1, 15))], ids=str)
def test_every_row_wherever_the_shards_are_cut(tmp_path, quietly, cuts):
    """N20: the action of a record led to its observation; shards may be cut inside an episode."""
    values = records(6, 5, 4, terminated=(1,))
    (path,) = write(tmp_path / "whole", values)
    whole = quietly(path, VD4RL, "one")
    check(CORPORA["vd4rl"], path, whole.published)
    paths = write(tmp_path / "files", values, *cuts)
    data = quietly(tmp_path / "files", VD4RL)
    assert_ted(data.published)
    columns = data.published.columns
    assert columns.keys() == whole.published.columns.keys()
    for key, column in whole.published.columns.items():
        assert key in (("seed",), ("episode",)) or columns[key].equal(column), key
    # An episode has the number of the shard that it begins in, and is counted there.
    seeds = np.searchsorted(cuts, [0, 6, 11], "right").tolist()
    assert data.episode_table["seed"].tolist() == seeds
    assert data.episode_table["episode"].tolist() == [seeds[:k].count(seeds[k]) for k in range(3)]
    assert data.episode_table["terminated"].tolist() == [False, True, False]
    assert data.episode_table["truncated"].tolist() == [True, False, True]
    named = [file["name"] for file in data.published.manifest.source["files"]]
    assert named == [path.name for path in paths]


@pytest.mark.parametrize("block_bytes", [1, 100, pytest.param(1 << 24, marks=pytest.mark.long)])
def test_every_block_size_and_every_worker_gives_the_same(tmp_path, block_bytes):
    values = records(6, 5, 4, 7, terminated=(0, 3))
    write(tmp_path / "files", values, 3, 11, 13)

    def made(name: str, **options: Any) -> Any:
        return ensure_dataset(
            tmp_path / name,
            get_sources=lambda: local_sources(tmp_path / "files", natural=True),
            layout=VD4RL,
            options=ConvertOptions(**options),
        )

    plain, other = made("a"), made("b", block_bytes=block_bytes, workers=2)
    for key, column in plain.columns.items():
        assert other.columns[key].numpy().tobytes() == column.numpy().tobytes(), key
    assert (plain.episodes == other.episodes).all()
    # Shards 0 and 1 are read as one, and 2 and 3: these an episode crosses.
    assert plain.episodes["seed"].tolist() == [0, 1, 2, 3]


def test_shards_that_do_not_follow_are_named(tmp_path, quietly):
    first, middle, last = write(tmp_path / "files", records(9), 3, 6)
    middle.unlink()
    values = records(4, 4)
    values["step_type"][4] = 1
    ended = write(tmp_path / "ended", values, 4)
    for files, said in (
        ([first, last], r"3\.hdf5: it continues .*1\.hdf5: the files between"),
        ([last], r"3\.hdf5: step_type, record 0: begins no episode"),
        (ended, r"2\.hdf5: step_type, record 0: begins no episode"),
    ):
        with pytest.raises(CorpusError, match=rf"{said}.*V32"):
            quietly(files, VD4RL)


def test_values_that_break_a_rule_are_named_with_shard_and_record(tmp_path, quietly):
    values = records(4, 6, 5)
    values["action"][7, 0] = np.nan
    write(tmp_path / "files", values, 5)
    with pytest.raises(CorpusError, match=r"2\.hdf5: action, record 2: .*NaN.*V20"):
        quietly(tmp_path / "files", VD4RL)
    data = quietly(tmp_path / "files", VD4RL, policies=Policies(on_invalid="skip"))
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [3, 4]
    (skipped,) = data.published.manifest.report["skipped"]
    assert (skipped["file"], skipped["name"]) == ("1.hdf5", "[4:10]")
    # A filler is not looked at: it led nowhere.
    values = records(4, 3)
    values["action"][values["step_type"] == 0] = np.nan
    write(tmp_path / "more", values)
    assert len(quietly(tmp_path / "more", VD4RL, "other")) == 5


def test_episode_that_breaks_off_ends_truncated_and_is_reported(tmp_path, quietly):
    """The first because another one begins, the last because the shards end."""
    values = records(4, 5)
    values["step_type"][3] = values["step_type"][-1] = 1
    write(tmp_path / "files", values)
    data = quietly(tmp_path / "files", VD4RL)
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [3, 4]
    assert data.episode_table["truncated"].tolist() == [True, True]
    (note,) = data.published.manifest.report["warnings"]
    assert (note["rule"], note["count"]) == ("V39", 2)
    assert note["first"] == "1.hdf5: step_type, record 3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_type": (2, 7)}, r"step_type, record 2: is 7, expected 0, 1 or 2 \[V30\]"),
        ({"step_type": (2, np.nan)}, r"step_type, record 2: holds NaN .*V30"),
        ({"discount": (2, 0)}, r"discount, record 2: .*zero before the last record.*V31"),
        ({"discount": (2, np.inf)}, r"discount, record 2: holds NaN or infinity.*V30"),
        ({"reward": (3, np.nan)}, r"reward, record 3: .*NaN.*V21"),
    ],
)
def test_values_that_make_no_sense_are_named(tmp_path, quietly, change, message):
    values = records(5, 4)
    for name, (record, value) in change.items():
        values[name][record] = value
    write(tmp_path / "files", values)
    with pytest.raises(CorpusError, match=rf"1\.hdf5: {message}"):
        quietly(tmp_path / "files", VD4RL)


@pytest.mark.parametrize("name", ["observation", "action", "reward", "discount", "step_type"])
def test_arrays_that_a_shard_lacks_or_has_otherwise_are_named(tmp_path, quietly, name):
    values = records(4, 4)
    write(tmp_path / "files", values, 6)
    cases = [
        (None, rf"2\.hdf5: no arrays '{name}' of the layout.*V04"),
        (values[name][:1], r"2\.hdf5: [a-z_]+: has shape.*V11"),
    ]
    if name == "action":
        wide = np.zeros((2, 9), np.float32)
        cases.append((wide, r"action: .*2\.hdf5 has shape \[2, 9\] and .*V10"))
    for value, said in cases:
        with h5py.File(tmp_path / "files/2.hdf5", "a") as file:
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value
        with pytest.raises(CorpusError, match=said):
            quietly(tmp_path / "files", VD4RL)


def test_shards_without_records(tmp_path, quietly):
    values = records(6, 4)
    write(tmp_path / "files", values, 4, 4, 6)
    data = quietly(tmp_path / "files", VD4RL)
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [5, 3]
    write(tmp_path / "none", {name: value[:0] for name, value in values.items()})
    with pytest.raises(CorpusError, match=r"1\.hdf5: .*the source is empty.*V38"):
        quietly(tmp_path / "none", VD4RL, "other")


def test_unreadable_shard_is_skipped_with_rows_that_continue_it(tmp_path, quietly):
    """C10: and is named, as is what is lost with it; the shard before ends where it breaks off."""
    values = records(6, 6, 6, 6)
    paths = write(tmp_path / "files", values, 3, 9, 15, 18)
    paths[1].write_bytes(paths[1].read_bytes()[:3000])
    with pytest.raises(CorpusError, match=r"2\.hdf5: cannot be read"):
        quietly(tmp_path / "files", VD4RL)
    data = quietly(tmp_path / "files", VD4RL, policies=Policies(on_invalid="skip"))
    assert_ted(data.published)
    skipped = {e["file"]: e["why"] for e in data.published.manifest.report["skipped"]}
    assert "2.hdf5: cannot be read" in skipped["2.hdf5"]
    assert "begins in 2.hdf5, which is skipped" in skipped["3.hdf5"]
    table = data.episode_table
    assert (table["seed"].tolist(), table["length"].tolist()) == ([0, 4], [2, 5])
    np.testing.assert_array_equal(data[:]["action"][:2], values["action"][1:3])
    np.testing.assert_array_equal(data[:]["action"][2:], values["action"][19:])
