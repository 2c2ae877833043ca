"""RoboSet from the Hub to the disk: fetched once, refused by name, replaced whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replaykit.datasets import Policies
from replaykit.errors import CorpusError, DownloadError
from tests.datasets.trials import ROBOSET_ID as ID
from tests.datasets.trials import ROBOSET_REPO as REPO
from tests.datasets.trials import construct, served, write_file
from tests.prepared import python
from tests.support import Fault


@pytest.mark.pitfall("IF9")
def test_second_construction_makes_no_request(serve, small, root):
    serving = serve(*small)
    construct(root)
    asked = serving.requests
    assert len(construct(root)) == len(construct(root, download=False)) == 17
    assert serving.requests == asked


@pytest.mark.pitfall("DS12")
def test_room_for_the_columns_is_looked_at_before_the_download(serve, small, root, monkeypatch):
    serving = serve(*small)
    total = sum(path.stat().st_size for path in small)

    def free(nbytes: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=nbytes))

    free(2 * total - 1)
    said = rf"{total:,} bytes to download, and about {total:,} bytes .* {2 * total - 1:,} bytes are"
    with pytest.raises(OSError, match=said) as caught:
        construct(root)
    assert caught.value.errno == errno.ENOSPC
    assert str(root / ID) in str(caught.value)
    assert serving.hub.bytes_served == 0
    assert not root.exists() or not list(root.rglob("*.memmap"))
    # What is asked for may be less than what the files hold.
    smaller = Policies(casts={"float64": "float32"})
    assert len(construct(root, policies=smaller)) == 17
    shutil.rmtree(root)
    # What is there already asks for nothing; how much the columns take is known then.
    assert len(construct(root)) == 17


@pytest.mark.pitfall("DS4")
@pytest.mark.parametrize("failure", ["server", "file"])
def test_force_keeps_the_old_copy_until_the_new_one_is_complete(
    serve, small, root, tmp_path, failure
):
    serving = serve(*small)
    old = construct(root)
    before, new = old[:].clone(), write_file(tmp_path / "n.h5", 8)
    more = {} if failure == "server" else {f"{ID}/seed9/bad.h5": b"no"}
    serving.hub.commit(REPO, served(new) | more)
    if failure == "server":
        wrong = bytes(reversed(new.read_bytes()))
        serving.hub.faults.append(Fault(path="*x_trace.h5", method="GET", body=wrong))
    with pytest.raises(DownloadError if failure == "server" else CorpusError):
        construct(root, download="force")
    again = construct(root, download=False)
    assert (again[:] == before).all()
    assert (old[:] == before).all()


def test_forced_download_takes_current_hub_files(serve, small, root, tmp_path):
    serving = serve(*small)
    old = construct(root)
    serving.hub.commit(REPO, served(write_file(tmp_path / "new.h5", 8)))
    assert len(construct(root)) == 17  # pinned until it is forced
    new = construct(root, download="force")
    # The commit replaced the first file: 7 rows in place of 10, beside the 7 of the second.
    assert torch.bincount(new["seed"]).tolist() == [7, 7]
    assert len(construct(root, download=False)) == 14
    assert len(old[:]) == 17  # what is open stays as it was


def test_cache_that_may_only_be_read_is_used_all_the_same(serve, small, root, monkeypatch):
    serve(*small)
    construct(root)
    shutil.rmtree(root)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert len(construct(root)) == 17


# -- other processes, and clients without a network ---------------------------------------------


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
def test_offline_client_uses_its_cache_and_the_remembered_listing(serve, small, root, other_root):
    """D7: the cache is complete, wherever the rows go."""
    serving = serve(*small)
    construct(root)
    shutil.rmtree(root)
    assert rows_offline(serving, root.with_name("elsewhere") if other_root else root) == 17


def test_offline_client_uses_the_last_commit_that_is_complete(serve, small, root, tmp_path):
    """A download that fails does not make the client forget what it has."""
    serving = serve(*small)
    construct(root)
    new = write_file(tmp_path / "new.h5", 8)
    serving.hub.commit(REPO, served(new))
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


@pytest.mark.parametrize("is_damaged", [True, False])
def test_offline_client_without_a_cache_or_its_listing_says_so(serve, small, root, is_damaged):
    serving = serve(*small)
    if is_damaged:
        construct(root)
        shutil.rmtree(root)
        (memory,) = serving.cache.rglob("replaykit/*.json")
        memory.write_text(memory.read_text()[:-20])
    asked = serving.requests
    process = child(serving, root, HF_HUB_OFFLINE="1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    for said in ("FileNotFoundError", "offline mode forbids every request", "HF_HUB_OFFLINE"):
        assert said in errors
    assert serving.requests == asked
