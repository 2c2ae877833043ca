"""What is made of saved arrays only when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from replaykit.checkpoint.mapped import MappedRows
from replaykit.errors import CheckpointError

__all__ = ["ReadLater", "ReadOnce"]

Array = np.ndarray[Any, Any]
Held = TypeVar("Held")
Made = TypeVar("Made", covariant=True)


class ReadLater(Generic[Made]):
    """What is made of saved arrays when somebody asks for it: opening a checkpoint reads nothing.

    Args:
        make: makes it of the arrays; ValueError where they contradict themselves.
        arrays: over files of a checkpoint, ``[K]`` each, which may be closed then.
        what: they are, for the error.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint import ReadLater
        >>> late = ReadLater(lambda counts: int(counts.sum()), [np.arange(4)], "counts")
        >>> late.read()
        6
    """

    def __init__(
        self, make: Callable[..., Made], arrays: Sequence[Array | MappedRows], what: str
    ) -> None:
        self._make, self._what = make, what
        self._arrays = [_array(array) for array in arrays]
        files = dict.fromkeys(array.where for array in arrays if isinstance(array, MappedRows))
        self._where = f", in {', '.join(files)}" if files else ""

    def read(self) -> Made:
        """Makes it: O(K).

        Raises:
            CheckpointError: the arrays contradict themselves; names their files.
        """
        try:
            return self._make(*self._arrays)
        except ValueError as error:
            raise CheckpointError(
                f"the {self._what} of the checkpoint{self._where}: {error}"
            ) from None


class ReadOnce(Generic[Held]):
    """An attribute that is given something, or ReadLater, which is read when it is first asked for;
    where that raises, whoever asks next asks again.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint import ReadLater, ReadOnce
        >>> class Counts:
        ...     total = ReadOnce[int]()
        >>> counts = Counts()
        >>> counts.total = ReadLater(lambda found: int(found.sum()), [np.arange(4)], "counts")
        >>> counts.total
        6
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_held{name}"

    @overload
    def __get__(self, owner: None, kind: type) -> ReadOnce[Held]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Held: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is None:
            return self
        held = vars(owner)[self._name]
        if isinstance(held, ReadLater):
            held = vars(owner)[self._name] = held.read()
        return held

    def __set__(self, owner: object, value: Held | ReadLater[Held]) -> None:
        vars(owner)[self._name] = value


def _array(rows: Array | MappedRows) -> Array:
    return rows.spanned().numpy() if isinstance(rows, MappedRows) else rows
