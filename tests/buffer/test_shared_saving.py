"""A shared buffer saved again: what any process has changed is written, and the rest is not."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.buffer import state
from replaykit.checkpoint import chunks
from tests.checkpoint.test_resaving import Player, rows, small_chunks, state_of, written
from tests.crash import sharing
from tests.storages.sharing import another

CAPACITY = 60


def make(storage: Any, *, shared: bool = True) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator().manual_seed(0),
        batch_size=4,
        shared=shared,
    )


def filled(count: int = 20_000) -> list[ReplayBuffer]:
    """Two processes' buffers over the same rows."""
    buffer = make(LazyTensorStorage(count))
    buffer.extend(rows(0, count))
    return [buffer, another(buffer)]


def loaded_from(folder: Path, buffer: ReplayBuffer) -> Any:
    storage = buffer.storage
    loaded = make(LazyTensorStorage(storage.max_size, ndim=storage.ndim), shared=False)
    loaded.loads(folder)
    return state_of(loaded)


def assert_saved(folder: Path, buffer: ReplayBuffer, fresh: Path) -> None:
    """What was just saved is what a directory without anything gets."""
    buffer.dumps(fresh)
    assert loaded_from(folder, buffer) == loaded_from(fresh, buffer)


class Sparing(Player):
    """Holds views seldom: all is written meanwhile, and little could be missed."""

    def view(self) -> None:
        if self.views or self.chance.random() < 0.1:
            super().view()


@pytest.mark.parametrize("kind", ["memory", "disk", "lanes"])
@pytest.mark.parametrize("seed", range(2))
def test_save_contains_changes_made_through_any_handle(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind}{seed}")
    torch.manual_seed(seed)
    small_chunks(monkeypatch, chance.choice([7, 4096]))
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", chance.choice([500, 5000, 2**20]))
    lanes = (2,) if kind == "lanes" else ()
    size = CAPACITY * 2 if lanes else CAPACITY
    first = make(
        LazyMemmapStorage(size, scratch_dir=tmp_path / "rows")
        if kind == "disk"
        else LazyTensorStorage(size, ndim=1 + len(lanes))
    )
    players = [Sparing(buffer, chance, lanes) for buffer in (first, another(first), another(first))]
    players[0].extend()
    folders = [tmp_path / "a", tmp_path / "b"]
    for turn in range(25):
        for _ in range(chance.randrange(4)):
            player = chance.choice(players)
            player.number += 100  # no two of them write the same rows
            player.step()
        saver, folder = chance.choice(players).buffer, chance.choice(folders)
        saver.dumps(folder, keep=chance.choice([1, 2]))
        assert_saved(folder, saver, tmp_path / f"full {turn}")
        if chance.random() < 0.15:
            chance.choice(players).buffer.loads(folder)


