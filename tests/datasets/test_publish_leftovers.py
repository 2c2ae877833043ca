"""What a conversion that was killed left beside a data set is removed, nothing else."""

from __future__ import annotations

import errno
import shutil
import time
from typing import Any

import pytest

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published
from replaykit.datasets.transfers import target_lock
from replaykit.filesystem import private_path, siblings
from tests.datasets.trials import convert, names, never


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
