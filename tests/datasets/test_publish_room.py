"""Room on the disk: reserved in advance, and missing in one sentence."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from replaykit.filesystem import reserve
from tests.datasets.trials import convert, names


def test_reserved_file_has_its_size_and_no_room_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.touch()
    reserve(path, 100_000)
    assert path.stat().st_size == 100_000
    assert path.stat().st_blocks * 512 >= 100_000

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"200,000 bytes are needed for .*x, .* are free there"):
        reserve(path, 200_000)

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("os.posix_fallocate", unsupported)
    reserve(path, 300_000)
    assert path.stat().st_size == 300_000


def test_quota_met_while_writing_is_the_same_sentence(tmp_path, source, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match=r"bytes are needed for .*memmap") as caught:
        convert(tmp_path / "root" / "data", source)
    assert caught.value.errno == errno.EDQUOT
    assert names(tmp_path / "root") == [".data.lock"]
