"""A conversion that ends at any point leaves no data set, and what it leaves is removed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from typing import Any

import pytest
from tensordict import TensorDict

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.datasets.transfers import target_lock
from replaykit.filesystem import private_path, reserve, siblings
from tests.datasets.trials import convert, names, never


@pytest.mark.pitfall("DS3")
def test_interrupt_at_any_write_leaves_nothing_that_loads(tmp_path, source, monkeypatch):
    """N7: the interrupt comes with the k-th write, for every k."""
    real = os.pwrite
    state = {"count": 0, "stop": 0}

    def counting(*args: Any) -> int:
        state["count"] += 1
        if state["count"] == state["stop"]:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr("os.pwrite", counting)
    convert(tmp_path / "whole", source)
    writes = state["count"]
    assert writes > 30
    target = tmp_path / "root" / "data"
    for stop in [*range(1, writes, 5), writes]:
        state.update(count=0, stop=stop)
        with pytest.raises(KeyboardInterrupt):
            convert(target, source)
        assert names(target.parent) == [".data.lock"]
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(target)
    state.update(stop=0)
    assert convert(target, source).rows == 6
    verify_published(target)


def test_half_built_directory_does_not_load(tmp_path, source, monkeypatch):
    """Not even the private directory can be taken for a table."""
    seen = []

    def look(self: Any) -> None:
        (private,) = siblings(tmp_path / "data", "tmp")
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(private)
        with pytest.raises(RuntimeError, match="no manifest"):
            open_published(private)
        seen.append(private)

    monkeypatch.setattr("replaykit.datasets.engine.row_writer.RowWriter.finish", look)
    convert(tmp_path / "data", source)
    assert len(seen) == 1
    assert not seen[0].exists()


def test_stale_directories_are_removed_and_others_left_alone(tmp_path, source):
    """P7: only what was made for this very target."""
    root = tmp_path / "root"
    target = root / "data"
    root.mkdir()
    stale = private_path(target, "tmp")
    other = private_path(root / "data.tmp-x", "tmp")
    alike = root / ".data.tmp-mine"
    for path in (stale, other, alike):
        path.mkdir()
        (path / "x").write_text("y")
    convert(target, source)
    assert not stale.exists()
    assert (other / "x").exists()
    assert (alike / "x").exists()
    assert siblings(target, "tmp") == []


KILLED = """
import os, sys
from pathlib import Path
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.datasets.engine.row_writer import RowWriter
RowWriter.finish = lambda self: os._exit(9)
source, target = map(Path, sys.argv[1:3])
ensure_dataset(target, get_sources=lambda: Sources.local([source]), layout=ROBOHIVE, force=True)
"""


@pytest.mark.parametrize("opening", ["open", "ensure"])
def test_next_opening_removes_leftovers_of_killed_replacement(target, source, run_python, opening):
    """P7: there may never be another replacement that would clear it away."""
    done = run_python(KILLED, source, target, check=False)
    assert done.returncode == 9
    assert len(siblings(target, "tmp")) == 1
    retired = private_path(target, "old")
    shutil.copytree(target, retired)
    if opening == "open":
        found = open_published(target)
    else:
        found = ensure_dataset(target, get_sources=never, layout=ROBOHIVE)
    assert found.rows == 6
    assert names(target.parent) == [".data.lock", "data"]
    assert found.columns["next", "reward"][0] == 1.0


def test_opening_keeps_draft_of_a_living_process(target):
    with target_lock(target):
        private = private_path(target, "tmp")
        private.mkdir()
        begin = time.monotonic()
        assert open_published(target).rows == 6
        assert time.monotonic() - begin < 5  # it does not wait for the lock
        assert private.exists()


def test_leftovers_on_a_disk_that_may_only_be_read_are_no_hindrance(target, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    private_path(target, "tmp").mkdir()
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert open_published(target).rows == 6


def test_reserved_file_has_its_size_and_no_room_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.touch()
    reserve(path, 100_000)
    assert path.stat().st_size == 100_000
    assert path.stat().st_blocks * 512 >= 100_000

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"200,000 bytes are needed for .*x, .* are free there"):
        reserve(path, 200_000)

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("os.posix_fallocate", unsupported)
    reserve(path, 300_000)
    assert path.stat().st_size == 300_000


def test_quota_met_while_writing_is_the_same_sentence(tmp_path, source, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match=r"bytes are needed for .*memmap") as caught:
        convert(tmp_path / "root" / "data", source)
    assert caught.value.errno == errno.EDQUOT
    assert names(tmp_path / "root") == [".data.lock"]
