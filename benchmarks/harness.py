"""Taking turns: every contender once per round, medians over rounds, ratios before times."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Contender", "Timing", "describe_machine", "measure", "print_timings"]


@dataclass(frozen=True)
class Contender:
    """Someone who does a piece of work: a name, and the call that does it once."""

    name: str
    call: Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over all rounds, and the ratio to the first contender per round."""

    work: str
    name: str
    median_us: float
    p99_us: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    work: str, contenders: Sequence[Contender], *, rounds: int = 200, calls: int = 10
) -> list[Timing]:
    """Times contenders in turn.

    Args:
        rounds: in each of them every contender makes ``calls`` calls in a row.
        calls: more of them where a call is short next to the clock.

    Returns:
        A timing for each. Ratios are to the first contender, round by round: median and the
        middle 90 %.
    """
    for contender in contenders:
        for _ in range(15):
            contender.call()
    spent: list[list[float]] = [[] for _ in contenders]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for times, contender in zip(spent, contenders, strict=True):
                start = time.perf_counter()
                for _ in range(calls):
                    contender.call()
                times.append((time.perf_counter() - start) / calls * 1e6)
            gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()
    timings = []
    for times, contender in zip(spent, contenders, strict=True):
        ratios = sorted(a / b for a, b in zip(times, spent[0], strict=True))
        timings.append(
            Timing(
                work,
                contender.name,
                statistics.median(times),
                sorted(times)[int(0.99 * (len(times) - 1))],
                statistics.median(ratios),
                ratios[int(0.05 * (len(ratios) - 1))],
                ratios[int(0.95 * (len(ratios) - 1))],
            )
        )
    return timings


def print_timings(timings: Sequence[Timing]) -> None:
    """Prints a table: time per call, and how many times the first contender's that is."""
    head = f"{'work':<28} {'contender':<14} {'median us':>10} {'p99 us':>10} {'ratio':>7}  5-95 %"
    print(head)
    print("-" * len(head))
    work = None
    for timing in timings:
        if work is not None and timing.work != work:
            print()
        shown = timing.work if timing.work != work else ""
        work = timing.work
        print(
            f"{shown:<28} {timing.name:<14} {timing.median_us:>10.1f} {timing.p99_us:>10.1f} "
            f"{timing.ratio:>7.2f}  {timing.ratio_low:.2f}-{timing.ratio_high:.2f}"
        )


def describe_machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        processor = f"{names[0]} x {len(names)}" if names else processor
    except OSError:
        pass
    import tensordict

    from replaykit.native import HAS_CORE

    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
        "core": HAS_CORE,
    }
