"""Manage the folder that records which rows of a storage are committed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaykit import native
from replaykit._version import __version__
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, replace_file, sync_directory, sync_file
from replaykit.recovery.journal import Journal, MappedFile, States
from replaykit.recovery.locks import Exclusive, is_held

FORMAT = "replaykit-recovery"
FORMAT_VERSION = 5
MANIFEST = "manifest.json"


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, Any] | None:
    """Return the content of a manifest, or None if there is none.

    Args:
        folder: the folder of the manifest.
        name: the name of its file.

    Raises:
        CheckpointError: the manifest is damaged, or has a newer format; the error names the file.
    """
    file = folder / name
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
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    return content


def write_manifest(
    folder: Path, content: Mapping[str, Any], version: int, name: str = MANIFEST
) -> None:
    """Write or replace a manifest in one step, durably.

    Args:
        folder: the folder of the manifest.
        content: the values to write.
        version: the oldest version of the format that has all parts of the content.
        name: the name of its file.

    Raises:
        OSError: a write to the disk failed. An old manifest is unchanged.
    """
    record = {
        "format": FORMAT,
        "format_version": version,
        "library_version": __version__,
        "content": dict(content),
        "crc32": _checksum(content),
    }
    replace_file(folder / name, json.dumps(record), draft=folder / f".{name}")


def check_file(file: Path, nbytes: int, *, exactly: bool = True) -> None:
    """Raise CheckpointError unless a file has ``nbytes`` bytes, or at least as many.

    A link also raises the error, so that all writes stay in the folder of the storage.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"expected {nbytes} bytes in {file}, which is gone") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"expected a file of {nbytes} bytes, got something else: {file}")
    if found.st_size < nbytes or (exactly and found.st_size != nbytes):
        raise CheckpointError(f"expected {nbytes} bytes in {file}, got {found.st_size}")


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def is_shared(home: Path) -> bool:
    """Return whether processes share the rows whose recovery folder is ``home``."""
    try:
        return is_held(home / MEMBERS)
    except FileNotFoundError:
        return False


Array = np.ndarray[Any, Any]

RECOVERABLE, SHARED = "%recovery", "%shared"
MAKING = "making"
LOCK = "lock"
MEMBERS = "members"
COUNTS = "pace.bin"
"""File with the counts of a rate limiter."""
DESCRIPTION = "sharing.json"
"""File with the description of the storage for processes that join."""


class Tables:
    """The numbers of all tables, and of the other targets of the journal.

    - ``POSITIONS``, ``GENERATIONS``: the tables of a ledger.
    - ``REFERENCES``: the references of rows to observations.
    - ``PRIORITIES``: the priorities of the first sampler; those of the next one have the next
      number.
    - ``CHANGED``, ``SIGNS``, ``ROWS_WRITTEN``, ``PRIORITIES_SET``: for processes that share the
      rows. They are the log of changed elements, the signs for readers without the lock, and the
      chunks to write at the next save.
    - ``TAKEN``: the rows that were taken from a queue.
    - ``TAGS``, ``CUTS``: the first of two logs of tags and of two logs of cuts; see
      ``storages.commit_state.write_log``.
    - ``ENTRIES``, ``ROWS``: the first file of overflow entries, and the first file of rows.
    """

    POSITIONS, GENERATIONS, CHANGED, SIGNS = range(4)
    OVERFLOW_BEFORE_4, STEPS_BEFORE_4 = 4, 5
    REFERENCES, PRIORITIES = 6, 8
    ROWS_WRITTEN, PRIORITIES_SET, TAKEN, TAGS, CUTS = 400, 401, 402, 403, 405
    ENTRIES, ROWS = 500, 1000

    @staticmethod
    def dtype(number: int) -> np.dtype[Any]:
        """Return the dtype of a table; a pair of references is one number."""
        if number in (Tables.OVERFLOW_BEFORE_4, Tables.STEPS_BEFORE_4):
            return np.dtype(np.int32)
        prioritized = Tables.PRIORITIES <= number < Tables.ROWS_WRITTEN
        return np.dtype(np.float64 if prioritized else np.int64)


_FOLLOWING = (
    Tables.CHANGED,
    Tables.SIGNS,
    Tables.ROWS_WRITTEN,
    Tables.PRIORITIES_SET,
)
_FOLLOWING_BEFORE_5 = (6, 7)
"""Tables that only processes that share the rows need. In older folders they also had the numbers 6
and 7, unless 6 held references."""

_NONE = -1
"""The process that may write after a storage was closed."""
_JOURNAL_BYTES = 1 << 16
_TABLE = re.compile(r"table-(\d{1,9})-([1-9]\d{0,8})\.bin")


