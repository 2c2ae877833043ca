"""Members of an ensemble, and rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, overload

import torch
from typing_extensions import Self

from replaykit._compat import is_tensordict
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.generic import DataT
from replaykit.ensembles.batches import Places, length_of, select, stacked
from replaykit.ensembles.choosing import chosen
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.elsewhere import as_given
from replaykit.ensembles.sampler import SamplerEnsemble
from replaykit.structure import map_leaves

__all__ = ["EnsembleReading"]


class EnsembleReading(EnsembleCore[DataT]):
    """``ensemble[...]``."""

    @overload  # type: ignore[override]
    def __getitem__(self, index: int) -> ReplayBuffer[DataT]: ...
    @overload
    def __getitem__(self, index: tuple[Any, str]) -> Any: ...
    @overload
    def __getitem__(self, index: tuple[Any, Any]) -> DataT: ...
    @overload
    def __getitem__(
        self, index: slice | EllipsisType | Sequence[int] | Sequence[bool] | torch.Tensor
    ) -> Self: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns a member, an ensemble of several, or rows of members.

        Args:
            index: an int for a member; a slice, list, tensor of ints, or bools, for an ensemble
                over these members, with their weights; ``...`` for one over all. With a second
                index what that gives of the member, or of each of these, put together:
                ``ensemble[:, 3]`` is row 3 of every member, ``ensemble[:, :8]`` a batch ``[K, 8]``.

        Raises:
            IndexError: no such member or row. TypeError: numbers with fractions. RuntimeError: an
                index of more than one dimension. ValueError: rows of members that differ in keys,
                shapes or dtypes, or are not equally many.

        Example:
            >>> import torch
            >>> from replaykit import ReplayBuffer, ReplayBufferEnsemble, LazyTensorStorage
            >>> rbs = [ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(3)]
            >>> for number, rb in enumerate(rbs):
            ...     _ = rb.extend(torch.arange(5) + 10 * number)
            >>> ensemble = ReplayBufferEnsemble(*rbs)
            >>> ensemble[1] is rbs[1], len(ensemble[1:]), ensemble[:, 3]
            (True, 2, tensor([ 3, 13, 23]))
            >>> ensemble[[0, 2], 1:3]
            tensor([[ 1,  2],
                    [21, 22]])
        """
        if isinstance(index, str) or (
            isinstance(index, tuple) and bool(index) and isinstance(index[0], str)
        ):
            raise TypeError(
                f"expected members of the ensemble, got a key: columns are those of a member, "
                f"ensemble[i][{index!r}]"
            )
        if not isinstance(index, tuple):
            numbers = chosen(index, len(self), "an ensemble")
            return (
                as_given(self._members[numbers]) if isinstance(numbers, int) else self._of(numbers)
            )
        if not index:
            return self
        numbers = chosen(index[0], len(self), "an ensemble")
        if len(index) == 1:
            return self[index[0]]
        inner = index[1] if len(index) == 2 else index[1:]
        if isinstance(numbers, int):
            return self._members[numbers][inner]
        return self._rows(numbers, inner)

    def _rows(self, numbers: list[int], inner: Any) -> Any:
        """What an index gives of each of some members, put together and transformed."""
        single = _is_number(inner)
        pieces = []
        for number in numbers:
            data = self._members[number][inner]
            if self._keys is not None:
                data = select(data, self._keys, number)
            pieces.append((number, _as_batch(data) if single else data))
        if self._collate_fn is not None:
            data = self._collate_fn([data for _, data in pieces])
        else:
            counts = {length_of(data) for _, data in pieces}
            if len(counts) > 1:
                raise ValueError(f"expected equally many rows of each member, got {sorted(counts)}")
            # By position: a member may be named twice, in any order.
            places = Places(list(range(len(pieces))), counts.pop())
            data = stacked([(i, data) for i, (_, data) in enumerate(pieces)], places)
        if single:
            data = _without_rows(data)
        return self._chain.forward(data) if len(self._chain) else data

    def _of(self, numbers: list[int]) -> Any:
        """An ensemble like this over some of the members."""
        if numbers == list(range(len(self))):
            return self
        if not numbers:
            raise IndexError("expected at least one member of an ensemble, got none")
        sampler: SamplerEnsemble = self._sampler
        everyone = sampler.sample_from_all
        return type(self)(
            *(self.members[number] for number in numbers),
            transform=self._chain,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[number] for number in numbers],
            p=sampler.p[numbers] if isinstance(sampler.p, torch.Tensor) else sampler.p,
            sample_from_all=everyone,
            num_buffer_sampled=None if everyone else sampler._parts,
            counts=None if everyone else sampler.counts,
            unready=sampler.unready,
            keys=self._keys,
            device=self._device,
            generator=self._generator,
            priority_key=self._priority_name,
            pin_memory=self._pin_memory,
            prefetch=self._prefetch_depth,
            contiguous=self._contiguous,
        )


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype is not torch.bool
    return hasattr(index, "__index__") and not isinstance(index, bool)


def _as_batch(data: Any) -> Any:
    if isinstance(data, torch.Tensor) or is_tensordict(data):
        return data.unsqueeze(0)
    return map_leaves(data, lambda leaf: leaf.unsqueeze(0))


def _without_rows(data: Any) -> Any:
    if isinstance(data, torch.Tensor) or is_tensordict(data):
        return data.squeeze(1)
    return map_leaves(data, lambda leaf: leaf.squeeze(1))
