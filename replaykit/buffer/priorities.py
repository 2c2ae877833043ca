"""Update the priorities of rows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from tensordict import is_tensorclass

from replaykit import native
from replaykit._compat import TensorDict, fields_of, is_tensordict, lookup
from replaykit.reductions import reduce_rows
from replaykit.samplers import Sampler, Sequence
from replaykit.samplers.sequence import anchor_priorities
from replaykit.samplers.window_forms import MASK
from replaykit.ted import Key, format_key

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


def without_priorities(sampler: Sampler, *, above: int) -> bool:
    """Return whether a sampler has no priorities; warn that the update has no effect.

    ``above``: the number of stack frames between the user and this function's caller.
    """
    if not sampler.prioritized:
        warnings.warn(
            f"{type(sampler).__name__} has no priorities; the update has no effect",
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
    if type(data) is TensorDict and key[0] not in fields_of(data):
        return None
    batches = data if isinstance(data, (list, tuple)) and not single else [data]
    values = []
    for batch in batches:
        found = lookup(batch, key)
        if not isinstance(found, torch.Tensor):
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


def update_from_sample(buffer: ReplayBuffer, data: Any) -> None:
    """Set priorities that the learner has written into a sample."""
    buffer._ready()
    sampler, key = buffer._sampler, buffer._priority_key
    if not sampler.prioritized:
        return  # training loops call this after every batch, whatever the sampler
    dim = buffer._storage.stack_dim if buffer._collate_fn is None else 0
    found = priorities_of(data, sampler, key, dim, isinstance(buffer._sample_unit, Sequence))
    if found is not None:
        index, value, generation = found
        with buffer._locked(settled=False) as storage:
            try:
                sampler.update_priority(index, value, storage=storage, generation=generation)
            except ValueError:
                # Raises the same error with key and row.
                reduced_priority(value, index.shape[0], sampler, key)
                raise


def priorities_of(
    data: Any, sampler: Sampler, key: Key, dim: int = 0, sequences: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Any] | None:
    """Return the index, the priorities and the generations in a sample; None without rows.

    The priorities are one number a row, and are not checked if the sampler checks them.

    Args:
        dim: the dimension of the rows. If rows are trajectories, their info is repeated over their
            inner dimensions.
        sequences: whether the rows are sequences, each with the priority of its anchor.
    """
    if not (is_tensordict(data) or is_tensorclass(data)):
        raise TypeError(
            f"expected a TensorDict as sample() returns it, got {type(data).__name__}: batches "
            "of rows that are not TensorDicts carry no index. Write TensorDicts, as "
            "replaykit.transition() makes them, or pass info['index'] of "
            "sample(return_info=True) to update_priority()"
        )
    if sequences or getattr(sampler, "unit", "") == "slice":
        return _priorities_of_anchors(data, sampler, key, sequences)
    if sampler.draws_windows:
        data = only_real_rows(data)
    value, index = lookup(data, key), lookup(data, ("index",))
    for name, found in ((key, value), (("index",), index)):
        if found is None:
            raise KeyError(f"expected {format_key(name)} in the data; got none")
    generation = lookup(data, ("index_generation",))
    if not (type(value) is torch.Tensor and data.batch_dims == 1):
        if 0 in data.batch_size:
            return None
        if data.batch_dims == 0:
            data, value, index = data.unsqueeze(0), value.unsqueeze(0), index.unsqueeze(0)
            generation = lookup(data, ("index_generation",))
        dim = min(dim if dim >= 0 else dim + data.batch_dims, data.batch_dims - 1)
        index, generation = (_per_row(item, dim, data.batch_dims) for item in (index, generation))
        value = value.movedim(dim, 0)
    # Such a sampler refuses invalid priorities itself.
    checks = type(sampler).check_priorities is not Sampler.check_priorities
    if not (checks and _is_column(value) and value.shape == index.shape):
        value = reduced_priority(value, index.shape[0], sampler, key)
    return index, value, generation


def _priorities_of_anchors(
    data: Any, sampler: Sampler, key: Key, sequences: bool
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the index, the priorities and the generations of the anchors of windows."""
    flat = data.reshape(-1)
    value, anchor = lookup(flat, key), lookup(flat, ("anchor_index",))
    needed = {format_key(key): value, "anchor_index": anchor}
    valid = lookup(flat, ("validity_mask",) if sequences else MASK)
    if sequences:
        needed["validity_mask"] = valid
    for name, item in needed.items():
        if item is None:
            raise KeyError(f"expected {name} in the data; got none")
    if valid is None:  # slices without padding
        valid = torch.ones(len(anchor), dtype=torch.bool, device=anchor.device)
    # Values that a learner computes for padding may be NaN.
    mask = valid.to(value.device).reshape(-1, *(1,) * (value.ndim - 1))
    value = reduced_priority(value.where(mask, 0), len(valid), sampler, key)
    generation = lookup(flat, ("anchor_generation",))
    return anchor_priorities(anchor, generation, value, valid.to(anchor.device))


def only_real_rows(data: Any) -> Any:
    """Return a sample of windows as flat rows without padding."""
    flat = data if data.batch_dims == 1 else data.reshape(-1)
    mask = lookup(flat, MASK)
    return flat if mask is None or bool(mask.all()) else flat[mask]
