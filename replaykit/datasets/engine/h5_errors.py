"""Errors of the HDF5 library, as ones that name the file and the place in it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replaykit.datasets.engine.signature import AT_SOURCE
from replaykit.errors import CorpusError

__all__ = ["naming"]


@contextmanager
def naming(path: Path, where: str | None, is_verified: bool) -> Iterator[None]:
    """Turns whatever the HDF5 library raises into an error that names the file and the place."""
    place = str(path) if where is None else f"{path}: {where}"
    try:
        yield
    except CorpusError as error:
        raise CorpusError(f"{place}: {error} [V03]") from error
    except MemoryError as error:
        raise CorpusError(f"{place}: too large to read in one piece ({error}) [V03]") from error
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        cause = str(error.args[-1] if error.args else error)
        remedy = _remedy(cause, is_verified)
        raise CorpusError(f"{place}: cannot be read ({cause}); {remedy} [V03]") from error


def _remedy(cause: str, is_verified: bool) -> str:
    if "lock file" in cause or "already open for write" in cause:
        return "it is open for writing: close it there first"
    if "plugin" in cause or "required filter" in cause:
        return "install the HDF5 plugin for its compression, for example `pip install hdf5plugin`"
    if is_verified:
        return f"the file is cut short or damaged: {AT_SOURCE}"
    return "the file is cut short or damaged: fetch it again"
