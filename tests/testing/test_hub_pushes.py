"""The loopback Hub as one that is written to: what it takes, refuses, and keeps."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support import Fault, LoopbackHub

DATA = b"some bytes"
OID = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({"me/data": {"a.bin": b"a", "b.txt": b"b"}}) as hub:
        yield hub


def ask(
    hub: LoopbackHub, method: str, path: str, body: Any = b"", token: str | None = "t", **more: Any
) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", hub.port)
    data = body if isinstance(body, (bytes, list)) else json.dumps(body).encode()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request(method, path, data, headers, **more)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def commit(hub: LoopbackHub, *operations: tuple[str, dict[str, Any]], **header: Any) -> Any:
    lines = [("header", {"summary": "x", **header}), *operations]
    body = b"\n".join(json.dumps({"key": key, "value": value}).encode() for key, value in lines)
    return ask(hub, "POST", "/api/datasets/me/data/commit/main", body)


def test_a_repository_is_made_once(hub: LoopbackHub) -> None:
    asked = {"name": "new", "organization": "me", "type": "dataset", "private": True}
    status, answer = ask(hub, "POST", "/api/repos/create", asked)
    assert (status, answer["url"]) == (200, f"{hub.url}/datasets/me/new")
    assert list(hub.files("me/new")) == [".gitattributes"]
    status, answer = ask(hub, "POST", "/api/repos/create", asked)
    assert (status, answer["url"]) == (409, f"{hub.url}/datasets/me/new")
    assert ask(hub, "GET", "/api/datasets/me/new", token=None)[0] == 401
    assert ask(hub, "GET", "/api/datasets/me/new")[1]["private"] is True


def test_files_are_kept_in_lfs_or_not_by_their_names(hub: LoopbackHub) -> None:
    files = [{"path": name, "size": 1, "sample": ""} for name in ("a.bin", "new.txt")]
    _, answer = ask(hub, "POST", "/api/datasets/me/data/preupload/main", {"files": files})
    assert answer["files"] == [
        {
            "path": "a.bin",
            "shouldIgnore": False,
            "uploadMode": "lfs",
            "oid": hashlib.sha256(b"a").hexdigest(),
        },
        {"path": "new.txt", "shouldIgnore": False, "uploadMode": "regular"},
    ]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_content_is_sent_once_and_then_committed(hub: LoopbackHub, chunked: bool) -> None:
    batch = "/datasets/me/data.git/info/lfs/objects/batch"
    objects = {"objects": [{"oid": OID, "size": len(DATA)}]}
    _, answer = ask(hub, "POST", batch, objects)
    actions = answer["objects"][0]["actions"]
    put = actions["upload"]["href"].removeprefix(hub.url)
    verify = actions["verify"]["href"].removeprefix(hub.url)
    assert ask(hub, "PUT", put, b"other bytes")[0] == 400
    assert ask(hub, "POST", verify, {"oid": OID, "size": len(DATA)})[0] == 404
    body = [DATA[:4], DATA[4:]] if chunked else DATA
    assert ask(hub, "PUT", put, body, None, encode_chunked=chunked)[0] == 200
    assert ask(hub, "POST", verify, {"oid": OID, "size": len(DATA)})[0] == 200
    _, answer = ask(hub, "POST", batch, objects)
    assert "actions" not in answer["objects"][0]
    status, answer = commit(hub, ("lfsFile", {"path": "x/c.bin", "algo": "sha256", "oid": OID}))
    assert (status, answer["commitOid"]) == (200, hub.head("me/data"))
    assert hub.files("me/data")["x/c.bin"] == DATA


def test_a_commit_adds_and_removes_in_one_step(hub: LoopbackHub) -> None:
    first = hub.head("me/data")
    text = base64.b64encode(b"text").decode()
    status, _ = commit(
        hub,
        ("file", {"path": "c.txt", "content": text, "encoding": "base64"}),
        ("deletedFile", {"path": "a.bin"}),
        parentCommit=first,
    )
    assert status == 200
    assert hub.files("me/data") == {"b.txt": b"b", "c.txt": b"text"}
    assert hub.files("me/data", first) == {"a.bin": b"a", "b.txt": b"b"}


@pytest.mark.parametrize(
    ("operation", "header", "status"),
    [
        (("lfsFile", {"path": "c.bin", "oid": OID}), {}, 400),
        (("deletedFile", {"path": "none"}), {}, 404),
        (("rename", {"path": "none"}), {}, 400),
        (("deletedFile", {"path": "a.bin"}), {"parentCommit": "0" * 40}, 412),
    ],
)
def test_a_commit_that_is_refused_changes_nothing(
    hub: LoopbackHub, operation: Any, header: dict[str, str], status: int
) -> None:
    before = hub.head("me/data")
    assert commit(hub, operation, **header)[0] == status
    assert hub.head("me/data") == before


def test_branches_and_tags_are_created_once(hub: LoopbackHub) -> None:
    head = hub.head("me/data")
    api = "/api/datasets/me/data"
    assert ask(hub, "POST", f"{api}/branch/dev", {})[0] == 200
    assert hub.head("me/data", "dev") == head
    assert ask(hub, "POST", f"{api}/branch/dev", {})[0] == 409
    assert ask(hub, "POST", f"{api}/tag/main", {"tag": "v1"})[0] == 200
    assert hub.files("me/data", "v1") == hub.files("me/data")
    assert ask(hub, "POST", f"{api}/tag/main", {"tag": "v1"})[0] == 409
    assert ask(hub, "POST", f"{api}/tag/none", {"tag": "v2"})[0] == 404
    assert ask(hub, "DELETE", f"{api}/tag/v1")[0] == 200
    assert ask(hub, "DELETE", f"{api}/tag/v1")[0] == 404
    with pytest.raises(KeyError):
        hub.files("me/data", "v1")


def test_write_without_token_is_refused(hub: LoopbackHub) -> None:
    before = hub.head("me/data")
    for path in ("/api/repos/create", "/api/datasets/me/data/commit/main"):
        assert ask(hub, "POST", path, {"name": "x"}, token=None)[0] == 401
    assert hub.head("me/data") == before


def test_a_card_without_yaml_is_found(hub: LoopbackHub) -> None:
    good = ask(hub, "POST", "/api/validate-yaml", {"content": "---\na: b\n---\n"})
    bad = ask(hub, "POST", "/api/validate-yaml", {"content": "words"})
    assert (good[1]["errors"], len(bad[1]["errors"])) == ([], 1)


def test_faults_affect_commits(hub: LoopbackHub) -> None:
    hub.faults.append(Fault(route="commit", status=503, times=1))
    assert commit(hub)[0] == 503
    assert commit(hub)[0] == 200
