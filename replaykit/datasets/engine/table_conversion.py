"""Conversion of table sources: read blocks, check values, write columns and the episode table."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ATTACHED, ColumnOutput, attach_files, synced_early
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.dataset_manifest import AttachedFile, joined_crc32
from replaykit.datasets.encoded_frames import REFERENCE_WIDTH
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.layout import ALWAYS
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.plan import (
    Entry,
    EpisodeSpan,
    Excluded,
    Plan,
    PlannedLeaf,
    SourceEpisodes,
    Spans,
)
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.resuming import ImagesPart, Unfinished
from replaykit.datasets.engine.row_batches import store_constant, store_flag
from replaykit.datasets.engine.row_writer import lost_numbers
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    ValueChecks,
)
from replaykit.datasets.engine.write_files import WrittenRows, known_table
from replaykit.datasets.sources import Sources
from replaykit.filesystem import NoRoomError, disk_errors
from replaykit.ted import DEFAULT_DONE_KEYS, TERMINATED, TRUNCATED, Key

_REWARD: Final[Key] = ("next", "reward")
_ENDS: Final[tuple[Key, ...]] = (TERMINATED, TRUNCATED)
_FLAG_ROWS: Final = 1 << 20
_HANDED_BYTES: Final = 1 << 17
"""Least size of a block that a thread works on, because the change of threads costs time, too."""
_READ_BYTES: Final = 1 << 20
_UNUSED: Final = ("missing", "extra", "constant", "all_nan", "duplicate", "unrecorded")
"""Policies about arrays that episodes share or lack, which tables do not have."""


class TableConversion:
    """A table that a conversion plans and writes.

    Args:
        directory: the directory of the data set.
        sources: the files.
        layout: their layout.
        policies: the caller's decisions.
        block_bytes: the size of a block of one column, as a goal.

    Attributes:
        source: the table.
        judge: decides about episodes that break a rule, by their positions in the source.
        columns: the columns that are read, by key.
        dtypes: their stored dtypes.
        kept: the episodes of the last plan, bool ``[E]``.

    Raises:
        CorpusError: a rule is broken. The message names file, episode and rule.
        ValueError: a policy names a key or dtype that the source lacks, or does not apply.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        sources: Sources,
        layout: TableLayout,
        policies: Policies,
        block_bytes: int,
    ) -> None:
        for name in _UNUSED:
            if getattr(policies, name) != getattr(Policies(), name):
                raise ValueError(
                    f"expected the default of the policy {name!r} for the layout {layout.name!r}, "
                    f"which it does not apply to, got {getattr(policies, name)!r}"
                )
        self.directory, self._layout, self._block_bytes = directory, layout, block_bytes
        self.judge = Judge(policies.on_invalid, RuleFindings())
        self.source = layout.open(sources, policies, self.judge)
        self._bad, self._notes = self.judge.bad, self.judge.notes
        policies.check_met(
            [(each.key, None if each.frames else each.dtype) for each in self.source.columns],
            ALWAYS,
        )
        self._wanted = [
            each for each in self.source.columns if each.key in _ENDS or policies.keeps(each.key)
        ]
        self.columns = {each.key: each for each in self._wanted}
        self.dtypes = {
            key: each.dtype if each.frames else policies.stored_dtype(each.dtype)
            for key, each in self.columns.items()
        }

    def plan(self, without: Mapping[str, str], excluded: Excluded, notes: RuleFindings) -> Plan:
        """Return the plan of all episodes that are not left out.

        Raises:
            CorpusError: no episode is left (V38).
        """
        of, source = self.source.episodes, self.source
        stops = of.lengths.cumsum()
        left_out = {
            int(np.searchsorted(stops, base, "right")): why for (*_, base), why in excluded.items()
        }
        self.judge.bad = {**self._bad, **left_out}
        notes.extend(RuleFindings.of(replace(note) for note in self._notes))
        self.kept = of.lengths > 0
        self.kept[list(self.judge.bad)] = False
        at = np.flatnonzero(self.kept)
        if not len(at):
            home = Location(Path(self._layout.name), self._layout.name)
            where = source.location(0) if len(of.lengths) else home
            raise where.error("no episode has rows that can be converted", "V38")
        episodes = _planned(of, at)
        numbers = {position: number for number, position in enumerate(at.tolist())}
        return Plan(
            layout=self._layout,
            leaves=[self._leaf(column) for column in self._wanted],
            facts={
                key: self._facts_of(column)
                for key, column in self.columns.items()
                if key not in _ENDS
            },
            episodes=episodes,
            spans=episodes.spans,
            location=lambda number: source.location(int(at[number])),
            first=source.location(int(at[0])),
            detects_copies=any(
                key[0] == "observation" and not column.frames
                for key, column in self.columns.items()
            ),
            left_out=[dict(entry) for entry in source.left_out],
            splits={
                name: [numbers[each] for each in positions if each in numbers]
                for name, positions in source.splits.items()
            },
        )

    def _leaf(self, column: SourceColumn) -> PlannedLeaf:
        return PlannedLeaf(
            path=column.source,
            paths=(column.source,),
            role="info",
            shape=(REFERENCE_WIDTH,) if column.frames else column.shape,
            dtype=column.dtype,
            stored=np.dtype(np.int64) if column.frames else self.dtypes[column.key],
            targets=() if column.key in _ENDS else (Target(column.key, 0),),
        )

    def _facts_of(self, column: SourceColumn) -> dict[str, Any]:
        is_cast = self.dtypes[column.key] != column.dtype
        return {
            "source": column.source,
            **({"frames": dict(column.frames)} if column.frames else {}),
            **({"source_dtype": column.dtype.name} if is_cast else {}),
        }

    def write(
        self,
        plan: Plan,
        create: Callable[[], dict[Key, ColumnOutput]],
        *,
        notes: RuleFindings,
        advance: Callable[[int], object],
        unfinished: Unfinished[ImagesPart],
    ) -> WrittenRows:
        """Write the rows of a plan, which may have the images of ``unfinished``.

        The result has no table if an episode broke a rule. The rows must then be planned again.

        Args:
            plan: the last plan.
            create: returns the columns, which may have the images.
            notes: collects the findings.
            advance: called with the number of bytes that were written.
            unfinished: the images that are finished, to which further ones are added.

        Raises:
            CorpusError: a rule is broken. The message names file, episode and rule.
            OSError: a file cannot be read, or no space is left.
        """
        self.judge.notes, known = notes, set(self.judge.bad)
        checks = ValueChecks(self.source, [*self.columns.values()], self.kept, self.judge)
        written = WrittenRows({}, {}, {})
        try:
            columns = create()
        except NoRoomError:
            # A wrong shape or length breaks a rule. It must not look like a disk that is too small.
            self._read_first(known)
            if self.judge.bad.keys() == known:
                raise
        else:
            writer = _Writer(self, plan, checks, columns, unfinished, advance)
            written = writer.write(self._block_bytes)
        numbers = self.kept.cumsum() - 1
        for position in sorted(self.judge.bad.keys() - known):
            why = self.judge.bad[position]
            if self.kept[position]:
                written.bad[int(numbers[position])] = why
            else:
                self._bad[position] = why
        facts = self.source.facts
        written.report = {
            "skipped": list(self._skipped()),
            "about": dict(facts),
            **({"fps": facts["fps"]} if "fps" in facts else {}),
        }
        return written

    def _read_first(self, known: Collection[int]) -> None:
        """Read until each column has given a row, or to the end if an episode is bad."""
        unread = set(self.columns)
        for block in self.source.blocks(self.kept, list(self.columns), 1):
            unread -= block.keys()
            if not unread and self.judge.bad.keys() == known:
                return

    def _skipped(self) -> Iterator[Entry]:
        for position in np.flatnonzero(~self.kept).tolist():
            why = self.judge.bad.get(position, "it has no rows [V37]")
            name = self.source.episodes.names[position]
            yield {"file": self.source.location(position).name, "name": name, "why": why}


