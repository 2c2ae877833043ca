"""What is made of saved arrays only when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from replaykit.errors import CheckpointError

__all__ = ["ReadLater"]

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")


class ReadLater(Generic[Made]):
    """What is made of saved arrays when somebody asks for it: opening a checkpoint reads nothing.

    Args:
        make: makes it of the arrays; ValueError where they contradict themselves.
        arrays: over files of a checkpoint, ``[K]`` each.
        what: they are, for the error.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint import ReadLater
        >>> late = ReadLater(lambda counts: int(counts.sum()), [np.arange(4)], "counts")
        >>> late.read()
        6
    """

    def __init__(self, make: Callable[..., Made], arrays: list[Array], what: str) -> None:
        self._make, self._arrays, self._what = make, arrays, what

    def read(self) -> Made:
        """Makes it: O(K).

        Raises:
            CheckpointError: the arrays contradict themselves.
        """
        try:
            return self._make(*self._arrays)
        except ValueError as error:
            raise CheckpointError(f"the {self._what} of the checkpoint: {error}") from None
