"""Rows in memory-mapped files: names, reuse, removal, full disks, and what memory they take."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import pickle
import re
import resource
import shutil
import tempfile
import unicodedata
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, ReplayBuffer
from replaykit.storages import memmap as module
from replaykit.storages.memmap import map_file


def _files(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def _private(folder: Path) -> list[Path]:
    return sorted(folder.glob("replaykit-*"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private folders are made during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# -- files ----------------------------------------------------------------------------------------


def test_files_are_named_after_keys_and_hold_the_raw_values(tmp_path: Path, make_rows: Any) -> None:
    folder = tmp_path / "with" / "parents"
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    assert not folder.exists()
    rb.extend(make_rows(0, 7))
    assert _files(folder) == [
        "action.memmap",
        "id.memmap",
        "next/done.memmap",
        "next/reward.memmap",
        "observation.memmap",
    ]
    ids = np.fromfile(folder / "id.memmap", dtype=np.int64)
    assert ids.tolist() == [5, 6, 2, 3, 4]
    observation = np.fromfile(folder / "observation.memmap", dtype=np.float32).reshape(5, 3)
    assert np.array_equal(observation, rb[:]["observation"].numpy())
    # Blocks are reserved: a disk that is too small is found at once.
    assert (folder / "id.memmap").stat().st_blocks * 512 >= 40


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
]


@pytest.mark.pitfall("CK12")
def test_any_key_gets_a_file_of_its_own(tmp_path: Path) -> None:
    """CK12: no key breaks a file name, leaves the folder, or meets another one's file."""
    paths = [key if isinstance(key, tuple) else (key,) for key in ODD_KEYS]
    leaves: dict[str, Any] = {}
    for number, path in enumerate(paths):
        node = leaves
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = torch.full((3,), number)
    folder = tmp_path / "inside" / "scratch"
    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=folder))
    rb.extend(leaves)
    rb.extend(leaves)
    files = _files(folder)
    # On some file systems, names that differ only in case or in Unicode form are one.
    assert len({unicodedata.normalize("NFC", name).casefold() for name in files}) == len(paths)
    assert all(name.endswith(".memmap") for name in files)
    assert _files(tmp_path) == [f"inside/scratch/{name}" for name in files]
    for number, path in enumerate(paths):
        assert rb.storage.column(path).tolist() == [number] * 4, path


def test_keys_that_are_numbers_do_not_meet_those_that_are_text(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(2, scratch_dir=tmp_path))
    rb.extend({"0": torch.zeros(2), 0: torch.ones(2)})
    assert len(_files(tmp_path)) == 2
    assert [column.tolist() for column in rb[:].values()] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (torch.zeros(2, 3), ["data.memmap"]),
        ((torch.zeros(2), (torch.ones(2),)), ["0.memmap", "1/0.memmap"]),
        (Odd(torch.zeros(2), {"b": torch.ones(2)}), ["0.memmap", "1/b.memmap"]),
    ],
)
def test_other_records_are_stored_in_files_too(tmp_path: Path, rows: Any, names: list[str]) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(2, scratch_dir=tmp_path))
    rb.extend(rows)
    assert _files(tmp_path) == names


# -- existing files -------------------------------------------------------------------------------


@pytest.mark.pitfall("RD13")
def test_existing_files_are_refused_and_untouched(tmp_path: Path, make_rows: Any) -> None:
    """RD13: ``existsok=False`` is the one that refuses."""
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "done.memmap").write_bytes(b"precious")
    (tmp_path / "other").write_text("kept")
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"next/done.memmap exists.*existsok=True"):
            rb.extend(make_rows(0, 3))
    assert _files(tmp_path) == ["next/done.memmap", "other"]
    assert (tmp_path / "next" / "done.memmap").read_bytes() == b"precious"
    assert len(rb) == 0
    assert rb.storage.schema is None


@pytest.mark.pitfall("RD13")
@pytest.mark.parametrize("old_size", [3, 10_000])
def test_existing_files_are_reused_as_space_only(
    tmp_path: Path, make_rows: Any, old_size: int
) -> None:
    """RD13: ``existsok=True``: the storage starts empty, old bytes are never visible."""
    (tmp_path / "id.memmap").write_bytes(b"\x07" * old_size)
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    assert len(rb) == 0
    rb.extend(make_rows(0, 2))
    assert rb[:]["id"].tolist() == [0, 1]
    assert (tmp_path / "id.memmap").stat().st_size == 40
    with pytest.raises(IndexError):
        rb[2]
    again = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    assert len(again) == 0
    again.extend(make_rows(5, 1))
    assert again[:]["id"].tolist() == [5]


def test_a_second_storage_does_not_take_the_files_of_the_first(
    tmp_path: Path, make_rows: Any
) -> None:
    first = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    first.extend(make_rows(0, 5))
    second = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    with pytest.raises(RuntimeError, match="exists"):
        second.extend(make_rows(5, 5))
    assert first[:]["id"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("cuda", 0)])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="expected device cpu for memory-mapped files, got"):
        LazyMemmapStorage(5, device=device)


