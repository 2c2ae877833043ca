"""Which leaves of a record are stored once: those that come back a row later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, FLAG_KEYS, Key, format_key, unravel

__all__ = ["DedupNext", "Mismatch", "Pairs", "checked_keys", "checked_mismatch", "pairs_of"]

DedupNext = bool | Iterable[Any]
"""``False``: nothing. ``True``: all that can be. Else the root keys themselves."""

Mismatch = Literal["error", "dense"]

_NEVER = frozenset((*DEFAULT_DONE_KEYS, "reward"))
"""Names that mean another thing under ``next`` than at the root of the following row."""


@dataclass(frozen=True)
class Pairs:
    """Leaves at the root, and their counterparts under ``next`` that are not stored for most rows.

    Attributes:
        schema: all leaves, as users see them.
        stored: the schema without the counterparts: what lies in every row.
        beside: the counterparts alone: what rows of which the next one does not follow have.
        root_of: the root path of each counterpart, in the schema's order.
    """

    schema: Schema
    stored: Schema
    beside: Schema
    root_of: dict[Path, Path]


def checked_keys(dedup_next: DedupNext) -> bool | tuple[Key, ...]:
    """Returns the option with its keys as flat tuples.

    Raises:
        TypeError: neither a bool nor a collection of keys. ValueError: no key in it.
    """
    if isinstance(dedup_next, bool):
        return dedup_next
    if isinstance(dedup_next, (str, bytes)) or not isinstance(dedup_next, Iterable):
        raise TypeError(f"expected dedup_next as a bool or a list of root keys, got {dedup_next!r}")
    keys = tuple(dict.fromkeys(unravel(key) for key in dedup_next))
    if not keys:
        raise ValueError("expected at least one key in dedup_next, got none; False stores densely")
    return keys


def checked_mismatch(on_mismatch: object) -> Mismatch:
    """Returns the option; ValueError where there is no such choice."""
    if on_mismatch == "error":
        return "error"
    if on_mismatch == "dense":
        return "dense"
    raise ValueError(f"expected on_mismatch 'error' or 'dense', got {on_mismatch!r}")


def pairs_of(schema: Schema, keys: bool | tuple[Key, ...]) -> Pairs:
    """Returns which leaves of records of that schema are stored once.

    Raises:
        ValueError: a key does not occur at the root and under ``next`` with one shape and dtype,
            with ``True`` none does, or a key is a flag.
    """
    leaves = schema.leaves
    if isinstance(keys, tuple):
        for key in keys:
            if key in FLAG_KEYS:
                raise ValueError(
                    f"dedup_next: expected no flag, got {format_key(key)}: under 'next' it says "
                    "where episodes end, at the root it never does"
                )
            if leaves.get(key) is None or leaves.get(key) != leaves.get(("next", *key)):
                raise ValueError(
                    f"dedup_next: expected {format_key(key)} at the root and under 'next' with "
                    f"one shape and dtype, got {leaves.get(key, 'nothing')} and "
                    f"{leaves.get(('next', *key), 'nothing')}"
                )
    root_of: dict[Path, Path] = {}
    for path, leaf in leaves.items():
        root = path[1:]
        if path[:1] != ("next",) or not root or leaves.get(root) != leaf:
            continue
        if leaf.added or leaves[root].added:
            continue  # what is stored once is settled by the first write
        if root in keys if isinstance(keys, tuple) else root[-1] not in _NEVER:
            root_of[path] = root
    if not root_of:
        raise ValueError(
            "dedup_next=True: expected a key that occurs at the root and under 'next' with one "
            f"shape and dtype, got {', '.join(format_key(p or ('(root)',)) for p in leaves)}"
        )
    if overlap := root_of.keys() & set(root_of.values()):
        raise ValueError(
            f"dedup_next: expected keys outside of 'next', got {format_key(overlap.pop())}"
        )
    stored = schema.part([path for path in leaves if path not in root_of])
    return Pairs(schema, stored, schema.part(list(root_of)), root_of)
