"""Batches made ahead: the same ones, in the same order, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Storage,
)
from replaykit.buffer.prefetch import Drawn, Prefetcher


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits for a condition; whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Counting(SamplerWithoutReplacement):
    """Counts its draws, and fails at some of them."""

    def __init__(self, *failing: int) -> None:
        super().__init__(shuffle=False)
        self.draws = 0
        self.failing = failing

    def sample(self, storage: Storage, batch_size: int) -> Any:
        self.draws += 1
        if self.draws in self.failing:
            raise ArithmeticError(f"draw {self.draws}")
        return super().sample(storage, batch_size)


# -- the same batches -----------------------------------------------------------------------------


@pytest.mark.pitfall("RD2")
@given(
    prefetch=st.integers(1, 8),
    count=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    sampler=st.sampled_from(["random", "without", "ordered", "drop_last"]),
    kind=st.sampled_from(["list", "tensor"]),
)
@settings(max_examples=60, deadline=None)
def test_the_batches_are_those_without_prefetch(
    prefetch: int, count: int, batch_size: int, sampler: str, kind: str, buffer_of: Any, same: Any
):
    """RD2, G5: draws are made in the order in which they are asked for."""
    batch_size = min(batch_size, count)
    ahead, direct = (
        buffer_of(
            kind,
            30,
            filled=count,
            sampler=sampler,
            batch_size=batch_size,
            seed=5,
            prefetch=depth,
        )
        for depth in (prefetch, None)
    )
    for number in range(3 * (count // batch_size + 2)):
        how = ("sample", "next")[number % 7 == 3]
        same(getattr(direct, how)(), getattr(ahead, how)())
        assert ahead.sampler.ran_out is direct.sampler.ran_out
    ahead.shutdown()


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("prefetch", range(9))
@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 11])
def test_a_pass_has_every_row_once(prefetch: int, batch_size: int, buffer_of: Any):
    """RD2: rows were lost or repeated, for depths 0..8 and sizes that do not divide."""
    buffer = buffer_of(filled=10, sampler="without", batch_size=batch_size, prefetch=prefetch)
    for _ in range(4):
        assert sorted(i for batch in buffer for i in batch["id"].tolist()) == list(range(10))


def test_slow_batches_are_delivered_in_order(buffer_of: Any):
    def slow_at_first(data: Any) -> Any:
        time.sleep(0.03 if int(data["id"][0]) % 4 == 0 else 0)
        return data

    buffer = buffer_of(
        max_size=24, filled=24, sampler="ordered", batch_size=2, prefetch=4, transform=slow_at_first
    )
    assert [batch["id"][0].item() for batch in buffer] == list(range(0, 24, 2))


@pytest.mark.pitfall("RD2")
@pytest.mark.parametrize("prefetch", [1, 4, 8])
def test_draws_never_reach_past_the_end_of_a_pass(prefetch: int, buffer_of: Any):
    """RD2: 10 rows in batches of 4 are three draws, however deep the queue is."""
    for _ in range(10):
        sampler = Counting()
        buffer = buffer_of(filled=10, sampler=sampler, batch_size=4, prefetch=prefetch)
        for delivered in (1, 2):
            buffer.sample()
            assert eventually(lambda s=sampler, d=delivered: s.draws == min(3, d + prefetch))
            time.sleep(0.005)
            assert sampler.draws <= 3
        assert len(buffer.sample()) == 2
        assert eventually(lambda s=sampler: s.draws == 3 + min(3, prefetch))
        buffer.shutdown()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_queue_is_filled_up_and_no_further(prefetch: int, buffer_of: Any):
    sampler = Counting()
    buffer = buffer_of(max_size=90, filled=90, sampler=sampler, batch_size=1, prefetch=prefetch)
    for number in range(1, 10):
        buffer.sample()
        assert eventually(lambda n=number: sampler.draws == n + prefetch)
        time.sleep(0.005)
        assert sampler.draws == number + prefetch
        assert buffer.stats()["prefetch_queue_size"] == prefetch


@pytest.mark.pitfall("RD1")
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_another_batch_size_is_served_directly(sampler: str, buffer_of: Any):
    """RD1, E12: a queued batch of the wrong size was returned."""
    buffer = buffer_of(max_size=100, filled=100, sampler=sampler, batch_size=3, prefetch=3, seed=0)
    seen: list[int] = []
    for size in (3, 5, 3, None, 1, 20, 3, 2):
        batch = buffer.sample(size)
        assert len(batch) == (size or 3)
        seen += batch["id"].tolist()
    if sampler == "without":
        assert len(set(seen)) == len(seen) == 40
        seen += [i for batch in buffer for i in batch["id"].tolist()]
        assert sorted(seen) == list(range(100))


def test_batches_may_predate_writes_by_no_more_than_the_depth(buffer_of: Any):
    depth = 3
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, prefetch=depth)
    oldest = 0
    for step in range(60):
        buffer.extend(torch.full((4,), step))
        values = buffer.sample().unique().tolist()
        assert len(values) == 1, "a batch was read while it was written"
        assert step - depth <= values[0] <= step
        oldest = max(oldest, step - values[0])
    assert oldest >= 1


# -- errors ---------------------------------------------------------------------------------------


class FailsAt:
    """A transform that fails at a row, as often as it is told to."""

    def __init__(self, row: int, times: int) -> None:
        self.row, self.times = row, times

    def __call__(self, data: Any) -> Any:
        if self.row in data["id"].tolist() and self.times:
            self.times -= 1
            raise ArithmeticError(f"row {self.row}")
        return data


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("prefetch", [None, 1, 2, 5])
def test_an_error_of_a_transform_is_raised_where_its_batch_would_come(
    prefetch: int | None, buffer_of: Any
):
    """TH9, G1: no exception is lost, none comes early, and no row of the pass is lost by it."""
    for _ in range(5):
        failing = FailsAt(4, 2)
        buffer = buffer_of(
            filled=10, sampler="ordered", batch_size=2, prefetch=prefetch, transform=failing
        )
        for turn in range(2):
            assert buffer.sample()["id"].tolist() == [0, 1]
            assert buffer.sample()["id"].tolist() == [2, 3]
            for _ in range(2 * (1 - turn)):
                with pytest.raises(ArithmeticError, match="row 4"):
                    buffer.sample()
                assert not buffer.sampler.ran_out
            for start in (4, 6, 8):
                assert buffer.sample()["id"].tolist() == [start, start + 1]
            assert buffer.sampler.ran_out


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_a_batch_that_failed_comes_as_if_nothing_had_failed(
    sampler: str, prefetch: int | None, buffer_of: Any
):
    """G1: a call that raises leaves the random state as it was; also with another batch size."""
    # Draws of another size take turns with those made ahead: in what order is chance.
    sizes = (3, 3, 5, 3, 5, 5, 2, 3) if prefetch is None else (3,) * 12
    make = {"filled": 30, "sampler": sampler, "batch_size": 3, "prefetch": prefetch}
    other = buffer_of(**make, seed=4)
    expected = [other.sample(size)["id"].tolist() for size in sizes]
    seen: set[tuple[int, ...]] = set()
    failures = 0

    def failing(data: Any) -> Any:
        ids = tuple(data["id"].tolist())
        if ids not in seen:
            seen.add(ids)
            raise ArithmeticError("the first time")
        return data

    one = buffer_of(**make, seed=4, transform=failing)
    for size, ids in zip(sizes, expected, strict=True):
        while True:
            try:
                batch = one.sample(size)
            except ArithmeticError:
                failures += 1
                continue
            break
        assert batch["id"].tolist() == ids
    assert failures >= len(sizes) // (1 + (prefetch or 0))


def test_a_transform_that_changes_the_number_of_rows_costs_none_of_them(buffer_of: Any):
    buffer = buffer_of(
        filled=6, sampler="ordered", batch_size=2, transform=lambda data: data[:1].clone()
    )
    with pytest.raises(RuntimeError, match="return_info=True"):
        buffer.sample()
    data, info = buffer.sample(return_info=True)
    assert info["index"].tolist() == [0, 1]
    assert data["id"].tolist() == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_a_forked_process_prepares_batches_of_its_own(sampler: str, run_python: Any):
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


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_an_error_of_a_draw_is_raised_where_its_batch_would_come(prefetch: int, buffer_of: Any):
    """TH9: as without prefetch, the draw after it is the next one."""
    buffer = buffer_of(filled=10, sampler=Counting(3, 4), batch_size=2, prefetch=prefetch)
    ids: list[Any] = []
    for _ in range(7):
        try:
            ids.append(buffer.sample()["id"].tolist())
        except ArithmeticError as error:
            ids.append(str(error))
    assert ids == [[0, 1], [2, 3], "draw 3", "draw 4", [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_empty_buffer_works_as_soon_as_there_are_rows(prefetch: int, buffer_of: Any, rows: Any):
    for _ in range(30):
        buffer = buffer_of(sampler="ordered", batch_size=2, prefetch=prefetch)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="empty storage"):
                buffer.sample()
        buffer.extend(rows(3))
        assert [batch["id"].tolist() for batch in buffer] == [[0, 1], [2]]


def test_an_error_at_the_end_of_a_pass_does_not_stop_the_next(buffer_of: Any):
    failing = FailsAt(9, 0)
    buffer = buffer_of(filled=10, sampler="ordered", batch_size=4, prefetch=4, transform=failing)
    for _ in range(3):
        failing.times = 2
        assert buffer.sample()["id"].tolist() == [0, 1, 2, 3]
        assert buffer.sample()["id"].tolist() == [4, 5, 6, 7]
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="row 9"):
                buffer.sample()
        assert buffer.sample()["id"].tolist() == [8, 9]


# -- changes while batches are prepared -----------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_transform_that_is_added_applies_to_the_next_batch(prefetch: int, buffer_of: Any):
    """Batches that were prepared are made anew, from the same draws."""

    def in_place(data: Any) -> Any:
        data["id"] += 1000
        return data

    buffer = buffer_of(filled=10, sampler="ordered", batch_size=2, prefetch=prefetch)
    assert buffer.sample()["id"].tolist() == [0, 1]
    time.sleep(0.02)
    buffer.append_transform(in_place)
    assert buffer.sample()["id"].tolist() == [1002, 1003]
    buffer.insert_transform(0, in_place)
    assert buffer.sample()["id"].tolist() == [2004, 2005]
    assert [batch["id"].tolist() for batch in buffer] == [[2006, 2007], [2008, 2009]]
    assert buffer["id"].tolist() == [i + 2000 for i in range(10)]
    assert buffer.storage[:]["id"].tolist() == list(range(10))


@pytest.mark.parametrize("wait", [0.0, 0.01])
def test_draws_kept_for_later_keep_their_order_through_saves(wait: float, buffer_of: Any):
    """What is left of the kept draws comes after those that the queue has taken from them."""
    seen: list[int] = []
    buffer = buffer_of(max_size=40, filled=40, sampler="ordered", batch_size=2, prefetch=4)
    for depth in (4, 1, 3, 2, 4, 1, 2):
        seen += buffer.sample()["id"].tolist()
        time.sleep(wait)
        state = buffer.state_dict()
        buffer = buffer_of(max_size=40, sampler="ordered", batch_size=2, prefetch=depth)
        buffer.load_state_dict(state)
        seen += buffer.sample()["id"].tolist()
        buffer.append_transform(lambda data: data)
    assert seen == list(range(28))


def test_what_is_read_again_has_the_generation_of_what_is_there(buffer_of: Any, rows: Any):
    buffer = buffer_of(
        "tensor",
        4,
        filled=4,
        sampler="ordered",
        batch_size=2,
        prefetch=1,
        writer=RoundRobinWriter(track_generations=True),
    )
    buffer.sample()
    assert eventually(lambda: len(buffer.state_dict()["_prefetch_state"]) == 1)
    buffer.append_transform(lambda td: td)
    buffer.extend(rows(4, 4))
    batch = buffer.sample()
    assert batch["id"].tolist() == [6, 7]
    assert batch["index_generation"].tolist() == [1, 1]


def test_draws_kept_for_later_are_dropped_with_their_rows(storage_of: Any, rows: Any):
    storage = storage_of("tensor", 8)
    one = ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2
    )
    two = ReplayBuffer(storage=storage)
    two.extend(rows(8))
    one.sample()
    assert eventually(lambda: len(one.state_dict()["_prefetch_state"]) == 2)
    one.append_transform(lambda td: td)
    two.empty()
    two.extend(rows(1, 50))
    for _ in range(3):
        assert one.sample()["id"].tolist() == [50]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_what_was_prepared_is_given_up_where_it_does_not_apply_any_more(
    prefetch: int, buffer_of: Any, storage_of: Any, rows: Any
):
    buffer = buffer_of(filled=8, sampler="ordered", batch_size=2, prefetch=prefetch)
    buffer.sample()
    buffer.empty()
    buffer.extend(rows(4, 20))
    assert buffer.sample()["id"].tolist() == [20, 21]
    buffer.set_storage(storage_of("list", 5))
    buffer.extend(rows(3, 30))
    assert buffer.sample()["id"].tolist() == [30, 31]
    buffer.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert buffer.sample()["id"].tolist() == [30, 31]
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.sample()["id"].tolist() == [32]


# -- the end --------------------------------------------------------------------------------------


def _workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("replaykit-prefetch")]


def test_shutdown_joins_the_threads(buffer_of: Any, rows: Any):
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
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    buffer.shutdown()
    buffer.extend(rows(1))
    assert len(buffer) == 9
    direct = buffer_of(filled=2)
    direct.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        direct.sample(1)


def test_shutdown_wakes_whoever_waits(buffer_of: Any, in_threads: Any):
    for _ in range(10):
        buffer = buffer_of(filled=4, sampler="without", batch_size=4, prefetch=2)

        def consume(buffer: ReplayBuffer = buffer) -> None:
            with pytest.raises(RuntimeError, match="shut down"):
                for _ in iter(buffer.sample, None):
                    pass

        in_threads(consume, consume, consume, lambda b=buffer: (time.sleep(0.01), b.shutdown()))


@pytest.mark.pitfall("TH9")
def test_threads_end_with_the_buffer(buffer_of: Any):
    """TH9: a buffer that nobody holds any more leaves no thread behind."""
    started = set(_workers())
    buffer = buffer_of(filled=8, batch_size=2, prefetch=3)
    buffer.sample()
    own = set(_workers()) - started
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert eventually(lambda: gone() is None and not any(thread.is_alive() for thread in own))


@pytest.mark.pitfall("TH9")
@pytest.mark.parametrize("failing", [False, True])
def test_the_interpreter_exits_at_once(failing: bool, run_python: Any):
    """TH9: within a second, also with batches under way and failing transforms."""
    program = f"""
