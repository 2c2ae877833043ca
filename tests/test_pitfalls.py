"""Every known fault of the field that the package has met so far has a test of its own.

The table is that of the faults, by group; a test says with ``@pytest.mark.pitfall("XY1")`` which it
covers. What is not in the table belongs to parts that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

COVERED = {
    "BD": [*range(1, 21)],
    "PR": [*range(1, 18), 20],
    "WR": [*range(1, 20)],
    "RD": [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14],
    "CK": [*range(1, 17)],
    "TH": [1, 2, 3, 4, 8, 9, 10, 11, 12],
    "DS": [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    "SL": [2, 3, 4, 8, 9, 10, 11],
    "IF": [1, 3, 4, 5, 6, 7, 8, 9, 10],
}
"""Identifiers of the rows, by group: boundaries, priorities, writing, reading, checkpoints,
threads and processes, data sets, speed, interfaces."""


@pytest.fixture(scope="module")
def marked(marked_with: Callable[[str], set[str]]) -> set[str]:
    return marked_with("pitfall")


@pytest.mark.parametrize("group", COVERED)
def test_every_row_has_a_test(group: str, marked: set[str]) -> None:
    missing = [f"{group}{row}" for row in COVERED[group] if f"{group}{row}" not in marked]
    assert not missing, f"no test is marked with {missing}"


def test_the_table_is_complete(marked: set[str]) -> None:
    listed = {f"{group}{row}" for group, rows in COVERED.items() for row in rows}
    assert sorted(marked - listed) == []
