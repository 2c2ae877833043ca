"""A conversion takes bounded memory, room and time, and asks for nothing that it does not need."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from replaykit.datasets import Policies
from replaykit.datasets import convert as convert_files
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.engine.row_writer import RowWriter
from replaykit.datasets.families import D4RL
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, verify_published
from replaykit.datasets.sources import Sources, require_room_for_columns, room_needed_at
from replaykit.errors import CorpusError, DownloadError
from replaykit.filesystem import private_path
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.datasets.converted import growth, needs_proc
from tests.datasets.mutated import corpora
from tests.datasets.trials import convert, never, write
from tests.limits import limited
from tests.support import LoopbackHub


@pytest.mark.pitfall("DS15")
@needs_proc
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path):
    """64 MB of source, 128 MB of columns, 8 MB of slack: blocks of 1 MiB and the episode list."""
    write(tmp_path / "small.h5", make_trial(50))
    with RoboHiveWriter(tmp_path / "large.h5") as writer:
        for seed in range(8):
            trial = make_trial(40, seed=seed, infos=False)
            # One trial alone is 8 times the block.
            trial["env_infos"] = {"image": np.full((40, 200_000), seed, np.uint8)}
            writer.add_trial(**trial)
    assert (
        growth(tmp_path / "small.h5", tmp_path / "large.h5", tmp_path, "ROBOHIVE", 1 << 20)
        < 8 << 20
    )
    data = open_published(tmp_path / "large")
    assert data.columns["info", "image"].shape == (8 * 39, 200_000)
    assert data.columns["next", "info", "image"][::39, 7].tolist() == list(range(8))


@needs_proc
def test_peak_memory_does_not_grow_with_the_length_of_an_episode(tmp_path):
    """One trial of two million records, of 13 bytes each: ids and flags alone are 38 MB."""
    records = 2_000_000
    write(tmp_path / "small.h5", make_trial(50))
    with h5py.File(tmp_path / "large.h5", "w") as file:
        for name in ("observations", "actions"):
            file[f"Trial0/{name}"] = np.zeros((records, 1), np.float16)
        file["Trial0/actions"][-1] = np.nan
        file["Trial0/rewards"] = np.zeros(records, np.float32)
        file["Trial0/time"] = np.arange(records, dtype=np.float32)
        file["Trial0/done"] = np.arange(records) == records - 1
        file["Trial0/env_infos/goal"] = np.ones(1, np.float16)
    # Blocks of 1 MiB, of several leaves and threads.
    assert (
        growth(tmp_path / "small.h5", tmp_path / "large.h5", tmp_path, "ROBOHIVE", 1 << 20)
        < 12 << 20
    )
    data = open_published(tmp_path / "large")
    assert data.columns["next", "done"].flatten().nonzero().flatten().tolist() == [records - 2]
    assert data.columns["next", "terminated"][-1]
    assert data.columns["info", "goal"].sum(dtype=torch.float64) == records - 1
    verify_published(tmp_path / "large")


@pytest.mark.parametrize("limit", [50, 1000, 2000, 3000])
def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, limit):
    """A limit on the file size stands for the full disk.

    The columns of the 49 rows need up to 2352 bytes, the manifest more. With the check in advance
    switched off, the columns themselves meet the limit, when they are made or reserved.
    """
    path = write(tmp_path / "a.h5", make_trial(50))
    target = tmp_path / "here" / "data"
    for look_ahead in (True, False):
        if not look_ahead:
            monkeypatch.setattr("replaykit.datasets.column_files.require_room", lambda *_: None)
        with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError) as caught:
            convert(target, path)
        assert caught.value.errno == errno.EFBIG
        message = str(caught.value)
        assert "bytes are needed for" in message
        assert "choose another directory" in message
        assert str(target.parent) in message
        assert [p.name for p in target.parent.iterdir()] == [".data.lock"]


def test_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(5))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
    monkeypatch.setattr("os.pwrite", None)
    with pytest.raises(OSError, match=r"bytes are needed for .*100 bytes are free"):
        convert(tmp_path / "data", path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".data.lock", "a.h5"]


@pytest.mark.pitfall("DS15")
@pytest.mark.parametrize(("tries", "times"), [(3, 10), pytest.param(12, 4, marks=pytest.mark.long)])
def test_conversion_keeps_up_with_plain_reading(tmp_path, tries, times):
    """N14: 20 times slower was seen. Compressed files, as RoboSet's are, take less than ten times
    here, where a busy machine must not fail the test, and less than four in the long run of it;
    the best of several tries counts. What a conversion takes is measured by the benchmark."""
    path = write(tmp_path / "a.h5", *(make_trial(200, seed=k, widths=(60, 9)) for k in range(12)))
    with h5py.File(path) as file:
        leaves = [name for name, _ in corpora.leaves(file["Trial0"])]
    plain, converted = [], []
    sources = Sources.local([path])
    for _ in range(tries):
        begin = time.perf_counter()
        with h5py.File(path) as file:
            values = [trial[leaf][...] for trial in file.values() for leaf in leaves]
        middle = time.perf_counter()
        ensure_dataset(tmp_path / "data", get_sources=lambda: sources, layout=ROBOHIVE, force=True)
        plain.append(middle - begin)
        converted.append(time.perf_counter() - middle)
    assert len(values) == 12 * len(leaves)
    assert min(converted) < times * min(plain)


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
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"block_bytes >= 1, got {bad}"):
            ConvertOptions(block_bytes=bad)


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
    assert convert(tmp_path / "data", get_sources=never).rows == 3
    assert open_published(tmp_path / "data").rows == 3


# -- room before a download ------------------------------------------------------------------------


def test_columns_of_a_url_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 70_000
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 * size - 1))
    with LoopbackHub({"me/files": {"a.hdf5": bytes(size)}}) as web:
        url = f"{web.url}/datasets/me/files/resolve/main/a.hdf5"
        with pytest.raises(OSError, match=f"{size:,} bytes to download, and about {size:,}") as e:
            convert_files(url, D4RL, tmp_path / "data")
        assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(tmp_path / "data"))
        assert [request.method for request in web.requests] == ["HEAD"]
        with pytest.raises(DownloadError, match="not an HDF5 file"):  # it is fetched
            convert_files(url, D4RL, tmp_path / "data", policies=Policies(include=["action"]))


@pytest.mark.parametrize("is_one_disk", [True, False])
def test_the_download_counts_where_it_is_on_the_same_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_disk: bool
) -> None:
    cache, target = tmp_path / "cache", tmp_path / "here" / "data"
    cache.mkdir()
    (tmp_path / "here").mkdir()
    disks = {cache: 1, tmp_path / "here": 1 if is_one_disk else 2}
    real = os.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **given: (
            SimpleNamespace(st_dev=disks[path]) if path in disks else real(path, **given)
        ),
    )
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    most = 70 if is_one_disk else 100
    require_room_for_columns(cache, 30, target, most)
    with pytest.raises(OSError, match=rf"not enough disk space for .*about {most + 1} bytes"):
        require_room_for_columns(cache, 30, target, most + 1)
    require_room_for_columns(cache, 0, target, 1000)  # nothing is fetched: it is known soon


def test_download_room_is_not_estimated_when_columns_may_shrink(tmp_path: Path) -> None:
    target = tmp_path / "data"
    assert room_needed_at(target, may_shrink=False) == target
    assert room_needed_at(target, may_shrink=True) is None
    unfinished = private_path(target, "tmp")
    unfinished.mkdir()
    assert room_needed_at(target, may_shrink=False) is None
    unfinished.rmdir()
    target.mkdir()
    assert room_needed_at(target, may_shrink=False) is None
    assert room_needed_at(target, may_shrink=False, force=True) == target


def test_policies_by_which_columns_may_be_smaller() -> None:
    assert not Policies(missing="pad", strict=True).may_shrink
    for given in (
        {"include": ["action"]},
        {"exclude": ["action"]},
        {"casts": {"float64": "float32"}},
        {"constant": "drop"},
        {"duplicate": "drop"},
        {"repeated": "once"},
        {"on_invalid": "skip"},
    ):
        assert Policies(**given).may_shrink, given
