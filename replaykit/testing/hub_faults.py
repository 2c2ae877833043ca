"""What a loopback Hub may do wrong, as data.

Each entry of ``LoopbackHub.faults`` says which requests it meets and what happens to their answer:

=============================  ================================================================
fault                          written as
=============================  ================================================================
body cut after n bytes, once   ``Fault(method="GET", cut_after=n, times=1)``
wrong bytes, same length       ``Fault(body=wrong)``: the ETag stays that of the right bytes
shorter, consistent headers    ``Fault(body=data[:-1])``
web page / LFS pointer         ``Fault(body=b"<html>...")`` / ``Fault(body=lfs_pointer(data))``
``Range`` ignored              ``Fault(method="GET", ignore_range=True)``
busy, with a waiting time      ``Fault(status=503, headers={"Retry-After": "2"}, times=1)``
gated                          ``Fault(status=403, error_code="GatedRepo")``
vanished after the listing     ``Fault(status=404, error_code="EntryNotFound")``
header missing                 ``Fault(headers={"ETag": None})``
slow                           ``Fault(bytes_per_s=1e5)``, or ``Fault(delay_s=3)`` before it starts
redirect                       ``Fault(redirect="same")`` or ``Fault(redirect="other")`` port
=============================  ================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ["Fault", "lfs_pointer"]

_REDIRECTS = (None, "same", "other")


def lfs_pointer(data: bytes) -> bytes:
    """Returns the text that git stores in place of ``data`` when Git LFS keeps the data.

    Example:
        >>> from replaykit.testing import lfs_pointer
        >>> lfs_pointer(b"abc").splitlines()[0]
        b'version https://git-lfs.github.com/spec/v1'
    """
    return lfs_pointer_of(hashlib.sha256(data).hexdigest(), len(data))


def lfs_pointer_of(sha256: str, size: int) -> bytes:
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    ).encode()


@dataclass(eq=False)
class Fault:
    """One thing that goes wrong, with the requests it goes wrong for.

    A request meets at most one fault: the first in ``LoopbackHub.faults`` that matches it and has
    ``times`` left. A fault may combine several effects, for example a replaced body that is slow.

    Args:
        path: shell pattern for the file's path in the repository (``*`` also matches ``/``).
        method: ``"HEAD"``, ``"GET"``, ``"POST"``, ``"PUT"`` or ``"DELETE"``; None for all.
        route: name of the route, see ``replaykit.testing.hub_server.ROUTES``.
        times: how many requests meet it; None for all.
        status: answer with this status and a small JSON body (or ``body``) in place of the file.
        error_code: the Hub's ``X-Error-Code`` for ``status``.
        headers: added to the answer or replaced in it; a header given as None is left out.
        body: sent in place of the content, with a Content-Length that fits it. Ranges are of it.
        cut_after: close the connection after so many bytes of the body.
        ignore_range: answer a range request with 200 and the whole body.
        delay_s: wait before the answer begins.
        bytes_per_s: send the body no faster.
        redirect: answer with 302 to a store on the ``"same"`` port or on the ``"other"`` one.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> from replaykit.testing import Fault
        >>> fault = Fault(path="*.h5", status=503, times=1)
        >>> fault.matches("resolve", "GET", "dir/a.h5"), fault.matches("tree", "GET", "")
        (True, False)
    """

    path: str = "*"
    method: str | None = None
    route: str = "resolve"
    times: int | None = None
    status: int | None = None
    error_code: str | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    ignore_range: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    redirect: str | None = None
    used: int = field(default=0, init=False)
    """How many requests have met this fault so far."""

    def __post_init__(self) -> None:
        if self.redirect not in _REDIRECTS:
            raise ValueError(f"redirect: expected one of {_REDIRECTS}, got {self.redirect!r}")
        if self.status is not None and not 400 <= self.status <= 599:
            raise ValueError(f"status: expected an error, 400 to 599, got {self.status}")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected a positive number, got {self.bytes_per_s}")
        for name in ("times", "cut_after", "delay_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a number >= 0, got {value}")

    def matches(self, route: str, method: str, path: str) -> bool:
        """Whether a request meets this fault; cost O(length of the path)."""
        return (
            (self.times is None or self.used < self.times)
            and route == self.route
            and self.method in (None, method)
            and fnmatchcase(path, self.path)
        )
