"""Find the following row of each row, and check its observation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater
from replaykit.episodes.interleaved import stream_keys
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.indexing import Neighbours, Picked, agreed
from replaykit.storages.tensor_bytes import carried, differing
from replaykit.structure import Path
from replaykit.ted import (
    DEFAULT_DONE_KEYS,
    EPISODE_KEYS,
    FLAG_KEYS,
    Key,
    end_flags,
    format_key,
    unravel,
)

__all__ = [
    "Chains",
    "DedupNext",
    "Links",
    "Mismatch",
    "Pairs",
    "StreamTails",
    "chains",
    "check_batch",
    "check_newest",
    "check_newest_of",
    "check_streams",
    "checked_keys",
    "checked_mismatch",
    "mismatch",
    "pairs_of",
]

DedupNext = bool | Iterable[Any]
"""``False`` for no keys, ``True`` for all eligible keys, or a list of root keys."""

Mismatch = Literal["error", "dense"]

_NEVER = frozenset((*DEFAULT_DONE_KEYS, "reward"))
"""Keys whose value under ``next`` is not the root value of the following row."""


@dataclass(frozen=True)
class Pairs:
    """Leaves at the root, and their counterparts under ``next``.

    For most rows, the counterparts equal the root values of the following row.

    Attributes:
        schema: all leaves, as users see them.
        stored: the schema without the counterparts, that is the leaves that are stored for every
            row.
        overflow: the schema of the counterparts alone, which are the leaves of an overflow row.
        root_of: the root path of each counterpart, in the schema's order.
    """

    schema: Schema
    stored: Schema
    overflow: Schema
    root_of: dict[Path, Path]


def checked_keys(dedup_next: DedupNext) -> bool | tuple[Key, ...]:
    """Return the option ``dedup_next`` with its keys as flat tuples.

    Raises:
        TypeError: the option is neither a bool nor a collection of keys.
        ValueError: the collection is empty.
    """
    if isinstance(dedup_next, bool):
        return dedup_next
    if isinstance(dedup_next, (str, bytes)) or not isinstance(dedup_next, Iterable):
        raise TypeError(f"expected dedup_next as a bool or a list of root keys, got {dedup_next!r}")
    keys = tuple(dict.fromkeys(unravel(key) for key in dedup_next))
    if not keys:
        raise ValueError("expected at least one key in dedup_next, got none; False stores densely")
    return keys


def checked_mismatch(on_mismatch: object) -> Mismatch:
    """Return the option ``on_mismatch``; ValueError for an unknown word."""
    if on_mismatch == "error":
        return "error"
    if on_mismatch == "dense":
        return "dense"
    raise ValueError(f"expected on_mismatch 'error' or 'dense', got {on_mismatch!r}")


def pairs_of(schema: Schema, keys: bool | tuple[Key, ...]) -> Pairs:
    """Return the pairs of leaves of a schema whose values are stored once.

    Raises:
        ValueError: a key is a flag, or does not occur at the root and under ``next`` with one shape
            and dtype.
        ValueError: ``keys`` is True, but no key of the schema is eligible.
    """
    leaves = schema.leaves
    if isinstance(keys, tuple):
        for key in keys:
            if key in FLAG_KEYS:
                raise ValueError(
                    f"dedup_next: expected no flag, got {format_key(key)}: under 'next' it says "
                    "where episodes end, at the root it never does"
                )
            if leaves.get(key) is None or leaves.get(key) != leaves.get(("next", *key)):
                raise ValueError(
                    f"dedup_next: expected {format_key(key)} at the root and under 'next' with "
                    f"one shape and dtype, got {leaves.get(key, 'nothing')} and "
                    f"{leaves.get(('next', *key), 'nothing')}"
                )
    root_of: dict[Path, Path] = {}
    for path, leaf in leaves.items():
        root = path[1:]
        if path[:1] != ("next",) or not root or leaves.get(root) != leaf:
            continue
        if leaf.added or leaves[root].added:
            continue  # the first write fixes which leaves are stored once
        if root in keys if isinstance(keys, tuple) else root[-1] not in _NEVER:
            root_of[path] = root
    if not root_of:
        raise ValueError(
            "dedup_next=True: expected a key that occurs at the root and under 'next' with one "
            f"shape and dtype, got {', '.join(format_key(p or ('(root)',)) for p in leaves)}"
        )
    if overlap := root_of.keys() & set(root_of.values()):
        raise ValueError(
            f"dedup_next: expected keys outside of 'next', got {format_key(overlap.pop())}"
        )
    stored = schema.part([path for path in leaves if path not in root_of])
    return Pairs(schema, stored, schema.part(list(root_of)), root_of)


Array = np.ndarray[Any, Any]

_INT32 = 2**31 - 1
_ZERO = np.zeros(1, np.int64)


class Chains(NamedTuple):
    """Rows of a batch by stream.

    Attributes:
        keys: the keys of the streams, ``[m]``.
        first, last: places of the first and the last row of each stream, int64 ``[m]``.
        rows, followers: places of rows, and of the following rows of their streams.
    """

    keys: Array
    first: torch.Tensor
    last: torch.Tensor
    rows: Picked
    followers: Picked

    @property
    def linked(self) -> bool:
        """True if a row of the batch follows another row of the batch."""
        if isinstance(self.rows, slice):
            return bool(self.rows.stop > self.rows.start)
        return len(self.rows) > 0

    def followers_of(self, count: int) -> Array:
        """Return the place of each row's follower, or -1, as int64 ``[count]``."""
        found = np.full(count, -1, np.int64)
        if isinstance(self.rows, slice) or isinstance(self.followers, slice):
            found[self.rows] = np.arange(count)[self.followers]
        else:
            found[self.rows.numpy()] = self.followers.numpy()
        return found

    def at(self, device: torch.device) -> tuple[Picked, Picked]:
        """Return ``rows`` and ``followers`` as indices of tensors on a device."""
        if isinstance(self.rows, slice) or isinstance(self.followers, slice):
            return self.rows, self.followers
        return self.rows.to(device), self.followers.to(device)


