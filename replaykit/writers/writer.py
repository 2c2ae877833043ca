"""What every writer offers: which slots the next records take, and when they count as stored."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from replaykit._compat import Uncompiled, as_tensor
from replaykit.checkpoint import Checkpoint, save_checkpoint
from replaykit.interrupts import deferred
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.indexing import with_lanes
from replaykit.storages.ledger import Ledger
from replaykit.structure import Path

__all__ = ["Writer"]

_MOST_WRITTEN = 2**62 - 1


class Writer(Uncompiled, ABC):
    """Reserves slots, has the storage filled, then commits.

    A writer of one's own brings ``write``. Cursor, length, positions and generations belong to
    the storage; a writer counts what it wrote.

    Attributes:
        tracks_generations: whether samples carry ``index_generation``.
        time_dim: dimension of written data that is time; set by the buffer.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Writer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(5))
        >>> isinstance(rb.writer, Writer), rb.writer.write_count
        (True, 5)
    """

    kind = "custom"
    """Writers of one kind take each other's saved state; one's own class is a kind of its own."""

    mapped_entries: tuple[str, ...] = ("_ledger",)
    """Entries of a saved state whose tensors it takes as MappedRows, to be read when they are
    needed."""

    tracks_generations = False

    keeps_order = True
    """Whether rows lie in the order in which they were written, as slices of episodes need them."""

    _owner: weakref.ref[Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind == "custom":
            cls.kind = cls.__qualname__

    def __init__(self) -> None:
        self._storage: Storage | None = None
        self._owner = None
        self._write_count = 0
        self.time_dim = 0

    @property
    def owner(self) -> Any:
        """The buffer that uses it; None where there is none, or none any more."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, buffer: Any) -> None:
        self._owner = weakref.ref(buffer)

    # -- what a writer brings -----------------------------------------------------------------

    @abstractmethod
    def write(self, rows: Any) -> torch.Tensor:
        """Stores rows that the storage has prepared, and commits them.

        Returns the slot of each row, int64 ``[B]``, -1 where it is not stored (``[B, ndim]`` for
        storages with lanes). Called with the storage's lock held.
        """

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """Which records of a saved state fit into ``capacity`` slots: their slots, oldest first.

        Most writers keep the newest.
        """
        ledger = ledger_of(state)
        return ledger.write_order()[-capacity:]

    def keeps_all(self, capacity: int, state: dict[str, Any]) -> bool:
        """Whether the records of a saved state can all stay in their slots, of ``capacity``: see
        ``Ledger.keeps_slots``."""
        return ledger_of(state).keeps_slots(capacity)

    # -- writing ------------------------------------------------------------------------------

    def register_storage(self, storage: Storage) -> None:
        """Takes the storage to write to; called by the buffer."""
        self._storage = storage
        if storage.recovery is not None:
            storage.recovery.adopt_writer(self)

    def works_on(self, storage: Storage) -> bool:
        """Whether it writes to a storage, and no other has come for it in its buffer."""
        owner = self.owner
        return self._storage is storage and (
            owner is None or getattr(owner, "_writer", self) is self
        )

    @property
    def storage(self) -> Storage:
        """The storage written to; RuntimeError before there is one."""
        if self._storage is None:
            raise RuntimeError("this writer has no storage yet; a buffer registers it")
        return self._storage

    @property
    def write_count(self) -> int:
        """Rows written so far through this writer (elements, for storages with lanes)."""
        return self._write_count

    def add(self, data: Any) -> int | torch.Tensor | None:
        """Stores one row; returns its slot: None if refused, ``[prod(lanes), ndim]`` with lanes."""
        rows = self.prepare(data, single=True)
        return single_index(self._write_and_tell(rows))

    def extend(self, data: Any) -> torch.Tensor:
        """Stores a batch; returns the slot of each row, int64 ``[B]`` (``[B, ndim]``)."""
        return self._write_and_tell(self.prepare(data))

    def prepare(self, data: Any, *, single: bool = False, optional: Collection[Path] = ()) -> Any:
        """Returns checked rows for ``write``; raises what the storage says does not fit."""
        return self.storage.prepare(data, single=single, time_dim=self.time_dim, optional=optional)

    def _write_and_tell(self, rows: Any) -> torch.Tensor:
        with self.storage.lock:
            index = self.write(rows)
            self.storage.notify(index)
        return index

    def write_at(self, index: Any, data: Any) -> torch.Tensor:
        """Stores rows at explicit slots, with the cursor where it was.

        Raises:
            RuntimeError: this writer chooses its slots itself.
        """
        raise RuntimeError(f"{type(self).__name__} chooses the slots of its records itself")

    def write_reusing(self, rows: Any, free: torch.Tensor) -> torch.Tensor:
        """Stores prepared rows in free slots first; as ``write`` otherwise.

        Raises:
            RuntimeError: this writer chooses its slots itself.
        """
        raise RuntimeError(f"{type(self).__name__} chooses the slots of its records itself")

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Ends the episodes that are being written, without a flag: the stream is severed there.

        What is written next belongs to another episode, which begins in the middle: no window,
        n-step sum, stack of frames or relabelling goes across.

        Args:
            lane: number of a lane, or several; None: all. In a storage with ``lane_key`` the
                lanes are its streams, by what stands in that column.

        Raises:
            IndexError: no such lane. RuntimeError: a storage without an episode index.
        """
        storage = self.storage
        with storage.lock:
            storage.cut(storage.lanes_named(lane))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all records; the storage's lock is held."""
        storage = self.storage
        storage.clear()
        storage.ledger.clear()
        if empty_write_count:
            self._write_count = 0

    def _no_rows(self) -> torch.Tensor:
        return _empty_index(self.storage.ndim)

    def _count(self, rows: int) -> None:
        self._write_count += rows * self.storage.lanes.numel()

    # -- generations --------------------------------------------------------------------------

    def generations_of(self, index: Any) -> torch.Tensor:
        """How often the slots were written, from 0; -1: never, or this writer does not track.

        Args:
            index: int64 ``[K]``, or ``[K, ndim]`` for storages with lanes.

        Returns:
            int64 ``[K]``.
        """
        slots = as_tensor(index)
        if self._storage is not None and self._storage.ndim > 1 and slots.ndim > 1:
            slots = slots[..., 0]
        if not self.tracks_generations:
            return torch.full_like(slots, -1, dtype=torch.int64)
        with self.storage.lock:
            return self.storage.ledger.generations(slots)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns write count, cursor, positions and generations, as numbers and tensors."""
        with self.storage.lock:
            return {
                "_kind": self.kind,
                "_write_count": self._write_count,
                "_cursor": self.storage.ledger.cursor,
                "_ledger": self.storage.ledger.state(),
                "_episodes": self.storage.episode_state(),
            }

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the state is not one of a writer of this kind."""
        if not isinstance(state_dict, dict) or "_ledger" not in state_dict:
            raise ValueError(f"expected the state of a writer, got {state_dict!r}")
        if state_dict.get("_kind") != self.kind:
            raise ValueError(
                f"expected the state of a {self.kind!r} writer, got {state_dict.get('_kind')!r}"
            )
        count = state_dict.get("_write_count")
        # Storages in files keep it as an int64, to which rows are added.
        if type(count) is not int or not 0 <= count <= _MOST_WRITTEN:
            raise ValueError(
                f"expected '_write_count' as an int from 0 to {_MOST_WRITTEN}, got {count!r}"
            )
        Ledger.check(state_dict["_ledger"])
        EpisodeIndexes.check(state_dict.get("_episodes"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of a writer of the same kind on a storage of the same capacity.

        Raises:
            ValueError: another kind, another capacity, or another number of stored rows.
        """
        self.check_state(state_dict)
        state, storage = state_dict["_ledger"], self.storage
        with storage.lock:
            if state["slots"] != storage.ledger.slots:
                raise ValueError(
                    f"expected the state of {storage.ledger.slots} slots, got {state['slots']}"
                )
            if state["length"] * storage.lanes.numel() != len(storage):
                raise ValueError(
                    f"expected the state of {len(storage)} stored rows, got {state['length']}"
                )
            self.restore(state_dict, None)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves the writer's state into a directory of its own, all or nothing."""
        save_checkpoint(path, {"writer": self.state_dict()}, {"writer": type(self).__name__})

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes over a state that ``dumps`` of a writer of the same kind saved.

        Raises:
            FileNotFoundError: nothing saved there. CheckpointError: it is damaged.
            ValueError: as ``load_state_dict``. Nothing has changed then.
        """
        with deferred, Checkpoint(path) as saved:
            saved.verify()
            self.load_state_dict(saved.part("writer"))

    def state_of_kept(
        self, content: Content, state_dict: dict[str, Any], rows: torch.Tensor | None
    ) -> dict[str, Any]:
        """The state for ``restore`` where of checked content only ``rows`` are kept."""
        episodes = self.storage.episodes_of_kept(
            content, state_dict.get("_episodes"), ledger_of(state_dict), rows
        )
        return {**state_dict, "_episodes": episodes}

    def restore(self, state_dict: dict[str, Any], rows: torch.Tensor | None) -> None:
        """Takes over a checked state; ``rows`` as for ``Ledger.restore``."""
        self._write_count = state_dict["_write_count"]
        self.storage.ledger.restore(state_dict["_ledger"], rows)
        self.storage.restore_episodes(state_dict.get("_episodes"), ledger_of(state_dict), rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(write_count={self.write_count})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}


def ledger_of(state: dict[str, Any]) -> Ledger:
    """Returns a ledger as it was when the writer's state was taken, to look at."""
    return Ledger.saved(state["_ledger"])


def single_index(index: torch.Tensor) -> int | torch.Tensor | None:
    """What ``add`` returns for the index of one row."""
    if index.ndim > 1:
        return index
    slot = int(index[0])
    return None if slot < 0 else slot


def _empty_index(ndim: int) -> torch.Tensor:
    return torch.empty((0, ndim) if ndim > 1 else (0,), dtype=torch.int64, device="cpu")


def full_index(slots: torch.Tensor, storage: Storage) -> torch.Tensor:
    """The index users see for time slots."""
    return with_lanes(slots, storage.lanes) if storage.ndim > 1 else slots
