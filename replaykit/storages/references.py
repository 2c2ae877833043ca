"""Name the observations that rows show, and read columns through these references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater, RowChunks
from replaykit.storages.indexing import agreed, rising_below
from replaykit.storages.memory import carried

Array = np.ndarray[Any, Any]

OBSERVATION, NEXT = 0, 1
"""The two references of a row, to its observation and to its next observation."""

REFERENCES_KEY = "%references"
"""The key of the references in the record of changes. No path of a leaf equals it."""


def entries_of(references: Any, elements: Any, lanes: int, kind: int) -> Any:
    """Return the entries that elements ``[B]`` refer to, NumPy or torch int64 ``[B]``.

    An entry ``e >= 0`` is in the root columns, and ``e < 0`` is the overflow entry ``-1 - e``. The
    reference of a row is ``e + 1`` or, for an overflow entry, ``e``. 0 stands for the row itself,
    and for ``NEXT`` for the row ``lanes`` elements later.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.references import NEXT, entries_of
        >>> references = np.array([[1, 0], [0, -1], [1, 2]], np.int32)
        >>> entries_of(references, np.arange(3), 1, NEXT).tolist()
        [1, -1, 1]
    """
    found = references[elements][:, kind]
    own = elements + lanes * kind
    if isinstance(found, torch.Tensor):
        found = found.to(torch.int64)
        return torch.where(found == 0, own, found - (found > 0).to(torch.int64))
    return np.where(found == 0, own, found - (found > 0).astype(np.int64))


def followed_references(rows: int, lanes: int, own: Array, steps: Array | None = None) -> Array:
    """Return the references of rows whose next observation is the one of the following row.

    Args:
        rows: number of rows, of all lanes.
        lanes: number of lanes.
        own: the rows with overflow entries, rising. Entry ``k`` belongs to ``own[k]``.
        steps: distances to the following rows; None for the next row of the ring.

    Raises:
        ValueError: the rows do not rise, or a following row is outside, or of two rows.
    """
    found = np.zeros((rows, 2), np.int32)
    if steps is not None:
        after = np.arange(rows) + steps
        if rows and not 0 <= after.min() <= after.max() < rows:
            raise ValueError(f"expected next rows in [0, {rows}), got others")
        found[:, NEXT] = after + 1
    elif rows:  # after the last row of a full ring comes the first one
        found[-lanes:, NEXT] = np.arange(1, lanes + 1)
    own = rising_below(rows, own)
    found[own, NEXT] = -1 - np.arange(len(own))
    return found


def picked_entries(source: Any, values: Any, entries: torch.Tensor) -> torch.Tensor:
    """Return the values ``[B, *F]`` of entries int64 ``[B]``, in the dtype of ``carried``.

    Args:
        source: the values of the entries ``e >= 0``, ``[n, *F]``.
        values: the values of the overflow entries, ``[m, *F]``.
    """
    found = _rows(source, entries.clamp(min=0))
    at = (entries < 0).nonzero().flatten()
    if len(at):
        found.index_copy_(0, at, _rows(values, -1 - entries[at]))
    return found


def _rows(column: Any, index: torch.Tensor) -> torch.Tensor:
    return carried(column[index]) if isinstance(column, RowChunks) else carried(column)[index]


class References:
    """The references of saved rows, in memory or in files.

    Args:
        rows: number of rows, of all lanes.
        lanes: number of lanes.
        table: the references, int32 ``[rows, 2]`` in any shape. Or, in a format before version 3,
            the arguments ``own`` and ``steps`` of ``followed_references``.
        overflow: number of overflow entries.
        moved: whether entries have other numbers than in the storage. Then a later save cannot
            reuse parts of the table.

    Tables in files are read and checked only when rows are read. If they are invalid, that read
    raises ValueError.
    """

    def __init__(
        self, rows: int, lanes: int, tables: tuple[Any, ...], overflow: int, *, moved: bool = False
    ) -> None:
        self.rows, self.lanes, self.tables, self.overflow = rows, lanes, tables, overflow
        self.moved = moved

    @property
    def is_direct(self) -> bool:
        """True if there is one table of references."""
        return self.tables[0].dtype == torch.int32 and len(self.tables[0].shape) > 1

    def direct(self, lanes: torch.Size) -> Any:
        """Return the references of all rows as one table ``[n, *lanes, 2]``."""
        if self.is_direct:
            return self.tables[0]
        return torch.from_numpy(self.array()).view(-1, *lanes, 2)

    def clone(self) -> References:
        """Return a copy in memory."""
        tables = tuple(table[:].clone() for table in self.tables)
        return References(self.rows, self.lanes, tables, self.overflow)

    def array(self) -> Array:
        """Return the references int32 ``[rows, 2]``, after a check.

        Raises:
            ValueError: an entry does not exist, or two rows refer to it in the same way.
        """
        tables = [t[:] if isinstance(t, RowChunks) else t for t in self.tables]
        return self.made(*(table.cpu().numpy() for table in tables))

    def made(self, *tables: Array) -> Array:
        """Return the result of ``array`` for the content of the tables."""
        if not self.is_direct:
            return followed_references(self.rows, self.lanes, *tables)
        found = tables[0].reshape(self.rows, 2)
        for kind in (OBSERVATION, NEXT):
            entries = entries_of(found, np.arange(self.rows), self.lanes, kind)
            if self.rows and not -self.overflow <= entries.min() <= entries.max() < self.rows:
                raise ValueError(
                    f"expected references to {self.rows} and {self.overflow} entries, got others"
                )
            if (np.bincount(entries + self.overflow) > 1).any():
                raise ValueError("expected an entry for each reference, got an entry of two rows")
        return found

    def later(self, others: list[References], use: Callable[[Array], None]) -> ReadLater[None]:
        """Return an object that passes the references to ``use``; ``others`` must be equal.

        ``use`` may raise ValueError, if the references contradict each other.

        Raises:
            OSError: the system refuses to map the tables.
        """
        count = len(self.tables)
        tables = [table for one in (self, *others) for table in one.tables]

        def make(*arrays: Array) -> None:
            use(self.made(*(agreed(*arrays[k::count]) for k in range(count))))

        name = "references of rows" if self.is_direct else "list of overflow rows"
        return ReadLater(make, tables, name)


class ReferencedColumn:
    """A column whose rows are entries of ``source`` or overflow entries.

    It has the shape of ``source``. It can be read like a tensor: it has ``len``, ``shape``,
    ``dtype`` and ``device``. An index is an int, a forward slice or int64 ``[K]``, and copies only
    its rows.

    Args:
        source: the column with the entries of rows, ``[n, *lanes, *F]``.
        values: the overflow entries, ``[K, *F]``.
        references: the references of all rows.
        kind: ``OBSERVATION`` or ``NEXT``.
        lanes: sizes of the dimensions after time.

    Raises:
        ValueError: the arguments contradict each other.
    """

    def __init__(
        self, source: Any, values: Any, references: References, kind: int, lanes: torch.Size
    ) -> None:
        self.source, self.values, self.references, self.kind = source, values, references, kind
        self.shape = torch.Size(source.shape)
        self.dtype, self.device = source.dtype, source.device
        self.lanes, self._cells = lanes, lanes.numel()
        self._feature = self.shape[1 + len(lanes) :]
        self._table: torch.Tensor | None = None
        if (
            self.shape[1 : 1 + len(lanes)] != lanes
            or values.dtype != source.dtype
            or tuple(values.shape) != (references.overflow, *self._feature)
        ):
            raise ValueError(
                f"expected overflow values {source.dtype} {[references.overflow, *self._feature]} "
                f"for a column {list(self.shape)}, got {values.dtype} {list(values.shape)}"
            )

    def copied(self, source: Any, references: References) -> ReferencedColumn:
        """Return the same column over copies of its parts."""
        return ReferencedColumn(source, self.values, references, self.kind, self.lanes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            return self._rows(torch.tensor([index % len(self)], device="cpu"))[0]
        if isinstance(index, slice):
            return self._rows(arange(*index.indices(len(self))))
        return self._rows(index.cpu())

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if not len(index):
            shape = (0, *self.shape[1:])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if self._table is None:
            self._table = torch.from_numpy(self.references.array())
        elements = (index[:, None] * self._cells + arange(self._cells)).reshape(-1)
        entries = entries_of(self._table, elements, self._cells, self.kind).to(self.device)
        if self._cells == 1:
            found = picked_entries(self.source, self.values, entries)
        else:  # each row of the source has an entry for each lane
            at = entries.clamp(min=0)
            slots, place = torch.div(at, self._cells, rounding_mode="floor").unique(
                return_inverse=True
            )
            source = _rows(self.source, slots).reshape(len(slots) * self._cells, *self._feature)
            rows = place * self._cells + at % self._cells
            found = picked_entries(source, self.values, torch.where(entries < 0, entries, rows))
        return found.view(self.dtype).view(len(index), *self.shape[1:])


def rebuilt_columns(columns: list[Any], references: Any, lanes: torch.Size) -> list[Any]:
    """Rebuild the columns of a saved state, in which ``ReferencedColumn`` are mappings.

    Args:
        columns: a column in memory or in files, or a mapping for a next observation. Since format
            version 3 it names its root column and has the overflow entries. Before, it also named
            its rows with overflow entries, and the distances to following rows.
        references: the references of all rows; None before version 3.

    Raises:
        ValueError: the state contradicts itself.
    """
    found = list(columns)
    shared: References | None = None
    for place, record in enumerate(columns):
        if not isinstance(record, Mapping):
            continue
        root: Any = record.get("follows")
        source = columns[root] if type(root) is int and 0 <= root < len(columns) else None
        if not isinstance(source, (torch.Tensor, RowChunks)):
            raise ValueError(
                f"expected the number of a column that another one follows, got {root!r}"
            )
        rows = source.shape[0] * lanes.numel()
        direct = "entries" in record
        name = "entries" if direct else "own_values" if "steps" in record else "values"
        values = record.get(name)
        if not isinstance(values, (torch.Tensor, RowChunks)):
            raise ValueError(
                f"expected the overflow values of a column, got {type(values).__name__}"
            )
        if direct:
            if shared is None:
                tables = (_checked_table(references, source.shape[0], lanes),)
                shared = References(rows, lanes.numel(), tables, len(values))
            known = shared
            found[root] = ReferencedColumn(source, values, known, OBSERVATION, lanes)
        else:
            known = _known_before(record, rows, len(values), lanes)
        found[place] = ReferencedColumn(source, values, known, NEXT, lanes)
        if not isinstance(known.tables[0], MappedRows):
            known.array()  # a check
    return found


def _checked_table(table: Any, rows: int, lanes: torch.Size) -> Any:
    if isinstance(table, RowChunks) and not isinstance(table, MappedRows):
        table = table[:]
    if not (
        isinstance(table, (torch.Tensor, MappedRows))
        and table.dtype == torch.int32
        and tuple(table.shape) == (rows, *lanes, 2)
    ):
        raise ValueError(f"expected the references of {rows} rows, got {table!r}")
    return table


def _known_before(
    record: Mapping[str, Any], rows: int, count: int, lanes: torch.Size
) -> References:
    streams = "steps" in record
    tables: list[Any] = [record.get("own" if streams else "elements")]
    if streams:
        tables.append(record["steps"])
    for place, table in enumerate(tables):
        if isinstance(table, RowChunks) and not isinstance(table, MappedRows):
            tables[place] = table = table[:]
        if not isinstance(table, (torch.Tensor, MappedRows)) or len(table.shape) != 1:
            raise ValueError(f"expected rising elements of a column, got {table!r}")
    elements = tables[0]
    if elements.dtype != torch.int64 or len(elements) > rows or len(elements) != count:
        raise ValueError(f"expected rising elements of a column, got {elements!r}")
    if streams:
        steps = tables[1]
        if lanes or steps.dtype not in (torch.int32, torch.int64) or len(steps) != rows:
            raise ValueError(
                f"expected the distances of {rows} rows to their next ones, got {steps!r}"
            )
    return References(rows, lanes.numel(), tuple(tables), count)
