"""Counts in words, for pages and reports."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as ``1 episode`` or ``2,000 episodes``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
