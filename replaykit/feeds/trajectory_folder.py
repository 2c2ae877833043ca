"""Feed a buffer from a folder that other processes fill."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.state import snapshot_of
from replaykit.checkpoint import Checkpoint, save_snapshot
from replaykit.checkpoint.checkpoint_format import version_of
from replaykit.declared import Count, Positive, decode_state, encode_state, read_value
from replaykit.errors import CheckpointError, RateLimiterTimeout, SchemaError
from replaykit.feeds.chunk_files import (
    FORMATS,
    ROWS_BYTES,
    Chunk,
    ChunkHeader,
    DamagedChunk,
    Partition,
    draft_of,
    join_rows,
    parse_name,
    read_chunk,
    read_header,
)
from replaykit.filesystem import make_directory
from replaykit.interrupts import Lock, check
from replaykit.keywords import checked_keywords, named_after
from replaykit.recovery.locks import Exclusive
from replaykit.storages.column_storage import ColumnStorage
from replaykit.transfer import BatchMemory

_SUFFIXES: Final = tuple(set(FORMATS.values()))
_OWNER: Final = ".owner"
_PART: Final = "feed"
"""The name of the folder's progress among the parts of a checkpoint."""
_DAMAGED_MOST: Final = 100
"""Number of damaged chunks in a row after which a refresh raises an error."""
_KEPT: Final = 1_000
"""Number of streams without files whose newest chunk is remembered."""
_DRAFT_S: Final = 600
"""Age in seconds of an unfinished file whose writer must have died."""


@dataclass
class FolderState:
    """The progress of a folder.

    Attributes:
        partition: the partition that was read.
        read: the last number that was read of each stream of chunks.
        others: names of files that were read and have no number.
        files, rows, damaged, evicted: counts of files and rows.
    """

    partition: Partition
    read: dict[str, Count]
    others: list[str]
    files: Count
    rows: Count
    damaged: Count
    evicted: Count


class _Entry(NamedTuple):
    """A file of the folder. ``stream`` is None for a name that no writer gave."""

    name: str
    stream: str | None
    number: int


_Item = tuple[_Entry, Chunk | None]
"""A file and its content, None if that is damaged."""

_Cut = tuple[list[Any], bool]
"""Streams of the buffer, ``[None]`` without ``lane_key``, and whether a reset follows."""


class _Kept(NamedTuple):
    """A file that an owner counts, in the order of age."""

    written: int
    name: str
    rows: int
    nbytes: int


class _Newest(NamedTuple):
    """The newest chunk in a stream of the buffer."""

    header: ChunkHeader
    mixed: bool  # it has rows of several streams of the buffer

    def needs_cut(self, after: ChunkHeader) -> bool:
        """Return whether the next chunk of the buffer's stream must not continue this one."""
        header = self.header
        if header.stream != after.stream or header.number != after.number - 1:
            return self.mixed or header.tail == "cut"
        return header.tail == "cut" and after.head == "reset"


