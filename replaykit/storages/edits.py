"""What was changed in place last, for who derives something from a column."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from replaykit.structure import Path

__all__ = ["KEPT_EDITS", "Edit", "with_edit"]

KEPT_EDITS = 64
"""How many a storage remembers."""


class Edit(NamedTuple):
    """One change of rows that were stored already.

    Attributes:
        number: of ``Storage.edits`` after it.
        paths: columns that it changed; None: any.
        slots: rows that it changed, int64 ``[K]``; None: any.
    """

    number: int
    paths: Collection[Path] | None
    slots: np.ndarray[Any, Any] | None


def with_edit(recent: tuple[Edit, ...], edit: Edit, rows: int) -> tuple[Edit, ...]:
    """The last edits with one more: at most `KEPT_EDITS`, and no more slots than there are rows.

    Older ones are let go: who would look at as many slots may as well look at all rows. So edits
    take 8 bytes a row at most.
    """
    kept: list[Edit] = []
    for one in (edit, *reversed(recent)):
        rows -= 0 if one.slots is None else len(one.slots)
        if rows < 0 or len(kept) == KEPT_EDITS:
            break
        kept.append(one)
    return tuple(reversed(kept))
