"""Where the command begins, before the package and what it needs are there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.prepared import python

ROOT = Path(__file__).parents[3]
PYTHON = [sys.executable, "-S"]  # without what is installed, which may come before any folder
RUN = "import sys; from replaykit_command import main; sys.exit(main())"
WAYS = {"the script": ["-c", RUN, "datasets"], "the module": ["-m", "replaykit", "datasets"]}
WAIT = "import time; print('loading', flush=True); time.sleep(60)"
LOADS = {
    "plainly": WAIT,
    "out of source": f"exec({WAIT!r})",
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
    """Writes a package that stands for the real one, and begins as it does; returns the environment
    that has it."""
    (folder / "replaykit/tools").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "registry.py"):
        shutil.copy(ROOT / "replaykit" / name, folder / "replaykit" / name)
    (folder / "replaykit/_version.py").write_text("__version__ = '0'\n")
    (folder / "replaykit/buffer.py").write_text(load)  # the first to import torch
    (folder / "replaykit/tools/app.py").write_text("def run(given): print('run'); return 7\n")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", LOADS)
def test_interrupted_import_of_the_package_prints_one_sentence(tmp_path, how, way):
    with subprocess.Popen(
        [*PYTHON, *WAYS[way]],
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


def begun(folder: Path, load: str, way: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, *way, *more],
        env=package(folder, load),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_interrupted_import_with_json_prints_a_document(tmp_path):
    done = begun(tmp_path, "raise KeyboardInterrupt", WAYS["the module"], "--json")
    assert (done.returncode, done.stderr) == (130, "")
    assert json.loads(done.stdout)["error"] == {
        "kind": "KeyboardInterrupt",
        "message": "interrupted: nothing was begun",
        "exit_code": 130,
    }


ABSENT = "replaykit: a required package cannot be imported: No module named 'absent'\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("load", "result"),
    [
        ("", (7, "run\n", "")),
        ("import absent", (6, "", ABSENT)),
        ("raise KeyboardInterrupt", (130, "", "replaykit: interrupted: nothing was begun\n")),
    ],
)
def test_entry_runs_the_command_or_explains_a_failed_import(tmp_path, load, result, way):
    done = begun(tmp_path, load, WAYS[way])
    assert (done.returncode, done.stdout, done.stderr) == result


def test_running_command_has_the_default_interrupt_handler(tmp_path):
    environment = package(tmp_path, "")
    (tmp_path / "replaykit/tools/app.py").write_text(
        "import signal\ndef run(given): return signal.getsignal(2) is signal.default_int_handler\n"
    )
    command = [*PYTHON, "-c", RUN, "datasets"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 1


def test_installed_command_starts_at_the_entry_module():
    found = entry_points(group="console_scripts", name="replaykit")
    assert {each.value for each in found} == {"replaykit_command:main"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], [], ["--version"], ["convert", "--help"], ["push", "-h"]]
)
def test_help_is_printed_without_loading_torch(arguments):
    """They take a second to load, which a reader of help need not wait for."""
    look = (
        "import sys; from replaykit_command import main; code = main(); heavy = "
        "{'torch', 'tensordict', 'h5py', 'huggingface_hub', 'matplotlib'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2 if not arguments else 0, "[]\n")
    assert "replaykit" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["convert", "--help"], 0),
        ([], 2),
        (["--version"], 0),
        (["datasets"], 0),
        (["inspect", "absent"], 4),
        (["inspect", "absent", "--json"], 4),
        (["nonsense"], 2),
    ],
)
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_closed_pipe_is_no_error(tmp_path, arguments, code, closed):
    """Of the help too, whose console would end the program with the code of a failed validation."""
    reads, writes = os.pipe()
    os.close(reads)
    streams = {"stdout": writes, "stderr": subprocess.PIPE if closed == "stdout" else writes}
    run = "import sys; from replaykit_command import main; sys.exit(main())"
    command = [*python(), "-c", run, *arguments]
    done = subprocess.run(command, cwd=tmp_path, text=True, check=False, **streams)
    os.close(writes)
    assert done.returncode == code
    assert "Traceback" not in (done.stderr or "")
    assert "BrokenPipe" not in (done.stderr or "")


def test_command_without_stdout_keeps_its_exit_code(tmp_path):
    run = f"'{sys.executable}' -m replaykit --version >&-"
    done = subprocess.run(["bash", "-c", run], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
