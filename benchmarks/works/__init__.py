"""The works, one module each: what is asked of them, and how they are measured.

A module is imported when its work is first asked for: another commit of replaykit may lack the
names that one of them needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contender import Subject, Unavailable
from benchmarks.report import Line, Target, missing_lines
from benchmarks.setting import Setting

__all__ = ["WORKS", "Work", "measure"]


@dataclass(frozen=True)
class Work:
    """A module of this package."""

    name: str

    @property
    def module(self) -> Any:
        """The module, imported."""
        return importlib.import_module(f"{__name__}.{self.name}")

    def asked(self, setting: Setting) -> Mapping[str, Sequence[Target]]:
        """Return what is asked, by title."""
        found: Mapping[str, Sequence[Target]] = self.module.asked(setting)
        return found

    def run(self, setting: Setting) -> list[Line]:
        """Measure, and return the lines of the table."""
        found: list[Line] = self.module.run(setting)
        return found

    def subjects(self, setting: Setting) -> Mapping[str, Subject]:
        """Return how to make its own contenders, by title; none where it takes no turns."""
        if not hasattr(self.module, "subjects"):
            return {}
        found: Mapping[str, Subject] = self.module.subjects(setting)
        return found


WORKS = {
    name: Work(name)
    for name in (
        "transitions",
        "prioritized",
        "trees",
        "writes",
        "images",
        "memmap_warm",
        "memmap_cold",
        "memory",
        "calls",
        "sequences",
        "checkpoints",
        "opening",
        "sharing",
        "costs",
        "overlap",
        "growing",
        "cuda",
        "corpora",
        "collection",
        "formats",
        "lerobot",
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
