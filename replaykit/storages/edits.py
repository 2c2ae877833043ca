"""What was changed in place last, for who derives something from a column."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from replaykit.structure import Path

__all__ = ["KEPT_EDITS", "Edit"]

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
