"""Checks of the values and rows of episodes, and the reasons for their ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput, torch_dtype
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.layout import Ends, Flags, Layout
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.policies import Judge
from replaykit.datasets.engine.row_batches import Runs, Stretch, StretchReader
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

Index = npt.NDArray[np.int64]


def is_image(leaf: PlannedLeaf) -> bool:
    """Return whether a leaf counts as images: an observation of bytes ``[H, W, ...]``."""
    return leaf.role == "observation" and leaf.dtype == np.uint8 and len(leaf.shape) >= 2


class FrameChecks:
    """A check that the images of a leaf change within each episode (rule V26).

    The caller passes the images of one episode after another.

    Cost: usually only the first two images of an episode are compared. If these are equal, all
    images are compared.
    """

    def __init__(self, path: str, notes: RuleFindings) -> None:
        self._path = path
        self._notes = notes
        self._first: npt.NDArray[Any] | None = None
        self._seen = 0
        self._is_still = True

    def check(self, images: npt.NDArray[Any], *, is_end: bool, location: Location) -> None:
        """Check the next images of an episode. ``is_end`` marks the last block of images."""
        if self._first is None:
            self._first = images[0].copy()
        if self._is_still:
            # Usually the second image already differs.
            self._is_still = bool((images[:2] == self._first).all()) and bool(
                (images[2:] == self._first).all()
            )
        self._seen += len(images)
        if not is_end:
            return
        if self._is_still and self._seen > 1:
            what = "the same image" if self._first.any() else "black images"
            text = f"{self._path} holds nothing but {what} throughout an episode"
            self._notes.add("V26", text, location, name=self._path)
        self._first, self._seen, self._is_still = None, 0, True


NEVER: Final = int(np.iinfo(np.int64).max)
"""The first record in `StretchChecks.ends` of an end that is never set."""
_SHORT_ROWS: Final = 32
"""Greatest length of episodes whose rewards are summed together, in rows."""


class StretchChecks:
    """The checks of the episodes of one stretch, block by block of each leaf.

    Args:
        stretch: the episodes.
        judge: decides about episodes that break a rule.
        outcomes: an offset for each field of ends, by its position in the layout. Row ``t`` takes
            record ``t + outcomes[field]``.

    Attributes:
        reward: the sum of the rewards of each episode.
        ends: for each field of ends, by its position in the layout, two arrays with one value per
            episode. The first array has the first record at which the end is set, or `NEVER`. The
            second array is True if the end is set at the record that the last row takes.
    """

    def __init__(self, stretch: Stretch, judge: Judge, outcomes: Mapping[int, int]) -> None:
        count = len(stretch.at)
        self._outcomes = outcomes
        self.reward = np.zeros(count)
        self.ends: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}
        self._digests = [hashlib.sha256() for _ in range(count)]
        self._stretch = stretch
        self._at = stretch.at
        self._judge = judge
        self._clocks: dict[int, npt.NDArray[Any]] = {}
        self._frames: dict[int, FrameChecks] = {}

    def check(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: Runs | None
    ) -> None:
        """Check one block of a leaf according to the role of the leaf.

        ``runs`` has the records of the block that are stored in rows.
        """
        if leaf.role == "observation":
            self._require_finite(leaf, start, block, "V21", None)
            if is_image(leaf) and not leaf.is_successor:
                self._check_values(leaf, start, block)
            if not leaf.is_successor:
                self._digest(start, block, leaf.extra)
        elif leaf.role == "action":
            # Actions that are not stored may have any value. They are actions after the last step,
            # or actions that the caller leaves out.
            if runs is not None:
                self._require_finite(leaf, start, block, "V20", runs)
                self._require_bounds(leaf, start, block, runs)
            self._digest(start, block, leaf.extra)
        elif leaf.role == "reward":
            self._require_finite(leaf, start, block, "V21", runs)
            if runs is not None:
                self._sum(start, block, runs)
        elif leaf.role in ("terminated", "truncated"):
            self._require_finite(leaf, start, block, "V30", None)
            self._record_ends(leaf, start, block)
        elif leaf.role == "time":
            self._require_progress(leaf, start, block)

    def finals(self, field: int) -> npt.NDArray[np.int64]:
        """Return the record of a field of ends that the last row of each episode takes."""
        return self._at.bases + self._at.rows - 1 + self._outcomes[field]

    def ends_of(self, episode: int) -> dict[int, Ends]:
        """Return where each field of ends is set in an episode, after all blocks.

        Args:
            episode: the position of the episode in the stretch.
        """
        found = {}
        for field, (first, last) in self.ends.items():
            base, at = int(self._at.bases[episode]), int(first[episode])
            records = int(self.finals(field)[episode]) - base + 1
            first_set = None if at == NEVER else at - base
            found[field] = Ends(records, first_set, bool(last[episode]))
        return found

    def digests(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the first bytes of the SHA-256 of observations and actions, ``[E, nbytes]``."""
        joined = b"".join([digest.digest()[:nbytes] for digest in self._digests])
        return np.frombuffer(joined, np.uint8).reshape(-1, nbytes)

    def _digest(self, start: int, block: npt.NDArray[Any], extra: int) -> None:
        size = block[:1].nbytes
        content = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        where, begins, ends = self._parts(start, block, extra)
        bounds = (begins * size).tolist(), (ends * size).tolist()
        for digest, begin, end in zip(self._digests[where], *bounds, strict=True):
            digest.update(content[begin:end])

    def _parts(self, start: int, block: npt.NDArray[Any], extra: int) -> tuple[slice, Index, Index]:
        """Return the episodes with records in a block, and the bounds of their records there."""
        stop = start + len(block)
        first = int(np.searchsorted(self._at.stops + extra, start, "right"))
        last = int(np.searchsorted(self._at.bases, stop, "left"))
        begins = np.maximum(self._at.bases[first:last], start) - start
        ends = np.minimum(self._at.stops[first:last] + extra, stop) - start
        return slice(first, last), begins, ends

    def _check_values(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        frames = self._frames.setdefault(leaf.field, FrameChecks(leaf.path, self._judge.notes))
        where, begins, ends = self._parts(start, block, leaf.extra)
        bounds = zip(begins.tolist(), ends.tolist(), strict=True)
        for i, (begin, end) in enumerate(bounds, where.start):
            episode = self._stretch.episode(i)
            location = self._stretch.location.at(
                group=episode.group or None,
                key=leaf.path,
                record=None if episode.is_whole else episode.base,
            )
            is_end = start + end == int(self._at.stops[i]) + leaf.extra
            frames.check(block[begin:end], is_end=is_end, location=location)

    def _require_bounds(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: Runs
    ) -> None:
        """Report stored actions outside the bounds in the source (rule V25)."""
        if leaf.bounds is None or block.dtype.kind not in "iuf":
            return
        flat = block.reshape(len(block), -1)
        with np.errstate(invalid="ignore"):
            least, most = (np.asarray(side) for side in leaf.bounds)
            outside = np.asarray(((flat < least) | (flat > most)).any(axis=1))
        stored = np.zeros(len(block), np.bool_)
        runs.within(start, start + len(block)).mark(stored, start)
        for record in (start + np.flatnonzero(outside & stored)).tolist():
            text = f"{leaf.path} is outside of the bounds that the source states"
            at = self._stretch.location_at(record, leaf.path)
            self._judge.notes.add("V25", text, at, name=leaf.path)

    def _sum(self, start: int, block: npt.NDArray[Any], runs: Runs) -> None:
        here = runs.within(start, start + len(block))
        if not len(here):
            return
        values = here.records_in(block.reshape(len(block)), start)
        # Rows have no gaps, so an episode begins at the end of the preceding episode.
        row, stop = int(here.rows[0]), int(here.rows[-1] + here.counts[-1])
        first, last = self._at.at_row(row), self._at.at_row(stop - 1)
        begins = np.maximum(self._at.starts[first : last + 1] - row, 0)
        sums = np.add.reduceat(values, begins, dtype=np.float64)
        counts = np.diff(begins, append=len(values))
        for i in np.flatnonzero(counts > _SHORT_ROWS).tolist():
            # Pairwise summation loses fewer digits than sequential summation.
            part = values[begins[i] : begins[i] + counts[i]]
            sums[i] = part.sum(dtype=np.float64)
        self.reward[first : last + 1] += sums

    def _require_finite(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], rule: str, runs: Runs | None
    ) -> None:
        if block.dtype.kind not in "fc" or not block.size or np.isfinite(block).all():
            return
        good = np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if runs is not None:
            stored = np.zeros(len(block), np.bool_)
            runs.within(start, start + len(block)).mark(stored, start)
            good |= ~stored
        for i, record in self._first_in_each(start + np.flatnonzero(~good), leaf.extra):
            location = self._stretch.location_at(record, leaf.path)
            what = f"the {leaf.role} holds NaN or infinity"
            self._judge.fail(self._stretch.first + i, location, what, rule)

    def _record_ends(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        if leaf.field not in self.ends:
            count = len(self._at.bases)
            self.ends[leaf.field] = (np.full(count, NEVER), np.zeros(count, np.bool_))
        first, last = self.ends[leaf.field]
        records = start + np.flatnonzero(block.reshape(len(block)))
        episodes, records = self._in_episodes(records, leaf.extra)
        np.minimum.at(first, episodes, records)
        last[episodes[records == self.finals(leaf.field)[episodes]]] = True

    def _require_progress(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind not in "iuf" or not block.size:
            return
        before = self._clocks.get(leaf.field, block[:0])
        known, times = len(before), np.concatenate([before, block])
        self._clocks[leaf.field] = block[-1:]
        if len(times) < 2:
            return
        grows = (times[1:] > times[:-1]).reshape(len(times) - 1, -1).all(axis=1)
        if grows.all():
            return
        # Time may restart at the beginning of an episode, and has no meaning between episodes.
        records = np.setdiff1d(start - known + 1 + np.flatnonzero(~grows), self._at.bases)
        for _, record in self._first_in_each(records, leaf.extra):
            text = f"{leaf.path} does not increase strictly"
            at = self._stretch.location_at(record, leaf.path)
            self._judge.notes.add("V27", text, at, name=leaf.path)

    def _first_in_each(self, records: Index, extra: int) -> Iterator[tuple[int, int]]:
        """Yield each episode that contains any of the records, with the first such record."""
        episodes, records = self._in_episodes(records, extra)
        found, at = np.unique(episodes, return_index=True)
        yield from zip(found.tolist(), records[at].tolist(), strict=True)

    def _in_episodes(self, records: Index, extra: int) -> tuple[Index, Index]:
        """Return the episodes of records, and the records.

        Records of episodes that were left out are ignored.
        """
        episodes = np.searchsorted(self._at.stops + extra, records, "right")
        known = episodes < len(self._at.stops)
        records, episodes = records[known], episodes[known]
        inside = records >= self._at.bases[episodes]
        return episodes[inside], records[inside]


Marks = npt.NDArray[np.bool_]


class EndFlags:
    """The flags of the last rows of episodes, as the layout determines them.

    Args:
        layout: the layout that the files resolved to.
        notes: collects the findings of the layout.

    Attributes:
        outcomes: the offset of each field of ends, by its position in the layout. Row ``t`` takes
            record ``t + outcomes[field]``.
    """

    def __init__(self, layout: Layout, notes: RuleFindings) -> None:
        self._layout = layout
        self._notes = notes
        self._names = layout.end_names
        self.outcomes = {
            at: layout.fields[at].end_offset(layout.alignment) for at in layout.end_names
        }
        # A layout that overrides `flags` is called for each episode separately.
        self.is_own = type(layout).flags is not Layout.flags

    def of(
        self,
        stretch: Stretch,
        checks: StretchChecks,
        last: Mapping[str, npt.NDArray[Any]],
        condemn: Callable[[int, CorpusError], None],
    ) -> dict[str, Marks]:
        """Return the flags of the last row of each episode, by ``DEFAULT_DONE_KEYS``.

        Args:
            stretch: the episodes.
            checks: the checks of the episodes, after all blocks.
            last: the last record of each required field, ``[E, ...]``, if each span is one episode.
            condemn: called for each episode that breaks a rule, with its position in the stretch
                and the error.

        For an episode that breaks a rule, ``done`` is False.
        """
        count = len(stretch.at)
        found = {name: np.zeros(count, np.bool_) for name in DEFAULT_DONE_KEYS}
        asked = range(count) if self.is_own else self._by_rule(stretch, checks, found)
        for i in asked:
            mine = {path: records[i : i + 1] for path, records in last.items()}
            try:
                flags = self._ask(stretch, checks, i, mine)
            except CorpusError as error:
                condemn(i, error)
                continue
            found["terminated"][i], found["truncated"][i] = flags.terminated, flags.truncated
            found["done"][i] = True
        return found

    def _ask(
        self, stretch: Stretch, checks: StretchChecks, i: int, last: Mapping[str, npt.NDArray[Any]]
    ) -> Flags:
        episode, location = stretch.episode(i), stretch.location_of_episode(i)
        facts = episode.facts
        if self._layout.is_open and not episode.is_open:
            # The step that terminated is not stored as a row.
            facts = replace(facts, terminated=None)
        ends = {self._names[at]: found for at, found in checks.ends_of(i).items()}
        flags = self._layout.flags(ends, last, facts, location, self._notes)
        if not (flags.terminated or flags.truncated):
            raise location.error("the episode does not end at its last row", "V31")
        return flags

    def _by_rule(
        self, stretch: Stretch, checks: StretchChecks, found: dict[str, Marks]
    ) -> Sequence[int]:
        """Apply the rule of `Layout.flags`, and return the episodes that break it."""
        at, layout = stretch.at, self._layout
        said = {
            # The information that does not come from the arrays.
            "terminated": (stretch.column("terminated") == 1)
            & (at.is_open if layout.is_open else True),
            "truncated": np.zeros(len(at.bases), np.bool_),
        }
        refused = np.zeros(len(at.bases), np.bool_)
        for field, (first, last) in checks.ends.items():
            entry = layout.fields[field]
            if not entry.held:
                refused |= first < checks.finals(field)
            said[entry.role] |= last
        found["terminated"][:] = said["terminated"] & ~refused
        found["truncated"][:] = (said["truncated"] | ~said["terminated"]) & ~refused
        found["done"][:] = ~refused
        return [int(i) for i in np.flatnonzero(refused)]


_COMPARED_BYTES: Final = 1 << 20
"""Number of bytes in one comparison."""


def check_alignment(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    start: int,
    values: npt.NDArray[Any],
    row: int,
    entries: npt.NDArray[Any],
) -> None:
    """Compare some rewards and final states with the records of the alignment.

    The rewards of the first, a middle and the last row of every episode are compared (rule V24).
    The state after the last row is also compared (rule V23). Other leaves are not compared. Cost:
    O(E) for each block, plus the compared entries.

    Args:
        stretch: the stretch that contains the rows.
        leaf: the leaf that the block belongs to.
        target: the column.
        start: the first record of the block.
        values: the records of the block, in the form in which they are stored.
        row: the first row that was stored from the block.
        entries: the values that were stored from ``row`` on.

    Raises:
        RuntimeError: a row holds a wrong record, which is a fault of this engine.
    """
    at = stretch.at
    first, offset = at.bases + target.offset, at.rows - 1
    if leaf.role == "reward":
        rule, steps = "V24", np.concatenate([np.zeros_like(offset), at.rows // 2, offset])
        episodes = np.tile(np.arange(len(at)), 3)
    elif leaf.role == "observation" and target.is_after:
        rule, episodes = "V23", np.flatnonzero(~at.is_open)
        steps = offset[episodes]
    else:
        return
    records = first[episodes] + steps
    here = (records >= start) & (records < start + len(values))
    records, rows = records[here], (at.starts[episodes] + steps)[here]
    # A record after the last one of its episode belongs to the next episode.
    wrong = records >= at.stops[episodes[here]] + leaf.extra
    wrong |= (rows < row) | (rows >= row + len(entries))
    known = np.flatnonzero(~wrong)
    step = max(1, _COMPARED_BYTES // max(1, entries[:1].nbytes))
    for begin in range(0, len(known), step):
        some = known[begin : begin + step]
        wrong[some] = _differing(entries[rows[some] - row], values[records[some] - start])
    if wrong.any():
        record = int(records[np.argmax(wrong)])
        what = "the reward" if rule == "V24" else "the final state"
        raise RuntimeError(
            f"{stretch.location_at(record, leaf.path)}: expected {what} of this "
            f"record, but row {int(rows[np.argmax(wrong)])} holds that of another one [{rule}]"
        )


_READ_BYTES: Final = 1 << 20
"""Number of bytes of a column in one check. They stay in a fast cache."""
_ROWS: Final = 1 << 15
"""Number of rows in one check. Row numbers take more memory than narrow entries."""


def check_blanks(
    stretch: Stretch,
    leaves: Sequence[PlannedLeaf],
    columns: Mapping[Key, ColumnOutput],
    reader: StretchReader,
    bad: Collection[int],
) -> None:
    """Check that rows that contain only zeros are also zero in the source (rule V28).

    Args:
        stretch: the stretch that contains the rows, which were all written.
        leaves: the leaves that fill the rows.
        columns: the column files.
        reader: reads the source again for rows with only zeros.
        bad: positions of the episodes to leave out.

    Raises:
        RuntimeError: the source has other values for such a row, which is a fault of this engine.

    Cost: the actions are read back. For rows with zero actions, the other columns are also read, in
    the order of their width, narrowest first. Memory: a block of 1 MiB. If a row has only zeros, a
    block of the source is also in memory.
    """
    filled = [
        (leaf, target)
        for leaf in leaves
        if stretch.leaves.issuperset(leaf.paths)
        for target in leaf.targets
        if columns[target.key].spec.entry_bytes
    ]
    # Actions are rarely zero, so usually no other column is read.
    filled.sort(key=lambda pair: (pair[0].role != "action", pair[0].record_bytes))
    if not filled:
        return
    (_, narrow), rest = filled[0], filled[1:]
    stop = stretch.start + stretch.rows
    step = min(_ROWS, max(1, _READ_BYTES // columns[narrow.key].spec.entry_bytes))
    for start in range(stretch.start, stop, step):
        blank = _blank(columns[narrow.key], np.arange(start, min(start + step, stop)))
        for _, target in rest:
            if not len(blank):
                break
            blank = _blank(columns[target.key], blank)
        episodes = np.searchsorted(stretch.at.starts, blank, "right") - 1
        good = np.isin(episodes + stretch.first, list(bad), invert=True)
        if good.any():
            for leaf, target in filled:
                _check_source(stretch, leaf, target, reader, blank[good], episodes[good])


def _blank(column: ColumnOutput, rows: Index) -> Index:
    """Return the rows among ``rows`` that are zero in a column."""
    found = [rows[:0]]
    for some in _together(rows, max(1, _READ_BYTES // column.spec.entry_bytes)):
        block = column.read(int(some[0]), int(some[-1] - some[0]) + 1)
        is_blank = np.logical_not(block.any(axis=1))
        found.append(some[np.asarray(is_blank)[some - some[0]]])
    return np.concatenate(found)


def _together(numbers: Index, most: int) -> Iterator[Index]:
    """Yield ascending numbers in pieces that each span fewer than ``most`` numbers."""
    begin = 0
    while begin < len(numbers):
        end = int(np.searchsorted(numbers, numbers[begin] + most))
        yield numbers[begin:end]
        begin = end


def _check_source(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    reader: StretchReader,
    rows: Index,
    episodes: Index,
) -> None:
    """Check that the source records of rows that read back as zero are zero."""
    at = stretch.at
    records = at.bases[episodes] + target.offset + rows - at.starts[episodes]
    # The last row of an open episode repeats the state that it started from.
    records = np.minimum(records, at.stops[episodes] + leaf.extra - 1)
    most = max(1, _READ_BYTES // max(1, leaf.record_bytes))
    for some in _together(records, stretch.records if not stretch.is_single else most):
        first, stop = int(some[0]), int(some[-1]) + 1
        if not stretch.is_single:
            first, stop = 0, stretch.records
        elif leaf.is_per_episode:
            first, stop = 0, 1
        block = reader.read(leaf, first, stop)
        values = block if leaf.is_per_episode and stretch.is_single else block[some - first]
        with np.errstate(over="ignore", invalid="ignore"):
            # Values that are too small for the column's dtype become zero.
            values = values.astype(leaf.stored) if leaf.stored.kind in "fc" else values
        filled = (values != 0).reshape(len(values), -1).any(axis=1)
        if filled.any():
            which = int(np.argmax(filled))
            row = int(rows[np.searchsorted(records, some[which])])
            raise RuntimeError(
                f"{stretch.location_at(int(some[which]), leaf.path)}: this record was not "
                f"stored: row {row} is zero in every column [V28]"
            )


def check_successor(
    stretch: Stretch,
    target: Target,
    row: int,
    stored: npt.NDArray[Any],
    columns: Mapping[Key, ColumnOutput],
    judge: Judge,
    tails: dict[Key, bytes],
) -> None:
    """Compare next observations with the observations of the following rows (V22).

    In flat arrays, the steps that break the rule are also counted (rule V40), because the
    conversion may continue.

    Args:
        stretch: the stretch that contains the rows. All its observations were written.
        target: the column of next observations.
        row: the first row.
        stored: the values that were stored from ``row`` on.
        columns: the column files.
        judge: receives the episodes that break the rule.
        tails: by key, the last next observation of the preceding part of the same arrays. The call
            compares it now, because the row after it had not been written before. The call then
            replaces it by the last next observation of this part.
    """
    column = columns.get(target.key[1:])
    if (
        column is None
        or target.key[0] != "next"
        or column.spec.dtype != torch_dtype(stored.dtype)
        or not column.spec.entry_bytes
    ):
        return
    size = column.spec.entry_bytes
    tail = tails.pop(target.key, None) if row == stretch.start else None
    if tail is not None and stretch.spans[0].base and column.read(row, 1).tobytes() == tail:
        _report_end_without_reset(stretch, target, -1, judge)
    if row + len(stored) == stretch.start + stretch.rows:
        tails[target.key] = np.ascontiguousarray(stored[-1]).tobytes()
    end = min(row + len(stored), stretch.start + stretch.rows - 1)
    if end <= row:
        return
    differs = np.empty(end - row, np.bool_)
    step = max(1, _COMPARED_BYTES // size)
    for begin in range(0, end - row, step):
        given = stored[begin : min(begin + step, end - row)]
        following = column.read(row + 1 + begin, len(given))
        differs[begin : begin + len(given)] = _differing(following, given)
    finals = stretch.at.finals
    lasts = finals[(finals >= row) & (finals < end)] - row
    for at in lasts[~differs[lasts]].tolist():
        _report_end_without_reset(stretch, target, stretch.at.at_row(row + at), judge)
    differs[lasts] = False
    rows = row + np.flatnonzero(differs)
    episodes, at = np.unique(
        np.searchsorted(stretch.at.starts, rows, "right") - 1, return_index=True
    )
    if len(rows) and not stretch.episode(0).is_whole:
        i = int(episodes[0])
        record = int(stretch.at.bases[i] + rows[0] - stretch.at.starts[i])
        judge.notes.add(
            "V40",
            "the next observation of a step that no flag ends is not the observation of the next "
            "record: rows of several episodes are mixed, or an end is not flagged",
            stretch.location_at(record, ".".join(target.key)),
            count=len(rows),
        )
    for i, first in zip(episodes.tolist(), rows[at].tolist(), strict=True):
        record = int(stretch.at.bases[i] + first - stretch.at.starts[i])
        judge.fail(
            stretch.first + i,
            stretch.location_at(record, ".".join(target.key)),
            "the state that the step arrived at is not the one that the next step starts "
            "from: rows of several episodes are mixed, or an end is not flagged",
            "V22",
        )


def _differing(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries that differ in any byte, so that NaN equals itself."""
    size = one[:1].nbytes
    if not size:
        return np.zeros(len(one), np.bool_)
    wide: Any = next(kind for kind in (np.uint64, np.uint32, np.uint16, np.uint8)
                     if size % np.dtype(kind).itemsize == 0)  # fmt: skip
    first, second = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(wide) for array in (one, other)
    )
    differs = np.zeros(len(one), np.bool_)
    differs[np.flatnonzero(first != second) // (size // np.dtype(wide).itemsize)] = True
    return differs


def _report_end_without_reset(stretch: Stretch, target: Target, i: int, judge: Judge) -> None:
    """Report an end after which the environment was not reset (rule V39).

    ``i`` is the position of the episode that ends in the stretch. It is -1 for the episode before
    the stretch.
    """
    if target.key[:2] != ("next", "observation"):
        return
    episode, following = stretch.episode(i), stretch.episode(i + 1)
    is_adjacent = following.base == episode.base + episode.records
    if is_adjacent and following.group == episode.group:
        record = int(stretch.at.bases[i + 1]) - 1
        text = (
            "an end is flagged, but the next episode continues from the state that the "
            "step arrived at: the environment was not reset there"
        )
        judge.notes.add("V39", text, stretch.location_at(record, ".".join(target.key)))
