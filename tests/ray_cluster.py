"""One real Ray on this machine for all tests of a test process.

Whoever needs it takes the fixture ``ray_cluster``, which `tests/conftest.py` has, and marks the
module with ``RAY_MARKS``. Actors ask for ``num_cpus`` of 0, so that none waits for another, and are
closed or killed by the test that made them; every worker process takes seconds to start.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import replaykit

__all__ = ["RAY_MARKS", "ray_cluster"]

ROOT = Path(replaykit.__file__).parents[1]

RAY_MARKS = [pytest.mark.timeout(180), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The module ray, initialised; its workers import this checkout."""
    if " " in sys.executable:
        pytest.skip("Ray starts no workers with an interpreter whose path has a space")
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    # Not pytest's own folder: the sockets below would have names that are too long.
    folder = tempfile.mkdtemp(prefix="rk-ray-")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Ray will do one day
            _start(ray, folder)
        yield ray
        ray.shutdown()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _start(ray: Any, folder: str) -> None:
    """Ray gives up after half a minute, which on a machine with other work may be too short."""
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                object_store_memory=100 * 2**20,
                _temp_dir=folder,
            )
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise
        else:
            return
