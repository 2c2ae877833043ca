"""Pushing a data set: what arrives, what does not, and what is said when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from replaykit.datasets import pull, push
from replaykit.datasets.hub_sharing import FORMAT_TAG
from replaykit.errors import UploadError
from tests.datasets.converted import files_of
from tests.datasets.trials import convert, write_source
from tests.support import Fault
from tests.support.refusals import refuses

REPO, FILES = "other/data", {"a.bin": b"1"}
TOKEN = "any"


def send(path: Path, repo_id: str = "me/steps", **options: Any) -> str:
    return push(path, repo_id, **{"license": "mit", "token": TOKEN, **options})


def header(hub: Any, repo_id: str = "me/steps") -> dict[str, Any]:
    text = hub.files(repo_id)["README.md"].decode()
    return yaml.safe_load(text.split("---\n")[1])


def manifest_with(path: Path, **origin: str) -> None:
    text = json.loads((path / "manifest.json").read_text())
    text["source"]["origin"].update(origin)
    (path / "manifest.json").write_text(json.dumps(text))


def test_a_repository_has_the_files_of_the_data_set_and_a_card(hub: Any, target: Path) -> None:
    (target / "notes.txt").write_text("mine")
    (target / ".lock").touch()
    (target / "observation.memmap.part").write_bytes(b"x")
    url = send(target)
    there = hub.files("me/steps")
    assert url == f"{hub.url}/datasets/me/steps/commit/{hub.head('me/steps')}"
    ours = files_of(target)
    for name in ("notes.txt", ".lock", "observation.memmap.part"):
        assert name not in there
        del ours[name]
    card = there.pop("README.md")
    assert there.pop(".gitattributes")
    assert there == ours
    assert b'pull("me/steps"' in card
    assert hub.head("me/steps") == hub._state.repos["me/steps"].tags[FORMAT_TAG]


def test_card_lists_licence_size_and_tags(hub: Any, target: Path) -> None:
    send(target, license="cc-by-4.0", tags=["kitchen", "robotics"])
    assert header(hub) == {
        "license": "cc-by-4.0",
        "size_categories": ["n<1K"],
        "tags": ["replaykit", "reinforcement-learning", "kitchen", "robotics"],
    }
    text = hub.files("me/steps")["README.md"].decode()
    assert "6 rows, 2 episodes" in text
    assert "| `next/reward` | float64 | [1] |" in text
    # The licence of the source travels, and replaces that of the card.
    manifest_with(target, license="cc0-1.0")
    send(target, license=None)
    assert header(hub)["license"] == "cc0-1.0"
    with pytest.raises(ValueError, match=r"the source has 'cc0-1\.0', got 'mit'"):
        send(target, license="mit")


def test_wrong_calls_are_refused_before_anything_is_sent(
    hub: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.clear_log()
    for repo_id in ("steps", "me/steps/more", "me/../x", ""):
        refuses(ValueError, "expected 'owner/name'", send, target, repo_id)
    refuses(ValueError, "licence of the data set is not known", send, target, license=None)
    refuses(FileNotFoundError, "absent", send, target.with_name("absent"))
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        refuses(FileNotFoundError, "offline mode forbids", send, target)
    column = target / "action.memmap"
    data = bytearray(column.read_bytes())
    data[0] ^= 1
    column.write_bytes(data)
    refuses(RuntimeError, r"action\.memmap has a wrong checksum", send, target)
    column.write_bytes(data[:-1])
    refuses(RuntimeError, r"action\.memmap has", send, target)
    assert hub.requests == []


def test_a_second_push_replaces_the_first_and_leaves_other_files(
    hub: Any, target: Path, tmp_path: Path
) -> None:
    first_url = send(target)
    first = hub.head("me/steps")
    hub.clear_log()
    assert send(target) == first_url  # the same again
    assert not hub.asked("PUT")
    assert not hub.asked("POST", "commit")
    hub.commit("me/steps", {"paper.pdf": b"%PDF"})
    obsolete = {"old.memmap", "gone/meta.json", "gone/x.memmap"}
    text = json.loads((target / "manifest.json").read_text())
    text["group_file"] = {"file": "old.memmap", "nbytes": 0, "crc32": "00000000"}
    text["arrays"][0] = {**text["arrays"][0], "file": "gone/x.memmap"}
    hub.commit("me/steps", {"manifest.json": json.dumps(text).encode()})
    hub.commit("me/steps", dict.fromkeys(obsolete, b"x"))
    other = tmp_path / "root" / "other"
    convert(other, write_source(tmp_path / "b.h5", records=7, seed=3))
    send(other)
    there = hub.files("me/steps")
    assert files_of(other).items() <= there.items()
    assert there["paper.pdf"] == b"%PDF"
    assert not obsolete & there.keys()
    assert hub.head("me/steps") == hub._state.repos["me/steps"].tags[FORMAT_TAG] != first
    assert pull("me/steps", revision=FORMAT_TAG, root=tmp_path / "pulled").published.rows == 8


def test_push_keeps_text_of_an_existing_card(hub: Any, target: Path) -> None:
    send(target, tags=["a"])
    mine = "---\nlicense: mit\npretty_name: Steps\ntags:\n- a\n- own\n---\n# My words\n"
    hub.commit("me/steps", {"README.md": mine.encode()})
    send(target, license="cc-by-4.0", tags=["b"])
    text = hub.files("me/steps")["README.md"].decode()
    assert text.endswith("\n# My words\n")
    assert header(hub) == {
        "license": "cc-by-4.0",
        "pretty_name": "Steps",
        "size_categories": ["n<1K"],
        "tags": ["a", "own", "replaykit", "reinforcement-learning", "b"],
    }
    hub.commit("me/steps", {"README.md": b"---\ntags: [\n---\nx"})
    with pytest.raises(ValueError, match=r"README\.md in 'me/steps' cannot be read"):
        send(target)


def test_a_branch_is_made_and_not_tagged(hub: Any, target: Path, tmp_path: Path) -> None:
    hub.commit("me/steps", {"x.txt": b"1"})
    main = hub.head("me/steps")
    send(target, revision="trial/one")
    assert hub.head("me/steps") == main
    assert FORMAT_TAG not in hub._state.repos["me/steps"].tags
    found = pull("me/steps", revision="trial/one", root=tmp_path / "pulled")
    assert found.published.path.name == hub.head("me/steps", "trial/one")


@pytest.mark.parametrize("route", ["create", "preupload", "lfs-batch", "lfs-put", "commit"])
def test_failed_push_raises_error_and_changes_nothing(
    hub: Any, target: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("me/steps", {"x.txt": b"1"})
    before = hub.head("me/steps")
    hub.faults.append(Fault(route=route, status=500))
    with pytest.raises(UploadError, match=r"could not push to .*'me/steps'.*push again") as caught:
        send(target)
    assert "\n" not in str(caught.value).strip()
    assert hub.head("me/steps") == before
    hub.faults.clear()
    hub.clear_log()
    send(target)
    assert files_of(target).items() <= hub.files("me/steps").items()
    # What had arrived is not sent anew.
    assert bool(hub.asked("PUT")) == (route != "commit")


def test_two_pushes_at_once_do_not_mix(hub: Any, target: Path) -> None:
    hub.faults.append(Fault(route="commit", status=412, times=1))
    with pytest.raises(UploadError, match="another client has pushed to it in between"):
        send(target)
    send(target)
    before = hub.head("me/steps")
    hub.commit("me/steps", {"x.txt": b"1"})
    # The branch is listed as it was before somebody else's commit.
    info = json.dumps({"id": "me/steps", "sha": before}).encode()
    hub.faults.append(Fault(route="revision", body=info, times=1))
    (target / "manifest.json").write_bytes((target / "manifest.json").read_bytes() + b"\n")
    with pytest.raises(UploadError, match="another client has pushed"):
        send(target)


def test_a_token_is_needed_to_write_and_to_read_private_repositories(
    hub: Any, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(PermissionError, match="log in with a token"):
        send(target, token=None)
    assert "me/steps" not in hub._state.repos
    send(target, private=True)
    with pytest.raises(FileNotFoundError, match="that you may see"):
        pull("me/steps", root=tmp_path / "pulled")
    assert len(pull("me/steps", root=tmp_path / "pulled", token=TOKEN)) == 6


def test_unreachable_hub_raises_upload_error(hub: Any, target: Path) -> None:
    hub.close()
    with pytest.raises(UploadError, match=r"could not push to .* push again"):
        send(target)
