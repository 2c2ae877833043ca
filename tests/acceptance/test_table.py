"""Every acceptance behaviour that concerns this package has a test of its own.

C: capabilities that are shown for random histories; S: behaviours with their numbers; F: faults of
the field that are not inherited. A test says with ``@pytest.mark.acceptance("S12")`` which it
shows. What is not in the table belongs to parts that do not exist yet, such as queues and mixtures
of laws or data sets.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

COVERED = {
    "C": [5, 6, 11, 16, 23, 24, 25, 34, 38, 39, 47, 48, 50],
    "S": [1, *range(5, 21), 22, 23, 24, 26, 27, 28, 30, 32, 37],
    "F": [
        *(1, *range(3, 10), *range(12, 24), *range(25, 31), *range(32, 37), 38, 39, 40, 41, 45, 46),
        *(49, 51, 53, 54, 57),
    ],
}


@pytest.fixture(scope="module")
def marked(marked_with: Callable[[str], set[str]]) -> set[str]:
    return marked_with("acceptance")


@pytest.mark.parametrize("group", COVERED)
def test_every_behaviour_has_a_test(group: str, marked: set[str]) -> None:
    missing = [f"{group}{row}" for row in COVERED[group] if f"{group}{row}" not in marked]
    assert not missing, f"no test is marked with {missing}"


def test_the_table_is_complete(marked: set[str]) -> None:
    listed = {f"{group}{row}" for group, rows in COVERED.items() for row in rows}
    assert sorted(marked - listed) == []
