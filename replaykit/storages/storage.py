"""Define what every storage offers, and what a custom storage has to implement."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import Uncompiled, arange, is_tensordict
from replaykit.interrupts import Lock
from replaykit.keywords import named_after
from replaykit.schema import Schema
from replaykit.storages.content import Content
from replaykit.storages.ledger import Ledger
from replaykit.storages.save_hooks import SavedRows
from replaykit.structure import Path, map_leaves

__all__ = ["KEPT_EDITS", "Edit", "Listener", "Storage", "with_edit"]

KEPT_EDITS = 64
"""How many a storage remembers."""


class Edit(NamedTuple):
    """One change of rows that were stored already.

    Attributes:
        number: of ``Storage.edits`` after it.
        paths: columns that it changed; None: any.
        slots: rows that it changed, int64 ``[K]``; None: any.
    """

    number: int
    paths: Collection[Path] | None
    slots: np.ndarray[Any, Any] | None


def with_edit(recent: tuple[Edit, ...], edit: Edit, rows: int) -> tuple[Edit, ...]:
    """The last edits with one more: at most `KEPT_EDITS`, and no more slots than there are rows.

    Older ones are let go: who would look at as many slots may as well look at all rows. So edits
    take 8 bytes a row at most.
    """
    kept: list[Edit] = []
    for one in (edit, *reversed(recent)):
        rows -= 0 if one.slots is None else len(one.slots)
        if rows < 0 or len(kept) == KEPT_EDITS:
            break
        kept.append(one)
    return tuple(reversed(kept))


class Listener(Protocol):
    """Who wants to know that rows were written."""

    def mark_update(self, index: torch.Tensor) -> None:
        """Told that the rows at ``index`` were written."""


@named_after
class Storage(SavedRows, Uncompiled, ABC):
    """Where records live.

    A storage of one's own brings ``set``, ``get``, ``__len__``, ``contains``, ``state_dict`` and
    ``load_state_dict`` and takes the rest from here, as long as ``ndim == 1``.

    Attributes:
        max_size: capacity in rows (elements, for ``ndim > 1``).
        ndim: number of leading dimensions that count as rows: dimension 0 is time, the others
            are lanes.
        ledger: which record lies in which slot; shared by every buffer over this storage.
        lock: one re-entrant lock, held by whoever writes, draws or reads. While the main thread
            holds it signals wait, so that Ctrl-C never leaves a change half done.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> storage = LazyTensorStorage(100)
        >>> _ = ReplayBuffer(storage=storage).extend(torch.arange(5.0))
        >>> len(storage), storage.max_size, storage[2].item()
        (5, 100, 2.0)
    """

    stack_dim = 0
    """Dimension of a batch along which its rows lie."""

    def __init__(self, max_size: int, *, ndim: int = 1) -> None:
        if type(max_size) is not int or max_size < 1:
            raise ValueError(f"expected max_size as an int of at least 1, got {max_size!r}")
        if type(ndim) is not int or ndim < 1:
            raise ValueError(f"expected ndim as an int of at least 1, got {ndim!r}")
        super().__init__()
        self.max_size = max_size
        self.ndim = ndim
        self.ledger = Ledger(max_size)
        self._locks: dict[int, Any] = {}
        # Grows whenever stored rows are changed where they are: what is derived from them is old.
        self.edits = 0
        # The last ones of them; those that nobody told of are missing.
        self.recent_edits: tuple[Edit, ...] = ()
        # What keeps ledger, counts and priorities in files; None: they go with the process.
        self.recovery: Any = None
        self._listeners: list[weakref.ref[Listener]] = []

    @property
    def lock(self) -> Any:
        """Guards the rows and the ledger; may be taken again by the thread that has it.

        A forked process has one of its own: the thread that held this one is not there.
        """
        process = os.getpid()
        lock = self._locks.get(process)
        return self._locks.setdefault(process, self._new_lock()) if lock is None else lock

    def look(self, *, whole: bool = False) -> None:
        """Takes note of what other processes have done, where they share the storage: of how much
        is stored, or of the ``whole``."""
        if self.recovery is not None:
            self.recovery.look(whole=whole)

    def _new_lock(self) -> Any:
        return Lock() if self.recovery is None else self.recovery.new_lock()

    # -- what a storage brings ----------------------------------------------------------------

    @abstractmethod
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows at an int, slice, range, sequence or LongTensor of positions."""

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Reads a row (int) or a batch (anything else that indexes)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def contains(self, item: Any) -> bool | torch.Tensor:
        """Whether rows are stored."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Copies of what is stored."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over copies of what another storage held."""

    # -- what it may bring --------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size | None:
        """Shape of the stored rows: ``[N]``, or ``[T, *lanes]``; None before the first write."""
        return torch.Size([len(self)])

    @property
    def device(self) -> torch.device | str:
        """Device of the rows."""
        return torch.device("cpu")

    @property
    def schema(self) -> Schema | None:
        """Fixed layout of the records; None for storages without one, or before the first write."""
        return None

    @property
    def identity(self) -> dict[str, Any] | None:
        """What tells these rows from all others, as values that can be saved, where they are kept
        elsewhere and are as they are there; None: whoever saves the storage has to save the rows.
        """
        return None

    @property
    def lanes(self) -> torch.Size:
        """Sizes of the dimensions beside time; empty for ``ndim == 1``."""
        return torch.Size()

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> Any:
        """Returns the rows of ``data`` checked and ready to be written, as a sized object.

        Writers call this before they reserve slots, so that bad data changes nothing.
        """
        return [data] if single else data

    def batch_of_one(self, data: Any, dim: int) -> Any:
        """Returns one row as a batch of one, along ``dim``."""
        if isinstance(data, torch.Tensor) or is_tensordict(data) or is_tensorclass(data):
            return data.unsqueeze(dim)
        return map_leaves(data, lambda leaf: leaf.unsqueeze(dim))

    def slots_for(self, rows: Any) -> int:
        """Number of slots that there will be once these prepared rows are accepted."""
        return self.ledger.slots

    def check_order(self, rows: Any) -> None:
        """Refuses prepared rows that cannot follow the newest record, or each other, in time.

        Called with the lock held, before ``accept``, where rows will be written at the cursor.
        """

    def accept(self, rows: Any) -> None:
        """Makes ready for prepared rows: checks them once more and takes memory if there is none.

        Called with the lock held, before slots are reserved: the last step that may refuse.
        """

    def write(self, slots: torch.Tensor, rows: Any, kept: torch.Tensor | slice) -> None:
        """Writes ``rows[kept]``, as ``prepare`` gave them, at distinct ``slots``.

        The ledger is not touched: the writer commits afterwards.
        """
        if isinstance(kept, slice):
            kept = arange(len(rows))[kept]
        for slot, row in zip(slots.tolist(), kept.tolist(), strict=True):
            self.set(slot, rows[row])

    def commit(self, rows: Any) -> None:
        """Makes rows count as stored that were written at the cursor."""
        self.ledger.advance(len(rows))

    def write_ring(self, first: int, rows: Any, skipped: int) -> None:
        """Writes ``rows[skipped:]`` at the slots from ``first + skipped`` on, round the ring.

        The same as ``write`` at these slots, which a storage may do faster.
        """
        slots = self.ledger.slots
        self.write(
            (arange(skipped, len(rows)) + first) % slots,
            rows,
            slice(skipped, None),
        )

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Reads rows at an int64 ``[B]`` (or ``[B, ndim]``) into fresh memory.

        ``own=False`` says that the rows are only looked at, so that a storage of objects may hand
        out the objects themselves.
        """
        return self.get(index)

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        """Replaces stored rows; length, cursor, positions and generations stay."""
        self.set(index, value, set_cursor=False)

    def flatten(self) -> Storage:
        """Returns a storage with ``ndim == 1`` over the same rows: here, itself.

        Raises:
            RuntimeError: nothing was written yet.
        """
        if not self.ledger.next_position:
            raise RuntimeError(
                "Cannot get elements out of a non-initialized storage: nothing is stored yet"
            )
        return self

    def collate(self, rows: Any) -> Any:
        """What a buffer over this storage does with rows by default: nothing."""
        return rows

    def clear(self) -> None:
        """Lets go of all rows; the caller holds the lock.

        Raises:
            NotImplementedError: a storage of one's own that does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be emptied: it defines no clear(self) that removes all "
            "of its rows"
        )

    def content(self) -> Content:
        """Returns what is stored, as columns or row by row; the caller holds the lock."""
        return Content(
            len(self), order=torch.full((len(self),), -1, device="cpu"), plain=tuple(self)
        )

    def content_of(self, state_dict: dict[str, Any]) -> Content | None:
        """Reads a state dict as rows; None for storages that take it back themselves."""
        return None

    @property
    def takes_over_whole(self) -> bool:
        """Whether ``load_content`` calls ``Content.check`` before anything changes."""
        return False

    def check_content(self, content: Content) -> Any:
        """Checks that rows of another storage fit; changes nothing visible.

        Returns what ``load_content`` needs to bring them in.
        """
        return content.items()

    def load_content(self, content: Content, target: Any, rows: torch.Tensor | None) -> None:
        """Takes rows over: all of them to their own slots, or ``rows`` to slots ``0, 1, ...``."""
        picked = target if rows is None else [target[row] for row in rows.tolist()]
        for slot, item in enumerate(picked):
            self.set(slot, item)

    def undo_content(self) -> Callable[[], None]:
        """Returns what takes back the ``load_content`` that comes next, before ledger and episodes
        have followed it. The lock is held.

        Cost: a copy of what is stored.
        """
        content = self.content()
        target = self.check_content(content)
        return lambda: self.load_content(content, target, None)

    # -- episodes -----------------------------------------------------------------------------

    def cut(self, lanes: Any) -> None:
        """Ends the open episodes of lanes, bool ``[lanes]``; the lock is held.

        Raises:
            RuntimeError: a storage that does not know where episodes end.
        """
        raise RuntimeError(
            f"a {type(self).__name__} does not know where episodes end; use a tensor or memmap "
            "storage"
        )

    def resume(self, *, over: bool) -> None:
        """Told that rows come that were written before the restart after which the storage was
        loaded: what that has ended goes on. ``over``: that they have come. The lock is held."""

    def lanes_named(self, lane: Any) -> Any:
        """Lanes by number, one or several, as bool ``[lanes]``; None: all of them.

        Raises:
            IndexError: no such lane.
        """
        if lane is None:
            return None
        count = self.lanes.numel()
        lanes, chosen = np.zeros(count, bool), np.atleast_1d(np.asarray(lane))
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < count):
            raise IndexError(f"expected lanes in [0, {count}), got {chosen.tolist()}")
        lanes[chosen] = True
        return lanes

    def episode_state(self) -> dict[str, Any] | None:
        """What is known of episodes and does not follow from the rows; None: nothing."""
        return None

    def episodes_of_kept(
        self,
        content: Content,
        state: dict[str, Any] | None,
        old: Ledger,
        rows: torch.Tensor | None,
    ) -> dict[str, Any] | None:
        """The state for ``restore_episodes`` where of checked content some rows are left out.

        Args:
            state: what ``episode_state`` gave of all of them, checked.
            old, rows: as for ``restore_episodes``.
        """
        return state

    def restore_episodes(
        self, state: dict[str, Any] | None, old: Ledger, rows: torch.Tensor | None
    ) -> None:
        """Takes over a checked state, after rows and ledger; ``rows`` as for ``Ledger.restore``.

        Args:
            old: the ledger as it was when the state was taken.
        """

    # -- listeners ----------------------------------------------------------------------------

    def attach(self, buffer: Listener) -> None:
        """Registers a listener, weakly and once: it is told of every write by anyone else."""
        if all(reference() is not buffer for reference in self._listeners):
            self._listeners.append(weakref.ref(buffer))

    def detach(self, buffer: Listener) -> None:
        """Takes a listener off; unknown ones are ignored."""
        self._listeners = [r for r in self._listeners if r() not in (None, buffer)]

    def notify(self, index: torch.Tensor, source: object = None) -> None:
        """Tells every listener but ``source`` that the rows at ``index`` were written."""
        for reference in self._listeners:
            listener = reference()
            if listener is not None and listener is not source:
                listener.mark_update(index)

    def announce(self) -> None:
        """Tells the listeners that want to know, by ``_about_to_write()``, that the first rows
        since a load are about to be written; what one raises prevents it."""
        for reference in self._listeners:
            told = getattr(reference(), "_about_to_write", None)
            if told is not None:
                told()

    # -- indexing -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces stored rows, addressed as for reading; nothing else changes."""
        self.edit(index, value)

    def __iter__(self) -> Iterator[Any]:
        """Yields the stored rows (elements, where there are lanes) in physical order."""
        for row in range(len(self)):
            yield self.get(row)

    def __contains__(self, item: Any) -> Any:
        return self.contains(item)

    def for_readers(self) -> Any:
        """What a process that is spawned gets in the storage's place, to read the same rows where
        they lie: the storage itself, or what ``opened()`` makes one of there.

        Raises:
            RuntimeError: they would be copied into each process.
        """
        raise RuntimeError(
            f"the rows of a {type(self).__name__} would be copied into each process that is "
            "spawned; use a LazyMemmapStorage, shared=True or a data set, or have processes forked "
            "(multiprocessing_context='fork')"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_locks"], state["_listeners"], state["recovery"] = {}, [], None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
