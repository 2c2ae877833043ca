"""Opening of the data at a path, and checks that it is complete and correct."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from replaykit.checkpoint import FORMAT as CHECKPOINT
from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.checkpoint_format import open_file, read_manifest
from replaykit.datasets.dataset_manifest import FORMAT as CORPUS
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, crc32_of_file
from replaykit.datasets.engine.conversion_report import duplicates
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.publishing import Published, open_published
from replaykit.datasets.sources import files_below, require_plain
from replaykit.errors import CheckpointError
from replaykit.storages.memory import differing
from replaykit.ted import Key
from replaykit.tools.facts import Facts, Finding, Table, counted
from replaykit.tools.layouts import table_layout_of
from replaykit.tools.source_facts import corpus_facts, h5_facts, table_facts, table_findings
from replaykit.tools.stored_facts import (
    checkpoint_facts,
    is_recording,
    is_scratch,
    recording_facts,
    scratch_facts,
)

MOST_BYTES: Final = 64 << 20
"""Number of bytes of a key that are read for statistics that are not stored."""


def kind_of(path: str | Path) -> str:
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
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    require_plain(path)
    if path.is_file():
        return "H5 file" if table_layout_of(path) is None else "table"
    said = _format(path / "manifest.json")
    if said == CORPUS:
        return "corpus"
    if said == CHECKPOINT or (path / "manifest.json").exists():
        return "checkpoint"
    if is_recording(path):
        return "recording"
    if is_scratch(path):
        return "buffer"
    if table_layout_of(path) is not None:
        return "table"
    if h5_files(path):
        return "H5 folder"
    raise ValueError(
        "expected a data set, a checkpoint, a recording, a buffer's directory, H5 files, or a set "
        f"of LeRobot, Zarr, Minari or RLDS, got {path}, which holds none of them"
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
    return sorted(files_below(path), key=lambda each: natural_key(str(each)))


@contextmanager
def opened(
    path: str | Path, *, layout: str | None = None, most_bytes: int | None = MOST_BYTES
) -> Iterator[tuple[Facts, Table]]:
    """Open the data at a path, and yield information about it and a table.

    Args:
        path: a converted data set, a checkpoint, a recording, the directory of a memory-mapped
            buffer, a data set of LeRobot, Zarr, Minari or RLDS, an H5 file, or a folder of H5
            files.
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
    kind = kind_of(path := Path(path))
    with ExitStack() as stack:
        if kind == "corpus":
            yield corpus_facts(path)
        elif kind == "checkpoint":
            yield checkpoint_facts(path, most_bytes, stack)
        elif kind == "recording":
            yield recording_facts(path, most_bytes)
        elif kind == "buffer":
            yield scratch_facts(path, most_bytes)
        elif kind == "table":
            yield table_facts(path, stack)
        else:
            yield h5_facts(path, h5_files(path), layout, most_bytes, stack)


Advance = Callable[[int], object]

_BLOCK_ROWS: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 22
_MOST_NAMED: Final = 5
_FLAGS: Final = ("done", "terminated", "truncated")


class _CheckError(Exception):
    """A check failed. The arguments are texts, each with True if it is only a warning."""


def _fail(text: str) -> NoReturn:
    raise _CheckError((text, False))


def _check(name: str, run: Callable[..., str | None], *given: Any) -> list[Finding]:
    """Run a check. It returns the amount of checked data, or ``None`` if it does not apply."""
    try:
        text = run(*given)
    except _CheckError as error:
        return [Finding(name, False, *failure) for failure in error.args]
    return [] if text is None else [Finding(name, True, text)]


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
    found = _check("episode table", _episodes, table)
    if all(each.ok for each in found):  # the other checks need the episodes of the rows
        for name, run in _RULES.items():
            found += _check(name, run, table, advance)
    return found


