"""One thing that was checked, and how it came out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        check: what it is, in a few words.
        ok: whether it holds.
        text: of one that does not hold: what is wrong, with the file or key; else how much was
            looked at.
        is_warning: it does not hold, but nothing is wrong with the data as it was written.
    """

    check: str
    ok: bool
    text: str
    is_warning: bool = False
