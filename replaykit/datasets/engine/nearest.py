"""Name what a caller may have meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

__all__ = ["meant", "nearest"]

_MOST: Final = 3


def nearest(entry: str, names: Iterable[str]) -> list[str]:
    """Return at most three names that look like ``entry``, the most similar first.

    Upper and lower case count as equal. A name that contains ``entry`` looks like it too.
    Cost: one comparison for each name, for an error text.

    Example:
        >>> from replaykit.datasets.engine.nearest import nearest
        >>> nearest("Hoper-v2", ["hopper-v2", "walker-v2"])
        ['hopper-v2']
    """
    known = {name.casefold(): name for name in names}
    wanted = entry.casefold()
    found = get_close_matches(wanted, known, _MOST, 0.7)
    if not found and len(wanted) > 2:
        found = [name for name in known if wanted in name][:_MOST]
    return [known[name] for name in found or get_close_matches(wanted, known, 1)]


def meant(entry: str, names: Iterable[str]) -> str:
    """Return ``" (meant: 'a' or 'b'?)"``, or an empty text where no name looks like ``entry``."""
    found = nearest(entry, names)
    return f" (meant: {' or '.join(map(repr, found))}?)" if found else ""
