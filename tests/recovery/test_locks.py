"""Locks of several holders, each with a file of its own, as processes have, and who has joined."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from replaykit.recovery import locks
from replaykit.recovery.locks import CommitLock, Exclusive, ProcessRegistry, SharedLock
from tests.support.refusals import refuses

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def nothing() -> None:
    pass


def new(folder: Path) -> SharedLock:
    return SharedLock(folder / "lock", nothing, nothing)


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    one, other = new(tmp_path), new(tmp_path)
    with one:
        assert not other.acquire(blocking=False)
        begun = time.monotonic()
        assert not other.acquire(timeout=0.05)
        assert time.monotonic() - begun >= 0.05
    assert other.acquire(blocking=False)
    assert not one.acquire(blocking=False)
    other.release()
    assert one.acquire(timeout=0)
    one.release()


def test_a_long_timeout_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it looks meanwhile."""
    monkeypatch.setattr(locks, "_PAUSES", (0.0, 0.0))
    one, other = new(tmp_path), new(tmp_path)
    looks, flock = 0, other._flock

    def counted(fd: int, how: int) -> None:
        nonlocal looks
        looks += 1
        if looks == 5000:
            one.release()
        flock(fd, how)

    other._flock = counted
    one.acquire()
    assert other.acquire(timeout=60)
    assert looks == 5000
    other.release()


def test_threads_of_one_holder_take_turns_too(tmp_path: Path) -> None:
    lock, count = new(tmp_path), 0

    def work() -> None:
        nonlocal count
        for _ in range(200):
            with lock:
                before = count
                time.sleep(0)
                count = before + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 800


@pytest.mark.parametrize("raising", ["enter", "commit"])
def test_error_of_a_callback_leaves_the_lock_free(tmp_path: Path, raising: str) -> None:
    def refuse() -> None:
        raise OSError("full")

    calls = {"enter": nothing, "commit": nothing, raising: refuse}
    lock, other = SharedLock(tmp_path / "lock", **calls), new(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="full"), lock:
            pass
        assert other.acquire(blocking=False)
        other.release()


def test_interrupt_after_a_wait_has_taken_the_file_frees_it(tmp_path: Path) -> None:
    one, other = new(tmp_path), new(tmp_path)
    flock = other._flock

    def interrupted(fd: int, how: int) -> None:
        one.release()
        flock(fd, how)
        raise KeyboardInterrupt

    other._flock = interrupted
    one.acquire()
    with pytest.raises(KeyboardInterrupt):
        other.acquire()
    assert one.acquire(blocking=False)
    one.release()


@needs_fork
def test_ending_child_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock, other = new(tmp_path), new(tmp_path)
    with lock:
        child = os.fork()
        if not child:
            lock.drop()
            os._exit(0)
        os.waitpid(child, 0)
        assert not other.acquire(blocking=False)
    assert other.acquire(blocking=False)


def test_a_lock_settles_once_and_is_given_back_if_that_fails() -> None:
    settled = []
    lock = CommitLock(lambda: settled.append(1) if len(settled) < 2 else 1 / 0)
    with lock:
        with lock:
            pass
        assert not settled
    assert len(settled) == 1
    with lock:
        pass
    with pytest.raises(ZeroDivisionError), lock:
        pass
    assert lock.acquire(blocking=False)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    held = Exclusive(tmp_path / "lock")
    refuses(BlockingIOError, "lock", Exclusive, tmp_path / "lock")
    del held
    Exclusive(tmp_path / "lock")


def test_registry_is_empty_after_the_last_member_leaves(tmp_path: Path) -> None:
    path = tmp_path / "members"
    assert not ProcessRegistry.is_unused(path), "there is no such folder to clear"
    members = [ProcessRegistry(path) for _ in range(3)]
    for member in members:
        assert not ProcessRegistry.is_unused(path)
        member.drop()
        member.drop()
    assert ProcessRegistry.is_unused(path)
    assert ProcessRegistry.is_unused(path), "asking takes nothing"


def test_deleted_member_leaves_the_registry(tmp_path: Path) -> None:
    member = ProcessRegistry(tmp_path / "members")
    del member
    assert ProcessRegistry.is_unused(tmp_path / "members")


@needs_fork
def test_forked_child_stays_registered_after_its_parent_leaves(tmp_path: Path) -> None:
    path = tmp_path / "members"
    member = ProcessRegistry(path)
    waiting, leave = os.pipe()
    child = os.fork()
    if not child:
        os.close(leave)
        os.read(waiting, 1)
        os._exit(0)
    member.drop()
    assert not ProcessRegistry.is_unused(path)
    os.close(leave)
    os.waitpid(child, 0)
    assert ProcessRegistry.is_unused(path)
