"""Checks of H5 files of unknown origin before their values are read."""

from __future__ import annotations

import errno
import math
import zlib
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.errors import CorpusError

SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"

_FETCH_AGAIN: Final = "download the file again"
AT_SOURCE: Final = (
    "its bytes match the hash that its source lists, so the file is wrong there and downloading it "
    "again does not help: report it to the owner of the source"
)
_PICKLE: Final = "a Python pickle"
# Signatures of other formats: (prefix, name, remedy).
_OTHER_MAGIC: Final[tuple[tuple[bytes, str, str], ...]] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the data",
        "fetch the data itself, for example with `git lfs pull`",
    ),
    (b"PK\x03\x04", "a zip archive", "unpack it and pass the .h5 files"),
    (b"\x1f\x8b", "gzip-compressed data", "unpack it and pass the .h5 files"),
    (b"\xfd7zXZ\x00", "xz-compressed data", "unpack it and pass the .h5 files"),
    (b"BZh", "bzip2-compressed data", "unpack it and pass the .h5 files"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data", "unpack it and pass the .h5 files"),
    (b"\x0e\x03\x13\x01", "an HDF4 file", "convert it to HDF5 first"),
    (b"\x93NUMPY", "a NumPy array file", "pass the .h5 files"),
    (b"PAR1", "a Parquet file", "pass the .h5 files"),
    (b"CDF\x01", "a NetCDF 3 file", "pass the .h5 files"),
    (b"CDF\x02", "a NetCDF 3 file", "pass the .h5 files"),
)


def check_signature(path: Path, *, is_verified: bool = False) -> None:
    """Check from its first bytes that a file is HDF5 (rule V01).

    Args:
        path: the file.
        is_verified: as for `open_h5`.

    Raises:
        CorpusError: the file is not HDF5. The message names its format and a remedy.
        FileNotFoundError, PermissionError, IsADirectoryError: the file cannot be opened.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(SIGNATURE):
        return
    what, remedy = _recognise(head)
    if is_verified and what != _PICKLE:
        remedy = AT_SOURCE
    raise CorpusError(f"{path}: not an HDF5 file but {what}; {remedy} [V01]")


def _recognise(head: bytes) -> tuple[str, str]:
    if not head:
        return "an empty file", _FETCH_AGAIN
    for magic, what, remedy in _OTHER_MAGIC:
        if head.startswith(magic):
            return what, remedy
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page", f"the server answered with a web page: {_FETCH_AGAIN}"
    if text.startswith(b"<?xml"):
        return "an XML document", f"the server answered with a message: {_FETCH_AGAIN}"
    # Pickle protocols 2 to 5 begin with their number. Protocols 0 and 1 look like text.
    if head[0] == 0x80 and len(head) > 1 and head[1] in (2, 3, 4, 5):
        return _PICKLE, "pickles can run code and are never loaded; save the trace as .h5"
    if not head.strip(b"\x00"):
        return "filled with zeros", f"the download was cut: {_FETCH_AGAIN}"
    if all(byte in b"\t\r\n\x0c" or 0x20 <= byte < 0x7F for byte in head):
        first = head.decode("ascii").strip().splitlines()[:1]
        return f"text that begins {(first or [''])[0][:40]!r}", _FETCH_AGAIN
    return f"something that begins with the bytes {head[:8].hex(' ')}", _FETCH_AGAIN


FAULTS: Final = (
    OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError,
)  # fmt: skip
"""The exceptions that h5py raises for errors of HDF5."""


class naming:
    """A context manager that adds the file and the location in it to HDF5 errors.

    The context is entered for every array. It is a class because a generator would be slower.
    """

    __slots__ = ("_is_verified", "_path", "_where")

    def __init__(self, path: Path, where: str | None, is_verified: bool) -> None:
        self._path = path
        self._where = where
        self._is_verified = is_verified

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, FAULTS):
            return
        location = str(self._path) if self._where is None else f"{self._path}: {self._where}"
        if isinstance(error, CorpusError):
            why = str(error)
        elif isinstance(error, MemoryError):
            why = f"too large to read in one piece ({error})"
        elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return
        else:
            cause = str(error.args[-1] if error.args else error)
            why = f"cannot be read ({cause}); {_remedy(cause, self._is_verified)}"
        raise CorpusError(f"{location}: {why}" + ("" if " [V" in why else " [V03]")) from error


def _remedy(cause: str, is_verified: bool) -> str:
    if "lock file" in cause or "already open for write" in cause:
        return "it is open for writing: close it there first"
    if "plugin" in cause or "required filter" in cause:
        return "install the HDF5 plugin for its compression, for example `pip install hdf5plugin`"
    if is_verified:
        return f"the file is cut short or damaged: {AT_SOURCE}"
    return "the file is cut short or damaged: fetch it again"


def links_of(node: Any) -> Iterator[tuple[bytes, str | None]]:
    """Yield the name of each link of a group, with the reason not to follow the link.

    The reason is ``None`` for hard links. Soft and external links are not followed, because an
    external link could name any file of this machine.
    """
    import h5py

    names, ends = bytearray(), array("q", [0])
    odd: dict[bytes, str] = {}

    def check(name: bytes, info: Any) -> None:
        # There may be a million links, so one object per link would take too much memory.
        names.extend(name)
        ends.append(len(names))
        if info.type != h5py.h5l.TYPE_HARD:
            odd[name] = _why(info)

    # All links are read in one iteration, because single look-ups take quadratic time.
    node.links.iterate(check, info=True)
    for begin, stop in pairwise(ends):
        name = bytes(names[begin:stop])
        yield name, odd.get(name)


def link_problem(node: Any, name: bytes) -> str | None:
    """Return the reason why an entry of a group cannot be followed, or ``None``."""
    import h5py

    try:
        info = node.links.get_info(name)
        return None if info.type == h5py.h5l.TYPE_HARD else _why(info)
    except RuntimeError:
        if node.links.exists(name):
            raise
    return "is missing, expected by the layout [V12]"


def _why(info: Any) -> str:
    import h5py

    if info.type == h5py.h5l.TYPE_SOFT:
        return "it is a soft link, which is not followed"
    return "it is a link out of this file"


def entries_of(node: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield name and opened object of each entry of a group.

    For a link that is not followed, the reason replaces the object.
    """
    import h5py

    for name, why in links_of(node):
        yield name, h5py.h5o.open(node, name) if why is None else why


