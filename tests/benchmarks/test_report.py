"""The table: what is met, what is missed, and what was not measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import Times
from benchmarks.limits import Limit
from benchmarks.report import Line, Target, lines_of_turns, missing_lines, print_lines

FAST, SLOW = Times([2.0, 2.0, 2.0], [2.0] * 9), Times([10.0, 8.0, 10.0], [9.0] * 9)


def test_a_ratio_is_our_time_over_theirs() -> None:
    ours, theirs = lines_of_turns(
        "w", {"replaykit": FAST, "slow": SLOW}, {}, (Target("slow", 0.2),)
    )
    assert (ours.name, ours.ratio, ours.is_met) == ("replaykit", None, None)
    assert (theirs.ratio, theirs.low, theirs.high, theirs.value) == (0.2, 0.2, 0.25, 10.0)
    assert theirs.is_met is True


@pytest.mark.parametrize(("at_most", "met"), [(0.19, False), (0.2, True), (1.0, True)])
def test_target_is_met_up_to_its_limit(at_most: float, met: bool) -> None:
    lines = lines_of_turns("w", {"replaykit": FAST, "slow": SLOW}, {}, (Target("slow", at_most),))
    assert lines[1].is_met is met


def test_target_without_a_ratio_compares_the_amount() -> None:
    assert Line("memory", "replaykit", 5.4, "B/row", at_most=5.5).is_met is True
    assert Line("memory", "replaykit", 5.6, "B/row", at_most=5.5).is_met is False
    assert Line("memory", "raw", 170.0, "B/row", ratio=1.06, at_most=1.05).is_met is False


def test_unmeasured_target_is_neither_met_nor_missed() -> None:
    lines = lines_of_turns("w", {"replaykit": FAST}, {"x": "not there"}, (Target("x", 0.5),))
    assert lines[1].missing == "not there"
    assert (lines[1].at_most, lines[1].is_met) == (0.5, None)
    [line] = missing_lines("w", (Target("x", 0.5),), "no such thing")
    assert (line.missing, line.is_met) == ("no such thing", None)


def test_a_share_is_the_limit_over_the_figure() -> None:
    lines = lines_of_turns("w", {"replaykit": FAST, "slow": SLOW}, {}, limit=Limit("copy", 1.0))
    assert [(line.share, line.limit) for line in lines] == [(0.5, "copy"), (0.1, "copy")]


def test_table_names_missing_contenders_and_counts_targets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    targets = (Target("slow", 0.1), Target("gone", 0.5))
    absent = {"gone": "no module named gone"}
    lines = lines_of_turns(
        "sample", {"replaykit": FAST, "slow": SLOW}, absent, targets, limit=Limit("copy", 4.0)
    )
    print_lines(lines)
    text = capsys.readouterr().out
    assert "left out: sample: gone: no module named gone" in text
    assert "0 of 2 targets met, 1 missed, 1 not measured" in text
    row = next(row for row in text.splitlines() if " slow " in row)
    assert row.split() == [
        "slow",
        "10.0",
        "9.0",
        "0.20",
        "0.20-0.25",
        "0.10",
        "NO",
        "40.0%",
        "copy",
    ]
    # Faster than physics: the limit is wrong, or the benchmark.
    assert "200.0% copy (!)" in text
    stored = json.loads(json.dumps([line.to_json() for line in lines]))
    assert (stored[1]["ratio"], stored[1]["is_met"]) == (0.2, False)
