"""Buffers that unrelated processes join by path, and that are recovered when all have ended."""

from __future__ import annotations

import gc
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from replaykit.errors import CheckpointError
from tests.support.refusals import refuses

pytest.importorskip("fcntl", reason="processes share files only on systems with flock")


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "next": {"done": number % 4 == 3}}, [count])


def observed(first: int, count: int) -> TensorDict:
    """Rows with observations, of which each is the next one of the row before."""
    found = rows(first, count)
    found["seen"] = found["number"][:, None].expand(count, 3).contiguous()
    found["next", "seen"] = found["seen"] + 1
    return found


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(alpha=0.7, beta=0.5)


def new_buffer(folder: Path, *, recover: bool = True, **options: Any) -> ReplayBuffer:
    key = options.pop("lane_key", None)
    storage = LazyMemmapStorage(10, scratch_dir=folder, recover=recover, lane_key=key)
    return ReplayBuffer(storage=storage, shared=True, batch_size=4, **options)


def raw(buffer: ReplayBuffer) -> list[float]:
    """Return the priorities by slot."""
    sampler: Any = buffer.sampler
    found: list[float] = sampler.state_dict()["_priorities"].tolist()
    return found


def numbers(buffer: ReplayBuffer) -> list[int]:
    """The stored numbers, the oldest first."""
    with buffer.storage.lock:
        found: list[int] = buffer[buffer.storage.ledger.write_order()]["number"].tolist()
    return found


WRITES = """
import sys, torch
from tensordict import TensorDict
from replaykit import PrioritizedSampler, ReplayBuffer
rb = ReplayBuffer.join(sys.argv[1], sampler=PrioritizedSampler(alpha=0.7, beta=0.5))
number = torch.arange(int(sys.argv[2]), int(sys.argv[3]))
rows = {"number": number, "next": {"done": number % 4 == 3}}
index = rb.extend(TensorDict(rows, [len(number)]))
rb.update_priority(index[:1], torch.tensor([7.0]))
print(rb[:]["number"].tolist(), rb.write_count)
"""


@pytest.mark.parametrize("recover", [False, True])
def test_unrelated_process_writes_rows_and_priorities(
    recover: bool, tmp_path: Path, run_python: Any
) -> None:
    buffer = new_buffer(tmp_path, recover=recover, sampler=prioritized())
    buffer.extend(rows(0, 3))
    assert run_python(WRITES, tmp_path, 3, 5).stdout == "[0, 1, 2, 3, 4] 5\n"
    assert numbers(buffer) == [0, 1, 2, 3, 4]
    assert raw(buffer) == [1, 1, 1, 7, 1]
    assert len(buffer.episodes.index) == 5
    chosen = torch.cat([buffer.sample()["number"] for _ in range(500)])
    share = (chosen == 3).float().mean().item()  # the law: 7 ** 0.7 / (4 + 7 ** 0.7) = 0.494
    assert abs(share - 0.494) < 0.04  # 3.6 standard deviations of 2,000 draws


def test_rows_outlive_all_processes(tmp_path: Path, run_python: Any) -> None:
    buffer = new_buffer(tmp_path, sampler=prioritized())
    buffer.extend(rows(0, 3))
    del buffer
    gc.collect()
    # No process shares the rows now. The next one opens them alone.
    assert run_python(WRITES, tmp_path, 3, 8).stdout == "[0, 1, 2, 3, 4, 5, 6, 7] 8\n"
    again = new_buffer(tmp_path, sampler=prioritized())
    assert numbers(again) == list(range(8))
    assert again.write_count == 8
    assert raw(again) == [1, 1, 1, 7, 1, 1, 1, 1]
    # An episode ends where its writer has ended.
    assert again.episodes.lengths.tolist() == [3, 1, 4]
    again.extend(rows(8, 5))
    assert numbers(again) == list(range(3, 13))


