"""Files of the web: fetched once, continued where they broke off, verified, or one clear error."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets import download
from replaykit.datasets.http_files import DownloadCache, WebFile, default_downloads, fetch_files
from replaykit.datasets.transfers import Retry
from replaykit.errors import DownloadError
from tests.support import Fault, LoopbackHub, lfs_pointer

A, B, C = "dir/a.bin", "dir/b (1).bin", "c.bin"
DATA = {A: os.urandom(3_000_000), B: os.urandom(50_000), C: b""}
AT_ONCE = Retry(attempts=3, first_wait_s=0)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A server; what it serves is `url`. Downloads go below ``tmp_path / "downloads"``."""
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with LoopbackHub({"me/files": DATA}) as hub:
        yield hub


def url(web: LoopbackHub, path: str) -> str:
    quoted = path.replace(" ", "%20").replace("(", "%28").replace(")", "%29")
    return f"{web.url}/datasets/me/files/resolve/main/{quoted}"


def sums(web: LoopbackHub, *paths: str) -> dict[str, str]:
    return {url(web, path): hashlib.sha256(DATA[path]).hexdigest() for path in paths}


def get(web: LoopbackHub, *paths: str, checked: bool = True, **options: Any) -> list[bytes]:
    given = {"checksums": sums(web, *paths)} if checked else {}
    found = download([url(web, p) for p in paths], **{"retry": AT_ONCE, **given, **options})
    return [path.read_bytes() for path in found]


def gets(web: LoopbackHub) -> list[str | None]:
    return [request.range for request in web.requests if request.method == "GET"]


def kept(tmp_path: Path, pattern: str = "*") -> list[str]:
    found = (tmp_path / "downloads").rglob(pattern)
    return sorted(path.name for path in found if path.is_file() and path.name != ".lock")


@pytest.mark.parametrize("checked", [True, False])
def test_files_are_returned_in_order_and_requested_once(web: LoopbackHub, checked: bool) -> None:
    assert get(web, B, A, C, checked=checked) == [DATA[B], DATA[A], DATA[C]]
    web.clear_log()
    assert get(web, A, B, C, checked=checked) == [DATA[A], DATA[B], DATA[C]]
    assert web.requests == []


def test_same_url_given_twice_is_fetched_once(web: LoopbackHub) -> None:
    [path] = download(url(web, B))
    assert path.name == "b (1).bin"
    web.clear_log()
    first, second = download([url(web, A), url(web, A)])
    assert first == second
    assert len(gets(web)) == 1


CUT, FROM = {"method": "GET", "cut_after": 1_000_000, "times": 1}, "bytes=1000000-"
BUSY = {"headers": {"Retry-After": "0"}, "times": 2}
OVERCOME: dict[str, tuple[list[dict[str, Any]], str, list[str | None]]] = {
    "cut": ([CUT], "both", [None, FROM]),
    "ranges ignored": ([CUT, {"method": "GET", "ignore_range": True}], "checked", [None, FROM]),
    "other bytes than asked for": (
        [CUT, {"method": "GET", "headers": {"Content-Range": "bytes 5-9/10"}, "times": 1}],
        "checked",
        [None, FROM, None],
    ),
    "another version": (
        [CUT, {"method": "GET", "headers": {"ETag": '"2"'}, "times": 1}],
        "unchecked",
        [None, FROM, None],
    ),
    "wrong bytes": (
        [{"method": "GET", "body": bytes(3_000_000), "times": 1}],
        "checked",
        [None] * 2,
    ),
    # Without a checksum, a strong ETag is needed to know that it is the same file.
    "no mark": ([{**CUT, "headers": {"ETag": None}}], "unchecked", [None, None]),
    "weak mark": ([{**CUT, "headers": {"ETag": 'W/"1"'}}], "unchecked", [None, None]),
    "no length": ([{"headers": {"Content-Length": None}}], "both", [None]),
    "no HEAD": ([{"method": "HEAD", "status": 501}], "checked", [None]),
    "redirected": ([{"redirect": "same"}], "checked", []),
    "redirected elsewhere": ([{"redirect": "other"}], "checked", []),
    "busy for HEAD": ([{**BUSY, "method": "HEAD", "status": 429}], "checked", [None]),
    "busy for GET": ([{**BUSY, "method": "GET", "status": 503}], "checked", [None] * 3),
}


