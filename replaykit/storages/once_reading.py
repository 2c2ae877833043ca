"""Rows read from columns in which what follows a row is stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.assembly import assembler
from replaykit.schema import Schema
from replaykit.storages.beside import Beside, Grow
from replaykit.storages.columns import Columns
from replaykit.storages.indexing import ravel, selected_elements
from replaykit.storages.links import Links
from replaykit.storages.native_once import NativeOnce
from replaykit.storages.pairs import Pairs
from replaykit.structure import Path
from replaykit.ted import format_key

__all__ = ["FollowedRows"]

_Leaves = dict[Path, torch.Tensor]


class FollowedRows:
    """The reading face of ``OnceColumns``: as that of ``Columns``, with all leaves.

    Rows are elements here, counted through time slots and lanes; the one that follows an element
    lies one time slot further, round the ring, in the same lane, or where ``links`` say.

    Args:
        pairs: which leaves are those of the following row.
        rows: columns of the leaves that every row has.
        grow: takes memory for the rows beside.
        links: where the following rows lie, without lanes.

    Attributes:
        order: the paths, in the order in which leaves are gathered.
        advise: whether the kernel is told which pages of mapped files a batch will touch.

    Cost of a read: that of a dense one, and a few operations on int64 ``[B]``.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        self.rows = rows
        self.ndim, self.slots, self.lanes = rows.ndim, rows.slots, rows.lanes
        self.device = rows.device
        self.advise = rows.advise
        self.changes = rows.changes
        self._cells = rows.lanes.numel()
        self._elements = rows.slots * self._cells
        self._roots = rows.part(list(pairs.root_of.values()))
        next_of = {root: path for path, root in pairs.root_of.items()}
        # The counterparts come out in the order of the roots.
        self._nexts = [next_of[root] for root in self._roots.order]
        self._beside = Beside(pairs.beside, self._elements, self.device, grow)
        self._links = links
        self._arrange(pairs)

    def _arrange(self, pairs: Pairs) -> None:
        """Work out what follows from which leaves there are."""
        self.pairs = pairs
        self.schema = pairs.schema
        self.order = [*self.rows.order, *self._nexts]
        self._assemble = assembler(self.schema.root, self.order)
        self._native = NativeOnce.over(pairs, self.rows, self._beside, self._links)
        if self._native is not None:
            self._assemble_native = assembler(self.schema.root, self._native.order)
        # Where the leaves of every row are among all.
        places = {path: place for place, path in enumerate(pairs.schema.leaves)}
        self._places = [places[path] for path in self.rows.tensors]

    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Take more leaves, which every row has; see ``Columns.add``."""
        pairs = self.pairs
        stored = schema.part([path for path in schema.leaves if path not in pairs.root_of])
        self.rows.add(stored, tensors)
        self._arrange(replace(pairs, schema=schema, stored=stored))

    def __getitem__(self, path: Path) -> torch.Tensor:
        """A leaf as it lies, to look at; KeyError for what is rebuilt and lies nowhere."""
        if path in self.pairs.root_of:
            raise KeyError(
                f"{format_key(path)} is stored once, under {format_key(self.pairs.root_of[path])}, "
                "and cannot tell where episodes end; give dedup_next the other keys"
            )
        return self.rows[path]

    def follow_memory(self) -> None:
        """Looks where the columns lie: whoever holds a view may have had the memory moved."""
        self.rows.follow_memory()

    @property
    def kept_beside(self) -> int:
        """Number of rows (elements, for ``ndim > 1``) that have their counterparts beside."""
        return len(self._beside)

    def nbytes(self) -> int:
        """Bytes of memory, or of files, that the rows take, those beside among them."""
        return self.rows.nbytes() + self._beside.nbytes()

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Reads the rows at slots ``[B]`` (coordinates ``[B, ndim]``) into a fresh container.

        Raises:
            IndexError: a slot outside ``[0, length)``; not on devices where asking means waiting.
        """
        if self._native is not None and not contiguous:
            elements = self._elements_of(index)
            found = self._native.gather(elements, length * self._cells)
            if found is not None:
                return self._assemble_native(found, index.shape[:1], self.device)
        leaves = self._gather(index, length, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device)

    def gather(
        self, index: torch.Tensor, length: int | None = None, *, contiguous: bool = False
    ) -> _Leaves:
        """Copies rows out: leaves ``[B, *F]`` by path; as ``read``, by default of all slots."""
        length = self.slots if length is None else length
        found = dict(zip(self.order, self._gather(index, length, contiguous), strict=True))
        return {path: found[path] for path in self.schema.leaves}

    def gather_keys(self, paths: Sequence[Path], elements: torch.Tensor) -> _Leaves:
        """Copies some leaves of rows out: ``[B, *F]`` by path; see ``Columns.gather_keys``."""
        stored = [path for path in paths if path not in self.pairs.root_of]
        found = self.rows.gather_keys(stored, elements) if stored else {}
        if len(stored) < len(paths):
            following = self._following(elements.to(self.device, torch.int64), contiguous=True)
            found.update(following)
        return {path: found[path] for path in paths}

    def _elements_of(self, index: torch.Tensor) -> torch.Tensor:
        elements = index if self.ndim == 1 else ravel(index, self.lanes)
        if elements.dtype is not torch.int64 or elements.device != self.device:
            elements = elements.to(self.device, torch.int64)
        return elements

    def _gather(self, index: torch.Tensor, length: int, contiguous: bool) -> list[torch.Tensor]:
        elements = self._elements_of(index)
        limit = length * self._cells
        leaves = list(self.rows.gather_elements(elements, limit, contiguous=contiguous))
        following = self._following(elements, contiguous)
        leaves.extend(following[path] for path in self._nexts)
        return leaves

    def _following(self, elements: torch.Tensor, contiguous: bool = False) -> _Leaves:
        """The counterparts of elements ``[B]``: ``[B, *F]``, in fresh memory."""
        if self._native is not None and contiguous:
            found = self._native.following(elements)
            if found is not None:
                return found
        after = self._after(elements)
        leaves = self._roots.gather_elements(after, self._elements, contiguous=contiguous)
        return self._beside.patch(elements, dict(zip(self._nexts, leaves, strict=True)))

    def _after(self, elements: torch.Tensor) -> torch.Tensor:
        """The elements that follow elements ``[B]``.

        The one after the newest row may never have been written; what it holds is not asked for.
        """
        if self._links is not None:
            return self._links.after(elements)
        return (elements + self._cells).remainder_(self._elements)

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Returns the first ``stop`` slots of a leaf: a copy where it is one of a pair."""
        if path not in self.pairs.root_of and path not in self.pairs.root_of.values():
            return self.rows.column(path, stop)
        elements = arange(stop * self._cells).to(self.device)
        if path in self.pairs.root_of:
            found = self._following(elements, contiguous=True)
        else:
            found = self._at_root(elements, contiguous=True)
        return found[path].view(stop, *self.lanes, *self.schema.leaves[path].shape)

    def _at_root(self, elements: torch.Tensor, contiguous: bool = False) -> _Leaves:
        """The root values in pairs of elements ``[B]``, in fresh memory."""
        part = self._roots
        leaves = part.gather_elements(elements, self._elements, contiguous=contiguous)
        return dict(zip(part.order, leaves, strict=True))

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> _Leaves:
        """Indexes the first ``stop`` slots: copies of leaves in pairs, else as ``Columns.view``.

        A view of a root value would let it be changed without the row before.
        """
        leaves = self.rows.view(stop, index, time_dim=time_dim)
        numbers = self._selected(stop, slice(None) if index is None else index, time_dim)
        elements = numbers.reshape(-1)
        for found in (self._at_root(elements, True), self._following(elements, True)):
            for path, leaf in found.items():
                leaves[path] = leaf.view(numbers.shape + leaf.shape[1:])
        return {path: leaves[path] for path in self.schema.leaves}

    def _selected(self, stop: int, index: Any, time_dim: int) -> torch.Tensor:
        """Numbers of the elements that an index selects of the first ``stop`` slots."""
        shape, strides, step = [stop, *self.lanes], [], self._cells
        for size in (1, *self.lanes):
            step //= size
            strides.append(step)
        for grid in (shape, strides):
            grid[0], grid[time_dim] = grid[time_dim], grid[0]
        return selected_elements(index, torch.Size(shape), strides).to(self.device)

    def own_following(self, stop: int) -> tuple[torch.Tensor, _Leaves]:
        """What is needed beside the root values of the first ``stop`` slots to rebuild them all.

        Returns:
            Elements, rising, int64 ``[K]``, and their counterparts ``[K, *F]``: those that do not
            follow from the row behind them, which is the first one for the last of a full ring.
        """
        elements = self._beside.elements_with(stop * self._cells)
        if stop and stop < self.slots:
            last = arange((stop - 1) * self._cells, stop * self._cells).to(self.device)
            elements = torch.cat([elements[elements < last[0]], last])
        return elements, self._following(elements, True)