class RecoveryFolder:
    """The manifest, journal, states and tables of one storage.

    They are used by one process, or by several processes that take turns. A table is an array of
    rows in a separate file, and has a number. A target of the journal is a table, or a file with
    rows of the storage. Changes are committed only by ``commit``, with one store of 8 bytes.
    Journaled changes since the last commit are undone by ``roll_back``, or by the next process that
    opens the folder.

    Args:
        scratch_dir: the folder of the storage's files.
        durable: whether commits also survive a loss of power.
        shared: whether several processes, including forked processes, have the folder open. The
            caller of each method then holds a SharedLock.
        recoverable: whether a later storage recovers the rows. It needs to be False only if
            ``shared`` is True.

    Raises:
        RuntimeError: ``shared`` is False, but another process, or another storage of this process,
            has the folder open.
        OSError: the folder cannot be made or opened.
    """

    def __init__(
        self,
        scratch_dir: Path,
        *,
        durable: bool = False,
        shared: bool = False,
        recoverable: bool = True,
    ) -> None:
        self.folder = scratch_dir / (RECOVERABLE if recoverable else SHARED)
        self.durable, self.shared = durable, shared
        make_directory(self.folder)
        self._lock: Exclusive | None = None
        if not shared:
            try:
                self._lock = Exclusive(self.folder / LOCK)
            except BlockingIOError:
                raise RuntimeError(
                    f"{scratch_dir} is in use by another process, or by another storage of this "
                    "one; only one at a time can recover it"
                ) from None
            if is_shared(self.folder):
                gc.collect()  # unreferenced members may not have been collected yet
            if is_shared(self.folder):
                self._lock.drop()
                raise RuntimeError(
                    f"{scratch_dir} is in use by processes that share its rows; use "
                    "ReplayBuffer.join() to share them too"
                )
        self.process = os.getpid()
        self._manifest = str(self.folder / MANIFEST)
        self._targets: dict[int, Array] = {}
        self._tables: dict[int, tuple[MappedFile, Array]] = {}
        self._found: dict[int, int] = {}
        self._more: list[Path] = []
        self._rows: dict[int, Array] = {}
        self._commits: Any = None
        """The core's commits, used while no file has to grow; see ``_pass_addresses``."""

    def close(self) -> None:
        """Release the lock of the folder, so that another storage can open it.

        From then on this object only reads, as in a forked process.
        """
        if self._lock is not None:
            self._lock.drop()
        self.process = _NONE

    # -- manifest -----------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any] | None:
        """Return the content of the manifest, or None before ``publish``.

        Raises:
            CheckpointError: the manifest is damaged, or has a newer format; the error names the
                file.
        """
        return read_manifest(self.folder)

    def publish(self, content: Mapping[str, Any], *, version: int = 1) -> None:
        """Write the manifest in one step, after which the storage can be recovered.

        If commits are durable, all other files are synced first.

        Args:
            version: the oldest version of the format that has all parts of the content.

        Raises:
            OSError: a write to the disk failed. There is no manifest then.
        """
        if self.durable:
            # The first commit syncs neither the length of the journal nor that of the other state.
            self.journal.sync()
            self.states.sync()
            self._sync_rows()
            folders = {above for path in self._more for above in self._folders_of(path)}
            for folder in {self.folder, *folders}:
                sync_directory(folder)
        write_manifest(self.folder, content, version)

    @property
    def published(self) -> bool:
        """True if there is a manifest."""
        return os.path.exists(self._manifest)

    @property
    def half_made(self) -> bool:
        """True if a storage in the folder was begun, but not published."""
        return (self.folder / MAKING).exists()

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Mark the folder as ``half_made`` while the files of a new storage are made."""
        # After a failure the mark stays, and the next attempt makes the files again.
        mark = self.folder / MAKING
        mark.touch()
        (self.folder / MANIFEST).unlink(missing_ok=True)  # left by an attempt that failed
        sync_directory(self.folder)
        yield
        mark.unlink()

    # -- open ---------------------------------------------------------------------------------

    def open(
        self,
        targets: Mapping[int, Array],
        *,
        fresh: bool = False,
        undoing: Callable[[], None] | None = None,
    ) -> Array:
        """Open the journal and the states, undo uncommitted changes, and return the state.

        Args:
            targets: the rows of the storage's files, uint8 ``[N, bytes]``, by target number.
            fresh: whether the files of the rows are new. If so, old journals, states and tables are
                removed.
            undoing: function to call before uncommitted changes are undone.

        Raises:
            CheckpointError: a file is missing or damaged, or contradicts the other files. The error
                names it. Nothing has changed then.
        """
        self._targets.update(targets)
        self._rows = dict(targets)
        state = 4096  # the smallest page size of any system
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
                    if file.stat().st_size:  # a process killed before the first use leaves it empty
                        self._map_table(int(parts[1]), int(parts[2]), 0)
            if self.journal.sequence > self._next:
                raise ValueError(
                    f"{self.folder} has lost its latest state: the journal belongs to number "
                    f"{self.journal.sequence}, the latest state has {self.states.sequence}"
                )
            if undoing is not None and self.journal.used(self._next):
                undoing()
            if self.journal.undo(self._next, self._targets):
                self._sync_rows()
                self.journal.forget(self._next)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._pass_addresses()
        return self.states.latest()

    def _pass_addresses(self) -> None:
        """Pass the addresses of journal and states to the core; they change with growth."""
        if not self.durable and sys.byteorder == "little":
            even, odd = self.states.memory
            rows = list(self._rows.items())
            self._commits = native.core.Commits(self.journal.memory, even, odd, rows)

    def check_table(self, number: int, rows: int) -> None:
        """Raise CheckpointError, which names the file, if a table has too few rows."""
        width = Tables.dtype(number).itemsize
        found = self._found.get(number, 0)  # before the mapping extended the file to whole pages
        if rows * width > found or (rows and number not in self._tables):
            file = self._table_file(number, width)
            raise CheckpointError(f"expected {rows * width} bytes in {file}, got {found}")

    def _table_file(self, number: int, width: int) -> Path:
        return self.folder / f"table-{number}-{width}.bin"

    def _folders_of(self, path: Path) -> list[Path]:
        """Return the folders from a file of the rows up to the storage's folder."""
        top = self.folder.parent
        return [above for above in path.parents if above == top or top in above.parents]

    def sync_with(self, files: list[Path]) -> None:
        """Set the files of rows that durable commits sync."""
        self._more = files

    def also(self, targets: Mapping[int, Array], files: Iterable[Path]) -> None:
        """Add targets and files, or update targets and files that have grown.

        See ``open`` for ``targets`` and ``sync_with`` for ``files``.
        """
        self._targets.update(targets)
        fresh = [file for file in files if file not in self._more]
        self._more = [*self._more, *fresh]
        if self.durable:  # the journal may name rows of the files before a commit syncs them
            for file in self._more:
                sync_file(file)
            for folder in {above for file in fresh for above in self._folders_of(file)}:
                sync_directory(folder)

    @property
    def _next(self) -> int:
        return self.states.sequence + 1

    # -- changes ------------------------------------------------------------------------------

    def journal_rows(self, target: int, at: Array | range) -> None:
        """Journal rows of a target before they are overwritten.

        Raises:
            OSError: there is no room. The caller must not overwrite the rows.
            RuntimeError: this is a forked process.
        """
        if not self.shared:
            self.check_process()
        if type(at) is not range or at:
            self.journal.save(self._next, target, self._targets[target], at)

    def journal_file_rows(self, first: int, until: int) -> tuple[int, int]:
        """Journal the rows ``first..until`` of the storage's files.

        Every write of a few rows calls this.

        Returns:
            The result of ``journaled`` before this call.
        """
        if not self.shared:
            self.check_process()
        before, commits = self.journaled(), self._commits
        if commits is None or not commits.journal(first, until):
            for target, cells in self._rows.items():
                self.journal.save(before[0], target, cells, range(first, until))
            self._pass_addresses()
        return before

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process, which may only read."""
        if not self.shared and os.getpid() != self.process:
            owner = (
                "the storage is closed, and can only read them"
                if self.process == _NONE
                else f"they belong to process {self.process}, and a forked process only reads them"
            )
            raise RuntimeError(f"the rows in {self.folder.parent} cannot be written: {owner}")

    def table(self, number: int, rows: int) -> Array:
        """Return the rows of a table, ``[N]`` with N at least ``rows``; new rows are 0."""
        dtype, known = Tables.dtype(number), self._tables.get(number)
        if known is None or len(known[1]) < rows:
            self._map_table(number, dtype.itemsize, rows)
        return self._tables[number][1].view(dtype)[:, 0]

    def has_table(self, number: int) -> bool:
        """Return whether any process has made a table."""
        return self._table_file(number, Tables.dtype(number).itemsize).exists()

    def _map_table(self, number: int, width: int, rows: int) -> None:
        known = self._tables.get(number)
        if known is None:
            file = MappedFile(self._table_file(number, width), rows * width)
        else:
            file = known[0]
            file.grow(rows * width)
        if self.durable:  # the journal may name the new rows before a commit syncs the table
            file.sync()
            if known is None:
                sync_directory(self.folder)
        whole = len(file.bytes) // width * width
        cells = file.bytes[:whole].reshape(-1, width)
        self._tables[number], self._targets[number] = (file, cells), cells

    def drop_table(self, number: int) -> None:
        """Remove a table that no journal and no state uses any more."""
        if (known := self._tables.pop(number, None)) is not None:
            del self._targets[number]
            known[0].path.unlink()

    def drop_following(self) -> None:
        """Remove the tables that only processes that share the rows need.

        A process that writes the rows alone does not update them.
        """
        found = self.manifest()
        dedup = found is not None and "references" in found
        for number in (*_FOLLOWING, *_FOLLOWING_BEFORE_5[dedup:]):
            if number in self._tables:
                self.drop_table(number)
        (self.folder / COUNTS).unlink(missing_ok=True)
        sync_directory(self.folder)

    def set(self, number: int, values: Any, at: Array | range) -> None:
        """Journal the rows ``at`` of a table of doubles, and set them.

        ``values`` is an array ``[K]``, or one number for a range.
        """
        top = (at.stop if isinstance(at, range) else int(at.max()) + 1) if len(at) else 0
        cells = self.table(number, top)
        self.journal_rows(number, at)
        if isinstance(at, range):
            cells[at.start : at.stop] = values
        else:
            cells[at] = values

    def column(self, number: int, *logging: Any) -> Any:
        """Return a table as a ``Column`` of the core; None if the core makes no commits.

        It sets rows as long as no file has to grow. ``logging`` are its other arguments.
        """
        if self._commits is None:
            return None
        self._pass_addresses()  # the journal may have grown
        return native.core.Column(self._commits, number, self._tables[number][1], *logging)

    def journaled(self) -> tuple[int, int]:
        """Return the next state's sequence number, and the bytes journaled for it."""
        if self._commits is not None:
            found: tuple[int, int] = self._commits.journaled()
            return found
        count = self._next
        return count, self.journal.used(count)

    def commit(self, numbers: Array, more: Sequence[int] = ()) -> int:
        """Commit all changes, with the int64 ``numbers`` and ``more`` as the new state.

        Returns:
            The number of the state.

        Raises:
            OSError: there is no room, or the disk failed. Nothing is committed then.
        """
        if self._commits is not None and (done := self._commits.commit(numbers, more)):
            return int(done)
        if self.durable:
            self._sync_rows()
        done = self.states.commit(numbers, more)
        self._pass_addresses()
        return done

    def roll_back(self, since: int = 0) -> bool:
        """Undo the journaled changes since the last commit.

        Args:
            since: undo only changes after this point, the number of bytes that ``journaled``
                returned.

        Returns:
            Whether there were any changes.
        """
        if self.shared and self.journal.used(self._next):
            self._map_all()
        found = self.journal.undo(self._next, self._targets, since)
        if found:
            if self.durable:  # sync before the journal drops the old rows
                self._sync_rows()
            self.journal.forget(self._next, since)
        return found

    def _map_all(self) -> None:
        """Map all tables with their full length.

        Other processes may have made or extended them.
        """
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
            sync_file(path)