@pytest.mark.parametrize("name", OVERCOME)
def test_faults_that_pass_are_overcome(web: LoopbackHub, tmp_path: Path, name: str) -> None:
    """What was received is not asked for again, where it can be continued."""
    faults, which, ranges = OVERCOME[name]
    for checked in {"both": (True, False), "checked": (True,), "unchecked": (False,)}[which]:
        shutil.rmtree(tmp_path / "downloads", ignore_errors=True)
        web.clear_log()
        web.faults[:] = [Fault(**fault) for fault in faults]
        retry = Retry(attempts=3, first_wait_s=100 if "busy" in name else 0)
        assert get(web, A, checked=checked, retry=retry) == [DATA[A]]
        assert not ranges or gets(web) == ranges
        heads = [request for request in web.requests if request.method == "HEAD"]
        assert "redirected" not in name or len(heads) == 2, "a HEAD became a GET"
        served = {"cut": len(DATA[A]), "ranges ignored": len(DATA[A]) + 1_000_000}
        assert web.bytes_served == served.get(name, web.bytes_served)


def test_permanently_cut_body_raises_one_error_and_next_call_continues(
    web: LoopbackHub, tmp_path: Path
) -> None:
    web.faults.append(Fault(method="GET", cut_after=400_000))
    with pytest.raises(
        DownloadError, match=r"a\.bin: the transfer broke off; call again"
    ) as caught:
        get(web, A)
    assert "1,200,000 of 3,000,000 bytes" in str(caught.value)
    assert kept(tmp_path, "a.bin") == []
    web.faults.clear()
    web.clear_log()
    assert get(web, A) == [DATA[A]]
    assert web.bytes_served == len(DATA[A]) - 1_200_000


def test_file_changed_on_server_is_fetched_again_in_full(web: LoopbackHub) -> None:
    web.faults.append(Fault(method="GET", cut_after=1_000_000))
    with pytest.raises(DownloadError):
        get(web, A, checked=False, retry=Retry(attempts=1))
    other = os.urandom(3_000_000)
    web.commit("me/files", {A: other})
    web.faults.clear()
    web.clear_log()
    assert get(web, A, checked=False) == [other]
    assert gets(web) == ["bytes=1000000-"]


def test_a_part_that_is_longer_than_the_file_is_forgotten(web: LoopbackHub) -> None:
    cache = DownloadCache(default_downloads())
    [(address, sha256)] = sums(web, B).items()
    file = WebFile(address, sha256=sha256)
    cache.part(file).parent.mkdir(parents=True)
    cache.part(file).write_bytes(b"x" * 60_000)
    assert get(web, B) == [DATA[B]]
    # A server that does not say how long it is answers 416.
    cache.entry(file).unlink()
    cache.part(file).write_bytes(b"x" * 60_000)
    web.faults.append(Fault(method="HEAD", status=405))
    web.clear_log()
    assert get(web, B) == [DATA[B]]
    assert gets(web) == ["bytes=60000-", None]


