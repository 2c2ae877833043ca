"""What the index notes of every row: whether its episode goes on after it, and why not."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = [
    "CODE_BITS",
    "GOES_ON",
    "HEAD_SHIFT",
    "LINK_SHIFT",
    "NOT_INIT",
    "RESTORED",
    "SEVERED",
    "SWITCHED",
    "TERMINATED",
    "TRUNCATED",
    "EndReason",
    "Head",
]


class EndReason(IntEnum):
    """Why an episode has no further row.

    ``OPEN``: its newest row is the newest of its stream, which may go on. ``TERMINATED``: the task
    ended; nothing to bootstrap from. ``TRUNCATED``: a time limit; bootstrap. ``CUT``: the stored
    stream was severed without a flag: another trajectory id, ``cut()``, a restore, a row placed by
    hand.

    Example:
        >>> from replaykit.episodes import EndReason
        >>> EndReason(1).name, int(EndReason.CUT)
        ('TERMINATED', 3)
    """

    OPEN = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3


class Head(IntEnum):
    """How the stored part of an episode begins.

    ``RESET``: with the environment's reset. ``CUT``: in the middle, since the stream was joined
    there. ``EVICTED``: its first row was overwritten.

    Example:
        >>> from replaykit.episodes import Head
        >>> Head.RESET.name
        'RESET'
    """

    RESET = 1
    CUT = 2
    EVICTED = 3


GOES_ON: Final = 0
TERMINATED: Final = 1
TRUNCATED: Final = 2
SWITCHED: Final = 3
"""Cut since the next row has another trajectory id; what follows begins with a reset."""
SEVERED: Final = 4
"""Cut by hand, or since rows are missing; what follows begins in the middle."""
RESTORED: Final = 5
"""Cut by a restart; what follows begins with a reset."""

CODE_BITS: Final = 7
NOT_INIT: Final = 0x20
"""Of a row whose stored ``is_init`` is False: if an episode begins with it, it was joined there."""

HEAD_SHIFT: Final = 3
LINK_SHIFT: Final = 5
"""A link is ``target << 5 | head << 3 | code``; see ``ring``."""
