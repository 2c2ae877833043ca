"""Rows that format version 2 has stored once, in checkpoints and recoverable folders."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests.checkpoint.make_dedup import KINDS, SLOTS, dense, rows

FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "dedup-2"


def _storage(kind: str, make: Any = LazyTensorStorage, slots: int = SLOTS, **options: Any) -> Any:
    options = {"dedup_next": True, **KINDS[kind], **options}
    return make(slots * (2 if kind == "lanes" else 1), **options)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("slots", [SLOTS, SLOTS + 9])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_version_2_are_read(
    kind: str, slots: int, mmap: bool, same_rows: Any, tmp_path: Path
) -> None:
    expected = dense(kind)
    if slots > SLOTS:  # in another capacity, rows are in the order of their writes
        expected.dumps(tmp_path / "dense")
        expected = ReplayBuffer(storage=_storage(kind, slots=slots, dedup_next=False))
        expected.loads(tmp_path / "dense")
    rb = ReplayBuffer(storage=_storage(kind, slots=slots))
    if mmap and slots > SLOTS:
        with pytest.raises(ValueError, match="the saved capacity"):
            rb.loads(FIXTURES / kind, mmap=True)
        return
    rb.loads(FIXTURES / kind, mmap=mmap)
    assert same_rows(rb[:], expected[:])
    for buffer in (rb, expected):
        buffer.extend(rows(kind, 28, 7))
    assert same_rows(rb[:], expected[:])
    rb.dumps(tmp_path / "again")
    again = ReplayBuffer(storage=_storage(kind, slots=slots, dedup_next=False))
    again.loads(tmp_path / "again")
    assert same_rows(again[:], expected[:])


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_version_2_are_recovered(kind: str, same_rows: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(FIXTURES / f"recovered-{kind}.zip") as archive:
        archive.extractall(tmp_path / "rows")
    expected = dense(kind)
    manifest = tmp_path / "rows" / "%recovery" / "manifest.json"
    before = manifest.read_bytes()
    for turn in range(3):
        storage = _storage(kind, LazyMemmapStorage, scratch_dir=tmp_path / "rows", recover=True)
        rb = ReplayBuffer(storage=storage)
        assert same_rows(rb[:], expected[:])
        assert json.loads(manifest.read_bytes())["format_version"] == 4
        assert not list(manifest.parent.glob("table-[45]-*"))
        if turn == 0:
            # A conversion that was cut off before the manifest was replaced is made again.
            del rb, storage
            shutil.rmtree(tmp_path / "rows")
            with zipfile.ZipFile(FIXTURES / f"recovered-{kind}.zip") as archive:
                archive.extractall(tmp_path / "rows")
            assert manifest.read_bytes() == before
            (manifest.parent / "table-6-8.bin").write_bytes(b"\xff" * 4096)
            continue
        for buffer in (rb, expected):
            buffer.extend(rows(kind, 28 + 7 * turn, 7))
        assert same_rows(rb[:], expected[:])
        del rb, storage


def test_a_checkpoint_of_version_2_still_shares_observations(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=_storage("ring"))
    rb.loads(FIXTURES / "ring", mmap=True)
    plain = ReplayBuffer(storage=_storage("ring"))
    plain.loads(FIXTURES / "ring")
    assert 0 < rb.storage.overflow_rows == plain.storage.overflow_rows < SLOTS // 2
    assert torch.equal(rb["next", "state"], plain["next", "state"])
