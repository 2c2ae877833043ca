"""Uniform samples of 256 small transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Cpprb, Holder, RawTorch, Replaykit, TorchRL
from benchmarks.laws import expect_frequencies
from benchmarks.limits import gather_limit
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions, row_bytes
from benchmarks.setting import BATCH, Setting

__all__ = ["Sampling", "asked", "run", "subjects"]

TARGETS = (Target("index_select", 0.5), Target("TorchRL", 1 / 5), Target("cpprb", 1 / 3))


def _title(setting: Setting) -> str:
    return f"uniform sample, {setting.rows:,} rows"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(setting): TARGETS}


class Sampling(Contender):
    """A buffer that returns random rows of those given."""

    def __init__(self, kind: Callable[[Leaves], Holder], title: str, leaves: Leaves) -> None:
        self.name = title
        self.kind = kind
        self.leaves = leaves

    def make(self) -> None:
        self.holder = self.kind(self.leaves)

    def check(self) -> None:
        """Rows are those that the index names, all of them, and every part of the buffer is drawn
        as often as the others."""
        self.holder.check_label()
        sample = self.holder.sampler()
        parts = min(64, self.holder.rows)
        counts = torch.zeros(parts, dtype=torch.int64)
        for turn in range(200 if row_bytes(self.leaves) < 1000 else 25):
            index, batch = self.holder.tell(sample(None))
            expect(len(index) == BATCH, f"a batch of {len(index)}")
            counts += (index * parts // self.holder.rows).bincount(minlength=parts)
            if turn < 20:
                for key, column in self.leaves.items():
                    expect(batch[key].equal(column[index]), f"{key} is not what was written")
        sizes = (torch.arange(self.holder.rows) * parts // self.holder.rows).bincount()
        expect_frequencies(counts, sizes)

    def timed(self) -> Callable[[Any], Any]:
        return self.holder.sampler()


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    return {
        _title(setting): Subject(
            lambda: Sampling(Replaykit, Replaykit.name, make_transitions(setting.rows))
        )
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_transitions(setting.rows)
    kinds = (RawTorch, TorchRL, Cpprb)
    found, absent = ready(
        Sampling(Replaykit, Replaykit.name, leaves),
        [Sampling(kind, kind.name, leaves) for kind in kinds],
    )
    times = take_turns(found, rounds=setting.rounds)
    size = row_bytes(leaves)
    limit = setting.limit(
        lambda at: gather_limit(at, BATCH, size, setting.threads, setting.rows * size)
    )
    return lines_of_turns(_title(setting), times, absent, TARGETS, limit=limit)
