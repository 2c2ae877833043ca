"""Links to sources and data sets are followed; links inside, pipes and devices are refused."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replaykit.datasets import convert, push
from replaykit.datasets import open as open_dataset
from replaykit.datasets.column_files import EPISODE_DIRECTORY, GROUP_FILE
from replaykit.datasets.families import D4RL
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.inspection import opened, validate
from tests.datasets.trials import write_steps


@pytest.fixture
def data(target: Path, no_pipe_is_waited_for: None) -> Path:
    return target


def _inspect(path: Path) -> None:
    with opened(path):
        pass


def _validate(path: Path) -> None:
    wrong = [found.text for found in validate(path) if not found.ok]
    if wrong:
        raise RuntimeError("; ".join(wrong))


READERS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: open_dataset(path, 2),
    "open_published": open_published,
    "verify_published": verify_published,
    "inspect": _inspect,
    "validate": _validate,
    "push": lambda path: push(path, "lab/data", license="mit", token="any"),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "member",
    [
        "manifest.json", "meta.json", "next/meta.json", "action.memmap", "next/reward.memmap",
        "next", "episodes", "episodes/length.memmap", f"{EPISODE_DIRECTORY}/{GROUP_FILE}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_absolute", [True, False])
def test_links_are_refused_by_name(tmp_path, data, reader, member, is_absolute):
    there, outside = data / member, tmp_path / "outside"
    shutil.move(there, outside)  # the same content, so that only the link can tell
    there.symlink_to(outside if is_absolute else os.path.relpath(outside, there.parent))
    with pytest.raises(RuntimeError, match=f"{member} is a link, which is not followed"):
        READERS[reader](data)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("member", ["manifest.json", "action.memmap"])
def test_no_pipe_is_waited_for(data, reader, member):
    (data / member).unlink()
    os.mkfifo(data / member)
    with pytest.raises((RuntimeError, ValueError)):
        READERS[reader](data)


@pytest.fixture
def folder(tmp_path: Path, no_pipe_is_waited_for: None) -> Path:
    write_steps(tmp_path / "outside" / "b.h5", observations=2 * np.eye(4, 2))
    return write_steps(tmp_path / "sources" / "a.h5").parent


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
