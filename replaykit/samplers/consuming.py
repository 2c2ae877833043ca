"""Records that are drawn a number of times, and then make room."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.errors import NotEnoughData
from replaykit.keywords import checked_keywords
from replaykit.samplers.base import Sampler, require_rows
from replaykit.samplers.draws import integers
from replaykit.samplers.live import LiveSlots
from replaykit.samplers.priority_arguments import stored_elements
from replaykit.samplers.saved_arrays import made_of_saved
from replaykit.storages import Storage

__all__ = ["ConsumingSampler", "checked_uses"]

Array = np.ndarray[Any, Any]

_ARRAYS = ("_sample_count", "_sampleable", "_free")
_UNKNOWN = 2**62
"""More than any storage has slots."""


class ConsumingSampler(Sampler):
    """Draws records uniformly, none twice in a batch, each ``max_sample_count`` times in all.

    A record that was drawn so often cannot be drawn again before its slot is written again, and
    the buffer writes to such slots first, in the order in which they became free. ``len`` of the
    buffer is the number of records that can be drawn; a batch has at most so many. ``ran_out``
    turns True with the batch that leaves none, which ends an iteration.

    Args:
        max_sample_count: how often a record is drawn, at least 1.

    Raises:
        TypeError: no int. ValueError: below 1.
        RuntimeError: in ``sample``: nothing is left.

    For buffers over list and tensor storages (``ndim=1``) with a RoundRobinWriter; not with
    ``prefetch``, ``shared``, a ``Sequence``, or transforms that read the rows around: reused slots
    do not keep the order of time. ``consume_after_n_samples=n`` of a buffer is the same. A batch
    whose making failed is given back.

    Cost: O(B) a draw and a write; 28 to 72 bytes a record.

    Example:
        >>> import torch
        >>> from replaykit import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler(),
        ...                   generator=torch.Generator().manual_seed(0))
        >>> _ = rb.extend(torch.arange(4) * 10)
        >>> rb.sample(3), len(rb)
        (tensor([ 0, 10, 30]), 1)
        >>> rb.extend(torch.tensor([50, 60])), len(rb)  # where the first two of them were
        (tensor([0, 1]), 3)
    """

    kind = "consuming"
    consumes = True
    mapped_entries = _ARRAYS

    _slots = ReadOnce[LiveSlots]()

    @checked_keywords
    def __init__(self, max_sample_count: int = 1, *, replacement: bool = True) -> None:
        super().__init__(replacement=replacement)
        self._most = checked_uses("max_sample_count", max_sample_count)
        self._slots = LiveSlots()
        # How far the ledger had been cleared when it was looked at; None: it was not.
        self._cleared: int | None = None

    @property
    def max_sample_count(self) -> int:
        """How often a record is drawn."""
        return self._most

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws up to ``batch_size`` records; returns the index, and no info.

        Raises:
            RuntimeError: nothing is stored, or nothing is left. ValueError: ``ndim > 1``, or
                transforms that read the rows around.
        """
        require_rows(storage)
        if storage.ndim > 1 or self.needs:
            raise ValueError(
                f"{type(self).__name__} draws rows one by one, and their slots are written again: "
                "expected ndim=1 and no transforms that read the rows around"
            )
        left = self.left(storage)
        if not left:
            raise NotEnoughData(
                f"each of the {len(storage)} stored rows has been sampled {self._most} times; "
                "write others first"
            )
        drawn = self._slots.at(_distinct(left, min(batch_size, left), self.generator))
        self._slots.use(drawn, self._most)
        self._ran_out = not self._slots.count
        return torch.from_numpy(drawn).to(storage.device), {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        return self.left(storage) > 0 and storage.ndim == 1 and not self.needs

    def left(self, storage: Storage) -> int:
        """How many records can be drawn."""
        with storage.lock:
            self._follow(storage)
            return self._slots.count

    def free(self, storage: Storage, count: int) -> torch.Tensor:
        """Slots of records that have been drawn for the last time, up to ``count``, those first
        that were so first; they stay free until somebody writes there."""
        with storage.lock:
            self._follow(storage)
            return torch.from_numpy(self._slots.free(count))

    def _follow(self, storage: Storage) -> None:
        """Takes note of what nobody has told of: records that are gone, and more of them."""
        ledger = storage.ledger
        if self._cleared != ledger.cleared:
            if self._cleared is not None:
                self._slots = LiveSlots()
            self._cleared = ledger.cleared
        if ledger.length < self._slots.length:  # the state of a longer buffer
            self._slots.move(np.arange(ledger.length))
        if ledger.length > self._slots.length:
            self._slots.written(np.arange(self._slots.length, ledger.length))

    # -- being told ---------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        """Takes the storage to draw from; what is stored there was never drawn."""
        self._slots, self._cleared = LiveSlots(), storage.ledger.cleared

    def add(self, index: Any) -> None:
        self.mark_update(index)

    def extend(self, index: Any) -> None:
        self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Told that records were written: they were never drawn.

        Raises:
            IndexError: an index other than -1 outside the stored records; nothing has changed.
        """
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        limit = _UNKNOWN if storage is None else storage.ledger.length
        slots, _ = stored_elements(as_tensor(index).cpu().reshape(-1), limit)
        self._slots.written(slots.numpy())

    def empty(self) -> None:
        super().empty()
        self._slots, self._cleared = LiveSlots(), None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        for index in drawn:
            self._slots.unused(index.cpu().numpy(), self._most)

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        self._slots.move(rows.cpu().numpy())

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns how often each record was drawn, int64 ``[N]``, and what comes next: the records
        that can be drawn, and the free slots in their order."""
        uses, live, free = self._slots.state()
        return {
            **super().state_dict(),
            "_max_sample_count": self._most,
            "_sample_count": torch.from_numpy(uses),
            "_sampleable": torch.from_numpy(live),
            "_free": torch.from_numpy(free),
            "_ran_out": self._ran_out,
        }

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        super().check_state(state_dict, storage)
        self._checked(state_dict)

    def stored_in(self, state_dict: dict[str, Any]) -> int | None:
        # Records that came unnoticed are not in it.
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._slots, self._cleared = self._checked(state_dict), None
        self._ran_out = state_dict["_ran_out"]

    def _checked(self, state: dict[str, Any]) -> LiveSlots | ReadLater[LiveSlots]:
        if state.get("_max_sample_count") != self._most:
            raise ValueError(
                f"expected the state of a sampler with max_sample_count={self._most}, got "
                f"{state.get('_max_sample_count')!r}"
            )
        if type(state.get("_ran_out")) is not bool:
            raise ValueError(f"expected ran_out as a bool, got {state.get('_ran_out')!r}")
        names = dict.fromkeys(_ARRAYS, (torch.int64,))
        make = functools.partial(LiveSlots.of, most=self._most)
        return made_of_saved(state, names, make, "counts of draws")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self._most})"


def checked_uses(name: str, value: object) -> int:
    """Returns how often records are drawn.

    Raises:
        TypeError: no int. ValueError: below 1.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"expected {name} as an int, got {value!r}")
    if value < 1:
        raise ValueError(f"expected {name} of at least 1, got {value!r}")
    return int(value)


def _distinct(limit: int, count: int, generator: torch.Generator | None) -> Array:
    """Distinct numbers of ``[0, limit)`` in random order, each as likely: int64 ``[count]``.

    Independent draws of which repeated ones are dropped have that law. Cost: O(count).
    """
    if 4 * count >= limit:
        device = "cpu" if generator is None else generator.device
        order = torch.randperm(limit, generator=generator, device=device)
        return np.asarray(order[:count].cpu().numpy())
    drawn = np.empty(0, np.int64)
    while len(drawn) < count:
        drawn = np.concatenate([drawn, integers(limit, count, generator)])
        drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return drawn[:count]
