"""The client's cache: where it is, what of it is missing, and how a changed file is found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from replaykit.datasets.hub_files import (
    HubFile,
    HubListing,
    cache_root,
    endpoint,
    entry,
    missing_bytes,
)
from replaykit.datasets.transfers import difference, is_offline

DATA = b"data of a file"
SHA256 = hashlib.sha256(DATA).hexdigest()
GIT = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "/home/u/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"HF_HOME": "~/h"}, "/home/u/h/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}, "/old"),
        ({"HF_HUB_CACHE": "$WHERE/c", "HUGGINGFACE_HUB_CACHE": "/old", "WHERE": "/w"}, "/w/c"),
    ],
)
def test_cache_is_where_the_client_would_have_it(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected


def test_environment_sets_endpoint_and_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint().startswith("https://")
    assert not is_offline()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1/")
    assert endpoint() == "http://127.0.0.1:1"
    for value, expected in {"1": True, "true": True, "YES": True, "0": False, "": False}.items():
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        assert is_offline() is expected
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert is_offline()


@pytest.mark.parametrize(
    ("sha256", "blob_id"), [(SHA256, "0" * 40), (None, GIT), (SHA256, None), (None, None)]
)
def test_difference_finds_every_change(
    tmp_path: Path, sha256: str | None, blob_id: str | None
) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(DATA)
    assert difference(path, len(DATA), sha256, blob_id) is None
    path.write_bytes(DATA[:-1])
    assert difference(path, len(DATA), sha256, blob_id) == "expected 14 bytes, got 13" + (
        " (it begins with the text 'data of a fil')"
    )
    for position in range(len(DATA)):
        changed = bytearray(DATA)
        changed[position] ^= 1
        path.write_bytes(changed)
        found = difference(path, len(DATA), sha256, blob_id)
        assert (found is None) is (sha256 is None and blob_id is None)


@pytest.mark.parametrize("sha256", [True, False])
def test_long_files_are_compared_to_their_end(tmp_path: Path, sha256: bool) -> None:
    data = bytes(range(256)) * (3 << 12)
    path = tmp_path / "a.h5"
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    known = (digest, None) if sha256 else (None, git)
    assert difference(path, None, *known) is None
    path.write_bytes(data[:-1] + b"x")
    assert difference(path, None, *known) is not None


def test_missing_bytes_count_equal_contents_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    files = (
        HubFile("a.h5", 14, SHA256, None),
        HubFile("b.h5", 14, SHA256, None),
        HubFile("c.h5", 5, None, None),
    )
    listing = HubListing("me/data", "c" * 40, "", files)
    assert missing_bytes(listing, files) == 14 + 5
    path = entry(listing, files[2])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"four")
    assert missing_bytes(listing, files) == 14 + 5
    path.write_bytes(b"fiver")
    assert missing_bytes(listing, files) == 14
