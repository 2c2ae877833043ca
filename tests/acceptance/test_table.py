"""Every acceptance behaviour that concerns this package has a test of its own.

C: capabilities that are shown for random histories; S: behaviours with their numbers; F: faults of
the field that are not inherited. A test says with ``@pytest.mark.acceptance("S12")`` which it
shows. What is not in the table belongs to parts that do not exist yet, such as queues, mixtures of
laws or data sets and directories of trajectories.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

COVERED = {
    "C": [6, 11, 24, 25, 34, 38, 39, 48],
    "S": [1, *range(5, 21), 26, 27, 28, 30, 37],
    "F": [1, 3, 4, *range(6, 10), *range(12, 23), 32, 33, 34, 39, 41, 45, 46, 49, 53, 54, 57],
}


def _marks(tree: ast.AST) -> set[str]:
    """The identifiers in ``pytest.mark.acceptance(...)`` on the functions of a module."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.acceptance":
                found |= {ast.literal_eval(argument) for argument in mark.args}
    return found


@pytest.fixture(scope="module")
def marked() -> set[str]:
    files = [path for path in TESTS.glob("test_*.py") if path != Path(__file__)]
    return set().union(*(_marks(ast.parse(path.read_text("utf-8"))) for path in files))


@pytest.mark.parametrize("group", COVERED)
def test_every_behaviour_has_a_test(group: str, marked: set[str]) -> None:
    missing = [f"{group}{row}" for row in COVERED[group] if f"{group}{row}" not in marked]
    assert not missing, f"no test is marked with {missing}"


def test_the_table_is_complete(marked: set[str]) -> None:
    listed = {f"{group}{row}" for group, rows in COVERED.items() for row in rows}
    assert sorted(marked - listed) == []
