"""Manage the folder that says which rows of a storage count."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaykit import native
from replaykit._version import __version__
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, sync_directory
from replaykit.recovery.journal import Journal, MappedFile, States
from replaykit.recovery.locks import Exclusive

__all__ = [
    "FORMAT",
    "KEPT",
    "LOCK",
    "MAKING",
    "MANIFEST",
    "SHARED",
    "Home",
    "check_file",
    "read_manifest",
    "write_manifest",
]

FORMAT = "replaykit-recovery"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What ``write_manifest`` has written; None: there is none.

    Raises:
        CheckpointError: it is damaged, or of a newer version; names the file.
    """
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    check_file(file, 0, exactly=False)
    try:
        record = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not that of a storage that can be recovered")
    if type(record.get("format_version")) is not int or record["format_version"] < 1:
        raise CheckpointError(f"{file} has no version")
    if record["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"expected {file} of version {FORMAT_VERSION} or older, got {record['format_version']}"
        )
    content = record.get("content")
    if not isinstance(content, dict) or record.get("crc32") != _checksum(content):
        raise CheckpointError(f"{file} is damaged: its checksum is another one")
    return content


def write_manifest(folder: Path, content: Mapping[str, Any], version: int) -> None:
    """Puts a manifest in its place in one step, durably.

    Args:
        version: the oldest one of the format that knows of all of it.

    Raises:
        OSError: the disk refused; what was there still is.
    """
    record = {
        "format": FORMAT,
        "format_version": version,
        "library_version": __version__,
        "content": dict(content),
        "crc32": _checksum(content),
    }
    draft = folder / f".{MANIFEST}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / MANIFEST)
    sync_directory(folder)


