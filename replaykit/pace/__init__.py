"""The rate limiter, which keeps the ratio of samples to writes within bounds."""

from replaykit.pace.limiter import INSERT, SAMPLE, RateLimiter, checked_timeout
from replaykit.pace.waiting import LimiterQueue, Ticket

__all__ = ["INSERT", "SAMPLE", "LimiterQueue", "RateLimiter", "Ticket", "checked_timeout"]
