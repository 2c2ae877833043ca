"""Run random programs: ``python -m tests.programs --count 10000 --jobs 2 --seed 0``."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.programs.runner import prepare_process, run_seed


def _results(seeds: range, jobs: int, length: int) -> Iterator[str | None]:
    """Yield the difference of each program, or None."""
    run = functools.partial(run_seed, length=length)
    if jobs == 1:
        prepare_process()
        yield from map(run, seeds)
        return
    # Programs start threads and fork, so each worker begins in a fresh process.
    context = multiprocessing.get_context("spawn")
    # Processes of a pool cannot have children, which programs with shared buffers start.
    with concurrent.futures.ProcessPoolExecutor(jobs, context, prepare_process) as pool:
        yield from pool.map(run, seeds, chunksize=8)


def main(arguments: list[str] | None = None) -> int:
    """Run programs and print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of programs")
    parser.add_argument("--operations", type=int, default=50, help="operations of a program")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    begin, different = time.monotonic(), 0
    results = _results(seeds, options.jobs, options.operations)
    for done, difference in enumerate(results, 1):
        if difference is not None:
            different += 1
            print(difference, flush=True)
        if done % 100 == 0 or done == options.count:
            print(
                f"{done} programs, {done * options.operations} operations, {different} different, "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
