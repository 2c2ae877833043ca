"""One directory on disk: published by one atomic replace, or not at all.

``manifest.json`` names every file with size and checksum, and ends with its own; data lies in
``data-*.bin``. New files are written beside the old ones and synced; replacing the manifest
publishes them; files that it does not name are then removed. Whoever reads opens all files of one
manifest first, so that a save going on beside it cannot mix two states.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from replaykit._version import __version__
from replaykit.checkpoint.chunks import ChunkWriter, RowChunks, chunk_bytes, map_tensor
from replaykit.checkpoint.tree import decode, encode
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, sync_directory

__all__ = ["FORMAT", "FORMAT_VERSION", "Checkpoint", "save_checkpoint"]

FORMAT = "replaykit-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{5,}\.bin")
_CHECKSUM = re.compile(r', "crc32": ([0-9]{1,10})\}\Z')
_ATTEMPTS = 20


def save_checkpoint(
    path: str | os.PathLike[str], parts: Mapping[str, Any], document: Mapping[str, Any]
) -> None:
    """Writes parts and a document into a directory, all or nothing.

    Args:
        path: the directory; made with its parents.
        parts: state of each part: values that ``tree.encode`` takes. Tensors are read block by
            block, not copied as a whole.
        document: plain JSON values for the head of the manifest.

    Raises:
        TypeError: a state that cannot be represented; nothing has been written.
        CheckpointError: the directory holds something else under ``manifest.json``.
        OSError: the disk refused; what was there before is untouched.

    Cost: one pass over the bytes, one sync per file of 64 MiB.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = {name: encode(state, name, tensors) for name, state in parts.items()}
    head = {name: encode(value, name, {}) for name, value in document.items()}
    folder = Path(path).expanduser()
    make_directory(folder)
    with _exclusive(folder):
        _check_own(folder)
        token = uuid.uuid4().hex[:12]
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        writer = ChunkWriter(folder, token, chunk_bytes(total))
        try:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.finish()
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "library_version": __version__,
                "save": token,
                **head,
                "files": writer.files,
                "tensors": writer.tensors,
                "parts": encoded,
            }
            _publish(folder, manifest, token)
        except BaseException:
            if not _published(folder, token):
                writer.discard()
            raise
        _remove_unnamed(folder, set(writer.files))


def _publish(folder: Path, manifest: dict[str, Any], token: str) -> None:
    text = json.dumps(manifest, allow_nan=False)
    # The last entry is the checksum of the text without it.
    text = f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'
    draft = folder / f".{MANIFEST}.{token}"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
        os.replace(draft, folder / MANIFEST)
        sync_directory(folder)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _published(folder: Path, token: str) -> bool:
    try:
        return bool(_read_manifest(folder).get("save") == token)
    except (OSError, CheckpointError):
        return False


