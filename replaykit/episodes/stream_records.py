"""What is known of each stream, and of each of its episodes, where streams lie interleaved."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes.pools import Records

__all__ = ["Episodes", "Lanes"]

Array = np.ndarray[Any, Any]


class Lanes(Records):
    """One record for each stream that has stored rows."""

    lo: Array  # stored rows are those with lo <= time < hi
    hi: Array
    first: Array  # stored episodes are those with first <= number < stop, in its queue
    stop: Array
    open: Array  # the episode that may go on, or -1
    next_head: Array
    newest: Array  # position of the newest row
    segment: Array
    knows_ids: Array

    def __init__(self) -> None:
        names = ("lo", "hi", "first", "stop", "open", "newest", "segment")
        super().__init__(
            {**dict.fromkeys(names, np.int64), "next_head": np.uint8, "knows_ids": np.bool_}
        )


class Episodes(Records):
    """One record for each episode that has stored rows."""

    lane: Array
    begin: Array
    last: Array  # of one that has ended
    position: Array  # of its first row
    code: Array
    head: Array

    def __init__(self) -> None:
        names = ("lane", "begin", "last", "position")
        super().__init__({**dict.fromkeys(names, np.int64), "code": np.uint8, "head": np.uint8})
