"""Keep the values of those rows that cannot share the values of the row after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.memory import allocate
from replaykit.storages.records import plan_records
from replaykit.storages.slot_sets import agreed, rising_below
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Path

__all__ = ["Beside", "Change", "Grow", "Memory", "grow_in_memory"]

Grow = Callable[[Schema, int, Columns | None], Columns]
"""``grow(schema, entries, table)``: columns with that many slots, holding what the table does."""

Array = np.ndarray[Any, Any]

_FIRST_ENTRIES = 64
_INT32 = 2**31 - 1


def grow_in_memory(device: torch.device) -> Grow:
    """Returns what takes memory on a device, and copies the table there is."""

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        layout = plan_records(schema)
        tensors, records = allocate(schema, entries, torch.Size(), device, layout)
        grown = Columns(schema, tensors, 1, layout=layout, records=records)
        if table is not None:
            for path, column in table.tensors.items():
                carried(grown[path])[: table.slots] = carried(column)
        return grown

    return grow


@dataclass
class Change:
    """A change of the table, worked out and not made.

    Attributes:
        numbers: entries that get values, counted from 0.
        returned: entries that are free afterwards and were not before.
        free: how many are free afterwards.
    """

    numbers: torch.Tensor
    returned: torch.Tensor
    free: int


@dataclass(frozen=True)
class Memory:
    """Addresses for the core.

    Attributes:
        map: 1 + the entry of each element: int64 where ``wide``, else int32.
        entries: how many the table holds.
        stack: int64 ``[entries]``, the first of which are the free ones.
        free: how many are free, int64.
    """

    map: int
    wide: bool
    entries: int
    stack: int
    free: int


@dataclass
class _Book:
    """Who has which entry: 1 + the entry of each element, or 0; ``[entries]``, the first of which
    are the free ones; how many those are, ``[1]``, in memory that the core changes too."""

    map: torch.Tensor
    stack: torch.Tensor
    count: Array


class Beside:
    """Entries of their own for some elements of a storage, and a map that says for which.

    Entries that are given back are used again; the table doubles when none is left and never
    shrinks. Not thread-safe: the storage's lock guards it.

    Args:
        schema: what an entry holds.
        elements: number of elements of the storage.
        grow: takes memory for the table.

    Cost: 4 bytes an element for the map (of memory that is touched only as rows are written), and
    the entries: at most twice as many as there were in use at one time. Which elements of a
    checkpoint have one that is opened in place is read by whoever asks first.
    """

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def __init__(self, schema: Schema, elements: int, device: torch.device, grow: Grow) -> None:
        self.schema = schema
        self.elements = elements
        self.device = device
        dtype = torch.int32 if elements <= _INT32 else torch.int64
        if device.type == "cpu":
            # Pages of zeros are only taken when they are written to.
            kind = np.int32 if dtype is torch.int32 else np.int64
            numbers = torch.from_numpy(np.zeros(elements, kind))
        else:
            numbers = torch.zeros(elements, dtype=dtype, device=device)
        self._grow = grow
        self._table: Columns | None = None
        stack = torch.empty(0, dtype=torch.int64, device=device)
        self._book = _Book(numbers, stack, np.zeros(1, np.int64))
        # Whose the entries are, ``[used]``: nobody has asked for it yet.
        self._later: ReadLater[Array] | None = None

    @property
    def unread(self) -> bool:
        """Whether nobody has asked yet whose the entries are."""
        return self._later is not None

    @property
    def _known(self) -> _Book:
        if self._later is not None:
            self._take_book(torch.from_numpy(self._later.read()))
            self._later = None
        return self._book

    @property
    def _map(self) -> torch.Tensor:
        return self._known.map

    @property
    def _stack(self) -> torch.Tensor:
        return self._known.stack

    @property
    def _free(self) -> int:
        return int(self._known.count[0])

    @property
    def table(self) -> Columns | None:
        """What the entries hold; None before the first one is needed."""
        return self._table

    def memory(self) -> Memory:
        """Where everything but the table lies, on the CPU: until more entries are taken."""
        book = self._known
        return Memory(
            book.map.data_ptr(),
            book.map.dtype is torch.int64,
            len(book.stack),
            book.stack.data_ptr(),
            book.count.ctypes.data,
        )

    def __len__(self) -> int:
        """Number of entries in use."""
        return len(self._stack) - self._free

    def nbytes(self) -> int:
        """Bytes of the map, of the table and of the list of free entries."""
        table = self._table
        entries = 0 if table is None else table.nbytes() + table.slots * 8
        return self._book.map.nbytes + entries

    # -- reading ------------------------------------------------------------------------------

    def entries(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns 1 + the entry of each element ``[B]``, 0 where it has none."""
        return self._map.index_select(0, elements)

    def elements_with(self, stop: int) -> torch.Tensor:
        """Returns the elements below ``stop`` that have an entry, rising."""
        return self._map[:stop].nonzero().flatten()

    def patch(
        self, elements: torch.Tensor, leaves: dict[Path, torch.Tensor]
    ) -> dict[Path, torch.Tensor]:
        """Puts what elements ``[B]`` have beside into leaves ``[B, *F]``; returns the leaves.

        On the CPU they are changed where they are; elsewhere, where to look for elements without
        an entry would mean to wait, they are made anew.
        """
        table = self._table
        if table is None:
            return leaves
        entries = self.entries(elements)
        if self.device.type == "cpu":
            at = entries.nonzero().flatten()
            if not len(at):
                return leaves
            rows = entries.index_select(0, at).to(torch.int64).sub_(1)
            for path, values in table.gather(rows).items():
                carried(leaves[path]).index_copy_(0, at, carried(values))
            return leaves
        found = table.gather((entries.to(torch.int64) - 1).clamp_(min=0))
        patched = {}
        for path, values in found.items():
            has = (entries > 0).view(-1, *[1] * (values.ndim - 1))
            leaf = leaves[path]
            patched[path] = torch.where(has, carried(values), carried(leaf)).view(leaf.dtype)
        return patched

    # -- changing -----------------------------------------------------------------------------

    def plan(self, returned: torch.Tensor, count: int) -> Change:
        """Works out a change: entries ``[R]`` come back, ``count`` are taken.

        Takes memory where too few are free, and changes nothing else: what can fail, fails here.
        """
        back = len(returned)
        short = count - back
        if short > self._free:
            self.take(short - self._free)
        free = self._free + back - count
        if short > 0:
            numbers = torch.cat([returned, self._stack[free : self._free]])
            return Change(numbers, returned[:0], free)
        return Change(returned[:count], returned[count:], free)

    def commit(self, change: Change, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Fills the entries that a change takes; may be done again after an interrupt."""
        back = len(change.returned)
        self._stack[change.free - back : change.free] = change.returned
        self._book.count[0] = change.free
        if len(change.numbers):
            assert self._table is not None
            self._table.scatter(change.numbers, leaves, slice(None))

    def assign(self, elements: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """Says which entries elements have; ``None``: none."""
        if numbers is None:
            self._map[elements] = 0
        else:
            self._map[elements] = (numbers + 1).to(self._map.dtype)

    def adopt(self, elements: torch.Tensor, table: Columns) -> None:
        """Takes a table that is there: entry ``i`` is of element ``elements[i]``, and those behind
        them are free. No element had one before."""
        self._table = table
        self._take_book(elements)

    def adopt_later(
        self, elements: Sequence[Array | MappedRows], table: Columns, stop: int
    ) -> None:
        """As ``adopt``; elements are read and checked once somebody asks whose the entries are.

        Args:
            elements: the same one or several times, rising and below ``stop``, int64 ``[used]``.
                Where they are others, each of those who ask gets CheckpointError.
        """
        self._table = table

        def make(*tables: Array) -> Array:
            return rising_below(stop, agreed(*tables))

        self._later = ReadLater(make, elements, "list of rows with values beside")

    @torch.inference_mode(False)
    def _take_book(self, elements: torch.Tensor) -> None:
        assert self._table is not None
        used, entries = len(elements), self._table.slots
        book = self._book
        book.map[elements] = arange(1, used + 1).to(book.map.dtype)
        book.stack = arange(used, used + entries) % entries
        book.count[0] = entries - used

    @property
    def kind(self) -> Any:
        """The map is of this dtype."""
        return np.int64 if self._book.map.dtype is torch.int64 else np.int32

    @torch.inference_mode(False)
    def keep_in(self, memory: Array) -> None:
        """Has the map lie elsewhere, as it is there; on the CPU."""
        self._book.map = torch.from_numpy(memory)

    @torch.inference_mode(False)
    def reread(self, table: Columns | None = None) -> int:
        """Takes a table that is there, or the one it has, and works out from the map which entries
        are free; returns how many elements, from 0 on, may have one.

        Raises:
            ValueError: an entry is not there, or of two elements.
        """
        self._table = table or self._table
        entries = 0 if self._table is None else self._table.slots
        numbers = self._map.numpy()
        at = np.flatnonzero(numbers)
        used = numbers[at] - 1
        if len(used) and not 0 <= used.min() <= used.max() < entries:
            raise ValueError(f"expected numbers of {entries} entries beside, got others")
        free = np.ones(entries, np.bool_)
        free[used] = False
        if int(free.sum()) + len(used) > entries:
            raise ValueError("expected an entry beside for each row, got one of two rows")
        found = torch.from_numpy(np.flatnonzero(free))
        if entries != len(self._stack):
            self._book.stack = torch.zeros(entries, dtype=torch.int64, device="cpu")
        self._stack[: len(found)] = found  # where the core knows it to be
        self._book.count[0] = len(found)
        return int(at[-1]) + 1 if len(at) else 0

    @torch.inference_mode(False)
    def clear(self, stop: int) -> None:
        """Gives back all entries; elements from ``stop`` on have none."""
        book = self._book
        book.map[:stop].zero_()
        if self._later is not None and self._table is not None:
            book.stack, self._later = arange(self._table.slots), None
        book.count[0] = len(book.stack)
        book.stack.copy_(torch.arange(len(book.stack), device=self.device))

    @torch.inference_mode(False)
    def take(self, more: int) -> None:
        """Takes memory for at least so many more free entries, with everything in a new place."""
        old = len(self._stack)
        entries = min(max(_FIRST_ENTRIES, 2 * old, old + more), self.elements)
        self._table = self._grow(self.schema, entries, self._table)
        fresh = arange(old, entries).to(self.device)
        book, free = self._book, self._free
        book.stack = torch.cat([book.stack[:free], fresh, book.stack[free:]])
        book.count[0] = free + entries - old
