"""The loopback Hub: what the tests of downloads and pushes would not notice if it were wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.support import Fault, LoopbackHub
from tests.support.refusals import refuses

REPO = "me/data"
H5 = "DAPG(expert)/door_v2d-v1/seed0/a b.h5"
DATA = bytes(range(256)) * 40
FILES = {H5: DATA, "README.md": b"hello"}
FILE = f"/datasets/{REPO}/resolve/main/{quote(H5)}"
API = f"/api/datasets/{REPO}"
OID = hashlib.sha256(b"some bytes").hexdigest()


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({REPO: FILES}) as hub:
        yield hub


def ask(
    hub: LoopbackHub, method: str, path: str, body: Any = None, *, port: int = 0, **headers: str
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port or hub.port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def push(hub: LoopbackHub, method: str, path: str, body: Any = b"") -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(hub, method, path, data, Authorization="Bearer t")[0].status


def commit(**value: Any) -> bytes:
    """Return the body of a commit of one operation; ``key`` names it, ``parent`` its parent."""
    header = {"key": "header", "value": {"summary": "x", "parentCommit": value.pop("parent", None)}}
    entry = {"key": value.pop("key"), "value": value}
    return b"\n".join(json.dumps(line).encode() for line in (header, entry))


def test_commits_are_whole_and_old_ones_stay(hub: LoopbackHub) -> None:
    first = hub.head(REPO)
    for error, words, repo_id, files in (
        (FileNotFoundError, "no such file", REPO, {"new.h5": b"1", "none.h5": None}),
        (ValueError, "expected a relative path", REPO, {"new.h5": b"1", "../x": b"2"}),
        (ValueError, "owner/name", "data", {}),
    ):
        refuses(error, words, hub.commit, repo_id, files)
    assert hub.head(REPO) == first
    second = hub.commit(REPO, {H5: b"new", "README.md": None, "c.h5": b"c"})
    assert hub.files(REPO, second[:7]) == hub.files(REPO) == {H5: b"new", "c.h5": b"c"}
    assert hub.files(REPO, first) == FILES
    again = LoopbackHub({REPO: FILES})
    assert again.head(REPO) == first  # ids are the same in every run
    assert again.commit(REPO, {}) != again.commit(REPO, {})


@pytest.mark.parametrize("where", ["same", "other"])
def test_redirect_fault_redirects_requests(hub: LoopbackHub, where: str) -> None:
    hub.faults.append(Fault(redirect=where))
    answer, _ = ask(hub, "HEAD", FILE)
    target = urlsplit(answer.headers["Location"])
    assert (answer.status, target.port == hub.port) == (302, where == "same")
    assert answer.headers["X-Linked-Size"] == str(len(DATA))
    stored, body = ask(hub, "GET", target.path, port=target.port or 0)
    assert body == DATA
    assert stored.headers["ETag"] == answer.headers["X-Linked-Etag"]
    assert stored.headers["X-Repo-Commit"] == answer.headers["X-Repo-Commit"] == hub.head(REPO)


def test_faults_affect_matching_requests_a_number_of_times(hub: LoopbackHub) -> None:
    busy = Fault(path="DAPG(expert)/*", method="GET", status=503, headers={"A": "7"}, times=2)
    hub.faults.extend([busy, Fault(path=H5, bytes_per_s=len(DATA) / 0.4, times=1)])
    answers = [ask(hub, "GET", FILE)[0] for _ in range(2)]
    assert [(answer.status, answer.headers["A"]) for answer in answers] == [(503, "7")] * 2
    assert ask(hub, "GET", FILE.replace(quote(H5), "README.md"))[1] == b"hello"
    assert ask(hub, "GET", API)[0].status == 200
    start = time.monotonic()
    assert ask(hub, "GET", FILE)[1] == DATA
    assert time.monotonic() - start >= 0.3
    assert (busy.used, hub.bytes_served) == (2, len(b"hello") + len(DATA))


REFUSED = {
    "repository twice": ("POST", "/api/repos/create", {"name": "data"}, 409),
    "bytes of another hash": ("PUT", f"/_lfs/{REPO}/{OID}", b"other bytes", 400),
    "verification of nothing": ("POST", f"/_lfs/{REPO}/{OID}/verify", {"size": 10}, 404),
    "content not sent": (
        "POST", f"{API}/commit/main", commit(key="lfsFile", path="c.bin", oid=OID), 400
    ),
    "removal of nothing": ("POST", f"{API}/commit/main", commit(key="deletedFile", path="x"), 404),
    "unknown operation": ("POST", f"{API}/commit/main", commit(key="rename", path="x"), 400),
    "other parent": (
        "POST", f"{API}/commit/main", commit(key="deletedFile", path=H5, parent="0" * 40), 412
    ),
    "branch twice": ("POST", f"{API}/branch/main", {}, 409),
    "tag of nothing": ("POST", f"{API}/tag/none", {"tag": "v2"}, 404),
    "tag twice": ("POST", f"{API}/tag/main", {"tag": "v1"}, 409),
    "no such tag": ("DELETE", f"{API}/tag/v2", b"", 404),
}  # fmt: skip


def test_refused_pushes_change_nothing(hub: LoopbackHub) -> None:
    head = hub.head(REPO)
    hub.tag(REPO, "v1", head)
    for name, (method, path, body, status) in REFUSED.items():
        assert push(hub, method, path, body) == status, name
        assert (hub.head(REPO), hub.files(REPO, "v1")) == (head, FILES), name
        data = body if isinstance(body, bytes) else json.dumps(body)
        without_token = 400 if "_lfs" in path and method == "PUT" else 401
        assert ask(hub, method, path, data)[0].status == without_token, name
    text = base64.b64encode(b"text").decode()
    body = commit(key="file", path="c.txt", content=text, encoding="base64", parent=head)
    assert push(hub, "POST", f"{API}/commit/main", body) == 200
    assert hub.files(REPO) == {**FILES, "c.txt": b"text"}
