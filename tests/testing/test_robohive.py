"""The test support's writer writes what RoboHive's logger writes."""

from __future__ import annotations

import h5py
import numpy as np

from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.datasets.conftest import sample
from tests.datasets.mutated.corpora import leaves

__all__ = ["sample"]


def test_trial_is_stored_value_for_value_with_a_closing_row_of_nan(tmp_path):
    trial = make_trial(5, seed=3, terminated=True)
    qpos = trial["env_infos"]["state"]["qpos"]
    trial["observations"] = trial["observations"].astype(np.float32)
    trial["env_infos"]["proprio_dict"] = None
    with RoboHiveWriter(tmp_path / "a.h5") as writer:
        assert writer.add_trial(**trial, extra={"config": {"solved": 1.0}}) == "Trial0"
        assert writer.add_trial(**make_trial(3)) == "Trial1"
    with h5py.File(tmp_path / "a.h5") as file:
        group = file["Trial0"]
        assert group["actions"].shape == (5, 2)
        np.testing.assert_array_equal(group["actions"][:-1], trial["actions"])
        assert np.isnan(group["actions"][-1]).all()
        np.testing.assert_array_equal(group["observations"], trial["observations"])
        np.testing.assert_array_equal(group["rewards"], [300.0, 301, 302, 303, 304])
        np.testing.assert_array_equal(group["done"], [False] * 4 + [True])
        np.testing.assert_array_equal(group["env_infos/state/qpos"], qpos)
        assert not file.attrs
        assert not group.attrs
        for _, leaf in leaves(group):
            assert (leaf.compression, leaf.compression_opts, leaf.shuffle) == ("gzip", 4, False)
            assert leaf.chunks is not None
        assert (group["observations"].dtype, group["done"].dtype) == (np.float64, np.bool_)
        # An absent leaf is NaN of float16, and a scalar an array of one.
        absent = group["env_infos/proprio_dict"]
        assert (absent.shape, absent.dtype) == ((5,), np.float16)
        assert np.isnan(absent[...]).all()
        assert group["config/solved"].shape == (1,)


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


def test_layout_of_the_sample_is_reproduced(tmp_path, sample):
    """Names, shapes, dtypes, chunks and compression equal those of a file by RoboHive itself."""

    def tree(group: h5py.Group) -> dict:
        return {k: tree(v) if isinstance(v, h5py.Group) else v[...] for k, v in group.items()}

    with h5py.File(sample) as theirs:
        trial = tree(theirs["Trial0"])
        infos = trial["env_infos"]
        infos["proprio_dict"] = None
        infos["state"] |= dict.fromkeys(["act", "mocap_pos", "mocap_quat"])
        trial["actions"] = trial["actions"][:-1]
        with RoboHiveWriter(tmp_path / "a.h5") as writer:
            writer.add_trial(**trial)
        with h5py.File(tmp_path / "a.h5") as copy:
            ours, others = dict(leaves(copy["Trial0"])), dict(leaves(theirs["Trial0"]))
            assert ours.keys() == others.keys()
            for path, leaf in ours.items():
                other = others[path]
                assert (leaf.dtype, leaf.chunks) == (other.dtype, other.chunks), path
                assert leaf.compression_opts == other.compression_opts
                np.testing.assert_array_equal(leaf[...], other[...])
