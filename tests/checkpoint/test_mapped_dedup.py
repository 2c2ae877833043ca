"""``loads(path, mmap=True)`` of rows whose observations are stored once."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer
from replaykit.checkpoint import ReadLater
from replaykit.errors import CheckpointError
from tests.checkpoint.building import equal, opened_both_ways
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("small_files")

SLOTS = 300
KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "some keys": {"dedup_next": ["pixels"]},
    "lanes": {"ndim": 2},
    "streams": {"lane_key": "env"},
    "rings": {"lane_key": "env"},
}


def make(kind: str, slots: int = SLOTS, **options: Any) -> ReplayBuffer:
    size = slots * (3 if kind == "lanes" else 1)
    options = {"dedup_next": True, **KINDS[kind], **options}
    return ReplayBuffer(
        storage=LazyTensorStorage(size, **options),
        writer=LaneWriter(length=90) if kind == "rings" else None,
        batch_size=32,
        generator=torch.Generator().manual_seed(0),
    )


def rows(kind: str, first: int, count: int) -> TensorDict:
    """Transitions of streams that go on from call to call; every seventh ends."""
    lanes = [3] if kind == "lanes" else []
    shape = [count, *lanes]
    number = torch.arange(first, first + count).reshape([count] + [1] * len(lanes)).expand(shape)
    env = number % 3
    step = 3 if "env" in KINDS[kind].values() else 1
    time = number // step
    done = (time % 7 == 6).unsqueeze(-1)

    def observed(at: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = at.unsqueeze(-1) * 5 + torch.arange(700)
        return {"pixels": pixels.to(torch.uint8), "state": at.unsqueeze(-1).float().contiguous()}

    fresh = torch.where(done.squeeze(-1), time + 1000, time + 1)
    following = {**observed(fresh), "done": done, "reward": done.float()}
    found = TensorDict({**observed(time), "env": env.contiguous(), "next": following}, shape)
    return found.transpose(0, 1).contiguous() if lanes else found


def reward(rb: ReplayBuffer) -> torch.Tensor:
    """A column that every row has."""
    return rb.storage.require().column(("next", "reward"), rb.storage.ledger.length)


@pytest.mark.parametrize(
    ("kind", "count", "slots"),
    [
        *((kind, count, SLOTS) for kind in KINDS for count in (150, SLOTS + 77)),
        *(("ring", count, SLOTS) for count in (1, SLOTS)),
        ("streams", 1, SLOTS),
        *((kind, 250, SLOTS + 100) for kind in KINDS),
    ],
)
def test_mapped_load_equals_a_plain_load(kind: str, count: int, slots: int, tmp_path: Path) -> None:
    filled = make(kind)
    for first in range(0, count, 100):
        filled.extend(rows(kind, first, min(100, count - first)))
    filled.dumps(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    mapped, plain = opened_both_ways(lambda: make(kind, slots), tmp_path)
    # In another capacity, rows are in the order of their writes.
    assert slots > SLOTS or equal(mapped[:], filled[:])
    for first in range(count, count + 300, 100):
        assert equal(mapped.sample(), plain.sample())
        at = torch.arange(3)
        for rb in (mapped, plain):
            rb.extend(rows(kind, first, 100))
            if kind != "lanes":
                rb.storage.edit_columns({("pixels",): rb["next", "pixels"][5:8]}, at)
    assert equal(mapped[:], plain[:])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    mapped.dumps(tmp_path)  # and the files of what is mapped go
    again = make(kind, slots)
    again.loads(tmp_path, mmap=True)
    assert equal(again[:], plain[:])


USES: dict[str, Callable[[ReplayBuffer, str, Path], Any]] = {
    "sample": lambda rb, kind, folder: rb.sample(),
    "read": lambda rb, kind, folder: rb[:],
    "read a key": lambda rb, kind, folder: rb["next", "state"],
    "extend": lambda rb, kind, folder: rb.extend(rows(kind, SLOTS, 20)),
    "place": lambda rb, kind, folder: rb.storage.set(
        torch.tensor([5, 9]), rows(kind, 70, 2), set_cursor=False
    ),
    "edit": lambda rb, kind, folder: rb.storage.edit_columns(
        {("state",): torch.zeros(2, 1)}, torch.arange(2)
    ),
    "dumps": lambda rb, kind, folder: rb.dumps(folder / "again"),
    "pickle": lambda rb, kind, folder: pickle.dumps(rb),
    "state": lambda rb, kind, folder: rb.state_dict(),
    "count": lambda rb, kind, folder: rb.storage.overflow_rows,
}


@pytest.mark.parametrize("kind", ["ring", "streams"])
@pytest.mark.parametrize("use", USES)
def test_any_first_use_of_a_mapped_load_equals_a_plain_load(
    use: str, kind: str, tmp_path: Path
) -> None:
    filled = make(kind)
    filled.extend(rows(kind, 0, 290))
    filled.dumps(tmp_path)
    mapped, plain = opened_both_ways(lambda: make(kind), tmp_path)
    for rb in (mapped, plain):
        USES[use](rb, kind, tmp_path)
        if use == "pickle":
            assert equal(pickle.loads(pickle.dumps(rb))[:], filled[:])
    assert equal(mapped[:], plain[:])
    assert equal(mapped.sample(), plain.sample())
    assert mapped.storage.overflow_rows == plain.storage.overflow_rows > 0


def test_late_read_by_another_thread_keeps_rows_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = make("ring")
    filled.extend(rows("ring", 0, 150))
    filled.dumps(tmp_path)
    mapped, plain = opened_both_ways(lambda: make("ring"), tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    original = ReadLater.read

    def read(self: ReadLater[Any]) -> Any:
        found = original(self)
        if threading.current_thread() is asking:
            reading.set()
            go_on.wait(10)
        return found

    monkeypatch.setattr(ReadLater, "read", read)
    asking = threading.Thread(target=lambda: mapped.storage.overflow_rows)
    writing = threading.Thread(target=lambda: mapped.extend(rows("ring", 150, 30)))
    asking.start()
    assert reading.wait(10)
    writing.start()
    writing.join(0.2)
    go_on.set()
    for thread in (asking, writing):
        thread.join(10)
        assert not thread.is_alive()
    plain.extend(rows("ring", 150, 30))
    assert mapped.storage.overflow_rows == plain.storage.overflow_rows
    for buffer in (mapped, plain):
        buffer.extend(rows("ring", 180, 25))
    assert equal(mapped[:], plain[:])


@pytest.mark.parametrize("kind", KINDS)
def test_mapped_buffer_can_be_emptied_unread(kind: str, tmp_path: Path) -> None:
    filled = make(kind)
    filled.extend(rows(kind, 0, SLOTS))
    filled.dumps(tmp_path)
    mapped, fresh = make(kind), make(kind)
    mapped.loads(tmp_path, mmap=True)
    mapped.empty()
    assert mapped.storage.overflow_rows == 0
    for first in (0, 100, 200, 300):
        for rb in (mapped, fresh):
            rb.extend(rows(kind, first, 100))
    assert equal(mapped[:], fresh[:])
    assert mapped.storage.overflow_rows == fresh.storage.overflow_rows


def damage(folder: Path, row: int, kind: int, value: int | None) -> None:
    """Writes another reference of a row; None: the one of the row before it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tensor = manifest["tensors"][manifest["parts"]["storage"]["groups"][0]["references"]["name"]]
    file, offset, count = tensor["pieces"][0]
    shape = (count, *tensor["shape"][1:])
    table = np.memmap(folder / file, np.int32, "r+", offset, shape).reshape(-1, 2)
    table[row, kind] = table[row - 1, kind] if value is None else value


