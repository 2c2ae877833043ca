"""Whether the fields of a layout have keys of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from replaykit.datasets.engine.fields import Field
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["ALWAYS", "key_problems"]

ALWAYS: Final[tuple[Key, ...]] = (
    *((name,) for name in DEFAULT_DONE_KEYS),
    *(("next", name) for name in DEFAULT_DONE_KEYS),
    ("episode",),
    ("seed",),
)
"""The keys that the engine fills in every data set."""


def key_problems(fields: Iterable[Field]) -> Iterator[str]:
    """Yields what is wrong with the keys of fields, if anything.

    What a group of datasets fills is known when there is a file; `column_specs` looks at it then.
    """
    seen: list[tuple[Key, Field]] = []
    for entry in fields:
        for key in (entry.before, entry.after):
            if key is None:
                continue
            for other in ALWAYS:
                if _meet(key, other, entry.is_group, False):
                    yield (
                        f"the field {entry.name!r} fills {key}, but every data set has the key "
                        f"{other} besides: give it another key"
                    )
            for other, before in seen:
                may_both_be = before is entry or entry.required or before.required
                if may_both_be and _meet(key, other, entry.is_group, before.is_group):
                    what = "the key" if key == other else f"{key} and"
                    yield (
                        f"the fields {before.name!r} and {entry.name!r} fill {what} {other}; "
                        "expected keys that are not equal and not below one another: give one of "
                        "them another key [V10]"
                    )
            seen.append((key, entry))


def _meet(key: Key, other: Key, is_group: bool, is_other_group: bool) -> bool:
    """Whether two fields fill one key, or one a key below that of the other, in every file."""
    if is_group and is_other_group:
        return False  # that depends on the names in the groups
    if is_group:
        return key[: len(other)] == other
    if is_other_group:
        return other[: len(key)] == key
    shorter = min(len(key), len(other))
    return key[:shorter] == other[:shorter]
