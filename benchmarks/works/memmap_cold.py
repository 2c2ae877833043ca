"""Uniform samples out of mapped files of which no page is in the page cache.

Before every call the pages are taken out of the process and out of the cache, outside the timer;
mincore says whether they are gone, and the count of blocks read whether the call went to the disk.
What a hypervisor or the device keeps cannot be dropped from here.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contender import Subject, Unavailable
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Replaykit
from benchmarks.limits import disk_limit
from benchmarks.pages import drop, forget_advice, read_singly, resident_share, settle
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions, row_bytes
from benchmarks.setting import BATCH, Setting
from benchmarks.stored import tensors_of_storage
from benchmarks.works.memmap_warm import mapped_in
from benchmarks.works.transitions import Sampling

__all__ = ["Cold", "OneByOne", "Unadvised", "asked", "run", "subjects"]

TARGETS = (Target("without page advice", 1 / 3),)
ROUNDS = 100
"""At most: a call takes tens of milliseconds."""

KEPT = 0.01
"""Share of the pages that may stay: the kernel keeps some that are on their way elsewhere."""


def _title(setting: Setting) -> str:
    return f"mapped files, cold, {setting.rows:,} rows"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(setting): TARGETS}


class Cold(Sampling):
    """Pages are dropped before every call."""

    def __init__(self, folder: Path, title: str, leaves: Leaves) -> None:
        super().__init__(mapped_in(folder), title, leaves)

    def make(self) -> None:
        super().make()
        holder: Any = self.holder
        self.tensors = tensors_of_storage(holder.buffer.storage)
        self.files = holder.files()

    def check(self) -> None:
        super().check()
        settle(self.files)
        self._drop()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        self.timed()(None)
        if resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before:
            raise Unavailable("dropped pages come back without a read from disk")

    def _drop(self) -> None:
        drop(self.tensors, self.files)
        share = resident_share(self.tensors)
        if share > KEPT:
            raise Unavailable(f"{share:.1%} of the pages stay in the cache when dropped")

    def inputs(self, calls: int) -> Iterable[Any]:
        for _ in range(calls):
            self._drop()
            yield None


class Unadvised(Cold):
    """The same reads, the kernel left to its own guesses."""

    def make(self) -> None:
        super().make()
        holder: Any = self.holder
        columns = holder.buffer.storage._columns
        if not hasattr(columns, "advise"):
            raise Unavailable("this replaykit gives no page advice that could be left out")
        columns.advise = False
        forget_advice(self.tensors)


class OneByOne(Unadvised):
    """The same reads, each page read when it is touched and nothing around it."""

    def make(self) -> None:
        super().make()
        read_singly(self.tensors)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    folder = setting.scratch / "cold"
    return {
        _title(setting): Subject(
            lambda: Cold(folder, Replaykit.name, make_transitions(setting.rows)), calls=1
        )
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_transitions(setting.rows)
    folder = Path(tempfile.mkdtemp(prefix="replaykit-cold-", dir=setting.scratch))
    try:
        found, absent = ready(
            Cold(folder / "advised", Replaykit.name, leaves),
            [
                Unadvised(folder / "unadvised", "without page advice", leaves),
                OneByOne(folder / "singly", "page by page", leaves),
            ],
        )
        times = take_turns(found, rounds=min(setting.rounds, ROUNDS), calls=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limit = setting.limit(partial(disk_limit, rows=BATCH, row_bytes=row_bytes(leaves)))
    return lines_of_turns(_title(setting), times, absent, TARGETS, limit=limit)
