"""A lock of several holders, each with a file of its own, as processes have."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from replaykit.recovery import locks
from replaykit.recovery.locks import SharedLock

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
