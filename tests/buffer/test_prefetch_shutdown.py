"""The end of batches made ahead: threads are joined, nobody waits, nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from replaykit import ReplayBuffer
from tests.buffer.building import buffer_of, eventually, in_threads, rows

pytestmark = pytest.mark.usefixtures("by_threads")


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
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    buffer.shutdown()
    buffer.extend(rows(1))
    assert len(buffer) == 9
    direct = buffer_of(filled=2)
    direct.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        direct.sample(1)


def test_shutdown_wakes_waiting_consumers():
    for _ in range(10):
        buffer = buffer_of(filled=4, sampler="without", batch_size=4, prefetch=2)

        def consume(buffer: ReplayBuffer = buffer) -> None:
            with pytest.raises(RuntimeError, match="shut down"):
                for _ in iter(buffer.sample, None):
                    pass

        in_threads(consume, consume, consume, lambda b=buffer: (time.sleep(0.01), b.shutdown()))


@pytest.mark.pitfall("TH9")
def test_threads_end_with_the_buffer():
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
