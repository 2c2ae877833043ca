"""Opening of the data at a path, and checks that it is complete and correct."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.checkpoint import FORMAT as CHECKPOINT
from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.checkpoint_format import open_file, read_manifest
from replaykit.datasets.dataset_manifest import FORMAT as CORPUS
from replaykit.datasets.dataset_manifest import MANIFEST_NAME
from replaykit.datasets.engine.conversion_report import duplicates
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.publishing import Published, open_published
from replaykit.datasets.sources import h5_below, require_plain
from replaykit.errors import CheckpointError
from replaykit.native import crc32
from replaykit.ted import Key
from replaykit.tools.facts import Facts, Finding, Table, counted
from replaykit.tools.source_facts import corpus_facts, opened_h5
from replaykit.tools.stored_facts import (
    is_recording,
    is_scratch,
    opened_checkpoint,
    opened_recorded,
    opened_scratch,
)

__all__ = ["MOST_BYTES", "h5_files", "kind_of", "opened", "ted_findings", "validate"]

MOST_BYTES: Final = 64 << 20
"""Number of bytes of a key that are read for statistics that are not stored."""


def kind_of(path: Path) -> str:
    """Return the kind of data at a path.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: a folder holds no data of a known kind. Or the path, or an H5 file in the
            folder, is a pipe, a device or a socket.

    Example:
        >>> from pathlib import Path
        >>> from replaykit.inspection import kind_of
        >>> kind_of(Path("no-such-folder"))
        Traceback (most recent call last):
        FileNotFoundError: no-such-folder is not there
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    require_plain(path)
    if path.is_file():
        return "H5 file"
    said = _format(path / "manifest.json")
    if said == CORPUS:
        return "corpus"
    if said == CHECKPOINT or (path / "manifest.json").exists():
        return "checkpoint"
    if is_recording(path):
        return "recording"
    if is_scratch(path):
        return "buffer"
    if h5_files(path):
        return "H5 folder"
    raise ValueError(
        f"expected a converted data set, a checkpoint, a recording, a buffer's directory, or H5 "
        f"files, got {path}, which holds none of them"
    )


