"""Values of small datasets that were read while they were open for their declarations.

Opening a dataset of some fifty numbers takes as long as reading it, and a robot corpus has
thousands of them: what the scan has in its hands anyway is not opened again when rows are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Held", "HeldValues"]

_MOST_BYTES: Final = 1 << 16
"""Bytes of a dataset beyond which opening it is little beside reading it."""
_LEAST_ROOM: Final = 1 << 16
"""Room of a file below which nothing is saved."""
_ENTRY_BYTES: Final = 256
"""What a name and a place take beside the values."""
_ALIGNED: Final = 16


class HeldValues:
    """Whole datasets of one file, side by side in one piece of memory.

    Args:
        room: how many bytes, with 256 for each dataset beside its values.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.held import HeldValues
        >>> held = HeldValues(1000)
        >>> values = held.room_for("Trial0/time", (3,), np.dtype("int64"))
        >>> values[:] = 7
        >>> held.put("Trial0/time", values)
        >>> held.get("Trial0/time"), held.get("Trial1/time")
        (array([7, 7, 7]), None)
        >>> held.room_for("Trial1/time", (90,), np.dtype("int64")) is None
        True
    """

    def __init__(self, room: int) -> None:
        self._left = room
        # Pages that are never written take no memory.
        self._memory = np.empty(room, np.uint8)
        self._used = 0
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": self._memory[: self._used], "_left": 0}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._places

    def room_for(
        self, dataset: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any] | None:
        """Returns memory for the values of a dataset; ``None`` if they are not to be held.

        They are from `put` on; what is asked for next may be the same memory until then.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 < nbytes <= min(self._left - _ENTRY_BYTES - _ALIGNED, _MOST_BYTES):
            return None
        if dataset in self._places:
            return None
        return self._values(self._used, shape, dtype)

    def put(self, dataset: str, values: npt.NDArray[Any]) -> None:
        """Holds the values that are in the memory that `room_for` has returned last."""
        self._places[dataset] = (self._used, values.shape, values.dtype)
        nbytes = values.nbytes + -values.nbytes % _ALIGNED
        self._used += nbytes
        self._left -= nbytes + _ENTRY_BYTES

    def get(self, dataset: str) -> npt.NDArray[Any] | None:
        """Returns the values of a dataset, which are not to be changed, where they are held."""
        place = self._places.get(dataset)
        return None if place is None else self._values(*place)

    def _values(self, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self._memory, at)


class Held:
    """What is held of each of some files, in equal shares.

    Args:
        room: how many bytes of all together.
        files: their paths.
    """

    def __init__(self, room: int, files: Iterable[Path]) -> None:
        paths = set(files)
        share = room // max(1, len(paths))
        self.share = share if share >= _LEAST_ROOM else 0
        """Room of each file; zero where it would save nothing."""
        self._files: dict[Path, HeldValues] = {}

    def of(self, file: Path) -> HeldValues:
        """Returns what is held of a file, which there may be more of."""
        if file not in self._files:
            self._files[file] = HeldValues(self.share)
        return self._files[file]

    def take(self, file: Path, values: HeldValues) -> None:
        """Takes what another process has read of a file."""
        self._files[file] = values