def who_uses(scratch_dir: Path, own: Path | None = None) -> str | None:
    """Return a description of the users of the rows in a folder, or None.

    Users are processes that share the rows, or a storage that recovers the rows.

    Args:
        own: the caller's recovery folder next to the files, which does not count.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.recovery_folder import who_uses
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(who_uses(Path(folder)))
        None
    """
    user, held = _user_or_lock(scratch_dir, own)
    if held is not None:
        held.drop()
    return user


def _user_or_lock(scratch_dir: Path, own: Path | None) -> tuple[str | None, Exclusive | None]:
    """Return a description of the users of the rows; without users, lock their recovery."""
    homes = [scratch_dir / name for name in (SHARED, RECOVERABLE)]
    if any(home != own and is_shared(home) for home in homes):
        return "processes that share its rows", None
    recoverable = scratch_dir / RECOVERABLE
    if recoverable == own or not recoverable.is_dir():
        return None, None
    try:
        return None, Exclusive(recoverable / LOCK)
    except BlockingIOError:
        return "another process, or another storage of this one, which recovers its rows", None


def give_up_rows(scratch_dir: Path, own: Path | None = None) -> None:
    """Give up the recovery of rows in a folder, whose files will be overwritten.

    From then on, no storage can be recovered from them.

    Args:
        own: the caller's recovery folder next to the files, which does not change.

    Raises:
        RuntimeError: a process or storage shares or recovers the rows. Nothing has changed then.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.recovery_folder import RecoveryFolder, give_up_rows
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     home = RecoveryFolder(Path(folder))
        ...     home.publish({"slots": 3})
        ...     del home
        ...     give_up_rows(Path(folder))
        ...     print(RecoveryFolder(Path(folder)).manifest())
        None
    """
    user, held = _user_or_lock(scratch_dir, own)
    if user is not None:
        raise RuntimeError(f"{scratch_dir} is in use by {user}")
    if held is None:
        return
    recoverable = scratch_dir / RECOVERABLE
    try:
        for name in (MANIFEST, MAKING, DESCRIPTION):
            (recoverable / name).unlink(missing_ok=True)
        sync_directory(recoverable)  # before a row is overwritten
    finally:
        held.drop()
