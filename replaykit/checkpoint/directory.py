"""A checkpoint as it is read: whole, whatever is saved beside it.

All files of one manifest are opened before any is read, so that a save going on cannot mix two
states. Nothing is opened but plain files of the directory itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from replaykit.checkpoint.files import open_file
from replaykit.checkpoint.manifests import MANIFEST, read_manifest
from replaykit.checkpoint.row_chunks import RowChunks, copied, map_tensor
from replaykit.checkpoint.tree import decode
from replaykit.errors import CheckpointError
from replaykit.filesystem import file_limit_errors
from replaykit.interrupts import check
from replaykit.native import crc32

__all__ = ["Checkpoint"]

_ATTEMPTS = 20
_MOST_THREADS = 8


class Checkpoint:
    """An opened checkpoint: its files are held open, checked, and mapped.

    Use as a context manager, or call ``close``. A save to the same directory does not disturb it.

    Args:
        path: the directory.
        version: which of the checkpoints in it; None: the newest.

    Attributes:
        folder: the directory.
        manifest: what the manifest says.

    Raises:
        FileNotFoundError: there is no checkpoint, or not of that version.
        CheckpointError: it is damaged, of another format, or of a newer version; names the file.
    """

    def __init__(self, path: str | os.PathLike[str], version: int | None = None) -> None:
        self._mappings: dict[str, mmap.mmap | None] = {}
        self._checks: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if version is not None and type(version) is not int:
            raise TypeError(f"expected version as an int or None, got {version!r}")
        self.folder = Path(path).expanduser()
        for attempt in range(_ATTEMPTS):
            self.manifest = read_manifest(self.folder, version, check=True)
            try:
                self._mappings = {
                    name: self._map(name, record["size"])
                    for name, record in self.manifest["files"].items()
                }
                return
            except FileNotFoundError as error:
                # A save published and cleaned up meanwhile; its manifest is there by now.
                newer = read_manifest(self.folder, version).get("save")
                if newer == self.manifest.get("save") or attempt == _ATTEMPTS - 1:
                    raise CheckpointError(f"{error.filename} is missing") from None

    def _map(self, name: str, size: int) -> mmap.mmap | None:
        opened = open_file(self.folder / name, size)
        try:
            with file_limit_errors(self.folder):
                return mmap.mmap(opened, size, access=mmap.ACCESS_COPY) if size else None
        finally:
            os.close(opened)

    def verify(self, *, wait: bool = True) -> None:
        """Reads every file and compares checksums.

        Args:
            wait: False to go on at once. Then what ``part`` copies from a file waits until that
                file was checked, before all others that are not under way, and raises if it is
                damaged. What is mapped does not wait, so that who copies it and who checks it read
                the disk once, side by side: nobody may be shown it before another call, which
                waits.

        Raises:
            CheckpointError: one differs; names the file.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
            # In the order of the names, which is that in which they were written.
            for name in sorted(self._mappings):
                self._checks[name] = self._pool.submit(self._check, name, self._mappings[name])
        if wait:
            for checked in self._checks.values():
                check()
                checked.result()
            self._checks = {}

    def _check(self, name: str, mapping: mmap.mmap | None) -> None:
        expected = self.manifest["files"][name]["crc32"]
        found = crc32(mapping) if mapping is not None else 0
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
        except CheckpointError:
            raise  # a file
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST} is damaged: part {name!r}: {error}"
            ) from None

    def _mapped(self, tensor: str) -> torch.Tensor | RowChunks:
        return map_tensor(self.manifest["tensors"][tensor], self._mappings)

    def _copied(self, tensor: str) -> torch.Tensor:
        for file, *_ in self.manifest["tensors"][tensor]["pieces"]:
            if file in self._checks:
                self._checked(file)
        return copied(self._mapped(tensor))

    def _checked(self, name: str) -> None:
        """Waits until a file was checked; here and now, if nobody has begun. Priorities lie behind
        all rows: waiting for them in turn would be waiting for the whole."""
        check()
        if self._checks[name].cancel():
            here: Future[None] = Future()
            self._checks[name] = here
            try:
                self._check(name, self._mappings[name])
                here.set_result(None)
            except BaseException as error:
                here.set_exception(error)
        self._checks[name].result()

    def close(self) -> None:
        """Lets go of the files; tensors that are still in use keep their mapping."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._mappings = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
