"""What the work on remote buffers times, by a pipeline whose speed is known."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import take_turns
from benchmarks.works.growing import AHEAD, RemoteSampling

SECONDS = 0.004


class Pipeline:
    """Serves one request after the other, SECONDS each, with AHEAD of them under way."""

    def __init__(self, leaves: Any) -> None:
        self.due: deque[float] = deque()
        self.last = 0.0

    def sampler(self) -> Callable[[Any], None]:
        return self.sample

    def sample(self, _: Any) -> None:
        while len(self.due) <= AHEAD:
            self.last = max(self.last, time.perf_counter()) + SECONDS
            self.due.append(self.last)
        time.sleep(max(0.0, self.due.popleft() - time.perf_counter()))


def test_timing_excludes_batches_prepared_before_the_turn() -> None:
    """A sample of a full pipeline takes as long as the actor needs for one, and no less."""
    kind: Any = Pipeline
    work = RemoteSampling(kind, "pipeline", {"x": torch.zeros(1)}, AHEAD)
    work.make()
    times = take_turns({"pipeline": work}, rounds=7)["pipeline"]
    assert statistics.median(times.rounds) > 0.85 * SECONDS * 1e6
