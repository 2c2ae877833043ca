"""D4RL's very large files: arrays in parts below ``virtual``, beside the whole or in its place."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.families.d4rl import D4RL
from replaykit.errors import CorpusError
from replaykit.inspection import guess_layout
from tests.datasets.families.test_d4rl import arrays, write
from tests.datasets.trials import assert_ted

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


def test_blocks_that_lie_in_several_parts(tmp_path):
    path = cut(tmp_path / "a.hdf5", arrays(5, 8, 7))
    one, many = (
        ensure_dataset(
            tmp_path / f"{block_bytes}",
            get_sources=lambda: local_sources([path]),
            layout=D4RL,
            options=ConvertOptions(block_bytes=block_bytes),
        )
        for block_bytes in (1 << 24, 60)
    )
    for key, column in one.columns.items():
        assert many.columns[key].numpy().tobytes() == column.numpy().tobytes(), key


def test_a_value_is_named_by_its_record_in_the_whole(tmp_path, quietly):
    values = arrays(5, 8, 7)
    values["actions"][9, 0] = np.nan
    with pytest.raises(CorpusError, match=r"a\.hdf5: actions, record 9: .*V20"):
        quietly(cut(tmp_path / "a.hdf5", values), D4RL)


@pytest.mark.parametrize(("lost", "said"), [("4", 4), ("0", 1)])
def test_a_part_that_is_missing_is_named(tmp_path, quietly, lost, said):
    path = cut(tmp_path / "a.hdf5", arrays(5, 8, 7))
    with h5py.File(path, "a") as file:
        del file["virtual"][lost]
        if lost == "0":
            del file["virtual/1"]
    with pytest.raises(CorpusError, match=rf"a\.hdf5: virtual: the chunk {said} is missing.*V32"):
        quietly(path, D4RL)


def test_arrays_cut_into_unequal_chunks_are_refused(tmp_path, quietly):
    """All arrays are as long as they should be, and rows would be misaligned."""
    path = cut(tmp_path / "a.hdf5", arrays(5, 8, 7), longer="observations")
    said = r"a\.hdf5: observations: .*chunks have \[4, 3, .*'actions' \[3, 4, .*V10"
    with pytest.raises(CorpusError, match=said):
        quietly(path, D4RL)


@pytest.mark.parametrize("lost", ["observations", "actions", "terminals"])
def test_an_array_that_one_part_lacks_is_named(tmp_path, quietly, lost):
    path = cut(tmp_path / "a.hdf5", arrays(5, 8, 7))
    with h5py.File(path, "a") as file:
        del file[f"virtual/3/{lost}"]
    with pytest.raises(CorpusError, match=rf"a\.hdf5: .*{lost}.*V\d\d"):
        quietly(path, D4RL)


def test_the_layout_is_guessed(tmp_path):
    assert guess_layout([cut(tmp_path / "a.hdf5", arrays(5, 8, 7))]).layout == "d4rl"
