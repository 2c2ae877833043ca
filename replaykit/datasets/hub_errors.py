"""What goes wrong between us and a Hub: which of it is worth another try, and what to say."""

from __future__ import annotations

import email.utils
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from replaykit.errors import DownloadError

__all__ = ["Cancelled", "Retry", "Stalled", "Subject"]

T = TypeVar("T")

# Answers that another try may change; the client itself raises some of them at once.
_BUSY = (408, 429, 500, 502, 503, 504)

# Faults of this machine: trying again changes nothing, and the caller must see the number.
_LOCAL = {
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


@dataclass(frozen=True)
class Subject:
    """What was asked for: the words that every message needs."""

    repo_id: str
    revision: str
    endpoint: str
    path: str | None = None

    @property
    def repository(self) -> str:
        return f"dataset repository {self.repo_id!r} at {self.endpoint}"

    def __str__(self) -> str:
        what = f"file {self.path!r} of " if self.path is not None else "the listing of "
        return f"{what}{self.repository}, revision {self.revision}"


@dataclass(frozen=True)
class Retry:
    """How long to go on with a Hub that does not answer as it should.

    Attributes:
        attempts: calls of the client in all; it makes several requests in each.
        first_wait_s: wait before the second call; it doubles from then on.
        longest_wait_s: no wait is longer. A server that asks for more (``Retry-After``) gets no
            further call: the error says how long it wants us to stay away.
        stall_s: longest silence while a repository is being listed.

    Raises:
        ValueError: fewer than one attempt, or a negative wait.

    Example:
        >>> from replaykit.datasets.hub_errors import Retry
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

    def run(self, call: Callable[[], T], subject: Subject, cancel: Event) -> T:
        """Returns what ``call`` returns; where it goes on failing, raises what `explain` says."""
        wait_s = self.first_wait_s
        for left in reversed(range(self.attempts)):
            try:
                return call()
            except Cancelled:
                raise
            except Exception as error:
                # The client lets exceptions of its HTTP library out: no narrower type will do.
                asked_s = _retry_after_s(error)
                pause_s = min(wait_s, self.longest_wait_s) if asked_s is None else asked_s
                if not left or pause_s > self.longest_wait_s or not is_transient(error):
                    raise explain(error, subject) from error
            if cancel.wait(pause_s):
                raise Cancelled
            wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed a little later."""
    from huggingface_hub import errors as hub

    error = _unwrapped(error)
    if isinstance(error, hub.HfHubHTTPError):
        return _status(error) in _BUSY
    lasting = (
        Stalled,
        hub.FileMetadataError,
        hub.LocalEntryNotFoundError,
        hub.OfflineModeIsEnabled,
    )
    return not (isinstance(error, lasting) or _is_strange_answer(error) or _is_local(error))


def explain(error: Exception, subject: Subject) -> Exception:
    """Returns the exception to raise for what the client raised: what failed and what to do."""
    from huggingface_hub import errors as hub

    error = _unwrapped(error)
    where, status = subject.repository, _status(error)
    login = "log in (`hf auth login`, or set HF_TOKEN)"
    if isinstance(error, hub.GatedRepoError):
        return PermissionError(
            f"access to {where} is gated: accept its owner's conditions on its page, then {login}"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return FileNotFoundError(
            f"there is no {where} that you may see: check the id and HF_ENDPOINT; if it is "
            f"private, {login}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return FileNotFoundError(
            f"there is no revision {subject.revision!r} in {where}: give a branch, a tag or a "
            "commit id that exists there"
        )
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return offline_error(subject)
    if isinstance(error, hub.EntryNotFoundError):
        return FileNotFoundError(
            f"there is no {subject}, though it was listed: the repository has been rewritten; "
            "list it again, or ask its owner"
        )
    if status in (401, 403):
        return PermissionError(f"access to {subject} was refused (HTTP {status}): {login}")
    if _is_local(error):
        return _local_error(error, subject)
    return DownloadError(f"could not fetch {subject}: {_reason(error, status)}")


def offline_error(subject: Subject) -> FileNotFoundError:
    """Returns the error for a request that offline mode forbids."""
    return FileNotFoundError(
        f"cannot fetch {subject}: offline mode forbids every request; unset HF_HUB_OFFLINE and "
        "start anew with a network, or use data that has been fetched before"
    )


def _reason(error: Exception, status: int | None) -> str:
    from huggingface_hub import errors as hub

    said = f"{type(error).__name__}: {str(error).strip() or 'no details'}"
    if status is not None:
        asked_s = _retry_after_s(error)
        later = "later" if asked_s is None else f"in {asked_s:.0f} s"
        return f"the server answered HTTP {status}; try again {later}"
    if isinstance(error, Stalled) or _is_kind(error, "Timeout"):
        return (
            "no answer in time; check the connection, or raise HF_HUB_DOWNLOAD_TIMEOUT and "
            f"HF_HUB_ETAG_TIMEOUT ({said})"
        )
    # Where one thread finds nobody there, the client closes its session under all others: these
    # are what they get.
    collateral = isinstance(error, (AttributeError, RuntimeError))
    if collateral or _is_kind(error, "ConnectError", "ConnectionRefusedError"):
        return f"the server cannot be reached; check the connection and HF_ENDPOINT ({said})"
    if isinstance(error, hub.FileMetadataError) or _is_strange_answer(error):
        return f"the answer is not that of a Hub; check HF_ENDPOINT and any proxy ({said})"
    return f"the transfer broke off; call again, complete files are kept ({said})"


def _unwrapped(error: Exception) -> Exception:
    """Returns why the client could not locate a file: it says no more than that it could not."""
    from huggingface_hub import errors as hub

    cause = error.__cause__
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return cause
    return error


def _local_error(error: Exception, subject: Subject) -> OSError:
    assert isinstance(error, OSError)
    remedy = "free some space, or set HF_HUB_CACHE to a directory that can take it"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close some, or raise the limit (`ulimit -n`)"
    said = f"could not store {subject}: {error.strerror}; {remedy}"
    return OSError(error.errno, said, error.filename)


def _is_local(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _LOCAL


def _is_strange_answer(error: Exception) -> bool:
    """Whether the answer could not be read: a web page where JSON was due, missing fields."""
    return isinstance(error, (ValueError, KeyError, TypeError))


def _is_kind(error: Exception, *names: str) -> bool:
    # By name: which HTTP library the client stands on depends on its version.
    return any(name in kind.__name__ for kind in type(error).__mro__ for name in names)


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after_s(error: Exception) -> float | None:
    """Returns how long the server asks us to wait: ``Retry-After`` as seconds or as a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
