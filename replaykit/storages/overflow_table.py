"""Store next observations that differ from the observation of the following row."""

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
from replaykit.storages.indexing import agreed, rising_below
from replaykit.storages.memory import allocate
from replaykit.storages.records import plan_records
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Path

__all__ = ["Change", "Grow", "Memory", "OverflowTable", "grow_in_memory"]

Grow = Callable[[Schema, int, Columns | None], Columns]
"""``grow(schema, entries, table)`` returns columns with ``entries`` slots and the table's
values."""

Array = np.ndarray[Any, Any]

_FIRST_ENTRIES = 64
_INT32 = 2**31 - 1


def grow_in_memory(device: torch.device) -> Grow:
    """Return a function that copies a table into a larger one on a device."""

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
    """A planned change of the table.

    Attributes:
        numbers: entries that get values, counted from 0.
        returned: entries that become free.
        free: number of free entries after the change.
    """

    numbers: torch.Tensor
    returned: torch.Tensor
    free: int


@dataclass(frozen=True)
class Memory:
    """Addresses for the core.

    Attributes:
        map: address of the map, which holds 1 + the entry of each element. It is int64 if ``wide``,
            else int32.
        wide: whether the map is int64.
        entries: number of entries of the table.
        stack: address of the list of entries, int64 ``[entries]``, in which the free entries come
            first.
        free: address of the count of free entries, int64.
    """

    map: int
    wide: bool
    entries: int
    stack: int
    free: int


@dataclass
class _Book:
    """The entries of elements, and the free entries.

    Attributes:
        map: 1 + the entry of each element, or 0 for an element without an entry.
        stack: the list of entries, ``[entries]``, in which the free entries come first.
        count: the number of free entries, ``[1]``, in memory that the core also changes.
    """

    map: torch.Tensor
    stack: torch.Tensor
    count: Array


