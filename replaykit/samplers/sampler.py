"""Define what every sampler offers, and what one drawn row stands for."""

from __future__ import annotations

import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit._compat import Uncompiled, dtype_name
from replaykit.checkpoint import Checkpoint, MappedRows, ReadLater, save_checkpoint
from replaykit.episodes import NOTHING, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.interrupts import deferred
from replaykit.keywords import named_after
from replaykit.storages import Storage
from replaykit.storages.indexing import unravel_index
from replaykit.storages.tensor_bytes import by_value, from_value

__all__ = ["SampleUnit", "Sampler", "Transition", "made_of_saved"]

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")


def made_of_saved(
    state: Mapping[str, Any],
    names: Mapping[str, tuple[torch.dtype, ...]],
    make: Callable[..., Made],
    what: str,
    *,
    optional: bool = False,
) -> Made | ReadLater[Made]:
    """What is made of entries of a state: now, or later where some lie in files.

    Args:
        names: of the entries, with the dtypes that each may have.
        make: makes it of the arrays, ``[K]`` each, which are its own; ValueError where they
            contradict themselves.
        what: they are, for the error of who asks later.
        optional: entries that are missing are empty.

    Raises:
        ValueError: an entry is no vector, or of another dtype; what ``make`` raises.
    """
    found: list[Array | MappedRows] = []
    for name, kinds in names.items():
        part = state.get(name)
        if part is None and optional:
            part = torch.empty(0, dtype=kinds[0], device="cpu")
        if (
            not isinstance(part, (torch.Tensor, MappedRows))
            or len(part.shape) != 1
            or part.dtype not in kinds
        ):
            words = " or ".join(dtype_name(kind) for kind in kinds)
            raise ValueError(f"expected {name!r} as {words} [K], got {part!r}")
        found.append(part if isinstance(part, MappedRows) else part.cpu().numpy().copy())
    if any(isinstance(part, MappedRows) for part in found):
        return ReadLater(make, found, what)
    return make(*found)