def _format(manifest: Path) -> str | None:
    if not manifest.is_file():  # reading a pipe would wait for a writer
        return None
    try:
        found = json.loads(manifest.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("format") if isinstance(found, dict) else None


def h5_files(path: Path) -> list[Path]:
    """Return the H5 files of a folder in natural order, or the file itself.

    Links to files in the folder are followed, as in `convert`.

    Raises:
        ValueError: a file is a pipe, a device or a socket.
    """
    require_plain(path)
    if path.is_file():
        return [path]
    return sorted(h5_below(path), key=lambda each: natural_key(str(each)))


@contextmanager
def opened(
    path: Path, *, layout: str | None = None, most_bytes: int | None = MOST_BYTES
) -> Iterator[tuple[Facts, Table]]:
    """Open the data at a path, and yield information about it and a table.

    Args:
        path: a converted data set, a checkpoint, a recording, the directory of a memory-mapped
            buffer, an H5 file, or a folder of H5 files.
        layout: the name of the layout of H5 files. ``None`` guesses the layout.
        most_bytes: number of bytes of each key that are read for statistics, from rows at even
            intervals. ``None`` reads all rows. Stored statistics are returned without reading rows.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the path is none of these.
        RuntimeError, CorpusError, CheckpointError, OSError: a file is damaged. The message names
            it.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> from replaykit.inspection import opened
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(folder)
        ...     with opened(Path(folder)) as (facts, table):
        ...         facts.kind, facts.rows, facts.keys[0].statistics["mean"]
        ('checkpoint', 3, 1.0)
    """
    kind = kind_of(path)
    if kind == "corpus":
        yield corpus_facts(path)
    elif kind == "checkpoint":
        with opened_checkpoint(path, most_bytes) as found:
            yield found
    elif kind == "recording":
        with opened_recorded(path, most_bytes) as found:
            yield found
    elif kind == "buffer":
        with opened_scratch(path, most_bytes) as found:
            yield found
    else:
        with opened_h5(path, h5_files(path), layout, most_bytes) as found:
            yield found


Array = npt.NDArray[Any]
Advance = Callable[[int], object]

_BLOCK_ROWS: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 22
_MOST_NAMED: Final = 5
_FLAGS: Final = ("done", "terminated", "truncated")


def ted_findings(published: Published, advance: Advance) -> list[Finding]:
    """Check a data set's columns against each other and against its episode table.

    The messages name these rules by number:

    - V20: actions contain no NaN.
    - V21: observations and rewards contain no NaN.
    - V22: the next observation of a row is the observation of the next row.
    - V30: the flags agree with each other.
    - V31: the flags mark the ends of the episodes in the table.
    - V32: the episodes cover all rows once.
    - V33: each pair of ids names one episode.
    - V36: no episode is stored twice.
    """
    table = _Table(published)
    found = [*_episodes(table)]
    if any(not each.ok for each in found):
        return found  # the other checks need the episodes of the rows
    found += _flags(table, advance)
    found += _returns(table, advance)
    found += _successors(table, advance)
    found += _holes(published)
    found += _twice(published)
    return found


class _Table:
    """The rows of a flat or split data set, in a flat order."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.starts = published.episodes["start"].numpy()
        self.lengths = published.episodes["length"].numpy()
        self.batch = published.manifest.batch
        self.rows = int(self.lengths.sum())

    def blocks(self, *keys: Key, rows: int = _BLOCK_ROWS) -> Iterator[tuple[int, list[Array]]]:
        """Yield blocks of columns: the number of the first row, and arrays ``[n, ...]``."""
        columns = [self.published.columns[key].numpy() for key in keys]
        if len(self.batch) == 1:
            for start in range(0, self.rows, rows):
                yield start, [column[start : start + rows] for column in columns]
            return
        first = 0
        for episode, length in enumerate(self.lengths.tolist()):
            for start in range(0, length, rows):
                stop = min(start + rows, length)
                yield first + start, [column[episode, start:stop] for column in columns]
            first += length

    def has(self, *keys: Key) -> bool:
        return all(key in self.published.columns for key in keys)

    def name(self, row: int) -> str:
        """Return a description of a row with its number, step and episode."""
        ends = np.cumsum(self.lengths)
        episode = int(np.searchsorted(ends, row, "right"))
        first = int(ends[episode - 1]) if episode else 0
        return f"row {row} (step {row - first} of episode {episode})"


def _episodes(table: _Table) -> list[Finding]:
    check, lengths, starts = "episode table", table.lengths, table.starts
    if (lengths < 1).any():
        at = int(np.argmax(lengths < 1))
        return [Finding(check, False, f"episode {at} has length {int(lengths[at])} [V32]")]
    is_flat = len(table.batch) == 1
    expected = np.cumsum(lengths) - lengths
    if is_flat and not np.array_equal(starts, expected):
        at = int(np.argmax(starts != expected))
        text = f"episode {at} starts at row {int(starts[at])}, expected {int(expected[at])} [V32]"
        return [Finding(check, False, text)]
    room = table.batch[0] if is_flat else int(np.prod(table.batch))
    if table.rows != room if is_flat else (lengths > table.batch[1]).any():
        text = f"its episodes have {table.rows} rows, the columns {room} [V32]"
        return [Finding(check, False, text)]
    return [
        Finding(
            check,
            True,
            f"{counted(len(lengths), 'episode')} of {counted(table.rows, 'row')} together",
        )
    ]


def _flags(table: _Table, advance: Advance) -> list[Finding]:
    check = "flags"
    following = [("next", name) for name in _FLAGS]
    if not table.has(*following):
        missing = [key for key in following if not table.has(key)]
        return [Finding(check, False, f"the columns {missing} are missing [V30]")]
    last = np.cumsum(table.lengths) - 1
    said = [table.published.episodes[name].numpy() for name in ("terminated", "truncated")]
    for start, flags in table.blocks(*following):
        done, terminated, truncated = (flag.reshape(len(flag)) for flag in flags)
        advance(3 * len(done))
        wrong = done != (terminated | truncated)
        if wrong.any():
            at = table.name(start + int(np.argmax(wrong)))
            text = f"next/done is not next/terminated or next/truncated at {at} [V30]"
            return [Finding(check, False, text)]
        low, high = np.searchsorted(last, [start, start + len(done)])
        ends = last[low:high] - start
        expected = np.zeros(len(done), np.bool_)
        expected[ends] = True
        if not np.array_equal(expected, done):
            row = int(np.argmax(expected != done))
            what = (
                "is set before the end of an episode"
                if done[row]
                else "is not set at the end of an episode"
            )
            text = f"next/done at {table.name(start + row)} {what} [V31]"
            return [Finding(check, False, text)]
        for number, (name, flag) in enumerate(
            zip(_FLAGS[1:], (terminated, truncated), strict=True)
        ):
            column = said[number][low:high]
            differs = flag[ends] != column
            if differs.any():
                first = int(np.argmax(differs))
                is_set = bool(column[first])
                text = (
                    f"the table has {name} {is_set} of episode {low + first}, its last row "
                    f"next/{name} {not is_set} [V31]"
                )
                return [Finding(check, False, text)]
    found = [Finding(check, True, f"{table.rows:,} rows, {len(last):,} ends")]
    return found + _before(table, advance) + _ids(table, advance)


def _before(table: _Table, advance: Advance) -> list[Finding]:
    for name in _FLAGS:
        if not table.has((name,)):
            continue
        for start, (flag,) in table.blocks((name,)):
            advance(len(flag))
            if flag.any():
                at = table.name(start + int(np.argmax(flag.reshape(len(flag)))))
                return [Finding("flags before", False, f"{name} is set at {at} [V30]")]
    return [Finding("flags before", True, "none is set")]


def _ids(table: _Table, advance: Advance) -> list[Finding]:
    check = "ids"
    if not table.has(("episode",), ("seed",)):
        return [Finding(check, False, "the columns 'episode' and 'seed' are missing [V33]")]
    episodes = table.published.episodes
    pairs = np.stack([episodes["seed"].numpy(), episodes["episode"].numpy()], 1)
    if len(np.unique(pairs, axis=0)) < len(pairs):
        return [Finding(check, False, "two episodes have the same seed and episode [V33]")]
    ends = np.cumsum(table.lengths)
    for start, (seed, episode) in table.blocks(("seed",), ("episode",)):
        advance(seed.nbytes + episode.nbytes)
        of = np.searchsorted(ends, np.arange(start, start + len(seed)), "right")
        wrong = (seed.reshape(-1) != pairs[of, 0]) | (episode.reshape(-1) != pairs[of, 1])
        if wrong.any():
            at = table.name(start + int(np.argmax(wrong)))
            return [
                Finding(check, False, f"seed and episode are those of another one at {at} [V33]")
            ]
    return [Finding(check, True, f"{len(pairs):,} pairs of seed and episode")]


def _returns(table: _Table, advance: Advance) -> list[Finding]:
    key = ("next", "reward")
    if not table.has(key) or table.published.columns[key].numel() != np.prod(table.batch):
        return []
    sums = np.zeros(len(table.lengths))
    sizes = np.zeros(len(table.lengths))
    ends = np.cumsum(table.lengths)
    for start, (reward,) in table.blocks(key):
        advance(reward.nbytes)
        of = np.searchsorted(ends, np.arange(start, start + len(reward)), "right")
        values = reward.reshape(-1).astype(np.float64)
        np.add.at(sums, of, values)
        np.add.at(sizes, of, np.abs(values))
    said = table.published.episodes["return"].numpy()
    # The table has sums of the source's rewards, computed before a cast and in another order.
    precision = max(1e-9, 8 * _precision(table.published.columns[key].numpy().dtype))
    wrong = ~(np.abs(sums - said) <= 1e-12 + precision * sizes) & np.isfinite(sums)
    if wrong.any():
        at = int(np.argmax(wrong))
        text = (
            f"the table has {said[at]:.9g} of episode {at}, the sum of its next/reward is "
            f"{sums[at]:.9g}"
        )
        return [Finding("returns", False, text)]
    return [Finding("returns", True, f"{len(said):,} sums of next/reward")]


def _precision(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0


def _successors(table: _Table, advance: Advance) -> list[Finding]:
    """Check that next observations equal the next rows' observations, byte by byte."""
    columns, found = table.published.columns, []
    last = np.cumsum(table.lengths) - 1
    for key in columns:
        if key[0] != "observation" or not table.has(("next", *key)):
            continue
        one = columns[key]
        width = max(1, one[:1].numel() // max(1, int(np.prod(one.shape[: len(table.batch)][1:]))))
        rows = max(2, _BLOCK_BYTES // (width * one.element_size()))
        before = held = one.numpy()[:0].reshape(0, *one.shape[len(table.batch) :])
        count, first = 0, None
        for start, (now, after) in table.blocks(key, ("next", *key), rows=rows):
            advance(2 * now.nbytes)
            joined, following = np.concatenate([before, now]), np.concatenate([held, after])
            base = start - len(before)
            wrong = _differ(following[:-1], joined[1:])
            ends = last[(last >= base) & (last < base + len(wrong))] - base
            wrong[ends] = False
            count += int(wrong.sum())
            if first is None and wrong.any():
                first = base + int(np.argmax(wrong))
            before, held = now[-1:], after[-1:]
        if first is not None:
            text = (
                f"next/{'/'.join(key)} is not the {'/'.join(key)} of the next row in {count} rows, "
                f"first at {table.name(first)} [V22]"
            )
            found.append(
                Finding("successors", False, text, is_warning=_has_own(table.published, key))
            )
    checked = sum(key[0] == "observation" and table.has(("next", *key)) for key in columns)
    return found or [Finding("successors", True, f"{checked} keys of observations")]


def _differ(one: Array, other: Array) -> Array:
    """Return a mask of the rows that differ in a byte, so that NaN equals itself."""
    width = int(np.prod(one.shape[1:])) * one.dtype.itemsize
    if not width or not len(one):
        return np.zeros(len(one), np.bool_)
    first = np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8)
    second = np.ascontiguousarray(other).reshape(len(one), -1).view(np.uint8)
    return np.asarray((first != second).any(axis=1))


def _has_own(published: Published, key: Key) -> bool:
    """Return whether next observations have a separate source."""
    sources = {array.key: array.facts.get("source") for array in published.manifest.arrays}
    return sources.get(key) != sources.get(("next", *key))


def _holes(published: Published) -> list[Finding]:
    """Report NaNs in observations, actions and rewards, from the stored statistics."""
    policies = published.manifest.options.get("policies", {})
    kept = policies.get("on_invalid") == "keep"
    found, count = [], 0
    for array in (*published.manifest.arrays, *published.manifest.finals):
        role = array.key[1] if array.key[0] == "next" and len(array.key) > 1 else array.key[0]
        if role not in ("observation", "action", "reward"):
            continue
        count += 1
        nan = (array.facts.get("statistics") or {}).get("nan", 0)
        if nan:
            rule = "V20" if role == "action" else "V21"
            text = f"{'/'.join(array.key)} holds {nan} NaN [{rule}]"
            found.append(Finding("numbers", False, text, is_warning=kept))
    return found or [Finding("numbers", True, f"no NaN in {count} keys")]


def _twice(published: Published) -> list[Finding]:
    if "digest" not in published.episodes:
        return []
    pairs = duplicates(published.episodes["digest"].numpy())
    if not pairs:
        return [Finding("duplicates", True, "no episode is stored twice")]
    listed = ", ".join(f"{later} as {first}" for later, first in pairs[:_MOST_NAMED])
    text = f"{counted(len(pairs), 'episode')} with the content of an earlier one: {listed} [V36]"
    return [Finding("duplicates", False, text, is_warning=True)]


_META_NAME: Final = "meta.json"


def validate(path: Path, advance: Advance | None = None) -> list[Finding]:
    """Check a converted data set, a checkpoint, a recording, or a buffer on disk.

    Args:
        path: the directory.
        advance: called with the number of bytes checked since the last call.

    Returns:
        The results of all checks, in order. The data is correct if every result is ``ok`` or a
        warning.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the path is none of these.
        RuntimeError: no episode of the recording has ended yet.

    Cost: every file is read once. Flags, ids, rewards and observations of a data set are read
    twice. Memory: a few MiB.

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
    report = advance or (lambda _: None)
    kind = kind_of(path)
    if kind == "corpus":
        return _corpus(path, report)
    if kind == "checkpoint":
        return _checkpoint(path, report)
    if kind == "recording":
        return _recording(path, report)
    if kind == "buffer":
        return _buffer(path, report)
    raise ValueError(
        f"{path} was not converted yet: convert checks every value, and inspect shows the "
        "warnings of a conversion"
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
        said = f"{MANIFEST_NAME} ({len(text):,} bytes) does not match its checksum"
        said += ": it was changed after it was written [V61]"
        # The other files cannot be checked, because a damaged manifest has no valid checksums.
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
                    f"{name} ({size:,} bytes) does not match its checksum: expected crc32 "
                    f"{expected:08x}, got {found:08x} [V61]",
                )
            )
    return bad or [Finding("checksums", True, f"{count} files")]


def _descriptions(published: Published) -> Finding:
    """Check the ``meta.json`` files of tensordict, which have no checksum.

    `TensorDict.load_memmap` is not called, because it changes a file that is smaller than its
    shape.
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
            continue  # the file was checked with an earlier version
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
    """Return the CRC-32 of a file. The file is read in blocks."""
    found = 0
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            found = crc32(block, found)
            advance(len(block))
    return found


# -- recordings --------------------------------------------------------------------------------


def _recording(path: Path, advance: Advance) -> list[Finding]:
    """Check the files, and the flags against the episode numbers. No checksums are stored."""
    try:
        with opened_recorded(path, 0) as (facts, table):
            advance(facts.nbytes)
            assert facts.rows is not None
            assert facts.episodes is not None
            found = [Finding("files and committed state", True, f"{facts.rows:,} rows")]
            numbers = table.columns["episode"].read(0, facts.rows)
            count = counted(len(facts.episodes), "episode")
            lengths, ends = facts.episodes.lengths, set(facts.episodes.ends)
            is_ended = ends <= {"terminated", "truncated"}
            if is_ended and np.array_equal(numbers, np.repeat(np.arange(len(lengths)), lengths)):
                return [*found, Finding("flags and episode numbers", True, count)]
            text = f"the flags give {count}: one has no end, or the key 'episode' differs"
            return [*found, Finding("flags and episode numbers", False, text)]
    except CheckpointError as error:
        return [Finding("files and committed state", False, str(error))]


# -- buffers -----------------------------------------------------------------------------------


def _buffer(path: Path, advance: Advance) -> list[Finding]:
    try:
        with opened_scratch(path, 0) as (facts, _):
            advance(facts.nbytes)
            if facts.rows is None:
                text = facts.warnings[0]
                return [Finding("content of the files", False, text, is_warning=True)]
            return [Finding("files and committed state", True, f"{facts.rows:,} rows")]
    except (CheckpointError, RuntimeError) as error:
        return [Finding("files and committed state", False, str(error))]
