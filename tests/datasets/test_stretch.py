"""Short groups that are read as one array: the same rows, and errors that name the group."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.datasets import Field, Policies, convert
from replaykit.datasets.engine import row_batches
from replaykit.datasets.engine.row_batches import Runs
from replaykit.errors import CorpusError
from tests.datasets.arms import arm_layout
from tests.datasets.converted import content

LAB = arm_layout(
    "lab",
    Field("fallen", "terminated"),
    Field("clock", "time", before=("time",), required=False),
    Field("goal", "info", before=("goal",), required=False),
)


def write(path: Path, lengths: list[int]) -> None:
    """Runs of one more state than actions; the tenth and all after it have flags as numbers."""
    draw = np.random.default_rng(len(lengths))
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            run = file.create_group(f"run{number}")
            run["joints"] = draw.normal(size=(length + 1, 3))
            run["torque"] = draw.normal(size=(length, 2)).astype(np.float32)
            run["score"] = draw.normal(size=(length, 1) if number % 2 else length)
            ends = (np.arange(length) == length - 1) & bool(number % 3)
            run["fallen"] = ends.astype(np.float64) if number > 8 else ends
            run["clock"] = np.arange(length + 1.0)
            run["goal"] = np.array([number])


@pytest.mark.parametrize("nbytes", [1, 600, 5000])
def test_rows_do_not_depend_on_how_many_groups_are_read_together(tmp_path, monkeypatch, nbytes):
    lengths = [4, 1, 7, 2, 3, 40, 5, 5, 5, 1, 1, 9]
    write(tmp_path / "a.h5", lengths)
    together = convert(tmp_path / "a.h5", LAB, tmp_path / "together")
    monkeypatch.setattr(row_batches, "_TOGETHER_BYTES", nbytes)
    convert(tmp_path / "a.h5", LAB, tmp_path / "other")
    assert content(tmp_path / "together", in_blocks=True) == content(
        tmp_path / "other", in_blocks=True
    )
    rows, table = together[:], together.episode_table
    assert table["length"].tolist() == lengths
    with h5py.File(tmp_path / "a.h5") as file:
        for number, (start, length) in enumerate(zip(table["start"], lengths, strict=True)):
            run, mine = file[f"run{number}"], rows[int(start) : int(start) + length]
            assert np.array_equal(mine["observation"], run["joints"][:-1])
            assert np.array_equal(mine["next", "observation"], run["joints"][1:])
            assert np.array_equal(mine["action"], run["torque"])
            assert np.array_equal(mine["next", "reward"][:, 0], run["score"][...].reshape(-1))
            assert mine["goal"].tolist() == [number] * length
            assert table["return"][number] == pytest.approx(run["score"][...].sum())
            assert bool(table["terminated"][number]) == bool(run["fallen"][-1])


def test_error_in_one_of_many_groups_names_that_group(tmp_path):
    write(tmp_path / "a.h5", [4] * 9)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["run3/torque"][2] = np.nan
        file["run5/joints"][4] = np.inf  # the state after the last step
        file["run6/clock"][3] = 0.0
    with pytest.raises(CorpusError, match=r"run5/joints, record 4: .* NaN or infinity \[V21\]"):
        convert(tmp_path / "a.h5", LAB, tmp_path / "data")
    with pytest.warns(UserWarning, match="skipped") as warned:
        data = convert(
            tmp_path / "a.h5", LAB, tmp_path / "data", policies=Policies(on_invalid="skip")
        )
    said = str(warned[0].message)
    assert "run3/torque, record 2: the action holds NaN" in said
    assert "clock does not increase strictly (1 time, first in a.h5: run6/clock, record 3)" in said
    assert data.episode_table["episode"].tolist() == [0, 1, 2, 4, 6, 7, 8]


def test_only_the_unreadable_group_is_left_out(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(5):
            run = file.create_group(f"run{number}")
            run.create_dataset("joints", data=np.ones((5, 3)), compression="gzip")
            run["torque"], run["score"] = np.ones((4, 2)), np.ones(4)
            run["fallen"] = np.zeros(4, bool)
        at = file["run2/joints"].id.get_chunk_info(0).byte_offset
    with open(tmp_path / "a.h5", "r+b") as raw:
        raw.seek(at)
        raw.write(b"\xff" * 8)
    with pytest.raises(CorpusError, match=r"run2/joints: cannot be read"):
        convert(tmp_path / "a.h5", LAB, tmp_path / "data")
    policies = Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=r"run2: .*run2/joints: cannot be read"):
        data = convert(tmp_path / "a.h5", LAB, tmp_path / "data", policies=policies)
    assert data.episode_table["episode"].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("width", [1, 3000])
def test_records_of_many_runs_are_taken_in_the_order_of_rows(width):
    """More than are picked in one go, narrow and wide, from a block that begins somewhere."""
    draw = np.random.default_rng(width)
    counts = draw.integers(1, 40, 9000 if width == 1 else 20)
    records = 7 + np.cumsum(counts + draw.integers(0, 3, len(counts))) - counts
    runs = Runs(np.cumsum(counts) - counts, records, counts)
    block = draw.integers(0, 256, (int(records[-1] + counts[-1]) - 7, width), np.uint8)
    expected = np.concatenate(
        [block[r - 7 : r - 7 + n] for r, n in zip(records, counts, strict=True)]
    )
    assert np.array_equal(runs.records_in(block, 7), expected)
