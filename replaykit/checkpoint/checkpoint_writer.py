"""Save the state of parts into a directory, atomically and incrementally."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    runs,
)
from replaykit.checkpoint.dirty_chunks import FrozenRows, RowsAtSave, TrackedTensor
from replaykit.filesystem import EarlySync, make_directory
from replaykit.interrupts import check, deferred
from replaykit.structure import raw_bytes

__all__ = ["Snapshot", "save_checkpoint", "save_snapshot"]


class Snapshot:
    """What a save will write; a context manager, which lets go of it.

    Tensors are copied, but for those whose changes are tracked: these are read block by block
    later, and what is overwritten before is copied first. Of those that others write too, who say
    so to nobody here, what the save will not name again is copied at once.

    Args:
        parts: state of each part: values that ``tree.encode`` takes.
        document: plain JSON values for the head of the manifest.
        lock: guards the tracked tensors. Whoever makes a snapshot holds it.
        base: the checkpoint that the save follows, as it was found a moment ago; None: of what is
            copied at once, it is all.

    Attributes:
        encoded, head: parts and document as JSON.
        plain: copies of the other tensors, by name.
        frozen: the tracked tensors, those of one Changes together.
        again: what of them the save names again, where some are copied at once; else None.

    Raises:
        TypeError: a state that cannot be represented.
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

    def follows(self, base: Base) -> bool:
        """Whether it can be saved over a checkpoint: that has no later state of the same tensors,
        and is the one that it has copied what is new for."""
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
"""How much is copied at a time while writers wait."""
_MOST_BLOCKS = 256
_MOST_BLOCK_BYTES = 64 * 2**20
_SYNC_THREADS = 8
_LOOK = 0.05
"""Seconds between looks for Ctrl-C while another process saves to the directory."""


def save_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Any],
    document: Mapping[str, Any],
    *,
    keep: int = 1,
) -> None:
    """Writes parts and a document into a directory, all or nothing.

    Args:
        path: the directory; made with its parents.
        parts: state of each part: values that ``tree.encode`` takes.
        document: plain JSON values for the head of the manifest.
        keep: how many checkpoints the directory holds at most, this one included.

    Raises:
        TypeError: a state that cannot be represented; nothing has been written.
        ValueError: ``keep`` is below 1, or ``path`` is empty.
        CheckpointError: the directory holds something else under ``manifest.json``.
        OSError: the disk refused; names the file. What was there before is untouched.

    Cost: one pass over the bytes.
    """
    save_snapshot(path, lambda base: Snapshot(parts, document), keep=keep)


def save_snapshot(
    path: str | os.PathLike[str], take: Callable[[Base], Snapshot], *, keep: int = 1
) -> None:
    """Writes a snapshot into a directory, all or nothing; see ``save_checkpoint``.

    Of tracked tensors only those chunks are written that have changed since the save that the
    directory holds, if that was one of the last of the same tensors.

    Args:
        take: makes the snapshot, of the checkpoint that the directory holds; called again where
            another one was saved before this one could be, and that matters.
    """
    if type(keep) is not int or keep < 1:
        raise ValueError(f"expected keep as an int of at least 1, got {keep!r}")
    if not os.fspath(path):  # to pathlib the current directory, which is then called "."
        raise ValueError(f"expected path as that of a directory, got {path!r}")
    folder = Path(path).expanduser()
    with deferred, contextlib.ExitStack() as held:
        snapshot = held.enter_context(take(Base.of(folder)))
        with naming(folder):
            make_directory(folder)
        with _exclusive(folder):
            base = Base.of(folder)
            if not snapshot.follows(base):
                held.close()
                snapshot = held.enter_context(take(base))
            _save(snapshot, base, keep)


def _save(snapshot: Snapshot, base: Base, keep: int) -> None:
    token, folder = uuid.uuid4().hex[:12], base.folder
    again = snapshot.again or Again(snapshot.frozen, base)
    plain = sum(tensor.nbytes for tensor in snapshot.plain.values())
    with EarlySync() as early:
        writer = ChunkWriter(folder, token, chunk_bytes(plain + again.nbytes), early.wrote)
        try:
            tensors = {name: writer.write(tensor) for name, tensor in snapshot.plain.items()}
            writer.finish()  # what every save writes anew does not lie with what stays
            saved = []
            for frozen in snapshot.frozen:
                records = _write_rows(writer, frozen, again.pieces[id(frozen)])
                tensors.update(records)
                saved.append((frozen, records))
            writer.finish()
            _sync(folder / name for name in writer.files)
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
    """Writes the rows that are wanted, some of all tensors after each other; returns the records.

    So the rows of a ring that are overwritten together lie in one file, which goes with them.
    """
    size, width = frozen.changes.chunk, sum(frozen.row_bytes.values())
    block = max(_BLOCK_BYTES, frozen.rows * width // _MOST_BLOCKS) // max(width, 1)
    # Rows of whole pages, where that is not too many; chunks and pages are powers of two.
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

        # A few rows are not worth the gap before them: whoever maps the tensor copies them.
        large = paged[name] and (stop - first) * row_bytes >= 4 * PAGE_BYTES
        pieces[name] += writer.append(stop - first, row_bytes, blocks, first, size, large)
    return {name: _record(writer, frozen, name, pieces[name]) for name in frozen.names}


class _Staging:
    """Memory for rows on their way to a file, taken once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, frozen: FrozenRows, name: str, count: int) -> torch.Tensor:
        """Room for rows of a tensor."""
        tensor, nbytes = frozen.tensors[name].tensor, count * frozen.row_bytes[name]
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(tensor.dtype).view(count, *tensor.shape[1:])


def _record(
    writer: ChunkWriter, frozen: FrozenRows, name: str, pieces: list[RowExtent]
) -> dict[str, Any]:
    tensor, row_bytes = frozen.tensors[name].tensor, frozen.row_bytes[name]
    if not pieces:  # no rows, or rows without bytes
        pieces = writer.append(frozen.rows, 0, lambda start, stop: ())
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": [frozen.rows, *tensor.shape[1:]],
        "pieces": Pieces(row_bytes, pieces).to_record(),
    }


def _sync(files: Iterable[Path]) -> None:
    """Makes files durable; the system reports what was not written to one of these calls."""

    def sync(file: Path) -> None:
        with naming(file):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    files = list(files)
    if len(files) < 2:
        for file in files:
            sync(file)
        return
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(sync, files))


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One saver at a time; the kernel lets go of the lock when a process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    while True:
        try:
            held = lock.acquire(timeout=_LOOK)
            break
        except Timeout:
            check()
    with held:
        yield
