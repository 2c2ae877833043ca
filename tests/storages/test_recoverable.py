"""Storages in files that are opened again: what they hold, what they refuse."""

from __future__ import annotations

import gc
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
)
from replaykit.errors import CheckpointError, SchemaError
from tests.support.refusals import refuses


def opened(
    folder: Path, size: int = 10, sampler: PrioritizedSampler | None = None, **options: Any
) -> ReplayBuffer:
    gc.collect()
    storage = LazyMemmapStorage(size, scratch_dir=folder, recover=True, **options)
    return ReplayBuffer(storage=storage, sampler=sampler)


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    wide = number[:, None].expand(count, 3000).to(torch.uint8).contiguous()
    return TensorDict({"number": number, "wide": wide, "next": {"done": number % 4 == 3}}, [count])


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(alpha=1.0, beta=1.0)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder that a storage of the rows 0, 1 and 2 has left."""
    opened(tmp_path, sampler=prioritized()).extend(rows(0, 3))
    return tmp_path


@pytest.mark.parametrize("length", [6, 14])
def test_a_closed_storage_only_reads(tmp_path: Path, length: int) -> None:
    """Another storage opens the folder at once, also while the first one is in use."""

    rb = opened(tmp_path, sampler=prioritized())
    rb.extend(rows(0, length))
    rb.update_priority(torch.arange(2), 3.0)
    rb.storage.close()
    rb.storage.close()
    rb.update_priority(torch.arange(2), 9.0)  # is not saved
    rb.cut()
    again = opened(tmp_path, sampler=prioritized())
    writes: list[Any] = [
        lambda: rb.extend(rows(20, 2)),
        lambda: rb.set_at_("number", torch.tensor([7]), torch.tensor([0])),
        rb.empty,
    ]
    for write in writes:
        refuses(RuntimeError, "the storage is closed, and can only read", write)
    assert rb[:]["number"].equal(again[:]["number"])
    assert again.extend(rows(length, 2)).tolist() == [length % 10, length % 10 + 1]
    del again
    found = opened(tmp_path, sampler=prioritized())
    assert found.write_count == length + 2
    raw = found.sampler._table.follow(found.storage).raw[:2]
    assert raw.tolist() == [3.0, 3.0]


def test_a_write_that_fails_half_way_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 14))
    before = rb[:].clone()
    commit = type(rb.storage).commit

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(rb.storage), "commit", refuse)
    with pytest.raises(KeyboardInterrupt):
        rb.extend(rows(50, 5))
    assert (rb[:] == before).all()
    monkeypatch.setattr(type(rb.storage), "commit", commit)
    rb.extend(rows(14, 1))
    assert rb["number"].tolist() == [10, 11, 12, 13, 14, *range(5, 10)]


def test_priorities_follow_the_sampler_of_the_same_place(tmp_path: Path) -> None:
    def made(**options: Any) -> ReplayBuffer:
        gc.collect()
        return ReplayBuffer(
            storage=LazyMemmapStorage(10, scratch_dir=tmp_path, recover=True),
            sampler=PrioritizedSampler(alpha=1.0, beta=1.0, **options),
        )

    rb = made()
    rb.extend(rows(0, 8))
    rb.update_priority(torch.tensor([1, 5]), torch.tensor([7.0, 0.25]))
    del rb
    # An exponent is not kept, it is given; priorities are those that were set.
    rb = made(dtype=torch.float64)
    raw = rb.sampler.state_dict()["_priorities"]
    assert raw.tolist() == [1, 7, 1, 1, 1, 0.25, 1, 1]
    assert rb.sampler.default_priority == 7.0
    del rb
    plain = opened(tmp_path)  # without one they are kept as long as nothing is written
    del plain
    rb = made()
    assert rb.sampler.state_dict()["_priorities"].tolist() == raw.tolist()
    del rb
    plain = opened(tmp_path)
    plain.extend(rows(8, 1))
    del plain
    assert made().sampler.state_dict()["_priorities"].tolist() == [1.0] * 9


def test_replaced_sampler_leaves_committed_priorities_alone(tmp_path: Path) -> None:
    old = prioritized()
    rb = opened(tmp_path, sampler=old)
    rb.extend(rows(0, 8))
    rb.set_sampler(RandomSampler())
    rb.extend(rows(8, 1))
    rb.set_sampler(prioritized())
    for factor in (1, 3):
        rb.update_priority(torch.arange(9), (factor * torch.arange(18.0))[::2])
    old.update_priority(torch.arange(4), 99.0)
    rb.add(rows(9, 1)[0])
    before = rb.sampler.state_dict()["_priorities"]
    assert before.tolist() == [*range(0, 54, 6), 48]
    del rb
    assert opened(tmp_path, sampler=prioritized()).sampler.state_dict()["_priorities"].equal(before)


def test_commits_of_a_durable_storage_wait_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path, durable=True)
    rb.extend(rows(0, 10))
    rb.extend(rows(10, 1))
    synced: list[str] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        # Rows are as they were until what they were is on the disk.
        synced.append(f"{name} {int(rb['number'][1])}")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    rb.extend(rows(11, 1))
    journal = [at for at, one in enumerate(synced) if one.startswith("journal")]
    data = [at for at, one in enumerate(synced) if one.startswith(("records", "wide"))]
    state = [at for at, one in enumerate(synced) if one.startswith("state")]
    assert journal
    assert max(journal) < min(data) <= max(data) < state[0]
    assert {synced[at].split()[1] for at in journal} == {"1"}
    assert len(state) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 11}, "max_size"),
        ({"ndim": 2}, "ndim"),
        ({"lane_key": "number"}, "lane_key='number', got None"),
    ],
)
def test_another_storage_is_refused_by_name(
    left: Path, options: dict[str, Any], message: str
) -> None:
    refuses(ValueError, message, opened, left, **options)
    assert opened(left)["number"].tolist() == [0, 1, 2]


def test_other_rows_are_refused(left: Path) -> None:
    refuses(SchemaError, "wide", opened(left).extend, rows(3, 1).exclude("wide"))


HARMED = {
    "records.memmap": ["gone", "short", "long"],
    "wide.memmap": ["gone", "short", "long"],
    "%recovery/state-0.bin": ["gone", "empty"],
    "%recovery/state-1.bin": ["gone", "cut"],
    "%recovery/journal.bin": ["gone", "link"],
    "%recovery/table-8-8.bin": ["gone", "empty", "cut"],
    "%recovery/manifest.json": ["link", "pipe"],
}


@pytest.mark.parametrize(
    ("file", "harm"), [(file, harm) for file, harms in HARMED.items() for harm in harms]
)
def test_a_file_that_is_not_as_it_was_left_is_named(left: Path, file: str, harm: str) -> None:
    path, aside = left / file, left / "elsewhere"
    path.rename(aside)
    if harm == "link":
        path.symlink_to(aside)
    elif harm == "pipe":
        os.mkfifo(path)  # would wait for a writer for ever
    elif harm != "gone":
        content = aside.read_bytes()
        cut = {"empty": content[:0], "cut": content[:20], "short": content[:-1]}
        path.write_bytes(cut.get(harm, content + b"\0"))
    refuses(CheckpointError, path.name, opened, left, sampler=prioritized())
    aside.replace(path)
    assert opened(left)["number"].tolist() == [0, 1, 2]  # which was refused changed nothing


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    other = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    other.extend(rows(0, 3))
    for _ in range(2):
        refuses(RuntimeError, r"records\.memmap", opened(tmp_path).extend, rows(5, 3))
    assert other["number"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shared", [False, True])
def test_reuse_of_files_as_space_leaves_nothing_to_recover(shared: bool, tmp_path: Path) -> None:
    def other() -> ReplayBuffer:
        storage = LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
        return ReplayBuffer(storage=storage, shared=shared)

    rb = opened(tmp_path)
    rb.extend(rows(0, 7))
    with pytest.raises(RuntimeError, match="recovers its rows"):
        other().extend(rows(90, 2))  # while somebody counts on them
    assert rb["number"].tolist() == list(range(7))
    del rb
    gc.collect()
    taking = other()
    taking.extend(rows(90, 2))
    if shared:
        refuses(RuntimeError, "share its rows", opened(tmp_path, existsok=True).extend, rows(0, 1))
    taking.extend(rows(92, 1))
    assert taking["number"].tolist() == [90, 91, 92]
    del taking
    rb = opened(tmp_path)
    assert len(rb) == 0
    refuses(RuntimeError, r"records\.memmap", rb.extend, rows(0, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-5],
        lambda text: text.replace('"slots": 10', '"slots": 12'),
        lambda text: text.replace("replaykit-recovery", "something-else"),
        lambda text: text.replace('"format_version": 1', '"format_version": 99'),
        lambda text: "[" * 10**5,
    ],
)
def test_a_damaged_manifest_is_named(left: Path, change: Any) -> None:
    file = left / "%recovery" / "manifest.json"
    file.write_text(change(file.read_text()))
    refuses(CheckpointError, r"manifest\.json", opened, left)


def test_manifest_contains_no_file_names(left: Path) -> None:
    record = json.loads((left / "%recovery" / "manifest.json").read_text())
    assert set(record["content"]) == {"slots", "ndim", "lanes", "lane_key", "schema"}


def test_files_in_use_by_another_storage_are_refused(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    refuses(RuntimeError, "in use", opened, tmp_path)


def test_copy_uses_separate_files(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    copied = pickle.loads(pickle.dumps(rb))
    copied.extend(rows(3, 3))
    assert len(rb) == 3
    assert copied.storage.recovery is None
    rb.extend(rows(3, 1))
    assert len(rb) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recover": True}, "scratch_dir"),
        ({"durable": True, "scratch_dir": "x"}, "recover"),
    ],
)
def test_arguments_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    refuses(ValueError, message, LazyMemmapStorage, 10, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_and_is_refused_writes(tmp_path: Path) -> None:
    rb = opened(tmp_path, sampler=PrioritizedSampler(alpha=0.5, beta=0.5))
    rb.extend(rows(0, 12))
    for _ in range(2):
        rb.update_priority(torch.arange(10), torch.arange(10.0))
    reading, said = os.pipe()
    child = os.fork()
    if not child:
        answer = b"wrote"
        try:
            assert rb["number"].tolist()[0] == 10
            rb.update_priority(torch.arange(10), torch.full((10,), 50.0))  # its own ones
            rb.extend(rows(12, 1))
        except RuntimeError:
            answer = b"refused"
        finally:
            os.write(said, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"refused"
    rb.extend(rows(12, 1))
    assert rb["number"].tolist() == [10, 11, 12, *range(3, 10)]
    del rb
    rb = opened(tmp_path, sampler=PrioritizedSampler(alpha=0.5, beta=0.5))
    assert rb.sampler.state_dict()["_priorities"].tolist() == [0, 1, 9, *range(3, 10)]


def test_first_save_after_restart_writes_all_rows_then_only_changes(
    tmp_path: Path,
) -> None:
    """Which rows changed since a checkpoint is known to who wrote them, not to the folder."""
    saved = tmp_path / "saved"

    def written(buffer: ReplayBuffer) -> int:
        def found() -> dict[str, int]:
            return {file.name: file.stat().st_size for file in saved.glob("data-*.bin")}

        before = found()
        buffer.dumps(saved)
        return sum(size for name, size in found().items() if name not in before)

    def make() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyMemmapStorage(1024, scratch_dir=tmp_path / "rows", recover=True)
        )

    rows = TensorDict({"x": torch.arange(1024.0)[:, None].repeat(1, 64)}, [1024])
    buffer = make()
    buffer.extend(rows)
    whole = written(buffer)
    buffer.extend(rows[:4] + 0.5)
    assert written(buffer) <= whole // 16
    del buffer
    gc.collect()
    buffer = make()
    assert written(buffer) >= whole
    buffer.extend(rows[:4] + 0.25)
    assert written(buffer) <= whole // 16
    other = ReplayBuffer(storage=LazyTensorStorage(1024))
    other.loads(saved)
    assert torch.equal(other[:]["x"], buffer[:]["x"])
