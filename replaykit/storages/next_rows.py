"""Find the following row of each row, and check its observation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from replaykit.episodes.streams import stream_keys
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.memory import carried, differing
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


def pairs_of(schema: Schema, keys: bool | tuple[Key, ...], lane_key: Path | None = None) -> Pairs:
    """Return the pairs of leaves of a schema whose values are stored once.

    Ids of episodes and streams are stored in every row, because their columns are read in place.

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
        if root in EPISODE_KEYS or root == lane_key:
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

_ZERO = np.zeros(1, np.int64)


class Chains(NamedTuple):
    """Rows of a batch by stream.

    Attributes:
        keys: the keys of the streams, ``[m]``.
        first, last: places of the first and the last row of each stream, int64 ``[m]``.
        rows, followers: places of rows, and of the following rows of their streams, int64.
    """

    keys: Array
    first: Array
    last: Array
    rows: Array
    followers: Array

    def before(self, count: int) -> Array:
        """Return the place of the row before each row, or -1, as int64 ``[count]``."""
        found = np.full(count, -1, np.int64)
        found[self.followers] = self.rows
        return found


def chains(keys: Array) -> Chains:
    """Group rows ``[n]``, ``n >= 1``, by the keys of their streams. Cost: a sort of the keys.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.next_rows import chains
        >>> found = chains(np.array([7, 5, 7, 7, 5]))
        >>> found.keys.tolist(), found.first.tolist(), found.last.tolist()
        ([5, 7], [1, 0], [4, 3])
        >>> found.rows.tolist(), found.followers.tolist()
        ([1, 0, 2], [4, 2, 3])
    """
    if len(keys) == 1:
        return Chains(keys, _ZERO, _ZERO, _ZERO[:0], _ZERO[:0])
    order = np.argsort(keys, kind="stable")
    grouped = keys[order]
    same = grouped[1:] == grouped[:-1]
    others = np.flatnonzero(~same)
    starts = np.concatenate([_ZERO, others + 1])
    ends = np.concatenate([others, [len(keys) - 1]])
    return Chains(grouped[starts], order[starts], order[ends], order[:-1][same], order[1:][same])


def following_lanes(count: int, lanes: int, newest: int) -> Array:
    """Return the rows before consecutive rows, int64 ``[count]``, see `adjacent`.

    ``newest`` is the first stored row before them; -1 if there is none.
    """
    before = np.arange(-lanes, count - lanes)
    before[:lanes] = -1 if newest < 0 else -2 - newest - np.arange(min(lanes, count))
    return before


def adjacent(elements: Array, lanes: int, total: int, stored: int) -> tuple[Array, Array]:
    """Return the rows before and after distinct elements ``[K]`` of a ring.

    Args:
        lanes: distance from an element to the next one of its lane.
        total: number of elements of the ring.
        stored: elements below this number hold a row.

    Returns:
        The place in the batch of the row before each, or ``-2 - element`` of a stored row, or -1.
        And the stored element after each, or -1 also if it is in the batch.

    Cost: a sort.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.next_rows import adjacent
        >>> [found.tolist() for found in adjacent(np.array([4, 0]), 1, 5, 5)]
        [[-5, 0], [-1, 1]]
    """
    order = np.argsort(elements, kind="stable")
    rising = elements[order]

    def places(wanted: Array) -> Array:
        at = np.minimum(np.searchsorted(rising, wanted), len(rising) - 1)
        return np.where(rising[at] == wanted, order[at], -1)

    before, after = (elements - lanes) % total, (elements + lanes) % total
    inside = places(before)
    earlier = np.where(inside >= 0, inside, np.where(before < stored, -2 - before, -1))
    return earlier, np.where((places(after) < 0) & (after < stored), after, -1)


_LEAST_KNOWN: Final = 1024
"""Fewest known streams for a search that removes the streams without stored rows."""


