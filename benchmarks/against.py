"""This tree's replaykit and that of another commit, in two processes that take turns.

Both processes run the benchmarks of this tree; only the package differs. While one of them takes a
turn, the other waits. A ratio is that of two turns each, there and back. What the other commit
lacks is left out with the reason.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.builds import ROOT
from benchmarks.contender import Mismatch
from benchmarks.harness import Times, compare_rounds
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.setting import Setting

__all__ = ["AT_MOST", "BY_NAME", "Lacking", "Side", "compare_works", "started"]

AT_MOST = 1.05
"""What the median ratio may be."""

BY_NAME = ("checkpoints", "opening", "overlap", "growing", "corpora")
"""Works that take no turns and are run as a whole: minutes each, so only where they are named."""

COUNTED = ("memory", "calls")
"""Works whose figures are the same in every round: one is enough."""

MOST_ROUNDS = 5
"""Rounds of a work that is run as a whole, at most."""

MAKES = 4
"""How often each contender is made: where its memory lies changes what calls cost."""

SETTLED = 0.002
"""Seconds between two turns: threads of the process before have gone to sleep by then."""


class Lacking(Exception):
    """A side has no such work, or cannot do it; says why."""


class Side:
    """A process with one of the two packages. Used as a context.

    Args:
        name: what it is called in the table.
        setting: how works are measured, calibration apart.
        package: the folder with the package; None for the installed one.
    """

    def __init__(self, name: str, setting: Setting, package: Path | None = None) -> None:
        self.name = name
        self._package = package
        given = {**asdict(setting), "scratch": str(setting.scratch), "calibration": None}
        self._command = [sys.executable, "-m", "benchmarks.worker", json.dumps(given)]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str, **details: Any) -> Any:
        """Return the answer to a request.

        Raises:
            Lacking: the other commit cannot do it, or this tree says that it is not available.
            Mismatch: this tree fails.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({"ask": request, **details}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer = json.loads(line)
        else:
            self.close()
            # The next request starts another process.
            answer = {"error": f"its process ended with {process.returncode}", "expected": False}
        if "error" not in answer:
            return answer["value"]
        if self._package is None and not answer["expected"]:
            raise Mismatch(f"{self.name}: {answer['error']}")
        raise Lacking(f"{self.name}: {answer['error']}")

    def check_package(self) -> str:
        """Return a description of the package, which lies where it should.

        Raises:
            Mismatch: the process imports another one.
        """
        found = self.ask("describe")
        folder = ROOT if self._package is None else self._package
        if not Path(found["file"]).resolve().is_relative_to(folder.resolve()):
            raise Mismatch(f"{self.name}: expected replaykit in {folder}, got {found['file']}")
        return f"replaykit {found['version']}"

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        # Otherwise each process would lay out its dicts and sets in another way.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        if self._package is not None:
            paths = [str(ROOT / "benchmarks" / "redirect"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment["REPLAYKIT_BENCHMARKED"] = str(self._package)
        return subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@contextmanager
def started(setting: Setting, label: str, package: Path) -> Iterator[tuple[Side, Side]]:
    """Start a process for this tree, and one for the other commit, with folders of their own."""
    sides = []
    for name, place in ((SUBJECT, None), (label, package)):
        scratch = setting.scratch / ("this" if place is None else "other")
        scratch.mkdir()
        sides.append(Side(name, replace(setting, scratch=scratch), place))
    try:
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.close()


def compare_works(sides: tuple[Side, Side], names: Sequence[str], rounds: int) -> Iterator[Line]:
    """Measure works on both sides, and return the lines of the table."""
    for name in names:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        try:
            # Both sides have the titles of this tree, if they can import what these need.
            titles, _ = (side.ask("titles", work=name) for side in sides)
        except Lacking as error:
            yield _left_out(name, sides, error)
            continue
        if not titles:
            yield from _whole(name, sides, 1 if name in COUNTED else min(rounds, MOST_ROUNDS))
        for title in titles:
            yield from _in_turn(name, title, sides, rounds)


def _left_out(title: str, sides: tuple[Side, Side], error: Lacking) -> Line:
    return Line(title, sides[1].name, at_most=AT_MOST, missing=str(error))


def _rounds(sides: tuple[Side, Side], rounds: int, turn: Callable[[Side], None]) -> None:
    """Let both sides take their turns, there and back."""
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            time.sleep(SETTLED)
            turn(side)


def _in_turn(work: str, title: str, sides: tuple[Side, Side], rounds: int) -> list[Line]:
    spent: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    pairs = max(1, rounds // 2)
    try:
        for number in range(min(MAKES, pairs)):
            for side in sides[:: -1 if number % 2 else 1]:
                side.ask("drop")
                side.ask("make", work=work, title=title)
            share = len(range(number, pairs, MAKES))
            _rounds(sides, 2 * share, lambda side: spent[side.name].append(side.ask("turn")))
    except Lacking as error:
        return [_left_out(title, sides, error)]
    finally:
        for side in sides:
            side.ask("drop")
    times = {name: _paired(turns) for name, turns in spent.items()}
    return lines_of_turns(title, times, {}, (Target(sides[1].name, AT_MOST),))


def _paired(turns: list[list[float]]) -> Times:
    """Return one figure for each two turns, there and back: one of them follows an own turn.

    A turn counts with its median call: a process that is set aside for a while loses one call.
    """
    figures = [statistics.median(turn) for turn in turns]
    pairs = [(first + second) / 2 for first, second in zip(*[iter(figures)] * 2, strict=True)]
    return Times(pairs, list(chain.from_iterable(turns)))


def _whole(work: str, sides: tuple[Side, Side], rounds: int) -> list[Line]:
    figures: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def run(side: Side) -> None:
        for title, contender, value, unit in side.ask("run", work=work):
            found = figures.setdefault((title, contender, unit), {s.name: [] for s in sides})
            found[side.name].append(value)

    try:
        _rounds(sides, rounds, run)
    except Lacking as error:
        return [_left_out(work, sides, error)]
    finally:
        for side in sides:
            side.ask("drop")
    lines = []
    for (title, contender, unit), found in figures.items():
        name = title if contender == SUBJECT else f"{title}, {contender}"
        lines += _figures(name, unit, sides, found)
    return lines


def _figures(
    title: str, unit: str, sides: tuple[Side, Side], found: dict[str, list[float]]
) -> list[Line]:
    this, other = (found[side.name] for side in sides)
    if len(this) != len(other):
        return [_left_out(title, sides, Lacking("only one side has this figure"))]
    figures = [sorted(values)[len(values) // 2] for values in (this, other)]
    ratio = compare_rounds(this, other) if all(other) else None
    counted = unit == "calls"
    shown = ratio is not None and not counted
    return [
        Line(title, sides[0].name, figures[0], unit),
        Line(
            title,
            sides[1].name,
            figures[1],
            unit,
            ratio=None if ratio is None else ratio.median,
            low=ratio.low if ratio is not None and shown else None,
            high=ratio.high if ratio is not None and shown else None,
            at_most=None if ratio is None else AT_MOST,
            more=int(figures[0] - figures[1]) if counted else None,
        ),
    ]
