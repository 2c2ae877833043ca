"""Define the base class of storages, which custom storages extend."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import Uncompiled, arange, is_tensordict
from replaykit.checkpoint import save_snapshot
from replaykit.declared import Positive, read_value
from replaykit.interrupts import Lock, ProcessLock
from replaykit.keywords import named_after, old_name
from replaykit.schema import Schema
from replaykit.storages.content import Content
from replaykit.storages.indexing import as_slots, last_occurrences
from replaykit.storages.ledger import Ledger
from replaykit.storages.save_hooks import (
    Hook,
    check_no_checkpointer,
    checked_hook,
    load_rows,
    rows_snapshot,
)
from replaykit.structure import Path, map_leaves


class Listener(Protocol):
    """An object that is notified of writes."""

    def mark_update(self, index: torch.Tensor) -> None:
        """Follow a write of the rows at ``index``."""


@named_after
class Storage(Uncompiled, ABC):
    """Base class of storages, which hold the rows of a buffer.

    A custom storage defines ``set``, ``get``, ``__len__``, ``contains``, ``state_dict`` and
    ``load_state_dict``. It also defines ``clear`` if the buffer must support ``empty()``. With
    ``ndim == 1`` it inherits all other methods.

    Attributes:
        max_size: capacity in rows; for ``ndim > 1``, rows of all lanes count.
        ndim: number of leading dimensions that count as rows. Dimension 0 is time, and the others
            are lanes.
        ledger: the counts, row ids and generations of the rows. All buffers over this storage share
            it.
        save_hooks, load_hooks: the hooks, in the order of registration.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> storage = LazyTensorStorage(100)
        >>> _ = ReplayBuffer(storage=storage).extend(torch.arange(5.0))
        >>> len(storage), storage.max_size, storage[2].item()
        (5, 100, 2.0)
    """

    stack_dim = 0
    """Dimension of a batch along which the rows are stacked."""

    def __init__(self, max_size: int, *, ndim: int = 1) -> None:
        if type(max_size) is not int or max_size < 1:
            raise ValueError(f"expected max_size as an int of at least 1, got {max_size!r}")
        read_value(Positive, ndim, "ndim")
        self.save_hooks: list[Hook] = []
        self.load_hooks: list[Hook] = []
        self.max_size = max_size
        self.ndim = ndim
        self.ledger = Ledger(max_size)
        # Keeps ledger, counts and priorities in files. If it is None, they are lost with the
        # process.
        self.recovery: Any = None
        self._listeners: list[weakref.ref[Listener]] = []

    lock: Any = ProcessLock(lambda storage: storage._new_lock())
    """The re-entrant lock that is held during every write, draw and read.

    Signals wait while the main thread holds it. Ctrl-C therefore never leaves a change half done.
    """

    def poll(self, *, whole: bool = False) -> None:
        """Read the changes of other processes that share the storage.

        By default it reads only the number of stored rows. With ``whole`` it reads all changes.
        """
        if self.recovery is not None:
            self.recovery.poll(whole=whole)

    look = old_name("look", "poll")

    def _new_lock(self) -> Any:
        return Lock() if self.recovery is None else self.recovery.new_lock()

    # -- required methods ---------------------------------------------------------------------

    @abstractmethod
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at slots: an int, slice, range, sequence or LongTensor."""

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Read one row for an int, or a batch for any other index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def contains(self, item: Any) -> bool | torch.Tensor:
        """Return whether rows are stored."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored rows."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of the rows of another storage."""

    # -- optional methods ---------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size | None:
        """Shape ``[N]`` or ``[T, *lanes]`` of the rows; None before the first write."""
        return torch.Size([len(self)])

    @property
    def device(self) -> torch.device | str:
        """Device of the rows."""
        return torch.device("cpu")

    @property
    def schema(self) -> Schema | None:
        """Layout of the rows; None before the first write, or if rows have no schema."""
        return None

    @property
    def identity(self) -> dict[str, Any] | None:
        """Values that identify the rows if a save need not include them, or None.

        Rows have an identity if another file or directory keeps them unchanged. A save then stores
        these values in place of the rows. If the identity is None, a save has to include the rows.
        """
        return None

    @property
    def lanes(self) -> torch.Size:
        """Sizes of the dimensions after time; empty for ``ndim == 1``."""
        return torch.Size()

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> Any:
        """Return the rows of ``data``, checked and ready to be written.

        The result has a length. Writers call this before they reserve slots, so that invalid data
        changes nothing.
        """
        return [data] if single else data

    def batch_of_one(self, data: Any, dim: int) -> Any:
        """Return one row as a batch of one, along ``dim``."""
        if isinstance(data, torch.Tensor) or is_tensordict(data) or is_tensorclass(data):
            return data.unsqueeze(dim)
        return map_leaves(data, lambda leaf: leaf.unsqueeze(dim))

    def slots_for(self, rows: Any) -> int:
        """Return the number of slots that the storage has once it accepts these rows."""
        return self.ledger.slots

    def _slots_at(self, cursor: Any, rows: Any) -> torch.Tensor:
        """Return the slots that the argument ``cursor`` of ``set`` selects for these rows."""
        limit, length = self.slots_for(rows), self.ledger.length
        if isinstance(cursor, slice) and cursor.stop is None:
            stored = range(*cursor.indices(length))
            if stored and len(stored) == len(rows):
                limit = length
        return as_slots(cursor, limit)

    def check_order(self, rows: Any) -> None:
        """Refuse prepared rows that cannot follow the newest row, or each other, in time.

        The writer holds the lock. It calls this before ``accept`` if it will write the rows at the
        cursor.
        """

    def accept(self, rows: Any) -> None:
        """Check prepared rows once more, and allocate memory if there is none.

        The writer holds the lock, and calls this before it reserves slots. No later step may refuse
        the rows.
        """

    def write(self, slots: torch.Tensor, rows: Any, kept: torch.Tensor | slice) -> None:
        """Write the prepared rows ``rows[kept]`` at distinct ``slots``.

        The ledger does not change here. The writer commits the rows afterwards.
        """
        if isinstance(kept, slice):
            kept = arange(len(rows))[kept]
        for slot, row in zip(slots.tolist(), kept.tolist(), strict=True):
            self.set(slot, rows[row])

    def place(
        self,
        slots: torch.Tensor,
        rows: Any,
        of: torch.Tensor | None = None,
        *,
        move_cursor: bool,
    ) -> torch.Tensor | slice:
        """Write the accepted rows ``rows[of]`` at ``slots``, and commit them.

        Args:
            slots: int64 ``[K]``. Of several rows for one slot, the last one is stored.
            of: the places of the rows, int64 ``[K]``; None for all rows.
            move_cursor: as for ``Ledger.place``.

        Returns:
            The places in ``slots`` of the rows that are stored.
        """
        last = last_occurrences(slots)
        tables = self.ledger.reserve(slots)
        self.write(slots[last], rows, last if of is None else of[last])
        self.ledger.place(slots, tables, move_cursor=move_cursor)
        return last

    def commit(self, rows: Any) -> None:
        """Commit rows that were written at the cursor."""
        self.ledger.advance(len(rows))

    def write_ring(self, first: int, rows: Any, skipped: int) -> None:
        """Write ``rows[skipped:]`` at the slots from ``first + skipped`` on, in the ring.

        The effect is that of ``write`` at these slots. A storage may override this with a faster
        method.
        """
        slots = (arange(skipped, len(rows)) + first) % self.ledger.slots
        self.write(slots, rows, slice(skipped, None))

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Read copies of the rows at an int64 ``[B]`` (or ``[B, ndim]``).

        With ``own=False`` the caller promises not to change the rows. A storage of objects may then
        return the stored objects themselves.
        """
        return self.get(index)

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        """Replace stored rows; length, cursor, row ids and generations stay the same."""
        self.set(index, value, set_cursor=False)

    def flatten(self) -> Storage:
        """Return a storage with ``ndim == 1`` over the same rows.

        This base class returns the storage itself.

        Raises:
            RuntimeError: nothing was written yet.
        """
        if not self.ledger.next_position:
            raise RuntimeError(
                "Cannot get elements out of a non-initialized storage: nothing is stored yet"
            )
        return self

    def collate(self, rows: Any) -> Any:
        """Collate the rows of a batch. This base class returns them unchanged."""
        return rows

    def clear(self) -> None:
        """Release all rows; the caller holds the lock.

        Raises:
            NotImplementedError: a custom storage does not define ``clear``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be emptied: it defines no clear(self) that removes all "
            "of its rows"
        )

    def content(self) -> Content:
        """Return the stored rows, as columns or row by row; the caller holds the lock."""
        return Content(
            len(self), order=torch.full((len(self),), -1, device="cpu"), plain=tuple(self)
        )

    def content_of(self, state_dict: dict[str, Any]) -> Content | None:
        """Return the rows of a state dict; None if only ``load_state_dict`` can load it."""
        return None

    @property
    def checks_before_load(self) -> bool:
        """True if ``load_content`` calls ``Content.check`` before anything changes."""
        return False

    def check_content(self, content: Content) -> Any:
        """Check that the rows of ``content`` fit; return the target for ``load_content``.

        Nothing visible changes.
        """
        return content.items()

    def load_content(self, content: Content, target: Any, rows: torch.Tensor | None) -> None:
        """Load all rows into their own slots, or ``rows`` into slots ``0, 1, ...``."""
        picked = target if rows is None else [target[row] for row in rows.tolist()]
        for slot, item in enumerate(picked):
            self.set(slot, item)

    def check_resizable(self) -> None:
        """Raise RuntimeError if the capacity of this storage is fixed."""
        if type(self).resized is Storage.resized:
            self.resized(self.max_size, None)

    def resized(
        self, max_size: int, rows: torch.Tensor | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes the capacity, and moves ``rows`` to slots ``0, 1, ...``.

        An error in the context undoes both. The caller holds the lock.

        Args:
            rows: old slots of the rows that stay, oldest first; None if all rows keep their slots.

        Raises:
            RuntimeError: the capacity of this storage is fixed. Nothing has changed then.
        """
        raise RuntimeError(f"expected a storage whose capacity can change, got {self!r}")

    @contextlib.contextmanager
    def _undone_on_error(self, *parts: Any) -> Iterator[None]:
        """Return a context whose error restores the attributes of storage, ledger and parts."""
        parts = (self, self.ledger, *parts)
        saved = [dict(vars(part)) for part in parts]
        try:
            yield
        except BaseException:
            for part, attributes in zip(parts, saved, strict=True):
                vars(part).update(attributes)
            self.ledger.log.rows = self.ledger.slots
            raise

    def undo_content(self) -> Callable[[], None]:
        """Return a function that undoes the next ``load_content``.

        The function may be called until the ledger and the episodes have followed the load. The
        caller holds the lock.

        Cost: a copy of the stored rows.
        """
        content = self.content()
        target = self.check_content(content)
        return lambda: self.load_content(content, target, None)

    def _load_rows(self, content: Content) -> None:
        """Replace all rows by others, which get the first slots.

        Raises:
            ValueError: there are too many rows.
            SchemaError: the rows do not fit.
        """
        with self.lock:
            target = self.check_content(content)
            limit = getattr(target, "slots", self.ledger.slots)
            if content.rows > limit:
                raise ValueError(f"expected at most {limit} rows, got {content.rows}")
            self.load_content(content, target, None)
            self.ledger.clear()
            self.ledger.advance(content.rows)
            self.restore_episodes(None, self.ledger, None)

    # -- rows in a directory ------------------------------------------------------------------

    @property
    def checkpointer(self) -> None:
        """Always None, because storages do not use checkpointers.

        To set another value raises TypeError.
        """
        return None

    @checkpointer.setter
    def checkpointer(self, value: object) -> None:
        check_no_checkpointer(value)

    def register_save_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows before ``dumps`` writes them.

        If the hook has the attributes ``shift`` and ``is_full``, they are set before each call.
        ``shift`` is the slot after the newest row, and ``is_full`` is True if every slot holds a
        row.
        """
        self.save_hooks.append(checked_hook(hook))

    def register_load_hook(self, hook: Hook) -> None:
        """Add a function that changes the rows after ``loads`` has read them."""
        self.load_hooks.append(checked_hook(hook))

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the rows with their slots into a directory; an error leaves it unchanged.

        ``keep`` and the cost are as for ``ReplayBuffer.dumps``.

        Raises:
            TypeError: a row cannot be saved without pickle. Nothing was written then.
        """
        save_snapshot(path, lambda base: rows_snapshot(self, path, base), keep=keep)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load rows that ``dumps`` of this or another kind of storage has saved.

        If the capacity differs, the rows are stored in write order from slot 0. A smaller storage
        keeps the newest rows. A UserWarning then gives the number of rows that were left out.

        Raises:
            FileNotFoundError: the directory has no checkpoint.
            CheckpointError: the checkpoint is damaged.
            SchemaError: the rows do not fit. The storage has not changed then.
        """
        load_rows(self, path)

    dump = save = dumps
    load = loads

    # -- episodes -----------------------------------------------------------------------------

    def cut(self, lanes: Any, *, reset: bool = False) -> None:
        """End the open episodes of lanes, bool ``[lanes]``; the caller holds the lock.

        Args:
            reset: whether the next rows follow a reset. By default they begin in the middle.

        Raises:
            RuntimeError: the storage has no episode index.
        """
        raise RuntimeError(
            f"a {type(self).__name__} does not know where episodes end; use a tensor or memmap "
            "storage"
        )

    def resume(self, *, over: bool) -> None:
        """Continue the episodes that a load has ended, or end them again.

        A save may hold back rows that continue open episodes. Before the buffer writes these rows,
        it calls this with ``over=False``. After the write it calls this with ``over=True``. The
        buffer holds the lock.
        """

    def lanes_named(self, lane: Any) -> Any:
        """Return lanes, given by one or several numbers, as bool ``[lanes]``.

        The result for None, which means all lanes, is None.

        Raises:
            IndexError: no such lane.
        """
        if lane is None:
            return None
        count = self.lanes.numel()
        lanes, chosen = np.zeros(count, bool), np.atleast_1d(np.asarray(lane))
        if not chosen.size:
            return lanes
        if not (chosen.min() >= 0 and chosen.max() < count):
            raise IndexError(f"expected lanes in [0, {count}), got {chosen.tolist()}")
        lanes[chosen] = True
        return lanes

    def episode_state(self) -> dict[str, Any] | None:
        """Return the state of episodes that the rows do not imply, or None."""
        return None

    def episodes_of_subset(
        self,
        content: Content,
        state: dict[str, Any] | None,
        old: Ledger,
        rows: torch.Tensor | None,
    ) -> dict[str, Any] | None:
        """Return the state for ``restore_episodes`` if some rows are left out.

        Args:
            state: the checked result of ``episode_state`` for all rows of the content.
            old, rows: as for ``restore_episodes``.
        """
        return state

    def restore_episodes(
        self, state: dict[str, Any] | None, old: Ledger, rows: torch.Tensor | None
    ) -> None:
        """Load a checked state of episodes, after rows and ledger.

        Args:
            old: the ledger at the time of the saved state.
            rows: as for ``Ledger.restore``.
        """

    # -- listeners ----------------------------------------------------------------------------

    def attach(self, buffer: Listener) -> None:
        """Register a listener, weakly and once.

        The storage then notifies the listener of every write that another object makes.
        """
        if all(reference() is not buffer for reference in self._listeners):
            self._listeners.append(weakref.ref(buffer))

    def detach(self, buffer: Listener) -> None:
        """Remove a listener; an unknown listener is ignored."""
        self._listeners = [r for r in self._listeners if r() not in (None, buffer)]

    def notify(self, index: torch.Tensor, source: object = None) -> None:
        """Notify every listener except ``source`` that the rows at ``index`` were written."""
        for reference in self._listeners:
            listener = reference()
            if listener is not None and listener is not source:
                listener.mark_update(index)

    def announce(self) -> None:
        """Notify listeners before the first write to loaded rows.

        The storage calls the method ``_about_to_write()`` of every listener that has one. An
        exception from a listener prevents the write.
        """
        for reference in self._listeners:
            about_to_write = getattr(reference(), "_about_to_write", None)
            if about_to_write is not None:
                about_to_write()

    # -- indexing -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored rows; the index means the same as for reading."""
        self.edit(index, value)

    def __iter__(self) -> Iterator[Any]:
        """Yield the stored rows in slot order; with lanes, the rows of all lanes."""
        for row in range(len(self)):
            yield self.get(row)

    def __contains__(self, item: Any) -> Any:
        return self.contains(item)

    def for_readers(self) -> Any:
        """Return an object through which a spawned process reads the same rows in place.

        The object is the storage itself, or has a method ``opened()`` that makes a storage in that
        process.

        Raises:
            RuntimeError: the rows cannot be shared, so each process would get a copy.
        """
        raise RuntimeError(
            f"the rows of a {type(self).__name__} would be copied into each process that is "
            "spawned; use a LazyMemmapStorage, shared=True or a data set, or fork the processes "
            "(multiprocessing_context='fork')"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("lock", None)
        state["_listeners"], state["recovery"] = [], None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
