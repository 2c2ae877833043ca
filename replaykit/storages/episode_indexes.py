"""Keep the episode indexes of a storage up to date, also across loads."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch

from replaykit.episodes import BoundaryRule, CutMarks, EpisodeIndex, Head, InterleavedIndex
from replaykit.episodes.episode_laws import RESTORED, SEVERED
from replaykit.schema import Rows, Schema
from replaykit.storages.content import Content, Group
from replaykit.storages.ledger import Ledger, MovedPositions
from replaykit.structure import Branch, Path
from replaykit.ted import end_flags, format_key, unused_flags

if TYPE_CHECKING:
    from replaykit.storages.column_storage import ColumnStorage

__all__ = ["EpisodeIndexes", "heads_of", "state_of_kept"]

Array = np.ndarray[Any, Any]

_DEFAULT = BoundaryRule()


class EpisodeIndexes:
    """Keeps the indexes of a storage up with it. The storage's lock guards it.

    The one of the default rule is kept from the first write on; one of another rule as long as
    somebody holds it.
    """

    def __init__(self, storage: ColumnStorage) -> None:
        self._storage = weakref.ref(storage)
        self._marks = CutMarks()
        self._is_read = False  # whether a reader has asked for episodes
        # A saved state of which nothing was taken over yet, and whether what was open has yet to be
        # ended by a restart; see ``marks``.
        self._restoring: dict[str, Any] | None = None
        self._restarted = False
        # Whether there may be stored rows that are not noted as they are: their columns were
        # edited, or they came otherwise than by a write.
        self.stale = True
        self._main: EpisodeIndex | None = None
        self._others: weakref.WeakValueDictionary[BoundaryRule, EpisodeIndex] = (
            weakref.WeakValueDictionary()
        )
        self._saved: dict[str, Any] | None = None
        # Asked for what is known of the first episodes, where other processes write too.
        self.heads_from: Callable[[], dict[str, Any] | None] | None = None
        # How often columns that bound episodes were edited.
        self.bounding = 0

    @property
    def storage(self) -> ColumnStorage:
        """Whose they are."""
        storage = self._storage()
        assert storage is not None
        return storage

    @property
    def marks(self) -> CutMarks:
        """Where streams were severed.

        Cost: nothing, but the first time after interleaved streams were loaded, or positions that
        do not follow from counters were opened in place: which rows are the newest takes all of
        them to know.
        """
        self._end_what_was_open()
        return self._marks

    def _end_what_was_open(self) -> None:
        """Takes over what was saved and cuts what a restart has ended, where nobody has asked
        since: all who look at rows as streams come through here, or write or edit them."""
        if self._restoring is not None:
            ledger = self.storage.ledger
            self._take(self._restoring, MovedPositions(ledger, ledger, None))
            self._restoring = None
        if self._restarted:
            try:
                self._restarted = False
                self.cut(code=RESTORED)
            except BaseException:
                self._restarted = True
                raise

    def of(self, rule: BoundaryRule = _DEFAULT) -> EpisodeIndex:
        """Returns the index by a rule, up to date.

        Raises:
            KeyError: columns that the rule names are not stored. RuntimeError: nothing was
                written yet, or records are no TensorDicts.
        """
        self._end_what_was_open()
        found = self._main if rule is _DEFAULT or rule == _DEFAULT else self._others.get(rule)
        if found is None:
            storage = self.storage
            root = storage.require().schema.root
            if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
                raise RuntimeError(
                    "expected TensorDicts, whose keys tell where episodes end, got records that "
                    f"are {'tensors' if not isinstance(root, Branch) else root.kind + 's'}; write "
                    "TensorDicts, as replaykit.transition() makes them"
                )
            found = self._made(rule)
            if rule == _DEFAULT:
                self._main = found
            else:
                self._others[rule] = found
        else:
            found.sync()
        if not self._is_read and rule.flags is None and rule.ids is None:
            self._is_read = True
            _warn_of_unused_flags(self.storage.require().schema)
        return found

    def note(self, rows: Rows) -> None:
        """Told after every write at the cursor which rows were committed.

        Of more rows than there are slots some were never stored: those are read from the batch.
        """
        self._end_what_was_open()
        main = self._main
        if main is None:
            if not self._is_kept():
                return
            main = self._main = self._made(_DEFAULT, before=len(rows))
        if len(rows) > self.storage.ledger.slots:
            for index in self._live():
                index.note_rows(rows)
            return
        main.follow(len(rows))
        if self._others:
            for index in list(self._others.values()):
                index.follow(len(rows))

    def placed(self, rows: Rows, slots: Array, displacing: Array, turn: Array) -> None:
        """Told after every write by stream which rows were committed, and where; all of them are
        up to date but for these. See ``InterleavedIndex.placed``."""
        for index in self._live():
            assert isinstance(index, InterleavedIndex)
            index.placed(rows, slots, displacing, turn)

    def settle(self) -> None:
        """Told that stored rows are about to be overwritten or forgotten: what they say is noted
        first."""
        self._end_what_was_open()
        self.storage.ledger.read_tables()
        for index in self._live():
            index.sync()
        if self._main is None and self.storage.ledger.length and self._is_kept():
            self._main = self._made(_DEFAULT)
        self.stale = False  # not before: what could not be noted has to be at the next write

    def _made(self, rule: BoundaryRule, *, before: int = 0) -> EpisodeIndex:
        storage = self.storage
        kind = EpisodeIndex if storage.lane_key is None else InterleavedIndex
        return kind(storage, rule, before=before)

    def _is_kept(self) -> bool:
        """Whether episodes can be told of such rows: then they are, from the first write on."""
        root = self.storage.require().schema.root
        return isinstance(root, Branch) and root.kind == "tensordict"

    def edited(self, paths: Collection[Path]) -> None:
        """Told that columns were changed in place."""
        self._end_what_was_open()
        live = self._live()
        if not live:
            self.bounding += 1
        for index in live:
            if not index.bound.paths.isdisjoint(paths):
                index.edited()
                self.stale = True
                self.bounding += 1

    def cut(self, lanes: Array | None = None, code: int = SEVERED) -> None:
        """Ends what is open in lanes (bool ``[lanes]``; None: all) without a flag."""
        self._end_what_was_open()
        ledger = self.storage.ledger
        if not ledger.length:
            return
        chosen, newest = self._newest(lanes)
        lowest = 0
        if ledger.in_order:
            lowest = (ledger.next_position - ledger.slots) * self.storage.lanes.numel()
        if isinstance(self._main, InterleavedIndex) and ledger.by_stream:
            lowest = self._main.oldest()
        self.marks.add(newest, code, lowest)
        for index in self._live():
            index.close(chosen, code)

    def reopen(self) -> None:
        """Takes back that a restart has ended what is newest: rows come that were written before
        it. One pass over the columns that bound episodes."""
        if not self.storage.ledger.length:
            return
        _, newest = self._newest(None)
        if self.marks.remove(newest, RESTORED):
            self.stale = True
            for index in self._live():
                index.edited()

    def _newest(self, lanes: Array | None) -> tuple[Array, Array]:
        """Lanes, all of them for None, and the numbers of their newest rows, rising; all that was
        written is noted."""
        storage = self.storage
        ledger, count = storage.ledger, storage.lanes.numel()
        main = None if storage.lane_key is None else self.of()
        for index in self._live():
            index.sync()
        if isinstance(main, InterleavedIndex):
            chosen = np.ones(main.lanes, bool) if lanes is None else lanes
            return chosen, np.sort(main.newest(chosen))
        chosen = np.ones(count, bool) if lanes is None else lanes
        position = int(ledger.positions(torch.tensor([ledger.newest], device="cpu")))
        return chosen, position * count + np.nonzero(chosen)[0]

    def _live(self) -> list[EpisodeIndex]:
        main = [] if self._main is None else [self._main]
        return [*main, *self._others.values()]

    # -- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what does not follow from rows and ledger, as plain values."""
        known = self.known()
        heads = known["heads"]
        if heads is not None:
            heads = {name: _plain(value) for name, value in heads.items()}
        marks, codes = known["marks"].tolist(), known["codes"].tolist()
        return {"marks": marks, "codes": codes, "heads": heads, "root_flags": True}

    def known(self) -> dict[str, Any]:
        """The same as arrays, to look at."""
        main, storage = self._main, self.storage
        if main is None and storage.ledger.length and self._is_kept():
            main = self.of()  # rows that were loaded, and saved again before anybody asked
        return {
            "marks": self.marks.numbers,
            "codes": self.marks.codes,
            "heads": None if main is None else main.state(),
        }

    def first_known(self) -> tuple[int, Any, Any] | None:
        """Position of the oldest row, and where the episodes of its lanes began and how, where
        that is all that ``known`` has to say beside the marks; else None."""
        main = self._main
        if type(main) is not EpisodeIndex:
            return None
        return main.first()

    @staticmethod
    def check(state: object) -> dict[str, Any] | None:
        """Returns the state if it is one that ``state`` can have given; None for none.

        Raises:
            ValueError: an entry is missing or impossible.
        """
        if state is None:
            return None
        fields = state if isinstance(state, dict) else {}
        marks, codes, heads = fields.get("marks"), fields.get("codes"), fields.get("heads")
        if not (
            _ints(marks)
            and _ints(codes)
            and len(marks) == len(codes)
            and all(code in (SEVERED, RESTORED) for code in codes)
            and marks == sorted(set(marks))
        ):
            raise ValueError(f"expected the cuts of an episode index, got {state!r}")
        if fields.get("root_flags", True) is not True:
            raise ValueError(f"expected root_flags as True, got {fields['root_flags']!r}")
        if ("heads" not in fields or heads is not None) and not (
            isinstance(heads, dict)
            and type(heads.get("oldest")) is int
            and _ints(heads.get("begin"))
            and all(begin < max(heads["oldest"], 0) for begin in heads["begin"])
            and _ints(heads.get("head"))
            and len(heads["begin"]) == len(heads["head"])
            and all(1 <= kind <= 3 for kind in heads["head"])
            and isinstance(heads.get("streams", []), list)
            and all(_is_head(row) for row in heads.get("streams", []))
        ):
            raise ValueError(f"expected where episodes began, got {heads!r}")
        return fields

    def restore(
        self,
        state: dict[str, Any] | None,
        old: Ledger | None,
        rows: torch.Tensor | None,
        *,
        restarted: bool = True,
    ) -> None:
        """Takes a checked state over, after rows and ledger were.

        Args:
            old: the ledger as it was when the state was taken.
            rows: as for ``Ledger.restore``.
            restarted: whether what was open ends here: nothing spans a restart.
        """
        self._main, self.stale = None, True
        self._others.clear()
        self._marks, self._saved = CutMarks(), None
        self._restarted, self._restoring = False, None
        storage = self.storage
        ledger = storage.ledger
        if not ledger.length:
            return
        if state is not None and old is not None:
            if rows is None and ledger.unread:
                # No row has moved, and no position changes before somebody has asked.
                self._restoring = state
            else:
                self._take(state, MovedPositions(old, ledger, rows))
        self._restarted = restarted
        if restarted and storage.lane_key is None and not ledger.unread:
            self._end_what_was_open()

    def _take(self, state: dict[str, Any], moved: MovedPositions) -> None:
        """Takes over cuts and begins of a saved state, of rows that lie elsewhere now."""
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

    def follow(self, marks: Array, codes: Array, *, anew: bool, edited: bool) -> None:
        """Takes over what another process has done: the rows that nothing follows, and why.

        Args:
            anew: nothing that was noted here counts. edited: columns that bound episodes were.
        """
        if anew:
            self._main = None
            self._others.clear()
        if edited or not np.array_equal(marks, self.marks.numbers):
            for index in self._live():
                index.edited()
        self.stale, self._saved = True, None
        self._marks = CutMarks(marks.tolist(), codes.tolist())
        self._restarted, self._restoring = False, None

    def noted(self) -> int | None:
        """Position from which on rows have yet to be noted by an index; None: there is none."""
        main = self._main
        if not self._others:  # each draw beside other processes asks
            return None if main is None else main.noted
        return min((index.noted for index in self._live()), default=None)

    def take_heads(self) -> dict[str, Any] | None:
        """Where headless episodes began when the rows were saved, for who indexes them first."""
        if self._saved is not None or self.heads_from is None:
            return self._saved
        return self.heads_from()

    @property
    def is_told(self) -> bool:
        """Whether others have noted how the first episodes began, who saw edits of rows that are
        gone: what they say counts more than what an index knows."""
        return self.heads_from is not None

    def saved_streams(self) -> tuple[list[list[int]], bool]:
        """The same for interleaved streams, see ``InterleavedIndex.state``; and whether that is all
        that there is to say of the streams as they are now."""
        heads = self.take_heads()
        return ([], False) if heads is None else (heads.get("streams", []), heads.get("now", False))


