"""What a process may have, less for a while."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

__all__ = ["limited"]


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """No more than ``most`` of a resource, ``RLIMIT_FSIZE`` or another, for this process."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))
