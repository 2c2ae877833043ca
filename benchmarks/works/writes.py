"""Adding one row, extending by 8 and by 64, to full buffers of small transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Cpprb, Holder, RawTorch, Replaykit, TorchRL, blocks
from benchmarks.limits import copy_limit
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions, row_bytes, take_rows
from benchmarks.setting import Setting

__all__ = ["Writing", "asked", "run", "subjects"]

TARGETS = (Target("cpprb", 1.5), Target("TorchRL", 1 / 5))
COUNTS: dict[int, tuple[Target, ...]] = {1: TARGETS, 8: TARGETS, 64: ()}
"""Rows in a call, and what is asked."""

FRESH = 64


def _title(count: int) -> str:
    return "add 1" if count == 1 else f"extend {count}"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(count): targets for count, targets in COUNTS.items()}


class Writing(Contender):
    """A full buffer that takes rows which it does not hold yet."""

    def __init__(
        self, kind: Callable[[Leaves], Holder], title: str, leaves: Leaves, count: int = 1
    ) -> None:
        self.name = title
        self.kind = kind
        self.leaves = leaves
        self.fresh = take_rows(leaves, 0, FRESH)
        # The reward of a row is its number: none of the rows held is below zero.
        self.fresh["next", "reward"] = -1 - torch.arange(FRESH, dtype=torch.float32).unsqueeze(-1)
        self.count = count

    def make(self) -> None:
        self.holder = self.kind(self.leaves)
        self.blocks = blocks(self.holder, self.fresh, self.count)

    def resize(self, count: int) -> None:
        """Rows in a call from here on."""
        self.count = count
        self.blocks = blocks(self.holder, self.fresh, count)

    def check(self) -> None:
        """What is written can be read, and takes the place of as many rows."""
        self.holder.check_label()
        everything = torch.arange(self.holder.rows)
        for count in COUNTS:
            first = blocks(self.holder, self.fresh, count)(1)[0]
            before = self.holder.read(everything)["next", "reward"].flatten()
            self.holder.writer(count)(first)
            rewards = self.holder.read(everything)["next", "reward"].flatten()
            changed = int((rewards != before).sum())
            expect(changed <= count, f"writing {count} rows changed {changed}")
            written = self.fresh["next", "reward"][:count].flatten()
            slots = torch.stack([(rewards == reward).nonzero()[-1, 0] for reward in written])
            stored = self.holder.read(slots)
            for key, column in self.fresh.items():
                expect(stored[key].equal(column[:count]), f"{key} is not what was written")

    def inputs(self, calls: int) -> Iterable[Any]:
        return self.blocks(calls)

    def timed(self) -> Callable[[Any], Any]:
        return self.holder.writer(self.count)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""

    def contender(count: int) -> Writing:
        return Writing(Replaykit, Replaykit.name, make_transitions(setting.rows), count)

    return {_title(count): Subject(partial(contender, count)) for count in COUNTS}


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_transitions(setting.rows)
    found, absent = ready(
        Writing(Replaykit, Replaykit.name, leaves),
        [
            Writing(RawTorch, "copy per leaf", leaves),
            Writing(TorchRL, TorchRL.name, leaves),
            Writing(Cpprb, Cpprb.name, leaves),
        ],
    )
    lines = []
    size = row_bytes(leaves)
    for count, targets in COUNTS.items():
        for contender in found.values():
            assert isinstance(contender, Writing)
            contender.resize(count)
        times = take_turns(found, rounds=setting.rounds)
        limit = setting.limit(partial(copy_limit, rows=count, row_bytes=size))
        lines += lines_of_turns(_title(count), times, absent, targets, limit=limit)
    return lines
