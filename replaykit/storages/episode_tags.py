"""Keep values of stored episodes, and read the episodes of saved rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch

from replaykit._compat import arange, dtype_name
from replaykit.declared import MOST, Count, vector, within
from replaykit.episodes import BoundaryRule, CutMarks, EndReason, EpisodeIndex, Head
from replaykit.episodes.boundaries import RESTORED, SEVERED, LoggedPart
from replaykit.errors import SchemaError
from replaykit.schema import Schema
from replaykit.storages.content import Content, Group
from replaykit.storages.ledger import Ledger
from replaykit.structure import Branch, Path
from replaykit.ted import end_flags

Array = np.ndarray[Any, Any]

DRAWS, COUNTED = "draws", "counted draws"
"""Names of the columns of draws: until now, and until the last change of the episodes.

Only samplers write them.
"""

_FREE = np.iinfo(np.int64).max
"""The id of a place for a new episode."""


@dataclass(frozen=True)
class TagState:
    """The values of episodes, which are named by the element of their last stored row."""

    element: Annotated[Any, vector(torch.int64)]
    columns: dict[str, Any]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if not isinstance(column, torch.Tensor) or len(column) != len(self.element):
                raise ValueError(f"expected {len(self.element)} values of {name}, got {column!r}")


class EpisodeTags(LoggedPart):
    """Columns of values of episodes, by episode id.

    An episode without a value has zeros. Values of lost episodes are dropped from time to time, and
    their ids are never used again.

    Attributes:
        number: grows with each change of a tag. Counts of draws do not change it.
        edited: whether a tag was set since the values were loaded or copied.
        drawn: grows with each change of the counts.
        layout: grows when episodes get other places in the columns.

    Cost: O(K log J) for K of J episodes. New ids cost O(J) if some of them are lower than a known
    one, else O(1) on average.
    """

    def __init__(self) -> None:
        self.number = self.drawn = self.layout = 0
        self.edited = False
        self._pruned = 0  # number of ids after lost episodes were dropped last
        self._hold(np.zeros(0, np.int64), {})
        self._counted_at = -1  # the version of the index that `COUNTED` belongs to

    def _hold(self, ids: Array, columns: dict[str, torch.Tensor]) -> None:
        """Hold the values of rising ids, at new places."""
        # The last ids may be ``_FREE``, with values of 0.
        self._ids, self._columns = ids, columns
        self.layout += 1

    @property
    def _used(self) -> int:
        """The number of ids."""
        return int(self._ids.searchsorted(_FREE))

    @property
    def names(self) -> list[str]:
        """The names of the tags."""
        return [name for name in self._columns if name not in (DRAWS, COUNTED)]

    def get(self, name: str, ids: Array) -> torch.Tensor:
        """Return the values of episodes ``[K, *F]``. Raises KeyError for an unknown tag."""
        if name not in self._columns:
            raise KeyError(f"expected one of the tags {self.names}, got {name!r}")
        column = self._columns[name]
        at, known = self._find(ids)
        if known.all():
            return column[torch.from_numpy(at)]
        found = column.new_zeros(len(ids), *column.shape[1:])
        found[torch.from_numpy(known)] = column[torch.from_numpy(at[known])]
        return found

    def set(self, ids: Array, values: Mapping[str, Any], index: EpisodeIndex) -> None:
        """Set values of episodes. If an id occurs several times, the last value counts.

        Args:
            values: a value for all episodes, or a tensor ``[K, *F]``, by tag.

        Raises:
            ValueError: a name is reserved.
            SchemaError: shape or dtype of a value differ from the first values of the tag.
        """
        given = self.checked(values, len(ids))
        at = self.places(ids, index)
        # All columns exist before the first value changes.
        for column, tensor in [(self._column(name, t), t) for name, t in given.items()]:
            column.numpy()[at] = tensor.numpy()
        self._note(ids)
        self.number += 1
        self.edited = True

    def checked(self, values: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
        """Return a tensor ``[count, *F]`` for each tag; raise as ``set`` does."""
        given = {}
        for name, value in values.items():
            if not isinstance(name, str) or name in (DRAWS, COUNTED):
                raise ValueError(f"expected another name of a tag than {name!r}")
            try:
                tensor = torch.as_tensor(value, device="cpu").detach()
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"tag {name!r}: expected numbers or bools, got {value!r}") from None
            if not isinstance(value, torch.Tensor) or not tensor.ndim:
                tensor = tensor.expand(count, *tensor.shape)
            column = self._columns.get(name)
            shape = [count, *(tensor.shape[1:] if column is None else column.shape[1:])]
            dtype = tensor.dtype if column is None else column.dtype
            if list(tensor.shape) != shape or tensor.dtype != dtype:
                raise SchemaError(
                    f"tag {name!r}: expected {dtype_name(dtype)} {shape}, got "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
            given[name] = tensor
        return given

    def places(self, ids: Array, index: EpisodeIndex) -> Array:
        """Return the places of episodes in the columns, int64 ``[K]``; add missing ones.

        The places are valid while ``layout`` stays the same.
        """
        at, known = self._find(ids)
        if known.all():
            return at
        new = np.unique(ids[~known])
        if self._used + len(new) > 2 * self._pruned + 1024:
            table = index.table()
            self._keep(np.isin(self._ids, index.ids(table.first, table.lane)))
            self._pruned = self._used + len(new)
        self._insert(new)
        return self._ids.searchsorted(ids)

    def _find(self, ids: Array) -> tuple[Array, Array]:
        """Return the places of ids, and which of them are known."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        at = np.minimum(self._ids.searchsorted(ids), len(self._ids) - 1)
        return at, self._ids[at] == ids

    def _keep(self, kept: Array) -> None:
        """Drop the values of ids that are not ``kept``, bool, and all room."""
        chosen = torch.from_numpy(kept)
        self._hold(self._ids[kept], {name: c[chosen] for name, c in self._columns.items()})

    def _insert(self, new: Array) -> None:
        """Add rising ids that are not known yet."""
        used, until = self._used, self._used + len(new)
        if until <= len(self._ids) and (not used or new[0] > self._ids[used - 1]):
            self._ids[used:until] = new
        else:
            ids = np.full(until + until // 4 + 1024, _FREE)
            at = self._ids[:used].searchsorted(new) + np.arange(len(new))
            old = np.ones(len(ids), bool)
            old[at] = old[until:] = False
            ids[at], ids[old] = new, self._ids[:used]
            columns = {}
            for name, column in self._columns.items():
                columns[name] = column.new_zeros(len(ids), *column.shape[1:])
                columns[name][torch.from_numpy(old)] = column[:used]
            self._hold(ids, columns)

    def count_draws(self, at: Array, by: int) -> None:
        """Add a number to the draws at ``places``, for each time that a place occurs."""
        np.add.at(self.draws_by_place(), at, by)
        self.drawn += 1

    def draws_by_place(self) -> Array:
        """Return the draws of all episodes by place; a change also increases ``drawn``."""
        if DRAWS not in self._columns:
            self._columns[DRAWS] = torch.zeros(len(self._ids), dtype=torch.int64, device="cpu")
        return np.asarray(self._columns[DRAWS].numpy())

    def draws(self, ids: Array) -> Array:
        """Return how many windows of episodes were drawn, int64 ``[K]``."""
        if DRAWS not in self._columns:
            return np.zeros(len(ids), np.int64)
        return self.get(DRAWS, ids).numpy()

    def counted(self, ids: Array, index: EpisodeIndex) -> Array:
        """Return the draws of episodes before the last change of the stored ones, int64 ``[K]``."""
        if self._counted_at != index.version:
            self._columns[COUNTED] = torch.from_numpy(self.draws_by_place().copy())
            self._counted_at = index.version
        return self.get(COUNTED, ids).numpy()

    def _column(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self._columns:
            shape = (len(self._ids), *like.shape[1:])
            self._columns[name] = torch.zeros(shape, dtype=like.dtype, device="cpu")
        return self._columns[name]

    # -- state ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "edited": False, "_changed": None}

    def state(self, index: EpisodeIndex | None) -> dict[str, Any] | None:
        """Return the values of the stored episodes for a ``TagState``; None without values.

        ``index`` is None if no row is stored.
        """
        if not self._columns:
            return None
        if index is None:
            none = {name: column[:0].clone() for name, column in self._columns.items()}
            return {"element": torch.zeros(0, dtype=torch.int64, device="cpu"), "columns": none}
        table = index.table()
        ids = index.ids(table.first, table.lane)
        known = np.isin(ids, self._ids)
        element = index.element(table.last[known], table.lane[known])
        late = self._counted_at != index.version
        names = [name for name in self._columns if not (late and name == COUNTED)]
        columns = {name: self.get(name, ids[known]) for name in names}
        return {"element": torch.from_numpy(element), "columns": columns}

    def load(self, element: Array, columns: Mapping[str, Any], index: EpisodeIndex | None) -> None:
        """Replace all values by saved ones; see ``TagState``. Without rows, ``index`` is None."""
        ids = element if index is None else index.ids(*index.time_and_lane(element))
        order = np.argsort(ids)
        at = torch.from_numpy(order)
        self._hold(ids[order], {name: column[at].clone() for name, column in columns.items()})
        self._counted_at = index.version if index is not None and COUNTED in columns else -1
        self.number += 1
        self.edited = False
        self._changed = None

    def packed(self, ids: Array | None) -> Array:
        """Return the tags of episodes, and the ids, as int64 numbers for a commit.

        Counts of draws are not part of them. Without ``ids``, the result has all episodes. Without
        tags, it is empty.
        """
        if not self.names:
            return self._ids[:0]
        ids = self._ids[: self._used] if ids is None else ids[self._find(ids)[1]]
        columns = {name: self.get(name, ids) for name in self.names}
        kinds = [[name, dtype_name(c.dtype), list(c.shape[1:])] for name, c in columns.items()]
        header = json.dumps([len(ids), kinds]).encode()
        parts = [np.frombuffer(header, np.uint8), ids.view(np.uint8)]
        parts += [c.contiguous().view(-1).view(torch.uint8).numpy() for c in columns.values()]
        lengths = np.array([len(part) for part in parts], np.int64)
        data = np.concatenate([np.pad(part, (0, -len(part) % 8)) for part in parts])
        return np.concatenate([[len(parts)], lengths, data.view(np.int64)])

    def unpack(self, entries: Sequence[Array], *, whole: bool) -> None:
        """Set the tags of results of ``packed``, in this order; they are all committed then.

        The results may come from another process.

        Args:
            whole: remove all other tags.

        Raises:
            ValueError: the numbers are not those of tags.
        """
        if whole and self.names:
            counts = {n: c for n, c in self._columns.items() if n in (DRAWS, COUNTED)}
            kept = torch.zeros(len(self._ids), dtype=torch.bool, device="cpu")
            for column in counts.values():
                kept |= column != 0
            self._columns = counts
            self._keep(kept.numpy())
            self.number += 1
            self.edited = True
        for numbers in entries:
            count = int(numbers[0])
            lengths, data = numbers[1 : 1 + count], numbers[1 + count :].copy().view(np.uint8)
            starts = np.cumsum(lengths + -lengths % 8) - (lengths + -lengths % 8)
            header, ids, *parts = (
                data[first : first + length]
                for first, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            )
            rows, kinds = json.loads(bytes(header))
            ids = ids.view(np.int64)
            if len(ids) != rows or len(kinds) != len(parts):
                raise ValueError(f"expected tags {kinds} of {rows} episodes, got {len(ids)}")
            known = self._find(ids)[1]
            if not known.all():
                self._insert(np.unique(ids[~known]))
            at = torch.from_numpy(np.searchsorted(self._ids, ids))
            for (name, dtype, shape), part in zip(kinds, parts, strict=True):
                values = torch.from_numpy(part).view(getattr(torch, dtype)).view(len(ids), *shape)
                self._column(name, values)[at] = values
            self.number += 1
            self.edited = True
        self.committed()


class EpisodeData:
    """The stored episodes as columns, for evictors and for predicates of samplers.

    Every column has one value for each of the J stored episodes, in order of time, stream after
    stream. It is computed at its first use. ``data["name"]`` is the column of a tag, ``[J, *F]``;
    an episode without a value has zeros. ``"name" in data`` is True if there is such a tag.

    Attributes:
        lane: number of the lane or stream.
        length: number of stored rows.
        head: the ``Head`` of the episode.

    Raises:
        KeyError: there is no such tag.

    Cost: O(J) for each column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> sampler = SliceSampler(slice_len=2, where=lambda episodes: episodes.length > 2)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=64)
        >>> done = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
        >>> _ = rb.extend(TensorDict({"t": torch.arange(6), "next": {"done": done}}, [6]))
        >>> rb.sample()["t"].unique().tolist()
        [2, 3, 4]
    """

    def __init__(
        self, index: EpisodeIndex, tags: EpisodeTags, priorities: Callable[[], Array] | None = None
    ) -> None:
        self._index, self._tags, table = index, tags, index.table()
        self._priorities = priorities
        self.lane, self.first, self.last = table.lane, table.first, table.last
        self.head = table.head
        self.length = table.last + 1 - table.first
        self.code = table.code

    def __len__(self) -> int:
        return len(self.lane)

    def __contains__(self, tag: object) -> bool:
        """Return whether there is a tag of this name."""
        return tag in self._tags.names

    @cached_property
    def id(self) -> Array:
        """The ids of the episodes. An id is never used again; older episodes have lower ids."""
        return self._index.ids(self.first, self.lane)

    @cached_property
    def reason(self) -> Array:
        """The ``EndReason`` of the episodes."""
        return np.minimum(self.code, int(EndReason.CUT))

    @cached_property
    def draws(self) -> Array:
        """The number of windows that samplers with ``Coverage`` have drawn from the episodes."""
        return self._tags.draws(self.id)

    @cached_property
    def priority(self) -> Array:
        """The largest priority of the rows of each episode. Cost: O(stored rows).

        Raises ValueError if the sampler has no priorities.
        """
        if self._priorities is None:
            raise ValueError("expected a sampler with priorities, got one without")
        of_row = np.repeat(np.arange(len(self)), self.length)
        starts = np.cumsum(self.length) - self.length
        time = np.arange(len(of_row)) - (starts - self.first)[of_row]
        element = self._index.element(time, self.lane[of_row])
        return np.maximum.reduceat(self._priorities()[element], starts)

    def __getitem__(self, tag: str) -> Array:
        return self._tags.get(tag, self.id).numpy()


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
            there = np.isin(positions, self._old)
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
    index = EpisodeIndex(cast(Any, saved), saved.rule)
    heads = index.state(kept)
    known = state or {"marks": [], "codes": []}
    if not ledger.oldest_first:
        known = {**known, **_marks_with_gaps(known, index, ledger, saved.lanes.numel())}
    return {**known, "heads": heads, "root_flags": True}


def _marks_with_gaps(
    state: dict[str, Any], index: EpisodeIndex, ledger: Ledger, lanes: int
) -> dict[str, Any]:
    """Return the cuts, with one at each gap, since other slots do not show the gaps.

    All streams end before a row whose row id does not follow that of the slot before.
    """
    first = ledger.cursor if ledger.length == ledger.slots else 0
    slots = np.roll(np.arange(ledger.length), -first)
    row_id = ledger.positions(torch.from_numpy(slots)).numpy()
    segment = np.cumsum(np.diff(row_id, prepend=row_id[0] - 1) != 1)
    number = (row_id[:, None] * lanes + np.arange(lanes)).reshape(-1)
    lane = index.time_and_lane((slots[:, None] * lanes + np.arange(lanes)).reshape(-1))[1]
    group = np.repeat(segment, lanes) * index.lanes + lane
    last = len(group) - 1 - np.unique(group[::-1], return_index=True)[1]
    newest = np.full(index.lanes, -1)
    np.maximum.at(newest, lane, number)
    gaps = number[last][number[last] < newest[lane[last]]]
    codes = dict(zip(state["marks"], state["codes"], strict=True))
    codes = dict.fromkeys(gaps.tolist(), SEVERED) | codes
    return {"marks": sorted(codes), "codes": [codes[mark] for mark in sorted(codes)]}


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

    def parts(self, paths: Iterable[Path], first: int, until: int) -> dict[Path, torch.Tensor]:
        """Return the slots ``[first, until)`` of some columns."""
        return {path: self._leaves[path][first:until] for path in paths}

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
