"""The cases that a short run leaves out, and the processes that are prepared for programs."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests import effort
from tests.prepared import python


class Case:
    """An item of a test that is marked ``covering(2)``, with these parameters."""

    function = None

    def __init__(self, **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.covering(2) if name == "covering" else None

    def pairs(self) -> set[Any]:
        return set(itertools.combinations(self.callspec.params.items(), 2))


def test_a_short_run_meets_all_pairs_of_values_in_fewer_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = itertools.product(range(5), "abc", [False, True], [None, 1.5, 2.5])
    cases = [Case(a=a, b=b, c=c, d=d) for a, b, c, d in product]
    monkeypatch.setattr(effort, "short", True)
    dropped = effort.left_out(cases)
    left = [each for each in cases if each not in dropped]
    assert set().union(*(each.pairs() for each in left)) == set().union(
        *(each.pairs() for each in cases)
    )
    assert 15 <= len(left) <= 25
    monkeypatch.setattr(effort, "short", False)
    assert effort.left_out(cases) == set()


PROGRAM = """
import atexit, os, sys
atexit.register(print, "at exit", flush=True)
print(__name__, sys.argv, sys.stdin.read(), os.environ["GIVEN"], "replaykit.buffer" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


def test_a_prepared_process_runs_a_program_as_an_interpreter_does() -> None:
    found = [
        subprocess.run(
            [*interpreter, "-c", PROGRAM, "7"],
            input="text",
            env={"GIVEN": "here"},
            capture_output=True,
            text=True,
            check=False,
        )
        for interpreter in (python(), [sys.executable])
    ]
    assert [done.returncode for done in found] == [7, 7]
    assert found[0].stdout == "__main__ ['-c', '7'] text here True\nat exit\n"
    assert found[0].stdout.replace("True", "False") == found[1].stdout
    assert [done.stderr for done in found] == ["", ""]


def test_a_prepared_process_gets_signals_and_tells_how_it_ended() -> None:
    for sent, program in (
        (signal.SIGINT, "try: print(flush=True); time.sleep(60)\nexcept KeyboardInterrupt: raise"),
        (signal.SIGTERM, "print(flush=True); time.sleep(60)"),
        (signal.SIGKILL, "print(flush=True); time.sleep(60)"),
    ):
        process = subprocess.Popen(
            [*python(), "-W", "error", "-c", f"import time\n{program}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.send_signal(sent)
        process.communicate(timeout=30)
        assert process.returncode == -sent
