"""Read checkpoints into memory, or map them in place."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch

from replaykit._compat import arange, dtype_by_name
from replaykit.checkpoint.checkpoint_format import MANIFEST, decode, open_file, read_manifest
from replaykit.errors import CheckpointError
from replaykit.filesystem import Span, map_private, map_spans
from replaykit.interrupts import check
from replaykit.native import crc32


class RowChunks:
    """The rows of one tensor in several mapped files, read piece by piece.

    It can be read like a tensor: it has ``len``, ``shape``, ``dtype`` and ``device``. An index is
    an int, a forward slice or int64 ``[K]``. An index copies only its rows, and a slice of rows in
    one piece returns a view.

    Args:
        pieces: the rows, in order.
    """

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self.pieces = pieces
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece))
        self._starts = torch.tensor(self.starts, device="cpu")
        self.shape = torch.Size([self.starts[-1], *pieces[0].shape[1:]])
        self.dtype = pieces[0].dtype
        self.device = pieces[0].device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            number = bisect_right(self.starts, index) - 1
            return self.pieces[number][index - self.starts[number]]
        if isinstance(index, slice):
            return self._span(*index.indices(len(self)))
        rows = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype, device="cpu")
        numbers = torch.searchsorted(self._starts, index, right=True) - 1
        for number in numbers.unique().tolist():
            here = (numbers == number).nonzero().flatten()
            start, piece = self.starts[number], self.pieces[number]
            _raw(rows)[here] = _raw(piece)[index[here] - start]
        return rows

    def each(self, view: Callable[[torch.Tensor], torch.Tensor]) -> RowChunks:
        """Return the rows with ``view`` applied to every piece.

        Args:
            view: function that returns a view with the same number of rows.
        """
        return RowChunks([view(piece) for piece in self.pieces])

    def border(self, row: int) -> int:
        """Return the position of the first row after the piece that holds a given row."""
        number = bisect_right(self.starts, row) - 1
        return self.starts[number] + len(self.pieces[number])

    def views(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield views of the rows ``start..stop``, one for each piece.

        Each view comes with the number of its first row.
        """
        number = max(bisect_right(self.starts, start) - 1, 0)
        while number < len(self.pieces) and self.starts[number] < stop:
            piece, first = self.pieces[number], self.starts[number]
            low, high = max(start, first), min(stop, first + len(piece))
            if low < high:
                yield low, piece[low - first : high - first]
            number += 1

    def _span(self, start: int, stop: int, step: int) -> torch.Tensor:
        if step != 1:
            return self[arange(start, max(start, stop), step)]
        views = list(self.views(start, stop))
        if len(views) == 1:
            return views[0][1]
        rows = torch.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype, device="cpu")
        for first, view in views:
            rows[first - start : first - start + len(view)].copy_(view)
        return rows


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as bytes ``[rows, ...]``, since not every dtype can be indexed."""
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.numel() else tensor


def map_tensor(
    record: dict[str, Any], mappings: dict[str, mmap.mmap | None]
) -> torch.Tensor | RowChunks:
    """Return a tensor over mapped files, or its rows in chunks, without reading them.

    Raises:
        ValueError: the record contradicts the files.
    """
    dtype, shape = dtype_by_name(record["dtype"]), record["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected a shape, got {shape!r}")
    row_shape = shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    pieces = []
    for file, offset, rows in record["pieces"]:
        mapping = mappings[file]
        if not (type(offset) is int and type(rows) is int and offset >= 0 and rows >= 0):
            raise ValueError(f"expected an offset and a number of rows, got {offset}, {rows}")
        nbytes = rows * row_bytes
        if nbytes == 0:
            pieces.append(torch.empty([rows, *row_shape], dtype=dtype, device="cpu"))
            continue
        unit = dtype.itemsize
        if offset % unit or mapping is None or offset + nbytes > len(mapping):
            raise ValueError(f"expected {nbytes} bytes at a multiple of {unit} in {file}")
        raw = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=offset)
        pieces.append(raw.view(dtype).view([rows, *row_shape]))
    total = sum(len(piece) for piece in pieces)
    if not pieces or total != (shape[0] if shape else 1):
        raise ValueError(f"expected {shape[:1] or 1} rows, got {total}")
    if len(pieces) > 1:
        return RowChunks(pieces)
    return pieces[0] if shape else pieces[0].reshape(())


def copied(found: torch.Tensor | RowChunks) -> torch.Tensor:
    """Return a copy, in memory, of a result of ``map_tensor``."""
    if not isinstance(found, RowChunks):
        return found.clone()
    rows = found[:]  # a copy if there are several pieces, unless all pieces but one are empty
    return rows.clone() if any(len(piece) == len(found) for piece in found.pieces) else rows


_ATTEMPTS = 20
_MOST_THREADS = 8


class Checkpoint:
    """An open checkpoint, whose files are mapped after a check of their sizes.

    Use it as a context manager, or call ``close``. A save to the same directory does not affect it.

    Args:
        path: the directory.
        version: the number of the checkpoint in the directory; None for the newest.

    Attributes:
        folder: the directory.
        manifest: the content of the manifest.

    Raises:
        FileNotFoundError: there is no checkpoint, or no checkpoint of that version.
        CheckpointError: the checkpoint is damaged, or has another or a newer format. The error
            names the file.
    """

    def __init__(self, path: str | os.PathLike[str], version: int | None = None) -> None:
        self._mappings: dict[str, mmap.mmap | None] = {}
        self._checks: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if version is not None and type(version) is not int:
            raise TypeError(f"expected version as an int or None, got {version!r}")
        self.folder = Path(path).expanduser()
        for attempt in range(_ATTEMPTS):
            self.manifest = read_manifest(self.folder, version, check=True)
            try:
                self._mappings = {
                    name: self._map(name, record["size"])
                    for name, record in self.manifest["files"].items()
                }
                return
            except FileNotFoundError as error:
                # Another save may have published a manifest and removed files meanwhile. Read its
                # manifest.
                newer = read_manifest(self.folder, version).get("save")
                if newer == self.manifest.get("save") or attempt == _ATTEMPTS - 1:
                    raise CheckpointError(f"{error.filename} is missing") from None

    def _map(self, name: str, size: int) -> mmap.mmap | None:
        opened = open_file(self.folder / name, size)
        try:
            return mmap.mmap(opened, size, access=mmap.ACCESS_COPY) if size else None
        finally:
            os.close(opened)

    def verify(self, *, wait: bool = True) -> None:
        """Read every file and compare checksums.

        Args:
            wait: False returns at once, while threads check the files. ``part`` then waits for the
                check of each file that it copies from, and raises an error if the file is damaged.
                That check comes before other checks that have not begun. Mapped entries do not
                wait, so that a copy and the check together read the disk only once. Do not use
                mapped data before a second call with ``wait=True``.

        Raises:
            CheckpointError: a checksum differs; the error names the file.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
            # The order of the names is the order of the writes.
            for name in sorted(self._mappings):
                self._checks[name] = self._pool.submit(self._check, name, self._mappings[name])
        if wait:
            for checked in self._checks.values():
                check()
                checked.result()
            self._checks = {}

    def _check(self, name: str, mapping: mmap.mmap | None) -> None:
        expected = self.manifest["files"][name]["crc32"]
        found = crc32(mapping) if mapping is not None else 0
        if found != expected:
            raise CheckpointError(
                f"{self.folder / name} is damaged: expected crc32 {expected}, got {found}"
            )

    def __contains__(self, name: object) -> bool:
        return name in self.manifest["parts"]

    def part(self, name: str, *, mapped: Collection[str] = ()) -> Any:
        """Return the state of a part.

        Tensors are copied to memory. But tensors under an entry named in ``mapped`` stay in the
        files, large tensors as RowChunks. Read and release such tensors soon.

        Raises:
            CheckpointError: there is no such part, or its record is damaged.
        """
        parts = self.manifest["parts"]
        if name not in parts:
            raise CheckpointError(f"{self.folder / MANIFEST} has no part {name!r}")
        record = parts[name]
        try:
            if not mapped:
                return decode(record, self._copied)
            return {
                key: decode(item, self._mapped if key in mapped else self._copied)
                for key, item in record.items()
            }
        except CheckpointError:
            raise  # the error already names the file
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST} is damaged: part {name!r}: {error}"
            ) from None

    def _mapped(self, tensor: str) -> torch.Tensor | RowChunks:
        return map_tensor(self.manifest["tensors"][tensor], self._mappings)

    def _copied(self, tensor: str) -> torch.Tensor:
        for file, *_ in self.manifest["tensors"][tensor]["pieces"]:
            if file in self._checks:
                self._checked(file)
        return copied(map_tensor(self.manifest["tensors"][tensor], self._mappings))

    def _checked(self, name: str) -> None:
        """Wait until a file is checked, or check it here if no thread has begun.

        Priorities are stored after all rows. Without this, they would wait for the checks of all
        files.
        """
        check()
        if self._checks[name].cancel():
            here: Future[None] = Future()
            self._checks[name] = here
            try:
                self._check(name, self._mappings[name])
                here.set_result(None)
            except BaseException as error:
                here.set_exception(error)
        self._checks[name].result()

    def close(self) -> None:
        """Release the files; tensors in use keep their mapping."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._mappings = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedRows(RowChunks):
    """The rows of a tensor in files, which can also be mapped as one tensor.

    Args:
        pieces: the rows as for RowChunks, ``[n, *F]`` each.
        places: for each piece, the descriptor of its file and the offset in the file.
        folder: the folder of the checkpoint, for error messages.
        files: the names of the pieces' files in the folder, for error messages.
    """

    def __init__(
        self,
        pieces: list[torch.Tensor],
        places: list[tuple[int, int]],
        folder: Path,
        files: list[str],
    ) -> None:
        super().__init__(pieces)
        self._places, self._folder, self._files = places, folder, files

    @property
    def where(self) -> str:
        """A description of the files of the rows."""
        if not self._files:
            return str(self._folder)
        first, last = self._files[0], self._files[-1]
        return f"{self._folder / first}" + (f" to {last}" if last != first else "")

    @torch.inference_mode(False)  # a tensor made in that mode cannot be changed outside it
    def spanned(self, slots: int | None = None) -> torch.Tensor:
        """Map the rows copy-on-write, with room for more rows, as ``[slots, *F]``.

        Writes to the tensor never reach the files. The rows after the rows in the files are zero,
        and take memory only after they are written. Call this while the checkpoint is open. The
        tensor may outlive the checkpoint.

        Raises:
            OSError: the system refuses, for example with ``ENOMEM`` if there are too many mappings.

        Cost: large pieces, which ``ChunkWriter`` aligns to pages, are not read. Other pieces are
        copied.
        """
        shape = [len(self) if slots is None else slots, *self.shape[1:]]
        row_bytes = torch.Size(shape[1:]).numel() * self.dtype.itemsize
        if not shape[0] * row_bytes:
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        spans = [
            Span(descriptor, offset, start * row_bytes, len(piece) * row_bytes)
            for piece, (descriptor, offset), start in zip(
                self.pieces, self._places, self.starts, strict=False
            )
            if len(piece)
        ]
        try:
            memory = map_spans(shape[0] * row_bytes, spans)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot map {shape[0] * row_bytes} bytes: {error.strerror}",
                str(self._folder),
            ) from None
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(shape)


class MappedCheckpoint(Checkpoint):
    """A Checkpoint whose ``mapped`` entries are MappedRows of any size."""

    def __init__(self, path: str | os.PathLike[str], version: int | None = None) -> None:
        self._descriptors: dict[str, int] = {}
        try:
            super().__init__(path, version)
        except BaseException:
            self.close()
            raise

    def _map(self, name: str, size: int) -> Any:
        opened = open_file(self.folder / name, size)
        # An earlier attempt, before another save, may have opened the file. Names are never used
        # twice.
        with contextlib.suppress(KeyError):
            os.close(self._descriptors.pop(name))
        self._descriptors[name] = opened
        return map_private(opened, size) if size else None

    def _mapped(self, tensor: str) -> torch.Tensor | RowChunks:
        record = self.manifest["tensors"][tensor]
        rows = map_tensor(record, self._mappings)
        pieces = rows.pieces if isinstance(rows, RowChunks) else [rows]
        if not pieces[0].ndim:
            return rows
        places = [(self._descriptors[file], offset) for file, offset, _ in record["pieces"]]
        return MappedRows(pieces, places, self.folder, [file for file, *_ in record["pieces"]])

    def close(self) -> None:
        """Release the files; tensors that map them stay valid."""
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


Array = np.ndarray[Any, Any]
Held = TypeVar("Held")
Made = TypeVar("Made", covariant=True)


class ReadLater(Generic[Made]):
    """An object that is made from saved arrays at first use.

    A checkpoint can therefore be opened without a read of these arrays.

    Args:
        make: function that makes the object from the arrays. It raises ValueError if they
            contradict each other.
        arrays: arrays over files of a checkpoint, ``[K]`` each. The checkpoint may be closed
            afterwards.
        ``what``: a noun for the object, for error messages.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint import ReadLater
        >>> late = ReadLater(lambda counts: int(counts.sum()), [np.arange(4)], "counts")
        >>> late.read()
        6
    """

    def __init__(
        self, make: Callable[..., Made], arrays: Sequence[Array | MappedRows], what: str
    ) -> None:
        self._make, self._what = make, what
        self._arrays = [_array(array) for array in arrays]
        files = dict.fromkeys(array.where for array in arrays if isinstance(array, MappedRows))
        self._where = f", in {', '.join(files)}" if files else ""

    @torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
    def read(self) -> Made:
        """Make the object. Cost: O(K).

        Raises:
            CheckpointError: the arrays contradict each other; the error names their files.
        """
        try:
            return self._make(*self._arrays)
        except ValueError as error:
            raise CheckpointError(
                f"the {self._what} of the checkpoint{self._where}: {error}"
            ) from None


class ReadOnce(Generic[Held]):
    """A class attribute for a value, or for a ReadLater that the first access reads.

    If the read raises an error, the next access reads again.

    Args:
        name: the attribute of the owner that holds the value or the ReadLater.

    Example:
        >>> import numpy as np
        >>> from replaykit.checkpoint import ReadLater, ReadOnce
        >>> class Counts:
        ...     total = ReadOnce[int]()
        >>> counts = Counts()
        >>> counts.total = ReadLater(lambda found: int(found.sum()), [np.arange(4)], "counts")
        >>> counts.total
        6
    """

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or f"_held{name}"

    @overload
    def __get__(self, owner: None, kind: type) -> ReadOnce[Held]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Held: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is None:
            return self
        held = vars(owner)[self._name]
        if isinstance(held, ReadLater):
            held = vars(owner)[self._name] = held.read()
        return held

    def __set__(self, owner: object, value: Held | ReadLater[Held]) -> None:
        vars(owner)[self._name] = value


def _array(rows: Array | MappedRows) -> Array:
    return rows.spanned().numpy() if isinstance(rows, MappedRows) else rows
