"""Chunks: every row once, cut as streams and limits say, and whole on the disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import TrajectoryChunks, TrajectoryWriter
from replaykit.errors import Closed, SchemaError
from replaykit.feeds import chunk_files, trajectory_writer
from tests.feeds.trajectories import files_in, rows_of, steps_in
from tests.support.refusals import refuses

FORMATS = ["safetensors", "npz", "npz-compressed"]


def cut_by_model(flags: str, limits: list[int]) -> list[tuple[int, str, str, int]]:
    """Return (rows, head, tail, step) of the chunks of a stream of flags ``.``, ``t`` and ``u``."""
    chunks, rows, step, head = [], 0, 0, "reset"
    for flag in flags:
        rows += 1
        tail = {"t": "terminated", "u": "truncated", ".": ""}[flag]
        if tail or rows == limits[len(chunks)]:
            chunks.append((rows, head, tail or "cut", step))
            step, head = (0, "reset") if tail else (step + rows, "cut")
            rows = 0
    return [*chunks, (rows, head, "cut", step)] if rows else chunks


@pytest.mark.acceptance("S23", "C16")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("max_len", [None, 5])
def test_chunks_hold_each_row_once_and_are_cut_as_the_model_says(
    tmp_path: Path, format: Any, lanes: int | None, max_len: int | None
) -> None:
    draw = random.Random(f"{format} {lanes} {max_len}")
    count = 60
    flags = ["".join(draw.choices(".tu", [8, 1, 1], k=count)) for _ in range(lanes or 1)]
    streams = [
        rows_of(
            lane,
            0,
            count,
            [s for s in range(count) if own[s] == "t"],
            truncated=[s for s in range(count) if own[s] == "u"],
        )
        for lane, own in enumerate(flags)
    ]
    rows = torch.stack(streams, 1) if lanes else streams[0]
    writer = TrajectoryWriter(tmp_path, max_len=max_len, format=format, lanes=lanes)
    at = 0
    while at < count:
        size = draw.randint(1, 9)
        if size == 1:
            writer.add(rows[at])
        else:
            writer.extend(rows[at : at + size])
        at += size
    writer.close()
    chunks = TrajectoryChunks(tmp_path)
    for lane, own in enumerate(flags):
        mine = [n for n in range(len(chunks)) if chunks.tags(n)["lane"] == lane]
        mine.sort(key=lambda n: chunks.tags(n)["number"])
        names = ("rows", "head", "tail", "step")
        found = [tuple(chunks.tags(n)[name] for name in names) for n in mine]
        assert found == cut_by_model(own, [max_len or 10**9] * count)
        loaded = [chunks.load(n) for n in mine]
        assert steps_in(torch.cat(loaded)) == [(lane, step) for step in range(count)]
        for before, after, n in zip(loaded, loaded[1:], mine[1:], strict=False):
            assert before["next", "observation"][-1].equal(after["observation"][0])
            assert chunks.load(n, ["half", ("next", "reward")], 0, 1)["half"].equal(
                after["half"][:1]
            )


def test_staggered_lengths_are_uniform(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    with TrajectoryWriter(tmp_path, max_len=5, stagger=2, flush="call", generator=generator) as w:
        w.extend(rows_of(0, 0, 5_000))
        lengths = [chunk.values["rows"] for chunk in w._finished]
        w._finished.clear()
    counts = np.bincount(lengths, minlength=8)[3:]
    assert set(lengths) == {3, 4, 5, 6, 7}
    expected = len(lengths) / 5
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # p = 0.001, 4 degrees


def test_ids_and_cuts_end_chunks_without_a_flag(tmp_path: Path) -> None:
    rows = rows_of(0, 0, 8)
    rows["episode"] = torch.tensor([4, 4, 4, 5, 5, 5, 5, 5])
    writer = TrajectoryWriter(tmp_path, format="npz")
    writer.extend(rows[:2])
    writer.extend(rows[2:6])
    writer.cut()
    writer.extend(rows[6:])
    refuses(IndexError, "lane below 1, got 1", writer.cut, 1)
    writer.close()
    chunks = TrajectoryChunks(tmp_path)
    tags = [chunks.tags(n) for n in range(len(chunks))]
    assert [(t["rows"], t["head"], t["tail"], t["step"]) for t in tags] == [
        (3, "reset", "cut", 0),
        (3, "reset", "cut", 0),
        (2, "reset", "cut", 0),
    ]


def test_flush_and_close_write_complete_chunks(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, max_len=4, flush="call", partition="protected")
    rows = rows_of(0, 0, 10)
    writer.extend(rows)
    rows["step"].zero_()  # the writer holds copies
    assert not (tmp_path / "protected").exists()
    writer.flush()
    assert len(files_in(tmp_path, "protected")) == 2
    writer.close(drop_partial=True)
    writer.close()
    chunks = TrajectoryChunks(tmp_path, "protected")
    assert steps_in(torch.cat([chunks.load(n) for n in range(2)])) == [(0, s) for s in range(8)]
    for use in (lambda: writer.add(rows[0]), writer.flush, writer.cut):
        refuses(Closed, "the writer is closed", use)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_len": 0}, "max_len as an int of at least 1 or None, got 0"),
        ({"max_len": 2.0}, r"max_len as an int of at least 1 or None, got 2\.0"),
        ({"max_len": 3, "stagger": 3}, "stagger below max_len=3, got 3"),
        ({"stagger": 1}, "stagger below max_len=None, got 1"),
        ({"max_len": 3, "stagger": -1}, "stagger as an int of at least 0"),
        ({"partition": "lifo"}, r"partition as one of \('fifo', 'protected'\), got 'lifo'"),
        ({"flush": "never"}, r"flush as one of \('done', 'call'\)"),
        (
            {"format": "traj"},
            r"format as one of \('safetensors', 'npz', 'npz-compressed'\), got 'traj'",
        ),
        ({"lanes": 0}, "lanes as an int of at least 1"),
    ],
)
@pytest.mark.acceptance("F25", "F36")
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: Any, message: str) -> None:
    refuses(ValueError, message, TrajectoryWriter, tmp_path, **arguments)
    refuses(TypeError, r"expected a torch\.Generator", TrajectoryWriter, tmp_path, generator=3)


def test_rows_that_do_not_fit_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TrajectoryWriter(tmp_path, lanes=2)
    rows = torch.stack([rows_of(lane, 0, 4, [3]) for lane in range(2)], 1)
    refuses(TypeError, "rows as a TensorDict, got dict", writer.extend, {"step": torch.arange(3)})
    writer.extend(rows[:2])
    refuses(SchemaError, "key 'step': expected int64", writer.extend, rows[2:].exclude("step"))
    refuses(ValueError, "expected 2 lanes, got 1", writer.extend, rows[2:, :1])
    monkeypatch.setattr(trajectory_writer.os, "getpid", lambda: -1)
    refuses(RuntimeError, "make one in each process", writer.extend, rows[2:])
    monkeypatch.undo()
    writer.extend(rows[2:])
    chunks = TrajectoryChunks(tmp_path)
    assert [steps_in(chunks.load(n)) for n in range(2)] == [
        [(lane, step) for step in range(4)] for lane in range(2)
    ]


@pytest.mark.acceptance("F30", "F38")
def test_a_failed_write_leaves_no_file_and_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    writer = TrajectoryWriter(tmp_path)
    (tmp_path / "fifo").mkdir()
    monkeypatch.setattr(chunk_files.os, "fsync", full)
    refuses(OSError, "No space left", writer.extend, rows_of(0, 0, 3, [2]))
    assert os.listdir(tmp_path / "fifo") == []
    monkeypatch.undo()
    writer.flush()
    shutil.rmtree(tmp_path / "fifo")
    writer.extend(rows_of(0, 3, 3, [5]))  # makes the folder again
    assert TrajectoryChunks(tmp_path).tags(0)["number"] == 1


@pytest.mark.acceptance("F40")
def test_files_are_readable_for_all_and_by_other_libraries(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, format="npz") as writer:
        writer.extend(rows_of(0, 0, 3))
    with TrajectoryWriter(tmp_path, format="safetensors") as writer:
        writer.extend(rows_of(0, 0, 3))
    for path in (tmp_path / "fifo").iterdir():
        assert path.stat().st_mode & 0o444 == 0o444
        data = path.read_bytes()
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as found:
                assert found["next.reward"].tolist() == [[0], [3], [6]]
            continue
        # The layout of safetensors: a table, padded to 8 bytes, and columns without gaps.
        size = int.from_bytes(data[:8], "little")
        assert size % 8 == 0
        table = json.loads(data[8 : 8 + size])
        assert set(map(type, table.pop("__metadata__").values())) == {str}
        spans = sorted(column["data_offsets"] for column in table.values())
        assert [0, *(until for _, until in spans)] == [
            *(start for start, _ in spans),
            len(data) - 8 - size,
        ]
        assert table["half"] == {
            "dtype": "BF16",
            "shape": [3],
            "data_offsets": table["half"]["data_offsets"],
        }


def test_rows_without_flags_or_columns(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.extend(TensorDict({"x": torch.ones(0, 2)}, [0]))
        writer.extend(TensorDict({"x": torch.ones(4, 0, dtype=torch.complex128)}, [4]))
    only = TrajectoryChunks(tmp_path).load(0)["x"]
    assert (only.shape, only.dtype) == ((4, 0), torch.complex128)
