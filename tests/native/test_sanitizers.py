"""The rank heap by itself, compiled with the address and undefined behaviour sanitizers.

Python's tests see results. A read one entry past the end can give the right one, on one machine and
on one day; here it ends the program.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("rank_heap_harness.cpp")
HEADERS = Path(__file__).parents[2] / "csrc"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-D_GLIBCXX_ASSERTIONS"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        # Looking for leaks needs rights that containers often do not give; the heap allocates
        # through `std::vector` alone.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    # A library that is loaded first would come before the sanitizer's, which refuses to start then.
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


def _compiler(folder: Path) -> list[str]:
    """A compiler with both sanitizers, shown by a program that does nothing; skips without one."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    present = [command for command in candidates if shutil.which(command[0])]
    if not present:
        pytest.skip("no C++ compiler")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n", encoding="utf-8")
    program, said = folder / "empty", ""
    for command in present:
        done = _run(*command, *SANITIZERS, folder / "empty.cpp", "-o", program)
        if done.returncode == 0:
            done = _run(program)
        if done.returncode == 0:
            return command
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    pytest.skip(f"no C++ compiler with the sanitizers' libraries: {said}")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the program; it is compiled once."""
    folder = tmp_path_factory.mktemp("harness")
    program = folder / "harness"
    flags = [*SANITIZERS, *FLAGS, f"-I{HEADERS}"]
    done = _run(*_compiler(folder), *flags, HARNESS, "-o", program)
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda *arguments: _run(program, *arguments)


def test_random_batches_agree_with_a_sorted_vector(harness: Run) -> None:
    """Ties, infinities, one slot, empty batches, restores; NaN keeps memory and slots sound."""
    done = harness()
    assert (done.returncode, done.stdout, done.stderr) == (0, "all agree\n", "")


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--break", "AddressSanitizer: heap-buffer-overflow"), ("--overflow", "integer overflow")],
    ids=["address", "undefined"],
)
def test_the_sanitizers_are_on(harness: Run, argument: str, message: str) -> None:
    """A wrong step ends the program, hence the silence above says something."""
    done = harness(argument)
    assert done.returncode not in (0, 2, 3)  # 2: the models differ, 3: an unknown argument
    assert message in done.stderr
