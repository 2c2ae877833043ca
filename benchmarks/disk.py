"""What the disk below a folder can do: reads in sequence, and 4 KiB at random at several depths.

Past the page cache (O_DIRECT); below it a hypervisor or the device may still keep what it likes.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import threading
import time
from pathlib import Path

__all__ = ["measure_disk"]

PAGE = 4096
BLOCK = 1 << 20
DEPTHS = (1, 4, 16, 64)
READS = 4000


def measure_disk(folder: Path, nbytes: int) -> tuple[dict[str, float] | None, str]:
    """Returns figures and a remark on them, or None and why there are none."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return None, "not measured: this system cannot read past the page cache"
    handle, name = tempfile.mkstemp(prefix="replaykit-disk-", dir=folder)
    try:
        written = _write(handle, nbytes)
        os.close(handle)
        try:
            direct = os.open(name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return None, f"not measured: {error.strerror} for O_DIRECT in the scratch folder"
        try:
            found = {"write_gbs": written, "sequential_gbs": _sequential(direct, nbytes)}
            for depth in DEPTHS:
                found[f"reads_per_s_{depth}"] = _random(direct, nbytes, depth)
        finally:
            os.close(direct)
        found["reads_per_s_asked_ahead"] = _asked_ahead(name, nbytes)
        remark = f"a file of {nbytes >> 20} MiB, read with O_DIRECT, 4 KiB at random"
        return found, f"{remark}; left alone, the kernel reads {_read_ahead(folder)} ahead"
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return None, "not measured: the disk is full"
    finally:
        os.unlink(name)


def _read_ahead(folder: Path) -> str:
    """How much the kernel reads around a page that is touched, at the most."""
    device = folder.stat().st_dev
    file = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        return f"{int(file.read_text(encoding='ascii'))} KiB"
    except (OSError, ValueError):
        return "an unknown amount"


def _write(handle: int, nbytes: int) -> float:
    block = random.Random(0).randbytes(BLOCK)
    start = time.perf_counter()
    for _ in range(nbytes // BLOCK):
        os.write(handle, block)
    os.fsync(handle)
    return nbytes / (time.perf_counter() - start) / 1e9


def _sequential(handle: int, nbytes: int) -> float:
    # Memory of a mapping is aligned, as O_DIRECT wants it.
    with mmap.mmap(-1, BLOCK) as memory:
        rates = []
        for _ in range(2):
            start = time.perf_counter()
            for at in range(0, nbytes, BLOCK):
                os.preadv(handle, [memory], at)
            rates.append(nbytes / (time.perf_counter() - start) / 1e9)
    return max(rates)


def _random(handle: int, nbytes: int, depth: int) -> float:
    """Reads a second with that many threads that each wait for one."""
    draw = random.Random(depth)
    each = max(1, READS // max(4, depth) if depth > 1 else READS // 8)
    places = [[draw.randrange(nbytes // PAGE) * PAGE for _ in range(each)] for _ in range(depth)]

    def read(mine: list[int]) -> None:
        with mmap.mmap(-1, PAGE) as memory:
            for at in mine:
                os.preadv(handle, [memory], at)

    threads = [threading.Thread(target=read, args=(mine,)) for mine in places]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return each * depth / (time.perf_counter() - start)


def _asked_ahead(name: str, nbytes: int) -> float:
    """Reads a second through the page cache, all of a batch asked for before the first is read."""
    draw = random.Random(1)
    with open(name, "rb", buffering=0) as file:
        handle = file.fileno()
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        places = draw.sample(range(nbytes // PAGE), min(READS, nbytes // PAGE // 4))
        start = time.perf_counter()
        for begin in range(0, len(places), 256):
            batch = places[begin : begin + 256]
            for page in batch:
                os.posix_fadvise(handle, page * PAGE, PAGE, os.POSIX_FADV_WILLNEED)
            for page in batch:
                os.pread(handle, PAGE, page * PAGE)
        return len(places) / (time.perf_counter() - start)
