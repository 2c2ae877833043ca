"""How surprising rows were: from learners and from written data to the sampler."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit import native
from replaykit._compat import as_tensor, is_tensordict, lookup
from replaykit.buffer.core import BufferCore
from replaykit.buffer.generic import DataT, SamplerT, StorageT, WriterT
from replaykit.reductions import reduce_rows
from replaykit.samplers import Sampler, Sequence
from replaykit.samplers.markers import MASK
from replaykit.samplers.sequence import anchor_priorities
from replaykit.ted import Key, format_key

__all__ = ["Priorities", "without_priorities", "written_priorities"]


_core = native.core()


class Priorities(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``update_priority``, ``update_tensordict_priority``."""

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Sets the priorities of rows, in buffers whose sampler has priorities.

        Args:
            index: slots, int64 ``[K]`` (``[K, ndim]``). Or, without ``priority``, a TensorDict as
                for ``update_tensordict_priority``.
            priority: a number, ``[K]`` or ``[K, 1]``; not negative, finite.
            generation: that of the slots when they were sampled; rows written since are left out.

        Without priorities: a UserWarning, and no change.

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
        self._ready()
        if without_priorities(self._sampler, above=1):
            return
        if priority is None and is_tensordict(index):
            self.update_tensordict_priority(index)
            return
        values = priority
        if not isinstance(values, torch.Tensor):
            # As torch would take them, numbers of Python would lose half of their digits.
            values = as_tensor(priority, dtype=torch.float64)
        dims = values.ndim
        if dims > 1 and values.shape[-1] == 1 and values.numel() == values.shape[0]:
            values = values.reshape(-1)
        elif dims > 1 and values.ndim == self._storage.ndim:
            # Laid out like written data; the index that `extend` gave for it has time first.
            values = values.transpose(0, self.dim_extend).reshape(-1)
        with self._locked() as storage:
            self._sampler.update_priority(index, values, storage=storage, generation=generation)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets priorities from a sample that the learner has put them into.

        Args:
            data: a TensorDict as ``sample`` returned it, with values under ``priority_key``:
                ``[B]``, ``[B, 1]``, or with more dimensions, which are reduced.

        Rows that were overwritten since they were sampled are left out. Where the sampler has no
        priorities nothing happens, without a warning: a learner may call this after every batch,
        whatever the sampler. In a buffer of sequences the largest priority among the valid rows of
        an anchor is that of the anchor; other rows keep theirs.

        Raises:
            KeyError: no ``priority_key`` or no ``index`` in the data. TypeError: no TensorDict.
            ValueError: a priority is NaN, negative or infinite; nothing has changed.
        """
        self._ready()
        sampler = self._sampler
        if not sampler.prioritized:
            return  # training loops call this after every batch, whatever the sampler
        if not (is_tensordict(data) or is_tensorclass(data)):
            raise TypeError(
                f"expected a TensorDict as sample() returns it, got {type(data).__name__}: batches "
                "of rows that are no TensorDicts carry no index. Write TensorDicts, as "
                "replaykit.transition() makes them, or take info['index'] of "
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
            with self._locked() as storage:
                try:
                    sampler.update_priority(index, value, storage=storage, generation=generation)
                except ValueError:
                    # The same, said by key and row.
                    reduced_priority(value, index.shape[0], sampler, self._priority_key)
                    raise
            return
        if data.batch_dims == 0:
            data, value, index = data.unsqueeze(0), value.unsqueeze(0), index.unsqueeze(0)
        with self._locked() as storage:
            # Rows that are trajectories repeat what is known of them over their own dimensions.
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
        """Sets the priorities of the rows that were drawn for the windows of a sample."""
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
        with self._locked() as storage:
            # What a learner computes for rows that fill a gap need not be a number.
            mask = valid.to(value.device).reshape(-1, *(1,) * (value.ndim - 1))
            value = reduced_priority(value.where(mask, 0), len(valid), sampler, key)
            update = anchor_priorities(
                anchor, lookup(flat, ("anchor_generation",)), value, valid.to(anchor.device)
            )
            sampler.update_priority(
                update.anchor, update.priority, storage=storage, generation=update.generation
            )

    def _only_real_rows(self, data: Any) -> Any:
        """A sample of windows as flat rows, without those that are padding."""
        flat = data if data.batch_dims == 1 else data.reshape(-1)
        mask = lookup(flat, MASK)
        return flat if mask is None or bool(mask.all()) else flat[mask]


def without_priorities(sampler: Sampler, *, above: int) -> bool:
    """Whether a sampler has no priorities, so that an update has no effect; warns of it.

    ``above``: how many calls above this function's caller the user is.
    """
    if not sampler.prioritized:
        warnings.warn(
            f"{type(sampler).__name__} has no priorities; the update has no effect",
            UserWarning,
            stacklevel=above + 2,
        )
    return not sampler.prioritized


def _per_row(value: torch.Tensor | None, dim: int, batch_dims: int) -> Any:
    """One entry a row, of what is the same all over the other batch dimensions."""
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
    """Returns the priorities that written data carries, one per element; None if it has none, if
    the sampler has none, or if they are not ``wanted`` (False).

    Args:
        rows: number of rows (time slots, where there are lanes).
        single, time_dim: as in ``schema.take_apart``.
        ndim: batch dimensions of the storage; each of their cells has a priority of its own.

    Raises:
        ValueError: not one per row, or one that is NaN, negative or infinite.
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
    if not (is_tensordict(data) or is_tensorclass(data)):
        return None
    value = data.get(key, None)
    return value if isinstance(value, torch.Tensor) else None


def reduced_priority(value: torch.Tensor, rows: int, sampler: Sampler, key: Key) -> torch.Tensor:
    """Returns one priority per row: all other dimensions reduced as the sampler says.

    Raises:
        ValueError: not one per row, or one that is NaN, negative or infinite.
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
    """Whether there is nothing to reduce, and no dtype to bring to another."""
    return value.dim() == 1 and (value.dtype is torch.float32 or value.dtype is torch.float64)


def _checks_itself(sampler: Sampler) -> bool:
    """Whether a sampler refuses bad priorities by itself."""
    return type(sampler).check_priorities is not Sampler.check_priorities


def _all_plain(value: torch.Tensor) -> bool:
    """Whether all numbers ``[K]`` are finite and not negative."""
    if (
        _core is not None
        and (value.dtype is torch.float32 or value.dtype is torch.float64)
        and value.is_cpu
        and value.is_contiguous()
        and not value.is_neg()
    ):
        return _core.all_plain(value.data_ptr(), len(value), value.dtype is torch.float64)
    return bool(((value >= 0) & value.isfinite()).all())
