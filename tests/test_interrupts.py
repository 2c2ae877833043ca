"""Ctrl-C at any step of any call: each change is whole or not there, and no lock stays held."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    ConsumingSampler,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from replaykit.errors import NotEnoughData, RateLimiterTimeout
from replaykit.interrupts import Lock
from tests import effort
from tests.conftest import fingerprint
from tests.interrupting import interrupted_at, random_interrupts
from tests.support.refusals import refuses

# Python prints and drops an interrupt that comes while it finalizes an object.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CAPACITY, BATCH = 24, 4


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def passed_on(data: Any) -> Any:
    return data


Make = Callable[[Path], ReplayBuffer]


def rows(first: int, count: int) -> TensorDict:
    """Rows of a stream whose episodes have five steps."""
    time = torch.arange(first, first + count)
    ends = (time % 5 == 4)[:, None]
    ends[-1] = True
    after = {"observation": time[:, None] + 1.0, "reward": time[:, None] / 2.0, "done": ends}
    columns = {"observation": time[:, None] + 0.0, "id": time, "stream": time % 2, "next": after}
    return TensorDict(columns, [count])


def buffer(storage: Any, **options: Any) -> ReplayBuffer:
    options.setdefault("writer", RoundRobinWriter(track_generations=True))
    generator = torch.Generator().manual_seed(3)
    return ReplayBuffer(storage=storage, batch_size=BATCH, generator=generator, **options)


def lanes(first: int, count: int) -> TensorDict:
    return torch.stack([rows(first, count), rows(first + 1000, count)])


KINDS: dict[str, Make] = {
    "list": lambda _: buffer(ListStorage(CAPACITY)),
    "tensor": lambda _: buffer(LazyTensorStorage(CAPACITY)),
    "prioritized": lambda _: buffer(
        LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(alpha=0.7, beta=0.5)
    ),
    "pass": lambda _: buffer(LazyTensorStorage(CAPACITY), sampler=SamplerWithoutReplacement()),
    "slices": lambda _: buffer(LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=2)),
    "consuming": lambda _: buffer(
        LazyTensorStorage(CAPACITY), sampler=ConsumingSampler(1000), writer=RoundRobinWriter()
    ),
    "once": lambda _: buffer(LazyTensorStorage(CAPACITY, dedup_next=True)),
    "best": lambda _: buffer(
        LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter(rank_key="id")
    ),
    "streams": lambda _: buffer(
        LazyTensorStorage(CAPACITY, lane_key="stream"),
        writer=LaneWriter(CAPACITY // 2, track_generations=True),
    ),
    "memmap": lambda path: buffer(LazyMemmapStorage(CAPACITY, scratch_dir=path)),
    "recovered": lambda path: buffer(
        LazyMemmapStorage(CAPACITY, scratch_dir=path, recover=True),
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
    ),
    "shared": lambda _: buffer(
        LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(alpha=0.7, beta=0.5), shared=True
    ),
    "prefetched": lambda _: buffer(
        LazyTensorStorage(CAPACITY), sampler=SamplerWithoutReplacement(), prefetch=2
    ),
    "prefetched list": lambda _: buffer(
        ListStorage(CAPACITY), sampler=SamplerWithoutReplacement(), prefetch=2
    ),
    "transformed": lambda _: buffer(
        LazyTensorStorage(CAPACITY),
        sampler=SamplerWithoutReplacement(),
        transform=Compose(NStep(3, gamma=0.9, when="write"), passed_on),
        prefetch=2,
    ),
    "paced": lambda _: buffer(LazyTensorStorage(CAPACITY), rate_limiter=RateLimiter(1.0, 1, 1e6)),
}

Call = Callable[[ReplayBuffer, int, Path], Any]


def _update(rb: ReplayBuffer, number: int, _: Path) -> None:
    index = torch.arange(number % 5, 20)
    if rb.sampler.prioritized:
        rb.update_priority(index, torch.full((len(index),), 1.0 + number % 7))


def _patch(rb: ReplayBuffer, number: int, _: Path) -> None:
    if isinstance(rb.storage, ListStorage) or not rb.writer.tracks_generations:
        return
    index = torch.arange(3)
    rb.update_if_present(
        index=index,
        generation=rb.writer.generations_of(index),
        patch={"observation": torch.full((3, 1), float(number))},
    )


def _column(rb: ReplayBuffer, number: int, _: Path) -> None:
    if not isinstance(rb.storage, ListStorage):
        rb.set_("observation", torch.full((len(rb.storage), 1), float(number)))


CALLS: dict[str, Call] = {
    "extend": lambda rb, n, _: rb.extend(rows(10 * n, 7)),
    "add": lambda rb, n, _: rb.add(rows(10 * n, 1)[0]),
    "sample": lambda rb, n, _: rb.sample(),
    "edit": lambda rb, n, _: rb.__setitem__(slice(1, 5), rows(5000 + 10 * n, 4)),
    "set a column": _column,
    "update_priority": _update,
    "update_if_present": _patch,
    "cut": lambda rb, n, _: None if isinstance(rb.storage, ListStorage) else rb.cut(),
    "empty": lambda rb, n, _: rb.empty(),
    "dumps": lambda rb, n, path: rb.dumps(path / "saved"),
    "loads": lambda rb, n, path: rb.loads(path / "kept"),
}


def prepared(make: Make, folder: Path) -> ReplayBuffer:
    """A full ring that has been sampled."""
    folder.mkdir(parents=True)
    rb = make(folder / "rows")
    rb.extend(rows(0, 17))
    rb.extend(rows(17, 17))
    rb.sample()
    rb.dumps(folder / "kept")
    rb.extend(rows(34, 3))
    return rb


def draws(rb: ReplayBuffer) -> Any:
    """How often rows were drawn, all together: a draw that is taken back may come by other rows."""
    return int(rb.sampler.state_dict()["_sample_count"].sum()), rb.write_count


def state(rb: ReplayBuffer) -> Any:
    """All that a user can tell of a buffer, and the batches that come next."""
    storage, ledger = rb.storage, rb.storage.ledger
    slots = torch.arange(ledger.slots)
    with storage.lock:
        seen = {
            "rows": [fingerprint(storage[row]) for row in range(ledger.length)],
            "len": len(rb),
            "count": rb.write_count,
            "cursor": ledger.cursor,
            "positions": ledger.positions(slots),
            "generations": ledger.generations(slots),
        }
    if not isinstance(storage, ListStorage):
        seen["episodes"] = [(e.length, e.reason, e.begin, e.evicted, e.head) for e in rb.episodes]
    if rb.sampler.consumes:
        seen["sampler"] = repr(rb.sampler.state_dict())
    elif not rb.shared:
        copy = pickle.loads(pickle.dumps(rb))
        size = len(copy)
        try:
            seen["batches"] = [copy.sample() for _ in range(5)] if size >= BATCH else []
        except NotEnoughData as error:  # each added row is an episode that is too short for slices
            seen["batches"] = str(error)
        copy.shutdown()
    return fingerprint(seen)


def check_is_free(rb: ReplayBuffer) -> None:
    """Another thread can have the lock, and this one can go on."""
    found: list[bool] = []

    def take() -> None:
        if rb.storage.lock.acquire(timeout=5):
            rb.storage.lock.release()
            found.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert found, "the lock of the storage is held"
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler,)


def injected(kind: str, name: str, folder: Path, *, bytecodes: bool, most: int) -> int:
    """Interrupts a call at its steps; each time it has happened as a whole, or not at all."""
    make, call = KINDS[kind], CALLS[name]
    shown = draws if (kind, name) == ("consuming", "sample") else state
    rb, twin = prepared(make, folder / "one"), prepared(make, folder / "twin")
    calm = prepared(make, folder / "calm")
    call(calm, 0, folder / "calm")
    _, count = interrupted_at(None, lambda: call(calm, 1, folder / "calm"), bytecodes=bytecodes)
    before, hits = shown(twin), 0
    assert shown(rb) == before
    for number, step in enumerate(range(1, count + 1, max(1, count // most)), start=2):
        cut, _ = interrupted_at(
            step, lambda number=number: call(rb, number, folder / "one"), bytecodes=bytecodes
        )
        hits += cut
        check_is_free(rb)
        found = shown(rb)
        call(twin, number, folder / "twin")
        after = shown(twin)
        if found != after:
            assert cut, f"step {step}: not interrupted, and wrong"
            assert found == before, f"step {step} of {count}: neither done nor undone"
            call(rb, number, folder / "one")
            assert shown(rb) == after, f"step {step} of {count}: not the same when it is repeated"
        before = after
    return hits


@pytest.mark.parametrize("bytecodes", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupts_at_steps_leave_whole_changes(
    kind: str, name: str, bytecodes: bool, tmp_path: Path
) -> None:
    most = 300 if bytecodes else effort.cases(5)
    hits = injected(kind, name, tmp_path, bytecodes=bytecodes, most=most)
    assert hits or name in ("cut", "set a column", "update_if_present", "update_priority")


# -- at any time ----------------------------------------------------------------------------------


def quick_state(rb: ReplayBuffer) -> Any:
    """What a write changes, told in little time."""
    ledger = rb.storage.ledger
    slots = torch.arange(ledger.slots)
    numbers = ledger.positions(slots), ledger.generations(slots)
    stored = rb[:] if len(rb.storage) else None
    told = len(rb), rb.write_count, ledger.cursor, numbers, stored
    if rb.sampler.prioritized:
        told = (*told, rb.sampler.state_dict())
    return fingerprint(list(told))


def shaken(kind: str, name: str, folder: Path, interrupts: int) -> int:
    """Calls under interrupts of another process, at any time; how many have ended a call."""
    rb, twin = prepared(KINDS[kind], folder / "one"), prepared(KINDS[kind], folder / "twin")
    call, before = CALLS[name], quick_state(twin)
    with random_interrupts(1e-5, 5e-4) as alarm:
        number = 0
        while alarm.count < interrupts:
            number += 1
            cut = alarm.interrupts(lambda number=number: call(rb, number, folder / "one"))
            if not cut and number % 16:
                call(twin, number, folder / "twin")
                before = None
                continue
            before = quick_state(twin) if before is None else before
            found = quick_state(rb)
            call(twin, number, folder / "twin")
            after = quick_state(twin)
            if found != after:
                assert cut, f"call {number}: not interrupted, and wrong"
                assert found == before, f"call {number}: neither done nor undone"
                call(rb, number, folder / "one")
                assert quick_state(rb) == after
            before = after
        count = alarm.count
    check_is_free(rb)
    assert state(rb) == state(twin)
    return count


WRITES = ["extend", "edit", "empty", "update_priority", "dumps"]
SHAKEN = [
    (kind, name)
    for kind in ("tensor", "list", "prioritized", "recovered", "shared", "prefetched")
    for name in WRITES
    if name != "update_priority" or kind in ("prioritized", "recovered", "shared")
]


@pytest.mark.timeout(1800)  # a long run sends 10,000 interrupts to each call
@pytest.mark.parametrize(("kind", "name"), SHAKEN)
def test_interrupts_at_any_time_leave_whole_changes(kind: str, name: str, tmp_path: Path) -> None:
    kinds = sum(other == name for _, other in SHAKEN)
    least = 12 if effort.short else 10_000 // kinds + 1
    assert shaken(kind, name, tmp_path, least) >= least


DRAWN = ["tensor", "list", "pass", "prioritized", "slices", "shared"]
DRAWN += ["prefetched", "prefetched list"]


def check_order(rb: Any, twin: Any, interrupts: int) -> int:
    """Samples under interrupts; returns how many batches were delivered and then dropped.

    A call that an interrupt ends has delivered its batch or not. Equal batches may follow each
    other, so that a batch may be one of several of the twin's: all that are possible are tracked.
    """
    for _ in range(4):  # those drawn before the last write, which are read again after an interrupt
        rb.sample(), twin.sample()
    batches: dict[int, Any] = {}  # of the twin, by number
    delivered, possible = 0, {0}  # numbers of the twin's batch that comes next
    with random_interrupts(1e-5, 5e-4) as alarm:
        while alarm.count < interrupts:
            found: list[Any] = []
            alarm.interrupts(lambda found=found: found.append(rb.sample()))
            if not found:
                possible |= {number + 1 for number in possible}
                continue
            while max(possible) not in batches:
                batches[len(batches)] = fingerprint(twin.sample())
            got = fingerprint(found[0])
            possible = {number + 1 for number in possible if batches[number] == got}
            assert possible, f"batch {delivered} is not the one that comes next"
            delivered += 1
    return min(possible) - delivered


@pytest.mark.timeout(1800)  # a long run sends 10,000 interrupts
@pytest.mark.parametrize("kind", DRAWN)
def test_batches_come_in_order_after_interrupts(kind: str, tmp_path: Path) -> None:
    make, count = KINDS[kind], 60 if effort.short else 10_000 // len(DRAWN)
    rb, twin = prepared(make, tmp_path / "one"), prepared(make, tmp_path / "twin")
    lost = check_order(rb, twin, count)
    check_is_free(rb)
    assert lost <= 3 + count // 4  # the last microsecond of a call


# -- several buffers ------------------------------------------------------------------------------


def test_interrupted_write_reaches_all_of_its_shards_or_none() -> None:
    with (
        ShardedReplayBuffer(
            num_shards=3, storage=lambda: LazyTensorStorage(5000), backend="local"
        ) as rb,
        random_interrupts(1e-5, 1e-3) as alarm,
    ):
        number, stored = 0, 0
        while alarm.count < 40 and stored < 12_000:
            number += 1
            alarm.interrupts(lambda: rb.extend(rows(0, 6)))
            stored = len(rb)
            assert stored % 6 == 0
        assert alarm.count


def ensemble(folder: Path) -> ReplayBufferEnsemble:
    members = [prepared(KINDS["pass"], folder / "first"), prepared(KINDS["pass"], folder / "other")]
    return ReplayBufferEnsemble(
        *members, batch_size=BATCH, generator=torch.Generator().manual_seed(5), sample_from_all=True
    )


def shards_of_a_queue() -> ShardedReplayBuffer:
    """Two shards that admit two rows until they are sampled."""
    return ShardedReplayBuffer(
        num_shards=2,
        storage=lambda: LazyTensorStorage(10),
        batch_size=2,
        rate_limiter=RateLimiter.queue(2),
        backend="local",
    )


def test_interrupted_waits_for_a_write_do_not_delay_it() -> None:
    with shards_of_a_queue() as rb:
        rb.extend(torch.zeros(2))
        written = rb.extend_async(torch.ones(2))

        def wait() -> None:
            with contextlib.suppress(RateLimiterTimeout):
                written.result(0.001)

        _, steps = interrupted_at(None, wait, bytecodes=False)
        for step in range(1, steps + 1):
            interrupted_at(step, wait, bytecodes=False)
        rb.sample()
        assert written.result(10).tolist() == [2, 3]


def test_interrupted_waits_for_a_sample_do_not_prevent_it() -> None:
    with shards_of_a_queue() as rb:
        sampled = rb.sample_async()

        def wait() -> None:
            with contextlib.suppress(RateLimiterTimeout):
                sampled.result(0.0)

        for step in range(1, 200):
            interrupted_at(step, wait, bytecodes=True)
        rb.extend(torch.ones(2))
        assert sampled.result(10).tolist() == [1.0, 1.0]


def test_interrupted_asynchronous_writes_keep_the_order_of_shards() -> None:
    with ShardedReplayBuffer(
        num_shards=2, storage=lambda: LazyTensorStorage(5000), backend="local"
    ) as rb:
        rows = torch.zeros(3)
        _, steps = interrupted_at(None, lambda: rb.extend_async(rows), bytecodes=False)
        for step in range(1, steps + 1, 5):
            interrupted_at(step, lambda: rb.extend_async(rows), bytecodes=False)
            rb.flush()
            assert rb.add(torch.zeros(())) == len(rb) - 1


def test_batches_of_ensembles_come_in_order(tmp_path: Path) -> None:
    rb, twin = ensemble(tmp_path / "one"), ensemble(tmp_path / "twin")
    lost = check_order(rb, twin, 60)
    assert lost <= 3 + 60 // 4


@pytest.mark.parametrize("by_batch", [True, False])
def test_members_of_ensembles_take_priorities_together(tmp_path: Path, by_batch: bool) -> None:
    members = [prepared(KINDS["prioritized"], tmp_path / str(number)) for number in range(3)]
    rb = ReplayBufferEnsemble(
        *members,
        batch_size=12,
        generator=torch.Generator().manual_seed(5),
        sample_from_all=True,
    )
    batch, last = rb.sample(), 1.0

    def update(value: float) -> None:
        given = torch.full(batch.batch_size, value)
        if by_batch:
            rb.update_tensordict_priority(batch.set("td_error", given))
        else:
            rb.update_priority(batch["index"], given)

    with random_interrupts(1e-5, 5e-4) as alarm:
        for number in range(2, 400):
            alarm.interrupts(lambda number=number: update(float(number)))
            largest = {member.sampler.state_dict()["_max_priority"] for member in members}
            assert len(largest) == 1, f"update {number} reached some of the members only"
            assert max(largest) in (last, float(number))
            last = max(largest)
        assert alarm.count > 10


def test_members_of_ensembles_are_saved_together(tmp_path: Path) -> None:
    rb, folder = ensemble(tmp_path / "one"), tmp_path / "saved"
    one, other = ensemble(tmp_path / "first copy"), ensemble(tmp_path / "other copy")
    rb.dumps(folder)
    with random_interrupts(1e-4, 5e-3) as alarm:
        for _ in range(25):
            rb.sample()
            alarm.interrupts(lambda: rb.dumps(folder))
            one.loads(folder)
            if alarm.interrupts(lambda: other.loads(folder)):
                other.sample()  # with what it had, or with what was loaded
                other.loads(folder)
            batches = [e.sample().exclude("index_generation") for e in (one, other)]
            assert fingerprint(batches[0]) == fingerprint(batches[1])


# -- waits ----------------------------------------------------------------------------------------


def interrupted_soon(call: Callable[[], Any], seconds: float = 0.3) -> float:
    """Runs a call that Ctrl-C ends; how long that took from the signal on."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    took = time.monotonic() - sent[0]
    timer.join()
    return took