def chains(keys: Array) -> Chains:
    """Group rows ``[n]``, ``n >= 1``, by the keys of their streams.

    The places are slices if there is one stream, or if streams take turns. Rows are then compared
    with their followers without a copy. Cost: a sort of the keys.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.next_rows import chains
        >>> found = chains(np.array([7, 5, 7, 7, 5]))
        >>> found.keys.tolist(), found.first.tolist(), found.last.tolist()
        ([5, 7], [1, 0], [4, 3])
        >>> found.rows.tolist(), found.followers.tolist()
        ([1, 0, 2], [4, 2, 3])
        >>> chains(np.array([1, 2, 1, 2, 1])).rows
        slice(0, 3, None)
    """
    count = len(keys)
    if count == 1:
        only = torch.zeros(1, dtype=torch.int64, device="cpu")
        return Chains(keys, only, only, slice(0, 0), slice(0, 0))
    order = np.argsort(keys, kind="stable")
    grouped = keys[order]
    same = grouped[1:] == grouped[:-1]
    others = np.flatnonzero(~same)
    starts = np.concatenate([_ZERO, others + 1])
    ends = np.concatenate([others, [count - 1]])
    rows: Any = order[:-1][same]
    followers: Any = order[1:][same]
    step = count - len(rows)
    # The batch has count - step pairs of rows with distance ``step``, so all of them are pairs of a
    # stream.
    if bool((followers - rows == step).all()):
        rows, followers = slice(0, count - step), slice(step, count)
    else:
        rows, followers = torch.from_numpy(rows), torch.from_numpy(followers)
    first, last = torch.from_numpy(order[starts]), torch.from_numpy(order[ends])
    return Chains(grouped[starts], first, last, rows, followers)


