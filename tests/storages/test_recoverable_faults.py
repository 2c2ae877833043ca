"""Storages in files that are opened again: faults of disks, files, processes and exceptions."""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.buffer import components
from replaykit.errors import CheckpointError
from replaykit.recovery.journal import MappedFile, States
from replaykit.recovery.recovery_folder import RecoveryFolder
from replaykit.storages.change_log import ChangeLog
from replaykit.storages.columns import Columns
from tests.storages.test_recoverable import rows
from tests.support.refusals import refuses

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def opened(folder: Path, size: int = 10, *, alpha: float = 1.0, **options: Any) -> ReplayBuffer:
    gc.collect()
    return ReplayBuffer(
        storage=LazyMemmapStorage(size, scratch_dir=folder, recover=True, **options),
        sampler=PrioritizedSampler(alpha=alpha, beta=1.0),
    )


def priorities(rb: ReplayBuffer) -> list[float]:
    found: list[float] = rb.sampler.state_dict()["_priorities"].tolist()
    return found


def in_child(work: Callable[[], None]) -> None:
    """Runs it in a forked process, which does not come back."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    os.waitpid(child, 0)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- killed processes -------------------------------------------------------------------------


@needs_fork
def test_a_child_of_a_killed_process_does_not_hold_the_folder(tmp_path: Path) -> None:
    reading, told = os.pipe()
    waiting, leave = os.pipe()

    def work() -> None:
        rb = opened(tmp_path)
        rb.extend(rows(0, 3))
        os.close(leave)
        if not os.fork():
            os.write(told, b"there")
            os.read(waiting, 1)  # until the test has ended
            os._exit(0)
        os.read(reading, 5)
        die()

    in_child(work)
    assert opened(tmp_path)["number"].tolist() == [0, 1, 2]
    os.close(leave)


@needs_fork
def test_a_child_forked_before_the_first_write_leaves_no_files(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    reading, said = os.pipe()

    def work() -> None:
        try:
            rb.extend(rows(0, 3))
        except RuntimeError as error:
            os.write(said, str(error).encode())

    in_child(work)
    assert b"forked" in os.read(reading, 1000)
    rb.extend(rows(0, 3))
    assert rb["number"].tolist() == [0, 1, 2]


@needs_fork
def test_commit_interrupted_after_it_counted_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        rb = opened(tmp_path)
        rb.extend(rows(0, 10))
        commit = States.commit

        def interrupted(self: States, *numbers: Any) -> None:
            commit(self, *numbers)
            raise KeyboardInterrupt

        monkeypatch.setattr(States, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(rows(10, 1))
        monkeypatch.undo()
        type(rb.storage).commit = die
        rb.extend(rows(50, 5))

    in_child(work)
    assert opened(tmp_path)["number"].tolist() == [10, *range(1, 10)]


# -- full disks -------------------------------------------------------------------------------


def test_next_commit_keeps_changes_missed_by_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(first: int, count: int) -> TensorDict:
        return TensorDict({"number": torch.arange(first, first + count)}, [count])

    rb = opened(tmp_path, 100_000)
    rb.extend(small(0, 400))
    rb.writer.write_at(torch.tensor([3]), small(7000, 1))
    monkeypatch.setattr(MappedFile, "_map", full)
    refuses(OSError, "space", rb.extend, small(400, 2000))
    monkeypatch.undo()
    rb.update_priority(torch.tensor([3]), torch.tensor([7.0]))
    kept, raw = rb["number"].tolist(), priorities(rb)
    order = rb.storage.ledger.write_order().tolist()
    del rb
    again = opened(tmp_path, 100_000)
    assert (again["number"].tolist(), priorities(again)) == (kept, raw)
    assert again.storage.ledger.write_order().tolist() == order


def test_next_commit_keeps_priorities_missed_by_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 10))
    home = rb.storage.recovery.home
    monkeypatch.setattr(home, "commit", full)
    refuses(OSError, "space", rb.update_priority, torch.tensor([3]), torch.tensor([7.0]))
    monkeypatch.undo()
    rb.update_priority(torch.tensor([4]), torch.tensor([2.0]))
    del rb, home
    assert priorities(opened(tmp_path)) == [1, 1, 1, 7, 2, 1, 1, 1, 1, 1]


def no_room_for(number: int) -> Callable[..., Any]:
    """``RecoveryFolder.table`` with a full disk for one of the tables."""
    table = RecoveryFolder.table

    def found(folder: RecoveryFolder, wanted: int, slots: int) -> Any:
        return full() if wanted == number else table(folder, wanted, slots)

    return found


@pytest.mark.parametrize("by_stream", [False, True])
def test_a_first_write_that_found_no_room_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_stream: bool
) -> None:
    options: dict[str, Any] = {}
    if by_stream:
        options = {"lane_key": "number"}
        monkeypatch.setattr(RecoveryFolder, "table", no_room_for(1))
    else:
        monkeypatch.setattr("replaykit.recovery.recovery_folder.MappedFile", full)
    rb = opened(tmp_path, **options)
    if by_stream:
        rb.set_writer(LaneWriter(3))
    refuses(OSError, "space", rb.extend, rows(0, 3))
    monkeypatch.undo()
    rb.extend(rows(0, 3))
    assert rb["number"].tolist() == [0, 1, 2]
    if not by_stream:
        del rb
        assert opened(tmp_path)["number"].tolist() == [0, 1, 2]


def and_then_interrupted(real: Any) -> Any:
    def call(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    return call


def test_a_load_that_is_interrupted_changes_nothing_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = PrioritizedSampler(alpha=1.0, beta=1.0)
    other = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    other.extend(rows(100, 7))
    other.dumps(tmp_path / "saved")
    rb = opened(tmp_path / "rows")
    real = Columns.fill
    for there in ([], [0, 1, 2]):
        if there:
            rb.empty()
            rb.extend(rows(0, 3))
        monkeypatch.setattr(Columns, "fill", and_then_interrupted(real))
        with pytest.raises(KeyboardInterrupt):
            rb.loads(tmp_path / "saved")
        monkeypatch.undo()
        assert (rb["number"].tolist() if len(rb) else []) == there
        rb.loads(tmp_path / "saved")
    del rb
    assert opened(tmp_path / "rows")["number"].tolist() == list(range(100, 107))


# -- exceptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda rb: rb.__setitem__(torch.tensor([1, 2]), rows(70, 2)),
        lambda rb: rb.set_("number", torch.arange(20, 30)),
        lambda rb: rb.update_if_present(
            index=torch.tensor([1]),
            generation=torch.tensor([0]),
            patch={"number": torch.tensor([1])},
        ),
        lambda rb: rb.extend(rows(50, 5)),
    ],
    ids=["rows", "column", "patch", "write"],
)
def test_a_change_that_is_interrupted_is_taken_back_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[ReplayBuffer], Any]
) -> None:
    rb = opened(tmp_path)
    rb.set_writer(RoundRobinWriter(track_generations=True))
    rb.extend(rows(0, 10))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def both(rb: ReplayBuffer) -> None:
        with rb.storage.lock, monkeypatch.context() as patch:
            rb[5] = rows(55, 1)[0]  # in the same hold of the lock, and to its end
            patch.setattr(Columns, "put", and_then_interrupted(Columns.put))
            patch.setattr(LazyMemmapStorage, "commit", interrupt)
            change(rb)

    with pytest.raises(KeyboardInterrupt):
        both(rb)
    wanted = [0, 1, 2, 3, 4, 55, 6, 7, 8, 9]
    assert rb["number"].tolist() == wanted
    del rb
    assert opened(tmp_path)["number"].tolist() == wanted


# -- parts ------------------------------------------------------------------------------------


def test_priorities_set_before_an_exception_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 6))

    record = ChangeLog.edit

    def interrupted(log: ChangeLog, slots: Any, *columns: Any) -> None:
        if slots is not None:
            raise KeyboardInterrupt
        record(log, slots, *columns)

    monkeypatch.setattr(ChangeLog, "edit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.update_priority(torch.tensor([1]), torch.tensor([0.5]))
    monkeypatch.undo()
    wanted = priorities(rb)
    del rb
    assert priorities(opened(tmp_path)) == wanted


def test_interrupted_exchange_keeps_the_previous_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 6))
    monkeypatch.setattr(components, "rewind", and_then_interrupted(components.rewind))
    with pytest.raises(KeyboardInterrupt):
        rb.set_sampler(PrioritizedSampler(alpha=0.5, beta=1.0))
    monkeypatch.undo()
    gc.collect()
    rb.update_priority(torch.tensor([1]), torch.tensor([7.0]))
    previous = rb.set_sampler(PrioritizedSampler(alpha=0.5, beta=1.0))
    rb.set_sampler(previous)  # and back
    rb.update_priority(torch.tensor([2]), torch.tensor([9.0]))
    wanted = priorities(rb)
    del rb, previous
    assert priorities(opened(tmp_path)) == wanted


def test_sampler_moved_to_another_storage_takes_its_priorities(
    tmp_path: Path,
) -> None:
    rb = opened(tmp_path / "a")
    rb.extend(rows(0, 6))
    rb.update_priority(torch.tensor([1]), torch.tensor([7.0]))
    old = rb.set_storage(LazyMemmapStorage(10, scratch_dir=tmp_path / "b", recover=True))
    rb.extend(rows(0, 4))
    rb.update_priority(torch.tensor([2]), torch.tensor([9.0]))
    with old.lock:
        pass
    del rb, old
    assert priorities(opened(tmp_path / "a")) in ([1, 7, 1, 1, 1, 1], [1] * 6)
    assert priorities(opened(tmp_path / "b")) == [1, 1, 9, 1]


def test_priorities_of_a_deleted_buffer_do_not_replace_others(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    storage = first.storage
    first.extend(rows(0, 6))
    second = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    first.update_priority(torch.tensor([1]), torch.tensor([7.0]))
    second.update_priority(torch.tensor([2]), torch.tensor([9.0]))
    del first
    gc.collect()
    second.extend(rows(6, 1))
    del second, storage
    assert priorities(opened(tmp_path)) == [1, 1, 9, 1, 1, 1, 9]


def test_priorities_are_not_restored_after_empty(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    rb.update_priority(torch.tensor([1]), torch.tensor([7.0]))
    del rb
    gc.collect()
    plain = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, recover=True))
    plain.empty()
    del plain
    assert opened(tmp_path).sampler.default_priority == 1.0


# -- files ------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("placed", [False, True])
def test_rows_forgotten_under_a_lock_are_noted_before_they_are_overwritten(
    tmp_path: Path, placed: bool
) -> None:
    def work() -> None:
        rb = opened(tmp_path)
        rb.extend(rows(0, 8))
        if placed:
            rb.writer.write_at(torch.tensor([1, 2]), rows(100, 2))
        with rb.storage.lock:
            rb.empty()
            if placed:
                rb.writer.write_at(torch.tensor([0, 1]), rows(50, 2))
            else:
                rb.extend(rows(50, 3))
            die()

    in_child(work)
    rb = opened(tmp_path)
    assert rb["number"].tolist() == ([0, 100, 101, *range(3, 8)] if placed else [*range(8)])
    positions = rb.storage.ledger.positions(torch.arange(8)).tolist()
    assert positions == ([0, 8, 9, *range(3, 8)] if placed else [*range(8)])


def test_a_damaged_state_is_named_and_not_replaced_by_the_one_before(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    rb.extend(rows(3, 2))
    latest = rb.storage.recovery.home.states.sequence % 2
    del rb
    gc.collect()
    path = tmp_path / "%recovery" / f"state-{latest}.bin"
    content = path.read_bytes()
    used = 8 * (4 + int(np.frombuffer(content, np.int64)[2]))
    for at in [6, *range(16, used, 37)]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        refuses(CheckpointError, path.name, opened, tmp_path)
    path.write_bytes(content)
    assert opened(tmp_path)["number"].tolist() == [0, 1, 2, 3, 4]


def test_journal_reveals_lost_state(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 10))
    rb.extend(rows(10, 2))
    rb.extend(rows(12, 2))
    latest = rb.storage.recovery.home.states.sequence % 2
    del rb
    gc.collect()
    for turn in (latest, 1 - latest):
        path = tmp_path / "%recovery" / f"state-{turn}.bin"
        path.write_bytes(bytes(path.stat().st_size))
    refuses(CheckpointError, "latest state", opened, tmp_path)


def test_invalid_stored_priorities_are_refused(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    del rb
    path = tmp_path / "%recovery" / "table-8-8.bin"
    numbers = np.frombuffer(path.read_bytes()).copy()
    numbers[1] = np.nan
    path.write_bytes(numbers.tobytes())
    refuses(CheckpointError, "holds no priorities", opened, tmp_path)


# -- cost -------------------------------------------------------------------------------------


def test_only_the_leaves_and_rows_that_are_edited_are_copied(tmp_path: Path) -> None:
    def noted(rb: ReplayBuffer, change: Callable[[], Any]) -> int:
        with rb.storage.lock:
            change()
            return int(rb.storage.recovery.home.journaled()[1])

    rb = opened(tmp_path / "a", 1000)
    rb.extend(rows(0, 1000))
    assert noted(rb, lambda: rb.set_("number", torch.arange(1000))) < 100_000
    gc.collect()
    grid = ReplayBuffer(
        storage=LazyMemmapStorage(2000, scratch_dir=tmp_path / "b", recover=True, ndim=2)
    )
    data = TensorDict({"wide": torch.zeros(2, 1000, 3000, dtype=torch.uint8)}, [2, 1000])
    grid.extend(data)
    before = grid["wide"].clone()

    def edit() -> None:
        grid[1, 7:9] = data[1, 7:9].apply(lambda wide: wide + 1)

    assert 2 * 6000 <= noted(grid, edit) < 13_000
    before[1, 7:9] = 1
    assert (grid["wide"] == before).all()


def test_undone_durable_write_reaches_disk_before_its_record_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = opened(tmp_path, durable=True)
    rb.extend(rows(0, 10))
    synced: list[str] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        sync(descriptor)

    def interrupted(*_: Any) -> None:
        synced.clear()
        raise KeyboardInterrupt

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(type(rb.storage), "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.extend(rows(50, 2))
    data = [at for at, name in enumerate(synced) if name.endswith(".memmap")]
    assert len(data) >= 2
    assert max(data) < synced.index("journal.bin")


def test_table_left_empty_by_a_kill_is_created(tmp_path: Path) -> None:
    rb = opened(tmp_path)
    rb.extend(rows(0, 3))
    del rb
    (tmp_path / "%recovery" / "table-0-8.bin").touch()
    rb = opened(tmp_path)
    rb.writer.write_at(torch.tensor([1]), rows(50, 1))
    del rb
    rb = opened(tmp_path)
    assert rb.storage.ledger.positions(torch.arange(3)).tolist() == [0, 3, 2]


def test_failed_first_flush_after_a_load_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush also cuts the loaded stream. The cut does not make the half write complete."""

    def steps(count: int) -> TensorDict:
        x = torch.arange(float(count))
        following = {"x": x + 1, "reward": torch.ones(count, 1)}
        following |= {
            name: torch.zeros(count, 1, dtype=torch.bool) for name in ("done", "truncated")
        }
        return TensorDict({"x": x, "next": TensorDict(following, [count])}, [count])

    def buffer(name: str) -> ReplayBuffer:
        storage = LazyMemmapStorage(4, scratch_dir=tmp_path / name, recover=True)
        return ReplayBuffer(storage=storage, transform=NStep(2, 0.9, when="write"))

    def broken(columns: Columns, *_: Any) -> None:
        columns[("x",)][1] = -999.0
        raise OSError("the disk is broken")

    saved = buffer("a")
    saved.extend(steps(6))
    saved.dumps(tmp_path / "saved")
    loaded = buffer("b")
    loaded.loads(tmp_path / "saved")
    before = loaded.storage[:]["x"].clone()
    with monkeypatch.context() as patch:
        patch.setattr(Columns, "scatter_ring", broken)
        patch.setattr(Columns, "scatter", broken)
        refuses(OSError, "broken", loaded.flush)
    assert torch.equal(loaded.storage[:]["x"], before)
    loaded.flush()
    assert len(loaded) == 4
