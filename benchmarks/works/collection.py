"""Feeding a buffer from a folder, writing whole episodes, and draws that follow draw counts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import as_tensordict, make_episodes
from benchmarks.setting import BATCH, Setting
from benchmarks.works import episodes
from replaykit import LazyTensorStorage, ReplayBuffer, TrajectoryFolder, TrajectoryWriter
from replaykit.feeds.chunk_files import ChunkHeader, ChunkLayout, chunk_name, encode_chunk
from replaykit.schema import Schema, split_leaves

__all__ = ["asked", "run"]

ROWS, FILES, TRAJECTORIES = 200, 100, 1_000
PLAIN, BYTES, ONE_FILE = "a buffer", "their bytes", "its bytes, synced"
SAMPLE = f"sample {BATCH} rows, fed by {TRAJECTORIES} files"
REFRESH, WRITE = f"refresh, {FILES} files of {ROWS} rows", f"write a chunk of {ROWS} rows"
MOST_ROUNDS = 50


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    return {
        SAMPLE: (Target(PLAIN, 1.05),),
        REFRESH: (Target(BYTES, 4.0),),
        WRITE: (Target(ONE_FILE, 3.0),),
        **episodes.asked(setting),
    }


class Trajectories:
    """Whole trajectories as chunks, which are written without syncs."""

    def __init__(self, folder: Path, count: int, length: int) -> None:
        self.root, self.folder = folder, folder / "fifo"
        self.count, self.length = count, length
        self.rows = as_tensordict(make_episodes(count * length, length))
        self._layout = ChunkLayout.of(Schema(split_leaves(self.rows, 1).root))
        self._written = 0

    def write(self) -> None:
        """Replace all files by those of the next numbers."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for first in range(0, len(self.rows), self.length):
            rows = split_leaves(self.rows[first : first + self.length], 1).leaves
            header = ChunkHeader(
                "0" * 16, 0, self._written, "reset", "truncated", 0, self.length, self._written
            )
            data = encode_chunk(header, self._layout, rows, "safetensors")
            (self.folder / chunk_name(header, "safetensors")).write_bytes(data)
            self._written += 1


def _expect_rows(buffer: ReplayBuffer[Any, Any, Any, Any], rows: Any) -> None:
    stored = buffer[:]
    for key in rows.keys(True, True):
        expect(bool(stored[key].equal(rows[key])), f"{key} is not what was written")


class Sampling(Contender):
    """A full buffer, which a folder or a write filled."""

    def __init__(self, name: str, source: Trajectories, *, fed: bool) -> None:
        self.name, self.source, self.fed = name, source, fed

    def make(self) -> None:
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(len(self.source.rows)),
            batch_size=BATCH,
            generator=torch.Generator().manual_seed(0),
        )
        if self.fed:
            TrajectoryFolder(self.source.root, self.buffer).refresh()
        else:
            self.buffer.extend(self.source.rows)

    def check(self) -> None:
        _expect_rows(self.buffer, self.source.rows)
        batch = self.buffer.sample()
        same = batch["next", "reward"] == self.source.rows["next", "reward"][batch["index"]]
        expect(len(batch) == BATCH and bool(same.all()), "a sample has other rows")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.buffer.sample()


class Refreshing(Contender):
    """A folder whose buffer takes the rows of new files."""

    name = SUBJECT

    def __init__(self, source: Trajectories) -> None:
        self.source = source

    def make(self) -> None:
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(len(self.source.rows)))
        self.feed = TrajectoryFolder(self.source.root, self.buffer)

    def check(self) -> None:
        for _ in range(2):
            self.source.write()
            expect(self.feed.refresh() == len(self.source.rows), "it has not read all rows")
            _expect_rows(self.buffer, self.source.rows)

    def inputs(self, calls: int) -> Iterable[Any]:
        for _ in range(calls):
            self.source.write()
            yield None

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.feed.refresh()


class Reading(Refreshing):
    """Reading the files of a folder, and nothing else."""

    name = BYTES

    def read(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.source.folder.iterdir())]

    def check(self) -> None:
        self.source.write()
        found = self.read()
        least = self.source.length * 170
        expect(len(found) == FILES and min(map(len, found)) > least, "it has not read all files")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.read()


class Writing(Contender):
    """A writer that takes a whole trajectory, which becomes a file."""

    name = SUBJECT

    def __init__(self, source: Trajectories, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.rows = source.rows[: source.length]

    def make(self) -> None:
        self.writer = TrajectoryWriter(self.folder)

    def check(self) -> None:
        self.writer.extend(self.rows)
        buffer = ReplayBuffer(storage=LazyTensorStorage(self.source.length))
        TrajectoryFolder(self.folder, buffer).refresh()
        _expect_rows(buffer, self.rows)

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.writer.extend(self.rows)


class WritingBytes(Writing):
    """The bytes of a chunk, written into a new file and synced."""

    name = ONE_FILE

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.source.write()
        self.data = next(self.source.folder.iterdir()).read_bytes()
        self.number = 0

    def write(self) -> None:
        self.number += 1
        path = self.folder / str(self.number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.write(descriptor, self.data)
        os.fsync(descriptor)
        os.close(descriptor)

    def check(self) -> None:
        self.write()
        expect((self.folder / "1").read_bytes() == self.data, "it has written other bytes")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.write()


def run(setting: Setting) -> list[Line]:
    """Measure."""
    folder, rounds = setting.scratch / "collection", min(setting.rounds, MOST_ROUNDS)
    whole = Trajectories(folder / "sample", TRAJECTORIES, max(2, setting.rows // TRAJECTORIES))
    whole.write()
    new, other = (Trajectories(folder / name, FILES, ROWS) for name in ("refresh", "read"))
    works = {
        SAMPLE: (Sampling(SUBJECT, whole, fed=True), Sampling(PLAIN, whole, fed=False), 10),
        REFRESH: (Refreshing(new), Reading(other), 1),
        WRITE: (Writing(new, folder / "chunks"), WritingBytes(new, folder / "bytes"), 5),
    }
    lines = []
    try:
        for title, (subject, rival, calls) in works.items():
            found, absent = ready(subject, [rival])
            times = take_turns(
                found, rounds=setting.rounds if title == SAMPLE else rounds, calls=calls
            )
            lines += lines_of_turns(title, times, absent, asked(setting)[title])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return lines + episodes.run(setting)
