"""The rows of tensors at one instant, for a save that reads them while they go on being written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from replaykit.checkpoint.changes import Changes, SavedRows, TrackedTensor

__all__ = ["FrozenRows", "blank", "copy_rows"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenRows:
    """The rows of some tensors at one instant, while they go on being written.

    Attributes:
        at: the number of the save: what was written up to the instant has it, or a smaller one.
        rows: how many rows there were.
        names: the tensors.
        row_bytes: bytes of a row of each.

    Cost: nothing is copied before it is read or overwritten.
    """

    at_once = False
    """Whether all that is wanted is copied while the lock is still held; see ``CopiedRows``."""

    def __init__(
        self,
        changes: Changes,
        tensors: Mapping[str, TrackedTensor],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.changes, self.tensors, self.lock = changes, dict(tensors), lock
        self.at = changes.now
        self.names = list(tensors)
        self.rows = len(next(iter(tensors.values())).tensor)
        self.chunks = -(-self.rows // changes.chunk)
        self.versions = {
            name: changes.versions(tracked.key)[: self.chunks] for name, tracked in tensors.items()
        }
        self.row_bytes = {
            name: tracked.tensor[:1].nbytes if self.rows else 0 for name, tracked in tensors.items()
        }
        self._left = {name: np.ones(self.chunks, bool) for name in self.names}
        self._kept: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.names}

    def __enter__(self) -> FrozenRows:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.changes.thaw(self)
            self._kept = {name: {} for name in self.names}

    def saved(self, manifest: Mapping[str, Any]) -> SavedRows | None:
        """Returns what the save wrote that left a manifest, if it was one of the last of these
        rows."""
        return self.changes.saved(manifest["save"])

    def remember(self, save: str, rows: SavedRows) -> None:
        """Keeps in mind what a save of this has written, once it is published."""
        self.changes.remember(save, rows)

    def keep(self, chunks: np.ndarray[Any, Any], keys: Iterable[Any] | None) -> None:
        """Copies chunks that will be overwritten and have not been read. The lock is held."""
        known = None if keys is None else set(keys)
        chunks = chunks[chunks < self.chunks]
        for name, tracked in self.tensors.items():
            if known is not None and tracked.key not in known:
                continue
            left, kept = self._left[name], self._kept[name]
            for number in chunks[left[chunks]].tolist():
                if number not in kept:
                    kept[number] = tracked.tensor[self._span(number)].clone()

    def _span(self, chunk: int) -> slice:
        return slice(chunk * self.changes.chunk, min((chunk + 1) * self.changes.chunk, self.rows))

    def want(self, wanted: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Says which chunks of each tensor will be read, bool ``[chunks]``; each once."""
        with self.lock:
            for name, chunks in wanted.items():
                self._left[name] &= chunks
                kept = self._kept[name]
                for number in [number for number in kept if not chunks[number]]:
                    del kept[number]

    def wanted(self, name: str) -> np.ndarray[Any, Any]:
        """Returns which chunks of a tensor are still to be read, bool ``[chunks]``."""
        return self._left[name].copy()

    def read(self, name: str, first: int, stop: int, out: torch.Tensor) -> None:
        """Copies the rows ``first..stop`` as they were at the instant, into ``out`` on the CPU.

        Args:
            first, stop: both at the border of a chunk, or a part of one chunk; a chunk that is
                read in parts is read in order.
        """
        size = self.changes.chunk
        with self.lock:
            left, kept, tracked = self._left[name], self._kept[name], self.tensors[name]
            if tracked.check is not None:
                tracked.check()
            copy_rows(out, tracked.tensor[first:stop])
            for number in range(first // size, (stop - 1) // size + 1):
                start = number * size
                if number in kept:
                    low, high = max(first, start), min(stop, start + size)
                    out[low - first : high - first] = kept[number][low - start : high - start]
                if stop >= min(start + size, self.rows):
                    left[number] = False
                    kept.pop(number, None)
            if tracked.padding:  # whatever the memory held before
                blank(out, tracked.padding)

    def blocks(self, name: str, first: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields spans of rows to ``read``, of some bytes each, that make up chunks in a row."""
        step = max(1, nbytes // max(self.row_bytes[name], 1))
        if step >= self.changes.chunk:
            step -= step % self.changes.chunk
        else:  # parts of one chunk each
            starts = range(first - first % self.changes.chunk, stop, self.changes.chunk)
            cuts = [
                at
                for start in starts
                for at in range(start, min(start + self.changes.chunk, stop), step)
            ]
            yield from itertools.pairwise([*(at for at in cuts if at >= first), stop])
            return
        for start in range(first, stop, step):
            yield start, min(start + step, stop)


def blank(rows: torch.Tensor, padding: int) -> None:
    """Sets the last ``padding`` bytes of rows uint8 ``[*batch, n]`` to zero.

    Word by word: an operation on a few bytes of every row takes five times as long.
    """
    width = rows.shape[-1]
    size = next(size for size in (8, 4, 2, 1) if width % size == 0)
    count = -(-padding // size)
    kept = bytes([255]) * (count * size - padding) + bytes(padding)
    words = rows.reshape(-1, width).numpy().view(f"u{size}")
    for place, mask in enumerate(np.frombuffer(kept, f"u{size}"), width // size - count):
        words[:, place] &= mask


def copy_rows(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copies rows bit for bit: on the CPU without torch's threads, which wait for each other."""
    words = _WORDS.get(source.dtype.itemsize)
    if words is None or not source.is_cpu or source.is_conj() or source.is_neg():
        out.copy_(source)
    else:
        np.copyto(out.view(words).numpy(), source.detach().view(words).numpy())
