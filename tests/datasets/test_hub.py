"""Fetching from a loopback Hub with the real client, when nothing and when everything fails."""

from __future__ import annotations

import errno
import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from replaykit.datasets.hub_files import HubListing, Progress, Retry, fetch
from replaykit.errors import DownloadError
from tests.datasets.door import (
    DATA,
    DOOR,
    NOTES,
    OTHERS,
    QUICK,
    REPO,
    A,
    B,
    C,
    contents,
    listing_of,
)
from tests.support import Fault, lfs_pointer

# The client reads blocks of 10 MiB: a body cut beyond the first is continued by a range.
BLOCK = 10 << 20
BIG = f"{DOOR}/big.h5"
BIG_DATA = hashlib.sha256(b"seed").digest() * (11 * (1 << 20) // 32)


def only(listing: HubListing, path: str) -> HubListing:
    files = tuple(file for file in listing.files if file.path == path)
    return HubListing(listing.repo_id, listing.commit, listing.endpoint, files)


def test_fetch_returns_the_files_in_order_and_then_asks_for_nothing(hub: Any) -> None:
    listing = listing_of()
    paths = fetch(listing, retry=QUICK)
    assert contents(paths) == [DATA[A], DATA[B], DATA[C]]
    assert [path.as_posix().endswith(p) for path, p in zip(paths, DATA, strict=True)] == [True] * 3
    assert hub.bytes_served == listing.nbytes
    hub.clear_log()
    assert fetch(listing, retry=QUICK) == paths
    assert hub.asked() == []


def test_contents_that_are_in_the_cache_are_not_fetched_again(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = listing_of()
    paths = fetch(listing, retry=QUICK)
    hub.commit(REPO, {A: b"new", B: b"new"})  # C is that of an older commit
    hub.clear_log()
    assert contents(fetch(listing_of(), retry=QUICK)) == [b"new", b"new", DATA[C]]
    assert hub.bytes_served == len(b"new")
    hub.close()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fetch(HubListing.from_json(listing.to_json())) == paths


def test_fetch_reads_endpoint_and_cache_at_each_call(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(listing_of(), retry=QUICK)
    with type(hub)({REPO: {A: b"elsewhere"}}) as other:
        monkeypatch.setenv("HF_ENDPOINT", other.url + "/")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "second"))
        listing = listing_of()
        (path,) = fetch(listing, retry=QUICK)
    assert listing.endpoint == other.url
    assert path.read_bytes() == b"elsewhere"
    assert tmp_path / "second" in path.parents


def test_progress_counts_bytes_and_files(hub: Any) -> None:
    """Bytes of a file that begins again count once."""
    hub.commit(REPO, {BIG: BIG_DATA})
    hub.faults.append(Fault(path=BIG, method="GET", cut_after=BLOCK + 9, times=1))
    hub.faults.append(Fault(path=BIG, method="GET", status=503, times=1))
    listing = listing_of()
    seen: list[Progress] = []
    fetch(listing, progress=seen.append, retry=QUICK)
    total = listing.nbytes
    assert seen[-1] == Progress(4, 4, total, total)
    assert any(0 < state.bytes_done < total and state.files_done < 4 for state in seen)
    assert [state.files_done for state in seen] == sorted(state.files_done for state in seen)
    assert all(state.bytes_done <= total for state in seen)
    seen.clear()
    fetch(listing, progress=seen.append)  # all in the cache
    assert seen[-1] == Progress(4, 4, total, total)


def test_progress_bar_on_stderr(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(listing_of(), progress=True, retry=QUICK)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"Downloading {REPO}: 100%" in shown.err
    assert "3/3 files" in shown.err
    assert shown.err.count("Downloading") == shown.err.count(REPO)  # no bar of the client


def test_exception_in_progress_function_ends_fetch(hub: Any, tmp_path: Path) -> None:
    def stop(state: Progress) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        fetch(listing_of(), progress=stop, retry=QUICK)
    assert list((tmp_path / "hf").rglob("*.incomplete")) == []


@pytest.mark.pitfall("DS12")
def test_too_little_disk_space_raises_error_before_the_first_request(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = listing_of()
    fetch(HubListing(REPO, listing.commit, "", listing.files[:1]), retry=QUICK)
    need = len(DATA[B]) + len(DATA[C])
    hub.clear_log()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need - 1))
    with pytest.raises(OSError, match=rf"{need:,} bytes are missing, {need - 1:,} are free") as e:
        fetch(listing, retry=QUICK)
    assert e.value.errno == errno.ENOSPC
    assert "HF_HUB_CACHE" in str(e.value)
    assert hub.asked() == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need))
    fetch(listing, retry=QUICK)


