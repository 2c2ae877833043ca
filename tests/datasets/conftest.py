"""Shared by the tests of data sets: a hub, files of trials, conversions, and RoboSet over both."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaykit.testing.robohive_files import make_trial
from tests.datasets.door import FILES
from tests.datasets.trials import ROBOSET_REPO, convert, served, write, write_source
from tests.support import LoopbackHub

# -- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def point_client_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[LoopbackHub], None]]:
    """Leads the client, in this process, to a hub and to a cache below ``tmp_path / "hf"``.

    Where the client waits between attempts of its own, it does not.
    """
    import huggingface_hub

    def point(hub: LoopbackHub) -> None:
        for name, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)

    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", clock)
    # Read from the environment when the client is imported, which has been done.
    for name in ("TELEMETRY", "XET", "IMPLICIT_TOKEN"):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_DISABLE_{name}", True)
    # Not by its functions: they warn where the environment says so too.
    bars = sys.modules["huggingface_hub.utils.tqdm"]
    monkeypatch.setitem(bars.progress_bar_states, "_global", False)
    yield point
    huggingface_hub.close_session()


class CountingHub(LoopbackHub):
    """A hub whose every request counts, those of the client for itself apart."""

    def asked(self, method: str | None = None, route: str | None = None) -> list[Any]:
        return [
            request
            for request in self.requests
            if request.route and method in (None, request.method) and route in (None, request.route)
        ]


@pytest.fixture
def hub(
    request: pytest.FixtureRequest, point_client_at: Callable[[LoopbackHub], None]
) -> Iterator[CountingHub]:
    """A hub that serves the ``FILES`` of the test's module, or those of `door`, as its ``REPO``."""
    files = getattr(request.module, "FILES", FILES)
    with CountingHub({request.module.REPO: files}) as hub:
        point_client_at(hub)
        yield hub


# -- files and their conversion -------------------------------------------------------------------


SAMPLE = Path(__file__).parents[3] / "shared/data/robohive/fk1_random_policy_trace.h5"
SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"


@pytest.fixture
def sample() -> Path:
    if not SAMPLE.exists():
        pytest.skip(f"sample file {SAMPLE} not present")
    if hashlib.sha256(SAMPLE.read_bytes()).hexdigest() != SAMPLE_SHA256:
        pytest.skip(f"sample file {SAMPLE} has another sha256")
    return SAMPLE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "a.h5")


@pytest.fixture
def target(tmp_path: Path, source: Path) -> Path:
    """A published data set of six rows, alone in its directory."""
    convert(tmp_path / "root" / "data", source)
    return tmp_path / "root" / "data"


@pytest.fixture
def no_pipe_is_waited_for() -> Iterator[None]:
    """Makes waiting for a pipe an error."""

    def waiting(*_: object) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, waiting)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- RoboSet --------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> list[Path]:
    """Two files: trials of 4, 6, 3 and of 5, 4 records, the last of each file terminated."""
    paths = []
    for number, lengths in enumerate(((4, 6, 3), (5, 4))):
        trials = [make_trial(n, seed=10 * number + k) for k, n in enumerate(lengths[:-1])]
        last = make_trial(lengths[-1], seed=10 * number + len(trials), terminated=True)
        paths.append(write(tmp_path / f"files/{number}.h5", *trials, last))
    return paths


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class Serving:
    """A hub with the files, and the environment that points the client to it."""

    def __init__(self, hub: LoopbackHub, tmp_path: Path, monkeypatch: Any) -> None:
        self.hub = hub
        self.cache = tmp_path / "cache"
        self.env = hub.env(self.cache)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)

    @property
    def requests(self) -> int:
        return len(self.hub.requests)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    import huggingface_hub

    hubs = []

    def start(*files: Path, **more: Path | bytes) -> Serving:
        hub = LoopbackHub({ROBOSET_REPO: {**served(*files), **more}})
        hub.__enter__()
        hubs.append(hub)
        return Serving(hub, tmp_path, monkeypatch)

    yield start
    huggingface_hub.close_session()
    for hub in hubs:
        hub.__exit__(None, None, None)