_NUMBERS: Final = frozenset(
    np.dtype(f"{kind}{bits}")
    for kind, sizes in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in sizes
) | {np.dtype("bool")}
"""The dtypes that NumPy and torch share."""


class Types:
    """The dtypes of a file's datasets. Each HDF5 type is converted once.

    Converting an HDF5 type to a dtype takes several times as long as reading a small array.
    """

    def __init__(self) -> None:
        self._dtypes: dict[bytes, np.dtype[Any]] = {}
        self._in_memory: dict[np.dtype[Any], Any] = {}

    def of(self, node: Any) -> np.dtype[Any]:
        """Return the native dtype of a dataset.

        Raises:
            TypeError, ValueError: NumPy has no such dtype.
        """
        kind = node.get_type()
        try:
            said = kind.encode()
        except Exception:  # HDF5 cannot encode some types
            return _native(kind.dtype)
        found = self._dtypes.get(said)
        if found is None:
            found = self._dtypes[said] = _native(kind.dtype)
        return found

    def in_memory(self, dtype: npt.DTypeLike) -> Any:
        """Return the HDF5 type of an array of a native dtype."""
        import h5py

        dtype = np.dtype(dtype)
        found = self._in_memory.get(dtype)
        if found is None:
            found = self._in_memory[dtype] = h5py.h5t.py_create(dtype)
        return found


def not_numbers(dtype: np.dtype[Any]) -> str | None:
    """Return a description of a dtype that cannot be a column, or ``None``.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.h5_checks import not_numbers
        >>> not_numbers(np.dtype("float32")), not_numbers(np.dtype("S3"))
        (None, 'text or values of varying length')
    """
    if dtype in _NUMBERS:
        return None
    if dtype.kind in "OSU":
        return "text or values of varying length"
    if dtype.names:
        return "records with named fields"
    return f"values of type {dtype}"


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


MOST_CHUNK_BYTES: Final = 1 << 30
"""Greatest number of bytes that one compressed chunk may inflate to."""
EXTERNAL: Final = "its values are in another file, which is not read"
DEFLATE: Final = 1
SHUFFLE: Final = 2
FLETCHER32: Final = 3
_SZIP: Final = 4
_NBIT: Final = 5
_SCALEOFFSET: Final = 6
LZF: Final = 32_000
REFERENCE_BYTES: Final = 16
"""Bytes of a variable-length value in the file, without its content."""
_RATIOS: Final = {DEFLATE: 1032, LZF: 90, _SZIP: 1 << 32}
"""Greatest number of bytes that one stored byte can inflate to, by filter.

Other filters of HDF5 store the size. Filter plugins are code that the user has installed.
"""
_PIECE: Final = 1 << 20
_REMEDY: Final = "rewrite the file with smaller chunks, for example by h5repack"


