"""Buffers with a rate limiter: what waits, what counts, what is kept."""

from __future__ import annotations

import copy
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from replaykit.errors import RateLimiterTimeout
from tests.buffer.building import in_threads
from tests.pace.calls import counts, numbers, started
from tests.support.refusals import refuses


def paced(limiter: RateLimiter, capacity: int = 1000, **options: Any) -> ReplayBuffer:
    options.setdefault("storage", LazyTensorStorage(capacity))
    return ReplayBuffer(rate_limiter=limiter, **options)


def waits(rb: ReplayBuffer, thread: threading.Thread) -> None:
    """Returns once the thread has been waiting for a tenth of a second."""
    pace, until = rb._pace, time.monotonic() + 60
    assert pace is not None
    while not pace._waiting and time.monotonic() < until:
        time.sleep(0.001)
    thread.join(0.12)
    assert thread.is_alive()


# -- one thread: what may be done is what the law says --------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_keeps_the_law(seed: int) -> None:
    """A plain model counts rows; with ``timeout=0`` a call goes through where the model says so."""
    chance = random.Random(seed)
    ratio, least, error = chance.choice([(1, 5, 12), (3, 10, 30), (0.5, 8, 20), (4, 1, 40)])
    rb = paced(RateLimiter(ratio, least, error), 64, batch_size=4)
    inserts = samples = 0
    refused = 0
    for _ in range(300):
        before = rb.stats()["write_count"], len(rb)
        if chance.random() < 0.5:
            n = chance.randint(1, 8)
            fits = (
                min(inserts, 64) + n <= least
                or (inserts + n) * ratio - samples <= ratio * least + error
            )
            if fits:
                rb.extend(numbers(inserts, n), timeout=0)
                inserts += n
            else:
                with pytest.raises(RateLimiterTimeout, match=f"{inserts} inserted, {samples} samp"):
                    rb.extend(numbers(inserts, n), timeout=0)
        else:
            n = chance.randint(1, 8)
            fits = (
                min(inserts, 64) >= least and inserts * ratio - samples - n >= ratio * least - error
            )
            assert rb.can_sample(n) is fits
            if fits:
                assert len(rb.sample(n, timeout=0)) == n
                samples += n
            else:
                refuses(TimeoutError, f"a sample of {n} row", rb.sample, n, timeout=0)
        if not fits:
            refused += 1
            assert before == (rb.stats()["write_count"], len(rb))
        assert counts(rb) == (inserts, samples)
    assert refused > 20


def test_a_refused_call_leaves_the_generator_and_the_pass_alone() -> None:
    found: list[list[Any]] = [[], []]
    for refused, batches in enumerate(found):
        rb = paced(
            RateLimiter.queue(40),
            40,
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
            generator=torch.Generator().manual_seed(1),
        )
        rb.extend(numbers(0, 8))
        batches += [rb.sample()["number"].tolist() for _ in range(2)]
        if refused:
            refuses(RateLimiterTimeout, "sample", rb.sample, timeout=0)
        rb.extend(numbers(8, 4))
        batches.append(rb.sample()["number"].tolist())
    assert found[0] == found[1]


def test_calls_that_can_never_succeed_are_refused_before_anything_waits() -> None:
    rb = paced(RateLimiter.queue(4), 9)
    refuses(ValueError, "writes of at most 4 rows", rb.extend, numbers(0, 5))
    refuses(ValueError, "samples of at most 4 rows", rb.sample, 5)
    assert (len(rb), counts(rb)) == (0, (0, 0))
    rb.extend(numbers(0, 4))
    refuses(ValueError, "number", rb.add, TensorDict({"other": torch.zeros(())}, []))


@pytest.mark.parametrize("call", ["extend", "add", "sample"])
def test_timeouts_are_checked_with_and_without_a_limiter(call: str) -> None:
    for rb in (paced(RateLimiter.min_size(1)), ReplayBuffer(storage=LazyTensorStorage(9))):
        rb.extend(numbers(0, 3))
        given: Any = 2 if call == "sample" else numbers(0, 2)[0] if call == "add" else numbers(0, 2)
        getattr(rb, call)(given, timeout=5)
        refuses(ValueError, "timeout", getattr(rb, call), given, timeout=-1)
        refuses(TypeError, "timeout", getattr(rb, call), given, timeout="soon")


