"""Fixtures of the buffer's tests."""

from __future__ import annotations

import pytest

from tests.buffer.workers import no_process_is_left

__all__ = ["no_process_is_left"]


@pytest.fixture
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are drawn ahead by threads too, as large ones are."""
    monkeypatch.setattr("replaykit.buffer.draw.reads_now", lambda buffer: False)
