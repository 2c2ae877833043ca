"""One side of a comparison of commits: ``python -m benchmarks.worker SETTING``.

Each line of standard input is a request, and each line of standard output its answer, both as JSON.
This module imports replaykit only on request: the start of the interpreter decides which one.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.contender import Mismatch, Unavailable
from benchmarks.harness import Runner, seed_all, without_collector
from benchmarks.report import SUBJECT
from benchmarks.setting import Setting
from benchmarks.works import WORKS

__all__ = ["Worker", "main"]


class Worker:
    """Do what the parent asks: each method whose name is a request.

    Args:
        setting: how works are to be measured, calibration apart.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._runner: Runner | None = None
        self._ballast: list[bytes] = []
        self._quiet = ExitStack()

    def describe(self) -> dict[str, str]:
        """Return which package this is."""
        import replaykit

        return {"file": str(replaykit.__file__), "version": replaykit.__version__}

    def titles(self, work: str) -> list[str]:
        """Return the titles of a work whose contenders take turns."""
        return list(WORKS[work].subjects(self._setting))

    def make(self, work: str, title: str) -> None:
        """Make a contender, check it, and warm it up."""
        seed_all()
        # Every time a contender is made its memory lies in other places.
        self._ballast = [bytes(random.randrange(16, 4096)) for _ in range(4096)]
        subject = WORKS[work].subjects(self._setting)[title]
        contender = subject.contender()
        contender.make()
        contender.check()
        self._runner = Runner(contender, subject.calls)
        self._runner.warm_up()
        self._quiet.enter_context(without_collector())

    def turn(self) -> list[float]:
        """Return the microseconds of each call of a turn."""
        assert self._runner is not None
        # The process has waited for its turn: the first call would find it asleep.
        spent = self._runner.turn(untimed=1)
        gc.collect(0)
        return spent

    def drop(self) -> None:
        """Let go of the contender and of its files."""
        self._runner = None
        self._quiet.close()
        gc.collect()
        for path in self._setting.scratch.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def run(self, work: str) -> list[tuple[str, str, float, str]]:
        """Measure a whole work; return title, contender, figure and unit of its own lines."""
        seed_all()
        lines = [line for line in WORKS[work].run(self._setting) if line.value is not None]
        own = {line.work for line in lines if line.name.startswith(SUBJECT)}
        return [
            (line.work, line.name, line.value, line.unit)
            for line in lines
            if line.value is not None and (line.work not in own or line.name.startswith(SUBJECT))
        ]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the value of a request, or the error and whether it was to be expected."""
        try:
            return {"value": getattr(self, request.pop("ask"))(**request)}
        except (Unavailable, ImportError) as error:
            return {"error": str(error), "expected": True}
        except Mismatch as error:
            return {"error": str(error), "expected": False}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return {"error": f"{type(error).__name__} in {where}: {error}", "expected": False}


def main() -> None:
    """Answer requests until there are no more."""
    # What others print would end up among the answers.
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    setting = Setting(**{**given, "scratch": Path(given["scratch"])})
    torch.set_num_threads(setting.threads)
    worker = Worker(setting)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
