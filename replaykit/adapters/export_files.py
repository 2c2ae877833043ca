"""Drafts of exports: written next to their target, read back, and published in one step."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from replaykit.adapters.exported_episodes import Array
from replaykit.datasets.publishing import replace_path, restore
from replaykit.filesystem import make_directory, private_path, remove_tree, siblings, sync_tree
from replaykit.recovery.locks import Exclusive, is_held

_EXPORT: Final = "export"


class Draft:
    """The hidden file or folder that an export writes.

    Attributes:
        path: its path, which does not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[dict[str, object]] = []

    def wrote(self, values: Mapping[str, Array]) -> None:
        """Note the values of the next episode, by the names that the target gives them."""
        self._written.append({name: _digest(value) for name, value in values.items()})

    def check(self, read: Callable[[int], Mapping[str, Array]]) -> None:
        """Read all episodes of the draft, and compare them with the written values.

        Args:
            read: returns the values of an episode by the same names, as a reader of the target's
                format finds them.

        Raises:
            RuntimeError: a value differs. The message names it and its episode.

        Cost: one pass over the files. Memory: one episode, and one checksum for each value.
        """
        for number, written in enumerate(self._written):
            found = read(number)
            for name, digest in written.items():
                if name not in found or _digest(found[name]) != digest:
                    raise RuntimeError(
                        f"{self.path.name} was not made: {name!r} of episode {number} differs from "
                        "the data after it was written; the disk or the library that wrote it is "
                        "at fault"
                    )


def _digest(values: Array) -> object:
    return values.dtype.str, values.shape, zlib.crc32(np.ascontiguousarray(values).data)


@contextmanager
def export_to(target: Path, *, overwrite: bool, is_export: Callable[[], bool]) -> Iterator[Draft]:
    """Yield a draft on the target's file system; publish it in one step, durably, at the end.

    The folder of the draft has a lock. So a later export can remove the drafts of exports that were
    killed, and leaves those of other running exports.

    Args:
        target: the file or folder.
        overwrite: whether to replace a former export.
        is_export: returns whether the existing target is a former export.

    Raises:
        FileExistsError: the target exists, and ``overwrite`` is False or it is no export.
    """
    make_directory(target.parent)
    running = False
    for other in siblings(target, _EXPORT):
        with suppress(OSError):  # that export has just begun or ended
            if is_held(other / "lock"):
                running = True
            else:
                remove_tree(other)
    if not running:
        restore(target)
    _check_target(target, overwrite, is_export)
    folder = private_path(target, _EXPORT)
    folder.mkdir()
    lock = None
    try:
        lock = Exclusive(folder / "lock")
        draft = Draft(folder / target.name)
        yield draft
        sync_tree(folder)
        _check_target(target, overwrite, is_export)  # another process may have made it
        replace_path(draft.path, target)
    finally:
        if lock is not None:
            lock.drop()
        remove_tree(folder)


def _check_target(target: Path, overwrite: bool, is_export: Callable[[], bool]) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it")
    if not is_export():
        raise FileExistsError(f"{target} exists and is not a former export; remove it first")