def test_a_disk_that_fills_up_is_not_tried_again(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(**options: Any) -> str:
        calls.append(options["filename"])
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    listing = listing_of()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(OSError, match=r"could not store file .*HF_HUB_CACHE") as caught:
        fetch(listing, max_workers=1, retry=QUICK)
    assert (caught.value.errno, calls) == (errno.ENOSPC, [A])


def test_offline_mode_of_the_moment(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = listing_of()
    paths = fetch(listing, retry=QUICK)
    hub.clear_log()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # the client is not imported
    assert fetch(listing) == paths
    with pytest.raises(FileNotFoundError, match=r"offline mode .*unset HF_HUB_OFFLINE"):
        listing_of()
    paths[0].unlink()
    damaged = bytearray(DATA[C])
    damaged[3] ^= 1
    paths[2].write_bytes(damaged)
    with pytest.raises(FileNotFoundError) as caught:
        fetch(listing)
    message = str(caught.value)
    assert f"{A}: not in the cache" in message
    assert f"{C}: expected sha256" in message
    assert B not in message
    assert f"hf download {REPO} --repo-type dataset --revision {listing.commit}" in message
    assert "2 of 3" in message
    assert paths[2].exists()  # nothing to replace it with
    assert hub.asked() == []


def test_offline_mode_since_the_client_was_imported(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = listing_of()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.clear_log()
    for call in (listing_of, lambda: fetch(listing, retry=QUICK)):
        with pytest.raises(FileNotFoundError, match="offline mode forbids"):
            call()
    assert hub.asked() == []


# Faults


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize("ignore_range", [False, True])
def test_body_cut_late_is_continued_or_restarted(hub: Any, ignore_range: bool) -> None:
    hub.commit(REPO, {BIG: BIG_DATA})
    hub.faults.append(Fault(path=BIG, method="GET", cut_after=BLOCK + 9, times=1))
    hub.faults.append(Fault(path=BIG, ignore_range=ignore_range))
    (path,) = fetch(only(listing_of(), BIG), retry=QUICK)
    assert path.read_bytes() == BIG_DATA
    assert [request.range for request in hub.asked("GET", "resolve")] == [None, f"bytes={BLOCK}-"]


def test_a_body_that_begins_again_for_ever_is_given_up(hub: Any) -> None:
    """The client alone would go on without end: each block received resets its count."""
    hub.commit(REPO, {BIG: BIG_DATA})
    hub.faults.append(Fault(path=BIG, method="GET", cut_after=BLOCK + 1, ignore_range=True))
    with pytest.raises(DownloadError, match="and no end"):
        fetch(only(listing_of(), BIG), retry=Retry(attempts=1))
    assert hub.faults[0].used < 30


BUSY = [
    {"method": method, "status": status, "headers": headers}
    for method, status, headers in (
        ("HEAD", 429, {}),
        ("HEAD", 503, {"Retry-After": "0"}),
        ("GET", 500, {}),
        ("GET", 503, {"Retry-After": "0"}),
    )
]


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize(
    "fault",
    [
        *({**busy, "times": 2} for busy in BUSY),
        *({"method": "GET", "cut_after": 100, "times": times} for times in (1, 3)),
        *({"body": wrong, "times": 2} for wrong in (b"x" * len(DATA[A]), DATA[A][:-1])),
        *({"redirect": where} for where in ("same", "other")),
        {"headers": {"Content-Length": None}},  # the listing has the length
    ],
    ids="-".join,
)
def test_faults_that_pass_are_overcome(hub: Any, fault: dict[str, Any]) -> None:
    hub.faults.append(Fault(path=A, **fault))
    assert contents(fetch(listing_of(), retry=QUICK)) == [DATA[A], DATA[B], DATA[C]]
    assert hub.faults[0].used == fault.get("times", hub.faults[0].used) > 0


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize(
    ("fault", "said", "most"),
    [
        ({"body": b"x" * len(DATA[A])}, "expected sha256 ", 4),
        ({"body": DATA[A][:-1]}, f"expected {len(DATA[A]):,} bytes, got {len(DATA[A]) - 1:,}", 4),
        ({"body": DATA[A] + b"x"}, f"got {len(DATA[A]) + 1:,}", 4),
        ({"body": b""}, "got 0", 4),
        ({"body": b"<!DOCTYPE html>\n<p>log in"}, "begins with the text '<!DOCTYPE html>'", 4),
        ({"body": lfs_pointer(DATA[A])}, r"begins with the text 'version https://git-lfs", 4),
        ({"headers": {"Content-Length": None}, "cut_after": 100}, "bytes, got 100", 99),
        *(({"method": "GET", "cut_after": cut}, "broke off", 18) for cut in (0, 100)),
        ({"method": "HEAD", "status": 503}, "HTTP 503; try again later", 21),
        ({"method": "GET", "status": 503}, "HTTP 503; try again later", 3),
        ({"headers": {"ETag": None}}, "not that of a Hub.*proxy", 99),
        ({"headers": {"X-Repo-Commit": None}}, "not that of a Hub.*proxy", 99),
    ],
)
def test_faults_that_stay_end_in_one_error_and_nothing_wrong_is_kept(
    hub: Any, tmp_path: Path, fault: dict[str, Any], said: str, most: int
) -> None:
    listing = listing_of()
    hub.faults.append(Fault(path=A, **fault))
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(listing, retry=QUICK)
    for part in (A, REPO, listing.commit):
        assert part in str(caught.value)
    assert hub.faults[0].used <= most
    assert list((tmp_path / "hf").rglob("*.incomplete")) == []
    hub.faults.clear()
    assert contents(fetch(listing, retry=QUICK)) == [DATA[A], DATA[B], DATA[C]]


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize("symlinks", [True, False])
@pytest.mark.parametrize("path", [A, NOTES])
@pytest.mark.parametrize("shorter", [0, 1])
def test_a_file_damaged_in_the_cache_is_replaced(
    hub: Any, monkeypatch: pytest.MonkeyPatch, symlinks: bool, path: str, shorter: int
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", not symlinks)
    listing = only(listing_of(suffix=""), path)
    right = {**DATA, **OTHERS}[path]
    (entry,) = fetch(listing, retry=QUICK)
    assert entry.is_symlink() is symlinks
    entry.write_bytes(b"x" * (len(right) - shorter))
    hub.clear_log()
    assert contents(fetch(listing, retry=QUICK)) == [right]
    assert hub.bytes_served == len(right)


def test_a_damaged_blob_that_an_older_commit_left_is_replaced(hub: Any) -> None:
    (entry,) = fetch(only(listing_of(), A), retry=QUICK)
    entry.write_bytes(b"x" * len(DATA[A]))
    hub.commit(REPO, {B: b"new"})
    assert contents(fetch(only(listing_of(), A), retry=QUICK)) == [DATA[A]]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_damaged_file_is_replaced_by_a_busy_server_or_the_error_names_its_answer(
    hub: Any, method: str
) -> None:
    """The damaged content must not come back while the server is busy."""
    listing = only(listing_of(), A)
    (entry,) = fetch(listing, retry=QUICK)
    hub.faults.append(Fault(path=A, method=method, status=503, times=2))
    entry.write_bytes(b"x" * len(DATA[A]))
    assert contents(fetch(listing, retry=QUICK)) == [DATA[A]]
    hub.faults[:] = [Fault(path=A, method=method, status=503)]
    entry.write_bytes(b"x" * len(DATA[A]))
    with pytest.raises(DownloadError, match=r"HTTP 503; try again later"):
        fetch(listing, retry=QUICK)


def test_retry_after_is_honoured_and_bounded(hub: Any) -> None:
    listing = listing_of()
    busy = {"path": A, "method": "GET", "status": 503, "times": 1}
    hub.faults.append(Fault(headers={"Retry-After": "1"}, **busy))  # type: ignore[arg-type]
    start = time.monotonic()
    fetch(listing, retry=Retry(attempts=2, first_wait_s=0))
    assert time.monotonic() - start >= 1
    hub.faults[:] = [Fault(route="revision", status=503, headers={"Retry-After": "3600"})]
    with pytest.raises(DownloadError, match="try again in 3600 s"):
        listing_of()
    assert hub.faults[0].used == 1
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 7200))
    hub.faults[:] = [Fault(route="revision", status=429, headers={"Retry-After": later})]
    with pytest.raises(DownloadError, match=r"try again in (7200|71\d\d) s"):
        listing_of()


def test_a_file_that_fails_keeps_the_others(hub: Any) -> None:
    listing = listing_of()
    hub.faults.append(Fault(path=C, status=404, error_code="EntryNotFound"))
    with pytest.raises(FileNotFoundError, match="seed2"):
        fetch(listing, max_workers=1, retry=QUICK)
    hub.faults[:] = [Fault(status=403, error_code="GatedRepo")]
    hub.clear_log()
    with pytest.raises(PermissionError, match="gated"):
        fetch(listing, retry=QUICK)
    assert len(hub.asked("HEAD")) == 1  # no use in asking again
    hub.faults.clear()
    hub.clear_log()
    fetch(listing, retry=QUICK)
    assert hub.bytes_served == len(DATA[C])


def test_a_body_that_stalls_is_given_up(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    listing = listing_of()
    hub.faults.append(Fault(path=A, method="GET", delay_s=5))
    with pytest.raises(DownloadError, match=r"no answer in time.*HF_HUB_DOWNLOAD_TIMEOUT"):
        fetch(listing, retry=Retry(attempts=1))


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'request'"),
        RuntimeError("Cannot send a request, as the client has been closed."),
        LocalEntryNotFoundError("An error happened"),
    ],
)
def test_errors_of_a_session_closed_by_another_thread_are_retried(
    hub: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It closes the session that all threads share; one of its versions tries HEAD only once."""
    left = [error] * 2
    real = huggingface_hub.hf_hub_download

    def download(tqdm_class: Any, **options: Any) -> Any:
        if left:
            raise left.pop() from ConnectionRefusedError("nobody there")
        return real(**options)

    listing = only(listing_of(), A)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert contents(fetch(listing, retry=QUICK)) == [DATA[A]]
    left += [error] * 9
    with pytest.raises(DownloadError, match="the server cannot be reached"):
        fetch(only(listing_of(), B), retry=QUICK)
