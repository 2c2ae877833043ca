"""Reports of conversions: complete in the manifest, and short in one warning."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.locations import WHOLE_FILE, RuleFinding, RuleFindings
from replaykit.datasets.engine.plan import Plan

_PACKAGE: Final = __name__.partition(".")[0]
_MOST_NAMES: Final = 3
"""Number of names that a line lists after the first name."""
_RULE: Final = re.compile(r"\[V[0-9]+\]$")
_VARYING: Final = re.compile(
    r", first .*$| \(.*\)$|(?<=^it has ).* in one episode and .*$|(?<=^in ).+(?= it stays)"
    r"|(?<=^the name )'.*'|(?<= begins in ).+(?=, which is skipped$)"
    r"|(?<![\w.])[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?!\w)"
)
"""The parts that differ between texts of one kind: locations, shapes and numbers."""


def duplicates(digests: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Return pairs (later episode, first episode) with equal digests ``[E, 16]``.

    Cost: O(E log E). Memory: about 40 bytes for each episode.
    """
    halves = np.ascontiguousarray(digests).view(np.uint64)
    # Duplicates are rare, and half of each digest is enough to exclude them.
    if np.diff(np.sort(halves[:, 0])).all():
        return []
    # Sorting puts equal digests next to each other, in the order of episodes.
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
    notes: RuleFindings,
    copies: Iterable[tuple[int, int]],
) -> dict[str, Any]:
    """Return all decisions, omissions and findings as JSON values.

    Args:
        copies: the result of `duplicates`.
    """

    def episode(position: int) -> list[str | None]:
        found = plan.location(position)
        return [found.name, found.group]

    return {
        "left_out": list(plan.left_out),
        "skipped": list(plan.skipped),
        "numbering": list(plan.numbering),
        "files": [],
        "duplicates": [
            {"episode": episode(later), "same_as": episode(first)} for later, first in copies
        ],
        "warnings": [record_of(note) for note in notes],
    }


def record_of(note: RuleFinding) -> dict[str, Any]:
    """Return a finding as JSON values, for a report."""
    found = {"rule": note.rule, "text": note.text, "count": note.count, "first": note.first}
    return {**found, "name": note.name} if note.name else found