@pytest.mark.parametrize("dedup_next", [False, True])
def test_rows_are_recovered_with_and_without_sharing(dedup_next: bool, tmp_path: Path) -> None:
    written = 0
    for shared in (False, True, False, False, True, True):
        options: Any = {"dedup_next": dedup_next, "recover": True}
        storage = LazyMemmapStorage(10, scratch_dir=tmp_path, **options)
        assert len(storage) == min(written, 10)
        buffer = ReplayBuffer(storage=storage, sampler=prioritized(), shared=shared, batch_size=4)
        handles = [buffer]
        if shared:
            handles.append(ReplayBuffer.join(tmp_path, sampler=prioritized()))
        for handle in handles:
            index = handle.extend(observed(written, 3))
            handle.update_priority(index, torch.arange(3.0) + written + 1)
            written += 3
        for handle in handles:
            assert numbers(handle) == [*range(max(0, written - 10), written)]
            found = handle[:]
            assert (found["seen"][:, 0] == found["number"]).all()
            assert (found["next", "seen"][:, 2] == found["number"] + 1).all()
            assert raw(handle) == (handle[torch.arange(len(handle))]["number"] + 1.0).tolist()
            assert handle.write_count == written
        del storage, buffer, handles, handle
        gc.collect()
    record = json.loads((tmp_path / "%recovery" / "manifest.json").read_text())
    assert record["format_version"] == (4 if dedup_next else 3)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_written_without_priorities_get_the_default(shared: bool, tmp_path: Path) -> None:
    """A process without a prioritized sampler drops the priorities of earlier processes."""
    buffer = new_buffer(tmp_path, sampler=prioritized())
    buffer.update_priority(buffer.extend(rows(0, 8)), torch.arange(8.0) + 2)
    del buffer
    gc.collect()
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path, recover=True)
    plain = ReplayBuffer(storage=storage, shared=shared)
    plain.extend(rows(8, 5))
    del storage, plain
    gc.collect()
    again = new_buffer(tmp_path, sampler=prioritized())
    again.update_priority(torch.tensor([5]), torch.tensor([3.0]))
    for handle in (again, ReplayBuffer.join(tmp_path, sampler=prioritized())):
        assert raw(handle) == [1, 1, 1, 1, 1, 3, 1, 1, 1, 1]


def test_saves_after_a_recovery_have_all_rows(tmp_path: Path) -> None:
    """A process that wrote alone has marked no changes for the others' saves."""
    folder, saved = tmp_path / "rows", tmp_path / "saved"
    for turn, shared in enumerate((True, False, True, True)):
        storage = LazyMemmapStorage(10, scratch_dir=folder, recover=True)
        buffer = ReplayBuffer(storage=storage, sampler=prioritized(), shared=shared)
        if turn:
            buffer[torch.tensor([turn])] = rows(100 + turn, 1)
            buffer.update_priority(torch.tensor([turn]), torch.tensor([turn + 1.0]))
        else:
            buffer.extend(rows(0, 10))
        if shared:
            buffer.dumps(saved)
            other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=prioritized())
            other.loads(saved)
            assert (other[:] == buffer[:]).all()
            assert raw(buffer) == raw(other)
        del storage, buffer
        gc.collect()


