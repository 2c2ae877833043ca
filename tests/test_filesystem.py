"""Making a directory durable: everything below it is synced, and what fails is told."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from replaykit.filesystem import NoRoomError, sync_tree
from tests.limits import limited
from tests.support.refusals import refuses

FILES = 150


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory of more files than are open at once, in two directories."""
    for number in range(FILES):
        directory = tmp_path / "data" / str(number % 2)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / str(number)).write_bytes(b"x")
    return tmp_path / "data"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the files that are open")
def test_every_file_is_synced_once_where_few_more_may_be_open(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 20):
        sync_tree(tree)
    assert sorted(synced) == sorted(path.stat().st_ino for path in [tree, *tree.rglob("*")])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failing_sync_of_a_file_raises_its_error(
    code: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (tree / "1" / "77").stat().st_ino

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        sync_tree(tree)
    assert caught.value.errno == code
    if code == errno.ENOSPC:
        assert isinstance(caught.value, NoRoomError)
        assert str(tree / "1" / "77") in str(caught.value)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_sync_of_a_directory_may_be_impossible_and_must_not_fail(
    code: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL: the file system cannot sync directories."""

    def fail(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), (tree / "0").stat()):
            raise OSError(code, "broken")

    monkeypatch.setattr(os, "fsync", fail)
    if code == errno.EINVAL:
        sync_tree(tree)
    else:
        refuses(OSError, "broken", sync_tree, tree)
