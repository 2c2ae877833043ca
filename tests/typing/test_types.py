"""What type checkers know of a program that uses the package: mypy and pyright, strictly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

PROGRAM = Path(__file__).with_name("program.py")

WRONG = """
import torch
from typing_extensions import assert_type
from replaykit import (
    D4RLExperienceReplay, LazyTensorStorage, PrioritizedSampler, RayReplayBuffer, ReplayBuffer,
    ReplayBufferEnsemble, ShardedReplayBuffer, SliceSampler, datasets
)

rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 0.7, 0.5))
assert_type(rb.sample(), torch.Tensor)  # error
assert_type(rb[:], torch.Tensor)  # error
assert_type(rb.sample(return_info=True), torch.Tensor)  # error
for batch in rb:
    assert_type(batch, torch.Tensor)  # error
data, info, more = rb.sample(return_info=True)  # error
rb.sampler.slice_len  # error
rb.storage.scratch_dir  # error
ReplayBuffer(sampler=3)  # error
D4RLExperienceReplay("x", 3, sampler=SliceSampler(slice_len=4)).sampler.alpha  # error
D4RLExperienceReplay("x", 3, sampler=3)  # error
datasets.open("x", sampler=SliceSampler(slice_len=4)).sampler.alpha  # error
for batch in rb.dataloader(3):
    assert_type(batch, torch.Tensor)  # error
ensemble = ReplayBufferEnsemble(rb, rb)
assert_type(ensemble.sample(), torch.Tensor)  # error
assert_type(ensemble[:, 0], torch.Tensor)  # error
ensemble[0].slice_len  # error
shards = ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10))
assert_type(shards.sample(), torch.Tensor)  # error
assert_type(shards[...], torch.Tensor)  # error
actor = RayReplayBuffer(storage=lambda: LazyTensorStorage(10))
assert_type(actor.sample(), torch.Tensor)  # error
assert_type(actor[0], torch.Tensor)  # error
"""

STUB = """
from typing import Any, Iterator
import torch

class TensorDictBase:
    def __getitem__(self, key: Any) -> torch.Tensor: ...
    def __iter__(self) -> Iterator[Any]: ...

class TensorDict(TensorDictBase): ...
class TensorClass(TensorDictBase): ...
def __getattr__(name: str) -> Any: ...
"""
"""What mypy reads of TensorDicts: their package says nothing for type checkers of itself."""


def lines_in_error(found: list[dict[str, Any]]) -> list[int]:
    return sorted({error["range"]["start"]["line"] + 1 for error in found})


def pyright(program: Path) -> list[dict[str, Any]]:
    """Errors that pyright finds; it comes with its own node and fetches nothing."""
    pytest.importorskip("pyright", reason="needs pyright[nodejs]")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, program],
        capture_output=True,
        text=True,
        cwd=program.parent,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        timeout=200,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["summary"]["filesAnalyzed"] == 1, said
    return [found for found in said["generalDiagnostics"] if found["severity"] == "error"]


def mypy(*programs: Path, cache: Path) -> list[str]:
    """Errors that mypy finds, strictly, with stubs of TensorDicts."""
    pytest.importorskip("mypy", reason="needs mypy")
    folder = programs[0].parent
    stubs = folder / "stubs" / "tensordict"
    stubs.mkdir(parents=True, exist_ok=True)
    (stubs / "__init__.pyi").write_text(STUB)
    (folder / "mypy.ini").write_text("[mypy]\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, *programs],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(stubs.parent)},
        timeout=250,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return Path(shutil.copy(PROGRAM, tmp_path))


@pytest.fixture
def wrong(tmp_path: Path) -> tuple[Path, list[int]]:
    """A program with errors, and the numbers of its lines that have one."""
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    marked = [n for n, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# error")]
    return path, marked


def test_pyright_knows_batches_and_components(program: Path) -> None:
    assert pyright(program) == []


def test_pyright_finds_what_is_wrong(wrong: tuple[Path, list[int]]) -> None:
    path, marked = wrong
    assert set(marked) <= set(lines_in_error(pyright(path)))


def test_mypy_knows_batches_and_components_and_finds_what_is_wrong(
    program: Path, wrong: tuple[Path, list[int]], cache: Path
) -> None:
    """In one run, since most of it reads torch."""
    path, marked = wrong
    errors = mypy(program, path, cache=cache)
    assert [error for error in errors if error.startswith("program.py")] == []
    found = {int(error.split(":")[1]) for error in errors if error.startswith("wrong.py")}
    assert set(marked) <= found


def test_package_contains_py_typed() -> None:
    assert files("replaykit").joinpath("py.typed").is_file()