def storage_of(node: Any) -> tuple[str | None, int]:
    """Return the reason not to read a dataset, and the inflation limit of its chunks.

    Args:
        node: the low-level dataset.

    Returns:
        The reason or ``None``, and the largest count of bytes that one stored byte can inflate to.

    Cost: some microseconds. No value is read, and no other file is opened.
    """
    from h5py import h5d, h5t

    properties = node.get_create_plist()
    layout = properties.get_layout()
    # This check must be the first. A forged file may have both an address and other files, and HDF5
    # then reads the other files.
    if layout == h5d.VIRTUAL or properties.get_external_count():
        return EXTERNAL, 1
    count = properties.get_nfilters() if layout == h5d.CHUNKED else 0
    if not count:
        return None, 1
    # References take 16 bytes in the file, independently of their size in memory.
    kind, ratio = node.get_type(), 1
    is_text = isinstance(kind, h5t.TypeStringID) and kind.is_variable_str()
    size = max(kind.get_size(), REFERENCE_BYTES * is_text)
    declared = math.prod(properties.get_chunk()) * size
    for at in range(count):
        code, _, values, _ = properties.get_filter(at)
        ratio *= _RATIOS.get(code, 1)
        if code in (_NBIT, _SCALEOFFSET):
            # These filters inflate to the number of values that is stored with them.
            named = [value & 0xFFFF_FFFF for value in values[2:5]]
            declared = max(declared, math.prod(named[:1]) * max(size, *named[2:], 1))
    if declared > MOST_CHUNK_BYTES:
        return (
            f"its compressed chunks take {declared:,} bytes each, more than the "
            f"{MOST_CHUNK_BYTES:,} that are inflated at once: {_REMEDY}"
        ), ratio
    return None, ratio


class ChunkChecks:
    """The checks that no chunk of an open file inflates to more than `MOST_CHUNK_BYTES`.

    Each dataset is checked once. Memory: one entry for each dataset of more than 1 MB that was
    read, and one entry for each of its chunks of more than 1 MB.
    """

    def __init__(self) -> None:
        self._large: dict[str, set[tuple[int, ...]]] = {}

    def require(self, node: Any, ratio: int, dataset: str, start: int, stop: int) -> None:
        """Check the chunks that hold some records of a dataset.

        Args:
            node: the low-level dataset.
            ratio: the ratio that `storage_of` returned for it.
            dataset: the path of the dataset.
            start, stop: the records ``start .. stop - 1``.

        Raises:
            CorpusError: a chunk would take more memory than `MOST_CHUNK_BYTES`. Or the inflated
                size of the chunk cannot be bounded without inflating it.

        Cost: microseconds if the stored bytes are too few to exceed the limit. Otherwise the sizes
        of all chunks are read once. Chunks that could exceed the limit are inflated piece by piece.
        """
        if ratio == 1:
            return
        large = self._large.get(dataset)
        if large is None:
            if node.get_storage_size() * ratio <= MOST_CHUNK_BYTES:
                return
            large = self._large[dataset] = set()

            def check(chunk: Any) -> None:
                if chunk.size * ratio > MOST_CHUNK_BYTES:
                    large.add(tuple(chunk.chunk_offset))

            node.chunk_iter(check)
        if large:
            records = node.get_create_plist().get_chunk()[0]
            here = [at for at in large if at[0] < stop and at[0] + records > start]
            for at in here:
                _require(node, at)
                large.discard(at)


def _require(node: Any, corner: tuple[int, ...]) -> None:
    """Check a chunk whose stored size does not bound its inflated size."""
    properties = node.get_create_plist()
    # The filters in the order in which they were applied.
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
    """Return whether a deflated chunk inflates to at most `MOST_CHUNK_BYTES`."""
    stream, total = zlib.decompressobj(), 0
    try:
        while not stream.eof and total <= MOST_CHUNK_BYTES:
            piece = stream.decompress(stored, _PIECE)
            total += len(piece)
            stored = stream.unconsumed_tail
            if not piece and not stored:
                break
    except zlib.error:
        return total <= MOST_CHUNK_BYTES  # damaged; HDF5 also stops here, and reports it
    return total <= MOST_CHUNK_BYTES
