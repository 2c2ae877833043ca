"""Counts of function calls: exact on known work, and the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contender import Contender
from benchmarks.setting import Setting
from benchmarks.works import calls


class Known(Contender):
    """Make two Python calls and three C calls, and its own call."""

    name = "known"

    def make(self) -> None: ...

    def check(self) -> None: ...

    def timed(self) -> Callable[[Any], Any]:
        def step() -> int:
            return len("row")

        def work(_: Any) -> int:
            return step() + step() + abs(-1)

        return work


def test_calls_of_python_and_of_c_are_counted_apart() -> None:
    assert calls.count_calls(Known()) == (3, 3)
    assert sys.getprofile() is None


@pytest.mark.programs
def test_two_runs_count_the_same_calls(tmp_path: Path) -> None:
    setting = Setting(rows=1000, images=100, rounds=1, threads=1, scratch=tmp_path)
    first, second = calls.run(setting), calls.run(setting)
    assert first == second
    assert [line.work for line in first] == list(calls.asked(setting))
    assert all(isinstance(line.value, int) and line.value > 10 for line in first)
