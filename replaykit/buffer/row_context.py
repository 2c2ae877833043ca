"""Read the rows around drawn rows from a storage, for the transforms of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, is_tensordict
from replaykit.episodes import ROWS, CountLaw, EpisodeIndex
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage, with_episodes
from replaykit.storages.columns import Columns
from replaykit.storages.indexing import ravel
from replaykit.storages.row_kernels import Before, Led, StepsPlan
from replaykit.structure import Node, Path
from replaykit.ted import format_key
from replaykit.transforms.history import HistoryTransform, Prepared, Stacks, Surroundings
from replaykit.transforms.transform import Compose

Array = np.ndarray[Any, Any]

_ALL = CountLaw(1, 0)


class StoredSurroundings(Surroundings):
    """The surroundings of drawn rows in their storage.

    The caller holds the lock while it makes and uses them.
    """

    def __init__(
        self, storage: ColumnStorage, index: EpisodeIndex, drawn: torch.Tensor, info: Any
    ) -> None:
        super().__init__()
        self._storage, self._index = storage, index
        self._columns = storage.require()
        cells = drawn if storage.ndim == 1 else ravel(drawn, storage.lanes)
        self._cells = cells.numpy() if cells.is_cpu else cells.cpu().numpy()
        found = index.around(self._cells)
        self.time, self.lane, self.begin, self.last, self._code, self.head = found
        window, mask = info.get("sequence_id"), info.get("validity_mask")
        if mask is None:
            mask = info.get(("collector", "mask"))
        self.alone = window is None
        self._window = None if window is None else window.cpu().numpy()
        self.mask = None if mask is None else mask.cpu().numpy()
        self.keys = self._columns.schema.leaves

    # Computed on first use, because not every transform needs them.

    @cached_property
    def first(self) -> Array:  # type: ignore[override]
        return np.maximum(self.begin, self._index.bounds(self.lane)[0])

    @cached_property
    def reason(self) -> Array:  # type: ignore[override]
        return np.minimum(self._code, 3)

    @cached_property
    def window(self) -> Array:  # type: ignore[override]
        return np.arange(len(self.time)) if self._window is None else self._window

    @property
    def root(self) -> Node:  # type: ignore[override]
        return self._storage.require().schema.root

    def column(self, key: Path) -> torch.Tensor | None:
        columns = self._storage.require()
        if not self._index.in_ring or type(columns) is not Columns:
            return None
        if columns.ndim > 1 or columns.advise:
            return None
        columns.refresh_addresses()
        return columns.tensors.get(key)

    def lead(self, plan: StepsPlan) -> Led | None:
        columns = self._columns
        if not self._index.in_ring:
            return None
        ahead = columns.steps_ahead(plan) if type(columns) is Columns else None
        if ahead is None:
            return None
        return ahead.lead(self.rows, self._cells, self.time, self.last)

    def stacks(
        self, keys: Sequence[Path], count: int, *, zero: bool = False, at_next: bool = False
    ) -> Stacks:
        columns, index, found = self._columns, self._index, None
        relabelled = any(not one.changes.isdisjoint(keys) for one, _ in self.relabels)
        if index.in_ring and type(columns) is Columns and columns.frames and not relabelled:
            element, time = self._cells, self.time
            if at_next:
                assert self.next_time is not None
                time = self.next_time
                element = index.element(time, self.lane)
            rows = Before(element, time, self.begin, index.bounds(self.lane)[0])
            found = columns.frames.stacks(tuple(keys), rows, count, zero=zero)
        if found is None:
            return super().stacks(keys, count, zero=zero, at_next=at_next)
        return Stacks(found)

    def tags(self, name: str, time: Array, lane: Array) -> torch.Tensor:
        index, indexes = self._index, self._storage.indexes
        if index is not indexes.of():
            raise RuntimeError(
                f"tag {name!r}: expected the episodes of the storage, got those of a sampler with "
                "other boundaries"
            )
        return indexes.tags.get(name, index.ids(time, lane))

    def stored(self) -> int:
        return int(self._index.totals(_ALL, ROWS).sum())

    def any_rows(self, number: Array) -> tuple[Array, Array]:
        found = self._index.find(_ALL, ROWS, number.reshape(-1))
        time = (found.base + found.rest).reshape(number.shape)
        return time, found.lane.reshape(number.shape)

    def read(self, keys: list[Path], time: Array, lane: Array) -> dict[Path, torch.Tensor]:
        columns = self._storage.require()
        if not all(key in self.keys for key in keys):
            unknown = ", ".join(format_key(key) for key in keys if key not in self.keys)
            known = ", ".join(map(format_key, self.keys))
            raise KeyError(f"expected the columns {unknown}; there are {known}")
        if time.ndim == 1:
            return columns.gather_keys(keys, torch.from_numpy(self._index.element(time, lane)))
        rows = torch.from_numpy(self._index.element(time, lane).reshape(-1))
        leaves = columns.gather_keys(keys, rows)
        return {key: leaf.view(*time.shape, *leaf.shape[1:]) for key, leaf in leaves.items()}


def fetch_all(
    chain: Compose,
    storage: Storage,
    index: torch.Tensor,
    info: dict[Any, Any],
    generator: torch.Generator | None,
    episodes: EpisodeIndex | None = None,
    rows: Any = None,
    *,
    bare: bool = False,
) -> Prepared:
    """Read those rows around an index that a chain's history transforms need.

    Args:
        rows: the batch in separate memory, if the chain is the first code that uses it; else None.
        bare: True if the batch has no leaves.

    Raises:
        RuntimeError: the storage does not record where episodes end.
    """
    columns = with_episodes(storage, ", which transforms that read the rows around need")
    known = columns.episodes if episodes is None else episodes
    around = StoredSurroundings(columns, known, index, info)
    around.generator, around.bare = generator, bare
    if around.mask is None:
        around.rows = rows
    return fetch_more(chain, Prepared(around))


def fetch_more(chain: Compose, prepared: Prepared, start: int = 0) -> Prepared:
    """Read rows for the history transforms of a chain, from position ``start`` on.

    The function stops after a transform that edits whole episodes. Later transforms read the result
    of that transform.
    """
    around = prepared.around
    around.relabels = []
    for position, transform in chain.readers:
        if position:
            around.rows = None  # an earlier transform has received them
        if position < start:
            continue
        if transform.edits_episodes:
            around.later = list(chain)[position + 1 :]
        fetched = prepared.fetched[position] = transform.fetch(around)
        if transform.edits_episodes:
            break
        if transform.relabels:
            around.relabels.append((transform, fetched))
    around.rows = None
    return prepared


def apply_all(chain: Compose, data: Any, prepared: Prepared) -> Any:
    """Run a chain on a batch, with the rows that its history transforms have read.

    Raises:
        RuntimeError: the rows are not TensorDicts, or not single rows.
    """
    if type(data) is not TensorDict and not is_tensordict(data):
        raise RuntimeError(f"expected a TensorDict to transform, got {type(data).__name__}")
    if data.batch_size != (len(prepared.around),):
        raise RuntimeError(
            f"transforms that read the rows around expected a batch of [{len(prepared.around)}] "
            f"rows, got {list(data.batch_size)}: they cannot be used if rows are whole "
            "trajectories, or if a collate_fn makes another shape"
        )
    prepared.around.relabels = []
    now = prepared

    def apply(position: int, transform: HistoryTransform, batch: Any) -> Any:
        nonlocal now
        fetched = now.fetched.get(position)
        batch = transform.apply(batch, fetched, now.around)
        if transform.edits_episodes:
            # Later transforms read copies of the episodes, without the storage and its lock.
            now = fetch_more(chain, Prepared(transform.surroundings(fetched)), position + 1)
            now.around.relabels = []
        elif transform.relabels:
            now.around.relabels.append((transform, fetched))
        return batch

    return chain.forward(data, apply)
