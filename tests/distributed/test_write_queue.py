"""Writes under way: errors, order, copies, the end of the program."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit.distributed import write_queue as module
from replaykit.distributed.requests import Reply, one_of
from replaykit.distributed.shard_writes import in_thread
from replaykit.distributed.write_queue import MOST_UNDER_WAY, WriteQueue, leave_all
from replaykit.errors import ActorLost, SchemaError
from replaykit.sharding import ShardSilent
from tests.distributed.laws import numbered, prioritized, running, wait_until
from tests.distributed.stand_in import Ray, Untold, failing, no_answer, stand_in
from tests.support.refusals import refuses


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def write_queue() -> WriteQueue:
    """One whose writes all fail, with what was written."""

    return WriteQueue(actor=object())


def fails(number: int) -> Any:
    """Return a function that sends a failing write."""
    return lambda: Reply(failing(ValueError(f"write {number}")))


@pytest.mark.parametrize("together", [0, 9])
def test_interrupt_while_a_write_is_sent_leaves_it_in_the_queue(together: int) -> None:
    def sent(*_: Any) -> Any:
        signal.raise_signal(SIGINT)
        return failing(ValueError("it was sent"))

    def write() -> None:
        box.put(lambda: Reply(sent()), numbered(0, 2))
        box.send()

    box, before = WriteQueue(sent, together), signal.signal(SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write()
    finally:
        signal.signal(SIGINT, before)
    refuses(ValueError, "it was sent", box.flush)


def test_each_error_is_raised_in_one_thread_only() -> None:
    """Of many threads that look at once, none is told of the error of another."""
    box, told = write_queue(), []
    for number in range(MOST_UNDER_WAY):
        box.put(fails(number))
    start = threading.Barrier(4)

    def look() -> None:
        start.wait()
        for _ in range(MOST_UNDER_WAY):
            try:
                box.flush()
            except ValueError as error:
                told.append(str(error))

    with running(look, look, look, look):
        pass
    assert sorted(told) == sorted(f"write {number}" for number in range(MOST_UNDER_WAY))


def test_closing_reports_all_unread_errors() -> None:
    """The first, with the others in its text, each kind of them once."""
    box = write_queue()
    for number in (0, 1, 1, 1):
        box.put(fails(number))
    failed, unanswered = leave_all(None, box.actor)
    assert unanswered == 0
    found = one_of(failed)
    assert type(found) is ValueError
    assert str(found) == "write 0; 3 more writes have failed: ValueError: write 1 (3 times)"
    assert found.__cause__ is failed[0]
    assert one_of(failed[:1]) is failed[0]
    assert leave_all(None, box.actor) == ([], 0)

    many = one_of([Untold(1, 2), *(ValueError(f"{number}") for number in range(9))])
    assert type(many) is RuntimeError
    assert str(many).startswith("Untold: 1 and 2; 9 more writes have failed: ValueError: 0; ")
    assert str(many).endswith("ValueError: 4; and 4 others")


def test_pending_writes_are_released_once_they_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FEW", 2)
    monkeypatch.setattr(module, "_looked_at", [2])
    actor, here, largest = object(), len(module._PENDING), 0
    for _ in range(50):
        box = WriteQueue(actor=actor)
        box.put(lambda: Reply(lambda: [0, None]))
        largest = max(largest, len(module._PENDING) - here)
    assert 1 <= largest <= 6
    assert leave_all(None, actor) == ([], 0)
    assert len(module._PENDING) <= here


def test_closing_reports_writes_lost_with_the_actor() -> None:
    def lost() -> Any:
        raise Ray.exceptions.RayActorError("killed")

    box = WriteQueue(actor=object())
    box.put(lambda: Reply(lost))
    (error,), unanswered = leave_all(None, box.actor)
    assert type(error) is ActorLost
    assert unanswered == 0


def test_program_exit_warns_of_lost_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PENDING", {})
    monkeypatch.setattr(module, "_AT_EXIT_SECONDS", 0.0)
    box = write_queue()
    box.put(fails(7))
    silent = WriteQueue(actor=object())
    silent.put(lambda: Reply(no_answer))
    with pytest.warns(RuntimeWarning, match=r"ValueError: write 7; TimeoutError: 1 messages"):
        module._leave_at_exit()
    assert not module._PENDING


class Gate:
    """Keeps extends away from shard 1 until it is opened; or has them fail."""

    def __init__(self, rb: Any) -> None:
        self.open, self.error, self.came = threading.Event(), None, 0
        shard = rb._members.shards[1]
        self._send = shard.call
        shard.call = self.call

    def call(self, verb: str, *args: Any) -> Any:
        if verb == "extend":
            self.came += 1
            assert self.open.wait(20)
            if self.error is not None:
                raise self.error
        return self._send(verb, *args)


@pytest.fixture
def gated(sharded: Any) -> Iterator[tuple[Any, Gate]]:
    rb = sharded(2, sampler=prioritized, batch_size=4)
    rb.extend(numbered(0, 4))
    gate = Gate(rb)
    yield rb, gate
    gate.open.set()


def test_rows_are_stored_as_by_extend(sharded: Any) -> None:
    one, two = sharded(3), sharded(3)
    rows, under_way = numbered(0, 5), []
    for step in range(8):
        rows["x"] += step
        expected = one.extend(rows)
        under_way.append((two.extend_async(rows), expected))
        rows["x"][0] = -7  # the caller's again
        rows["x"][0] = int(rows["x"][1]) - 1
    assert all(torch.equal(result.result(), index) for result, index in under_way)
    assert torch.equal(one[:]["x"], two[:]["x"])
    assert two.extend_async(numbered(0, 0)).result().tolist() == []

    async def written() -> Any:
        return await two.extend_async(numbered(90, 3))

    assert asyncio.run(written()).tolist() == one.extend(numbered(90, 3)).tolist()
    with pytest.raises(SchemaError):  # at once
        two.extend_async(TensorDict({"y": torch.zeros(2)}, [2]))


def test_only_later_writes_wait_for_pending_writes(gated: tuple[Any, Gate], tmp_path: Path) -> None:
    rb, gate = gated
    first, second = rb.extend_async(numbered(4, 4)), rb.extend_async(numbered(8, 4))
    assert rb.sample().shape == (4,)
    assert not first.done()
    assert not second.done()
    refuses(ShardSilent, r"within 0\.01 s", first.result, 0.01)
    threading.Timer(0.1, gate.open.set).start()
    rb.update_priority(torch.tensor([11]), 5.0)  # of a row that is under way, and checked later
    assert second.done()
    assert first.result().tolist() == [4, 5, 6, 7]
    assert second.result() is second.result()
    gate.open.clear()
    third = rb.extend_async(numbered(12, 4))
    threading.Timer(0.1, gate.open.set).start()
    assert rb.extend(numbered(16, 2)).tolist() == [16, 17]
    assert third.done()
    assert torch.equal(rb[:]["x"], torch.arange(18))
    gate.open.clear()
    rb.extend_async(numbered(18, 2))
    threading.Timer(0.1, gate.open.set).start()
    rb.dumps(tmp_path)
    rb.empty()
    rb.loads(tmp_path)
    assert len(rb) == 20


def test_queue_holds_a_limited_number_of_writes(gated: tuple[Any, Gate]) -> None:
    rb, gate = gated
    results = [rb.extend_async(numbered(4, 2)) for _ in range(16)]
    threading.Timer(0.1, gate.open.set).start()
    results.append(rb.extend_async(numbered(4, 2)))  # waits for the first
    assert results[0].done()
    assert [int(result.result()[0]) for result in results] == list(range(4, 38, 2))
    assert in_thread(rb, lambda: 5).result() == 5
    rb._write_queue.flush()
    assert not rb._write_queue._under_way


def test_error_is_raised_by_result_or_next_write(gated: tuple[Any, Gate]) -> None:
    rb, gate = gated
    gate.open.set()
    gate.error = OSError("a broken shard")
    refuses(OSError, "a broken shard", rb.extend_async(numbered(4, 2)).result)
    gate.error = None
    rb.extend(numbered(4, 2))  # told already
    for write in (rb.extend, rb.extend_async, lambda rows: rb.flush()):
        gate.error = OSError("a broken shard")
        failed = rb.extend_async(numbered(6, 2))
        wait_until(failed.done)
        gate.error = None
        dealt, came = rb._router.dealt, gate.came
        refuses(OSError, "a broken shard", write, numbered(8, 2))
        assert (rb._router.dealt, gate.came) == (dealt, came)  # not dealt, not sent
        rb.extend(numbered(8, 2))
        refuses(OSError, "a broken shard", failed.result)
    gate.error = OSError("a broken shard")
    rb.extend_async(numbered(6, 2))
    refuses(OSError, "a broken shard", rb.close)
    assert not rb.is_alive
    rb.close()


def test_close_raises_all_errors_of_writes(gated: tuple[Any, Gate]) -> None:
    rb, gate = gated
    gate.error = OSError("a broken shard")
    for first in (4, 6, 8):
        rb.extend_async(numbered(first, 2))
    threading.Timer(0.1, gate.open.set).start()
    refuses(OSError, "2 more writes have failed: OSError: a broken shard", rb.close)


WAITING = """
import multiprocessing, sys, torch
from replaykit import LazyTensorStorage, RateLimiter, ShardedReplayBuffer
from replaykit.distributed import write_queue
write_queue._AT_EXIT_SECONDS = 0.05
def write():
    global rb, written
    rb = ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(9), backend="local",
                             rate_limiter=RateLimiter.queue(4))
    rb.extend(torch.zeros(4))
    written = rb.extend_async(torch.zeros(1))