WRONG = {
    "same length": (b"x" * len(DATA[B]), "expected sha256"),
    "page": (b"<!doctype html><p>log in", "begins with the text '<!doctype html>"),
    "pointer": (lfs_pointer(DATA[B]), "begins with the text 'version https://git-lfs"),
    "shorter": (DATA[B][:-1], "expected sha256"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_bytes_are_never_kept(web: LoopbackHub, tmp_path: Path, wrong: str) -> None:
    body, said = WRONG[wrong]
    web.faults.append(Fault(method="GET", body=body))
    with pytest.raises(DownloadError, match=rf"b%20%281%29\.bin.*{said}"):
        get(web, B)
    assert kept(tmp_path) == []
    web.faults.clear()
    assert get(web, B) == [DATA[B]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html><p>log in", "an HTML page"),
        (lfs_pointer(b"abc"), "a Git LFS pointer"),
        (pickle.dumps({"a": 1}), "a Python pickle"),
        (b"", "an empty file"),
        (b"\0" * 600, "filled with zeros"),
    ],
)
def test_non_hdf5_download_is_not_kept(
    web: LoopbackHub, tmp_path: Path, body: bytes, said: str
) -> None:
    web.commit("me/files", {"x.hdf5": body})
    with pytest.raises(
        DownloadError, match=rf"x\.hdf5 does not verify: not an HDF5 file but {said}"
    ):
        download(url(web, "x.hdf5"), retry=AT_ONCE)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("damage", ["flip", "cut", "replace"])
def test_a_file_that_was_damaged_here_is_fetched_again(
    web: LoopbackHub, checked: bool, damage: str
) -> None:
    [path] = download(url(web, B), checksums=sums(web, B) if checked else None)
    data = bytearray(DATA[B])
    data[7] ^= 1
    path.write_bytes({"flip": data, "cut": data[:-9], "replace": b"other"}[damage])
    assert get(web, B, checked=checked) == [DATA[B]]


def test_another_checksum_is_another_file(web: LoopbackHub, tmp_path: Path) -> None:
    get(web, B)
    other = os.urandom(50_000)
    web.commit("me/files", {B: other})
    new = {url(web, B): hashlib.sha256(other).hexdigest()}
    [path] = download(url(web, B), checksums=new)
    assert path.read_bytes() == other
    assert kept(tmp_path) == ["b (1).bin", "b (1).bin"]


def test_a_size_that_is_known_is_compared_before_anything_is_received(web: LoopbackHub) -> None:
    with pytest.raises(DownloadError, match="the server has 50,000 bytes, expected 49,000"):
        fetch_files([WebFile(url(web, B), size=49_000)], retry=AT_ONCE)
    assert len(gets(web)) == 1


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize(
    ("fault", "error", "said", "most"),
    [
        ({"status": 404}, FileNotFoundError, r"there is no .*a\.bin \(HTTP 404\)", 1),
        ({"status": 403}, PermissionError, r"access to .*a\.bin was refused \(HTTP 403\)", 1),
        ({"status": 500}, DownloadError, r"a\.bin: the server answered HTTP 500; try again la", 3),
        (
            {"status": 503, "headers": {"Retry-After": "3600"}},
            DownloadError,
            "HTTP 503; try again in 3600 s",
            1,
        ),
        ({"headers": {"Content-Encoding": "gzip"}}, DownloadError, "sends the coding 'gzip'", 1),
        (None, DownloadError, "the server cannot be reached", 0),
    ],
)
def test_faults_that_stay_have_different_errors(
    web: LoopbackHub, fault: Any, error: type[Exception], said: str, most: int, method: str
) -> None:
    if fault is None:
        web.close()
    else:
        of = "GET" if "Content-Encoding" in fault.get("headers", {}) else method
        web.faults.append(Fault(path=A, method=of, **fault))
    with pytest.raises(error, match=said):
        get(web, B, A)
    assert sum(fault.used for fault in web.faults) == most


def test_a_body_that_stalls_is_given_up(web: LoopbackHub) -> None:
    web.faults.append(Fault(method="GET", delay_s=30))
    with pytest.raises(DownloadError, match="imed out"):
        get(web, A, retry=Retry(attempts=1, stall_s=0.2))


def test_too_little_disk_space_raises_error_before_any_download(
    web: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=3_049_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="3,050,000 bytes are needed") as caught:
        get(web, A, B)
    assert caught.value.errno == errno.ENOSPC
    assert gets(web) == []


def test_offline_fetch_uses_kept_files_and_names_missing_ones(
    web: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(web, B)
    get(web, C, checked=False)
    web.clear_log()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get(web, B) == [DATA[B]]
    assert get(web, C, checked=False) == [DATA[C]]
    with pytest.raises(FileNotFoundError, match="offline mode, and 2 of 3 files") as caught:
        get(web, A, B, C)
    assert all(url(web, path) in str(caught.value) for path in (A, C))
    assert url(web, B) not in str(caught.value)
    assert web.requests == []


def test_progress_counts_bytes_and_files(web: LoopbackHub) -> None:
    web.faults.append(Fault(path=A, method="GET", cut_after=1_000_000, times=1))
    told: list[Any] = []
    get(web, A, B, progress=told.append)
    last = told[-1]
    assert (last.files_done, last.files_total) == (2, 2)
    assert (last.bytes_done, last.bytes_total) == (3_050_000, 3_050_000)
    assert max(each.bytes_done for each in told) == 3_050_000


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: download("ftp://host/a.h5"), "expected http:// or https://"),
        (lambda: download("http:///a.h5"), "expected http:// or https://"),
        (lambda: download("http://host/"), "expected the name of a file"),
        (lambda: download("http://host/%2e%2e"), "expected the name of a file"),
        (lambda: download("http://host/a%2Fb"), "expected the name of a file"),
        (lambda: download("http://h/a", checksums={"http://h/b": "0" * 64}), "checksums: expected"),
        (lambda: download("http://h/a", checksums={"http://h/a": "0" * 63}), "64 lower-case"),
        (lambda: download("http://h/a", max_workers=0), "max_workers: expected at least 1"),
        (lambda: WebFile("http://h/a", size=-1), "expected bytes >= 0"),
    ],
)
def test_arguments_are_checked(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_damaged_note_is_ignored(web: LoopbackHub, tmp_path: Path) -> None:
    get(web, B, checked=False)
    [note] = (tmp_path / "downloads").rglob("*.json")
    for text in ("{", "[]", '{"sha256": "x"}'):
        note.write_text(text)
        web.clear_log()
        assert get(web, B, checked=False) == [DATA[B]]
        assert len(gets(web)) == 1


# -- answers that RFC 9110 allows or forbids ------------------------------------------------------

BODY = bytes(range(256)) * 40
OLD, NEW = BODY, BODY[::-1]
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that downloads a file from a server with the given answers to GET."""
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    answers: list[Answer] = []
    ranges: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranges.append(self.headers["Range"])
            status, headers, body = answers.pop(0)
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None: ...

    def fetched(*given: Answer, **known: Any) -> tuple[bytes, list[str | None]]:
        answers[:] = given
        ranges.clear()
        file = WebFile(f"http://127.0.0.1:{server.server_port}/a.bin", **known)
        [path] = fetch_files([file], retry=AT_ONCE)
        return path.read_bytes(), list(ranges)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield fetched
        server.shutdown()


def whole(body: bytes, upto: int | None = None, **headers: str) -> Answer:
    """Return an answer with all bytes, which ends after ``upto`` bytes."""
    return 200, {"Content-Length": str(len(body)), **headers}, body[:upto]


def part(body: bytes, first: int, stop: int, total: object = "", **headers: str) -> Answer:
    said = f"bytes {first}-{stop - 1}/{total or len(body)}"
    length = str(stop - first)
    return 206, {"Content-Length": length, "Content-Range": said, **headers}, body[first:stop]


@pytest.mark.parametrize("known", [{}, {"size": len(BODY)}, {"sha256": sha256(BODY).hexdigest()}])
def test_a_shorter_range_than_requested_is_continued(scripted: Any, known: Any) -> None:
    tag = {"ETag": '"1"'}
    first = whole(BODY, 1000, **tag)
    found = scripted(first, part(BODY, 1000, 3000, **tag), part(BODY, 3000, 10240, **tag), **known)
    assert found == (BODY, [None, "bytes=1000-", "bytes=3000-"])


LATE = {"Date": "Tue, 15 Nov 1994 08:12:31 GMT"}
DATED = {"Last-Modified": "Tue, 15 Nov 1994 08:12:30 GMT"}
SAME_SECOND = {"Date": DATED["Last-Modified"]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ETag": '"1"'}, {"ETag": '"1"'}),
        ({**DATED, **LATE}, {}),  # a 206 need not repeat the date
        ({**DATED, **LATE}, {**DATED, **LATE}),
    ],
)
def test_a_strong_validator_continues_a_download(scripted: Any, first: Any, second: Any) -> None:
    rest = part(OLD, 1000, len(OLD), **second)
    assert scripted(whole(OLD, 1000, **first), rest) == (OLD, [None, "bytes=1000-"])


@pytest.mark.parametrize(
    "first", [{**DATED, **SAME_SECOND}, DATED, {"ETag": 'W/"1"', **DATED, **LATE}]
)
def test_a_weak_validator_continues_no_download(scripted: Any, first: Any) -> None:
    assert scripted(whole(OLD, 1000, **first), whole(NEW)) == (NEW, [None, None])


@pytest.mark.parametrize("second", [{}, {"ETag": 'W/"1"'}, {"ETag": '"2"'}])
def test_a_part_without_the_etag_of_the_first_answer_is_refused(scripted: Any, second: Any) -> None:
    """Every 206 has the ETag of the whole file, so this server ignores If-Range."""
    changed = part(NEW, 1000, len(NEW), **second)
    found = scripted(whole(OLD, 1000, ETag='"1"'), changed, whole(NEW))
    assert found == (NEW, [None, "bytes=1000-", None])


@pytest.mark.parametrize("status", [202, 203, 204])
def test_only_the_statuses_of_a_file_are_accepted(scripted: Any, status: int) -> None:
    with pytest.raises(DownloadError, match=rf"a\.bin: the server answered HTTP {status}"):
        scripted((status, {"Content-Length": "0"}, b""))


@pytest.mark.parametrize("coding", ["Identity", ""])
def test_names_of_codings_have_no_case(scripted: Any, coding: str) -> None:
    assert scripted(whole(BODY, **{"Content-Encoding": coding}))[0] == BODY


def test_the_length_of_a_chunked_body_is_that_of_its_chunks(scripted: Any) -> None:
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    headers = {"Transfer-Encoding": "chunked", "Content-Length": "7"}
    assert scripted((200, headers, body))[0] == BODY
