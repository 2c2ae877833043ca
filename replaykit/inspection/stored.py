"""The rows of a storage as a table, and its episodes: of checkpoints and of buffers on disk."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.buffer.episodes import Episodes
from replaykit.episodes import EndReason
from replaykit.inspection.facts import EpisodeFacts, KeyFacts
from replaykit.inspection.table import Table, TensorColumn, evenly, measure
from replaykit.storages import LazyTensorStorage
from replaykit.storages.content import Content
from replaykit.structure import Branch

__all__ = ["episodes_of", "keys_of", "table_of"]

_MOST_PRIORITIES: Final = 200_000
_ENDS: Final = {
    int(EndReason.OPEN): "open",
    int(EndReason.TERMINATED): "terminated",
    int(EndReason.TRUNCATED): "truncated",
    int(EndReason.CUT): "cut",
}


def table_of(content: Content, episodes: Episodes | None, priorities: Any = None) -> Table:
    """Returns stored rows as columns; none is read yet.

    Args:
        content: of one schema.
        episodes: which rows are those of which episode; ``None`` where that is not known.
        priorities: of the rows, as they were set, ``[N]``: what takes an index of rows.
    """
    lanes = tuple(content.lanes)
    count = 0 if priorities is None else len(priorities)

    def rows_of(number: int) -> npt.NDArray[np.int64]:
        assert episodes is not None
        index = episodes[number].index.numpy()
        if index.ndim == 1:
            return np.asarray(index)
        return np.asarray(np.ravel_multi_index(tuple(index.T), (content.rows, *lanes)))

    columns = {}
    for group in content.groups if len(content.groups) == 1 else ():
        for path, values in group.leaves.items():
            spec = group.schema.leaves[path]
            key = "/".join(map(str, path)) or "data"
            dtype = torch.empty(0, dtype=spec.dtype).float() if spec.dtype == torch.bfloat16 else (
                torch.empty(0, dtype=spec.dtype)
            )  # fmt: skip
            columns[key] = TensorColumn(
                values,
                rows_of,
                tuple(spec.shape),
                dtype.numpy().dtype,
                content.rows * math.prod(lanes),
                lanes,
            )
    return Table(
        columns,
        0 if episodes is None else len(episodes),
        tuple(key for key in columns if key == "action" or key.startswith("action/")),
        tuple(key for key in columns if key == "next/reward"),
        None if not count else _picked(priorities, count),
        count,
    )


def _picked(priorities: Any, count: int) -> npt.NDArray[Any]:
    at = evenly(np.arange(count), _MOST_PRIORITIES)
    return np.asarray(priorities[torch.from_numpy(at)].reshape(-1).to(torch.float64).numpy())


def keys_of(table: Table, most_bytes: int | None) -> tuple[KeyFacts, ...]:
    """Returns what each key is, with the statistics of its rows; see `measure`."""
    found = []
    for key, column in table.columns.items():
        statistics, rows = measure(column, most_bytes)
        found.append(KeyFacts(key, column.shape, str(column.dtype), column.rows, statistics, rows))
    return tuple(found)


def episodes_of(storage: LazyTensorStorage) -> tuple[Episodes | None, EpisodeFacts | None]:
    """Returns the episodes that are stored; one pass over the rewards, where there are any.

    ``None`` where rows have no keys, such as those that tell an end.
    """
    schema = storage.schema
    root = None if schema is None else schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        return None, None
    episodes = Episodes(storage)
    returns = None
    try:
        sums = episodes.returns
        if sums.numel() == len(episodes):
            returns = sums.reshape(-1).numpy()
    except KeyError:
        pass  # rows without rewards
    reasons, lanes = episodes.reasons.numpy(), episodes.lanes.numpy()
    # What was going on when it was saved is cut by opening it: nothing spans a restart.
    last = np.append(lanes[1:] != lanes[:-1], True)[: len(lanes)]
    reasons = np.where(last & (reasons == EndReason.CUT), EndReason.OPEN, reasons)
    ends = tuple(_ENDS[int(reason)] for reason in reasons)
    return episodes, EpisodeFacts(episodes.lengths.numpy(), ends, returns)