def test_invalid_rate_limiters_and_capacities_are_refused() -> None:
    refuses(TypeError, "RateLimiter", ReplayBuffer, rate_limiter=3)
    refuses(ValueError, "capacity of 9", paced, RateLimiter.min_size(10), 9)
    rb = paced(RateLimiter.queue(9), 9)
    refuses(ValueError, "capacity of 8", rb.set_storage, LazyTensorStorage(8))
    with pytest.raises(ValueError, match="member 1: expected a buffer without a rate limiter"):
        ReplayBufferEnsemble(ReplayBuffer(), rb)


# -- what counts ----------------------------------------------------------------------------------


def test_inserts_are_rows_that_were_stored() -> None:
    best = paced(
        RateLimiter.min_size(1),
        2,
        writer=TensorDictMaxValueWriter(rank_key="number"),
    )
    best.extend(numbers(0, 2))
    best.extend(numbers(-5, 4))  # none of them is better
    assert best.add(numbers(9, 1)[0]) is not None
    assert counts(best)[0] == 3
    lanes = paced(RateLimiter.min_size(1), storage=LazyTensorStorage(60, ndim=2))
    lanes.extend(TensorDict({"x": torch.zeros(3, 4)}, [3, 4]))
    lanes.add(TensorDict({"x": torch.zeros(3)}, [3]))
    assert counts(lanes)[0] == 15
    listed = paced(RateLimiter.min_size(1), storage=ListStorage(9), collate_fn=list)
    listed.extend(["a", "b"])
    listed.add("c")
    assert counts(listed)[0] == 3


def test_samples_are_records_that_were_delivered() -> None:
    passes = paced(RateLimiter.min_size(1), sampler=SamplerWithoutReplacement(), batch_size=4)
    passes.extend(numbers(0, 6))
    assert [len(batch) for batch in passes] == [4, 2]
    assert counts(passes)[1] == 6
    windows = paced(RateLimiter.min_size(1), sample_unit=Sequence(3), batch_size=2)
    rows = TensorDict({"x": torch.arange(9), "next": {"done": torch.zeros(9, 1).bool()}}, [9])
    windows.extend(rows)
    assert windows.sample().numel() == 6
    assert counts(windows)[1] == 2

    def fails(data: Any) -> Any:
        raise OSError("no")

    failing = paced(RateLimiter.queue(5), 5, transform=fails)
    failing.extend(numbers(0, 5))
    refuses(OSError, "no", failing.sample, 5)
    assert counts(failing) == (5, 0)
    assert failing._pace is not None
    assert failing._pace.may(1, 5, 5)  # nothing is under way


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_made_ahead_count_when_they_are_delivered(prefetch: int) -> None:
    rb = paced(RateLimiter.queue(12), 12, batch_size=4, prefetch=prefetch)
    rb.extend(numbers(0, 12))
    for done in (4, 8, 12):
        rb.sample(timeout=5)
        assert counts(rb) == (12, done)
    with pytest.raises(RateLimiterTimeout):
        rb.sample(timeout=0)
    rb.extend(numbers(12, 4), timeout=0)
    rb.sample(timeout=5)
    rb.shutdown()


