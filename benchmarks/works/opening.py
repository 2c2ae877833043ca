"""Opening a checkpoint in place, ``loads(path, mmap=True)``, of rows and of five times as many.

Files are taken out of the page cache before, as after a restart. Kinds are those of which something
grows with the rows that does not follow from counters: priorities, versions, what is left of a
pass, tables of positions and generations, ranks, rows that are stored once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from benchmarks.contender import Unavailable, expect
from benchmarks.pages import drop, settle
from benchmarks.report import Line, Target
from benchmarks.setting import BATCH, Setting
from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
)

__all__ = ["asked", "run"]

AT_MOST_MS = 200.0
TIMES = (1, 5)
LANES, EPISODE = 50, 40
MOST_ROUNDS = 5
_STEP = 50_000
_ROW_BYTES = 80
_MS = 1e3


class Kind(NamedTuple):
    """How a buffer is put together, and whether it is cleared once while it is filled."""

    storage: Mapping[str, Any] = {}
    writer: Callable[[int], Any] = lambda _: RoundRobinWriter()
    sampler: Callable[[], Any] = lambda: None
    cleared: bool = False

    def make(self, rows: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(rows, **self.storage),
            writer=self.writer(rows),
            sampler=self.sampler(),
            batch_size=BATCH,
            generator=torch.Generator().manual_seed(0),
        )


def _lanes(rows: int) -> LaneWriter:
    return LaneWriter(rows // LANES)


KINDS = {
    "priorities": Kind(sampler=lambda: PrioritizedSampler(alpha=0.6, beta=0.4)),
    "versions": Kind(
        sampler=lambda: StalenessAwareSampler(-1, torch.exp2, "version"),
    ),
    "a pass": Kind(sampler=lambda: SliceSamplerWithoutReplacement(slice_len=4)),
    "a cleared ring": Kind(writer=lambda _: RoundRobinWriter(track_generations=True), cleared=True),
    "rings of streams": Kind({"lane_key": "lane"}, _lanes),
    "rings of streams, once": Kind({"lane_key": "lane", "dedup_next": True}, _lanes),
    "the best rows": Kind(writer=lambda _: TensorDictMaxValueWriter()),
}


def _titles(kind: str) -> tuple[str, str]:
    return f"open {kind} in place", f"first batch of {kind}"


def _names(setting: Setting) -> list[str]:
    return [f"{_rows(setting, times):,} rows" for times in TIMES]


def _rows(setting: Setting, times: int) -> int:
    return max(setting.rows * times // LANES, 2 * EPISODE) * LANES


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {
        _titles(kind)[0]: tuple(Target(name, AT_MOST_MS) for name in _names(setting))
        for kind in KINDS
    }


def run(setting: Setting) -> list[Line]:
    """Measures every kind, of rows and of five times as many."""
    wanted = 2 * _ROW_BYTES * _rows(setting, TIMES[-1])
    free = shutil.disk_usage(setting.scratch).free
    if free < wanted:
        raise Unavailable(f"expected {wanted:,} bytes free in scratch, got {free:,}")
    lines: list[Line] = []
    for title, kind in KINDS.items():
        opened: list[Line] = []
        drawn: list[Line] = []
        for name, times in zip(_names(setting), TIMES, strict=True):
            open_ms, draw_ms = _measure(kind, _rows(setting, times), setting)
            opens, draws = _titles(title)
            opened.append(Line(opens, name, open_ms, "ms", at_most=AT_MOST_MS))
            drawn.append(Line(draws, name, draw_ms, "ms"))
        lines += opened + drawn
    return lines


def _measure(kind: Kind, rows: int, setting: Setting) -> tuple[float, float]:
    """Milliseconds to open, and to draw a first batch: medians."""
    folder = setting.scratch / "opened"
    shutil.rmtree(folder, ignore_errors=True)
    _filled(kind, rows).dumps(folder)
    files = [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith("data-")]
    plain = kind.make(rows)
    plain.loads(folder)
    expected = plain.sample()
    opens: list[float] = []
    draws: list[float] = []
    for _ in range(min(MOST_ROUNDS, setting.rounds)):
        buffer = kind.make(rows)
        settle(files)
        drop([], files)
        start = time.perf_counter()
        buffer.loads(folder, mmap=True)
        opens.append((time.perf_counter() - start) * _MS)
        start = time.perf_counter()
        batch = buffer.sample()
        draws.append((time.perf_counter() - start) * _MS)
        expect(bool((batch == expected).all()), "another first batch than after a plain load")
    expect(bool((buffer[-BATCH:] == plain[-BATCH:]).all()), "other rows than after a plain load")
    shutil.rmtree(folder)
    return sorted(opens)[len(opens) // 2], sorted(draws)[len(draws) // 2]


def _filled(kind: Kind, rows: int) -> ReplayBuffer:
    """A buffer whose ring has gone on for a tenth, and of which a batch was drawn."""
    buffer = kind.make(rows)
    if kind.cleared:
        buffer.extend(_made(0, min(rows, _STEP)))
        buffer.empty()
    for start in range(0, rows + rows // 10, _STEP):
        buffer.extend(_made(start, min(_STEP, rows + rows // 10 - start)))
    buffer.sample()
    return buffer


def _made(start: int, count: int) -> TensorDict:
    """Rows of streams that take turns, each of episodes one after the other."""
    number = torch.arange(start, start + count)
    step = number // LANES
    obs = step[:, None].expand(count, 4).float()
    return TensorDict(
        {
            "obs": obs,
            "lane": number % LANES,
            "version": number * 8 // (start + count),
            "next": {
                "obs": obs + 1,
                "reward": (number * 0.618).sin()[:, None],
                "done": (step % EPISODE == EPISODE - 1)[:, None],
            },
        },
        [count],
    )
