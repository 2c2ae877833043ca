"""The compiled core by itself, with the address and undefined behaviour sanitizers.

Python's tests see results. A read one entry past the end can give the right one, on one machine and
on one day; here it ends the program.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "csrc"
X86 = platform.machine().lower() in ("x86_64", "amd64")
# Sources beside the harness, with the flags that each is compiled with.
SOURCES: dict[str, dict[str, list[str]]] = {
    "commits": {},
    "episodes": {},
    "marks": {},
    "observations": {},
    "rank_heap": {},
    "relabel": {},
    "rows": {},
    "tree": {"tree_portable.cpp": [], **({"tree_avx512.cpp": ["-mavx512f"]} if X86 else {})},
}
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RACES = ["-fsanitize=thread"]
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-D_GLIBCXX_ASSERTIONS"]
FLAGS += [
    f"-I{CORE}",
    "-pthread",
    "-rdynamic",
    "-ldl",
    "-ffp-contract=off",
    *(["-DREPLAYKIT_AVX512"] if X86 else []),
]

pytestmark = pytest.mark.programs

Run = Callable[..., subprocess.CompletedProcess[str]]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        # Looking for leaks needs rights that containers often do not give; what is tested
        # allocates through `std::vector` alone, or not at all.
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


def _compiler(folder: Path, sanitizers: list[str]) -> list[str]:
    """A compiler with these sanitizers, shown by a program that does nothing; skips without one."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    present = [command for command in candidates if shutil.which(command[0])]
    if not present:
        pytest.skip("no C++ compiler")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n", encoding="utf-8")
    program, said = folder / "empty", ""
    for command in present:
        done = _run(*command, *sanitizers, folder / "empty.cpp", "-o", program)
        if done.returncode == 0:
            done = _run(program)
        if done.returncode == 0:
            return command
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    pytest.skip(f"no C++ compiler with the sanitizers' libraries: {said}")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _compiler(tmp_path_factory.mktemp("compiler"), SANITIZERS)


def _built(name: str, folder: Path, compiler: list[str], sanitizers: list[str]) -> Run:
    command = [*compiler, *sanitizers, *FLAGS]
    objects = [folder / f"{source}.o" for source in SOURCES[name]]
    for (source, flags), compiled in zip(SOURCES[name].items(), objects, strict=True):
        done = _run(*command, *flags, "-c", CORE / source, "-o", compiled)
        assert done.returncode == 0, done.stderr[-3000:]
    program = folder / name
    harness = Path(__file__).with_name(f"{name}_harness.cpp")
    done = _run(*command, harness, *objects, "-o", program)
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda *arguments: _run(program, *arguments)


OVERFLOW = "AddressSanitizer: heap-buffer-overflow"
# Steps that are wrong, and what a sanitizer says of each.
WRONG_STEPS = {name: {"--break": OVERFLOW} for name in SOURCES}
WRONG_STEPS["rank_heap"]["--overflow"] = "integer overflow"


# In one test, since it takes long to compile: tests of one module are divided between processes.
@pytest.mark.parametrize("name", SOURCES)
def test_random_programs_agree_with_plain_vectors(
    tmp_path: Path, compiler: list[str], name: str
) -> None:
    """Every kernel that the processor runs; ties, one slot, empty batches, NaN, threads.

    A wrong step ends the program, hence the silence says something.
    """
    run = _built(name, tmp_path, compiler, SANITIZERS)
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "all agree\n", "")
    for argument, message in WRONG_STEPS[name].items():
        done = run(argument)
        assert done.returncode not in (0, 2, 3)  # 2: the models differ, 3: an unknown argument
        assert message in done.stderr


def test_threads_that_share_rows_do_not_race(tmp_path: Path) -> None:
    """Several callers at the same time, helpers that wake late, and one race to show it is on."""
    run = _built("rows", tmp_path, _compiler(tmp_path, RACES), RACES)
    done = run("--pool")
    assert (done.returncode, done.stdout, done.stderr) == (0, "all agree\n", "")
    done = run("--race")
    assert done.returncode not in (0, 2, 3)
    assert "ThreadSanitizer: data race" in done.stderr


def test_threads_work_in_forked_children(tmp_path: Path) -> None:
    """Gathers and loops that another thread is busy with while the process forks."""
    run = _built("rows", tmp_path, _compiler(tmp_path, UNDEFINED), UNDEFINED)
    done = run("--forks")
    assert (done.returncode, done.stdout, done.stderr) == (0, "all agree\n", "")


@pytest.mark.skipif(not X86, reason="one kernel only is compiled for this processor")
@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
def test_nothing_compiled_for_one_processor_is_linked_into_the_rest(
    compiler: list[str], tmp_path: Path, optimisation: str
) -> None:
    """A function that two files share is linked once, perhaps with what a processor lacks."""
    compiled = tmp_path / "kernels.o"
    flags = ["-std=c++17", optimisation, f"-I{CORE}", "-DREPLAYKIT_AVX512", "-mavx512f"]
    done = _run(*compiler, *flags, "-c", CORE / "tree_avx512.cpp", "-o", compiled)
    assert done.returncode == 0, done.stderr[-3000:]
    symbols = _run("nm", "-C", "--defined-only", "--extern-only", compiled).stdout.splitlines()
    assert len(symbols) == 1
    assert "avx512_kernels" in symbols[0]
