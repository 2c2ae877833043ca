"""The memory that a conversion or another call takes, and the files that it has made."""

from __future__ import annotations

import json
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prepared import python

__all__ = ["content", "files_of", "growth", "in_memory", "needs_proc"]

_PEAK = """
import sys
from pathlib import Path
import h5py, huggingface_hub, tqdm, filelock, torch, tensordict
from replaykit.datasets import families
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.sources import Sources
def peak():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM"))
small, large, work = map(Path, sys.argv[1:4])
options = ConvertOptions(block_bytes=int(sys.argv[5]))
def work_on(path):
    if sys.argv[4] == "split":
        ensure_split(path, work / f"{path.stem}_split", options=options)
        return
    sources = Sources.local([path])
    layout = getattr(families, sys.argv[4])
    ensure_dataset(work / path.stem, get_sources=lambda: sources, layout=layout, options=options)
work_on(small)
before = peak()
work_on(large)
print(peak() - before)
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def growth(small: Path, large: Path, work: Path, layout: str, block_bytes: int) -> int:
    """Bytes by which the most memory that was in use grows from one conversion to the other.

    Each becomes a folder of ``work`` that has the name of its file; ``layout`` is the name of one
    in `replaykit.datasets.families`, or "split" for data sets that are split.
    """
    arguments = [*map(str, (small, large, work)), layout, str(block_bytes)]
    command = [*python(), "-W", "ignore", "-c", _PEAK, *arguments]
    return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def content(root: Path, *, in_blocks: bool = False) -> dict[str, object]:
    """All that a data set is, but for when and by what it was made.

    ``in_blocks``: the last digits of statistics do not count, which depend on the size of blocks.
    """
    found = files_of(root)
    manifest = json.loads(found.pop("manifest.json"))
    left_out = {"made", "crc32", *(("arrays", "options") if in_blocks else ())}
    return {**found, "manifest": {k: v for k, v in manifest.items() if k not in left_out}}


def in_memory(work: Callable[[], object]) -> int:
    """Returns by how many bytes the memory of the process grew while it worked, at most."""
    peak, stop = [0], threading.Event()

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def watch() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], rss())

    before, watcher = rss(), threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        stop.set()
        watcher.join()
    return max(peak[0], rss()) - before
