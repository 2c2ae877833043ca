"""The loopback Hub: what it answers, what it logs, and every fault that it can put in."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.support import Fault, LoopbackHub, lfs_pointer

REPO = "me/data"
H5 = "DAPG(expert)/door_v2d-v1/seed0/a b.h5"
DATA = bytes(range(256)) * 40
FILES = {H5: DATA, "DAPG(expert)/door_v2d-v1_extra/b.h5": b"b", "README.md": b"hello"}


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({REPO: FILES}) as hub:
        yield hub


def ask(
    hub: LoopbackHub, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", hub.port, timeout=10)
    try:
        connection.request(method, path, body, names)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def resolve(path: str = H5, revision: str = "main") -> str:
    return f"/datasets/{REPO}/resolve/{revision}/{quote(path)}"


# What it answers


@pytest.mark.parametrize("suffix", ["", "/revision/main", "/revision/v1", "/revision/{c:.7}"])
def test_info_gives_the_commit_of_a_branch_tag_and_short_id(hub: LoopbackHub, suffix: str) -> None:
    commit = hub.head(REPO)
    hub.tag(REPO, "v1", commit)
    answer, body = ask(hub, "GET", f"/api/datasets/{REPO}{suffix.format(c=commit)}")
    info = json.loads(body)
    assert (answer.status, info["id"], info["sha"]) == (200, REPO, commit)
    assert [entry["rfilename"] for entry in info["siblings"]] == sorted(FILES)


def test_tree_gives_hashes_as_the_hub_does(hub: LoopbackHub) -> None:
    _, body = ask(hub, "GET", f"/api/datasets/{REPO}/tree/main?recursive=true&expand=false")
    entries = {entry["path"]: entry for entry in json.loads(body)}
    assert {path for path, e in entries.items() if e["type"] == "file"} == set(FILES)
    assert entries["DAPG(expert)/door_v2d-v1/seed0"]["type"] == "directory"
    assert entries[H5]["lfs"]["oid"] == hashlib.sha256(DATA).hexdigest()
    assert entries[H5]["size"] == entries[H5]["lfs"]["size"] == len(DATA)
    assert "lfs" not in entries["README.md"]
    # `printf hello | git hash-object --stdin`
    assert entries["README.md"]["oid"] == "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"


def test_tree_of_a_directory_and_without_recursion(hub: LoopbackHub) -> None:
    _, body = ask(hub, "GET", f"/api/datasets/{REPO}/tree/main")
    assert [entry["path"] for entry in json.loads(body)] == ["DAPG(expert)", "README.md"]
    below = quote("DAPG(expert)/door_v2d-v1", safe="")
    _, body = ask(hub, "GET", f"/api/datasets/{REPO}/tree/main/{below}?recursive=true")
    assert [entry["path"] for entry in json.loads(body)] == [H5.rpartition("/")[0], H5]
    answer, _ = ask(hub, "GET", f"/api/datasets/{REPO}/tree/main/none?recursive=true")
    assert (answer.status, answer.headers["X-Error-Code"]) == (404, "EntryNotFound")


@pytest.mark.parametrize("page_size", [1, 2, 3, 100])
def test_pages_of_a_tree_together_are_the_tree(hub: LoopbackHub, page_size: int) -> None:
    first = f"/api/datasets/{REPO}/tree/main?recursive=true&expand=false"
    whole = json.loads(ask(hub, "GET", first)[1])
    hub.page_size = page_size
    entries, path, pages = [], first, 0
    while path:
        answer, body = ask(hub, "GET", path)
        entries += json.loads(body)
        pages += 1
        link = answer.headers["Link"]
        path = "?".join(urlsplit(link[1 : link.index(">")])[2:4]) if link else ""
    assert entries == whole
    assert pages == -(-len(whole) // page_size)


def test_paths_info_gives_the_files_that_exist(hub: LoopbackHub) -> None:
    body = f"paths={quote(H5)}&paths=none.h5&expand=false"
    kind = "application/x-www-form-urlencoded"
    where = f"/api/datasets/{REPO}/paths-info/main"
    entries = json.loads(ask(hub, "POST", where, body, Content_Type=kind)[1])
    assert [entry["path"] for entry in entries] == [H5]


def test_head_and_get_of_a_file_agree(hub: LoopbackHub) -> None:
    head, nothing = ask(hub, "HEAD", resolve())
    answer, body = ask(hub, "GET", resolve())
    assert (nothing, body) == (b"", DATA)
    for name in ("ETag", "X-Repo-Commit", "Content-Length"):
        assert head.headers[name] == answer.headers[name]
    assert answer.headers["ETag"] == f'"{hashlib.sha256(DATA).hexdigest()}"'
    assert answer.headers["X-Repo-Commit"] == hub.head(REPO)
    assert answer.headers["Content-Length"] == str(len(DATA))


@pytest.mark.parametrize(
    ("header", "expected", "content_range"),
    [
        ("bytes=10-", DATA[10:], f"bytes 10-{len(DATA) - 1}/{len(DATA)}"),
        ("bytes=10-19", DATA[10:20], f"bytes 10-19/{len(DATA)}"),
        ("bytes=-7", DATA[-7:], f"bytes {len(DATA) - 7}-{len(DATA) - 1}/{len(DATA)}"),
        ("bytes=5-999999", DATA[5:], f"bytes 5-{len(DATA) - 1}/{len(DATA)}"),
    ],
)
def test_range_request_returns_part_of_a_file(
    hub: LoopbackHub, header: str, expected: bytes, content_range: str
) -> None:
    answer, body = ask(hub, "GET", resolve(), Range=header)
    assert (answer.status, body) == (206, expected)
    assert answer.headers["Content-Range"] == content_range
    assert hub.bytes_served == len(expected)
    assert hub.requests[-1].range == header


def test_range_beyond_the_end_is_416(hub: LoopbackHub) -> None:
    assert ask(hub, "GET", resolve(), Range=f"bytes={len(DATA)}-")[0].status == 416


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/datasets/me/none", "RepoNotFound"),
        (f"/api/datasets/{REPO}/revision/none", "RevisionNotFound"),
        (f"/api/datasets/{REPO}/tree/none", "RevisionNotFound"),
        (resolve("none.h5"), "EntryNotFound"),
        ("/api/anything/else", "EntryNotFound"),
    ],
)
def test_missing_resource_is_404_with_a_code(hub: LoopbackHub, path: str, code: str) -> None:
    answer, body = ask(hub, "GET", path)
    assert (answer.status, answer.headers["X-Error-Code"]) == (404, code)
    assert json.loads(body)["error"]


def test_commits_add_replace_and_remove_and_old_ones_stay(hub: LoopbackHub) -> None:
    first = hub.head(REPO)
    second = hub.commit(REPO, {H5: b"new", "README.md": None, "c.h5": b"c"})
    assert hub.head(REPO) == second != first
    assert ask(hub, "GET", resolve())[1] == b"new"
    assert ask(hub, "GET", resolve(revision=first))[1] == DATA
    assert ask(hub, "GET", resolve("README.md"))[0].status == 404
    assert ask(hub, "GET", resolve("README.md", first))[0].status == 200
    assert ask(hub, "GET", resolve("c.h5", second[:7]))[1] == b"c"


def test_a_commit_that_fails_changes_nothing(hub: LoopbackHub) -> None:
    before = hub.head(REPO)
    with pytest.raises(FileNotFoundError):
        hub.commit(REPO, {"new.h5": b"1", "none.h5": None})
    with pytest.raises(ValueError, match="expected a relative path"):
        hub.commit(REPO, {"new.h5": b"1", "../x": b"2"})
    with pytest.raises(ValueError, match="owner/name"):
        hub.commit("data", {})
    assert hub.head(REPO) == before
    assert ask(hub, "GET", resolve("new.h5"))[0].status == 404


def test_commit_ids_are_the_same_in_every_run() -> None:
    ids = [LoopbackHub({REPO: FILES}).commit(REPO, {"c.h5": b"c"}) for _ in range(2)]
    assert ids[0] == ids[1]
    hub = LoopbackHub({REPO: FILES})
    assert hub.commit(REPO, {}) != hub.commit(REPO, {})


def test_local_files_are_served(hub: LoopbackHub, tmp_path: Path) -> None:
    path = tmp_path / "big.h5"
    path.write_bytes(os.urandom((1 << 20) + 17))
    hub.commit(REPO, {"big.h5": path})
    answer, body = ask(hub, "GET", resolve("big.h5"))
    assert body == path.read_bytes()
    assert answer.headers["ETag"] == f'"{hashlib.sha256(body).hexdigest()}"'
    assert ask(hub, "GET", resolve("big.h5"), Range="bytes=1048570-")[1] == body[1048570:]


def test_hub_logs_requests_and_counts_bytes(hub: LoopbackHub) -> None:
    ask(hub, "HEAD", resolve())
    ask(hub, "GET", resolve())
    ask(hub, "GET", "/api/other")
    log = [(request.method, request.path, request.route) for request in hub.requests]
    file = f"/datasets/{REPO}/resolve/main/{H5}"
    assert log == [("HEAD", file, "resolve"), ("GET", file, "resolve"), ("GET", "/api/other", None)]
    assert hub.bytes_served == len(DATA)
    hub.clear_log()
    assert (hub.requests, hub.bytes_served) == ([], 0)


def test_one_connection_serves_many_requests(hub: LoopbackHub) -> None:
    connection = HTTPConnection("127.0.0.1", hub.port, timeout=10)
    connection.connect()
    first = connection.sock
    for path in (resolve(), "/api/none", resolve("README.md")):
        connection.request("GET", path)
        connection.getresponse().read()
        assert connection.sock is first
    connection.close()


def test_env_points_a_subprocess_to_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from huggingface_hub import hf_hub_download as download\n"
        f"path = Path(download({REPO!r}, {H5!r}, repo_type='dataset'))\n"
        "print(path.read_bytes() == bytes(range(256)) * 40)"
    )
    env = {**os.environ, **hub.env(tmp_path / "hf")}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.strip() == "True", run.stderr
    assert {request.path for request in hub.requests} == {f"/datasets/{REPO}/resolve/main/{H5}"}
    assert (tmp_path / "hf" / "hub").is_dir()


# Faults


def test_error_status_with_code_and_headers_a_number_of_times(hub: LoopbackHub) -> None:
    fault = Fault(
        status=503, error_code="Busy", headers={"Retry-After": "7"}, method="GET", times=2
    )
    hub.faults.append(fault)
    answers = [ask(hub, "GET", resolve())[0] for _ in range(3)]
    assert [answer.status for answer in answers] == [503, 503, 200]
    assert answers[0].headers["Retry-After"] == "7"
    assert answers[0].headers["X-Error-Code"] == "Busy"
    assert ask(hub, "HEAD", resolve())[0].status == 200
    assert fault.used == 2


def test_faults_affect_only_matching_requests(hub: LoopbackHub) -> None:
    hub.faults.append(Fault(path="DAPG(expert)/door_v2d-v1/*", status=500))
    hub.faults.append(Fault(route="tree", status=503))
    assert ask(hub, "GET", resolve())[0].status == 500
    assert ask(hub, "GET", resolve("DAPG(expert)/door_v2d-v1_extra/b.h5"))[0].status == 200
    assert ask(hub, "GET", f"/api/datasets/{REPO}/tree/main")[0].status == 503
    assert ask(hub, "GET", f"/api/datasets/{REPO}")[0].status == 200


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_cut_after_fault_shortens_body(hub: LoopbackHub, n: int) -> None:
    hub.faults.append(Fault(cut_after=n, times=1))
    with pytest.raises(IncompleteRead) as caught:
        ask(hub, "GET", resolve())
    assert caught.value.partial == DATA[:n]
    assert hub.bytes_served == n
    assert ask(hub, "GET", resolve())[1] == DATA


@pytest.mark.parametrize("wrong", [b"x" * len(DATA), DATA[:-1], b"<html>", lfs_pointer(DATA)])
def test_other_body_under_the_right_etag(hub: LoopbackHub, wrong: bytes) -> None:
    right = ask(hub, "HEAD", resolve())[0].headers["ETag"]
    hub.faults.append(Fault(body=wrong))
    head, _ = ask(hub, "HEAD", resolve())
    answer, body = ask(hub, "GET", resolve())
    assert body == wrong
    assert head.headers["ETag"] == answer.headers["ETag"] == right
    assert head.headers["Content-Length"] == answer.headers["Content-Length"] == str(len(wrong))


def test_ignore_range_fault_returns_whole_file(hub: LoopbackHub) -> None:
    hub.faults.append(Fault(ignore_range=True))
    answer, body = ask(hub, "GET", resolve(), Range="bytes=10-")
    assert (answer.status, body) == (200, DATA)


@pytest.mark.parametrize("name", ["ETag", "X-Repo-Commit", "Content-Length"])
def test_headers_fault_removes_header(hub: LoopbackHub, name: str) -> None:
    hub.faults.append(Fault(headers={name: None}))
    for method in ("HEAD", "GET"):
        answer, body = ask(hub, method, resolve())
        assert name not in answer.headers
        assert body == (DATA if method == "GET" else b"")


@pytest.mark.parametrize("where", ["same", "other"])
def test_redirect_fault_redirects_requests(hub: LoopbackHub, where: str) -> None:
    hub.faults.append(Fault(redirect=where))
    answer, _ = ask(hub, "HEAD", resolve())
    target = urlsplit(answer.headers["Location"])
    assert answer.status == 302
    assert (target.port == hub.port) is (where == "same")
    assert answer.headers["X-Linked-Size"] == str(len(DATA))
    connection = HTTPConnection("127.0.0.1", target.port or 0, timeout=10)
    connection.request("GET", target.path)
    stored = connection.getresponse()
    assert stored.read() == DATA
    assert stored.headers["ETag"] == answer.headers["X-Linked-Etag"]
    assert stored.headers["X-Repo-Commit"] == answer.headers["X-Repo-Commit"] == hub.head(REPO)
    connection.close()


def test_rate_and_delay_faults_slow_body(hub: LoopbackHub) -> None:
    hub.faults.append(Fault(bytes_per_s=len(DATA) / 0.4, times=1))
    hub.faults.append(Fault(delay_s=0.3, times=1))
    for least in (0.3, 0.3):
        start = time.monotonic()
        assert ask(hub, "GET", resolve())[1] == DATA
        assert time.monotonic() - start >= least


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": 200},
        {"redirect": "elsewhere"},
        {"bytes_per_s": 0},
        {"cut_after": -1},
        {"times": -1},
        {"delay_s": -0.1},
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Fault(**wrong)  # type: ignore[arg-type]


# Life


def test_close_ends_slow_answers_idle_connections_and_threads() -> None:
    before = set(threading.enumerate())
    hub = LoopbackHub({REPO: FILES}).start()
    hub.faults.append(Fault(bytes_per_s=10))
    idle = socket.create_connection(("127.0.0.1", hub.port))
    slow = HTTPConnection("127.0.0.1", hub.port, timeout=10)
    slow.request("GET", resolve())
    answer = slow.getresponse()
    start = time.monotonic()
    hub.close()
    assert time.monotonic() - start < 3
    assert set(threading.enumerate()) - before == set()
    with pytest.raises((IncompleteRead, ConnectionError)):
        answer.read()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", hub.port)).close()
    idle.close()
    slow.close()
    hub.close()  # a second time: nothing


def test_no_address_before_start() -> None:
    with pytest.raises(RuntimeError, match="with statement"):
        _ = LoopbackHub().url


def test_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size"):
        LoopbackHub(page_size=0)