def _planned(of: TableEpisodes, at: npt.NDArray[np.int64]) -> SourceEpisodes:
    """Return some episodes of a table, whose rows follow one another."""
    lengths, spans = of.lengths[at], Spans()
    starts = lengths.cumsum() - lengths
    episodes = SourceEpisodes(spans, is_whole=True)
    values = {
        "file": of.files[at],
        "number": of.numbers[at],
        "base": of.lengths.cumsum()[at] - lengths,
        "records": lengths,
        "rows": lengths,
        "start": starts,
        "is_open": False,
        "source_seed": of.seeds[at],
        "success": of.success[at],
        "terminated": -1,
    }
    episodes.extend(values, {})
    each = zip(at.tolist(), of.files[at].tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for number, (position, file, start, rows) in enumerate(each):
        place = (file, of.names[position], rows, number, number + 1, start, rows)
        spans.append(EpisodeSpan(*place, leaves=frozenset(), form=0))
    return episodes


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
        table: TableConversion,
        plan: Plan,
        checks: ValueChecks,
        columns: dict[Key, ColumnOutput],
        unfinished: Unfinished[ImagesPart],
        advance: Callable[[int], object],
    ) -> None:
        self._table, self._plan, self.columns = table, plan, columns
        self.source, self.judge, self._wanted = table.source, table.judge, table.columns
        self._unfinished, self._advance = unfinished, advance
        self._checks, self._where, self.positions = checks, checks.where, checks.positions
        self._starts, self._stops = checks.starts, checks.stops
        self._known = len(table.judge.bad)
        self._ends = {key: np.zeros(len(self._stops), bool) for key in _ENDS}
        self._returns = np.full(len(self._stops), np.nan)
        plain = [key for key, column in table.columns.items() if not column.frames]
        self._statistics = {key: Statistics() for key in plain if key not in _ENDS}
        self._digests = {
            key: _Digests(self._stops) for key in plain if key[0] in ("observation", "action")
        }
        self._handed: list[Future[None]] = []
        self._at = dict.fromkeys(self._wanted, 0)
        slow = [key for key in getattr(self.source, "slow", ()) if key in self._wanted]
        self._slow = {key: at for at, key in enumerate(slow)}
        self._of_episode = {key: Statistics() for key in slow}
        images = [c.key for c in self._wanted.values() if c.frames and c.frames["kind"] == "image"]
        self._images = {
            key: _ImageFile(
                table.directory, key, len(self.source.attached) + at, not unfinished.finished
            )
            for at, key in enumerate(images, 1)
        }

    # -- blocks -----------------------------------------------------------------------------------

    def write(self, block_bytes: int) -> WrittenRows:
        """Write all blocks of the source, then flags and ids."""
        at, source, keys = self._at, self.source, list(self._wanted)
        if self._slow:
            source.is_stored = self._adopt  # type: ignore[attr-defined]
        with synced_early(self.columns), ThreadPoolExecutor(2) as self._threads:
            for block in source.blocks(self._table.kept, keys, block_bytes):
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
                return WrittenRows({}, {}, {})  # other rows will be written without these episodes
            for key, count in at.items():
                if count != self._plan.rows:
                    what = f"has {count} rows, expected {self._plan.rows}"
                    raise self._where(len(self._stops) - 1, key).error(what, "V34")
            self._write_flags()
        table = {
            **known_table(self._plan),
            "terminated": self._ends[TERMINATED],
            "truncated": self._ends[TRUNCATED],
            "return": self._returns,
        }
        if self._plan.detects_copies:
            table["digest"] = self._digest()
        return WrittenRows(self.columns, table, self._statistics, attached=self._attached())

    def _attached(self) -> Iterator[AttachedFile]:
        yield from attach_files(self._table.directory, self.source.attached)
        for images in self._images.values():
            yield images.describe()

    def _write(self, key: Key, values: Array, start: int) -> None:
        column = self._wanted[key]
        stop = start + len(values)
        if (
            stop > self._plan.rows
            or values.shape[1:] != column.shape
            or values.dtype != column.dtype
        ):
            raise self._where(self._episode(min(start, self._plan.rows - 1)), key).error(
                f"is {values.dtype} {list(values.shape[1:])} up to row {stop}, expected "
                f"{column.dtype} {list(column.shape)} up to row {self._plan.rows}",
                "V11",
            )
        if len(self.judge.bad) > self._known:  # the rows will be written again without them
            self._checks.check(key, values, start)
            return
        if key in self._ends:
            flags = values.reshape(-1).astype(bool)
            episodes, lasts = self._checks.check_ends(flags, key, start)
            self._ends[key][episodes] = flags[lasts]
            return
        dtype = self._table.dtypes[key]
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
        lasts, rows = self._stops - 1, range(self._plan.rows)
        ends = {**self._ends, ("next", "done"): np.ones(len(lasts), bool)}
        for key, is_end in ends.items():
            store_flag(rows, key, lasts[is_end], is_set=True, block=_FLAG_ROWS, put=self._put)
        for key, name in ((("episode",), "number"), (("seed",), "file")):
            each = self._plan.episodes.column(name).astype(np.int64)
            store_constant(rows, self._starts, key, each, block=_FLAG_ROWS, put=self._put)
        for name in DEFAULT_DONE_KEYS:
            self.columns[name,].finish()

    def _put(self, key: Key, row: int, values: Array) -> None:
        self.columns[key].write(row, values)

    def _digest(self) -> npt.NDArray[np.uint8]:
        """Return the digest of observations and actions of each episode, uint8 ``[E, 16]``."""
        each = zip(*(digests.found for digests in self._digests.values()), strict=True)
        found = b"".join(hashlib.sha256(b"".join(parts)).digest()[:16] for parts in each)
        return np.frombuffer(found, np.uint8).reshape(-1, 16)


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
