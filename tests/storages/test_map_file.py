"""Mapping one file: shared, private, read-only, too short, empty."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaykit.storages import row_files as module
from replaykit.storages.row_files import map_file


def test_a_file_can_be_mapped_so_that_edits_stay_in_the_process(tmp_path: Path) -> None:
    file = tmp_path / "x"
    np.arange(6, dtype=np.int16).tofile(file)
    shared = map_file(file, torch.Size([3, 2]), torch.int16)
    private = map_file(file, torch.Size([3, 2]), torch.int16, private=True)
    assert shared.tolist() == private.tolist() == [[0, 1], [2, 3], [4, 5]]
    private[0] = 9
    shared[2] = 7
    assert np.fromfile(file, dtype=np.int16).tolist() == [0, 1, 2, 3, 7, 7]
    assert private[0].tolist() == [9, 9]


def test_a_file_that_is_read_only_can_be_mapped_privately(tmp_path: Path) -> None:
    file = tmp_path / "x"
    np.arange(3).tofile(file)
    file.chmod(0o400)
    opened: list[str] = []
    whole = open

    def noting(path: Any, mode: str = "r", *rest: Any) -> Any:
        opened.append(mode)
        return whole(path, mode, *rest)

    # Root may write to anything, so that the mode is looked at instead.
    module.open = noting  # type: ignore[attr-defined]
    try:
        mapped = map_file(file, torch.Size([3]), torch.int64, private=True)
    finally:
        del module.open  # type: ignore[attr-defined]
    mapped += 1
    assert opened == ["rb"]
    assert mapped.tolist() == [1, 2, 3]


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234567")
    message = re.escape(f"expected 8 bytes in {tmp_path / 'x'}, got 7")
    with pytest.raises(ValueError, match=message):
        map_file(tmp_path / "x", torch.Size([2]), torch.float32)
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "y", torch.Size([2]), torch.float32)


def test_nothing_to_map_needs_no_bytes(tmp_path: Path) -> None:
    mapped = map_file(tmp_path / "x", torch.Size([3, 0]), torch.float32, create=True)
    assert mapped.shape == (3, 0)
    assert (tmp_path / "x").stat().st_size == 0
