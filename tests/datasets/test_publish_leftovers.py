"""A conversion that ends at any point leaves no data set, and several that ask share one."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import Published, open_published, verify_published
from replaykit.datasets.sources import Sources
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


def ensured(target: Path) -> Published:
    return ensure_dataset(target, get_sources=never, layout=ROBOHIVE)


@pytest.mark.parametrize("opening", [open_published, ensured])
@pytest.mark.parametrize("leave", [shutil.copytree, os.rename])
def test_next_opening_clears_up_after_a_killed_replacement(target, opening, leave):
    """The old version is removed, or restored if the new one had not taken its place."""
    private_path(target, "tmp").mkdir()
    leave(target, private_path(target, "old"))
    found = opening(target)
    assert found.rows == 6
    assert found.columns["next", "reward"][0] == 1.0
    assert names(target.parent) == [".data.lock", "data"]


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


def test_file_has_its_size_where_blocks_cannot_be_reserved(tmp_path, monkeypatch):
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("os.posix_fallocate", unsupported)
    (tmp_path / "x").touch()
    reserve(tmp_path / "x", 300_000)
    assert (tmp_path / "x").stat().st_size == 300_000


def test_quota_met_while_writing_is_the_same_sentence(tmp_path, source, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match=r"bytes are needed for .*memmap") as caught:
        convert(tmp_path / "root" / "data", source)
    assert caught.value.errno == errno.EDQUOT
    assert names(tmp_path / "root") == [".data.lock"]


# -- several that ask at once ---------------------------------------------------------------------


@pytest.mark.pitfall("DS12")
def test_threads_that_ask_at_once_share_one_conversion(tmp_path, source, caplog):
    started, asked, found = threading.Event(), [], []

    def sources() -> Sources:
        asked.append(True)
        started.wait(20)
        return Sources.local([source])

    def ask() -> None:
        target = tmp_path / "root" / "data"
        found.append(ensure_dataset(target, get_sources=sources, layout=ROBOHIVE).rows)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "replaykit"):
        for thread in threads:
            thread.start()
        while len(caplog.records) < 3:
            threads[0].join(0.01)
        started.set()
        for thread in threads:
            thread.join(60)
    assert found == [6] * 4
    assert asked == [True]
    assert len(caplog.records) == 3
    assert all("waiting for it" in record.message for record in caplog.records)


SHARE = """
import os, sys, time, warnings
from pathlib import Path
from replaykit.datasets import dataset_passes
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
warnings.simplefilter("ignore")
source, target, log = map(Path, sys.argv[1:4])

def noted(name, work):
    def slowly(*given):
        with log.open("a") as file:
            file.write(name + "\\n")
        time.sleep(0.5)
        return work(*given)
    return slowly

sources = noted("converted", lambda: Sources.local([source]))
dataset_passes._split = noted("split", dataset_passes._split)
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            ensure_dataset(target, get_sources=sources, layout=ROBOHIVE)
            rows = dataset_passes.ensure_split(target, target.with_name("split")).rows
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0 if rows == 2 else 2)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.pitfall("DS12")
def test_processes_that_ask_at_once_share_one_conversion_and_one_split(
    tmp_path, source, run_python
):
    log = tmp_path / "log"
    done = run_python(SHARE, source, tmp_path / "root" / "data", log)
    assert done.stdout.strip() == "[0, 0, 0, 0]", done.stderr
    assert log.read_text() == "converted\nsplit\n"
    # Without a handler of the user's, logging shows the lines of those who wait.
    waits = done.stderr.count("data is being prepared by another process; waiting for it")
    assert waits >= 3  # and perhaps one that comes while another splits


def test_waiting_for_the_lock_can_be_interrupted_and_its_failure_passes_on(tmp_path, source):
    """When the holder fails, the next in line converts."""
    target = tmp_path / "root" / "data"
    entered, leave = threading.Event(), threading.Event()

    def failing() -> Sources:
        entered.set()
        leave.wait(20)
        raise OSError("the network is gone")

    errors = []

    def first() -> None:
        try:
            ensure_dataset(target, get_sources=failing, layout=ROBOHIVE)
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(20)
    timer = threading.Timer(0.2, leave.set)
    timer.start()
    assert convert(target, source).rows == 6
    thread.join(20)
    timer.join(20)
    assert errors == ["the network is gone"]


def test_lock_excludes_and_names_its_target(tmp_path):
    with target_lock(tmp_path / "new" / "data"):
        assert names(tmp_path / "new") == [".data.lock"]


def test_failed_lock_creation_raises_error_without_a_wait():
    """There files cannot be made, and are missing where others look for them."""
    if not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    with (
        pytest.raises(OSError, match=r"\.replaykit\.lock"),
        target_lock(Path("/proc/replaykit")),
    ):
        pytest.fail("a lock was made")
