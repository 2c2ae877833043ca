"""The engine of the conversion: its options, its checks, and what it does not ask for."""

from __future__ import annotations

import os
import sys

import pytest

from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.row_writer import RowWriter
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import make_trial
from tests.datasets.trials import convert, write


def test_progress_bar_is_shown_on_request_only(tmp_path, capfd):
    path = write(tmp_path / "a.h5", make_trial(4))
    convert(tmp_path / "quiet", path)
    assert capfd.readouterr().err == ""
    convert(tmp_path / "told", path, progress=True)
    assert "converting: 100%" in capfd.readouterr().err


def test_source_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(4))
    original = RowWriter.finish

    def touch(self):
        with path.open("ab") as file:
            file.write(b"x")
        original(self)

    monkeypatch.setattr(RowWriter, "finish", touch)
    with pytest.raises(CorpusError, match="changed while it was converted"):
        convert(tmp_path / "data", path)
    assert not (tmp_path / "data").exists()


def test_stored_value_that_differs_is_found(tmp_path, monkeypatch):
    """V60: rows are read back; here the disk returns another byte."""
    path = write(tmp_path / "a.h5", make_trial(4))
    real, into = os.pread, os.preadv

    def other(descriptor: int, buffers: list[memoryview], at: int) -> int:
        count = into(descriptor, buffers, at)
        buffers[0][0] ^= 1
        return count

    monkeypatch.setattr("os.pread", lambda *args: bytes(b ^ 1 for b in real(*args)))
    monkeypatch.setattr("os.preadv", other)
    with pytest.raises(OSError, match=r"not stored as it was written \[V60\]"):
        convert(tmp_path / "data", path)
    assert not (tmp_path / "data").exists()


def test_opening_needs_no_h5py_and_no_source(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(4))
    convert(tmp_path / "data", path)
    path.unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)

    def fail() -> Sources:
        raise AssertionError("sources were asked for")

    assert ensure_dataset(tmp_path / "data", get_sources=fail, layout=ROBOHIVE).rows == 3
    assert open_published(tmp_path / "data").rows == 3


@pytest.mark.parametrize("bad", [0, -1])
def test_block_of_no_bytes_is_refused(bad):
    with pytest.raises(ValueError, match=f"block_bytes >= 1, got {bad}"):
        ConvertOptions(block_bytes=bad)
