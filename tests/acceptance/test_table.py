"""Every acceptance behaviour that concerns this package has a test of its own.

C: capabilities that are shown for random histories; S: behaviours with their numbers; F: faults of
the field that are not inherited. A test says with ``@pytest.mark.acceptance("S12")`` which it
shows. S29 has no accessor of arrays: the transforms of C7 take its place.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

COVERED = {
    "C": [
        *(1, *range(4, 9), 10, 11, 13, *range(15, 19), *range(20, 26), 29, 30, 31, 34, 35, 38),
        *(39, *range(43, 51)),
    ],
    "S": [*range(1, 38)],
    "F": [
        *(1, *range(3, 10), *range(11, 24), *range(25, 42), *range(45, 52), *range(53, 56)),
        *(57, 58, *range(60, 64)),
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
