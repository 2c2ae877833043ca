"""The example with actors, a learner and a buffer on Ray learns what it says it does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LIMIT = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""A program that becomes another one, on so many processors: with all that this one starts."""


def on_processors(count: int, *arguments: str) -> list[str]:
    """The command of a Python program that has that many, where the system can say so."""
    return [sys.executable, "-c", LIMIT, str(count), *arguments]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_on_processors_limits_the_processors_of_a_program() -> None:
    count = on_processors(1, "-c", "import os; print(len(os.sched_getaffinity(0)))")
    assert subprocess.run(count, capture_output=True, check=True).stdout.split() == [b"1"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_example_reaches_a_mean_return_of_400_within_five_minutes() -> None:
    for module in ("ray", "gymnasium", "rich"):
        pytest.importorskip(module, reason="the example needs the extras `ray` and `examples`")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="rk-ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            on_processors(2, str(ROOT / "examples" / "actor_learner.py")),
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_TMPDIR": folder},
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean return" in done.stdout
