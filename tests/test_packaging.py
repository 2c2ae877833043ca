"""The files and metadata of the wheel, and its use where no compiler is installed.

The wheel is built once, from a copy of the sources, also where several workers of xdist share this
file. The checkout is only read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from packaging.requirements import Requirement

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[1]

# Tests and the like are copied too: what is not there could not be packed by mistake.
SOURCES = [
    "CMakeLists.txt",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "benchmarks",
    "csrc",
    "docs",
    "examples",
    "replaykit",
    "replaykit_command",
    "tests",
]


# -- building -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wheel:
    """A built wheel."""

    folder: Path

    @property
    def source(self) -> Path:
        """The copy that it was built from; the checkout may have changed since."""
        return self.folder / "source"

    @property
    def unpacked(self) -> Path:
        return self.folder / "unpacked"

    @property
    def file(self) -> Path:
        (file,) = (self.source / "dist").iterdir()
        return file

    @property
    def names(self) -> list[str]:
        with ZipFile(self.file) as archive:
            return archive.namelist()

    def information(self, name: str) -> Message:
        """A file of the wheel's ``.dist-info`` that is written as headers."""
        (path,) = self.unpacked.glob(f"*.dist-info/{name}")
        return Parser().parsestr(path.read_text(encoding="utf-8"))

    @property
    def binaries(self) -> list[Path]:
        found = (path for path in self.unpacked.rglob("*") if ".so" in path.suffixes)
        return sorted(found)


def _run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _isolation(source: Path) -> dict[str, str]:
    """Builds with what is installed, if that is all a build needs; isolation has to fetch it.

    What the backend asks for beyond itself is a CMake and a Ninja, where the machine has none.
    """
    if not all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind")):
        return {}
    hook = (
        "import json; from scikit_build_core.build import get_requires_for_build_wheel as ask; "
        "print(json.dumps(ask({})))"
    )
    missing = json.loads(_run([sys.executable, "-c", hook], source).splitlines()[-1])
    # pip reads this variable the other way round: 0 turns isolation off.
    return {} if missing else {"PIP_NO_BUILD_ISOLATION": "0"}


def _build(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    # A core that an editable installation left in the checkout must not be taken for a built one.
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "_core.pyi")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy2(path, source / name)
    # With this interpreter, whose environment is set up, instead of a new one.
    command = ["make", "wheel", f"PY={sys.executable}", "STAMP="]
    _run(command, source, PIP_CONSTRAINT=str(source / "constraints.txt"), **_isolation(source))
    wheel = Wheel(folder)
    with ZipFile(wheel.file) as archive:
        archive.extractall(wheel.unpacked)


@pytest.fixture(scope="session")
def wheel(built_once: Any) -> Wheel:
    return Wheel(built_once("wheel", _build))


# -- files ----------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Wheel) -> None:
    source = wheel.source
    modules = {path.relative_to(source).as_posix() for path in source.glob("replaykit*/**/*.py")}
    assert len(modules) > 50
    tables = {
        path.relative_to(source).as_posix()
        for kind in ("tsv", "html")
        for path in source.glob(f"replaykit/**/*.{kind}")
    }
    stubs = {path.relative_to(source).as_posix() for path in source.glob("replaykit/**/*.pyi")}
    assert "replaykit/__init__.pyi" in stubs
    expected = modules | tables | stubs | {"replaykit/py.typed", "replaykit/native/_core.pyi"}
    about = [name for name in wheel.names if ".dist-info/" in name]
    binaries = {path.relative_to(wheel.unpacked).as_posix() for path in wheel.binaries}
    assert {name for name in wheel.names if not name.endswith("/")} == (
        expected | binaries | set(about)
    )
    assert sorted(PurePosixPath(name).name for name in about) == [
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
    ]
    for name in modules | tables | stubs:
        assert (wheel.unpacked / name).read_bytes() == (source / name).read_bytes(), name
    (licence,) = wheel.unpacked.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (source / "LICENSE").read_bytes()