def test_rows_held_back_by_a_transform_count_when_written() -> None:
    """Nothing that they saw is lost by a timeout; what they give up later counts then."""
    rb = paced(RateLimiter.queue(6), 20, transform=NStep(2, 0.9, when="write"))

    def steps(first: int, count: int, done: int | None = None) -> TensorDict:
        ends = torch.zeros(count, 1, dtype=torch.bool)
        if done is not None:
            ends[done] = True
        x = torch.arange(first, first + count).float()
        following = {"observation": x + 1, "reward": x[:, None], "done": ends}
        return TensorDict({"observation": x, "next": following}, [count])

    rb.extend(steps(0, 4))
    stored = counts(rb)[0]
    assert stored == len(rb) < 4
    with pytest.raises(RateLimiterTimeout):
        rb.extend(steps(4, 5), timeout=0)
    assert counts(rb)[0] == len(rb) == stored
    rb.sample(stored)
    rb.extend(steps(4, 3, done=2), timeout=0)
    assert rb["observation"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert counts(rb) == (7, stored)
    rb.flush()
    assert counts(rb)[0] == 7


# -- waiting --------------------------------------------------------------------------------------


def test_a_sample_waits_for_rows_and_a_write_for_samples() -> None:
    rb = paced(RateLimiter.queue(4), 4, batch_size=4)
    got: list[Any] = []
    reader = started(lambda: got.append(rb.sample()))
    waits(rb, reader)
    rb.extend(numbers(0, 4))
    reader.join(60)
    assert len(got[0]) == 4
    rb.extend(numbers(4, 4))
    writer = started(lambda: got.append(rb.extend(numbers(8, 2))))
    waits(rb, writer)
    assert rb.storage.lock.acquire(blocking=False)  # nobody holds it meanwhile
    rb.storage.lock.release()
    rb.sample(2)
    writer.join(60)
    assert len(got) == 2
    stats = rb.stats()
    assert (stats["inserts"], stats["samples"]) == (10, 6)
    assert stats["insert_blocked_s"] >= 0.1
    assert stats["sample_blocked_s"] >= 0.1


def test_timeout_is_respected_and_counted_as_waiting() -> None:
    rb = paced(RateLimiter.min_size(5))
    began = time.monotonic()
    refuses(RateLimiterTimeout, r"waited 0\.1 s for inserts: 0 inserted", rb.sample, 1, timeout=0.1)
    assert 0.1 <= time.monotonic() - began < 60
    assert 0.1 <= rb.stats()["sample_blocked_s"] < 60


def test_shutdown_wakes_waiting_threads() -> None:
    rb = paced(RateLimiter.queue(3), 3)
    rb.extend(numbers(0, 3))
    said: list[str] = []

    def tries(call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))

    threads = [started(lambda: tries(lambda: rb.extend(numbers(3, 2)))) for _ in range(2)]
    rb.sample(3)
    threads.append(started(lambda: tries(lambda: rb.sample(3))))
    threads.append(started(lambda: tries(lambda: rb.extend(numbers(3, 3)))))
    time.sleep(0.1)
    rb.shutdown()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert set(said) == {"this buffer was shut down"}
    refuses(RuntimeError, "shut down", rb.sample, 1)


def test_rows_that_another_buffer_wrote_are_seen() -> None:
    storage = LazyTensorStorage(9)
    rb, other = paced(RateLimiter.min_size(3), storage=storage), ReplayBuffer(storage=storage)
    reader = started(lambda: rb.sample(2))
    waits(rb, reader)
    other.extend(numbers(0, 3))
    reader.join(60)
    assert counts(rb)[1] == 2


@pytest.mark.parametrize(
    ("ratio", "least", "error"), [(1.0, 4, 24.0), (3.0, 10, 60.0), (0.5, 6, 24.0)]
)
def test_many_threads_never_break_the_law(ratio: float, least: int, error: float) -> None:
    """The counts are within the bounds whenever they are looked at."""
    rb = paced(RateLimiter(ratio, least, error), 5000)

    def write() -> None:
        for n in [1, 2, 3, 4] * 12:
            rb.extend(numbers(0, n), timeout=60)

    def read() -> None:
        for n in [1, 2, 3] * int(20 * ratio):
            rb.sample(n, timeout=60)

    threads = [started(work) for work in (write, read) * 3]
    while any(thread.is_alive() for thread in threads):
        inserts, samples = counts(rb)
        diff = inserts * ratio - samples
        assert not samples or ratio * least - error <= diff <= ratio * least + error
        time.sleep(0.001)
    assert counts(rb) == (360, 360 * ratio)


def test_a_queue_delivers_each_row_once() -> None:
    rb = paced(RateLimiter.queue(16), 16, consume_after_n_samples=1)
    got: list[int] = []

    def write(first: int) -> None:
        for at in range(first, first + 90, 3):
            rb.extend(numbers(at, 3), timeout=60)

    def read() -> None:
        for _ in range(30):
            got.extend(rb.sample(3, timeout=60)["number"].tolist())

    in_threads(*(partial(write, 90 * n) for n in range(3)), *[read] * 3)
    assert sorted(got) == list(range(270))
    assert counts(rb) == (270, 270)
    assert len(rb) == 0


# -- state ----------------------------------------------------------------------------------------


def used(**options: Any) -> ReplayBuffer:
    rb = paced(RateLimiter(2, 4, 20), 50, **options)
    rb.extend(numbers(0, 10))
    rb.sample(7)
    return rb