def test_interrupt_ends_a_wait_for_a_lock() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY))
    rb.extend(rows(0, 5))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with rb.storage.lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    for call in (lambda: rb.extend(rows(5, 5)), rb.sample, rb.empty):
        assert interrupted_soon(call) < 5
    done.set()
    thread.join()
    check_is_free(rb)
    assert (len(rb), rb.write_count) == (5, 5)


def test_interrupt_ends_a_wait_for_a_rate_limiter() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY), rate_limiter=RateLimiter.queue(4))
    rb.extend(rows(0, 4))
    assert interrupted_soon(lambda: rb.extend(rows(4, 4))) < 5
    assert rb.stats()["inserts"] == 4
    rb.sample()
    rb.extend(rows(4, 4))  # what was not done holds nothing up
    assert rb.write_count == 8


def test_interrupt_ends_a_wait_for_a_batch() -> None:
    slow = threading.Event()

    def wait(data: Any) -> Any:
        slow.wait(20)
        return data

    rb = buffer(
        LazyTensorStorage(CAPACITY),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=wait,
        prefetch=2,
    )
    rb.extend(rows(0, 12))
    assert interrupted_soon(rb.sample) < 5
    slow.set()
    assert [rb.sample()["id"].tolist() for _ in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    rb.shutdown()


def test_second_interrupt_ends_a_hanging_sampler() -> None:
    class Hanging(RandomSampler):
        def sample(self, storage: Any, batch_size: int) -> Any:
            time.sleep(20)

    rb = buffer(LazyTensorStorage(CAPACITY), sampler=Hanging())
    rb.storage.set(range(5), rows(0, 5))
    begun = time.monotonic()
    first = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    first.start()
    assert interrupted_soon(rb.sample, 1.6) < 5
    assert time.monotonic() - begun < 10
    first.join()


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="the system has no alarms")
def test_an_alarm_ends_a_transform_that_takes_too_long() -> None:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError("too late")

    waits = [20.0]

    def slow(data: Any) -> Any:
        time.sleep(waits[0])
        return data

    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = buffer(LazyTensorStorage(CAPACITY), sampler=sampler, transform=slow)
    rb.storage.set(range(8), rows(0, 8))
    before, begun = signal.signal(signal.SIGALRM, late), time.monotonic()
    try:
        signal.alarm(1)
        refuses(TimeoutError, "too late", rb.sample)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 10
    waits[0] = 0.0
    assert rb.sample()["id"].tolist() == [0, 1, 2, 3]  # the interrupted batch comes next


