"""``loads(path, mmap=True)`` of rows whose observations are stored once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer
from replaykit.checkpoint import MappedRows

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


def equal(a: TensorDict, b: TensorDict) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[key], b[key]) for key in keys)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, count) for kind in KINDS for count in (150, SLOTS + 77)),
        *(("ring", count) for count in (1, SLOTS)),
        ("streams", 1),
    ],
)
def test_it_is_the_buffer_that_a_plain_load_gives(kind: str, count: int, tmp_path: Path) -> None:
    filled = make(kind)
    for first in range(0, count, 100):
        filled.extend(rows(kind, first, min(100, count - first)))
    filled.dumps(tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    mapped, plain = make(kind), make(kind)
    mapped.loads(tmp_path, mmap=True)
    plain.loads(tmp_path)
    assert equal(mapped[:], filled[:])
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
    again = make(kind)
    again.loads(tmp_path, mmap=True)
    assert equal(again[:], plain[:])


def test_nothing_beside_the_rows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But which rows have something there."""
    filled = make("ring")
    filled.extend(rows("ring", 0, 299))
    filled.dumps(tmp_path)
    read: list[tuple[int, ...]] = []
    item = MappedRows.__getitem__

    def watched(found: MappedRows, index: Any) -> Any:
        read.append((*found.shape, found.dtype.itemsize))
        return item(found, index)

    monkeypatch.setattr(MappedRows, "__getitem__", watched)
    mapped = make("ring")
    mapped.loads(tmp_path, mmap=True)
    assert mapped.storage.kept_beside == filled.storage.kept_beside == 43
    assert set(read) == {(43, 8)}


@pytest.mark.parametrize("kind", KINDS)
def test_another_capacity_where_no_row_has_to_move(kind: str, tmp_path: Path) -> None:
    filled = make(kind)
    filled.extend(rows(kind, 0, 250))
    filled.dumps(tmp_path)
    mapped, plain = make(kind, 400), make(kind, 400)
    plain.loads(tmp_path)
    mapped.loads(tmp_path, mmap=True)
    for first in range(250, 550, 100):
        assert equal(mapped.sample(), plain.sample())
        for rb in (mapped, plain):
            rb.extend(rows(kind, first, 100))
    assert equal(mapped[:], plain[:])
    if kind != "rings":  # which forget by stream
        order = plain.storage.ledger.write_order()
        found = plain[:, order] if kind == "lanes" else plain[order]
        assert equal(found, rows(kind, 150, 400))


@pytest.mark.parametrize(
    ("saved", "kind", "options", "message"),
    [
        ("ring", "ring", {"dedup_next": False}, "was stored once"),
        ("ring", "some keys", {}, "state.*was stored once"),
        ("some keys", "ring", {}, "state.*which lies in every row there"),
        ("ring", "streams", {}, "another lane_key"),
        ("streams", "ring", {}, "another lane_key"),
        ("ring", "ring", {"slots": 100}, "the capacity that was saved"),
    ],
)
def test_what_is_stored_otherwise_is_refused_by_name(
    saved: str, kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    filled = make(saved)
    filled.extend(rows(saved, 0, 150))
    filled.dumps(tmp_path)
    buffer = make(kind, **options)
    with pytest.raises(ValueError, match=message):
        buffer.loads(tmp_path, mmap=True)
    assert not buffer.storage.initialized
    buffer.extend(rows(kind, 0, 10))
    assert len(buffer) == 10


def test_a_dense_checkpoint_is_refused_by_a_storage_that_stores_once(tmp_path: Path) -> None:
    filled = make("ring", dedup_next=False)
    filled.extend(rows("ring", 0, 150))
    filled.dumps(tmp_path)
    with pytest.raises(ValueError, match="which lies in every row there"):
        make("ring").loads(tmp_path, mmap=True)


def test_the_last_row_of_a_full_ring_has_no_other_follower_in_a_larger_one(tmp_path: Path) -> None:
    filled = make("ring")
    same = rows("ring", 6, 1).expand(SLOTS).contiguous()
    same["next", "state"] = same["state"].clone()
    same["next", "pixels"] = same["pixels"].clone()
    filled.extend(same)
    filled.storage.edit_columns({("state",): same["state"][:1]}, torch.arange(1))
    assert filled.storage.kept_beside == 0  # the last row leads to the first one
    filled.dumps(tmp_path)
    mapped = make("ring")
    mapped.loads(tmp_path, mmap=True)
    assert equal(mapped[:], same)
    with pytest.raises(ValueError, match="whose last row is followed by the first one"):
        make("ring", SLOTS + 1).loads(tmp_path, mmap=True)
    plain = make("ring", SLOTS + 1)
    plain.loads(tmp_path)
    assert equal(plain[:], same)


def test_it_is_open_in_a_fifth_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    count = 300_000
    number = torch.arange(count)
    state = number[:, None].expand(count, 30).float()
    following = {"state": state + 1, "done": (number % 100 == 99)[:, None]}
    filled = make("ring", count)
    filled.extend(TensorDict({"state": state, "next": following}, [count]))
    filled.dumps(tmp_path)
    taken = []
    for _ in range(3):
        mapped = make("ring", count)
        start = time.perf_counter()
        mapped.loads(tmp_path, mmap=True)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.2
    batch = mapped.sample()
    assert torch.equal(batch["next", "state"], batch["state"] + 1)