DAMAGES: dict[str, tuple[str, int, int, int | None]] = {
    "an observation of two": ("ring", 3, 0, None),
    "a next observation of two": ("streams", 3, 1, None),
    "a next observation of two streams": ("rings", 9, 1, None),
    "an entry beyond": ("ring", 4, 1, 3 * SLOTS + 1),
    "an entry far beyond": ("streams", 4, 0, 2**31 - 1),
    "an overflow entry beyond": ("ring", 0, 1, -400),
    "an overflow entry far beyond": ("rings", 4, 1, -(2**31)),
}


@pytest.mark.parametrize("damaged", DAMAGES)
def test_first_use_finds_inconsistent_tables(damaged: str, tmp_path: Path) -> None:
    kind, row, which, value = DAMAGES[damaged]
    filled = make(kind)
    filled.extend(rows(kind, 0, SLOTS))
    for folder in ("whole", "damaged"):
        filled.dumps(tmp_path / folder)
    damage(tmp_path / "damaged", row, which, value)
    mapped, other = make(kind), make(kind)
    for rb in (mapped, other):
        rb.loads(tmp_path / "damaged", mmap=True)
        for use in (*USES, *USES):
            named = r"the references of rows .*, in .*: expected"
            refuses(CheckpointError, named, USES[use], rb, kind, tmp_path)
            assert (len(rb), rb.write_count) == (len(filled), filled.write_count)
            # No row has changed.
            assert torch.equal(reward(rb), reward(filled))
    assert not (tmp_path / "again" / "manifest.json").exists()
    mapped.empty()
    fresh = make(kind)
    for rb in (mapped, fresh):
        rb.extend(rows(kind, 0, 50))
    assert equal(mapped[:], fresh[:])
    other.loads(tmp_path / "whole")
    assert equal(other[:], filled[:])


@pytest.mark.parametrize(
    ("saved", "kind", "options", "message"),
    [
        ({}, "ring", {"dedup_next": False}, "was stored once"),
        ({}, "some keys", {}, "state.*was stored once"),
        (KINDS["some keys"], "ring", {}, "state.*which is stored in every row there"),
        ({"dedup_next": False}, "ring", {}, "which is stored in every row there"),
        ({}, "ring", {"slots": 100}, "the saved capacity"),
    ],
)
def test_checkpoints_of_another_dedup_layout_are_refused(
    saved: dict[str, Any], kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    filled = make("ring", **saved)
    filled.extend(rows("ring", 0, 150))
    filled.dumps(tmp_path)
    buffer = make(kind, **options)
    refuses(ValueError, message, buffer.loads, tmp_path, mmap=True)
    assert not buffer.storage.initialized
    buffer.extend(rows(kind, 0, 10))
    assert len(buffer) == 10
