"""What the disk is told, and when: synced, then published, then removed; and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit.checkpoint import chunks
from tests.checkpoint.building import make, restarted, state_of
from tests.support.refusals import refuses


class Trace:
    """Notes the calls into the file system; fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fail_at = fail_at
        for name in ("fsync", "replace", "mkdir", "unlink"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def wrapper(target: Any, *rest: Any, **keywords: Any) -> Any:
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{target}")
            else:
                path = os.fspath(rest[0] if name == "replace" else target)
            if name in ("fsync", "replace") and self.fail_at >= 0:
                self.fail_at -= 1
                if self.fail_at < 0:
                    raise OSError(28, "No space left on device", path)
            self.calls.append((name, path))
            return original(target, *rest, **keywords)

        monkeypatch.setattr(os, name, wrapper)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.pitfall("CK4")
def test_files_are_synced_before_they_are_published(monkeypatch: Any, tmp_path: Path):
    """CK4: data, then the manifest, then the directory; old files go when all that is done."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    path = tmp_path / "a" / "b" / "saved"
    with monkeypatch.context() as patch:
        first = Trace(patch)
        make(5).dumps(path)
    made = [name for call, name in first.calls if call == "mkdir"][:3]
    assert made == [str(tmp_path / "a"), str(tmp_path / "a" / "b"), str(path)]
    for folder in made:  # the name of a new directory lies in its parent
        at = first.calls.index(("mkdir", folder))
        assert ("fsync", str(Path(folder).parent)) in first.calls[at:]
    old = set(json.loads((path / "manifest.json").read_text())["files"])

    with monkeypatch.context() as patch:
        trace = Trace(patch)
        make(8, start=50).dumps(path)
    new = set(json.loads((path / "manifest.json").read_text())["files"])
    assert len(new) > 2
    assert not old & new
    steps = [(call, os.path.basename(name)) for call, name in trace.calls]
    published = steps.index(("replace", "manifest.json"))
    before, after = steps[:published], steps[published + 1 :]
    drafts = [n for call, n in before if call == "fsync" and n.startswith(".manifest.json.")]
    assert len(drafts) == 1
    draft = before.index(("fsync", drafts[0]))
    assert {n for call, n in before[:draft] if call == "fsync"} >= new
    last = max(before.index(("fsync", name)) for name in new)
    assert ("fsync", "saved") in before[last:]  # the names of the new files
    assert after[0] == ("fsync", "saved")  # the new name of the manifest
    # Folders of storages of other tests may go at any time.
    assert not [n for call, n in before if call == "unlink" and n.startswith("data-")]
    assert {n for call, n in after if call == "unlink"} >= old


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_save_that_fails_anywhere_leaves_a_whole_state_and_no_litter(
    monkeypatch: Any, tmp_path: Path
):
    """C1, G1: an error of the disk at every single step."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    make(5).dumps(tmp_path / "count")
    with monkeypatch.context() as patch:
        trace = Trace(patch)
        make(8).dumps(tmp_path / "count")
        total = sum(call in ("fsync", "replace") for call, _ in trace.calls)
    assert total > 5
    states = [state_of(make(5)), state_of(make(8, start=50))]
    outcomes = []
    for fail_at in range(total):
        path = tmp_path / str(fail_at)
        make(5).dumps(path)
        buffer = make(8, start=50)
        with monkeypatch.context() as patch:
            Trace(patch, fail_at)
            refuses(OSError, "No space left", buffer.dumps, path)
        assert state_of(buffer) == states[1]
        loaded = make()
        loaded.loads(path)
        outcomes.append(list(map(restarted, states)).index(state_of(loaded)))
        if not outcomes[-1]:
            manifest = json.loads((path / "manifest.json").read_text())
            assert set(os.listdir(path)) == {"manifest.json", ".lock", *manifest["files"]}
        buffer.dumps(path)
        loaded.loads(path)
        assert torch.equal(loaded["id"], buffer["id"])
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_disk_found_when_a_file_is_closed_leaves_no_litter(monkeypatch: Any, tmp_path: Path):
    """What fails when a file is closed may fail a second time while the files are removed."""
    make(5).dumps(tmp_path)
    before = set(os.listdir(tmp_path))
    original = open
    failed: list[str] = []

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            return self.file.write(data)

        def close(self) -> None:
            self.file.close()
            failed.append("close")
            raise OSError(28, "No space left on device")

        def fileno(self) -> int:
            return self.file.fileno()

    def opened(file: Any, mode: str = "r", **keywords: Any) -> Any:
        found = original(file, mode, **keywords)
        return Full(found) if mode == "xb" else found

    monkeypatch.setattr(chunks, "open", opened, raising=False)
    refuses(OSError, "No space left", make(8).dumps, tmp_path)
    assert failed == ["close", "close"]
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.pitfall("CK1")
def test_saves_and_loads_at_once_see_whole_checkpoints(tmp_path: Path):
    """CK1, C12: of saves to one path each is whole; loads read one of them."""
    path = tmp_path / "shared"
    make(8, start=100).dumps(path)

    def save_often(number: int) -> None:
        for turn in range(12):
            make(8, start=1000 * number + 10 * turn).dumps(path)

    def load_often() -> None:
        buffer = make()
        for _ in range(25):
            buffer.loads(path)
            ids = buffer["id"].tolist()
            assert ids == list(range(ids[0], ids[0] + 8))
            assert ids[0] % 10 == 0
            assert buffer["next", "x"].flatten().tolist() == ids

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(save_often, number) for number in (1, 2)]
        running += [pool.submit(load_often) for _ in range(2)]
        for each in running:
            each.result(60)
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(os.listdir(path)) == {"manifest.json", ".lock", *manifest["files"]}
