"""Checkpoints whose large tensors stay in their files: opened at once, read as they are used."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from replaykit.checkpoint.directory import Checkpoint
from replaykit.checkpoint.files import open_file
from replaykit.checkpoint.row_chunks import RowChunks, copied, map_tensor
from replaykit.mapping import Span, can_map_spans, map_private, map_spans

__all__ = ["MappedCheckpoint", "MappedRows"]


class MappedRows(RowChunks):
    """The rows of a tensor in files, which can be had as one tensor over these files.

    Args:
        pieces: the rows, ``[n, *F]`` each, as for RowChunks.
        places: for each of them the descriptor of its file and its offset in it.
        folder: of the checkpoint, and ``files``, the names of theirs in it, for errors.
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
        """The files in which they lie, in words."""
        if not self._files:
            return str(self._folder)
        first, last = self._files[0], self._files[-1]
        return f"{self._folder / first}" + (f" to {last}" if last != first else "")

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def spanned(self, slots: int | None = None) -> torch.Tensor:
        """Returns the rows and room for more, ``[slots, *F]``, mapped copy-on-write.

        What is written to it never reaches the files. Rows beyond those of the files are zero and
        take memory once they are written. Only as long as the checkpoint is open; the tensor may
        outlive it.

        Raises:
            OSError: the system refuses, for example with ``ENOMEM`` for too many mappings.

        Cost: no row is read where pieces lie as ``ChunkWriter`` puts large ones; others are copied.
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
    """As Checkpoint; entries of a part that are ``mapped`` are MappedRows, whatever their size.

    Raises:
        NotImplementedError: a system on which parts of files cannot be mapped in a row.
    """

    def __init__(self, path: str | os.PathLike[str], version: int | None = None) -> None:
        if not can_map_spans():
            raise NotImplementedError(
                "a checkpoint can only be opened with mmap=True on a 64-bit POSIX system; "
                "load it without"
            )
        self._descriptors: dict[str, int] = {}
        try:
            super().__init__(path, version)
        except BaseException:
            self.close()
            raise

    def _map(self, name: str, size: int) -> Any:
        opened = open_file(self.folder / name, size)
        # Of an attempt that a save overtook: names are not used twice, so it is the same file.
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

    def _copied(self, tensor: str) -> torch.Tensor:
        return copied(map_tensor(self.manifest["tensors"][tensor], self._mappings))

    def close(self) -> None:
        """Lets go of the files; tensors over them keep what they need."""
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
