"""Define the interfaces of samplers and sample units."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import Uncompiled
from replaykit.checkpoint import Checkpoint, MappedRows, ReadLater, save_checkpoint
from replaykit.declared import decode_state, require_kind, vector
from replaykit.episodes import NOTHING, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.interrupts import deferred
from replaykit.keywords import named_after, old_name
from replaykit.storages import Storage
from replaykit.storages.indexing import unravel_index
from replaykit.storages.memory import by_value, from_value
from replaykit.transfer import put_on

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")


def made_of_saved(
    make: Callable[..., Made], label: str, *vectors: torch.Tensor | MappedRows
) -> Made | ReadLater[Made]:
    """Make an object from vectors of a saved state; do so later if some are in files.

    Args:
        make: function that makes the object from the vectors as arrays, ``[K]`` each. The arrays
            then belong to that object. It raises ValueError if they contradict each other.
        label: a noun for the object, for the error message of a later read.

    Raises:
        ValueError: ``make`` raises it.
    """
    found = [v if isinstance(v, MappedRows) else v.cpu().numpy().copy() for v in vectors]
    if any(isinstance(part, MappedRows) for part in found):
        return ReadLater(make, found, label)
    return make(*found)


def saved_below(
    limit: int, name: str, label: str, vector: torch.Tensor | MappedRows | None
) -> torch.Tensor | ReadLater[torch.Tensor] | None:
    """Return the numbers of a saved state, or read them later if they are in files.

    Raises:
        ValueError: a number is negative, or not below ``limit``.
    """

    def make(numbers: Array) -> torch.Tensor:
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
            raise ValueError(f"expected {name} in [0, {limit}), got {numbers}")
        return torch.from_numpy(numbers)

    return None if vector is None else made_of_saved(make, label, vector)


@dataclass(frozen=True)
class Stateless:
    """The declared state of a sampler whose state is only its kind."""


Int64s = Annotated[Any, vector(torch.int64)]


@named_after
class Sampler(Uncompiled, ABC):
    """Chooses rows by index. It reads no row values unless ``reads_rows`` is set.

    A custom sampler defines ``sample`` and, if it has state, ``state_dict`` and
    ``load_state_dict``.

    Attributes:
        generator: the source of randomness; None for torch's global generator. The buffer sets it.
        prioritized: whether rows have priorities.
        follows_log: whether a sampler with priorities finds new rows in the log of the storage's
            ledger. If not, the buffer calls ``mark_update`` for new rows without priorities.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Sampler
        >>> class Newest(Sampler):
        ...     def sample(self, storage, batch_size):
        ...         return storage.ledger.write_order()[-1].expand(batch_size), {}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=Newest())
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.sample(2)
        tensor([4, 4])
    """

    kind = "custom"
    """Name of the sampler's kind. Samplers of one kind can load each other's state.

    A custom class is a separate kind.
    """

    prioritized = False
    follows_log = False

    _declared: ClassVar[type] = Stateless
    """The declared state of the class."""

    mapped_entries: tuple[str, ...] = ()
    """Entries of a saved state that may be MappedRows, which the sampler reads when needed."""

    draws_windows = False
    """True if the sampler itself draws windows of several rows."""

    @property
    def draws_anchors(self) -> bool:
        """True if a ``Sequence`` can make windows around the rows that the sampler draws."""
        return not self.draws_windows

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys that every draw returns.

        The keys of the index, the generations and the marks of window ends are not included.
        """
        return ()

    tells = old_name("tells", "info_keys")

    @property
    def _marks(self) -> tuple[Any, ...]:
        """The keys of the marks of window ends that batches get."""
        return ()

    reads_rows = False
    """True if the sampler reads row values. Other processes then do not write during a draw."""

    consumes = False
    """True if rows are drawn a limited number of times. Their slots are free afterwards."""

    stateless = False
    """True if a draw changes no state, so that several buffers may share one sampler."""

    passes = False
    """True if the sampler draws in passes, each of which ends with ``ran_out``."""

    marks_draws = True
    """False if ``mark`` is never needed, because ``rollback`` would change nothing."""

    needs_write_order = False
    """True if rows must be stored in order of time. Some writers do not keep this order."""

    needs: Needs = NOTHING
    """The neighbouring rows that the buffer's transforms need; the buffer sets this.

    The sampler does not draw a row if one of these neighbours is missing.
    """

    _owner: weakref.ref[Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.kind == "custom":
            cls.kind = cls.__qualname__

    def __init__(self, *, replacement: bool = True) -> None:
        if not replacement:
            raise TypeError(f"{type(self).__name__} has no without-replacement variant")
        self.generator: torch.Generator | None = None
        self._ran_out = False
        self._owner = None

    @property
    def owner(self) -> Any:
        """The buffer that uses the sampler; None without a buffer, or if it was deleted."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, buffer: Any) -> None:
        self._owner = weakref.ref(buffer)

    # -- drawing ------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw ``batch_size`` rows.

        Returns:
            The index, int64 ``[B]`` (``[B, ndim]`` for storages with lanes), and the info of the
            drawn rows: tensors with leading dimension B.

        Raises:
            RuntimeError: no row can be drawn.
        """

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would succeed now.

        This draws nothing, changes nothing and never raises.
        """
        return len(storage) > 0

    def episodes(self, storage: Storage) -> EpisodeIndex | None:
        """Return the episode index that cuts the windows; None for the storage's index."""
        return None

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        """Add to ``info`` the values that depend on the drawn rows; return the rows.

        The buffer calls this once per draw, without a lock. The result depends on the arguments
        only.
        """
        return rows

    def complete_fresh(self, rows: Any, info: dict[Any, Any]) -> Any:
        """Do the same as ``complete``, for rows that no other code uses.

        The method may overwrite values of these rows.
        """
        return self.complete(rows, info)

    def shape_of(self, rows: int) -> tuple[int, ...] | None:
        """Return the batch shape of ``rows`` delivered rows; None for a flat batch."""
        return None

    def left(self, storage: Storage) -> int:
        """Return the number of rows that can be drawn, for samplers that use rows up."""
        return len(storage)

    def free(self, storage: Storage, count: int) -> torch.Tensor:
        """Return up to ``count`` slots, int64 ``[K]``, whose rows draws have used up.

        The writer may write to them again.
        """
        return torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def ran_out(self) -> bool:
        """True if the last batch ended a pass over the rows."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)

    def attach(self, storage: Storage) -> None:
        """Attach the sampler to its storage, which may hold rows already."""

    def check_capacity(self, storage: Storage, rows: int) -> None:
        """Raise ValueError if the sampler cannot draw from a storage of ``rows`` rows."""

    def rejoin(self, storage: Storage) -> None:
        """Attach a copied sampler to the copy of its storage.

        Both copies were made together, so the sampler's state still matches the rows.
        """

    # -- notifications of writes --------------------------------------------------------------

    def about_to_write(self) -> None:
        """Prepare for the first write to loaded rows.

        If a part of the sampler's state is still in files, the sampler reads it now. An exception
        in this method prevents the write.
        """

    def add(self, index: Any) -> None:
        """Follow the write of one row. It must not raise, because the row is stored."""

    def extend(self, index: torch.Tensor) -> None:
        """Follow a write of several rows. It must not raise, because they are stored."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Follow a write of rows by another buffer over the same storage."""

    def empty(self) -> None:
        """Follow the removal of all rows."""
        self._ran_out = False

    # -- undoing draws ------------------------------------------------------------------------

    def mark(self, storage: Storage) -> Any:
        """Return a token of the state before a draw, for ``rollback``.

        By default this is a copy of ``state_dict``, for a sampler whose draws change its state. A
        sampler with priorities, or without ``state_dict``, has no token.
        """
        if self.prioritized or type(self).state_dict is Sampler.state_dict:
            return None
        return storage.ledger.next_position, copy.deepcopy(self.state_dict())

    def drawn(self, token: Any) -> Any:
        """Return the token of the default ``mark``, with a copy of the state after the draw."""
        return (*token, copy.deepcopy(self.state_dict()))

    def rollback(self, token: Any, storage: Storage) -> bool | None:
        """Undo all draws since a ``mark``. The state then is as if they were never made.

        Writes and updates since then stay. So the default declines if rows were written since
        then, or if other code has changed the state since the draw.

        Returns:
            False if the draws were not undone. The buffer then calls ``put_back``.
        """
        position, before, after = token
        if position != storage.ledger.next_position or not equal_states(self.state_dict(), after):
            return False
        self.load_state_dict(before)
        return None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        """Return the rows of undelivered draws, given in the order of drawing, to the pass.

        The buffer calls this if later draws were delivered, if there is no token, or if
        ``rollback`` has declined.
        """

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        """Follow a move of the rows from slots ``rows`` to slots ``0, 1, ...``.

        The buffer calls this after ``load_state_dict`` if the buffer's capacity differs from the
        saved capacity. In that case rows have moved or were dropped.
        """

    # -- priorities ---------------------------------------------------------------------------

    @property
    def default_priority(self) -> float:
        """The priority of new rows."""
        return 1.0

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        storage: Storage | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Set priorities. A sampler without priorities warns and changes nothing."""
        warnings.warn(
            f"{type(self).__name__} has no priorities; the update has no effect",
            stacklevel=2,
        )

    def check_priorities(self, priority: torch.Tensor) -> None:
        """Raise ValueError if ``update_priority`` would refuse priorities ``[K]``.

        The buffer calls this before it stores rows that carry priorities.
        """

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state that the next draw depends on, except the generator."""
        return {"_kind": self.kind}

    def state_to_save(self, storage: Storage) -> dict[str, Any]:
        """Return ``state_dict`` for a save of that storage; the caller holds its lock.

        To avoid a copy, a large tensor with tracked changes may be a ``TrackedTensor``.
        """
        return self.state_dict()

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        """Raise ValueError unless the state comes from a sampler of this kind.

        The buffer skips this check for a custom sampler without ``_kind`` in its state.
        """
        self._declared_state(state_dict)

    def _declared_state(self, state_dict: object) -> Any:
        """Return the decoded state. Raises ValueError as ``check_state`` does."""
        require_kind(state_dict, self.kind, "sampler")
        return decode_state(self._declared, state_dict, f"the state of a {self.kind!r} sampler")

    def stored_in(self, state_dict: dict[str, Any]) -> int | None:
        """Return the number of stored rows in a checked state; None if unknown."""
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Raises ValueError if it comes from another kind of sampler."""
        require_kind(state_dict, self.kind, "sampler")

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the sampler's state into a separate directory, completely or not at all."""
        save_checkpoint(path, {"sampler": self.state_dict()}, {"sampler": type(self).__name__})

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load a state that ``dumps`` of a sampler of the same kind saved.

        If the call raises, nothing has changed.

        Raises:
            FileNotFoundError: nothing is saved at the path.
            CheckpointError: the checkpoint is damaged.
            ValueError: the state comes from another kind of sampler.
        """
        with deferred, Checkpoint(path) as saved:
            saved.verify()
            self.load_state_dict(saved.part("sampler"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __copy__(self) -> Self:
        """Return a copy whose draws and updates do not change this sampler."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        return by_value({**self.__dict__, "generator": None, "_owner": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))


def require_rows(storage: Storage) -> int:
    """Return the number of stored rows. Raises NotEnoughData if there are none."""
    count = len(storage)
    if not count:
        raise NotEnoughData("Cannot sample from an empty storage.")
    return count


def drawing_device(storage: Storage, generator: torch.Generator | None) -> torch.device:
    """Return the device of random numbers: the generator's, or else the storage's."""
    return torch.device(storage.device) if generator is None else generator.device


def as_drawn(flat: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Convert flat indices ``[B]`` to the index of users, on the storage's device."""
    flat = put_on(flat, storage.device)
    return unravel_index(flat, storage.lanes) if storage.ndim > 1 else flat


class SampleUnit(Uncompiled, ABC):
    """Turns the rows that a sampler drew into the rows of the batch.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SampleUnit
        >>> class Twice(SampleUnit):
        ...     def expand(self, index, info, storage):
        ...         return index.repeat_interleave(2), {}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sample_unit=Twice())
        >>> _ = rb.extend(torch.tensor([7]))
        >>> rb.sample(2)
        tensor([7, 7, 7, 7])
    """

    def check(self, storage: Storage, sampler: Sampler) -> None:
        """Raise TypeError or ValueError if the unit does not fit storage and sampler.

        The buffer calls this before it attaches storage, sampler or unit.
        """

    @abstractmethod
    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the index of the batch and its info, aligned with each other.

        The caller holds the storage's lock. The method must not change the storage.
        """

    def episodes(self, storage: Storage) -> EpisodeIndex | None:
        """Return the episode index that cuts the windows; None for the sampler's index."""
        return None

    def anchor_needs(self, needs: Needs) -> Needs:
        """Return the needs of a drawn row, given those of the rows that it is expanded into."""
        return needs

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys that every batch has. The key of generations is not included."""
        return ()

    tells = old_name("tells", "info_keys")


class Transition(SampleUnit):
    """Returns each drawn row as it is.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Transition
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sample_unit=Transition())
        >>> _ = rb.extend(torch.zeros(3))
        >>> rb.sample(2)
        tensor([0., 0.])
    """

    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return both arguments unchanged."""
        return index, info


def equal_states(one: Any, other: Any) -> bool:
    """Return whether two states hold equal values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return bool(one == other)
