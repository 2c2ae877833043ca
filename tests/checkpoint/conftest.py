"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest

from replaykit.checkpoint import chunks


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few pages, so that a column is many pieces, of few rows."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 6 * chunks.PAGE_BYTES + 1000)
    monkeypatch.setattr(chunks, "PAGED_BYTES", 1000)
    monkeypatch.setattr(chunks, "chunk_bytes", lambda total: chunks._CHUNK_BYTES)
    monkeypatch.setattr("replaykit.checkpoint.checkpoint_writer.chunk_bytes", chunks.chunk_bytes)
