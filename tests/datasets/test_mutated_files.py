"""A thousand damaged and changed files of all families: converted right, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: many small files are made."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)


def run(folder: Path, count: int, first: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.datasets.mutated.running", str(folder)]
    done = subprocess.run(
        [*command, str(count), str(first)], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], count: int) -> None:
    """Every file has an outcome, neither of which is rare, and none is a fault."""
    assert found["faults"] == {}
    assert found["left"] == []
    assert found["converted"] + found["refused"] == count
    assert min(found["converted"], found["refused"]) > 0.3 * count


@pytest.mark.programs
@pytest.mark.timeout(1200)
def test_a_thousand_mutated_files_are_converted_right_or_refused_by_name(folder):
    """Bytes flipped, files cut, datasets dropped, reshaped, retyped, values and links changed.

    What is converted is compared with what h5py reads of the mutated file, bit for bit, in all
    columns; what is refused names the file and leaves nothing. Children do it, so that a crash or
    a hang of the HDF5 library would be seen.
    """
    check(run(folder, 1000, 0), 1000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_further_mutated_files_are_converted_or_refused(folder):
    check(run(folder, 6000, 1000), 6000)


SURVEY = """
import os, signal, sys, time
from tests.datasets.mutated.running import survey

def work(name, seed):
    if seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 4:
        time.sleep(60)
    if seed == 5:
        raise ValueError("wrong")
    return "converted"

found = survey([("a", seed) for seed in range(7)], work, 2.0)
assert list(found) == [str(("a", seed)) for seed in range(7)], found
said = [outcome[:10] for outcome in found.values()]
plain = "converted"
assert said == [plain, plain, "kills the ", plain, "hangs for ", "ValueError", plain], found
"""


def test_crash_and_hang_are_seen_and_the_other_files_still_done():
    command = [sys.executable, "-c", SURVEY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
