"""The programs that learn run end to end, within a short time, and report the truth about it.

``make examples`` runs them for as long as they need to reach their goals.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.rooms import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.timeout(280)]

SECONDS = 8
START_S = 120
"""Time for imports, for processes that start and end, and for other tests on the machine."""

PROGRAMS = [
    "atari_frames",
    "callbacks_trainer",
    "dqn_prioritized",
    "memory_agent",
    "ppo_drain",
    "recurrent_r2d2",
    "roboset_offline",
    "sac_hindsight",
]


def test_makefile_runs_every_program() -> None:
    listed = re.search(r"^PROGRAMS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert listed is not None
    assert sorted(listed[1].replace("\\", " ").split()) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_fits_on_a_few_screens(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text("utf-8").splitlines()) <= 250


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_short_run_ends_in_time_with_a_verdict_and_a_plot(name: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / f"{name}.py")
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, program, "--seconds", str(SECONDS), "--output", str(tmp_path / "plots")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + START_S + 60,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert time.monotonic() - begin < SECONDS + START_S
    verdict = re.fullmatch(rf"{name}: (pass|fail) - .*\d.* against .*\d.*", last_line(done.stdout))
    assert verdict is not None, done.stdout[-1000:]
    assert (verdict[1] == "pass") == (done.returncode == 0)
    with Image.open(tmp_path / "plots" / f"{name}.png") as plot:
        assert min(plot.size) >= 200
        assert len(plot.convert("RGB").getcolors(1 << 24) or ()) > 20


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
