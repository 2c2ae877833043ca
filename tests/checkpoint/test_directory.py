"""One directory on disk: damage is found, reading goes piece by piece, saves and loads may meet."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import native
from replaykit.checkpoint import FORMAT_VERSION, Checkpoint, chunks, reader, save_checkpoint
from replaykit.errors import CheckpointError
from tests.checkpoint.building import make, save
from tests.support.refusals import refuses

# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.pitfall("CK10")
def test_newer_format_version_is_named_instead_of_damage(forge: Any, tmp_path: Path):
    """CK10: the message says which version wrote it and which one reads it."""
    save(tmp_path)
    forge(tmp_path, lambda m: m.update(format_version=FORMAT_VERSION + 1, library_version="9.9"))
    with pytest.raises(
        RuntimeError, match=rf"version {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}.*replaykit 9\.9"
    ):
        make().loads(tmp_path)
    # Also where the newer version puts its checksum somewhere else.
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": "replaykit-checkpoint", "format_version": 7})
    )
    refuses(CheckpointError, "version 7", make().loads, tmp_path)


def test_copied_tensors_do_not_wait_for_checks_of_earlier_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Priorities lie behind all rows, and are wanted before them."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 64)
    save_checkpoint(tmp_path, {"a": {"t": torch.arange(400)}, "b": {"t": torch.arange(3)}}, {})
    assert len(list(tmp_path.glob("*.bin"))) > 5
    continues = threading.Event()

    def crc32(data: Any, value: int = 0) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert continues.wait(20)
        return native.crc32(data, value)

    monkeypatch.setattr(reader, "crc32", crc32)
    with Checkpoint(tmp_path) as saved:
        saved.verify(wait=False)
        assert saved.part("b")["t"].tolist() == [0, 1, 2]
        continues.set()
        saved.verify()
    last = max(tmp_path.glob("*.bin"))
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    with Checkpoint(tmp_path) as saved:
        continues.clear()
        saved.verify(wait=False)
        refuses(CheckpointError, last.name, saved.part, "b")
        continues.set()
        refuses(CheckpointError, last.name, saved.verify)


# -- two at once ----------------------------------------------------------------------------------


@pytest.mark.pitfall("CK1")
def test_saves_and_loads_at_once_see_whole_checkpoints(tmp_path: Path):
    """CK1, C12: of saves to one path each is whole; loads read one of them."""
    path = tmp_path / "shared"
    make(8, start=100).dumps(path)
    wrong: list[Any] = []

    def save_often(number: int) -> None:
        for turn in range(12):
            start = 1000 * number + 10 * turn
            make(8, start=start).dumps(path)

    def load_often() -> None:
        buffer = make()
        for _ in range(25):
            buffer.loads(path)
            ids = buffer["id"].tolist()
            if ids != list(range(ids[0], ids[0] + 8)) or ids[0] % 10:
                wrong.append(ids)
            if buffer["next", "x"].flatten().tolist() != [float(i) for i in ids]:
                wrong.append(ids)

    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    calls = [lambda: save_often(1), lambda: save_often(2), load_often, load_often]
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (errors, wrong) == ([], [])
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(os.listdir(path)) == {"manifest.json", ".lock", *manifest["files"]}
