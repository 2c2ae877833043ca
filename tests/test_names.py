"""A class name and a file name stand once in the package."""

from __future__ import annotations

import ast

import pytest

from tests.names import _classes, lowered, raised

KINDS = ("classes", "files")


@pytest.mark.parametrize("kind", KINDS)
def test_name_is_used_once_but_for_exceptions_which_only_shrink(kind: str) -> None:
    assert raised(kind) == {}, "choose another name: these are taken"
    assert lowered(kind) == [], "fewer duplicates than exceptions: run python -m tests.names"


def test_classes_under_conditions_count_and_private_ones_do_not() -> None:
    source = """
class A: ...
class _B: ...
if True:
    class C: ...
def f():
    class D: ...
"""
    assert sorted(_classes(ast.parse(source))) == ["A", "C"]
