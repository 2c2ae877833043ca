"""Keep only the rows of largest rank."""

from __future__ import annotations

import multiprocessing.context
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from replaykit._compat import arange, is_tensordict, lookup
from replaykit.checkpoint import MappedRows, ReadLater
from replaykit.declared import vector
from replaykit.keywords import checked_keywords, one_of
from replaykit.native import RankHeap
from replaykit.reductions import REDUCTIONS, reduce_rows
from replaykit.schema import Rows
from replaykit.storages import Storage
from replaykit.structure import Branch
from replaykit.ted import format_key, unravel
from replaykit.writers.writer import Writer, WriterState, ledger_of, no_tensordicts

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _RankState(WriterState):
    """The state of the writer, with the rank of each row."""

    ranks: Annotated[Any, vector(torch.float64)]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.ledger.length:
            raise ValueError(f"expected {self.ledger.length} ranks, got {len(self.ranks)}")
        if isinstance(self.ranks, torch.Tensor):
            _numbers(self.ranks.numpy())


class TensorDictMaxValueWriter(Writer):
    """A writer that keeps the ``max_size`` rows of largest rank.

    While there is room, the writer appends rows. When the storage is full, a new row replaces the
    row of smallest rank if the new rank is strictly larger. Among equal ranks the older row stays.
    Writing a batch gives the same result as writing its rows one by one. Ranks are compared in
    float64, so integers beyond 2^53 are rounded.

    Args:
        rank_key: key of the rank; rows may be whole trajectories.
        reduction: the function that reduces the values of a row to one rank: ``max``, ``min``,
            ``mean``, ``median`` (the lower median) or ``sum``.

    Raises:
        ValueError: the reduction is unknown, the storage has ``ndim > 1``, or a rank is NaN.
        KeyError: the data has no ``rank_key``.
        RuntimeError: the data is not a TensorDict.

    Cost: O(log max_size) per accepted row. The first write after a load takes a pass over all ranks
    and over the columns that end episodes, about 0.1 s per million rows.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("r"))
        >>> rb.extend(TensorDict({"r": torch.tensor([1.0, 5.0, 2.0, 3.0, 0.0])}, [5]))
        tensor([-1,  1,  2,  0, -1])
    """

    kind = "max_value"
    keeps_order = False
    _declared = _RankState
    mapped_entries = ("_ledger", "_ranks")

    @checked_keywords
    def __init__(
        self,
        rank_key: Any = None,
        reduction: str = "sum",
        *,
        compilable: bool = False,
    ) -> None:
        one_of("reduction", reduction, REDUCTIONS)
        super().__init__()
        self.rank_key = unravel(("next", "reward") if rank_key is None else rank_key)
        self.reduction = reduction
        self._heap: RankHeap | None = None
        # The ranks of a checkpoint, until the first write builds the heap from them.
        self._ranks_then: Array | ReadLater[Array] | None = None
        # The number of the storage's log when the heap was updated last.
        self._seen = -1

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to. Raises ValueError if it has ``ndim > 1``."""
        if storage.ndim > 1:
            raise ValueError(
                f"a {type(self).__name__} expected a storage with ndim=1, got ndim={storage.ndim}"
            )
        super().register_storage(storage)
        self._heap = self._ranks_then = None

    def prepare(self, data: Any, **options: Any) -> Any:
        """Return checked rows for ``write``; raise if a rank is absent or NaN."""
        rows = super().prepare(data, **options)
        if len(rows):
            self._ranks(rows)
        return rows

    def write(self, rows: Any) -> torch.Tensor:
        """Store rows of sufficient rank; return slots, with -1 for rows not stored."""
        count, storage = len(rows), self.storage
        if not count:
            return self._no_rows()
        ranks = self._ranks(rows)
        storage.accept(rows)
        heap = self._known_heap()
        slots = np.empty(count, dtype=np.int64)
        heap.offer(ranks, slots)
        index = torch.from_numpy(slots)
        accepted = (index >= 0).nonzero().flatten()
        if not len(accepted):
            return index
        try:
            # The cursor moves too, because another writer may later continue from it.
            last = storage.place(index[accepted], rows, accepted, move_cursor=True)
        except BaseException:
            self._heap = None  # the heap has rows that were not stored
            raise
        self._seen = self.storage.ledger.log.number
        self._count(len(accepted))
        stored, result = accepted[last], torch.full_like(index, -1)
        result[stored] = index[stored]
        return result

    def _known_heap(self) -> RankHeap:
        """Return the heap over the stored rows; rebuild it if other code changed them.

        Cost: O(1), or O(N) after an edit or a load.
        """
        changed = self.storage.ledger.log.rows_changed(self._seen)
        if self._heap is None or changed:
            then = None if changed else self._ranks_then
            if isinstance(then, ReadLater):
                then = then.read()
            self._heap = self._rebuilt(self._stored_ranks() if then is None else then)
        self._ranks_then = None
        return self._heap

    def _rebuilt(self, ranks: Array) -> RankHeap:
        ledger = self.storage.ledger
        heap = RankHeap(ledger.slots)
        if len(ranks):
            ages = ledger.position_table()
            ages = ledger.positions(arange(ledger.length)) if ages is None else ages
            heap.assign(ranks, ages.numpy(), ledger.next_position)
        self._seen = self.storage.ledger.log.number
        return heap

    def _stored_ranks(self) -> Array:
        storage = self.storage
        if not len(storage):
            return np.empty(0)
        # Rows without a schema may differ in shape and cannot be read as one batch.
        return self._reduced(list(storage) if storage.schema is None else storage.get(slice(None)))

    def _ranks(self, rows: Any) -> Array:
        """Return the rank of each prepared row: float64 ``[B]``."""
        if isinstance(rows, Rows):
            if not isinstance(rows.root, Branch) or rows.root.kind != "tensordict":
                raise no_tensordicts(self, rows.root)
            if self.rank_key not in rows.leaves:
                raise KeyError(f"expected the rank under {format_key(self.rank_key)}, got none")
            return self._reduce(rows.leaves[self.rank_key])
        return self._reduced(rows)

    def _reduced(self, data: Any) -> Array:
        if not isinstance(data, list):
            return self._reduce(self._rank_of(data))
        ranks = [self._reduce(self._rank_of(row).unsqueeze(0)) for row in data]
        return np.concatenate(ranks)

    def _rank_of(self, data: Any) -> torch.Tensor:
        if not is_tensordict(data):
            raise no_tensordicts(self, type(data).__name__)
        value = lookup(data, self.rank_key)
        if not isinstance(value, torch.Tensor):
            raise KeyError(f"expected the rank under {format_key(self.rank_key)}, got none")
        return value

    def _reduce(self, values: torch.Tensor) -> Array:
        rows = values.shape[0]
        if rows and not values[0].numel():
            raise ValueError(
                f"expected a rank under {format_key(self.rank_key)}, got shape {list(values.shape)}"
            )
        ranks = reduce_rows(values.cpu(), self.reduction)
        wrong = ranks.isnan().nonzero()
        if len(wrong):
            raise ValueError(
                f"expected ranks that are numbers, got NaN under {format_key(self.rank_key)} "
                f"at row {int(wrong[0])}"
            )
        return np.ascontiguousarray(ranks.numpy())

    # -- state --------------------------------------------------------------------------------

    def empty(self, empty_write_count: bool = True) -> None:
        super().empty(empty_write_count)
        self._heap = self._ranks_then = None

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """Return the slots of the rows of largest rank, oldest first.

        Among rows of equal rank, the older rows are returned.
        """
        ledger = ledger_of(state)
        order = ledger.write_order()
        best = torch.argsort(_ranks_of(state)[order], descending=True, stable=True)[:capacity]
        return order[best.sort().values]

    def state_dict(self) -> dict[str, Any]:
        with self.storage.lock:
            ranks = np.empty(self.storage.ledger.length)
            heap = self._known_heap()
            heap.export(ranks, np.empty(len(ranks), dtype=np.int64))
            return {**super().state_dict(), "_ranks": torch.from_numpy(ranks)}

    def restore(self, state_dict: dict[str, Any], rows: torch.Tensor | None) -> None:
        super().restore(state_dict, rows)
        # The first write builds the heap, so that opening a checkpoint for sampling is fast.
        self._heap, ranks = None, state_dict["_ranks"]
        if rows is not None:
            self._ranks_then = _ranks_of(state_dict)[rows].numpy()
        elif isinstance(ranks, MappedRows):
            self._ranks_then = ReadLater(_numbers, [ranks], "ranks of rows")
        else:
            self._ranks_then = ranks.numpy().copy()
        self._seen = self.storage.ledger.log.number

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            raise RuntimeError(
                f"a {type(self).__name__} cannot be handed to a spawned process: its heap of ranks "
                "belongs to one process; write in the process that created it"
            )
        return {**super().__getstate__(), "_heap": None, "_ranks_then": None}


def _ranks_of(state: dict[str, Any]) -> torch.Tensor:
    """Return the rank of each row of a saved state. Raises ValueError for a NaN."""
    ranks = state["_ranks"]
    ranks = ranks.spanned() if isinstance(ranks, MappedRows) else ranks
    return torch.from_numpy(_numbers(ranks.numpy()))


def _numbers(ranks: Array) -> Array:
    if np.isnan(ranks).any():
        raise ValueError("expected ranks that are numbers, got NaN")
    return ranks
