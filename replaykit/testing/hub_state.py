"""What the threads of a loopback Hub share: repositories, faults, and the log of requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from replaykit.testing.hub_faults import Fault
from replaykit.testing.hub_repos import Repository

__all__ = ["HubState", "Request"]

_NO_FAULT = Fault()


@dataclass(frozen=True)
class Request:
    """One request as it arrived: ``path`` is decoded and without its query."""

    method: str
    path: str
    range: str | None = None
    route: str | None = None


@dataclass
class HubState:
    """What the threads of a hub share.

    ``lock`` guards the log, the counter and the faults; ``writing`` is held while a push changes
    a repository.
    """

    repos: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    bytes_served: int = 0
    page_size: int | None = None
    url: str = ""
    other_url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def note(self, request: Request, file: str) -> Fault:
        """Logs a request and returns the fault it meets, counted as used."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if request.route and fault.matches(request.route, request.method, file):
                    fault.used += 1
                    return fault
        return _NO_FAULT

    def count(self, nbytes: int) -> None:
        with self.lock:
            self.bytes_served += nbytes
