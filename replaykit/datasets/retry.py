"""Going on with a server that fails for a while: how often, how long between, and when not."""

from __future__ import annotations

import email.utils
import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, Protocol, TypeVar

__all__ = [
    "BUSY",
    "Cancelled",
    "Requested",
    "Retry",
    "Stalled",
    "is_local",
    "local_error",
    "seconds_to_wait",
]

T = TypeVar("T")

BUSY: Final = (408, 429, 500, 502, 503, 504)
"""Answers that another try may change."""

# Faults of this machine: trying again changes nothing, and the caller must see the number.
_LOCAL: Final = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENAMETOOLONG,
    errno.ENFILE,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class Cancelled(Exception):
    """The fetch was given up elsewhere; its ``__cause__``, if any, says why."""


class Stalled(TimeoutError):
    """Nothing has arrived for as long as we are willing to wait."""


class Requested(Protocol):
    """What was asked of a server, and what its errors mean."""

    def is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed a little later."""

    def retry_after_s(self, error: Exception) -> float | None:
        """Returns how long the server asks us to wait, if it says."""

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise: what failed and what to do."""


@dataclass(frozen=True)
class Retry:
    """How long to go on with a server that does not answer as it should.

    Attributes:
        attempts: calls in all; the Hub's client makes several requests in each.
        first_wait_s: wait before the second call; it doubles from then on.
        longest_wait_s: no wait is longer. A server that asks for more (``Retry-After``) gets no
            further call: the error says how long it wants us to stay away.
        stall_s: longest silence while a repository is being listed, or a file is received over
            plain HTTP.

    Raises:
        ValueError: fewer than one attempt, or a negative wait.

    Example:
        >>> from replaykit.datasets.retry import Retry
        >>> Retry(attempts=1).attempts
        1
    """

    attempts: int = 4
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: expected at least 1, got {self.attempts}")
        if min(self.first_wait_s, self.longest_wait_s, self.stall_s) < 0:
            raise ValueError(f"expected waits >= 0, got {self}")

    def run(self, call: Callable[[], T], subject: Requested, cancel: Event) -> T:
        """Returns what ``call`` returns; where it goes on failing, raises what the subject says."""
        wait_s = self.first_wait_s
        for left in reversed(range(self.attempts)):
            try:
                return call()
            except Cancelled:
                raise
            except Exception as error:
                # The Hub's client lets exceptions of its HTTP library out: no narrower type will
                # do.
                asked_s = subject.retry_after_s(error)
                pause_s = min(wait_s, self.longest_wait_s) if asked_s is None else asked_s
                if not left or pause_s > self.longest_wait_s or not subject.is_transient(error):
                    raise subject.explain(error) from error
            if cancel.wait(pause_s):
                raise Cancelled
            wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")


def seconds_to_wait(headers: Mapping[str, Any]) -> float | None:
    """Returns how long a server asks us to wait: ``Retry-After`` as seconds or as a date."""
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def is_local(error: Exception) -> bool:
    """Whether this machine failed, and not the server."""
    return isinstance(error, OSError) and error.errno in _LOCAL


def local_error(error: Exception, subject: object, where: str) -> OSError:
    """Returns the error for a file that could not be stored; ``where`` is what else to do."""
    assert isinstance(error, OSError)
    remedy = f"free some space, or {where}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close some, or raise the limit (`ulimit -n`)"
    said = f"could not store {subject}: {error.strerror}; {remedy}"
    return OSError(error.errno, said, error.filename)
