"""State on disk that is whole at every instant, whatever is killed in the middle of what.

Layers: ``files`` (mapped files that grow), ``journal`` (what an operation is about to overwrite),
``states`` (numbers that change all at once), ``manifest`` (of what storage), ``home`` (the folder
that holds them). For several processes at a time ``shared_lock``, ``members`` (who uses a folder),
``change_log`` (what to look at anew), ``views`` (who may write without a word) and ``forked`` (what
torch needs in children).
"""

from __future__ import annotations

from replaykit.recovery.change_log import ChangeLog
from replaykit.recovery.commit_lock import CommitLock
from replaykit.recovery.exclusive import Exclusive, let_go_in_children
from replaykit.recovery.files import MappedFile
from replaykit.recovery.forked import one_thread_in_children
from replaykit.recovery.home import Home
from replaykit.recovery.journal import Journal
from replaykit.recovery.manifest import check_file
from replaykit.recovery.members import MEMBERS, Members, give_up_rows, who_uses
from replaykit.recovery.open_file import OpenFile, is_held, open_to_lock
from replaykit.recovery.shared_lock import SharedLock, check_flock
from replaykit.recovery.states import States
from replaykit.recovery.views import GivenViews

__all__ = [
    "MEMBERS",
    "ChangeLog",
    "CommitLock",
    "Exclusive",
    "GivenViews",
    "Home",
    "Journal",
    "MappedFile",
    "Members",
    "OpenFile",
    "SharedLock",
    "States",
    "check_file",
    "check_flock",
    "give_up_rows",
    "is_held",
    "let_go_in_children",
    "one_thread_in_children",
    "open_to_lock",
    "who_uses",
]
