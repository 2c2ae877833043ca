"""Observations stored once in files that are recovered: what is there again, what is taken back."""

from __future__ import annotations

import errno
import gc
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

from replaykit import LazyMemmapStorage, ReplayBuffer
from replaykit.errors import CheckpointError
from replaykit.recovery.journal import Journal
from replaykit.storages.observation_table import ObservationTable
from tests.storages.dedup import KINDS, Rows, Twins, apply, buffer
from tests.support.refusals import refuses

SLOTS = 19


def kept(folder: Path, kind: str = "ring", size: int = SLOTS, **options: Any) -> ReplayBuffer:
    options = {"dedup_next": True, "on_mismatch": "dense", **KINDS[kind], **options}
    storage = LazyMemmapStorage(size, scratch_dir=folder, recover=True, **options)
    return ReplayBuffer(storage=storage)


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cut_off_write(twins: Twins, rows: TensorDict, half: bool, patch: pytest.MonkeyPatch) -> None:
    """A write that is cut off in the middle of what it changes, or at its end."""
    once, write = twins.buffers[1], ObservationTable.write
    table, stored = once.storage.require().table, once.storage.ledger.length

    def cut_off(table: Any, *arguments: Any, **options: Any) -> None:
        write(table, *arguments, **options)
        if half:  # as if some references had not been set yet
            table.references[: stored // 2] = 0
        raise RuntimeError("cut off")

    with patch.context() as patched, once.storage.lock:
        patched.setattr(ObservationTable, "write", cut_off)
        if half:
            elements = np.arange(stored * table.cells)
            table.journal.journal(elements, elements[:0], table.cells, [])
        refuses(RuntimeError, "cut off", once.extend, rows)


def open_again(twins: Twins) -> None:
    written = twins.buffers.pop().write_count
    gc.collect()
    twins.buffers.append(twins.buffer(twins.make_once()))
    assert twins.buffers[1].write_count == written


def empty_and_write_under_a_lock(twins: Twins, rows: Rows) -> None:
    with twins.storages[0].lock, twins.storages[1].lock:
        for count in (4, 5):
            twins.both(lambda buffer: buffer.empty())
            twins.write(rows.steps(count))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_return_if_a_kill_follows_a_clear(
    kind: str, tmp_path: Path, same_rows: Any, transitions: Any
) -> None:
    """A copy of the folder shows what a kill leaves, after a clear and each write after it."""
    rb, rows = kept(tmp_path / "rows", kind), Rows(transitions, 0, kind)
    for _ in range(4):
        rb.extend(rows.steps(7))
    shutil.copytree(tmp_path / "rows", tmp_path / "before")
    before = kept(tmp_path / "before", kind)[:]
    assert same_rows(before, rb[:])
    with rb.storage.lock:
        for number, count in enumerate((0, 3, 9, 0, 5)):
            if count:
                rb.extend(rows.noise(count))
            else:
                rb.empty()
            shutil.copytree(tmp_path / "rows", tmp_path / str(number))
    for number in range(5):
        assert same_rows(kept(tmp_path / str(number), kind)[:], before)
    rb.storage.close()
    assert same_rows(kept(tmp_path / "rows", kind)[:], rb[:])


OPERATIONS = ["extend", "extend", "turns", "noise", "add", "edit", "column", "patch", "set", "env"]
OPERATIONS += ["empty", "load", "saved", "locked", "cut off", "cut off half", "open again"]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_match_dense_storage(
    kind: str,
    seed: int,
    tmp_path: Path,
    transitions: Any,
    same_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = (2,) if kind == "lanes" else ()
    files: dict[str, Any] = {"scratch_dir": tmp_path / "rows", "recover": True}
    twins = Twins(kind, lanes, SLOTS, LazyMemmapStorage, length=4, **files)
    rows, draw = Rows(transitions, seed, kind), random.Random(seed)
    for _ in range(32):
        operation, size = draw.choice(OPERATIONS), draw.randrange(25)
        if operation == "open again":
            open_again(twins)
        elif operation == "locked":
            empty_and_write_under_a_lock(twins, rows)
        elif operation.startswith("cut off"):
            if twins.storages[1].ledger.length:
                cut_off_write(twins, rows.steps(1 + size), "half" in operation, monkeypatch)
        else:
            apply(twins, rows, operation, size, draw.randrange(4), tmp_path)
        twins.check(same_rows)


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
    assert same_rows(kept(tmp_path, kind)[:], begin(buffer(kind, "dense", SLOTS))[:])


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


@pytest.mark.parametrize("fault", ["full", "closed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clear_that_fails_leaves_the_references(
    fault: str, kind: str, tmp_path: Path, same_rows: Any, transitions: Any
) -> None:
    """A ledger journals its generations after the references were cleared."""
    rb, twin = (kept(tmp_path / name, kind) for name in ("rows", "twin"))
    rows = Rows(transitions, 0, kind)
    for number in range(5):
        written = rows.steps(7)
        for one in (rb, twin):
            one.extend(written)
            if not number:
                one.empty()  # makes the table of generations
    if fault == "closed":
        rb.storage.close()
        refuses(RuntimeError, "closed", rb.empty)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "save", no_room)
            refuses(OSError, "No space", rb.empty)
        for written in (rows.noise(3), rows.steps(9)):
            for one in (rb, twin):
                one.extend(written)
    assert same_rows(rb[:], twin[:])
    assert rb.storage.overflow_rows == twin.storage.overflow_rows


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
