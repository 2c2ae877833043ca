"""Files of the web in processes of their own: kills, interrupts, two at once."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaykit.datasets import download
from tests.datasets.test_hub_processes import wait_for
from tests.support import Fault, LoopbackHub

DATA = os.urandom(8_000_000)
SOME = 20_000
SHA256 = hashlib.sha256(DATA).hexdigest()
FETCH = """
import sys
from replaykit.datasets.http_files import download
[path] = download(sys.argv[1], checksums={sys.argv[1]: sys.argv[2]})
print(path)
"""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with LoopbackHub({"me/files": {"a.bin": DATA}}) as hub:
        yield hub


def address(web: LoopbackHub) -> str:
    return f"{web.url}/datasets/me/files/resolve/main/a.bin"


def start(web: LoopbackHub) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, address(web), SHA256],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def part(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "downloads").rglob("*.part"))


def test_waiting_process_continues_download_of_killed_process(
    web: LoopbackHub, tmp_path: Path
) -> None:
    web.faults.append(Fault(method="GET", bytes_per_s=50_000, times=1))
    first = start(web)
    wait_for(lambda: part(tmp_path) >= SOME, first)
    second = start(web)
    wait_for(lambda: sum(r.method == "HEAD" for r in web.requests) == 2, first)
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert Path(out.strip()).read_bytes() == DATA
    ranges = [request.range for request in web.requests if request.method == "GET"]
    assert (len(ranges), ranges[0]) == (2, None)
    assert int(str(ranges[1]).removeprefix("bytes=").removesuffix("-")) >= SOME
    assert not list((tmp_path / "downloads").rglob("*.part*"))


@pytest.mark.long
def test_interrupt_ends_download_and_keeps_received_bytes(web: LoopbackHub, tmp_path: Path) -> None:
    web.faults.append(Fault(method="GET", bytes_per_s=50_000, times=1))
    process = start(web)
    wait_for(lambda: part(tmp_path) >= SOME, process)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 60
    assert (process.returncode, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    had = part(tmp_path)
    [path] = download(address(web), checksums={address(web): SHA256})
    assert path.read_bytes() == DATA
    assert web.requests[-1].range == f"bytes={had}-"
