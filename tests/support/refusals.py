"""Calls that are refused, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refuses"]


def refuses(error: Any, match: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Assert that a call raises an error whose text matches."""
    __tracebackhide__ = True
    with pytest.raises(error, match=match):
        call(*given, **named)
