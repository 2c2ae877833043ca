"""What ``import replaykit`` does, and what it does not."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import replaykit
from tests.support.refusals import refuses

_LOAD = """
from replaykit import registry
for name, entry in registry.exports("replaykit").items():
    if entry.module.partition(".")[0] not in ("datasets", "distributed"):
        getattr(replaykit, name)
"""
"""What needs no more than torch and tensordict."""

_LOOK = """
import atexit, json, os, signal, sys, threading
import tensordict  # what it loads is not this package's doing
from pathlib import Path

def handlers():
    return {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()}

opened = []
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        mode, flags = arguments[1], arguments[2] or 0
        if (mode and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            opened.append(str(arguments[0]))
    elif event in ("socket.connect", "subprocess.Popen", "os.fork", "os.mkdir"):
        opened.append(event)

before = set(sys.modules), handlers(), threading.active_count(), dict(os.environ)
exits, register = [], atexit.register
def noting(function, *arguments, **keywords):
    exits.append(function.__code__.co_filename)
    return register(function, *arguments, **keywords)
atexit.register = noting
sys.addaudithook(audit)
import replaykit
LOAD
after = set(sys.modules), handlers(), threading.active_count(), dict(os.environ)
during = list(opened)  # what follows writes pipes of its own
print(json.dumps({
    "modules": sorted(after[0] - before[0]),
    "handlers": before[1] == after[1],
    "threads": [before[2], after[2]],
    "exits": exits,
    "environment": before[3] == after[3],
    "opened": during,
    "files": sorted(path.name for path in Path.cwd().iterdir()),
}))
""".replace("LOAD", _LOAD)


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one import did, in a folder of its own and an interpreter of its own."""
    folder = tmp_path_factory.mktemp("empty")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _LOOK],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=True,
        timeout=120,
    )
    (line,) = done.stdout.splitlines()
    return {**json.loads(line), "stderr": done.stderr}


@pytest.mark.pitfall("TH10")
def test_importing_loads_no_optional_package(looked: Any) -> None:
    """G7, D10: what only some users need is loaded when they ask for it."""
    heavy = {"h5py", "huggingface_hub", "ray", "filelock", "torchrl", "gymnasium"}
    heavy |= {"matplotlib", "jinja2", "rich", "click", "PIL"}
    loaded = {name.split(".")[0] for name in looked["modules"]}
    assert not loaded & heavy
    ours = {name for name in looked["modules"] if name.startswith("replaykit")}
    later = ("replaykit.datasets", "replaykit.testing", "replaykit.tools", "replaykit.inspection")
    assert not {name for name in ours if name.startswith(later)}


@pytest.mark.pitfall("TH10")
def test_importing_has_no_side_effects(looked: Any) -> None:
    """TH10: no handlers, threads, processes, connections, files or words."""
    assert looked["stderr"] == ""
    assert looked["handlers"]
    assert looked["threads"][0] == looked["threads"][1]
    # None of ours; nanobind, which the core is built with, has one that looks for leaks.
    assert set(looked["exits"]) <= {"<internal>"}
    assert looked["environment"]
    assert looked["opened"] == []
    assert looked["files"] == []


@pytest.mark.programs
def test_importing_takes_at_most_a_sixth_of_a_second_longer(run_python: Any) -> None:
    """The time of the processor, the best of some: what other programs do does not count. As for
    who has installed it, modules are compiled by then."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    program = (
        f"import time, tensordict; t = time.process_time(); import replaykit\n{_LOAD}\n"
        "print(time.process_time() - t)"
    )
    run_python("import replaykit", fresh=True, env=environment)
    seconds = 1.0
    for _ in range(5):
        if seconds <= 0.15:
            break
        seconds = min(seconds, float(run_python(program, fresh=True, env=environment).stdout))
    assert seconds <= 0.15


@pytest.mark.programs
def test_import_of_the_package_loads_no_torch(run_python: Any) -> None:
    program = "import replaykit, sys; print({*sys.modules} & {'torch', 'numpy', 'tensordict'})"
    assert run_python(program, fresh=True).stdout == "set()\n"
    found = run_python(
        "import replaykit; print(replaykit.samplers.RandomSampler.__name__)", fresh=True
    )
    assert found.stdout == "RandomSampler\n"
    refuses(AttributeError, "has no attribute 'sampler'", lambda: replaykit.sampler)
    with pytest.raises(ImportError, match="cannot import name 'Sample' from 'replaykit'"):
        exec("from replaykit import Sample")


def test_every_public_name_resolves() -> None:
    assert sorted(replaykit.__all__) == replaykit.__dir__()
    assert len(set(replaykit.__all__)) == len(replaykit.__all__)
    for name in replaykit.__all__:
        assert getattr(replaykit, name) is not None
    namespace: dict[str, Any] = {}
    exec("from replaykit import *", namespace)
    assert set(replaykit.__all__) <= set(namespace)


@pytest.mark.parametrize(
    "name",
    ["storages", "samplers", "writers", "transforms", "remote"],
)
def test_every_name_of_a_sub_package_is_one_of_the_package(name: str) -> None:
    part = importlib.import_module(f"replaykit.{name}")
    for public in part.__all__:
        assert public in replaykit.__all__, public
        assert getattr(part, public) is getattr(replaykit, public)


def test_every_corpus_class_is_one_of_the_package() -> None:
    """What describes and converts corpora stays in its room: `open` is no name for a package."""
    import replaykit.datasets as part

    classes = [name for name in part.__all__ if name.endswith("ExperienceReplay")]
    assert len(classes) == 15
    for public in classes:
        assert public in replaykit.__all__, public
        assert getattr(part, public) is getattr(replaykit, public)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'replaykit' has no attribute 'Zoo'"):
        replaykit.Zoo  # noqa: B018


def _public_classes() -> list[type]:
    found = (getattr(replaykit, name) for name in replaykit.__all__)
    return [thing for thing in found if inspect.isclass(thing)]


@pytest.mark.parametrize("thing", _public_classes(), ids=lambda thing: thing.__name__)
def test_docstring_of_every_public_class_has_an_example(thing: type) -> None:
    # As it is written: tensordict puts a signature in the place of what a TensorClass says.
    (definition,) = ast.parse(inspect.getsource(thing)).body
    assert isinstance(definition, ast.ClassDef)
    text = ast.get_docstring(definition)
    assert text, "no docstring"
    assert ">>>" in text, "no example"


@pytest.mark.pitfall("IF6")
@pytest.mark.parametrize("thing", _public_classes(), ids=lambda thing: thing.__name__)
def test_every_public_method_has_a_docstring_and_a_signature(thing: type) -> None:
    """IF6: and has a signature that tools can read."""
    inspect.signature(thing)
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else member
        written_here = getattr(function, "__module__", "").startswith("replaykit")
        if name.startswith("_") or not callable(function) or not written_here:
            continue
        inherited = [vars(base).get(name) for base in thing.__mro__]
        assert any(getattr(part, "__doc__", None) for part in inherited if part), name


def test_version_equals_the_installed_package() -> None:
    assert replaykit.__version__ == version("replaykit")


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(replaykit.__file__).parent / "py.typed").exists()
