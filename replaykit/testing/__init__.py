"""Test support for users: a loopback Hub and a writer of RoboSet files.

The loopback Hub is a local server that answers the real Hub client.

Example:
    >>> from replaykit.testing import LoopbackHub
    >>> with LoopbackHub({"me/data": {"a.bin": b"abc"}}) as hub:
    ...     hub.url.startswith("http://127.0.0.1:")
    True
"""

from __future__ import annotations

from replaykit.testing.hub_repositories import Fault, Request, lfs_pointer
from replaykit.testing.hub_server import LoopbackHub
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

__all__ = ["Fault", "LoopbackHub", "Request", "RoboHiveWriter", "lfs_pointer", "make_trial"]
