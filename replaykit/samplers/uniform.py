"""Draw rows uniformly, with and without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import arange
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.declared import Count
from replaykit.episodes import NOTHING, WINDOWS
from replaykit.keywords import checked_keywords
from replaykit.samplers.sampler import (
    Int64s,
    Sampler,
    as_drawn,
    drawing_device,
    require_rows,
    saved_below,
)
from replaykit.samplers.window_measures import Eligible, eligible_records, index_for
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _RowPass:
    """The state of a pass over rows."""

    PREFIX: ClassVar[str] = "_"
    length: Count
    ran_out: bool
    remaining: Int64s | None = None

    def __post_init__(self) -> None:
        self.left()

    def left(self) -> torch.Tensor | ReadLater[torch.Tensor] | None:
        """Return the rows left in the pass. Raises ValueError if a row is impossible."""
        return saved_below(self.length, "_remaining", "pass", self.remaining)


class SamplerWithoutReplacement(Sampler):
    """Draws every stored row once per pass, in random order.

    ``ran_out`` becomes True with the batch that ends a pass. This batch may be shorter than
    requested. The next draw begins a new pass. A draw also begins a new pass if the number of
    stored rows has changed, or if rows were removed and others moved. Overwriting rows at constant
    length does not end a pass.

    If transforms read neighbouring rows, a pass consists of the rows that are eligible when the
    pass begins. A draw skips rows that are no longer eligible. If writes leave no eligible row in
    the pass, the next draw begins a new pass.

    Args:
        drop_last: if True, skip a last batch that would be shorter.
        shuffle: if ``False``, draw rows in the order of their slots.
        even: divide a pass into batches whose sizes differ by at most 1, instead of a short last
            batch. No batch is smaller than requested, unless a pass has fewer rows.
        replacement: no effect.

    Raises:
        ValueError: ``drop_last`` is True together with ``even``, or with fewer stored rows than one
            batch has.

    Cost: O(B + skipped rows) for a draw, and O(N) once per pass. Memory: 8 bytes per row.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4,
        ...                   sampler=SamplerWithoutReplacement(shuffle=False))
        >>> _ = rb.extend(torch.arange(10))
        >>> [batch.tolist() for batch in rb]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    kind = "without_replacement"
    _declared = _RowPass
    passes = True
    mapped_entries = ("_remaining",)

    _remaining = ReadOnce[torch.Tensor | None]()
    """Flat indices that are left in this pass; None if the next draw begins a pass."""

    @checked_keywords
    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        even: bool = False,
        replacement: bool = False,
    ) -> None:
        super().__init__()
        if even and drop_last:
            raise ValueError("expected even=True without drop_last, since no batch is smaller")
        self.even = bool(even)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._remaining = None
        self._length = 0
        # The number in the log after the latest removal that the pass follows; -1: not known yet.
        self._removed = -1
        self._resets = 0
        # The state of the episode index when all rows of the pass were eligible; None: unknown.
        self._whole_as_of: Any = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw the next rows of the pass; return the index and an empty info.

        The last batch of a pass may be shorter. If no pass is under way, a new pass begins.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: ``drop_last`` is True, and fewer than ``batch_size`` rows are stored.
        """
        count = require_rows(storage)
        eligible = eligible_records(storage, self.needs) if self.needs else None
        known = count if eligible is None else eligible.require()
        if self.drop_last and batch_size > known:
            raise ValueError(
                f"The batch size ({batch_size}) is greater than the storage capacity in use: "
                f"{known} rows are stored, and drop_last=True gives no smaller batch"
            )
        if self._is_outdated(storage):
            self._remaining = None
        self._removed = storage.ledger.log.removed
        remaining, drawn = self._remaining, None
        if self.even:
            left = known if remaining is None or self._length != count else len(remaining)
            batch_size = -(-left // max(1, left // batch_size))
        if remaining is not None and self._length == count:
            if eligible is None or eligible.as_of == self._whole_as_of:
                if not self._too_few(remaining, batch_size):
                    drawn = remaining[:batch_size], remaining[batch_size:]
            else:
                drawn = self._still_eligible(remaining, batch_size, eligible)
        if drawn is None:
            remaining = self._new_pass(known, drawing_device(storage, self.generator))
            if eligible is not None:
                remaining = eligible.elements(remaining.cpu().numpy())
            self._whole_as_of = None if eligible is None else eligible.as_of
            drawn = remaining[:batch_size], remaining[batch_size:]
        index, rest = drawn
        self._length = count
        self._ran_out = not len(rest) or self._too_few(rest, batch_size)
        self._remaining = None if self._ran_out else rest
        return as_drawn(index, storage), {}

    def _still_eligible(
        self, remaining: torch.Tensor, batch_size: int, eligible: Eligible
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the next eligible rows of a pass, and the rows that follow them.

        The result is None if fewer rows are eligible than a batch needs. The second tensor is empty
        if no further batch can be drawn now.
        """
        more = batch_size if self.drop_last else 1
        place = eligible.first_of(remaining, batch_size + more)
        index = remaining[torch.from_numpy(place[:batch_size])]
        if not len(index) or self._too_few(index, batch_size):
            return None
        after = int(place[batch_size]) if len(place) == batch_size + more else len(remaining)
        return index, remaining[after:]

    def _is_outdated(self, storage: Storage) -> bool:
        """Return whether a removal has put rows into other slots, so that a new pass begins."""
        return self._removed not in (-1, storage.ledger.log.removed)

    def _too_few(self, remaining: torch.Tensor, batch_size: int) -> bool:
        return self.drop_last and len(remaining) < batch_size

    def _new_pass(self, count: int, device: torch.device) -> torch.Tensor:
        if self.shuffle:
            return torch.randperm(count, generator=self.generator, device=device)
        return torch.arange(count, device=device)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        count = len(storage)
        if count and self.needs:
            with storage.lock:
                count = eligible_records(storage, self.needs).count
        return count >= (batch_size if self.drop_last else 1)

    def empty(self) -> None:
        super().empty()
        self._remaining, self._length, self._whole_as_of, self._removed = None, 0, None, -1
        self._resets += 1

    def mark(self, storage: Storage) -> Any:
        return self._remaining, self._length, self._whole_as_of, self._removed, self._resets

    def rollback(self, token: Any, storage: Storage) -> None:
        *state, resets = token
        if resets == self._resets:
            self._remaining, self._length, self._whole_as_of, self._removed = state

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        flat = [ravel(index, storage.lanes) if storage.ndim > 1 else index for index in drawn]
        if self._remaining is not None:
            flat.append(self._remaining)
        if flat:
            self._remaining = torch.cat([index.to(flat[0].device) for index in flat])
            self._whole_as_of = None

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        if self._remaining is None:
            return
        lanes = storage.lanes.numel()
        if len(rows) and int(rows.max()) >= self._length // lanes:
            # Rows were added after this pass began, so the next draw begins a new pass anyway.
            self._remaining = None
            return
        now = torch.full((self._length // lanes,), -1, device="cpu")
        now[rows] = arange(len(rows))
        remaining = self._remaining.cpu()
        slots = now[remaining // lanes]
        kept = (slots * lanes + remaining % lanes)[slots >= 0]
        self._remaining = kept if len(kept) else None
        self._length = len(rows) * lanes

    def _left(self) -> torch.Tensor | None:
        """Return the rows left in the pass, unless the next draw begins a new pass."""
        storage = None if self.owner is None else self.owner.storage
        if storage is not None and (self._is_outdated(storage) or self._length != len(storage)):
            return None
        return self._remaining

    def state_dict(self) -> dict[str, Any]:
        remaining = self._left()
        return {
            **super().state_dict(),
            "_remaining": None if remaining is None else remaining.cpu().clone(),
            "_length": self._length,
            "_ran_out": self._ran_out,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = self._declared_state(state_dict)
        self._remaining, self._whole_as_of = saved.left(), None
        # A load leaves the number of removals as it is, so the pass notices the next removal.
        self._removed = -1 if self.owner is None else self.owner.storage.ledger.log.removed
        self._length, self._ran_out = saved.length, saved.ran_out
        self._resets += 1

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_whole_as_of": None, "_removed": -1}
        return state if self._left() is not None else {**state, "_held_remaining": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


class RandomSampler(Sampler):
    """Draws rows independently, with the same probability for every stored row.

    Args:
        replacement: ``False`` creates a SamplerWithoutReplacement from the other keywords.

    Cost: O(B).

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomSampler(),
        ...                   generator=torch.Generator().manual_seed(0))
        >>> _ = rb.extend(torch.arange(8) * 10)
        >>> rb.sample(4)
        tensor([40, 70, 50,  0])
    """

    kind = "random"
    stateless = True
    marks_draws = False

    @overload
    def __new__(cls, *, replacement: Literal[True] = True) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]  # returns another class, as in TorchRL
        cls, *, replacement: Literal[False], **kwargs: Any
    ) -> SamplerWithoutReplacement: ...
    def __new__(cls, *, replacement: bool = True, **kwargs: Any) -> Any:
        if not replacement:
            return SamplerWithoutReplacement(**kwargs)
        return super().__new__(cls)

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw each row independently from all rows; return the index and an empty info."""
        count = len(storage) or require_rows(storage)
        self._ran_out = False  # there is no pass; clear a flag that was set
        if self.needs is not NOTHING and self.needs:
            known = index_for(storage).total(self.needs.single, WINDOWS)
            if known < count:
                records = eligible_records(storage, self.needs)
                records.require()
                return self._eligible(records, storage, batch_size), {}
        generator, home = self.generator, storage.device
        device = home if generator is None else generator.device
        flat = torch.randint(count, (batch_size,), generator=generator, device=device)
        if storage.ndim == 1 and device == home:
            return flat, {}
        return as_drawn(flat, storage), {}

    def _eligible(self, records: Eligible, storage: Storage, batch_size: int) -> torch.Tensor:
        """Draw among the eligible rows only."""
        generator, device = self.generator, drawing_device(storage, self.generator)
        number = torch.randint(records.count, (batch_size,), generator=generator, device=device)
        found = records.elements((number if number.is_cpu else number.cpu()).numpy())
        return as_drawn(found, storage)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        if not len(storage) or not self.needs:
            return len(storage) > 0
        with storage.lock:
            return eligible_records(storage, self.needs).count > 0
