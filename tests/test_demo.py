"""The demo with a file of the user's; the whole of it, with its recording, runs in CI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from replaykit.testing import RoboHiveWriter, make_trial
from replaykit.tools.page import DAY

pytestmark = pytest.mark.programs

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def run_demo(folder: Path, data: Path) -> subprocess.CompletedProcess[str]:
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module, reason="the demo needs the extra `examples`")
    return subprocess.run(
        [sys.executable, str(DEMO), "--data", str(data), "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
        check=False,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "my trace #1.hdf5"
    with RoboHiveWriter(path) as writer:
        for seed in range(4):
            writer.add_trial(**make_trial(30 + seed, seed=seed))
    return path


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


def test_demo_names_a_file_that_is_not_hdf5_in_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "bad.h5"
    data.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    done = run_demo(tmp_path, data)
    assert done.returncode == 1
    assert f"{data}: not an HDF5 file but a Git LFS pointer" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