def heads_of(state: dict[str, Any], schema: Schema) -> dict[str, Any] | None:
    """Returns where the first episodes of a checked state began.

    States without ``root_flags`` were saved when flags at the root ended nothing. Where they do, an
    episode whose begin is not stored may have begun later than such a state says: it is taken for
    one that was joined in the middle.
    """
    heads: dict[str, Any] | None = state["heads"]
    flags = end_flags(schema.leaves)
    if heads is None or "root_flags" in state or not flags or len(flags[0]) > 1:
        return heads
    head = [
        int(Head.CUT) if begin >= 0 else kind
        for begin, kind in zip(heads["begin"], heads["head"], strict=True)
    ]
    streams = [
        [row, row, 0, int(Head.CUT)] if gone else [row, begin, gone, kind]
        for row, begin, gone, kind in heads.get("streams", [])
    ]
    return {**heads, "begin": [-1] * len(head), "head": head, "streams": streams}


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


def _is_head(row: object) -> bool:
    """Whether it tells of a row, at a position, how many of its episode came before, and how it
    began: see ``InterleavedIndex.state``."""
    return _ints(row) and len(row) == 4 and 0 <= row[2] <= row[0] and 1 <= row[3] <= 3


def _ints(values: object) -> TypeGuard[list[int]]:
    """Whether it is a list of numbers that fit into int64, also a little later."""
    return isinstance(values, list) and all(
        type(value) is int and abs(value) <= 2**62 for value in values
    )