@named_after
class Sampler(Uncompiled, ABC):
    """Draws records by index; never reads what it draws.

    A sampler of one's own brings ``sample`` and, where it has state, ``state_dict`` and
    ``load_state_dict``.

    Attributes:
        generator: where randomness comes from; None: torch's global generator. Set by the buffer.
        prioritized: whether records have priorities.

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
    """Samplers of one kind take each other's saved state; one's own class is a kind of its own."""

    prioritized = False

    mapped_entries: tuple[str, ...] = ()
    """Entries of a saved state that it takes as MappedRows, to be read when they are needed."""

    draws_windows = False
    """Whether it draws windows of several rows by itself."""

    @property
    def draws_anchors(self) -> bool:
        """Whether a ``Sequence`` can make windows of the rows that it draws."""
        return not self.draws_windows

    @property
    def tells(self) -> tuple[Any, ...]:
        """Keys of what a draw always tells of its rows, beside ``index``, generations and marks of
        where windows end."""
        return ()

    reads_rows = False
    """Whether it looks at rows to decide which to draw: other processes do not write meanwhile."""

    consumes = False
    """Whether records are drawn a number of times and are free to be written again after that."""

    stateless = False
    """Whether a draw leaves nothing behind, so that several buffers may use one sampler."""

    prompt = False
    """Whether a draw takes microseconds, so that a thread is not asked to make it ahead. It is
    said of the class itself: a subclass may draw in another way."""

    passes = False
    """Whether it goes through the records pass by pass, so that ``ran_out`` ends each of them."""

    needs_write_order = False
    """Whether rows must lie in the order of time, which not every writer keeps."""

    needs: Needs = NOTHING
    """What the buffer's transforms need around a row; rows without it are not drawn. Set by the
    buffer."""

    _owner: weakref.ref[Any] | None = None

    _shown: bool | None = None
    """What ``ran_out`` says while a buffer draws ahead of what it has delivered."""

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
        """The buffer that uses it; None where there is none, or none any more."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, buffer: Any) -> None:
        self._owner = weakref.ref(buffer)

    def _settle_draws(self) -> None:
        """Waits until its buffer has made the draws that this thread has asked for ahead of time:
        what is set afterwards counts for later ones alone."""
        settle = getattr(self.owner, "_settle_draws", None)
        if settle is not None:
            settle()

    # -- drawing ------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws ``batch_size`` records.

        Returns:
            The index, int64 ``[B]`` (``[B, ndim]`` for storages with lanes), and what is known of
            the records drawn: tensors with leading dimension B.

        Raises:
            RuntimeError: nothing can be drawn.
        """

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether ``sample`` would succeed now. Draws nothing, changes nothing, never raises."""
        return len(storage) > 0

    def episodes(self, storage: Storage) -> EpisodeIndex | None:
        """The index by which it cuts windows; None: that of the storage."""
        return None

    def complete(self, rows: Any, info: dict[Any, Any]) -> Any:
        """Told what was read for a draw: adds to ``info`` what follows from it; returns the rows.

        Called once a draw, without a lock; depends on its arguments only.
        """
        return rows

    def complete_fresh(self, rows: Any, info: dict[Any, Any]) -> Any:
        """``complete`` of rows that nobody else has or will see as they were stored: what it adds
        may take the place of what is there."""
        return self.complete(rows, info)

    def shape_of(self, rows: int) -> tuple[int, ...] | None:
        """Batch shape in which ``rows`` rows are delivered; None: flat."""
        return None

    def left(self, storage: Storage) -> int:
        """How many of the stored records can be drawn, where draws use them up."""
        return len(storage)

    def free(self, storage: Storage, count: int) -> torch.Tensor:
        """Up to ``count`` slots that are free to be written again, since draws have used their
        records up: int64 ``[K]``."""
        return torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def ran_out(self) -> bool:
        """Whether the last batch ended a pass over the records."""
        return self._ran_out if self._shown is None else self._shown

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)

    def attach(self, storage: Storage) -> None:
        """Told which storage it draws from, with the rows that are there already."""

    def rejoin(self, storage: Storage) -> None:
        """Told which storage it draws from, where both were copied together: what it knows of the
        rows stays."""

    # -- being told of writes -----------------------------------------------------------------

    def about_to_write(self) -> None:
        """Told before the first write to records that were loaded: what it has to know then, and
        lies in files yet, is read. What it raises prevents the write."""

    def add(self, index: Any) -> None:
        """Told that one record was written."""

    def extend(self, index: torch.Tensor) -> None:
        """Told that records were written."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Told that records were written by another buffer over the same storage."""

    def empty(self) -> None:
        """Told that all records are gone."""
        self._ran_out = False

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        """Told that draws, in the order they were made, will not be delivered after all."""

    def drop_pass(self) -> None:
        """Told that no draw of the pass that began last will be delivered: it has not begun.

        ``put_back`` follows, with draws of the pass before.
        """

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        """Told that the records of slots ``rows`` now lie in slots ``0, 1, ...``.

        Follows ``load_state_dict`` where rows lie elsewhere, or are gone, in another capacity than
        the one that was saved.
        """

    # -- priorities ---------------------------------------------------------------------------

    @property
    def default_priority(self) -> float:
        """Priority of new records."""
        return 1.0

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        storage: Storage | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        """Sets priorities, in samplers that have them; here: a warning and no change."""
        warnings.warn(
            f"{type(self).__name__} has no priorities; the update has no effect",
            UserWarning,
            stacklevel=2,
        )

    def check_priorities(self, priority: torch.Tensor) -> None:
        """Raises ValueError where ``update_priority`` would refuse priorities ``[K]``.

        Asked before records that carry priorities are stored.
        """

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of everything that the next draw depends on, the generator apart."""
        return {"_kind": self.kind}

    def state_to_save(self, storage: Storage) -> dict[str, Any]:
        """Returns what ``state_dict`` does, for a save of that storage, whose lock is held.

        Large tensors of which is known what has changed may be ``TrackedTensor``, without a copy.
        """
        return self.state_dict()

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        """Raises ValueError where the state is not one of a sampler of this kind.

        Not asked about the state of a sampler of one's own that keeps no ``_kind`` in it.
        """
        if not isinstance(state_dict, dict) or state_dict.get("_kind") != self.kind:
            found = state_dict.get("_kind") if isinstance(state_dict, dict) else state_dict
            raise ValueError(f"expected the state of a {self.kind!r} sampler, got {found!r}")

    def stored_in(self, state_dict: dict[str, Any]) -> int | None:
        """Number of stored records that a checked state tells of; None where it does not count."""
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state over; ValueError where it is not one of this kind of sampler."""
        if state_dict.get("_kind") != self.kind:
            raise ValueError(
                f"expected the state of a {self.kind!r} sampler, got {state_dict.get('_kind')!r}"
            )

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves the sampler's state into a directory of its own, all or nothing."""
        save_checkpoint(path, {"sampler": self.state_dict()}, {"sampler": type(self).__name__})

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes over a state that ``dumps`` of a sampler of the same kind saved.

        Raises:
            FileNotFoundError: nothing saved there. CheckpointError: it is damaged.
            ValueError: another kind of sampler. Nothing has changed then.
        """
        with deferred, Checkpoint(path) as saved:
            saved.verify()
            self.load_state_dict(saved.part("sampler"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __getstate__(self) -> dict[str, Any]:
        return by_value({**self.__dict__, "generator": None, "_owner": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))


def require_rows(storage: Storage) -> int:
    """Returns the number of stored rows; raises where there is none."""
    count = len(storage)
    if not count:
        raise NotEnoughData("Cannot sample from an empty storage.")
    return count


def drawing_device(storage: Storage, generator: torch.Generator | None) -> torch.device:
    """Where random numbers are made: with the generator, else with the records."""
    if generator is not None:
        return generator.device
    device = storage.device
    return torch.device(device) if isinstance(device, str) else device


def as_drawn(flat: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Brings numbers of elements ``[B]`` to the index that users see, on the storage's device."""
    flat = flat.to(storage.device)
    return unravel_index(flat, storage.lanes) if storage.ndim > 1 else flat


class SampleUnit(Uncompiled, ABC):
    """Turns the records that a sampler drew into the records of the batch.

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
        """Raises TypeError or ValueError where it cannot work with these components of a buffer.

        Asked before a buffer takes any of the three.
        """

    @abstractmethod
    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the index of the batch and its info, aligned with each other.

        Called with the storage's lock held; must not change the storage.
        """

    def episodes(self, storage: Storage) -> EpisodeIndex | None:
        """The index by which it cuts windows; None: that of the sampler."""
        return None

    @property
    def tells(self) -> tuple[Any, ...]:
        """Keys of what it always tells of the rows of the batch, beside their generations."""
        return ()


class Transition(SampleUnit):
    """The record itself.

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
        """Returns both as they are."""
        return index, info
