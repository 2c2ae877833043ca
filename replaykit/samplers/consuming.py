"""Draw each row a given number of times, then free its slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.declared import Positive
from replaykit.errors import NotEnoughData
from replaykit.keywords import checked_keywords, one_of, whole_number
from replaykit.samplers.priority_rules import stored_elements
from replaykit.samplers.sampler import Int64s, Sampler, made_of_saved, require_rows
from replaykit.samplers.window_measures import integers, permutation
from replaykit.storages import Storage
from replaykit.storages.indexing import rising

Array = np.ndarray[Any, Any]

_FIRST = 64


class LiveSlots:
    """Slots ``0..length-1``, each either live or queued to be written again.

    Live slots fill the front of one array in any order, so a draw only chooses positions in it.
    When a live slot is removed, the last live slot moves to its position.

    The queue is a part of another array. It has each slot that is not live once. Writers take slots
    from its front.

    Cost: O(K) for K slots, amortised. If slots become live that are at neither end of the queue, it
    is O(length).
    Memory: 20 bytes per slot, up to twice that while the number of slots grows, and up to 16 bytes
    per slot for the queue.

    Example:
        >>> import numpy as np
        >>> from replaykit.samplers.consuming import LiveSlots
        >>> slots = LiveSlots()
        >>> slots.written(np.arange(4))
        >>> slots.use(np.array([2, 0]), 1)
        >>> slots.count, slots.free(9).tolist()
        (2, [2, 0])
        >>> slots.written(np.array([2]))
        >>> slots.count, slots.free(9).tolist()
        (3, [0])
    """

    def __init__(self) -> None:
        self.length = 0
        self.count = 0
        """Number of live slots."""
        self._uses = np.zeros(0, np.int32)
        self._live = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)  # position in _live; -1: not live
        self._line = np.zeros(_FIRST, np.int64)
        self._lo, self._hi = 0, 0  # range of the array that is queued

    def at(self, places: Array) -> Array:
        """Return the live slots at these positions in ``[0, count)``."""
        return self._live[places]

    def use(self, slots: Array, most: int) -> None:
        """Count one draw of these distinct live slots; ``most`` is the limit per slot."""
        self._uses[slots] += 1
        gone = slots[self._uses[slots] >= most]
        if not len(gone):
            return
        holes = self._place[gone]
        after = self.count - len(gone)
        self._place[gone] = -1
        tail = self._live[after : self.count]
        kept = tail[self._place[tail] >= 0]
        holes = holes[holes < after]
        self._live[holes], self._place[kept] = kept, holes
        self.count = after
        self._queue(gone)

    def unused(self, slots: Array, most: int) -> None:
        """Take back one draw of each slot. The slots were not written after that draw."""
        slots = np.unique(slots[slots < self.length])
        self._uses[slots] = np.maximum(self._uses[slots] - 1, 0)
        self._enliven(slots[self._uses[slots] < most])

    def written(self, slots: Array) -> None:
        """Make the slots live and reset their counts, because they hold new rows."""
        if not len(slots):
            return
        slots = rising(slots)
        self._reserve(int(slots[-1]) + 1)
        self._uses[slots] = 0
        self._enliven(slots)

    def _enliven(self, slots: Array) -> None:
        fresh = slots[self._place[slots] < 0]
        places = np.arange(len(fresh)) + self.count
        self._live[places], self._place[fresh] = fresh, places
        self.count += len(fresh)
        if len(fresh):
            self._unqueue(len(fresh))

    def _unqueue(self, most: int) -> None:
        """Remove up to ``most`` slots from the queue that have become live."""
        front = self._place[self._line[self._lo : min(self._hi, self._lo + most)]] < 0
        self._lo += int(front.argmax()) if front.any() else len(front)
        back = self._place[self._line[max(self._lo, self._hi - most) : self._hi][::-1]] < 0
        self._hi -= int(back.argmax()) if back.any() else len(back)
        if self._hi - self._lo > self.length - self.count:  # others are between the ends
            line = self.free(self.length)
            self._hi = self._lo
            self._queue(line[self._place[line] < 0])

    def _reserve(self, length: int) -> None:
        if length <= self.length:
            return
        if length > len(self._uses):
            room = max(length, 2 * len(self._uses), _FIRST)
            for name, fill in (("_uses", 0), ("_live", 0), ("_place", -1)):
                old = getattr(self, name)
                new = np.full(room, fill, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
        skipped = np.arange(self.length, length)
        self.length = length
        self._enliven(skipped)

    def free(self, count: int) -> Array:
        """Return up to ``count`` slots from the front of the queue, which keeps them."""
        return self._line[self._lo : min(self._hi, self._lo + count)].copy()

    def _queue(self, slots: Array) -> None:
        if self._hi + len(slots) > len(self._line):
            waiting = self._hi - self._lo
            room = max(len(self._line), 2 * (waiting + len(slots)))
            line = np.zeros(room, np.int64)
            line[:waiting] = self._line[self._lo : self._hi]
            self._line, self._lo, self._hi = line, 0, waiting
        self._line[self._hi : self._hi + len(slots)] = slots
        self._hi += len(slots)

    def move(self, rows: Array) -> None:
        """Renumber slots ``rows`` as ``0, 1, ...`` and drop all others."""
        self._reserve(int(rows.max()) + 1 if len(rows) else 0)
        uses, live, line = self.state()
        now = np.full(len(uses), -1, np.int64)
        now[rows] = np.arange(len(rows))
        live, line = now[live], now[line]
        self._set(uses[rows], live[live >= 0], line[line >= 0])

    # -- state --------------------------------------------------------------------------------

    def state(self) -> tuple[Array, Array, Array]:
        """Return copies of each slot's count, the live slots and the queue, int64."""
        uses = self._uses[: self.length].astype(np.int64)
        return uses, self._live[: self.count].copy(), self.free(self.length)

    @classmethod
    def of(cls, uses: Array, live: Array, line: Array, most: int) -> LiveSlots:
        """Restore a ``state``. Raises ValueError if its arrays contradict each other."""
        length, whole = len(uses), np.concatenate([live, line])
        seen = np.zeros(length, bool)
        if len(whole) == length and ((whole >= 0) & (whole < length)).all():
            seen[whole] = True
        if not (
            len(whole) == length
            and seen.all()
            and ((uses >= 0) & (uses <= most)).all()
            and (uses[live] < most).all()
            and (uses[line] == most).all()
        ):
            raise ValueError(
                f"expected each of {length} rows to be sampleable, or free after {most} draws, got "
                f"{uses.tolist()[:8]} draws, {live.tolist()[:8]} sampleable, {line.tolist()[:8]} "
                "free"
            )
        found = cls()
        found._set(uses, live, line)
        return found

    def _set(self, uses: Array, live: Array, line: Array) -> None:
        length = len(uses)
        self.length, self.count = length, len(live)
        self._uses = uses.astype(np.int32)
        self._live = np.zeros(length, np.int64)
        self._live[: len(live)] = live
        self._place = np.full(length, -1, np.int64)
        self._place[live] = np.arange(len(live))
        self._lo = self._hi
        self._queue(line)


