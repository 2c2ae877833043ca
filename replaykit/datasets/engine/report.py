"""What people are told of a conversion: in the manifest all of it, in one warning the gist."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Notes
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.sources import Sources

__all__ = ["duplicates", "make_report", "summary", "warn_caller"]

_PACKAGE: Final = __name__.partition(".")[0]


def duplicates(digests: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Returns pairs (later episode, first episode) with equal digests ``[E, 16]``; O(E log E).

    Memory: some 40 bytes for each episode.
    """
    halves = np.ascontiguousarray(digests).view(np.uint64)
    # Mostly there are none, which half of each digest shows as well.
    if np.diff(np.sort(halves[:, 0])).all():
        return []
    # Equal ones lie side by side then, in their order.
    order = np.lexsort(halves.T)
    ordered = halves[order]
    repeats = np.zeros(len(order), np.bool_)
    repeats[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    del ordered
    if not repeats.any():
        return []
    heads = np.flatnonzero(~repeats)
    later = np.flatnonzero(repeats)
    first = heads[np.searchsorted(heads, later) - 1]
    return sorted(zip(order[later].tolist(), order[first].tolist(), strict=True))


def make_report(
    plan: Plan,
    sources: Sources,
    notes: Notes,
    facts: Sequence[Mapping[str, Any]],
    digests: npt.NDArray[np.uint8],
) -> dict[str, Any]:
    """Returns all that was decided, left out, skipped or found odd, as JSON values.

    Args:
        facts: what the layout learnt of each file.
        digests: uint8 ``[E, 16]``, of the content of each episode.
    """
    names = [file.name for file in sources.files]

    def episode(position: int) -> list[str]:
        found = plan.episodes[position]
        return [names[found.file], found.name]

    return {
        "left_out": [{"key": leaf.path, "why": leaf.why} for leaf in plan.left_out],
        "skipped": [
            {"file": names[entry.file], "name": entry.name, "why": entry.why}
            for entry in plan.skipped
        ],
        "numbering": [{"file": names[file], "why": why} for file, why in plan.numbering],
        "files": [
            {"file": name, **found} for name, found in zip(names, facts, strict=True) if found
        ],
        "duplicates": [
            {"episode": episode(later), "same_as": episode(first)}
            for later, first in duplicates(digests)
        ],
        "warnings": [
            {"rule": note.rule, "text": note.text, "count": note.count, "first": note.first}
            for note in notes
        ],
    }


def summary(report: Mapping[str, Any], notes: Notes) -> str | None:
    """Returns one text of all that a user should know, or ``None`` when there is nothing."""
    parts = []
    if report["left_out"]:
        listed = "; ".join(f"{leaf['key']}: {leaf['why']}" for leaf in report["left_out"])
        parts.append(f"left out of the data set: {listed}")
    if report["skipped"]:
        listed = "; ".join(f"{e['file']}: {e['name']}: {e['why']}" for e in report["skipped"])
        parts.append(f"skipped: {listed}")
    if report["duplicates"]:
        first = report["duplicates"][0]
        parts.append(
            f"{len(report['duplicates'])} episodes have the observations and actions of an "
            f"earlier one, first {': '.join(first['episode'])} those of "
            f"{': '.join(first['same_as'])} [V36]"
        )
    parts.extend(
        f"{note.text} ({note.count} times, first in {note.first}) [{note.rule}]"
        for note in notes
        if not note.quiet
    )
    return ". ".join(parts) if parts else None


def warn_caller(text: str) -> None:
    """Warns at the line outside this package that led here, however deep in it we are."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)
