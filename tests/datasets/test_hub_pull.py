"""Pulling a data set: the same bytes, at one commit, complete or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import replaykit.datasets
from replaykit.datasets import pull, push
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.datasets.families import D4RL
from replaykit.datasets.hub_sharing import FORMAT_TAG
from replaykit.datasets.transfers import Retry
from replaykit.errors import DownloadError
from tests.datasets.converted import files_of
from tests.datasets.test_hub_processes import wait_for
from tests.datasets.trials import convert, write_source, write_steps
from tests.support import Fault

REPO, FILES = "other/data", {"a.bin": b"1"}
STEPS = "me/steps"
AT_ONCE = Retry(attempts=2, first_wait_s=0)

PULL = """
import hashlib, json, sys
from replaykit.datasets import pull
data = pull("me/steps", root=sys.argv[1])
columns = {"/".join(key): hashlib.sha256(value.numpy().tobytes()).hexdigest()
           for key, value in data.published.columns.items()}
print(json.dumps([str(data.published.path), columns]))
"""


@pytest.fixture
def pushed(hub: Any, target: Path) -> Path:
    """A published data set that is on the hub too, as ``me/steps``."""
    push(target, STEPS, license="mit", token="any")
    hub.clear_log()
    return target


def run(hub: Any, tmp_path: Path, root: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(root)],
        env={**os.environ, **hub.env(tmp_path / "hf"), "HOME": str(tmp_path / "user"), **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def column_gets(hub: Any) -> list[str]:
    return [r.path for r in hub.asked("GET", "resolve") if r.path.endswith(".memmap")]


def test_names_that_need_quoting_survive_and_progress_is_reported(hub: Any, tmp_path: Path) -> None:
    path = write_steps(tmp_path / "a.hdf5", **{"infos/rgb:left cam:é%20": np.arange(4.0)})
    data = replaykit.datasets.convert(path, D4RL, tmp_path / "data")
    push(tmp_path / "data", STEPS, license="mit", token="any")
    told: list[Any] = []
    found = pull(STEPS, root=tmp_path / "pulled", progress=told.append)
    assert told[-1].files_done == told[-1].files_total
    assert told[-1].bytes_done == told[-1].bytes_total > 0
    assert files_of(found.published.path) == files_of(tmp_path / "data")
    assert ("info", "rgb:left cam:é%20") in found.published.columns
    assert torch.equal(found[:]["info", "rgb:left cam:é%20"], torch.arange(4.0).double())
    assert len(found) == len(data)


def test_split_trajectories_are_pushed_and_pulled_too(
    hub: Any, tmp_path: Path, target: Path
) -> None:
    split = tmp_path / "root" / "data_split"
    ensure_split(target, split)
    push(split, STEPS, license="mit", token="any")
    data = pull(STEPS, root=tmp_path / "pulled", episodes=[0], batch_size=3)
    found = data.published
    assert (found.batch_size, found.rows, len(data)) == (torch.Size([2, 4]), 2, 1)
    assert data.sample().shape == (3, 4)  # arguments of a buffer are passed on
    assert files_of(found.path) == files_of(split)


def test_a_commit_that_is_there_needs_no_request(hub: Any, tmp_path: Path, pushed: Path) -> None:
    root, commit = tmp_path / "pulled", hub.head(STEPS)
    first = pull(STEPS, root=root)
    hub.clear_log()
    assert pull(STEPS, root=root, revision=commit).published.path == first.published.path
    assert hub.requests == []
    pull(STEPS, root=root)
    assert [r.route for r in hub.requests if r.route] == ["revision", "tree"]


def test_moved_branch_keeps_earlier_pulls(hub: Any, tmp_path: Path, pushed: Path) -> None:
    root, old = tmp_path / "pulled", hub.head(STEPS)
    before = pull(STEPS, root=root)
    other = tmp_path / "root" / "other"
    convert(other, write_source(tmp_path / "b.h5", records=9, seed=5))
    push(other, STEPS, license="mit", token="any")
    after = pull(STEPS, root=root)
    assert (len(before), len(after)) == (6, 10)
    assert len(pull(STEPS, root=root, revision=old)) == 6
    assert files_of(after.published.path) == files_of(other)


def test_offline_the_last_commit_of_a_branch_is_opened(
    hub: Any, tmp_path: Path, pushed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "pulled"
    hub.tag(STEPS, "v1", hub.head(STEPS))
    pull(STEPS, root=root)
    hub.clear_log()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(pull(STEPS, root=root)) == 6
    assert len(pull(STEPS, root=root, revision=hub.head(STEPS))) == 6
    for revision in ("v1", "0" * 40):
        with pytest.raises(FileNotFoundError, match="offline mode"):
            pull(STEPS, root=root, revision=revision)
    (root / "me" / "steps" / ".revisions" / "main").write_text("../../elsewhere")
    with pytest.raises(FileNotFoundError, match="offline mode"):  # a damaged note is ignored
        pull(STEPS, root=root)
    assert hub.requests == []


def test_pull_of_a_branch_fails_while_the_server_is_down(
    hub: Any, tmp_path: Path, pushed: Path
) -> None:
    root, commit = tmp_path / "pulled", hub.head(STEPS)
    pull(STEPS, root=root)
    hub.close()
    with pytest.raises(DownloadError, match="cannot be reached"):
        pull(STEPS, root=root, retry=AT_ONCE)
    assert len(pull(STEPS, root=root, revision=commit)) == 6
    with pytest.raises(ValueError, match="owner/name"):
        pull("../me", root=tmp_path)


WRONG = {
    "wrong bytes": {"body": b"x" * 96},
    "short": {"body": b"x"},
    "cut": {"cut_after": 1},
    "gone": {"status": 404, "error_code": "EntryNotFound"},
    "busy": {"status": 503},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_unverified_download_is_never_opened(
    hub: Any, tmp_path: Path, pushed: Path, wrong: str
) -> None:
    root = tmp_path / "pulled"
    assert (pushed / "action.memmap").stat().st_size == 96
    hub.faults.append(Fault(path="action.memmap", method="GET", **WRONG[wrong]))
    with pytest.raises((DownloadError, FileNotFoundError), match=r"action\.memmap"):
        pull(STEPS, root=root, retry=AT_ONCE)
    assert [path.name for path in (root / "me" / "steps").iterdir()] == [f".{hub.head(STEPS)}.lock"]
    hub.faults.clear()
    hub.clear_log()
    assert files_of(pull(STEPS, root=root).published.path) == files_of(pushed)
    assert len(column_gets(hub)) < len(list(pushed.rglob("*.memmap")))


def altered(pushed: Path, **entries: Any) -> bytes:
    return json.dumps({**json.loads((pushed / "manifest.json").read_text()), **entries}).encode()


def flipped(pushed: Path) -> bytes:
    data = (pushed / "action.memmap").read_bytes()
    return bytes([data[0] ^ 1]) + data[1:]


OUTSIDE = {"file": "../x", "nbytes": 0, "crc32": "00000000"}
# What is said of a repository in which a file is another one, or none.
DAMAGE: dict[str, tuple[str, Callable[[Path], bytes] | bytes | None]] = {
    "another action.memmap than its manifest": ("action.memmap", flipped),
    "action.memmap with 95 bytes, expected 96": ("action.memmap", bytes(95)),
    "no action.memmap": ("action.memmap", None),
    "no meta.json": ("meta.json", None),
    "expected a data set": ("manifest.json", None),
    "is not JSON": ("manifest.json", b"<html>"),
    f"has format version 99.*'{FORMAT_TAG}'": (
        "manifest.json",
        lambda pushed: altered(pushed, format_version=99),
    ),
    "is damaged": ("manifest.json", lambda pushed: altered(pushed, group_file=OUTSIDE)),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_repository_that_was_damaged_is_refused(
    hub: Any, tmp_path: Path, pushed: Path, said: str
) -> None:
    name, content = DAMAGE[said]
    hub.commit(STEPS, {name: content(pushed) if callable(content) else content})
    with pytest.raises((DownloadError, FileNotFoundError), match=said):
        pull(STEPS, root=tmp_path / "pulled")
    folder = tmp_path / "pulled" / "me" / "steps"
    assert [path.name for path in folder.iterdir()] == [f".{hub.head(STEPS)}.lock"]


def test_files_are_copied_where_they_cannot_be_linked(
    hub: Any, tmp_path: Path, pushed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pull(STEPS, root=tmp_path / "linked").published.path
    assert (found / "action.memmap").stat().st_nlink > 1

    def refuse(*args: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    found = pull(STEPS, root=tmp_path / "copied").published.path
    assert (found / "action.memmap").stat().st_nlink == 1
    assert files_of(found) == files_of(pushed)


@pytest.mark.long  # as of downloads, of which it is shown all the time
def test_waiting_process_completes_pull_of_killed_process(
    hub: Any, tmp_path: Path, pushed: Path
) -> None:
    hub.faults.append(Fault(path="action.memmap", method="GET", delay_s=300, times=1))
    first = run(hub, tmp_path, tmp_path / "pulled", HF_HUB_DOWNLOAD_TIMEOUT="300")
    wait_for(lambda: len(set(column_gets(hub))) >= 8, first)
    second = run(hub, tmp_path, tmp_path / "pulled")
    wait_for(lambda: sum(r.route == "tree" for r in hub.requests) == 2, first)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    gets = column_gets(hub)
    assert len(gets) - len(set(gets)) <= 4  # those that were under way
    path, columns = json.loads(out)
    assert Path(path) == tmp_path / "pulled" / "me" / "steps" / hub.head(STEPS)
    assert files_of(Path(path)) == files_of(pushed)
    ours = replaykit.datasets.open(pushed).published.columns
    assert columns == {
        "/".join(key): hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for key, value in ours.items()
    }
    assert [entry.name for entry in Path(path).parent.iterdir() if "tmp-" in entry.name] == []
