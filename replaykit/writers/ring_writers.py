"""Write rows into a ring, or refuse to write into a data set."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from replaykit.keywords import checked_keywords
from replaykit.storages.indexing import as_slots, check_no_hole, last_occurrences
from replaykit.writers.writer import Writer, full_index

__all__ = ["ImmutableDatasetWriter", "RoundRobinWriter", "TensorDictRoundRobinWriter"]


class RoundRobinWriter(Writer):
    """Writes at the cursor, which goes round; the oldest records are displaced.

    A batch longer than the capacity leaves what writing its rows one by one would have left.
    Cursor, length, positions and generations change together, after the rows are in place.

    Args:
        track_generations: samples then carry ``index_generation``, int64 ``[B]``: how often the
            slot was written. Index and generation together name a record for ever.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(10)), rb[:], rb.write_count
        (tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1]), tensor([8, 9, 6, 7]), 10)
    """

    kind = "round_robin"

    @checked_keywords
    def __init__(self, *, track_generations: bool = False, compilable: bool = False) -> None:
        super().__init__()
        self.tracks_generations = track_generations

    def write(self, rows: Any) -> torch.Tensor:
        """Stores every row from the cursor on; returns its slot, int64 ``[B]`` (``[B, ndim]``)."""
        count, storage = len(rows), self.storage
        if not count:
            return self._no_rows()
        storage.check_order(rows)
        storage.accept(rows)
        ledger = storage.ledger
        slots = ledger.next_slots(count)
        storage.write_ring(ledger.cursor, rows, max(0, count - ledger.slots))
        storage.commit(rows)
        self._count(count)
        return full_index(slots, storage)

    def write_reusing(self, rows: Any, free: torch.Tensor) -> torch.Tensor:
        """Stores rows as new records in free slots first, then from the cursor on.

        Args:
            free: distinct slots below the length, int64 ``[K]``, of which nobody needs the records;
                at most as many as there are rows.

        Returns:
            The slot of each row, int64 ``[B]``.

        The storage's lock is held. Cost: as ``write``; the first time O(capacity), after which
        positions and generations take 16 bytes a slot.
        """
        count, storage = len(rows), self.storage
        if not len(free):
            return self.write(rows)
        storage.accept(rows)
        ledger = storage.ledger
        slots = torch.cat([free, ledger.next_slots(count - len(free))])
        last = last_occurrences(slots)
        storage.write(slots[last], rows, last)
        ledger.place(slots, move_cursor=count > len(free))
        self._count(count)
        return slots

    def write_at(self, index: Any, data: Any) -> torch.Tensor:
        """Stores rows as new records at explicit slots of dimension 0; the cursor stays.

        Args:
            index: an int with one row, or int64 ``[B]`` with a batch.

        Returns:
            The slots, int64 ``[B]`` (``[B * prod(lanes), ndim]`` with lanes).

        Raises:
            IndexError: outside the capacity. RuntimeError: a slot below them would stay without
                a record. ValueError: another number of rows than slots. SchemaError.
        """
        storage = self.storage
        rows = self.prepare(data, single=isinstance(index, int))
        if not len(rows):
            return self._no_rows()
        with storage.lock:
            slots = as_slots(index, storage.slots_for(rows))
            if len(slots) != len(rows):
                raise ValueError(f"expected {len(slots)} rows for as many slots, got {len(rows)}")
            check_no_hole(slots, storage.ledger.length)
            storage.accept(rows)
            last = last_occurrences(slots)
            storage.write(slots[last], rows, last)
            storage.ledger.place(slots, move_cursor=False)
            self._count(len(rows))
            index = full_index(slots, storage)
            storage.notify(index)
        return index


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same as RoundRobinWriter, under the name that code for TensorDicts uses.

    Example:
        >>> from replaykit import RoundRobinWriter, TensorDictRoundRobinWriter
        >>> issubclass(TensorDictRoundRobinWriter, RoundRobinWriter)
        True
    """


class ImmutableDatasetWriter(Writer):
    """Refuses every write. Rows that are there can still be edited in place.

    Example:
        >>> import torch
        >>> from replaykit import ImmutableDatasetWriter, ReplayBuffer, TensorStorage
        >>> rb = ReplayBuffer(storage=TensorStorage(torch.arange(3)),
        ...                   writer=ImmutableDatasetWriter())
        >>> rb.add(torch.tensor(3))
        Traceback (most recent call last):
        RuntimeError: This dataset doesn't allow writing.
    """

    kind = "immutable"

    def __init__(self, *, compilable: bool = False) -> None:
        super().__init__()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("This dataset doesn't allow writing.")

    def write(self, rows: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def add(self, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def extend(self, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def write_at(self, index: Any, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def prepare(self, data: Any, **_: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()
