"""Files of memory-mapped rows: who removes them, and when; copies have their own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaykit import LazyMemmapStorage, ReplayBuffer


def _private(folder: Path) -> list[Path]:
    return sorted(folder.glob("replaykit-*"))


def test_private_folder_is_removed_with_its_object(temporary: Path, make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(5))
    assert _private(temporary) == []
    rb.extend(make_rows(0, 3))
    (folder,) = _private(temporary)
    view = rb[0:2]
    del rb
    gc.collect()
    assert not folder.exists()
    assert view["id"].tolist() == [0, 1]  # what the user still holds stays readable


def test_a_folder_of_the_user_stays(tmp_path: Path, make_rows: Any, files_in: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    rb.extend(make_rows(0, 3))
    del rb
    gc.collect()
    assert files_in(tmp_path) == ["records.memmap"]


@pytest.mark.pitfall("CK13")
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("private", [True, False])
def test_copy_uses_separate_files(
    temporary: Path, make_rows: Any, way: str, private: bool, files_in: Any
) -> None:
    """CK13: collecting a copy removes the copy's files, not those of the original."""
    given = None if private else temporary / "given"
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=given))
    rb.extend(make_rows(0, 7))
    mine = _private(temporary)
    before = files_in(temporary)
    twin = pickle.loads(pickle.dumps(rb)) if way == "pickle" else copy.deepcopy(rb)
    theirs = [folder for folder in _private(temporary) if folder not in mine]
    assert len(theirs) == 1
    assert twin[:]["id"].tolist() == rb[:]["id"].tolist() == [5, 6, 2, 3, 4]
    assert twin.storage.ledger.state()["cursor"] == 2
    twin.extend(make_rows(50, 5))
    assert rb[:]["id"].tolist() == [5, 6, 2, 3, 4]
    rb[0] = make_rows(9, 1)[0]
    assert twin[:]["id"].tolist() == [53, 54, 50, 51, 52]
    del twin
    gc.collect()
    assert not theirs[0].exists()
    assert files_in(temporary) == before
    assert rb[:]["id"].tolist() == [9, 6, 2, 3, 4]


def test_an_empty_storage_can_be_copied(temporary: Path) -> None:
    twin = pickle.loads(pickle.dumps(LazyMemmapStorage(5)))
    assert (len(twin), twin.schema, twin.max_size) == (0, None, 5)
    assert _private(temporary) == []


_LIVES = """
import os, signal, sys, time, torch
from pathlib import Path
from replaykit import LazyMemmapStorage, ReplayBuffer
home = Path(os.environ["TMPDIR"])
def new():
    rb = ReplayBuffer(storage=LazyMemmapStorage(5))
    rb.extend(torch.arange(3))
    return rb
rb = new()
(folder,) = home.glob("replaykit-*")
def readable():
    return folder.exists() and (folder / "data.memmap").exists() and rb[:].tolist() == [0, 1, 2]
def child(what):
    pid = os.fork()
    if pid == 0:
        what()
    return os.waitpid(pid, 0)[1]
def leaves():        # a child that ends as programs do: exit handlers run, objects die
    global rb
    rb = None
    sys.exit(0)
def makes():
    global other
    other = new()
    sys.exit(0)
def killed():
    global other
    other = new()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert child(leaves) == 0 and readable(), "normal exit of a child, death of the object in it"
assert child(makes) == 0 and readable(), "a child that makes its own"
assert list(home.glob("replaykit-*")) == [folder], "what a child made, it removes"
assert child(killed) == signal.SIGTERM and readable(), "a child that is killed"
print(folder.name)
"""


@pytest.mark.pitfall("CK13")
def test_a_private_folder_is_removed_by_its_maker_at_a_normal_exit_only(
    tmp_path: Path, run_python: Any
) -> None:
    """CK13: not by a forked child, and not by a signal: no handler deletes live data."""
    done = run_python(_LIVES, env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = _private(tmp_path)  # that of the child that was killed
    assert left.name != done.stdout.strip()
    assert np.fromfile(left / "data.memmap", dtype=np.int64)[:3].tolist() == [0, 1, 2]
