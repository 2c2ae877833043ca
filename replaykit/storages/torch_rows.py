"""Rows moved by torch, where the core cannot: the counterpart of ``NativeRows``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from replaykit.storages.carrying import carried
from replaykit.storages.indexing import unravel_index
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns

__all__ = ["copy_rows", "gather", "gather_some", "scatter"]

_ENOUGH_BYTES = 2**23
"""What is worth a thread: a hundred times what it takes to start one."""
_BLOCK_BYTES = 2**22
_MOST_THREADS = 4


def gather(
    columns: Columns, index: torch.Tensor, rows: torch.Tensor, contiguous: bool
) -> list[torch.Tensor]:
    """Copies all leaves of rows out, ``[B, *F]`` in the columns' order; records as whole words.

    Args:
        index: slots ``[B]``, or coordinates ``[B, ndim]``, on the columns' device.
        rows: the same as elements.
        contiguous: whether each leaf is to lie in one piece.
    """
    columns.follow_memory()
    found: dict[Path, torch.Tensor] = {}
    layout, records, ndim = columns.layout, columns.records, columns.ndim
    if layout is not None and records is not None:
        words = records.view(layout.word).flatten(0, ndim - 1)
        block = layout.as_block(words.index_select(0, rows))
        leaves = layout.split(block)
        if contiguous:
            leaves = [leaf.contiguous() for leaf in leaves]
        found.update(zip(layout.offsets, leaves, strict=True))
    for path, column in columns.tensors.items():
        if path in found:
            continue
        source = carried(column)
        if ndim == 1:
            values = source.index_select(0, rows)
        elif source.is_contiguous():
            values = source.flatten(0, ndim - 1).index_select(0, rows)
        else:
            values = source[tuple(index.unbind(-1))]
        found[path] = values.view(column.dtype)
    return [found[path] for path in columns.order]


def gather_some(
    columns: Columns, paths: Sequence[Path], elements: torch.Tensor
) -> dict[Path, torch.Tensor]:
    """Copies some leaves of stored elements ``[B]`` out, each in one piece."""
    columns.follow_memory()
    found, rows = {}, elements.to(columns.device)
    for path in paths:
        column = columns.tensors[path]
        source = carried(column)
        if columns.ndim > 1:
            cells = tuple(unravel_index(rows, columns.lanes).unbind(-1))
            found[path] = source[cells].view(column.dtype)
        else:
            found[path] = source.index_select(0, rows).view(column.dtype)
    return found


def scatter(
    columns: Columns,
    slots: torch.Tensor,
    runs: Sequence[tuple[int, int, int]] | None,
    sources: Mapping[Path, torch.Tensor],
) -> None:
    """Writes leaves ``[K, *F]`` to distinct slots ``[K]`` of dimension 0.

    Args:
        runs: the slots as runs (``runs_of``); None: there are none, and ``slots`` lie on the
            columns' device.
    """
    for path, column in columns.tensors.items():
        target, source = carried(column), sources[path]
        if runs is None:
            target[slots] = source
            continue
        for first, start, stop in runs:
            rows = source if len(runs) == 1 else source[start:stop]
            target[first : first + stop - start].copy_(rows)


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies rows; on the CPU without torch's threads, which wait for each other.

    Many rows go block by block, to whichever thread is free: what is filled first is given its
    memory meanwhile, which may take longer than the copy.
    """
    plain = not (source.is_conj() or source.is_neg()) and target.dtype is not torch.bfloat16
    if not (target.is_cpu and source.is_cpu and plain):
        target.copy_(source)
        return
    to, values = target.numpy(), source.detach().numpy()
    threads = min(os.cpu_count() or 1, _MOST_THREADS, to.nbytes // _ENOUGH_BYTES)
    if threads < 2:
        np.copyto(to, values)
        return
    rows = max(1, _BLOCK_BYTES * len(to) // to.nbytes)
    blocks = [slice(first, first + rows) for first in range(0, len(to), rows)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda block: np.copyto(to[block], values[block]), blocks):
            pass
