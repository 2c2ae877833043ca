"""Read and edit stored rows, also under conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorClass, is_tensorclass

from replaykit._compat import (
    LazyStackedTensorDict,
    arange,
    as_tensor,
    dtype_name,
    is_tensordict,
)
from replaykit.buffer.deliver import is_ragged, with_each
from replaykit.buffer.draw import rewind
from replaykit.buffer.row_context import apply_all, fetch_all
from replaykit.schema import Schema
from replaykit.storages import ListStorage, Storage, TensorStorage
from replaykit.storages.column_storage import fitted
from replaykit.storages.indexing import as_index, elements_at, ravel, unravel_index
from replaykit.storages.memory import carried
from replaykit.structure import Leaf, Path, flatten, map_leaves, map_tensors
from replaykit.ted import RESERVED_KEYS, Key, format_key, no_key, unravel
from replaykit.writers import Writer

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


def is_key(index: Any) -> bool:
    """Return whether the index in ``rb[...]`` names a column."""
    if isinstance(index, tuple):
        return bool(index) and all(is_key(part) for part in index)
    return isinstance(index, str)


def column_of(rows: Any, key: Any) -> Any:
    """Return a column of rows; KeyError with the existing columns if it is missing."""
    value = rows
    for part in unravel(key):
        known = is_tensordict(value) or is_tensorclass(value) or isinstance(value, dict)
        value = value.get(part, None) if known else None
    if value is None:
        names = rows.keys(True, True) if is_tensordict(rows) else ()
        raise no_key(unravel(key), map(unravel, names))
    return value


def with_index(rows: Any, cells: torch.Tensor, storage: Storage) -> Any:
    """Return a TensorDict of rows with their index, if the shapes still fit."""
    shape = cells.shape if storage.ndim == 1 else cells.shape[:-1]
    if is_ragged(rows) and len(shape) == 1:
        dim = storage.stack_dim % rows.batch_dims
        fits = rows.batch_size[dim] == shape[0] and rows.stack_dim == dim
        return with_each(rows, {"index": cells}) if fits else rows
    if rows.batch_size[: len(shape)] != shape:  # a transform or collate_fn made another shape
        return rows
    return rows.copy().set("index", _for_each(cells, rows.batch_size, len(shape)))


def _for_each(cells: torch.Tensor, batch: torch.Size, dims: int) -> torch.Tensor:
    """Return the index of rows, expanded to the batch dimensions inside each row."""
    inner = batch[dims:]
    if not inner:
        return cells
    shape = [*cells.shape[:dims], *[1] * len(inner), *cells.shape[dims:]]
    return cells.view(shape).expand(*batch, *cells.shape[dims:])


def _is_single(index: Any) -> bool:
    """Return whether an index selects one row, not a batch."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer))


def _nothing_of(collate: Callable[[Any], Any], dim: int) -> Callable[[Any], Any]:
    """Return a function that makes an empty batch.

    The function collates one row, and cuts the batch to length 0 along ``dim``.
    """

    def collated(rows: Any) -> Any:
        if rows is None:
            raise RuntimeError("nothing is stored")
        batch = collate(rows)
        if isinstance(batch, LazyStackedTensorDict):
            batch = batch.contiguous()  # an empty stack has no keys
        if isinstance(batch, (dict, tuple)):
            return map_leaves(batch, lambda leaf: leaf[:0])
        at = dim if dim >= 0 else dim + batch.ndim
        return batch[(slice(None),) * at + (slice(0, 0),)]

    return collated


def _count(data: Any) -> int:
    """Return the number of rows of data; for a mapping, the rows of its first tensor."""
    while isinstance(data, (dict, tuple)) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    if getattr(data, "shape", None):
        return int(data.shape[0])
    if not hasattr(data, "__len__") or hasattr(data, "shape"):
        given = "one row" if hasattr(data, "shape") else repr(data)
        raise TypeError(
            f"expected a batch of rows to write, got {given}; rb[index] = row replaces one row"
        )
    return len(data)


def _selected(buffer: ReplayBuffer, index: Any, storage: Storage) -> torch.Tensor:
    """Return the elements of the rows that an index selects, in their shape.

    The caller holds the lock.
    """
    if storage.ndim == 1:
        return arange(len(storage))[as_index(index, len(storage))]
    return elements_at(index, storage.ledger.length, storage.lanes, layout_of(buffer, storage))


def _cells(elements: torch.Tensor, storage: Storage) -> torch.Tensor:
    """Return the ``index`` of elements, as users see it."""
    return elements if storage.ndim == 1 else unravel_index(elements, storage.lanes)


def rows_at(buffer: ReplayBuffer, index: Any, cells: list[torch.Tensor]) -> Any:
    """Return ``rb[index]`` without its ``index``.

    If rows of this buffer carry the ``index``, the method appends it to ``cells``.
    """
    with buffer._locked() as storage:
        if storage.ndim > 1:
            # The index applies to the layout of written data.
            rows = columns_of(buffer).view_at(index, time_dim=buffer.dim_extend)
        else:
            rows = storage.get(index)
        if buffer._reads_index:
            cells.append(_cells(_selected(buffer, index, storage), storage))
        single = storage.ndim == 1 and _is_single(index)
        prepared = fetched_at(buffer, index, storage)
        collate = storage.collate if buffer._collate_fn is None else buffer._collate_fn
        if not single and isinstance(rows, list) and not rows and buffer._collate_fn is None:
            rows = storage.get(slice(0, 1)) if len(storage) else None
            collate = _nothing_of(collate, storage.stack_dim)
    if not single:
        rows = collate(rows)
    if not len(buffer._chain):
        return rows
    rows = map_tensors(rows, torch.clone)
    if cells and is_tensordict(rows):
        rows = with_index(rows, cells[0], storage)
    if prepared is None:
        return buffer._chain.forward(rows)
    chain, found, shape = prepared
    if len(shape) == 1 or rows.batch_size != shape:
        return apply_all(chain, rows, found)
    # Transforms get the rows along one dimension, for any shape of the index.
    made = apply_all(chain, rows.reshape(-1) if shape else rows.unsqueeze(0), found)
    return made.reshape(shape) if shape else made[0]


