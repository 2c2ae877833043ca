"""The works, one module each: what is asked of them, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contender import Unavailable
from benchmarks.report import Line, Target, missing_lines
from benchmarks.setting import Setting
from benchmarks.works import (
    checkpoints,
    corpora,
    costs,
    growing,
    images,
    memmap_cold,
    memmap_warm,
    memory,
    opening,
    overlap,
    prioritized,
    sequences,
    sharing,
    transitions,
    trees,
    writes,
)

__all__ = ["WORKS", "Work", "measure"]


@dataclass(frozen=True)
class Work:
    """What is asked, by title, and what measures it."""

    asked: Callable[[Setting], Mapping[str, Sequence[Target]]]
    run: Callable[[Setting], list[Line]]


WORKS = {
    module.__name__.rpartition(".")[2]: Work(module.asked, module.run)
    for module in (
        transitions,
        prioritized,
        trees,
        writes,
        images,
        memmap_warm,
        memmap_cold,
        memory,
        sequences,
        checkpoints,
        opening,
        sharing,
        costs,
        overlap,
        growing,
        corpora,
    )
}


def measure(work: Work, setting: Setting) -> list[Line]:
    """Returns the lines of a work: figures, or the reason why there are none."""
    try:
        return work.run(setting)
    except Unavailable as error:
        return [
            line
            for title, targets in work.asked(setting).items()
            for line in missing_lines(title, targets, str(error))
        ]