# -- removal --------------------------------------------------------------------------------------


def test_a_private_folder_goes_with_its_object(temporary: Path, make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(5))
    assert _private(temporary) == []
    rb.extend(make_rows(0, 3))
    (folder,) = _private(temporary)
    view = rb[0:2]
    del rb
    gc.collect()
    assert not folder.exists()
    assert view["id"].tolist() == [0, 1]  # what the user still holds stays readable


def test_a_folder_of_the_user_stays(tmp_path: Path, make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    rb.extend(make_rows(0, 3))
    del rb
    gc.collect()
    assert len(_files(tmp_path)) == 5


@pytest.mark.pitfall("CK13")
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("private", [True, False])
def test_a_copy_has_files_of_its_own(
    temporary: Path, make_rows: Any, way: str, private: bool
) -> None:
    """CK13: collecting a copy removes the copy's files, not those of the original."""
    given = None if private else temporary / "given"
    rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=given))
    rb.extend(make_rows(0, 7))
    mine = _private(temporary)
    before = _files(temporary)
    twin = pickle.loads(pickle.dumps(rb)) if way == "pickle" else copy.deepcopy(rb)
    theirs = [folder for folder in _private(temporary) if folder not in mine]
    assert len(theirs) == 1
    assert twin[:]["id"].tolist() == rb[:]["id"].tolist() == [5, 6, 2, 3, 4]
    assert twin.storage.ledger.state()["cursor"] == 2
    twin.extend(make_rows(50, 5))
    assert rb[:]["id"].tolist() == [5, 6, 2, 3, 4]
    rb[0] = make_rows(9, 1)[0]
    assert twin[:]["id"].tolist() == [53, 54, 50, 51, 52]
    del twin
    gc.collect()
    assert not theirs[0].exists()
    assert _files(temporary) == before
    assert rb[:]["id"].tolist() == [9, 6, 2, 3, 4]


def test_an_empty_storage_can_be_copied(temporary: Path) -> None:
    twin = pickle.loads(pickle.dumps(LazyMemmapStorage(5)))
    assert (len(twin), twin.schema, twin.max_size) == (0, None, 5)
    assert _private(temporary) == []


_LIVES = """
import os, signal, sys, time, torch
from pathlib import Path
from replaykit import LazyMemmapStorage, ReplayBuffer
home = Path(os.environ["TMPDIR"])
def new():
    rb = ReplayBuffer(storage=LazyMemmapStorage(5))
    rb.extend(torch.arange(3))
    return rb
rb = new()
(folder,) = home.glob("replaykit-*")
def readable():
    return folder.exists() and (folder / "data.memmap").exists() and rb[:].tolist() == [0, 1, 2]
def child(what):
    pid = os.fork()
    if pid == 0:
        what()
    return os.waitpid(pid, 0)[1]
def leaves():        # a child that ends as programs do: exit handlers run, objects die
    global rb
    rb = None
    sys.exit(0)
def makes():
    global other
    other = new()
    sys.exit(0)
def killed():
    global other
    other = new()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert child(leaves) == 0 and readable(), "normal exit of a child, death of the object in it"
assert child(makes) == 0 and readable(), "a child that makes its own"
assert list(home.glob("replaykit-*")) == [folder], "what a child made, it removes"
assert child(killed) == signal.SIGTERM and readable(), "a child that is killed"
print(folder.name)
"""


@pytest.mark.pitfall("CK13")
def test_a_private_folder_is_removed_by_its_maker_at_a_normal_exit_only(
    tmp_path: Path, run_python: Any
) -> None:
    """CK13: not by a forked child, and not by a signal: no handler deletes live data."""
    done = run_python(_LIVES, env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = _private(tmp_path)  # that of the child that was killed
    assert left.name != done.stdout.strip()
    assert np.fromfile(left / "data.memmap", dtype=np.int64)[:3].tolist() == [0, 1, 2]


# -- full disks -----------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("scratch", ["new/folder", "mine", None])
def test_a_disk_that_is_full_is_said_with_the_file_and_leaves_nothing(
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
            files_of_at_most(4096),
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
        with pytest.raises(OSError, match=r"the rows need 26.0 PiB, .* are free") as caught:
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


# -- memory ---------------------------------------------------------------------------------------


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


# -- mapping a file -------------------------------------------------------------------------------


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


def test_lanes_lie_in_files_as_in_memory(tmp_path: Path, make_lanes: Any) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path, ndim=2))
    rb.extend(make_lanes(0, 5))
    ids = np.fromfile(tmp_path / "id.memmap", dtype=np.int64).reshape(4, 2)
    assert ids.tolist() == [[4, 104], [1, 101], [2, 102], [3, 103]]
    assert isinstance(rb.storage[:], TensorDict)