def test_save_writes_only_rows_that_any_process_changed(tmp_path: Path) -> None:
    """One per cent of the rows and scattered priorities: at most three per cent of the bytes."""
    buffers, count = filled(), 20_000
    buffers[0].dumps(tmp_path)
    full = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
    for turn in range(6):
        writer, saver = buffers[turn % 2], buffers[turn // 2 % 2]
        writer.extend(rows(count + turn * count // 100, count // 100))
        index, other = torch.randint(0, count, (10,)), buffers[(turn + 1) % 2]
        other.update_priority(index, torch.rand(10) + 0.1)
        assert 0.01 * full < written(tmp_path, lambda s=saver: s.dumps(tmp_path)) <= 0.03 * full
    assert_saved(tmp_path, buffers[0], tmp_path / "full")
    for buffer in (*buffers, another(buffers[0])):  # nothing has changed
        assert written(tmp_path, lambda b=buffer: b.dumps(tmp_path)) < 20_000
    one, other = buffers
    other["next", "reward"] = torch.ones(count, 1)  # a column
    records = one.storage._columns.records.nbytes  # small columns lie side by side
    assert records <= written(tmp_path, lambda: one.dumps(tmp_path)) < records + 40_000
    assert_saved(tmp_path, one, tmp_path / "full")


@pytest.mark.parametrize("whose", [0, 1])
def test_save_writes_everything_while_a_process_holds_a_view(whose: int, tmp_path: Path) -> None:
    """Through a view anything can be written without a word; when it is gone, nothing can."""
    buffers = filled()
    saver, folder = buffers[0], tmp_path / "saved"
    saver.dumps(folder)
    view = buffers[whose][10:20]["wide"]
    view.fill_(7)
    for _ in range(2):
        assert written(folder, lambda: saver.dumps(folder)) > 10**7
    view.fill_(8)
    del view
    assert written(folder, lambda: saver.dumps(folder)) > 10**7  # what was written last
    assert_saved(folder, saver, tmp_path / "full")
    with buffers[whose].storage.lock:  # who held it sees that it is gone
        pass
    saver.dumps(folder)
    assert written(folder, lambda: saver.dumps(folder)) < 20_000


def test_save_under_the_lock_contains_uncommitted_changes(tmp_path: Path) -> None:
    """It is not committed yet, but it is what the buffer holds."""
    one, other = filled(2000)
    one.dumps(tmp_path)
    with other.storage.lock:
        other.update_priority(torch.tensor([5]), torch.tensor([7.0]))
        other.extend(rows(0, 3))
        other.dumps(tmp_path)
        found = loaded_from(tmp_path, other)
    assert found["_storage"] == state_of(other)["_storage"]
    assert found["_sampler"] == state_of(other)["_sampler"]
    assert_saved(tmp_path, one, tmp_path / "full")


def test_new_run_writes_everything_over_an_old_checkpoint(tmp_path: Path) -> None:
    """Of the same rows in the same memory: its marks are not those that the checkpoint was of."""
    filled(2000)[0].dumps(tmp_path)
    one, other = filled(2000)
    other.extend(rows(7, 5))
    for _ in range(3):
        one.dumps(tmp_path / "other")  # as many saves as the other run had, and more
    assert written(tmp_path, lambda: one.dumps(tmp_path)) > 10**6
    assert_saved(tmp_path, one, tmp_path / "full")


def test_saves_to_several_directories_stay_incremental(tmp_path: Path) -> None:
    one, other = filled(2000)
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        one.dumps(folder)
    one.extend(rows(0, 3))
    for folder in folders:
        assert written(folder, lambda f=folder: other.dumps(f)) < 60_000
    for turn in range(20):  # more than are remembered
        one.dumps(tmp_path / f"more {turn}")
    assert written(folders[0], lambda: other.dumps(folders[0])) > 10**6


@pytest.mark.parametrize("stranger", [False, True])
def test_later_state_wins_when_two_buffers_save_at_once(
    stranger: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another process, or a buffer of its own, saves between the instant of a save and its turn:
    it is taken anew."""
    one, other = filled(500)
    another_one = filled(30)[0]
    one.dumps(tmp_path)
    taken, saved = state.snapshot_of, []

    def take(buffer: ReplayBuffer, *given: Any) -> Any:
        snapshot = taken(buffer, *given)
        if buffer is one and not saved:
            saved.append(True)
            other.extend(rows(100, 3))
            (another_one if stranger else other).dumps(tmp_path)
        return snapshot

    monkeypatch.setattr(state, "snapshot_of", take)
    one.dumps(tmp_path)
    assert saved
    assert_saved(tmp_path, one, tmp_path / "full")
    assert len(one) == 500
    assert one.write_count == 503


# -- killed ----------------------------------------------------------------------------------------

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def die_in_child(work: Callable[[], Any]) -> None:
    """Does it in a forked process, which is killed at the latest when it has come to its end."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@forks
def test_save_contains_rows_committed_by_killed_writers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed at any call: what it had overwritten is put back, what it had committed is written."""
    small_chunks(monkeypatch)
    chance, folder = random.Random(3), tmp_path / "saved"
    buffer = sharing.new_buffer(45)
    sharing.extends(buffer, 0, range(20))
    buffer.dumps(folder)
    for turn in range(12):
        first = 4 * turn
        at = chance.randrange(1, 2500)
        die_in_child(partial(sharing.extends, buffer, 1, range(first, first + 4), None, at))
        buffer.dumps(folder)
        buffer.dumps(tmp_path / "full")
        states = []
        for saved in (folder, tmp_path / "full"):
            loaded = ReplayBuffer(
                storage=LazyTensorStorage(45), sampler=PrioritizedSampler(alpha=0.7, beta=0.5)
            )
            loaded.loads(saved)
            sharing.assert_whole(loaded[:])
            states.append(state_of(loaded))
        assert states[0]["_storage"] == states[1]["_storage"]
        assert states[0]["_sampler"] == states[1]["_sampler"]
        assert states[0]["_storage"] == state_of(buffer)["_storage"]


@forks
@pytest.mark.parametrize("what", ["rows", "priorities"])
def test_save_replaces_changes_rolled_back_after_a_kill(what: str, tmp_path: Path) -> None:
    """Saved under the lock under which it was changed, and killed before it counted."""
    buffer, folder = filled(500)[0], tmp_path / "saved"
    buffer.dumps(folder)

    def work() -> None:
        with buffer.storage.lock:
            if what == "rows":
                buffer.extend(rows(1000, 5))
            else:
                buffer.update_priority(torch.tensor([3]), torch.tensor([9.0]))
            buffer.dumps(folder)
            os.kill(os.getpid(), signal.SIGKILL)

    die_in_child(work)
    buffer.dumps(folder)
    assert buffer.write_count == 500
    assert_saved(folder, buffer, tmp_path / "full")
    assert written(folder, lambda: buffer.dumps(folder)) < 20_000


@forks
def test_a_view_of_a_killed_process_is_not_forgotten(tmp_path: Path) -> None:
    buffer, folder = filled(2000)[0], tmp_path / "saved"
    buffer.dumps(folder)
    die_in_child(lambda: buffer[10:20]["wide"].fill_(7))
    assert written(folder, lambda: buffer.dumps(folder)) > 10**6
    assert_saved(folder, buffer, tmp_path / "full")
    assert written(folder, lambda: buffer.dumps(folder)) < 20_000


@forks
def test_a_child_has_the_views_of_its_parent(tmp_path: Path) -> None:
    buffer, folder = filled(2000)[0], tmp_path / "saved"
    view = buffer[10:20]["wide"]
    (hear, said), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        len(buffer)
        gc.collect()  # what it had from its parent
        os.write(said, b"1")
        os.read(wait, 1)
        view.fill_(9)
        os._exit(0)
    os.read(hear, 1)
    del view
    buffer.dumps(folder)
    buffer.dumps(folder)  # the parent has none any more
    os.write(go, b"1")
    os.waitpid(child, 0)
    buffer.dumps(folder)
    assert_saved(folder, buffer, tmp_path / "full")
    assert (buffer.storage.read(torch.arange(10, 20))["wide"] == 9).all()


@forks
def test_save_after_killed_savers_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_chunks(monkeypatch)
    chance, folder = random.Random(5), tmp_path / "saved"
    buffer = make(LazyTensorStorage(CAPACITY))
    buffer.extend(rows(0, CAPACITY))
    buffer.dumps(folder)
    for turn in range(10):
        buffer.extend(rows(100 * turn, 5))
        left = chance.randrange(1, 900)

        def save(left: int = left) -> None:
            def count(*_: Any) -> None:
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(count)
            buffer.dumps(folder)

        die_in_child(save)
        buffer.update_priority(torch.tensor([turn]), torch.tensor([2.0]))
        buffer.dumps(folder)
        assert_saved(folder, buffer, tmp_path / "full")
