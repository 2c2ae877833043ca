"""Which row follows which, where the rows of several streams lie in slots of any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater
from replaykit.storages.neighbours import Neighbours, Picked
from replaykit.storages.number_sets import agreed

__all__ = ["Chains", "Links", "chains"]

Array = np.ndarray[Any, Any]

_INT32 = 2**31 - 1
_ZERO = np.zeros(1, np.int64)


class Chains(NamedTuple):
    """Rows of a batch by stream.

    Attributes:
        keys: the streams among them, ``[m]``.
        first, last: places of the first and the last row of each, int64 ``[m]``.
        rows, followers: places of rows, and of the next ones of their streams.
    """

    keys: Array
    first: torch.Tensor
    last: torch.Tensor
    rows: Picked
    followers: Picked

    @property
    def linked(self) -> bool:
        """Whether a row of the batch follows another one."""
        if isinstance(self.rows, slice):
            return bool(self.rows.stop > self.rows.start)
        return len(self.rows) > 0

    def followers_of(self, count: int) -> Array:
        """The place of the next one for each of the ``count`` rows, or -1: int64 ``[count]``."""
        found = np.full(count, -1, np.int64)
        if isinstance(self.rows, slice) or isinstance(self.followers, slice):
            found[self.rows] = np.arange(count)[self.followers]
        else:
            found[self.rows.numpy()] = self.followers.numpy()
        return found

    def at(self, device: torch.device) -> tuple[Picked, Picked]:
        """``rows`` and ``followers`` as they index tensors on a device."""
        if isinstance(self.rows, slice) or isinstance(self.followers, slice):
            return self.rows, self.followers
        return self.rows.to(device), self.followers.to(device)


def chains(keys: Array) -> Chains:
    """Sorts rows ``[n]``, ``n >= 1``, by the keys of their streams.

    Streams that take turns, or one alone, come as slices: no row has to be copied to be compared
    with its follower. Cost: a sort of the keys.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.links import chains
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
    # As many pairs as are that far apart, and all of them that far apart: there are no others.
    if bool((followers - rows == step).all()):
        rows, followers = slice(0, count - step), slice(step, count)
    else:
        rows, followers = torch.from_numpy(rows), torch.from_numpy(followers)
    first, last = torch.from_numpy(order[starts]), torch.from_numpy(order[ends])
    return Chains(grouped[starts], first, last, rows, followers)


