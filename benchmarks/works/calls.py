"""Function calls of one operation, which do not depend on how busy the machine is.

Python calls are frames that begin; C calls are those of builtin functions and methods. Functions of
the compiled core are neither: the interpreter does not report them. Frames of the benchmarks do not
count, and neither do their calls of C.

A process of its own counts, because other works may leave buffers and threads behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.contender import Contender, Mismatch
from benchmarks.harness import WARM_UP, quantile, seed_all, without_collector
from benchmarks.holders import Replaykit
from benchmarks.report import SUBJECT, Line
from benchmarks.rows import make_episodes, make_transitions
from benchmarks.setting import Setting
from benchmarks.works.prioritized import ByIndex, Stepping
from benchmarks.works.sequences import EPISODE, Slices, sliced
from benchmarks.works.transitions import Sampling
from benchmarks.works.writes import Writing

__all__ = ["OPERATIONS", "UNIT", "asked", "count_calls", "run"]

UNIT = "calls"
ROWS = 10_000
COUNTED = 100
"""Operations that are counted, one by one."""

SHARE = 0.25
"""The figure is the least count that this share of operations does not exceed.

Half of the writes mark other blocks of rows as changed: a median would fall between two counts.
"""

OPERATIONS: dict[str, Callable[[], Contender]] = {
    "uniform sample": lambda: Sampling(Replaykit, SUBJECT, make_transitions(ROWS)),
    "prioritized step": lambda: Stepping(ByIndex, SUBJECT, make_transitions(ROWS)),
    "add": lambda: Writing(Replaykit, SUBJECT, make_transitions(ROWS)),
    "extend 8": lambda: Writing(Replaykit, SUBJECT, make_transitions(ROWS), 8),
    "slices": lambda: Slices(SUBJECT, make_episodes(ROWS, EPISODE), sliced),
}
_HERE = str(Path(__file__).parents[1])


def _titles(operation: str) -> tuple[str, str]:
    return f"{operation}: Python calls", f"{operation}: C calls"


def asked(setting: Setting) -> dict[str, tuple[()]]:
    """Return the titles: nothing is asked of these figures alone."""
    return {title: () for operation in OPERATIONS for title in _titles(operation)}


def run(setting: Setting) -> list[Line]:
    """Count the calls of each operation on a full buffer of 10,000 rows."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(_HERE).parent,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Mismatch(f"calls cannot be counted: {done.stderr.strip()[-300:]}")
    counts = json.loads(done.stdout.splitlines()[-1])
    return [
        Line(title, SUBJECT, count, UNIT)
        for operation, both in counts.items()
        for title, count in zip(_titles(operation), both, strict=True)
    ]


def _count_all() -> dict[str, tuple[int, int]]:
    torch.set_num_threads(1)
    counts = {}
    for operation, make in OPERATIONS.items():
        seed_all()
        contender = make()
        contender.make()
        contender.check()
        counts[operation] = count_calls(contender)
    return counts


def count_calls(contender: Contender) -> tuple[int, int]:
    """Return the Python calls and the C calls of one operation of a checked contender."""
    work = contender.timed()
    for given in contender.inputs(WARM_UP):
        work(given)
    with without_collector():
        counts = [_counted(work, given) for given in contender.inputs(COUNTED)]
    python, native = zip(*counts, strict=True)
    return int(quantile(python, SHARE)), int(quantile(native, SHARE))


def _counted(work: Callable[[Any], Any], given: Any) -> tuple[int, int]:
    python = native = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal python, native
        if frame.f_code.co_filename.startswith(_HERE):
            return
        if event == "call":
            python += 1
        elif event == "c_call":
            native += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        kept = work(given)
    finally:
        sys.setprofile(before)
    del kept
    return python, native


if __name__ == "__main__":
    print(json.dumps(_count_all()))
