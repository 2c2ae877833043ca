"""Update the episode indexes of a storage, also across loads."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from replaykit.declared import decode_state
from replaykit.episodes import BoundaryRule, CutMarks, EpisodeIndex
from replaykit.episodes.boundaries import RESTORED, SEVERED
from replaykit.schema import Rows, Schema
from replaykit.storages.change_log import ChangeKind, LoggedChange
from replaykit.storages.episode_tags import (
    EpisodeData,
    EpisodeState,
    EpisodeTags,
    MovedPositions,
    heads_of,
    moved_tags,
)
from replaykit.storages.ledger import Ledger
from replaykit.structure import Branch, Path
from replaykit.ted import end_flags, format_key, unused_flags

if TYPE_CHECKING:
    from replaykit.storages.column_storage import ColumnStorage
    from replaykit.storages.removal import Replacement

Array = np.ndarray[Any, Any]

_DEFAULT = BoundaryRule()

_PENDING = (ChangeKind.APPEND, ChangeKind.CUT, ChangeKind.MOVE)
"""Kinds of changes after which rows have to be indexed before they are overwritten."""


class EpisodeIndexes:
    """The episode indexes of a storage. The storage's lock guards them.

    The index of the default rule exists from the first write on. The index of any other rule exists
    as long as a caller holds a reference to it.
    """

    def __init__(self, storage: ColumnStorage) -> None:
        self._storage = weakref.ref(storage)
        self._marks = CutMarks()
        self._is_read = False  # True once a reader has requested an index
        # A saved state that is not loaded yet, and whether open episodes must still be ended after
        # a restart; see ``marks``.
        self._restoring: dict[str, Any] | None = None
        self._restarted = False
        # True if rows came by other means than a write, and no row was overwritten since. Before
        # the next write, the indexes and parts of the buffer may have to read rows and files.
        self.loaded = True
        # The number of the ledger's log up to which the indexes have followed it. Placed rows and
        # clears do not count, because an index finds them in the ledger.
        self.seen = 0
        self._main: EpisodeIndex | None = None
        self._has_others = False  # asked at each write, where a length costs two calls
        self._others: weakref.WeakValueDictionary[BoundaryRule, EpisodeIndex] = (
            weakref.WeakValueDictionary()
        )
        self._saved: dict[str, Any] | None = None
        # Values of episodes, and the saved values that are not loaded yet.
        self._tags = EpisodeTags()
        self._saved_tags: tuple[Array, dict[str, Any]] | None = None
        # Tags of rows, by element, that `set_tags` has not set yet.
        self._new_tags: tuple[Array, Mapping[str, Any]] | None = None
        # Returns the begins of episodes that other processes know; None if no other process writes.
        self.heads_from: Callable[[], dict[str, Any] | None] | None = None

    @property
    def storage(self) -> ColumnStorage:
        """The indexed storage."""
        storage = self._storage()
        assert storage is not None
        return storage

    @property
    def marks(self) -> CutMarks:
        """The marks of cut streams.

        Cost: none, except at the first use after two events. One event is a load of interleaved
        streams. The other is that rows with a table of row ids were opened in place. Such a first
        use makes a pass over all rows to find the newest rows.
        """
        self.settle()
        return self._marks

    def settle(self) -> None:
        """Load a pending saved state, and make the cut of a pending restart.

        All methods that read rows as streams, write rows or edit rows call this first.
        """
        if self._restoring is not None:
            ledger = self.storage.ledger
            self._load(self._restoring, MovedPositions(ledger, ledger, None))
            self._restoring = None
        if self._restarted:
            try:
                self._restarted = False
                self.cut(code=RESTORED)
            except BaseException:
                self._restarted = True
                raise

    def of(self, rule: BoundaryRule = _DEFAULT) -> EpisodeIndex:
        """Return the index of a rule, up to date.

        Raises:
            KeyError: the storage lacks a column that the rule names.
            RuntimeError: nothing was written yet, or the rows are not TensorDicts.
        """
        if self._restoring is not None or self._restarted:
            self.settle()
        storage = self._storage()
        assert storage is not None
        if self.seen != storage.ledger.log.number:
            self._catch_up()
        found = self._main if rule is _DEFAULT or rule == _DEFAULT else self._others.get(rule)
        if found is None:
            root = storage.require().schema.root
            if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
                raise RuntimeError(
                    "expected TensorDicts, whose keys show where episodes end, got rows that are "
                    f"{'tensors' if not isinstance(root, Branch) else root.kind + 's'}; write "
                    "TensorDicts, as replaykit.transition() makes them"
                )
            found = self._made(rule)
            if rule == _DEFAULT:
                self._main = found
            else:
                self._others[rule] = found
                self._has_others = True
        else:
            found.sync()
        if not self._is_read and rule.flags is None and rule.ids is None:
            self._is_read = True
            _warn_of_unused_flags(self.storage.require().schema)
        return found

    @property
    def present_marks(self) -> CutMarks:
        """The marks that are loaded already, which follow other processes."""
        return self._marks

    @property
    def tags(self) -> EpisodeTags:
        """The values of the episodes of the default rule."""
        self._load_tags()
        return self._tags

    @property
    def present_tags(self) -> EpisodeTags:
        """The values that are set already, which follow other processes."""
        return self._tags

    def set_tags(self, elements: Array, values: Mapping[str, Any]) -> None:
        """Set checked tags of the episodes of stored rows, int64 ``[K]``.

        After a lack of memory, the next use, commit or overwrite of rows sets the tags.
        """
        self._new_tags, loaded, self.loaded = (elements, values), self.loaded, True
        with contextlib.suppress(MemoryError):
            self._load_tags()
            self.loaded = loaded

    def data(self, priorities: Callable[[], Array] | None = None) -> EpisodeData:
        """Return the stored episodes of the default rule as columns.

        ``priorities`` returns the priorities of the stored rows.
        """
        return EpisodeData(self.of(), self.tags, priorities)

    def append(self, rows: Rows, number: int) -> None:
        """Index committed rows that were written at the cursor.

        ``number`` is that of the log after the write.

        If the batch has more rows than the storage has slots, some rows were never stored. The
        indexes read those rows from the batch.
        """
        if self._restoring is not None or self._restarted:
            self.settle()
        main, count = self._main, rows.batch[0]
        if self.seen != number - count:
            self.pending()
        if main is None:
            if not self._is_indexed():
                self.seen = number
                return
            main = self._main = self._made(_DEFAULT, before=count)
        if count > main.slots:
            for index in self._live():
                index.append_rows(rows)
        else:
            main.append(rows)
            for index in tuple(self._others.values()) if self._has_others else ():
                index.append(rows)
        self.seen = number

    def placed(self, rows: Rows, slots: Array | range) -> None:
        """Index committed rows that were written by stream.

        The indexes already have all other rows. See ``EpisodeIndex.placed``.
        """
        for index in self._live():
            index.placed(rows, slots)
        self.seen = self.storage.ledger.log.number

    def replaced(self, change: Replacement, rows: Rows | None) -> None:
        """Follow a committed change of streams. The indexes already have all other rows.

        Args:
            rows: the new rows; None if rows were only removed.
        """
        try:
            for index in self._live():
                if change.keys:
                    index.pool.drop_oldest(change.keys, change.counts, forget=change.forget)
                index.pool.joined.update(change.joined)
                if rows is not None:
                    index.placed(rows, change.slots)
                if change.removal is not None:
                    index.pool.relocate(change.removal.source, change.removal.target)
                    index.leave_ring()
        except BaseException:
            self.storage.ledger.changes += 1  # so that the indexes read the rows again
            raise
        self.seen = self.storage.ledger.log.number

    def only_current(self) -> EpisodeIndex | None:
        """Return the only index of stored rows, which has all of them and saved tags, or None."""
        main, storage = self._main, self._storage()
        late = self.loaded or self._restarted or self._restoring is not None
        if main is None or storage is None or late or self._has_others or self._saved_tags:
            return None
        ledger = storage.ledger
        if not ledger.length:
            return None
        current = self.seen == ledger.log.number and main.indexed_until == ledger.next_position
        return main if current else None

    def complete(self) -> bool:
        """Return whether the default index is the only one, and has all rows of streams."""
        main, ledger = self._main, self.storage.ledger
        if main is None or self._has_others or main.in_ring or not ledger.length:
            return False
        return main.indexed_until == ledger.next_position

    def follow_moves(self, slots: Array, before: int) -> None:
        """Follow moves of another process in a ``complete`` index, unless streams are cut.

        See ``EpisodeIndex.follow_moves``.
        """
        if self._main is not None and self.storage.ledger.by_stream and not len(self.marks.numbers):
            self._main.follow_moves(slots, before)

    def replaced_run(self, gone: list[Any], key: Any, slot: int, count: int) -> None:
        """Follow a committed change of the ``only_current`` index; see ``replace_run``."""
        assert self._main is not None
        try:
            self._main.replace_run(gone, key, slot, count)
        except BaseException:
            self.storage.ledger.changes += 1  # so that the index reads the rows again
            raise
        self.seen = self.storage.ledger.log.number

    def pending(self) -> bool:
        """Return whether rows have to be indexed before a write overwrites them.

        The indexes learn of the changes that they cannot find in the ledger.
        """
        log = self.storage.ledger.log
        if self.seen == log.number:
            return self.loaded
        changes, live = log.since(self.seen), self._live()
        found = changes is None or any(change.kind in _PENDING for change in changes)
        for index in live:
            if changes is None or any(_outdates(change, index.bound.paths) for change in changes):
                index.edited()
                found = True
        if not found:
            self.seen = log.number
        return found or self.loaded

    def _catch_up(self) -> None:
        """Index all rows that the log lists, in all indexes."""
        if self.seen != self.storage.ledger.log.number and self.pending():
            for index in self._live():
                index.sync()
            # This comes last: after an error the next write has to index the rows.
            self.seen = self.storage.ledger.log.number

    def index_pending(self) -> None:
        """Index all pending rows, before stored rows are overwritten or removed."""
        self.settle()
        self.storage.ledger.read_tables()
        self.pending()
        for index in self._live():
            index.sync()
        if self._main is None and self.storage.ledger.length and self._is_indexed():
            self._main = self._made(_DEFAULT)
        self.loaded, self.seen = False, self.storage.ledger.log.number
        self._load_tags()

    def bounding(self, paths: Iterable[Path]) -> list[Path]:
        """Return those of the paths whose values bound the episodes of an index in use."""
        bounds: set[Path] = set().union(*(index.bound.paths for index in self._live()))
        return [path for path in paths if path in bounds]

    def before_edit(self, paths: Collection[Path]) -> None:
        """Find the episodes that loaded state names, before an edit of columns moves their ends.

        Tags and samplers name episodes by slots after a load. Follow other processes first: later
        their begins of episodes may not fit the rows.
        """
        self.settle()
        if self.heads_from is not None:
            self._catch_up()
        if self.loaded:
            self.storage.announce()
        if self._saved_tags is not None:
            rule = _DEFAULT.bind(self.storage.require().schema)
            if not rule.paths.isdisjoint(paths):
                self._load_tags()

    def _load_tags(self) -> None:
        """Load saved tags, which name slots, so this comes before rows leave them."""
        if self._saved_tags is not None:
            self._tags.load(*self._saved_tags, self.of())
            self._saved_tags = None
        if self._new_tags is not None:
            index, (elements, values) = self.of(), self._new_tags
            self._tags.set(index.ids(*index.time_and_lane(elements)), values, index)
            self._new_tags = None

    def _made(self, rule: BoundaryRule, *, before: int = 0) -> EpisodeIndex:
        return EpisodeIndex(self.storage, rule, before=before)

    def _is_indexed(self) -> bool:
        """Return whether the rows are TensorDicts, the only rows that are indexed."""
        root = self.storage.require().schema.root
        return isinstance(root, Branch) and root.kind == "tensordict"

    def cut(self, lanes: Array | None = None, code: int = SEVERED) -> None:
        """End the open episodes of lanes, without a flag.

        ``lanes`` is bool ``[lanes]``, or None for all lanes.
        """
        self.settle()
        ledger = self.storage.ledger
        if not ledger.length:
            return
        chosen, newest = self._newest(lanes)
        lowest = 0
        if ledger.in_order:
            lowest = (ledger.next_position - ledger.slots) * self.storage.lanes.numel()
        if self._main is not None and ledger.by_stream:
            lowest = self._main.oldest()
        ledger.log.cut()
        self.marks.add(newest, code, lowest)
        for index in self._live():
            index.close(chosen, code)
        self.seen = ledger.log.number

    def reopen(self) -> None:
        """Continue the episodes that a restart has ended.

        The rows that come next were written before the restart.

        Cost: one pass over the columns that bound episodes.
        """
        if not self.storage.ledger.length:
            return
        _, newest = self._newest(None)
        if self.marks.remove(newest, RESTORED):
            self.storage.ledger.log.cut()

    def _newest(self, lanes: Array | None) -> tuple[Array, Array]:
        """Index all pending rows, and return the newest rows of lanes.

        Args:
            lanes: bool ``[lanes]``; None for all.

        Returns:
            The lanes, bool ``[lanes]``, and the numbers ``row id * lanes + lane`` of their newest
            rows, rising.
        """
        storage = self.storage
        ledger, count = storage.ledger, storage.lanes.numel()
        main = None if storage.lane_key is None else self.of()
        self.pending()
        for index in self._live():
            index.sync()
        self.seen = ledger.log.number
        if main is not None:
            chosen = np.ones(main.lanes, bool) if lanes is None else lanes
            return chosen, np.sort(main.pool.per_lane()[4][chosen])
        chosen = np.ones(count, bool) if lanes is None else lanes
        position = int(ledger.positions(torch.tensor([ledger.newest], device="cpu")))
        return chosen, position * count + np.nonzero(chosen)[0]

    def _live(self) -> list[EpisodeIndex]:
        main = [] if self._main is None else [self._main]
        return [*main, *self._others.values()] if self._has_others else main

    # -- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state that the rows and the ledger do not imply, as plain values."""
        heads = self.heads()
        if heads is not None:
            heads = {name: _plain(value) for name, value in heads.items()}
        marks, codes = self.marks.numbers.tolist(), self.marks.codes.tolist()
        found = {"marks": marks, "codes": codes, "heads": heads, "root_flags": True}
        tags = self.tags.state(self._main if self.storage.ledger.length else None)
        return found if tags is None else {**found, "tags": tags}

    def heads(self) -> dict[str, Any] | None:
        """Return the begins of the first episodes in arrays, which the caller must not change."""
        main, storage = self._main, self.storage
        self._catch_up()
        if main is None and storage.ledger.length and self._is_indexed():
            main = self.of()  # for loaded rows that are saved again before any use
        return None if main is None else main.state()

    def first_known(self) -> tuple[int, Any, Any] | None:
        """Return the oldest row id, and where and how the first episodes begin.

        Return None if ``heads`` has more than these values.
        """
        main = self._main
        if main is None or not main.in_ring:
            return None
        self._catch_up()
        return main.first()

    @staticmethod
    def check(state: object) -> dict[str, Any] | None:
        """Return the argument after a check that ``state`` can have returned it, or None.

        Raises:
            ValueError: an entry is missing or impossible.
        """
        if state is None:
            return None
        decode_state(EpisodeState, state, "the state of episode indexes")
        return cast(dict[str, Any], state)

    def restore(
        self,
        state: dict[str, Any] | None,
        old: Ledger | None,
        rows: torch.Tensor | None,
        *,
        restarted: bool = True,
    ) -> None:
        """Load a checked state, after rows and ledger.

        Args:
            old: the ledger at the time of the saved state.
            rows: as for ``Ledger.restore``.
            restarted: whether open episodes end at this load, because no episode spans a restart.
        """
        self._main, self.loaded, self.seen = None, True, self.storage.ledger.log.number
        self._others.clear()
        self._marks, self._saved = CutMarks(), None
        self._restarted, self._restoring = False, None
        self._tags, self._saved_tags, self._new_tags = EpisodeTags(), None, None
        storage = self.storage
        ledger = storage.ledger
        tags = None if state is None else state.get("tags")
        if not ledger.length:
            if tags is not None:  # their names and layouts
                none = {name: column[:0] for name, column in tags["columns"].items()}
                self._tags.load(np.zeros(0, np.int64), none, None)
            return
        if tags is not None:
            self._saved_tags = moved_tags(tags, rows, storage.lanes.numel())
        if state is not None and old is not None:
            if rows is None and ledger.unread:
                # No row has moved, and no row id changes before the use of the state.
                self._restoring = state
            else:
                self._load(state, MovedPositions(old, ledger, rows))
        self._restarted = restarted
        if restarted and storage.lane_key is None and not ledger.unread:
            self.settle()

    def _load(self, state: dict[str, Any], moved: MovedPositions) -> None:
        """Load the cuts and begins of a saved state, for rows that have moved since."""
        lanes = self.storage.lanes.numel()
        marks = np.array(state["marks"], np.int64)
        codes = np.array(state["codes"], np.uint8)
        known, now = moved.find(marks // lanes)
        numbers = now * lanes + marks[known] % lanes
        for code in (SEVERED, RESTORED):
            self._marks.add(numbers[codes[known] == code], code, 0)
        heads = heads_of(state, self.storage.require().schema)
        if heads is not None:
            oldest, shift = moved.oldest, moved.shift
            fits = heads["oldest"] == oldest and len(heads["begin"]) == lanes
            streams = np.array(heads.get("streams", []), np.int64).reshape(-1, 4)
            there, now = moved.find(streams[:, 0])
            streams = streams[there]
            streams[:, :2] += (now - streams[:, 0])[:, None]
            heads = {
                "oldest": oldest + shift if fits else -1,
                "begin": [b + shift if b >= 0 else -1 for b in heads["begin"]] if fits else [],
                "head": heads["head"] if fits else [],
                "streams": streams.tolist(),
            }
        self._saved = heads

    def follow(self, marks: CutMarks, *, cut: bool, reset: bool) -> None:
        """Follow the rows and the marks of cut streams of another process.

        Args:
            cut: whether the marks have changed.
            reset: whether all rows have to be indexed again.
        """
        if reset:
            self._main = None
            self._others.clear()
        if cut:
            self.storage.ledger.log.cut()
        self.loaded, self._saved, self._marks = True, None, marks
        self._restarted, self._restoring = False, None

    def indexed_until(self) -> int | None:
        """Return the lowest row id that an index lacks; None without an index."""
        main = self._main
        ledger = self.storage.ledger
        if ledger.log.irregular > self.seen:
            self.pending()
        if not self._others:  # a fast path, because each draw from shared rows calls this
            return None if main is None else main.indexed_until
        return min((index.indexed_until for index in self._live()), default=None)

    def pop_first_begins(self) -> dict[str, Any] | None:
        """Return the begins of the first episodes, from a save or from other processes.

        The first index of these rows needs them for episodes whose first rows are not stored.
        """
        known = None if self.heads_from is None else self.heads_from()
        if known is None or (self._saved is not None and not known["now"]):
            return self._saved
        return known  # other processes may have written since the load of ``_saved``

    @property
    def has_begins(self) -> bool:
        """True if other processes know the begins of the first episodes.

        These begins take precedence over those of an index. Other processes have followed edits of
        rows that are not stored any more.
        """
        return self.heads_from is not None


def _outdates(change: LoggedChange, paths: Collection[Path]) -> bool:
    """Return whether an index over columns has to read them again after a change."""
    if change.kind is ChangeKind.EDIT:
        return change.columns is None or not change.columns.isdisjoint(paths)
    return change.kind is ChangeKind.CUT


def _warn_of_unused_flags(schema: Schema) -> None:
    """Warn of columns that look like flags but end no episode."""
    unused = unused_flags(schema.leaves)
    if unused:
        ends = end_flags(schema.leaves)
        names = ", ".join(format_key(path) for path in unused)
        by = (
            f"{', '.join(format_key(path) for path in ends)} do" if ends else "no other column does"
        )
        warnings.warn(
            f"{names}: no episode ends with this flag; {by}. Flags that end episodes are named "
            "done, terminated or truncated, under next or all of them at the root",
            stacklevel=4,
        )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