class Links:
    """Links from each slot to the slots of the next and previous row of its stream.

    A row without a next or previous row has a link to itself. Links are not checked. The code that
    sets them must make sure that the rows are stored.

    Cost: 8 bytes per slot, or 16 from 2**31 slots on. Their pages are allocated only when rows are
    written. Links of a checkpoint that was opened in place are read at their first use.

    Example:
        >>> import torch
        >>> from replaykit.storages.next_rows import Links
        >>> links = Links(4, torch.device("cpu"))
        >>> links.join(torch.tensor([3, 0]), torch.tensor([0, 2]))
        >>> links.after(torch.arange(4)).tolist(), links.before(torch.arange(4)).tolist()
        ([2, 1, 2, 0], [3, 1, 0, 3])
    """

    @torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.wide = slots > _INT32
        self._tables = self._zeros(), self._zeros()
        # The content of the tables, in files that were not read yet.
        self._later: ReadLater[_Distances] | None = None

    def _zeros(self) -> torch.Tensor:
        # Tables hold distances to slots. So zeros, the content of unwritten memory, mean no links.
        if self.device.type == "cpu":
            return torch.from_numpy(np.zeros(self.slots, np.int64 if self.wide else np.int32))
        dtype = torch.int64 if self.wide else torch.int32
        return torch.zeros(self.slots, dtype=dtype, device=self.device)

    @property
    def kind(self) -> Any:
        """The NumPy dtype of the distances."""
        return np.int64 if self.wide else np.int32

    @property
    def _after(self) -> torch.Tensor:
        return self._tables[0] if self._later is None else self._read()[0]

    @property
    def _before(self) -> torch.Tensor:
        return self._tables[1] if self._later is None else self._read()[1]

    @torch.inference_mode(False)
    def move_to(self, memory: Array) -> None:
        """Use ``memory``, on the CPU, as the table of next rows from now on."""
        self._tables = torch.from_numpy(memory), self._tables[1]

    def reread(self) -> int:
        """Compute the table of previous rows again.

        Returns:
            A bound for slots. Only slots below this bound may have links.

        Raises:
            ValueError: a link leads outside the slots, or a slot follows two slots.
        """
        after, before = (table.numpy() for table in self._tables)
        found = _distances(after)
        before[:] = found.before  # in place: the core has its address
        return found.stop

    def set_distances_later(self, steps: Sequence[Array | MappedRows]) -> None:
        """Set the distances from the first slots to their next rows, for a later read.

        Args:
            steps: the distances ``[n]``, as one or several equal arrays. If they differ, or are
                invalid as for ``reread``, each use of the links raises CheckpointError.
        """
        self._later = ReadLater(_distances, steps, "links between rows")

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._later is not None:
            found = self._later.read()
            after, before = (table.numpy() for table in self._tables)
            after[: len(found.after)], before[: len(found.after)] = found.after, found.before
            self._later = None
        return self._tables

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the distances to next and to previous rows.

        The distances are int64 if ``wide``, else int32.
        """
        return self._after.data_ptr(), self._before.data_ptr()

    def nbytes(self) -> int:
        """Return the bytes of both tables."""
        after, before = self._tables
        return after.nbytes + before.nbytes

    def after(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of the next rows, int64 ``[B]``."""
        return slots + self._after.index_select(0, slots)

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of the previous rows, int64 ``[B]``."""
        return slots + self._before.index_select(0, slots)

    def ends(self, slots: Array) -> Array:
        """Return a mask of the rows without a known next row, bool ``[B]``.

        Slots and result are on the CPU.
        """
        if self.device.type == "cpu":
            return np.asarray(self._after.numpy()[slots] == 0)
        found = self._after.index_select(0, torch.from_numpy(slots).to(self.device)) == 0
        return np.asarray(found.cpu().numpy())

    def steps(self, stop: int) -> torch.Tensor:
        """Return a copy of the distances from the first ``stop`` slots to their next rows."""
        return self._after[:stop].clone()

    def join(self, rows: torch.Tensor, followers: torch.Tensor) -> None:
        """Link rows to their followers, int64 ``[K]`` each."""
        step = (followers - rows).to(self._after.dtype)
        self._after[rows] = step
        self._before[followers] = -step

    def part(self, rows: torch.Tensor, followers: torch.Tensor) -> None:
        """Remove the links from rows to next rows, and from followers to previous rows."""
        self._after[rows] = 0
        self._before[followers] = 0

    def clear(self, stop: int) -> None:
        """Remove the links of the first ``stop`` slots.

        No other slot may have links.
        """
        self._later = None
        for table in self._tables:
            table[:stop].zero_()

    def neighbours(self, elements: torch.Tensor, stored: int) -> Neighbours:
        """Return the neighbours of distinct slots ``[K]`` of a write.

        The slots below ``stored`` held rows before the write. See ``indexing.neighbours``.

        Cost: O(K) for consecutive slots, else O(K log K).
        """
        after, before = self.after(elements), self.before(elements)
        places = _SlotOrder(elements)
        at, written = places.of(after)
        follows = after != elements
        inside = (follows & written).nonzero().flatten()
        outside = (follows & ~written & (after < stored)).nonzero().flatten()
        _, written = places.of(before)
        following = ((before != elements) & ~written & (before < stored)).nonzero().flatten()
        return Neighbours([(inside, at[inside])], outside, before[following], following)


class _Distances(NamedTuple):
    """Distances ``[n]`` to next and previous rows, without links from ``stop`` on."""

    after: Array
    before: Array
    stop: int


def _distances(*tables: Array) -> _Distances:
    """Compute the distances to previous rows from the distances to next rows.

    If several tables are given, they must be equal.

    Raises:
        ValueError: the tables differ, a link leads outside the slots, or two lead to one slot.
    """
    after = agreed(*tables)
    at = np.flatnonzero(after)
    followers = at + after[at]
    if len(at) and not 0 <= followers.min() <= followers.max() < len(after):
        raise ValueError(f"expected links between {len(after)} slots, got links to others")
    before, steps = np.zeros_like(after), -after[at]
    before[followers] = steps
    if not np.array_equal(before[followers], steps):
        raise ValueError("expected at most one previous row, got a slot that follows two")
    return _Distances(after, before, int(max(at.max(), followers.max())) + 1 if len(at) else 0)


class _SlotOrder:
    """The places of distinct slots ``[K]``, for look-ups."""

    def __init__(self, elements: torch.Tensor) -> None:
        self._count, self._first = len(elements), int(elements[0])
        run = arange(self._first, self._first + self._count).to(elements.device)
        self._rising: torch.Tensor | None = None
        if not torch.equal(elements, run):
            self._rising, self._order = elements.sort()

    def of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places of slots, and a mask of the slots found.

        Places of slots that were not found have no meaning.
        """
        if self._rising is None:
            at = slots - self._first
            return at, (at >= 0) & (at < self._count)
        at = torch.searchsorted(self._rising, slots).clamp_(max=self._count - 1)
        return self._order[at], self._rising[at] == slots


