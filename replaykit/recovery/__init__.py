"""State on disk that is whole at every instant, whatever is killed in the middle of what.

Layers: ``files`` (mapped files that grow), ``journal`` (what an operation is about to overwrite),
``states`` (numbers that change all at once), ``manifest`` (of what storage), ``home`` (the folder
that holds them). For several processes at a time ``shared_lock``, ``members`` (who uses a folder),
``change_log`` (what to look at anew), ``views`` (who may write without a word) and ``forked`` (what
torch needs in children).
"""

from __future__ import annotations

from replaykit.recovery.journal import Journal, MappedFile, States
from replaykit.recovery.locks import (
    CommitLock,
    Exclusive,
    OpenFile,
    SharedLock,
    check_flock,
    is_held,
    let_go_in_children,
    one_thread_in_children,
    open_to_lock,
)
from replaykit.recovery.processes import (
    MEMBERS,
    ChangeLog,
    GivenViews,
    ProcessRegistry,
    give_up_rows,
    who_uses,
)
from replaykit.recovery.recovery_folder import Home, check_file

__all__ = [
    "MEMBERS",
    "ChangeLog",
    "CommitLock",
    "Exclusive",
    "GivenViews",
    "Home",
    "Journal",
    "MappedFile",
    "OpenFile",
    "ProcessRegistry",
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
