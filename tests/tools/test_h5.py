"""Facts of H5 files against what h5py and NumPy say of them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.errors import CorpusError
from replaykit.inspection import kind_of, opened
from tests.support.refusals import refuses

SHARED = Path(__file__).parents[3] / "shared/data"
SAMPLES = {
    "robohive/fk1_random_policy_trace.h5": ("robohive-trials", 500, [50] * 10),
    "d4rl/hopper_medium-v2.hdf5": ("d4rl", 911, [470, 441]),
    "d4rl/door-human-v1.hdf5": ("d4rl", 598, [299, 299]),
    "robomimic/robomimic_ph_lift_low_dim.hdf5": ("robomimic", 117, [59, 58]),
    "robosuite/panda_lift.hdf5": ("robosuite-raw", 411, [411]),
    "maniskill/rlboilerplate_trajectory.h5": ("maniskill", 100, [50, 50]),
    "minari_generated/cartpole/random-v0/data/main_data.hdf5": (
        "minari-hdf5", 117, [30, 25, 18, 31, 13],
    ),
}  # fmt: skip


def test_facts_of_groups_equal_h5py_and_numpy(tmp_path, write_robomimic):
    path = write_robomimic(tmp_path / "demo.hdf5")
    with h5py.File(path) as file:
        demos = [file[f"data/demo_{i}"] for i in range(3)]
        names = ("actions", "rewards", "dones", "obs/eef", "next_obs/eef")
        leaves = {name: np.concatenate([demo[name][...] for demo in demos]) for name in names}
        returns = [d["rewards"][...].sum() for d in demos]
    with opened(path) as (facts, table):
        assert (facts.kind, facts.rows, facts.nbytes) == ("H5 file", 12, path.stat().st_size)
        assert facts.guess.layout == "robomimic"
        found = {key.key: key for key in facts.keys}
        assert found.keys() == {f"data/demo_*/{name}" for name in leaves}
        for name, values in leaves.items():
            key = found[f"data/demo_*/{name}"]
            assert (key.shape, key.dtype, key.rows) == (
                values.shape[1:], values.dtype.name, len(values),
            )  # fmt: skip
            said = key.statistics
            assert (said["min"], said["max"], said["nan"]) == (values.min(), values.max(), 0)
            assert said["mean"] == pytest.approx(values.mean())
            assert said["std"] == pytest.approx(values.std())
            column = table.columns[f"data/demo_*/{name}"]
            np.testing.assert_array_equal(column.read(4, 9), values[4:9])
            np.testing.assert_array_equal(column.episode(1, 99), values[5:8])
        assert facts.episodes.lengths.tolist() == [5, 3, 4]
        assert facts.episodes.ends == ("terminated", "truncated", "terminated")
        assert facts.episodes.end_counts() == {"terminated": 2, "truncated": 1}
        np.testing.assert_allclose(facts.episodes.returns, returns)
        assert facts.episodes.names[2] == "data/demo_2"
        assert (table.actions, table.rewards) == (
            ("data/demo_*/actions",), ("data/demo_*/rewards",),
        )  # fmt: skip


def test_a_read_visits_only_its_datasets(tmp_path, write_robomimic):
    class Pieces(list):
        def __iter__(self):
            raise AssertionError("a column of many datasets is read in many blocks")

    with opened(write_robomimic(tmp_path / "demo.hdf5")) as (_, table):
        column = table.columns["data/demo_*/actions"]
        every = column.read(0, 12)
        column.pieces = Pieces(column.pieces)
        np.testing.assert_array_equal(column.read(4, 9), every[4:9])


def test_flat_arrays_are_cut_into_episodes(tmp_path, write_d4rl):
    path = write_d4rl(tmp_path / "flat.hdf5")
    with opened(path) as (facts, table), h5py.File(path) as file:
        rewards = file["rewards"][...].astype(np.float64)
        assert facts.guess.layout == "d4rl"
        assert facts.episodes.lengths.tolist() == [7, 7, 6]
        assert facts.episodes.ends == ("terminated", "truncated", "truncated")
        parts = (slice(7), slice(7, 14), slice(14, 20))
        np.testing.assert_allclose(facts.episodes.returns, [rewards[p].sum() for p in parts])
        np.testing.assert_array_equal(
            table.columns["actions"].episode(1, 99), file["actions"][7:14]
        )
        assert table.episodes == 3


def test_a_folder_of_files_is_one_data_set(tmp_path, write_robomimic):
    for number in (10, 2):
        write_robomimic(tmp_path / f"part{number}.hdf5", (2, number))
    with opened(tmp_path) as (facts, table):
        assert (facts.kind, facts.about["files"]) == ("H5 folder", 2)
        assert facts.episodes.lengths.tolist() in ([2, 2, 2, 10], [2, 10, 2, 2])
        column = table.columns["data/demo_*/actions"]
        assert column.rows == 16
        with (
            h5py.File(tmp_path / "part2.hdf5") as first,
            h5py.File(tmp_path / "part10.hdf5") as other,
        ):
            both = [f[f"data/demo_{i}/actions"][...] for f in (first, other) for i in range(2)]
        np.testing.assert_array_equal(column.read(0, 16), np.concatenate(both))


def test_a_file_of_no_layout_is_listed_with_the_reasons(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/b"] = np.arange(6.0).reshape(3, 2)
        file["text"] = "words"
    with opened(tmp_path / "x.h5") as (facts, _):
        assert facts.guess.layout is None
        assert "[V04]" in facts.guess.refused["d4rl"]
        assert {k.key: (k.rows, k.shape) for k in facts.keys} == {"a/b": (3, (2,)), "text": (1, ())}
        assert facts.episodes is None
        assert any("no layout" in text for text in facts.warnings)
        text = next(key for key in facts.keys if key.key == "text")
        assert text.statistics is None
        assert "text" in text.note


def test_large_keys_are_looked_at_evenly(tmp_path, write_d4rl):
    rows = 5000
    path = write_d4rl(tmp_path / "a.hdf5", rows, (2499,), infos__clock=np.arange(rows, dtype=float))
    with opened(path, most_bytes=8 * 640) as (facts, _):
        key = next(key for key in facts.keys if key.key == "infos/clock")
        assert (key.rows, key.looked_at) == (rows, 640)
        assert key.statistics["min"] == 0
        assert key.statistics["max"] == rows - 1
        assert key.statistics["mean"] == pytest.approx((rows - 1) / 2, rel=1e-3)
    with opened(path, most_bytes=None) as (facts, _):
        key = next(key for key in facts.keys if key.key == "infos/clock")
        assert key.looked_at == rows
        assert key.statistics["mean"] == (rows - 1) / 2


def test_facts_warn_of_a_file_that_convert_refuses(tmp_path, write_robomimic):
    path = write_robomimic(tmp_path / "a.hdf5")
    with h5py.File(path, "r+") as file:
        for number in range(3):
            file[f"data/demo_{number}"].attrs["num_samples"] = 77
    with opened(path) as (facts, _):
        assert facts.guess.layout == "robomimic"
        assert facts.episodes is None
        assert "says 77" in " ".join(facts.warnings)


def test_file_of_another_format_is_named(tmp_path):
    (tmp_path / "a.h5").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CorpusError, match=r"a\.h5: .*Git LFS"), opened(tmp_path / "a.h5"):
        pass


@pytest.mark.parametrize("name", SAMPLES)
def test_layouts_of_sample_files_are_recognized(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"sample file {path} not present")
    layout, rows, lengths = SAMPLES[name]
    with opened(path, most_bytes=1 << 12) as (facts, _):
        assert facts.guess.layout == layout
        assert facts.guess.problem is None
        assert facts.rows == rows
        assert facts.episodes.lengths.tolist() == lengths


def test_empty_and_absent_folders_are_refused(tmp_path):
    refuses(ValueError, "holds none of them", kind_of, tmp_path)
    refuses(FileNotFoundError, "is not there", kind_of, tmp_path / "absent")
