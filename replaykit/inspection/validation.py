"""Whether what lies at a path is whole and right: every file, and what the files say together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.files import open_file
from replaykit.checkpoint.manifests import read_manifest
from replaykit.datasets.manifest import MANIFEST_NAME
from replaykit.datasets.opened import Published
from replaykit.datasets.publish import open_published
from replaykit.errors import CheckpointError
from replaykit.inspection.finding import Finding
from replaykit.inspection.opening import kind_of
from replaykit.inspection.scratch import opened_scratch
from replaykit.inspection.ted_rules import ted_findings
from replaykit.native import crc32

__all__ = ["validate"]

_BLOCK_BYTES: Final = 1 << 22
_META_NAME: Final = "meta.json"

Advance = Callable[[int], object]


def validate(path: Path, advance: Advance | None = None) -> list[Finding]:
    """Checks all that can be checked of a converted data set, a checkpoint, or a buffer on disk.

    Args:
        path: where it lies.
        advance: told how many bytes were looked at, now and then.

    Returns:
        What was checked, in order. It is right if every one is ``ok`` or a warning.

    Raises:
        FileNotFoundError: there is nothing. ValueError: it is none of these.

    Cost: reads every file once; of a data set flags, ids, rewards and observations once more.
    Memory: a few MiB.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.inspection import validate
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(folder)
        ...     [(found.check, found.ok) for found in validate(Path(folder))]
        [('version 1: manifest', True), ('version 1: files', True), ('version 1: records', True)]
    """
    told = advance or (lambda _: None)
    kind = kind_of(path)
    if kind == "corpus":
        return _corpus(path, told)
    if kind == "checkpoint":
        return _checkpoint(path, told)
    if kind == "buffer":
        return _buffer(path, told)
    raise ValueError(
        f"{path} was not converted yet: convert checks every value of it on the way, and inspect "
        "says what it would find"
    )


# -- data sets ---------------------------------------------------------------------------------


def _corpus(path: Path, advance: Advance) -> list[Finding]:
    try:
        published = open_published(path)
    except RuntimeError as error:
        return [Finding("manifest and sizes", False, str(error))]
    manifest = published.manifest
    found = [Finding("manifest and sizes", True, f"{len(list(manifest.files()))} files")]
    text = (path / MANIFEST_NAME).read_bytes()
    if not manifest.is_text(text):
        said = f"{MANIFEST_NAME} ({len(text):,} bytes) is not what was written"
        said += ": its own checksum is another one [V61]"
        # What it tells of the others means nothing.
        return [*found, Finding("checksums", False, said)]
    found += _files(published, advance)
    found.append(_descriptions(published))
    found += ted_findings(published, advance)
    return found


def _files(published: Published, advance: Advance) -> list[Finding]:
    bad, count = [], 1
    for name, size, expected in published.manifest.files():
        count += 1
        try:
            found = crc32_of(published.path / name, advance)
        except OSError as error:
            bad.append(Finding("checksums", False, f"{name} cannot be read: {error.strerror}"))
            continue
        if found != expected:
            bad.append(
                Finding(
                    "checksums",
                    False,
                    f"{name} ({size:,} bytes) is not what was written: expected crc32 "
                    f"{expected:08x}, got {found:08x} [V61]",
                )
            )
    return bad or [Finding("checksums", True, f"{count} files")]


def _descriptions(published: Published) -> Finding:
    """Checks what `TensorDict.load_memmap` would go by, which no checksum covers.

    It is not called: where a shape is larger than a file, it changes the file.
    """
    manifest = published.manifest
    said: dict[Path, dict[str, Any]] = {}
    arrays = [each for each in (*manifest.arrays, *manifest.episode_arrays) if each.file]
    for array in arrays:
        folder = (published.path / str(array.file)).parent
        for _ in array.key:
            if folder not in said:
                try:
                    said[folder] = dict(json.loads((folder / _META_NAME).read_bytes()))
                except (OSError, ValueError, TypeError) as error:
                    text = f"{folder / _META_NAME} is damaged: {error}"
                    return Finding("descriptions", False, text)
            folder = folder.parent
        folder = (published.path / str(array.file)).parent
        found = said[folder].get(array.key[-1])
        wanted = {"shape": list(array.shape), "dtype": str(array.dtype), "is_nested": False}
        has = found if isinstance(found, dict) else {}
        if any(has.get(name) != value for name, value in wanted.items()):
            return Finding(
                "descriptions",
                False,
                f"{folder / _META_NAME} says {found!r:.200} of {array.key[-1]!r}, expected "
                f"{wanted['dtype']} of shape {wanted['shape']} [V61]",
            )
    return Finding(
        "descriptions", True, f"{len(said)} folders as TensorDict.load_memmap reads them"
    )


# -- checkpoints -------------------------------------------------------------------------------


def _checkpoint(path: Path, advance: Advance) -> list[Finding]:
    try:
        versions = checkpoint_versions(path)
    except (CheckpointError, FileNotFoundError) as error:
        return [Finding("manifest", False, str(error))]
    found: list[Finding] = []
    named: set[str] = set()
    for version in versions:
        found += _version(path, version, advance, named)
    others = sorted(each.name for each in path.glob("data-*.bin") if each.name not in named)
    if others:
        text = f"no manifest names {', '.join(others[:10])}: the next save removes them"
        found.append(Finding("leftovers", False, text, is_warning=True))
    return found


def _version(path: Path, version: int, advance: Advance, named: set[str]) -> list[Finding]:
    label = f"version {version}"
    try:
        manifest = read_manifest(path, version, check=True)
    except (CheckpointError, FileNotFoundError) as error:
        return [Finding(f"{label}: manifest", False, str(error))]
    found = [Finding(f"{label}: manifest", True, f"{len(manifest['files'])} files")]
    bad = []
    for name, record in manifest["files"].items():
        if name in named:
            continue  # it belongs to a version before, and was read then
        named.add(name)
        problem = _file(path / name, record["size"], record["crc32"], advance)
        if problem:
            bad.append(Finding(f"{label}: files", False, problem))
    if bad:
        return found + bad
    found.append(Finding(f"{label}: files", True, f"{len(manifest['files'])} files"))
    try:
        with Checkpoint(path, version) as saved:
            for part in saved.manifest["parts"]:
                saved.part(part, mapped=["groups", "_priorities"] if _is_dict(saved, part) else ())
    except CheckpointError as error:
        return [*found, Finding(f"{label}: records", False, str(error))]
    return [*found, Finding(f"{label}: records", True, f"{len(manifest['parts'])} parts")]


def _is_dict(saved: Checkpoint, part: str) -> bool:
    record = saved.manifest["parts"][part]
    return isinstance(record, dict) and "$" not in record


def _file(file: Path, size: int, expected: int, advance: Advance) -> str | None:
    try:
        descriptor = open_file(file, size)
    except FileNotFoundError:
        return f"{file} is missing"
    except (CheckpointError, OSError) as error:
        return str(error)
    os.close(descriptor)
    found = crc32_of(file, advance)
    if found != expected:
        return f"{file} is damaged: expected crc32 {expected}, got {found}"
    return None


def crc32_of(file: Path, advance: Advance) -> int:
    """Returns the CRC-32 of a file, read in blocks."""
    found = 0
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            found = crc32(block, found)
            advance(len(block))
    return found


# -- buffers -----------------------------------------------------------------------------------


def _buffer(path: Path, advance: Advance) -> list[Finding]:
    try:
        with opened_scratch(path, 0) as (facts, _):
            advance(facts.nbytes)
            if facts.rows is None:
                text = facts.warnings[0]
                return [Finding("what the files hold", False, text, is_warning=True)]
            return [Finding("files and committed state", True, f"{facts.rows:,} rows")]
    except (CheckpointError, RuntimeError) as error:
        return [Finding("files and committed state", False, str(error))]
