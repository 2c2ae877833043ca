"""The table: what is asked, what was measured, and whether the one holds for the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import Times, compare
from benchmarks.limits import Limit

__all__ = ["SUBJECT", "Line", "Target", "lines_of_turns", "missing_lines", "print_lines"]

SUBJECT = "replaykit"


@dataclass(frozen=True)
class Target:
    """What is asked: the subject's figure over that of ``other`` is at most ``at_most``."""

    other: str
    at_most: float
    subject: str = SUBJECT


@dataclass(frozen=True)
class Line:
    """A figure of one contender, or a comparison of the subject with one.

    Attributes:
        value: median microseconds, or the amount in ``unit``.
        ratio: the subject's time over this contender's in the same round, median; ``low`` and
            ``high`` are the middle 90 % of rounds.
        at_most: what is asked of the ratio, or of the value where there is no ratio.
        more: the subject's amount less this contender's, where amounts are counted.
        share: the physical limit over the figure, and ``limit`` what limits.
        missing: why there is no figure.
    """

    work: str
    name: str
    value: float | None = None
    unit: str = "us"
    p99: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    more: int | None = None
    share: float | None = None
    limit: str | None = None
    missing: str | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target holds; None: nothing is asked, or nothing was measured."""
        found = self.value if self.unit != "us" and self.ratio is None else self.ratio
        if self.at_most is None or found is None:
            return None
        return found <= self.at_most

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}


def lines_of_turns(
    work: str,
    times: Mapping[str, Times],
    absent: Mapping[str, str],
    targets: Sequence[Target] = (),
    *,
    limit: Limit | None = None,
    subject: str = SUBJECT,
) -> list[Line]:
    """Returns the subject's line and then one for each other contender, absent ones included."""
    asked = {target.other: target.at_most for target in targets if target.subject == subject}
    lines = []
    for name in sorted(times, key=lambda name: name != subject):
        spent = times[name]
        ratio = None if name == subject else compare(times[subject], spent)
        lines.append(
            Line(
                work,
                name,
                spent.median_us,
                p99=spent.p99_us,
                ratio=None if ratio is None else ratio.median,
                low=None if ratio is None else ratio.low,
                high=None if ratio is None else ratio.high,
                at_most=asked.get(name),
                share=None if limit is None else limit.us / spent.median_us,
                limit=None if limit is None else limit.name,
            )
        )
    return lines + [
        Line(work, name, at_most=asked.get(name), missing=reason) for name, reason in absent.items()
    ]


def missing_lines(work: str, targets: Sequence[Target], reason: str) -> list[Line]:
    """Returns the lines of a work that could not be measured: what is asked, and the reason."""
    return [Line(work, target.other, at_most=target.at_most, missing=reason) for target in targets]


def print_lines(lines: Sequence[Line]) -> None:
    """Prints the table, and below it what was left out and why."""
    head = (
        f"{'work':<38} {'contender':<24} {'median us':>11} {'p99':>9} {'ratio':>6} {'5-95 %':>11} "
        f"{'asked':>6} {'met':<4} {'of the limit':>12}"
    )
    print(head)
    print("-" * len(head))
    work = None
    for line in lines:
        if work not in (None, line.work):
            print()
        print(_row(line, line.work if line.work != work else ""))
        work = line.work
    print(
        "\nratio: replaykit's time over the contender's in the same round, median; asked: at most."
        "\nof the limit: what the hardware allows over what was measured, and what limits."
    )
    missing = {(line.work, line.name): line.missing for line in lines if line.missing}
    for (name, other), reason in missing.items():
        print(f"left out: {name}: {other}: {reason}")
    missed = [line for line in lines if line.is_met is False]
    asked = [line for line in lines if line.at_most is not None]
    met = sum(line.is_met is True for line in asked)
    print(
        f"\n{met} of {len(asked)} targets met, {len(missed)} missed, "
        f"{len(asked) - met - len(missed)} not measured"
    )


def _row(line: Line, work: str) -> str:
    met = {True: "yes", False: "NO", None: ""}[line.is_met]
    if line.at_most is not None and line.is_met is None:
        met = "-"
    value = "" if line.value is None else f"{line.value:.1f}"
    if line.unit != "us":
        digits = ",d" if isinstance(line.value, int) else ".3f"
        value = "" if line.value is None else f"{line.value:{digits}} {line.unit}"
    spread = "" if line.low is None else f"{line.low:.2f}-{line.high:.2f}"
    if line.more is not None:
        spread = f"{line.more:+,d}"
    share = "" if line.share is None else f"{line.share:.1%} {line.limit}"
    if line.share is not None and line.share > 1.05:
        share += " (!)"
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
    asked = "" if line.at_most is None else f"{line.at_most:.2f}"
    p99 = "" if line.p99 is None else f"{line.p99:.1f}"
    text = (
        f"{work:<38} {line.name:<24} {value:>11} {p99:>9} {ratio:>6} {spread:>11} "
        f"{asked:>6} {met:<4} {share:>12}"
    )
    return text.rstrip() if line.missing is None else f"{text.rstrip()}  (left out, see below)"
