"""Errors of the HDF5 library, as ones that name the file and the place in it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from replaykit.datasets.engine.signature import AT_SOURCE
from replaykit.errors import CorpusError

__all__ = ["FAULTS", "naming"]

FAULTS: Final = (
    OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError,
)  # fmt: skip
"""What h5py makes of the errors of HDF5."""


class naming:
    """Turns whatever the HDF5 library raises into an error that names the file and the place.

    A context manager without a generator: it is entered for every array that is read.
    """

    __slots__ = ("_is_verified", "_path", "_where")

    def __init__(self, path: Path, where: str | None, is_verified: bool) -> None:
        self._path = path
        self._where = where
        self._is_verified = is_verified

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, FAULTS):
            return
        place = str(self._path) if self._where is None else f"{self._path}: {self._where}"
        if isinstance(error, CorpusError):
            raise CorpusError(f"{place}: {error} [V03]") from error
        if isinstance(error, MemoryError):
            why = f"too large to read in one piece ({error})"
            raise CorpusError(f"{place}: {why} [V03]") from error
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return
        cause = str(error.args[-1] if error.args else error)
        remedy = _remedy(cause, self._is_verified)
        raise CorpusError(f"{place}: cannot be read ({cause}); {remedy} [V03]") from error


def _remedy(cause: str, is_verified: bool) -> str:
    if "lock file" in cause or "already open for write" in cause:
        return "it is open for writing: close it there first"
    if "plugin" in cause or "required filter" in cause:
        return "install the HDF5 plugin for its compression, for example `pip install hdf5plugin`"
    if is_verified:
        return f"the file is cut short or damaged: {AT_SOURCE}"
    return "the file is cut short or damaged: fetch it again"
