"""Disks that are full: said with the file and the bytes, and nothing is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_columns import DedupColumns
from tests.limits import limited
from tests.storages.test_recoverable_faults import full
from tests.support.refusals import refuses


@pytest.mark.parametrize("scratch", ["new/folder", "mine", None])
def test_full_disk_error_names_the_file_and_leaves_nothing(
    temporary: Path, scratch: str | None
) -> None:
    (temporary / "mine" / "next").mkdir(parents=True)
    (temporary / "mine" / "note").write_text("kept")
    before = sorted(temporary.rglob("*"))
    rows = TensorDict({"a": torch.zeros(2), "info": {"deep": {"b": torch.zeros(2, 3000)}}}, [2])
    folder = None if scratch is None else temporary / scratch
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
    for _ in range(2):
        with (
            pytest.raises(
                OSError, match=r"cannot reserve 1\.1 MiB .* a smaller max_size"
            ) as caught,
            limited(resource.RLIMIT_FSIZE, 4096),
        ):
            rb.extend(rows)
        assert Path(caught.value.filename).name == "b.memmap"
        assert caught.value.errno == errno.EFBIG
        assert sorted(temporary.rglob("*")) == before
        assert (len(rb), rb.storage.schema, rb.write_count) == (0, None, 0)
    assert rb.extend(rows).tolist() == [0, 1]


@pytest.mark.pitfall("WR19")
def test_an_over_large_request_is_refused_before_a_file_is_made(
    tmp_path: Path, temporary: Path, make_rows: Any
) -> None:
    """WR19: the message names the bytes that are needed and those that are free."""
    for scratch in (tmp_path / "new", None):
        rb = ReplayBuffer(storage=LazyMemmapStorage(2**50, scratch_dir=scratch))
        with pytest.raises(OSError, match=r"the rows need 32.0 PiB, .* are free") as caught:
            rb.extend(make_rows(0, 1))
        assert caught.value.errno == errno.ENOSPC
        assert rb.storage.schema is None
    assert list(tmp_path.iterdir()) == []


def test_the_space_of_files_that_are_reused_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Usage = namedtuple("Usage", ["total", "used", "free"])
    (tmp_path / "data.memmap").write_bytes(b"x" * 8 * 4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6, 0))
    rb = ReplayBuffer(storage=LazyMemmapStorage(4096, scratch_dir=tmp_path, existsok=True))
    rb.extend(torch.zeros(3, dtype=torch.int64))
    assert len(rb) == 3
    larger = ReplayBuffer(storage=LazyMemmapStorage(8192, scratch_dir=tmp_path, existsok=True))
    with pytest.raises(OSError, match=r"need 64\.0 KiB, 32\.0 KiB are free"):
        larger.extend(torch.zeros(3, dtype=torch.int64))


def test_file_systems_that_cannot_reserve_blocks_are_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    rb.extend(torch.arange(6))
    assert rb[:].tolist() == [4, 5, 2, 3]
    monkeypatch.delattr(os, "posix_fallocate")
    other = ReplayBuffer(storage=LazyMemmapStorage(4))
    other.extend(torch.arange(2))
    assert other[:].tolist() == [0, 1]


@pytest.mark.parametrize("dedup", [False, ["x"]])
def test_a_failed_load_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dedup: Any
) -> None:
    def rows(key: str) -> TensorDict:
        x = torch.arange(6)
        return TensorDict({key: torch.zeros(6, 3000), "x": x, "next": {"x": x + 2}}, [6])

    how: dict[str, Any] = {"dedup_next": dedup, "on_mismatch": "dense"}
    other = ReplayBuffer(storage=LazyTensorStorage(9, **how))
    other.extend(rows("wide"))
    other.dumps(tmp_path / "saved")
    folder = tmp_path / "rows"
    rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=folder, **how))
    with monkeypatch.context() as patch:
        patch.setattr(DedupColumns if dedup else Columns, "fill", full)
        refuses(OSError, "space", rb.loads, tmp_path / "saved")
    assert (len(rb), list(folder.iterdir())) == (0, [])
    rb.extend(rows("other"))
    assert rb["x"].tolist() == list(range(6))


@pytest.mark.parametrize("resizes", [False, True])
def test_values_that_another_storage_keeps_in_the_folder_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resizes: bool
) -> None:
    x, folder = torch.arange(6.0), tmp_path / "rows"
    saved = ReplayBuffer(storage=LazyTensorStorage(9))
    saved.extend(x)
    saved.dumps(tmp_path / "saved")
    once = LazyMemmapStorage(9, scratch_dir=folder, dedup_next=["x"], on_mismatch="dense")
    ReplayBuffer(storage=once).extend(TensorDict({"x": x, "next": {"x": x + 2}}, [6]))
    before = {file for file in folder.rglob("*") if file.is_file()}
    rb = ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=folder))
    if resizes:
        rb.extend(x)
        rb.resize(20)
    else:
        monkeypatch.setattr(Columns, "fill", full)
        refuses(OSError, "space", rb.loads, tmp_path / "saved")
    made = {folder / "data.memmap"} if resizes else set()
    assert {file for file in folder.rglob("*") if file.is_file()} - made == before
