"""Uniform samples out of mapped files that lie in the page cache, and out of memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contender import Subject, Unavailable
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Replaykit
from benchmarks.limits import gather_limit
from benchmarks.pages import resident_share, touch
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions, row_bytes
from benchmarks.setting import BATCH, Setting
from benchmarks.stored import tensors_of_storage
from benchmarks.works.transitions import Sampling
from replaykit import LazyMemmapStorage, ReplayBuffer

__all__ = ["Mapped", "asked", "mapped_in", "run", "subjects"]

TARGETS = (Target("the same in memory", 1.3),)


def _title(setting: Setting) -> str:
    return f"mapped files, warm, {setting.rows:,} rows"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(setting): TARGETS}


class Mapped(Replaykit):
    """replaykit's ReplayBuffer over a LazyMemmapStorage in a folder of its own."""

    storage = LazyMemmapStorage

    def __init__(self, leaves: Leaves, folder: Path) -> None:
        self.folder = folder
        super().__init__(leaves)

    def new_buffer(self) -> Any:
        storage = LazyMemmapStorage(self.rows, scratch_dir=self.folder)
        return ReplayBuffer(storage=storage, batch_size=BATCH)

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


def mapped_in(folder: Path) -> Callable[[Leaves], Mapped]:
    """Returns what makes such a buffer there."""
    return lambda leaves: Mapped(leaves, folder)


class Warm(Sampling):
    """All pages lie in the cache before the first call."""

    def check(self) -> None:
        super().check()
        tensors = tensors_of_storage(self.holder.buffer.storage)  # type: ignore[attr-defined]
        touch(tensors)
        share = resident_share(tensors)
        if share < 1:
            raise Unavailable(f"only {share:.1%} of the pages stay in the cache")


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    kind = mapped_in(setting.scratch / "warm")
    return {
        _title(setting): Subject(lambda: Warm(kind, Replaykit.name, make_transitions(setting.rows)))
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_transitions(setting.rows)
    folder = Path(tempfile.mkdtemp(prefix="replaykit-warm-", dir=setting.scratch))
    try:
        found, absent = ready(
            Warm(mapped_in(folder), Replaykit.name, leaves),
            [Sampling(Replaykit, "the same in memory", leaves)],
        )
        times = take_turns(found, rounds=setting.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = row_bytes(leaves)
    limit = setting.limit(
        lambda at: gather_limit(at, BATCH, size, setting.threads, setting.rows * size)
    )
    return lines_of_turns(_title(setting), times, absent, TARGETS, limit=limit)
