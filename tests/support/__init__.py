"""A Hub on loopback, which answers the real client and simulates faults."""

from __future__ import annotations

from tests.support.hub_repositories import Fault, Request, lfs_pointer
from tests.support.hub_server import LoopbackHub

__all__ = ["Fault", "LoopbackHub", "Request", "lfs_pointer"]
