"""Keep the files of a recording, which grow by whole episodes.

A recording is a folder with four entries:

- ``recording.json``: environment, spaces, information keys, and the sessions that wrote episodes.
- ``committed.json``: the folder of the rows, its capacity, and the counts of rows and episodes.
- ``rows-<capacity>``: the rows, in the files of a recoverable `LazyMemmapStorage`.
- ``lock``: locked by the process that records.

Rows are appended only, and never past the capacity of their folder. A replace of ``committed.json``
makes an episode visible to readers. A reader maps the first rows of the files copy-on-write, so it
needs no lock.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import torch

from replaykit._compat import TensorDict, new_tensordict
from replaykit.buffer import ReplayBuffer
from replaykit.declared import Count, decode_state, encode_state, matching, within
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, map_private, remove_tree, replace_file
from replaykit.interrupts import deferred
from replaykit.recovery.locks import Exclusive
from replaykit.recovery.recovery_folder import RECOVERABLE, read_manifest
from replaykit.schema import Schema
from replaykit.storages import LazyMemmapStorage, TensorStorage
from replaykit.storages.row_files import RowFiles
from replaykit.writers import ImmutableDatasetWriter

_Content = TypeVar("_Content")

_FORMAT: Final = "replaykit-recording"
_VERSION: Final = 1
_HEADER: Final = "recording.json"
_COMMITTED: Final = "committed.json"
_LOCK: Final = "lock"
_ROWS: Final = re.compile(r"rows-([1-9]\d{0,17})")
_FIRST_BYTES: Final = 16 << 20
"""Bytes of the first folder of rows. Each later folder has twice the capacity."""
_COPIED: Final = 16 << 20
"""Bytes of rows that one write copies to a larger folder."""
_ATTEMPTS: Final = 10
"""Number of reads of a recording, if its writer moves the rows to a larger folder meanwhile."""


def open_recording(
    path: str | os.PathLike[str], batch_size: int | None = None, **kwargs: Any
) -> ReplayBuffer[Any, Any, Any, Any]:
    """Open the episodes of a recording as a ReplayBuffer.

    The call maps the files copy-on-write, and reads no rows. Any number of processes may open a
    recording, also while `record` or `RecordReplay` writes to it. The buffer has the episodes that
    had ended at the time of the call. The buffer refuses new rows. Edits are visible in this
    process only, and never reach the disk.

    Args:
        path: the folder of the recording.
        batch_size: default number of rows of a sample.
        kwargs: other keywords of ReplayBuffer, such as ``sampler``, ``transform`` and
            ``generator``, but not ``storage`` and ``writer``.

    Returns:
        A buffer with one row per step, in the order of recording. The keys are ``observation``,
        ``action``, ``episode``, ``source_seed``, and below ``next`` ``observation``, ``reward``,
        ``terminated``, ``truncated``, ``done`` and ``info``. ``episode`` and ``source_seed`` are
        int64 ``[N]``. ``source_seed`` is the seed of the episode's reset, or -1 without a seed.

    Raises:
        FileNotFoundError: the folder is not a recording.
        CheckpointError: a file is damaged or missing. The message names it.
        RuntimeError: no episode has ended yet.

    Cost: a few milliseconds, for any number of rows.

    Example:
        >>> import tempfile, gymnasium
        >>> from replaykit import SliceSampler
        >>> from replaykit.adapters import open_recording, record
        >>> folder = tempfile.mkdtemp()
        >>> _ = record(gymnasium.make("CartPole-v1"), None, folder, episodes=3, seed=0)
        >>> rb = open_recording(folder, batch_size=8, sampler=SliceSampler(slice_len=4))
        >>> len(rb.episodes), rb.sample()["observation"].shape
        (3, torch.Size([8, 4]))
    """
    folder = Path(path).expanduser()
    _read_header(folder)
    for attempt in range(_ATTEMPTS):
        committed = _read_committed(folder)
        if not committed.rows:
            raise RuntimeError(f"{folder} has no episode yet; open it after the first episode ends")
        try:
            rows = _mapped_rows(folder, committed)
            break
        except FileNotFoundError as error:
            # A writer has moved the rows since. The next attempt finds them.
            if attempt == _ATTEMPTS - 1 or _read_committed(folder) == committed:
                raise CheckpointError(f"{error.filename} is gone, a file of {folder}") from error
    return ReplayBuffer(
        storage=TensorStorage(rows),
        writer=ImmutableDatasetWriter(),
        batch_size=batch_size,
        **kwargs,
    )


def _mapped_rows(folder: Path, committed: _Committed) -> TensorDict:
    """Return the committed rows of a recording as views of private mappings."""
    assert committed.folder is not None
    home = folder / committed.folder
    found = read_manifest(home / RECOVERABLE)
    if found is None:
        raise FileNotFoundError(None, "no manifest", str(home / RECOVERABLE))
    rows, slots = committed.rows, committed.capacity
    plan = RowFiles.of(home, Schema.from_json(found["schema"]), slots, torch.Size())
    tensors = {path: _map_rows(file, plan.nbytes(path)) for path, file in plan.files.items()}
    leaves = {
        path: tensor.view(plan.dtypes[path]).view(plan.shapes[path])
        for path, tensor in tensors.items()
    }
    if plan.layout is not None:
        # The only path that is not a leaf is that of the records, which hold all small leaves.
        records = next(leaves.pop(path) for path in list(leaves) if path not in plan.schema.leaves)
        leaves |= plan.layout.views(records)
    data = new_tensordict({}, torch.Size([rows]), None)
    for path in plan.schema.leaves:
        data.set(path, leaves[path][:rows])
    return data


def _map_rows(file: Path, nbytes: int) -> torch.Tensor:
    """Return the bytes of a file as a tensor; changes stay in this process."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        found = os.fstat(descriptor).st_size
        if found < nbytes:
            raise CheckpointError(f"expected {nbytes} bytes in {file}, got {found}")
        return torch.frombuffer(map_private(descriptor, nbytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class RecordingFolder:
    """The folder of a recording, opened by its only writer.

    Args:
        path: the folder. It is made with its parents. If it is a recording, writing continues
            after its last episode.
        header: JSON values that must equal those of an existing recording.
        session: JSON values that describe this run.
        durable: whether episodes also survive a loss of power.

    Attributes:
        episodes, rows: the counts of stored episodes and rows.

    Raises:
        NotADirectoryError: the path is not a directory.
        FileExistsError: the directory holds other files; the message names one.
        ValueError: an entry of ``header`` differs; the message names it.
        RuntimeError: another process, or another object in this process, records to the folder.
        CheckpointError: a file is damaged. The message names it.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        session: Mapping[str, Any],
        *,
        durable: bool,
    ) -> None:
        self.path, self._durable = path, durable
        self.episodes = self.rows = 0
        self._buffer: ReplayBuffer[Any, Any, Any, Any] | None = None
        self._home: Path | None = None
        self._capacity = 0
        self._moved = True  # a process that died may have left other folders of rows
        self._check(header)
        make_directory(path)
        try:
            self._lock = Exclusive(path / _LOCK)
        except BlockingIOError:
            raise RuntimeError(
                f"{path} is in use: another process or object records to it; close that one first, "
                "or give another path"
            ) from None
        try:
            found = self._check(header)  # another process may have begun before the lock was held
            self._resume()
            sessions = [] if found is None else found["sessions"]
            session = {"first_episode": self.episodes, **session}
            content = {"format": _FORMAT, "format_version": _VERSION, **header}
            self._write(_HEADER, {**content, "sessions": [*sessions, session]})
            self.commit()
        except BaseException:
            self.close()
            raise

    def _check(self, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the old header; None if there is no recording. Changes nothing."""
        path = self.path
        if not path.exists():
            return None
        if not path.is_dir():
            raise NotADirectoryError(f"expected a folder or a free path for a recording: {path}")
        if not (path / _HEADER).exists():
            drafts = {_LOCK, _draft_of(_HEADER)}
            others = sorted(name for name in os.listdir(path) if name not in drafts)
            if others:
                raise FileExistsError(
                    f"{path} holds {others[0]!r}, which belongs to no recording; give another path"
                )
            return None
        found = _read_header(path)
        for name, value in json.loads(json.dumps(header)).items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path} was recorded with another {name}: expected "
                    f"{json.dumps(found.get(name)):.200}, got {json.dumps(value):.200}; give "
                    "another path"
                )
        return found

    def _resume(self) -> None:
        """Open the rows of an existing recording."""
        if not (self.path / _COMMITTED).exists():
            return
        committed = _read_committed(self.path)
        if committed.folder is None:
            return
        self._home, self._capacity = self.path / committed.folder, committed.capacity
        self._buffer = self._opened(self._home, self._capacity)
        # The storage has one more episode if the last process died between its two commits.
        self._count()
        if self.rows < committed.rows:
            raise CheckpointError(
                f"expected {committed.rows} rows in {self._home}, got {self.rows}; "
                "the files of the rows were replaced"
            )

    def _opened(self, home: Path, capacity: int) -> ReplayBuffer[Any, Any, Any, Any]:
        storage = LazyMemmapStorage(capacity, scratch_dir=home, recover=True, durable=self._durable)
        return ReplayBuffer(storage=storage, batch_size=1)

    def _count(self) -> None:
        assert self._buffer is not None
        self.rows = len(self._buffer)
        if self.rows:
            self.episodes = int(self._buffer.storage.get(self.rows - 1)["episode"]) + 1

    @property
    def schema(self) -> Schema | None:
        """The schema of the stored rows; None before the first episode."""
        if self._buffer is None:
            return None
        found: Schema | None = self._buffer.storage.schema
        return found

    def reserve(self, rows: TensorDict) -> None:
        """Make room for the rows of an episode; move all rows to a larger folder if needed.

        An interrupted call changes nothing that a reader or a later process sees.

        Raises:
            OSError: the disk has too little room.
        """
        needed = self.rows + len(rows)
        if needed <= self._capacity:
            return
        each = max(1, sum(leaf.nbytes for leaf in rows.values(True, True)) // len(rows))
        capacity = max(needed, 2 * self._capacity or _FIRST_BYTES // each)
        home = self.path / f"rows-{capacity}"
        remove_tree(home)  # left by an interrupted call
        old, buffer = self._buffer, None
        try:
            with deferred:
                buffer = self._opened(home, capacity)
            step = max(1, _COPIED // each)
            for first in range(0, self.rows, step):
                assert old is not None
                buffer.extend(old.storage[first : min(first + step, self.rows)])
        except BaseException:
            _release(buffer)
            raise
        with deferred:
            _release(old)
            self._buffer, self._home, self._capacity = buffer, home, capacity
            self._moved = True

    def append(self, rows: TensorDict) -> None:
        """Store the rows of one episode, for which there is room.

        Readers see the episode after `commit`.

        Raises:
            SchemaError: the rows do not fit the stored rows. Nothing has changed.
            OSError: the disk has too little room.
        """
        assert self._buffer is not None
        self._buffer.extend(rows)
        self._count()

    def commit(self) -> None:
        """Show all stored episodes to readers, and remove a smaller folder of rows.

        Raises:
            OSError: a write to the disk failed. The next commit shows the episodes.
        """
        name = None if self._home is None else self._home.name
        now = _Committed(_FORMAT, _VERSION, name, self._capacity, self.rows, self.episodes)
        self._write(_COMMITTED, encode_state(now))
        if self._moved:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the folders of rows that ``committed.json`` does not name."""
        for name in os.listdir(self.path):
            if _ROWS.fullmatch(name) and self.path / name != self._home:
                remove_tree(self.path / name)
        self._moved = False

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text, draft = json.dumps(content, indent=1), self.path / _draft_of(name)
        replace_file(self.path / name, text, draft=draft, durable=self._durable)

    def close(self) -> None:
        """Close the files, so that another process or object can record."""
        with deferred:
            _release(self._buffer)
            self._buffer = None
            self._lock.drop()


def _release(buffer: ReplayBuffer[Any, Any, Any, Any] | None) -> None:
    """Release the lock of the rows now, even if a traceback keeps the buffer alive."""
    if buffer is not None:
        buffer.storage.recovery.home.close()


def _draft_of(name: str) -> str:
    return f".{name}"


@dataclass(frozen=True)
class _Format:
    format: Literal["replaykit-recording"]
    format_version: Annotated[int, within(1, _VERSION)]


@dataclass(frozen=True)
class _Header(_Format):
    """The entries of ``recording.json`` that each recording has."""

    sessions: list[Any]


@dataclass(frozen=True)
class _Committed(_Format):
    """The content of ``committed.json``."""

    folder: Annotated[str, matching(_ROWS.pattern)] | None
    capacity: Count
    rows: Count
    episodes: Count


def _read_header(folder: Path) -> dict[str, Any]:
    if not (folder / _HEADER).exists():
        raise FileNotFoundError(f"{folder} is not a recording: it has no {_HEADER}")
    return _read(folder / _HEADER, _Header)[0]


def _read_committed(folder: Path) -> _Committed:
    if not (folder / _COMMITTED).exists():
        return _Committed(_FORMAT, _VERSION, None, 0, 0, 0)
    return _read(folder / _COMMITTED, _Committed)[1]


def _read(file: Path, cls: type[_Content]) -> tuple[dict[str, Any], _Content]:
    """Read a JSON file of a recording, and return its content as declared.

    Raises:
        CheckpointError: the file is damaged, or has a newer version.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
        return found, decode_state(cls, found, "its entries")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