def test_handler_set_under_the_lock_can_call_the_previous_handler() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY))
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with rb.storage.lock:
            known = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *given: known(*given))
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1] * 3
        with rb.storage.lock:  # the handler that was there when it came gets it
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert came == [signal.SIGUSR1] * 4
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN  # and the one set meanwhile stays
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_reaches_an_event_loop_once() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY))
    came: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, came.append, 1)
        with rb.storage.lock:
            os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(run())
    assert came == [1]


def test_calls_restore_signal_handlers() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY))
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (
            *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM),
            *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1, signal.SIGUSR2),
        )
    }
    try:
        set_here = [signal.getsignal(number) for number in before]
        with rb.storage.lock:
            for number in before:
                signal.raise_signal(number)
            assert came == []
            rb.extend(rows(0, 3))
        assert sorted(came) == sorted(before)
        assert [signal.getsignal(number) for number in before] == set_here
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_under_the_lock_takes_interrupts() -> None:
    rb = buffer(LazyTensorStorage(CAPACITY))
    with rb.storage.lock:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_under_the_lock_commits_nothing(tmp_path: Path) -> None:
    rb, child = KINDS["shared"](tmp_path), None
    rb.extend(rows(0, 5))
    home = rb.storage.recovery.home
    try:
        with rb.storage.lock:
            rb.update_priority(0, 3.0)
            before = home.journaled()
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                assert home.journaled() == before
        if child == 0:
            os._exit(0)
    finally:
        if child == 0:
            os._exit(1)