class _Table:
    """The rows of a flat or split data set, in a flat order."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.columns = published.columns
        self.starts = published.episodes["start"].numpy()
        self.lengths = published.episodes["length"].numpy()
        self.ends = np.cumsum(self.lengths)
        self.batch = published.manifest.batch
        self.rows = int(self.lengths.sum())

    def blocks(
        self, *keys: Key, rows: int = _BLOCK_ROWS, more: int = 0
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield blocks of columns: the number of the first row, and tensors ``[n, ...]``.

        Each block also has the first ``more`` rows of the next block.
        """
        columns = [self.columns[key] for key in keys]
        is_flat = len(self.batch) == 1
        first = 0
        for episode, length in enumerate([self.rows] if is_flat else self.lengths.tolist()):
            parts = columns if is_flat else [column[episode] for column in columns]
            for start in range(0, length - more, rows):
                stop = min(start + rows + more, length)
                yield first + start, [part[start:stop] for part in parts]
            first += length

    def has(self, *keys: Key) -> bool:
        return all(key in self.columns for key in keys)

    def episodes_of(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the episodes of rows."""
        return np.searchsorted(self.ends, np.arange(start, start + count), "right")

    def first(self, start: int, wrong: Any) -> str:
        """Return a description of the first wrong row: its number, step and episode."""
        row = start + int(np.argmax(np.asarray(wrong)))
        (episode,) = self.episodes_of(row, 1).tolist()
        step = row - int(self.ends[episode] - self.lengths[episode])
        return f"row {row} (step {step} of episode {episode})"


def _episodes(table: _Table) -> str:
    lengths, starts = table.lengths, table.starts
    if (lengths < 1).any():
        at = int(np.argmax(lengths < 1))
        _fail(f"episode {at} has length {int(lengths[at])} [V32]")
    is_flat = len(table.batch) == 1
    expected = table.ends - lengths
    if is_flat and not np.array_equal(starts, expected):
        at = int(np.argmax(starts != expected))
        _fail(f"episode {at} starts at row {int(starts[at])}, expected {int(expected[at])} [V32]")
    room = table.batch[0] if is_flat else int(np.prod(table.batch))
    if table.rows != room if is_flat else (lengths > table.batch[1]).any():
        _fail(f"its episodes have {table.rows} rows, the columns {room} [V32]")
    return f"{counted(len(lengths), 'episode')} of {counted(table.rows, 'row')} together"


def _flags(table: _Table, advance: Advance) -> str:
    following = [("next", name) for name in _FLAGS]
    if not table.has(*following):
        _fail(f"the columns {[key for key in following if not table.has(key)]} are missing [V30]")
    last = table.ends - 1
    for start, columns in table.blocks(*following):
        done, *flags = (column.numpy().reshape(len(column)) for column in columns)
        advance(3 * len(done))
        wrong = done != (flags[0] | flags[1])
        if wrong.any():
            at = table.first(start, wrong)
            _fail(f"next/done is not next/terminated or next/truncated at {at} [V30]")
        low, high = np.searchsorted(last, [start, start + len(done)])
        ends = last[low:high] - start
        expected = np.zeros(len(done), np.bool_)
        expected[ends] = True
        wrong = expected != done
        if wrong.any():
            is_early = done[np.argmax(wrong)]
            what = "is set before" if is_early else "is not set at"
            _fail(f"next/done at {table.first(start, wrong)} {what} the end of an episode [V31]")
        for name, flag in zip(_FLAGS[1:], flags, strict=True):
            column = table.published.episodes[name].numpy()[low:high]
            differs = flag[ends] != column
            if differs.any():
                first = int(np.argmax(differs))
                is_set = bool(column[first])
                _fail(
                    f"the table has {name} {is_set} of episode {low + first}, its last row "
                    f"next/{name} {not is_set} [V31]"
                )
    return f"{table.rows:,} rows, {len(last):,} ends"


def _before(table: _Table, advance: Advance) -> str:
    for name in _FLAGS:
        for start, (flag,) in table.blocks((name,)) if table.has((name,)) else ():
            advance(len(flag))
            if flag.any():
                _fail(f"{name} is set at {table.first(start, flag.reshape(len(flag)))} [V30]")
    return "none is set"


def _ids(table: _Table, advance: Advance) -> str:
    if not table.has(("episode",), ("seed",)):
        _fail("the columns 'episode' and 'seed' are missing [V33]")
    episodes = table.published.episodes
    pairs = np.stack([episodes["seed"].numpy(), episodes["episode"].numpy()], 1)
    if len(np.unique(pairs, axis=0)) < len(pairs):
        _fail("two episodes have the same seed and episode [V33]")
    for start, columns in table.blocks(("seed",), ("episode",)):
        ids = np.stack([column.numpy().reshape(-1) for column in columns], 1)
        advance(ids.nbytes)
        wrong = (ids != pairs[table.episodes_of(start, len(ids))]).any(1)
        if wrong.any():
            at = table.first(start, wrong)
            _fail(f"seed and episode are those of another one at {at} [V33]")
    return f"{len(pairs):,} pairs of seed and episode"


def _returns(table: _Table, advance: Advance) -> str | None:
    key = ("next", "reward")
    if not table.has(key) or table.columns[key].numel() != np.prod(table.batch):
        return None
    sums, sizes = np.zeros((2, len(table.lengths)))
    for start, (reward,) in table.blocks(key):
        advance(reward.nbytes)
        of = table.episodes_of(start, len(reward))
        values = reward.reshape(-1).numpy().astype(np.float64)
        np.add.at(sums, of, values)
        np.add.at(sizes, of, np.abs(values))
    said = table.published.episodes["return"].numpy()
    # The table has sums of the source's rewards, computed before a cast and in another order.
    dtype = table.columns[key].dtype
    precision = max(1e-9, 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 0)
    wrong = ~(np.abs(sums - said) <= 1e-12 + precision * sizes) & np.isfinite(sums)
    if wrong.any():
        at = int(np.argmax(wrong))
        _fail(
            f"the table has {said[at]:.9g} of episode {at}, the sum of its next/reward is "
            f"{sums[at]:.9g}"
        )
    return f"{len(said):,} sums of next/reward"


def _successors(table: _Table, advance: Advance) -> str:
    """Check that next observations equal the next rows' observations, byte by byte."""
    failures: list[tuple[str, bool]] = []
    keys = [key for key in table.columns if key[0] == "observation" and table.has(("next", *key))]
    sources = {array.key: array.facts.get("source") for array in table.published.manifest.arrays}
    last = table.ends - 1
    for key in keys:
        column = table.columns[key]
        row_bytes = max(1, column.nbytes // max(1, int(np.prod(table.batch))))
        count, first = 0, ""
        blocks = table.blocks(key, ("next", *key), rows=max(1, _BLOCK_BYTES // row_bytes), more=1)
        for start, (now, after) in blocks:
            advance(2 * now.nbytes)
            wrong = differing(after[:-1], now[1:])
            ends = last[np.searchsorted(last, start) : np.searchsorted(last, start + len(wrong))]
            wrong[torch.from_numpy(ends - start)] = False
            if wrong.any():
                first = first or table.first(start, wrong)
                count += int(wrong.sum())
        if count:
            # Next observations with a separate source may be right.
            is_warning = sources.get(key) != sources.get(("next", *key))
            name = "/".join(key)
            text = (
                f"next/{name} is not the {name} of the next row in {count} rows, first at {first}"
            )
            failures.append((f"{text} [V22]", is_warning))
    if failures:
        raise _CheckError(*failures)
    return f"{len(keys)} keys of observations"


def _numbers(table: _Table, advance: Advance) -> str:
    """Report NaNs in observations, actions and rewards, from the stored statistics."""
    manifest = table.published.manifest
    is_kept = manifest.options.get("policies", {}).get("on_invalid") == "keep"
    failures, count = [], 0
    for array in (*manifest.arrays, *manifest.finals):
        role = array.key[1] if array.key[0] == "next" and len(array.key) > 1 else array.key[0]
        if role not in ("observation", "action", "reward"):
            continue
        count += 1
        nan = (array.facts.get("statistics") or {}).get("nan", 0)
        if nan:
            rule = "V20" if role == "action" else "V21"
            failures.append((f"{'/'.join(array.key)} holds {nan} NaN [{rule}]", is_kept))
    if failures:
        raise _CheckError(*failures)
    return f"no NaN in {count} keys"


def _twice(table: _Table, advance: Advance) -> str | None:
    if "digest" not in table.published.episodes:
        return None
    pairs = duplicates(table.published.episodes["digest"].numpy())
    if not pairs:
        return "no episode is stored twice"
    listed = ", ".join(f"{later} as {first}" for later, first in pairs[:_MOST_NAMED])
    episodes = counted(len(pairs), "episode")
    text = f"{episodes} with the content of an earlier one: {listed} [V36]"
    raise _CheckError((text, True))


_RULES: Final[dict[str, Callable[[_Table, Advance], str | None]]] = {
    "flags": _flags,
    "flags before": _before,
    "ids": _ids,
    "returns": _returns,
    "successors": _successors,
    "numbers": _numbers,
    "duplicates": _twice,
}


_META_NAME: Final = "meta.json"


def validate(path: str | Path, advance: Advance | None = None) -> list[Finding]:
    """Check a data set, a checkpoint, a recording, a buffer on disk, or a table.

    Args:
        path: the directory, or the ``.zip`` file of a Zarr table. Tables are the data sets of
            LeRobot, Zarr, Minari's Arrow and RLDS.
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
    kind = kind_of(path := Path(path))
    if kind == "corpus":
        return _corpus(path, report)
    if kind == "checkpoint":
        return _checkpoint(path, report)
    if kind == "recording":
        return _recording(path, report)
    if kind == "buffer":
        return _buffer(path, report)
    if kind == "table":
        return table_findings(path, report)
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
    found += _check("checksums", _checksums, published, advance)
    found += _check("descriptions", _descriptions, published)
    return found + ted_findings(published, advance)


def _checksums(published: Published, advance: Advance) -> str:
    bad, count = [], 1
    for name, size, expected in published.manifest.files():
        count += 1
        try:
            found = crc32_of_file(published.path / name, advance)
        except OSError as error:
            bad.append((f"{name} cannot be read: {error.strerror}", False))
            continue
        if found != expected:
            text = f"{name} ({size:,} bytes) does not match its checksum: expected crc32 "
            bad.append((f"{text}{expected:08x}, got {found:08x} [V61]", False))
    if bad:
        raise _CheckError(*bad)
    return f"{count} files"


def _descriptions(published: Published) -> str:
    """Check the ``meta.json`` files of tensordict, which have no checksum.

    `TensorDict.load_memmap` is not called, because it changes a file that is smaller than its
    shape.
    """
    manifest = published.manifest
    said: dict[Path, dict[str, Any]] = {}
    for array in (*manifest.arrays, *manifest.episode_arrays):
        if not array.file:
            continue
        own = folder = (published.path / array.file).parent
        for _ in array.key:
            if folder not in said:
                try:
                    said[folder] = dict(json.loads((folder / _META_NAME).read_bytes()))
                except (OSError, ValueError, TypeError) as error:
                    _fail(f"{folder / _META_NAME} is damaged: {error}")
            folder = folder.parent
        found = said[own].get(array.key[-1])
        wanted = {"shape": list(array.shape), "dtype": str(array.dtype), "is_nested": False}
        if not isinstance(found, dict) or {**found, **wanted} != found:
            _fail(
                f"{own / _META_NAME} says {found!r:.200} of {array.key[-1]!r}, expected "
                f"{wanted['dtype']} of shape {wanted['shape']} [V61]"
            )
    return f"{len(said)} folders as TensorDict.load_memmap reads them"


# -- checkpoints -------------------------------------------------------------------------------


def _checkpoint(path: Path, advance: Advance) -> list[Finding]:
    try:
        versions = checkpoint_versions(path)
    except (CheckpointError, FileNotFoundError) as error:
        return [Finding("manifest", False, str(error))]
    found: list[Finding] = []
    named: set[str] = set()
    for version in versions:
        for name, run in (("manifest", _manifest), ("files", _files), ("records", _records)):
            found += _check(f"version {version}: {name}", run, path, version, advance, named)
            if not found[-1].ok:
                break
    others = sorted(each.name for each in path.glob("data-*.bin") if each.name not in named)
    if others:
        text = f"no manifest names {', '.join(others[:10])}: the next save removes them"
        found.append(Finding("leftovers", False, text, is_warning=True))
    return found


def _manifest(path: Path, version: int, *_: object) -> str:
    try:
        return f"{len(read_manifest(path, version, check=True)['files'])} files"
    except (CheckpointError, FileNotFoundError) as error:
        _fail(str(error))


def _files(path: Path, version: int, advance: Advance, named: set[str]) -> str:
    """Check the files of a version that no earlier version names."""
    files, bad = read_manifest(path, version, check=True)["files"], []
    for name in files.keys() - named:
        record, file = files[name], path / name
        try:
            os.close(open_file(file, record["size"]))
            found = crc32_of_file(file, advance)
            if found != record["crc32"]:
                bad.append(f"{file} is damaged: expected crc32 {record['crc32']}, got {found}")
        except FileNotFoundError:
            bad.append(f"{file} is missing")
        except (CheckpointError, OSError) as error:
            bad.append(str(error))
    named.update(files)
    if bad:
        raise _CheckError(*((text, False) for text in sorted(bad)))
    return f"{len(files)} files"


def _records(path: Path, version: int, *_: object) -> str:
    try:
        with Checkpoint(path, version) as saved:
            for part, record in saved.manifest["parts"].items():
                is_dict = isinstance(record, dict) and "$" not in record
                saved.part(part, mapped=["groups", "_priorities"] if is_dict else ())
            return f"{len(saved.manifest['parts'])} parts"
    except CheckpointError as error:
        _fail(str(error))


# -- recordings and buffers --------------------------------------------------------------------


def _recording(path: Path, advance: Advance) -> list[Finding]:
    """Check the files, and the flags against the episode numbers. No checksums are stored."""
    try:
        facts, table = recording_facts(path, 0)
    except CheckpointError as error:
        return [Finding("files and committed state", False, str(error))]
    found = _committed(facts, advance)
    return found + _check("flags and episode numbers", _numbered, facts, table)


def _committed(facts: Facts, advance: Advance) -> list[Finding]:
    advance(facts.nbytes)
    return [Finding("files and committed state", True, f"{facts.rows:,} rows")]


def _numbered(facts: Facts, table: Table) -> str:
    assert facts.rows is not None
    assert facts.episodes is not None
    numbers = table.columns["episode"].read(0, facts.rows)
    count = counted(len(facts.episodes), "episode")
    lengths, ends = facts.episodes.lengths, set(facts.episodes.ends)
    expected = np.repeat(np.arange(len(lengths)), lengths)
    if not ends <= {"terminated", "truncated"} or not np.array_equal(numbers, expected):
        _fail(f"the flags give {count}: one has no end, or the key 'episode' differs")
    return count


def _buffer(path: Path, advance: Advance) -> list[Finding]:
    try:
        facts, _ = scratch_facts(path, 0)
    except (CheckpointError, RuntimeError) as error:
        return [Finding("files and committed state", False, str(error))]
    if facts.rows is None:
        return [Finding("content of the files", False, facts.warnings[0], is_warning=True)]
    return _committed(facts, advance)