def summary(report: Mapping[str, Any], notes: RuleFindings) -> str | None:
    """Return one text with all findings, or ``None`` if there are none."""
    heard = [record_of(note) for note in notes if not note.quiet]
    return ". ".join(lines_of({**report, "warnings": heard, "removed": []})) or None


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a report, one for each kind of finding.

    A line contains the count of findings of its kind, and the full text of the first finding. For
    some further findings, it adds their names and the words in which their texts differ. The report
    itself contains all findings. Findings are of one kind if their texts differ only in locations,
    shapes and numbers. Skipped episodes are of one kind if they break the same rule. Cost:
    O(findings).

    Args:
        report: the report of a manifest. In a manifest of an earlier version, entries may be
            missing.

    Example:
        >>> from replaykit.datasets.engine.conversion_report import lines_of
        >>> lines_of({"left_out": [{"key": key, "why": "not known"} for key in "abcdef"]})
        ['left out: a, b, c, d and 2 more: not known']
    """
    lines = []
    for group in _kinds(report.get("left_out", []), lambda leaf: _kind_of(leaf["why"])):
        first, keys = group[0], [leaf["key"] for leaf in group]
        if all(leaf["why"] == first["why"] for leaf in group):
            lines.append(f"left out: {_listed(keys, _MOST_NAMES + 1)}: {first['why']}")
            continue
        others = [_detailed(leaf["key"], leaf["why"], first["why"]) for leaf in group[1:]]
        lines.append(
            f"left out: {len(group):,}, first {first['key']}: {first['why']}; also "
            f"{_listed(others)}"
        )
    for group in _kinds(report.get("removed", []), lambda entry: entry["why"]):
        entries = [_removed(entry) for entry in group]
        lines.append(f"removed: {group[0]['why']}: {_listed(entries, _MOST_NAMES + 1)}")
    lines.extend(f"skipped: {line}" for line in skipped_lines(report.get("skipped", [])))
    twice = report.get("duplicates", [])
    if twice:
        pairs = [f"{', '.join(each['episode'])} as {', '.join(each['same_as'])}" for each in twice]
        lines.append(
            f"{len(twice):,} episode{'s' * (len(twice) != 1)} with the observations and actions of "
            f"an earlier one: {_listed(pairs)} [V36]"
        )
    for group in _kinds(report.get("warnings", []), _kind):
        first, names = group[0], [_named(entry, group[0]) for entry in group[1:]]
        count = sum(entry["count"] for entry in group)
        also = f"; also {_listed(names)}" if names else ""
        lines.append(
            f"{first['text']} ({count:,} time{'s' * (count != 1)}, first in {first['first']}"
            f"{also}) [{first['rule']}]"
        )
    return lines


def skipped_lines(skipped: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines about skipped episodes and files, one for each rule.

    Args:
        skipped: entries of a report: ``file``, ``name`` and ``why``.
    """
    lines = []
    for group in _kinds(skipped, _rule_of):
        first = group[0]
        # Episodes of different files may have the same name.
        is_one = all(entry["file"] == first["file"] for entry in group)
        others = [_skipped(entry, is_one) for entry in group[1:]]
        count = f"{len(group):,}, first " if others else ""
        also = f"; also {_listed(others)}" if others else ""
        # Most errors begin with the path of the file and the name of the episode.
        folder, _, rest = first["why"].partition(f"{first['file']}: ")
        why = (
            rest.removeprefix(f"{first['name']}: ") if rest and ": " not in folder else first["why"]
        )
        lines.append(f"{count}{first['file']}: {first['name']}: {why}{also}")
    return lines


def _kinds(
    entries: Iterable[dict[str, Any]], kind: Callable[[dict[str, Any]], object]
) -> list[list[dict[str, Any]]]:
    """Group entries by kind, in the order of the first entry of each kind."""
    found: dict[object, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(kind(entry), []).append(entry)
    return list(found.values())


def _kind(entry: dict[str, Any]) -> object:
    return entry["rule"], _kind_of(_unnamed(entry))


def _kind_of(text: str) -> str:
    """Return a text without the parts that differ between findings of one kind."""
    return _VARYING.sub("*", text)


def _unnamed(entry: Mapping[str, Any]) -> str:
    name, text = entry.get("name"), str(entry["text"])
    return text.replace(name, "*", 1) if name else text


def _named(entry: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return the name of a warning, and how it differs from the first of its kind."""
    name = entry.get("name") or entry["first"]
    return _detailed(name, _unnamed(entry), _unnamed(first))


def _detailed(name: str, text: str, first: str) -> str:
    """Return a name with the words in which its text differs from the text ``first``."""
    ours, theirs = text.split(), first.split()
    if len(ours) != len(theirs):
        return name
    words = [word.strip("(),;:") for word, other in zip(ours, theirs, strict=True) if word != other]
    return f"{name} ({', '.join(words)})" if words else name


def _rule_of(entry: dict[str, Any]) -> str:
    why = str(entry["why"])
    rule = _RULE.search(why)
    return _kind_of(why.replace(entry["file"], "*")) if rule is None else rule[0]


def _skipped(entry: Mapping[str, Any], is_one_file: bool) -> str:
    if entry["name"] == WHOLE_FILE:
        return str(entry["file"])
    return str(entry["name"]) if is_one_file else f"{entry['file']}: {entry['name']}"


def _removed(entry: Mapping[str, Any]) -> str:
    key = "/".join(entry["key"])
    if "same_as" in entry:
        return f"{key} (of {'/'.join(entry['same_as'])})"
    return f"{key} ({entry['value']})" if "value" in entry else key


def _listed(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def warn_caller(text: str) -> None:
    """Warn at the innermost line outside this package on the call stack."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, stacklevel=level)
