"""Rooms stay within their written sizes, so that growth is a decision."""

from __future__ import annotations

import pytest

from tests.rooms import CORE, core_files, modules
from tests.size import Size, block, bounds, code_lines, size_of, table, without_comments

ROOMS = {**modules(), CORE: core_files()}


@pytest.mark.parametrize("room", ROOMS)
def test_room_stays_within_its_bound(room: str) -> None:
    """To allow growth, or to lower bounds: ``python -m tests.size --write-bounds``."""
    bound, size = bounds().get(room, Size(0, 0, 0)), size_of(ROOMS[room])
    assert size.within(bound), (
        f"{room}: expected at most {bound}, got {size}; make it smaller, or run "
        "python -m tests.size --write-bounds and say why in the commit"
    )


def test_bounds_name_only_rooms_that_exist() -> None:
    assert set(bounds()) == set(ROOMS)


def test_page_shows_the_bounds() -> None:
    assert block() == table(), "run python -m tests.size"


def test_docstrings_comments_and_blank_lines_do_not_count() -> None:
    source = '''
"""Module."""

import os  # used below

LIMIT = 3
"""An attribute's
text."""


class A:
    """Class."""

    text = """one
    two"""

    def f(self):
        """Function."""
        # a comment
        return os.path.join(
            "a",
        )
'''
    assert code_lines(source) == 9


def test_comments_of_the_core_do_not_count() -> None:
    source = 'int a; // one\n/* two\nthree */\nchar const *b = "// four";\n'
    assert [line for line in without_comments(source).splitlines() if line.strip()] == [
        "int a;  ",
        'char const *b = "// four";',
    ]
