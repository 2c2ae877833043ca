"""The records of one span, a block of one leaf at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.plan import PlannedLeaf, Span

__all__ = ["SpanReader"]


class SpanReader:
    """Reads the leaves of a span.

    Args:
        file: the file that the span is in.
        span: the arrays.
        block_bytes: how much of one leaf is read at a time.
    """

    def __init__(self, file: H5File, span: Span, block_bytes: int) -> None:
        self._file = file
        self._span = span
        self._block_bytes = block_bytes

    def read(self, leaf: PlannedLeaf, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns records ``start .. stop - 1`` of a leaf, decoded, parts side by side.

        Raises:
            CorpusError: they cannot be read in full, or not decoded.
        """
        if leaf.decoder is not None:
            return leaf.decoder.read(self._file, self._path(leaf.path), start, stop)
        parts = [self._file.read(self._path(path), start, stop) for path in leaf.paths]
        if len(parts) == 1:
            return parts[0]
        flat = [part.reshape(stop - start, -1) for part in parts]
        return np.concatenate(flat, axis=1, dtype=leaf.dtype)

    def blocks(
        self, leaf: PlannedLeaf, loaded: Mapping[str, npt.NDArray[Any]]
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields the records of a leaf in blocks, each with the index of its first record.

        ``loaded`` has leaves that were read whole already.
        """
        records = self._span.records + leaf.extra
        if leaf.path in loaded:
            yield 0, loaded[leaf.path]
            return
        step = records
        if leaf.is_once:
            value = self.read(leaf, 0, 1)
            step = max(1, self._block_bytes // max(1, leaf.record_bytes))
            for start in range(0, records, step):
                count = min(step, records - start)
                yield start, np.broadcast_to(value, (count, *value.shape[1:]))
            return
        if leaf.record_bytes * records > self._block_bytes:
            # Whole stripes of chunks, so that none is decompressed twice.
            stripe = max(self._file.chunk_rows(self._path(path)) for path in leaf.paths)
            step = stripe * max(1, self._block_bytes // (stripe * leaf.record_bytes))
        for start in range(0, records, step):
            yield start, self.read(leaf, start, min(start + step, records))

    def _path(self, path: str) -> str:
        return f"{self._span.group}/{path}" if self._span.group else path
