"""What people are told of a conversion: in the manifest all of it, in one warning the gist."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Note, Notes
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.sources import Sources

__all__ = ["duplicates", "lines_of", "make_report", "summary", "warn_caller"]

_PACKAGE: Final = __name__.partition(".")[0]
_MOST_NAMES: Final = 3
"""Names that a line lists behind the first."""
_RULE: Final = re.compile(r"\[V[0-9]+\]$")


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
            for later, first in (duplicates(digests) if plan.tells_copies else ())
        ],
        "warnings": [_record(note) for note in notes],
    }


def _record(note: Note) -> dict[str, Any]:
    found = {"rule": note.rule, "text": note.text, "count": note.count, "first": note.first}
    return {**found, "name": note.name} if note.name else found


def summary(report: Mapping[str, Any], notes: Notes) -> str | None:
    """Returns one text of all that a user should know, or ``None`` when there is nothing."""
    heard = [_record(note) for note in notes if not note.quiet]
    return ". ".join(lines_of({**report, "warnings": heard, "removed": []})) or None


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return what a report says to people, one line for each kind of finding.

    A line has the first finding of its kind in full, how many there are, and the names of the next
    ones; the report has all of them. Cost: O(findings).

    Args:
        report: of a manifest, of this version or an earlier one; entries may be missing.

    Example:
        >>> from replaykit.datasets.engine.report import lines_of
        >>> lines_of({"left_out": [{"key": key, "why": "not known"} for key in "abcdef"]})
        ['left out: a, b, c, d and 2 more: not known']
    """
    lines = []
    for group in _kinds(report.get("left_out", []), lambda leaf: leaf["why"]):
        keys = [leaf["key"] for leaf in group]
        lines.append(f"left out: {_listed(keys, _MOST_NAMES + 1)}: {group[0]['why']}")
    for group in _kinds(report.get("removed", []), lambda entry: entry["why"]):
        entries = [_removed(entry) for entry in group]
        lines.append(f"removed: {group[0]['why']}: {_listed(entries, _MOST_NAMES + 1)}")
    for group in _kinds(report.get("skipped", []), _rule_of):
        first, others = group[0], [entry["name"] for entry in group[1:]]
        count = f"{len(group):,}, first " if others else ""
        also = f"; also {_listed(others)}" if others else ""
        lines.append(f"skipped: {count}{first['file']}: {first['name']}: {first['why']}{also}")
    twice = report.get("duplicates", [])
    if twice:
        pairs = [f"{', '.join(each['episode'])} as {', '.join(each['same_as'])}" for each in twice]
        lines.append(
            f"{len(twice):,} episode{'s' * (len(twice) != 1)} with the observations and actions of "
            f"an earlier one: {_listed(pairs)} [V36]"
        )
    for group in _kinds(report.get("warnings", []), _kind):
        first, names = group[0], [entry["name"] for entry in group[1:]]
        count = sum(entry["count"] for entry in group)
        also = f"; also {_listed(names)}" if names else ""
        lines.append(
            f"{first['text']} ({count:,} time{'s' * (count != 1)}, first in {first['first']}"
            f"{also}) [{first['rule']}]"
        )
    return lines


def _kinds(
    entries: Iterable[dict[str, Any]], kind: Callable[[dict[str, Any]], object]
) -> list[list[dict[str, Any]]]:
    """Group entries by their kind, in the order of the first of each."""
    found: dict[object, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(kind(entry), []).append(entry)
    return list(found.values())


def _kind(entry: dict[str, Any]) -> object:
    name = entry.get("name")
    # Without a name the text says all, and no second finding has the same.
    return entry["rule"], entry["text"].replace(name, "*", 1) if name else id(entry)


def _rule_of(entry: dict[str, Any]) -> str:
    rule = _RULE.search(entry["why"])
    return str(entry["why"]) if rule is None else rule[0]


def _removed(entry: Mapping[str, Any]) -> str:
    key = "/".join(entry["key"])
    if "same_as" in entry:
        return f"{key} (of {'/'.join(entry['same_as'])})"
    return f"{key} ({entry['value']})" if "value" in entry else key


def _listed(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def warn_caller(text: str) -> None:
    """Warns at the line outside this package that led here, however deep in it we are."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)
