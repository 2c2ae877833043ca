"""Batches made while the learner works: a loop with ``prefetch`` beside the longer of its halves.

The learner's step is matrix products by one thread, as many as take as long as a sample does. The
other processor is for who makes the batches, so that torch has one thread in both.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contender import Unavailable, expect
from benchmarks.harness import Times
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import Leaves, as_tensordict, make_images, make_transitions, row_count
from benchmarks.setting import BATCH, Setting
from replaykit import ImageScale, LazyTensorStorage, ReplayBuffer

__all__ = ["asked", "run"]

AHEAD = 2
LONGER, AFTER = "the longer of the two", "one after the other"
TARGETS = (Target(LONGER, 1.15),)
MOST_ROUNDS = 30
TURN_US = 30_000
"""How long the samples of a turn take, about."""
_SIDE = 128
_BLOCK = 10_000


def _works(setting: Setting) -> dict[str, tuple[Callable[[], Leaves], int, Any]]:
    """Rows, batch size and transform, by title."""
    pixels = ImageScale(keys=["pixels"])
    images, rows = min(setting.images, 10_000), setting.rows
    return {
        "learn and sample, images as floats": (lambda: make_images(images), BATCH, pixels),
        "learn and sample, images as bytes": (lambda: make_images(images), BATCH, None),
        f"learn and sample, {16 * BATCH} rows": (lambda: make_transitions(rows), 16 * BATCH, None),
        f"learn and sample, {BATCH} rows": (lambda: make_transitions(rows), BATCH, None),
    }


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return dict.fromkeys(_works(setting), TARGETS)


def run(setting: Setting) -> list[Line]:
    """Measures."""
    if _processors() < 2:
        raise Unavailable("one processor cannot make batches while it learns")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = []
        for title, (make, size, transform) in _works(setting).items():
            lines += _measured(title, make(), size, transform, min(setting.rounds, MOST_ROUNDS))
        return lines
    finally:
        torch.set_num_threads(before)


def _processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _measured(title: str, leaves: Leaves, size: int, transform: Any, rounds: int) -> list[Line]:
    direct, ahead = (_filled(leaves, size, transform, depth) for depth in (None, AHEAD))
    _check(direct, ahead)
    sample_us = _spent(direct.sample, 50)
    step = _learner(sample_us)
    calls = max(5, int(TURN_US / sample_us))

    def loop(buffer: ReplayBuffer) -> Callable[[], object]:
        def both() -> object:
            batch = buffer.sample()
            step()
            return batch

        return both

    spent: dict[str, list[float]] = {SUBJECT: [], LONGER: [], AFTER: []}
    parts: dict[str, list[float]] = {"the sample": [], "the step": []}
    for number in range(rounds):
        turn: dict[str, float] = {}
        works: dict[str, Callable[[], object]] = {
            SUBJECT: loop(ahead),
            "the sample": direct.sample,
            "the step": step,
            AFTER: loop(direct),
        }
        for name in list(works)[:: -1 if number % 2 else 1]:
            # What was made ahead before the turn began is taken first.
            for _ in range(AHEAD):
                works[name]()
            turn[name] = _spent(works[name], calls)
        for name in parts:
            parts[name].append(turn[name])
        spent[SUBJECT].append(turn[SUBJECT])
        spent[AFTER].append(turn[AFTER])
        spent[LONGER].append(max(turn[name] for name in parts))
    ahead.shutdown()
    lines = lines_of_turns(title, {n: Times(us, us) for n, us in spent.items()}, {}, TARGETS)
    return lines + [Line(title, f"({name})", Times(us, us).median_us) for name, us in parts.items()]


def _filled(leaves: Leaves, size: int, transform: Any, depth: int | None) -> ReplayBuffer:
    rows = row_count(leaves)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(rows),
        batch_size=size,
        prefetch=depth,
        transform=transform,
        generator=torch.Generator().manual_seed(0),
    )
    data = as_tensordict(leaves)
    for start in range(0, rows, _BLOCK):
        buffer.extend(data[start : start + _BLOCK])
    return buffer


def _check(direct: ReplayBuffer, ahead: ReplayBuffer) -> None:
    """The batches are the same ones."""
    for _ in range(4):
        one, other = direct.sample(), ahead.sample()
        for key in one.keys(include_nested=True, leaves_only=True):
            expect(bool((one[key] == other[key]).all()), f"{key} is another one with prefetch")


def _learner(us: float) -> Callable[[], object]:
    """Work of one thread that takes so long; it lets go of the interpreter while it computes."""
    side = torch.rand(_SIDE, _SIDE)
    out = torch.empty_like(side)

    def product() -> object:
        return torch.mm(side, side, out=out)

    count = max(1, round(us / _spent(product, 300)))

    def step() -> None:
        for _ in itertools.repeat(None, count):
            torch.mm(side, side, out=out)

    return step


def _spent(work: Callable[[], object], calls: int) -> float:
    """Microseconds a call, of that many in a row."""
    kept = work()
    start = time.perf_counter_ns()
    for _ in range(calls):
        # As in a loop that trains: a batch is let go when there is the next one.
        kept = work()
    spent = time.perf_counter_ns() - start
    del kept
    return spent / 1e3 / calls
