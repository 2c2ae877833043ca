"""Rows that others write too, at one instant: what a save wants of them is copied at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.changes import SavedRows, TrackedTensor
from replaykit.checkpoint.frozen import FrozenRows, blank, copy_rows

if TYPE_CHECKING:
    from replaykit.checkpoint.kept_changes import KeptChanges

__all__ = ["CopiedRows"]

_BLOCK_BYTES = 64 * 2**20
"""How much is copied in one piece, which is let go when all of it has been read."""


class CopiedRows(FrozenRows):
    """``FrozenRows`` of which nobody says when they are overwritten: ``want`` copies what it names,
    under the lock that was held when they were frozen, and no view of them is kept.

    Args:
        settled: whether what they hold stays; else no later save may go on from this one.

    Cost: the memory of what is wanted and not yet read.
    """

    changes: KeptChanges
    at_once = True

    def __init__(
        self,
        changes: KeptChanges,
        tensors: Mapping[str, TrackedTensor],
        lock: AbstractContextManager[Any],
        settled: bool,
    ) -> None:
        super().__init__(changes, tensors, lock)
        self._settled = settled
        self._copies: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
        # Under another name, or of other tensors, what a save wrote is not that of these.
        keys = sorted((name, repr(tracked.key)) for name, tracked in tensors.items())
        self._names = zlib.crc32(repr(keys).encode())

    def __exit__(self, *_: object) -> None:
        self._copies = {}

    def saved(self, manifest: Mapping[str, Any]) -> SavedRows | None:
        at = self.changes.saved_at(manifest["save"], self._names)
        if at is None:
            return None
        records = manifest["tensors"]
        known = {tracked.key: records[name] for name, tracked in self.tensors.items()}
        return SavedRows(at, known)

    def remember(self, save: str, rows: SavedRows) -> None:
        if self._settled:
            with self.lock:
                self.changes.note_saved(save, rows.at, self._names)

    def keep(self, chunks: np.ndarray[Any, Any], keys: Iterable[Any] | None) -> None:
        raise AssertionError("they are copied before anybody writes")

    def want(self, wanted: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copies the chunks that will be read. The lock has been held since they were frozen."""
        size = self.changes.chunk
        for name, chunks in wanted.items():
            tracked = self.tensors[name]
            copies: dict[int, tuple[int, torch.Tensor]] = {}
            self._left[name] &= chunks
            if tracked.check is not None:
                tracked.check()
            step = max(1, _BLOCK_BYTES // max(1, size * self.row_bytes[name]))
            numbers = self._left[name].nonzero()[0]
            breaks = (np.diff(numbers) > 1).nonzero()[0] + 1
            for run in np.split(numbers, breaks):
                for at in range(0, len(run), step):
                    some = run[at : at + step]
                    first, stop = int(some[0]) * size, min((int(some[-1]) + 1) * size, self.rows)
                    source = tracked.tensor[first:stop]
                    rows = torch.empty(source.shape, dtype=source.dtype, device="cpu")
                    copy_rows(rows, source)
                    if tracked.padding:
                        blank(rows, tracked.padding)
                    copies.update(dict.fromkeys(some.tolist(), (first, rows)))
            self._copies[name] = copies
        # A view that is held here would be counted as one that somebody may write to.
        self.tensors = {
            name: replace(tracked, tensor=tracked.tensor.to("meta"))
            for name, tracked in self.tensors.items()
        }

    def read(self, name: str, first: int, stop: int, out: torch.Tensor) -> None:
        size, copies, at = self.changes.chunk, self._copies[name], first
        while at < stop:
            number = at // size
            start, rows = copies[number]
            border = min(stop, start + len(rows))
            copy_rows(out[at - first : border - first], rows[at - start : border - start])
            for chunk in range(number, -(-border // size)):
                if border >= min((chunk + 1) * size, self.rows):
                    self._left[name][chunk] = False
                    del copies[chunk]
            at = border
