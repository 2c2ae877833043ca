"""Before a download there must be room for the columns that are made of it, as far as is known."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.families import D4RL
from replaykit.datasets.sources import require_room_for_columns, room_needed_at
from replaykit.errors import DownloadError
from replaykit.filesystem import private_path
from tests.support import LoopbackHub


def test_columns_of_a_url_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 70_000
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2 * size - 1))
    with LoopbackHub({"me/files": {"a.hdf5": bytes(size)}}) as web:
        url = f"{web.url}/datasets/me/files/resolve/main/a.hdf5"
        with pytest.raises(OSError, match=f"{size:,} bytes to download, and about {size:,}") as e:
            convert(url, D4RL, tmp_path / "data")
        assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(tmp_path / "data"))
        assert [request.method for request in web.requests] == ["HEAD"]
        with pytest.raises(DownloadError, match="not an HDF5 file"):  # it is fetched
            convert(url, D4RL, tmp_path / "data", policies=Policies(include=["action"]))


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


@pytest.mark.parametrize(
    "given",
    [
        {"include": ["action"]},
        {"exclude": ["action"]},
        {"casts": {"float64": "float32"}},
        {"constant": "drop"},
        {"duplicate": "drop"},
        {"repeated": "once"},
        {"on_invalid": "skip"},
    ],
)
def test_policies_by_which_columns_may_be_smaller(given) -> None:
    assert not Policies(missing="pad", strict=True).may_shrink
    assert Policies(**given).may_shrink
