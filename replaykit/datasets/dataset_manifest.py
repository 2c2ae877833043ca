"""The manifest of a published data set, and its checksums."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Final

import torch

from replaykit._version import __version__
from replaykit.declared import Count, Rule, decode_state, encode_state
from replaykit.native import crc32

_BLOCK_BYTES: Final = 1 << 20
_POLYNOMIAL: Final = 0xEDB88320


def joined_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two joined byte strings from their CRC-32s.

    ``length`` is the length of the second string, in bytes.

    Cost: about 32 steps for each bit that is set in ``length``; about 100 microseconds in total.

    Example:
        >>> import zlib
        >>> from replaykit.datasets.dataset_manifest import joined_crc32
        >>> joined_crc32(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    # The checksum is linear, so the first checksum is continued over ``length`` zeros.
    power = 0
    while length:
        if length & 1:
            first = _applied(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


def crc32_of_file(path: Path, advance: Callable[[int], object] = lambda nbytes: None) -> int:
    """Return the CRC-32 of a file. The file is read in blocks of 1 MiB.

    Args:
        path: the file.
        advance: called with the size of each block.
    """
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found = crc32(block, found)
            advance(len(block))
    return found


@lru_cache(maxsize=64)
def _zeros(power: int) -> tuple[int, ...]:
    """Return the effect of ``2 ** power`` zero bytes on each bit of a checksum."""
    if power:
        half = _zeros(power - 1)
        return tuple(_applied(half, column) for column in half)
    columns = []
    for bit in range(32):
        value = 1 << bit
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        columns.append(value)
    return tuple(columns)


def _applied(matrix: tuple[int, ...], vector: int) -> int:
    total, bit = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[bit]
        vector >>= 1
        bit += 1
    return total


MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "replaykit-dataset"
FORMAT_VERSION: Final = 3

_CHECKSUM: Final = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n\Z')
_WITHOUT_FINALS: Final = 1
"""Format version of data sets that store all columns."""
_WITHOUT_ATTACHED: Final = 2
_VERSIONS: Final = (_WITHOUT_FINALS, _WITHOUT_ATTACHED, FORMAT_VERSION)


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file
    )


_File = Annotated[str, Rule("that names a file of the data set", _is_inside)]
_Crc32 = Annotated[
    Any,
    Rule(
        "eight hexadecimal digits",
        lambda text: type(text) is str and re.fullmatch("[0-9a-f]{8}", text) is not None,
        lambda text, path: int(text, 16),
        lambda number: f"{number:08x}",
    ),
]


_Dtype = Annotated[
    Any,
    Rule(
        "the name of a dtype",
        lambda name: type(name) is str and isinstance(getattr(torch, name, None), torch.dtype),
        lambda name, path: getattr(torch, name),
        lambda dtype: str(dtype).removeprefix("torch."),
    ),
]


@dataclass(frozen=True)
class Array:
    """An array and its file, relative to the data set.

    ``shape`` has all dimensions, and ``facts`` all other entries.
    """

    REST: ClassVar[str] = "facts"
    key: tuple[str, ...]
    file: _File | None
    dtype: _Dtype
    shape: tuple[Count, ...]
    nbytes: Count
    crc32: _Crc32
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.nbytes != nbytes or not self.key or (self.file is None and nbytes):
            raise ValueError(
                f"expected a key, and {nbytes} bytes in a file for {list(self.shape)} of "
                f"{self.dtype}, got {self.key}, {self.nbytes} and {self.file!r}"
            )


@dataclass(frozen=True)
class AttachedFile:
    """A file that holds no column: names of groups, or encoded images of a column."""

    file: _File
    nbytes: Count
    crc32: _Crc32


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a published data set.

    Attributes:
        rows: size of the first batch dimension.
        batch: all batch dimensions: ``(N,)``, or ``(E, T)`` for split trajectories.
        episodes: the count of episodes.
        arrays: the columns.
        episode_arrays: the columns of the episode table.
        group_file: the text file with the names of the episodes' groups.
        converter: name and version of the rules that made the rows.
        identity: JSON values that identify the data set. They are compared with the identity that a
            caller requests.
        source: the origin of the rows, and the source files with size and SHA-256.
        report: decisions, warnings, and the keys and episodes that were left out. Programs do not
            read it.
        options: the options of the conversion.
        finals: for some columns under ``next``, the values of the last row of each episode, ``[E,
            ...]``. All other values of these columns repeat the following row, so they are not
            stored.
        attached: files with encoded images, to which columns refer.
        made: time and version of the conversion, and the time stamps of the source files. Only
            these entries differ between two conversions of the same files.
    """

    made: Mapping[str, Any] = field(default_factory=lambda: provenance())
    converter: Mapping[str, Any]
    identity: Mapping[str, Any]
    source: Mapping[str, Any]
    rows: Count
    batch: tuple[Count, ...]
    episodes: Count
    options: Mapping[str, Any]
    report: Mapping[str, Any]
    arrays: tuple[Array, ...]
    episode_arrays: tuple[Array, ...]
    group_file: AttachedFile
    finals: tuple[Array, ...] = ()
    attached: tuple[AttachedFile, ...] = ()

    def __post_init__(self) -> None:
        if self.batch[:1] != (self.rows,):
            raise ValueError(f"expected a batch of {self.rows} rows, got {self.batch}")
        for array in self.arrays:
            if array.shape[: len(self.batch)] != self.batch:
                raise ValueError(f"batch: {array.key} needs the batch {self.batch}")
        for array in (*self.episode_arrays, *self.finals):
            if array.shape[:1] != (self.episodes,):
                raise ValueError(f"episodes: {array.key} needs {self.episodes} entries")

    @property
    def format_version(self) -> int:
        """The format version.

        A data set with finals has a newer format version, and one with attached files a still newer
        one. A reader without support for finals would miss columns, and one without support for
        attached files would deliver references, so it must refuse the data set.
        """
        if self.attached:
            return FORMAT_VERSION
        return _WITHOUT_ATTACHED if self.finals else _WITHOUT_FINALS

    def files(self) -> Iterable[tuple[str, int, int]]:
        """Yield path, size and CRC-32 of each file except the manifest."""
        for array in (*self.arrays, *self.episode_arrays, *self.finals):
            if array.file is not None:
                yield array.file, array.nbytes, array.crc32
        for file in (self.group_file, *self.attached):
            yield file.file, file.nbytes, file.crc32

    def folders(self) -> set[PurePosixPath]:
        """Return the folders of all files, with ``.`` for that of the data set."""
        return {each for name, _, _ in self.files() for each in PurePosixPath(name).parents}

    def content_id(self) -> str:
        """Return a digest of the manifest without ``made``.

        The digests of two conversions of the same files are equal.
        """
        content = {name: value for name, value in self._json().items() if name != "made"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def dump(self) -> bytes:
        """Return the text of the file, which ends with a checksum of the text before it."""
        # With an indent, json would use its Python code, which takes several times as long.
        entries = (f" {json.dumps(name)}: {_lines(said)}" for name, said in self._json().items())
        text = ("{\n" + ",\n".join(entries)).encode()
        return text + f',\n "crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()

    def is_text(self, text: bytes) -> bool:
        """Return whether the text of a manifest matches the checksum at its end.

        Manifests of old versions have no checksum. Such a text is accepted if all its entries are
        known.
        """
        found = _CHECKSUM.search(text)
        if found is None:
            return set(json.loads(text)) <= {*self._json(), "finals", "attached"}
        return zlib.crc32(text[: found.start()]) == int(found[1], 16)

    def _json(self) -> dict[str, Any]:
        found = encode_state(self)
        for name in ("finals", "attached"):
            if not found[name]:
                del found[name]
        return {"format": FORMAT, "format_version": self.format_version, **found}

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Read and check the text of a manifest.

        Raises:
            ValueError: the text is not a manifest, has an unknown version, or contradicts itself.
                The message completes a sentence that begins with "its manifest".
        """
        try:
            entry = json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error})") from error
        found = entry.get("format") if isinstance(entry, dict) else None
        if found != FORMAT:
            raise ValueError(f"is not the manifest of a replaykit data set (format {found!r:.40})")
        if entry.get("format_version") not in _VERSIONS:
            raise ValueError(
                f"has format version {entry.get('format_version')!r:.20}, this version of "
                f"replaykit reads 1 to {FORMAT_VERSION}"
            )
        try:
            return decode_state(cls, entry, "its entries")
        except ValueError as error:
            raise ValueError(f"is damaged ({error})") from error


def provenance() -> dict[str, Any]:
    """Return the time and versions of a conversion as JSON values.

    The values contain no information about the machine.
    """
    return {
        "library": "replaykit",
        "version": __version__,
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(value: Any) -> str:
    """Return the JSON text of a value, with one line for each entry of a list."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
