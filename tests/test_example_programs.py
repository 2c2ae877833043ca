"""Example programs: the demo, vector environments, and actors with a learner on Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from replaykit.testing import RoboHiveWriter, make_trial
from replaykit.tools.page import DAY
from tests.rooms import ROOT

LIMIT = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""A program that becomes another one, on so many processors: with all that this one starts."""


def run(*arguments: object, folder: Path, processors: int = 2, **environment: str) -> Any:
    """Run a Python program of the repository in a folder, on so many processors."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", LIMIT, str(processors), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        timeout=500,
        check=False,
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_processors_of_a_program_are_limited(tmp_path: Path) -> None:
    look = "import os; print(len(os.sched_getaffinity(0)))"
    assert run("-c", look, folder=tmp_path, processors=1).stdout == "1\n"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_actors_reach_a_mean_return_of_400_within_five_minutes() -> None:
    for module in ("ray", "gymnasium", "rich"):
        pytest.importorskip(module, reason="the example needs the extras `ray` and `examples`")
    with tempfile.TemporaryDirectory(prefix="rk-ray-", ignore_cleanup_errors=True) as folder:
        program = ROOT / "examples" / "actor_learner.py"
        done = run(program, folder=Path(folder), RAY_TMPDIR=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean return" in done.stdout


@pytest.mark.programs
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_vector_environment_example_learns(mode: str, tmp_path: Path) -> None:
    """Random play ends after 22 steps on average."""
    program = ROOT / "examples" / "vector_environments.py"
    options = ("--mode", mode, "--goal", "60")
    done = run("-W", "error", program, *options, folder=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean return" in done.stdout


# -- the demo with a file of the user's; the whole of it, with its recording, runs in CI ----------


def run_demo(folder: Path, data: Path) -> Any:
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module, reason="the demo needs the extra `examples`")
    program = ROOT / "examples" / "demo.py"
    return run(program, "--data", data, "--out", folder / "out", folder=folder)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "my trace #1.hdf5"
    with RoboHiveWriter(path) as writer:
        for seed in range(4):
            writer.add_trial(**make_trial(30 + seed, seed=seed))
    return path


@pytest.mark.programs
def test_demo_makes_a_table_and_a_picture_of_a_file_of_any_name(
    tmp_path: Path, recorded: Path
) -> None:
    done = run_demo(tmp_path, recorded)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sum(30 + seed - 1 for seed in range(4))
    with h5py.File(recorded) as file:
        returns = [float(np.sum(trial["rewards"][1:])) for trial in file.values()]
    words = " ".join(done.stdout.split())
    assert f"converted {rows} rows" in words
    assert f"{min(returns):.2f} to {max(returns):.2f}" in words
    assert "4 (29 to 32 steps)" in words
    assert "the same" in words
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(picture) as opened:
        counts = {colour: count for count, colour in opened.convert("RGB").getcolors(1 << 20)}
    # Bars, the line and the ground have the colours of the page of `inspect`.
    for name, least in (("card", 100_000), ("accent", 10_000), ("warm", 100), ("line", 500)):
        assert counts.get(tuple(bytes.fromhex(DAY[name][1:])), 0) > least, name
    assert str(picture) in done.stdout.replace("\n", "")


@pytest.mark.programs
def test_demo_names_a_file_that_is_not_hdf5_in_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "bad.h5"
    data.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    done = run_demo(tmp_path, data)
    assert done.returncode == 1
    assert f"{data}: not an HDF5 file but a Git LFS pointer" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