@dataclass(frozen=True)
class _DrawCounts:
    """The number of draws of each row, and the live and the free slots."""

    PREFIX: ClassVar[str] = "_"
    max_sample_count: Positive
    ran_out: bool
    sample_count: Int64s
    sampleable: Int64s
    free: Int64s

    def __post_init__(self) -> None:
        self.slots()

    def slots(self) -> LiveSlots | ReadLater[LiveSlots]:
        """Return the slots. Raises ValueError if the vectors contradict each other."""
        make = functools.partial(LiveSlots.of, most=self.max_sample_count)
        vectors = (self.sample_count, self.sampleable, self.free)
        return made_of_saved(make, "counts of draws", *vectors)


_UNKNOWN = 2**62
"""A limit above the number of slots of any storage."""


class ConsumingSampler(Sampler):
    """Draws rows uniformly without repetition, each ``max_sample_count`` times.

    No row occurs twice in a batch. After ``max_sample_count`` draws, a row is used up and its slot
    is free. The buffer writes new rows to free slots first, in the order in which they became free.

    The ``len`` of the buffer is the number of rows that can still be drawn. A batch cannot have
    more rows than that. ``ran_out`` becomes True with the batch that uses up the last row, and
    iteration over the buffer ends there.

    The buffer needs a list or tensor storage with ``ndim=1``, and a RoundRobinWriter. It cannot use
    ``prefetch``, ``shared``, a ``Sequence``, or transforms that read neighbouring rows, because
    reused slots do not keep the order of time. The buffer argument ``consume_after_n_samples=n``
    has the same effect as this sampler. If a batch cannot be made, its draws are rolled back.

    Args:
        max_sample_count: number of times that a row is drawn, at least 1.
        order: ``"random"``, or ``"age"`` to draw the oldest rows first, as from a queue. A draw
            then takes O(N) for N rows that can be drawn.

    Raises:
        TypeError: ``max_sample_count`` is not an int.
        ValueError: ``max_sample_count`` is below 1.
        RuntimeError: ``sample`` finds no row left.

    Cost: O(B) for a draw or a write of B rows. Memory: 20 to 56 bytes per row.

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
    marks_draws = False  # `put_back` undoes every draw
    _declared = _DrawCounts
    mapped_entries = ("_sample_count", "_sampleable", "_free")

    _slots = ReadOnce[LiveSlots]()

    @checked_keywords
    def __init__(
        self, max_sample_count: int = 1, order: str = "random", *, replacement: bool = True
    ) -> None:
        super().__init__(replacement=replacement)
        self.order = one_of("order", order, ("random", "age"))
        self._most = whole_number("max_sample_count", max_sample_count, 1)
        self._slots = LiveSlots()
        # The place in the storage's log that the slots have followed; None after a load.
        self._seen: tuple[int, int] | None = None

    @property
    def max_sample_count(self) -> int:
        """The number of times that a row is drawn."""
        return self._most

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw up to ``batch_size`` rows; return the index and an empty info.

        Raises:
            RuntimeError: the storage is empty, or no row is left.
            ValueError: ``ndim > 1``, or the buffer's transforms read neighbouring rows.
        """
        require_rows(storage)
        if storage.ndim > 1 or self.needs:
            raise ValueError(
                f"{type(self).__name__} draws rows one by one, and their slots are written again: "
                "expected ndim=1 and no transforms that read neighbouring rows"
            )
        left = self.left(storage)
        if not left:
            raise NotEnoughData(
                f"each of the {len(storage)} stored rows has been sampled {self._most} times; "
                "write new rows first"
            )
        if self.order == "age":
            live = self._slots.at(np.arange(left))
            row_id = storage.ledger.positions(torch.from_numpy(live)).numpy()
            drawn = live[np.argsort(row_id)[:batch_size]]
        else:
            drawn = self._slots.at(_distinct(left, min(batch_size, left), self.generator))
        self._slots.use(drawn, self._most)
        self._ran_out = not self._slots.count
        return torch.from_numpy(drawn).to(storage.device), {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        return self.left(storage) > 0 and storage.ndim == 1 and not self.needs

    def left(self, storage: Storage) -> int:
        """Return the number of rows that can be drawn."""
        with storage.lock:
            self._follow(storage)
            return self._slots.count

    def free(self, storage: Storage, count: int) -> torch.Tensor:
        """Return up to ``count`` slots whose rows were drawn for the last time.

        The slots are in the order in which they became free. They stay free until the writer writes
        to them.
        """
        with storage.lock:
            self._follow(storage)
            return torch.from_numpy(self._slots.free(count))

    def _follow(self, storage: Storage) -> None:
        """Follow all writes, also those that came without a notification."""
        ledger = storage.ledger
        cleared, slots = ledger.written_since(self._seen)
        if cleared:
            self._slots = LiveSlots()
        if ledger.length < self._slots.length:  # the loaded state is of a buffer with more rows
            self._slots.move(np.arange(ledger.length))
        if ledger.length > self._slots.length:
            self._slots.written(np.arange(self._slots.length, ledger.length))
        self._slots.written(slots)
        self._seen = ledger.place_in_log

    # -- notifications ------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        """Attach the sampler to its storage. All rows in it count as never drawn."""
        self._slots, self._seen = LiveSlots(), storage.ledger.place_in_log

    def add(self, index: Any) -> None:
        self.mark_update(index)

    def extend(self, index: Any) -> None:
        self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Reset the draw counts of rows that were written.

        Raises:
            IndexError: an index other than -1 is outside the stored rows; nothing has changed.
        """
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        if storage is not None:
            self._follow(storage)
        limit = _UNKNOWN if storage is None else storage.ledger.length
        slots, _ = stored_elements(as_tensor(index).cpu().reshape(-1), limit)
        self._slots.written(slots.numpy())

    def empty(self) -> None:
        super().empty()
        self._slots, self._seen = LiveSlots(), None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        for index in drawn:
            self._slots.unused(index.cpu().numpy(), self._most)

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        self._slots.move(rows.cpu().numpy())

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return each row's number of draws, int64 ``[N]``, and the order of the slots.

        The order has two parts: the live slots, and the free slots in the order of the queue.
        """
        uses, live, free = self._slots.state()
        return {
            **super().state_dict(),
            "_max_sample_count": self._most,
            "_sample_count": torch.from_numpy(uses),
            "_sampleable": torch.from_numpy(live),
            "_free": torch.from_numpy(free),
            "_ran_out": self._ran_out,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = self._declared_state(state_dict)
        self._slots, self._seen = saved.slots(), None
        self._ran_out = saved.ran_out

    def _declared_state(self, state_dict: object) -> Any:
        saved = super()._declared_state(state_dict)
        if saved.max_sample_count != self._most:
            raise ValueError(
                f"expected the state of a sampler with max_sample_count={self._most}, got "
                f"{saved.max_sample_count}"
            )
        return saved

    def __getstate__(self) -> dict[str, Any]:
        if self.owner is not None:
            self.left(self.owner.storage)  # follows changes, which the copied log lacks
        return {**super().__getstate__(), "_seen": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self._most})"


def _distinct(limit: int, count: int, generator: torch.Generator | None) -> Array:
    """Draw ``count`` distinct integers of ``[0, limit)`` uniformly, in random order.

    Returns:
        int64 ``[count]``.

    Independent draws without their repetitions have this distribution. Cost: O(count).
    """
    if 4 * count >= limit:
        return permutation(limit, generator)[:count]
    drawn = np.empty(0, np.int64)
    while len(drawn) < count:
        drawn = np.concatenate([drawn, integers(limit, count, generator)])
        drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return drawn[:count]
