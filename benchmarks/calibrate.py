"""Measures what the machine can do: ``python -m benchmarks.calibrate FILE``.

Physical constants are the best of several tries, not medians: they bound what can be reached.
Random loads are one word out of a line, by numpy's take: its loop leaves the processor enough of
them in flight to reach what hand-written chains of loads do. The latency of a single load, which
no limit here needs, cannot be measured without a compiler and is left out.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.calibration import Calibration, save
from benchmarks.disk import measure_disk
from benchmarks.machine import fingerprint, memory_bytes

__all__ = ["calibrate"]

LINE = 64
LOADS = 400_000
TRIES = 15
ROW_BYTES = (16, 64, 256, 1024, 4096, 28224)
BATCH = 256


def best(action: Callable[[], object], tries: int = TRIES) -> float:
    """Returns the seconds of the fastest of several calls, the first of which is not counted."""
    action()
    spent = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        spent.append(time.perf_counter() - start)
    return min(spent)


def _thread_counts(threads: int) -> list[int]:
    return sorted({1, threads})


def _rates(nbytes: int, threads: int) -> tuple[dict[int, float], dict[int, float]]:
    """GB copied and read a second, by threads; the buffers have been touched before."""
    source = torch.ones(nbytes // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    copy, read = {}, {}
    before = torch.get_num_threads()
    try:
        for count in _thread_counts(threads):
            torch.set_num_threads(count)
            copy[count] = nbytes / best(lambda: target.copy_(source)) / 1e9
            read[count] = nbytes / best(lambda: source.sum()) / 1e9
    finally:
        torch.set_num_threads(before)
    return copy, read


def _random_loads(table: np.ndarray, spread: int, threads: int) -> float:
    """Nanoseconds of one of many independent loads out of the first ``spread`` bytes."""
    draw = np.random.default_rng(spread)
    words = LINE // table.itemsize
    index = draw.integers(0, spread // LINE, LOADS) * words
    found = np.empty(LOADS, table.dtype)
    parts = np.array_split(np.arange(LOADS), threads)
    bounds = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]

    def load(part: slice) -> None:
        np.take(table, index[part], out=found[part], mode="wrap")

    def load_all() -> None:
        helpers = [threading.Thread(target=load, args=(part,)) for part in bounds[1:]]
        for helper in helpers:
            helper.start()
        load(bounds[0])
        for helper in helpers:
            helper.join()

    return best(load_all) / LOADS * 1e9


def _gather_times(table: np.ndarray, rounds: int) -> dict[str, dict[int, float]]:
    """Median microseconds of gathering 256 random rows; indices are drawn outside the timer."""
    gathers = {"index_select": _index_select, "core": _core_gather}
    found: dict[str, dict[int, float]] = {}
    for name, make in gathers.items():
        for nbytes in ROW_BYTES:
            rows = table.nbytes // nbytes
            gather = make(torch.from_numpy(table).view(torch.uint8), rows, nbytes)
            spent = []
            for _ in range(rounds):
                index = torch.randint(rows, (BATCH,))
                start = time.perf_counter()
                gather(index)
                spent.append(time.perf_counter() - start)
            found.setdefault(name, {})[nbytes] = statistics.median(spent) * 1e6
    return found


def _index_select(table: torch.Tensor, rows: int, nbytes: int) -> Callable[[torch.Tensor], object]:
    # Words as wide as they can be: a row of 28224 bytes is one of 3528 numbers.
    source = table[: rows * nbytes].view(torch.int64).view(rows, nbytes // 8)
    target = torch.empty(BATCH, nbytes // 8, dtype=torch.int64)
    return lambda index: torch.index_select(source, 0, index, out=target)


def _core_gather(table: torch.Tensor, rows: int, nbytes: int) -> Callable[[torch.Tensor], object]:
    from replaykit import native

    core = native.Table([table.data_ptr()], [nbytes], [nbytes], rows)
    target = torch.empty(BATCH, nbytes, dtype=torch.uint8)
    to, strides, threads = [target.data_ptr()], [nbytes], torch.get_num_threads()

    def gather(index: torch.Tensor, kept: torch.Tensor = target) -> object:
        return core.gather(index.data_ptr(), BATCH, rows, to, strides, threads)

    return gather


def calibrate(scratch: Path, *, threads: int = 2, quick: bool = False) -> Calibration:
    """Measures; takes about a quarter of a minute, ``quick`` a few seconds of worse figures.

    Args:
        scratch: a folder on the disk to be measured.
    """
    nbytes = (1 << 27) if quick else (1 << 29)
    largest = min(1 << 27 if quick else 1 << 30, memory_bytes() // 8)
    copy, read = _rates(nbytes, threads)
    # numpy asks the kernel for large pages; torch does not.
    table = np.ones(largest // 8, np.int64)
    spreads = [1 << bits for bits in range(16, 31, 2 if quick else 1) if 1 << bits <= largest]
    lines = {
        count: {spread: _random_loads(table, spread, count) for spread in spreads}
        for count in _thread_counts(threads)
    }
    rows = _gather_times(table, 60 if quick else 200)
    del table
    notes = {
        "rates": f"{nbytes >> 20} MiB copied and read, best of {TRIES}",
        "lines": f"{LOADS} loads, best of {TRIES}; over at most {largest >> 20} MiB",
        "latency of one load": "not measured: needs a compiled chain of loads",
    }
    disk, reason = measure_disk(scratch, (1 << 27) if quick else (1 << 30))
    notes["disk"] = reason
    return Calibration(fingerprint(), copy, read, lines, rows, disk, notes)


def print_calibration(at: Calibration) -> None:
    """Prints the constants that limits are made of."""
    for count in at.copy:
        sizes = at.lines[count]
        shown = [size for size in (1 << 20, 1 << 23, 1 << 25, max(sizes)) if size in sizes]
        loads = ", ".join(f"{sizes[size]:.1f} in {size >> 20} MiB" for size in shown)
        print(
            f"{count} thread(s): copy {at.copy[count]:.1f} GB/s, read {at.read[count]:.1f} GB/s; "
            f"random loads, ns/line: {loads}"
        )
    for name, times in at.rows.items():
        sizes_us = ", ".join(f"{nbytes} B {us:.1f}" for nbytes, us in times.items())
        print(f"256 random rows by {name}, us: {sizes_us}")
    if at.disk is not None:
        reads = {
            name.removeprefix("reads_per_s_").replace("_", " "): f"{value:,.0f}"
            for name, value in at.disk.items()
            if name.startswith("reads_per_s_")
        }
        print(
            f"disk: read in sequence {at.disk['sequential_gbs']:.2f} GB/s; 4-KiB reads a second at "
            "depth " + ", ".join(f"{depth}: {value}" for depth, value in reads.items())
        )
    print(f"disk: {at.notes.get('disk', 'not measured')}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    parser.add_argument("file", type=Path, help="where the constants go, as JSON")
    parser.add_argument("--threads", type=int, default=2, help="the larger number of threads")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scratch = arguments.scratch or arguments.file.absolute().parent
    found = calibrate(scratch, threads=arguments.threads)
    save(found, arguments.file)
    print_calibration(found)


if __name__ == "__main__":
    main()
