"""Downloads in processes of their own, from the Hub and the web: kills, interrupts, two at once."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replaykit.datasets import download
from replaykit.datasets.hub_files import fetch, list_files
from tests.support import Fault, LoopbackHub

REPO = "me/data"
DATA = {f"door/seed{seed}/a.h5": os.urandom(200_000) for seed in range(3)}

FETCH = """
from replaykit.datasets import download
from replaykit.datasets.hub_files import fetch, list_files
fetch(list_files("me/data", directory="door", suffix=".h5"))
"""


FETCH_URL = """
import sys
from replaykit.datasets.http_files import download
[path] = download(sys.argv[1], checksums={sys.argv[1]: sys.argv[2]})
print(path)
"""


def start(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


class World:
    """A hub and a cache, and processes that use them."""

    def __init__(self, hub: LoopbackHub, home: Path) -> None:
        self.hub, self.home = hub, home
        # A home of its own: nothing below it means that nothing was written to a user's cache.
        self.env = {**hub.env(home / "hf"), "HOME": str(home / "user")}

    def start(self, **env: str) -> subprocess.Popen[str]:
        return start(FETCH, env={**self.env, **env})

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


# -- over plain HTTP -------------------------------------------------------------------------------


FILE = os.urandom(8_000_000)
SHA256 = hashlib.sha256(FILE).hexdigest()
SOME = 20_000


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with LoopbackHub({"me/files": {"a.bin": FILE}}) as hub:
        yield hub


def address(web: LoopbackHub) -> str:
    return f"{web.url}/datasets/me/files/resolve/main/a.bin"


def part(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "downloads").rglob("*.part"))


def test_waiting_process_continues_download_of_killed_process(
    web: LoopbackHub, tmp_path: Path
) -> None:
    web.faults.append(Fault(method="GET", bytes_per_s=50_000, times=1))
    first = start(FETCH_URL, address(web), SHA256)
    wait_for(lambda: part(tmp_path) >= SOME, first)
    second = start(FETCH_URL, address(web), SHA256)
    wait_for(lambda: sum(r.method == "HEAD" for r in web.requests) == 2, first)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert Path(out.strip()).read_bytes() == FILE
    ranges = [request.range for request in web.requests if request.method == "GET"]
    assert (len(ranges), ranges[0]) == (2, None)
    assert int(str(ranges[1]).removeprefix("bytes=").removesuffix("-")) >= SOME
    assert not list((tmp_path / "downloads").rglob("*.part*"))


@pytest.mark.long
def test_interrupt_ends_download_and_keeps_received_bytes(web: LoopbackHub, tmp_path: Path) -> None:
    web.faults.append(Fault(method="GET", bytes_per_s=50_000, times=1))
    process = start(FETCH_URL, address(web), SHA256)
    wait_for(lambda: part(tmp_path) >= SOME, process)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 60
    assert (process.returncode, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    had = part(tmp_path)
    [path] = download(address(web), checksums={address(web): SHA256})
    assert path.read_bytes() == FILE
    assert web.requests[-1].range == f"bytes={had}-"
