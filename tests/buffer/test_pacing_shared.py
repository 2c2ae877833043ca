"""Processes that keep each other's pace, and one that is killed while it waits or draws."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
from replaykit.buffer import deliver
from replaykit.errors import RateLimiterTimeout
from replaykit.pace import SAMPLE
from tests.pace.calls import counts, numbers
from tests.storages.sharing import another

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def shared(limiter: RateLimiter, capacity: int = 200) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), shared=True, rate_limiter=limiter)
    rb.extend(numbers(0, 1))
    return rb


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    """Those that are in it do not outlive the test."""
    started: list[Any] = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(10)
        process.close()


def write(rb: ReplayBuffer, total: int) -> None:
    for at in range(0, total, 3):
        rb.extend(numbers(at, 3), timeout=60)


def ended(process: Any, code: int) -> None:
    process.join(60)
    assert process.exitcode == code


def begun(processes: list[Any], context: Any, target: Any, *given: Any) -> Any:
    process = context.Process(target=target, args=given)
    processes.append(process)
    process.start()
    return process


def read(rb: ReplayBuffer, total: int) -> None:
    for _ in range(0, total, 4):
        rb.sample(4, timeout=60)


def test_processes_keep_each_others_pace(context: Any, processes: list[Any]) -> None:
    ratio, least, error = 2, 10, 40
    rb = shared(RateLimiter(ratio, least, error))
    for target, total in [(write, 150), (write, 150), (read, 300), (read, 300)]:
        begun(processes, context, target, rb, total)
    while any(process.is_alive() for process in processes):
        inserts, samples = counts(rb)
        if samples:
            assert ratio * least - error <= inserts * ratio - samples <= ratio * least + error
        time.sleep(0.001)
    for process in processes:
        ended(process, 0)
    assert counts(rb) == (301, 600)
    assert rb.write_count == 301


@pytest.mark.long
@pytest.mark.timeout(600)
def test_repeatedly_killed_processes_do_not_break_the_law(processes: list[Any]) -> None:
    """Two minutes; a writer or a reader is killed and replaced every quarter of a second."""
    chance, context = random.Random(0), multiprocessing.get_context("fork")
    ratio, least, error = 2, 10, 40
    rb = shared(RateLimiter(ratio, least, error))
    work = [write, write, read, read]

    def start(number: int) -> None:
        process = context.Process(target=work[number], args=(rb, 10**9))
        process.start()
        processes[number : number + 1] = [process]

    for number in range(4):
        start(number)
    until, kill = time.monotonic() + 120, time.monotonic()
    before, kills = counts(rb), 0
    while time.monotonic() < until:
        inserts, samples = counts(rb)
        if samples:
            assert ratio * least - error <= inserts * ratio - samples <= ratio * least + error
        if time.monotonic() - kill > 0.25:
            number = chance.randrange(4)
            processes[number].kill()
            processes[number].join(10)
            processes[number].close()
            start(number)
            kill, kills = time.monotonic(), kills + 1
            if kills % 40 == 0:  # all of them are going on
                now = counts(rb)
                assert now[0] > before[0] + 100
                assert now[1] > before[1] + 200
                before = now
        time.sleep(0.001)
    assert kills > 100


def call_for_ever(rb: ReplayBuffer, ready: Any, side: str) -> None:
    """Set the event when the call has been refused twice: it looks a third time as it waits."""
    size, looks = rb.__len__, [0]

    def looked() -> int:
        looks[0] += 1
        if looks[0] == 3:
            ready.set()
        return size()

    rb.__len__ = looked  # type: ignore[method-assign]
    rb.sample(4) if side == "sample" else rb.extend(numbers(0, 4))


@pytest.mark.parametrize("side", ["extend", "sample"])
def test_killed_waiting_process_does_not_block_others(
    side: str, context: Any, processes: list[Any]
) -> None:
    rb = shared(RateLimiter.queue(6), 60)
    if side == "extend":
        rb.extend(numbers(0, 5))
    ready = context.Event()
    process = begun(processes, context, call_for_ever, rb, ready, side)
    assert ready.wait(60)
    process.kill()
    ended(process, -signal.SIGKILL)
    before = counts(rb)
    assert before == ((6, 0) if side == "extend" else (1, 0))
    rb.sample(1, timeout=60)
    for _ in range(20):
        rb.extend(numbers(0, 1), timeout=60)
        rb.sample(1, timeout=60)
    assert counts(rb) == (before[0] + 20, 21)


def die_in(rb: ReplayBuffer, call: str) -> None:
    """Is killed when it has been let go on and has not come to its end."""
    if call == "sample":
        deliver.next_batch = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        rb.sample(4)
    else:
        rb._writer.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        rb.extend(numbers(0, 4))


@pytest.mark.parametrize("call", ["sample", "extend"])
def test_unfinished_call_of_a_killed_process_is_not_counted(
    call: str, context: Any, processes: list[Any]
) -> None:
    rb = shared(RateLimiter.queue(6), 60)
    if call == "sample":
        rb.extend(numbers(0, 5))
    ended(begun(processes, context, die_in, rb, call), -signal.SIGKILL)
    if call == "sample":  # its four rows are there for others
        assert len(rb.sample(6, timeout=60)) == 6
    else:
        rb.extend(numbers(0, 5), timeout=60)
        assert counts(rb) == (6, 0)


@pytest.mark.parametrize("call", ["sample", "extend", "can_sample"])
def test_zero_timeout_ignores_calls_of_killed_processes(call: str, processes: list[Any]) -> None:
    """An event loop that asks again and again with ``timeout=0`` would be refused for ever."""
    rb = shared(RateLimiter.queue(6), 60)
    if call != "extend":
        rb.extend(numbers(0, 5))
    died_in, context = call.removeprefix("can_"), multiprocessing.get_context("fork")
    ended(begun(processes, context, die_in, rb, died_in), -signal.SIGKILL)
    if call == "sample":
        assert len(rb.sample(6, timeout=0)) == 6
    elif call == "extend":
        rb.extend(numbers(0, 5), timeout=0)
        assert counts(rb) == (6, 0)
    else:
        assert rb.can_sample(6)


def test_unfinished_call_of_a_living_process_is_counted() -> None:
    rb = shared(RateLimiter.queue(6), 60)
    other = another(rb)
    rb.extend(numbers(0, 5))
    assert other._pace is not None
    with other._pace.ticket(SAMPLE, None) as ticket:
        ticket.admit(4, lambda: 6)
        with pytest.raises(RateLimiterTimeout):
            rb.sample(3, timeout=0.3)
        rb.sample(2, timeout=60)
        with pytest.raises(RateLimiterTimeout):  # what was not delivered has not made room
            rb.extend(numbers(0, 3), timeout=0.1)
    rb.sample(4, timeout=60)
    assert counts(rb) == counts(other) == (6, 6)
    for one in (rb, other):
        one.shutdown()


def test_copy_counts_separately() -> None:
    rb = shared(RateLimiter.queue(6), 60)
    mine = copy.deepcopy(rb)
    mine.extend(numbers(0, 3))
    assert (counts(mine), counts(rb)) == ((4, 0), (1, 0))


def test_shutdown_ends_waits_of_one_process_only() -> None:
    rb = shared(RateLimiter.queue(2), 60)
    other = another(rb)
    rb.shutdown()
    other.sample(1, timeout=60)
    other.extend(numbers(0, 2), timeout=60)
    assert counts(other) == (3, 1)
