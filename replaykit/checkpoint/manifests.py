"""The manifests of a checkpoint's directory: read, checked, published, kept and removed.

``manifest.json`` is the checkpoint; ``manifest-<version>.json`` are older ones that are kept. Each
ends with its own checksum. A file belongs to the directory if a manifest names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replaykit.checkpoint.files import open_file
from replaykit.errors import CheckpointError
from replaykit.filesystem import sync_directory

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "checkpoint_versions",
    "is_published",
    "publish",
    "read_base",
    "read_manifest",
    "version_of",
]

FORMAT = "replaykit-checkpoint"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_MOST_VERSIONS = 10**15
_KEPT = re.compile(r"manifest-([0-9]{1,15})\.json")
_DATA_FILE = re.compile(r"data-[0-9a-f]{12}-[0-9]{5,}\.bin")
_CHECKSUM = re.compile(r', "crc32": ([0-9]{1,10})\}\Z')


class _NoRecordError(CheckpointError):
    """JSON of another kind than ours: what a save of the package leaves begins as a record, and
    cut off or damaged it is no JSON of another kind."""


def version_of(manifest: Mapping[str, Any]) -> int:
    """Returns the number of a checkpoint in its directory: 1 for the first one."""
    return int(manifest.get("version", 1))


def checkpoint_versions(path: str | os.PathLike[str]) -> list[int]:
    """Returns the versions that a directory holds, rising; the last one is the newest.

    Each of them can be given to ``loads(path, version=...)``.

    Raises:
        FileNotFoundError: there is no checkpoint. CheckpointError: the newest one is damaged.

    Example:
        >>> import tempfile, torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.checkpoint import checkpoint_versions
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number in range(4):
        ...         _ = rb.extend(torch.full((2,), number))
        ...         rb.dumps(folder, keep=3)
        ...     found = checkpoint_versions(folder)
        ...     rb.loads(folder, version=found[0])
        >>> found, rb[:]
        ([2, 3, 4], tensor([0, 0, 1, 1]))
    """
    folder = Path(path).expanduser()
    newest = version_of(read_manifest(folder, check=True))
    return [*(number for number in _kept(folder) if number < newest), newest]


def _kept(folder: Path) -> list[int]:
    found = (_KEPT.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match and match[1] == str(int(match[1])))


def _kept_name(version: int) -> str:
    return f"manifest-{version}.json"


def read_manifest(
    folder: Path, version: int | None = None, *, check: bool = False
) -> dict[str, Any]:
    """Reads the newest manifest of a directory, or that of a version.

    Args:
        check: whether to refuse what cannot be read now.

    Raises:
        FileNotFoundError: there is none. CheckpointError: it is damaged; names the file.
    """
    if version is None:
        return _read(folder, MANIFEST, check)
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        newest = _read(folder, MANIFEST, check)
        if version_of(newest) == version:
            return newest
    try:
        found = _read(folder, _kept_name(version), check)
    except FileNotFoundError:
        there = checkpoint_versions(folder)
        raise FileNotFoundError(f"{folder} has no version {version}; there are {there}") from None
    if version_of(found) != version:
        file = folder / _kept_name(version)
        raise CheckpointError(f"{file} is damaged: it is that of version {version_of(found)}")
    return found


def _read(folder: Path, name: str, check: bool) -> dict[str, Any]:
    file = folder / name
    try:
        with open(open_file(file), encoding="utf-8") as opened:
            text = opened.read()
        manifest = json.loads(text)
    except CheckpointError:
        raise  # a ValueError too: it is no plain file
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint in {folder}") from None
    except NotADirectoryError:
        raise FileNotFoundError(f"{folder} is not a directory with a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(manifest, dict):
        raise _NoRecordError(f"{file} is damaged: it holds no record")
    if check:
        _check(manifest, text, file)
    return manifest


def read_base(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest that a save follows; None where there is none that can be read.

    Raises:
        CheckpointError: the directory holds something else under ``manifest.json``.
    """
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        manifest = read_manifest(folder, check=True)
        if manifest.get("format") == FORMAT:
            return manifest
    try:
        manifest = read_manifest(folder)
        found = f"format {manifest.get('format')!r}"
        if manifest.get("format") == FORMAT:
            return None
    except _NoRecordError:
        found = "it holds no record"
    except (FileNotFoundError, CheckpointError):
        return None  # nothing there, or nothing that could still be read
    raise CheckpointError(
        f"{folder / MANIFEST} is not that of a checkpoint ({found}); choose another directory"
    )


