"""Uniform samples of 256 rows of two images."""

from __future__ import annotations

from benchmarks.contender import Subject
from benchmarks.harness import ready, take_turns
from benchmarks.holders import RawTorch, Replaykit, TorchRL
from benchmarks.limits import gather_limit
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import make_images, row_bytes
from benchmarks.setting import BATCH, Setting
from benchmarks.works.transitions import Sampling

__all__ = ["asked", "run", "subjects"]

TARGETS = (Target("index_select", 1.1), Target("TorchRL", 1 / 4))

CALLS = 3
"""Calls in a turn: each takes a millisecond."""


def _title(setting: Setting) -> str:
    return f"images, {setting.images:,} x 2 x 3x64x64"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(setting): TARGETS}


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    return {
        _title(setting): Subject(
            lambda: Sampling(Replaykit, Replaykit.name, make_images(setting.images)), CALLS
        )
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_images(setting.images)
    found, absent = ready(
        Sampling(Replaykit, Replaykit.name, leaves),
        [Sampling(kind, kind.name, leaves) for kind in (RawTorch, TorchRL)],
    )
    times = take_turns(found, rounds=setting.rounds, calls=CALLS)
    size = row_bytes(leaves)
    limit = setting.limit(
        lambda at: gather_limit(at, BATCH, size, setting.threads, setting.images * size)
    )
    return lines_of_turns(_title(setting), times, absent, TARGETS, limit=limit)