class StreamTails:
    """The slot of the newest row of each stream, by the key of the stream.

    This object is not notified when rows are replaced. The key in the slot shows whether the row is
    still stored.

    Args:
        rows, key: the columns, and the path of the key.
        dtype: the dtype of the keys.

    Cost: a dict entry for each written stream. The count of entries is at most 1024, or at most
    twice the count of stored streams if that is more.
    """

    def __init__(self, rows: Columns, key: Path, dtype: Any) -> None:
        self._rows, self._key, self._dtype = rows, key, dtype
        self._slots: dict[Any, int] = {}
        self._most = _LEAST_KNOWN

    def found(self, slots: torch.Tensor) -> None:
        """Set the newest rows of all streams.

        ``slots`` are the stored slots from the oldest row to the newest.
        """
        self._slots = dict(zip(self._keys_at(slots).tolist(), slots.tolist(), strict=True))
        self._most = max(_LEAST_KNOWN, 2 * len(self._slots))

    def follow(self, slots: torch.Tensor) -> None:
        """Record rows that another process has written to these slots, in write order."""
        self.append(chains(self._keys_at(slots)), slots)

    def clear(self) -> None:
        """Forget all streams, because no row is stored any more."""
        self._slots = {}

    def of(self, found: Chains) -> tuple[Array, Array]:
        """Find the newest rows of a batch's streams, if they are still stored.

        Returns:
            The indices in ``found`` of the streams that have such a row, and the slots of these
            rows.
        """
        known = self._slots
        slots = np.array([known.get(key, -1) for key in found.keys.tolist()], np.int64)
        at = np.flatnonzero(slots >= 0)
        newest = slots[at]
        if len(at):
            held = self._keys_at(torch.from_numpy(newest)) == found.keys[at]
            if not held.all():
                at, newest = at[held], newest[held]
        return at, newest

    def append(self, found: Chains, slots: torch.Tensor) -> list[Any] | None:
        """Record a write of rows to slots ``[K]``.

        Returns:
            The keys of all known streams if the call removed streams without stored rows, else
            None.
        """
        last = slots.numpy()[found.last].tolist()
        self._slots.update(zip(found.keys.tolist(), last, strict=True))
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


def check_follows(
    leaves: _Leaves,
    before: Array,
    pairs: Pairs,
    lanes: int,
    newest: _Leaves,
    at: Array,
    *,
    streams: bool,
) -> None:
    """Check the rows of a batch against the rows before them.

    Only rows in one episode count. An episode ends if a flag of the earlier row is set (see
    `end_flags`) or an id differs.

    Args:
        leaves: the rows, leaves ``[n, *F]`` by path.
        before: for each row the place in the batch of the row before it; negative for none.
        pairs: the leaves to compare.
        lanes: number of lanes.
        newest: stored rows ``[m, *F]``.
        at: the places of the rows that must follow ``newest``, int64 ``[m]``.
        streams: whether rows follow each other by stream.

    Raises:
        ValueError: a row continues an episode, but differs from the next observation of the row
            before.

    Cost: one pass over the paired leaves. Flags and ids are read only if rows differ.
    """
    read = {*pairs.root_of, *pairs.root_of.values(), *FLAG_KEYS, *EPISODE_KEYS}
    kept = {path: leaf for path, leaf in leaves.items() if path in read}
    known = f"the newest stored row{' of its stream' if streams else ''} has"
    if len(at):
        device = next(iter(newest.values())).device
        later = {path: leaf.to(device) for path, leaf in _some(kept, at).items()}
        found = _mismatch(newest, later, pairs)
        if found is not None:
            _refuse(found[0], pairs, int(at[found[1]]), known, lanes)
    followers = np.flatnonzero(before >= 0)
    if len(followers):
        rows = before[followers]
        found = _mismatch(_some(kept, rows), _some(kept, followers), pairs)
        if found is not None:
            of_stream = ", of the same stream," if streams else ""
            earlier = f"row {int(rows[found[1]]) // lanes}{of_stream} has"
            _refuse(found[0], pairs, int(followers[found[1]]), earlier, lanes)


def _mismatch(earlier: _Leaves, later: _Leaves, pairs: Pairs) -> tuple[Path, int] | None:
    first: tuple[Path, int] | None = None
    ended: torch.Tensor | None = None
    for path, root in pairs.root_of.items():
        differs = differing(earlier[path], later[root])
        if not bool(differs.any()):
            continue
        if ended is None:
            ended = _ended(earlier, later).to(differs.device)
        wrong = (differs & ~ended).nonzero()
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


def _some(leaves: _Leaves, at: Array) -> dict[Path, torch.Tensor]:
    index = torch.from_numpy(at)
    return {
        path: carried(leaf)[index.to(leaf.device)].view(leaf.dtype) for path, leaf in leaves.items()
    }


def _refuse(path: Path, pairs: Pairs, row: int, before: str, lanes: int) -> None:
    root, (step, lane) = format_key(pairs.root_of[path]), divmod(row, lanes)
    where = f" (lane {lane})" if lanes > 1 else ""
    raise ValueError(
        f"key {root}, row {step}{where}: expected the value that {before} under "
        f"{format_key(path)}, since no flag under 'next' and no change of an id ends the episode "
        'there, got another one; on_mismatch="dense" stores such rows in full'
    )