@named_after
class TrajectoryFolder:
    """A folder of chunks that feeds a buffer.

    Each `refresh` stores the rows of new chunks in the buffer, each chunk once. The buffer decides
    about all else: sampler, padding, transforms, priorities, loaders. A chunk that continues the
    chunk before it continues its episode. Between other chunks the buffer is cut.

    Any number of folders, in any processes, may read the same files. At most one of them is the
    owner, which removes the oldest files beyond the limits.

    Args:
        root: the folder, as for `TrajectoryWriter`. It need not exist yet.
        buffer: the buffer to feed, of this process.
        max_files, max_rows, max_bytes: limits of the partition, which the owner enforces. None for
            no limit.
        owner: whether to become the owner. The lease of an owner ends when it is closed, or when
            its process ends in any way. Then another one can become the owner.
        partition: ``"fifo"``, or ``"protected"``, from which nothing is evicted.
        min_files: number of chunks after which `ready` is True.

    Raises:
        RuntimeError: the folder has an owner already.
        ValueError: a limit is below 1, or is given for protected chunks. Also if the buffer has
            lanes (``ndim > 1``).
        TypeError: the buffer is no ReplayBuffer.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit import TrajectoryFolder, TrajectoryWriter
        >>> root = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> folder = TrajectoryFolder(root, rb, max_files=2, owner=True)
        >>> done = torch.arange(9) % 3 == 2
        >>> with TrajectoryWriter(root) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(9.0), "next": {"done": done}}, [9]))
        >>> folder.refresh(), folder.refresh()
        (9, 0)
        >>> len(rb), rb.episodes.lengths.tolist(), folder.stats()["evicted"]
        (9, [3, 3, 3], 1)
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        buffer: ReplayBuffer[Any, Any, Any, Any],
        *,
        max_files: int | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        owner: bool = False,
        partition: Literal["fifo", "protected"] = "fifo",
        min_files: int = 1,
    ) -> None:
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"expected a ReplayBuffer, got {type(buffer).__name__}")
        if buffer.storage.ndim > 1:
            raise ValueError(
                f"expected a buffer without lanes, got ndim={buffer.storage.ndim}; a storage with "
                "lane_key= keeps the streams of a folder apart"
            )
        self._partition: Partition = read_value(Partition, partition, "partition")
        limits = {"max_files": max_files, "max_rows": max_rows, "max_bytes": max_bytes}
        limits = {name: read_value(Positive | None, limits[name], name) for name in limits}
        self._limits: dict[str, int] = {
            name: limit for name, limit in limits.items() if limit is not None
        }
        if self._limits and partition == "protected":
            raise ValueError(f"protected chunks are not evicted; got {next(iter(self._limits))}")
        self._min_files: int = read_value(Count, min_files, "min_files")
        self._buffer = buffer
        self._lane_key: Any = None
        self._folder = Path(root).expanduser() / partition
        self._lock = Lock()
        self._state = FolderState(partition, {}, [], 0, 0, 0, 0)
        # The newest chunk of each stream of the buffer, as long as only this folder writes.
        self._newest: dict[Any, _Newest] = {}
        self._write_count = -1
        self._damaged_together = 0
        self._vanished = self._foreign = 0
        self._kept: dict[str, _Kept] = {}
        self._drafts: list[str] = []
        self._memory = BatchMemory()
        self._files = memoryview(bytearray(ROWS_BYTES))  # the bytes of the files of a batch
        self._lease: Exclusive | None = None
        if owner:
            make_directory(self._folder)
            try:
                self._lease = Exclusive(self._folder / _OWNER)
            except BlockingIOError:
                raise RuntimeError(
                    f"{self._folder} has an owner; close that one first, or leave owner=True out"
                ) from None

    # -- for users --------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Store the rows of new chunks in the buffer; return the number of rows.

        Files of other programs, damaged chunks and chunks that vanish are skipped and counted
        (`stats`). With a rate limiter in the buffer the call does not wait. Chunks that the limiter
        does not admit stay for the next call. An owner then evicts chunks, also after an error, and
        removes unfinished files of writers that have died.

        Raises:
            SchemaError, ValueError: a chunk does not fit the buffer, or has more rows than the
                rate limiter admits at once. The error names the file; the chunks before it are
                stored. Or a transform on write mixes the streams of ``lane_key``.
            CheckpointError: 100 chunks in a row are damaged. The error names the last one.
            OSError: the folder or a file cannot be read. The next call reads that chunk again.

        Cost: a listing of the folder, and for new chunks a read, a checksum and a write of their
        rows.
        """
        with self._lock:
            before = self._state.rows
            names, sizes = self._listed(), dict[str, _Kept]()
            try:
                self._feed(names, sizes)
            finally:
                if self.owner:
                    self._evict(names, sizes)
            return self._state.rows - before

    @property
    def ready(self) -> bool:
        """True if at least ``min_files`` chunks were read."""
        return self._state.files >= self._min_files

    @property
    def owner(self) -> bool:
        """True if this object is the owner of the folder, in this process."""
        return self._lease is not None and "_fd" in self._lease.__dict__

    def stats(self) -> dict[str, int]:
        """Return counts of files and rows that were read, skipped or evicted.

        ``files`` and ``rows`` were stored in the buffer. ``damaged`` and ``vanished`` files were
        skipped. ``foreign`` counts the files of other programs in the folder. ``evicted`` files
        were removed by this owner.
        """
        names = ("files", "rows", "damaged", "evicted")
        found: dict[str, int] = {name: getattr(self._state, name) for name in names}
        return {**found, "vanished": self._vanished, "foreign": self._foreign}

    def delete(self) -> int:
        """Remove all chunks of the partition; return their number. The folder stays usable.

        Raises:
            RuntimeError: this object is not the owner.
        """
        with self._lock:
            if not self.owner:
                raise RuntimeError(f"only the owner of {self._folder} removes chunks")
            return sum(self._unlink(name) for name in self._listed())

    def close(self) -> None:
        """End the lease of an owner. A closed folder can still refresh."""
        if self._lease is not None:
            self._lease.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, as plain numbers and texts.

        It belongs to the rows that the buffer has at the same time; `dumps` saves both.
        """
        with self._lock:
            return encode_state(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the progress of a folder. Chunks that it has read are not read again.

        Raises:
            ValueError: an entry is missing or impossible, or belongs to the other partition.
        """
        state = self._decoded(state_dict)
        with self._lock:
            self._apply(state)

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the buffer and the progress into one checkpoint, as of one instant.

        The checkpoint is that of ``ReplayBuffer.dumps``, with one more part. So
        ``ReplayBuffer.loads`` can read it too. Arguments and errors are the same.

        Example:
            >>> import tempfile
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, TrajectoryFolder
            >>> root, path = tempfile.mkdtemp(), tempfile.mkdtemp()
            >>> folder = TrajectoryFolder(root, ReplayBuffer(storage=LazyTensorStorage(100)))
            >>> folder.dumps(path)
            >>> folder.loads(path)
        """

        def snapshot(base: Any) -> Any:
            with self._lock:
                more = {_PART: encode_state(self._state)}
                return snapshot_of(self._buffer, path, base, more)

        save_snapshot(path, snapshot, keep=keep)

    def loads(self, path: str | os.PathLike[str], *, version: int | None = None) -> None:
        """Load the buffer and the progress that `dumps` saved.

        Raises:
            CheckpointError: the checkpoint has no progress, because a buffer saved it.
            FileNotFoundError, CheckpointError, ValueError: as for ``ReplayBuffer.loads``.

        After an error nothing has changed.
        """
        with Checkpoint(path, version) as saved:
            if _PART not in saved:
                raise CheckpointError(f"{path} has no progress of a folder; save with its dumps()")
            state = self._decoded(saved.part(_PART))
            version = version_of(saved.manifest)  # another process may save a newer one meanwhile
        with self._lock:
            self._buffer.loads(path, version=version)
            self._apply(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r}, owner={self.owner})"

    def _decoded(self, state: Any) -> FolderState:
        found = decode_state(FolderState, state, "the state of a folder")
        if found.partition != self._partition:
            raise ValueError(
                f"expected the state of the partition {self._partition!r}, got {found.partition!r}"
            )
        return found

    def _apply(self, state: FolderState) -> None:
        self._state, self._newest, self._write_count = state, {}, -1

    # -- listing ----------------------------------------------------------------------------------

    def _listed(self) -> dict[str, _Entry]:
        """Return the chunks of the folder by name."""
        found, foreign, drafts = {}, 0, []
        try:
            with os.scandir(self._folder) as entries:
                files = [(entry.name, entry.is_file()) for entry in entries]
        except FileNotFoundError:
            return {}
        for name, is_file in files:
            if is_file and name.endswith(_SUFFIXES) and not name.startswith("."):
                found[name] = _Entry(name, *(parse_name(name) or (None, 0)))
            elif draft_of(name):
                drafts.append(name)
            else:
                foreign += not name.startswith(".")
        self._foreign, self._drafts = foreign, drafts
        return found

    def _unread(self, names: dict[str, _Entry]) -> list[_Entry]:
        """Return the entries that were not read, the oldest first.

        The names of a writer sort in the order of its chunks.
        """
        read, others = self._state.read, set(self._state.others)
        return sorted(
            entry
            for entry in names.values()
            if (
                entry.name not in others
                if entry.stream is None
                else entry.number > read.get(entry.stream, -1)
            )
        )

    def _has_gap(self, fresh: list[_Entry]) -> bool:
        """Return whether a stream lacks a number before one of its unread chunks."""
        last = dict(self._state.read)
        for _, stream, number in fresh:
            if stream is not None:
                if number != last.get(stream, -1) + 1:
                    return True
                last[stream] = number
        return False

    # -- feeding ----------------------------------------------------------------------------------

    def _feed(self, names: dict[str, _Entry], sizes: dict[str, _Kept]) -> None:
        """Store the rows of unread chunks; add their ages and sizes to ``sizes``."""
        self._lane_key = getattr(self._buffer.storage, "lane_key", None)
        fresh = self._unread(names)
        if self._has_gap(fresh):
            # A listing may miss a file that appears meanwhile and show a later one of its stream.
            # The next listing shows every file that is older than one of the first listing. It may
            # itself miss a file before a later one.
            newest = {stream: number for _, stream, number in sorted(names.values())}
            names |= {
                name: entry
                for name, entry in self._listed().items()
                if entry.number <= newest.get(entry.stream, -1)
            }
            fresh = self._unread(names)
        self._forget(names)
        limited = "inserts" in self._buffer.stats()
        for batch in self._batches(fresh, sizes):
            check()
            try:
                for group, cut in self._groups(batch, single=limited):
                    self._store(group, cut)
            except RateLimiterTimeout:
                break

    def _batches(self, fresh: list[_Entry], sizes: dict[str, _Kept]) -> Iterator[list[_Item]]:
        """Read entries, and yield them in batches."""
        batch: list[_Item] = []
        left, damaged = self._files, []
        for entry in fresh:
            path = f"{self._folder}/{entry.name}"
            chunk = None
            try:
                chunk = read_chunk(path, left)
            except OSError as error:
                # A file that another machine has removed is stale.
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                self._vanished += 1
                continue
            except DamagedChunk as error:
                damaged.append(f"{path}: {error}")
                self._damaged_together += 1
            else:
                self._damaged_together = 0
                header = chunk.header
                sizes[entry.name] = _Kept(header.written, entry.name, header.rows, chunk.nbytes)
                left = left[chunk.nbytes :]
            batch.append((entry, chunk))
            if 2 * len(left) <= len(self._files):
                yield batch
                batch, left = [], self._files
        yield batch
        if damaged:
            if self._damaged_together >= _DAMAGED_MOST:
                raise CheckpointError(
                    f"{self._damaged_together} chunks in a row are damaged, the last is "
                    f"{damaged[-1]}"
                )
            warnings.warn(
                f"{len(damaged)} damaged chunks were skipped, the first is {damaged[0]}",
                stacklevel=4,
            )

    def _groups(
        self, batch: list[_Item], *, single: bool
    ) -> Iterator[tuple[list[_Item], _Cut | None]]:
        """Divide a batch into groups that one write stores, each with the cut before it.

        The chunks of a stream come together, so that they continue one another.
        """
        group: list[_Item] = []
        layout, before = None, None
        if self._buffer.write_count != self._write_count:
            # Others write only to streams that are not named after a writer.
            known = self._newest.items()
            self._newest = {lane: own for lane, own in known if lane == _lane_of(own.header)}
        newest = dict(self._newest)
        for entry, chunk in sorted(batch, key=lambda item: (item[0].stream or "", item[0])):
            cut = None
            if chunk is not None:
                cut = self._cut_before(newest, chunk)
                if layout is not None and (single or cut or chunk.layout is not layout):
                    yield group, before
                    group, before = [], None
                before, layout = cut or before, chunk.layout
            group.append((entry, chunk))
        if group:
            yield group, before

    def _cut_before(self, newest: dict[Any, _Newest], chunk: Chunk) -> _Cut | None:
        """Return the cut that a chunk needs before it, and note the chunk as the newest one."""
        header, lanes = chunk.header, self._lanes_of(chunk)
        needed = []
        for lane in lanes:
            before = newest.get(lane)
            # If no newest chunk is known, rows of other origin may precede this one.
            if self._has_rows(lane) if before is None else before.needs_cut(header):
                needed.append(lane)
            newest[lane] = _Newest(header, len(lanes) > 1)
        return (needed, header.head == "reset") if needed else None

    def _lanes_of(self, chunk: Chunk) -> list[Any]:
        """Return the buffer's streams with rows of a chunk; ``[None]`` without ``lane_key``."""
        key = self._lane_key
        if key is None:
            return [None]
        if key in chunk.layout.schema.leaves:
            return chunk.distinct(key)
        return [_lane_of(chunk.header)]

    def _has_rows(self, lane: Any) -> bool:
        """Return whether a stream of the buffer has rows."""
        if lane is None or not len(self._buffer):
            return len(self._buffer) > 0
        with self._buffer._locked() as storage:
            try:
                storage.lanes_named(lane)
            except IndexError:
                return False
        return True

    def _store(self, group: list[_Item], cut: _Cut | None) -> None:
        """Store a group in the buffer, then note that it was read."""
        chunks = [chunk for _, chunk in group if chunk is not None]
        if chunks:
            if cut is not None:
                end_episodes(self._buffer, *cut)
            rows = join_rows(chunks, self._memory)
            key = self._lane_key
            if key is not None and key not in chunks[0].layout.schema.leaves:
                lanes = [_lane_of(chunk.header) for chunk in chunks]
                counts = [chunk.header.rows for chunk in chunks]
                rows.set(key, torch.from_numpy(np.repeat(lanes, counts)))
            try:
                self._buffer.extend(rows, timeout=0)
            except ValueError as error:
                name = next(entry.name for entry, chunk in group if chunk is not None)
                kind = SchemaError if isinstance(error, SchemaError) else ValueError
                raise kind(f"{self._folder / name}: {error}") from None
            self._write_count = self._buffer.write_count
            for chunk in chunks:
                lanes = self._lanes_of(chunk)
                self._newest |= dict.fromkeys(lanes, _Newest(chunk.header, len(lanes) > 1))
        state = self._state
        for entry, _ in group:
            if entry.stream is None:
                state.others.append(entry.name)
            else:
                state.read[entry.stream] = entry.number
        state.files += len(chunks)
        state.damaged += len(group) - len(chunks)
        state.rows += sum(chunk.header.rows for chunk in chunks)

    def _forget(self, names: dict[str, _Entry]) -> None:
        """Forget the progress of streams and files that are gone from the folder.

        Later files of such a stream have later numbers, and none of them was read.
        """
        if not names:
            return  # the folder may be missing for a while
        state, streams = self._state, {entry.stream for entry in names.values()}
        state.read = {name: last for name, last in state.read.items() if name in streams}
        newest = self._newest.items()
        for lane in [lane for lane, own in newest if own.header.stream not in streams][:-_KEPT]:
            del self._newest[lane]
        state.others = [name for name in state.others if name in names]

    # -- owning -----------------------------------------------------------------------------------

    def _evict(self, names: dict[str, _Entry], sizes: dict[str, _Kept]) -> None:
        """Remove the oldest files beyond the limits, and files of writers that have died."""
        kept = {name: own for name, own in self._kept.items() if name in names}
        for name in names.keys() - kept.keys():
            found = sizes.get(name) or self._measured(name)
            if found is not None:
                kept[name] = found
        self._kept = kept
        totals = {
            "max_files": len(kept),
            "max_rows": sum(own.rows for own in kept.values()),
            "max_bytes": sum(own.nbytes for own in kept.values()),
        }
        for own in sorted(kept.values()):
            if all(totals[name] <= limit for name, limit in self._limits.items()):
                break
            self._state.evicted += self._unlink(own.name)
            for name, count in zip(totals, (1, own.rows, own.nbytes), strict=True):
                totals[name] -= count
        for name in self._drafts:
            with suppress(FileNotFoundError):
                path = self._folder / name
                if time.time() - path.stat().st_mtime > _DRAFT_S:
                    path.unlink()

    def _measured(self, name: str) -> _Kept | None:
        """Return age and sizes of a file that was not read now; None if it is gone."""
        path = self._folder / name
        try:
            found = path.stat()
            header = read_header(str(path))[0]
        except FileNotFoundError:
            return None
        except DamagedChunk:
            return _Kept(found.st_mtime_ns, name, 0, found.st_size)
        return _Kept(header.written, name, header.rows, found.st_size)

    def _unlink(self, name: str) -> bool:
        """Remove a file; return whether it was there."""
        self._kept.pop(name, None)
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True


def _lane_of(header: ChunkHeader) -> int:
    """Return the number of a stream, which differs in all folders: names of writers are random."""
    return int(header.writer[:15], 16) + header.lane


def end_episodes(buffer: ReplayBuffer[Any, Any, Any, Any], lanes: list[Any], reset: bool) -> None:
    """End the open episodes of streams, ``[None]`` without ``lane_key``.

    Args:
        reset: whether the next rows follow a reset.
    """
    if not isinstance(buffer.storage, ColumnStorage):
        return  # such a storage has no episodes
    buffer.flush()
    # A restart with rows that transforms hold back would remove a cut before a reset.
    entries = buffer.transform.entries
    reset = reset and not any(callable(getattr(e.transform, "flush", None)) for e in entries)
    for lane in lanes:
        with buffer._locked() as storage, suppress(IndexError):  # no row of it is stored
            storage.cut(storage.lanes_named(lane), reset=reset)
