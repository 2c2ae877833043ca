"""``loads(path, mmap=True)``: what is read late by two threads, or is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
)
from replaykit.checkpoint import ReadLater
from replaykit.episodes import EpisodeIndex
from replaykit.errors import CheckpointError
from tests.checkpoint.building import overwrite
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("small_files")

SLOTS = 200


def rows(start: int, count: int, *, ends: bool = True) -> TensorDict:
    """Rows that follow each other but for one in ten; ranks that rise and fall."""
    number = torch.arange(start, start + count).float()[:, None]
    done = (number % 10 == 9) & torch.tensor(ends)
    following = {"obs": number + 1 + 1000 * done, "reward": number.sin(), "done": done}
    return TensorDict({"obs": number, "next": following}, [count])


def test_late_read_by_another_thread_keeps_rows_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(SLOTS, dedup_next=True), batch_size=8)

    filled = make()
    filled.extend(rows(0, 150))
    filled.dumps(tmp_path)
    mapped, plain = make(), make()
    mapped.loads(tmp_path, mmap=True)
    plain.loads(tmp_path)
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
    writing = threading.Thread(target=lambda: mapped.extend(rows(500, 30)))
    asking.start()
    assert reading.wait(10)
    writing.start()
    writing.join(0.2)
    go_on.set()
    for thread in (asking, writing):
        thread.join(10)
        assert not thread.is_alive()
    plain.extend(rows(500, 30))
    assert mapped.storage.overflow_rows == plain.storage.overflow_rows
    for buffer in (mapped, plain):
        buffer.extend(rows(900, 25))
    assert bool((mapped[:] == plain[:]).all())


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
@pytest.mark.parametrize("mmap", [True, False])
def test_write_after_a_failed_first_write_rebuilds_the_episodes(
    writer: Any, mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(SLOTS), writer=writer())

    filled = make()
    filled.extend(rows(0, 303))
    filled.dumps(tmp_path)
    interrupted, other = make(), make()
    interrupted.loads(tmp_path, mmap=mmap)
    other.loads(tmp_path)
    before, after = interrupted[:], rows(700, 12, ends=False)
    original = EpisodeIndex._rebuild

    def rebuild(self: EpisodeIndex) -> None:
        raise MemoryError("no memory for an index")

    monkeypatch.setattr(EpisodeIndex, "_rebuild", rebuild)
    refuses(MemoryError, "for an index", interrupted.extend, after)
    assert bool((interrupted[:] == before).all())
    monkeypatch.setattr(EpisodeIndex, "_rebuild", original)
    assert torch.equal(interrupted.extend(after), other.extend(after))
    assert bool((interrupted[:] == other[:]).all())
    every = np.arange(SLOTS)
    around = [buffer.storage.episodes.around(every) for buffer in (interrupted, other)]
    assert np.array_equal(*around)
    assert interrupted.storage.episode_state() == other.storage.episode_state()


def _opened_without_priorities(folder: Path) -> ReplayBuffer:
    """A full buffer whose priorities are not numbers, opened in place."""

    def make() -> ReplayBuffer:
        sampler = PrioritizedSampler(SLOTS, 0.7, 0.5)
        return ReplayBuffer(storage=LazyTensorStorage(SLOTS), sampler=sampler, batch_size=8)

    filled = make()
    filled.extend(rows(0, 250))
    filled.dumps(folder)
    overwrite(folder, "sampler", "_priorities", value=b"\xff" * 4)
    mapped = make()
    mapped.loads(folder, mmap=True)
    return mapped


@pytest.mark.parametrize(
    "write",
    [
        lambda rb: rb.extend(rows(900, 3)),
        lambda rb: rb.add(rows(900, 1)[0]),
        lambda rb: rb.writer.extend(rows(900, 3)),
        lambda rb: rb.writer.write_at(torch.tensor([3, 7]), rows(900, 2)),
        lambda rb: rb.storage.set(torch.tensor([3, 7]), rows(900, 2)),
    ],
)
def test_write_reads_saved_priorities_before_it_changes_anything(
    write: Callable[[ReplayBuffer], Any], tmp_path: Path
) -> None:
    mapped = _opened_without_priorities(tmp_path)
    ledger, before = mapped.storage.ledger, mapped[:]
    counted = mapped.write_count, ledger.next_position, ledger.cursor
    for _ in range(2):
        refuses(CheckpointError, "the priorities of the checkpoint", write, mapped)
        assert bool((mapped[:] == before).all())
        assert (mapped.write_count, ledger.next_position, ledger.cursor) == counted


def test_empty_discards_invalid_unread_priorities(tmp_path: Path) -> None:
    mapped = _opened_without_priorities(tmp_path)
    mapped.empty()
    mapped.extend(rows(0, 20))
    assert mapped.sample()["priority_weight"].tolist() == [1.0] * 8
