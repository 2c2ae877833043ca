"""Conversion of table sources: read blocks, check values, write columns and the episode table."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.column_files import (
    ATTACHED,
    EPISODE_DIRECTORY,
    ColumnOutput,
    ColumnSpec,
    attach_files,
    create_columns,
    synced_early,
    torch_dtype,
)
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, AttachedFile, joined_crc32
from replaykit.datasets.encoded_frames import REFERENCE_WIDTH
from replaykit.datasets.engine.conversion_report import Converted, duplicates, record_of
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.resuming import ImagesPart, Unfinished
from replaykit.datasets.engine.row_writer import lost_numbers
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableLayout,
    TableSource,
    ValueChecks,
)
from replaykit.datasets.engine.write_files import FINALS_DIRECTORY, store_once
from replaykit.datasets.publishing import hold_back
from replaykit.datasets.sources import Sources
from replaykit.datasets.transfers import progress_bar
from replaykit.errors import CorpusError
from replaykit.filesystem import NoRoomError, disk_errors, remove_tree
from replaykit.ted import DEFAULT_DONE_KEYS, TERMINATED, TRUNCATED, Key, format_key

_REWARD: Final[Key] = ("next", "reward")
_FLAGS: Final = tuple(key for name in DEFAULT_DONE_KEYS for key in ((name,), ("next", name)))
_IDS: Final[tuple[Key, ...]] = (("episode",), ("seed",))
_FLAG_ROWS: Final = 1 << 20
_HANDED_BYTES: Final = 1 << 17
"""Least size of a block that a thread works on, because the change of threads costs time, too."""
_READ_BYTES: Final = 1 << 20
_LATE: Final = (MANIFEST_NAME, EPISODE_DIRECTORY, FINALS_DIRECTORY)
"""Names in a data set that a conversion makes after all rows."""
_UNUSED: Final = ("missing", "extra", "constant", "all_nan", "duplicate", "unrecorded")
"""Policies about arrays that episodes share or lack, which tables do not have."""


def convert_table(
    directory: Path,
    sources: Sources,
    layout: TableLayout,
    policies: Policies,
    *,
    block_bytes: int,
    unfinished: Unfinished[ImagesPart],
    progress: bool | None,
) -> Converted:
    """Fill a directory with the columns of a table, which may have the images of ``unfinished``.

    Raises:
        CorpusError: a rule is broken. The message names file, episode and rule.
        ValueError: a policy names a key or dtype that the source lacks, or does not apply.
        OSError: a file cannot be read, or no space is left.
    """
    for name in _UNUSED:
        if getattr(policies, name) != getattr(Policies(), name):
            raise ValueError(
                f"expected the default of the policy {name!r} for the layout {layout.name!r}, "
                f"which it does not apply to, got {getattr(policies, name)!r}"
            )
    notes = RuleFindings()
    judge = Judge(policies.on_invalid, notes)
    source = layout.open(sources, policies, judge)
    policies.check_met(
        [(column.key, None if column.frames else column.dtype) for column in source.columns],
        (*_FLAGS, *_IDS),
    )
    ends = (TERMINATED, TRUNCATED)
    wanted = [c for c in source.columns if c.key in ends or policies.keeps(c.key)]
    choice = layout.copies if policies.copies == "layout" else policies.copies
    judge.bad |= {position: why for (position,), why in unfinished.excluded.items()}
    while True:
        judge.notes = RuleFindings.of(replace(note) for note in notes)  # each pass finds them again
        kept = source.episodes.lengths > 0
        kept[list(judge.bad)] = False
        if not kept.any():
            where = source.location(0) if len(kept) else Location(Path(layout.name), layout.name)
            raise where.error("no episode has rows that can be converted", "V38")
        plan = str(sorted(judge.bad))
        goes_on = unfinished.is_of(plan)
        if not goes_on:
            unfinished.begin(plan, {}, {(position,): why for position, why in judge.bad.items()})
        for name in _LATE if goes_on else os.listdir(directory):
            remove_tree(directory / name)
        known = len(judge.bad)
        try:
            writer = _Writer(directory, source, wanted, kept, policies, judge, unfinished)
        except NoRoomError:
            # A wrong shape or length breaks a rule. It must not look like a disk that is too small.
            _read_first(source, kept, [column.key for column in wanted], judge)
            if len(judge.bad) == known:
                raise
            continue
        writer.write(block_bytes, progress)
        if len(judge.bad) == known:
            writer.find_copies(choice)
        if len(judge.bad) == known:
            break
    return writer.finish()


def _read_first(
    source: TableSource, kept: npt.NDArray[np.bool_], keys: Sequence[Key], judge: Judge
) -> None:
    """Read a source until each column has given a row, or to its end if an episode is bad."""
    unread, known = set(keys), len(judge.bad)
    for block in source.blocks(kept, keys, 1):
        unread -= block.keys()
        if not unread and len(judge.bad) == known:
            return


class _Digests:
    """The SHA-256 of one column in each episode, of rows that arrive in blocks."""

    def __init__(self, stops: npt.NDArray[np.int64]) -> None:
        self._stops, self._at = stops, 0
        self._hash = hashlib.sha256()
        self.found: list[bytes] = []

    def adopt(self, digest: bytes) -> None:
        """Count an episode whose digest is known."""
        self.found.append(digest)
        self._at = int(self._stops[len(self.found) - 1])

    def add(self, values: Array) -> None:
        rows = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8).data
        low, high = np.searchsorted(self._stops, (self._at, self._at + len(values)), "right")
        start = 0
        for stop in (self._stops[low:high] - self._at).tolist():
            self._hash.update(rows[start:stop])
            self.found.append(self._hash.digest())
            self._hash, start = hashlib.sha256(), stop
        self._hash.update(rows[start:])
        self._at += len(values)


class _Writer:
    """The columns of the kept episodes, while blocks arrive."""

    def __init__(
        self,
        directory: Path,
        source: TableSource,
        wanted: Sequence[SourceColumn],
        kept: npt.NDArray[np.bool_],
        policies: Policies,
        judge: Judge,
        unfinished: Unfinished[ImagesPart],
    ) -> None:
        self.directory, self.source, self.policies, self.judge = directory, source, policies, judge
        self._unfinished = unfinished
        self._checks = ValueChecks(source, wanted, kept, judge)
        self.positions, self._where = self._checks.positions, self._checks.where
        self._starts, self._stops = self._checks.starts, self._checks.stops
        self._kept, self._known = kept, len(judge.bad)
        self._lengths = source.episodes.lengths[kept]
        self.rows = int(self._stops[-1])
        self._wanted = {column.key: column for column in wanted}
        self._dtypes = {
            column.key: column.dtype if column.frames else policies.stored_dtype(column.dtype)
            for column in wanted
        }
        self._ends = {key: np.zeros(len(self.positions), bool) for key in (TERMINATED, TRUNCATED)}
        self._returns = np.full(len(self.positions), np.nan)
        self._statistics = {column.key: Statistics() for column in wanted if not column.frames}
        self._digests = {
            column.key: _Digests(self._stops)
            for column in wanted
            if column.key[0] in ("observation", "action") and not column.frames
        }
        self._handed: list[Future[None]] = []
        self._at = dict.fromkeys(self._wanted, 0)
        slow = [key for key in getattr(source, "slow", ()) if key in self._wanted]
        self._slow = {key: at for at, key in enumerate(slow)}
        self._of_episode = {key: Statistics() for key in slow}
        is_new = not unfinished.finished
        self.columns = self._create(is_new)
        hold_back(directory)
        images = [c.key for c in wanted if c.frames and c.frames["kind"] == "image"]
        self._images = {
            key: _ImageFile(directory, key, len(source.attached) + at, is_new)
            for at, key in enumerate(images, 1)
        }

    @property
    def detects_copies(self) -> bool:
        """True if the digests cover observations."""
        return any(key[0] == "observation" for key in self._digests)

    def _create(self, is_new: bool) -> dict[Key, ColumnOutput]:
        specs = [
            ColumnSpec(key, (REFERENCE_WIDTH,), torch.int64)
            if column.frames
            else ColumnSpec(key, column.shape, torch_dtype(self._dtypes[key]))
            for key, column in self._wanted.items()
            if key not in self._ends
        ]
        specs += [ColumnSpec(key, (1,), torch.bool) for key in _FLAGS]
        specs += [ColumnSpec(key, (), torch.int64) for key in _IDS]
        keys = {spec.key for spec in specs}
        for key in keys:
            above = next((key[:size] for size in range(1, len(key)) if key[:size] in keys), None)
            if above is not None or sum(spec.key == key for spec in specs) > 1:
                raise self._error(0, f"two columns have the key {format_key(above or key)}", "V10")
        return create_columns(self.directory, specs, (self.rows,), is_new=is_new)

    def _error(self, number: int, what: str, rule: str, key: Key = ()) -> CorpusError:
        return self._where(number, key).error(what, rule)

    # -- blocks -----------------------------------------------------------------------------------

    def write(self, block_bytes: int, progress: bool | None) -> None:
        """Write all blocks of the source, then flags and ids."""
        at, source = self._at, self.source
        if self._slow:
            source.is_stored = self._adopt  # type: ignore[attr-defined]
        total = sum(column.nbytes for column in self.columns.values())
        with (
            progress_bar("converting", total, progress) as self._advance,
            synced_early(self.columns),
            ThreadPoolExecutor(2) as self._threads,
        ):
            for block in source.blocks(self._kept, list(self._wanted), block_bytes):
                for key, values in block.items():
                    self._write(key, values, at[key])
                    at[key] += len(values)
                    self._advance(values.nbytes)
                # The next block needs the memory, and follows in the same columns.
                for work in self._handed:
                    work.result()
                self._handed.clear()
                for key in block.keys() & self._slow:
                    self._record(key)
            if len(self.judge.bad) > self._known:
                return  # other rows will be written without these episodes
            for key, count in at.items():
                if count != self.rows:
                    raise self._error(
                        len(self.positions) - 1,
                        f"has {count} rows, expected {self.rows}",
                        "V34",
                        key,
                    )
            self._write_flags()

    def _write(self, key: Key, values: Array, start: int) -> None:
        column = self._wanted[key]
        stop = start + len(values)
        if stop > self.rows or values.shape[1:] != column.shape or values.dtype != column.dtype:
            raise self._error(
                self._episode(min(start, self.rows - 1)),
                f"is {values.dtype} {list(values.shape[1:])} up to row {stop}, expected "
                f"{column.dtype} {list(column.shape)} up to row {self.rows}",
                "V11",
                key,
            )
        if len(self.judge.bad) > self._known:  # the rows will be written again without them
            self._checks.check(key, values, start)
            return
        if key in self._ends:
            flags = values.reshape(-1).astype(bool)
            episodes, lasts = self._checks.check_ends(flags, key, start)
            self._ends[key][episodes] = flags[lasts]
            return
        dtype = self._dtypes[key]
        stored = values
        if dtype != values.dtype:
            with np.errstate(over="ignore", invalid="ignore"):
                stored = values.astype(dtype)
        if key in self._images:
            stored = self._images[key].append(values)
        if not column.frames:
            self._measure(key, values, stored, start)
        if key in self._digests:
            self._hand(stored.nbytes, partial(self._digests[key].add, stored))
        low, high = np.searchsorted(self._starts, (start, stop))
        firsts = (self._starts[low:high] - start).tolist()
        verify = sorted({0, *firsts, len(values) - 1})
        self._hand(stored.nbytes, partial(self.columns[key].write, start, stored, verify=verify))

    def _hand(self, nbytes: int, work: Callable[[], None]) -> None:
        """Let a thread hash or write a large block, while this one checks the next column."""
        if nbytes < _HANDED_BYTES:
            work()
        else:
            self._handed.append(self._threads.submit(work))

    def _record(self, key: Key) -> None:
        """Record the images of an episode after its last row."""
        number = self._episode(self._at[key] - 1)
        if len(self.judge.bad) > self._known or self._at[key] < self._stops[number]:
            return
        digests, images = self._digests.get(key), self._images.get(key)
        part = ImagesPart(
            self._index(key, int(self.positions[number])),
            self.columns[key].crc32,
            self._of_episode[key],
            digests.found[-1].hex() if digests else "",
            images.end if images else (0, 0),
        )
        self._unfinished.record(part)
        self._end_episode(key, part.statistics)

    def _adopt(self, key: Key, position: int) -> bool:
        """Return whether the images of the next episode are stored, and count them.

        Cost: they are read once for their checksum.
        """
        part = self._unfinished.finished.get(self._index(key, position))
        if part is None:
            return False
        column, start = self.columns[key], self._at[key]
        count = int(self.source.episodes.lengths[position])
        if len(self.judge.bad) == self._known:
            found, images = column.part(start, start + count), self._images.get(key)
            for _, block in column.blocks(start, start + count):
                found.adopt(block)
            nbytes = count * column.spec.entry_bytes
            if joined_crc32(column.crc32, found.crc32, nbytes) != part.crc32:
                return False
            if images is not None and not images.adopt(*part.file):
                return False
            column.join(found.crc32, count)
            if key in self._digests:
                self._digests[key].adopt(bytes.fromhex(part.digest))
            self._end_episode(key, part.statistics)
            self._advance(nbytes)
        self._at[key] += count
        return True

    def _index(self, key: Key, position: int) -> int:
        return position * len(self._slow) + self._slow[key]

    def _end_episode(self, key: Key, found: Statistics) -> None:
        # Blocks are merged by episodes, so an interruption does not change the last digits.
        self._of_episode[key] = Statistics()
        if key in self._statistics:
            self._statistics[key].merge(found)

    def _episode(self, row: int) -> int:
        return int(np.searchsorted(self._stops, row, "right"))

    def _measure(self, key: Key, values: Array, stored: Array, start: int) -> None:
        """Add a block to the statistics, and report its numbers that are not finite."""
        of = Statistics()
        of.add(stored)
        (self._of_episode if key in self._slow else self._statistics)[key].merge(of)
        if key == _REWARD and values.size == len(values):
            rows = values.reshape(-1).astype(np.float64)
            low, high = self._episode(start), self._episode(start + len(values) - 1) + 1
            cuts = np.maximum(self._starts[low:high] - start, 0)
            sums = np.add.reduceat(rows, cuts) if len(rows) else rows
            known = np.nan_to_num(self._returns[low:high])
            self._returns[low:high] = np.where(np.isnan(self._returns[low:high]), 0, known) + sums
        is_whole = of.nan == 0 and np.isfinite([of.least, of.largest]).all() if of.count else False
        is_float = stored.dtype.kind in "fc"
        if stored.dtype != values.dtype and not (is_float and is_whole):
            lost = lost_numbers(values, stored).reshape(len(values), -1).any(1)
            self._checks.fail(lost, start, key, f"a value does not fit {stored.dtype}", "V10")
        if is_float and not is_whole:
            self._checks.check_finite(key, stored, start)

    def _write_flags(self) -> None:
        # An episode that no flag ends is cut, which is a truncation.
        self._ends[TRUNCATED] |= ~self._ends[TERMINATED]
        of = self.source.episodes
        for start in range(0, self.rows, _FLAG_ROWS):
            stop = min(start + _FLAG_ROWS, self.rows)
            low, high = np.searchsorted(self._stops - 1, (start, stop))
            counts = np.diff(np.minimum(self._stops[low : high + 1], stop), prepend=start)
            positions = self.positions[low : high + 1]
            lasts = self._stops[low:high] - 1 - start
            done = np.zeros((stop - start, 1), bool)
            for name in ("terminated", "truncated"):
                flag = np.zeros_like(done)
                flag[lasts, 0] = self._ends["next", name][low:high]
                self.columns["next", name].write(start, flag)
                done |= flag
            self.columns["next", "done"].write(start, done)
            for (name,), ids in zip(_IDS, (of.numbers, of.files), strict=True):
                self.columns[name,].write(start, ids[positions].repeat(counts))
        for name in DEFAULT_DONE_KEYS:
            self.columns[name,].finish()

    # -- the end ----------------------------------------------------------------------------------

    def _digest(self) -> npt.NDArray[np.uint8]:
        """Return the digest of observations and actions of each episode, uint8 ``[E, 16]``."""
        each = zip(*(digests.found for digests in self._digests.values()), strict=True)
        found = b"".join(hashlib.sha256(b"".join(parts)).digest()[:16] for parts in each)
        return np.frombuffer(found, np.uint8).reshape(-1, 16)

    def find_copies(self, choice: str) -> None:
        """Leave out or refuse episodes that repeat an earlier one (V36)."""
        if choice == "keep":
            return
        if not self.detects_copies:
            if self.policies.copies != "layout":
                raise ValueError(
                    f"copies={choice!r}: copies of episodes cannot be recognized if all "
                    'observations are left out; keep observations, or pass copies="keep"'
                )
            return
        for later, first in duplicates(self._digest()):
            what = f"it has the observations and actions of {self._where(first).brief}"
            if choice == "error":
                raise self._error(later, what, "V36")
            self.judge.bad[int(self.positions[later])] = f"{what} [V36]"

    def finish(self) -> Converted:
        """Attach files, and return the written columns."""
        lasts = self._stops - 1
        finals = {}
        if self.policies.repeated == "once":
            finals = store_once(self.directory, lasts, self.columns)
        of, at = self.source.episodes, self.positions
        table: dict[str, Array] = {
            "start": self._starts,
            "length": self._lengths,
            "seed": of.files[at],
            "episode": of.numbers[at],
            "source_seed": of.seeds[at],
            "success": of.success[at],
            "terminated": self._ends[TERMINATED],
            "truncated": self._ends[TRUNCATED],
            "return": self._returns,
        }
        copies = []
        if self.detects_copies:
            table["digest"] = self._digest()
            copies = [[self._named(each) for each in pair] for pair in duplicates(table["digest"])]
        notes = self.judge.notes
        report = {
            "left_out": [dict(entry) for entry in self.source.left_out],
            "skipped": list(self._skipped()),
            "numbering": [],
            "files": [],
            "duplicates": [{"episode": a, "same_as": b} for a, b in copies],
            "warnings": [record_of(note) for note in notes],
            "removed": [],
            "splits": self._splits(),
            "about": dict(self.source.facts),
        }
        if "fps" in self.source.facts:
            report["fps"] = self.source.facts["fps"]
        return Converted(
            self._where(0).file,
            tuple(self._described(self.columns)),
            tuple(self._described(finals)),
            table,
            (of.names[position] for position in at.tolist()),
            report,
            notes,
            (
                *attach_files(self.directory, self.source.attached),
                *(images.describe() for images in self._images.values()),
            ),
        )

    def _described(self, columns: Mapping[Key, ColumnOutput]) -> Iterator[Any]:
        for key, output in columns.items():
            facts: dict[str, Any] = {}
            column = self._wanted.get(key)
            if column is not None and key not in self._ends:
                facts = {"source": column.source}
                if column.frames:
                    facts["frames"] = dict(column.frames)
                else:
                    facts["statistics"] = self._statistics[key].to_json()
                if self._dtypes[key] != column.dtype:
                    facts["source_dtype"] = column.dtype.name
            yield output.describe(self.directory, facts)

    def _named(self, number: int) -> list[str]:
        position = int(self.positions[number])
        return [self.source.location(position).name, self.source.episodes.names[position]]

    def _skipped(self) -> Iterator[dict[str, str]]:
        names, lengths = self.source.episodes.names, self.source.episodes.lengths
        for position in np.flatnonzero(~self._kept).tolist():
            why = self.judge.bad.get(position)
            if why is None and lengths[position] == 0:
                why = "it has no rows [V37]"
            file = self.source.location(position).name
            yield {"file": file, "name": names[position], "why": str(why)}

    def _splits(self) -> dict[str, list[int]]:
        at = {int(position): number for number, position in enumerate(self.positions)}
        return {
            name: [at[each] for each in positions if each in at]
            for name, positions in self.source.splits.items()
        }


class _ImageFile:
    """The encoded images of a column, one after the other in an attached file."""

    def __init__(self, directory: Path, key: Key, number: int, is_new: bool) -> None:
        self._directory, self._number = directory, number
        self._path = directory / "images" / f"{'.'.join(key)}{ATTACHED}"
        self._path.parent.mkdir(exist_ok=True)
        self._path.open("wb" if is_new else "ab").close()
        self._size = self._crc32 = 0

    @property
    def end(self) -> tuple[int, int]:
        """Size and checksum of the file up to the end of the last image."""
        return self._size, self._crc32

    def adopt(self, size: int, crc32: int) -> bool:
        """Return whether the file goes on with images up to an end, and count them."""
        found = self._crc32
        with self._path.open("rb") as file:
            file.seek(self._size)
            for start in range(self._size, size, _READ_BYTES):
                found = zlib.crc32(file.read(min(_READ_BYTES, size - start)), found)
        if found == crc32:
            self._size, self._crc32 = size, crc32
        return found == crc32

    def append(self, values: Array) -> npt.NDArray[np.int64]:
        """Append images, and return the references to them, int64 ``[n, 3]``."""
        block = b"".join(values)
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        references = np.full((len(values), REFERENCE_WIDTH), self._number, np.int64)
        references[:, 1], references[:, 2] = self._size + sizes.cumsum() - sizes, sizes
        with disk_errors(self._path, self._size + len(block)), self._path.open("r+b") as file:
            file.truncate(self._size)  # an interrupted conversion may have written more
            file.seek(self._size)
            file.write(block)
        self._crc32 = zlib.crc32(block, self._crc32)
        self._size += len(block)
        return references

    def describe(self) -> AttachedFile:
        """Return the manifest's entry of the file."""
        name = self._path.relative_to(self._directory).as_posix()
        return AttachedFile(name, self._size, self._crc32)
