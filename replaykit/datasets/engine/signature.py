"""What a file is, by its first bytes: HDF5, or what else, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from replaykit.errors import CorpusError

__all__ = ["AT_SOURCE", "SIGNATURE", "check_signature"]

SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"

# What a file is that is not HDF5: prefix -> (what it is, what to do about it).
_FETCH_AGAIN: Final = "download the file again"
AT_SOURCE: Final = (
    "its bytes are those that its source lists, so the file is wrong there and downloading it "
    "again does not help: tell the owner of the source"
)
_PICKLE: Final = "a Python pickle"
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
    """Checks by its first bytes that a file is HDF5 (rule V01).

    Args:
        path: the file.
        is_verified: as for `open_h5`.

    Raises:
        CorpusError: it is not; the message says what the file is instead, and what to do.
        FileNotFoundError, PermissionError, IsADirectoryError: it cannot be opened.
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
    # Pickle protocols 2 to 5 begin with their number, protocols 0 and 1 look like text.
    if head[0] == 0x80 and len(head) > 1 and head[1] in (2, 3, 4, 5):
        return _PICKLE, "pickles can run code and are never loaded; save the trace as .h5"
    if not head.strip(b"\x00"):
        return "filled with zeros", f"the download was cut: {_FETCH_AGAIN}"
    if all(byte in b"\t\r\n\x0c" or 0x20 <= byte < 0x7F for byte in head):
        first = head.decode("ascii").strip().splitlines()[:1]
        return f"text that begins {(first or [''])[0][:40]!r}", _FETCH_AGAIN
    return f"something that begins with the bytes {head[:8].hex(' ')}", _FETCH_AGAIN