def _check_own(folder: Path) -> None:
    try:
        manifest = _read_manifest(folder)
    except (FileNotFoundError, CheckpointError):
        return  # nothing there, or nothing that could still be read
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST} is not that of a checkpoint (format "
            f"{manifest.get('format')!r}); choose another directory"
        )


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    for entry in os.scandir(folder):
        stale = _DATA_FILE.fullmatch(entry.name) and entry.name not in named
        if stale or entry.name.startswith(f".{MANIFEST}."):
            with contextlib.suppress(OSError):  # the next save tries again
                os.unlink(entry.path)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One saver at a time; the kernel lets go of the lock when a process dies."""
    from filelock import FileLock

    with FileLock(folder / ".lock"):
        yield


def _read_manifest(folder: Path, *, check: bool = False) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint in {folder}") from None
    except NotADirectoryError:
        raise FileNotFoundError(f"{folder} is not a directory with a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} is damaged: it holds no record")
    if check:
        _check(manifest, text, file)
    return manifest


class Checkpoint:
    """An opened checkpoint: its files are held open, checked, and mapped.

    Use as a context manager, or call ``close``. A save to the same directory does not disturb it.

    Attributes:
        folder: the directory.
        manifest: what the manifest says.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged, of another format, or of a newer version; names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path).expanduser()
        self._mappings: dict[str, mmap.mmap | None] = {}
        for attempt in range(_ATTEMPTS):
            self.manifest = _read_manifest(self.folder, check=True)
            try:
                self._mappings = {
                    name: self._map(name, record["size"])
                    for name, record in self.manifest["files"].items()
                }
                return
            except FileNotFoundError as error:
                # A save published and cleaned up meanwhile; its manifest is there by now.
                newer = _read_manifest(self.folder).get("save")
                if newer == self.manifest.get("save") or attempt == _ATTEMPTS - 1:
                    raise CheckpointError(f"{error.filename} is missing") from None

    def _map(self, name: str, size: int) -> mmap.mmap | None:
        file = self.folder / name
        with open(file, "rb") as opened:
            found = os.fstat(opened.fileno()).st_size
            if found != size:
                raise CheckpointError(f"{file} is torn: expected {size} bytes, got {found}")
            if not size:
                return None
            return mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)

    def verify(self) -> None:
        """Reads every file and compares checksums.

        Raises:
            CheckpointError: one differs; names the file.
        """
        for name, mapping in self._mappings.items():
            expected = self.manifest["files"][name]["crc32"]
            found = zlib.crc32(mapping) if mapping is not None else 0
            if found != expected:
                raise CheckpointError(
                    f"{self.folder / name} is damaged: expected crc32 {expected}, got {found}"
                )

    def __contains__(self, name: object) -> bool:
        return name in self.manifest["parts"]

    def part(self, name: str, *, mapped: Collection[str] = ()) -> Any:
        """Returns the state of a part.

        Tensors are copies in memory. Those under an entry named in ``mapped`` stay in the files,
        large ones as RowChunks; they are meant to be read and let go.

        Raises:
            CheckpointError: no such part, or a record that is damaged.
        """
        parts = self.manifest["parts"]
        if name not in parts:
            raise CheckpointError(f"{self.folder / MANIFEST} has no part {name!r}")
        record = parts[name]
        try:
            if not mapped:
                return decode(record, self._copied)
            return {
                key: decode(item, self._mapped if key in mapped else self._copied)
                for key, item in record.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST} is damaged: part {name!r}: {error}"
            ) from None

    def _mapped(self, tensor: str) -> torch.Tensor | RowChunks:
        return map_tensor(self.manifest["tensors"][tensor], self._mappings)

    def _copied(self, tensor: str) -> torch.Tensor:
        found = self._mapped(tensor)
        return found[:] if isinstance(found, RowChunks) else found.clone()

    def close(self) -> None:
        """Lets go of the files; tensors that are still in use keep their mapping."""
        self._mappings = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(manifest: dict[str, Any], text: str, file: Path) -> None:
    """Raises CheckpointError where the manifest is not one that can be read now."""
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a checkpoint's (format {manifest.get('format')!r})")
    version = manifest.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file} is damaged: format_version {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format version {version}, this version of replaykit reads up to "
            f"{FORMAT_VERSION}; it was written by replaykit {manifest.get('library_version')}"
        )
    end = _CHECKSUM.search(text)
    if end is None or zlib.crc32(f"{text[: end.start()]}}}".encode()) != int(end[1]):
        raise CheckpointError(f"{file} is damaged: its checksum is not that of its content")
    for name in ("files", "tensors", "parts"):
        if not isinstance(manifest.get(name), dict):
            raise CheckpointError(f"{file} is damaged: no {name}")
    for name, record in manifest["files"].items():
        # Only names of our own making: nothing outside the directory is ever opened.
        if not _DATA_FILE.fullmatch(name):
            raise CheckpointError(f"{file} is damaged: file name {name!r}")
        if not isinstance(record, dict) or not all(
            type(record.get(key)) is int and record[key] >= 0 for key in ("size", "crc32")
        ):
            raise CheckpointError(f"{file} is damaged: record of {name}: {record!r}")