def test_rows_in_memory_are_joined_by_their_folder(run_python: Any) -> None:
    """The first write may come from a joined process."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=prioritized(), shared=True)
    folder = buffer.storage.recovery.folder
    assert len(buffer) == 0
    assert run_python(WRITES, folder, 0, 2).stdout == "[0, 1] 2\n"
    assert numbers(buffer) == [0, 1]
    del buffer
    gc.collect()
    assert not folder.exists()


def test_joined_buffer_is_handed_to_a_spawned_process(tmp_path: Path) -> None:
    first = new_buffer(tmp_path)
    joined = ReplayBuffer.join(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=joined.extend, args=(rows(0, 3),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert numbers(first) == numbers(joined) == [0, 1, 2]


def test_layout_and_kind_come_from_the_folder(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(12, scratch_dir=tmp_path, lane_key=("info", "env"))
    options: dict[str, Any] = {"alpha": 0.7, "beta": 0.5, "batch_size": 4}
    buffer = TensorDictPrioritizedReplayBuffer(storage=storage, shared=True, **options)
    joined = TensorDictPrioritizedReplayBuffer.join(tmp_path, **options)
    assert type(joined) is TensorDictPrioritizedReplayBuffer
    assert joined.storage.lane_key == ("info", "env")
    assert joined.storage.max_size == 12
    data = rows(0, 4)
    data["info", "env"] = torch.tensor([0, 1, 0, 1])
    joined.extend(data)
    found = [episode.rows()["number"].tolist() for episode in buffer.episodes]
    assert sorted(found) == [[0, 2], [1, 3]]
    assert joined.storage.scratch_dir == tmp_path


def test_rate_limiter_counts_go_on_for_a_joined_process(tmp_path: Path) -> None:
    limiter = RateLimiter.queue(8)
    buffer = new_buffer(tmp_path, rate_limiter=limiter)
    buffer.extend(rows(0, 6))
    joined = ReplayBuffer.join(tmp_path, rate_limiter=limiter, batch_size=4)
    assert joined.stats()["inserts"] == buffer.stats()["inserts"] == 6
    joined.sample()
    assert buffer.stats()["samples"] == 4
    del buffer, joined
    gc.collect()
    again = new_buffer(tmp_path, rate_limiter=limiter)
    assert (again.stats()["inserts"], again.stats()["samples"]) == (6, 0)  # as after a load


# -- what is refused ------------------------------------------------------------------------------


def test_folder_without_a_shared_buffer_is_refused(tmp_path: Path) -> None:
    text = "expected a folder of a buffer with shared=True"
    refuses(FileNotFoundError, text, ReplayBuffer.join, tmp_path)
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path)).extend(rows(0, 2))
    refuses(FileNotFoundError, str(tmp_path), ReplayBuffer.join, tmp_path)
    for name in ("storage", "shared"):
        text = rf"join\(\) finds the {name} in the folder"
        refuses(TypeError, text, ReplayBuffer.join, tmp_path, **{name: None})


def test_folder_of_an_earlier_run_does_not_hide_the_present_one(tmp_path: Path) -> None:
    new_buffer(tmp_path).extend(rows(0, 3))
    gc.collect()
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
    buffer = ReplayBuffer(storage=storage, shared=True)
    before = ReplayBuffer.join(tmp_path)  # nothing is written yet
    buffer.extend(rows(5, 2))
    after = ReplayBuffer.join(tmp_path)
    assert numbers(buffer) == numbers(before) == numbers(after) == [5, 6]
    assert not (tmp_path / "%recovery" / "sharing.json").exists()


def test_ended_buffer_that_is_not_recovered_is_refused(tmp_path: Path) -> None:
    new_buffer(tmp_path, recover=False).extend(rows(0, 2))
    gc.collect()
    with pytest.raises(RuntimeError, match="have ended; make the buffer with a LazyMemmapStorage"):
        ReplayBuffer.join(tmp_path)


def test_rows_that_one_process_recovers_alone_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replaykit.storages import memmap

    monkeypatch.setattr(memmap, "_OPEN_SECONDS", 0.1)
    new_buffer(tmp_path).extend(rows(0, 2))
    gc.collect()
    alone = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, recover=True))
    refuses(RuntimeError, "only one at a time can recover", ReplayBuffer.join, tmp_path)
    refuses(ValueError, "no buffer uses yet", alone.share)
    refuses(ValueError, "no buffer uses yet", ReplayBuffer, storage=alone.storage, shared=True)
    assert numbers(alone) == [0, 1]


def test_rows_that_processes_share_are_not_recovered_alone(tmp_path: Path) -> None:
    buffer = new_buffer(tmp_path)
    buffer.extend(rows(0, 2))
    for make in (
        lambda: LazyMemmapStorage(10, scratch_dir=tmp_path, recover=True),
        lambda: new_buffer(tmp_path),
    ):
        refuses(RuntimeError, r"share its rows; use ReplayBuffer\.join\(\)", make)
    other = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    refuses(RuntimeError, "processes that share its rows", other.extend, rows(0, 2))
    assert numbers(buffer) == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"sampler": prioritized}, {"sampler": RandomSampler}, "with a prioritized sampler"),
        ({"sampler": RandomSampler}, {"sampler": prioritized}, "without a prioritized sampler"),
        (
            {"lane_key": lambda: "number", "writer": lambda: LaneWriter(1)},
            {},
            "with a writer of streams, such as LaneWriter",
        ),
        (
            {"lane_key": lambda: "number"},
            {"writer": lambda: LaneWriter(1)},
            "without a writer of streams",
        ),
        ({}, {"rate_limiter": lambda: RateLimiter.queue(8)}, "without a rate limiter"),
        ({"rate_limiter": lambda: RateLimiter.queue(8)}, {}, "with a rate limiter"),
    ],
)
def test_part_that_the_others_do_not_have_is_refused(
    first: dict[str, Any], second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    buffer = new_buffer(tmp_path, **{name: make() for name, make in first.items()})
    buffer.extend(rows(0, 2))
    with pytest.raises(ValueError, match=f"expected a buffer {message}"):
        ReplayBuffer.join(tmp_path, **{name: make() for name, make in second.items()})
    buffer.extend(rows(2, 2))
    assert numbers(buffer) == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["torn", "other values", "not a description"])
def test_damaged_description_is_named(damage: str, tmp_path: Path) -> None:
    from replaykit.recovery.recovery_folder import write_manifest

    buffer = new_buffer(tmp_path)
    file = tmp_path / "%recovery" / "sharing.json"
    text = file.read_text()
    if damage == "not a description":
        write_manifest(file.parent, {"max_size": -1}, 3, file.name)
    else:
        file.write_text(text[:40] if damage == "torn" else text.replace("10", "11"))
    refuses(CheckpointError, r"sharing\.json", ReplayBuffer.join, tmp_path)
    buffer.extend(rows(0, 2))
