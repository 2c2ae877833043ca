"""No new records: for data sets."""

from __future__ import annotations

from typing import Any, NoReturn

from replaykit.writers.base import Writer

__all__ = ["ImmutableDatasetWriter"]


class ImmutableDatasetWriter(Writer):
    """Refuses every write. Rows that are there can still be edited in place.

    Example:
        >>> import torch
        >>> from replaykit import ImmutableDatasetWriter, ReplayBuffer, TensorStorage
        >>> rb = ReplayBuffer(storage=TensorStorage(torch.arange(3)),
        ...                   writer=ImmutableDatasetWriter())
        >>> rb.add(torch.tensor(3))
        Traceback (most recent call last):
        RuntimeError: This dataset doesn't allow writing.
    """

    kind = "immutable"

    def __init__(self, *, compilable: bool = False) -> None:
        super().__init__()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("This dataset doesn't allow writing.")

    def write(self, rows: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def add(self, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def extend(self, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def write_at(self, index: Any, data: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()

    def prepare(self, data: Any, **_: Any) -> NoReturn:
        """Always raises RuntimeError."""
        self._refuse()
