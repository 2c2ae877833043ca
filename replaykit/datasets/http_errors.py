"""What goes wrong with a file of the web: which of it is worth another try, and what to say."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError

from replaykit.datasets.retry import BUSY, is_local, local_error, seconds_to_wait
from replaykit.errors import DownloadError

__all__ = ["Refused", "WebSubject"]


class Refused(Exception):
    """An answer that another try does not change; the text says what is wrong with it."""


@dataclass(frozen=True)
class WebSubject:
    """A URL that was asked for."""

    url: str

    def __str__(self) -> str:
        return self.url

    def is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed a little later."""
        if isinstance(error, HTTPError):
            return error.code in BUSY
        cause = _cause(error)
        if is_local(cause) or isinstance(cause, ssl.SSLCertVerificationError):
            return False
        return isinstance(error, (OSError, HTTPException))

    def retry_after_s(self, error: Exception) -> float | None:
        """Returns how long the server asks us to wait, if it says."""
        return seconds_to_wait(dict(error.headers)) if isinstance(error, HTTPError) else None

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise: what failed and what to do."""
        if isinstance(error, HTTPError):
            return self._explain_status(error)
        if isinstance(error, Refused):
            return DownloadError(f"could not fetch {self}: {error}")
        cause = _cause(error)
        if is_local(cause):
            return local_error(cause, self, "set REPLAYKIT_DOWNLOADS to a directory with room")
        said = f"{type(cause).__name__}: {str(cause).strip() or 'no details'}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return DownloadError(f"could not fetch {self}: its certificate is not valid ({said})")
        if isinstance(error, URLError):
            return DownloadError(
                f"could not fetch {self}: the server cannot be reached; check the connection and "
                f"any proxy ({said})"
            )
        return DownloadError(
            f"could not fetch {self}: the transfer broke off; call again, it goes on from there "
            f"({said})"
        )

    def _explain_status(self, error: HTTPError) -> Exception:
        if error.code in (404, 410):
            return FileNotFoundError(
                f"there is no {self} (HTTP {error.code}): it has been moved or removed; fetch it "
                "elsewhere and pass it with source="
            )
        if error.code in (401, 403):
            return PermissionError(f"access to {self} was refused (HTTP {error.code})")
        asked_s = self.retry_after_s(error)
        later = "later" if asked_s is None else f"in {asked_s:.0f} s"
        return DownloadError(
            f"could not fetch {self}: the server answered HTTP {error.code}; try again {later}"
        )


def _cause(error: Exception) -> Exception:
    reason = getattr(error, "reason", None) if isinstance(error, URLError) else None
    return reason if isinstance(reason, Exception) else error
