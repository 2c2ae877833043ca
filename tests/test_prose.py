"""Prose is plain English: the idioms that it does without only get fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prose import (
    ROOT,
    Text,
    core_comments,
    counted,
    differing,
    exceptions,
    findings,
    module_texts,
    page,
)


def test_banned_idioms_are_as_many_as_the_exceptions_which_only_shrink() -> None:
    counts, allowed = counted(), exceptions()
    more, fewer = differing(counts, allowed), differing(allowed, counts)
    assert more == {}, "say it in plain words; python -m tests.prose ROOM shows where"
    assert fewer == {}, "fewer idioms than exceptions: run python -m tests.prose"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Rows are written anew, as it were.", ["anew", "as it were"]),
        ("Has the rows that were kept be read now.", []),
        ("Has draws be read now.", ["has X be"]),
        ("`prefetch=` has threads make them.", ["has X be"]),
        ("Locks are let go; the writer lets it go.", ["let go", "let go"]),
        ("An entry lies beside, of its own.", ["beside", "of its own"]),
        ("A member elsewhere is told of it.", ["elsewhere", "told"]),
        ("by who calls, of whom nobody knows", ["nobody", "of whom", "who"]),
        ("users who write, the caller, who holds the lock", []),
        ("It holds what was drawn.", ["what"]),
        ("The error says what was expected and what came, and what to do.", []),
        ("Rows are read. Which is cheap. Which rows?", ["opening"]),
        ("what of a row is kept", ["what", "opening"]),
        ("rows that have to be read, rows that have been read", []),
    ],
)
def test_idiom_is_found(text: str, names: list[str]) -> None:
    assert [name for name, _ in findings(Text(ROOT, 1, text))] == names


def test_page_is_divided_into_paragraphs_cells_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# What a title is\n\nOne `told` [two](elsewhere.md)\nthree.\n\n- What four\n  five.\n\n"
        "| six | who |\n|---|---|\n\n```python\nnobody = 1  # told\n```\n",
        "utf-8",
    )
    found = [(name, text.line) for text in page(path) for name, _ in findings(text)]
    assert found == [("opening", 6), ("who", 9), ("opening", 9), ("told", 13)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return the kinds of the texts of a module that hold the word ``reset``."""
    monkeypatch.setattr("tests.prose.ROOT", tmp_path)
    monkeypatch.setattr("tests.prose.public_names", lambda: {("m", "A"), ("m", "A.f")})

    def kinds(source: str) -> list[str]:
        path = tmp_path / "m.py"
        path.write_text(source, "utf-8")
        return [
            f"{kind} {text.line}"
            for kind, text in module_texts(path)
            if [name for name, _ in findings(text)] == ["anew"]
        ]

    return kinds


def test_module_is_divided_into_kinds(module: Callable[[str], list[str]]) -> None:
    source = '''"""Anew."""
# one
# anew
x = 1  # anew


class A:
    """One.

    >>> anew
    Anew.
    """

    def f(self):
        """Anew."""
        raise ValueError(f"expected {self}, got anew", "anew")

    def _g(self):
        """Anew, ``reset``."""
        return field(help="anew", x="anew")

    def _h(self):
        why = "it was written anew"
        warn(f"{self} is anew: " + why)
'''
    assert module(source) == [
        "private docstrings 1",
        "public docstrings 11",
        "public docstrings 15",
        "private docstrings 19",
        "comments 2",
        "comments 4",
        "error texts 16",
        "error texts 16",
        "help texts 20",
        "messages 23",
        "messages 24",
    ]


def test_comments_of_the_core_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "core.h"
    path.write_text('// one\n// two\nint a; /* three\n * four */ "// five"\n', "utf-8")
    assert [(text.line, text.text.split()) for text in core_comments(path)] == [
        (1, ["one", "two"]),
        (3, ["three", "four"]),
    ]
