"""What goes wrong between us and a Hub: which of it is worth another try, and what to say."""

from __future__ import annotations

from dataclasses import dataclass

from replaykit.datasets.retry import BUSY, Stalled, is_local, local_error, seconds_to_wait
from replaykit.errors import DownloadError

__all__ = ["Subject", "offline_error", "refusal"]


_LOGIN = "log in (`hf auth login`, or set HF_TOKEN)"


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

    def is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed a little later."""
        return _is_transient(error)

    def retry_after_s(self, error: Exception) -> float | None:
        """Returns how long the server asks us to wait, if it says."""
        return _retry_after_s(error)

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise for what the client raised."""
        return _explain(error, self)


def _is_transient(error: Exception) -> bool:
    from huggingface_hub import errors as hub

    error = _unwrapped(error)
    if isinstance(error, hub.HfHubHTTPError):
        return _status(error) in BUSY
    lasting = (
        Stalled,
        hub.FileMetadataError,
        hub.LocalEntryNotFoundError,
        hub.OfflineModeIsEnabled,
    )
    return not (isinstance(error, lasting) or _is_strange_answer(error) or is_local(error))


def refusal(error: Exception, subject: Subject) -> Exception | None:
    """Returns what to raise where the Hub refuses: no such thing, or no access; else None."""
    from huggingface_hub import errors as hub

    where = subject.repository
    if isinstance(error, hub.GatedRepoError):
        return PermissionError(
            f"access to {where} is gated: accept its owner's conditions on its page, then {_LOGIN}"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return FileNotFoundError(
            f"there is no {where} that you may see: check the id and HF_ENDPOINT; if it is "
            f"private, {_LOGIN}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return FileNotFoundError(
            f"there is no revision {subject.revision!r} in {where}: give a branch, a tag or a "
            "commit id that exists there"
        )
    return None


def _explain(error: Exception, subject: Subject) -> Exception:
    from huggingface_hub import errors as hub

    error = _unwrapped(error)
    refused = refusal(error, subject)
    if refused is not None:
        return refused
    status = _status(error)
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return offline_error(subject)
    if isinstance(error, hub.EntryNotFoundError):
        return FileNotFoundError(
            f"there is no {subject}, though it was listed: the repository has been rewritten; "
            "list it again, or ask its owner"
        )
    if status in (401, 403):
        return PermissionError(f"access to {subject} was refused (HTTP {status}): {_LOGIN}")
    if is_local(error):
        return local_error(error, subject, "set HF_HUB_CACHE to a directory that can take it")
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
    response = getattr(error, "response", None)
    return seconds_to_wait(getattr(response, "headers", None) or {})
