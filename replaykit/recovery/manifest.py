"""The manifest of a folder that can be recovered: what kind of storage it belongs to."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replaykit._version import __version__
from replaykit.errors import CheckpointError
from replaykit.filesystem import sync_directory

__all__ = ["FORMAT", "MANIFEST", "check_file", "read_manifest", "write_manifest"]

FORMAT = "replaykit-recovery"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What ``write_manifest`` has written; None: there is none.

    Raises:
        CheckpointError: it is damaged, or of a newer version; names the file.
    """
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    check_file(file, 0, exactly=False)
    try:
        record = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not that of a storage that can be recovered")
    if type(record.get("format_version")) is not int or record["format_version"] < 1:
        raise CheckpointError(f"{file} has no version")
    if record["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"expected {file} of version {FORMAT_VERSION} or older, got {record['format_version']}"
        )
    content = record.get("content")
    if not isinstance(content, dict) or record.get("crc32") != _checksum(content):
        raise CheckpointError(f"{file} is damaged: its checksum is another one")
    return content


def write_manifest(folder: Path, content: Mapping[str, Any], version: int) -> None:
    """Puts a manifest in its place in one step, durably.

    Args:
        version: the oldest one of the format that knows of all of it.

    Raises:
        OSError: the disk refused; what was there still is.
    """
    record = {
        "format": FORMAT,
        "format_version": version,
        "library_version": __version__,
        "content": dict(content),
        "crc32": _checksum(content),
    }
    draft = folder / f".{MANIFEST}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / MANIFEST)
    sync_directory(folder)


def check_file(file: Path, nbytes: int, *, exactly: bool = True) -> None:
    """Raises CheckpointError where there is no such file of so many bytes, or at least so many.

    A link is none: what is written goes where the storage is, and nowhere else.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"expected {nbytes} bytes in {file}, which is gone") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"expected a file of {nbytes} bytes, got none of that kind: {file}")
    if found.st_size < nbytes or (exactly and found.st_size != nbytes):
        raise CheckpointError(f"expected {nbytes} bytes in {file}, got {found.st_size}")


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
