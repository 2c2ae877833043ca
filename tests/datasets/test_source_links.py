"""Which paths in a folder of sources are read: links to files are, pipes and sockets are not."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.datasets import convert
from replaykit.datasets.families import D4RL
from replaykit.inspection import opened, validate


def _write(path: Path, scale: float = 1.0) -> None:
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = scale * np.eye(4), np.zeros((4, 1))
        file["rewards"], file["terminals"] = np.ones(4), np.arange(4) == 3


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of one source; waiting for a pipe is an error."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "outside").mkdir()
    _write(tmp_path / "sources" / "a.h5")
    _write(tmp_path / "outside" / "b.h5", 2.0)

    def waiting(*_: object) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, waiting)
    signal.alarm(60)
    yield tmp_path / "sources"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_links_to_source_files_are_followed_and_links_to_folders_are_not(folder, tmp_path):
    (folder / "b.h5").symlink_to(tmp_path / "outside" / "b.h5")
    (folder / "more").symlink_to(tmp_path / "outside")
    assert len(convert(folder, D4RL, tmp_path / "data")) == 8
    with opened(folder) as (facts, _):
        assert facts.rows == 8


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_named", [False, True])
def test_pipes_and_devices_are_refused_by_name(folder, tmp_path, kind, is_named, monkeypatch):
    monkeypatch.chdir(folder)  # names of sockets are short
    KINDS[kind](Path("p.h5"))
    given = folder / "p.h5" if is_named else folder
    calls: list[Callable[[], object]] = [
        lambda: convert(given, D4RL, tmp_path / "data"),
        lambda: validate(given),
        lambda: opened(given).__enter__(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"p\.h5: expected a file, got a pipe, a device"):
            call()
    assert not (tmp_path / "data").exists()
