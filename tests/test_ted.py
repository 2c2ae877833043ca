"""Keys: how they are written, joined and told apart."""

from __future__ import annotations

import pytest

import replaykit
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
    EPISODE_KEYS,
    FLAG_KEYS,
    RESERVED_KEYS,
    format_key,
    unravel,
)
from tests.support.refusals import refuses


def test_flag_keys_and_reserved_keys_are_the_documented_ones() -> None:
    assert DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")
    assert replaykit.DEFAULT_DONE_KEYS is DEFAULT_DONE_KEYS
    assert {
        ("done",),
        ("truncated",),
        ("terminated",),
        ("next", "done"),
        ("next", "truncated"),
        ("next", "terminated"),
    } == FLAG_KEYS
    assert {"index", "index_generation"} == RESERVED_KEYS
    assert EPISODE_KEYS == (("collector", "traj_ids"), ("episode",), ("seed",))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward", ("reward",)),
        ("next.reward", ("next.reward",)),  # a dot is part of a name, never a separator
        ("", ("",)),
        (("next", "reward"), ("next", "reward")),
        (("reward",), ("reward",)),
        ((("next",), (("info",), "x")), ("next", "info", "x")),
    ],
)
def test_a_key_becomes_a_flat_tuple(key: object, expected: tuple[str, ...]) -> None:
    assert unravel(key) == expected


@pytest.mark.parametrize("key", [None, 3, (), ("a", 1), ("a", ()), ["a"], b"a", ("a", None)])
def test_unravel_refuses_an_invalid_key_and_shows_it(key: object) -> None:
    refuses(TypeError, r"expected a key .*, got", unravel, key)


def test_keys_are_printed_as_users_write_them() -> None:
    assert format_key(("action",)) == "'action'"
    assert format_key(("next", "done")) == "('next', 'done')"
    assert format_key((0,)) == "0"
    assert format_key(("it's",)) == '"it\'s"'
