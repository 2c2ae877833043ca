"""Import replaykit from the folder that an environment variable names.

An interpreter loads this module when it starts with this folder on ``PYTHONPATH``, and so do the
interpreters that it starts. An editable installation finds replaykit by a finder of its own, which
comes before every path; this finder comes before that one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = ("replaykit", "replaykit_command")


class Redirect:
    """Find the modules of replaykit in one folder.

    Args:
        folder: the folder that holds the packages.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of replaykit, or None for other modules."""
        top, _, below = name.partition(".")
        if top not in PACKAGES:
            return None
        found = PathFinder.find_spec(name, path if below else [self.folder], target)
        if found is None:
            # The next finder would find the module of the installed version.
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


if "REPLAYKIT_BENCHMARKED" in os.environ:
    sys.meta_path.insert(0, Redirect(os.environ["REPLAYKIT_BENCHMARKED"]))
