"""What the download layer makes of the client's cache, without any server."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from replaykit.datasets.hub_cache import HubCache, HubFile, cache_root, endpoint, is_offline
from replaykit.datasets.hub_files import HubListing, fetch

DATA = b"data of a file"
FILE = HubFile("dir/a.h5", len(DATA), hashlib.sha256(DATA).hexdigest(), None)
COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    return HubCache(tmp_path / "hub", "me/data", COMMIT)


def fill(cache: HubCache, content: bytes = DATA) -> tuple[Path, Path]:
    """Puts a file where the client would, and returns its entry and its blob."""
    entry, blob = cache.entry(FILE), cache.blob(FILE)
    assert blob is not None
    for path in (entry, blob):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    entry.symlink_to(os.path.relpath(blob, entry.parent))
    return entry, blob


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


@pytest.mark.parametrize("known", ["sha256", "blob_id", "size"])
def test_problem_finds_every_change(cache: HubCache, known: str) -> None:
    entry, _ = fill(cache)
    git = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    file = {
        "sha256": FILE,
        "blob_id": HubFile(FILE.path, FILE.size, None, git),
        "size": HubFile(FILE.path, FILE.size, None, None),
    }[known]
    assert cache.problem(file) is None
    entry.write_bytes(DATA[:-1] + b"X")
    problem = cache.problem(file)
    if known == "size":
        assert problem is None
    else:
        assert problem is not None
        assert f"expected {'sha256' if known == 'sha256' else 'git blob id'} {file.etag}" in problem
    entry.write_bytes(DATA + b"X")
    assert "expected 14 bytes, got 15" in str(cache.problem(file))
    entry.unlink()
    assert cache.problem(file) == "not in the cache"


def test_problem_reads_in_blocks(cache: HubCache) -> None:
    content = os.urandom((2 << 20) + 5)
    digest = hashlib.sha256(content).hexdigest()
    file = HubFile("dir/a.h5", len(content), digest, None)
    cache.entry(file).parent.mkdir(parents=True)
    cache.entry(file).write_bytes(content)
    assert cache.problem(file) is None


def test_discard_removes_entry_and_blob_and_no_more(cache: HubCache) -> None:
    entry, blob = fill(cache)
    beside = blob.with_name("other")
    beside.write_bytes(b"other")
    cache.discard(FILE)
    assert not os.path.lexists(entry)
    assert not blob.exists()
    assert beside.exists()
    cache.discard(FILE)  # nothing is there: nothing happens


def test_discard_removes_the_blob_where_the_entry_is_a_copy_of_it(cache: HubCache) -> None:
    entry, blob = fill(cache)
    entry.unlink()
    entry.write_bytes(DATA)
    cache.discard(FILE)
    assert not entry.exists()
    assert not blob.exists()


def test_discard_never_leaves_the_cache(cache: HubCache, tmp_path: Path) -> None:
    entry, blob = fill(cache)
    mine = tmp_path / "mine.h5"
    mine.write_bytes(b"a file of the user's")
    blob.unlink()
    blob.symlink_to(mine)
    cache.discard(FILE)
    assert mine.exists()
    assert not os.path.lexists(entry)
    assert not os.path.lexists(blob)


def test_discard_follows_a_blob_that_repositories_share(cache: HubCache) -> None:
    entry, blob = fill(cache)
    shared = cache.root / "blobs" / "x" / "content"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    cache.discard(FILE)
    assert not any(os.path.lexists(path) for path in (entry, blob, shared))


def test_a_cache_behind_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "hub").symlink_to("disk")
    cache = HubCache(tmp_path / "hub", "me/data", COMMIT)
    entry, blob = fill(cache)
    cache.discard(FILE)
    assert not os.path.lexists(entry)
    assert not blob.exists()


def test_missing_bytes_count_equal_contents_once(cache: HubCache) -> None:
    same = HubFile("dir/b.h5", FILE.size, FILE.sha256, None)
    other = HubFile("dir/c.h5", 100, "e" * 64, None)
    assert cache.missing_bytes([FILE, same, other]) == FILE.size + 100
    entry, _ = fill(cache)
    assert cache.missing_bytes([FILE, same, other]) == 100
    entry.unlink()  # the blob is still there: the client links it again
    assert cache.missing_bytes([FILE]) == 0


class Parts:
    """Parts of downloads, and the locks that the client holds while it writes them."""

    def __init__(self, cache: HubCache) -> None:
        blobs = fill(cache)[1].parent
        locks = cache.root / ".locks" / "datasets--me--data"
        locks.mkdir(parents=True)
        self.lock = locks / f"{FILE.etag}.lock"
        self.lock.touch()
        self.ours = blobs / f"{FILE.etag}.0a1b2c3d.incomplete"
        self.others = blobs / f"{'e' * 64}.0a1b2c3d.incomplete"
        self.older = blobs / f"{FILE.etag}.incomplete"
        for path in (self.ours, self.others, self.older):
            path.write_bytes(b"part")


def test_parts_of_dead_downloads_of_these_files_are_removed(cache: HubCache) -> None:
    parts = Parts(cache)
    cache.remove_orphans([FILE])
    assert not parts.ours.exists()
    assert parts.others.exists()
    assert parts.older.exists()  # an older client goes on from here
    assert cache.problem(FILE) is None
    # A client that removes its lock when done has left none behind: nobody holds it either.
    parts.lock.unlink()
    parts.ours.write_bytes(b"part")
    cache.remove_orphans([FILE])
    assert not parts.ours.exists()


def test_parts_of_living_downloads_are_left(cache: HubCache) -> None:
    parts = Parts(cache)
    with parts.lock.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache.remove_orphans([FILE])
        assert parts.ours.exists()
    cache.remove_orphans([FILE])
    assert not parts.ours.exists()


@pytest.mark.parametrize("answer", ["all granted", "none known"])
def test_parts_stay_if_file_system_lacks_locks(
    cache: HubCache, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def flock(file: object, kind: int) -> None:
        if answer == "none known":
            raise OSError(38, "Function not implemented")

    parts = Parts(cache)
    monkeypatch.setattr(fcntl, "flock", flock)
    cache.remove_orphans([FILE])
    assert parts.ours.exists()


def test_nothing_to_remove_is_no_error(cache: HubCache) -> None:
    cache.remove_orphans([FILE])
    assert not cache.root.exists()


def test_a_file_too_large_for_http_is_refused_before_it_starts(
    cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.root))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 50))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    huge = HubFile("huge.h5", 50_000_000_001, "a" * 64, None)
    with pytest.raises(ImportError, match=r"huge\.h5.*pip install hf_xet"):
        fetch(HubListing("me/data", COMMIT, "", (huge,)))
    assert not cache.root.exists()
