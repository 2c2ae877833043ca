"""Types of HDF5 as those of NumPy, and which of them can be columns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Types", "not_numbers"]

_NUMBERS: Final = frozenset(
    np.dtype(f"{kind}{bits}")
    for kind, sizes in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in sizes
) | {np.dtype("bool")}
"""The dtypes that NumPy and torch share."""


class Types:
    """The types of a file, each made once.

    Asking HDF5 for a dtype costs several times what reading a small array does.
    """

    def __init__(self) -> None:
        self._dtypes: dict[bytes, np.dtype[Any]] = {}
        self._in_memory: dict[np.dtype[Any], Any] = {}

    def of(self, node: Any) -> np.dtype[Any]:
        """Returns the native dtype of a dataset.

        Raises:
            TypeError, ValueError: NumPy has none.
        """
        kind = node.get_type()
        try:
            said = kind.encode()
        except Exception:  # some types cannot be said in bytes
            return _native(kind.dtype)
        found = self._dtypes.get(said)
        if found is None:
            found = self._dtypes[said] = _native(kind.dtype)
        return found

    def in_memory(self, dtype: npt.DTypeLike) -> Any:
        """Returns the HDF5 type of an array of a native dtype."""
        import h5py

        dtype = np.dtype(dtype)
        found = self._in_memory.get(dtype)
        if found is None:
            found = self._in_memory[dtype] = h5py.h5t.py_create(dtype)
        return found


def not_numbers(dtype: np.dtype[Any]) -> str | None:
    """Says what a dtype is that cannot be a column of numbers; ``None`` for one that can.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.h5_types import not_numbers
        >>> not_numbers(np.dtype("float32")), not_numbers(np.dtype("S3"))
        (None, 'text or values of varying length')
    """
    if dtype in _NUMBERS:
        return None
    if dtype.kind in "OSU":
        return "text or values of varying length"
    if dtype.names:
        return "records with named fields"
    return f"values of type {dtype}"


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")
