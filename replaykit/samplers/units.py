"""What one drawn record stands for in a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from replaykit._compat import Uncompiled
from replaykit.episodes import EpisodeIndex
from replaykit.samplers.base import Sampler
from replaykit.storages import Storage

__all__ = ["SampleUnit", "Transition"]


class SampleUnit(Uncompiled, ABC):
    """Turns the records that a sampler drew into the records of the batch.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SampleUnit
        >>> class Twice(SampleUnit):
        ...     def expand(self, index, info, storage):
        ...         return index.repeat_interleave(2), {}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sample_unit=Twice())
        >>> _ = rb.extend(torch.tensor([7]))
        >>> rb.sample(2)
        tensor([7, 7, 7, 7])
    """

    def check(self, storage: Storage, sampler: Sampler) -> None:
        """Raises TypeError or ValueError where it cannot work with these components of a buffer.

        Asked before a buffer takes any of the three.
        """

    @abstractmethod
    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the index of the batch and its info, aligned with each other.

        Called with the storage's lock held; must not change the storage.
        """

    def episodes(self, storage: Storage) -> EpisodeIndex | None:
        """The index by which it cuts windows; None: that of the sampler."""
        return None

    @property
    def tells(self) -> tuple[Any, ...]:
        """Keys of what it always tells of the rows of the batch, beside their generations."""
        return ()


class Transition(SampleUnit):
    """The record itself.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, Transition
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sample_unit=Transition())
        >>> _ = rb.extend(torch.zeros(3))
        >>> rb.sample(2)
        tensor([0., 0.])
    """

    def expand(
        self, index: torch.Tensor, info: dict[str, Any], storage: Storage
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns both as they are."""
        return index, info