_LEAST_KNOWN: Final = 1024
"""Fewest known streams for a search that removes the streams without stored rows."""


class StreamTails:
    """The slot of the newest row of each stream, by the key of the stream.

    This object is not notified when rows are replaced. The key in the slot shows whether the row is
    still stored.

    Args:
        links: the links between rows.
        rows, key: the columns, and the path of the key.
        dtype: the dtype of the keys.

    Cost: a dict entry for each written stream. The count of entries is at most 1024, or at most
    twice the count of stored streams if that is more.
    """

    def __init__(self, links: Links, rows: Columns, key: Path, dtype: np.dtype[Any]) -> None:
        self._links, self._rows, self._key, self._dtype = links, rows, key, dtype
        self._slots: dict[Any, int] = {}
        self._most = _LEAST_KNOWN

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self) -> Any:
        """Return the keys of known streams, even of streams without stored rows."""
        return self._slots.keys()

    def found(self, slots: torch.Tensor) -> None:
        """Set the newest rows of all streams.

        ``slots`` are the stored slots from the oldest row to the newest.
        """
        self._slots = dict(zip(self._keys_at(slots).tolist(), slots.tolist(), strict=True))
        self._most = max(_LEAST_KNOWN, 2 * len(self._slots))

    def clear(self) -> None:
        """Forget all streams, because no row is stored any more."""
        self._slots = {}

    def of(self, found: Chains) -> tuple[Array, torch.Tensor]:
        """Find the stored newest rows of a batch's streams, which have no followers yet.

        Returns:
            The indices in ``found`` of the streams that have such a row, and the slots of these
            rows.
        """
        known = self._slots
        slots = np.array([known.get(key, -1) for key in found.keys.tolist()], np.int64)
        at = np.flatnonzero(slots >= 0)
        newest = slots[at]
        if len(at):
            held = self._links.ends(newest)
            held &= self._keys_at(torch.from_numpy(newest)) == found.keys[at]
            if not held.all():
                at, newest = at[held], newest[held]
        return at, torch.from_numpy(newest).to(self._rows.device)

    def append(self, found: Chains, slots: torch.Tensor) -> list[Any] | None:
        """Record a write of rows to slots ``[K]``.

        Returns:
            The keys of all known streams if the call removed streams without stored rows, else
            None.
        """
        self._slots.update(zip(found.keys.tolist(), slots[found.last].tolist(), strict=True))
        if len(self._slots) <= self._most:
            return None
        # The number of known streams has doubled since the last search, so searches are rare.
        keys = np.array(list(self._slots), self._dtype)
        slots = torch.tensor(list(self._slots.values()), device="cpu")
        there = self._keys_at(slots) == keys
        names, at = keys[there].tolist(), slots[torch.from_numpy(there)].tolist()
        self._slots = dict(zip(names, at, strict=True))
        self._most = max(_LEAST_KNOWN, 2 * len(names))
        return list(names)

    def _keys_at(self, slots: torch.Tensor) -> Array:
        return stream_keys(self._rows.gather_keys([self._key], slots)[self._key])


