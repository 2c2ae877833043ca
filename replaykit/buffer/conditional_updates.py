"""Patch rows that have not been overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorClass

from replaykit._compat import arange, as_tensor, dtype_name
from replaykit.errors import SchemaError
from replaykit.storages import Storage, TensorStorage
from replaykit.storages.indexing import ravel
from replaykit.storages.memory import carried
from replaykit.structure import Leaf, Path, flatten
from replaykit.ted import FLAG_KEYS, format_key, unravel
from replaykit.writers import Writer


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
        accepted = _newer(columns, path, handles, live, versions, patch.require_newer)
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
