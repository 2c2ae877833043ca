"""Where an H5 file keeps the values of a dataset, and how much memory reading a chunk takes.

A file of unknown origin may name any other file of this machine as the place of its values, and may
hold a few kilobytes that inflate to many gigabytes. Both are found out here before HDF5 reads.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Final

from replaykit.errors import CorpusError

__all__ = [
    "DEFLATE",
    "ELSEWHERE",
    "FLETCHER32",
    "LZF",
    "MOST_CHUNK_BYTES",
    "REFERENCE_BYTES",
    "SHUFFLE",
    "ChunkChecks",
    "storage_of",
]

MOST_CHUNK_BYTES: Final = 1 << 30
"""Bytes that one compressed chunk may take once it is inflated."""
ELSEWHERE: Final = "its values lie in another file, which is not read"
DEFLATE: Final = 1
SHUFFLE: Final = 2
FLETCHER32: Final = 3
_SZIP: Final = 4
_NBIT: Final = 5
_SCALEOFFSET: Final = 6
LZF: Final = 32_000
REFERENCE_BYTES: Final = 16
"""Bytes of a value of varying length in the file, besides its content."""
_RATIOS: Final = {DEFLATE: 1032, LZF: 90, _SZIP: 1 << 32}
"""Bytes that one stored byte can become at most; other filters of HDF5 say the number themselves,
and those of plugins are code that the user has installed."""
_PIECE: Final = 1 << 20
_REMEDY: Final = "rewrite the file with smaller chunks, for example by h5repack"


def storage_of(node: Any) -> tuple[str | None, int]:
    """Says why the values of a dataset are not to be read, and how far its chunks may inflate.

    Args:
        node: the low-level dataset.

    Returns:
        The reason, or ``None``; and how many bytes a stored byte of a chunk becomes at most.

    Cost: some microseconds; no value is read, and no other file is opened.
    """
    from h5py import h5d, h5t

    properties = node.get_create_plist()
    layout = properties.get_layout()
    # Before all else: a forged file may name both an address of its own and other files, of which
    # HDF5 reads the latter.
    if layout == h5d.VIRTUAL or properties.get_external_count():
        return ELSEWHERE, 1
    count = properties.get_nfilters() if layout == h5d.CHUNKED else 0
    if not count:
        return None, 1
    # References are of 16 bytes in the file, whatever they are in memory.
    kind, ratio = node.get_type(), 1
    is_text = isinstance(kind, h5t.TypeStringID) and kind.is_variable_str()
    size = max(kind.get_size(), REFERENCE_BYTES * is_text)
    declared = math.prod(properties.get_chunk()) * size
    for at in range(count):
        code, _, values, _ = properties.get_filter(at)
        ratio *= _RATIOS.get(code, 1)
        if code in (_NBIT, _SCALEOFFSET):
            # What these filters inflate to is the number of values that they name.
            named = [value & 0xFFFF_FFFF for value in values[2:5]]
            declared = max(declared, math.prod(named[:1]) * max(size, *named[2:], 1))
    if declared > MOST_CHUNK_BYTES:
        return (
            f"its compressed chunks take {declared:,} bytes each, more than the "
            f"{MOST_CHUNK_BYTES:,} that are inflated at once: {_REMEDY}"
        ), ratio
    return None, ratio


class ChunkChecks:
    """Makes sure that no chunk of an open file inflates beyond `MOST_CHUNK_BYTES`.

    Each dataset is looked at once. Memory: one entry for each dataset of more than 1 MB that was
    read, and one for each chunk of more than that.
    """

    def __init__(self) -> None:
        self._large: dict[str, set[tuple[int, ...]]] = {}

    def require(self, node: Any, ratio: int, dataset: str, start: int, stop: int) -> None:
        """Checks the chunks that hold some records of a dataset.

        Args:
            node: the low-level dataset.
            ratio: what `storage_of` says of it.
            dataset: its path.
            start, stop: the records.

        Raises:
            CorpusError: one would take more memory; or nothing but inflating it can tell.

        Cost: microseconds where what is stored is too little to become so much; otherwise the
        sizes of all chunks are looked up once, and those that could inflate to more are inflated
        piece by piece.
        """
        if ratio == 1:
            return
        large = self._large.get(dataset)
        if large is None:
            if node.get_storage_size() * ratio <= MOST_CHUNK_BYTES:
                return
            large = self._large[dataset] = set()

            def note(chunk: Any) -> None:
                if chunk.size * ratio > MOST_CHUNK_BYTES:
                    large.add(tuple(chunk.chunk_offset))

            node.chunk_iter(note)
        if large:
            records = node.get_create_plist().get_chunk()[0]
            here = [at for at in large if at[0] < stop and at[0] + records > start]
            for at in here:
                _require(node, at)
                large.discard(at)


def _require(node: Any, corner: tuple[int, ...]) -> None:
    """Checks one chunk of which little is known but that it is large."""
    properties = node.get_create_plist()
    # In the order in which they were applied.
    filters = [properties.get_filter(at)[0] for at in range(properties.get_nfilters())]
    if node.get_chunk_info_by_coord(corner).size <= MOST_CHUNK_BYTES:
        mask, stored = node.read_direct_chunk(corner)
        active = [code for at, code in enumerate(filters) if not mask >> at & 1]
        outer = [code for code in active if code != FLETCHER32]
        if not any(code in _RATIOS for code in active):
            return
        if outer and outer[-1] == _SZIP and not any(code in _RATIOS for code in outer[:-1]):
            if int.from_bytes(stored[:4], "little") <= MOST_CHUNK_BYTES:
                return
        elif outer and outer[-1] == DEFLATE and set(outer[:-1]) <= {SHUFFLE}:
            if _is_bounded(stored):
                return
        elif len(stored) * math.prod(_RATIOS.get(c, 1) for c in active) <= MOST_CHUNK_BYTES:
            return
    raise CorpusError(
        f"the chunk at {list(corner)} may inflate to more than {MOST_CHUNK_BYTES:,} bytes, which "
        f"no chunk may take: {_REMEDY}"
    )


def _is_bounded(stored: bytes) -> bool:
    """Whether what was deflated inflates to no more than a chunk may take."""
    stream, total = zlib.decompressobj(), 0
    try:
        while not stream.eof and total <= MOST_CHUNK_BYTES:
            piece = stream.decompress(stored, _PIECE)
            total += len(piece)
            stored = stream.unconsumed_tail
            if not piece and not stored:
                break
    except zlib.error:
        return total <= MOST_CHUNK_BYTES  # damaged: HDF5 comes no further, and says so
    return total <= MOST_CHUNK_BYTES