_Leaves = Mapping[Path, torch.Tensor]


def mismatch(
    earlier: _Leaves, later: _Leaves, pairs: Pairs, severed: torch.Tensor | None = None
) -> tuple[Path, int] | None:
    """Find the first row whose next observation differs from the following row.

    Only pairs of rows in one episode count.

    Args:
        earlier, later: rows ``[n, *F]`` by path, and their followers in time. An episode ends if a
            flag of the earlier row is set (see `end_flags`) or an id differs.
        pairs: the leaves to compare.
        severed: rows after which an episode ends without a flag, bool ``[n]``.

    Returns:
        The path of the counterpart, and the position of the row among the ``n`` rows; None if all
        rows agree.

    Cost: one pass over the paired leaves. Flags and ids are read only if rows differ.
    """
    first: tuple[Path, int] | None = None
    open_rows: torch.Tensor | None = None
    for path, root in pairs.root_of.items():
        differs = differing(earlier[path], later[root])
        if not bool(differs.any()):
            continue
        if open_rows is None:
            ended = _ended(earlier, later)
            open_rows = ~(ended if severed is None else ended | severed)
        wrong = (differs & open_rows).nonzero()
        if len(wrong) and (first is None or int(wrong[0]) < first[1]):
            first = path, int(wrong[0])
    return first


def _ended(earlier: _Leaves, later: _Leaves) -> torch.Tensor:
    """Return a mask of the rows that are the last of their episode, bool ``[n]``."""
    some = next(iter(earlier.values()))
    ended = torch.zeros(len(some), dtype=torch.bool, device=some.device)
    for key in end_flags(earlier):
        ended |= earlier[key].reshape(len(ended), -1).ne(0).any(1).to(ended.device)
    for key in EPISODE_KEYS:
        if key in earlier:
            ended |= differing(earlier[key], later[key]).to(ended.device)
    return ended


