"""Column files: their layout, their checksums, and syncs that begin early."""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import filesystem
from replaykit.datasets import column_files, publishing
from replaykit.datasets.column_files import ColumnSpec, create_columns
from replaykit.datasets.dataset_manifest import joined_crc32
from replaykit.datasets.engine import row_batches
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.publishing import verify_published
from replaykit.filesystem import EarlySync
from tests.datasets.converted import files_of
from tests.datasets.trials import convert, write_file

LEAVES: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]] = {
    ("observation",): ((3, 4), torch.float32),
    ("next", "observation"): ((3, 4), torch.float32),
    ("next", "deep", "flag"): ((1,), torch.bool),
    ("info", "rgb:left cam/50%"): ((), torch.uint8),
    ("info", 'a"b\\c*?<>|\t\x7f'): ((2,), torch.uint16),
    ("info", "größe"): ((), torch.int64),
    ("..", "."): ((), torch.float16),
    ("nothing",): ((0,), torch.complex64),
}


def _tree(rows: tuple[int, ...]) -> TensorDict:
    tree = TensorDict({}, batch_size=rows)
    for key, (shape, dtype) in LEAVES.items():
        tree.set(key, torch.zeros((*rows, *shape), dtype=dtype))
    return tree


def _content(folder: Path) -> dict[str, Any]:
    """Bytes of the columns and what is said of them, in order."""
    return {
        name: list(json.loads(data).items()) if name.endswith(".json") else data
        for name, data in files_of(folder).items()
    }


@pytest.mark.parametrize("rows", [(7,), (2, 5)])
def test_columns_have_the_layout_of_tensordict(tmp_path, rows):
    specs = [ColumnSpec(key, shape, dtype) for key, (shape, dtype) in LEAVES.items()]
    columns = create_columns(tmp_path / "ours", specs, rows)
    _tree(rows).memmap_like(tmp_path / "theirs")
    assert _content(tmp_path / "ours") == _content(tmp_path / "theirs")
    column = columns["next", "observation"]
    values = np.arange(column.nbytes // 4, dtype=np.float32).reshape(-1, 3, 4)
    column.write(0, values)
    loaded: Any = TensorDict.load_memmap(tmp_path / "ours")
    assert loaded.batch_size == torch.Size(rows)
    assert {key: value.dtype for key, value in loaded.items(True, True)} == {
        key if len(key) > 1 else key[0]: dtype for key, (_, dtype) in LEAVES.items()
    }
    assert loaded["next", "observation"].numpy().tobytes() == values.tobytes()


def test_keys_that_map_to_the_same_file_are_refused(tmp_path, monkeypatch):
    # As on a file system that does not tell small letters from large ones.
    monkeypatch.setattr("replaykit.datasets.column_files._file_name", str.lower)
    specs = [ColumnSpec((name,), (), torch.uint8) for name in ("Arm", "arm")]
    with pytest.raises(
        ValueError, match="'Arm' and 'arm' have the same file name on this file system"
    ):
        create_columns(tmp_path / "data", specs, (3,))


# -- checksums and syncs ---------------------------------------------------------------------------


LONG = np.random.default_rng(0).bytes((5 << 20) + 12345)


@given(st.binary(max_size=3000), st.binary(max_size=3000))
@example(b"abc", LONG[: 1 << 20])
@example(b"abc", LONG)
def test_checksum_of_two_parts(first, second):
    found = joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@pytest.mark.parametrize("block_bytes", [1, 300, 5000, 1 << 20])
def test_columns_of_one_leaf_have_the_right_checksums(tmp_path, monkeypatch, block_bytes):
    """All of their bytes, whatever the blocks: as a reading of the files finds them."""
    monkeypatch.setattr(row_batches, "_TOGETHER_BYTES", 0)  # each trial by itself
    path = write_file(tmp_path / "a.h5", 40, 2, 3, 17)
    convert(tmp_path / "data", path, options=ConvertOptions(block_bytes=block_bytes))
    verify_published(tmp_path / "data")


def test_long_files_are_synced_while_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_EARLY_BYTES", 100)
    synced = []
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (synced.append(fd), real(fd)))
    (tmp_path / "x").write_bytes(bytes(150))
    with EarlySync() as early:
        early.wrote(tmp_path / "x", 60)
        assert synced == []
        early.wrote(tmp_path / "x", 60)
    assert len(synced) == 1


def test_busy_disk_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_EARLY_BYTES", 1)
    release, begun = threading.Event(), []
    monkeypatch.setattr("os.fsync", lambda fd: (begun.append(fd), release.wait(20)))
    (tmp_path / "x").touch()
    with EarlySync() as early:
        for _ in range(100):
            early.wrote(tmp_path / "x", 10)
        release.set()
    assert 1 <= len(begun) <= 2


def test_failed_early_sync_is_an_error_of_the_conversion(tmp_path, monkeypatch):
    """The system tells it once: it must not get lost."""
    monkeypatch.setattr(column_files, "_SYNC_BYTES", 1)
    monkeypatch.setattr(publishing, "sync_tree", lambda directory: pytest.fail("it was too late"))
    real, failed = os.fsync, []

    def fail_once(descriptor: int) -> Any:
        if threading.current_thread() is not threading.main_thread() and not failed:
            failed.append(True)
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor)

    path = write_file(tmp_path / "a.h5", 9)
    monkeypatch.setattr("os.fsync", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        convert(tmp_path / "data", path)
    assert not (tmp_path / "data").exists()
