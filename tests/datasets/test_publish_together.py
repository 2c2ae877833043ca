"""Several that ask for a data set at once share one conversion."""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path

import pytest

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.datasets.transfers import target_lock
from tests.datasets.trials import convert, names
from tests.prepared import python


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
import os, sys, time
from pathlib import Path
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
source, target, log = map(Path, sys.argv[1:4])

def sources():
    with log.open("a") as file:
        file.write("converted\\n")
    time.sleep(0.5)
    return Sources.local([source])

children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            rows = ensure_dataset(target, get_sources=sources, layout=ROBOHIVE).rows
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0 if rows == 6 else 2)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.pitfall("DS12")
def test_processes_that_ask_at_once_share_one_conversion(tmp_path, source):
    log = tmp_path / "log"
    paths = [str(path) for path in (source, tmp_path / "root" / "data", log)]
    done = subprocess.run([*python(), "-c", SHARE, *paths], capture_output=True, text=True)
    assert done.stdout.strip() == "[0, 0, 0, 0]", done.stderr
    assert log.read_text() == "converted\n"
    # Without a handler of the user's, logging shows the lines of those who wait.
    assert done.stderr.count("is being prepared by another process; waiting for it") == 3


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
