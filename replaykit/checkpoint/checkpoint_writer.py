"""Save the state of parts into a directory, atomically and incrementally."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from replaykit._compat import dtype_name
from replaykit._version import __version__
from replaykit.checkpoint.checkpoint_format import (
    FORMAT,
    FORMAT_VERSION,
    Tensors,
    encode,
    is_published,
    publish,
)
from replaykit.checkpoint.chunks import (
    PAGE_BYTES,
    PAGED_BYTES,
    Again,
    Base,
    ChunkWriter,
    Pieces,
    RowExtent,
    chunk_bytes,
    naming,
    rows_of_pages,
)
from replaykit.checkpoint.dirty_chunks import FrozenRows, RowsAtSave, TrackedTensor, runs
from replaykit.declared import Positive, read_value
from replaykit.filesystem import EarlySync, make_directory, sync_file
from replaykit.interrupts import check, deferred
from replaykit.structure import raw_bytes


class Snapshot:
    """A context manager with the state that a save writes, as of one instant.

    The snapshot copies all tensors except tracked tensors. The save reads these later, block by
    block. If a writer overwrites rows before the save has read them, the writer first copies them.
    If other processes also write a tracked tensor, the snapshot at once copies the chunks that the
    save cannot reuse. The exit from the context releases the tracked tensors.

    Args:
        parts: state of each part, as values that ``encode`` takes.
        document: plain JSON values for the head of the manifest.
        lock: the lock of the tracked tensors, which the caller holds.
        base: the latest checkpoint of the directory, whose chunks the save can reuse. With None, a
            snapshot that copies chunks at once copies all of them.

    Attributes:
        encoded, head: ``parts`` and ``document`` as JSON.
        plain: copies of the tensors that are not tracked, by name.
        frozen: the tracked tensors, grouped by their record of changes.
        again: the chunks that the save reuses, if the other chunks are copied at once; else None.

    Raises:
        TypeError: a state cannot be saved.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        document: Mapping[str, Any],
        lock: AbstractContextManager[Any] | None = None,
        base: Base | None = None,
    ) -> None:
        tensors: Tensors = {}
        self.encoded = {name: encode(state, name, tensors) for name, state in parts.items()}
        self.head = {name: encode(value, name, {}) for name, value in document.items()}
        self.plain: dict[str, torch.Tensor] = {}
        groups: dict[Any, dict[str, TrackedTensor]] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TrackedTensor):
                group = (id(tensor.changes), len(tensor.tensor))
                groups.setdefault(group, {})[name] = tensor
            else:
                self.plain[name] = tensor.to("cpu", copy=True)
        lock = contextlib.nullcontext() if lock is None else lock
        self.frozen: list[FrozenRows] = []
        self.again: Again | None = None
        try:
            for tracked in groups.values():
                changes = next(iter(tracked.values())).changes
                self.frozen.append(changes.freeze(tracked, lock))
            if any(frozen.at_once for frozen in self.frozen):
                self.again = Again(self.frozen, Base() if base is None else base)
        except BaseException:
            self.__exit__()
            raise

    def extends(self, base: Base) -> bool:
        """Return whether a save of the snapshot can build on a checkpoint.

        The checkpoint must not have a later state of the same tensors. If the snapshot
        copied chunks when it was made, the checkpoint must be the ``base`` of the snapshot, unless
        that base has no save.
        """
        if self.again is not None and self.again.base.save not in (None, base.save):
            return False
        if base.manifest is None:
            return True
        saved = [(frozen.saved(base.manifest), frozen.at) for frozen in self.frozen]
        return not any(rows is not None and rows.at > at for rows, at in saved)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        for frozen in self.frozen:
            frozen.__exit__()


_BLOCK_BYTES = 8 * 2**20
"""Bytes of a block that is copied while writers wait."""
_MOST_BLOCKS = 256
_MOST_BLOCK_BYTES = 64 * 2**20
_SYNC_THREADS = 8
_POLL_S = 0.05
"""Seconds between checks for Ctrl-C during a wait for another save."""


def save_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Any],
    document: Mapping[str, Any],
    *,
    keep: int = 1,
) -> None:
    """Write parts and a document into a directory; an error leaves it unchanged.

    Args:
        path: the directory, which is made with its parents.
        parts: state of each part, as values that ``encode`` takes.
        document: plain JSON values for the head of the manifest.
        keep: the largest number of checkpoints in the directory, including the new one.

    Raises:
        TypeError: a state cannot be saved. Nothing was written then.
        ValueError: ``keep`` is below 1, or ``path`` is empty.
        CheckpointError: ``manifest.json`` in the directory is not the manifest of a checkpoint.
        OSError: a write to the disk failed; the error names the file. Earlier files are unchanged.

    Cost: one pass over the bytes.
    """
    save_snapshot(path, lambda base: Snapshot(parts, document), keep=keep)


def save_snapshot(
    path: str | os.PathLike[str], snapshot_of: Callable[[Base], Snapshot], *, keep: int = 1
) -> None:
    """Write a snapshot into a directory; an error leaves it unchanged.

    See ``save_checkpoint``. If the directory holds one of the last saves of the same tracked
    tensors, this writes only the chunks that have changed since.

    Args:
        snapshot_of: function that makes the snapshot, given the checkpoint in the directory. It is
            called again if another save was published first, and the snapshot cannot build on that
            save.
    """
    read_value(Positive, keep, "keep")
    if not os.fspath(path):  # pathlib would treat an empty path as the current directory
        raise ValueError(f"expected path as that of a directory, got {path!r}")
    folder = Path(path).expanduser()
    with deferred, contextlib.ExitStack() as held:
        snapshot = held.enter_context(snapshot_of(Base.of(folder)))
        with naming(folder):
            make_directory(folder)
        with exclusive(folder / ".lock"):
            base = Base.of(folder)
            if not snapshot.extends(base):
                held.close()
                snapshot = held.enter_context(snapshot_of(base))
            _save(snapshot, base, keep)