def check_batch(leaves: _Leaves, batch: torch.Size, pairs: Pairs) -> None:
    """Check the rows of a batch, leaves ``[n, *lanes, *F]``, against each other.

    Raises:
        ValueError: a row continues an episode, but differs from the next observation of the row
            before.
    """
    if batch[0] < 2:
        return
    cells, rows = batch[1:].numel(), batch.numel()
    flat = {
        path: leaf.reshape(rows, *leaf.shape[len(batch) :])
        for path, leaf in leaves.items()
        if _matters(path, pairs)
    }
    earlier = {path: leaf[: rows - cells] for path, leaf in flat.items()}
    later = {path: leaf[cells:] for path, leaf in flat.items()}
    found = mismatch(earlier, later, pairs)
    if found is not None:
        path, element = found
        row, lane = divmod(element, cells)
        _refuse(path, pairs, f"row {row + 1}", f"row {row} has", lane, cells)


def check_newest(
    earlier: _Leaves,
    leaves: _Leaves,
    batch: torch.Size,
    pairs: Pairs,
    severed: torch.Tensor | None = None,
) -> None:
    """Check the first row of a batch against the newest stored row.

    Args:
        earlier: the newest stored row, leaves ``[lanes, *F]``.
        leaves: the leaves of the batch, ``[*batch, *F]``.
        batch: the shape of the batch, ``[n, *lanes]``.
        pairs: the leaves to compare.
        severed: lanes whose newest row ends an episode, bool ``[lanes]``.

    Raises:
        ValueError: as ``check_batch``.
    """
    cells = batch[1:].numel()
    later = {
        path: leaf[:1].reshape(cells, *leaf.shape[len(batch) :])
        for path, leaf in leaves.items()
        if _matters(path, pairs)
    }
    device = next(iter(earlier.values())).device
    later = {path: leaf.to(device) for path, leaf in later.items()}
    found = mismatch(earlier, later, pairs, severed)
    if found is not None:
        _refuse(found[0], pairs, "row 0", "the newest stored row has", found[1], cells)


def check_streams(leaves: _Leaves, found: Chains, pairs: Pairs) -> None:
    """Check the rows of a batch, leaves ``[n, *F]``, against each other, by stream.

    Raises:
        ValueError: as ``check_batch``.
    """
    known = {path: leaf for path, leaf in leaves.items() if _matters(path, pairs)}
    places = arange(len(next(iter(known.values()))))
    wrong = mismatch(_some(known, found.rows), _some(known, found.followers), pairs)
    if wrong is not None:
        path, pair = wrong
        rows, followers = (int(places[part][pair]) for part in (found.rows, found.followers))
        _refuse(path, pairs, f"row {followers}", f"row {rows}, of the same stream, has", 0, 1)


def check_newest_of(earlier: _Leaves, leaves: _Leaves, first: torch.Tensor, pairs: Pairs) -> None:
    """Check rows ``first`` of a batch against the newest stored rows of their streams.

    ``first`` is int64 ``[m]``, and the stored rows ``earlier`` are leaves ``[m, *F]``.

    Raises:
        ValueError: as ``check_batch``.
    """
    known = {path: leaf for path, leaf in leaves.items() if _matters(path, pairs)}
    device = next(iter(earlier.values())).device
    later = {path: leaf.to(device) for path, leaf in _some(known, first).items()}
    found = mismatch(earlier, later, pairs)
    if found is not None:
        path, place = found
        row = f"row {int(first[place])}"
        _refuse(path, pairs, row, "the newest stored row of its stream has", 0, 1)


def _matters(path: Path, pairs: Pairs) -> bool:
    return (
        path in pairs.root_of
        or path in pairs.root_of.values()
        or path in FLAG_KEYS
        or path in EPISODE_KEYS
    )


def _some(leaves: _Leaves, at: slice | torch.Tensor) -> dict[Path, torch.Tensor]:
    return {path: carried(leaf)[at].view(leaf.dtype) for path, leaf in leaves.items()}


def _refuse(path: Path, pairs: Pairs, row: str, before: str, lane: int, cells: int) -> None:
    root, where = format_key(pairs.root_of[path]), f" (lane {lane})" if cells > 1 else ""
    raise ValueError(
        f"key {root}, {row}{where}: expected the value that {before} under {format_key(path)}, "
        "since no flag under 'next' and no change of an id ends the episode there, got another "
        'one; on_mismatch="dense" stores such rows in full'
    )
