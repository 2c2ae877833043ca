"""Define the TED format, the meaning of keys in a table of transitions.

A row is one step. The root holds the state before the step and the action. ``next`` holds the
results. Time is the first dimension, and episodes follow one another.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Final

__all__ = [
    "DEFAULT_DONE_KEYS",
    "DONE",
    "EPISODE_KEYS",
    "FLAG_KEYS",
    "NEXT_FLAGS",
    "RESERVED_KEYS",
    "RETURN_VALID",
    "REWARD",
    "TERMINATED",
    "TRUNCATED",
    "Key",
    "end_flags",
    "format_key",
    "no_key",
    "unravel",
    "unused_flags",
]

Key = tuple[str, ...]
"""A nested key, always a tuple, such as ``("next", "reward")`` or ``("action",)``."""

DEFAULT_DONE_KEYS: Final = ("done", "truncated", "terminated")
"""Flags, each of which ends an episode; see `end_flags`."""

NEXT_FLAGS: Final[tuple[Key, ...]] = tuple(("next", name) for name in DEFAULT_DONE_KEYS)
"""The flags of `DEFAULT_DONE_KEYS` under ``next``."""

DONE, TRUNCATED, TERMINATED = NEXT_FLAGS

REWARD: Final[Key] = ("next", "reward")

FLAG_KEYS: Final[frozenset[Key]] = frozenset(
    {*((name,) for name in DEFAULT_DONE_KEYS), *NEXT_FLAGS}
)
"""Keys accepted as ``[N]`` or ``[N, 1]`` and stored as ``[N, 1]``."""

EPISODE_KEYS: Final[tuple[Key, ...]] = (("collector", "traj_ids"), ("episode",), ("seed",))
"""Id columns. A change of any of these ids ends an episode."""

RETURN_VALID: Final[Key] = ("return_valid",)
"""The key of a flag: the row has its discounted return. See ``ReturnToGo``."""

RESERVED_KEYS: Final[frozenset[str]] = frozenset({"index", "index_generation"})
"""Root keys of samples. They are ignored on write, added on read and never stored."""


def end_flags(keys: Container[Key]) -> tuple[Key, ...]:
    """Return the keys that are flags which end an episode with their row.

    They are ``done``, ``truncated`` and ``terminated`` under ``next``. If none of these is among
    the keys, the flags at the root are returned. Without flags under ``next``, flags at the root
    describe the step of their row. If there are flags under ``next``, a flag at the root describes
    the observation, and ends no episode.

    Example:
        >>> from replaykit.ted import end_flags
        >>> end_flags({("done",), ("next", "done")}), end_flags({("obs",), ("done",)})
        ((('next', 'done'),), (('done',),))
    """
    for above in (("next",), ()):
        found = tuple((*above, name) for name in DEFAULT_DONE_KEYS if (*above, name) in keys)
        if found:
            return found
    return ()


_FLAG_NAMES: Final = frozenset(
    {"dones", "terminals", "terminations", "timeouts", "truncations", *DEFAULT_DONE_KEYS}
)
"""Names that libraries give to flags that end episodes."""


def unused_flags(keys: Collection[Key]) -> tuple[Key, ...]:
    """Return the keys that look like flags but end no episode.

    If there are flags under ``next``, these are the flags at the root without a counterpart under
    ``next``. If there is no flag or id, these are keys such as ``dones`` or ``("agents", "done")``.

    Example:
        >>> from replaykit.ted import unused_flags
        >>> unused_flags({("done",), ("next", "truncated")}), unused_flags({("obs",), ("dones",)})
        ((('done',),), (('dones',),))
    """
    ends = end_flags(keys)
    found: set[Key] = set()
    if ends and len(ends[0]) > 1:
        found = {key for key in keys if key[0] in DEFAULT_DONE_KEYS and len(key) == 1}
        found -= {path[1:] for path in ends}
    elif not ends and not any(key in keys for key in EPISODE_KEYS):
        found = {key for key in keys if key[-1] in _FLAG_NAMES}
    return tuple(sorted(found))


def unravel(key: object) -> Key:
    """Return a nested key as a flat tuple of strings.

    Raises:
        TypeError: the key is not a string or a (nested) tuple of strings.

    Example:
        >>> from replaykit.ted import unravel
        >>> unravel("reward"), unravel(("next", ("info", "x")))
        (('reward',), ('next', 'info', 'x'))
    """
    if isinstance(key, str):
        return (key,)
    if isinstance(key, tuple) and key:
        return tuple(part for item in key for part in unravel(item))
    raise TypeError(f"expected a key (a string or a tuple of strings), got {key!r}")


def format_key(key: tuple[object, ...]) -> str:
    """Return a key as users write it, a string for one part, else a tuple.

    Example:
        >>> from replaykit.ted import format_key
        >>> format_key(("next", "done")), format_key(("action",))
        ("('next', 'done')", "'action'")
    """
    return repr(key[0]) if len(key) == 1 else repr(tuple(key))


def no_key(key: Key, known: Iterable[Key], kind: str = "key") -> KeyError:
    """Return the error about an absent key, with the existing keys.

    Example:
        >>> from replaykit.ted import no_key
        >>> no_key(("observation.state",), [("observation", "state")], "column")
        KeyError("no column 'observation.state' (meant: ('observation', 'state')?); there are ...")
    """
    paths = list(known)
    near = [path for path in paths if len(path) > 1 and ".".join(path) == key[0]]
    meant = f" (meant: {format_key(near[0])}?)" if near else ""
    there = f"; there are {', '.join(sorted(map(format_key, paths)))}" if paths else ""
    return KeyError(f"no {kind} {format_key(key)}{meant}{there}")