class OverflowTable:
    """Separate entries for some elements of a storage, and a map to these entries.

    Released entries are used again. The table doubles when no entry is free, and never shrinks. The
    object is not thread-safe, so callers hold the storage's lock.

    Args:
        schema: the leaves of an entry.
        elements: number of elements of the storage.
        device: device of the map and the table.
        grow: function that allocates memory for the table.

    Cost: 4 bytes per element for the map, or 8 from 2**31 elements on. The pages of the map are
    allocated only when rows are written. There are at most twice as many entries as were ever in
    use at the same time. The map of a checkpoint that was opened in place is read at its first use.
    """

    @torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
    def __init__(self, schema: Schema, elements: int, device: torch.device, grow: Grow) -> None:
        self.schema = schema
        self.elements = elements
        self.device = device
        dtype = torch.int32 if elements <= _INT32 else torch.int64
        if device.type == "cpu":
            # The system allocates pages of zeros only when they are written to.
            kind = np.int32 if dtype is torch.int32 else np.int64
            numbers = torch.from_numpy(np.zeros(elements, kind))
        else:
            numbers = torch.zeros(elements, dtype=dtype, device=device)
        self._grow = grow
        self._table: Columns | None = None
        stack = torch.empty(0, dtype=torch.int64, device=device)
        self._book = _Book(numbers, stack, np.zeros(1, np.int64))
        # The elements of the entries, ``[used]``, if they are in files and were not read yet.
        self._later: ReadLater[Array] | None = None

    @property
    def unread(self) -> bool:
        """True if the elements of the entries are in files and were not read yet."""
        return self._later is not None

    @property
    def _known(self) -> _Book:
        if self._later is not None:
            self._replace_map(torch.from_numpy(self._later.read()))
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
        """The values of the entries; None before the first entry is needed."""
        return self._table

    def memory(self) -> Memory:
        """Return the addresses of everything but the table, on the CPU.

        They are valid until the table grows.
        """
        book = self._known
        return Memory(
            book.map.data_ptr(),
            book.map.dtype is torch.int64,
            len(book.stack),
            book.stack.data_ptr(),
            book.count.ctypes.data,
        )

    def __len__(self) -> int:
        """Return the number of entries in use."""
        return len(self._stack) - self._free

    def nbytes(self) -> int:
        """Return the bytes of the map, the table and the list of free entries."""
        table = self._table
        entries = 0 if table is None else table.nbytes() + table.slots * 8
        return self._book.map.nbytes + entries

    # -- reading ------------------------------------------------------------------------------

    def entries(self, elements: torch.Tensor) -> torch.Tensor:
        """Return 1 + the entry of each element ``[B]``; 0 for an element without one."""
        return self._map.index_select(0, elements)

    def elements_with(self, stop: int) -> torch.Tensor:
        """Return the elements below ``stop`` that have an entry, rising."""
        return self._map[:stop].nonzero().flatten()

    def patch(
        self, elements: torch.Tensor, leaves: dict[Path, torch.Tensor]
    ) -> dict[Path, torch.Tensor]:
        """Return leaves ``[B, *F]``, with the entries' values for elements with an entry.

        On the CPU the leaves change in place. On another device this makes new leaves, because a
        search for elements with an entry would wait for the device.
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
        """Plan a change that releases entries ``[R]`` and then uses ``count`` entries.

        This allocates memory if too few entries are free, and changes nothing else. A later
        ``commit`` of the plan therefore cannot fail.
        """
        back = len(returned)
        short = count - back
        if short > self._free:
            self.grow(short - self._free)
        free = self._free + back - count
        if short > 0:
            numbers = torch.cat([returned, self._stack[free : self._free]])
            return Change(numbers, returned[:0], free)
        return Change(returned[:count], returned[count:], free)

    def commit(self, change: Change, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Write the values of a planned change.

        The call may be repeated after an interrupt.
        """
        back = len(change.returned)
        self._stack[change.free - back : change.free] = change.returned
        self._book.count[0] = change.free
        if len(change.numbers):
            assert self._table is not None
            self._table.scatter(change.numbers, leaves, slice(None))

    def assign(self, elements: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """Set the entries of elements; None removes their entries."""
        if numbers is None:
            self._map[elements] = 0
        else:
            self._map[elements] = (numbers + 1).to(self._map.dtype)

    def adopt(self, elements: torch.Tensor, table: Columns) -> None:
        """Adopt an existing table, in which entry ``i`` belongs to ``elements[i]``.

        The other entries of the table are free. No element may have an entry before the call.
        """
        self._table = table
        self._replace_map(elements)

    def adopt_later(
        self, elements: Sequence[Array | MappedRows], table: Columns, stop: int
    ) -> None:
        """Adopt a table as ``adopt`` does, but read and check the elements at first use.

        Args:
            elements: the elements int64 ``[used]``, rising and below ``stop``, as one or several
                equal arrays. If the arrays are invalid, each use raises CheckpointError.
            table: as for ``adopt``.
            stop: number of stored elements.
        """
        self._table = table

        def make(*tables: Array) -> Array:
            return rising_below(stop, agreed(*tables))

        self._later = ReadLater(make, elements, "list of overflow rows")

    @torch.inference_mode(False)
    def _replace_map(self, elements: torch.Tensor) -> None:
        assert self._table is not None
        used, entries = len(elements), self._table.slots
        book = self._book
        book.map[elements] = arange(1, used + 1).to(book.map.dtype)
        book.stack = arange(used, used + entries) % entries
        book.count[0] = entries - used

    @property
    def kind(self) -> Any:
        """The NumPy dtype of the map."""
        return np.int64 if self._book.map.dtype is torch.int64 else np.int32

    @torch.inference_mode(False)
    def move_to(self, memory: Array) -> None:
        """Use the map in ``memory``, on the CPU, with its values, from now on."""
        self._book.map = torch.from_numpy(memory)

    @torch.inference_mode(False)
    def reread(self, table: Columns | None = None) -> int:
        """Compute the free entries from the map, after the map or the table has changed.

        Args:
            table: the new table; None keeps the present table.

        Returns:
            A bound for elements. Only elements below this bound may have an entry.

        Raises:
            ValueError: the map names an entry outside the table, or one entry twice.
        """
        self._table = table or self._table
        entries = 0 if self._table is None else self._table.slots
        numbers = self._map.numpy()
        at = np.flatnonzero(numbers)
        used = numbers[at] - 1
        if len(used) and not 0 <= used.min() <= used.max() < entries:
            raise ValueError(f"expected numbers of {entries} overflow entries, got others")
        free = np.ones(entries, np.bool_)
        free[used] = False
        if int(free.sum()) + len(used) > entries:
            raise ValueError("expected one row per overflow entry, got an entry of two rows")
        found = torch.from_numpy(np.flatnonzero(free))
        if entries != len(self._stack):
            self._book.stack = torch.zeros(entries, dtype=torch.int64, device="cpu")
        self._stack[: len(found)] = found  # in place: the core has its address
        self._book.count[0] = len(found)
        return int(at[-1]) + 1 if len(at) else 0

    @torch.inference_mode(False)
    def clear(self, stop: int) -> None:
        """Release all entries.

        Elements from ``stop`` on must have no entries.
        """
        book = self._book
        book.map[:stop].zero_()
        if self._later is not None and self._table is not None:
            book.stack, self._later = arange(self._table.slots), None
        book.count[0] = len(book.stack)
        book.stack.copy_(torch.arange(len(book.stack), device=self.device))

    @torch.inference_mode(False)
    def grow(self, more: int) -> None:
        """Allocate at least ``more`` free entries, which changes all addresses."""
        old = len(self._stack)
        entries = min(max(_FIRST_ENTRIES, 2 * old, old + more), self.elements)
        self._table = self._grow(self.schema, entries, self._table)
        fresh = arange(old, entries).to(self.device)
        book, free = self._book, self._free
        book.stack = torch.cat([book.stack[:free], fresh, book.stack[free:]])
        book.count[0] = free + entries - old
