"""What it costs that a buffer is shared by processes, or comes back after a kill: each beside the
same buffer without that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contender import Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Replaykit
from benchmarks.report import SUBJECT, Line, lines_of_turns
from benchmarks.rows import Leaves, make_transitions
from benchmarks.setting import BATCH, Setting
from benchmarks.works.transitions import Sampling
from benchmarks.works.writes import Writing
from replaykit import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer

__all__ = ["asked", "run", "subjects"]

ROWS = 8
WITHOUT = "without"


def asked(setting: Setting) -> dict[str, tuple[()]]:
    """Nothing: what these cost is said, and no more."""
    return dict.fromkeys(_titles(setting), ())


def _titles(setting: Setting) -> list[str]:
    few = min(setting.rows, 100_000)
    return [
        f"extend {ROWS}, shared, priorities",
        f"sample of {few:,} rows, shared",
        f"sample of {setting.rows:,} rows, shared",
        f"extend {ROWS}, recover",
        f"extend {ROWS}, recover, priorities",
    ]


class Plain(Replaykit):
    """A buffer in memory or in files, with or without priorities, shared or not."""

    def __init__(
        self, leaves: Leaves, *, folder: Path | None = None, priorities: bool = False, **how: Any
    ) -> None:
        self.folder, self.priorities, self.how = folder, priorities, how
        super().__init__(leaves)

    def new_buffer(self) -> Any:
        sampler = PrioritizedSampler(alpha=0.6, beta=0.4) if self.priorities else None
        if self.folder is None:
            storage: Any = LazyTensorStorage(self.rows)
            return ReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH, **self.how)
        storage = LazyMemmapStorage(self.rows, scratch_dir=self.folder, **self.how)
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)

    def check_label(self) -> None:
        sampler = type(self.buffer.sampler).__name__
        expected = "PrioritizedSampler" if self.priorities else "RandomSampler"
        expect(sampler == expected, f"sampler is a {sampler}")
        kept = self.buffer.storage.recovery is not None
        expect(kept == bool(self.how), f"kept in files: {kept}")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    shared, few, many, recover, both = _titles(setting)

    def writing(**how: Any) -> Subject:
        kind = partial(Plain, **how)
        return Subject(lambda: Writing(kind, SUBJECT, make_transitions(setting.rows), ROWS))

    def sampling(rows: int) -> Subject:
        kind = partial(Plain, shared=True)
        return Subject(lambda: Sampling(kind, SUBJECT, make_transitions(rows)))

    folder = setting.scratch / "recovered"
    return {
        shared: writing(shared=True, priorities=True),
        few: sampling(min(setting.rows, 100_000)),
        many: sampling(setting.rows),
        recover: writing(folder=folder, recover=True),
        both: writing(folder=folder, recover=True, priorities=True),
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves, few = make_transitions(setting.rows), make_transitions(min(setting.rows, 100_000))
    titles = iter(_titles(setting))
    with tempfile.TemporaryDirectory(dir=setting.scratch) as root:
        folders = (Path(root) / str(number) for number in range(4))
        shared = partial(Plain, shared=True)
        lines = _turns(
            setting, next(titles), Writing, leaves,
            partial(shared, priorities=True), partial(Plain, priorities=True),
        )  # fmt: skip
        for rows in (few, leaves):
            lines += _turns(setting, next(titles), Sampling, rows, shared, Plain)
        for priorities in (False, True):
            files = partial(Plain, priorities=priorities)
            lines += _turns(
                setting, next(titles), Writing, leaves,
                partial(files, folder=next(folders), recover=True),
                partial(files, folder=next(folders)),
            )  # fmt: skip
    return lines


def _turns(
    setting: Setting,
    title: str,
    work: type[Writing] | type[Sampling],
    leaves: Leaves,
    kind: Callable[[Leaves], Plain],
    other: Callable[[Leaves], Plain],
) -> list[Line]:
    found, absent = ready(work(kind, SUBJECT, leaves), [work(other, WITHOUT, leaves)])
    for contender in found.values():
        if isinstance(contender, Writing):
            contender.resize(ROWS)
    return lines_of_turns(title, take_turns(found, rounds=setting.rounds), absent)
