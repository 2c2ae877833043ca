"""Tables of a ledger in files: a write that fails or ends with its process changes nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
)
from replaykit.recovery.journal import Journal
from replaykit.recovery.recovery_folder import RecoveryFolder
from replaykit.storages.recoverable import Recovery
from tests.storages.test_recoverable_faults import full, no_room_for
from tests.support.refusals import refuses


def _rows(first: int, last: int) -> TensorDict:
    count = last - first
    rest = {"done": torch.ones(count, 1, dtype=torch.bool)}
    return TensorDict({"x": torch.arange(first, last), "next": rest}, [count])


def _kept(folder: Path, **how: Any) -> ReplayBuffer:
    storage = LazyMemmapStorage(10, scratch_dir=str(folder), recover=True)
    return ReplayBuffer(storage=storage, batch_size=4, **how)


@pytest.mark.parametrize("first", [True, False])
def test_a_placed_write_without_room_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    rb = _kept(tmp_path)
    rb.extend(_rows(0, 6))
    if not first:
        rb.writer.write_at(torch.tensor([3]), _rows(3, 4))
    before = rb.storage.ledger.positions(torch.arange(6)).tolist()
    with monkeypatch.context() as patch:
        if first:
            patch.setattr(RecoveryFolder, "table", no_room_for(0))
        else:
            patch.setattr(Recovery, "before_change", full)
        refuses(OSError, "No space", rb.writer.write_at, torch.tensor([1, 2]), _rows(100, 102))
    assert rb["x"].tolist() == list(range(6))
    assert rb.storage.ledger.positions(torch.arange(6)).tolist() == before
    rb.extend(_rows(6, 7))
    del rb
    gc.collect()
    again = _kept(tmp_path)
    assert again["x"].tolist() == list(range(7))
    assert again.storage.ledger.positions(torch.arange(6)).tolist() == before


def test_the_best_rows_are_known_after_a_write_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = _kept(tmp_path, writer=TensorDictMaxValueWriter(rank_key="x"))
    rb.extend(_rows(0, 10))
    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "before_change", full)
        refuses(OSError, "No space", rb.extend, _rows(20, 23))
    assert sorted(rb["x"].tolist()) == list(range(10))
    rb.extend(_rows(30, 33))
    assert sorted(rb["x"].tolist()) == [*range(3, 10), 30, 31, 32]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_change_generations(tmp_path: Path) -> None:
    rb = _kept(tmp_path, writer=RoundRobinWriter(track_generations=True))
    rb.extend(_rows(0, 6))
    start, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(start, 1)
        try:
            rb.empty()
        except RuntimeError:
            os._exit(3)
        os._exit(4)
    for _ in range(2):
        rb.empty()
        rb.extend(_rows(0, 6))
    writer: Any = rb.writer
    before = writer.generations_of(torch.arange(6)).tolist()
    os.write(started, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert writer.generations_of(torch.arange(6)).tolist() == before


def _extends(rb: ReplayBuffer, first: int, times: int, count: int) -> None:
    for turn in range(times):
        rb.extend(_rows(first + turn * count, first + (turn + 1) * count))


def _in_another_process(target: Callable[..., None], *args: Any, status: int = 0) -> None:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == status


def test_a_failed_placed_write_leaves_no_private_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8, shared=True)
    rb.extend(_rows(0, 6))
    rb.sample()
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryFolder, "table", no_room_for(1))
        refuses(OSError, "No space", rb.writer.write_at, torch.tensor([6]), _rows(6, 7))
    _in_another_process(_extends, rb, 10, 3, 4)
    rb.sample()
    with rb.storage.lock:
        positions = rb.storage.ledger.positions(torch.arange(8)).tolist()
    assert positions == [16, 17, 10, 11, 12, 13, 14, 15]
    assert rb["x"].tolist() == [20, 21, 14, 15, 16, 17, 18, 19]


def test_a_reader_notices_a_write_to_stored_rows_at_the_cursor() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=4, shared=True)
    rb.extend(_rows(0, 4))
    rb.writer.write_at(torch.tensor([4, 5, 6]), _rows(4, 7))
    rb.sample()
    recovery: Any = rb.storage.recovery
    seen = recovery.sharing.glance()
    _in_another_process(_extends, rb, 90, 1, 2)
    assert not recovery.sharing.intact(seen, torch.tensor([4]))


def test_observations_are_derived_again_after_a_clear_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> ReplayBuffer:
        storage = LazyMemmapStorage(
            24, scratch_dir=str(tmp_path), recover=True, dedup_next=True, on_mismatch="dense"
        )
        return ReplayBuffer(storage=storage, batch_size=4)

    def rows(first: int, count: int, step: int) -> TensorDict:
        x = torch.arange(first, first + count)
        return TensorDict({"observation": x, "next": {"observation": x + step}}, [count])

    rb = made()
    rb.extend(rows(0, 6, 5))
    state = rb.state_dict()
    rb.extend(rows(50, 3, 5))
    for index in ([2], [7, 1]):
        rb.writer.write_at(torch.tensor(index), rows(70 + index[0], len(index), 3))
    wanted = rb["next", "observation"].tolist()
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryFolder, "table", full)
        refuses(OSError, "No space", rb.load_state_dict, state)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", full)
        refuses(OSError, "No space", rb.empty)
    assert rb["next", "observation"].tolist() == wanted
    rb.writer.write_at(torch.tensor([4, 9]), rows(90, 2, 7))
    wanted = [*wanted[:4], 97, *wanted[5:], 98]
    assert rb["next", "observation"].tolist() == wanted
    del rb
    gc.collect()
    assert made()["next", "observation"].tolist() == wanted


def test_a_first_shared_write_without_room_counts_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True, batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryFolder, "commit", full)
        refuses(OSError, "No space", rb.extend, _rows(0, 6))
    assert (len(rb), rb.write_count) == (0, 0)
    rb.extend(_rows(0, 6))
    assert (len(rb), rb.write_count) == (6, 6)
