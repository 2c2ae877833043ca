"""The number of windows of one episode, as the definition of a `CountLaw` says it."""

from __future__ import annotations

from replaykit.episodes import CountLaw


def window_count(law: CountLaw, rows: int, *, reset: bool, is_open: bool) -> int:
    if (law.closed and is_open) or (law.intact and not reset):
        return 0
    rows -= 0 if reset else law.past
    rows -= law.open_future if is_open else 0
    if rows < 1:
        return 0
    return max(0, rows + law.add) if rows >= law.least else law.below
