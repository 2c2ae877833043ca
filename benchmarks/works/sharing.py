"""A buffer that processes share: ``extend`` of 8 rows beside one that is not shared, and four
processes that extend with one that samples beside two processes with a buffer each."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contender import Subject, Unavailable, expect
from benchmarks.harness import Times, ready, take_turns
from benchmarks.holders import Replaykit
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import as_tensordict, make_transitions
from benchmarks.setting import BATCH, Setting
from benchmarks.works.writes import Writing
from replaykit import LazyTensorStorage, ReplayBuffer

__all__ = ["asked", "run", "subjects"]

ROWS = 8
EXTENDERS = 4
EXTEND, TOGETHER = "extend 8, shared", f"{EXTENDERS} extend 8, 1 samples: us a row"
ALONE, APART = "not shared", "1 extends, 1 samples, own buffers"
TARGETS = (Target(ALONE, 2.0),)
ROWS_TARGETS = (Target(APART, 1 / 0.7),)
MOST_SECONDS, SECONDS_A_ROUND = 2.0, 0.05
MOST_ROUNDS = 10
_BLOCK = 10_000


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {EXTEND: TARGETS, TOGETHER: ROWS_TARGETS}


class Shared(Replaykit):
    """replaykit's ReplayBuffer with ``shared=True``."""

    def new_buffer(self) -> Any:
        return ReplayBuffer(storage=self.storage(self.rows), batch_size=BATCH, shared=True)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    return {EXTEND: Subject(lambda: Writing(Shared, SUBJECT, make_transitions(setting.rows), ROWS))}


def run(setting: Setting) -> list[Line]:
    """Measures."""
    return [*_extend(setting), *_together(setting)]


def _extend(setting: Setting) -> list[Line]:
    leaves = make_transitions(setting.rows)
    found, absent = ready(Writing(Shared, SUBJECT, leaves), [Writing(Replaykit, ALONE, leaves)])
    for contender in found.values():
        assert isinstance(contender, Writing)
        contender.resize(ROWS)
    times = take_turns(found, rounds=setting.rounds)
    return lines_of_turns(EXTEND, times, absent, TARGETS)


def _together(setting: Setting) -> list[Line]:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise Unavailable("the processes are forked, which this system does not do")
    spent: dict[str, list[float]] = {SUBJECT: [], APART: []}
    parts: dict[str, list[tuple[float, float]]] = {SUBJECT: [], APART: []}
    seconds = min(MOST_SECONDS, SECONDS_A_ROUND * setting.rounds)
    for number in range(min(MOST_ROUNDS, setting.rounds)):
        for name in [SUBJECT, APART][:: -1 if number % 2 else 1]:
            buffer = _filled(setting.rows, shared=True) if name == SUBJECT else None
            written, read = _move(buffer, setting.rows, EXTENDERS if buffer else 1, seconds)
            if buffer is not None:
                expect(buffer.write_count >= setting.rows + written, "rows were lost")
                _check(buffer.sample(setting.rows // 10), setting.rows)
            spent[name].append(seconds * 1e6 / (written + read))
            parts[name].append((seconds * 1e6 / max(written, 1), seconds * 1e6 / max(read, 1)))
    times = {name: Times(found, found) for name, found in spent.items()}
    lines = lines_of_turns(TOGETHER, times, {}, ROWS_TARGETS)
    for at, what in enumerate(("written", "sampled")):
        each = {name: [pair[at] for pair in found] for name, found in parts.items()}
        title = f"the same, us a row {what}"
        lines += lines_of_turns(title, {n: Times(us, us) for n, us in each.items()}, {})
    return lines


def _filled(rows: int, *, shared: bool) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=BATCH, shared=shared)
    data = as_tensordict(make_transitions(min(rows, _BLOCK)))
    for start in range(0, rows, len(data)):
        buffer.extend(data[: rows - start])
    return buffer


def _move(
    buffer: ReplayBuffer | None, rows: int, extenders: int, seconds: float
) -> tuple[int, int]:
    """Rows that processes write and sample in a while: of one buffer, or each of one of its own."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(extenders + 1)
    moved = context.Array("q", extenders + 1)
    works: list[Callable[..., None]] = [*[_extender] * extenders, _sampler]
    processes = [
        context.Process(target=work, args=(buffer, rows, start, moved, place, seconds))
        for place, work in enumerate(works)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        expect(process.exitcode == 0, "a process failed")
    return sum(moved[:extenders]), moved[extenders]


def _extender(
    given: ReplayBuffer | None, rows: int, start: Any, moved: Any, place: int, seconds: float
) -> None:
    torch.set_num_threads(1)
    buffer = _filled(rows, shared=False) if given is None else given
    data = as_tensordict(make_transitions(ROWS))
    moved[place] = ROWS * _repeat(lambda: buffer.extend(data), start, seconds)


def _sampler(
    given: ReplayBuffer | None, rows: int, start: Any, moved: Any, place: int, seconds: float
) -> None:
    torch.set_num_threads(1)
    buffer = _filled(rows, shared=False) if given is None else given
    moved[place] = BATCH * _repeat(buffer.sample, start, seconds)
    _check(buffer.sample(), rows)


def _repeat(work: Callable[[], object], start: Any, seconds: float) -> int:
    """How often it can be done."""
    for _ in range(50):
        work()
    start.wait()
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        work()
        count += 1
    return count


def _check(batch: Any, rows: int) -> None:
    """The rows are those that there were, each whole."""
    known, again = make_transitions(min(rows, _BLOCK)), make_transitions(ROWS)
    number = batch["next", "reward"].flatten().long()
    for key, column in known.items():
        if key == ("next", "reward"):
            continue
        same = (batch[key] == column[number]).flatten(1).all(-1)
        # Rows of the extenders begin anew at number 0.
        other = again[key][number.clamp(max=ROWS - 1)]
        same |= (batch[key] == other).flatten(1).all(-1) & (number < ROWS)
        expect(bool(same.all()), f"{key} is not what was written")
