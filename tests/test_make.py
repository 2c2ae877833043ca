"""What targets of the Makefile would run, as ``make -n`` says it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands_of(target: str) -> list[list[str]]:
    """The commands of a target, as words; none of them is run."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_the_newest_tensordict_is_installed_before_the_tests_run() -> None:
    commands = commands_of("test-newest")
    newest = ["install", "--upgrade", "--no-deps", "tensordict"]
    installs = [words for words in commands if words[-4:] == newest]
    assert len(installs) == 1
    assert commands.index(installs[0]) < len(commands) - 1
    assert "pytest" in commands[-1]
    assert {words[0] for words in (installs[0], commands[-1])} == {".venv-newest/bin/python"}


def test_tests_for_the_newest_tensordict_exist() -> None:
    words = commands_of("test-newest")[-1]
    named = [word.removeprefix("--ignore=") for word in words if "tests/" in word]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
