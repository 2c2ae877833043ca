"""Whether what lies at a path is a data set's alone: nothing else is ever replaced or removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from replaykit.datasets.episode_table import GROUP_FILE
from replaykit.datasets.manifest import MANIFEST_NAME

__all__ = ["HELD_BACK", "META", "UNFINISHED_NAME", "check_own"]

META: Final = "meta.json"
HELD_BACK: Final = "meta.json.incomplete"
UNFINISHED_NAME: Final = "unfinished"
"""A file by which a directory that was not published says that its making can go on."""

_NAMES: Final = frozenset({META, HELD_BACK, UNFINISHED_NAME, MANIFEST_NAME, GROUP_FILE})
_COLUMN: Final = ".memmap"


def check_own(path: Path) -> None:
    """Looks whether all that lies at a path could be a data set's, whole or damaged.

    Args:
        path: a directory, or where nothing is.

    Raises:
        RuntimeError: there are files of somebody else; names one.

    Cost: lists the directory, and those in it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.datasets.own_files import check_own
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     check_own(Path(folder))
        ...     _ = Path(folder, "notes.txt").write_text("mine")
        ...     try:
        ...         check_own(Path(folder))
        ...     except RuntimeError as error:
        ...         print(str(error).partition(" holds ")[2].partition(":")[0])
        notes.txt, which is no part of a data set
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise RuntimeError(
            f"{path} is no directory, and only data sets are replaced or removed; move it away, "
            "or choose another place"
        )
    for folder, folders, files in os.walk(path, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        others = [name for name in files if not (name in _NAMES or name.endswith(_COLUMN))]
        for name in (*links, *others):
            found = os.path.relpath(os.path.join(folder, name), path)
            raise RuntimeError(
                f"{path} holds {found}, which is no part of a data set: only data sets are "
                "replaced or removed; move it away, or choose another place"
            )


def _raise(error: OSError) -> None:
    raise error