import sys, time, torch
from replaykit import LazyTensorStorage, ReplayBuffer
def transform(data):
    if {failing}:
        raise ArithmeticError
    time.sleep(0.1)
    return data
depth = int(sys.argv[1])
rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2, prefetch=depth,
                  transform=transform)
rb.extend(torch.arange(9))
try:
    rb.sample()
except ArithmeticError:
    pass
print(time.time(), flush=True)
"""

    def seconds(depth: int) -> float:
        done = run_python(program, depth)
        assert done.stderr == ""
        return time.time() - float(done.stdout)

    # The end of a torch process takes its own time; on a busy machine one attempt says little.
    for _ in range(4):
        if seconds(4) < seconds(0) + 1.0:
            return
    raise AssertionError("prepared batches keep the interpreter from ending")


# -- two races, step by step ----------------------------------------------------------------------


class Source:
    """A buffer of which some draws, by number, end a pass."""

    def __init__(self, *ending: int) -> None:
        self.ending = ending
        self.draws = 0
        self.after_draw: dict[int, Callable[[], Any]] = {}
        self.before_delivery = threading.Event()

    def _draw_ahead(self, entry: Any) -> Drawn:
        number, self.draws = self.draws, self.draws + 1
        index = torch.tensor([number])
        entry.drawn = Drawn(index, {}, number in self.ending, index)
        self.after_draw.get(number, lambda: None)()
        return entry.drawn

    def _finish(self, drawn: Drawn) -> int:
        assert self.before_delivery.wait(20)
        return int(drawn.index)

    def _written(self) -> int:
        return 0


def test_a_pass_that_ends_while_batches_are_given_up_stops_nobody(in_threads: Any):
    source = Source(1)
    source.before_delivery.set()
    prefetcher = Prefetcher(2, source)
    source.after_draw[1] = prefetcher.clear  # by another thread, right after the draw
    assert prefetcher.next()[1] == 0
    assert eventually(lambda: source.draws >= 2)
    delivered: list[int] = []
    in_threads(lambda: delivered.append(prefetcher.next()[1]), timeout=10)
    assert delivered[0] > 1
    prefetcher.shutdown()


def test_who_waits_for_the_end_of_a_pass_is_not_held_up_by_the_next_one(in_threads: Any):
    """The third draw ends another pass before the second consumer is awake again."""
    drawn_again, third = threading.Event(), threading.Event()

    class Slow(Prefetcher):
        def _draw(self, entry: Any, ticket: int) -> Any:
            assert ticket != 2 or third.wait(20)
            try:
                return super()._draw(entry, ticket)
            finally:
                if ticket == 2:
                    drawn_again.set()

        def _await_release(self, number: int) -> None:
            source.before_delivery.set()
            assert drawn_again.wait(20)
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

    in_threads(first, second, timeout=10)
    assert delivered == [0, 1]
    prefetcher.shutdown()


# -- many threads ---------------------------------------------------------------------------------


@pytest.mark.pitfall("TH8")
@pytest.mark.parametrize("kind", ["list", "tensor", "memmap"])
def test_writers_go_on_while_batches_are_made(kind: str, buffer_of: Any, rows: Any):
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
        assert busy.acquire(timeout=20)
    for start in range(10, 60):
        buffer.extend(rows(1, start))
    assert len(buffer) == 60
    assert not batches
    go.set()
    consumer.join(20)
    assert len(batches) == 1


@pytest.mark.pitfall("TH8")
def test_batches_are_made_in_parallel(buffer_of: Any):
    together = threading.Barrier(3)

    def transform(data: Any) -> Any:
        together.wait(20)
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
def test_nobody_waits_for_ever(kind: str, buffer_of: Any, in_threads: Any, rows: Any):
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

    in_threads(consume, consume, consume, change, timeout=30)


def test_a_delayed_buffer_prefetches_too():
    buffer = ReplayBuffer(
        storage=lambda: ListStorage(5), batch_size=2, prefetch=2, delayed_init=True
    )
    buffer.extend([1, 2, 3])
    assert set(buffer.sample().tolist()) <= {1, 2, 3}
