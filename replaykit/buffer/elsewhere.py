"""Buffers whose rows other processes hold, as what `BufferDataset` draws from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from replaykit._compat import Uncompiled

__all__ = ["Asked", "Elsewhere", "MemberFacts", "Piece", "Standing"]


class Asked(Protocol):
    """A batch that was asked for."""

    def result(self, timeout: float | None = None) -> Any: ...


@dataclass(frozen=True)
class MemberFacts:
    """What an ensemble has to know of a member that draws in other processes.

    Attributes:
        sampler: name of the class of its sampler.
        tells: keys of what its samples always tell of their rows.
        prioritized: whether it takes priorities, and ``priority_key``: where it looks for them.
        width: numbers in an index.
        weights: dtype of ``priority_weight``.
        single: whether it draws single rows, however many at once; else windows.
        ordered: whether a transform takes batches in the order of delivery.
    """

    sampler: str
    tells: frozenset[Any]
    prioritized: bool
    priority_key: tuple[str, ...]
    width: int
    weights: torch.dtype
    single: bool
    ordered: bool


class Piece(NamedTuple):
    """Rows that were drawn elsewhere, along dimension 0, and what is known of them.

    ``info`` has ``index`` and ``index_generation``, and nothing of it is in ``data`` yet.
    """

    data: Any
    info: dict[Any, Any]


class Standing(NamedTuple):
    """How many rows a member has, and whether it can give those that it was asked about."""

    size: int
    ready: bool


class Elsewhere(Uncompiled, ABC):
    """A handle of a buffer that makes its batches in other processes.

    Loaders ask it for streams of batches, each drawn with a generator of its own; what the handle
    itself draws is left alone. New rows and priorities count from the next batch on. Ensembles ask
    it for parts of their batches, each drawn with a seed. What is asked for is on its way at once
    wherever that needs no waiting.
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

    # -- as a member of an ensemble -----------------------------------------------------------

    @abstractmethod
    def _facts_of_member(self) -> MemberFacts:
        """What its samples are like; ValueError or TypeError where it cannot be a member."""

    @abstractmethod
    def _be_fresh(self, rows: int) -> None:
        """Learns what a draw of so many rows needs to know, where it is too old; may wait."""

    @abstractmethod
    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> Asked:
        """Asks for draws of so many rows, which follow from a seed, the rows and priorities.

        Returns:
            What will have a list of `Piece`, and its `MemberFacts` where these are not the known
            ones any more, else None.
        """

    @abstractmethod
    def _ask_standing(self, rows: int) -> Asked:
        """Asks for its `Standing`."""

    @abstractmethod
    def _ask_stored(self, index: torch.Tensor) -> Asked:
        """Asks whether rows are stored; -1 is any. The answer is None, or an IndexError."""

    @abstractmethod
    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> Asked:
        """Calls one of its methods."""

    @abstractmethod
    def _handed_on(self) -> Any:
        """A handle that can be pickled."""
