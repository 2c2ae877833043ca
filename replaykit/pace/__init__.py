"""How far writing and sampling may run ahead of each other."""

from replaykit.pace.limiter import INSERT, SAMPLE, RateLimiter, checked_timeout
from replaykit.pace.limiter_state import Pace, Ticket

__all__ = ["INSERT", "SAMPLE", "Pace", "RateLimiter", "Ticket", "checked_timeout"]