def test_wheel_contains_the_core(wheel: Wheel) -> None:
    (found,) = (path.relative_to(wheel.unpacked).as_posix() for path in wheel.binaries)
    assert re.fullmatch(r"replaykit/native/_core\.[\w.-]*so", found)


def test_wheel_tag_names_the_platform(wheel: Wheel) -> None:
    information = wheel.information("WHEEL")
    (tag,) = information.get_all("Tag", [])
    assert wheel.file.name.endswith(f"-{tag}.whl")
    assert information["Root-Is-Purelib"] == "false"
    python, abi, platform = tag.split("-", 2)
    assert platform != "any"
    if sys.version_info >= (3, 12):
        assert (python, abi) == ("cp312", "abi3")
        # One file for all later versions: a core built for one version would not load there.
        assert all(path.name.endswith(".abi3.so") for path in wheel.binaries)
    else:
        assert python == abi == f"cp3{sys.version_info.minor}"


# -- metadata -------------------------------------------------------------------------------------


def test_metadata_of_the_wheel_is_complete(wheel: Wheel) -> None:
    metadata = wheel.information("METADATA")
    namespace: dict[str, Any] = {}
    exec((wheel.source / "replaykit" / "_version.py").read_text(encoding="utf-8"), namespace)
    assert metadata["Name"] == "replaykit"
    assert metadata["Version"] == namespace["__version__"]
    assert wheel.file.name.startswith(f"replaykit-{namespace['__version__']}-")
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert str(metadata.get_payload()).startswith("# replaykit")


def test_wheel_installs_the_command(wheel: Wheel) -> None:
    (path,) = wheel.unpacked.glob("*.dist-info/entry_points.txt")
    assert path.read_text(encoding="utf-8").split("\n")[:2] == [
        "[console_scripts]",
        "replaykit = replaykit_command:main",
    ]
    # As an installed script begins: the package and torch come later, and may be interrupted.
    look = "import sys, replaykit_command as at; print(at.__file__, 'replaykit' in sys.modules)"
    said = _run([sys.executable, "-S", "-c", look], wheel.folder, PYTHONPATH=str(wheel.unpacked))
    assert said.split() == [str(wheel.unpacked / "replaykit_command/__init__.py"), "False"]
    assert "replaykit/__main__.py" in wheel.names


def test_seven_packages_are_needed_and_each_has_a_floor(wheel: Wheel) -> None:
    metadata = wheel.information("METADATA")
    assert metadata.get_all("Provides-Extra") == [
        "ray",
        "images",
        "fast",
        "lerobot",
        "cli",
        "test",
        "sb3",
        "gymnasium",
        "minari",
        "d3rlpy",
        "zarr",
        "rlds",
        "bench",
        "docs",
        "examples",
    ]
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    needed = [requirement for requirement in requirements if requirement.marker is None]
    assert sorted(requirement.name for requirement in needed) == [
        "h5py",
        "huggingface_hub",
        "numpy",
        "tensordict",
        "torch",
        "tqdm",
        "typing-extensions",
    ]
    # No ceiling: that would make this package the reason for which others cannot be updated.
    assert [[part.operator for part in requirement.specifier] for requirement in needed] == (
        [[">="]] * 7
    )


# -- linking --------------------------------------------------------------------------------------


