"""Records in a list of TensorDicts that may differ from one another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict import is_tensorclass, lazy_stack

from replaykit._compat import is_tensordict
from replaykit.keywords import checked_keywords
from replaykit.storages.lists import ListStorage, copy_item
from replaykit.structure import Path

__all__ = ["LazyStackStorage"]


class LazyStackStorage(ListStorage):
    """A list of TensorDicts whose batches are lazily stacked TensorDicts.

    Rows may differ in keys and in feature shapes. A key that not all rows of a batch share is not
    visible on the stack, but on its parts.

    Args:
        max_size: capacity in rows; ``None``: 2^63 - 1.
        stack_dim: dimension along which batches are stacked; negative counts from the end.
        device: TensorDicts are moved there when they come in.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10))
        >>> for length in (2, 3):
        ...     _ = rb.add(TensorDict({"x": torch.ones(length)}, []))
        >>> [row["x"].tolist() for row in rb[:].unbind(0)]
        [[1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    rows_have_batches = True  # `add` takes a row with batch dimensions without a warning

    @checked_keywords
    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: Any = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, device=device)
        self.stack_dim = stack_dim

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> list[Any]:
        """Returns the rows as a list of copies; TypeError, where one is no TensorDict."""
        rows = super().prepare(data, single=single, time_dim=time_dim, optional=optional)
        for row in rows:
            if not (is_tensordict(row) or is_tensorclass(row)):
                raise TypeError(
                    f"expected rows that are TensorDicts, got {type(row).__name__}; "
                    "ListStorage takes any object"
                )
        return rows

    def get(self, index: Any) -> Any:
        """Returns the row at an int, a lazy stack at anything else; an empty list for no rows."""
        rows = super().get(index)
        return self._stacked(rows) if isinstance(rows, list) and rows else rows

    def read(self, index: torch.Tensor, *, own: bool = True) -> Any:
        """Returns a lazy stack of copies."""
        with self.lock:
            rows = ListStorage.get(self, index)
        return self._stacked([copy_item(row) for row in rows])

    def _stacked(self, rows: list[Any]) -> Any:
        """Rows as one lazy stack; ValueError where they cannot be."""
        try:
            return lazy_stack(rows, self._dim(rows))
        except RuntimeError as error:
            found = sorted({tuple(row.batch_size) for row in rows})
            raise ValueError(
                "expected rows with as many batch dimensions each, got batch sizes "
                f"{' and '.join(str(list(size)) for size in found[:3])}; use a ListStorage with a "
                "collate_fn for rows that cannot be stacked"
            ) from error

    def collate(self, rows: Any) -> Any:
        """Returns the lazy stack as it is."""
        return rows

    def _dim(self, rows: list[Any]) -> int:
        return self.stack_dim if self.stack_dim >= 0 else self.stack_dim + rows[0].batch_dims + 1
