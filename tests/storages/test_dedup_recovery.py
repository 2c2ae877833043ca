"""Observations stored once in files that are recovered: what is there again, what is taken back."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from replaykit.errors import CheckpointError
from replaykit.storages.observation_table import ObservationTable
from tests.support.refusals import refuses

SLOTS = 19
OPTIONS: dict[str, dict[str, Any]] = {
    "ring": {},
    "lanes": {"ndim": 2},
    "streams": {"lane_key": "env"},
    "rings": {"lane_key": "env"},
}


def kept(folder: Path, kind: str = "ring", size: int | None = None, **options: Any) -> ReplayBuffer:
    options = {"dedup_next": True, "on_mismatch": "dense", **OPTIONS[kind], **options}
    size = size or SLOTS * (2 if kind == "lanes" else 1)
    return ReplayBuffer(
        storage=LazyMemmapStorage(size, scratch_dir=folder, recover=True, **options),
        writer=LaneWriter(length=6) if kind == "rings" else None,
    )


def dense(kind: str) -> ReplayBuffer:
    size = SLOTS * (2 if kind == "lanes" else 1)
    return ReplayBuffer(
        storage=LazyTensorStorage(size, **OPTIONS[kind]),
        writer=LaneWriter(length=6) if kind == "rings" else None,
    )


class _Worker:
    """The same done to a buffer in files and to a dense one in memory."""

    def __init__(self, kind: str, folder: Path, seed: int, stream: Any) -> None:
        self.kind, self.folder, self.draw = kind, folder, random.Random(seed)
        lanes = {"ring": (), "lanes": (2,)}.get(kind, (3,))
        self.stream = stream(seed, lanes, wide=700)
        self.model, self.rb = dense(kind), kept(folder, kind)

    def rows(self, count: int) -> TensorDict:
        noise = self.draw.random() < 0.2
        rows = self.stream.noise(count) if noise else self.stream.steps(count)
        if self.kind == "lanes":
            return rows.transpose(0, 1).contiguous()
        if self.kind != "ring":
            rows["env"] = torch.arange(3).expand(count, 3)
            rows = rows.reshape(-1)[torch.rand(count * 3, generator=self.stream.generator) < 0.8]
        return rows

    def step(self, patch: pytest.MonkeyPatch) -> None:
        what, stored = self.draw.random(), len(self.model)
        both = self.rb, self.model
        if stored and what < 0.12 and self.kind != "lanes":
            at = torch.tensor(self.draw.sample(range(stored), min(3, stored)))
            new = self.stream.noise(3)
            new = (new if self.kind == "ring" else new[:, 0])[: len(at)]
            for key in self.draw.choice([[("observation",)], [("pixels",), ("next", "pixels")]]):
                for rb in both:
                    rb.storage.edit_columns({key: new[key]}, at)
        elif stored and what < 0.18 and self.kind == "ring":
            at = torch.tensor(sorted(self.draw.sample(range(stored), min(3, stored))))
            new, moves = self.stream.noise(len(at)), self.draw.random() < 0.5
            for rb in both:
                rb.storage.set(at, new, set_cursor=moves)
        elif what < 0.22:
            for rb in both:
                rb.empty()
        elif what < 0.26:
            with self.rb.storage.lock, self.model.storage.lock:
                for rows in (self.rows(4), self.rows(5)):
                    for rb in both:
                        rb.empty()
                        rb.extend(rows)
        elif what < 0.32:
            self.model.dumps(self.folder.parent / "saved")
            for rb in both:
                rb.loads(self.folder.parent / "saved")
        elif what < 0.45 and self.rb.storage.initialized:
            self.fails(patch)
        elif what < 0.52:
            kept_state = self.rb.write_count
            del self.rb, both
            self.rb = kept(self.folder, self.kind)
            assert self.rb.write_count == kept_state
        else:
            rows = self.rows(self.draw.choice([1, 2, 3, 8, 25]))
            for rb in both:
                rb.extend(rows)

    def fails(self, patch: pytest.MonkeyPatch) -> None:
        """A write that is cut off in the middle of what it changes, or at its end."""
        write, half = ObservationTable.write, len(self.rb) > 1 and self.draw.random() < 0.5

        def cut_off(table: Any, *arguments: Any, **options: Any) -> None:
            write(table, *arguments, **options)
            if half:  # as if some references had not been set yet
                table.references[: len(self.rb) // 2] = 0
            raise RuntimeError("cut off")

        with patch.context() as patched:
            patched.setattr(ObservationTable, "write", cut_off)
            rows = self.rows(self.draw.choice([1, 3, 8]))
            while not len(rows):
                rows = self.rows(3)
            table = self.rb.storage.require().table
            if half:
                elements = torch.arange(len(self.rb) * table.cells).numpy()
                with self.rb.storage.lock:
                    table.journal.journal(elements, elements[:0], table.cells, [])
                    refuses(RuntimeError, "cut off", self.rb.extend, rows)
                return
            refuses(RuntimeError, "cut off", self.rb.extend, rows)


def check(rb: ReplayBuffer, model: ReplayBuffer, same_rows: Any) -> None:
    ledger, wanted = rb.storage.ledger, model.storage.ledger
    assert (len(rb), ledger.cursor) == (len(model), wanted.cursor)
    assert ledger.write_order().tolist() == wanted.write_order().tolist()
    if len(model):
        assert same_rows(rb[:], model[:])
    columns: Any = rb.storage._columns
    if columns is None:
        return
    # What follows from the files is what it would be if it were worked out anew.
    alone = rb.storage.overflow_rows
    columns.table.core.derive(len(rb))
    assert rb.storage.overflow_rows == alone


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))]
)
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_random_calls_match_dense_storage(
    kind: str,
    seed: int,
    tmp_path: Path,
    transitions: Any,
    same_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = _Worker(kind, tmp_path / "rows", seed, transitions)
    for _ in range(32):
        worker.step(monkeypatch)
        check(worker.rb, worker.model, same_rows)


def episode(first: int, count: int, env: int | None = None) -> TensorDict:
    """Rows that go on from each other, of one stream."""
    x = torch.arange(first, first + count + 1)
    pixels = x[:, None].expand(-1, 2000).to(torch.uint8).contiguous()
    following = {"x": x[1:].clone(), "pixels": pixels[1:].clone()}
    following["done"] = torch.zeros(count, 1, dtype=torch.bool)
    rows = TensorDict({"x": x[:-1].clone(), "pixels": pixels[:-1], "next": following}, [count])
    if env is not None:
        rows["env"] = torch.full((count,), env)
    return rows


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["ring", "streams"])
def test_changes_of_killed_process_are_undone(kind: str, tmp_path: Path, same_rows: Any) -> None:
    """Entries that were given back without a note are not overwritten without one."""
    env = None if kind == "ring" else 0

    def begin(rb: ReplayBuffer) -> ReplayBuffer:
        for first in range(0, 24, 4):  # rows that do not follow each other: each has an entry
            rb.extend(episode(10 * first, 2, env))
            rb.extend(episode(10 * first + 5, 2, env))
        return rb

    child = os.fork()
    if not child:
        try:
            rb = begin(kept(tmp_path, kind))
            with rb.storage.lock:
                rb.empty()
                for first in range(17):  # nearly all the entries that there are
                    rb.extend(episode(100 + 7 * first, 1, env))
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert same_rows(kept(tmp_path, kind)[:], begin(dense(kind))[:])


def test_streams_continue_after_restart_without_extra_overflow_rows(tmp_path: Path) -> None:
    rb = kept(tmp_path, "streams", 60)
    for first in range(0, 15, 5):
        for env in range(3):
            rb.extend(episode(first, 5, env))
        del rb
        rb = kept(tmp_path, "streams", 60)
    assert rb.storage.overflow_rows == 3
    assert rb["next", "x"].tolist() == (rb["x"] + 1).tolist()


@pytest.mark.parametrize(("dedup", "version"), [(False, 1), (True, 4)])
def test_manifest_has_a_version_that_older_packages_refuse_if_needed(
    tmp_path: Path, dedup: bool, version: int
) -> None:
    rb = kept(tmp_path, dedup_next=dedup)
    rb.extend(episode(0, 5))
    record = json.loads((tmp_path / "%recovery" / "manifest.json").read_text())
    assert record["format_version"] == version
    assert record["content"].get("dedup_next") == ([["x"], ["pixels"]] if dedup else None)
    del rb
    if not dedup:
        refuses(ValueError, r"dedup_next=\['x', 'pixels'\], got False", kept, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dedup_next": False}, r"dedup_next=False, got \['x', 'pixels'\]"),
        ({"dedup_next": ["x"]}, r"dedup_next=\['x'\], got \['x', 'pixels'\]"),
        ({"dedup_next": ["y"]}, "dedup_next: expected 'y' at the root"),
        ({"lane_key": "x", "dedup_next": ["pixels"]}, "lane_key"),
    ],
)
def test_other_leaves_stored_once_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    rb = kept(tmp_path)
    rb.extend(episode(0, 5))
    del rb
    refuses(ValueError, message, kept, tmp_path, **options)
    assert kept(tmp_path, dedup_next=["x", "pixels"])["next", "x"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("harm", ["gone", "short", "link"])
@pytest.mark.parametrize("file", ["%beside/next/pixels.memmap", "%recovery/table-6-8.bin"])
def test_a_file_that_is_not_as_it_was_left_is_named(tmp_path: Path, file: str, harm: str) -> None:
    rb = kept(tmp_path, "streams")
    for env in range(3):
        rb.extend(episode(10 * env, 5, env))
    before = rb[:].clone()
    del rb
    gc.collect()
    path = tmp_path / file
    content = path.read_bytes()
    path.unlink()
    if harm == "short":
        path.write_bytes(content[:20])
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    refuses(CheckpointError, Path(file).name, kept, tmp_path, "streams")
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    assert bool((kept(tmp_path, "streams")[:] == before).all())  # who was refused changed nothing


@pytest.mark.parametrize(
    ("row", "kind", "value", "message"),
    [
        (0, 0, 2, "of two rows"),
        (0, 1, 400, "references to 19 entries, got one to entry 399"),
        (4, 1, -30, "bytes in .*beside"),
    ],
)
def test_bookkeeping_that_contradicts_itself_is_refused(
    tmp_path: Path, row: int, kind: int, value: int, message: str
) -> None:
    rb = kept(tmp_path, "streams")
    rb.extend(episode(0, 5, 0))
    del rb
    gc.collect()
    path = tmp_path / "%recovery" / "table-6-8.bin"
    numbers = np.frombuffer(path.read_bytes(), np.int32).copy()
    numbers[2 * row + kind] = value
    path.write_bytes(numbers.tobytes())
    refuses(CheckpointError, message, kept, tmp_path, "streams")


def test_space_of_others_is_refused_or_taken(tmp_path: Path) -> None:
    other = LazyMemmapStorage(SLOTS, scratch_dir=tmp_path, dedup_next=True)
    ReplayBuffer(storage=other).extend(episode(0, 5))
    for name in ("pixels.memmap", "records.memmap"):
        (tmp_path / name).unlink()
    rb = kept(tmp_path)
    refuses(RuntimeError, r"beside.*exists", rb.extend, episode(0, 5))
    del rb, other
    rb = kept(tmp_path, existsok=True)
    rb.extend(episode(0, 5))
    del rb
    assert kept(tmp_path)["next", "x"].tolist() == [1, 2, 3, 4, 5]


def test_commits_of_a_durable_storage_have_all_files_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(str(path.relative_to(tmp_path)) if path != tmp_path else "")
        sync(descriptor)

    rb = kept(tmp_path, "streams", durable=True)
    monkeypatch.setattr(os, "fsync", watched)
    rb.extend(episode(0, 5, 0))
    assert {"%beside", "%beside/next", ""} <= set(synced)  # the names of files that were made
    for turn in range(2):
        synced.clear()
        rb.extend(episode(5 + turn, 1, 0))
        state = next(at for at, one in enumerate(synced) if "state" in one)
        rows = {"%beside/next/pixels.memmap", "%recovery/table-6-8.bin"}
        assert rows <= set(synced[:state])
        del rb
        rb = kept(tmp_path, "streams", durable=True)
    assert rb["x"].tolist() == list(range(7))


def test_unreserved_end_of_a_file_is_not_used(tmp_path: Path) -> None:
    """A kill between making a file longer and reserving its blocks leaves a hole in it."""
    rb = kept(tmp_path, size=500)
    for first in range(0, 100, 10):
        rb.extend(episode(first, 1))
    before = rb[:].clone()
    del rb
    gc.collect()
    for file in (tmp_path / "%beside").rglob("*.memmap"):
        with open(file, "r+b") as longer:
            longer.truncate(file.stat().st_size + 10**6)
    rb = kept(tmp_path, size=500)
    columns: Any = rb.storage._columns
    assert columns.table._overflow.slots <= 64
    assert bool((rb[:] == before).all())
    for first in range(0, 1000, 10):
        rb.extend(episode(first, 1))
    assert rb.storage.overflow_rows == 110
    assert rb["next", "x"].tolist() == (rb["x"] + 1).tolist()


def test_full_disk_leaves_rows_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = kept(tmp_path, size=200)
    for first in range(0, 600, 10):
        rb.extend(episode(first, 1))
    before = rb[:].clone()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr("replaykit.storages.row_files.reserve_blocks", full)
        with pytest.raises(OSError, match="reserve"):
            rb.extend(torch.cat([episode(first, 1) for first in range(0, 200, 10)]))
    assert bool((rb[:] == before).all())
    rb.extend(episode(1, 1))
    before = rb[:].clone()
    del rb
    assert bool((kept(tmp_path, size=200)[:] == before).all())


@pytest.mark.parametrize("kind", ["ring", "streams"])
def test_storage_made_in_inference_mode_works_outside(kind: str, tmp_path: Path) -> None:
    env = None if kind == "ring" else 0
    with torch.inference_mode():
        rb = kept(tmp_path, kind)
        rb.extend(episode(0, 3, env))
    rb.extend(episode(3, 3, env))
    rb.storage.edit_columns({("x",): torch.tensor([7])}, torch.tensor([1]))
    del rb
    with torch.inference_mode():
        rb = kept(tmp_path, kind)
    rb.extend(episode(63, 3, env))
    rb.empty()
    rb.extend(episode(0, 3, env))
    assert rb["next", "x"].tolist() == [1, 2, 3]