def _save(snapshot: Snapshot, base: Base, keep: int) -> None:
    token, folder = uuid.uuid4().hex[:12], base.folder
    again = snapshot.again or Again(snapshot.frozen, base)
    plain = sum(tensor.nbytes for tensor in snapshot.plain.values())
    with EarlySync() as early:
        writer = ChunkWriter(folder, token, chunk_bytes(plain + again.nbytes), early.wrote)
        try:
            tensors = {name: writer.write(tensor) for name, tensor in snapshot.plain.items()}
            writer.finish()  # separate files, since later saves reuse only rows, not these tensors
            saved = []
            for frozen in snapshot.frozen:
                records = _write_rows(writer, frozen, again.pieces[id(frozen)])
                tensors.update(records)
                saved.append((frozen, records))
            writer.finish()
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:
                list(pool.map(_sync, [folder / name for name in writer.files]))
            named = {p[0] for record in tensors.values() for p in record["pieces"]}
            old = {} if base.manifest is None else base.manifest["files"]
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "library_version": __version__,
                "save": token,
                **snapshot.head,
                "files": {
                    **{name: old[name] for name in old if name in named},
                    **writer.files,
                },
                "tensors": tensors,
                "parts": snapshot.encoded,
            }
            with naming(folder):
                publish(folder, manifest, base.manifest, keep)
        except BaseException:
            if not is_published(folder, token):
                writer.discard()
            raise
    for frozen, records in saved:
        by_key = {frozen.tensors[name].key: record for name, record in records.items()}
        frozen.remember(token, RowsAtSave(frozen.at, by_key))


def _write_rows(
    writer: ChunkWriter, frozen: FrozenRows, again: Mapping[str, Pieces]
) -> dict[str, dict[str, Any]]:
    """Write the wanted rows, a block of each tensor in turn; return the records.

    Rows that a ring overwrites together then share a file. A later save can thus drop whole files.
    """
    size, width = frozen.changes.chunk, sum(frozen.row_bytes.values())
    block = max(_BLOCK_BYTES, frozen.rows * width // _MOST_BLOCKS) // max(width, 1)
    # Blocks are whole pages, unless such blocks are too large. Chunks and pages are powers of two.
    paged = {n: frozen.rows * row_bytes >= PAGED_BYTES for n, row_bytes in frozen.row_bytes.items()}
    pages = [size, *(rows_of_pages(frozen.row_bytes[n]) for n in frozen.names if paged[n])]
    unit = max(pages) if max(pages) * width <= _MOST_BLOCK_BYTES else size
    block = max(1, block // unit) * unit
    steps = []
    for number, name in enumerate(frozen.names):
        for first, stop in runs(frozen.wanted(name)):
            first, stop = first * size, min(stop * size, frozen.rows)
            steps += [
                (start, number, max(first, start), min(stop, start + block))
                for start in range(first - first % block, stop, block)
            ]
    pieces = {name: list(again[name].pieces) for name in frozen.names}
    staging = _Staging()
    for _, number, first, stop in sorted(steps):
        check()
        name = frozen.names[number]
        row_bytes = frozen.row_bytes[name]

        def blocks(start: int, end: int, name: str = name) -> Iterator[memoryview]:
            for low, high in frozen.blocks(name, start, end, _BLOCK_BYTES):
                out = staging.rows(frozen, name, high - low)
                frozen.read(name, low, high, out)
                yield raw_bytes(out).numpy().data

        # A few rows are not aligned, to save the padding. A mapped checkpoint copies them.
        large = paged[name] and (stop - first) * row_bytes >= 4 * PAGE_BYTES
        pieces[name] += writer.append(stop - first, row_bytes, blocks, first, size, large)
    return {name: _record(writer, frozen, name, pieces[name]) for name in frozen.names}


class _Staging:
    """Memory for rows on their way to a file, which all blocks reuse."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, frozen: FrozenRows, name: str, count: int) -> torch.Tensor:
        """Return memory for ``count`` rows of a tensor."""
        tensor, nbytes = frozen.tensors[name].tensor, count * frozen.row_bytes[name]
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(tensor.dtype).view(count, *tensor.shape[1:])


def _record(
    writer: ChunkWriter, frozen: FrozenRows, name: str, pieces: list[RowExtent]
) -> dict[str, Any]:
    tensor, row_bytes = frozen.tensors[name].tensor, frozen.row_bytes[name]
    if not pieces:  # there are no rows, or rows without bytes
        pieces = writer.append(frozen.rows, 0, lambda start, stop: ())
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": [frozen.rows, *tensor.shape[1:]],
        "pieces": Pieces(row_bytes, pieces).to_record(),
    }


def _sync(file: Path) -> None:
    with naming(file):
        sync_file(file)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Exclude others that hold this lock file; the kernel frees the lock of a dead process.

    The caller is inside ``deferred``, and Ctrl-C ends the wait for the lock.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    while True:
        try:
            held = lock.acquire(timeout=_POLL_S)
            break
        except Timeout:
            check()
    with held:
        yield
