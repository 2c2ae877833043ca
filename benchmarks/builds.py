"""Builds of other commits of the repository, each made once and kept."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

__all__ = ["CACHE", "ROOT", "BuildError", "build", "resolve"]

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "against"

_ASK = (
    "import json; from scikit_build_core.build import get_requires_for_build_wheel as ask; "
    "print(json.dumps(ask({})))"
)


class BuildError(Exception):
    """A commit that is not there, or that cannot be built; says why."""


def resolve(rev: str) -> str:
    """Return the hash of the commit that a revision names."""
    try:
        found = _run(["git", "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}"], ROOT)
    except BuildError as error:
        raise BuildError(f"expected a commit of this repository, got {rev!r}") from error
    return found.decode().strip()


def build(commit: str, cache: Path = CACHE) -> Path:
    """Return the folder with the packages of a commit, built if they were not yet.

    Args:
        commit: the hash, as `resolve` returns it.
        cache: a folder for builds; each is kept under its hash and the Python it is for.
    """
    target = cache / f"{commit}-{sys.implementation.cache_tag}"
    if target.exists():
        return target
    print(f"building {commit[:9]}, about a minute", file=sys.stderr, flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
        source, site = Path(making) / "source", Path(making) / "site"
        exported = _run(["git", "archive", "--format=tar", commit], ROOT)
        with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
            archive.extractall(source, filter="data")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", *_isolation(source)]
        constraints = source / "constraints.txt"
        limits = {"PIP_CONSTRAINT": str(constraints)} if constraints.exists() else {}
        _run([*command, "--target", str(site), str(source)], source, **limits)
        try:
            site.rename(target)
        except OSError:
            # Another run has built the same commit meanwhile.
            if not target.exists():
                raise
    return target


def _isolation(source: Path) -> list[str]:
    """Build with the installed tools if none is missing: isolation has to fetch them."""
    if not all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind")):
        return []
    missing = json.loads(_run([sys.executable, "-c", _ASK], source).splitlines()[-1])
    return [] if missing else ["--no-build-isolation"]


def _run(command: list[str], folder: Path, **environment: str) -> bytes:
    if shutil.which(command[0]) is None:
        raise BuildError(f"{command[0]} is not installed")
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-2000:]
        raise BuildError(f"{' '.join(command[:4])} exited with {done.returncode}: {said}")
    return done.stdout
