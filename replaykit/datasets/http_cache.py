"""Files of the web on this machine: where they lie, what is known of them, and whether it is so.

Layout: ``<root>/<key>/<name>``, with a key of the URL and the checksum: another file under the same
URL lies elsewhere. Beside it ``<name>.part`` while it is received, and JSON with what is known of a
file without a checksum: ``<name>.part.json`` what the server said of it, ``<name>.json`` what came.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from replaykit.datasets.engine.signature import check_signature
from replaykit.datasets.hub_cache import text_hint
from replaykit.datasets.sources import sha256_of
from replaykit.errors import CorpusError
from replaykit.filesystem import make_directory, require_room

__all__ = ["DownloadCache", "WebFile", "default_downloads"]

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_H5_SUFFIXES: Final = (".h5", ".hdf5", ".hdf")
_SNIFFED: Final = 48


@dataclass(frozen=True)
class WebFile:
    """A file under a URL, and what is known of it in advance.

    Attributes:
        url: ``http://`` or ``https://``.
        size: bytes.
        sha256: of its content, 64 hexadecimal digits.

    Raises:
        ValueError: another kind of URL, one without a file name, or a malformed size or checksum.

    Example:
        >>> from replaykit.datasets.http_cache import WebFile
        >>> WebFile("http://127.0.0.1/data/a%20b.hdf5").name
        'a b.hdf5'
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: expected http:// or https:// and a host, got {self.url!r}")
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"url: expected the name of a file at its end, got {self.url!r}")
        if self.size is not None and self.size < 0:
            raise ValueError(f"size of {self.url}: expected bytes >= 0, got {self.size}")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(
                f"sha256 of {self.url}: expected 64 lower-case hexadecimal digits, got "
                f"{self.sha256!r}"
            )

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def default_downloads() -> Path:
    """Returns where files of the web are kept: REPLAYKIT_DOWNLOADS, or below ``~/.cache``."""
    given = os.environ.get("REPLAYKIT_DOWNLOADS")
    if given:
        return Path(os.path.abspath(os.path.expanduser(given)))
    return Path.home() / ".cache" / "replaykit" / "downloads"


@dataclass(frozen=True)
class DownloadCache:
    """The files of the web that are below ``root``."""

    root: Path

    def entry(self, file: WebFile) -> Path:
        """Returns the path under which a file is, or would be, found."""
        key = hashlib.sha256(f"{file.url}\0{file.sha256 or ''}".encode()).hexdigest()
        return self.root / key[:32] / file.name

    def part(self, file: WebFile) -> Path:
        """Returns where a file is received."""
        entry = self.entry(file)
        return entry.with_name(f"{entry.name}.part")

    def known(self, file: WebFile) -> tuple[int | None, str | None]:
        """Returns size and SHA-256 of a file: those given, or those it had when it was received."""
        noted = _read_json(_beside(self.entry(file)))
        size, sha256 = file.size, file.sha256
        if sha256 is None and _is_sha256(noted.get("sha256")):
            sha256 = noted["sha256"]
        if size is None and isinstance(noted.get("size"), int):
            size = noted["size"]
        return size, sha256

    def problem(self, file: WebFile) -> str | None:
        """Returns what is wrong with the file that is kept, or None where it is what it should be.

        Cost: reads the file once. Memory: one block of 1 MiB.
        """
        entry = self.entry(file)
        if not entry.is_file():
            return f"not in {self.root}"
        size, sha256 = self.known(file)
        if sha256 is None:
            return "nothing is known of its content"
        return _difference(entry, size, sha256)

    def accept(self, file: WebFile) -> str | None:
        """Puts a file that was received in its place, or removes it and returns what is wrong.

        One without a checksum is at least what its name says: no web page, LFS pointer or pickle
        is kept under the name of an HDF5 file. Its checksum is kept for the next time.
        """
        part, entry = self.part(file), self.entry(file)
        problem = None
        if file.sha256 is not None or file.size is not None:
            problem = _difference(part, file.size, file.sha256)
        if problem is None and file.sha256 is None:
            if entry.suffix.lower() in _H5_SUFFIXES:
                try:
                    check_signature(part)
                except CorpusError as error:
                    problem = str(error).removeprefix(f"{part}: ")
            if problem is None:
                known = {"size": part.stat().st_size, "sha256": sha256_of(part), "url": file.url}
                _write_json(_beside(entry), known)
        if problem is None:
            part.replace(entry)
        self.forget_part(file)
        return problem

    def discard(self, file: WebFile) -> None:
        """Removes a file that is kept; never anything outside the cache."""
        entry = self.entry(file)
        entry.unlink(missing_ok=True)
        _beside(entry).unlink(missing_ok=True)

    def forget_part(self, file: WebFile) -> None:
        """Removes what has been received of a file."""
        part = self.part(file)
        part.unlink(missing_ok=True)
        _beside(part).unlink(missing_ok=True)

    def resumable(self, file: WebFile) -> tuple[int, str | None]:
        """Returns how many bytes can be kept, and the mark of the version that they belong to.

        With a checksum any bytes can: it tells whether they fit. Without one, only if the server
        has marked the version, and says whether that is still the one.
        """
        part = self.part(file)
        try:
            length = part.stat().st_size
        except OSError:
            return 0, None
        if file.sha256 is not None:
            return length, None
        mark = _read_json(_beside(part)).get("mark")
        return (length, mark) if isinstance(mark, str) and mark else (0, None)

    def note_mark(self, file: WebFile, etag: str | None, modified: str | None) -> None:
        """Keeps the mark of the version that is about to be received."""
        # A weak mark says that two versions mean the same, not that their bytes are the same.
        mark = etag if etag and not etag.startswith("W/") else modified
        _write_json(_beside(self.part(file)), {"mark": mark, "url": file.url})

    def prepare(self, file: WebFile) -> None:
        """Makes the folder of a file."""
        make_directory(self.entry(file).parent)

    def missing_bytes(self, files: Iterable[tuple[WebFile, int | None]]) -> list[int]:
        """Returns how many bytes each file with its size still needs; none where one is kept."""
        needed = []
        for file, size in files:
            if size is not None and not self.entry(file).is_file():
                needed.append(max(0, size - self.resumable(file)[0]))
        return needed

    def require_room(self, files: Iterable[tuple[WebFile, int | None]]) -> None:
        """Checks that what is missing fits on the disk, before anything is written.

        Raises:
            OSError: it does not; says what is needed and what is free.
        """
        needed = self.missing_bytes(files)
        if needed:
            require_room(self.root, sum(needed), max(needed))


def _difference(path: Path, size: int | None, sha256: str | None) -> str | None:
    with path.open("rb") as content:
        found = os.fstat(content.fileno()).st_size
        start = content.read(_SNIFFED)
    if size is not None and found != size:
        return f"expected {size:,} bytes, got {found:,}" + text_hint(start)
    if sha256 is None:
        return None
    digest = sha256_of(path)
    if digest != sha256:
        return f"expected sha256 {sha256}, got {digest}" + text_hint(start)
    return None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(json.dumps(value), encoding="utf-8")
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