def state_of_kept(
    content: Content,
    state: dict[str, Any] | None,
    ledger: Ledger,
    kept: torch.Tensor,
    lane_key: Path | None,
) -> dict[str, Any] | None:
    """Returns the state of an episode index (``EpisodeIndexes.state``) of rows of which only some
    are kept.

    Args:
        content: all rows that were saved.
        state: the checked state of their index; None: there was none.
        ledger: theirs.
        kept: slots of the rows that are kept, int64 ``[K]``.
        lane_key: column that tells streams apart, where they lie interleaved.

    Cost: one pass over the columns that bound episodes, and an index of the saved rows, 8 bytes
    each (24 with ``lane_key``), for the time of the call.
    """
    if len(content.groups) != 1 or content.plain or not len(kept):
        return state
    group = content.groups[0]
    root = group.schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        return state
    saved = _SavedRows(content, group, state, ledger, lane_key)
    kind = EpisodeIndex if lane_key is None else InterleavedIndex
    heads = kind(cast(Any, saved), saved.rule).state(kept)
    known = state or {"marks": [], "codes": []}
    return {**known, "heads": heads, "root_flags": True}


class _SavedColumns:
    """The columns that bound episodes, as an index reads those of a storage."""

    def __init__(self, content: Content, group: Group, paths: set[Path], slots: int) -> None:
        self.schema: Schema = group.schema
        self.lanes, self.slots = content.lanes, slots
        self.ndim = 1 + len(content.lanes)
        leaves = group.leaves
        self._leaves = {path: leaves[path][:] for path in paths}
        if not paths:  # only its shape is asked for
            shape = (content.rows, *content.lanes)
            self._leaves[()] = torch.zeros((), dtype=torch.bool, device="cpu").expand(shape)
        self.order = list(self._leaves)

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self._leaves[path]

    def follow_memory(self) -> None:
        """Nobody else has the memory of rows that are being read: it stays where it is."""


class _SavedRows:
    """Saved rows with the face by which an index knows its storage."""

    is_told = False

    def __init__(
        self,
        content: Content,
        group: Group,
        state: dict[str, Any] | None,
        ledger: Ledger,
        lane_key: Path | None,
    ) -> None:
        self.rule = BoundaryRule()
        paths = set(self.rule.bind(group.schema).paths)
        if lane_key is not None:
            paths.add(lane_key)
        self._columns = _SavedColumns(content, group, paths, ledger.slots)
        self.lanes, self.ledger, self.lane_key = content.lanes, ledger, lane_key
        known = state or {"marks": [], "codes": [], "heads": None}
        self.marks = CutMarks(known["marks"], known["codes"])
        self._heads: dict[str, Any] | None = heads_of(known, group.schema)

    @property
    def indexes(self) -> _SavedRows:
        return self

    def require(self) -> _SavedColumns:
        return self._columns

    def take_heads(self) -> dict[str, Any] | None:
        return self._heads

    def saved_streams(self) -> tuple[list[list[int]], bool]:
        return ([] if self._heads is None else self._heads.get("streams", [])), False
