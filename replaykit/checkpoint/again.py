"""What of the checkpoint that a directory holds a save names again, instead of writing it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replaykit._compat import dtype_name
from replaykit.checkpoint.changes import SavedRows
from replaykit.checkpoint.frozen import FrozenRows
from replaykit.checkpoint.manifests import read_base
from replaykit.checkpoint.pieces import Pieces, files_to_leave, runs

__all__ = ["Again", "Base"]


@dataclass(frozen=True)
class Base:
    """The checkpoint that a save follows.

    Attributes:
        folder: the directory.
        manifest: what it says; None: there is none that can be read.
    """

    folder: Path = Path()
    manifest: dict[str, Any] | None = None

    @classmethod
    def of(cls, folder: Path) -> Base:
        """The one that a directory holds; CheckpointError where it holds something else."""
        return cls(folder, read_base(folder))

    @property
    def save(self) -> str | None:
        """The name of the save that wrote it."""
        return None if self.manifest is None else self.manifest["save"]


class Again:
    """Which chunks of frozen rows a save names again, and tells these of the others.

    Attributes:
        base: the checkpoint whose chunks they are.
        pieces: by the frozen rows and by tensor, the pieces that are named again.
        nbytes: bytes of the rows that are not.
    """

    def __init__(self, frozen_rows: Iterable[FrozenRows], base: Base) -> None:
        self.base = base
        self.pieces: dict[int, dict[str, Pieces]] = {}
        self.nbytes = 0
        frozen_rows, manifest = list(frozen_rows), base.manifest
        sizes = {} if manifest is None else _sizes(base.folder, manifest)
        live: dict[str, int] = {}
        for frozen in frozen_rows:
            rows = None if manifest is None else frozen.saved(manifest)
            again = self.pieces[id(frozen)] = {
                name: _unchanged(frozen, name, rows, sizes) for name in frozen.names
            }
            for pieces in again.values():
                for file, nbytes in pieces.nbytes().items():
                    live[file] = live.get(file, 0) + nbytes
        left = files_to_leave(live, sizes)
        for frozen in frozen_rows:
            wanted, size = {}, frozen.changes.chunk
            for name, pieces in self.pieces[id(frozen)].items():
                pieces.pieces = [piece for piece in pieces.pieces if piece.file not in left]
                wanted[name] = np.full(frozen.chunks, frozen.row_bytes[name] > 0)
                for piece in pieces.pieces:
                    stop = -(-(piece.first + piece.rows) // size)
                    wanted[name][piece.first // size : stop] = False
                self.nbytes += int(wanted[name].sum()) * size * frozen.row_bytes[name]
            frozen.want(wanted)


def _sizes(folder: Path, base: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of those files of a checkpoint that are there and have them."""
    found = {}
    for name, record in base["files"].items():
        with contextlib.suppress(OSError):
            if os.lstat(folder / name).st_size == record["size"]:
                found[name] = record["size"]
    return found


def _unchanged(
    frozen: FrozenRows, name: str, saved: SavedRows | None, sizes: Mapping[str, int]
) -> Pieces:
    """The pieces of the chunks that have not changed since a save, and whose files are there."""
    row_bytes, tensor = frozen.row_bytes[name], frozen.tensors[name].tensor
    record = None if saved is None else saved.records.get(frozen.tensors[name].key)
    if (
        saved is None
        or record is None
        or record["dtype"] != dtype_name(tensor.dtype)
        or record["shape"][1:] != list(tensor.shape[1:])
        or not row_bytes
    ):
        return Pieces(row_bytes)
    size, rows, before = frozen.changes.chunk, frozen.rows, record["shape"][0]
    same = frozen.versions[name] <= saved.at
    # A chunk that was not full has grown, or all of its rows were saved.
    same[min(rows, before) // size :] = False
    if before >= rows and rows % size and frozen.versions[name][-1] <= saved.at:
        same[-1] = True
    spans = [(first * size, min(stop * size, rows)) for first, stop in runs(same)]
    old = Pieces.of_record(record["pieces"], row_bytes).spans(spans)
    # Files are cut at the borders of chunks: with a file that is gone go whole chunks.
    old.pieces = [piece for piece in old.pieces if piece.file in sizes]
    return old