if sys.argv[1] == "itself":
    write()
else:
    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("program", ["itself", "process of multiprocessing"])
def test_program_ends_although_a_write_waits_for_samples(program: str) -> None:
    command = [sys.executable, "-c", WAITING, program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning: writes were not stored, or may not have been" in ended.stderr


def test_queue_thread_finishes_queued_work_then_ends(sharded: Any) -> None:
    before = threading.enumerate()
    client, done = sharded(1).client(), threading.Event()
    gate = threading.Event()
    assert in_thread(client, lambda: 5).result() == 5
    in_thread(client, gate.wait)
    in_thread(client, done.set)
    [thread] = (
        one for one in threading.enumerate() if one.name == "replaykit-writes" and one not in before
    )
    assert thread.is_alive()
    del client
    gc.collect()
    gate.set()
    assert done.wait(10)
    thread.join(10)
    assert not thread.is_alive()


def test_a_shard_that_dies_meanwhile_gets_its_rows(sharded: Any, tmp_path: Path) -> None:
    rb = sharded(2, on_loss=print, checkpoint_dir=tmp_path, checkpoint_interval=0)
    rb.extend(numbered(0, 4))
    gate = Gate(rb)
    under_way = [rb.extend_async(numbered(4 + 2 * step, 2)) for step in range(3)]
    rb._members.shards[1].kill()
    gate.open.set()
    assert [result.result().tolist() for result in under_way] == [[4, 5], [6, 7], [8, 9]]
    assert sorted(rb[:]["x"].tolist()) == list(range(10))
