"""State on disk that is whole at every instant, whatever is killed in the middle of what.

Layers: ``files`` (mapped files that grow), ``journal`` (what an operation is about to overwrite),
``states`` (numbers that change all at once), ``home`` (the folder that holds them).
"""

from __future__ import annotations

from replaykit.recovery.commit_lock import CommitLock
from replaykit.recovery.exclusive import Exclusive
from replaykit.recovery.files import MappedFile
from replaykit.recovery.home import Home, check_file
from replaykit.recovery.journal import Journal
from replaykit.recovery.states import States

__all__ = ["CommitLock", "Exclusive", "Home", "Journal", "MappedFile", "States", "check_file"]
