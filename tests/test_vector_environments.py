"""The example of vector environments learns, in every mode of autoreset."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.programs
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_vector_environment_example_learns(mode: str) -> None:
    """Random play ends after 22 steps on average."""
    program = ROOT / "examples" / "vector_environments.py"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), "--mode", mode, "--goal", "60"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean return" in done.stdout
