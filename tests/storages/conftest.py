"""Files and folders of the storages' tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], list[str]]:
    """``files_in(folder)``: the names of all files below it."""
    return lambda folder: sorted(
        str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()
    )


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private folders are made during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
