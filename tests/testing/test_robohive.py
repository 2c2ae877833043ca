"""The test support's writer writes what RoboHive's logger writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

SAMPLE = Path(__file__).parents[2] / "../shared/data/robohive/fk1_random_policy_trace.h5"
SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"


def leaves(group: h5py.Group) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = node

    group.visititems(visit)
    return found


def test_trial_is_stored_value_for_value_with_a_closing_row_of_nan(tmp_path):
    trial = make_trial(5, seed=3, terminated=True)
    with RoboHiveWriter(tmp_path / "a.h5") as writer:
        assert writer.add_trial(**trial) == "Trial0"
        assert writer.add_trial(**make_trial(3)) == "Trial1"
    with h5py.File(tmp_path / "a.h5") as file:
        group = file["Trial0"]
        assert group["actions"].shape == (5, 2)
        np.testing.assert_array_equal(group["actions"][:-1], trial["actions"])
        assert np.isnan(group["actions"][-1]).all()
        np.testing.assert_array_equal(group["observations"], trial["observations"])
        np.testing.assert_array_equal(group["rewards"], [300.0, 301, 302, 303, 304])
        np.testing.assert_array_equal(group["done"], [False] * 4 + [True])
        np.testing.assert_array_equal(
            group["env_infos/state/qpos"], trial["env_infos"]["state"]["qpos"]
        )
        assert not file.attrs
        assert not group.attrs


def test_arrays_are_chunked_and_compressed_and_floats_are_float64(tmp_path):
    trial = make_trial(4)
    trial["observations"] = trial["observations"].astype(np.float32)
    with RoboHiveWriter(tmp_path / "a.h5") as writer:
        writer.add_trial(**trial)
    with h5py.File(tmp_path / "a.h5") as file:
        for leaf in leaves(file["Trial0"]).values():
            assert (leaf.compression, leaf.compression_opts, leaf.shuffle) == ("gzip", 4, False)
            assert leaf.chunks is not None
        assert file["Trial0/observations"].dtype == np.float64
        assert file["Trial0/done"].dtype == np.bool_


def test_absent_leaf_is_float16_nan_and_scalar_is_an_array_of_one(tmp_path):
    trial = make_trial(4)
    trial["env_infos"]["proprio_dict"] = None
    with RoboHiveWriter(tmp_path / "a.h5") as writer:
        writer.add_trial(**trial, extra={"config": {"solved": 1.0}})
    with h5py.File(tmp_path / "a.h5") as file:
        leaf = file["Trial0/env_infos/proprio_dict"]
        assert (leaf.shape, leaf.dtype) == ((4,), np.float16)
        assert np.isnan(leaf[...]).all()
        assert file["Trial0/config/solved"].shape == (1,)


def test_irregular_trials_are_written_as_asked(tmp_path):
    with RoboHiveWriter(tmp_path / "a.h5", float_dtype=None) as writer:
        writer.add_trial(
            np.zeros((3, 2), np.float16),
            np.ones((5, 1), np.float32),
            None,
            np.zeros(2, np.int8),
            np.arange(3, dtype=np.int8),
            name="Trial0-1",
            tail=False,
        )
        writer.add_member("notes", np.arange(3))
        writer.add_member("more", {"x": np.arange(2)})
    with h5py.File(tmp_path / "a.h5") as file:
        assert sorted(file) == ["Trial0-1", "more", "notes"]
        group = file["Trial0-1"]
        assert sorted(group) == ["actions", "done", "observations", "time"]
        assert group["actions"].shape == (5, 1)
        assert group["observations"].dtype == np.float16
        assert (group["time"].dtype, group["done"].dtype) == (np.int8, np.int8)


def test_layout_of_the_sample_is_reproduced(tmp_path):
    """Names, shapes, dtypes, chunks and compression equal those of a file by RoboHive itself."""
    if not SAMPLE.exists():
        pytest.skip(f"sample file {SAMPLE} not present")
    if hashlib.sha256(SAMPLE.read_bytes()).hexdigest() != SAMPLE_SHA256:
        pytest.skip(f"sample file {SAMPLE} has another sha256")

    def tree(group: h5py.Group) -> dict:
        return {k: tree(v) if isinstance(v, h5py.Group) else v[...] for k, v in group.items()}

    with h5py.File(SAMPLE) as sample:
        trial = tree(sample["Trial0"])
        infos = trial["env_infos"]
        infos["proprio_dict"] = None
        infos["state"] |= dict.fromkeys(["act", "mocap_pos", "mocap_quat"])
        trial["actions"] = trial["actions"][:-1]
        with RoboHiveWriter(tmp_path / "a.h5") as writer:
            writer.add_trial(**trial)
        with h5py.File(tmp_path / "a.h5") as copy:
            ours, theirs = leaves(copy["Trial0"]), leaves(sample["Trial0"])
            assert ours.keys() == theirs.keys()
            for path, leaf in ours.items():
                other = theirs[path]
                assert (leaf.dtype, leaf.chunks) == (other.dtype, other.chunks), path
                assert leaf.compression_opts == other.compression_opts
                np.testing.assert_array_equal(leaf[...], other[...])
