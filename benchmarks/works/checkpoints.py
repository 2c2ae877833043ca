"""Saving a prioritized buffer of 2 GB, saving it again after 1 % of it has changed, and loading it.

Of one that is shared, of half as many bytes, another process has changed what is saved again; the
first one has sampled since, and taken note of that.

Beside them stands the same number of bytes as one file: written from memory and synced, and read.
Reads are of files whose pages were taken out of the page cache, into fresh memory, as after a
restart.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contender import Unavailable, expect
from benchmarks.harness import Times
from benchmarks.pages import drop, settle
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import Leaves, as_tensordict, make_images, make_transitions, row_bytes
from benchmarks.setting import Setting
from replaykit import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer

__all__ = ["asked", "run"]

NBYTES = 2_000_000_000
"""What is asked, is asked of so many bytes; of fewer rows than a million, of as many fewer."""

PLAIN, FULL, BYTES = "one file", "full save", "bytes of the full one"
AS_ONE_FILE = (Target(PLAIN, 1.3),)
AGAIN = (Target(FULL, 0.1),)
BYTES_AT_MOST = 0.03

SHARED = "save shared transitions again, 1 % new"
SHARED_ROUNDS, SHARED_PART = 2, 2

MOST_ROUNDS = 4
PRIORITIES = 1000
_BLOCK = 8 << 20

KINDS: Mapping[str, Callable[[int], Leaves]] = {
    "transitions": make_transitions,
    "images": make_images,
}


def _titles(kind: str) -> tuple[str, str, str]:
    return f"save {kind}", f"save {kind} again, 1 % new", f"load {kind}, cold"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    found: dict[str, tuple[Target, ...]] = {}
    for kind in KINDS:
        save, again, load = _titles(kind)
        found |= {
            save: AS_ONE_FILE,
            again: (*AGAIN, Target(BYTES, BYTES_AT_MOST)),
            load: AS_ONE_FILE,
        }
    return found | {SHARED: (*AGAIN, Target(BYTES, BYTES_AT_MOST))}


def run(setting: Setting) -> list[Line]:
    """Measures rows in one record, and rows of columns."""
    wanted = NBYTES * setting.rows // 1_000_000
    free = shutil.disk_usage(setting.scratch).free
    if free < 3 * wanted:
        raise Unavailable(f"expected {3 * wanted:,} bytes free in scratch, got {free:,}")
    lines = [line for kind in KINDS for line in _measure(kind, setting, wanted)]
    return [*lines, *_shared(setting, wanted // SHARED_PART)]


def _measure(kind: str, setting: Setting, wanted: int) -> list[Line]:
    size = row_bytes(KINDS[kind](1))
    rows = max(200, wanted // size)
    buffer = _filled(kind, rows)
    folder, file = setting.scratch / f"saved-{kind}", setting.scratch / "one-file"
    spent: dict[str, list[float]] = {}
    full = rows * (size + 4)
    shares: list[float] = []
    # The first round is not counted.
    for number in range(min(MOST_ROUNDS, setting.rounds) + 1):
        shutil.rmtree(folder, ignore_errors=True)
        figures: dict[str, float] = {}
        # Who comes first changes: memory that the system has to find is found by the first one.
        held = np.resize(np.arange(256, dtype=np.uint8), full)
        saving = [("save", partial(buffer.dumps, folder)), ("write", partial(_write, file, held))]
        for name, work in _turn(saving, number):
            os.sync()
            _find_memory(full)
            figures[name] = _timed(work)
        del held, saving
        full = _nbytes(folder)
        before = {entry.name for entry in os.scandir(folder)} - {"manifest.json"}
        _change(buffer, kind, rows, number)
        os.sync()
        figures["again"] = _timed(lambda: buffer.dumps(folder))
        shares.append(_nbytes(folder, without=before) / full)
        files = [Path(entry.path) for entry in os.scandir(folder) if entry.name[0] != "."]
        other = _empty(rows)
        loading = [("load", partial(other.loads, folder)), ("read", partial(_read, file))]
        for name, work in _turn(loading, number):
            for paths in ([file], files):
                settle(paths)
                drop([], paths)
            _find_memory(2 * full)
            figures[name] = _timed(work)
        _check(buffer, other)
        del other
        file.unlink()
        if number:
            for name, us in figures.items():
                spent.setdefault(name, []).append(us)
    shutil.rmtree(folder)
    times = {name: Times(found, found) for name, found in spent.items()}
    save, again, load = _titles(kind)
    share = sorted(shares)[len(shares) // 2]
    return [
        *lines_of_turns(save, {SUBJECT: times["save"], PLAIN: times["write"]}, {}, AS_ONE_FILE),
        *lines_of_turns(again, {SUBJECT: times["again"], FULL: times["save"]}, {}, AGAIN),
        Line(again, BYTES, share, "of 1", at_most=BYTES_AT_MOST),
        *lines_of_turns(load, {SUBJECT: times["load"], PLAIN: times["read"]}, {}, AS_ONE_FILE),
    ]


def _shared(setting: Setting, wanted: int) -> list[Line]:
    kind, folder = "transitions", setting.scratch / "saved-shared"
    if "fork" not in multiprocessing.get_all_start_methods():
        raise Unavailable("the other process is forked, which this system does not do")
    rows = max(200, wanted // row_bytes(KINDS[kind](1)))
    buffer = _filled(kind, rows, shared=True)
    saves: list[float] = []
    again: list[float] = []
    shares: list[float] = []
    context = multiprocessing.get_context("fork")
    # The first round is not counted.
    for number in range(min(SHARED_ROUNDS, setting.rounds) + 1):
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        _find_memory(wanted)
        saves.append(_timed(lambda: buffer.dumps(folder)))
        full = _nbytes(folder)
        before = {entry.name for entry in os.scandir(folder)} - {"manifest.json"}
        other = context.Process(target=_change, args=(buffer, kind, rows, number))
        other.start()
        other.join()
        expect(other.exitcode == 0, "a process failed")
        buffer.sample()
        os.sync()
        again.append(_timed(lambda: buffer.dumps(folder)))
        shares.append(_nbytes(folder, without=before) / full)
    loaded = _empty(rows)
    loaded.loads(folder)
    _check(buffer, loaded)
    shutil.rmtree(folder)
    times = {SUBJECT: Times(again[1:], again[1:]), FULL: Times(saves[1:], saves[1:])}
    return [
        *lines_of_turns(SHARED, times, {}, AGAIN),
        Line(SHARED, BYTES, sorted(shares)[len(shares) // 2], "of 1", at_most=BYTES_AT_MOST),
    ]


def _turn(works: list[tuple[str, Any]], number: int) -> list[tuple[str, Any]]:
    return works[::-1] if number % 2 else works


def _empty(rows: int, *, shared: bool = False) -> ReplayBuffer:
    storage = LazyTensorStorage(rows)
    return PrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=storage, batch_size=256, shared=shared
    )


def _filled(kind: str, rows: int, *, shared: bool = False) -> ReplayBuffer:
    buffer = _empty(rows, shared=shared)
    # Not all at once: that would take three times the memory.
    step = max(1, rows // 20)
    data = as_tensordict(KINDS[kind](step))
    for start in range(0, rows, step):
        buffer.extend(data[: min(step, rows - start)])
    return buffer


def _change(buffer: ReplayBuffer, kind: str, rows: int, number: int) -> None:
    data = as_tensordict(KINDS[kind](max(1, rows // 100)))
    for value in data.values(True, True):
        value.view(torch.uint8).add_(number + 1) if value.dtype != torch.bool else value.fill_(True)
    buffer.extend(data)
    draw = torch.Generator().manual_seed(number)
    index = torch.randint(rows, (min(PRIORITIES, rows),), generator=draw)
    buffer.update_priority(index, torch.rand(len(index), generator=draw) + 0.1)


def _check(buffer: ReplayBuffer, other: ReplayBuffer) -> None:
    """What was loaded is what was saved, row for row and priority for priority."""
    rows = len(buffer)
    for start in range(0, rows, 100_000):
        at = torch.arange(start, min(start + 100_000, rows))
        ours, theirs = buffer.storage.read(at), other.storage.read(at)
        for key, value in ours.items(True, True):
            expect(torch.equal(value, theirs.get(key)), f"{key} is not what was saved")
    states: list[Any] = [found.sampler.state_dict()["_priorities"] for found in (buffer, other)]
    expect(torch.equal(*states), "priorities are not what was saved")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def _nbytes(folder: Path, without: set[str] | None = None) -> int:
    skipped = without or set()
    return sum(e.stat().st_size for e in os.scandir(folder) if e.name not in skipped)


def _find_memory(nbytes: int) -> None:
    """Has the system find the memory of a page cache first: a virtual machine has to be given it
    anew a few seconds after it was free, and that takes longer than all the rest."""
    np.ones(nbytes + nbytes // 4, np.uint8)


def _write(file: Path, held: np.ndarray[Any, Any]) -> None:
    with open(file, "wb", buffering=0) as opened:
        for start in range(0, len(held), _BLOCK):
            opened.write(held[start : start + _BLOCK].data)
        os.fsync(opened.fileno())


def _read(file: Path) -> None:
    array = np.empty(file.stat().st_size, np.uint8)
    left = array.data
    with open(file, "rb", buffering=0) as opened:
        while len(left):
            left = left[opened.readinto(left[:_BLOCK]) :]
