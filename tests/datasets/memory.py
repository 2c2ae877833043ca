"""How much memory something takes while it works."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["in_memory"]


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
