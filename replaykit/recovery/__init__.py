"""Keep state on disk that is valid at every instant, even if a process is killed.

- ``journal``: mapped files that grow, a journal of old rows, and states that change atomically.
- ``recovery_folder``: the manifest, and the folder that holds all these files.
- ``locks``: locks of folders and files between processes and their forked children.
- ``processes``: records of the processes that use a folder, of their views and of their changes.
"""

from __future__ import annotations

from replaykit.recovery.journal import Journal, MappedFile, States
from replaykit.recovery.locks import (
    CommitLock,
    Exclusive,
    OpenFile,
    SharedLock,
    check_flock,
    drop_in_children,
    is_held,
    one_thread_in_children,
    open_to_lock,
)
from replaykit.recovery.processes import (
    ElementLog,
    GivenViews,
    ProcessRegistry,
    give_up_rows,
    who_uses,
)
from replaykit.recovery.recovery_folder import (
    COUNTS,
    DESCRIPTION,
    LOCK,
    MEMBERS,
    RECOVERABLE,
    SHARED,
    RecoveryFolder,
    Tables,
    check_file,
    is_shared,
    read_manifest,
    write_manifest,
)

__all__ = [
    "COUNTS",
    "DESCRIPTION",
    "LOCK",
    "MEMBERS",
    "RECOVERABLE",
    "SHARED",
    "CommitLock",
    "ElementLog",
    "Exclusive",
    "GivenViews",
    "Journal",
    "MappedFile",
    "OpenFile",
    "ProcessRegistry",
    "RecoveryFolder",
    "SharedLock",
    "States",
    "Tables",
    "check_file",
    "check_flock",
    "drop_in_children",
    "give_up_rows",
    "is_held",
    "is_shared",
    "one_thread_in_children",
    "open_to_lock",
    "read_manifest",
    "who_uses",
    "write_manifest",
]
