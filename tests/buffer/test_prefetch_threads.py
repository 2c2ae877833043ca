"""Batches made ahead by threads: writers, consumers and forks, and the end of the threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any, cast

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from tests import effort
from tests.buffer.building import buffer_of, in_threads, rows
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("by_threads")

# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_forked_process_starts_new_prefetch_threads(sampler: str, run_python: Any):
    """The threads stay behind; what they have prepared is delivered in both processes."""
    done = run_python(_FORK, sampler, timeout=100)
    assert done.stdout.split() == ["equal"] * 3, done.stdout + done.stderr


_FORK = """
import os, sys, threading, time, torch
from replaykit import LazyTensorStorage, RandomSampler, ReplayBuffer, SamplerWithoutReplacement

kind = {"random": RandomSampler, "without": SamplerWithoutReplacement}[sys.argv[1]]
rb = ReplayBuffer(storage=LazyTensorStorage(60), sampler=kind(), batch_size=3, prefetch=3,
                  generator=torch.Generator().manual_seed(1))
rb.extend(torch.arange(60))
for turn in range(3):
    rb.sample()
    time.sleep(0.01)
    reading, writing = os.pipe()
    with rb.storage.lock:  # a thread that holds it when the process forks
        held = threading.Event()
        child = None
    holder = threading.Thread(target=lambda: (rb.storage.lock.acquire(), held.set(),
                                              time.sleep(0.1), rb.storage.lock.release()))
    holder.start(); held.wait()
    child = os.fork()
    if child == 0:
        found = [rb.sample().tolist() for _ in range(4)]
        os.write(writing, repr(found).encode())
        os._exit(0)
    os.close(writing)
    theirs = b""
    while part := os.read(reading, 4096):
        theirs += part
    os.waitpid(child, 0)
    holder.join()
    ours = [rb.sample().tolist() for _ in range(4)]
    print("equal" if repr(ours).encode() == theirs else (ours, theirs))
"""


# -- many threads ---------------------------------------------------------------------------------


@pytest.mark.pitfall("TH8")
@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_writers_continue_while_batches_are_prepared_in_parallel(kind: str):
    """Threads that transform hold no lock: rows come in although all of them are busy."""
    busy, go = threading.Semaphore(0), threading.Event()

    def transform(data: Any) -> Any:
        busy.release()
        assert go.wait(30)
        return data

    buffer = buffer_of(kind, 100, filled=10, batch_size=2, prefetch=4, transform=transform)
    batches: list[Any] = []
    consumer = threading.Thread(target=lambda: batches.append(buffer.sample()))
    consumer.start()
    for _ in range(4):  # all at the same time
        assert busy.acquire(timeout=60)
    for start in range(10, 60):
        buffer.extend(rows(1, start))
    assert len(buffer) == 60
    assert not batches
    go.set()
    consumer.join(60)
    assert len(batches) == 1


@pytest.mark.parametrize("count", [4, 10])
@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_consumers_share_the_passes(count: int, prefetch: int):
    """Every row comes equally often; passes of one batch (count 4) end with every draw."""
    per_pass = -(-count // 4)
    buffer = buffer_of(filled=count, sampler="without", batch_size=4, prefetch=prefetch)
    seen: list[int] = []

    def consume() -> None:
        for _ in range(50 * per_pass):
            seen.extend(buffer.sample()["id"].tolist())

    in_threads(*[consume] * 4)
    counts = torch.bincount(torch.tensor(seen), minlength=count)
    assert counts.tolist() == [200] * count


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_consumers_of_short_passes_never_hang(kind: str):
    """Consumers of short passes, while everything that gives up prepared batches goes on."""
    buffer = buffer_of(kind, filled=6, sampler="without", batch_size=3, prefetch=2)
    end = time.monotonic() + effort.seconds(3)

    def consume() -> None:
        while time.monotonic() < end:
            try:
                batch = buffer.sample()
            except RuntimeError as error:
                assert "empty storage" in str(error)  # noqa: PT017
            else:
                assert 1 <= len(batch) <= 3

    def change() -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            if number % 5 == 0:
                buffer.empty()
                buffer.extend(rows(6))
            elif number % 5 == 1:
                buffer.set_writer(RoundRobinWriter())
            elif number % 5 == 2:
                buffer.append_transform(lambda td: td)
                buffer.transform.entries.clear()
            elif number % 5 == 3:
                buffer.set_sampler(SamplerWithoutReplacement() if number % 2 else RandomSampler())
            else:
                buffer.load_state_dict(buffer.state_dict())

    in_threads(consume, consume, consume, change, timeout=60)


@pytest.mark.parametrize("started", [0, 1])
def test_prefetch_without_new_threads_makes_batches_in_the_caller(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
        prefetch=2,
        transform=lambda rows: rows,
    )
    rb.extend(torch.arange(8))
    left, start = [started], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("replaykit"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(3):
        assert sorted(torch.cat([rb.sample() for _ in range(4)]).tolist()) == list(range(8))
    rb.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_waits_for_a_running_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the child the storage's lock would be held for ever."""
    rb = ReplayBuffer(
        storage=ListStorage(1000),
        batch_size=4,
        prefetch=1,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(torch.arange(1000))
    monkeypatch.setattr("replaykit.buffer.prefetch._MOST_SECONDS", 60)
    begun, read = threading.Event(), rb.storage.get

    def slow(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.3)
        return read(*given)

    cast(Any, rb.storage).get = slow
    rb.sample()
    assert begun.wait(60)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(rb.sample().tolist()))
    process.start()
    there = answers.get()
    process.join()
    assert there == rb.sample().tolist()
    rb.shutdown()