class Links:
    """Of each slot the one of the next row of its stream, and the one of the row before.

    A row without the one or the other names itself. Links say where to look; who sets them answers
    for what lies there.

    Cost: 8 bytes a slot (16 from 2**31 slots on), of memory that is touched only as rows are
    written. Links of a checkpoint that is opened in place are read by whoever asks first.

    Example:
        >>> import torch
        >>> from replaykit.storages.links import Links
        >>> links = Links(4, torch.device("cpu"))
        >>> links.join(torch.tensor([3, 0]), torch.tensor([0, 2]))
        >>> links.after(torch.arange(4)).tolist(), links.before(torch.arange(4)).tolist()
        ([2, 1, 2, 0], [3, 1, 0, 3])
    """

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.wide = slots > _INT32
        self._tables = self._zeros(), self._zeros()
        # What the tables are to hold: nobody has asked for it yet.
        self._later: ReadLater[_Told] | None = None

    def _zeros(self) -> torch.Tensor:
        # How far away the other slot is, so that memory that was never touched says: nothing.
        if self.device.type == "cpu":
            return torch.from_numpy(np.zeros(self.slots, np.int64 if self.wide else np.int32))
        dtype = torch.int64 if self.wide else torch.int32
        return torch.zeros(self.slots, dtype=dtype, device=self.device)

    @property
    def kind(self) -> Any:
        """How far away the next row lies is said in this dtype."""
        return np.int64 if self.wide else np.int32

    @property
    def _after(self) -> torch.Tensor:
        return self._tables[0] if self._later is None else self._read()[0]

    @property
    def _before(self) -> torch.Tensor:
        return self._tables[1] if self._later is None else self._read()[1]

    @torch.inference_mode(False)
    def keep_in(self, memory: Array) -> None:
        """Has the table of next rows lie elsewhere, as it is there; on the CPU."""
        self._tables = torch.from_numpy(memory), self._tables[1]

    def reread(self) -> int:
        """Makes the table of rows before anew, and returns how many slots tell of others.

        Raises:
            ValueError: a slot is not there, or follows two.
        """
        after, before = (table.numpy() for table in self._tables)
        told = _told(after)
        before[:] = told.before  # where the core knows it to be
        return told.stop

    def take_later(self, steps: Sequence[Array | MappedRows]) -> None:
        """Takes how far away the next rows of the first ones are, ``[n]``, once somebody asks.

        Args:
            steps: the same one or several times. Where they differ, or contradict themselves as
                ``reread`` says, each of those who ask gets CheckpointError.
        """
        self._later = ReadLater(_told, steps, "links between rows")

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._later is not None:
            told = self._later.read()
            after, before = (table.numpy() for table in self._tables)
            after[: len(told.after)], before[: len(told.after)] = told.after, told.before
            self._later = None
        return self._tables

    def addresses(self) -> tuple[int, int]:
        """Where, for each slot, lies how far away the next row is, and the one before: int64 if
        ``wide``, else int32."""
        return self._after.data_ptr(), self._before.data_ptr()

    def nbytes(self) -> int:
        """Bytes of both tables."""
        after, before = self._tables
        return after.nbytes + before.nbytes

    def after(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the next rows of rows, int64 ``[B]``."""
        return slots + self._after.index_select(0, slots)

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the rows before."""
        return slots + self._before.index_select(0, slots)

    def ends(self, slots: Array) -> Array:
        """Of which rows nothing is known to follow, bool ``[B]``; slots and answer on the CPU."""
        if self.device.type == "cpu":
            return np.asarray(self._after.numpy()[slots] == 0)
        found = self._after.index_select(0, torch.from_numpy(slots).to(self.device)) == 0
        return np.asarray(found.cpu().numpy())

    def steps(self, stop: int) -> torch.Tensor:
        """How far away the next row is, of the first ``stop`` slots: a copy."""
        return self._after[:stop].clone()

    def join(self, rows: torch.Tensor, followers: torch.Tensor) -> None:
        """Says that rows are followed by others, int64 ``[K]``."""
        step = (followers - rows).to(self._after.dtype)
        self._after[rows] = step
        self._before[followers] = -step

    def part(self, rows: torch.Tensor, followers: torch.Tensor) -> None:
        """Says that nothing follows rows, and that others follow nothing."""
        self._after[rows] = 0
        self._before[followers] = 0

    def clear(self, stop: int) -> None:
        """Forgets the first ``stop`` slots, all that tell of others."""
        self._later = None
        for table in self._tables:
            table[:stop].zero_()

    def neighbours(self, elements: torch.Tensor, stored: int) -> Neighbours:
        """Returns the neighbours of distinct slots ``[K]`` that are written, ``stored`` slots
        holding rows before; see ``storages.neighbours``.

        Cost: O(K) for slots one after the other, else O(K log K).
        """
        after, before = self.after(elements), self.before(elements)
        places = _Places(elements)
        at, written = places.of(after)
        follows = after != elements
        inside = (follows & written).nonzero().flatten()
        outside = (follows & ~written & (after < stored)).nonzero().flatten()
        _, written = places.of(before)
        following = ((before != elements) & ~written & (before < stored)).nonzero().flatten()
        return Neighbours([(inside, at[inside])], outside, before[following], following)


class _Told(NamedTuple):
    """How far away the next rows lie, and those before, ``[n]``; no slot from ``stop`` on tells."""

    after: Array
    before: Array
    stop: int


def _told(*tables: Array) -> _Told:
    """Works out the rows before; ValueError where there is no slot, or two lead to one."""
    after = agreed(*tables)
    at = np.flatnonzero(after)
    followers = at + after[at]
    if len(at) and not 0 <= followers.min() <= followers.max() < len(after):
        raise ValueError(f"expected links between {len(after)} slots, got others")
    before, steps = np.zeros_like(after), -after[at]
    before[followers] = steps
    if not np.array_equal(before[followers], steps):
        raise ValueError("expected one row before each, got a slot that follows two")
    return _Told(after, before, int(max(at.max(), followers.max())) + 1 if len(at) else 0)


class _Places:
    """Where slots are among distinct ones ``[K]``."""

    def __init__(self, elements: torch.Tensor) -> None:
        self._count, self._first = len(elements), int(elements[0])
        run = arange(self._first, self._first + self._count).to(elements.device)
        self._rising: torch.Tensor | None = None
        if not torch.equal(elements, run):
            self._rising, self._order = elements.sort()

    def of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of slots, and which of them there are; other places mean nothing."""
        if self._rising is None:
            at = slots - self._first
            return at, (at >= 0) & (at < self._count)
        at = torch.searchsorted(self._rising, slots).clamp_(max=self._count - 1)
        return self._order[at], self._rising[at] == slots
