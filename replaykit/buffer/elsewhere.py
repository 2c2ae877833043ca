"""Buffers whose rows other processes hold, as what `BufferDataset` draws from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Asked", "Elsewhere"]


class Asked(Protocol):
    """A batch that was asked for."""

    def result(self, timeout: float | None = None) -> Any: ...


class Elsewhere(ABC):
    """A handle of a buffer that makes its batches in other processes.

    Loaders ask it for streams of batches, each drawn with a generator of its own; what the handle
    itself draws is left alone. New rows and priorities count from the next batch on.
    """

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """What the sampler is like."""

    @abstractmethod
    def _size_of(self, batch_size: int | None) -> int:
        """Number of rows of a batch; RuntimeError: none is known."""

    @abstractmethod
    def _check_loader(self) -> None:
        """Raises ValueError or TypeError where streams cannot be drawn beside the buffer's own."""

    @abstractmethod
    def _check_workers(self, method: str | None = None) -> None:
        """Raises ValueError where worker processes could not reach the buffer.

        Args:
            method: how they are started; None: this is one of them.
        """

    @abstractmethod
    def _asking(self, generator: torch.Generator) -> Callable[[int], Asked]:
        """What asks for one batch after the other of so many rows, drawn with that generator."""

    @abstractmethod
    def _carried(self) -> Any:
        """What a spawned process gets in the place of the handle, to be ``made`` there."""
