"""Batches made ahead by threads: writers, consumers, forks, and two races step by step."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from replaykit import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from replaykit.buffer.prefetch import Drawn, Prefetcher

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


# -- two races, step by step ----------------------------------------------------------------------


class Source:
    """A buffer of which some draws, by number, end a pass."""

    def __init__(self, *ending: int) -> None:
        self.ending = ending
        self.draws = 0
        self.after_draw: dict[int, Callable[[], Any]] = {}
        self.before_delivery = threading.Event()

    def _draws_at_once(self) -> bool:
        return False

    def _draw_ahead(self, entry: Any) -> Drawn:
        number, self.draws = self.draws, self.draws + 1
        index = torch.tensor([number])
        entry.drawn = Drawn(index, {}, number in self.ending, index)
        self.after_draw.get(number, lambda: None)()
        return entry.drawn

    def _finish(self, drawn: Drawn) -> int:
        assert self.before_delivery.wait(60)
        return int(drawn.index)

    def _written(self) -> int:
        return 0


def test_end_of_a_pass_during_clear_does_not_block_consumers(in_threads: Any):
    source = Source(1)
    source.before_delivery.set()
    prefetcher = Prefetcher(2, source)
    cleared = threading.Event()
    # By the thread that drew, right after the draw.
    source.after_draw[1] = lambda: (prefetcher.clear(), cleared.set())
    assert prefetcher.next()[1] == 0
    assert cleared.wait(60)
    delivered: list[int] = []
    in_threads(lambda: delivered.append(prefetcher.next()[1]), timeout=60)
    assert delivered[0] > 1
    prefetcher.shutdown()


def test_next_pass_does_not_delay_waiters_for_the_end_of_a_pass(in_threads: Any, eventually: Any):
    """The third draw ends another pass before the second consumer is awake again."""
    drawn_again, third = threading.Event(), threading.Event()

    tickets = itertools.count()

    class Slow(Prefetcher):
        def _draw(self, entry: Any) -> Any:
            ticket = next(tickets)
            assert ticket != 2 or third.wait(60)
            try:
                return super()._draw(entry)
            finally:
                if ticket == 2:
                    drawn_again.set()

        def _await_release(self, number: int) -> None:
            source.before_delivery.set()
            assert drawn_again.wait(60)
            super()._await_release(number)

    source = Source(0, 1)
    prefetcher = Slow(2, source)
    delivered: list[int] = []

    def first() -> None:
        delivered.append(prefetcher.next()[1])
        third.set()

    def second() -> None:
        assert eventually(lambda: source.draws == 1)
        delivered.append(prefetcher.next()[1])

    in_threads(first, second, timeout=60)
    assert delivered == [0, 1]
    prefetcher.shutdown()


# -- many threads ---------------------------------------------------------------------------------


@pytest.mark.pitfall("TH8")
@pytest.mark.parametrize("kind", ["list", "tensor", "memmap"])
def test_writers_continue_while_batches_are_prepared(kind: str, buffer_of: Any, rows: Any):
    """TH8: workers that transform hold no lock: rows come in although all of them are busy."""
    busy, go = threading.Semaphore(0), threading.Event()

    def transform(data: Any) -> Any:
        busy.release()
        assert go.wait(30)
        return data

    buffer = buffer_of(kind, 100, filled=10, batch_size=2, prefetch=4, transform=transform)
    batches: list[Any] = []
    consumer = threading.Thread(target=lambda: batches.append(buffer.sample()))
    consumer.start()
    for _ in range(4):
        assert busy.acquire(timeout=60)
    for start in range(10, 60):
        buffer.extend(rows(1, start))
    assert len(buffer) == 60
    assert not batches
    go.set()
    consumer.join(60)
    assert len(batches) == 1


@pytest.mark.pitfall("TH8")
def test_batches_are_made_in_parallel(buffer_of: Any):
    together = threading.Barrier(3)

    def transform(data: Any) -> Any:
        together.wait(60)
        return data

    buffer = buffer_of(filled=10, batch_size=2, prefetch=3, transform=transform)
    buffer.sample()
    together.abort()


@pytest.mark.parametrize("count", [4, 10])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_consumers_share_the_passes(count: int, prefetch: int, buffer_of: Any, in_threads: Any):
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
def test_consumers_of_short_passes_never_hang(
    kind: str, buffer_of: Any, in_threads: Any, rows: Any
):
    """Consumers of short passes, while everything that gives up prepared batches goes on."""
    buffer = buffer_of(kind, filled=6, sampler="without", batch_size=3, prefetch=2)
    end = time.monotonic() + 3

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
                buffer.transform._entries.clear()
            elif number % 5 == 3:
                buffer.set_sampler(SamplerWithoutReplacement() if number % 2 else RandomSampler())
            else:
                buffer.load_state_dict(buffer.state_dict())

    in_threads(consume, consume, consume, change, timeout=60)


@pytest.mark.parametrize("started", [0, 1])
def test_prefetch_without_new_threads_fails_or_uses_the_started_ones(
    started: int, monkeypatch: pytest.MonkeyPatch, in_threads: Any
) -> None:
    """Without any the call fails and nobody waits for ever; with one of them batches come."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2
    )
    rb.extend(torch.arange(8))
    left, start = [started], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("replaykit"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        if not started:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="new thread"):
                    rb.sample()
        else:
            rb.sample()
    rows: list[int] = []
    in_threads(lambda: rows.extend(torch.cat([rb.sample() for _ in range(4)]).tolist()), timeout=60)
    assert len(set(rows[: 8 - 2 * started])) == 8 - 2 * started
    rb.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_waits_for_a_running_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that has the numbers drawn but not the draw would go on with other batches."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        batch_size=4,
        prefetch=1,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(torch.arange(1000))
    monkeypatch.setattr("replaykit.buffer.thread_pool._MOST_SECONDS", 60)
    begun = threading.Semaphore(0)
    sample = rb.sampler.sample

    def slow(*given: Any) -> Any:
        found = sample(*given)
        begun.release()
        time.sleep(0.3)
        return found

    cast(Any, rb.sampler).sample = slow
    rb.sample()
    rb.sample()  # two draws are delivered, and the next one is under way in its thread
    for _ in range(3):
        assert begun.acquire(timeout=60)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(rb.sample().tolist()))
    process.start()
    there = answers.get()
    process.join()
    assert there == rb.sample().tolist()
    rb.shutdown()
