"""The download layer in processes of its own: kills, interrupts, two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replaykit.datasets.hub_files import fetch, list_files
from tests.support import Fault, LoopbackHub

REPO = "me/data"
DATA = {f"door/seed{seed}/a.h5": os.urandom(200_000) for seed in range(3)}

FETCH = """
from replaykit.datasets.hub_files import fetch, list_files
fetch(list_files("me/data", directory="door", suffix=".h5"))
"""


class World:
    """A hub and a cache, and processes that use them."""

    def __init__(self, hub: LoopbackHub, home: Path) -> None:
        self.hub, self.home = hub, home
        # A home of its own: nothing below it means that nothing was written to a user's cache.
        self.env = {**hub.env(home / "hf"), "HOME": str(home / "user")}

    def start(self, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH],
            env={**os.environ, **self.env, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def is_right(self) -> bool:
        listing = list_files(REPO, directory="door", suffix=".h5")
        return [path.read_bytes() for path in fetch(listing)] == list(DATA.values())

    def files_asked(self) -> int:
        requests = self.hub.requests
        return sum((entry.method, entry.route) == ("GET", "resolve") for entry in requests)

    def complete(self) -> list[Path]:
        return self._found("snapshots", ".h5")

    def parts(self) -> list[Path]:
        return self._found("blobs", ".incomplete")

    def _found(self, below: str, suffix: str) -> list[Path]:
        # Unlike glob, os.walk does not mind directories that vanish on the way.
        return [
            Path(folder, name)
            for folder, _, names in os.walk(self.home / "hf")
            for name in names
            if below in Path(folder).parts and name.endswith(suffix)
        ]


@pytest.fixture
def world(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point_client_at: Callable[[LoopbackHub], None],
) -> Iterator[World]:
    with LoopbackHub({REPO: DATA}) as hub:
        world = World(hub, tmp_path)
        point_client_at(hub)
        monkeypatch.setenv("HOME", world.env["HOME"])
        yield world
    assert not (tmp_path / "user").exists()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the process did not get there"
        time.sleep(0.01)


@pytest.mark.pitfall("DS12")
def test_killed_in_the_middle_of_a_file_and_started_again(world: World) -> None:
    world.hub.faults.append(Fault(path="door/seed1/*", method="GET", bytes_per_s=10_000))
    process = world.start()
    wait_for(lambda: len(world.complete()) == 2 and world.parts(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(world.parts()) == 1  # left by the client
    world.hub.faults.clear()
    world.hub.clear_log()
    assert world.is_right()
    assert world.files_asked() == 1  # the complete ones stay


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 10_000}, {"delay_s": 60}])
def test_interrupted_in_the_middle_of_a_file(world: World, wrong: dict[str, float]) -> None:
    world.hub.faults.append(Fault(path="door/seed1/*", method="GET", **wrong))
    process = world.start(HF_HUB_DOWNLOAD_TIMEOUT="60")
    wait_for(lambda: len(world.complete()) == 2 and world.parts(), process)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 10  # the file would take 20 s or 60 s
    assert "KeyboardInterrupt" in err
    world.hub.faults.clear()
    assert world.is_right()


@pytest.mark.pitfall("DS12")
def test_two_processes_fetch_each_file_once(world: World) -> None:
    world.hub.faults.append(Fault(method="GET", bytes_per_s=200_000))
    processes = [world.start() for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert world.files_asked() == 3
    assert world.is_right()
    assert world.parts() == []
