"""What it costs that a buffer is shared by processes, or comes back after a kill: each beside the
same buffer without that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Replaykit
from benchmarks.laws import expect_frequencies
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions
from benchmarks.setting import BATCH, Setting
from benchmarks.works.transitions import Sampling
from benchmarks.works.writes import Writing
from replaykit import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer

__all__ = ["asked", "run", "subjects"]

ROWS = 8
WITHOUT = "without"
UPDATES = (Target(WITHOUT, 1.5),)


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return the target of updates; the other works have none."""
    titles = _titles(setting)
    return {**dict.fromkeys(titles, ()), titles[0]: UPDATES}


def _titles(setting: Setting) -> list[str]:
    few = min(setting.rows, 100_000)
    return [
        f"update of {BATCH} priorities, shared",
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


class Updating(Contender):
    """A buffer in which 256 random rows get new priorities."""

    def __init__(self, kind: Callable[[Leaves], Plain], title: str, leaves: Leaves) -> None:
        self.name = title
        self.kind = kind
        self.leaves = leaves

    def make(self) -> None:
        self.holder = self.kind(self.leaves)

    def check(self) -> None:
        """Rows are drawn as often as their new priorities ask for."""
        self.holder.check_label()
        buffer, rows = self.holder.buffer, self.holder.rows
        parts = min(64, rows)
        priorities = torch.rand(rows) * (torch.arange(rows) % parts + 1)
        for index in torch.arange(rows).split(BATCH):
            buffer.update_priority(index, priorities[index])
        counts = torch.zeros(parts, dtype=torch.int64)
        for _ in range(100):
            counts += (buffer.sample()["index"] % parts).bincount(minlength=parts)
        weights = (priorities.double() + buffer.sampler.eps) ** buffer.sampler.alpha
        sums = torch.zeros(parts, dtype=torch.float64)
        expect_frequencies(counts, sums.index_add(0, torch.arange(rows) % parts, weights))

    def inputs(self, calls: int) -> Iterable[Any]:
        return [
            (torch.randint(self.holder.rows, (BATCH,)), torch.rand(BATCH)) for _ in range(calls)
        ]

    def timed(self) -> Callable[[Any], Any]:
        update = self.holder.buffer.update_priority
        return lambda given: update(*given)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    update, shared, few, many, recover, both = _titles(setting)

    def writing(**how: Any) -> Subject:
        kind = partial(Plain, **how)
        return Subject(lambda: Writing(kind, SUBJECT, make_transitions(setting.rows), ROWS))

    def sampling(rows: int) -> Subject:
        kind = partial(Plain, shared=True)
        return Subject(lambda: Sampling(kind, SUBJECT, make_transitions(rows)))

    folder = setting.scratch / "recovered"
    prioritized = partial(Plain, shared=True, priorities=True)
    return {
        update: Subject(lambda: Updating(prioritized, SUBJECT, make_transitions(setting.rows))),
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
        lines = []
        for work in (Updating, Writing):
            lines += _turns(
                setting, next(titles), work, leaves,
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
    work: type[Writing] | type[Sampling] | type[Updating],
    leaves: Leaves,
    kind: Callable[[Leaves], Plain],
    other: Callable[[Leaves], Plain],
) -> list[Line]:
    found, absent = ready(work(kind, SUBJECT, leaves), [work(other, WITHOUT, leaves)])
    for contender in found.values():
        if isinstance(contender, Writing):
            contender.resize(ROWS)
    targets = asked(setting)[title]
    return lines_of_turns(title, take_turns(found, rounds=setting.rounds), absent, targets)
