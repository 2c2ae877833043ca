"""The base of writers, which choose slots for new rows and commit them."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from replaykit._compat import Uncompiled, as_tensor
from replaykit.checkpoint import Checkpoint, save_checkpoint
from replaykit.declared import MOST, decode_state, require_kind, within
from replaykit.interrupts import deferred
from replaykit.schema import Rows
from replaykit.storages import Storage
from replaykit.storages.content import Content
from replaykit.storages.episode_tags import EpisodeState
from replaykit.storages.indexing import with_lanes
from replaykit.storages.ledger import Ledger, LedgerState
from replaykit.structure import Branch, Path


@dataclass(frozen=True)
class WriterState:
    """The state of a writer, with that of its storage's slots and episodes."""

    PREFIX: ClassVar[str] = "_"
    # Storages in files store the count as an int64, and the count must be able to grow.
    write_count: Annotated[int, within(0, MOST - 1)]
    ledger: LedgerState
    episodes: EpisodeState | None = field(default=None, kw_only=True)


class Writer(Uncompiled, ABC):
    """The base class of writers, which choose slots, fill them and commit the rows.

    A custom writer implements ``write``. Cursor, length, row ids and generations belong to the
    storage. The writer itself only counts the rows that it has written.

    Attributes:
        tracks_generations: whether samples carry ``index_generation``.
        time_dim: the time dimension of written data; set by the buffer.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Writer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(5))
        >>> isinstance(rb.writer, Writer), rb.writer.write_count
        (True, 5)
    """

    kind = "custom"
    """Writers of one kind can load each other's state. Each custom class is a separate kind."""

    _declared: ClassVar[type] = WriterState
    """The declared state of the class."""

    mapped_entries: tuple[str, ...] = ("_ledger",)
    """Entries of a saved state that may be MappedRows, read when they are needed."""

    tracks_generations = False

    keeps_order = True
    """True if rows are stored in write order, as slices of episodes require."""

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
        """The buffer that uses the writer; None without a buffer, or if it was deleted."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, buffer: Any) -> None:
        self._owner = weakref.ref(buffer)

    # -- for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def write(self, rows: Any) -> torch.Tensor:
        """Store and commit rows that the storage has prepared.

        The caller holds the lock of the storage.

        Returns:
            The slot of each row, int64 ``[B]`` (``[B, ndim]`` for storages with lanes); -1 for rows
            that are not stored.
        """

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """Return the slots of the saved rows to keep in ``capacity`` slots, oldest first.

        Most writers keep the newest rows.
        """
        ledger = ledger_of(state)
        return ledger.write_order()[-capacity:]

    def keeps_all(self, capacity: int, state: dict[str, Any]) -> bool:
        """Return whether all rows of a saved state can stay in their slots.

        ``capacity`` is the number of slots. ``Ledger.keeps_slots`` has the details.
        """
        return ledger_of(state).keeps_slots(capacity)

    def kept_rows(self, slots: int) -> torch.Tensor | None:
        """Return the slots of the rows that stay if the storage gets ``slots`` slots.

        They are in order of age; None if all rows stay in their slots. The caller holds the lock.

        Raises:
            BufferFull: rows that must be kept do not fit.
        """
        ledger = self.storage.ledger
        if ledger.length <= slots and (ledger.keeps_slots(slots) or ledger.by_stream):
            return None
        return self.survivors(slots, self.state_dict())

    @contextlib.contextmanager
    def resized(self, max_size: int) -> Iterator[torch.Tensor | None]:
        """Return a context with another capacity, whose error undoes the change.

        Its value is the result of ``kept_rows``.

        Raises:
            BufferFull, MemoryError, OSError: as ``ReplayBuffer.resize`` does. Nothing has changed
                then.
        """
        storage = self.storage
        kept = self.kept_rows(-(-max_size // storage.lanes.numel()))
        with storage.resized(max_size, kept):
            yield kept

    # -- writing ------------------------------------------------------------------------------

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to. The buffer calls this."""
        self._storage = storage
        if storage.recovery is not None:
            storage.recovery.adopt_writer(self)

    def works_on(self, storage: Storage) -> bool:
        """Return whether the writer uses a storage and is still the writer of its buffer."""
        owner = self.owner
        return self._storage is storage and (
            owner is None or getattr(owner, "_writer", self) is self
        )

    @property
    def storage(self) -> Storage:
        """The storage to write to. Raises RuntimeError before it is set."""
        if self._storage is None:
            raise RuntimeError("this writer has no storage; pass the writer to a buffer first")
        return self._storage

    @property
    def write_count(self) -> int:
        """Number of rows that this writer has written, over all lanes."""
        return self._write_count

    def add(self, data: Any) -> int | torch.Tensor | None:
        """Store one row and return its slot, or None if the row is refused.

        For storages with lanes, return the index, int64 ``[prod(lanes), ndim]``.
        """
        rows = self.prepare(data, single=True)
        return single_index(self._write_and_notify(rows))

    def extend(self, data: Any) -> torch.Tensor:
        """Store a batch; return the slot of each row, int64 ``[B]`` (``[B, ndim]``)."""
        return self._write_and_notify(self.prepare(data))

    def prepare(self, data: Any, *, single: bool = False, optional: Collection[Path] = ()) -> Any:
        """Return checked rows for ``write``; raise the storage's error if they do not fit."""
        storage = self.storage if self._storage is None else self._storage
        return storage.prepare(data, single=single, time_dim=self.time_dim, optional=optional)

    def _write_and_notify(self, rows: Any) -> torch.Tensor:
        with self.storage.lock:
            index = self.write(rows)
            self.storage.notify(index)
        return index

    def write_at(self, index: Any, data: Any) -> torch.Tensor:
        """Store rows at given slots; the cursor does not move.

        Raises:
            RuntimeError: this writer chooses its slots itself.
        """
        raise RuntimeError(f"{type(self).__name__} chooses the slots of its rows itself")

    def write_reusing(self, rows: Any, free: torch.Tensor) -> torch.Tensor:
        """Store prepared rows in free slots first, and the other rows as ``write`` does.

        Raises:
            RuntimeError: this writer chooses its slots itself.
        """
        raise RuntimeError(f"{type(self).__name__} chooses the slots of its rows itself")

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Cut streams: end their open episodes without a flag.

        The next rows belong to another episode, which is treated as if its first rows were not
        stored. A stream whose newest row ended its episode does not change. No window, n-step sum,
        stack of frames or relabelling crosses the cut.

        Args:
            lane: the number of a lane, or several numbers; None for all lanes. In a storage with
                ``lane_key``, the values of that column identify streams.

        Raises:
            IndexError: a lane does not exist.
            RuntimeError: the storage has no episode index.
        """
        storage = self.storage
        with storage.lock:
            storage.cut(storage.lanes_named(lane))

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows. The caller holds the lock of the storage."""
        storage = self.storage
        storage.clear()
        storage.ledger.clear()
        if empty_write_count:
            self._write_count = 0

    def _no_rows(self) -> torch.Tensor:
        ndim = self.storage.ndim
        return torch.empty((0, ndim) if ndim > 1 else (0,), dtype=torch.int64, device="cpu")

    def _count(self, rows: int) -> None:
        self._write_count += rows * self.storage.lanes.numel()

    # -- generations --------------------------------------------------------------------------

    def generations_of(self, index: Any) -> torch.Tensor:
        """Return the generations of slots, int64 ``[K]``.

        The first row of a slot has generation 0. The result is -1 for slots that were never
        written. If the writer does not track generations, it is -1 for all slots.

        Args:
            index: int64 ``[K]``, or ``[K, ndim]`` for storages with lanes.
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
        """Return write count, cursor, row ids and generations, as numbers and tensors."""
        with self.storage.lock:
            return {
                "_kind": self.kind,
                "_write_count": self._write_count,
                "_cursor": self.storage.ledger.cursor,
                "_ledger": self.storage.ledger.state(),
                "_episodes": self.storage.episode_state(),
            }

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError unless the state comes from a writer of this kind."""
        require_kind(state_dict, self.kind, "writer")
        decode_state(self._declared, state_dict, f"the state of a {self.kind!r} writer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a writer of the same kind and capacity.

        Raises:
            ValueError: the kind, the capacity or the number of stored rows differs.
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
        """Save the writer's state into a separate directory, completely or not at all."""
        save_checkpoint(path, {"writer": self.state_dict()}, {"writer": type(self).__name__})

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load a state that ``dumps`` of a writer of the same kind saved.

        Raises:
            FileNotFoundError: the path has no checkpoint.
            CheckpointError: the checkpoint is damaged.
            ValueError: as ``load_state_dict`` does.

        After an error nothing has changed.
        """
        with deferred, Checkpoint(path) as saved:
            saved.verify()
            self.load_state_dict(saved.part("writer"))

    def state_of_subset(
        self, content: Content, state_dict: dict[str, Any], rows: torch.Tensor | None
    ) -> dict[str, Any]:
        """Return the state for ``restore`` if only ``rows`` of the content are loaded."""
        episodes = self.storage.episodes_of_subset(
            content, state_dict.get("_episodes"), ledger_of(state_dict), rows
        )
        return {**state_dict, "_episodes": episodes}

    def restore(self, state_dict: dict[str, Any], rows: torch.Tensor | None) -> None:
        """Load a checked state. ``rows`` has the same meaning as in ``Ledger.restore``."""
        self.storage.ledger.restore(state_dict["_ledger"], rows)
        self._write_count = state_dict["_write_count"]
        self.storage.restore_episodes(state_dict.get("_episodes"), ledger_of(state_dict), rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(write_count={self.write_count})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}


def check_tensordicts(rows: Rows, writer: Writer) -> None:
    """Raise RuntimeError if rows are not TensorDicts, which a writer of streams needs."""
    root = rows.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        raise no_tensordicts(writer, root)


def no_tensordicts(writer: Writer, got: object) -> RuntimeError:
    """Return the error for rows that are not TensorDicts."""
    return RuntimeError(
        f"a {type(writer).__name__} expects data to be a tensor collection: it takes "
        f"TensorDicts, got {got}"
    )


def ledger_of(state: dict[str, Any]) -> Ledger:
    """Return the ledger of a writer's saved state, for reading only."""
    return Ledger.saved(state["_ledger"])


def single_index(index: torch.Tensor) -> int | torch.Tensor | None:
    """Return the result of ``add`` for the index of one row."""
    if index.ndim > 1:
        return index
    slot = int(index[0])
    return None if slot < 0 else slot


def full_index(slots: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the index that users see for slots of dimension 0."""
    return with_lanes(slots, storage.lanes) if storage.ndim > 1 else slots
