"""The records of one stretch, a block of one leaf at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.places import path_below
from replaykit.datasets.engine.plan import PlannedLeaf, Span
from replaykit.datasets.engine.stretch import Stretch
from replaykit.errors import CorpusError

__all__ = ["StretchReader"]

_KEPT_BYTES: Final = 160 << 20
"""Bytes of a stripe of chunks up to which it is decompressed once and kept while it is read."""


class StretchReader:
    """Reads the leaves of a stretch.

    Args:
        file: the file that it is in.
        stretch: the arrays.
        block_bytes: how much of one leaf is read at a time.
        give_up: told which of several spans cannot be read, by position, with the error; where
            it returns, the records of the span are zero from then on.
    """

    def __init__(
        self,
        file: H5File,
        stretch: Stretch,
        block_bytes: int,
        give_up: Callable[[int, CorpusError], None],
    ) -> None:
        self._file = file
        self._stretch = stretch
        self._block_bytes = block_bytes
        self._give_up = give_up
        self._dead: set[int] = set()

    def read(self, leaf: PlannedLeaf, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns records ``start .. stop - 1`` of a leaf, decoded, parts side by side.

        Of several spans all records are read at once.

        Raises:
            CorpusError: those of a single span cannot be read in full, or not decoded.
        """
        stretch = self._stretch
        if stretch.is_single:
            return self._read(stretch.spans[0], leaf, start, stop)
        block: npt.NDArray[Any] | None = None
        offsets = stretch.offsets.tolist()
        is_plain = leaf.decoder is None and len(leaf.paths) == 1 and not leaf.is_once
        for i, span in enumerate(stretch.spans):
            records = span.records + leaf.extra
            place = slice(offsets[i], offsets[i] + records)
            into = block[place] if block is not None and is_plain else None
            part = self._tried(i, leaf, 1 if leaf.is_once else records, into)
            if part is None or part is into:
                continue
            if block is None:
                # All spans of a stretch declare the same, so that this is the dtype of all.
                block = np.zeros((stretch.records, *part.shape[1:]), part.dtype)
            block[place] = part
        if block is None:
            return np.zeros((stretch.records, *leaf.shape), leaf.dtype)
        return block

    def _tried(
        self, position: int, leaf: PlannedLeaf, stop: int, into: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any] | None:
        """Returns the first records of one of several spans; ``None`` if they cannot be read."""
        if position in self._dead:
            return None
        try:
            return self._read(self._stretch.spans[position], leaf, 0, stop, into)
        except CorpusError as error:
            self._dead.add(position)
            self._give_up(position, error)
            return None

    def _read(
        self,
        span: Span,
        leaf: PlannedLeaf,
        start: int,
        stop: int,
        into: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        if not leaf.is_once:
            start, stop = start + span.base, stop + span.base
        if leaf.decoder is not None:
            return leaf.decoder.read(self._file, path_below(span.group, leaf.path), start, stop)
        if len(leaf.paths) == 1:
            return self._file.read(path_below(span.group, leaf.path), start, stop, into)
        parts = [self._file.read(path_below(span.group, path), start, stop) for path in leaf.paths]
        flat = [part.reshape(stop - start, -1) for part in parts]
        return np.concatenate(flat, axis=1, dtype=leaf.dtype)

    def blocks(
        self, leaf: PlannedLeaf, loaded: Mapping[str, npt.NDArray[Any]]
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields the records of a leaf in blocks, each with the index of its first record.

        ``loaded`` has the first records of leaves that were read already.

        HDF5 decompresses a chunk whole. A stripe of chunks that is larger than a block is read in
        blocks all the same: HDF5 keeps it meanwhile up to 160 MiB. A larger one is decompressed
        anew for every block, which takes time; a chunk of that size takes its memory in any case.
        """
        stretch, begin = self._stretch, 0
        if leaf.path in loaded:
            begin = len(loaded[leaf.path])
            yield 0, loaded[leaf.path]
            if begin == stretch.records + leaf.extra * stretch.is_single:
                return
        if not stretch.is_single:
            yield 0, self.read(leaf, 0, stretch.records)
            return
        records = stretch.records + leaf.extra
        step = records
        if leaf.is_once:
            value = self.read(leaf, 0, 1)
            step = max(1, self._block_bytes // max(1, leaf.record_bytes))
            for start in range(0, records, step):
                count = min(step, records - start)
                yield start, np.broadcast_to(value, (count, *value.shape[1:]))
            return
        if leaf.record_bytes * records <= self._block_bytes:
            yield begin, self.read(leaf, begin, records)
            return
        span = stretch.spans[0]
        paths = [path_below(span.group, path) for path in leaf.paths]
        stripes = [self._file.stripe(path) for path in paths]
        stripe = max(rows for rows, _ in stripes)
        nbytes = stripe * leaf.record_bytes
        # Whole stripes of chunks, so that none is decompressed twice.
        step = stripe * max(1, self._block_bytes // nbytes)
        piece = step if nbytes <= self._block_bytes else self._block_bytes // leaf.record_bytes
        whole = max(nbytes for _, nbytes in stripes)
        kept = whole if piece < step and whole <= _KEPT_BYTES else 0
        start = begin
        while start < records:
            # To the end of a stripe, wherever this begins.
            end = min(((start + span.base) // step + 1) * step - span.base, records)
            with self._file.keeping(paths, kept):
                while start < end:
                    stop = min(start + max(1, piece), end)
                    yield start, self.read(leaf, start, stop)
                    start = stop