def fetched_at(
    buffer: ReplayBuffer, index: Any, storage: Storage
) -> tuple[Any, Any, torch.Size] | None:
    """Return the neighbouring rows that transforms need for the rows at an index.

    The result includes the chain and the shape that the index selects. It is None if no
    transform reads neighbouring rows. If neighbours are missing, the surroundings are cut
    short, as at the beginning of an episode.
    """
    chain = buffer._chain
    if not chain.reads_around:
        return None
    elements = _selected(buffer, index, storage)
    cells = _cells(elements.reshape(-1), storage)
    found = fetch_all(chain, storage, cells, {}, buffer._generator)
    return chain, found, elements.shape


def set_rows(buffer: ReplayBuffer, index: Any, value: Any) -> None:
    """Replace stored rows, or a column if ``index`` is a key."""
    if is_key(index):
        set_column(buffer, unravel(index), value)
        return
    if len(buffer.transform):
        single = _is_single(index) and buffer.storage.ndim == 1
        if single:  # transforms receive a batch, as in add
            value, index = buffer.storage.batch_of_one(value, 0), as_tensor([index])
        value = buffer._chain.inv(value)
        if value is None:
            return
    with buffer._locked() as storage:
        before = storage.schema
        storage.edit(index, value, time_dim=layout_of(buffer, storage))
        refresh_prefetched(buffer, before)


def set_column(buffer: ReplayBuffer, key: Key, value: Any) -> None:
    """Set a stored or new key of all rows, or all keys nested below it."""
    _, found = flatten(value, 0)
    values = {(*key, *path): leaf for path, leaf in found.items()}
    with buffer._locked() as storage:
        if isinstance(storage, ListStorage):
            storage.edit_columns(values)
            return
        before = storage.schema
        columns = columns_of(buffer)
        columns.edit_columns(values, time_dim=layout_of(buffer, storage), adds=True)
        refresh_prefetched(buffer, before)


def refresh_prefetched(buffer: ReplayBuffer, before: Schema | None) -> None:
    """Draw prefetched batches again if columns were added."""
    if buffer._storage.schema is not before:
        rewind(buffer)


def set_first_rows(buffer: ReplayBuffer, data: Any, end: int | None = None) -> None:
    """Replace the first ``end`` stored rows in slot order: ``rb[:end] = data``."""
    if data is None:
        raise TypeError("expected rows to write, got None")
    if end is None:
        end = _count(data)
    if len(buffer.transform):
        data = buffer._chain.inv(data)
        if data is None:
            return
    with buffer._locked() as storage:
        stored = len(storage)
        if storage.ndim > 1:
            stored = columns_of(buffer).visible_shape(buffer.dim_extend)[0]
        if not 0 <= end <= stored:
            raise IndexError(f"expected at most the {stored} stored rows, got {end}")
        before = storage.schema
        storage.edit(slice(0, end), data, time_dim=layout_of(buffer, storage))
        refresh_prefetched(buffer, before)


def set_columns(
    buffer: ReplayBuffer,
    input_dict_or_td: Any,
    clone: bool = False,
    *,
    keys_to_update: Sequence[Any] | None = None,
) -> None:
    """Replace several whole columns. Transforms do not apply."""
    _, leaves = flatten(input_dict_or_td, 0)
    chosen = [()] if keys_to_update is None else [unravel(key) for key in keys_to_update]
    values = {
        path: value.clone() if clone else value
        for path, value in ((unravel(path), value) for path, value in leaves.items())
        if path[0] not in RESERVED_KEYS and any(path[: len(key)] == key for key in chosen)
    }
    with buffer._locked() as storage:
        columns_of(buffer).edit_columns(values, time_dim=layout_of(buffer, storage))


def columns_of(buffer: ReplayBuffer) -> TensorStorage:
    storage = buffer._storage
    if not isinstance(storage, TensorStorage):
        raise RuntimeError(
            f"a {type(storage).__name__} has no columns; use a tensor or memmap storage"
        )
    return storage


def layout_of(buffer: ReplayBuffer, storage: Storage) -> int:
    """Return the time dimension of ``rb[:]``."""
    return buffer.dim_extend if storage.ndim > 1 else 0


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
        column = columns.require().column(path, columns.ledger.length)
        stored = column[tuple(handles[live].to(column.device).unbind(-1))].reshape(-1).cpu()
        given, accepted = versions[live], torch.zeros_like(live)
        accepted[live] = given > stored if patch.require_newer else given >= stored
        accepted &= _best(handles, versions, accepted)
        rejected, live = live & ~accepted, accepted
        values[path] = versions.view(count, *columns.leaf(path).shape)
    winners = _best(handles, arange(count), live)
    leaves = {path: carried(value)[winners] for path, value in values.items()}
    columns.put(ravel(handles[winners], columns.lanes), leaves)
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


def patchable(storage: Storage, writer: Writer) -> TensorStorage:
    """Return a storage whose rows can be patched. Raises RuntimeError for another one."""
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
        shape = torch.Size([count, *leaf.shape])
        if value.shape != shape:
            value = _by_record(value, count, ndim, time_dim)
        values[path] = fitted(path, value, leaf.dtype, shape)
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