def _needed(path: Path) -> set[str]:
    """The libraries that the dynamic section of an ELF file names."""
    environment = {"LC_ALL": "C"}
    text = _run(["readelf", "--wide", "--dynamic", str(path)], path.parent, **environment)
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def test_the_core_links_no_torch(wheel: Wheel) -> None:
    """One wheel serves every version of torch."""
    if sys.platform != "linux":
        pytest.skip("reads ELF files")
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf, of binutils")
    (core,) = wheel.binaries
    bare = {name.split(".so")[0] for name in _needed(core)}
    assert "libc" in bare
    # `ld-linux` is the loader.
    assert {name for name in bare if not name.startswith("ld-linux")} <= {
        "libc",
        "libdl",
        "libgcc_s",
        "libm",
        "libpthread",
        "libstdc++",
    }
    # Nor does it open one by name.
    assert not re.search(rb"libtorch|libc10|libpython", core.read_bytes())
    # The same look at torch itself finds them.
    (other,) = (Path(torch.__file__).parent / "lib").glob("libtorch_python.so")
    assert {"libtorch", "libc10"} & {name.split(".so")[0] for name in _needed(other)}


# -- use ------------------------------------------------------------------------------------------

_USE = """
import json, sys, tempfile
from pathlib import Path

sys.path[:0] = json.loads(sys.argv[1])
import replaykit, torch
from replaykit import LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter, native
from tensordict import TensorDict

def rows(start, ranks):
    rank = torch.tensor(ranks, dtype=torch.float64)
    ids = torch.arange(start, start + len(ranks))
    return TensorDict({"id": ids, "next": {"reward": rank[:, None]}}, [len(ranks)])

def buffer(capacity, seed, **arguments):
    storage = LazyTensorStorage(capacity)
    generator = torch.Generator().manual_seed(seed)
    return ReplayBuffer(storage=storage, batch_size=8, generator=generator, **arguments)

first = buffer(10, 1)
slots = [first.extend(rows(0, [0.0] * 7)).tolist(), first.extend(rows(7, [0.0] * 6)).tolist()]
sampled = first.sample()["id"].tolist()
with tempfile.TemporaryDirectory() as folder:
    first.dumps(Path(folder) / "saved")
    second = buffer(10, 2)
    second.loads(Path(folder) / "saved")
again = [first.sample()["id"].tolist(), second.sample()["id"].tolist()]

best = buffer(3, 3, writer=TensorDictMaxValueWriter())
kept = [best.extend(rows(0, [1.0, 5.0, 2.0, 3.0, 0.0])).tolist()]
with tempfile.TemporaryDirectory() as folder:
    best.dumps(Path(folder) / "saved")
    other = buffer(3, 4, writer=TensorDictMaxValueWriter())
    other.loads(Path(folder) / "saved")
kept += [other.extend(rows(5, [4.0, 3.0, 3.0])).tolist(), other[:]["id"].tolist()]

print(json.dumps({
    "file": replaykit.__file__,
    "version": replaykit.__version__,
    "core_version": native.core.__version__,
    "results": {"slots": slots, "sampled": sampled, "again": again, "kept": kept},
}))
"""


def test_wheel_is_installed_and_works_without_a_compiler(wheel: Wheel, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "no-programs"
    empty.mkdir()
    bare = {"PATH": str(empty), "CC": "", "CXX": "", "PYTHONDONTWRITEBYTECODE": "1"}
    assert shutil.which("c++", path=bare["PATH"]) is None
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    _run([*pip, "--target", str(installed), str(wheel.file)], tmp_path, **bare)
    # Without the import hooks of the editable installation.
    others = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    program = [sys.executable, "-S", "-W", "error", "-c", _USE]
    argument = json.dumps([str(installed), *others])
    said = _run([*program, argument], tmp_path, PYTHONPATH="", **bare)
    used = json.loads(said.splitlines()[-1])
    assert installed in Path(used["file"]).parents
    assert used["version"] == used["core_version"] == wheel.information("METADATA")["Version"]
    results = used["results"]
    assert results["slots"] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 1, 2]]
    assert set(results["sampled"]) <= set(range(3, 13))
    assert results["again"][0] == results["again"][1]
    # Of ranks 1, 5, 2, 3, 0 in three slots: rank 3 displaces rank 1. After the restart 4 displaces
    # 2, and neither 3 displaces its older equal.
    assert results["kept"] == [[-1, 1, 2, 0, -1], [2, -1, -1], [3, 1, 5]]
