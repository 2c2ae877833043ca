"""Taking turns: contenders made and checked, then each of them once per round.

Every other round goes backwards. In a turn every call has fresh inputs, made outside the timer, and
is timed alone, less what timing an empty call costs. A ratio is that of two turns of one round.
Python's cyclic collector is off during the rounds, what lives before them is frozen, and the young
generation is collected between rounds, outside the timers.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.contender import Contender, Mismatch, Unavailable

__all__ = [
    "Ratio",
    "Runner",
    "Times",
    "compare",
    "compare_rounds",
    "quantile",
    "ready",
    "seed_all",
    "take_turns",
    "without_collector",
]

WARM_UP = 15
"""Calls before the first round: allocators and caches settle."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one contender: one figure a round, and every single call."""

    rounds: Sequence[float]
    calls: Sequence[float]

    @property
    def median_us(self) -> float:
        """Median over rounds of the time per call."""
        return statistics.median(self.rounds)

    @property
    def p99_us(self) -> float:
        """The call that 99 % of the calls are at least as fast as."""
        return quantile(self.calls, 0.99)


@dataclass(frozen=True)
class Ratio:
    """A time over another of the same round: the median over rounds, and the middle 90 %."""

    median: float
    low: float
    high: float


def quantile(values: Iterable[float], share: float) -> float:
    """Returns the smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def compare(subject: Times, other: Times) -> Ratio:
    """Returns the subject's time over the other's, round by round."""
    return compare_rounds(subject.rounds, other.rounds)


def compare_rounds(subject: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return the subject's figures over the other's, round by round."""
    ratios = [a / b for a, b in zip(subject, other, strict=True)]
    return Ratio(statistics.median(ratios), quantile(ratios, 0.05), quantile(ratios, 0.95))


def ready(
    subject: Contender, others: Sequence[Contender]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Makes and checks contenders: those to be timed by name, and why the others are not.

    Raises:
        Unavailable: what is to be shown does not exist here.
        Mismatch: what is to be shown returns wrong values. Another contender that does is left
            out with the reason: it is not timed either.
    """
    subject.make()
    subject.check()
    found, absent = {subject.name: subject}, {}
    for other in others:
        try:
            other.make()
            other.check()
        except (ImportError, Unavailable) as error:
            absent[other.name] = str(error)
        except Mismatch as error:
            absent[other.name] = f"refused, it is not the same work: {error}"
            print(f"{other.name} {absent[other.name]}", file=sys.stderr)
        else:
            found[other.name] = other
    return found, absent


def take_turns(
    contenders: Mapping[str, Contender], *, rounds: int, calls: int = 10
) -> dict[str, Times]:
    """Times contenders in turn.

    Args:
        contenders: checked ones, as `ready` returns them.
        rounds: turns of each.
        calls: calls in a turn; every one of them has inputs of its own.
    """
    runners = {name: Runner(contender, calls) for name, contender in contenders.items()}
    for runner in runners.values():
        runner.warm_up()
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    every: dict[str, list[float]] = {name: [] for name in contenders}
    with without_collector():
        for turn in range(rounds):
            # There and back: nobody always comes after the one who empties the caches.
            for name in list(contenders)[:: -1 if turn % 2 else 1]:
                spent = runners[name].turn()
                turns[name].append(sum(spent) / len(spent))
                every[name] += spent
            gc.collect(0)
    return {name: Times(turns[name], every[name]) for name in contenders}


class Runner:
    """Time one contender, turn by turn.

    Args:
        contender: a checked one.
        calls: calls in a turn; every one of them has inputs of its own.
    """

    def __init__(self, contender: Contender, calls: int) -> None:
        self._contender, self._calls = contender, calls
        self._work = contender.timed()
        self._clock = _clock_us()

    def warm_up(self) -> None:
        """Make the calls that come before the first round."""
        for start in range(0, WARM_UP, self._calls):
            for given in self._contender.inputs(min(self._calls, WARM_UP - start)):
                self._work(given)

    def turn(self, untimed: int = 0) -> list[float]:
        """Return the microseconds of each call of a turn.

        Args:
            untimed: calls before those, which are not timed.
        """
        spent = _timed(self._work, self._contender.inputs(untimed + self._calls))
        return [max(us - self._clock, 1e-3) for us in spent[untimed:]]


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch Python's cyclic collector off, and freeze what lives already."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _timed(work: Callable[[object], object], inputs: Iterable[object]) -> list[float]:
    spent = []
    clock = time.perf_counter_ns
    for given in inputs:
        start = clock()
        # Kept until the clock has stopped: a training loop frees a batch after it was used.
        kept = work(given)
        spent.append((clock() - start) / 1e3)
        del kept
    return spent


def _clock_us() -> float:
    """What timing an empty call costs."""
    return statistics.median(_timed(lambda given: given, [None] * 2000))


def seed_all() -> None:
    """Seeds the generators that contenders draw from."""
    import numpy as np

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (cpprb draws from the global one)
