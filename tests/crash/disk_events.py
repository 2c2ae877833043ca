"""Record what a program does to the files below a folder: writes, sizes, names and syncs.

The recorder wraps the functions of `os` that change names or sync. Stores into mapped files pass no
function, so the recorder compares all files with its last copy before and after each wrapped call.
The difference is a list of sectors, each with its new bytes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["SECTOR", "Begun", "Done", "Entries", "Event", "Recorder", "Sized", "Synced", "Wrote"]

SECTOR = 512
"""Bytes that a disk writes as a whole."""


class Wrote(NamedTuple):
    """New bytes of some sectors of a file."""

    node: int
    sectors: dict[int, bytes]


class Sized(NamedTuple):
    """A new length of a file."""

    node: int
    size: int


class Entries(NamedTuple):
    """One change of names, which a file system makes as a whole.

    ``changes`` has the directory, the name, and the new node of the name, or None if it is gone.
    A rename has two changes, all other calls have one.
    """

    changes: tuple[tuple[int, str, int | None], ...]


class Synced(NamedTuple):
    """A sync of a file or of a directory."""

    node: int


class Begun(NamedTuple):
    """The workload has begun a step."""

    step: int


class Done(NamedTuple):
    """The workload has completed a step, whose state is durable from here on."""

    step: int


Event = Wrote | Sized | Entries | Synced | Begun | Done

_CALLS = ("link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink")
_SYNCS = ("fdatasync", "fsync")


class Recorder:
    """Records the events below a folder, from ``__enter__`` to ``__exit__``.

    Files and directories have numbers, called nodes. The folder is node 0. What it holds at the
    beginning is durable.

    Args:
        root: the folder.
        lines_of: ends of paths of source files. The recorder compares the files at each line of
            them too, so that it sees the order of stores into mapped files between two calls.
        lost: whether the sync of a file, given its path below the folder, does not reach the disk.
            Tests use it to break the package.

    Attributes:
        events: the recorded events.
        start: the number of events for what the folder held at the beginning.
        directories: the nodes of directories.
        paths: the last known path of each node, for messages.
    """

    def __init__(
        self,
        root: Path,
        *,
        lines_of: tuple[str, ...] = (),
        lost: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self.root, self._lines_of, self._lost = root, lines_of, lost
        self.events: list[Event] = []
        self.start = 0
        self.directories = {0}
        self.paths = {0: "."}
        self._lock = threading.RLock()
        self._is_busy = False
        self._originals: dict[str, Any] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        # An open descriptor keeps the system from using an inode again for another file.
        self._opened: dict[int, int] = {}
        self._entries: dict[int, dict[str, int]] = {0: {}}
        self._content: dict[int, bytes] = {}

    # -- marks of the workload ----------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark the begin and the end of a step."""
        self.begin(number)
        yield
        self.end(number)

    def begin(self, number: int) -> None:
        """Mark that the workload begins to make the state ``number`` durable."""
        self._compare()
        self.events.append(Begun(number))

    def end(self, number: int) -> None:
        """Mark that the state ``number`` counts as durable."""
        self._compare()
        self.events.append(Done(number))

    # -- wrapped calls ------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._open = os.open
        self._node_of(os.stat(self.root), self.root)
        self._compare()
        self.events += [Synced(node) for node in self._opened]
        self.start = len(self.events)
        for name in (*_CALLS, *_SYNCS, "open"):
            self._originals[name] = getattr(os, name)
            wrap = self._wrapped_sync if name in _SYNCS else self._wrapped
            setattr(os, name, wrap(self._originals[name]))
        if self._lines_of:
            self._traced = sys.gettrace()
            sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines_of:
            sys.settrace(self._traced)
        for name, original in self._originals.items():
            setattr(os, name, original)
        for descriptor in self._opened.values():
            os.close(descriptor)

    def _wrapped(self, original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if original is self._open and not arguments[1] & os.O_CREAT:
                return original(*arguments, **keywords)
            with self._lock:
                self._compare()
                try:
                    return original(*arguments, **keywords)
                finally:
                    self._compare()

        return call

    def _wrapped_sync(self, original: Any) -> Any:
        def call(descriptor: Any) -> None:
            with self._lock:
                self._compare()
                status = os.fstat(descriptor)
                node = self._nodes.get((status.st_dev, status.st_ino))
                if node is not None and not self._lost(self.paths[node]):
                    self.events.append(Synced(node))

        return call

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename.endswith(self._lines_of) else None

    def _trace_line(self, frame: Any, event: str, argument: Any) -> Any:
        if not self._is_busy:
            with self._lock:
                self._compare(names=False)
        return self._trace_line

    # -- comparison ---------------------------------------------------------------------------

    def _compare(self, *, names: bool = True) -> None:
        """Record how the files differ from the last copy."""
        if self._is_busy:  # a call of the comparison itself
            return
        self._is_busy = True
        try:
            if names:
                self._compare_names()
            for node in [*self._content]:
                self._compare_file(node)
        finally:
            self._is_busy = False

    def _compare_names(self) -> None:
        before, self._entries = self._entries, {}
        todo = [(0, f"{self.root}/")]
        start = len(todo[0][1])
        while todo:
            node, path = todo.pop()
            found = self._entries[node] = {}
            for entry in os.scandir(path):
                status = entry.stat(follow_symlinks=False)
                inner = found[entry.name] = self._node_of(status, entry.path)
                self.paths[inner] = entry.path[start:]
                if entry.is_dir(follow_symlinks=False):
                    self.directories.add(inner)
                    todo.append((inner, f"{entry.path}/"))
        changes = [
            (node, name, before.get(node, {}).get(name), self._entries.get(node, {}).get(name))
            for node in sorted({*before, *self._entries})
            for name in sorted({*before.get(node, {}), *self._entries.get(node, {})})
        ]
        self._record_names([change for change in changes if change[2] != change[3]])
        there = {node for entries in self._entries.values() for node in entries.values()}
        for node in there - self.directories:
            self._content.setdefault(node, b"")
        for node in [node for node in self._content if node not in there]:
            del self._content[node]

    def _record_names(self, changes: list[tuple[int, str, int | None, int | None]]) -> None:
        """Record changes of names; those that move a node are one event."""
        while changes:
            some, changes = [changes[0]], changes[1:]
            moved = {*some[0][2:]} - {None}
            for change in [*changes]:
                if moved & {*change[2:]}:
                    changes.remove(change)
                    some.append(change)
                    moved |= {*change[2:]} - {None}
            self.events.append(Entries(tuple((node, name, new) for node, name, _, new in some)))

    def _compare_file(self, node: int) -> None:
        descriptor, old = self._opened[node], self._content[node]
        new = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if new == old:
            return
        self._content[node] = new
        length = -(-max(len(old), len(new)) // SECTOR) * SECTOR
        one, other = (
            np.frombuffer(data.ljust(length, b"\0"), np.uint64).reshape(-1, SECTOR // 8)
            for data in (old, new)
        )
        changed = np.flatnonzero((one != other).any(1)).tolist()
        if changed:
            self.events.append(Wrote(node, {at: other[at].tobytes() for at in changed}))
        if len(new) != len(old):
            self.events.append(Sized(node, len(new)))

    def _node_of(self, status: os.stat_result, path: str | Path) -> int:
        key = status.st_dev, status.st_ino
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = len(self._nodes)
            self._opened[node] = self._open(path, os.O_RDONLY)
        return node
