"""Listing a repository of the Hub, listings as JSON, and the cache of the client."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets.hub_files import (
    HubFile,
    HubListing,
    Retry,
    cache_root,
    endpoint,
    entry,
    fetch,
    list_files,
    missing_bytes,
)
from replaykit.datasets.transfers import difference, is_offline
from replaykit.errors import DownloadError
from tests.datasets.door import (
    DATA,
    DOOR,
    OTHERS,
    QUICK,
    REPO,
    A,
    B,
    C,
    contents,
    listing_of,
)
from tests.support import Fault
from tests.support.refusals import refuses


@pytest.mark.pitfall("DS5")
def test_lists_the_files_below_a_directory_in_string_order(hub: Any) -> None:
    for directory in (DOOR, DOOR + "/", "/" + DOOR):
        listing = listing_of(directory)
        assert [file.path for file in listing.files] == [A, B, C]  # seed0, seed10, seed2
    assert (listing.repo_id, listing.commit) == (REPO, hub.head(REPO))
    assert listing.endpoint == hub.url
    for file in listing.files:
        assert file.size == len(DATA[file.path])
        assert file.sha256 == hashlib.sha256(DATA[file.path]).hexdigest()
    assert listing.nbytes == sum(map(len, DATA.values()))
    whole = listing_of("", suffix="")
    assert [file.path for file in whole.files] == sorted({**DATA, **OTHERS})
    for page_size in (1, 2, 7):
        hub.page_size = page_size
        hub.clear_log()
        assert listing_of() == listing
        assert len(hub.asked("GET", "tree")) > 1
    hub.page_size = None
    entries = [
        {"type": "file", "path": file.path, "size": file.size, "oid": "0" * 40}
        for file in reversed(listing.files)
    ]
    hub.faults.append(Fault(route="tree", body=json.dumps(entries).encode()))
    assert [file.path for file in listing_of().files] == [A, B, C]


def test_every_kind_of_revision_is_resolved_to_its_commit(hub: Any) -> None:
    old = hub.head(REPO)
    hub.tag(REPO, "v1", old)
    new = hub.commit(REPO, {A: b"new"})
    hub.commit(REPO, {A: b"side"}, branch="side")
    assert listing_of().commit == new
    for revision in ("v1", old[:8], old):
        assert listing_of(revision=revision).commit == old
    assert listing_of(revision="side").commit == hub.head(REPO, "side")


def test_after_the_first_request_only_the_commit_is_asked_for(hub: Any) -> None:
    commit = hub.head(REPO)
    fetch(listing_of(), retry=QUICK)
    first, *rest = hub.asked()
    assert first.route == "revision"
    assert rest
    assert all(f"/{commit}" in request.path for request in rest)


@pytest.mark.pitfall("DS18")
def test_main_moves_between_listing_and_fetch(hub: Any) -> None:
    listing = listing_of()
    hub.commit(REPO, {A: b"new", B: None, f"{DOOR}/seed3/x.h5": b"more"})
    assert contents(fetch(listing, retry=QUICK)) == [DATA[A], DATA[B], DATA[C]]
    again = listing_of()
    assert [file.path for file in again.files] == [A, C, f"{DOOR}/seed3/x.h5"]
    assert contents(fetch(again, retry=QUICK)) == [b"new", DATA[C], b"more"]


def test_no_file_below_the_directory(hub: Any) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        listing_of("DAPG(expert)/door")
    for part in (REPO, hub.head(REPO), "DAPG(expert)/door/", f"{DOOR}/seed0", "*.h5"):
        assert part in str(caught.value)


def test_missing_repository_revision_and_gate_have_different_errors(hub: Any) -> None:
    messages = []
    with pytest.raises(FileNotFoundError, match="there is no dataset repository 'me/none'") as e:
        list_files("me/none", directory="", suffix="", retry=QUICK)
    messages.append(str(e.value))
    with pytest.raises(FileNotFoundError, match="there is no revision 'v9'") as e:
        listing_of(revision="v9")
    messages.append(str(e.value))
    with pytest.raises(FileNotFoundError, match="no revision 'ffff"):
        listing_of(revision="f" * 40)
    for status in (401, 403):
        hub.faults[:] = [Fault(route="revision", status=status, error_code="GatedRepo")]
        with pytest.raises(PermissionError, match=r"gated: accept .* HF_TOKEN") as gate:
            listing_of()
        hub.faults[:] = [Fault(route="revision", status=status)]
        with pytest.raises(PermissionError, match=rf"refused \(HTTP {status}\).*HF_TOKEN") as shut:
            listing_of()
    messages += [str(gate.value), str(shut.value)]
    hub.faults.clear()
    listing = listing_of()
    hub.faults[:] = [Fault(path=B, status=404, error_code="EntryNotFound")]
    with pytest.raises(FileNotFoundError, match="though it was listed") as e:
        fetch(listing, retry=QUICK)
    assert B in str(e.value)
    messages.append(str(e.value))
    assert len(set(messages)) == 5
    assert all(hub.url in message and "me/" in message for message in messages)


LEAVING = [{"type": "file", "path": f"{DOOR}/../../x.h5", "size": 1, "oid": "0" * 40}]
TWICE = [{"type": "file", "path": A, "size": size, "oid": "0" * 40} for size in (1, 2)]


@pytest.mark.parametrize(
    ("fault", "said", "used"),
    [
        *[
            ({"route": route, "body": b"<html>Please log in"}, "not that of a Hub; check HF_EN", 1)
            for route in ("revision", "tree")
        ],
        ({"route": "tree", "body": json.dumps(LEAVING).encode()}, "expected a relative path", 1),
        ({"route": "tree", "body": json.dumps(TWICE).encode()}, "revision .*got twice: .*door", 1),
        ({"route": "revision", "status": 503}, r"me/data.*http://127.*HTTP 503", QUICK.attempts),
    ],
)
def test_answers_that_are_no_listing_end_in_one_error(
    hub: Any, fault: dict[str, Any], said: str, used: int
) -> None:
    """Only where the server is busy, asking again is of use."""
    hub.faults.append(Fault(**fault))
    with pytest.raises(DownloadError, match=said):
        listing_of()
    assert hub.faults[0].used == used


@pytest.mark.parametrize("route", ["revision", "tree"])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(hub: Any, route: str, status: int) -> None:
    hub.faults.append(Fault(route=route, status=status, times=2))
    assert len(listing_of().files) == 3
    assert hub.faults[0].used == 2


def test_a_listing_that_hangs_is_given_up(hub: Any) -> None:
    hub.faults.append(Fault(route="tree", delay_s=60))
    before, start = set(threading.enumerate()), time.monotonic()
    with pytest.raises(DownloadError, match="no answer in time"):
        listing_of(retry=Retry(attempts=2, first_wait_s=0, stall_s=0.2))
    assert time.monotonic() - start < 5
    assert hub.faults[0].used == 1  # no use in asking again
    # The listing's thread is left behind. It would close the session of the next test when it
    # cannot connect, and that test would see closed sockets (EBADF).
    left = set(threading.enumerate()) - before
    assert any(thread.name == "replaykit-transfer-list" for thread in left)
    hub.close()
    for thread in left:
        thread.join(30)
        assert not thread.is_alive()


# The client may leave a socket, closed under it by the server, to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_unreachable_server_raises_download_error(hub: Any) -> None:
    listing = listing_of()
    hub.close()
    with pytest.raises(DownloadError, match=r"cannot be reached; check .* HF_ENDPOINT"):
        listing_of()
    with pytest.raises(DownloadError, match=r"cannot be reached; check .* HF_ENDPOINT") as caught:
        fetch(listing, max_workers=1, retry=QUICK)
    assert A in str(caught.value)
    assert listing.commit in str(caught.value)


def file_json(**change: Any) -> dict[str, Any]:
    return {"path": "a", "size": 1, "sha256": None, "blob_id": None, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commit": "main"}, "commit: expected 40 hexadecimal"),
        ({"repo_id": "../.."}, "repo_id"),
        ({"files": None}, "JSON of a Hub listing"),
        ({"files": [{"path": "a"}]}, "JSON of a Hub listing"),
        ({"files": [file_json(path="/a")]}, "path"),
        ({"files": [file_json(size=-1)]}, "size"),
        ({"files": [file_json(sha256="x")]}, "sha256"),
        ({"files": [file_json()] * 2}, "twice"),
    ],
)
def test_json_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    files = (HubFile("a/x.h5", 3, "a" * 64, "b" * 40), HubFile("a/y.h5", 0, None, None))
    listing = HubListing(REPO, "c" * 40, "http://127.0.0.1:1", files)
    right = json.loads(json.dumps(listing.to_json()))
    assert HubListing.from_json(right) == listing
    with pytest.raises(ValueError, match=message):
        HubListing.from_json({**right, **change})


def test_arguments_are_checked() -> None:
    listing = HubListing(REPO, "c" * 40, "", ())
    refuses(ValueError, "owner/name", list_files, "../x", directory="", suffix="")
    refuses(ValueError, "max_workers", fetch, listing, max_workers=0)
    refuses(ValueError, "attempts", Retry, attempts=0)
    refuses(ValueError, "waits", Retry, first_wait_s=-1)


# -- the cache -------------------------------------------------------------------------------------


CONTENT = b"data of a file"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
GIT = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()


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
    path.write_bytes(CONTENT)
    assert difference(path, len(CONTENT), sha256, blob_id) is None
    path.write_bytes(CONTENT[:-1])
    assert difference(path, len(CONTENT), sha256, blob_id) == "expected 14 bytes, got 13" + (
        " (it begins with the text 'data of a fil')"
    )
    for position in range(len(CONTENT)):
        changed = bytearray(CONTENT)
        changed[position] ^= 1
        path.write_bytes(changed)
        found = difference(path, len(CONTENT), sha256, blob_id)
        assert (found is None) is (sha256 is None and blob_id is None)
    # Long files are read in blocks, to their end.
    data = bytes(range(256)) * (3 << 12)
    known = (
        sha256 and hashlib.sha256(data).hexdigest(),
        blob_id and hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    )
    path.write_bytes(data)
    assert difference(path, None, *known) is None
    path.write_bytes(data[:-1] + b"x")
    assert (difference(path, None, *known) is None) is (known == (None, None))


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
