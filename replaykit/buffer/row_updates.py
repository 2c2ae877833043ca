"""Update the priorities of rows, and patch rows that have not been overwritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorClass, is_tensorclass

from replaykit import native
from replaykit._compat import arange, as_tensor, dtype_name, is_tensordict, lookup
from replaykit.buffer.core import BufferCore, DataT, SamplerT, StorageT, WriterT
from replaykit.errors import SchemaError
from replaykit.reductions import reduce_rows
from replaykit.samplers import Sampler, Sequence
from replaykit.samplers.sequence import anchor_priorities
from replaykit.samplers.window_forms import MASK
from replaykit.storages import Storage, TensorStorage
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Leaf, Path, flatten
from replaykit.ted import FLAG_KEYS, Key, format_key, unravel
from replaykit.writers import Writer

__all__ = [
    "Conditional",
    "ConditionalUpdateResult",
    "Patch",
    "Priorities",
    "check_tracked",
    "checked_handles",
    "checked_patch",
    "patched",
    "without_priorities",
    "written_priorities",
]


class ConditionalUpdateResult(TensorClass):
    """The outcome of ``update_if_present`` for each row.

    Attributes:
        updated: bool ``[K]``, True if the row was patched.
        version_rejected: bool ``[K]``, True if the row was live but its stored version was newer;
            None without versions.

    A row that is neither updated nor rejected is stale. Its slot has been overwritten, or was never
    written.

    Example:
        >>> import torch
        >>> from replaykit import ConditionalUpdateResult
        >>> result = ConditionalUpdateResult(torch.tensor([True, False]), batch_size=[2])
        >>> result.updated_count, result.version_rejected_count, result.stale_count
        (1, 0, 1)
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    @property
    def updated_count(self) -> int:
        """Number of rows that were patched."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of live rows whose stored version was newer."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of rows that are no longer stored."""
        return len(self.updated) - self.updated_count - self.version_rejected_count

    _about = __doc__


# TensorClass replaces the docstring with the signature.
ConditionalUpdateResult.__doc__ = ConditionalUpdateResult._about


