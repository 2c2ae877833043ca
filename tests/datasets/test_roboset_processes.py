"""RoboSet in processes of their own: two that ask at once, and clients without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replaykit.errors import DownloadError
from tests.prepared import python
from tests.support import Fault

REPO = "jdvakil/RoboSet_Sim"
ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


CHILD = """
import sys, warnings
warnings.simplefilter("ignore")
from replaykit.datasets import RobosetExperienceReplay
data = RobosetExperienceReplay({id!r}, batch_size=4, root={root!r})
print(len(data), float(data["next", "reward"].sum()))
"""


def child(serving: Any, root: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*python(), "-c", CHILD.format(id=ID, root=str(root))],
        env={**os.environ, **serving.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Says when it is ready, begins when it is told, and notes every conversion, which takes a while.
TOGETHER = """
import sys, time
from pathlib import Path
from replaykit.datasets import dataset_passes
from replaykit.datasets.engine import conversion as convert
for module, name in ((convert, "_convert"), (dataset_passes, "_split")):
    def slowly(*arguments, real=getattr(module, name), name=name):
        with Path({log!r}).open("a") as file:
            file.write(name + "\\n")
        time.sleep(1)
        return real(*arguments)
    setattr(module, name, slowly)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_processes_that_ask_at_once_share_one_conversion(serve, small, root, tmp_path, split):
    """One downloads and converts, the other waits and opens: both have the same files."""
    serving = serve(*small)
    log = tmp_path / "log"
    program = TOGETHER.format(log=str(log)) + CHILD.format(id=ID, root=str(root))
    if split:
        program = program.replace("batch_size=4", "batch_size=4, split_trajs=True")
    program += "print(data.storage.published.manifest.made, data.data_path.stat().st_ino)"
    children = [
        subprocess.Popen(
            [*python(), "-c", program],
            env={**os.environ, **serving.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in children] == ["ready\n"] * 2
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in children]
    assert [process.returncode for process in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert log.read_text().split() == ["_convert", "_split"][: 1 + split]
    bodies = [r for r in serving.hub.requests if r.method == "GET" and "x_trace" in r.path]
    assert len(bodies) == len(small)


def rows_offline(serving: Any, root: Path) -> int:
    asked = serving.requests
    process = child(serving, root, HF_HUB_OFFLINE="1")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert serving.requests == asked
    return int(output.split()[0])


@pytest.mark.parametrize("other_root", [False, True])
def test_offline_client_uses_its_cache_and_the_remembered_listing(
    serve, small, root, other_root, construct
):
    """D7: the cache is complete, wherever the rows go."""
    serving = serve(*small)
    construct(root)
    shutil.rmtree(root)
    assert rows_offline(serving, root.with_name("elsewhere") if other_root else root) == 17


def test_offline_client_uses_the_last_commit_that_is_complete(
    serve, small, root, tmp_path, construct, write_file, served
):
    """A download that fails does not make the client forget what it has."""
    serving = serve(*small)
    construct(root)
    new = write_file(tmp_path / "new.h5", 8)
    serving.hub.commit(REPO, served(tmp_path, new))
    wrong = bytes(reversed(new.read_bytes()))
    serving.hub.faults.append(Fault(path="*seed0*", method="GET", body=wrong))
    with pytest.raises(DownloadError):
        construct(root, download="force")
    shutil.rmtree(root)
    assert rows_offline(serving, root) == 17
    serving.hub.faults.clear()
    assert len(construct(root, download="force")) == 14
    shutil.rmtree(root)
    assert rows_offline(serving, root) == 14


def test_damaged_cached_listing_is_ignored(serve, small, root, construct):
    serving = serve(*small)
    construct(root)
    shutil.rmtree(root)
    (memory,) = serving.cache.rglob("replaykit/*.json")
    memory.write_text(memory.read_text()[:-20])
    process = child(serving, root, HF_HUB_OFFLINE="1")
    _, errors = process.communicate(timeout=120)
    assert "offline mode forbids every request" in errors


def test_offline_client_without_a_cache_names_missing_files(serve, small, root):
    serving = serve(*small)
    process = child(serving, root, HF_HUB_OFFLINE="1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "FileNotFoundError" in errors
    assert "HF_HUB_OFFLINE" in errors
    assert serving.requests == 0