def publish(
    folder: Path, manifest: dict[str, Any], base: Mapping[str, Any] | None, keep: int
) -> None:
    """Puts a manifest in the place of the one there is, then removes what none names any more.

    Its files are on disk already, under names that no other manifest has, or are those of
    ``base``. At any instant there is a whole checkpoint: the old one, then the new one.

    Args:
        manifest: without its checksum, and without ``version``, which it gets.
        base: the manifest that is there; None: none that can be read.
        keep: how many checkpoints there will be at most, this one included.
    """
    token, kept = manifest["save"], _kept(folder)
    newest = max([*kept, 0 if base is None else version_of(base)])
    if newest + 1 >= _MOST_VERSIONS:
        raise CheckpointError(
            f"{folder} has a checkpoint of version {newest}, after which none can come; choose "
            "another directory"
        )
    manifest["version"] = newest + 1
    if base is not None and keep > 1:
        # The same text under the name of its version; until the end both are the newest one.
        older = {name: value for name, value in base.items() if name != "crc32"}
        _write(folder, {**older, "version": version_of(base)}, _kept_name(version_of(base)), token)
    _write(folder, manifest, MANIFEST, token)
    _remove_old(folder, manifest, keep)


def _write(folder: Path, manifest: Mapping[str, Any], name: str, token: str) -> None:
    text = json.dumps(manifest, allow_nan=False)
    # The last entry is the checksum of the text without it.
    text = f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'
    draft = folder / f".{name}.{token}"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
        os.replace(draft, folder / name)
        sync_directory(folder)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def is_published(folder: Path, token: str) -> bool:
    """Whether the save of that name is the newest checkpoint."""
    try:
        return bool(read_manifest(folder).get("save") == token)
    except (OSError, CheckpointError):
        return False


def _remove_old(folder: Path, manifest: Mapping[str, Any], keep: int) -> None:
    """Removes older manifests that are not kept, then the files that no manifest names."""
    older = [number for number in _kept(folder) if number < manifest["version"]]
    gone = older[: max(0, len(older) - (keep - 1))]
    for number in gone:
        with contextlib.suppress(OSError):  # the next save tries again
            os.unlink(folder / _kept_name(number))
    if gone:
        sync_directory(folder)  # before the files that they name
    named = set(manifest["files"])
    for number in _kept(folder):
        try:
            named |= set(_read(folder, _kept_name(number), True)["files"])
        except FileNotFoundError:
            continue
        except (OSError, CheckpointError):
            return  # what it names is not known, so nothing is removed as long as it is kept
    for entry in os.scandir(folder):
        stale = _DATA_FILE.fullmatch(entry.name) and entry.name not in named
        if stale or entry.name.startswith(".manifest"):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


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
    number = manifest.get("version", 1)
    if type(number) is not int or not 1 <= number < _MOST_VERSIONS:
        raise CheckpointError(f"{file} is damaged: version {number!r}")
    if not isinstance(manifest.get("save"), str):
        raise CheckpointError(f"{file} is damaged: save {manifest.get('save')!r}")
    for name, record in manifest["files"].items():
        # Only names of our own making: nothing outside the directory is ever opened.
        if not _DATA_FILE.fullmatch(name):
            raise CheckpointError(f"{file} is damaged: file name {name!r}")
        if not isinstance(record, dict) or not all(
            type(record.get(key)) is int and record[key] >= 0 for key in ("size", "crc32")
        ):
            raise CheckpointError(f"{file} is damaged: record of {name}: {record!r}")
