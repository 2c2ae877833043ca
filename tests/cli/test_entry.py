"""Where the command begins, before the package and what it needs are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-S"]  # without what is installed, which may come before any folder
RUN = "import sys; from replaykit_command import main; sys.exit(main())"
WAIT = "import time; print('loading', flush=True); time.sleep(60)"
LOADS = {
    "plainly": WAIT,
    "with another error": f"""
try:
    {WAIT}
except BaseException:
    raise ImportError("libtorch cannot be loaded") from None
""",
    "all the same": f"""
try:
    {WAIT}
except BaseException:
    pass
""",
}


def package(folder: Path, load: str) -> dict[str, str]:
    """Writes a package that stands for the real one; returns the environment that has it."""
    (folder / "replaykit/cli").mkdir(parents=True)
    (folder / "replaykit/__init__.py").write_text(load)
    (folder / "replaykit/cli/__init__.py").write_text("def main(): print('run'); return 7\n")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("how", LOADS)
def test_an_interrupt_while_the_package_is_imported_is_one_sentence(tmp_path, how):
    with subprocess.Popen(
        [*PYTHON, "-c", RUN],
        env=package(tmp_path, LOADS[how]),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "replaykit: interrupted: nothing was begun\n"


@pytest.mark.parametrize(
    ("load", "code", "out", "err"),
    [
        ("", 7, "run\n", ""),
        (
            "import absent",
            6,
            "",
            "replaykit: what it needs cannot be imported: No module named 'absent'\n",
        ),
        ("raise KeyboardInterrupt", 130, "", "replaykit: interrupted: nothing was begun\n"),
    ],
)
def test_what_is_imported_is_run_or_says_why_not(tmp_path, load, code, out, err):
    environment = package(tmp_path, load)
    done = subprocess.run(
        [*PYTHON, "-c", RUN],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr == err


def test_ctrl_c_is_what_it_was_once_the_command_runs(tmp_path):
    environment = package(tmp_path, "")
    (tmp_path / "replaykit/cli/__init__.py").write_text(
        "import signal\ndef main(): return signal.getsignal(2) is signal.default_int_handler\n"
    )
    command = [*PYTHON, "-c", RUN]
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 1


def test_the_installed_command_begins_there():
    found = entry_points(group="console_scripts", name="replaykit")
    assert {each.value for each in found} == {"replaykit_command:main"}
