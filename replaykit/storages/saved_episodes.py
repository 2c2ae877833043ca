"""Read the episodes of saved rows, which may be in other slots now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.declared import MOST, Count, within
from replaykit.episodes import BoundaryRule, CutMarks, EpisodeIndex, Head
from replaykit.episodes.episode_laws import RESTORED, SEVERED
from replaykit.schema import Schema
from replaykit.storages.content import Content, Group
from replaykit.storages.episode_tags import TagState
from replaykit.storages.indexing import contained
from replaykit.storages.ledger import Ledger
from replaykit.structure import Branch, Path
from replaykit.ted import end_flags

Array = np.ndarray[Any, Any]

_Position = Annotated[int, within(-MOST)]
_Kind = Annotated[int, within(1, 3)]


@dataclass(frozen=True)
class _Beginnings:
    """The beginnings of the first episodes, in each lane or in each stream."""

    oldest: _Position
    begin: list[_Position]
    head: list[_Kind]
    streams: list[tuple[Count, _Position, Count, _Kind]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.begin) != len(self.head):
            raise ValueError(f"expected {len(self.begin)} kinds of begins, got {len(self.head)}")
        if any(begin >= max(self.oldest, 0) for begin in self.begin):
            raise ValueError(f"expected begins before {max(self.oldest, 0)}, got {self.begin}")
        if any(steps > newest for newest, _, steps, _ in self.streams):
            raise ValueError(f"expected no stream longer than its rows, got {self.streams}")


@dataclass(frozen=True)
class EpisodeState:
    """The cuts of episodes, and their beginnings; see `EpisodeIndexes.state`."""

    marks: list[_Position]
    codes: list[Annotated[int, within(SEVERED, RESTORED)]]
    heads: _Beginnings | None
    root_flags: Literal[True] = True
    tags: TagState | None = None

    def __post_init__(self) -> None:
        if len(self.marks) != len(self.codes) or self.marks != sorted(set(self.marks)):
            raise ValueError(f"expected rising marks, each with a code, got {self}")


class MovedPositions:
    """A map from the row ids of a ledger to those of a ledger restored from it.

    Args:
        old: the saved ledger.
        new: the ledger that was restored from it.
        rows: as for ``Ledger.restore``.

    Attributes:
        oldest: the lowest old id of the rows that are stored now.
        shift: the difference between the new and the old id of that row.

    Cost: O(1) if every row keeps its slot and row ids follow from the counters. If every row keeps
    its slot and row ids are in tables, it is a pass over all row ids. Otherwise it is a sort of all
    row ids.
    """

    def __init__(self, old: Ledger, new: Ledger, rows: torch.Tensor | None) -> None:
        self._count = new.length
        self._sorted: tuple[Array, Array] | None = None
        self._old: Array | None = None
        if rows is None and old.in_order and new.in_order:
            self.oldest = old.next_position - old.length
            self.shift = new.next_position - old.next_position
            return
        table = old.position_table()
        if rows is None and table is not None and not new.in_order:
            # All row ids have grown by the same number.
            self._old = table.numpy()
            first = int(new.positions(torch.zeros(1, dtype=torch.int64, device="cpu")))
            self.oldest, self.shift = int(self._old.min()), first - int(self._old[0])
            return
        stored = arange(new.length) if rows is None else rows
        before = old.positions(stored).numpy()
        now = new.positions(arange(new.length)).numpy()
        order = np.argsort(before, kind="stable")
        self._sorted = before[order], now[order]
        self.oldest = int(before[order[0]])
        self.shift = int(now[order[0]]) - self.oldest

    def find(self, positions: Array) -> tuple[Array, Array]:
        """Look up old row ids.

        Returns:
            A mask of the rows that are stored now, bool ``[K]``, and the new ids of those rows.
        """
        if self._old is not None:
            there = contained(positions, self._old)
            return there, positions[there] + self.shift
        if self._sorted is None:
            there = (positions >= self.oldest) & (positions < self.oldest + self._count)
            return there, positions[there] + self.shift
        before, now = self._sorted
        at = np.minimum(np.searchsorted(before, positions), len(before) - 1)
        there = before[at] == positions
        return there, now[at[there]]


def moved_tags(
    state: dict[str, Any], rows: torch.Tensor | None, lanes: int
) -> tuple[Array, dict[str, Any]]:
    """Return saved values of episodes whose last rows are now in slots ``0, 1, ...``."""
    element = np.asarray(state["element"])
    if rows is None:
        return element, state["columns"]
    slots, at = element // lanes, rows.numpy()
    order = np.argsort(at)
    place = np.minimum(np.searchsorted(at[order], slots), max(len(at) - 1, 0))
    kept = at[order][place] == slots
    now = order[place[kept]] * lanes + element[kept] % lanes
    chosen = torch.from_numpy(kept)
    return now, {name: column[chosen] for name, column in state["columns"].items()}


def heads_of(state: dict[str, Any], schema: Schema) -> dict[str, Any] | None:
    """Return the begins of the first episodes in a checked state.

    In states without ``root_flags``, flags at the root of a row did not end episodes. If such flags
    end episodes of this schema, an episode may have begun later than the state says. If its first
    row is not stored, the episode counts as joined in its middle.
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


def state_of_subset(
    content: Content,
    state: dict[str, Any] | None,
    ledger: Ledger,
    kept: torch.Tensor,
    lane_key: Path | None,
) -> dict[str, Any] | None:
    """Return the state of episode indexes for some of the saved rows.

    See ``EpisodeIndexes.state``.

    Args:
        content: all saved rows.
        state: the checked state of the indexes of these rows; None if there was none.
        ledger: the ledger of the saved rows.
        kept: slots of the rows to load, int64 ``[K]``.
        lane_key: the column that names the stream of a row, if streams are interleaved.

    Cost: one pass over the columns that bound episodes. During the call, an index of the saved rows
    takes 8 bytes per row, or 24 with ``lane_key``.
    """
    if len(content.groups) != 1 or content.plain or not len(kept):
        return state
    group = content.groups[0]
    root = group.schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        return state
    saved = _SavedRows(content, group, state, ledger, lane_key)
    heads = EpisodeIndex(cast(Any, saved), saved.rule).state(kept)
    known = state or {"marks": [], "codes": []}
    return {**known, "heads": heads, "root_flags": True}


class _SavedColumns:
    """The saved columns that bound episodes, with the interface that an index reads."""

    def __init__(self, content: Content, group: Group, paths: set[Path], slots: int) -> None:
        self.schema: Schema = group.schema
        self.lanes, self.slots = content.lanes, slots
        self.ndim = 1 + len(content.lanes)
        leaves = group.leaves
        self._leaves = {path: leaves[path][:] for path in paths}
        if not paths:  # without paths, the index reads only the shape
            shape = (content.rows, *content.lanes)
            self._leaves[()] = torch.zeros((), dtype=torch.bool, device="cpu").expand(shape)
        self.order = list(self._leaves)

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self._leaves[path]

    def refresh_addresses(self) -> None:
        """Do nothing, because no other code has this memory, so it cannot move."""


class _SavedRows:
    """Saved rows with the interface of a storage that an index uses."""

    has_begins = False

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

    def pop_first_begins(self) -> dict[str, Any] | None:
        return self._heads
