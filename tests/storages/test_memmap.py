"""Rows in memory-mapped files: names, content, reuse, and what memory they take."""

from __future__ import annotations

import gc
import re
import unicodedata
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, ReplayBuffer


def test_wide_keys_get_separate_files_and_small_keys_share_one(
    tmp_path: Path, make_rows: Any, files_in: Any
) -> None:
    folder = tmp_path / "with" / "parents"
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    assert not folder.exists()
    image = torch.arange(7)[:, None, None].expand(7, 64, 64).to(torch.uint8)
    rb.extend(make_rows(0, 7).set(("next", "pixels"), image))
    assert files_in(folder) == ["next/pixels.memmap", "records.memmap"]
    pixels = np.fromfile(folder / "next" / "pixels.memmap", dtype=np.uint8).reshape(5, 64, 64)
    assert pixels[:, 3, 7].tolist() == [5, 6, 2, 3, 4]
    # The widest values lie first, those of one dtype beside each other, in 26 bytes of 32.
    record = np.dtype(
        {
            "names": ["id", "observation", "reward", "action", "done"],
            "formats": ["<i8", ("<f4", 3), "<f4", "u1", "?"],
            "offsets": [0, 8, 20, 24, 25],
            "itemsize": 32,
        }
    )
    records = np.fromfile(folder / "records.memmap", dtype=record)
    assert records["id"].tolist() == [5, 6, 2, 3, 4]
    for name in ("observation", "action"):
        assert np.array_equal(records[name], rb[:][name].numpy())
    for name in ("reward", "done"):
        assert np.array_equal(records[name], rb[:]["next", name][:, 0].numpy())
    # Blocks are reserved: a disk that is too small is found at once.
    assert (folder / "records.memmap").stat().st_blocks * 512 >= 5 * 32


Odd = namedtuple("Odd", ["left", "right"])


ODD_KEYS: list[Any] = [
    "a.b",
    "a/b",
    ("a", "b"),
    "ä",
    "a\N{COMBINING DIAERESIS}",
    "x" * 200,
    "X" * 200,
    "x" * 199 + "y",
    "ä" * 200,
    "数" * 200,
    "\N{MUSICAL SYMBOL G CLEF}" * 100,
    "Case",
    "case",
    "CASE",
    ("Deep", "x"),
    ("deep", "x"),
    "b.memmap",
    "b",
    ("c.memmap", "x"),
    "c",
    "..",
    ".",
    ".hidden",
    "%2E",
    "",
    " ",
    "con:",
    "new\nline",
    "nul\0",
    "quote'\"",
    "~",
    "-rf",
    "data",
    "records",
    "RECORDS",
]


@pytest.mark.pitfall("CK12")
def test_every_key_gets_a_separate_file(tmp_path: Path, files_in: Any) -> None:
    """CK12: no key breaks a file name, leaves the folder, or meets another one's file."""
    paths = [key if isinstance(key, tuple) else (key,) for key in ODD_KEYS]
    leaves: dict[str, Any] = {}
    for number, path in enumerate(paths):
        node = leaves
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = torch.full((3, 64), number)  # wide: 512 bytes
    leaves["small"], leaves["smaller"] = torch.zeros(3), torch.ones(3)
    folder = tmp_path / "inside" / "scratch"
    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=folder))
    rb.extend(leaves)
    rb.extend(leaves)
    files = files_in(folder)
    # On some file systems, names that differ only in case or in Unicode form are one.
    assert len({unicodedata.normalize("NFC", name).casefold() for name in files}) == len(paths) + 1
    assert all(name.endswith(".memmap") for name in files)
    assert files_in(tmp_path) == [f"inside/scratch/{name}" for name in files]
    for number, path in enumerate(paths):
        assert rb.storage.column(path)[:, 5].tolist() == [number] * 4, path
    assert rb.storage.column("smaller").tolist() == [1.0] * 4


def test_number_keys_and_text_keys_get_different_files(tmp_path: Path, files_in: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(2, scratch_dir=tmp_path))
    rb.extend({"0": torch.zeros(2, 128), 0: torch.ones(2, 128)})
    assert len(files_in(tmp_path)) == 2
    assert [column[:, 9].tolist() for column in rb[:].values()] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (torch.zeros(2, 3), ["data.memmap"]),
        ((torch.zeros(2, 128), (torch.ones(2),)), ["0.memmap", "1/0.memmap"]),
        (Odd(torch.zeros(2), {"b": torch.ones(2, 128)}), ["0.memmap", "1/b.memmap"]),
        ((torch.zeros(2), (torch.ones(2),)), ["records.memmap"]),
    ],
)
def test_other_records_are_stored_in_files_too(
    tmp_path: Path, rows: Any, names: list[str], files_in: Any
) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(2, scratch_dir=tmp_path))
    rb.extend(rows)
    assert files_in(tmp_path) == names


def test_lanes_lie_in_files_as_in_memory(tmp_path: Path, make_lanes: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path, ndim=2))
    rb.extend(make_lanes(0, 5))
    records = np.fromfile(tmp_path / "records.memmap", dtype=np.int64).reshape(4, 2, 2)
    ids = records[:, :, 0]  # beside a float and a flag, by eights
    assert ids.tolist() == [[4, 104], [1, 101], [2, 102], [3, 103]]
    assert isinstance(rb.storage[:], TensorDict)


@pytest.mark.pitfall("RD13")
def test_existing_files_are_refused_and_untouched(
    tmp_path: Path, make_rows: Any, files_in: Any
) -> None:
    """RD13: ``existsok=False`` is the one that refuses."""
    (tmp_path / "records.memmap").write_bytes(b"precious")
    (tmp_path / "other").write_text("kept")
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"records.memmap exists.*existsok=True"):
            rb.extend(make_rows(0, 3))
    assert files_in(tmp_path) == ["other", "records.memmap"]
    assert (tmp_path / "records.memmap").read_bytes() == b"precious"
    assert len(rb) == 0
    assert rb.storage.schema is None


@pytest.mark.pitfall("RD13")
@pytest.mark.parametrize("old_size", [3, 10_000])
def test_existing_files_are_reused_as_space_only(
    tmp_path: Path, make_rows: Any, old_size: int
) -> None:
    """RD13: ``existsok=True``: the storage starts empty, old bytes are never visible."""
    (tmp_path / "records.memmap").write_bytes(b"\x07" * old_size)
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    assert len(rb) == 0
    rb.extend(make_rows(0, 2))
    assert rb[:]["id"].tolist() == [0, 1]
    assert (tmp_path / "records.memmap").stat().st_size == 160
    with pytest.raises(IndexError):
        rb[2]
    again = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    assert len(again) == 0
    again.extend(make_rows(5, 1))
    assert again[:]["id"].tolist() == [5]


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("cuda", 0)])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="expected device cpu for memory-mapped files, got"):
        LazyMemmapStorage(5, device=device)


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


@pytest.mark.pitfall("SL11")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_rows_on_disk_take_no_anonymous_memory(tmp_path: Path) -> None:
    """SL11: 160 MiB written into files of 96 MiB; what the process holds itself stays."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(96, scratch_dir=tmp_path), batch_size=4)
    block = torch.zeros(8, 2**20, dtype=torch.uint8)
    rb.extend(block)
    rb.sample()
    gc.collect()
    before = _anonymous_mib()
    for _ in range(20):
        rb.extend(block)
        rb.sample()
    assert len(rb) == 96
    assert _anonymous_mib() - before < 16
