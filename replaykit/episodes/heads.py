"""Find how the first stored episodes of lanes began, and describe it for a save.

The rows do not show how an episode began if its first row was overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replaykit.episodes.boundaries import BoundaryRule
from replaykit.episodes.episode_laws import Head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import SavedEpisodes
    from replaykit.episodes.streams import StreamEpisodes

__all__ = ["heads_to_save", "known_heads"]

Array = np.ndarray[Any, Any]

_MOST_GONE = 2**56
"""Highest number of overwritten rows of an episode that the core takes."""


def known_heads(
    old: StreamEpisodes,
    noted: int,
    indexes: SavedEpisodes,
    rule: BoundaryRule,
    keys: Array | None,
    element: Array,
    row_id: Array,
) -> Array:
    """Return the beginnings of the episodes of first rows of lanes, int64 ``[m, 3]``.

    The columns are the number of rows before the row in its episode, the ``Head``, and the row id
    of the episode's first row. If the beginning is unknown, the ``Head`` is 0.

    Args:
        old: the episodes of rows with row ids below ``noted``.
        indexes: the saved beginnings.
        rule: the rule of the index.
        keys: the keys of the streams of the rows; None for rows in a ring.
        element: the elements of the rows, int64 ``[m]``.
        row_id: their row ids, int64 ``[m]``.
    """
    known = np.zeros((len(row_id), 3), np.int64)
    # Saved beginnings take precedence if both follow the default rule.
    trusted = indexes.has_begins and rule == BoundaryRule()
    has_rows = bool(old.lanes)
    if keys is None:
        has_rows = (old.hi - 1 - element[0] // old.lanes) % old.slots < old.hi - old.lo
    saved: Mapping[str, Any] | None = None
    if trusted or not has_rows:
        saved = indexes.pop_first_begins()
    if saved is not None and keys is None and saved["oldest"] == row_id[0]:
        begin = np.asarray(saved["begin"], np.int64)
        known[:, 0] = np.where(begin >= 0, row_id - begin, 0)
        known[:, 1] = saved["head"]
    elif saved is not None and keys is not None:
        given = np.array(saved.get("streams", []), np.int64).reshape(-1, 4)
        _, at, of = np.intersect1d(row_id, given[:, 0], return_indices=True)
        known[:, 1] = int(Head.RESET) if trusted and saved.get("now", False) else 0
        known[at] = given[of][:, [2, 3, 1]]
    rest = np.flatnonzero((row_id < noted) & (known[:, 1] == 0)) if has_rows else row_id[:0]
    if len(rest):
        if keys is not None:
            lane = old.place(element[rest])[1]
            rest = rest[old.keys[lane] == keys[rest]]
        _, first, gone, head = heads_to_save(old, element[rest], row_id[rest]).T
        known[rest] = np.stack([gone, head, first], 1)
    known[:, 0] = np.minimum(known[:, 0], _MOST_GONE)
    return known


def heads_to_save(streams: StreamEpisodes, element: Array, row_id: Array) -> Array:
    """Return the beginnings of the episodes of rows, int64 ``[m, 4]``.

    The columns are the id of the row, the id of the first row of its episode, the number of rows
    between them, and the ``Head``. If rows of the episode are missing, the ``Head`` is RESET. In a
    ring, the second column is -1.
    """
    time, lane, begin, _, _, head = streams.around(element)
    head = np.where(head == int(Head.EVICTED), int(Head.RESET), head)
    return np.stack([row_id, streams.rows(time, lane)[4], time - begin, head], 1)