def test_threads_get_the_same_lock_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that made another lock would meanwhile reset the state of a forked process."""
    storage, made = LazyTensorStorage(CAPACITY), []
    monkeypatch.setattr(storage, "_new_lock", lambda: (time.sleep(0.05), made.append(1), Lock())[2])
    threads = [threading.Thread(target=lambda: storage.lock) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_other_process_continues_after_interrupts_of_one(tmp_path: Path) -> None:
    rb = KINDS["shared"](tmp_path)
    rb.extend(rows(0, 20))
    context = multiprocessing.get_context("fork")
    done, stop = context.Value("q", 0), context.Event()
    other = context.Process(target=extend_until, args=(rb, done, stop))
    other.start()
    try:
        with random_interrupts(1e-5, 5e-4) as alarm:
            while alarm.count < 150:
                alarm.interrupts(lambda: rb.extend(rows(0, 3)))
                alarm.interrupts(rb.sample)
        before = done.value
        deadline = time.monotonic() + 30
        while done.value < before + 20:
            assert time.monotonic() < deadline, "the other process stands still"
            rb.sample()
    finally:
        stop.set()
        other.join(30)
    assert other.exitcode == 0
    assert (rb.write_count - 20 - done.value) % 3 == 0


def extend_until(rb: ReplayBuffer, done: Any, stop: Any) -> None:
    while not stop.is_set():
        rb.extend(rows(0, 5)[:3])
        done.value += 3


def test_updates_of_a_sampler_without_a_storage_are_whole() -> None:
    def made(*priorities: float) -> PrioritizedSampler:
        sampler = PrioritizedSampler(8, 0.7, 0.5, max_priority_within_buffer=True)
        sampler.extend(torch.arange(4))
        for priority in priorities:
            sampler.update_priority(torch.arange(4), priority)
        return sampler

    def shown(sampler: PrioritizedSampler) -> Any:
        return sampler.state_dict()["_priorities"].tolist(), sampler.default_priority

    step, cut, whole = 0, True, [shown(made(2.0)), shown(made(2.0, 5.0))]
    while cut:
        step, sampler = step + 2, made(2.0)
        update = partial(sampler.update_priority, torch.arange(4), 5.0)
        cut, _ = interrupted_at(step, update, bytecodes=True)
        assert shown(sampler) in whole, f"step {step}"
    assert shown(sampler) == whole[1]