# -- the end ---------------------------------------------------------------------------------------


def _workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("replaykit-prefetch")]


def test_shutdown_joins_the_threads():
    started = set(_workers())
    buffer = buffer_of(filled=8, batch_size=2, prefetch=3)
    buffer.sample()
    own = set(_workers()) - started
    assert own
    buffer.shutdown()
    assert not any(thread.is_alive() for thread in own)
    for call in (
        buffer.sample,
        lambda: buffer.sample(3),
        buffer.next,
        lambda: next(iter(buffer)),
        buffer.can_sample,
    ):
        refuses(RuntimeError, "shut down", call)
    buffer.shutdown()
    buffer.extend(rows(1))
    assert len(buffer) == 9
    direct = buffer_of(filled=2)
    direct.shutdown()
    refuses(RuntimeError, "shut down", direct.sample, 1)


def test_shutdown_wakes_waiting_consumers():
    for _ in range(10):
        buffer = buffer_of(filled=4, sampler="without", batch_size=4, prefetch=2)

        def consume(buffer: ReplayBuffer = buffer) -> None:
            with pytest.raises(RuntimeError, match="shut down"):
                for _ in iter(buffer.sample, None):
                    pass

        in_threads(consume, consume, consume, lambda b=buffer: (time.sleep(0.01), b.shutdown()))


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("failing", [False, True])
def test_the_interpreter_exits_at_once(failing: bool, run_python: Any):
    """TH9: within a second, also with batches under way and failing transforms."""
    program = f"""
import atexit, time
ended = []
# What is registered first is called last, when everybody else has ended.
atexit.register(lambda: print(time.monotonic() - ended[0], flush=True))
import torch
from replaykit import LazyTensorStorage, ReplayBuffer
def transform(data):
    if {failing}:
        raise ArithmeticError
    time.sleep(0.1)
    return data
rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2, prefetch=4, transform=transform)
rb.extend(torch.arange(9))
try:
    rb.sample()
except ArithmeticError:
    pass
ended.append(time.monotonic())
"""

    def seconds() -> float:
        done = run_python(program, fresh=True)
        assert done.stderr == ""
        return float(done.stdout)

    # On a busy machine one attempt says little.
    assert any(seconds() < 1.0 for _ in range(3)), "prepared batches keep the interpreter alive"