def test_counts_are_in_checkpoints(tmp_path: Path) -> None:
    rb = used()
    rb.dumps(tmp_path / "saved")
    fresh = paced(RateLimiter(2, 4, 20), 50)
    fresh.loads(tmp_path / "saved")
    larger = paced(RateLimiter(2, 4, 20), 90)
    larger.load_state_dict(rb.state_dict())
    for again in (fresh, larger, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert counts(again) == (10, 7)
        # diff is 13: 7 rows more may be written and no 8th.
        with pytest.raises(RateLimiterTimeout):
            again.extend(numbers(0, 8), timeout=0)
        again.extend(numbers(0, 7), timeout=0)
        assert counts(again) == (17, 7)
    assert counts(rb) == (10, 7)
    ReplayBuffer(storage=LazyTensorStorage(50)).loads(tmp_path / "saved")  # without one


def test_loaded_rows_without_counts_count_up_to_the_limit(tmp_path: Path) -> None:
    plain = ReplayBuffer(storage=LazyTensorStorage(50))
    plain.extend(numbers(0, 40))
    plain.dumps(tmp_path / "saved")
    rb = paced(RateLimiter(2, 4, 20), 50)
    rb.loads(tmp_path / "saved")
    assert counts(rb) == (14, 0)
    wrapped = paced(RateLimiter.min_size(3), storage=TensorStorage(numbers(0, 6)))
    assert counts(wrapped) == (6, 0)
    rb.set_storage(LazyTensorStorage(30))
    assert counts(rb) == (0, 0)


def test_crafted_counts_are_refused() -> None:
    rb = used()
    whole = {"inserts": 1, "samples": 1}
    for bad in (
        3,
        {},
        {**whole, "inserts": -1},
        {**whole, "samples": 0.5},
        {**whole, "inserts_before": "2"},
    ):
        state = {**rb.state_dict(), "_pace": bad}
        refuses(ValueError, "rate limiter", rb.load_state_dict, state)
        assert counts(rb) == (10, 7)


@pytest.mark.parametrize("kept", [False, True])
def test_nothing_waits_for_rows_that_were_emptied(kept: bool, tmp_path: Path) -> None:
    """Whatever the counts say: no sample could ever make room for them."""

    def tried(rb: ReplayBuffer) -> tuple[int, int]:
        rb.extend(numbers(0, 3), timeout=0)
        with pytest.raises(RateLimiterTimeout, match="3 inserted, 0 sampled, 3 there"):
            rb.extend(numbers(3, 2), timeout=0)
        rb.sample(3, timeout=0)
        assert not rb.can_sample(1)
        rb.extend(numbers(3, 4), timeout=0)
        return counts(rb)

    rb = paced(RateLimiter.queue(4), 9)
    rb.extend(numbers(0, 4))
    rb.sample(1)
    for times in (1, 2):
        rb.empty(empty_write_count=not kept)
        assert counts(rb) == ((8 if times == 2 else 4) * kept, (3 * times - 2) * kept)
        if times == 1:
            rb.extend(numbers(0, 4), timeout=0)
            rb.sample(3, timeout=0)
    rb.dumps(tmp_path / "saved")
    fresh, taken = (paced(RateLimiter.queue(4), 9) for _ in range(2))
    fresh.loads(tmp_path / "saved")
    taken.load_state_dict(rb.state_dict())
    for one in (fresh, taken, copy.deepcopy(rb), rb):
        assert tried(one) == ((15, 7) if kept else (7, 3))
    rb.empty()
    assert counts(rb) == (0, 0)


def test_stats_work_before_the_parts_are_made() -> None:
    rb = ReplayBuffer(
        storage=lambda: LazyTensorStorage(9), rate_limiter=RateLimiter.queue(3), delayed_init=True
    )
    assert counts(rb) == (0, 0)
    rb.extend(numbers(0, 3))
    assert counts(rb) == (3, 0)
    assert "inserts" not in ReplayBuffer().stats()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_copy_counts_by_itself() -> None:
    rb = used()
    waiting = started(lambda: rb.extend(numbers(0, 8), timeout=60))
    waits(rb, waiting)
    child = os.fork()
    if not child:
        status = 1
        try:
            rb.extend(numbers(0, 7), timeout=0)
            status = 0 if counts(rb) == (17, 7) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert counts(rb) == (10, 7)
    rb.sample(4)
    waiting.join(60)
    assert counts(rb) == (18, 11)


def test_a_recovered_buffer_begins_with_its_rows(tmp_path: Path) -> None:
    for stored in (0, 6):
        storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "rows", recover=True)
        rb = paced(RateLimiter.queue(8), storage=storage)
        assert counts(rb) == (stored, 0)
        rb.extend(numbers(0, 2 if stored else 6), timeout=0)
        rb.shutdown()
        del rb, storage
