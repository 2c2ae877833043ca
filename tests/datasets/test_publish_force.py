"""A data set is replaced as a whole or not at all, and its readers keep what they have."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets import publishing
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, remove_published, verify_published
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.filesystem import private_path
from tests.datasets.trials import convert, names, write_source


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(publishing, "exchange", lambda *_: False)
    return request.param


def test_forced_replacement_keeps_columns_mapped_by_readers(target, source, swap):
    """P6."""
    old = open_published(target)
    write_source(source, 9, seed=2)
    new = convert(target, source, force=True)
    assert new.rows == 10
    assert old.columns["next", "reward"].flatten().tolist() == [1.0, 2, 3, 4, 5001, 5002]
    assert names(target.parent) == [".data.lock", "data"]


def test_old_version_is_renamed_durably_before_its_files_are_removed(target, source, monkeypatch):
    """Otherwise a loss of power could leave a part of it, which `recover` would restore."""
    listings: list[list[str]] = []
    removed = []
    sync, remove = publishing.sync_directory, publishing.remove_tree

    def synced(directory: Path) -> None:
        sync(directory)
        if directory == target.parent:
            listings.append(names(directory))

    def removing(path: Path) -> None:
        if path.exists():
            removed.append(path.name)
            assert not [name for name in listings[-1] if name.startswith(".data.old-")]
        remove(path)

    monkeypatch.setattr(publishing, "exchange", lambda *_: False)
    monkeypatch.setattr(publishing, "sync_directory", synced)
    monkeypatch.setattr(publishing, "remove_tree", removing)
    write_source(source, 9, seed=2)
    convert(target, source, force=True)
    assert len(removed) == 1
    shutil.copytree(target, private_path(target, "old"))  # as a killed replacement leaves it
    assert open_published(target).rows == 10
    assert len(removed) == 2
    assert names(target.parent) == [".data.lock", "data"]


@pytest.mark.pitfall("DS4")
@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "fault", [CorpusError("bad file"), OSError(errno.EIO, "network"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("when", ["sources", "finish", "put"])
def test_force_that_fails_keeps_the_old_version(target, source, swap, monkeypatch, fault, when):
    def fail(*_: Any) -> Any:
        raise fault

    if when == "finish":
        monkeypatch.setattr("replaykit.datasets.engine.row_writer.RowWriter.finish", fail)
    elif when == "put":
        monkeypatch.setattr(publishing, "_put", fail)
    with pytest.raises(type(fault)):
        ensure_dataset(
            target,
            get_sources=fail if when == "sources" else lambda: Sources.local([source]),
            layout=ROBOHIVE,
            force=True,
        )
    assert open_published(target).rows == 6
    verify_published(target)
    assert names(target.parent) == [".data.lock", "data"]


def test_second_rename_that_fails_is_taken_back(target, source, monkeypatch):
    monkeypatch.setattr(publishing, "exchange", lambda *_: False)
    real = os.rename

    def rename(old: Any, new: Any) -> None:
        if Path(new) == target and ".data.tmp-" in str(old):
            raise OSError(errno.EIO, "broken")
        real(old, new)

    monkeypatch.setattr("os.rename", rename)
    with pytest.raises(OSError, match="broken"):
        convert(target, source, force=True)
    assert names(target.parent) == [".data.lock", "data"]
    assert open_published(target).rows == 6
    assert names(target.parent) == [".data.lock", "data"]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("file", ""),
        ("file", "precious.txt"),
        ("file", "next/notes/a.md"),
        ("file", "data-0123456789ab-00000.bin"),
        ("link", "observation.memmap"),
        ("link", "next"),
    ],
)
def test_foreign_files_are_never_replaced(tmp_path, source, kind, place):
    """D10: force replaces data sets, whole or damaged, and nothing of the user's."""
    target = tmp_path / "data"
    other = target / place
    other.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        other.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        mine = tmp_path / "elsewhere/mine.memmap"
        mine.write_text("mine")
        other.symlink_to(mine.parent)
        other = mine
    before = names(tmp_path)
    named = r"data holds .* no part of a data set" if place else r"data is not a directory"
    with pytest.raises(RuntimeError, match=named):
        convert(target, source, force=True)
    assert other.read_text() == "mine"
    assert set(names(tmp_path)) - set(before) <= {".data.lock"}


def test_user_file_in_a_data_set_prevents_replacement_and_removal(target, source):
    note = target / "episodes" / "notes.txt"
    note.write_text("mine")
    write_source(source, 9, seed=2)
    for change in (lambda: convert(target, source, force=True), lambda: remove_published(target)):
        with pytest.raises(RuntimeError, match=r"data holds episodes/notes\.txt"):
            change()
        assert note.read_text() == "mine"
        assert open_published(target).rows == 6
    note.unlink()
    assert convert(target, source, force=True).rows == 10
    remove_published(target)
    assert not target.exists()


def test_file_added_during_conversion_prevents_replacement(target, source, swap, monkeypatch):
    write_source(source, 9, seed=2)
    put = publishing._put

    def late(directory: Path, at: Path) -> None:
        (target / "notes.txt").write_text("mine")
        put(directory, at)

    monkeypatch.setattr(publishing, "_put", late)
    with pytest.raises(RuntimeError, match=r"data holds notes\.txt"):
        convert(target, source, force=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert open_published(target).rows == 6