def check_file(file: Path, nbytes: int, *, exactly: bool = True) -> None:
    """Raises CheckpointError where there is no such file of so many bytes, or at least so many.

    A link is none: what is written goes where the storage is, and nowhere else.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"expected {nbytes} bytes in {file}, which is gone") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"expected a file of {nbytes} bytes, got none of that kind: {file}")
    if found.st_size < nbytes or (exactly and found.st_size != nbytes):
        raise CheckpointError(f"expected {nbytes} bytes in {file}, got {found.st_size}")


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


Array = np.ndarray[Any, Any]

KEPT, SHARED = "%recovery", "%shared"
MAKING = "making"
LOCK = "lock"
_JOURNAL_BYTES = 1 << 16
_TABLE = re.compile(r"table-(\d{1,9})-([1-9]\d{0,8})\.bin")


class Home:
    """Manifest, journal, states and tables of one storage, for one process at a time, or for
    several that take turns.

    A table is an array of rows in a file of its own, by number. Rows of the storage's own files are
    given as targets too: the journal takes them back as it does those of tables. Nothing that was
    changed counts before ``commit``, which is one store of 8 bytes; what was changed and noted
    since the last one is taken back by ``roll_back``, or by who opens the folder next.

    Args:
        scratch_dir: the folder of the storage's files.
        durable: commits hold across a loss of power too.
        shared: several processes have it open, forked ones too; who calls holds a SharedLock.

    Raises:
        RuntimeError: not ``shared``, and another process, or another storage of this one, has it
            open.
        OSError: the folder cannot be made or opened.
    """

    def __init__(self, scratch_dir: Path, *, durable: bool = False, shared: bool = False) -> None:
        self.folder = scratch_dir / (SHARED if shared else KEPT)
        self.durable, self.shared = durable, shared
        make_directory(self.folder)
        try:
            self._lock = None if shared else Exclusive(self.folder / LOCK)
        except BlockingIOError:
            raise RuntimeError(
                f"{scratch_dir} is in use by another process, or by another storage of this one; "
                "one at a time can recover it"
            ) from None
        self.process = os.getpid()
        self._manifest = str(self.folder / MANIFEST)
        self._targets: dict[int, Array] = {}
        self._tables: dict[int, tuple[MappedFile, Array]] = {}
        self._found: dict[int, int] = {}
        self._more: list[Path] = []
        self._rows: dict[int, Array] = {}
        self._commits: Any = None
        """What the core does of it, as long as nothing has to grow; see ``_look``."""

    # -- manifest -----------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any] | None:
        """What ``publish`` has written; None: it has not come to that.

        Raises:
            CheckpointError: it is damaged, or of a newer version; names the file.
        """
        return read_manifest(self.folder)

    def publish(self, content: Mapping[str, Any], *, version: int = 1) -> None:
        """Writes the manifest in one step: from now on there is a storage to recover.

        Where commits hold across a loss of power, the files of the rows are on the disk before.

        Args:
            version: the oldest one of the format that knows of all of it.

        Raises:
            OSError: the disk refused; there is none then.
        """
        if self.durable:
            self._sync_rows()
            for folder in {above for path in self._more for above in self._folders_of(path)}:
                sync_directory(folder)
        write_manifest(self.folder, content, version)

    @property
    def published(self) -> bool:
        """Whether there is a manifest."""
        return os.path.exists(self._manifest)

    @property
    def half_made(self) -> bool:
        """Whether somebody began to make a storage here and did not come to publish it."""
        return (self.folder / MAKING).exists()

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """While the files are made of which the manifest will tell: what they hold is nobody's."""
        # It stays if that fails: the files are there, and are made anew the next time.
        mark = self.folder / MAKING
        mark.touch()
        (self.folder / MANIFEST).unlink(missing_ok=True)  # published by an attempt that failed
        sync_directory(self.folder)
        yield
        mark.unlink()

    # -- open ---------------------------------------------------------------------------------

    def open(self, targets: Mapping[int, Array], *, fresh: bool = False) -> Array:
        """Opens journal and states, takes back what was not committed, and returns the state.

        Args:
            targets: the rows of the storage's files by number, uint8 ``[N, bytes]``.
            fresh: the files of the rows were just made: what else is there means nothing.

        Raises:
            CheckpointError: a file is missing, damaged or does not fit the others; names it.
                Nothing was changed.
        """
        self._targets.update(targets)
        self._rows = dict(targets)
        state = 4096  # the smallest page there is
        at_least = {"journal.bin": _JOURNAL_BYTES, "state-0.bin": state, "state-1.bin": state}
        for name, nbytes in at_least.items():
            file = self.folder / name
            if fresh:
                file.unlink(missing_ok=True)
            else:
                check_file(file, nbytes, exactly=False)
        try:
            self.states = States(self.folder, durable=self.durable)
            self.journal = Journal(
                MappedFile(self.folder / "journal.bin", _JOURNAL_BYTES), durable=self.durable
            )
            for file in sorted(self.folder.glob("table-*.bin")):
                if fresh:
                    file.unlink()
                elif parts := _TABLE.fullmatch(file.name):
                    check_file(file, 0, exactly=False)
                    self._found[int(parts[1])] = file.stat().st_size
                    if file.stat().st_size:  # else a kill came before it was used
                        self._map_table(int(parts[1]), int(parts[2]), 0)
            if self.journal.sequence > self._next:
                raise ValueError(
                    f"{self.folder} has lost its latest state: the journal is that of number "
                    f"{self.journal.sequence}, the latest one there is {self.states.sequence}"
                )
            if self.journal.undo(self._next, self._targets):
                self._sync_rows()
                self.journal.forget(self._next)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._look()
        return self.states.latest()

    def _look(self) -> None:
        """Hands the core the memory of journal and states, which is elsewhere once they grow."""
        core = native.core()
        if core is not None and not self.durable and sys.byteorder == "little":
            even, odd = self.states.memory
            self._commits = core.Commits(self.journal.memory, even, odd, list(self._rows.items()))

    def check_table(self, number: int, dtype: Any, rows: int) -> None:
        """Raises CheckpointError where a table with so many rows is not there; names its file."""
        width = np.dtype(dtype).itemsize
        found = self._found.get(number, 0)  # as it was before it was mapped, by whole pages
        if rows * width > found or (rows and number not in self._tables):
            file = self._table_file(number, width)
            raise CheckpointError(f"expected {rows * width} bytes in {file}, got {found}")

    def _table_file(self, number: int, width: int) -> Path:
        return self.folder / f"table-{number}-{width}.bin"

    def _folders_of(self, path: Path) -> list[Path]:
        """Those that lead to a file of the rows, from the storage's own on."""
        top = self.folder.parent
        return [above for above in path.parents if above == top or top in above.parents]

    def sync_with(self, files: list[Path]) -> None:
        """Says which files hold the rows, for commits that hold across a loss of power."""
        self._more = files

    def also(self, targets: Mapping[int, Array], files: Iterable[Path]) -> None:
        """Takes on more rows, or those of files that have grown; see ``open`` and ``sync_with``."""
        self._targets.update(targets)
        fresh = [file for file in files if file not in self._more]
        self._more = [*self._more, *fresh]
        if self.durable:
            for folder in {above for file in fresh for above in self._folders_of(file)}:
                sync_directory(folder)

    @property
    def _next(self) -> int:
        return self.states.sequence + 1

    # -- changes ------------------------------------------------------------------------------

    def note(self, target: int, at: Array | range) -> None:
        """Notes rows of a target that are about to be overwritten.

        Raises:
            OSError: no room; nothing may be overwritten. RuntimeError: in a forked process.
        """
        if not self.shared:
            self.check_process()
        if type(at) is range:
            if at.stop > at.start:
                cells = self._targets[target]
                self.journal.save_run(self._next, target, cells, at.start, at.stop)
        else:
            self.journal.save(self._next, target, self._targets[target], at)

    def note_rows(self, first: int, until: int) -> tuple[int, int]:
        """``note`` of some rows of the storage's files, from ``first`` to ``until``: what every
        write of a few rows does.

        Returns:
            As ``noted`` before it.
        """
        if not self.shared:
            self.check_process()
        before, commits = self.noted(), self._commits
        if commits is None or not commits.note(first, until):
            for target, cells in self._rows.items():
                self.journal.save_run(before[0], target, cells, first, until)
            self._look()
        return before

    def check_process(self) -> None:
        """Raises RuntimeError in a forked process, which reads only."""
        if not self.shared and os.getpid() != self.process:
            raise RuntimeError(
                f"the rows in {self.folder.parent} are those of process {self.process}; a forked "
                "process reads them only"
            )

    def table(self, number: int, dtype: Any, rows: int) -> Array:
        """Rows of a table, ``[N]`` with N at least ``rows``; made of zeros."""
        width = np.dtype(dtype).itemsize
        known = self._tables.get(number)
        if known is None or len(known[1]) < rows:
            self._map_table(number, width, rows)
        return self._tables[number][1].view(dtype)[:, 0]

    def _map_table(self, number: int, width: int, rows: int) -> None:
        known = self._tables.get(number)
        if known is None:
            file = MappedFile(self._table_file(number, width), rows * width)
            if self.durable:
                sync_directory(self.folder)
        else:
            file = known[0]
            file.grow(rows * width)
        whole = len(file.bytes) // width * width
        cells = file.bytes[:whole].reshape(-1, width)
        self._tables[number], self._targets[number] = (file, cells), cells

    def set(self, number: int, values: Array, at: Array | range, *, fresh: bool = False) -> None:
        """Changes rows of a table, ``values`` ``[K]`` at ``at``.

        Args:
            fresh: nothing that was committed counts on what is there now.
        """
        commits, known = self._commits, self._tables.get(number)
        if commits is not None and known is not None and not fresh and type(at) is not range:
            if not self.shared:
                self.check_process()
            # Eight bytes are eight bytes: as int64, so that no NaN is changed on its way.
            if values.dtype.itemsize == 8 and commits.put(
                number, known[1].view(np.int64)[:, 0], at, values.view(np.int64)
            ):
                return
        top = (at.stop if isinstance(at, range) else int(at.max()) + 1) if len(at) else 0
        cells = self.table(number, values.dtype, top)
        if not fresh:
            self.note(number, at)
        if isinstance(at, range):
            cells[at.start : at.stop] = values
        else:
            cells[at] = values

    def noted(self) -> tuple[int, int]:
        """Number of the state that is being worked on, and how much was noted for it."""
        if self._commits is not None:
            found: tuple[int, int] = self._commits.noted()
            return found
        count = self._next
        return count, self.journal.used(count)

    def commit(self, numbers: Array, more: Sequence[int] = ()) -> int:
        """Has everything that was changed count, with these int64 numbers as the state.

        Returns:
            The number of the state.

        Raises:
            OSError: no room, or the disk failed; nothing of it counts yet.
        """
        if self._commits is not None and (done := self._commits.commit(numbers, more)):
            return int(done)
        if self.durable:
            self._sync_rows()
        done = self.states.commit(numbers, more)
        self._look()
        return done

    def roll_back(self, since: int = 0) -> bool:
        """Takes back what was noted since the last commit, or since ``noted`` was that much;
        whether there was anything."""
        if self.shared and self.journal.pending(self._next):
            self._map_all()
        found = self.journal.undo(self._next, self._targets, since)
        if found:
            if self.durable:  # before the journal forgets what they were
                self._sync_rows()
            self.journal.forget(self._next, since)
        return found

    def _map_all(self) -> None:
        """Maps every table as long as it is: others may have made them, or had them grow."""
        for file in self.folder.glob("table-*.bin"):
            if (parts := _TABLE.fullmatch(file.name)) and file.stat().st_size:
                number, width = int(parts[1]), int(parts[2])
                known = self._tables.get(number)
                if known is None or len(known[0]) < file.stat().st_size:
                    self._map_table(number, width, file.stat().st_size // width)

    def _sync_rows(self) -> None:
        for file, _ in self._tables.values():
            file.sync()
        for path in self._more:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
