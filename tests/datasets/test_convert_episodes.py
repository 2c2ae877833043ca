"""Episodes in any number and size: the same rows, errors that name them, and bounded memory."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.datasets import Field, Policies, convert
from replaykit.datasets.engine import plan as episodes_module
from replaykit.datasets.engine import row_batches
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.row_batches import Runs
from replaykit.datasets.families import D4RL
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from tests.datasets.converted import content, growth, needs_proc
from tests.datasets.trials import arm_layout


def flat(path: Path, episodes: int, rows: int, *, width: int = 1, successors: bool = True) -> Path:
    """Episodes of so many steps; every third one terminates."""
    count = episodes * rows
    last = np.arange(count) % rows == rows - 1
    number = np.arange(count) // rows
    observation = np.arange(count, dtype=np.float32)[:, None] + np.zeros(width, np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("observations", data=observation, chunks=(min(count, 4096), width))
        if successors:
            file["next_observations"] = observation + 1 + last[:, None] * np.float32(0.5)
        file["actions"] = np.zeros((count, 1), np.float32)
        file["rewards"] = np.ones(count, np.float32)
        file["terminals"], file["timeouts"] = last & (number % 3 == 0), last & (number % 3 > 0)
    return path


@needs_proc
@pytest.mark.parametrize(
    ("episodes", "rows", "block", "most"),
    [
        # What is held of an episode, and what is held of 8,192 while they are written.
        (60_000, 2, 1 << 20, 60_000 * 250 + (24 << 20)),
        pytest.param(1_000_000, 10, 16 << 20, 256 << 20, marks=pytest.mark.long),
    ],
)
def test_memory_of_many_episodes(tmp_path, episodes, rows, block, most):
    small = flat(tmp_path / "small.h5", 50, 4)
    large = flat(tmp_path / "large.h5", episodes, rows)
    assert growth(small, large, tmp_path, "D4RL", block) < most
    data = open_published(tmp_path / "large")
    table = data.episodes
    assert table["start"].tolist() == list(range(0, episodes * rows, rows))
    assert (table["length"] == rows).all()
    assert (table["return"] == rows).all()
    assert table["terminated"].tolist() == [number % 3 == 0 for number in range(episodes)]
    assert (
        data.columns["observation",]
        .flatten()
        .equal(
            data.columns["observation",].new_tensor(np.arange(episodes * rows, dtype=np.float32))
        )
    )


@needs_proc
def test_memory_of_a_large_chunk(tmp_path):
    """A chunk of 64 MiB in blocks of 1 MiB: HDF5 holds it, the rest is blocks."""
    small = flat(tmp_path / "small.h5", 50, 4)
    large, rows = tmp_path / "large.h5", 16_384
    with h5py.File(large, "w") as file:
        values = np.arange(rows, dtype=np.float32)[:, None] + np.zeros(1024, np.float32)
        file.create_dataset(
            "observations", data=values, chunks=values.shape, compression="gzip", compression_opts=1
        )
        file["actions"], file["rewards"] = np.zeros((rows, 1)), np.zeros(rows)
        file["terminals"] = np.arange(rows) % 8192 == 8191
        file["timeouts"] = np.zeros(rows, bool)
    assert growth(small, large, tmp_path, "D4RL", 1 << 20) < 92 << 20
    data = open_published(tmp_path / "large")
    assert data.columns["observation",][:, 77].tolist() == list(range(rows))


def made(path: Path, target: Path, block_bytes: int) -> None:
    options = ConvertOptions(block_bytes=block_bytes)
    sources = Sources.local([path])
    ensure_dataset(target, get_sources=lambda: sources, layout=D4RL, options=options)


@pytest.mark.filterwarnings("ignore:.*was not reset there:UserWarning")
@pytest.mark.parametrize("successors", [True, False])
@pytest.mark.parametrize(("episodes", "block"), [(1, 1 << 20), (3, 64), (7, 100)])
def test_rows_do_not_depend_on_how_a_file_is_cut(
    tmp_path, monkeypatch, successors, episodes, block
):
    path = flat(tmp_path / "a.h5", 20, 5, width=3, successors=successors)
    with h5py.File(path, "r+") as file:
        file.create_dataset("infos/goal", data=np.arange(300.0).reshape(100, 3), chunks=(30, 3))
        file["infos/alone"] = np.ones(1)
        file["timeouts"][99] = file["terminals"][99] = False
        file["terminals"][17] = True  # where nothing was reset
    made(path, tmp_path / "whole", 1 << 20)
    monkeypatch.setattr(row_batches, "_EPISODES", episodes)
    monkeypatch.setattr(row_batches, "_CACHED_BYTES", block)
    monkeypatch.setattr(episodes_module, "_TOGETHER", 4)
    made(path, tmp_path / "cut", block)
    assert content(tmp_path / "whole", in_blocks=True) == content(tmp_path / "cut", in_blocks=True)
    verify_published(tmp_path / "cut")


def test_an_error_in_a_later_part_names_its_record_in_the_file(tmp_path, monkeypatch):
    path = flat(tmp_path / "a.h5", 20, 5)
    with h5py.File(path, "r+") as file:
        file["actions"][63] = np.nan
    monkeypatch.setattr(row_batches, "_EPISODES", 4)
    policies = Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=r"\[60:65\]: .*actions, record 63: .*NaN"):
        data = convert(path, D4RL, tmp_path / "data", policies=policies)
    assert data.episode_table["episode"].tolist() == [*range(12), *range(13, 20)]


# -- short groups that are read together -----------------------------------------------------------


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