class Conditional(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``update_if_present``."""

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Write values into rows whose slots have not been overwritten.

        A row is live if its slot still has the given generation. Other rows stay unchanged.

        Args:
            index: slots from a sample, int64 ``[K]`` or ``[K, ndim]``.
            generation: ``index_generation`` of the slots, int64 ``[K]``; -1 is never live.
            patch: a mapping of keys to tensors ``[K, *F]``, or a TensorDict. For ``ndim > 1`` also
                in the layout of written data, ``[*lanes, T, *F]``. ``index`` must then be the index
                that ``extend`` returned for that data.
            version_key, version: given together or not at all. ``version`` is an int, or one int
                per row. A live row is patched only if its ``version`` is at least the stored
                version under ``version_key``. The patch stores the new version.
            require_newer: patch only if ``version`` is larger than the stored one.

        If a row occurs several times, its last values are stored. With versions, the values with
        the highest version are stored. If several values have this version, the last of them are
        stored. A patch does not advance the generation.

        Raises:
            RuntimeError: the writer does not track generations, the storage is a list, or nothing
                is stored.
            KeyError: a patch key or the version key is not stored.
            TypeError: the patch is not a mapping.
            ValueError: shapes, dtypes or lengths differ, or the version key is in the patch.

        If it raises, nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2),
            ...                   writer=RoundRobinWriter(track_generations=True))
            >>> _ = rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
            >>> seen = rb.sample(8)
            >>> _ = rb.add(TensorDict({"x": torch.ones(())}, []))  # displaces the record in slot 0
            >>> result = rb.update_if_present(
            ...     index=torch.tensor([0, 1]), generation=torch.tensor([0, 0]),
            ...     patch={"x": torch.tensor([5.0, 5.0])})
            >>> result.updated.tolist(), rb["x"].tolist()
            ([False, True], [1.0, 5.0])
        """
        with self._locked() as storage:
            columns = _patchable(storage, self._writer)
            handles, generation = checked_handles(storage.ndim, index, generation)
            checked = checked_patch(
                columns.leaf,
                len(handles),
                patch,
                version_key,
                version,
                require_newer,
                ndim=storage.ndim,
                time_dim=self.dim_extend,
            )
            live, rejected = patched(columns, handles, generation, checked)
        return ConditionalUpdateResult(live, rejected, batch_size=[len(handles)])


class Patch(NamedTuple):
    """Checked values for the columns of a storage.

    Attributes:
        values: tensors ``[K, *F]`` by path.
        version_key: the path of the versions; None without versions.
        versions: the version of each row, ``[K]`` in the dtype of their column.
        require_newer: whether an equal version is rejected.
    """

    values: dict[Path, torch.Tensor]
    version_key: Path | None
    versions: torch.Tensor | None
    require_newer: bool


def patched(
    columns: TensorStorage, handles: torch.Tensor, generation: torch.Tensor, patch: Patch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write a checked patch into the live rows among rows ``[K, ndim]``.

    The caller holds the lock.

    Returns:
        Two masks, bool ``[K]``: the patched rows, and the rows rejected for their version. The
        second is None without versions.
    """
    count, values = len(handles), dict(patch.values)
    live = ((handles >= 0) & (handles < torch.tensor(columns.shape, device="cpu"))).all(-1)
    slots = torch.where(live, handles[:, 0], 0)
    live &= (generation >= 0) & (columns.ledger.generations(slots) == generation)
    rejected = None
    if patch.version_key is not None and patch.versions is not None:
        path, versions = patch.version_key, patch.versions
        accepted = _newer(columns, path, handles, live, versions, patch.require_newer)
        accepted &= _best(handles, versions, accepted)
        rejected, live = live & ~accepted, accepted
        values[path] = versions.view(count, *columns.leaf(path).shape)
    winners = _best(handles, arange(count), live)
    cells = handles[winners].unbind(-1)
    leaves = {path: carried(value)[winners] for path, value in values.items()}
    columns.put(cells, leaves)
    return live, rejected


def check_tracked(tracked: bool, of: str = "this buffer") -> None:
    """Raise RuntimeError unless the writer tracks generations.

    ``of`` describes storage and writer in the error.
    """
    if not tracked:
        raise RuntimeError(
            f"Conditional updates are not supported by {of}: the writer tracks no generations; "
            "update_if_present needs a writer with track_generations=True"
        )


def _patchable(storage: Storage, writer: Writer) -> TensorStorage:
    of = f"{type(storage).__name__} with {type(writer).__name__}"
    check_tracked(writer.tracks_generations, of)
    if not isinstance(storage, TensorStorage):
        raise RuntimeError(
            f"Conditional updates are not supported by {of}: the storage has no columns to patch; "
            "use a tensor or memmap storage"
        )
    if not len(storage):
        raise RuntimeError("Conditional updates require an initialized storage: nothing is stored")
    return storage


def checked_handles(ndim: int, index: Any, generation: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coordinates of rows ``[K, ndim]`` and their generations ``[K]``.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    index, generation = (as_tensor(item).cpu() for item in (index, generation))
    for name, item in (("index", index), ("generation", generation)):
        if item.is_floating_point() or item.is_complex() or item.dtype == torch.bool:
            raise ValueError(f"expected {name} as integers, got {dtype_name(item.dtype)}")
    wanted = "[K]" if ndim == 1 else f"[K, {ndim}]"
    if index.ndim != min(ndim, 2) or (ndim > 1 and index.shape[1] != ndim):
        raise ValueError(f"expected an index of shape {wanted}, got {list(index.shape)}")
    if generation.shape != index.shape[:1]:
        raise ValueError(f"expected {len(index)} generations, got {list(generation.shape)}")
    index = index.to(torch.int64)
    return (index if ndim > 1 else index[:, None]), generation.to(torch.int64)


def checked_patch(
    leaf_of: Callable[[Any], Leaf],
    count: int,
    patch: Any,
    version_key: Any,
    version: Any,
    require_newer: bool,
    *,
    ndim: int = 1,
    time_dim: int = 0,
) -> Patch:
    """Return the arguments of ``update_if_present``, checked against the columns.

    Args:
        leaf_of: a function that returns shape and dtype of a column by key, or raises KeyError.
        count: number of rows.
        ndim, time_dim: number of batch dimensions of written data, and the time dimension among
            them.

    Raises:
        As ``update_if_present``.
    """
    if (version_key is None) != (version is None):
        raise ValueError("expected version_key and version together, got one of them")
    values = _checked_values(leaf_of, patch, count, ndim, time_dim)
    path, versions = None, None
    if version_key is not None:
        version = _by_record(as_tensor(version), count, ndim, time_dim)
        path, versions = _checked_version(leaf_of, version_key, version, count, values)
    return Patch(values, path, versions, require_newer)


def _checked_values(
    leaf_of: Callable[[Any], Leaf], patch: Any, count: int, ndim: int, time_dim: int
) -> dict[Path, torch.Tensor]:
    values: dict[Path, torch.Tensor] = {}
    if not callable(getattr(patch, "items", None)):
        raise TypeError(f"expected patch as a mapping or TensorDict, got {type(patch).__name__}")
    for key, item in patch.items():
        _, leaves = flatten(item, 0)
        values.update({(*unravel(key), *path): leaf for path, leaf in leaves.items()})
    for path, value in values.items():
        leaf = leaf_of(path)
        shape = [count, *leaf.shape]
        if list(value.shape) != shape:
            values[path] = value = _by_record(value, count, ndim, time_dim)
        if path in FLAG_KEYS and [*value.shape, 1] == shape:
            values[path] = value = value.unsqueeze(-1)
        if value.dtype != leaf.dtype or list(value.shape) != shape:
            raise SchemaError(
                f"key {format_key(path)}: expected {dtype_name(leaf.dtype)} {shape}, "
                f"got {dtype_name(value.dtype)} {list(value.shape)}"
            )
    return values


def _by_record(value: torch.Tensor, count: int, ndim: int, time_dim: int) -> torch.Tensor:
    """Reorder values from the layout of written data, ``[*lanes, T, ...]``.

    The result has the order of the index from ``extend``. Values in other layouts are returned
    unchanged.
    """
    if ndim == 1 or value.ndim < ndim or value.shape[:ndim].numel() != count:
        return value
    return value.transpose(0, time_dim).flatten(0, ndim - 1)


def _checked_version(
    leaf_of: Callable[[Any], Leaf],
    key: Any,
    version: Any,
    count: int,
    values: dict[Path, torch.Tensor],
) -> tuple[Path, torch.Tensor]:
    if isinstance(key, str) and "." in key:
        raise ValueError(f"expected a nested version key as a tuple, got the string {key!r}")
    path = unravel(key)
    if path in values:
        raise ValueError(f"expected the version key {format_key(path)} not to be in the patch")
    leaf = leaf_of(path)
    if leaf.shape.numel() != 1:
        raise ValueError(f"expected one version per row under {format_key(path)}")
    given = as_tensor(version).cpu()
    versions = given.to(leaf.dtype)
    if not bool((versions.to(given.dtype) == given).all()):
        raise ValueError(
            f"expected versions that {dtype_name(leaf.dtype)} can hold under "
            f"{format_key(path)}, got {given.tolist()}"
        )
    if versions.ndim == 0:
        return path, versions.expand(count).clone()
    if versions.shape[0] != count or versions.numel() != count:
        raise ValueError(f"expected 1 or {count} versions, got shape {list(versions.shape)}")
    return path, versions.reshape(count)


def _newer(
    storage: TensorStorage,
    path: Path,
    handles: torch.Tensor,
    live: torch.Tensor,
    versions: torch.Tensor,
    require_newer: bool,
) -> torch.Tensor:
    """Return a mask of the live rows whose stored version may be replaced."""
    column = storage.require().column(path, storage.ledger.length)
    stored = column[tuple(handles[live].to(column.device).unbind(-1))].reshape(-1).cpu()
    given = versions[live]
    accepted = torch.zeros_like(live)
    accepted[live] = given > stored if require_newer else given >= stored
    return accepted


def _best(handles: torch.Tensor, rank: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return a mask of each row's highest-ranked entry ``among`` some: bool ``[K]``.

    Of entries with the same rank, the last is selected.
    """
    best = torch.zeros_like(among)
    chosen = among.nonzero().flatten()
    if not len(chosen):
        return best
    chosen = chosen[rank[chosen].argsort(stable=True)]
    _, record = handles[chosen].unique(dim=0, return_inverse=True)
    last = torch.zeros(int(record.max()) + 1, dtype=torch.int64, device="cpu")
    last.scatter_reduce_(0, record, arange(len(chosen)), "amax", include_self=False)
    best[chosen[last]] = True
    return best


class Priorities(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``update_priority``, ``update_tensordict_priority``."""

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Set the priorities of rows, if the sampler has priorities.

        Args:
            index: slots, int64 ``[K]`` (``[K, ndim]``). Or, without ``priority``, a TensorDict as
                for ``update_tensordict_priority``.
            priority: a number, or a tensor ``[K]`` or ``[K, 1]``. All values are finite and not
                negative.
            generation: the generation of each slot when it was sampled. Slots written since are
                skipped.

        If the sampler has no priorities, nothing changes and a UserWarning is issued.

        Example:
            >>> import torch, warnings
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> _ = rb.extend(torch.zeros(2))
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
            >>> str(caught[0].message)
            'RandomSampler has no priorities; the update has no effect'
        """
        if not self._initialized:
            self._ready()
        if not self._sampler.prioritized and without_priorities(self._sampler, above=1):
            return
        if priority is None and is_tensordict(index):
            self.update_tensordict_priority(index)
            return
        values = priority
        if not isinstance(values, torch.Tensor):
            # Python numbers would lose half of their digits in torch's default dtype.
            values = as_tensor(priority, dtype=torch.float64)
        dims = values.ndim
        if dims > 1 and values.shape[-1] == 1 and values.numel() == values.shape[0]:
            values = values.reshape(-1)
        elif dims > 1 and values.ndim == self._storage.ndim:
            # The value is in the layout of written data. The index from `extend` has time first.
            values = values.transpose(0, self.dim_extend).reshape(-1)
        with self._locked(settled=False) as storage:
            self._sampler.update_priority(index, values, storage=storage, generation=generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities that the learner has written into a sample.

        Args:
            data: a TensorDict from ``sample``, with values under ``priority_key``. Their shape is
                ``[B]``, ``[B, 1]``, or has more dimensions, which are reduced.

        Rows that were overwritten since the sample are skipped. If the sampler has no priorities,
        nothing happens. There is no warning, because a learner may call this method after every
        batch. In a buffer of sequences, an anchor gets the largest priority among the valid rows of
        its window. Other rows keep their priorities.

        Raises:
            KeyError: the data has no ``priority_key`` or no ``index``.
            TypeError: the data is not a TensorDict.
            ValueError: a priority is NaN, negative or infinite; nothing has changed.
        """
        self._ready()
        sampler = self._sampler
        if not sampler.prioritized:
            return  # training loops call this after every batch, whatever the sampler
        if not (is_tensordict(data) or is_tensorclass(data)):
            raise TypeError(
                f"expected a TensorDict as sample() returns it, got {type(data).__name__}: batches "
                "of rows that are not TensorDicts carry no index. Write TensorDicts, as "
                "replaykit.transition() makes them, or pass info['index'] of "
                "sample(return_info=True) to update_priority()"
            )
        if isinstance(self._sample_unit, Sequence) or getattr(sampler, "unit", "") == "slice":
            self._update_anchors(data)
            return
        if sampler.draws_windows:
            data = self._only_real_rows(data)
        value = lookup(data, self._priority_key)
        index = lookup(data, ("index",))
        for key, found in ((self._priority_key, value), (("index",), index)):
            if found is None:
                raise KeyError(f"expected {format_key(key)} in the data; got none")
        if type(value) is torch.Tensor and data.batch_dims == 1:
            generation = lookup(data, ("index_generation",))
            if not (_checks_itself(sampler) and _is_column(value) and value.shape == index.shape):
                value = reduced_priority(value, index.shape[0], sampler, self._priority_key)
            with self._locked(settled=False) as storage:
                try:
                    sampler.update_priority(index, value, storage=storage, generation=generation)
                except ValueError:
                    # Raises the same error with key and row.
                    reduced_priority(value, index.shape[0], sampler, self._priority_key)
                    raise
            return
        if data.batch_dims == 0:
            data, value, index = data.unsqueeze(0), value.unsqueeze(0), index.unsqueeze(0)
        with self._locked(settled=False) as storage:
            # If rows are trajectories, their info is repeated over their inner dimensions.
            dim = storage.stack_dim if self._collate_fn is None else 0
            dim = min(dim if dim >= 0 else dim + data.batch_dims, data.batch_dims - 1)
            index, generation = (
                _per_row(item, dim, data.batch_dims)
                for item in (index, data.get("index_generation", None))
            )
            value = reduced_priority(
                value.movedim(dim, 0), index.shape[0], sampler, self._priority_key
            )
            sampler.update_priority(index, value, storage=storage, generation=generation)

    def _update_anchors(self, data: Any) -> None:
        """Set the priorities of the anchors of a sample's windows."""
        key, sampler = self._priority_key, self._sampler
        flat = data.reshape(-1)
        value, anchor = lookup(flat, key), lookup(flat, ("anchor_index",))
        needed = {format_key(key): value, "anchor_index": anchor}
        if isinstance(self._sample_unit, Sequence):
            valid = needed["validity_mask"] = lookup(flat, ("validity_mask",))
        else:
            valid = lookup(flat, MASK)
        for name, item in needed.items():
            if item is None:
                raise KeyError(f"expected {name} in the data; got none")
        if valid is None:  # slices without padding
            valid = torch.ones(len(anchor), dtype=torch.bool, device=anchor.device)
        with self._locked(settled=False) as storage:
            # Values that a learner computes for padding may be NaN.
            mask = valid.to(value.device).reshape(-1, *(1,) * (value.ndim - 1))
            value = reduced_priority(value.where(mask, 0), len(valid), sampler, key)
            update = anchor_priorities(
                anchor, lookup(flat, ("anchor_generation",)), value, valid.to(anchor.device)
            )
            sampler.update_priority(
                update.anchor, update.priority, storage=storage, generation=update.generation
            )

    def _only_real_rows(self, data: Any) -> Any:
        """Return a sample of windows as flat rows without padding."""
        flat = data if data.batch_dims == 1 else data.reshape(-1)
        mask = lookup(flat, MASK)
        return flat if mask is None or bool(mask.all()) else flat[mask]


def without_priorities(sampler: Sampler, *, above: int) -> bool:
    """Return whether a sampler has no priorities; warn that the update has no effect.

    ``above``: the number of stack frames between the user and this function's caller.
    """
    if not sampler.prioritized:
        warnings.warn(
            f"{type(sampler).__name__} has no priorities; the update has no effect",
            UserWarning,
            stacklevel=above + 2,
        )
    return not sampler.prioritized


def _per_row(value: torch.Tensor | None, dim: int, batch_dims: int) -> Any:
    """Return one entry per row of values repeated over other batch dimensions."""
    if value is None or batch_dims == 1:
        return value
    value = value.movedim(dim, 0)
    return value.flatten(1, batch_dims - 1)[:, 0]


def written_priorities(
    data: Any,
    key: Key,
    sampler: Sampler,
    rows: int,
    *,
    wanted: bool | None,
    single: bool,
    time_dim: int = 0,
    ndim: int = 1,
) -> torch.Tensor | None:
    """Return the priorities that written data carries, one per row.

    The result is None if the data or the sampler has no priorities, or if ``wanted`` is False.

    Args:
        rows: number of rows; with lanes, number of time steps.
        single, time_dim: as in ``schema.split_leaves``.
        ndim: batch dimensions of the storage. With lanes, each lane has a separate priority.

    Raises:
        ValueError: there is not one priority per row, or a priority is NaN, negative or infinite.
    """
    if wanted is False or not sampler.prioritized:
        return None
    batches = data if isinstance(data, (list, tuple)) and not single else [data]
    values = []
    for batch in batches:
        found = _found(batch, key)
        if found is None:
            return None
        alone = single or batches is data
        value = (found.unsqueeze(time_dim) if alone else found).transpose(0, time_dim)
        if value.ndim < ndim or (batches is not data and value.shape[0] != rows):
            raise ValueError(
                f"expected {rows} priorities under {format_key(key)}, got shape {list(found.shape)}"
            )
        cells = value.shape[:ndim].numel()
        values.append(reduced_priority(value.flatten(0, ndim - 1), cells, sampler, key))
    if not values:
        return None
    written = torch.cat(values) if len(values) > 1 else values[0]
    sampler.check_priorities(written)  # now, before rows are stored
    return written


def _found(data: Any, key: Key) -> torch.Tensor | None:
    value = lookup(data, key)
    return value if isinstance(value, torch.Tensor) else None


def reduced_priority(value: torch.Tensor, rows: int, sampler: Sampler, key: Key) -> torch.Tensor:
    """Return one priority per row, reduced over all other dimensions.

    The sampler chooses the reduction.

    Raises:
        ValueError: there is not one priority per row, or a priority is NaN, negative or infinite.
    """
    if value.ndim == 0 or value.shape[0] != rows or (rows and not value.numel()):
        raise ValueError(
            f"expected {rows} priorities under {format_key(key)}, got shape {list(value.shape)}"
        )
    if _is_column(value):
        reduced = value.detach()
    else:
        reduced = reduce_rows(value, getattr(sampler, "reduction", "max"))
    if not _all_plain(reduced):
        row = int((~((reduced >= 0) & reduced.isfinite())).nonzero()[0])
        raise ValueError(
            f"expected priorities that are finite and not negative under {format_key(key)}, "
            f"got {float(reduced[row])} at row {row}"
        )
    return reduced


def _is_column(value: torch.Tensor) -> bool:
    """Return whether a value needs neither reduction nor a dtype conversion."""
    return value.dim() == 1 and (value.dtype is torch.float32 or value.dtype is torch.float64)


def _checks_itself(sampler: Sampler) -> bool:
    """Return whether a sampler itself refuses invalid priorities."""
    return type(sampler).check_priorities is not Sampler.check_priorities


def _all_plain(value: torch.Tensor) -> bool:
    """Return whether all numbers ``[K]`` are finite and not negative."""
    if (
        (value.dtype is torch.float32 or value.dtype is torch.float64)
        and value.is_cpu
        and value.is_contiguous()
        and not value.is_neg()
    ):
        return native.core.all_plain(value.data_ptr(), len(value), value.dtype is torch.float64)
    return bool(((value >= 0) & value.isfinite()).all())
