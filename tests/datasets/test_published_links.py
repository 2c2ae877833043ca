"""A data set is made of the files of its folder: links out of it, or in it, are not followed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replaykit.datasets import open as open_dataset
from replaykit.datasets import push
from replaykit.datasets.column_files import EPISODE_DIRECTORY, GROUP_FILE
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.inspection import opened, validate
from tests.datasets.trials import convert


@pytest.fixture
def data(tmp_path: Path, source: Path) -> Iterator[Path]:
    """A data set; waiting for a pipe is an error."""
    convert(tmp_path / "data", source)

    def waiting(*_: object) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, waiting)
    signal.alarm(60)
    yield tmp_path / "data"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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


def test_a_link_to_a_data_set_is_followed(tmp_path, data):
    (tmp_path / "newest").symlink_to(data)
    assert len(open_dataset(tmp_path / "newest", 2)) == 6
